/*
 * CRIU at work for somebody over a socket (`criu swrk`: for runc, crun, and what starts these), by packets of its own
 * images/rpc.proto. The launcher preloads this library into such a CRIU, so that these calls come here first:
 *
 *   recv() of a request for a dump: whether the tasks are to run on. No command line says so here, and phosd completes
 *   the image behind tasks that run on, but before others are killed (gpu_engine/stop/dump.py).
 *   write() of the answer that a dump has succeeded. Who asked takes the image for whole then: some pack it, for one.
 *   So the answer goes on when phosd says that it is whole, and as one of failure if it never will be.
 *
 * CRIU serves with one thread: no lock.
 */
#include "phos_plugin.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* How criu_req and criu_resp begin for a dump: type = DUMP; success = true. And a whole answer: success = false. */
static const uint8_t DUMP[] = { 0x08, 0x01 }, DUMPED[] = { 0x08, 0x01, 0x10, 0x01 }, FAILED[] = { 0x08, 0x01, 0x10, 0x00 };
#define OPTIONS 2	   /* criu_req's field */
#define LEAVE_RUNNING 3	   /* criu_opts' field */

static bool leaves_running;

bool phos_service_leaves_running(void)
{
	return leaves_running;
}

struct message {
	const uint8_t *at, *end;
};

static bool read_number(struct message *message, uint64_t *number)
{
	*number = 0;
	for (unsigned int shift = 0; message->at < message->end && shift < 64; shift += 7) {
		uint8_t byte = *message->at++;

		*number |= (uint64_t)(byte & 0x7f) << shift;
		if (!(byte & 0x80))
			return true;
	}
	return false;
}

/* Goes behind the head of a field; *number becomes its value, or its length. Returns whether there is such a field. */
static bool find(struct message *message, unsigned int field, uint64_t *number)
{
	uint64_t head;

	while (read_number(message, &head)) {
		uint64_t left;

		*number = 0;
		switch (head & 7) {
		case 0: /* a number */
			if (!read_number(message, number))
				return false;
			left = 0;
			break;
		case 1:
			left = 8;
			break;
		case 2: /* so many bytes */
			if (!read_number(message, number))
				return false;
			left = *number;
			break;
		case 5:
			left = 4;
			break;
		default:
			return false;
		}
		if (left > (uint64_t)(message->end - message->at))
			return false;
		if (head >> 3 == field)
			return true;
		message->at += left;
	}
	return false;
}

static bool asks_to_leave_running(const void *request, size_t size)
{
	struct message message = { request, (const uint8_t *)request + size };
	uint64_t number;

	if (!find(&message, OPTIONS, &number))
		return false;
	message.end = message.at + number;
	return find(&message, LEAVE_RUNNING, &number) && number;
}

static bool serves(int descriptor)
{
	int type;
	socklen_t size = sizeof(type);

	return getenv("PHOS_CRIU_SERVES") && !getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) &&
	       type == SOCK_SEQPACKET;
}

__attribute__((visibility("default"))) ssize_t recv(int descriptor, void *data, size_t size, int flags)
{
	ssize_t got = syscall(SYS_recvfrom, descriptor, data, size, flags, NULL, NULL);

	/* With these flags CRIU takes a request; phosd's answers are taken with others (packets.c). */
	if (flags == MSG_TRUNC && got >= (ssize_t)sizeof(DUMP) && (size_t)got <= size && !memcmp(data, DUMP, sizeof(DUMP)) &&
	    serves(descriptor))
		leaves_running = asks_to_leave_running(data, got);
	return got;
}

__attribute__((visibility("default"))) ssize_t write(int descriptor, const void *data, size_t size)
{
	if (size < sizeof(DUMPED) || memcmp(data, DUMPED, sizeof(DUMPED)) || !serves(descriptor) || !phos_link_wait_until_whole())
		return syscall(SYS_write, descriptor, data, size);
	return syscall(SYS_write, descriptor, FAILED, sizeof(FAILED)) < 0 ? -1 : (ssize_t)size;
}
