/*
 * Since Linux 6.16 only local and netlink sockets have SO_PASSCRED and SO_PASSSEC. CRIU up to 4.1 asks every socket for them,
 * and gives up a dump of whoever merely listens on a TCP port: checkpoint-restore/criu, issue 2705. What a socket does not
 * have it has not set, so that is the answer here, if the launcher has preloaded this library into CRIU.
 */
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((visibility("default"))) int getsockopt(int socket, int level, int option, void *value, socklen_t *size)
{
	int result = syscall(SYS_getsockopt, socket, level, option, value, size);

	if (!result || errno != EOPNOTSUPP || level != SOL_SOCKET || *size < sizeof(int) ||
	    (option != SO_PASSCRED && option != SO_PASSSEC))
		return result;
	*(int *)value = 0;
	*size = sizeof(int);
	return 0;
}
