#include "gate.h"
#include "clock.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

__thread struct phos_thread phos_self;
_Atomic uint32_t phos_gate_word = PHOS_GATE_UNBOUND;
bool (*phos_gate_bind)(void);

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER; /* guards list_head and every record's links */
static struct phos_thread list_head = {.next = &list_head, .previous = &list_head};
static pthread_key_t exit_key; /* written once by phos_gate_init, before any thread registers */
static atomic_bool exit_key_made;

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    /* EINTR after a signal and after CRIU alike: the caller looks again. */
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void thread_unlist(struct phos_thread *self)
{
    pthread_mutex_lock(&list_lock);
    if (self->next) {
        self->next->previous = self->previous;
        self->previous->next = self->next;
        self->next = self->previous = NULL;
    }
    pthread_mutex_unlock(&list_lock);
}

static void thread_ends(void *record)
{
    struct phos_thread *self = record;
    self->ends++;
    thread_unlist(self);
    atomic_store_explicit(&self->traced, 0, memory_order_release);
    atomic_store_explicit(&self->state, PHOS_THREAD_NEW, memory_order_release);
}

/* False: not now, the next call tries again. There is no list before cuInit. */
static bool thread_enlist(struct phos_thread *self)
{
    /* glibc runs destructors four times at most. A thread whose other destructors still call CUDA in the last round would
     * leave its record, which lives in its thread-local storage, on the list for ever: such a thread stays off the list. */
    if (self->ends >= 3)
        return true;
    if (!atomic_load(&exit_key_made) || pthread_setspecific(exit_key, self))
        return false;
    self->tid = (int32_t)syscall(SYS_gettid);
    pthread_mutex_lock(&list_lock);
    self->next = &list_head;
    self->previous = list_head.previous;
    list_head.previous->next = self;
    list_head.previous = self;
    pthread_mutex_unlock(&list_lock);
    return true;
}

enum phos_gate_answer phos_gate_enter_slow(struct phos_thread *self, uint32_t *before, uint32_t entry)
{
    if (*before >= PHOS_THREAD_INSIDE)
        return PHOS_GATE_NESTED;
    if (*before == PHOS_THREAD_NEW && thread_enlist(self))
        *before = PHOS_THREAD_OUTSIDE;
    for (;;) {
        atomic_thread_fence(memory_order_seq_cst);
        uint32_t word = atomic_load_explicit(&phos_gate_word, memory_order_acquire);
        if (word & PHOS_GATE_LOST) {
            atomic_store_explicit(&self->state, *before, memory_order_release);
            return PHOS_GATE_REFUSED;
        }
        if (word & PHOS_GATE_CLOSED) {
            atomic_store_explicit(&self->state, *before, memory_order_release);
            futex_wait(&phos_gate_word, word);
            atomic_store_explicit(&self->state, PHOS_THREAD_INSIDE + entry, memory_order_relaxed);
            continue;
        }
        if (word & PHOS_GATE_UNBOUND) {
            if (!phos_gate_bind || !phos_gate_bind()) {
                atomic_store_explicit(&self->state, *before, memory_order_release);
                return PHOS_GATE_ABSENT;
            }
            atomic_fetch_and(&phos_gate_word, ~(uint32_t)PHOS_GATE_UNBOUND);
            continue;
        }
        if (!(word & PHOS_GATE_TRACED))
            return PHOS_GATE_PASS;
        atomic_store_explicit(&self->traced, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&phos_gate_word, memory_order_acquire) & PHOS_GATE_TRACED)
            return PHOS_GATE_TRACED_PASS;
        atomic_store_explicit(&self->traced, 0, memory_order_release);
    }
}

void phos_gate_exempt_self(void)
{
    atomic_store(&phos_self.state, PHOS_THREAD_INSIDE);
}

static bool membarrier_register(void)
{
    return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

void phos_gate_init(void)
{
    if (!atomic_load(&exit_key_made) && pthread_key_create(&exit_key, thread_ends) == 0)
        atomic_store(&exit_key_made, true);
    if (!membarrier_register())
        atomic_fetch_or(&phos_gate_word, PHOS_GATE_FENCED);
}

/* After this, every thread either has its state store visible here or sees the closed gate. */
static void barrier_everywhere(void)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&phos_gate_word) & PHOS_GATE_FENCED)
        return;
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0)
        return;
    /* EPERM: restored by a CRIU that does not carry the registration. */
    if (membarrier_register() && syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0)
        return;
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0)
        return;
    /* It worked at start and does not now. From here on calls fence themselves; those already past their load of the
     * word stored their state microseconds ago at most, and a sleep drains any store buffer. */
    atomic_fetch_or(&phos_gate_word, PHOS_GATE_FENCED);
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
}

static bool someone_inside(struct phos_gate_straggler *who)
{
    bool found = false;
    pthread_mutex_lock(&list_lock);
    for (struct phos_thread *t = list_head.next; t != &list_head && !found; t = t->next) {
        uint32_t state = atomic_load_explicit(&t->state, memory_order_acquire);
        if (t != &phos_self && state >= PHOS_THREAD_INSIDE) {
            *who = (struct phos_gate_straggler){t->tid, state - PHOS_THREAD_INSIDE};
            found = true;
        }
    }
    pthread_mutex_unlock(&list_lock);
    return found;
}

bool phos_gate_close(uint64_t timeout_ns, struct phos_gate_straggler *straggler, bool (*pump)(void))
{
    atomic_fetch_or(&phos_gate_word, PHOS_GATE_CLOSED);
    barrier_everywhere();
    uint64_t start = phos_now_ns();
    for (unsigned round = 0; someone_inside(straggler); round++) {
        if (phos_now_ns() - start >= timeout_ns || (pump && !pump())) {
            phos_gate_open();
            return false;
        }
        /* Threads leave without a word, to keep their way out free of atomics: look often at first, then less so. */
        nanosleep(&(struct timespec){.tv_nsec = round < 50 ? 20000 : 200000}, NULL);
    }
    return true;
}

void phos_gate_open(void)
{
    atomic_fetch_and(&phos_gate_word, ~(uint32_t)PHOS_GATE_CLOSED);
    futex_wake_all(&phos_gate_word);
}

static bool someone_traced(void)
{
    bool found = false;
    pthread_mutex_lock(&list_lock);
    for (struct phos_thread *t = list_head.next; t != &list_head && !found; t = t->next)
        found = t != &phos_self && atomic_load_explicit(&t->traced, memory_order_acquire);
    pthread_mutex_unlock(&list_lock);
    return found;
}

void phos_gate_trace(bool on, bool (*pump)(void))
{
    if (on) {
        atomic_fetch_or(&phos_gate_word, PHOS_GATE_TRACED);
        barrier_everywhere();
        return;
    }
    atomic_fetch_and(&phos_gate_word, ~(uint32_t)PHOS_GATE_TRACED);
    barrier_everywhere();
    for (unsigned round = 0; someone_traced(); round++) {
        if (pump)
            pump();
        nanosleep(&(struct timespec){.tv_nsec = round < 50 ? 20000 : 200000}, NULL);
    }
}

void phos_gate_lose(void)
{
    atomic_fetch_or(&phos_gate_word, PHOS_GATE_LOST);
    phos_gate_open();
}

bool phos_gate_is_closed(void)
{
    return atomic_load(&phos_gate_word) & PHOS_GATE_CLOSED;
}

void phos_gate_forked(void)
{
    pthread_mutex_init(&list_lock, NULL);
    list_head.next = list_head.previous = &list_head;
    if (phos_self.next) {
        phos_self.tid = (int32_t)syscall(SYS_gettid);
        phos_self.next = phos_self.previous = &list_head;
        list_head.next = list_head.previous = &phos_self;
    }
    phos_gate_untrace_self();
    atomic_fetch_and(&phos_gate_word, ~(uint32_t)(PHOS_GATE_CLOSED | PHOS_GATE_LOST | PHOS_GATE_TRACED));
}
