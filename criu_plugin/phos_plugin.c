/*
 * CRIU's hooks, and nothing else: each becomes one request to phosd (daemon_link.c), which does the work.
 *
 * When the hooks fire (CRIU 4.1.1, seize.c, cr-dump.c, cr-restore.c):
 *   init(DUMP), PAUSE_DEVICES(root)      every task of the tree still runs; phosd quiesces, detaches and checkpoints all
 *                                        GPU processes of the tree here; of those without the frontend it has the driver
 *                                        block further calls, and no more
 *   PAUSE_DEVICES(child)                 only after its parent has been frozen: nothing is left to do
 *   CHECKPOINT_DEVICES(pid)              the whole tree is frozen, and CRIU has not touched any task's memory yet: of
 *                                        processes without the frontend the driver's part is saved (driver_thread.c), when
 *                                        their threads have left the driver (leave_driver.c), then
 *                                        phosd begins to copy the task's memory
 *   HANDLE_DEVICE_VMA, DUMP_EXT_FILE     for each mapping and each file of a task that CRIU knows no way to dump: those of the
 *                                        GPU's device files are left out (device_files.c), no others
 *   exit(DUMP, result)                   tasks still frozen. If CRIU is going to kill them, phosd completes the image first;
 *                                        if they are to run on it answers at once, and the driver's part of those without
 *                                        the frontend is brought back. CRIU's exit closes the socket, and that tells phosd
 *                                        that the tasks are released or dead
 *   init(RESTORE)                        nothing exists yet: phosd may refuse the image or the GPUs. Whoever brings the
 *                                        tasks' memory in CRIU's place begins (fill_server.c)
 *   RESTORE_EXT_FILE                     what a task gets in place of such a file
 *   RESUME_DEVICES_LATE(pid)             every task exists and is stopped; its return value is ignored by CRIU. Of those
 *                                        without the frontend, and for a pool, the driver's part is brought back here; what
 *                                        is for a pool stays stopped
 */
#include "phos_plugin.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What CRIU exports to its plugins without declaring it in a header (4.1.1: net.c, files-reg.c, pstree.c, seize.c). */
extern void network_unlock(void) __attribute__((weak));
extern void delete_link_remaps(void) __attribute__((weak));
extern void pstree_switch_state(void *root, int state) __attribute__((weak));
extern void *root_item __attribute__((weak));
#define TASK_ALIVE 0x1

/* CRIU's main thread only. */
static bool pre_dump, saved;

/*
 * The image cannot be completed, and CRIU is about to kill the tasks for having dumped them. An exit hook returns nothing,
 * so end CRIU here, as it ends itself after a failure: tasks released, network unlocked, exit status 1. Should a later
 * CRIU not export these, its death releases the tasks as well.
 */
static __attribute__((noreturn)) void keep_tasks(void)
{
	pr_err("the image is not complete: the tasks are kept\n");
	if (network_unlock)
		network_unlock();
	if (delete_link_remaps)
		delete_link_remaps();
	if (pstree_switch_state && &root_item)
		pstree_switch_state(root_item, TASK_ALIVE);
	_exit(EXIT_FAILURE);
}

/*
 * A restored task lacks its memory, or would never get it, and CRIU does not heed what the last hook returns. None of the
 * tasks may run on: CRIU holds all of them by ptrace, and its end would let them go. phosd, if there is one, sees CRIU end
 * and does its part.
 */
static __attribute__((noreturn)) void end_restore(int pid)
{
	kill(pid, SIGKILL);
	phos_kill_traced();
	_exit(EXIT_FAILURE);
}

static int phos_plugin_init(int stage)
{
	bool named;

	switch (stage) {
	case CR_PLUGIN_STAGE__PRE_DUMP:
		pre_dump = true;
		return 0;
	case CR_PLUGIN_STAGE__RESTORE:
		/* Plain CRIU's images do not name us, nor do ours of before 4.1: phosd looks at the files as well. */
		named = check_and_remove_inventory_plugin &&
			check_and_remove_inventory_plugin(PHOS_INVENTORY_PREFIX, strlen(PHOS_INVENTORY_PREFIX));
		return phos_link_restore_begin(named) || phos_fill_begin() ? -1 : phos_wait_lazy_pages();
	default:
		return 0;
	}
}

static void phos_plugin_exit(int stage, int ret)
{
	bool kept;
	int failed;

	switch (stage) {
	case CR_PLUGIN_STAGE__DUMP:
		failed = phos_link_dump_end(ret, &kept);
		if (kept)
			(void)phos_let_run(PHOS_DUMP_ENDS); /* what fails phosd tries again once CRIU has ended */
		if (failed && !ret) /* whatever it says of a dump that failed */
			keep_tasks();
		break;
	case CR_PLUGIN_STAGE__RESTORE:
		phos_link_restore_end(ret);
		break;
	default:
		break;
	}
}

/*
 * CRIU gives itself --timeout seconds (10) to freeze the tree, and ends some seconds after its alarm. That is for what hangs
 * in freezing, such as a task in the middle of an execve() that waits for a thread which CRIU has seized. What phosd and the
 * driver take has limits of its own (daemon_link.c), and is not in those seconds.
 */
static int outside_the_alarm(int (*work)(int pid), int pid)
{
	unsigned int left_s = alarm(0);
	int ret = work(pid);

	alarm(left_s);
	return ret;
}

static int phos_plugin_pause_devices(int pid)
{
	if (pre_dump) /* memory only, and the tasks run on: nothing of the GPU is touched */
		return 0;
	return outside_the_alarm(phos_link_dump_begin, pid);
}

static int freeze_devices(int pid)
{
	if (!saved && phos_let_run(PHOS_DUMPED)) /* of all tasks, which stand still by now */
		return -1;
	saved = true;
	return phos_link_task_frozen(pid);
}

static int phos_plugin_checkpoint_devices(int pid)
{
	if (pre_dump)
		return 0;
	return outside_the_alarm(freeze_devices, pid);
}

static int phos_plugin_dump_ext_file(int fd, int id)
{
	(void)id; /* all are restored alike */
	return phos_dump_device_file(fd);
}

static int phos_plugin_restore_ext_file(int id)
{
	(void)id;
	return phos_restore_device_file();
}

static int phos_plugin_handle_device_vma(int fd, const struct stat *stat)
{
	(void)stat;
	return phos_leave_out_mapping(fd);
}

static int phos_plugin_resume_devices_late(int pid)
{
	bool park;
	int ret;

	phos_wait_lazy_fill();
	if (phos_fill_end())
		end_restore(pid);
	if (phos_link_task_restored(pid, &park))
		end_restore(pid);
	if ((ret = phos_let_run(PHOS_RESTORED)) && !park)
		end_restore(pid);
	/* Each thread takes part in that stop when CRIU lets it go, before it returns to user mode. */
	if (park && kill(pid, SIGSTOP)) {
		pr_err("process %d cannot be stopped: %s\n", pid, strerror(errno));
		return -1;
	}
	return ret;
}

/* CRIU refuses a plugin that knows more hooks than itself: register up to CHECKPOINT_DEVICES (11) of CRIU 4.1, never more. */
__attribute__((visibility("default"))) cr_plugin_desc_t CR_PLUGIN_DESC = {
	.name = "phos_plugin",
	.init = phos_plugin_init,
	.exit = phos_plugin_exit,
	.version = CRIU_PLUGIN_VERSION,
	.max_hooks = CR_PLUGIN_HOOK__CHECKPOINT_DEVICES + 1,
	.hooks = {
		[CR_PLUGIN_HOOK__DUMP_EXT_FILE] = (void *)phos_plugin_dump_ext_file,
		[CR_PLUGIN_HOOK__RESTORE_EXT_FILE] = (void *)phos_plugin_restore_ext_file,
		[CR_PLUGIN_HOOK__HANDLE_DEVICE_VMA] = (void *)phos_plugin_handle_device_vma,
		[CR_PLUGIN_HOOK__PAUSE_DEVICES] = (void *)phos_plugin_pause_devices,
		[CR_PLUGIN_HOOK__CHECKPOINT_DEVICES] = (void *)phos_plugin_checkpoint_devices,
		[CR_PLUGIN_HOOK__RESUME_DEVICES_LATE] = (void *)phos_plugin_resume_devices_late,
	},
};
