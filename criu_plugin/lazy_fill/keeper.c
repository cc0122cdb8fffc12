/*
 * Once nobody has a descriptor of a userfaultfd any more, what has not been brought becomes zeros, and whoever waits for it goes on
 * with those. So a child of `criu lazy-pages`, which has all of its descriptors in common with it, waits for its end. If it was
 * killed, or has failed, the child ends the processes that still depended on it, and only then are the descriptors closed.
 *
 * CRIU's one thread calls this: no lock. What both processes look at is the table of who is kept, which CRIU's process writes and
 * the child reads when that is gone.
 */
#include "lazy_fill.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NAME "phos-keep-pages" /* no longer, or Linux cuts it off */
#define END_MS 10000 /* who is killed runs no code of its own any more; the kernel may take long to free its memory */
#define MOST_IN_THE_WAY 64
#define MOST_ENDED 4096
#define ARGUMENTS_FIELD 48 /* of /proc/PID/stat, proc_pid_stat(5): where they begin; the next one, where they end */

/* The folder that CRIU takes the image from, and its log, exported to its plugins (criu/plugin.c). Weak, as in interpose.c. */
extern int criu_get_image_dir(void) __attribute__((weak));
extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((format(printf, 2, 3), weak));

static struct kept {
	unsigned users; /* userfaultfds, of it and of what it has forked since; 0: this place is free */
	bool itself; /* one of them is its own */
	int pidfd;
	pid_t pid;
} *kept; /* in memory that both processes have; NULL: not yet */
static pid_t keeper;

/* ---- in the child ---- */

static int pidfd_open(pid_t pid)
{
	return (int)syscall(SYS_pidfd_open, pid, 0);
}

static void wait_for(int pidfd, int milliseconds)
{
	struct pollfd end = { .fd = pidfd, .events = POLLIN };

	while (poll(&end, 1, milliseconds) < 0 && errno == EINTR)
		;
}

static pid_t ended[MOST_ENDED];
static size_t ended_count;

static void add(pid_t pid)
{
	for (size_t i = 0; i < ended_count; i++)
		if (ended[i] == pid)
			return;
	if (ended_count < MOST_ENDED)
		ended[ended_count++] = pid;
}

static void add_children(pid_t pid)
{
	char path[64];
	struct dirent *entry;
	DIR *tasks;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	tasks = opendir(path);
	while (tasks && (entry = readdir(tasks))) {
		char children[sizeof(path) + 32];
		FILE *file;
		int child;

		if (entry->d_name[0] == '.')
			continue;
		snprintf(children, sizeof(children), "%s/%.16s/children", path, entry->d_name);
		file = fopen(children, "re");
		while (file && fscanf(file, "%d", &child) == 1)
			add(child);
		if (file)
			fclose(file);
	}
	if (tasks)
		closedir(tasks);
}

/* Each is stopped first, so that none has another child meanwhile; one may have been in the middle of that. */
static void add_all_below(void)
{
	size_t before;

	do {
		before = ended_count;
		for (size_t i = 0; i < ended_count; i++) {
			kill(ended[i], SIGSTOP);
			add_children(ended[i]);
		}
	} while (ended_count != before);
}

static void end_all(void)
{
	static int pidfds[MOST_ENDED];

	for (unsigned i = 0; i < PHOS_LAZY_MOST; i++) {
		if (!kept[i].users || (syscall(SYS_pidfd_send_signal, kept[i].pidfd, 0, NULL, 0) && errno == ESRCH))
			continue;
		if (kept[i].itself)
			add(kept[i].pid);
		else
			add_children(kept[i].pid);
	}
	add_all_below();
	for (size_t i = 0; i < ended_count; i++) {
		pidfds[i] = pidfd_open(ended[i]);
		kill(ended[i], SIGKILL);
	}
	for (size_t i = 0; i < ended_count; i++)
		if (pidfds[i] >= 0)
			wait_for(pidfds[i], END_MS);
}

/* Who looks for the server by what it was started with finds the server alone. */
static void rename_self(void)
{
	char stat[1024], *at, *end = NULL;
	unsigned long long begin = 0;
	int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	ssize_t size = file < 0 ? -1 : read(file, stat, sizeof(stat) - 1);

	prctl(PR_SET_NAME, NAME);
	if (size <= 0)
		return;
	stat[size] = 0;
	at = strrchr(stat, ')'); /* of the name, field 2 */
	for (int field = 3; at && field <= ARGUMENTS_FIELD; field++)
		at = strchr(at + 1, ' ');
	if (at)
		begin = strtoull(at, &end, 10);
	if (begin && end && strtoull(end, NULL, 10) > begin) {
		size_t room = (size_t)(strtoull(end, NULL, 10) - begin);

		memset((void *)(uintptr_t)begin, 0, room);
		strncpy((char *)(uintptr_t)begin, NAME, room);
	}
}

static _Noreturn void keep(int server)
{
	sigset_t all;

	setsid(); /* what is sent to the server's group is not for this one */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	rename_self();
	wait_for(server, -1);
	end_all();
	_exit(0);
}

/* ---- in CRIU's process ---- */

/* Without a signal at its end: CRIU hears nothing of it, and a plain wait() does not return it. */
static pid_t fork_with_descriptors(void)
{
	return (pid_t)syscall(SYS_clone, CLONE_FILES, NULL, NULL, NULL, NULL);
}

static void end(pid_t child)
{
	kill(child, SIGKILL);
	while (waitpid(child, NULL, __WALL) < 0 && errno == EINTR)
		;
}

static void at_exit(int status, void *unused)
{
	(void)unused;
	if (!status)
		end(keeper);
}

/* Threads of the image may need any pid, and get it only later. */
static pid_t start(int server)
{
	int images = criu_get_image_dir ? criu_get_image_dir() : AT_FDCWD;
	pid_t in_the_way[MOST_IN_THE_WAY], child;
	unsigned count = 0;

	while ((child = fork_with_descriptors()) > 0 && count < MOST_IN_THE_WAY && phos_pid_needed(images, child))
		in_the_way[count++] = child;
	if (!child)
		keep(server);
	if (count == MOST_IN_THE_WAY && child > 0) {
		end(child);
		child = -1;
	}
	while (count--)
		end(in_the_way[count]);
	return child;
}

static bool begin(void)
{
	static bool tried;
	int server = tried ? -1 : pidfd_open(getpid());

	tried = true;
	if (server < 0)
		return false;
	kept = mmap(NULL, PHOS_LAZY_MOST * sizeof(*kept), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	keeper = kept == MAP_FAILED ? -1 : start(server);
	if (keeper < 0 || on_exit(at_exit, NULL)) {
		kept = NULL; /* a keeper that is there keeps none */
		return false;
	}
	return true;
}

unsigned phos_lazy_keep(pid_t pid)
{
	int pidfd = pid > 0 ? pidfd_open(pid) : -1;
	unsigned place = 0;

	if (pidfd >= 0 && (kept || begin())) {
		while (place < PHOS_LAZY_MOST && kept[place].users)
			place++;
		if (place < PHOS_LAZY_MOST) {
			kept[place] = (struct kept){ .pidfd = pidfd, .pid = pid, .itself = true };
			kept[place].users = 1;
			return place;
		}
	}
	if (pidfd >= 0)
		syscall(SYS_close, pidfd); /* libc's name is ours (interpose.c) */
	if (print_on_level)
		print_on_level(2, "phos: if criu lazy-pages is killed, a process (%d) goes on with zeros\n", (int)pid);
	return PHOS_LAZY_NOWHERE;
}

void phos_lazy_forked(unsigned place)
{
	if (place != PHOS_LAZY_NOWHERE)
		kept[place].users++;
}

void phos_lazy_let_go(unsigned place, bool itself)
{
	if (place == PHOS_LAZY_NOWHERE)
		return;
	if (itself)
		kept[place].itself = false;
	if (!--kept[place].users)
		syscall(SYS_close, kept[place].pidfd);
}
