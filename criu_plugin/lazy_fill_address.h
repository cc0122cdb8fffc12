/* Where a `criu lazy-pages` listens for as long as it fills a process's memory (lazy_fill/), and who restores asks. */
#pragma once

#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Names no file. `pid`: of the criu lazy-pages. Returns how much of *address counts. */
static inline socklen_t phos_lazy_fill_address(struct sockaddr_un *address, int pid)
{
	int size;

	*address = (struct sockaddr_un){ .sun_family = AF_UNIX };
	size = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "phos-lazy-fill-%d", pid);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)size);
}
