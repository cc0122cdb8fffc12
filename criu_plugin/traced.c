/*
 * Who is traced by CRIU: the tasks that it has put together and not let go yet. CRIU's own list of them is no plugin's
 * business, the kernel's is in /proc.
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

static int tracer_of(int pid)
{
	char path[32], text[4096], *line;
	ssize_t size;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/status", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	size = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (size <= 0)
		return 0;
	text[size] = 0;
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
