/*
 * With the last descriptor of a userfaultfd, what has not been brought becomes zeros, and whoever waits for it goes on with
 * those. So a child of `criu lazy-pages`, which has all of its descriptors in common with it, waits for its end. If it was killed,
 * or has failed, the child ends the processes that still depended on it, and only then are the descriptors closed.
 *
 * CRIU's one thread calls this: no lock. What both processes look at is the table of pidfds, which CRIU's process writes and the
 * child reads when that is gone.
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
#define END_MS 10000 /* a process that is killed ends within that, or never */
#define MOST_IN_THE_WAY 64
#define MOST_BELOW 4096 /* processes that those have forked since */

/* The folder that CRIU takes the image from, exported to its plugins (criu/plugin.c). Weak, as in interpose.c. */
extern int criu_get_image_dir(void) __attribute__((weak));

/* Of a process whose memory is still to come. */
struct kept {
	int pidfd; /* 0: of none */
	pid_t pid;
};

static struct kept *kept; /* in memory that both processes have; NULL: not yet */
static pid_t keeper;
static char *arguments; /* this process's, from its name on, as others see them */
static size_t arguments_size;

__attribute__((constructor)) static void find_arguments(int count, char **values)
{
	if (count <= 0)
		return;
	arguments = values[0];
	arguments_size = (size_t)(values[count - 1] + strlen(values[count - 1]) - values[0]);
}

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

/* Adds the children of a process to those. */
static size_t add_children(pid_t pid, pid_t *below, size_t count)
{
	char path[64];
	struct dirent *entry;
	DIR *tasks;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	tasks = opendir(path);
	while (tasks && (entry = readdir(tasks))) {
		char children[sizeof(path) + 32];
		FILE *file;

		if (entry->d_name[0] == '.')
			continue;
		snprintf(children, sizeof(children), "%s/%.16s/children", path, entry->d_name);
		file = fopen(children, "re");
		while (file && count < MOST_BELOW && fscanf(file, "%d", &below[count]) == 1)
			count++;
		if (file)
			fclose(file);
	}
	if (tasks)
		closedir(tasks);
	return count;
}

/* Stopped first, so that none has another child meanwhile. */
static void end_tree(const struct kept *one)
{
	static pid_t below[MOST_BELOW];
	size_t count = 1, next = 0;

	if (syscall(SYS_pidfd_send_signal, one->pidfd, SIGSTOP, NULL, 0))
		return; /* it has ended */
	below[0] = one->pid;
	while (next < count) {
		kill(below[next], SIGSTOP);
		count = add_children(below[next++], below, count);
	}
	while (count--)
		kill(below[count], SIGKILL);
}

static _Noreturn void keep(int server)
{
	sigset_t all;

	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	prctl(PR_SET_NAME, NAME);
	/* Who looks for the server by what it was started with finds the server alone. */
	memset(arguments, 0, arguments_size);
	strncpy(arguments, NAME, arguments_size);
	wait_for(server, -1);
	for (unsigned i = 0; i < PHOS_LAZY_MOST; i++)
		if (kept[i].pidfd)
			end_tree(&kept[i]);
	for (unsigned i = 0; i < PHOS_LAZY_MOST; i++)
		if (kept[i].pidfd)
			wait_for(kept[i].pidfd, END_MS);
	_exit(0);
}

/* ---- in CRIU's process ---- */

/* It is nobody's to notice: it says nothing when it ends. */
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
	static bool failed;
	int server = failed || !arguments_size ? -1 : pidfd_open(getpid());

	failed = true;
	if (server < 0)
		return false;
	kept = mmap(NULL, PHOS_LAZY_MOST * sizeof(*kept), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	keeper = kept == MAP_FAILED ? -1 : start(server);
	if (keeper < 0 || on_exit(at_exit, NULL)) {
		kept = NULL; /* a keeper that is there waits for nothing, and ends none */
		return false;
	}
	return true;
}

void phos_lazy_keep(unsigned place, pid_t pid)
{
	int pidfd = pid > 0 ? pidfd_open(pid) : -1;

	if (pidfd < 0)
		return;
	if (!kept && !begin()) {
		syscall(SYS_close, pidfd);
		return;
	}
	kept[place] = (struct kept){ pidfd, pid };
}

void phos_lazy_let_go(unsigned place)
{
	if (!kept || !kept[place].pidfd)
		return;
	syscall(SYS_close, kept[place].pidfd); /* libc's name is ours (interpose.c) */
	kept[place].pidfd = 0;
}
