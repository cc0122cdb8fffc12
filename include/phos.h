/* PhOS for programs: checkpoints that a program asks for itself, at the moment that suits it.
 *
 *     #include <phos.h>
 *     for (int step = 0; step < steps; step++) {
 *         if (step % 100 == 0) {
 *             char image[64];
 *             snprintf(image, sizeof image, "checkpoints/%d", step);
 *             phos_checkpoint(image, "cow", 0, NULL);
 *         }
 *         train();
 *     }
 *
 * Only this header is needed: nothing is linked (glibc before 2.34: -ldl). A program that was not started by `phos-gpu run`
 * runs as ever: each function then answers PHOS_NOT_UNDER. C11 and C++, Linux. docs/sdk.md says more. */
#ifndef PHOS_H
#define PHOS_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the functions answer. */
enum phos_code {
    PHOS_OK = 0,
    PHOS_NOT_UNDER = 1, /* the program was not started by `phos-gpu run` */
    PHOS_NO_CUDA = 2,   /* the process has not called cuInit with success yet, or was forked after it */
    PHOS_NO_DAEMON = 3, /* no phosd answers */
    PHOS_BUSY = 4,      /* a checkpoint that was asked for before is in progress */
    PHOS_INVALID = 5,   /* an argument has no meaning */
    PHOS_UNKNOWN = 6,   /* no such request, or too many since */
    PHOS_TIMEOUT = 7,   /* still in progress */
};

/* Flags of phos_checkpoint. */
#define PHOS_END_AFTERWARDS 1u /* the process is to end once its image is whole; else it runs on */
#define PHOS_WAIT_IF_BUSY 2u   /* wait for a checkpoint in progress instead of answering PHOS_BUSY */

enum phos_state {
    PHOS_PENDING = 0,
    PHOS_COMMITTED = 1, /* the image is whole */
    PHOS_FAILED = 2,    /* there is none, and `error` says why; the process runs as before */
    PHOS_RESTORED = 3,  /* this process comes from an image: like fork(), a checkpoint returns a second time here */
};

struct phos_result {
    uint32_t size;    /* set by the caller: sizeof(struct phos_result) */
    uint32_t state;   /* enum phos_state */
    double seconds;   /* until the image was whole */
    double stall;     /* seconds for which the process stood still */
    char error[1024]; /* a sentence; empty unless PHOS_FAILED */
};

static inline void *phos_find_(const char *name)
{
    void *self = 0; /* RTLD_DEFAULT, which needs _GNU_SOURCE: whatever the process has loaded */
    return dlsym(self, name);
}

/* Asks for a checkpoint of this process and its children into `directory`, which is made if it is missing and must be empty,
 * and returns at once. `protocol`: "cow", "stop", or NULL for what fits. `request`, unless NULL, gets a number for
 * phos_checkpoint_wait. With PHOS_BUSY it gets the number of the request that is in progress. */
static inline int phos_checkpoint(const char *directory, const char *protocol, unsigned flags, uint64_t *request)
{
    typedef int phos_request_function(const char *, const char *, unsigned, uint64_t *);
    phos_request_function *ask;
    *(void **)&ask = phos_find_("phos_checkpoint_request");
    return ask ? ask(directory, protocol, flags, request) : PHOS_NOT_UNDER;
}

/* Waits until a request has ended, for timeout_ms milliseconds at most (0: only looks; negative: for ever). `result` may be
 * NULL. PHOS_OK: it has ended, and result->state says how. */
static inline int phos_checkpoint_wait(uint64_t request, int timeout_ms, struct phos_result *result)
{
    typedef int phos_wait_function(uint64_t, int, struct phos_result *);
    phos_wait_function *look;
    *(void **)&look = phos_find_("phos_checkpoint_result");
    return look ? look(request, timeout_ms, result) : PHOS_NOT_UNDER;
}

static inline const char *phos_code_text(int code)
{
    switch (code) {
    case PHOS_OK:
        return "done";
    case PHOS_NOT_UNDER:
        return "the program was not started by phos-gpu run";
    case PHOS_NO_CUDA:
        return "the process does not use CUDA yet, or was forked after it did";
    case PHOS_NO_DAEMON:
        return "phosd does not answer";
    case PHOS_BUSY:
        return "a checkpoint is in progress";
    case PHOS_INVALID:
        return "an argument has no meaning";
    case PHOS_UNKNOWN:
        return "there is no such request, or it is too long ago";
    case PHOS_TIMEOUT:
        return "the checkpoint is still in progress";
    default:
        return "an unknown code";
    }
}

#ifdef __cplusplus
}
#endif
#endif
