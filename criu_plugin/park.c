/*
 * A process of a pool is restored and must not run a single instruction of its own before somebody takes it. But the
 * driver's restore is carried out by a thread of the process. So here, where CRIU still holds every thread by ptrace, that
 * one thread is let go while phosd asks the driver, and caught again; then SIGSTOP is left for the process. Each thread
 * takes part in that stop when CRIU lets it go, before it returns to user mode.
 */
#include "phos_plugin.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>

#ifndef PTRACE_GETSIGMASK
#define PTRACE_GETSIGMASK 0x420a
#define PTRACE_SETSIGMASK 0x420b
#endif

#define KERNEL_SIGNALS 64 /* the size of the kernel's signal set; bits */

/* What waits for the process's threads is delivered once it is taken, and to whom the kernel chooses then. */
static int let_go(int thread, uint64_t *mask)
{
	uint64_t all = ~(1ull << (SIGTRAP - 1));

	if (ptrace(PTRACE_GETSIGMASK, thread, KERNEL_SIGNALS / 8, mask) ||
	    ptrace(PTRACE_SETSIGMASK, thread, KERNEL_SIGNALS / 8, &all)) {
		pr_err("the signals of thread %d cannot be blocked: %s\n", thread, strerror(errno));
		return -1;
	}
	/* CRIU suspends seccomp while it works; the thread's own calls go through its filter again. */
	if (ptrace(PTRACE_SETOPTIONS, thread, 0, 0) || ptrace(PTRACE_CONT, thread, 0, 0)) {
		pr_err("the driver's thread %d cannot be let go: %s\n", thread, strerror(errno));
		return -1;
	}
	return 0;
}

static int catch_again(int thread, const uint64_t *mask)
{
	int status;

	if (ptrace(PTRACE_INTERRUPT, thread, 0, 0)) {
		pr_err("the driver's thread %d cannot be stopped: %s\n", thread, strerror(errno));
		return -1;
	}
	while (waitpid(thread, &status, __WALL) < 0)
		if (errno != EINTR) {
			pr_err("the driver's thread %d does not stop: %s\n", thread, strerror(errno));
			return -1;
		}
	if (!WIFSTOPPED(status)) {
		pr_err("the driver's thread %d has ended\n", thread);
		return -1;
	}
	if (ptrace(PTRACE_SETSIGMASK, thread, KERNEL_SIGNALS / 8, mask)) {
		pr_err("the signals of thread %d cannot be put back: %s\n", thread, strerror(errno));
		return -1;
	}
	return 0;
}

int phos_park(int pid, int thread)
{
	uint64_t mask;
	int ret = 0;

	if (thread) {
		if (let_go(thread, &mask))
			return -1;
		ret = phos_link_task_runs(pid);
		if (catch_again(thread, &mask))
			ret = -1;
	}
	if (kill(pid, SIGSTOP)) {
		pr_err("process %d cannot be stopped: %s\n", pid, strerror(errno));
		ret = -1;
	}
	return ret;
}
