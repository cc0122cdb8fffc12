/*
 * The driver's part of tasks that stand still. One thread of each carries that out, and none of its own may run while it is
 * away: a call that asks for a stream's or an event's state crashes then, and in a pool nothing may run before somebody takes
 * the process. So here, where CRIU holds every thread by ptrace, those are let go while phosd asks the driver, and caught
 * again.
 */
#include "phos_plugin.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>

#define KERNEL_SIGNALS 64 /* the size of the kernel's signal set; bits */

/* A signal that waits for the process is delivered when all of it runs, and to whom the kernel chooses then. */
static int let_go(struct phos_alone *task, enum phos_stage stage)
{
	uint64_t all = ~(1ull << (SIGTRAP - 1));

	if (!phos_is_traced(task->thread)) {
		pr_err("thread %d of process %d, the driver's, is none that CRIU holds\n", task->thread, task->pid);
		return -1;
	}
	if (ptrace(PTRACE_GETSIGMASK, task->thread, KERNEL_SIGNALS / 8, &task->mask) ||
	    ptrace(PTRACE_SETSIGMASK, task->thread, KERNEL_SIGNALS / 8, &all)) {
		pr_err("the signals of thread %d cannot be blocked: %s\n", task->thread, strerror(errno));
		return -1;
	}
	/*
	 * CRIU suspends seccomp while it works. Of a restored task it is done with that, and the thread's own calls go through
	 * its filter again; of one that is dumped it has yet to work.
	 */
	if ((stage == PHOS_RESTORED && ptrace(PTRACE_SETOPTIONS, task->thread, 0, 0)) ||
	    ptrace(PTRACE_CONT, task->thread, 0, 0)) {
		pr_err("the driver's thread %d cannot be let go: %s\n", task->thread, strerror(errno));
		ptrace(PTRACE_SETSIGMASK, task->thread, KERNEL_SIGNALS / 8, &task->mask);
		return -1;
	}
	task->runs = true;
	return 0;
}

static int catch_again(struct phos_alone *task)
{
	int status;

	task->runs = false;
	if (ptrace(PTRACE_INTERRUPT, task->thread, 0, 0)) {
		pr_err("the driver's thread %d cannot be stopped: %s\n", task->thread, strerror(errno));
		return -1;
	}
	while (waitpid(task->thread, &status, __WALL) < 0)
		if (errno != EINTR) {
			pr_err("the driver's thread %d does not stop: %s\n", task->thread, strerror(errno));
			return -1;
		}
	if (!WIFSTOPPED(status)) {
		pr_err("the driver's thread %d has ended\n", task->thread);
		return -1;
	}
	if (ptrace(PTRACE_SETSIGMASK, task->thread, KERNEL_SIGNALS / 8, &task->mask)) {
		pr_err("the signals of thread %d cannot be put back: %s\n", task->thread, strerror(errno));
		return -1;
	}
	return 0;
}

int phos_let_run(enum phos_stage stage)
{
	struct phos_alone *tasks;
	size_t count = phos_link_alone(&tasks);
	int ret = 0;

	if (!count)
		return 0;
	for (size_t i = 0; stage == PHOS_DUMPED && i < count; i++) /* nothing is away yet */
		if (phos_leave_driver(tasks[i].pid, tasks[i].thread))
			return -1;
	for (size_t i = 0; i < count; i++)
		/* A dump may end before CRIU held them, and all of their threads run. */
		if ((stage != PHOS_DUMP_ENDS || phos_is_traced(tasks[i].thread)) && let_go(&tasks[i], stage))
			ret = -1;
	if (!ret || stage == PHOS_DUMP_ENDS)
		ret = phos_link_task_runs(stage) ? -1 : ret;
	for (size_t i = 0; i < count; i++)
		if (tasks[i].runs && catch_again(&tasks[i]))
			ret = -1;
	return ret;
}
