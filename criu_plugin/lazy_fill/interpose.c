/*
 * `criu lazy-pages` brings pages with one thread, 2 GB/s, and begins when the restored process runs: whoever touches a page
 * before waits for one fault at a time. A process of PyTorch meets with a thousand of them until it computes, 0.15 s.
 *
 * The launcher preloads this library into a `criu lazy-pages`. When the first fault of a process arrives, all of its pages
 * are brought at once, with several threads (fill.c), before CRIU hears of anything else. So CRIU knows of each change that
 * the process has made to its memory before any page is brought later than that: changes are said through the same
 * descriptor, their makers wait until they are read, and until then the kernel refuses to bring pages (EAGAIN).
 *
 * CRIU goes on as if nothing were there. What has been brought, and has not been changed since, counts as brought at once;
 * and so does a page that turns out to be there, which CRIU would try to bring for ever (uffd.c of 4.1, EEXIST). What the
 * process lets go of stays one mapping with the rest (keep_whole). Whoever asked for a page that could not be brought asks
 * again (ask_again). Nothing is forgotten that has been moved to where something else was (hear_moves). And if CRIU is killed,
 * nobody goes on with zeros (keeper.c).
 *
 * CRIU's one thread calls all of this: no lock.
 */
#include "descriptor_name.h"
#include "lazy_fill.h"
#include "lazy_fill_address.h"

#include <errno.h>
#include <limits.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* CRIU's log; level 3 is for information. Weak, so that tests can load this without a CRIU. */
extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((format(printf, 2, 3), weak));

#define FEWEST_THREADS 4 /* with fewer, a process would wait for longer than its faults cost it */
#define ASK_AGAIN_MS 1
#define MOST_MOVES 32
#define CONTROL_MOST 4096

static struct served {
	int uffd, pid;
	bool over; /* it has been filled, or is not to be */
	struct phos_lazy_filled filled;
	struct uffdio_range missed; /* where nothing could be brought while it changed its memory */
	struct uffdio_range moves[MOST_MOVES]; /* from where; those of whose end CRIU has yet to hear */
	unsigned moves_count;
	unsigned kept; /* the place (keeper.c) of the process, or of the one that it was forked from, */
	bool forked; /* which this says */
} served[PHOS_LAZY_MOST];
static unsigned served_count;

static int named; /* the process that CRIU was told of last; its descriptor comes next */

static struct served *find(int uffd)
{
	for (unsigned i = 0; i < served_count; i++)
		if (served[i].uffd == uffd)
			return &served[i];
	return NULL;
}

/* The number is about to be another's. */
static void forget(int uffd)
{
	struct served *process = find(uffd);

	if (process) {
		phos_lazy_let_go(process->kept, !process->forked);
		free(process->filled.pieces);
		*process = (struct served){ .uffd = -1, .over = true, .kept = PHOS_LAZY_NOWHERE };
	}
}

static struct served *room(void)
{
	struct served *empty = find(-1);

	return empty || served_count == PHOS_LAZY_MOST ? empty : &served[served_count++];
}

static bool is_userfaultfd(int descriptor)
{
	char name[64];

	return phos_name_of(descriptor, name, sizeof(name)) && !strcmp(name, "anon_inode:[userfaultfd]");
}

/* Who restores the process waits for the end of this, before the process runs (lazy_pages.c). */
static int announce(void)
{
	struct sockaddr_un address;
	socklen_t length = phos_lazy_fill_address(&address, getpid());
	int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (listening >= 0 && (bind(listening, (struct sockaddr *)&address, length) || listen(listening, 16))) {
		close(listening);
		return -1;
	}
	return listening;
}

static void fill(struct served *process)
{
	unsigned threads = phos_lazy_threads(FEWEST_THREADS);
	struct timespec began, ended;
	int listening, result;

	process->over = true;
	if (!threads)
		return;
	listening = announce();
	clock_gettime(CLOCK_MONOTONIC, &began);
	result = phos_lazy_fill(process->uffd, process->pid, threads, &process->filled);
	clock_gettime(CLOCK_MONOTONIC, &ended);
	if (listening >= 0)
		close(listening);
	if (print_on_level && !result)
		print_on_level(3, "phos: %llu bytes of process %d are there after %.1f ms\n",
			       (unsigned long long)process->filled.bytes, process->pid,
			       (double)(ended.tv_sec - began.tv_sec) * 1e3 + (double)(ended.tv_nsec - began.tv_nsec) * 1e-6);
	else if (print_on_level)
		print_on_level(3, "phos: nothing of process %d could be brought at once: it is left to CRIU\n", process->pid);
}

/* Once CRIU has heard of a change, only CRIU knows what is where. */
static void heard(struct served *process, const struct uffd_msg *message)
{
	if (!process->over && print_on_level)
		print_on_level(3, "phos: process %d has changed its memory already: it is left to CRIU\n", process->pid);
	process->over = true;
	switch (message->event) {
	case UFFD_EVENT_FORK: /* the child has what its parent has, and is none of those that are filled */
		break;
	case UFFD_EVENT_REMAP:
		phos_lazy_gone(&process->filled, message->arg.remap.from, message->arg.remap.len);
		phos_lazy_gone(&process->filled, message->arg.remap.to, message->arg.remap.len);
		break;
	case UFFD_EVENT_REMOVE:
	case UFFD_EVENT_UNMAP:
		phos_lazy_gone(&process->filled, message->arg.remove.start, message->arg.remove.end - message->arg.remove.start);
		break;
	default:
		phos_lazy_gone(&process->filled, 0, UINT64_MAX);
	}
}

/*
 * CRIU unregisters what a process lets go of (MADV_DONTNEED), which then is another mapping than the rest: the process cannot
 * mremap() them together any more (EFAULT). If it unmaps or moves that memory sooner, CRIU ends (EINVAL), and past
 * vm.max_map_count takes it for gone (ENOMEM): all that has not come yet is zeros then. There is no need for it: where CRIU
 * knows of nothing, it brings zeros. But of more than INT_MAX bytes it would still know.
 */
static int keep_whole(int descriptor, struct uffdio_range *range)
{
	/* who waits for a page of it is woken either way */
	return (int)syscall(SYS_ioctl, descriptor, range->len > INT_MAX ? UFFDIO_UNREGISTER : UFFDIO_WAKE, range);
}

static void miss(struct served *process, uint64_t start, uint64_t size)
{
	struct uffdio_range *missed = &process->missed;
	uint64_t end = start + size;

	if (missed->len) {
		start = missed->start < start ? missed->start : start;
		end = missed->start + missed->len > end ? missed->start + missed->len : end;
	}
	*missed = (struct uffdio_range){ .start = start, .len = end - start };
}

/* Until its change is over, which CRIU may have to hear of, the process would ask in vain again. */
static bool changes(const struct served *process)
{
	struct uffdio_copy nothing = { 0 };

	return syscall(SYS_ioctl, process->uffd, UFFDIO_COPY, &nothing) < 0 && errno == EAGAIN;
}

/*
 * CRIU forgets who asked for a page that could not be brought while the process changed its memory (EAGAIN): he would wait
 * until everything else has come. Returns whether somebody waits still.
 */
static bool ask_again(void)
{
	bool waiting = false;

	for (unsigned i = 0; i < served_count; i++) {
		struct served *process = &served[i];

		if (!process->missed.len && !process->moves_count)
			continue;
		if (changes(process)) {
			waiting |= process->missed.len > 0;
			continue;
		}
		if (process->missed.len)
			syscall(SYS_ioctl, process->uffd, UFFDIO_WAKE, &process->missed);
		process->missed.len = 0;
		process->moves_count = 0; /* with MREMAP_DONTUNMAP nothing else is said */
	}
	return waiting;
}

/*
 * mremap() says REMAP, and when that has been heard, UNMAP for the old place. Another thread may have moved memory there in
 * between, and said so: CRIU would forget what is still to come of that, and bring zeros. So it hears that nothing is unmapped.
 */
static void hear_moves(struct served *process, struct uffd_msg *message)
{
	uint64_t start = message->arg.remove.start;

	if (message->event == UFFD_EVENT_REMAP && process->moves_count < MOST_MOVES)
		process->moves[process->moves_count++] =
			(struct uffdio_range){ .start = message->arg.remap.from, .len = message->arg.remap.len };
	if (message->event != UFFD_EVENT_UNMAP)
		return;
	for (unsigned i = 0; i < process->moves_count; i++)
		if (process->moves[i].start == start && process->moves[i].len == message->arg.remove.end - start) {
			process->moves[i] = process->moves[--process->moves_count];
			message->arg.remove.end = start;
			return;
		}
}

/* ---- who has started this ---- */

/*
 * `phos-gpu restore --lazy` (cli/restore_first.py) starts the server before CRIU, and ends it if there will be no CRIU. If it is
 * killed before that can be known, nobody would: the server would wait for ever, and keep the image's directory locked.
 */
static bool with_starter;

__attribute__((constructor)) static void end_with_starter(void)
{
	const char *starter = getenv("PHOS_LAZY_STARTER");

	if (!starter)
		return;
	with_starter = !prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != atoi(starter))
		_exit(EXIT_FAILURE);
}

/* CRIU is there: processes are about to depend on this. */
static void outlive_starter(void)
{
	if (with_starter)
		prctl(PR_SET_PDEATHSIG, 0);
	with_starter = false;
}

/* ---- what CRIU calls ---- */

EXPORT ssize_t recv(int descriptor, void *buffer, size_t size, int flags)
{
	ssize_t result = syscall(SYS_recvfrom, descriptor, buffer, size, flags, NULL, NULL);

	if (size == sizeof(int) && result == (ssize_t)size) {
		memcpy(&named, buffer, sizeof(int));
		outlive_starter();
	}
	return result;
}

/* Then each message says who has sent it: which process a descriptor is of, whatever pid it has in its own namespace. */
EXPORT int listen(int descriptor, int backlog)
{
	int yes = 1;

	setsockopt(descriptor, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes));
	return (int)syscall(SYS_listen, descriptor, backlog);
}

/* As recvmsg() of a socket that does not say who has sent a message: that goes to `sender`, 0 if it is not known. */
static ssize_t receive(int descriptor, struct msghdr *message, int flags, pid_t *sender)
{
	union {
		struct cmsghdr align;
		char space[CONTROL_MOST];
	} control;
	struct msghdr whole = *message;
	struct cmsghdr *part;
	size_t room = message->msg_controllen;
	struct ucred from;
	ssize_t result;

	*sender = 0;
	if (!room || room > sizeof(control) - CMSG_SPACE(sizeof(from)))
		return syscall(SYS_recvmsg, descriptor, message, flags);
	whole.msg_control = &control;
	whole.msg_controllen = room + CMSG_SPACE(sizeof(from));
	result = syscall(SYS_recvmsg, descriptor, &whole, flags);
	if (result < 0)
		return result;
	message->msg_namelen = whole.msg_namelen;
	message->msg_flags = whole.msg_flags;
	message->msg_controllen = 0;
	for (part = CMSG_FIRSTHDR(&whole); part; part = CMSG_NXTHDR(&whole, part)) {
		if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_CREDENTIALS) {
			memcpy(&from, CMSG_DATA(part), sizeof(from));
			*sender = from.pid;
		} else if (part->cmsg_len <= room - message->msg_controllen) {
			memcpy((char *)message->msg_control + message->msg_controllen, part, part->cmsg_len);
			message->msg_controllen += CMSG_ALIGN(part->cmsg_len);
			if (message->msg_controllen > room) /* the last one need not be padded */
				message->msg_controllen = room;
		} else {
			message->msg_flags |= MSG_CTRUNC;
		}
	}
	return result;
}

EXPORT ssize_t recvmsg(int descriptor, struct msghdr *message, int flags)
{
	pid_t sender;
	ssize_t result = receive(descriptor, message, flags, &sender);
	struct cmsghdr *control = result < 0 ? NULL : CMSG_FIRSTHDR(message);
	struct served *place;
	int error = errno, uffd;

	if (named > 0 && control && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS &&
	    control->cmsg_len >= CMSG_LEN(sizeof(int))) {
		memcpy(&uffd, CMSG_DATA(control), sizeof(int));
		forget(uffd);
		place = room();
		if (place)
			*place = (struct served){
				.uffd = uffd, .pid = named, .over = !is_userfaultfd(uffd), .kept = phos_lazy_keep(sender) };
		named = 0;
	}
	errno = error;
	return result;
}

EXPORT ssize_t read(int descriptor, void *buffer, size_t size)
{
	ssize_t result = syscall(SYS_read, descriptor, buffer, size);
	struct uffd_msg *message = buffer;
	struct served *process, *child;

	if (size != sizeof(*message) || result != (ssize_t)size || !served_count || message->event == UFFD_EVENT_PAGEFAULT ||
	    !is_userfaultfd(descriptor))
		return result;
	process = find(descriptor);
	if (message->event == UFFD_EVENT_FORK) {
		forget((int)message->arg.fork.ufd);
		child = room();
		if (child) {
			*child = (struct served){ .uffd = (int)message->arg.fork.ufd,
						  .over = true,
						  .kept = process ? process->kept : PHOS_LAZY_NOWHERE,
						  .forked = true };
			phos_lazy_forked(child->kept);
		}
	}
	if (process) {
		hear_moves(process, message);
		heard(process, message);
	}
	return result;
}

EXPORT int close(int descriptor)
{
	if (descriptor >= 0)
		forget(descriptor);
	return (int)syscall(SYS_close, descriptor);
}

EXPORT int ioctl(int descriptor, unsigned long request, ...)
{
	struct uffdio_copy *copy;
	struct uffdio_zeropage *zero;
	struct served *process;
	int result, error;
	va_list list;
	void *argument;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	copy = argument;
	zero = argument;
	if (request == UFFDIO_COPY && (process = find(descriptor)) && phos_lazy_has(&process->filled, copy->dst, copy->len)) {
		copy->copy = (int64_t)copy->len;
		result = 0;
	} else if (request == UFFDIO_COPY && !copy->mode) {
		int64_t copied = 0;

		result = phos_lazy_copy(descriptor, copy->dst, (const void *)(uintptr_t)copy->src, copy->len, &copied);
		copy->copy = copied;
	} else if (request == UFFDIO_UNREGISTER) {
		result = keep_whole(descriptor, argument);
	} else {
		result = (int)syscall(SYS_ioctl, descriptor, request, argument);
	}
	if (result && errno == EAGAIN && (process = find(descriptor))) {
		if (request == UFFDIO_COPY)
			miss(process, copy->dst, copy->len);
		else if (request == UFFDIO_ZEROPAGE)
			miss(process, zero->range.start, zero->range.len);
	}
	if ((request == UFFDIO_COPY || request == UFFDIO_ZEROPAGE) && (process = find(descriptor)) && !process->over) {
		error = errno;
		fill(process);
		errno = error;
	}
	return result;
}

EXPORT int epoll_wait(int descriptor, struct epoll_event *events, int most, int timeout)
{
	bool waiting;
	int ready;

	do {
		waiting = ask_again() && timeout < 0;
		ready = (int)syscall(SYS_epoll_wait, descriptor, events, most, waiting ? ASK_AGAIN_MS : timeout);
	} while (!ready && waiting);
	return ready;
}
