/*
 * `phos-gpu restore --lazy` starts `criu lazy-pages` and `criu restore` at the same moment, and the one that restores waits
 * here for the other: CRIU connects to it only after the plugins' init (cr-restore.c), and takes 50 ms to get to that.
 */
#include "phos_plugin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SOCKET "lazy-pages.socket" /* in the image directory; CRIU's uffd.c */
#define LOOK_NS 1000000
#define LOOKS 20000

/* The letter of a process's state in /proc/PID/stat; 0: there is none. */
static char state_of(int pid)
{
	char path[32], text[512], *name_end;
	ssize_t size;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	size = read(fd, text, sizeof text - 1);
	close(fd);
	if (size <= 0)
		return 0;
	text[size] = 0;
	name_end = strrchr(text, ')');
	return name_end && name_end[1] ? name_end[2] : 0;
}

int phos_wait_lazy_pages(void)
{
	const char *said = getenv("PHOS_LAZY_PAGES");
	int pid = said ? atoi(said) : 0;

	if (pid <= 0)
		return 0;
	for (int i = 0; i < LOOKS; i++) {
		char state = state_of(pid);

		/* It sleeps for the first time when it waits for a connection: the file alone may not be listened at yet. */
		if (state == 'S' && faccessat(criu_get_image_dir(), SOCKET, F_OK, 0) == 0)
			return 0;
		if (!state || state == 'Z' || state == 'X') {
			pr_err("criu lazy-pages (pid %d) has ended; its own log says why\n", pid);
			return -1;
		}
		nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
	}
	pr_err("criu lazy-pages (pid %d) does not listen at %s within %d s\n", pid, SOCKET, (int)((long long)LOOKS * LOOK_NS / 1000000000));
	return -1;
}
