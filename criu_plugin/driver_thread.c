/*
 * The driver's part of a task that stands still. One of its threads carries that out, and none of its own may run while it is
 * away: a call that asks for a stream's or an event's state crashes then, and in a pool nothing may run before somebody takes
 * the process. So here, where CRIU holds every thread by ptrace, that one thread is let go while phosd asks the driver, and
 * caught again.
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

/* A signal that waits for the process is delivered when all of it runs, and to whom the kernel chooses then. */
static int let_go(int thread, uint64_t *mask, enum phos_stage stage)
{
	uint64_t all = ~(1ull << (SIGTRAP - 1));

	if (ptrace(PTRACE_GETSIGMASK, thread, KERNEL_SIGNALS / 8, mask) ||
	    ptrace(PTRACE_SETSIGMASK, thread, KERNEL_SIGNALS / 8, &all)) {
		pr_err("the signals of thread %d cannot be blocked: %s\n", thread, strerror(errno));
		return -1;
	}
	/*
	 * CRIU suspends seccomp while it works. Of a restored task it is done with that, and the thread's own calls go through
	 * its filter again; of one that is dumped it has yet to work.
	 */
	if ((stage == PHOS_RESTORED && ptrace(PTRACE_SETOPTIONS, thread, 0, 0)) || ptrace(PTRACE_CONT, thread, 0, 0)) {
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

int phos_let_run(int pid, int thread, enum phos_stage stage)
{
	uint64_t mask;
	int ret;

	if (!phos_is_traced(thread)) /* CRIU failed before it held the task, all of which runs */
		return phos_link_task_runs(pid, stage);
	if (let_go(thread, &mask, stage))
		return -1;
	ret = phos_link_task_runs(pid, stage);
	return catch_again(thread, &mask) ? -1 : ret;
}
