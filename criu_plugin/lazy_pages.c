/*
 * `phos-gpu restore --lazy` starts `criu lazy-pages` and `criu restore` at the same moment, and the one that restores waits
 * here for the other: CRIU connects to it only after the plugins' init (cr-restore.c), and takes 50 ms to get to that.
 * Later it waits until the other has filled a process that is being filled (lazy_fill/): before the process runs, nothing
 * interferes with that, and nobody meets with memory that is not there.
 */
#include "lazy_fill_address.h"
#include "lazy_socket.h"
#include "phos_plugin.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 1000000
#define LOOKS 20000
#define FILL_SECONDS 10

static int server(void)
{
	const char *said = getenv("PHOS_LAZY_PAGES");

	return said ? atoi(said) : 0;
}

void phos_wait_lazy_fill(void)
{
	struct timeval patience = { .tv_sec = FILL_SECONDS };
	struct ucred peer = { 0 };
	socklen_t peer_size = sizeof(peer);
	int pid = server(), connected = pid > 0 ? socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
	struct sockaddr_un address;
	socklen_t length = phos_lazy_fill_address(&address, pid);
	char nothing;

	if (connected < 0)
		return;
	setsockopt(connected, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(connected, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	/* It listens while it fills, and hangs up. Anybody may listen under that name. */
	if (!connect(connected, (struct sockaddr *)&address, length) &&
	    !getsockopt(connected, SOL_SOCKET, SO_PEERCRED, &peer, &peer_size) && peer.pid == pid &&
	    read(connected, &nothing, 1) < 0 && errno == EAGAIN)
		pr_warn("criu lazy-pages (pid %d) has not filled a process within %d s\n", pid, FILL_SECONDS);
	close(connected);
}

int phos_wait_lazy_pages(void)
{
	int pid = server();

	if (pid <= 0)
		return 0;
	for (int i = 0; i < LOOKS; i++) {
		/* It sleeps for the first time when it waits for a connection: the file alone may not be listened at yet. */
		if (phos_state_of(pid) == 'S' && access(PHOS_LAZY_SOCKET, F_OK) == 0)
			return 0;
		if (phos_has_ended(pid)) {
			pr_err("criu lazy-pages (pid %d) has ended; its own log says why\n", pid);
			return -1;
		}
		nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
	}
	pr_err("criu lazy-pages (pid %d) does not listen at %s within %d s\n", pid, PHOS_LAZY_SOCKET, (int)((long long)LOOKS * LOOK_NS / 1000000000));
	return -1;
}
