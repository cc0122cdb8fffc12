/* The interpreter's state: workers (host threads) run blocks, blocks have warps, a warp's lanes are grouped in splits.
 *
 * A split is a set of lanes of one warp that share a frame and a program counter. Of the splits that can run, the one in the deepest
 * frame and there with the lowest program counter goes first, and it stops where it reaches another one's counter, where both become
 * one: so lanes that diverged meet again at the first instruction they have in common, whatever the shape of the control flow.
 * A split that has jumped backwards many times while others wait steps aside, so that lanes which wait for one another in loops all
 * get on.
 */
#ifndef SOFTGPU_PTX_EXEC_H
#define SOFTGPU_PTX_EXEC_H

#include <stdatomic.h>

#include "ptx_ir.h"

#define PTX_RANGES 4
#define PTX_BARRIERS 16
#define PTX_PATIENCE 2048      /* backward jumps before another split gets its turn */
#define PTX_SLICE 200000       /* backward jumps before another warp gets its turn */

enum ptx_split_state { PTX_READY, PTX_WAIT_BARRIER, PTX_WAIT_WARP };
enum ptx_stop { PTX_STOP_DONE, PTX_STOP_BLOCKED, PTX_STOP_YIELD, PTX_STOP_FAULT };

struct ptx_frame {
    struct ptx_frame *up;
    const struct ptx_function *f;
    unsigned char *regs;
    uint32_t room;       /* bytes at regs */
    uint32_t local_base; /* of the function's variables in each lane's local memory */
    uint32_t mask;       /* lanes inside */
    uint32_t return_pc;
    uint32_t depth;
    const struct ptx_ext *call;
};

struct ptx_split {
    struct ptx_frame *frame;
    uint32_t pc, mask;
    uint8_t state;
    uint8_t go;      /* the exchange at pc has all its lanes */
    uint8_t barrier; /* which one it waits for; PTX_BARRIERS: the cluster's */
    uint64_t turn;   /* when it last ran */
};

struct ptx_block;
struct ptx_warp {
    struct ptx_block *block;
    struct ptx_split splits[PTX_WARP];
    uint32_t count;
    uint32_t live; /* lanes that exist and have not exited */
    uint32_t arrived; /* lanes that have been at the cluster's barrier, which others have not */
    uint32_t index;
    uint64_t turns;
    bool tired;    /* it gave way: another of its splits goes first next time */
    struct ptx_frame *base;
    unsigned char *local; /* of lane 0; the next lane's is `stride` on */
    uint32_t tid[3][PTX_WARP];
};

struct ptx_barrier {
    uint32_t waiting;  /* lanes that have arrived */
    uint32_t weight;   /* the same, partial warps counted as whole ones: what an explicit count means */
    uint32_t expected; /* 0: every live thread */
    uint32_t count;    /* bar.red: lanes whose predicate held */
    bool all, any;
};

struct ptx_worker;
struct ptx_block {
    struct ptx_worker *worker;
    uint32_t id[3];
    uint64_t number;
    uint32_t warp_count, live, done_warps;
    struct ptx_warp *warps;
    unsigned char *shared;
    unsigned char *local;
    struct ptx_barrier barriers[PTX_BARRIERS];
    struct ptx_block *next;
};

struct ptx_shared_state; /* of the launch: ptx_launch.c */
struct ptx_worker {
    const struct ptx_launch *launch;
    struct ptx_shared_state *state;
    const unsigned char *constants; /* the end of the table */
    struct ptx_range ranges[PTX_RANGES];
    uint32_t shared_bytes, local_bytes, stride;
    uint32_t index;
    struct ptx_frame *free_frames;
    _Atomic int *stop; /* set once another worker has met a fault */
    int error;
    struct ptx_fault fault;
    uint64_t workspace; /* grid barrier memory of a cooperative launch */
    uint64_t executed;
};

/* ptx_exec_*.c: the same source compiled for several instruction sets */
typedef enum ptx_stop (*ptx_run_warp_fn)(struct ptx_worker *w, struct ptx_warp *warp);
enum ptx_stop ptx_run_warp_base(struct ptx_worker *w, struct ptx_warp *warp);
enum ptx_stop ptx_run_warp_v3(struct ptx_worker *w, struct ptx_warp *warp);
enum ptx_stop ptx_run_warp_v4(struct ptx_worker *w, struct ptx_warp *warp);

/* ptx_sched.c */
struct ptx_split *ptx_pick(struct ptx_warp *warp, bool fair, uint32_t *stop);
bool ptx_add_split(struct ptx_warp *warp, struct ptx_frame *frame, uint32_t pc, uint32_t mask);
void ptx_drop_split(struct ptx_warp *warp, struct ptx_split *split);
bool ptx_force(struct ptx_warp *warp);
struct ptx_frame *ptx_frame_new(struct ptx_worker *w, const struct ptx_function *f);
void ptx_frame_free(struct ptx_worker *w, struct ptx_frame *frame);
bool ptx_exit_lanes(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, uint32_t m);
int ptx_barrier_arrive(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_split *split, const struct ptx_ins *in, const unsigned char *id, const unsigned char *count, uint32_t pred, uint32_t m, bool *waits);
bool ptx_cluster_arrive(struct ptx_warp *warp, uint32_t m); /* whether others may go on now */
bool ptx_cluster_wait(struct ptx_warp *warp, struct ptx_split *split); /* whether the split has to wait */
int ptx_call(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_split *split, const struct ptx_ins *in, const struct ptx_function *f, uint32_t m);
void ptx_return(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, uint32_t m);
void ptx_wait_warp(struct ptx_split *split);

/* ptx_access.c: each gives 0 or the fault's number, with w->fault filled in */
int ptx_fault(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_ins *in, uint32_t m, int error, const char *format, ...) __attribute__((format(printf, 6, 7)));
bool ptx_range_find(struct ptx_worker *w, uint64_t address, uint64_t size, bool write);
int ptx_resolve(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_frame *frame, const struct ptx_ins *in, uint32_t space, uint32_t m, const uint64_t *address, uint32_t size, bool write, unsigned char **host);
void ptx_addresses(const struct ptx_ins *in, const unsigned char *base, uint32_t m, uint64_t *address);
int ptx_load(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, const unsigned char *base, uint32_t m);
int ptx_store(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, const unsigned char *base, uint32_t m);
void ptx_load_param(struct ptx_worker *w, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m);
int ptx_copy_async(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m);

/* ptx_atomic.c */
int ptx_atomic(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m);

/* ptx_warp.c */
void ptx_shuffle(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m);
void ptx_vote(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m);
void ptx_match(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m);
void ptx_redux(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m);
void ptx_elect(const struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m);
void ptx_special(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_ins *in, void *d);
void ptx_pack(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, void *d);
void ptx_unpack(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m);

/* ptx_math.c, ptx_cvt.c, ptx_int.c: 32 lanes each; d may be a */
void ptx_fp(const struct ptx_ins *in, void *d, const void *a, const void *b, const void *c);
void ptx_cvt(const struct ptx_ins *in, void *d, const void *a, const void *b);
uint32_t ptx_compare_half(const struct ptx_ins *in, const void *a, const void *b, uint32_t *second);
uint32_t ptx_testp(const struct ptx_ins *in, const void *a);
void ptx_int(const struct ptx_ins *in, void *d, const void *a, const void *b, const void *c, const void *e, uint32_t *carry, uint32_t m);

/* ptx_mma.c: whole warps only */
void ptx_mma(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in);
int ptx_ldmatrix(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in);

/* ptx_builtin.c */
int ptx_builtin(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m);

static inline const unsigned char *ptx_operand(const struct ptx_frame *frame, const unsigned char *constants, int32_t o) {
    return (o >= 0 ? frame->regs : constants) + o;
}

#endif
