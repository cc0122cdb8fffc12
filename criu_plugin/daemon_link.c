/*
 * The connection to phosd: one per run of CRIU, one request at a time (proto/wire.proto).
 *
 * It is opened by the first request and closed only by the end of CRIU's process, because its end of file is what tells
 * phosd that CRIU has let the tasks go (or was killed). Should phosd die first, another may be asked for what it has left.
 * CRIU forks helpers while it restores: CLOEXEC does not close the connection in those, but none of them outlives the
 * tasks' release.
 */
#include "phos_plugin.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "packets.h"

/* Of the links in one packet. Each is short: it lies in /dev/shm itself (file_links.c). */
#define LINKS_AT_ONCE 512

/* Longest step behind one request: quiesce and detach, or the driver's checkpoint of processes without the frontend. */
#define REQUEST_TIMEOUT_S 600

/* The end of a dump that kills: the image is completed behind it. Slow disks are slow; only phosd's death ends it earlier. */
#define COMPLETION_TIMEOUT_S 86400

/* CRIU calls hooks from its main thread only: no lock. */
static struct {
	int fd;
	uint64_t next_id;
	bool dumping;
	bool gpu_part; /* of what is dumped */
	bool names;    /* phosd sees to the names of files in shared memory */
	bool copies;   /* phosd copies what tasks share without a name */
	bool behind;   /* phosd completes the image while the tasks run on */
	int dumped;    /* its directory then, or -1 */
	struct phos_alone *alone;
	size_t alone_count;
} link_ = { .fd = -1, .next_id = 1, .dumped = -1 };

static const char *socket_path(char *buffer, size_t size)
{
	const char *named = getenv("PHOS_SOCKET");
	const char *runtime = getenv("XDG_RUNTIME_DIR");

	if (named && *named)
		return named;
	if (geteuid() == 0 || access("/run/phos/phosd.sock", F_OK) == 0)
		return "/run/phos/phosd.sock";
	if (runtime)
		snprintf(buffer, size, "%s/phos/phosd.sock", runtime);
	else
		snprintf(buffer, size, "/tmp/phos-%u/phos/phosd.sock", geteuid());
	return buffer;
}

static int link_open(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char buffer[sizeof(address.sun_path)];
	const char *path = socket_path(buffer, sizeof(buffer));
	int fd;

	if (link_.fd >= 0)
		return 0;
	if (strlen(path) >= sizeof(address.sun_path)) {
		pr_err("the socket path %s is too long; set PHOS_SOCKET to a shorter one\n", path);
		return -1;
	}
	strcpy(address.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0) {
		pr_err("cannot make a socket: %s\n", strerror(errno));
		return -1;
	}
	if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		pr_err("phosd does not answer at %s (%s); start it with 'phosd --ensure'\n", path, strerror(errno));
		close(fd);
		return -1;
	}
	link_.fd = fd;
	return 0;
}

/* What Done says beside how it went. */
struct answer {
	bool gpu_part, park, kept, names, copies;
};

static int note_alone(Phos__Wire__Alone **tasks, size_t count)
{
	free(link_.alone);
	link_.alone_count = 0;
	link_.alone = calloc(count + 1, sizeof(*link_.alone));
	if (!link_.alone) {
		pr_err("no memory to note which tasks the driver alone sees to\n");
		return -1;
	}
	for (size_t i = 0; i < count; i++)
		link_.alone[i] = (struct phos_alone){ .pid = tasks[i]->pid, .thread = tasks[i]->thread };
	link_.alone_count = count;
	return 0;
}

size_t phos_link_alone(struct phos_alone **tasks)
{
	*tasks = link_.alone;
	return link_.alone_count;
}

/* Returns 0, or -1 after it has logged why; *said, unless NULL, becomes what phosd says. */
static int request(Envelope *envelope, int descriptor, const char *what, struct answer *said)
{
	Envelope *answer;
	int ret = -1, error, timeout_s;

	envelope->id = link_.next_id++;
	error = phos_send_packet(link_.fd, envelope, &descriptor, descriptor >= 0);
	if (error && error != -EPIPE) { /* a phosd that has hung up may have said why */
		pr_err("phosd has gone away before '%s': %s\n", what, strerror(-error));
		return -1;
	}
	timeout_s = envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_DUMP_END ? COMPLETION_TIMEOUT_S : REQUEST_TIMEOUT_S;
	answer = phos_receive_packet(link_.fd, envelope->id, timeout_s);
	if (answer && answer->body_case == PHOS__WIRE__ENVELOPE__BODY_STRANGERS) {
		if (note_alone(answer->strangers->alone, answer->strangers->n_alone))
			goto out;
		phos__wire__envelope__free_unpacked(answer, NULL);
		answer = phos_receive_packet(link_.fd, envelope->id, timeout_s);
	}
	if (!answer) {
		pr_err("phosd gave no answer to '%s': %s\n", what, strerror(errno));
		return -1;
	}
	if (answer->body_case != PHOS__WIRE__ENVELOPE__BODY_DONE) {
		pr_err("phosd answered '%s' with something else\n", what);
		goto out;
	}
	for (size_t i = 0; i < answer->done->n_warnings; i++)
		pr_warn("%s\n", answer->done->warnings[i]);
	if (answer->done->error && *answer->done->error) {
		pr_err("%s\n", answer->done->error);
		goto out;
	}
	if (envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_TASK_RESTORED &&
	    note_alone(answer->done->alone, answer->done->n_alone))
		goto out;
	if (envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_DUMP_BEGIN &&
	    phos_device_files_begin(answer->done->device_files, answer->done->n_device_files))
		goto out;
	if (said)
		*said = (struct answer){ answer->done->gpu_part, answer->done->park, answer->done->kept,
					answer->done->names, answer->done->copies };
	ret = 0;
out:
	phos__wire__envelope__free_unpacked(answer, NULL);
	return ret;
}

/* A variable of CRIU's environment; empty if it is not set. Never changed, whatever protobuf-c's types say. */
static char *setting(const char *name)
{
	char *value = getenv(name);

	return value ? value : "";
}

int phos_link_dump_begin(int pid)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__DumpBegin begin = PHOS__WIRE__DUMP_BEGIN__INIT;
	Phos__Wire__CowOptions cow = PHOS__WIRE__COW_OPTIONS__INIT;
	struct answer said = {};

	if (link_.dumping)
		return 0; /* a child of the root: phosd has seen to the whole tree already */
	if (link_open())
		return -1;
	begin.pid = pid;
	begin.criu_pid = getpid();
	begin.criu_version = setting("PHOS_CRIU_VERSION");
	begin.run = setting("PHOS_CRIU_RUN");
	/* As a person wrote them: phosd knows what has a meaning. */
	begin.protocol = setting("PHOS_PROTOCOL");
	cow.pool = setting("PHOS_COW_POOL");
	cow.validate = setting("PHOS_VALIDATE");
	cow.prioritise = setting("PHOS_PRIORITISE");
	begin.cow = &cow;
	/* One that somebody has work over a socket may put pages elsewhere than into files: the launcher does not know. */
	begin.hides_pages = phos_can_hide() && !*setting("PHOS_CRIU_SERVES");
	begin.leaves_running = phos_service_leaves_running();
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_DUMP_BEGIN;
	envelope.dump_begin = &begin;
	if (request(&envelope, criu_get_image_dir(), "begin the checkpoint", &said))
		return -1;
	link_.dumping = true;
	link_.gpu_part = said.gpu_part;
	link_.names = said.names;
	link_.copies = said.copies;
	if (said.gpu_part && add_inventory_plugin && add_inventory_plugin(PHOS_INVENTORY_NAME)) {
		pr_err("no memory to note in the image that it has a GPU part\n");
		return -1;
	}
	return 0;
}

bool phos_link_sees_to_names(void)
{
	return link_.names;
}

/* phosd does not answer this. See phos_link_take_memory(). */
static int give(Envelope *envelope, const int *descriptors, size_t count)
{
	int error;

	if (!link_.copies)
		return 1;
	envelope->id = link_.next_id++;
	error = phos_send_packet(link_.fd, envelope, descriptors, count);
	if (error != -EPIPE && error != -ECONNRESET)
		return error ? 1 : 0;
	pr_err("phosd has gone away while it copied what the tasks share\n");
	return -1;
}

int phos_link_take_memory(int descriptor, uint64_t inode)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__TakeMemory memory = PHOS__WIRE__TAKE_MEMORY__INIT;

	memory.inode = inode;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_TAKE_MEMORY;
	envelope.take_memory = &memory;
	return give(&envelope, &descriptor, 1);
}

int phos_link_take_range(int from, int to, uint64_t offset, uint64_t place, uint64_t size)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__TakeRange range = PHOS__WIRE__TAKE_RANGE__INIT;

	range.offset = offset;
	range.place = place;
	range.size = size;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_TAKE_RANGE;
	envelope.take_range = &range;
	return give(&envelope, (int[]){ from, to }, 2);
}

int phos_link_task_frozen(int pid)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__TaskFrozen frozen = PHOS__WIRE__TASK_FROZEN__INIT;

	if (!link_.gpu_part)
		return 0;
	frozen.pid = pid;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_TASK_FROZEN;
	envelope.task_frozen = &frozen;
	return request(&envelope, -1, "save what a frozen task has", NULL) ? -1 : phos_hide(pid);
}

int phos_link_task_pages(int pid, int table)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__TaskPages pages = PHOS__WIRE__TASK_PAGES__INIT;

	if (!link_.gpu_part)
		return 0;
	pages.pid = pid;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_TASK_PAGES;
	envelope.task_pages = &pages;
	return request(&envelope, table, "say which pages of a frozen task are copied", NULL);
}

/* Which links were not made, in as many packets as that takes. Returns 0 or -1. */
static int tell_links(void)
{
	const struct phos_link *links;
	size_t count = phos_spared_links(&links);

	while (count) {
		Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
		Phos__Wire__SparedLinks told = PHOS__WIRE__SPARED_LINKS__INIT;
		Phos__Wire__SparedLinks__Link entries[LINKS_AT_ONCE], *listed[LINKS_AT_ONCE];

		for (told.n_links = 0; told.n_links < LINKS_AT_ONCE && count; count--, links++) {
			Phos__Wire__SparedLinks__Link *entry = &entries[told.n_links];

			phos__wire__spared_links__link__init(entry);
			entry->path = links->path;
			entry->inode = links->inode;
			listed[told.n_links++] = entry;
		}
		told.links = listed;
		envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_SPARED_LINKS;
		envelope.spared_links = &told;
		if (request(&envelope, -1, "tell which links are not needed", NULL))
			return -1;
	}
	return 0;
}

int phos_link_dump_end(int result, bool *kept)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__DumpEnd end = PHOS__WIRE__DUMP_END__INIT;
	struct answer said = {};
	int hidden, ret;
	bool open, mapped;

	*kept = true;
	if (!link_.dumping)
		return 0;
	if ((phos_hidden(&hidden) || tell_links()) && !result)
		result = -1; /* the image cannot be completed */
	phos_device_files_found(&open, &mapped);
	end.result = result;
	end.device_files = open;
	end.device_mappings = mapped;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_DUMP_END;
	envelope.dump_end = &end;
	ret = request(&envelope, hidden, "end the checkpoint", &said);
	if (hidden >= 0)
		close(hidden);
	/* Else the image is whole now. CRIU closes its own descriptor before it answers. */
	link_.behind = !ret && !result && link_.gpu_part && phos_service_leaves_running();
	if (link_.behind)
		link_.dumped = fcntl(criu_get_image_dir(), F_DUPFD_CLOEXEC, 0);
	/* Not started by the launcher, nobody knows what else CRIU was told. */
	*kept = ret || result || said.kept || *setting("PHOS_MAY_KEEP") || !*setting("PHOS_PHOSD");
	return ret ? ret : result;
}

int phos_link_wait_until_whole(void)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT, *answer = NULL;
	Phos__Wire__WaitImage wait = PHOS__WIRE__WAIT_IMAGE__INIT;
	int ret = -1;

	if (!link_.behind)
		return 0;
	link_.behind = false;
	if (link_.dumped < 0) {
		pr_err("nobody can tell whether the image becomes whole: there was no descriptor left for its directory\n");
		return -1;
	}
	close(link_.fd); /* CRIU has let go of the tasks, and phosd goes on when it sees this end */
	link_.fd = -1;
	wait.timeout_s = COMPLETION_TIMEOUT_S;
	wait.run = setting("PHOS_CRIU_RUN");
	envelope.id = link_.next_id++;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_WAIT_IMAGE;
	envelope.wait_image = &wait;
	if (!link_open() && !phos_send_packet(link_.fd, &envelope, &link_.dumped, 1))
		answer = phos_receive_packet(link_.fd, envelope.id, COMPLETION_TIMEOUT_S);
	if (!answer || answer->body_case != PHOS__WIRE__ENVELOPE__BODY_IMAGE_STATE)
		pr_err("phosd has gone away before the image was whole\n");
	else if (strcmp(answer->image_state->state, "committed"))
		pr_err("the image is not whole: %s\n", answer->image_state->error);
	else
		ret = 0;
	if (answer)
		phos__wire__envelope__free_unpacked(answer, NULL);
	close(link_.dumped);
	link_.dumped = -1;
	return ret;
}

int phos_link_restore_begin(bool gpu_part)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__RestoreBegin begin = PHOS__WIRE__RESTORE_BEGIN__INIT;

	if (link_open())
		return -1;
	begin.criu_pid = getpid();
	begin.mode = setting("PHOS_RESTORE");
	if (phos_fills() && !*begin.mode)
		begin.mode = (char *)"eager"; /* whatever CRIU was told */
	begin.lazy = setting("PHOS_LAZY");
	begin.pool = setting("PHOS_POOL");
	begin.grown_files = setting("PHOS_GROWN_FILES");
	begin.gpus = setting("PHOS_RESTORE_GPUS");
	begin.gpu_part = gpu_part;
	begin.run = setting("PHOS_CRIU_RUN");
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_RESTORE_BEGIN;
	envelope.restore_begin = &begin;
	return request(&envelope, criu_get_image_dir(), "begin the restore", NULL);
}

int phos_link_task_restored(int pid, bool *park)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__TaskRestored restored = PHOS__WIRE__TASK_RESTORED__INIT;
	struct answer said = {};

	restored.pid = pid;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_TASK_RESTORED;
	envelope.task_restored = &restored;
	if (request(&envelope, -1, "take over a restored task", &said))
		return -1;
	*park = said.park;
	return 0;
}

static bool link_lost(void)
{
	struct pollfd end = { .fd = link_.fd };

	return link_.fd < 0 || (poll(&end, 1, 0) == 1 && end.revents);
}

/* Of the environment, what this CRIU alone is told: phosd serves others, too. reach.py has those that it is told itself. */
static const char *const for_one_command[] = {
	"PHOS_PROTOCOL", "PHOS_COW_POOL",     "PHOS_VALIDATE",	  "PHOS_PRIORITISE", "PHOS_RESTORE",  "PHOS_RESTORE_GPUS",
	"PHOS_LAZY",	 "PHOS_GROWN_FILES", "PHOS_CRIU_SERVES", "PHOS_MAY_KEEP",   "PHOS_CRIU_RUN",
};

/* `phosd --ensure`, with nothing of what CRIU has told signals to do, and out of reach of who interrupts CRIU. */
static void start_phosd(const char *phosd)
{
	sigset_t ended, before;
	pid_t child;

	/* CRIU may have a handler that takes the end of any child for one of its own. */
	sigemptyset(&ended);
	sigaddset(&ended, SIGCHLD);
	sigprocmask(SIG_BLOCK, &ended, &before);
	child = fork();
	if (!child) {
		for (int number = 1; number < NSIG; number++)
			signal(number, SIG_DFL);
		sigemptyset(&ended);
		sigprocmask(SIG_SETMASK, &ended, NULL);
		for (size_t i = 0; i < sizeof(for_one_command) / sizeof(*for_one_command); i++)
			unsetenv(for_one_command[i]);
		setsid();
		execl(phosd, phosd, "--ensure", (char *)NULL);
		_exit(127);
	}
	if (child < 0)
		pr_err("%s cannot be started: %s\n", phosd, strerror(errno));
	while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR)
		;
	sigprocmask(SIG_SETMASK, &before, NULL);
}

/* phosd has died, and tasks that it has taken the GPU from are about to be let go: another one takes over. */
static int link_again(void)
{
	const char *phosd = setting("PHOS_PHOSD");

	if (link_.fd >= 0)
		close(link_.fd);
	link_.fd = -1;
	if (*phosd)
		start_phosd(phosd);
	return link_open();
}

int phos_link_task_runs(enum phos_stage stage)
{
	const char *what = stage == PHOS_DUMPED ? "save the driver's part" : "bring back the driver's part";
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__TaskRuns runs = PHOS__WIRE__TASK_RUNS__INIT;
	int32_t *pids = calloc(link_.alone_count, sizeof(*pids));
	int ret;

	if (!pids) {
		pr_err("no memory to %s\n", what);
		return -1;
	}
	for (size_t i = 0; i < link_.alone_count; i++)
		pids[i] = link_.alone[i].pid;
	runs.n_pids = link_.alone_count;
	runs.pids = pids;
	runs.back = stage != PHOS_DUMPED;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_TASK_RUNS;
	envelope.task_runs = &runs;
	ret = stage == PHOS_DUMP_ENDS && link_lost() ? -1 : request(&envelope, -1, what, NULL);
	if (ret && stage == PHOS_DUMP_ENDS && link_lost() && !link_again())
		ret = request(&envelope, -1, what, NULL);
	free(pids);
	return ret;
}

void phos_link_restore_end(int result)
{
	Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
	Phos__Wire__RestoreEnd end = PHOS__WIRE__RESTORE_END__INIT;

	if (link_.fd < 0)
		return;
	end.result = result;
	envelope.body_case = PHOS__WIRE__ENVELOPE__BODY_RESTORE_END;
	envelope.restore_end = &end;
	(void)request(&envelope, -1, "end the restore", NULL);
}
