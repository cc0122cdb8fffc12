/*
 * What /proc says of tasks: their state, and who is traced by CRIU, which are those that it has put together and not let go
 * yet. CRIU's own list of them is no plugin's business, the kernel's is in /proc.
 */
#include "phos_plugin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define TRACER "\nTracerPid:\t"

/* Reads /proc/PID/NAME as text; false if it cannot be. */
static bool read_text(int pid, const char *name, char *text, size_t most)
{
	char path[32];
	ssize_t size;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	size = read(fd, text, most - 1);
	close(fd);
	if (size <= 0)
		return false;
	text[size] = 0;
	return true;
}

char phos_state_of(int pid)
{
	char text[512], *name_end;

	if (!read_text(pid, "stat", text, sizeof(text)))
		return 0;
	name_end = strrchr(text, ')'); /* the name before it may hold anything */
	return name_end && name_end[1] ? name_end[2] : 0;
}

bool phos_has_ended(int pid)
{
	char state = phos_state_of(pid);

	return !state || state == 'Z' || state == 'X';
}

static int tracer_of(int pid)
{
	char text[4096], *line;

	if (!read_text(pid, "status", text, sizeof(text)))
		return 0;
	line = strstr(text, TRACER);
	return line ? atoi(line + strlen(TRACER)) : 0;
}

bool phos_is_traced(int thread)
{
	return tracer_of(thread) == getpid();
}

void phos_kill_traced(void)
{
	DIR *processes = opendir("/proc");
	struct dirent *entry;

	if (!processes) {
		pr_err("the restored tasks cannot be ended: %s\n", strerror(errno));
		return;
	}
	while ((entry = readdir(processes))) {
		int pid = atoi(entry->d_name);

		if (pid > 0 && tracer_of(pid) == getpid())
			kill(pid, SIGKILL);
	}
	closedir(processes);
}
