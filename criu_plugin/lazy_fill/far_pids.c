/* Pids that a restore does not need, for whoever is started beside it. */
#include "lazy_fill.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LAST_PID "/proc/sys/kernel/ns_last_pid"
#define ROOM 200 /* above a far pid, for those that follow */

static long read_number(const char *path)
{
	char text[32];
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t size = file < 0 ? -1 : read(file, text, sizeof(text) - 1);

	if (file >= 0)
		close(file);
	if (size <= 0)
		return -1;
	text[size] = 0;
	return strtol(text, NULL, 10);
}

static bool write_number(const char *path, long number)
{
	char text[32];
	int length = snprintf(text, sizeof(text), "%ld", number), file = open(path, O_WRONLY | O_CLOEXEC);
	bool written = file >= 0 && write(file, text, (size_t)length) == length;

	if (file >= 0)
		close(file);
	return written;
}

/* Whether a thread of the image has one of the pids from `first` on. */
static bool needed(DIR *images, long first)
{
	struct dirent *entry;
	int pid;

	rewinddir(images);
	while ((entry = readdir(images)))
		if (sscanf(entry->d_name, "core-%d.img", &pid) == 1 && pid >= first && pid <= first + ROOM)
			return true;
	return false;
}

long phos_far_pids(int images)
{
	long before = read_number(LAST_PID), far = read_number("/proc/sys/kernel/pid_max") - 2 * ROOM;
	int folder = before < 0 ? -1 : openat(images, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *listed = folder < 0 ? NULL : fdopendir(folder);

	if (!listed) {
		if (folder >= 0)
			close(folder);
		return -1;
	}
	while (far > 2 * ROOM && needed(listed, far))
		far -= ROOM;
	closedir(listed);
	return far > 2 * ROOM && write_number(LAST_PID, far) ? before : -1;
}

void phos_near_pids(long before)
{
	if (before >= 0)
		write_number(LAST_PID, before);
}
