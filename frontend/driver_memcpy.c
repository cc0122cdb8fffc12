/* See driver_memcpy.h. The driver takes memcpy() from the C library by a slot that the dynamic linker has filled in, so what
 * is in the slot decides; nobody else's calls come here. It takes the version of glibc 2.2.5, for which source and
 * destination may overlap.
 *
 * Threads that help are made when there is something to copy, and end when there has been nothing for a while: when CRIU
 * looks at the process there are none. Whatever becomes of them, who calls copies all that nobody else does. */
#define _GNU_SOURCE
#include "driver_memcpy.h"
#include "clock.h"
#include "driver_object.h"
#include "log.h"
#include "thread.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SMALL ((size_t)256 << 10) /* not worth another thread's time */
#define PIECE ((size_t)128 << 10) /* that one thread copies at a time */
#define HELPERS 7
#define IDLE_NS 1000000u /* the driver's next call comes within microseconds, if it comes */
#define SPINS 1000

static const struct phos_driver_object *driver; /* the control thread's, like what follows; found once */
static void **slots[PHOS_SLOTS];
static void *before[PHOS_SLOTS];
static size_t slot_count;

static atomic_bool armed;
static _Atomic uint64_t copied;

/* What is being copied. `busy` is held by who called; the plain members are written while no helper is inside. */
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *to;
    const char *from;
    size_t bytes;
    atomic_size_t next; /* the first byte that nobody copies yet */
    atomic_bool open;
    atomic_uint inside; /* helpers that may look at all this */
} job;
static atomic_uint helpers;

static void relax(unsigned *spins)
{
    if (++*spins % SPINS == 0)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

static void copy_pieces(void)
{
    size_t at;
    while ((at = atomic_fetch_add(&job.next, PIECE)) < job.bytes)
        memcpy(job.to + at, job.from + at, job.bytes - at < PIECE ? job.bytes - at : PIECE);
}

static void *help(void *unused)
{
    (void)unused;
    unsigned spins = 0;
    pthread_setname_np(pthread_self(), "phos-memcpy");
    for (uint64_t idle_since = phos_now_ns(); phos_now_ns() - idle_since < IDLE_NS && atomic_load(&armed); relax(&spins)) {
        if (!atomic_load(&job.open))
            continue;
        atomic_fetch_add(&job.inside, 1);
        if (atomic_load(&job.open)) { /* still: now it stays until this one has left */
            copy_pieces();
            idle_since = phos_now_ns();
        }
        atomic_fetch_sub(&job.inside, 1);
    }
    atomic_fetch_sub(&helpers, 1);
    return NULL;
}

static unsigned wanted_helpers(void)
{
    cpu_set_t cpus;
    int count = sched_getaffinity(0, sizeof cpus, &cpus) ? 0 : CPU_COUNT(&cpus);
    return count < 2 ? 0 : count / 2 < HELPERS ? (unsigned)count / 2 : HELPERS;
}

/* Whether there have been any. */
static bool call_helpers(void)
{
    unsigned wanted = wanted_helpers();
    bool any = atomic_load(&helpers) > 0;
    while (atomic_load(&helpers) < wanted) {
        atomic_fetch_add(&helpers, 1);
        if (phos_thread_start(help, NULL)) {
            atomic_fetch_sub(&helpers, 1);
            break;
        }
        any = true;
    }
    return any;
}

static bool overlap(const char *to, const char *from, size_t bytes)
{
    return to < from + bytes && from < to + bytes;
}

static void *copy(void *to, const void *from, size_t bytes)
{
    if (bytes < SMALL || overlap(to, from, bytes) || !atomic_load(&armed) || pthread_mutex_trylock(&busy))
        return memmove(to, from, bytes);
    if (!call_helpers()) {
        pthread_mutex_unlock(&busy);
        return memmove(to, from, bytes);
    }
    job.to = to;
    job.from = from;
    job.bytes = bytes;
    atomic_store(&job.next, 0);
    atomic_store(&job.open, true);
    copy_pieces();
    atomic_store(&job.open, false);
    for (unsigned spins = 0; atomic_load(&job.inside); relax(&spins))
        ;
    atomic_fetch_add(&copied, bytes);
    pthread_mutex_unlock(&busy);
    return to;
}

/* Slots may lie in pages that are read-only since the driver was relocated. */
static bool put(void **slot, void *function)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *start = (char *)((uintptr_t)slot & ~(page - 1));
    bool closed = (uintptr_t)slot >= driver->relro_begin && (uintptr_t)slot < driver->relro_end;
    if (closed && mprotect(start, page, PROT_READ | PROT_WRITE))
        return false;
    __atomic_store_n(slot, function, __ATOMIC_RELEASE); /* other threads may be calling through it */
    if (closed)
        mprotect(start, page, PROT_READ);
    return true;
}

static void put_all(bool ours)
{
    for (size_t i = 0; i < slot_count; i++) {
        if (ours)
            before[i] = __atomic_load_n(slots[i], __ATOMIC_ACQUIRE);
        if (!put(slots[i], ours ? (void *)copy : before[i]))
            phos_debug("the driver's memcpy cannot be replaced: it copies alone");
    }
}

void phos_driver_memcpy_begin(bool several)
{
    atomic_store(&copied, 0);
    if (!several || atomic_load(&armed))
        return;
    if (!driver && (driver = phos_driver_object())) {
        slot_count = phos_driver_slots(driver, "memcpy", slots);
        if (!slot_count || slot_count > PHOS_SLOTS) {
            phos_debug("the driver's memcpy was found in %zu places: it copies alone", slot_count);
            slot_count = 0;
        }
    }
    put_all(true);
    atomic_store(&armed, true);
}

void phos_driver_memcpy_end(void)
{
    if (!atomic_load(&armed))
        return;
    put_all(false);
    atomic_store(&armed, false);
}

void phos_driver_memcpy_forked(void)
{
    phos_driver_memcpy_end();
    pthread_mutex_init(&busy, NULL); /* the thread that may have held it is not here, nor is any helper */
    atomic_store(&job.open, false);
    atomic_store(&job.inside, 0);
    atomic_store(&helpers, 0);
}

uint64_t phos_driver_memcpy_bytes(void)
{
    return atomic_load(&copied);
}
