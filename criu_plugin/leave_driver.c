/*
 * Threads that CRIU has stopped inside the driver may hold its locks. The driver's own thread, which is to save the process
 * or to bring it back while all others stand still, would wait for them for ever (docs/design-notes.md). The driver's lock
 * (cuCheckpointProcessLock) does not hold back those that ask for the state of a stream or an event. So each of them goes on,
 * while the driver has only locked the process, until it has returned from the driver, and not one instruction further: it
 * goes on step by step. Nothing else would keep it from ending, or from starting a thread that CRIU does not know.
 */
#include "phos_plugin.h"

#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>

#define SECONDS_MOST 10	      /* for all threads of a process; a thread that makes a stream of its own needs the most */
#define STEPS_IN_LIBC 50000   /* of one that is in no driver at all: its stack may only look like it */
#define SLEEPS_NS 20000000    /* what sleeps for so long while all others do waits for no work of theirs, nor of the GPU's */
#define STACK_BYTES (1 << 16) /* in the first of which a caller's address is looked for */
#define WAIT_NS 1000000	      /* for a step */
#define RETURNS_NS 50000000   /* for the return from the vDSO */
#define BREAKPOINTS 4	      /* the processor's */

enum code { ELSEWHERE, VDSO, LIBC, DRIVER };

struct range {
	uint64_t begin, end;
	enum code code;
};

struct code_map {
	struct range *ranges;
	size_t count;
};

struct walker {
	int thread;
	uint64_t mask; /* of signals that it blocks by itself */
	enum code code;
	uint64_t sp;
	unsigned long steps_in_libc;
	uint64_t returns; /* since when it goes on to a breakpoint; 0: it does not */
	bool walks, steps, was_in_driver;
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static bool begins(const char *name, const char *with)
{
	return !strncmp(name, with, strlen(with));
}

static enum code code_of(const char *file)
{
	static const char *const libc[] = { "libc.so", "ld-linux", "libpthread.so", "libdl.so", "libm.so", "librt.so" };
	const char *slash = strrchr(file, '/'), *name = slash ? slash + 1 : file;

	if (begins(name, "libcuda.so") || begins(name, "libnvidia-"))
		return DRIVER;
	if (!strcmp(name, "[vdso]"))
		return VDSO;
	for (size_t i = 0; i < sizeof(libc) / sizeof(*libc); i++)
		if (begins(name, libc[i]))
			return LIBC;
	return ELSEWHERE;
}

/* All code of a process. */
static int read_code(int pid, struct code_map *map)
{
	unsigned long begin, end;
	char path[32], file[256], *line = NULL;
	size_t size = 0;
	FILE *maps;

	*map = (struct code_map){ 0 };
	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps) {
		pr_err("%s cannot be read: %s\n", path, strerror(errno));
		return -1;
	}
	while (getline(&line, &size, maps) > 0) {
		struct range *grown;
		char access[8];

		*file = 0; /* no name follows: code that was made while the program runs */
		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %255s", &begin, &end, access, file) < 3 || access[2] != 'x')
			continue;
		grown = realloc(map->ranges, (map->count + 1) * sizeof(*grown));
		if (!grown) {
			pr_err("no memory to note where the code of process %d lies\n", pid);
			free(line);
			fclose(maps);
			return -1;
		}
		map->ranges = grown;
		map->ranges[map->count++] = (struct range){ .begin = begin, .end = end, .code = code_of(file) };
	}
	free(line);
	fclose(maps);
	return 0;
}

static const struct range *range_at(const struct code_map *map, uint64_t address)
{
	size_t low = 0, high = map->count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (map->ranges[middle].end <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low < map->count && map->ranges[low].begin <= address ? &map->ranges[low] : NULL;
}

static enum code code_at(const struct code_map *map, uint64_t address)
{
	const struct range *range = range_at(map, address);

	return range ? range->code : ELSEWHERE;
}

static size_t read_stack(int pid, uint64_t sp, uint64_t *words, size_t count)
{
	struct iovec here = { words, count * sizeof(*words) }, there = { (void *)(uintptr_t)(sp & ~7ull), here.iov_len };
	ssize_t bytes = process_vm_readv(pid, &here, 1, &there, 1, 0);

	return bytes < 0 ? 0 : (size_t)bytes / sizeof(*words);
}

/* Whether an address of the driver's code lies on the stack: as what returns to it, or left there by a call that is over. */
static bool driver_on_stack(int pid, const struct code_map *map, uint64_t sp)
{
	static uint64_t words[STACK_BYTES / sizeof(uint64_t)]; /* CRIU's main thread only */
	size_t count = read_stack(pid, sp, words, sizeof(words) / sizeof(*words));

	for (size_t i = 0; i < count; i++)
		if (code_at(map, words[i]) == DRIVER)
			return true;
	return false;
}

static int set_debug(int thread, unsigned which, uint64_t value)
{
	return ptrace(PTRACE_POKEUSER, thread, offsetof(struct user, u_debugreg) + which * sizeof(uint64_t), value) ? -1 : 0;
}

/*
 * What reads the clock in the vDSO begins anew whenever the clock has gone on, so step by step it may never get through. Its
 * frames are small: it returns to one of the first words on the stack that are addresses of other code. False: it cannot.
 */
static bool return_from_vdso(int pid, struct walker *walker, const struct code_map *map)
{
	uint64_t words[64], enabled = 0;
	size_t count = read_stack(pid, walker->sp, words, sizeof(words) / sizeof(*words));
	unsigned set = 0;

	for (size_t i = 0; i < count && set < BREAKPOINTS; i++) {
		const struct range *range = range_at(map, words[i]);

		if (!range || range->code == VDSO)
			continue;
		if (set_debug(walker->thread, set, words[i]))
			return false;
		enabled |= 1ull << (2 * set++); /* for this thread; where an instruction begins */
	}
	if (!set || set_debug(walker->thread, 7, enabled) || ptrace(PTRACE_CONT, walker->thread, 0, 0))
		return false;
	walker->returns = now_ns();
	walker->steps = true;
	return true;
}

static void clear_breakpoints(struct walker *walker)
{
	if (walker->returns && set_debug(walker->thread, 7, 0))
		pr_warn("breakpoints are left in thread %d: %s\n", walker->thread, strerror(errno));
	walker->returns = 0;
}

/* A system call that would end the thread, or start another; the instruction that makes it comes next. */
static bool is_about_to_leave(const struct walker *walker, const struct user_regs_struct *regs)
{
	switch (regs->rax) {
	case SYS_exit:
	case SYS_exit_group:
	case SYS_clone:
	case SYS_clone3:
	case SYS_fork:
	case SYS_vfork:
	case SYS_execve:
	case SYS_execveat:
		errno = 0;
		return (ptrace(PTRACE_PEEKTEXT, walker->thread, regs->rip, 0) & 0xffff) == 0x050f && !errno;
	default:
		return false;
	}
}

static int read_regs(const struct walker *walker, struct user_regs_struct *regs)
{
	struct iovec to = { regs, sizeof(*regs) };

	if (ptrace(PTRACE_GETREGSET, walker->thread, NT_PRSTATUS, &to)) {
		pr_err("the registers of thread %d cannot be read: %s\n", walker->thread, strerror(errno));
		return -1;
	}
	return 0;
}

/* 1: it has taken a step more; 0: it is to stay where it is. A step in the driver ends at the next branch that is taken. */
static int step(int pid, struct walker *walker, const struct code_map *map)
{
	struct user_regs_struct regs;
	enum code before = walker->code;
	uint64_t sp = walker->sp;

	if (read_regs(walker, &regs))
		return -1;
	walker->code = code_at(map, regs.rip);
	walker->sp = regs.rsp;
	walker->was_in_driver |= walker->code == DRIVER;
	/* The driver may call what is elsewhere: another malloc(), say. Only a return raises the stack's pointer. */
	if (walker->code == ELSEWHERE && before != ELSEWHERE && (before != DRIVER || walker->sp > sp))
		return 0;
	if (walker->code == VDSO && return_from_vdso(pid, walker, map))
		return 1;
	if (!walker->was_in_driver && ++walker->steps_in_libc > STEPS_IN_LIBC)
		return 0;
	if (is_about_to_leave(walker, &regs))
		return 0;
	if ((walker->code != DRIVER || ptrace(PTRACE_SINGLEBLOCK, walker->thread, 0, 0)) &&
	    ptrace(PTRACE_SINGLESTEP, walker->thread, 0, 0)) {
		pr_err("thread %d cannot go on by a step: %s\n", walker->thread, strerror(errno));
		return -1;
	}
	walker->steps = true;
	return 1;
}

/* Whether it has ended its step, and stands still. */
static int has_stepped(struct walker *walker)
{
	int status;
	pid_t found = waitpid(walker->thread, &status, __WALL | WNOHANG);

	if (!found || (found < 0 && errno == EINTR))
		return 0;
	walker->steps = false;
	if (found < 0 || !WIFSTOPPED(status)) {
		pr_err("thread %d has ended while it was to leave the driver\n", walker->thread);
		return -1;
	}
	clear_breakpoints(walker);
	return 1;
}

/* Not one that has only not been given a processor. */
static bool is_asleep(int thread)
{
	char path[32], text[512], *end;
	FILE *file;
	size_t size;

	snprintf(path, sizeof(path), "/proc/%d/stat", thread);
	file = fopen(path, "re");
	if (!file)
		return false;
	size = fread(text, 1, sizeof(text) - 1, file);
	fclose(file);
	text[size] = 0;
	end = strrchr(text, ')'); /* the name before it may hold anything */
	return end && end[1] == ' ' && end[2] == 'S';
}

static bool all_asleep(const struct walker *walkers, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (walkers[i].walks && !is_asleep(walkers[i].thread))
			return false;
	return true;
}

/* Whether a step's trap waits for the thread: a system call that was interrupted in a step leaves one behind. */
static bool trap_waits(const struct walker *walker)
{
	siginfo_t signals[8];
	struct __ptrace_peeksiginfo_args from = { .nr = sizeof(signals) / sizeof(*signals) };
	long count;

	while ((count = ptrace(PTRACE_PEEKSIGINFO, walker->thread, &from, signals)) > 0) {
		for (long i = 0; i < count; i++)
			if (signals[i].si_signo == SIGTRAP && signals[i].si_code > 0)
				return true;
		from.off += (uint64_t)count;
	}
	return false;
}

/* Leaves it as CRIU has stopped it: at the stop that PTRACE_INTERRUPT makes, not at a step's, and without a step's trap. */
static int stop_again(struct walker *walker)
{
	bool runs = walker->steps, interrupted = false;
	int status;

	walker->walks = walker->steps = false;
	for (;;) {
		/* A thread that is let go from a trap, or has one before it, comes to the next stop before it does anything else. */
		if ((!interrupted && ptrace(PTRACE_INTERRUPT, walker->thread, 0, 0)) ||
		    (!runs && ptrace(PTRACE_CONT, walker->thread, 0, 0)))
			break;
		while (waitpid(walker->thread, &status, __WALL) < 0)
			if (errno != EINTR)
				goto failed;
		if (!WIFSTOPPED(status)) {
			pr_err("thread %d has ended while it was to leave the driver\n", walker->thread);
			return -1;
		}
		runs = false;
		clear_breakpoints(walker);
		interrupted = status >> 16 == PTRACE_EVENT_STOP;
		if (interrupted && !trap_waits(walker)) {
			if (ptrace(PTRACE_SETSIGMASK, walker->thread, sizeof(walker->mask), &walker->mask))
				break;
			return 0;
		}
	}
failed:
	pr_err("thread %d cannot be stopped where it has left the driver: %s\n", walker->thread, strerror(errno));
	return -1;
}

/* Whether a stopped thread may be inside the driver; then it may go on, without any signal. */
static int begin(int pid, struct walker *walker, const struct code_map *map)
{
	uint64_t all = ~(1ull << (SIGTRAP - 1));
	struct user_regs_struct regs;

	if (!phos_is_traced(walker->thread))
		return 0;
	if (read_regs(walker, &regs))
		return -1;
	walker->code = code_at(map, regs.rip);
	walker->sp = regs.rsp;
	if (walker->code == ELSEWHERE || (walker->code == LIBC && !driver_on_stack(pid, map, regs.rsp)))
		return 0;
	if (ptrace(PTRACE_GETSIGMASK, walker->thread, sizeof(walker->mask), &walker->mask) ||
	    ptrace(PTRACE_SETSIGMASK, walker->thread, sizeof(all), &all)) {
		pr_err("the signals of thread %d cannot be blocked: %s\n", walker->thread, strerror(errno));
		return -1;
	}
	walker->walks = true;
	return 0;
}

/* All at once: one may wait for what another holds. Whoever sleeps when all the others are out holds nothing. */
static int walk(int pid, struct walker *walkers, size_t count, const struct code_map *map, const sigset_t *children)
{
	uint64_t began = now_ns(), last = began, now = began;
	const struct timespec wait = { .tv_nsec = WAIT_NS };
	size_t walking = count;
	int ret = 0, moved;

	while (walking && !ret && now - began < SECONDS_MOST * 1000000000ull) {
		if (now - last > SLEEPS_NS) {
			if (all_asleep(walkers, count))
				break;
			last = now;
		}
		walking = 0;
		for (size_t i = 0; i < count; i++) {
			struct walker *walker = &walkers[i];

			if (!walker->walks)
				continue;
			moved = walker->steps ? has_stepped(walker) : 1;
			if (walker->returns && now - walker->returns > RETURNS_NS) /* it does not come by there */
				ptrace(PTRACE_INTERRUPT, walker->thread, 0, 0);
			if (moved > 0) {
				last = now;
				moved = step(pid, walker, map);
				if (!moved)
					moved = stop_again(walker);
			}
			if (moved < 0) {
				walker->walks = false;
				ret = -1;
			}
			walking += walker->walks;
		}
		/* Asleep, not busy: whoever has slept is given a processor sooner, and so each step takes less long. */
		if (walking)
			sigtimedwait(children, NULL, &wait);
		now = now_ns();
	}
	if (walking && now - began >= SECONDS_MOST * 1000000000ull) {
		pr_err("threads of process %d do not leave the driver within %d s; it could not be saved. Try again, or start it "
		       "under 'phos-gpu run'\n",
		       pid, SECONDS_MOST);
		ret = -1; /* all run on, and nothing has happened */
	}
	for (size_t i = 0; i < count; i++)
		if (walkers[i].walks && stop_again(&walkers[i]))
			ret = -1;
	return ret;
}

/* A thread that comes to a stop sends a signal, whatever CRIU does with it else. */
static int hear_children(int pid, struct walker *walkers, size_t count, const struct code_map *map)
{
	const struct sigaction heard = { .sa_handler = SIG_DFL };
	const struct timespec at_once = { 0 };
	struct sigaction before;
	sigset_t children, mask;
	int ret;

	sigemptyset(&children);
	sigaddset(&children, SIGCHLD);
	if (sigprocmask(SIG_BLOCK, &children, &mask) || sigaction(SIGCHLD, &heard, &before)) {
		pr_err("CRIU cannot wait for threads: %s\n", strerror(errno));
		return -1;
	}
	ret = walk(pid, walkers, count, map, &children);
	while (sigtimedwait(&children, NULL, &at_once) == SIGCHLD)
		;
	sigaction(SIGCHLD, &before, NULL);
	sigprocmask(SIG_SETMASK, &mask, NULL);
	return ret;
}

int phos_leave_driver(int pid, int driver_thread)
{
	struct walker *walkers = NULL;
	struct code_map map;
	struct dirent *entry;
	size_t count = 0;
	char path[32];
	int ret = -1;
	DIR *tasks;

	if (read_code(pid, &map))
		goto out;
	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	tasks = opendir(path);
	if (!tasks) {
		pr_err("%s cannot be read: %s\n", path, strerror(errno));
		goto out;
	}
	ret = 0;
	while (!ret && (entry = readdir(tasks))) {
		int thread = atoi(entry->d_name);
		struct walker *grown;

		if (thread <= 0 || thread == driver_thread)
			continue;
		grown = realloc(walkers, (count + 1) * sizeof(*grown));
		if (!grown) {
			pr_err("no memory to note the threads of process %d\n", pid);
			ret = -1;
			break;
		}
		walkers = grown;
		walkers[count] = (struct walker){ .thread = thread };
		ret = begin(pid, &walkers[count], &map);
		count += walkers[count].walks;
	}
	closedir(tasks);
	if (count && hear_children(pid, walkers, count, &map)) /* what was begun has to be stopped again in any case */
		ret = -1;
out:
	free(walkers);
	free(map.ranges);
	return ret;
}
