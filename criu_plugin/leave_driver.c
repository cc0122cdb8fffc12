/*
 * Threads that CRIU has stopped inside the driver may hold its locks. The driver's own thread, which is to save the process
 * or to bring it back while all others stand still, would wait for them for ever (docs/design-notes.md). The driver's lock
 * (cuCheckpointProcessLock) does not hold back those that ask for the state of a stream or an event. So each of them goes on,
 * while the driver has only locked the process, until it has returned from the driver, and not one instruction further: it
 * goes on step by step. Nothing else would keep it from ending, or from starting a thread that CRIU does not know.
 *
 * Not seen: a thread that the driver has called other code with, neither libc's nor its own (a preloaded malloc()), and that
 * is stopped there.
 */
#include "code_map.h"
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
#define OUTSIDE_NS 200000000  /* for one that is not seen in the driver: its stack may only look like it; at least */
#define OUTSIDE_STEPS 1000    /* it takes so many, however long they take under load */
#define SLEEPS_NS 20000000    /* what sleeps for so long, while all others do, is taken for one that no other can wake */
#define STACK_BYTES (1 << 16) /* in the first of which a caller's address is looked for */
#define SPINS_NS 50000	      /* for a step, if there is a processor for it: asleep for each, one takes many times as long */
#define WAIT_NS 1000000	      /* for a step that takes longer */
#define RETURNS_NS 50000000   /* for the return from the vDSO */
#define BREAKPOINTS 4	      /* the processor's */
#define SIGNALS 8	      /* that are kept for a thread */

struct walker {
	int thread;
	enum code code;
	uint64_t sp, driver_sp;	 /* driver_sp: where it was last seen in the driver */
	uint64_t returns;	 /* since when it goes on to a breakpoint; 0: it does not */
	int fault;		 /* a signal that its own next instruction makes; it can go no further */
	siginfo_t kept[SIGNALS]; /* signals that came from elsewhere, for afterwards */
	size_t kept_count, steps_outside;
	bool walks, steps, was_in_driver;
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
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
		if (phos_code_at(map, words[i]) == DRIVER)
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
		const struct range *range = phos_range_at(map, words[i]);

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

/*
 * A system call that would end the thread, start another, or block signals (the trap of a step must not be): its instruction
 * comes next, or, if it was interrupted, once more.
 */
static bool is_about_to_leave(const struct walker *walker, const struct user_regs_struct *regs)
{
	bool again = (long)regs->orig_rax >= 0 && (long)regs->rax <= -512 && (long)regs->rax >= -516; /* ERESTART... */

	switch (again ? regs->orig_rax : regs->rax) {
	case SYS_exit:
	case SYS_exit_group:
	case SYS_clone:
	case SYS_clone3:
	case SYS_fork:
	case SYS_vfork:
	case SYS_execve:
	case SYS_execveat:
	case SYS_rt_sigprocmask:
	case SYS_rt_sigreturn:
		errno = 0;
		return again || ((ptrace(PTRACE_PEEKTEXT, walker->thread, regs->rip, 0) & 0xffff) == 0x050f && !errno);
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

/* Whether it is in code of the driver's or of libc no more, and what it is in was not called from there either. */
static bool is_out(const struct walker *walker, enum code before, uint64_t sp)
{
	if (walker->code != ELSEWHERE)
		return false;
	if (walker->was_in_driver) /* which may have called what is elsewhere */
		return walker->sp > walker->driver_sp;
	return before != ELSEWHERE && walker->sp > sp; /* a return */
}

/*
 * 1: it has taken a step more; 0: it is to stay where it is. Where the processor can, a step in the driver ends at the next
 * branch that is taken.
 */
static int step(int pid, struct walker *walker, const struct code_map *map)
{
	struct user_regs_struct regs;
	enum code before = walker->code;
	uint64_t sp = walker->sp;

	if (read_regs(walker, &regs))
		return -1;
	walker->code = phos_code_at(map, regs.rip);
	walker->sp = regs.rsp;
	if (walker->code == DRIVER) {
		walker->was_in_driver = true;
		walker->driver_sp = regs.rsp;
	}
	if (is_out(walker, before, sp) || is_about_to_leave(walker, &regs))
		return 0;
	if (walker->code == VDSO && return_from_vdso(pid, walker, map))
		return 1;
	if ((walker->code != DRIVER || ptrace(PTRACE_SINGLEBLOCK, walker->thread, 0, 0)) &&
	    ptrace(PTRACE_SINGLESTEP, walker->thread, 0, 0)) {
		pr_err("thread %d cannot go on by a step: %s\n", walker->thread, strerror(errno));
		return -1;
	}
	walker->steps = true;
	walker->steps_outside += !walker->was_in_driver;
	return 1;
}

/* Sends the signals that were kept from a thread once more. */
static void send_again(int pid, struct walker *walker)
{
	for (size_t i = 0; i < walker->kept_count; i++) {
		int signal = walker->kept[i].si_signo;

		/* The kernel lets nobody make up what only it says, or what kill() does. */
		if (syscall(SYS_rt_tgsigqueueinfo, pid, walker->thread, signal, &walker->kept[i]) &&
		    syscall(SYS_tgkill, pid, walker->thread, signal))
			pr_warn("signal %d of thread %d is lost: %s\n", signal, walker->thread, strerror(errno));
	}
	walker->kept_count = 0;
}

/* A stop for another reason than a step, or our interruption: a signal. */
static void keep_signal(struct walker *walker, int signal)
{
	siginfo_t *kept = &walker->kept[walker->kept_count];

	switch (signal) {
	case SIGSEGV:
	case SIGBUS:
	case SIGFPE:
	case SIGILL:
		walker->fault = signal;
		return;
	default:
		if (walker->kept_count == SIGNALS) {
			pr_warn("signal %d of thread %d is lost: others came before it\n", signal, walker->thread);
			return;
		}
		if (ptrace(PTRACE_GETSIGINFO, walker->thread, 0, kept))
			*kept = (siginfo_t){ .si_code = SI_USER };
		kept->si_signo = signal;
		walker->kept_count++;
	}
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
	if (status >> 16 != PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP)
		keep_signal(walker, WSTOPSIG(status));
	return 1;
}

/* Not those that have only not been given a processor. */
static bool all_asleep(const struct walker *walkers, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (walkers[i].walks && phos_state_of(walkers[i].thread) != 'S')
			return false;
	return true;
}

static bool any_ended(const struct walker *walkers, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (walkers[i].walks && phos_has_ended(walkers[i].thread))
			return true;
	return false;
}

/* Asleep: under load whoever has slept is given a processor sooner. */
static void await_stop(void)
{
	const struct timespec wait = { .tv_nsec = WAIT_NS };
	sigset_t children;

	sigemptyset(&children);
	sigaddset(&children, SIGCHLD);
	sigtimedwait(&children, NULL, &wait);
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

/*
 * Leaves it as CRIU has stopped it: at the stop that PTRACE_INTERRUPT makes, not at a step's, and without a step's trap. The
 * first thread of a process that was killed can be waited for only when all others have been, so nobody waits for it for ever.
 */
static int stop_again(int pid, struct walker *walker)
{
	bool runs = walker->steps, interrupted = false;
	pid_t found;
	int status;

	walker->walks = walker->steps = false;
	for (;;) {
		/* A thread that is let go from a trap, or has one before it, comes to the next stop before it does anything else. */
		if ((!interrupted && ptrace(PTRACE_INTERRUPT, walker->thread, 0, 0)) ||
		    (!runs && ptrace(PTRACE_CONT, walker->thread, 0, walker->fault)))
			break;
		walker->fault = 0;
		while (!(found = waitpid(walker->thread, &status, __WALL | WNOHANG)) || (found < 0 && errno == EINTR)) {
			if (phos_has_ended(walker->thread))
				goto ended;
			await_stop();
		}
		if (found < 0 || !WIFSTOPPED(status))
			goto ended;
		runs = false;
		clear_breakpoints(walker);
		interrupted = status >> 16 == PTRACE_EVENT_STOP;
		if (!interrupted && WSTOPSIG(status) != SIGTRAP)
			keep_signal(walker, WSTOPSIG(status));
		if (interrupted && !trap_waits(walker)) {
			send_again(pid, walker);
			return 0;
		}
	}
	pr_err("thread %d cannot be stopped where it has left the driver: %s\n", walker->thread, strerror(errno));
	return -1;
ended:
	pr_err("thread %d has ended while it was to leave the driver\n", walker->thread);
	return -1;
}

/* Whether a stopped thread may be inside the driver; then it is to go on. */
static int begin(int pid, struct walker *walker, const struct code_map *map)
{
	struct user_regs_struct regs;
	uint64_t blocked;

	if (!phos_is_traced(walker->thread))
		return 0;
	if (read_regs(walker, &regs))
		return -1;
	walker->code = phos_code_at(map, regs.rip);
	walker->sp = regs.rsp;
	if (walker->code == ELSEWHERE || (walker->code != DRIVER && !driver_on_stack(pid, map, regs.rsp)))
		return 0;
	if (ptrace(PTRACE_GETSIGMASK, walker->thread, sizeof(blocked), &blocked)) {
		pr_err("the signals that thread %d blocks cannot be read: %s\n", walker->thread, strerror(errno));
		return -1;
	}
	walker->walks = !(blocked & 1ull << (SIGTRAP - 1)); /* the kernel would unblock it, and forget its handler */
	return 0;
}

/* One thread on. Whether it walks still, or -1. */
static int walk_one(int pid, struct walker *walker, const struct code_map *map, uint64_t began, uint64_t now, uint64_t *last)
{
	int moved = walker->steps ? has_stepped(walker) : 1;

	if (moved > 0) {
		*last = now;
		moved = walker->fault ? 0 : step(pid, walker, map);
		if (!moved)
			return stop_again(pid, walker);
	} else if (!moved && walker->returns && now - walker->returns > RETURNS_NS) {
		ptrace(PTRACE_INTERRUPT, walker->thread, 0, 0); /* it does not come by there */
	}
	if (moved < 0) {
		walker->walks = false;
		return -1;
	}
	if (!walker->was_in_driver && walker->steps_outside > OUTSIDE_STEPS && now - began > OUTSIDE_NS)
		return stop_again(pid, walker);
	return 1;
}

/* All at once: one may wait for what another holds. */
static int walk(int pid, struct walker *walkers, size_t count, const struct code_map *map)
{
	uint64_t began = now_ns(), last = began, now = began;
	size_t walking = count;
	int ret = 0;

	while (walking && !ret && now - began < SECONDS_MOST * 1000000000ull) {
		if (now - last > SLEEPS_NS) {
			if (all_asleep(walkers, count) || any_ended(walkers, count))
				break; /* stop_again() says so of one that has ended */
			last = now;
		}
		walking = 0;
		for (size_t i = 0; i < count; i++) {
			if (!walkers[i].walks)
				continue;
			if (walk_one(pid, &walkers[i], map, began, now, &last) < 0)
				ret = -1;
			walking += walkers[i].walks;
		}
		now = now_ns();
		if (walking && now - last > SPINS_NS)
			await_stop();
	}
	if (walking && now - began >= SECONDS_MOST * 1000000000ull) {
		pr_err("threads of process %d do not leave the driver within %d s; it could not be saved. Try again, or start it "
		       "under 'phos-gpu run'\n",
		       pid, SECONDS_MOST);
		ret = -1; /* all run on, and nothing has happened */
	}
	for (size_t i = 0; i < count; i++)
		if (walkers[i].walks && stop_again(pid, &walkers[i]))
			ret = -1;
	return ret;
}

/*
 * A thread that comes to a stop sends SIGCHLD, whatever CRIU does with it else. No signal is to end CRIU meanwhile: the kernel
 * would let threads go in the middle of a step, and its trap kills a process that nobody traces.
 */
static int walk_undisturbed(int pid, struct walker *walkers, size_t count, const struct code_map *map)
{
	const struct sigaction heard = { .sa_handler = SIG_DFL };
	const struct timespec at_once = { 0 };
	struct sigaction before;
	sigset_t all, children, mask;
	int ret;

	sigfillset(&all);
	sigemptyset(&children);
	sigaddset(&children, SIGCHLD);
	if (sigprocmask(SIG_BLOCK, &all, &mask) || sigaction(SIGCHLD, &heard, &before)) {
		pr_err("CRIU cannot wait for threads: %s\n", strerror(errno));
		return -1;
	}
	ret = walk(pid, walkers, count, map);
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

	if (phos_read_code(pid, &map))
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
	if (count && !ret)
		ret = walk_undisturbed(pid, walkers, count, &map);
out:
	free(walkers);
	phos_free_code(&map);
	return ret;
}
