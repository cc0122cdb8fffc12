/* The software GPU's internal interface: a libcuda.so.1 whose device is this machine's CPU and memory.
 *
 * Handles are pointers to the structures below, registered in handle.c so that a stale or wild one is refused, not followed.
 *
 * Lock order (take in this order, never the other way):
 *   device->lock  >  context->lock  >  sg_graph_lock  >  sg_use (memory.c)  >  sg_map_lock (memory.c)  >  handle.c's
 * No lock is held while waiting for work of a stream, except sg_use for reading by the work itself.
 */
#ifndef SOFTGPU_H
#define SOFTGPU_H

#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "ptx.h"
#include "softgpu_impl.h"

#define SG_EXPORT __attribute__((visibility("default")))
#define SG_MAX_DEVICES 16
#define SG_GRANULARITY ((size_t)2 << 20)

/* ---- settings.c: the environment, read once at cuInit or first use ---- */
struct sg_settings {
    int devices;
    uint64_t memory;          /* bytes per device */
    char name[128];
    double copy_bandwidth;    /* bytes per second and direction; 0: as fast as memcpy */
    char copy_hold[256];      /* a file: as long as it exists, no copy to or from a device ends; empty: none */
    uint64_t copy_hold_bytes; /* but for shorter ones */
    unsigned launch_latency;  /* microseconds */
    unsigned queue;           /* operations that a stream may hold before who submits waits; 0: any number */
    unsigned registers;       /* of a multiprocessor; 0: they are not counted */
    int driver_version;
    unsigned threads;         /* host threads per kernel launch */
    unsigned toggle_ms;       /* least duration of a checkpoint and of a restore */
    unsigned poll_us;         /* duration of a question about the state of a stream or an event */
    char toggle_hold[256];    /* with .checkpoint or .restore: a file; as long as it exists, none ends; empty: none */
    uint64_t residue;         /* bytes that a checkpoint saves besides device memory */
    char machine[64];         /* processes with different values here do not see each other's memory in the account */
};
const struct sg_settings *sg_settings(void);
void sg_log(const char *format, ...) __attribute__((format(printf, 1, 2))); /* one sentence on stderr */
uint64_t sg_now_ns(void);
void sg_sleep_until_ns(uint64_t when);
void sg_sleep_ns(uint64_t duration);

/* ---- api.c: what every exported function does first and last ---- */
enum sg_stream_kind { SG_STREAM_ANY, SG_STREAM_LEGACY, SG_STREAM_PTSZ };
struct sg_entry {
    const char *name, *symbol;
    int version;
    enum sg_stream_kind stream;
    bool implemented;
    void (*function)(void);
};
extern const struct sg_entry sg_entries[];
extern const unsigned sg_entry_count;

struct sg_thread {
    bool per_thread_default; /* the current call is a _ptsz or _ptds spelling */
    bool in_callback;        /* a host function of a stream is running: no CUDA call is permitted */
    unsigned depth;          /* gated calls entered and not left */
    int cancel;              /* whether it can be cancelled outside of them */
};
extern _Thread_local struct sg_thread sg_thread;

CUresult sg_enter(unsigned index, bool gated, bool per_thread);
CUresult sg_leave(bool gated, CUresult result);
CUresult sg_unsupported(unsigned index);
bool sg_initialized(void);
bool sg_forked(void);
/* Gate for the checkpoint: false when calls did not drain before the deadline (ns, 0 = none); the gate is open again then. */
bool sg_gate_close(uint64_t deadline);
/* From the beginning of a checkpoint to the end of the restore. */
void sg_set_away(bool is_away);
/* Around calls that look at what is not there while the process is away, and that no gate keeps from it: they crash then. They
 * hold a lock, which the checkpoint and the restore need, too (sg_polls_stop, sg_polls_go). */
void sg_poll_begin(unsigned index);
void sg_poll_end(void);
void sg_polls_stop(void);
void sg_polls_go(void);
void sg_gate_open(void);
void sg_gate_fail(void); /* open for ever, every call refused: the process lost its GPU state */

/* ---- handle.c ---- */
enum sg_kind {
    SG_CONTEXT = 1, SG_STREAM, SG_EVENT, SG_MODULE, SG_FUNCTION, SG_LIBRARY, SG_KERNEL, SG_GRAPH, SG_NODE, SG_EXEC,
    SG_POOL, SG_LINK, SG_ARRAY, SG_USER_OBJECT, SG_PHYSICAL, SG_GONE, /* a context that was destroyed */
};
bool sg_handle_add(void *object, enum sg_kind kind);
bool sg_handle_is(const void *object, enum sg_kind kind);
bool sg_handle_remove(const void *object, enum sg_kind kind); /* false: it was not there (a double free) */

/* ---- device.c ---- */
struct sg_engine { /* a copy engine: one transfer at a time, the rest queue behind it */
    pthread_mutex_t lock;
    uint64_t busy_until; /* ns; under lock */
};
enum { SG_H2D, SG_D2H, SG_D2D, SG_DIRECTIONS };
struct sg_device {
    int ordinal;
    _Atomic int physical; /* which simulated GPU serves this ordinal: changed by a restore with gpuPairs */
    pthread_mutex_t lock; /* primary context and pool */
    struct sg_context *primary, *former; /* the former was destroyed; its structure stays */
    unsigned primary_references, primary_flags;
    struct sg_pool *default_pool, *current_pool;
    struct sg_engine engines[SG_DIRECTIONS];
};
bool sg_devices_init(void);
struct sg_device *sg_device(CUdevice ordinal); /* null: no such device */
CUuuid sg_uuid_of(int physical);
int sg_physical_of_uuid(const CUuuid *uuid); /* -1: none */

/* ---- context.c ---- */
struct sg_context {
    struct sg_device *device;
    bool primary;
    struct sg_context *whole; /* of a green context: the primary one that it is a part of */
    _Atomic unsigned attached; /* cuCtxAttach calls that cuCtxDetach has not undone */
    unsigned flags, api_version;
    uint64_t id;
    _Atomic int sticky; /* the CUresult that every call answers after a fault */
    pthread_mutex_t lock; /* everything below, and the queues of the context's streams */
    struct sg_stream *legacy;
    struct sg_stream *marks; /* operations that stand for all there was when they were submitted; made when first needed */
    struct sg_stream *streams; /* list through ->next, the legacy one included */
    struct sg_module *modules;
    size_t limits[CU_LIMIT_MAX];
    bool resizes;         /* the stack limit has changed: the next kernel finds local memory of another size */
    struct sg_op *resize; /* that kernel, which everything queued behind it in any stream waits for; held by a reference */
    CUfunc_cache cache;
    CUsharedconfig shared_config;
    uint32_t peers; /* bit per device whose memory this context may reach */
};
CUresult sg_context_current(struct sg_context **out); /* INVALID_CONTEXT, or the context's sticky error */
CUresult sg_context_get(CUcontext handle, struct sg_context **out); /* null means the current one */
struct sg_context *sg_context_first(int device); /* any live context of a device, or null */
void sg_context_fail(struct sg_context *context, CUresult error);
/* Who owns what is made in a context: a green one has no memory, events and limits of its own (580.159, H100). */
static inline struct sg_context *sg_context_owner(struct sg_context *context)
{
    return context->whole ? context->whole : context;
}
void sg_crash_if_gone(const struct sg_context *context, const char *what); /* unless the context is alive */
CUresult sg_context_synchronize(struct sg_context *context);
void sg_contexts_each(void (*visit)(struct sg_context *, void *), void *cookie);
CUresult sg_primary_retain(struct sg_device *device, struct sg_context **out);

/* ---- memory.c: address space, physical memory, accounting ---- */
enum sg_memory { SG_MEM_DEVICE, SG_MEM_VMM, SG_MEM_HOST, SG_MEM_REGISTERED, SG_MEM_MANAGED };

/* Physical memory: a memfd, or (reached by mappings alone) what its descriptor was. */
struct sg_physical {
    _Atomic int references; /* handles and mappings */
    _Atomic int handles;    /* handles alone: 0 means released by the application */
    int fd;                 /* -1 while checkpointed */
    int device;             /* ordinal; -1: host memory */
    size_t size;
    bool imported;
    atomic_bool exported;
    CUmemAllocationProp prop;
    struct sg_physical *next, *previous; /* list of all, under sg_map_lock */
    size_t residue;                      /* offset in the residue while checkpointed */
};

/* A stretch of address space that is accessible, or may become so. */
struct sg_range {
    uint64_t begin, end;
    enum sg_memory kind;
    int device; /* ordinal, or -1 */
    struct sg_context *context;
    uint32_t readable, writable; /* bit per device */
    unsigned flags;
    uint64_t id;
    struct sg_physical *physical; /* VMM */
    bool slab;                    /* serves small allocations */
    bool imported;                /* another process's */
    size_t residue;
};
struct sg_allocation { /* what cuMemAlloc gave: a whole range, or part of a slab */
    uint64_t begin, size;
    struct sg_range *range;
    struct sg_context *context; /* null: it has ended, which memory of a pool outlives */
    struct sg_pool *pool;
    uint64_t id;
    int device;
    bool graph; /* allocated in a capture: can be freed in one */
    bool synchronous;
    bool unused; /* a stream will free it: CU_MEMPOOL_ATTR_USED_MEM_CURRENT counts it no more */
};

bool sg_memory_init(void);
CUresult sg_allocate(struct sg_context *context, size_t size, struct sg_pool *pool, uint64_t *out);
CUresult sg_free(uint64_t address, bool *found_pool_memory);
/* Memory of another process, mapped at `begin`, as an allocation; `pool`: the imported one it is of, or null. */
CUresult sg_allocation_import(struct sg_context *context, uint64_t begin, size_t mapped, uint64_t offset, size_t size, int device,
                              struct sg_pool *pool);
bool sg_find_allocation(uint64_t address, struct sg_allocation *out);
void sg_make_synchronous(uint64_t address, bool synchronous);
void sg_make_of_graph(uint64_t address);
void sg_set_unused(uint64_t address, bool unused);
bool sg_find_range(uint64_t address, struct sg_range *out); /* a copy; the pointers in it are only for comparing */
/* True when all of [address, address+size), which may span neighbouring ranges, may be accessed: by a kernel of `context`, or
 * (null) by a copy engine, which reaches what any device may. */
bool sg_accessible(const struct sg_context *context, uint64_t address, size_t size, bool write);
bool sg_range_allows(const struct sg_range *range, const struct sg_context *context, bool write);
bool sg_is_device_memory(uint64_t address, int *device);
bool sg_is_pinned(uint64_t address);
/* Held while something touches device memory by its address; sg_use_exclusive while access is taken away. */
void sg_use_begin(void);
void sg_use_end(void);
void sg_use_exclusive_begin(void);
void sg_use_exclusive_end(void);
void sg_memory_free_context(struct sg_context *context);
uint64_t sg_next_id(void);

extern pthread_mutex_t sg_map_lock;
/* Sorted array of things that start with {begin, end or size}; under sg_map_lock. */
struct sg_map {
    void **items;
    size_t count, capacity;
};
size_t sg_map_upper(const struct sg_map *map, uint64_t address); /* index of the first item with begin > address */
bool sg_map_insert(struct sg_map *map, void *item);
void sg_map_remove(struct sg_map *map, const void *item);
extern struct sg_map sg_ranges, sg_allocations; /* struct sg_range, struct sg_allocation; under sg_map_lock */
extern struct sg_physical *sg_physicals;        /* under sg_map_lock */
struct sg_range *sg_range_at(uint64_t address); /* under sg_map_lock */
struct sg_range *sg_range_new(uint64_t begin, size_t size, enum sg_memory kind, int device, struct sg_context *context);

/* ---- physical.c ---- */
CUresult sg_physical_create(int device, size_t size, struct sg_physical **out); /* checks the accounting */
CUresult sg_physical_wrap(int fd, struct sg_physical **out);                     /* an imported descriptor, taken over */
void sg_physical_unreference(struct sg_physical *physical);
int sg_memfd(int device, size_t size, CUresult *error); /* accounted descriptor; -1 and *error */
int sg_memfd_device(int fd);                            /* ordinal of the device a descriptor's memory is on; -2: not ours */
uint64_t sg_used(int device);                           /* bytes of a device in use by the whole machine */
void sg_used_changed(int device, int64_t change);
void sg_fd_own(int fd);    /* descriptors of ours, which a forked child closes */
void sg_fd_close(int fd);
void sg_fd_disown(int fd); /* it stays open */
void sg_fd_close_all(void);
void *sg_reserve(size_t size, size_t alignment, uint64_t hint); /* PROT_NONE address space; null: none left */

/* ---- copy.c ---- */
struct sg_extent { /* one side of a copy */
    uint64_t address; /* of the first byte */
    size_t pitch, slice;
    bool typed_device, typed_host; /* what the caller declared it to be; neither: unified */
};
struct sg_copy {
    struct sg_extent destination, source;
    size_t width, height, depth; /* bytes, rows, slices */
    void *staging;               /* owned copy of pageable source bytes */
};
struct sg_fill {
    uint64_t address;
    size_t pitch, width, height; /* width in elements */
    unsigned element, value;
};
CUresult sg_copy_check(const struct sg_copy *copy, struct sg_context *context);
CUresult sg_copy_run(const struct sg_copy *copy, struct sg_context *context);
CUresult sg_fill_check(const struct sg_fill *fill, struct sg_context *context);
CUresult sg_fill_run(const struct sg_fill *fill, struct sg_context *context);
CUresult sg_copy_from_3d(const CUDA_MEMCPY3D_v2 *parameters, struct sg_copy *out);

/* ---- stream.c, work.c ---- */
enum sg_work_type {
    SG_WORK_EMPTY, SG_WORK_KERNEL, SG_WORK_COPY, SG_WORK_FILL, SG_WORK_HOST, SG_WORK_RECORD, SG_WORK_WAIT, SG_WORK_BATCH,
    SG_WORK_FREE, SG_WORK_GRAPH, SG_WORK_CHILD, SG_WORK_ALLOC,
};
struct sg_kernel_work {
    struct sg_function *function;
    unsigned grid[3], block[3], cluster[3];
    size_t dynamic_shared;
    void *params; /* owned copy */
    size_t params_size;
    bool cooperative;
    uint64_t not_before; /* ns: the simulated launch latency */
};
struct sg_host_work {
    CUhostFn function;
    CUstreamCallback callback; /* instead of function */
    CUstream stream;
    void *data;
};
struct sg_memory_op { /* cuStreamWaitValue and cuStreamWriteValue */
    bool wait, wide;
    uint64_t address, value;
    unsigned flags;
};
struct sg_work {
    enum sg_work_type type;
    union {
        struct sg_kernel_work kernel;
        struct sg_copy copy;
        CUDA_MEMCPY3D_v2 raw;
        struct sg_fill fill;
        struct sg_host_work host;
        struct sg_event *event;
        struct { struct sg_memory_op *ops; unsigned count; } batch;
        uint64_t address;
        struct { struct sg_exec *exec; struct sg_marks *marks; };
        struct sg_graph *child;
        struct { uint64_t address; size_t size; } alloc;
    };
    struct sg_context *context;
};
bool sg_work_copy(struct sg_work *to, const struct sg_work *from); /* deep; false: out of memory */
void sg_work_clear(struct sg_work *work);
CUresult sg_work_run(struct sg_work *work, struct sg_context *context);

struct sg_op {
    _Atomic int references;
    _Atomic uint32_t done; /* futex word */
    bool taken;            /* the submitting thread runs it, not the worker */
    struct sg_op *next;
    struct sg_op **dependencies;
    unsigned dependency_count, dependency_capacity;
    struct sg_work work;
    struct sg_context *context;
    uint64_t finished; /* ns; valid once done */
    CUresult result;
};
struct sg_stream {
    struct sg_stream *next;
    struct sg_context *context;
    unsigned flags;
    int priority;
    uint64_t id;
    bool legacy, per_thread, marks, destroyed;
    bool worker; /* its thread exists */
    pthread_cond_t wake, room;
    struct sg_op *head, *tail; /* queue; under context->lock */
    unsigned queued;           /* in it; likewise */
    struct sg_op *last;        /* newest operation, held by a reference */
    CUstreamAttrValue sync_policy;
    struct sg_capture *capture; /* under sg_graph_lock */
    struct sg_pool *attached;
};
CUresult sg_stream_get(CUstream handle, struct sg_stream **out); /* resolves null, LEGACY and PER_THREAD */
struct sg_stream *sg_stream_create(struct sg_context *context, unsigned flags, int priority);
void sg_stream_destroy(struct sg_stream *stream);
/* Takes the work over, whatever it returns. With wait, returns when it has run. During capture it becomes a graph node. */
CUresult sg_submit(struct sg_stream *stream, struct sg_work *work, bool wait, struct sg_op **out);
CUresult sg_submit_after(struct sg_stream *stream, struct sg_op *dependency);
CUresult sg_stream_synchronize(struct sg_stream *stream);
bool sg_stream_idle(struct sg_stream *stream);
struct sg_op *sg_op_reference(struct sg_op *op);
void sg_op_unreference(struct sg_op *op);
void sg_op_wait(struct sg_op *op);
bool sg_op_done(struct sg_op *op);
bool sg_streams_idle(uint64_t deadline); /* waits until nothing is queued in any context; false: after the deadline (0: none) */

/* ---- event.c ---- */
struct sg_event {
    struct sg_context *context;
    unsigned flags;
    _Atomic int references;
    pthread_mutex_t lock;
    struct sg_op *op;             /* last record */
    struct sg_capture *capture;   /* recorded in a capture, not a stream: for comparing */
    uint64_t capture_id;
    struct sg_node **nodes;       /* captured dependencies */
    size_t node_count;
};
void sg_event_unreference(struct sg_event *event);

/* ---- module.c, library.c, image.c ---- */
struct sg_function {
    struct sg_module *module;
    const struct ptx_kernel *kernel;
    struct sg_kernel *library_kernel;
    int max_dynamic_shared, carveout, cluster_required;
};
struct sg_module {
    struct sg_module *next;
    struct sg_context *context;
    struct ptx_module *ptx;
    uint64_t *addresses; /* of the globals */
    uint64_t memory;     /* one allocation that holds them all, or 0 */
    struct sg_function *functions;
    size_t function_count;
    struct sg_library *library;
    bool owns_ptx;
};
/* Turns an image (PTX text, fatbin, its wrapper) into a parsed module; log receives the reason of a failure. */
CUresult sg_image_load(const void *image, struct ptx_module **out, char *log, size_t log_size);
/* A module's PTX text, malloc'ed and terminated. */
CUresult sg_image_ptx(const void *image, char **text, size_t *length);
CUresult sg_module_create(struct sg_context *context, struct ptx_module *ptx, bool owns_ptx, struct sg_module **out);
void sg_module_destroy(struct sg_module *module);
CUresult sg_module_global(struct sg_module *module, const char *name, uint64_t *address, size_t *size);
/* Accepts a CUkernel too, as the driver does: its function in `context` (null: the current one). */
CUresult sg_function_get(CUfunction handle, struct sg_context *context, struct sg_function **out);
struct sg_function *sg_module_function(struct sg_module *module, const char *name);
CUresult sg_kernel_function(struct sg_kernel *kernel, struct sg_context *context, struct sg_function **out);
void sg_library_forget_module(struct sg_library *library, struct sg_module *module);
CUresult sg_function_attribute(const struct sg_function *function, CUfunction_attribute attribute, int *value);
CUresult sg_function_set_attribute(struct sg_function *function, CUfunction_attribute attribute, int value);
CUresult sg_jit_log(CUresult result, const char *log, unsigned count, CUjit_option *options, void **values);
CUresult sg_read_file(const char *path, char **text, size_t *size);

/* ---- launch.c ---- */
CUresult sg_kernel_work_make(CUfunction handle, struct sg_context *context, const unsigned grid[3], const unsigned block[3],
                             size_t shared, void **params, void **extra, struct sg_kernel_work *out);
CUresult sg_kernel_work_run(const struct sg_kernel_work *work, struct sg_context *context);

/* ---- pool.c ---- */
struct sg_pool {
    int device;
    CUmemPoolProps props;
    _Atomic uint64_t threshold, used, used_high;
    int reuse_follow, reuse_opportunistic, reuse_internal;
    CUmemAccess_flags access[SG_MAX_DEVICES];
    bool is_default, imported;
};
struct sg_pool *sg_pool_new(int device, const CUmemPoolProps *props);

/* ---- ipc.c ---- */
extern _Atomic int sg_pools_imported; /* pools of other processes that this one has a handle of */

/* ---- graph.c, capture.c ---- */
struct sg_node;
struct sg_graph;
struct sg_exec;
struct sg_capture;
extern pthread_mutex_t sg_graph_lock;
CUresult sg_capture_add(struct sg_stream *stream, struct sg_work *work); /* stream->capture is set */
/* Whether a stream of it (a blocking one, or any) is capturing. `spoil`: those captures end with an error. */
bool sg_capture_among(struct sg_context *context, bool non_blocking, bool spoil);
/* For a call that the driver counts among the "potentially unsafe" ones (cuThreadExchangeStreamCaptureMode): refused, and the
 * captures spoilt, if this thread may not make it now. `stream`, or null: what it is about; refused too if that is capturing. */
CUresult sg_capture_permits(struct sg_stream *stream);
bool sg_capture_spoil(struct sg_stream *stream); /* whether it was capturing */
#define SG_UNSAFE(stream) \
    do { \
        CUresult permitted_ = sg_capture_permits(stream); \
        if (permitted_ != CUDA_SUCCESS) \
            return permitted_; \
    } while (0)
CUresult sg_capture_event_record(struct sg_stream *stream, struct sg_event *event);
CUresult sg_capture_event_wait(struct sg_stream *stream, struct sg_event *event, bool *handled);
CUresult sg_exec_run(struct sg_exec *exec, struct sg_marks *marks, struct sg_context *context);
void sg_exec_reference(struct sg_exec *exec);
void sg_exec_unreference(struct sg_exec *exec);
struct sg_graph *sg_graph_copy(const struct sg_graph *graph);
void sg_graph_free(struct sg_graph *graph);
void sg_marks_end(struct sg_marks *marks);
void sg_marks_free(struct sg_marks *marks); /* ends them first; those of a graph that still exists */
void sg_capture_forget_stream(struct sg_stream *stream);

/* ---- checkpoint.c, control.c ---- */
bool sg_control_start(void);     /* the hidden thread that serves the checkpoint API */
void sg_control_forget(void);    /* in a forked child */
bool sg_guard_open(void);        /* the descriptor CRIU refuses */
void sg_guard_close(void);
void sg_guard_forget(void);
CUresult sg_checkpoint(void);
CUresult sg_restore(const int *physical, unsigned count, const char **why);

/* ---- faults.c ---- */
/* True when the named fault of SOFTGPU_FAULTS is due at this call of it. See faults.def. */
enum sg_fault {
#define FAULT(symbol, name, text) SG_FAULT_##symbol,
#include "faults.def"
#undef FAULT
    SG_FAULT_COUNT
};
bool sg_fault(enum sg_fault fault);

#endif
