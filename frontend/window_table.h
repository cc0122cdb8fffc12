/* The tables that phosd and the frontends share during the window of a concurrent checkpoint or of a lazy restore. phosd
 * makes them, in memfds; gpu_engine/cow/chunk_table.c and window*.c are the only code that reads or writes them.
 *
 * One chunk table for the whole checkpoint, because processes of a tree may map the same block:
 *
 *     UNSAVED ──phosd──▶ SAVING ──phosd──▶ SAVED           phosd copies the original
 *        └──frontend──▶ SHADOWING ──frontend──▶ SHADOWED ──phosd──▶ SAVED
 *                           └──frontend──▶ UNSAVED         (the driver refused the copy)
 *
 * The first step out of UNSAVED is a compare-and-swap, whoever takes it owns the chunk; the others are stores by the
 * owner. After SAVED anybody may write to the chunk. The states of a frontend say which process it is, because it may end
 * with a chunk in its hands, and SHADOWED says which slot. In a lazy restore SAVED means that the chunk's data is there,
 * before it nobody may read or write it, and phosd alone changes the states.
 *
 * One window table for each process: which chunks its blocks have, the slots of its shadow pools, a queue of chunks that
 * phosd should see to first, and the order in which the process first touched, and first wrote to, its chunks. */
#pragma once
#include <stdint.h>

#define PHOS_CHUNKS_MAGIC 0x314b4e4843534f50ull
#define PHOS_WINDOW_MAGIC 0x31444e4957534f50ull

enum phos_window_mode {
    PHOS_WINDOW_COW = 0,
    PHOS_WINDOW_LAZY = 1,   /* a call waits for what it may read or write */
    PHOS_WINDOW_STRICT = 2, /* likewise, and nothing can be accessed before its data is there: a wrong guess faults */
    PHOS_WINDOW_WATCH = 3,  /* before a checkpoint: first touches are noted, nothing is copied and nobody waits */
};

enum phos_chunk_state {
    PHOS_CHUNK_UNSAVED = 0,
    PHOS_CHUNK_SAVING = 1,
    PHOS_CHUNK_SAVED = 2,
    PHOS_CHUNK_SHADOWED = 0x10000, /* + process number << 16 + slot number; SHADOWING: + PHOS_SLOT_NONE */
};
#define PHOS_SLOT_NONE 0xffffu
#define PHOS_SLOTS_MOST 0x10000u
#define PHOS_PROCESSES_MOST 0x7ffeu
#define PHOS_TOUCH_WRITES 0x80000000u /* beside a chunk's number in the list of first touches: it may have been written to */

struct phos_chunk_table {
    uint64_t magic;
    uint32_t chunk_bytes;
    uint32_t chunks;
    uint32_t closed; /* phosd: all is saved, or nobody wants it any more */
    uint32_t zero[11];
    uint32_t state[]; /* atomically */
};

struct phos_window_block {
    uint64_t block; /* its number in the process's session */
    uint64_t size;  /* bytes */
    uint32_t first_chunk;
    uint32_t zero;
};

/* The memory of a shadow pool: PHOS_POOL_FLAGS bytes of flags, one 32-bit word a slot and then one a transfer, which the
 * GPU sets to the ticket when the copy that it stands behind has been made; then the slots, chunk_bytes each. */
#define PHOS_POOL_FLAGS ((uint64_t)2 << 20)
#define PHOS_TRANSFERS 64u

struct phos_window_pool {
    uint32_t device; /* as the frontend counts */
    uint32_t first_slot, slots;
    uint32_t zero;
    uint64_t bytes;
};

struct phos_window_slot {
    uint32_t ticket; /* 0: free. Set by the frontend, cleared by phosd */
    uint32_t chunk;
};

struct phos_window_transfer {
    uint32_t ticket; /* 0: none. Set by the frontend when the copy has been queued, cleared by phosd */
    uint32_t pool;
};

struct phos_window_counts { /* since the window began; nanoseconds */
    uint64_t calls, call_ns;         /* traced calls, and what tracing them cost, waiting included */
    uint64_t shadowed;               /* chunks copied aside */
    uint64_t waits, wait_ns;         /* calls that waited for a chunk to be saved */
    uint64_t anything;               /* calls that may write anywhere: they waited for everything */
    uint64_t stream_waits;           /* a stream that waited for another's copy */
    uint64_t failures;               /* shadow copies that the driver refused */
};

#define PHOS_RECENT 8u
#define PHOS_RECENT_NAME 120u

/* What phosd wants to know of a lazy restore. */
struct phos_window_loading {
    uint64_t first_launch_ns; /* CLOCK_REALTIME just before the first kernel or graph; 0: none yet */
    uint64_t opened, open_ns; /* mappings that were given access, and what that took */
    uint32_t fault;           /* what the driver said of work queued in a strict window: a wrong guess; 0: nothing */
    uint32_t launches;        /* kernels launched; the last of them are in `recent`, at launches % PHOS_RECENT */
    char recent[PHOS_RECENT][PHOS_RECENT_NAME];
};

struct phos_window_table {
    uint64_t magic, size;
    uint32_t process; /* number in the checkpoint */
    uint32_t blocks, pools, slots, queue;
    uint32_t prioritise;   /* application transfers first */
    uint32_t tail;         /* of the queue: how many were put in; each chunk at most twice */
    uint32_t transferring; /* calls that move data between host and device and have not returned */
    uint64_t blocks_at, pools_at, slots_at, transfers_at, queue_at; /* bytes from the start */
    struct phos_window_counts counts;
    uint32_t mode;         /* enum phos_window_mode */
    uint32_t order;        /* room in the list of first touches; a chunk that is read first comes again when it is written */
    uint32_t touched;      /* how many are in it */
    uint32_t zero;
    uint64_t order_at;     /* bytes from the start */
    struct phos_window_loading loading;
    uint64_t faulted;      /* bit p: work in the context of pool p's copies has failed; what is not there yet never will be */
    uint32_t waited_for_all;             /* a call that may write anywhere has put its name here */
    char culprit[PHOS_RECENT_NAME];
};
