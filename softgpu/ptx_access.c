/* Loads and stores in every state space, with the checks: range, alignment, permission. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ptx_exec.h"

int ptx_fault(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_ins *in, uint32_t m, int error, const char *format, ...) {
    struct ptx_fault *f = &w->fault;
    uint32_t lane = m ? (uint32_t)__builtin_ctz(m) : 0;
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    for (int i = 0; i < 3; i++) {
        f->block[i] = warp->block->id[i];
        f->thread[i] = warp->tid[i][lane];
    }
    snprintf(f->message, sizeof f->message, "kernel %.60s, line %u: %s", w->launch->kernel->function->name, in != NULL ? in->line : 0, what);
    return error;
}

/* Looks through the ranges this worker knows, then asks. The range found comes to the front. */
bool ptx_range_find(struct ptx_worker *w, uint64_t address, uint64_t size, bool write) {
    if (address + size < address) return false;
    for (uint32_t i = 0; i < PTX_RANGES; i++) {
        struct ptx_range r = w->ranges[i];
        if (address < r.begin || address + size > r.end || (write && !r.writable)) continue;
        memmove(&w->ranges[1], &w->ranges[0], i * sizeof r);
        w->ranges[0] = r;
        return true;
    }
    struct ptx_range r = {0, 0, false};
    if (address >> PTX_WINDOW_SHIFT != 0) return false;
    if (w->workspace != 0 && address >= w->workspace && address + size <= w->workspace + 64) {
        r = (struct ptx_range){w->workspace, w->workspace + 64, true};
    } else if (!w->launch->access(w->launch->cookie, address, size, write, &r) || address < r.begin || address + size > r.end || (write && !r.writable)) {
        return false;
    }
    memmove(&w->ranges[1], &w->ranges[0], (PTX_RANGES - 1) * sizeof r);
    w->ranges[0] = r;
    return true;
}

void ptx_addresses(const struct ptx_ins *in, const unsigned char *base, uint32_t m, uint64_t *address) {
    (void)m;
    if (in->flags & PTX_MEM_ADDRESS_32) {
        const uint32_t *a = (const uint32_t *)(const void *)base;
        for (uint32_t l = 0; l < PTX_WARP; l++) address[l] = (uint32_t)(a[l] + (uint32_t)in->imm);
    } else {
        const uint64_t *a = (const uint64_t *)(const void *)base;
        for (uint32_t l = 0; l < PTX_WARP; l++) address[l] = a[l] + (uint64_t)in->imm;
    }
}

static int outside(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_ins *in, uint32_t lane, uint64_t address, uint32_t size, bool write, const char *space) {
    w->fault.address = address;
    w->fault.write = write;
    return ptx_fault(w, warp, in, 1u << lane, PTX_ILLEGAL_ADDRESS, "%s of %u bytes at %#llx, outside %s", write ? "a write" : "a read", size, (unsigned long long)address, space);
}

/* One lane's address to a host pointer. */
static int resolve_lane(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_ins *in, uint32_t space, uint32_t lane, uint64_t address, uint32_t size, bool write, unsigned char **host) {
    uint64_t offset = address;
    if (address & (size - 1)) {
        w->fault.address = address;
        w->fault.write = write;
        return ptx_fault(w, warp, in, 1u << lane, PTX_MISALIGNED_ADDRESS, "%s of %u bytes at %#llx, which is not aligned", write ? "a write" : "a read", size, (unsigned long long)address);
    }
    if (space == PTX_GENERIC) {
        static const enum ptx_space windows[] = {PTX_GLOBAL, PTX_SHARED, PTX_LOCAL, PTX_PARAM};
        uint64_t window = address >> PTX_WINDOW_SHIFT;
        if (window > PTX_WINDOW_PARAM) return outside(w, warp, in, lane, address, size, write, "every state space");
        space = windows[window];
        offset = address & (PTX_WINDOW(1) - 1);
    }
    switch (space) {
    case PTX_SHARED:
        if (offset > w->shared_bytes || size > w->shared_bytes - offset) return outside(w, warp, in, lane, address, size, write, "the block's shared memory");
        *host = warp->block->shared + offset;
        return 0;
    case PTX_LOCAL:
        if (offset > w->local_bytes || size > w->local_bytes - offset) return outside(w, warp, in, lane, address, size, write, "the thread's local memory");
        *host = warp->local + (size_t)lane * w->stride + offset;
        return 0;
    case PTX_PARAM: {
        uint32_t bytes = w->launch->kernel->function->param_bytes;
        if (write || offset > bytes || size > bytes - offset) return outside(w, warp, in, lane, address, size, write, "the kernel's parameters");
        *host = (unsigned char *)(uintptr_t)w->launch->params + offset; /* only read: see above */
        return 0;
    }
    default:
        if (!ptx_range_find(w, address, size, write)) return outside(w, warp, in, lane, address, size, write, "every accessible allocation");
        *host = (unsigned char *)(uintptr_t)address;
        return 0;
    }
}

int ptx_resolve(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_frame *frame, const struct ptx_ins *in, uint32_t space, uint32_t m, const uint64_t *address, uint32_t size, bool write, unsigned char **host) {
    (void)frame;
    uint64_t low = UINT64_MAX, high = 0, bits = 0;
    for (uint32_t left = m; left != 0; left &= left - 1) {
        uint64_t x = address[__builtin_ctz(left)];
        low = x < low ? x : low;
        high = x > high ? x : high;
        bits |= x;
    }
    bool aligned = (bits & (size - 1)) == 0;
    uint32_t kind = space == PTX_GENERIC && high >> PTX_WINDOW_SHIFT == 0 ? PTX_GLOBAL : space;
    unsigned char *base = NULL;
    uint64_t step = 0;
    bool all = false;
    if (kind == PTX_GLOBAL) {
        all = aligned && low + size > low && high + size > high && ptx_range_find(w, low, high + size - low, write);
    } else if (kind == PTX_SHARED) {
        all = aligned && high < w->shared_bytes && high + size <= w->shared_bytes;
        base = warp->block->shared;
    } else if (kind == PTX_LOCAL) {
        all = aligned && high < w->local_bytes && high + size <= w->local_bytes;
        base = warp->local;
        step = w->stride;
    }
    if (all) {
        for (uint32_t l = 0; l < PTX_WARP; l++) host[l] = (unsigned char *)((uintptr_t)base + l * step + address[l]); /* of idle lanes: never used */
        return 0;
    }
    for (uint32_t left = m; left != 0; left &= left - 1) {
        uint32_t l = (uint32_t)__builtin_ctz(left);
        int error = resolve_lane(w, warp, in, space, l, address[l], size, write, &host[l]);
        if (error != 0) return error;
    }
    return 0;
}

/* One element of each active lane from memory into a register of `width` bytes. */
static void gather(unsigned char *d, uint32_t width, enum ptx_type type, unsigned char *const *host, uint32_t offset, uint32_t m) {
#define GATHER(T, W) \
    for (; m != 0; m &= m - 1) { \
        uint32_t l = (uint32_t)__builtin_ctz(m); \
        T v; \
        memcpy(&v, host[l] + offset, sizeof v); \
        W x = (W)v; \
        memcpy(d + l * sizeof x, &x, sizeof x); \
    } \
    return
#define BY_WIDTH(T) \
    if (width == 2) { GATHER(T, uint16_t); } \
    if (width == 4) { GATHER(T, uint32_t); } \
    GATHER(T, uint64_t)
    switch (type) {
    case PTX_U8: case PTX_B8: BY_WIDTH(uint8_t);
    case PTX_S8: BY_WIDTH(int8_t);
    case PTX_S16: BY_WIDTH(int16_t);
    case PTX_U16: case PTX_B16: case PTX_F16: case PTX_BF16: BY_WIDTH(uint16_t);
    case PTX_S32: BY_WIDTH(int32_t);
    case PTX_U64: case PTX_S64: case PTX_B64: case PTX_F64: GATHER(uint64_t, uint64_t);
    default: BY_WIDTH(uint32_t);
    }
}

static void scatter(const unsigned char *d, uint32_t width, uint32_t size, unsigned char *const *host, uint32_t offset, uint32_t m) {
    for (; m != 0; m &= m - 1) {
        uint32_t l = (uint32_t)__builtin_ctz(m);
        const unsigned char *from = d + (size_t)l * width; /* little-endian: the low bytes come first */
        switch (size) {
        case 1: memcpy(host[l] + offset, from, 1); break;
        case 2: memcpy(host[l] + offset, from, 2); break;
        case 4: memcpy(host[l] + offset, from, 4); break;
        default: memcpy(host[l] + offset, from, 8); break;
        }
    }
}

/* Addresses of .param variables and locals named directly are relative to the frame already: LOCAL_ADDRESS adds its base. */
int ptx_load(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, const unsigned char *base, uint32_t m) {
    uint64_t address[PTX_WARP];
    unsigned char *host[PTX_WARP];
    const struct ptx_ext *ext = in->ext;
    uint32_t size = in->aux;
    ptx_addresses(in, base, m, address);
    int error = ptx_resolve(w, warp, frame, in, in->sub, m, address, size * ext->count, false, host);
    if (error != 0) return error;
    for (uint32_t i = 0; i < ext->count; i++) gather(frame->regs + ext->v[i], ext->width[i], (enum ptx_type)in->type, host, i * size, m);
    if (in->flags & PTX_MEM_ACQUIRE) atomic_thread_fence(memory_order_acquire);
    return 0;
}

int ptx_store(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, const unsigned char *base, uint32_t m) {
    uint64_t address[PTX_WARP];
    unsigned char *host[PTX_WARP];
    const struct ptx_ext *ext = in->ext;
    uint32_t size = in->aux;
    ptx_addresses(in, base, m, address);
    int error = ptx_resolve(w, warp, frame, in, in->sub, m, address, size * ext->count, true, host);
    if (error != 0) return error;
    if (in->flags & PTX_MEM_RELEASE) atomic_thread_fence(memory_order_release);
    for (uint32_t i = 0; i < ext->count; i++) scatter(ptx_operand(frame, w->constants, ext->v[i]), ext->width[i], size, host, i * size, m);
    return 0;
}

void ptx_load_param(struct ptx_worker *w, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m) {
    unsigned char *host[PTX_WARP];
    for (uint32_t l = 0; l < PTX_WARP; l++) host[l] = (unsigned char *)(uintptr_t)w->launch->params + in->imm;
    for (uint32_t i = 0; i < in->ext->count; i++)
        gather(frame->regs + in->ext->v[i], in->ext->width[i], (enum ptx_type)in->type, host, i * in->aux, m);
}

/* cp.async, done at once: the group and wait instructions have nothing left to do. */
int ptx_copy_async(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m) {
    uint64_t to[PTX_WARP], from[PTX_WARP];
    unsigned char *shared[PTX_WARP], *global[PTX_WARP];
    struct ptx_ins target = *in, source = *in;
    const uint32_t *bytes = (const uint32_t *)(const void *)ptx_operand(frame, w->constants, in->b);
    target.imm = in->c;
    source.flags = 0;
    ptx_addresses(&target, ptx_operand(frame, w->constants, in->ext->v[0]), m, to);
    ptx_addresses(&source, ptx_operand(frame, w->constants, in->a), m, from);
    uint32_t some = 0;
    for (uint32_t l = 0; l < PTX_WARP; l++) some |= (uint32_t)(bytes[l] != 0) << l;
    some &= m;
    int error = ptx_resolve(w, warp, frame, in, PTX_SHARED, m, to, in->aux, true, shared);
    if (error == 0 && some != 0) error = ptx_resolve(w, warp, frame, in, PTX_GLOBAL, some, from, in->aux, false, global);
    if (error != 0) return error;
    for (; m != 0; m &= m - 1) {
        uint32_t l = (uint32_t)__builtin_ctz(m), n = bytes[l] < in->aux ? bytes[l] : in->aux;
        if (n != 0) memcpy(shared[l], global[l], n);
        memset(shared[l] + n, 0, in->aux - n);
    }
    return 0;
}
