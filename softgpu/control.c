/* The checkpoint API between processes: a mailbox in the target's memory and a signal to its control thread.
 *
 * The caller finds the target's mailbox by its magic in the writable mapping of the target's libcuda.so (/proc/PID/maps),
 * writes a request into it with process_vm_writev, sends the control thread a signal that only this thread waits for, and
 * reads the answer. So the mechanism needs no descriptor in the target, nothing that CRIU would have to carry, works across
 * network and pid namespaces, and the kernel checks the caller's right to the target (ptrace access: same user, or root). A
 * target that is stopped answers when it runs again.
 *
 * A request: the caller writes the arguments, then `request` = n. The thread copies the arguments, acts, writes `result`, then
 * `reply` = n. Callers of one target exclude each other by binding an abstract socket name, which dies with them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <dirent.h>
#include <unistd.h>

#include "softgpu.h"

#define CONTROL_SIGNAL (SIGRTMAX - 1) /* sent to one thread, in which alone it is blocked and waited for */

enum command { LOCK = 1, CHECKPOINT, RESTORE, UNLOCK };

struct arguments {
    uint32_t command, timeout_ms, count;
    int32_t physical[SG_MAX_DEVICES]; /* the new GPU, by the number of the old one; -1: not in the list */
};
struct mailbox {
    unsigned char magic[16];
    uint32_t size;
    _Atomic int32_t tid; /* of the control thread, in its own pid namespace; 0: no CUDA here */
    _Atomic int32_t state;
    _Atomic uint32_t request, reply;
    int32_t result;
    struct arguments arguments;
};

/* The bytes of magic[] inverted, so that no other place in memory holds the pattern. */
static const unsigned char pattern[16] = {0x8f, 0xb0, 0x97, 0xac, 0x2d, 0x6c, 0xe1, 0x05, 0x93, 0x7e, 0x52, 0xd8, 0x31, 0xc6, 0x4b, 0xfa};
static struct mailbox mailbox = {
    .magic = {0x70, 0x4f, 0x68, 0x53, 0xd2, 0x93, 0x1e, 0xfa, 0x6c, 0x81, 0xad, 0x27, 0xce, 0x39, 0xb4, 0x05},
    .size = sizeof(struct mailbox),
}; /* written by the control thread and, from outside, by callers */

/* ---- the target's side ---- */

/* Takes as long as the settings say. While the file of SOFTGPU_TOGGLE_HOLD exists there is another beside it, whose name ends
 * with the pid: so a test knows who waits for it. */
static void pause_toggle(uint64_t started, const char *what)
{
    uint64_t end = started + (uint64_t)sg_settings()->toggle_ms * 1000000u;
    if (sg_now_ns() < end)
        sg_sleep_until_ns(end);
    if (!sg_settings()->toggle_hold[0])
        return;
    char file[sizeof(sg_settings()->toggle_hold) + 32], waits[sizeof(file) + 16];
    snprintf(file, sizeof(file), "%s.%s", sg_settings()->toggle_hold, what);
    snprintf(waits, sizeof(waits), "%s.%d", file, (int)getpid());
    if (access(file, F_OK) != 0)
        return;
    int made = open(waits, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (made < 0)
        sg_log("%s cannot be made: %s", waits, strerror(errno));
    else
        close(made);
    while (access(file, F_OK) == 0)
        sg_sleep_ns(1000000);
    unlink(waits);
}

static CUresult lock(const struct arguments *arguments)
{
    if (mailbox.state != CU_PROCESS_STATE_RUNNING)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (sg_fault(SG_FAULT_PROFILED))
        return CUDA_ERROR_NOT_SUPPORTED;
    uint64_t deadline = arguments->timeout_ms ? sg_now_ns() + (uint64_t)arguments->timeout_ms * 1000000u : 0;
    if (sg_fault(SG_FAULT_LOCK)) {
        if (deadline)
            sg_sleep_until_ns(deadline);
        return CUDA_ERROR_NOT_READY;
    }
    if (!sg_gate_close(deadline))
        return CUDA_ERROR_NOT_READY;
    if (!sg_streams_idle(deadline)) {
        sg_gate_open();
        return CUDA_ERROR_NOT_READY;
    }
    mailbox.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

static CUresult checkpoint(void)
{
    if (mailbox.state != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (sg_fault(SG_FAULT_CHECKPOINT))
        return CUDA_ERROR_UNKNOWN;
    uint64_t started = sg_now_ns();
    sg_set_away(true);
    sg_polls_stop();
    CUresult result = sg_checkpoint();
    sg_polls_go();
    pause_toggle(started, "checkpoint");
    if (result == CUDA_SUCCESS)
        mailbox.state = CU_PROCESS_STATE_CHECKPOINTED;
    else
        sg_set_away(false);
    return result;
}

static CUresult restore(const struct arguments *arguments)
{
    if (mailbox.state != CU_PROCESS_STATE_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    uint64_t started = sg_now_ns();
    const char *why = "the fault 'restore-fail' is set";
    CUresult result = CUDA_ERROR_UNKNOWN;
    int physical[SG_MAX_DEVICES];
    for (int i = 0; arguments->count && sg_device(i); i++) {
        physical[i] = arguments->physical[sg_device(i)->physical];
        if (physical[i] < 0)
            return CUDA_ERROR_INVALID_VALUE; /* the list leaves out a visible GPU: the process stays checkpointed */
    }
    sg_polls_stop();
    if (!sg_fault(SG_FAULT_RESTORE))
        result = sg_restore(physical, arguments->count, &why);
    sg_polls_go();
    pause_toggle(started, "restore");
    if (result == CUDA_SUCCESS) {
        sg_set_away(false);
        mailbox.state = CU_PROCESS_STATE_LOCKED;
    } else if (why) {
        sg_log("process %d lost its GPU state: it cannot be restored because %s", (int)getpid(), why);
        mailbox.state = CU_PROCESS_STATE_FAILED;
        sg_gate_fail();
    }
    return result;
}

static CUresult unlock(void)
{
    if (mailbox.state != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    mailbox.state = CU_PROCESS_STATE_RUNNING;
    sg_gate_open();
    return CUDA_SUCCESS;
}

static CUresult serve(const struct arguments *arguments)
{
    switch ((enum command)arguments->command) {
    case LOCK:
        return lock(arguments);
    case CHECKPOINT:
        return checkpoint();
    case RESTORE:
        return restore(arguments);
    case UNLOCK:
        return unlock();
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

static void *control(void *unused)
{
    (void)unused;
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, CONTROL_SIGNAL);
    mailbox.tid = (int32_t)syscall(SYS_gettid);
    for (;;) {
        uint32_t request = mailbox.request;
        if (request == mailbox.reply) {
            /* The signal ends the wait; the timeout is there for one that got lost. */
            struct timespec second = {.tv_sec = 1};
            sigtimedwait(&wanted, NULL, &second);
            continue;
        }
        struct arguments arguments = mailbox.arguments;
        while (sg_fault(SG_FAULT_HANG_CONTROL))
            sg_sleep_ns(1000000000u);
        mailbox.result = (int32_t)serve(&arguments);
        mailbox.reply = request;
    }
    return NULL;
}

bool sg_control_start(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    /* Where Yama restricts ptrace to ancestors, the daemon, which is none, could not reach the mailbox. */
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &attributes, control, NULL);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        sg_log("cannot start the control thread: %s", strerror(error));
        return false;
    }
    pthread_setname_np(thread, "softgpu-control");
    while (!mailbox.tid)
        sched_yield();
    return true;
}

void sg_control_forget(void)
{
    mailbox.tid = 0;
    sg_guard_forget();
    sg_fd_close_all();
}

/* ---- the caller's side ---- */

static CUresult error_of(int error)
{
    return error == EPERM || error == EACCES ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_VALUE;
}

static bool read_target(int pid, uint64_t address, void *to, size_t size)
{
    struct iovec local = {to, size}, remote = {(void *)(uintptr_t)address, size};
    return process_vm_readv(pid, &local, 1, &remote, 1, 0) == (ssize_t)size;
}

static bool write_target(int pid, uint64_t address, const void *from, size_t size)
{
    struct iovec local = {(void *)(uintptr_t)from, size}, remote = {(void *)(uintptr_t)address, size};
    return process_vm_writev(pid, &local, 1, &remote, 1, 0) == (ssize_t)size;
}

static uint64_t search(int pid, uint64_t begin, size_t size)
{
    unsigned char magic[sizeof(pattern)];
    for (size_t i = 0; i < sizeof(magic); i++)
        magic[i] = (unsigned char)~pattern[i];
    if (size > 64 << 20)
        return 0;
    char *bytes = malloc(size);
    char *at = bytes && read_target(pid, begin, bytes, size) ? memmem(bytes, size, magic, sizeof(magic)) : NULL;
    uint64_t found = at ? begin + (uint64_t)(at - bytes) : 0;
    free(bytes);
    return found;
}

/* Where the target's mailbox lies, and what is in it. */
static CUresult find(int pid, uint64_t *address, struct mailbox *out)
{
    char path[64], *line = NULL;
    size_t room = 0;
    if (pid <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    if (!maps)
        return error_of(errno);
    *address = 0;
    while (!*address && getline(&line, &room, maps) > 0) {
        unsigned long begin, end;
        if (strstr(line, "libcuda.so") && strstr(line, " rw-p ") && sscanf(line, "%lx-%lx", &begin, &end) == 2)
            *address = search(pid, begin, end - begin);
    }
    free(line);
    fclose(maps);
    if (!*address || !read_target(pid, *address, out, sizeof(*out)))
        return errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_NOT_INITIALIZED;
    if (out->size != sizeof(*out))
        return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    return out->tid ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

/* The thread whose id in the target's own pid namespace is `inner`: its id in ours, or 0. */
static int thread_of(int pid, int inner)
{
    char path[320], line[256];
    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    int found = 0;
    for (struct dirent *entry; tasks && !found && (entry = readdir(tasks));) {
        snprintf(path, sizeof(path), "/proc/%d/task/%s/status", pid, entry->d_name);
        FILE *status = entry->d_name[0] == '.' ? NULL : fopen(path, "re");
        while (status && fgets(line, sizeof(line), status))
            if (!strncmp(line, "NSpid:", 6)) {
                char *last = strrchr(line, '\t');
                if (last && atoi(last) == inner)
                    found = atoi(entry->d_name);
            }
        if (status)
            fclose(status);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

/* One caller at a time per target. The name dies with its holder, so nothing is left behind. */
static int exclude(int pid)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "softgpu-caller.%d", pid);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    while (fd >= 0 && bind(fd, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length))) {
        if (errno != EADDRINUSE) {
            close(fd);
            return -1;
        }
        sg_sleep_ns(1000000);
    }
    return fd;
}

static bool alive(int pid)
{
    char path[64], line[512];
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    bool living = fgets(line, sizeof(line), file) && strrchr(line, ')') && !strchr("ZX", strrchr(line, ')')[2]);
    fclose(file);
    return living;
}

static CUresult ask(int pid, const struct arguments *arguments)
{
    uint64_t address;
    struct mailbox box;
    CUresult result = find(pid, &address, &box);
    if (result != CUDA_SUCCESS)
        return result;
    int exclusive = exclude(pid);
    if (exclusive < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    int tid = thread_of(pid, box.tid);
    uint32_t number = 0;
    bool ok = tid && read_target(pid, address, &box, sizeof(box));
    if (ok) {
        number = box.request + 1;
        ok = write_target(pid, address + offsetof(struct mailbox, arguments), arguments, sizeof(*arguments)) &&
             write_target(pid, address + offsetof(struct mailbox, request), &number, sizeof(number));
    }
    if (!ok)
        result = error_of(errno);
    uint64_t told = 0, pause = 20000;
    while (result == CUDA_SUCCESS) {
        if (!read_target(pid, address, &box, sizeof(box)) || !alive(pid)) {
            result = CUDA_ERROR_INVALID_VALUE; /* it died */
        } else if (box.reply == number) {
            result = (CUresult)box.result;
            break;
        } else {
            uint64_t now = sg_now_ns();
            if (now - told > 100000000u) {
                syscall(SYS_tgkill, pid, tid, CONTROL_SIGNAL);
                told = now;
            }
            sg_sleep_ns(pause);
            if (pause < 1000000)
                pause += pause / 2;
        }
    }
    close(exclusive);
    return result;
}

/* Whether a tracer holds the thread that answers: state 't' in /proc. */
static bool is_traced(int pid, int inner)
{
    char path[64], text[512];
    snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", pid, thread_of(pid, inner));
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    char *line = fgets(text, sizeof(text), file);
    fclose(file);
    char *end = line ? strrchr(line, ')') : NULL; /* the name before it may hold anything */
    return end && end[1] == ' ' && end[2] == 't';
}

CUresult softgpu_cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    uint64_t address;
    struct mailbox box;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find(pid, &address, &box);
    /*
     * The real driver asks a thread of the process (580.159.04: a restore in which phosd asked while CRIU still traced the
     * process never ended), so this answers when that thread runs.
     */
    while (result == CUDA_SUCCESS && is_traced(pid, box.tid)) {
        usleep(1000);
        result = find(pid, &address, &box);
    }
    if (result == CUDA_SUCCESS)
        *state = sg_fault(SG_FAULT_CUSTOM_STORAGE) ? CU_PROCESS_STATE_CHECKPOINTING : (CUprocessState)box.state;
    return result;
}

CUresult softgpu_cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    uint64_t address;
    struct mailbox box;
    if (!tid)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find(pid, &address, &box);
    if (result == CUDA_SUCCESS) {
        *tid = thread_of(pid, box.tid);
        if (!*tid)
            result = CUDA_ERROR_INVALID_VALUE;
    }
    return result;
}

static bool zero(const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (((const char *)bytes)[i])
            return false;
    return true;
}

CUresult softgpu_cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    if (args && (args->reserved0 || !zero(args->reserved1, sizeof(args->reserved1))))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &(struct arguments){.command = LOCK, .timeout_ms = args ? args->timeoutMs : 0});
}

CUresult softgpu_cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    if (args && !zero(args, sizeof(*args)))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &(struct arguments){.command = CHECKPOINT});
}

CUresult softgpu_cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    struct arguments arguments = {.command = RESTORE};
    if (args && args->gpuPairsCount) {
        if (!args->gpuPairs)
            return CUDA_ERROR_INVALID_VALUE;
        arguments.count = args->gpuPairsCount;
        if (arguments.count > SG_MAX_DEVICES)
            return CUDA_ERROR_INVALID_VALUE;
        for (int i = 0; i < SG_MAX_DEVICES; i++)
            arguments.physical[i] = -1;
        for (unsigned i = 0; i < args->gpuPairsCount; i++) {
            int from = sg_physical_of_uuid(&args->gpuPairs[i].oldUuid), to = sg_physical_of_uuid(&args->gpuPairs[i].newUuid);
            if (from < 0 || to < 0 || to >= sg_settings()->devices || arguments.physical[from] >= 0)
                return CUDA_ERROR_INVALID_VALUE;
            arguments.physical[from] = to; /* indexed by the old GPU; the target turns that into its ordinals */
        }
    }
    return ask(pid, &arguments);
}

CUresult softgpu_cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    if (args && !zero(args, sizeof(*args)))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &(struct arguments){.command = UNLOCK});
}
