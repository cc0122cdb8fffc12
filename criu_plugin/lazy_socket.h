/* The socket that the server of a lazy restore listens at, in CRIU's working directory (uffd.c of CRIU 4.1). */
#pragma once

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define PHOS_LAZY_SOCKET "lazy-pages.socket"

/*
 * Whether the one in `folder` was left by a server that was killed. Nobody asks by connecting: a server takes that for the
 * CRIU that it waits for. The kernel names sockets as they were bound, so one that is in use in another folder counts too.
 */
static inline bool phos_lazy_socket_left(int folder)
{
	static const char name[] = PHOS_LAZY_SOCKET "\n";
	struct stat status;
	char line[512];
	bool used = false;
	FILE *sockets;

	if (fstatat(folder, PHOS_LAZY_SOCKET, &status, AT_SYMLINK_NOFOLLOW) || !S_ISSOCK(status.st_mode))
		return false;
	sockets = fopen("/proc/net/unix", "re");
	if (!sockets)
		return false;
	while (!used && fgets(line, sizeof(line), sockets)) {
		size_t length = strlen(line);

		used = length >= sizeof(name) && !strcmp(line + length - (sizeof(name) - 1), name);
	}
	fclose(sockets);
	return !used;
}
