/* Packets of proto/wire.proto over the connection to phosd. */
#include "packets.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define PACKET_LIMIT (64 << 10)
#define DESCRIPTORS_MOST 2

/* The number of an answer to whatever was asked, or will be: a phosd that does not serve this connection says so. */
#define REFUSAL 0

int phos_send_packet(int connection, const Envelope *envelope, const int *descriptors, size_t count)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(DESCRIPTORS_MOST * sizeof(int))];
	} control = {};
	uint8_t packet[PACKET_LIMIT];
	struct iovec data = { .iov_base = packet };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };
	size_t size = phos__wire__envelope__get_packed_size(envelope);
	ssize_t sent;

	if (size > sizeof(packet) || count > DESCRIPTORS_MOST)
		return -EMSGSIZE;
	data.iov_len = phos__wire__envelope__pack(envelope, packet);
	if (count) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), descriptors, count * sizeof(int));
	}
	do {
		sent = sendmsg(connection, &message, MSG_NOSIGNAL);
	} while (sent < 0 && errno == EINTR);
	return sent < 0 ? -errno : 0;
}

/* Seconds of a clock that nobody sets. */
static time_t now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec;
}

Envelope *phos_receive_packet(int connection, uint64_t id, int timeout_s)
{
	static uint8_t packet[PACKET_LIMIT];
	struct pollfd ready = { .fd = connection, .events = POLLIN };
	time_t deadline = now_s() + timeout_s;

	for (;;) {
		Envelope *envelope;
		ssize_t size;
		int count = poll(&ready, 1, 1000);

		if (count < 0 && errno != EINTR)
			return NULL;
		if (count <= 0) {
			if (now_s() > deadline) {
				errno = ETIMEDOUT;
				return NULL;
			}
			continue;
		}
		size = recv(connection, packet, sizeof(packet), MSG_DONTWAIT);
		if (size < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		if (size <= 0) {
			if (size == 0)
				errno = ECONNRESET;
			return NULL;
		}
		envelope = phos__wire__envelope__unpack(NULL, size, packet);
		if (!envelope) {
			errno = EPROTO;
			return NULL;
		}
		if (envelope->id == id || envelope->id == REFUSAL)
			return envelope;
		phos__wire__envelope__free_unpacked(envelope, NULL);
	}
}
