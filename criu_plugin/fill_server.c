/*
 * The memory of a process that is restored all at once, brought by us and not by CRIU: CRIU reads it with one thread, page by
 * page into memory that the kernel clears first, a third as fast as one thread of ours, and a sixth as fast as four.
 *
 * For CRIU this is a lazy restore (`criu restore --lazy-pages`, which the launcher adds, with PHOS_FILL_PAGES=1, where
 * can_fill.c sees no difference), and a process of ours is its server: CRIU hands it each task's userfaultfd (uffd.c). It
 * brings all of a task's pages with the task's first fault, which comes when all of its memory is in its place, or when CRIU
 * has put the tasks together, or has died. Then it closes the descriptor: nothing is lazy any more before the task runs. If
 * not all could be brought, the task never runs.
 *
 * It is no child of CRIU's, which takes the end of any child during a restore for a failure; and no thread of CRIU's, which
 * forks, and whose children would find locks held by nobody.
 */
#include "lazy_fill/lazy_fill.h"
#include "lazy_socket.h"
#include "phos_plugin.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NAME "phos-fill" /* of the server, where processes are listed */
#define LOOK_NS 1000000
#define LOOKS 20000
#define RESTORED 0x52535446 /* in place of a pid: all tasks have been put together (uffd.c of CRIU 4.1) */
#define MOST_TASKS 256

/* What the server says at its end. */
struct report {
	int pid; /* of a task that lacks memory, as CRIU's images have it; 0: none does */
	int error; /* why; 0: its image is not understood, or cut off */
	uint64_t bytes, wanted; /* of that task, or of all */
	double seconds;
};

/* Of CRIU's main thread only. `server` hangs up when there is none any more. */
static bool wanted;
static int server = -1;

struct task {
	int uffd, pid; /* uffd -1: it has been filled */
};

struct serving {
	int listening, connection, control;
	int directory; /* locked for as long as it listens there */
	struct task tasks[MOST_TASKS];
	size_t count;
	struct report report;
};

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* ---- the server ---- */

/* A task that lacks memory after this goes on in CRIU's code, and is ended before its own. */
static void fill(struct serving *serving, struct task *task)
{
	unsigned threads = phos_lazy_threads(1);
	struct report *report = &serving->report;
	struct phos_lazy_filled filled;
	double began = now();
	int result = phos_lazy_fill(task->uffd, task->pid, threads ? threads : 1, &filled);

	free(filled.pieces);
	close(task->uffd);
	task->uffd = -1;
	report->seconds += now() - began;
	if (report->pid)
		return;
	if (result || filled.bytes < filled.wanted)
		*report = (struct report){ task->pid, filled.error, filled.bytes, filled.wanted, report->seconds };
	else
		report->bytes += filled.bytes;
}

/* The descriptor that comes with the next byte; -1: none does. */
static int receive_descriptor(int connection)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	char byte;
	struct iovec data = { &byte, sizeof(byte) };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header;
	int descriptor;

	if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) <= 0)
		return -1;
	header = CMSG_FIRSTHDR(&message);
	if (!header || header->cmsg_type != SCM_RIGHTS)
		return -1;
	memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
	return descriptor;
}

/* What CRIU says next. False: it says nothing more. */
static bool hear(struct serving *serving)
{
	struct task task = { -1, 0 };

	if (recv(serving->connection, &task.pid, sizeof(task.pid), MSG_WAITALL) != sizeof(task.pid))
		return false;
	if (task.pid == RESTORED || task.pid < 0) /* or a zombie, which has no memory */
		return true;
	task.uffd = receive_descriptor(serving->connection);
	if (task.uffd < 0 || serving->count == MOST_TASKS)
		return false;
	serving->tasks[serving->count++] = task;
	return true;
}

static void connect_criu(struct serving *serving)
{
	serving->connection = accept4(serving->listening, NULL, NULL, SOCK_CLOEXEC);
	if (serving->connection < 0)
		return;
	unlink(PHOS_LAZY_SOCKET); /* the next one's place */
	close(serving->directory);
	serving->directory = -1;
}

/* CRIU wants to know, or has ended: a task that it had put together would run. Nothing that it has said is left unheard. */
static void finish(struct serving *serving)
{
	struct pollfd said = { .fd = serving->connection, .events = POLLIN };

	while (said.fd >= 0 && poll(&said, 1, 0) > 0 && (said.revents & POLLIN) && hear(serving))
		;
	for (size_t i = 0; i < serving->count; i++)
		if (serving->tasks[i].uffd >= 0)
			fill(serving, &serving->tasks[i]);
	if (serving->directory >= 0)
		unlink(PHOS_LAZY_SOCKET);
	(void)!send(serving->control, &serving->report, sizeof(serving->report), MSG_NOSIGNAL);
}

static void serve(struct serving *serving)
{
	struct pollfd polled[2 + MOST_TASKS];
	bool more = true;

	for (;;) {
		bool connected = serving->connection >= 0;

		polled[0] = (struct pollfd){ .fd = serving->control, .events = POLLIN };
		polled[1] = (struct pollfd){ .fd = connected ? serving->connection : serving->listening, .events = POLLIN };
		if (!more)
			polled[1].fd = -1;
		for (size_t i = 0; i < serving->count; i++)
			polled[2 + i] = (struct pollfd){ .fd = serving->tasks[i].uffd, .events = POLLIN };
		if (poll(polled, 2 + serving->count, -1) < 0) {
			if (errno == EINTR)
				continue;
			return;
		}
		for (size_t i = serving->count; i--;)
			if (polled[2 + i].fd >= 0 && polled[2 + i].revents)
				fill(serving, &serving->tasks[i]);
		if (polled[1].revents && connected)
			more = hear(serving);
		else if (polled[1].revents)
			connect_criu(serving);
		else if (polled[0].revents)
			break;
	}
	finish(serving);
}

static int by_number(const void *one, const void *other)
{
	return *(const int *)one - *(const int *)other;
}

/* Nobody waits in vain for the end of something that CRIU had open. */
static void keep_only(int *kept, size_t count)
{
	unsigned first = STDERR_FILENO + 1;
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	for (int i = 0; i <= STDERR_FILENO; i++)
		dup2(null, i);
	qsort(kept, count, sizeof(*kept), by_number);
	for (size_t i = 0; i < count; first = (unsigned)kept[i++] + 1)
		if ((unsigned)kept[i] > first)
			syscall(SYS_close_range, first, (unsigned)kept[i] - 1, 0);
	syscall(SYS_close_range, first, UINT_MAX, 0);
}

static __attribute__((noreturn)) void run(int listening, int directory, int control)
{
	static struct serving serving;
	int kept[] = { listening, directory, control, criu_get_image_dir() };

	setsid(); /* what a keyboard sends is for CRIU: what becomes of it is seen here */
	prctl(PR_SET_NAME, NAME);
	for (int signal_ = 1; signal_ < NSIG; signal_++)
		signal(signal_, signal_ == SIGPIPE ? SIG_IGN : SIG_DFL);
	keep_only(kept, sizeof(kept) / sizeof(*kept));
	serving = (struct serving){ .listening = listening, .connection = -1, .control = control, .directory = directory };
	serve(&serving);
	_exit(EXIT_SUCCESS);
}

/* ---- CRIU's side ---- */

bool phos_fills(void)
{
	if (getenv("PHOS_FILL_PAGES")) {
		wanted = true;
		unsetenv("PHOS_FILL_PAGES"); /* it is not for what CRIU starts */
	}
	return wanted;
}

/* Waits until no other server is about to listen in this directory. -1: one is for long, or the directory is none. */
static int lock_directory(void)
{
	int directory = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	for (int i = 0; directory >= 0 && flock(directory, LOCK_EX | LOCK_NB); i++) {
		if ((errno != EWOULDBLOCK && errno != EINTR) || i == LOOKS) {
			close(directory);
			return -1;
		}
		nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
	}
	return directory;
}

/* With the directory locked, whose descriptor is given. */
static int listen_for_criu(int directory)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = PHOS_LAZY_SOCKET };
	int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (phos_lazy_socket_left(directory))
		unlink(PHOS_LAZY_SOCKET);
	if (listening >= 0 && (bind(listening, (struct sockaddr *)&address, sizeof(address)) || listen(listening, 1))) {
		close(listening);
		return -1;
	}
	return listening;
}

/* No child of CRIU's: what is forked here ends at once. */
static bool start(int listening, int directory, int control)
{
	int images = criu_get_image_dir(), status = -1;
	pid_t child = fork();

	if (!child) {
		bool in_the_way;

		do { /* no task has been created yet */
			child = fork();
			in_the_way = phos_pid_needed(images, child ? child : getpid());
			if (!child && in_the_way)
				_exit(0);
			if (!child)
				run(listening, directory, control);
			while (child > 0 && in_the_way && waitpid(child, NULL, 0) < 0 && errno == EINTR)
				;
		} while (child > 0 && in_the_way);
		_exit(child < 0);
	}
	while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	return !status;
}

int phos_fill_begin(void)
{
	int control[2] = { -1, -1 }, directory, listening;
	bool started;

	if (!phos_fills())
		return 0;
	directory = lock_directory();
	listening = directory < 0 ? -1 : listen_for_criu(directory);
	started = listening >= 0 && !socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) &&
		  start(listening, directory, control[1]);
	if (!started)
		pr_err("no server for the tasks' memory at %s: %s. With PHOS_FILL_THREADS=0 there is none\n", PHOS_LAZY_SOCKET,
		       strerror(errno));
	if (listening >= 0)
		close(listening);
	if (directory >= 0)
		close(directory);
	if (control[1] >= 0)
		close(control[1]);
	server = control[0];
	return started ? 0 : -1;
}

int phos_fill_end(void)
{
	struct report report;
	ssize_t size;

	if (server < 0)
		return 0;
	shutdown(server, SHUT_WR); /* it finishes */
	do
		size = recv(server, &report, sizeof(report), 0);
	while (size < 0 && errno == EINTR);
	close(server);
	server = -1;
	if (size != sizeof(report)) {
		pr_err("the server that brings the tasks' memory was ended (process " NAME ")\n");
		return -1;
	}
	if (report.pid) {
		pr_err("of the memory of task %d, %llu of %llu bytes could be brought: %s. With PHOS_FILL_THREADS=0 CRIU brings it\n",
		       report.pid, (unsigned long long)report.bytes, (unsigned long long)report.wanted,
		       report.error ? strerror(report.error) : "its image is cut off, or not understood");
		return -1;
	}
	pr_info("%llu bytes of the tasks' memory were brought in %.1f ms\n", (unsigned long long)report.bytes, report.seconds * 1e3);
	return 0;
}
