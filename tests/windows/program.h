/* What the parts of the random program share. */
#pragma once
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
#define STREAMS 4
#define BUFFERS 24
#define HOST_PAGES 256u
#define MOST_PAGES 2560u
#define GONE ((CUstream)(uintptr_t)~0ull) /* a stream that was destroyed: order behind it by event */

#define CHECK(call) check_at(call, #call, __LINE__)
/* One that a capture may forbid, and does not survive. */
#define UNSAFE(call) (pthread_rwlock_rdlock(&capturing), CHECK(call), pthread_rwlock_unlock(&capturing))

struct kernels {
    CUmodule module;
    CUfunction fill, add, count_up, derive, scatter, aim, shoot;
};

struct gpu {
    int number;
    CUcontext context;
    struct kernels kernels;
};
#define GPUS 8

extern struct gpu gpus[GPUS];
extern unsigned gpu_count;

struct range {
    unsigned first, pages;
};

/* What was done to a buffer, for when it turns out to be wrong. */
struct note {
    const char *what;
    struct range range;
    uint32_t value;
    CUstream stream;
    struct timespec when;
};
#define NOTES 12u

struct buffer {
    CUdeviceptr address;
    unsigned pages;
    uint32_t *model; /* the first word of each page */
    const char *kind;
    const struct gpu *gpu;
    size_t mapped;   /* of the application's own mappings: bytes */
    CUevent event;   /* behind its last use */
    CUstream last;   /* in which that was */
    struct note notes[NOTES];
    unsigned noted;
};

/* Of one thread alone. */
struct worker {
    pthread_t thread;
    const struct gpu *gpu; /* where the thread computes; most of its memory is there */
    uint64_t seed;
    CUstream streams[STREAMS]; /* legacy, blocking, non-blocking, the thread's own */
    struct buffer buffers[BUFFERS];
    unsigned count, pages, most; /* buffers; pages in use and allowed */
    char *pinned, *pageable;
    CUstream pinned_in; /* what reads the pinned memory */
    uint32_t *words;
    CUdeviceptr table;
    struct buffer *in_graph[2];
    CUgraph graph;
    CUgraphExec runnable;
    CUgraphNode node;
    uint32_t value, value_set;
    struct range add_to, set_to;
};

extern char *ptx;
extern atomic_int stop;
/* Write: a capture in the mode that forbids unsafe calls to all threads, and the synchronisation of a context; read: such a
 * call, and a capture that forbids nothing. */
extern pthread_rwlock_t capturing;

void check_at(CUresult result, const char *what, int line);
unsigned draw(struct worker *w, unsigned below);
CUstream any_stream(struct worker *w);
struct range any_range(struct worker *w, const struct buffer *b);
void begin_use(struct buffer *b, CUstream stream);
void end_use(struct buffer *b, CUstream stream);
CUdeviceptr page(const struct buffer *b, unsigned number);
void note(struct buffer *b, const char *what, struct range range, uint32_t value, CUstream stream);
void launch(struct worker *w, CUfunction function, unsigned threads, CUstream stream, void **parameters);
void model_set(struct buffer *b, struct range r, uint32_t value, bool counting);
void model_add(struct buffer *b, struct range r, uint32_t value);
void verify(struct worker *w, struct buffer *b, struct range r, CUstream stream);

/* program_parts.c */
char *read_text(const char *path);
void load_kernels(struct kernels *to);
void set_up(struct worker *w, unsigned most);
void replace_buffer(struct worker *w, unsigned which);
void use_graph(struct worker *w, struct buffer *a, struct buffer *b);
#define POLLS 4
void *poll_always(void *number);
