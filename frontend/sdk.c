/* The application asks for a checkpoint of itself (include/phos.h is its side). The asking thread only leaves word; the
 * control thread opens the directory, sends, and hears the result, which may come over another connection than the one the
 * request went by: every checkpoint ends the connection, and phosd is asked again over the next.
 *
 * One request is in progress at a time. The results of the last ones are kept for whoever waits: waiting is looking again
 * and again, because a thread may be dumped and restored in the middle of it, on a machine whose clocks show anything. */
#include "sdk.h"
#include "cleanup.h"
#include "control.h"
#include "log.h"
#include "runtime.h"
#include "tell.h"

#include "../include/phos.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KEPT 64

/* A flag of phos/__init__.py's own: it waits as PHOS_WAIT_IF_BUSY does, but here only for what others ask for. While a request
 * of this process is in progress it is answered PHOS_BUSY and asks again, and Python handles signals in between. */
#define ASKS_AGAIN 4u

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int phos_checkpoint_request(const char *directory, const char *protocol, unsigned flags, uint64_t *request);
EXPORTED int phos_checkpoint_result(uint64_t request, int timeout_ms, struct phos_result *result);

/* Guards everything below; taken last, held for no longer than copying takes. */
static pthread_mutex_t sdk_lock = PTHREAD_MUTEX_INITIALIZER;
static struct phos_result results[KEPT]; /* of request n at n % KEPT; size: 0 if there was none */
static uint64_t last_request;            /* 0: none */
static bool busy;                        /* the last one is in progress */
static bool asked, asked_before;         /* by this connection; by an earlier one */
static unsigned flags_wanted;
static char directory_wanted[PATH_MAX], protocol_wanted[sizeof "stop"];

static void sleep_us(unsigned us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

/* With sdk_lock held. */
static struct phos_result *result_of(uint64_t request)
{
    return &results[request % KEPT];
}

/* With sdk_lock held: the request in progress has ended. */
static void settle(enum phos_state state, const char *error)
{
    struct phos_result *result = result_of(last_request);
    result->state = state;
    snprintf(result->error, sizeof result->error, "%s", error);
    busy = false;
}

static bool absolute(const char *path, char *out, size_t size)
{
    if (*path == '/')
        return (size_t)snprintf(out, size, "%s", path) < size;
    char here[PATH_MAX];
    return getcwd(here, sizeof here) && (size_t)snprintf(out, size, "%s/%s", here, path) < size;
}

/* With the caller's cancellation off: it must not end with the lock held. */
static int request_once(const char *directory, const char *protocol, unsigned flags, uint64_t *request)
{
    char path[PATH_MAX];
    if (!absolute(directory, path, sizeof path))
        return PHOS_INVALID;
    {
        PHOS_LOCKED(&sdk_lock);
        if (busy) {
            if (request)
                *request = last_request;
            return PHOS_BUSY;
        }
        *result_of(++last_request) = (struct phos_result){.size = sizeof(struct phos_result), .state = PHOS_PENDING};
        busy = true;
        asked = asked_before = false;
        flags_wanted = flags;
        strcpy(directory_wanted, path);
        strcpy(protocol_wanted, protocol ? protocol : "");
        if (request)
            *request = last_request;
    }
    phos_control_kick();
    return PHOS_OK;
}

int phos_checkpoint_request(const char *directory, const char *protocol, unsigned flags, uint64_t *request)
{
    if (request)
        *request = 0;
    if (!directory || !*directory || (protocol && strcmp(protocol, "cow") && strcmp(protocol, "stop")) ||
        flags & ~(PHOS_END_AFTERWARDS | PHOS_WAIT_IF_BUSY | ASKS_AGAIN))
        return PHOS_INVALID;
    for (;;) {
        if (!phos_serving())
            return PHOS_NO_CUDA;
        if (phos_tell_nobody())
            return PHOS_NO_DAEMON;
        int cancel;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
        int code = request_once(directory, protocol, flags, request);
        pthread_setcancelstate(cancel, &cancel);
        if (code != PHOS_BUSY || !(flags & PHOS_WAIT_IF_BUSY))
            return code;
        sleep_us(2000);
    }
}

static int look(uint64_t request, struct phos_result *result)
{
    PHOS_LOCKED(&sdk_lock);
    if (!request || request > last_request || last_request - request >= KEPT)
        return PHOS_UNKNOWN;
    const struct phos_result *known = result_of(request);
    if (result) { /* an older program's may be shorter, a newer one's longer: its size stays as it is */
        uint32_t size = result->size < known->size ? result->size : known->size;
        if (size > sizeof result->size)
            memcpy((char *)result + sizeof result->size, (const char *)known + sizeof result->size,
                   size - sizeof result->size);
    }
    return known->state == PHOS_PENDING ? PHOS_TIMEOUT : PHOS_OK;
}

int phos_checkpoint_result(uint64_t request, int timeout_ms, struct phos_result *result)
{
    /* Time is counted in sleeps. */
    uint64_t patience_us = timeout_ms < 0 ? UINT64_MAX : (uint64_t)timeout_ms * 1000, waited_us = 0;
    for (;;) {
        int cancel;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
        int code = look(request, result);
        pthread_setcancelstate(cancel, &cancel);
        if (code != PHOS_TIMEOUT || waited_us >= patience_us)
            return code;
        uint64_t pause_us = waited_us < 200000 ? 1000 : 10000;
        if (pause_us > patience_us - waited_us)
            pause_us = patience_us - waited_us;
        sleep_us((unsigned)pause_us);
        waited_us += pause_us;
    }
}

/* ---- the control thread's side ---- */

/* Makes the directory, for its owner alone as it will hold the process's memory, and those above it that are missing, as the
 * application would. Returns a descriptor, or -1 and errno. */
static int open_directory(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int failed = mkdir(path, 0777) && errno != EEXIST ? errno : 0;
        *slash = '/';
        if (failed && failed != EROFS && failed != EACCES && failed != EPERM) { /* those may be for one that exists */
            errno = failed;
            return -1;
        }
    }
    if (mkdir(path, 0700) && errno != EEXIST)
        return -1;
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

bool phos_sdk_tell(void)
{
    Phos__Wire__CheckpointRequest request = PHOS__WIRE__CHECKPOINT_REQUEST__INIT;
    char path[PATH_MAX], protocol[sizeof protocol_wanted];
    {
        PHOS_LOCKED(&sdk_lock);
        if (!busy || asked)
            return true;
        asked = true;
        request.asked_before = asked_before;
        request.number = last_request;
        request.end = flags_wanted & PHOS_END_AFTERWARDS;
        request.wait = flags_wanted & (PHOS_WAIT_IF_BUSY | ASKS_AGAIN);
        strcpy(path, directory_wanted);
        strcpy(protocol, protocol_wanted);
    }
    request.protocol = protocol;
    PHOS_CLOSES int directory = open_directory(path);
    if (directory < 0 && !request.asked_before) {
        char error[512];
        snprintf(error, sizeof error, "The image directory %.300s cannot be made or opened: %s.", path, strerror(errno));
        PHOS_LOCKED(&sdk_lock);
        if (busy && last_request == request.number)
            settle(PHOS_FAILED, error);
        return true;
    }
    ENVELOPE(envelope, 0, CHECKPOINT_REQUEST, checkpoint_request, &request);
    return phos_tell_send(&envelope, &directory, directory >= 0);
}

void phos_sdk_again(void)
{
    PHOS_LOCKED(&sdk_lock);
    asked_before = asked_before || asked;
    asked = false;
}

void phos_sdk_result(const Phos__Wire__CheckpointResult *said)
{
    PHOS_LOCKED(&sdk_lock);
    if (!busy || said->number != last_request)
        return;
    struct phos_result *result = result_of(last_request);
    result->seconds = said->seconds;
    result->stall = said->stall;
    settle(said->error[0] ? PHOS_FAILED : PHOS_COMMITTED, said->error);
    phos_debug("checkpoint %llu: %s", (unsigned long long)said->number, said->error[0] ? said->error : "committed");
}

void phos_sdk_restored(void)
{
    PHOS_LOCKED(&sdk_lock);
    if (busy)
        settle(PHOS_RESTORED, "");
}

void phos_sdk_forked(void)
{
    pthread_mutex_init(&sdk_lock, NULL);
    if (busy)
        settle(PHOS_FAILED, "The request was made by the process that this one was forked from.");
}
