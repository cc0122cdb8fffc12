/*
 * CRIU's hooks, and nothing else: each becomes one request to phosd (daemon_link.c), which does the work.
 *
 * When the hooks fire (CRIU 4.1.1, seize.c, cr-dump.c, cr-restore.c):
 *   init(DUMP), PAUSE_DEVICES(root)      every task of the tree still runs; phosd quiesces, detaches and checkpoints all
 *                                        GPU processes of the tree here
 *   PAUSE_DEVICES(child)                 only after its parent has been frozen: nothing is left to do
 *   exit(DUMP, result)                   tasks still frozen; phosd must not be waited for. CRIU's exit closes the socket,
 *                                        and that tells phosd that the tasks are released or dead
 *   init(RESTORE)                        nothing exists yet: phosd may refuse the image or the GPUs
 *   RESUME_DEVICES_LATE(pid)             every task exists and is stopped; its return value is ignored by CRIU
 */
#include "phos_plugin.h"

#include <errno.h>

static int phos_plugin_init(int stage)
{
	switch (stage) {
	case CR_PLUGIN_STAGE__RESTORE:
		return phos_link_restore_begin();
	default:
		return 0;
	}
}

static void phos_plugin_exit(int stage, int ret)
{
	switch (stage) {
	case CR_PLUGIN_STAGE__DUMP:
		phos_link_dump_end(ret);
		break;
	case CR_PLUGIN_STAGE__RESTORE:
		phos_link_restore_end(ret);
		break;
	default:
		break;
	}
}

static int phos_plugin_pause_devices(int pid)
{
	return phos_link_dump_begin(pid);
}

static int phos_plugin_resume_devices_late(int pid)
{
	return phos_link_task_restored(pid);
}

/* CRIU refuses a plugin that knows more hooks than itself: register up to CHECKPOINT_DEVICES (11) of CRIU 4.1, never more. */
__attribute__((visibility("default"))) cr_plugin_desc_t CR_PLUGIN_DESC = {
	.name = "phos_plugin",
	.init = phos_plugin_init,
	.exit = phos_plugin_exit,
	.version = CRIU_PLUGIN_VERSION,
	.max_hooks = CR_PLUGIN_HOOK__CHECKPOINT_DEVICES + 1,
	.hooks = {
		[CR_PLUGIN_HOOK__PAUSE_DEVICES] = (void *)phos_plugin_pause_devices,
		[CR_PLUGIN_HOOK__RESUME_DEVICES_LATE] = (void *)phos_plugin_resume_devices_late,
	},
};
