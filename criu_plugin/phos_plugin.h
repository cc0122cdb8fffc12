#ifndef PHOS_PLUGIN_H
#define PHOS_PLUGIN_H

#include <criu-plugin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * CRIU's log, exported to its plugins. The header that Debian packages for it (criu-log.h) needs one that is not packaged.
 * Levels: 1 error, 2 warning, 3 info.
 */
extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define pr_err(format, ...) print_on_level(1, "Error: phos: " format, ##__VA_ARGS__)
#define pr_warn(format, ...) print_on_level(2, "Warn: phos: " format, ##__VA_ARGS__)
#define pr_info(format, ...) print_on_level(3, "phos: " format, ##__VA_ARGS__)

/*
 * CRIU's list of the plugins that an image needs, exported to its plugins without a header (4.1: image.c). CRIU writes it
 * into inventory.img, and refuses to restore unless plugins have taken everything off it again; the comparison is by prefix.
 * Weak: a CRIU without the list restores such images without asking.
 */
extern int add_inventory_plugin(const char *name) __attribute__((weak));
extern bool check_and_remove_inventory_plugin(const char *name, size_t size) __attribute__((weak));

/* CRIU shows it as "Missing required plugin: ...", so it says what to do. What comes after the prefix may change. */
#define PHOS_INVENTORY_PREFIX "phos"
#define PHOS_INVENTORY_NAME PHOS_INVENTORY_PREFIX " (the image holds GPU memory: restore it with --lib phos)"

/* All return 0, or a negative number after they have logged why. One thread: CRIU calls hooks from its main thread only. */
int phos_link_dump_begin(int pid);
/* *kept: the tasks may run on. */
int phos_link_dump_end(int result, bool *kept);
/*
 * After a dump that has succeeded, when CRIU has let go of the tasks: returns 0 when the image is whole, or if phosd has no
 * part in it, and -1 if it never will be.
 */
int phos_link_wait_until_whole(void);
/* gpu_part: CRIU's part of the image says that it has one. */
int phos_link_restore_begin(bool gpu_part);
/* *park: the task is to be left stopped. phos_link_alone() may name tasks now. */
int phos_link_task_restored(int pid, bool *park);

/* What phosd does while the drivers' threads of tasks run, and no others. */
enum phos_stage {
	PHOS_DUMPED,	/* has the driver save its part */
	PHOS_DUMP_ENDS, /* has it brought back, of tasks that are to run on */
	PHOS_RESTORED,	/* has it brought back */
};
int phos_link_task_runs(enum phos_stage stage);
void phos_link_restore_end(int result);

/* Whether phosd has files in shared memory restored by names that they have (file_links.c): from phos_link_dump_begin() on. */
bool phos_link_sees_to_names(void);
/* A link that CRIU was kept from making, and the inode of the file that it would have been to. */
struct phos_link {
	char *path;
	uint64_t inode;
};
/* Those; their number. */
size_t phos_spared_links(const struct phos_link **links);
/* A task is frozen: phosd begins to copy what it has. */
int phos_link_task_frozen(int pid);
/* Fills `table`, an empty memfd, with what phosd copies of that task's pages (struct phos_task_table); or leaves it empty. */
int phos_link_task_pages(int pid, int table);
/*
 * Gives phosd something to copy in CRIU's place: shared memory, by its inode, or a range of a file, to that place in another.
 * Returns 0; 1: phosd copies nothing, and CRIU is to do it; -1: phosd has gone away, and the dump cannot succeed any more.
 */
int phos_link_take_memory(int descriptor, uint64_t inode);
int phos_link_take_range(int from, int to, uint64_t offset, uint64_t place, uint64_t size);
/* The tasks of which only the driver's threads run while phosd sees to them (phos_let_run); their number. */
struct phos_alone {
	int pid, thread;
	uint64_t mask; /* of signals that the thread blocks by itself */
	bool runs;
};
size_t phos_link_alone(struct phos_alone **tasks);

/* Whether what CRIU asks the kernel comes to us first. */
bool phos_can_hide(void);
/* A task is frozen: of its pages those will be hidden from CRIU that phosd says it copies. Returns 0 or -1. */
int phos_hide(int pid);
/* *table: a memfd of struct phos_hidden, with what was hidden of all tasks; -1 if nothing was. Returns 0 or -1. */
int phos_hidden(int *table);

/* Lets the stopped threads of a process that are inside the driver, but for its own one, return from it. Returns 0 or -1. */
int phos_leave_driver(int pid, int driver_thread);
/* Lets the driver's thread of each task of phos_link_alone() run while phosd works. Returns 0 or -1. */
int phos_let_run(enum phos_stage stage);

/* How links in /proc/PID/fd begin that lead to device files of the GPU's driver. Copies them. Returns 0 or -1. */
int phos_device_files_begin(char **begins, size_t count);
/* Whether CRIU can do without what `fd` is, open in a task or mapped: 0 if it is such a file, else -ENOTSUP. */
int phos_dump_device_file(int fd);
int phos_leave_out_mapping(int fd);
/* What came of these two until now. */
void phos_device_files_found(bool *open, bool *mapped);
/* What a task gets in its place: a descriptor, or -1. */
int phos_restore_device_file(void);

/* The letter of a task's state in /proc/PID/stat; 0: there is none. */
char phos_state_of(int pid);
/* Whether it is gone, or nothing of it but what its parent asks for. */
bool phos_has_ended(int pid);
/* Whether this process traces a thread. */
bool phos_is_traced(int thread);
/* Kills every process that this one traces. */
void phos_kill_traced(void);

/* Whether it was asked for with PHOS_FILL_PAGES, which is taken out of the environment. */
bool phos_fills(void);
/* If so: begins to bring the tasks' memory in CRIU's place; CRIU has been told --lazy-pages. Returns 0 or -1. */
int phos_fill_begin(void);
/* Returns 0 when all of it is there, or has been; -1: not all is, and the tasks must not run. */
int phos_fill_end(void);

/* Whether who has CRIU work over a socket wants the tasks of this dump to run on, as far as that is known (service.c). */
bool phos_service_leaves_running(void);

/* Returns when the server of a lazy restore that was started beside CRIU listens; at once if none was. */
int phos_wait_lazy_pages(void);
/* Returns when that server is not about to fill a process's memory. */
void phos_wait_lazy_fill(void);

#endif
