/* The questions of threads that import shared memory: they wait here, the control thread asks for them. */
#include "cleanup.h"
#include "control.h"
#include "tell.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define SILENCE_S 5 /* phosd is not there, or hangs */

struct question {
    uint64_t id;
    uint8_t session[16];
    uint64_t block;
    bool asked, answered;
    bool coming; /* phosd has said so since it was looked at last */
    int descriptor;
    size_t size;
    CUdevice device;
    char error[160];
    struct question *next;
};
static pthread_mutex_t question_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list and what is in it; taken last */
static pthread_cond_t question_answered = PTHREAD_COND_INITIALIZER;
static struct question *questions;
static uint64_t last_question;

bool phos_ask_all(void)
{
    PHOS_LOCKED(&question_lock);
    for (struct question *q = questions; q; q = q->next) {
        if (q->asked)
            continue;
        Phos__Wire__TokenResolve resolve = PHOS__WIRE__TOKEN_RESOLVE__INIT;
        resolve.session = (ProtobufCBinaryData){sizeof q->session, q->session};
        resolve.block = q->block;
        resolve.waits = true;
        ENVELOPE(envelope, q->id, TOKEN_RESOLVE, token_resolve, &resolve);
        if (!phos_tell_send(&envelope, NULL, 0))
            return false;
        q->asked = true;
    }
    return true;
}

/* Until it is answered, or phosd has been silent for so long. Answers whether it said meanwhile that the answer will come. With
 * the lock. */
static bool wait_answered(struct question *question)
{
    struct timespec deadline;
    bool coming = false;
    do {
        coming = coming || question->coming;
        question->coming = false;
        clock_gettime(CLOCK_REALTIME, &deadline);
        deadline.tv_sec += SILENCE_S;
        while (!question->answered && !question->coming &&
               pthread_cond_timedwait(&question_answered, &question_lock, &deadline) != ETIMEDOUT)
            continue;
    } while (!question->answered && question->coming);
    return coming;
}

bool phos_control_resolve(const uint8_t session[16], uint64_t block, int *descriptor, size_t *size, CUdevice *device,
                          bool *coming, struct phos_error *error)
{
    struct question question = {.block = block, .descriptor = -1};
    memcpy(question.session, session, sizeof question.session);
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* the list has this stack's question */
    pthread_mutex_lock(&question_lock);
    question.id = ++last_question;
    question.next = questions;
    questions = &question;
    pthread_mutex_unlock(&question_lock);
    phos_control_hurry();
    pthread_mutex_lock(&question_lock);
    *coming = wait_answered(&question);
    struct question **link = &questions;
    while (*link != &question)
        link = &(*link)->next;
    *link = question.next;
    pthread_mutex_unlock(&question_lock);
    pthread_setcancelstate(cancel, &cancel);
    if (!question.answered)
        return phos_fail(error, CUDA_SUCCESS, "phosd did not answer for shared memory");
    if (question.error[0])
        return phos_fail(error, CUDA_SUCCESS, "%s", question.error);
    *descriptor = question.descriptor;
    *size = question.size;
    *device = question.device;
    return true;
}

void phos_tell_answer(struct phos_packet *packet)
{
    Phos__Wire__TokenResolved *resolved = packet->envelope->token_resolved;
    PHOS_LOCKED(&question_lock);
    for (struct question *q = questions; q; q = q->next) {
        if (q->id != packet->envelope->id || q->answered)
            continue;
        q->coming = resolved->coming;
        if (q->coming)
            continue;
        q->size = resolved->size;
        q->device = (CUdevice)resolved->device;
        snprintf(q->error, sizeof q->error, "%s", resolved->error);
        if (packet->descriptor_count) {
            q->descriptor = packet->descriptors[0];
            packet->descriptors[0] = -1;
        } else if (!q->error[0])
            snprintf(q->error, sizeof q->error, "phosd sent no descriptor for shared memory");
        q->answered = true;
    }
    pthread_cond_broadcast(&question_answered);
}

void phos_ask_again(void)
{
    PHOS_LOCKED(&question_lock);
    for (struct question *q = questions; q; q = q->next)
        q->asked = false;
}

void phos_ask_forked(void)
{
    pthread_cond_init(&question_answered, NULL);
    pthread_mutex_init(&question_lock, NULL);
    questions = NULL;
}
