/* Running the blocks of one launch on some host threads. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ptx_exec.h"

#define RESIDENT_BYTES ((size_t)1 << 30) /* memory of blocks that a worker may hold at once when blocks wait for one another */

struct ptx_shared_state {
    _Atomic uint64_t next_block;
    uint64_t block_count;
    _Atomic int stop;
    pthread_mutex_t mutex; /* the first fault */
    int error;
    struct ptx_fault fault;
    ptx_run_warp_fn run;
    uint64_t workspace[8]; /* cooperative groups keep their grid barrier here; it begins as zeros */
};

static ptx_run_warp_fn choose(void) {
#if defined(PTX_VARIANT) /* the tests try each */
    return PTX_VARIANT;
#elif defined(__x86_64__) && !defined(PTX_PORTABLE)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        return ptx_run_warp_v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")) return ptx_run_warp_v3;
#endif
    return ptx_run_warp_base;
}

static void block_free(struct ptx_worker *w, struct ptx_block *b) {
    if (b == NULL) return;
    for (uint32_t i = 0; b->warps != NULL && i < b->warp_count; i++) {
        struct ptx_warp *warp = &b->warps[i];
        for (uint32_t k = 0; k < warp->count; k++) /* a fault leaves frames behind */
            while (warp->splits[k].frame != NULL && warp->splits[k].frame != warp->base) {
                struct ptx_frame *frame = warp->splits[k].frame, *up = frame->up;
                for (uint32_t n = 0; n < warp->count; n++)
                    if (warp->splits[n].frame == frame) warp->splits[n].frame = up;
                frame->mask = 0;
                bool used = false; /* another split may be in a function that this one called */
                for (uint32_t n = 0; n < warp->count; n++)
                    for (struct ptx_frame *f = warp->splits[n].frame; f != NULL; f = f->up) used = used || f == frame;
                if (used) break;
                ptx_frame_free(w, frame);
            }
        if (warp->base != NULL) {
            free(warp->base->regs);
            free(warp->base);
        }
    }
    free(b->warps);
    free(b->shared);
    free(b->local);
    free(b);
}

static struct ptx_block *block_new(struct ptx_worker *w) {
    const unsigned *dim = w->launch->block;
    uint32_t threads = dim[0] * dim[1] * dim[2];
    struct ptx_block *b = calloc(1, sizeof *b);
    if (b == NULL) return NULL;
    b->worker = w;
    b->warp_count = (threads + PTX_WARP - 1) / PTX_WARP;
    b->warps = calloc(b->warp_count, sizeof *b->warps);
    b->shared = aligned_alloc(256, (w->shared_bytes + 256 + 255) & ~(size_t)255);
    b->local = calloc((size_t)b->warp_count * PTX_WARP + 1, w->stride);
    if (b->warps == NULL || b->shared == NULL || b->local == NULL) {
        block_free(w, b);
        return NULL;
    }
    for (uint32_t i = 0; i < b->warp_count; i++) {
        struct ptx_warp *warp = &b->warps[i];
        warp->block = b;
        warp->index = i;
        warp->local = b->local + (size_t)i * PTX_WARP * w->stride;
        warp->base = ptx_frame_new(w, w->launch->kernel->function);
        if (warp->base == NULL) {
            block_free(w, b);
            return NULL;
        }
        for (uint32_t l = 0; l < PTX_WARP; l++) {
            uint32_t t = i * PTX_WARP + l;
            warp->tid[0][l] = t % dim[0];
            warp->tid[1][l] = t / dim[0] % dim[1];
            warp->tid[2][l] = t / dim[0] / dim[1];
        }
    }
    return b;
}

static void block_start(struct ptx_worker *w, struct ptx_block *b, uint64_t number) {
    const struct ptx_launch *launch = w->launch;
    uint32_t threads = launch->block[0] * launch->block[1] * launch->block[2];
    b->number = number;
    b->id[0] = (uint32_t)(number % launch->grid[0]);
    b->id[1] = (uint32_t)(number / launch->grid[0] % launch->grid[1]);
    b->id[2] = (uint32_t)(number / launch->grid[0] / launch->grid[1]);
    b->live = threads;
    b->done_warps = 0;
    memset(b->barriers, 0, sizeof b->barriers);
    memset(b->shared, 0, w->shared_bytes);
    for (uint32_t i = 0; i < b->warp_count; i++) {
        struct ptx_warp *warp = &b->warps[i];
        uint32_t lanes = threads - i * PTX_WARP;
        warp->live = lanes >= PTX_WARP ? PTX_FULL : (1u << lanes) - 1;
        warp->arrived = 0;
        warp->base->mask = warp->live;
        warp->base->up = NULL;
        warp->base->depth = 0;
        warp->base->local_base = 0;
        warp->count = 1;
        warp->tired = false;
        warp->splits[0] = (struct ptx_split){.frame = warp->base, .mask = warp->live};
    }
}

/* Each warp of a block in turn. A block whose warps all wait without a barrier being due goes on where an exchange of lanes can be
 * forced; otherwise it can never go on. */
static enum ptx_stop run_block(struct ptx_worker *w, struct ptx_block *b, ptx_run_warp_fn run) {
    bool yielded = false;
    for (;;) {
        bool moved = false;
        for (uint32_t i = 0; i < b->warp_count; i++) {
            struct ptx_warp *warp = &b->warps[i];
            bool ready = false;
            for (uint32_t k = 0; k < warp->count; k++) ready = ready || warp->splits[k].state != PTX_WAIT_BARRIER;
            if (!ready) continue;
            uint32_t live = warp->live;
            enum ptx_stop stop = run(w, warp);
            if (stop == PTX_STOP_FAULT) return stop;
            if (stop == PTX_STOP_YIELD) yielded = true;
            for (uint32_t k = 0; k < warp->count; k++) moved = moved || (warp->splits[k].state == PTX_READY && stop != PTX_STOP_YIELD);
            moved = moved || (stop == PTX_STOP_DONE && live != 0);
        }
        if (b->live == 0) return PTX_STOP_DONE;
        for (uint32_t i = 0; !moved && i < b->warp_count; i++) /* a barrier released warps that had their turn already */
            for (uint32_t k = 0; k < b->warps[i].count; k++) moved = moved || (b->warps[i].splits[k].state == PTX_READY && !b->warps[i].tired);
        if (yielded) return PTX_STOP_YIELD;
        if (moved) continue;
        for (uint32_t i = 0; !moved && i < b->warp_count; i++) moved = ptx_force(&b->warps[i]);
        if (moved) continue;
        const struct ptx_split *s = NULL;
        struct ptx_warp *stuck = &b->warps[0];
        for (uint32_t i = 0; s == NULL && i < b->warp_count; i++)
            if (b->warps[i].count != 0) stuck = &b->warps[i], s = &stuck->splits[0];
        w->error = ptx_fault(w, stuck, s ? &s->frame->f->code[s->pc - 1] : NULL, s ? s->mask : 1, PTX_LAUNCH_FAILED, "every thread of the block waits at a barrier that others will never reach");
        return PTX_STOP_FAULT;
    }
}

static void report(struct ptx_worker *w) {
    pthread_mutex_lock(&w->state->mutex);
    if (w->state->error == 0 && w->error != 0) {
        w->state->error = w->error;
        w->state->fault = w->fault;
    }
    pthread_mutex_unlock(&w->state->mutex);
    atomic_store(&w->state->stop, 1);
}

static bool take(struct ptx_worker *w, uint64_t *number) {
    *number = atomic_fetch_add(&w->state->next_block, 1);
    return *number < w->state->block_count;
}

/* One block at a time, in order; but where a block waits for something that only another block can do, the next one is begun beside it,
 * and all of them take turns: so grid-wide barriers work without the launch saying that it has them. */
static void *work(void *argument) {
    struct ptx_worker *w = argument;
    struct ptx_block *resident = NULL, *spare = NULL;
    size_t count = 0;
    const struct ptx_function *f = w->launch->kernel->function;
    size_t warps = (w->launch->block[0] * w->launch->block[1] * w->launch->block[2] + PTX_WARP - 1) / PTX_WARP;
    size_t each = warps * f->frame_bytes + w->shared_bytes + warps * PTX_WARP * w->launch->kernel->function->local_bytes + 4096;
    bool more = true;
    while (!atomic_load_explicit(&w->state->stop, memory_order_relaxed)) {
        uint64_t number;
        bool room = count == 0 || count < RESIDENT_BYTES / each;
        if (more && room && (more = take(w, &number))) {
            struct ptx_block *b = spare != NULL ? spare : block_new(w);
            if (b == NULL) {
                w->error = PTX_OUT_OF_MEMORY;
                strcpy(w->fault.message, "there is no memory for another block");
                report(w);
                break;
            }
            spare = NULL;
            block_start(w, b, number);
            b->next = resident;
            resident = b;
            count++;
        }
        if (resident == NULL) break;
        bool finished = false;
        for (struct ptx_block **at = &resident; *at != NULL;) {
            struct ptx_block *b = *at;
            enum ptx_stop stop = run_block(w, b, w->state->run);
            if (stop == PTX_STOP_FAULT) {
                report(w);
                goto out;
            }
            if (stop != PTX_STOP_DONE) {
                at = &b->next;
                continue;
            }
            finished = true;
            *at = b->next;
            count--;
            if (spare == NULL) spare = b;
            else block_free(w, b);
        }
        (void)finished;
    }
out:
    while (resident != NULL) {
        struct ptx_block *next = resident->next;
        block_free(w, resident);
        resident = next;
    }
    block_free(w, spare);
    while (w->free_frames != NULL) {
        struct ptx_frame *next = w->free_frames->up;
        free(w->free_frames->regs);
        free(w->free_frames);
        w->free_frames = next;
    }
    return NULL;
}

static int check(const struct ptx_launch *launch, struct ptx_fault *fault, uint64_t *blocks) {
    const struct ptx_kernel *k = launch->kernel;
    const char *why = NULL;
    int error = PTX_INVALID_VALUE;
    uint64_t threads = (uint64_t)launch->block[0] * launch->block[1];
    threads = threads > 1024 ? threads : threads * launch->block[2];
    uint64_t cluster = 1;
    for (int i = 0; i < 3; i++) cluster *= launch->cluster[i] ? launch->cluster[i] : 1;
    cluster *= k->function->cluster;
    *blocks = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
    if (*blocks == 0 || threads == 0) why = "a launch needs at least one block and one thread";
    else if (threads > 1024 || launch->block[2] > 64) why = "a block has at most 1024 threads, and 64 in z";
    else if (launch->grid[1] > 65535 || launch->grid[2] > 65535 || launch->grid[0] > INT32_MAX) why = "the grid is too large";
    else if (k->function->required[0] != 0 && memcmp(k->function->required, launch->block, sizeof launch->block) != 0) why = "the kernel requires another block size";
    else if (launch->dynamic_shared > PTX_MAX_SHARED || k->static_shared + launch->dynamic_shared > PTX_MAX_SHARED) why = "a block would use too much shared memory";
    else if (threads > k->function->max_threads) why = "the kernel was compiled for smaller blocks", error = PTX_OUT_OF_RESOURCES;
    else if (cluster != 1) why = "clusters of several blocks are not supported", error = PTX_NOT_SUPPORTED;
    else return PTX_OK;
    strcpy(fault->message, why);
    return error;
}

int ptx_launch_check(const struct ptx_launch *launch, struct ptx_fault *fault) {
    uint64_t blocks;
    return check(launch, fault, &blocks);
}

int ptx_launch_run(const struct ptx_launch *launch, struct ptx_fault *fault) {
    struct ptx_fault none;
    struct ptx_shared_state state = {.run = choose()};
    uint64_t blocks;
    if (fault == NULL) fault = &none;
    memset(fault, 0, sizeof *fault);
    int error = check(launch, fault, &blocks);
    if (error != 0) return error;
    const struct ptx_kernel *k = launch->kernel;
    unsigned threads = launch->threads == 0 ? 1 : launch->threads > 256 ? 256 : launch->threads;
    if (threads > blocks) threads = (unsigned)blocks;
    state.block_count = blocks;
    pthread_mutex_init(&state.mutex, NULL);
    struct ptx_worker *workers = calloc(threads, sizeof *workers);
    pthread_t *ids = calloc(threads, sizeof *ids);
    if (workers == NULL || ids == NULL) {
        free(workers);
        free(ids);
        pthread_mutex_destroy(&state.mutex);
        return PTX_OUT_OF_MEMORY;
    }
    for (unsigned i = 0; i < threads; i++) {
        struct ptx_worker *w = &workers[i];
        w->launch = launch;
        w->state = &state;
        w->index = i;
        w->stop = &state.stop;
        w->constants = k->module->constants + k->module->constant_bytes;
        w->shared_bytes = (uint32_t)(k->static_shared + launch->dynamic_shared);
        w->local_bytes = k->stack;
        w->stride = ((k->stack + 63) & ~63u) + 64; /* off the powers of two: lanes would share cache sets */
        w->workspace = (uint64_t)(uintptr_t)state.workspace;
    }
    unsigned started = 1;
    for (; started < threads; started++)
        if (pthread_create(&ids[started], NULL, work, &workers[started]) != 0) break; /* fewer will do */
    work(&workers[0]);
    for (unsigned i = 1; i < started; i++) pthread_join(ids[i], NULL);
    pthread_mutex_destroy(&state.mutex);
    free(workers);
    free(ids);
    if (state.error != 0) *fault = state.fault;
    return state.error;
}
