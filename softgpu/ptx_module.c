/* Loading a module, what its kernels need, and its variables' initial values. */
#include <stdio.h>
#include <stdlib.h>

#include "ptx_parse.h"

static void parse_linked(struct ptx_parser *p) {
    bool external = false;
    for (;;) {
        struct ptx_str s = p->t.text;
        uint32_t line = p->t.line;
        if (p->t.kind != PTX_T_DOT) ptx_fail(p, line, "a directive was expected here");
        ptx_next(p);
        if (ptx_is(s, "extern")) external = true;
        else if (ptx_is(s, "visible") || ptx_is(s, "weak") || ptx_is(s, "common")) continue;
        else if (ptx_is(s, "entry")) { ptx_parse_function(p, true); return; }
        else if (ptx_is(s, "func")) { ptx_parse_function(p, false); return; }
        else if (ptx_is(s, "global")) { ptx_parse_variable(p, PTX_GLOBAL, external); return; }
        else if (ptx_is(s, "const")) { ptx_parse_variable(p, PTX_CONST, external); return; }
        else if (ptx_is(s, "shared")) { ptx_parse_variable(p, PTX_SHARED, external); return; }
        else ptx_fail(p, line, "'.%.*s' is not known here", (int)(s.n > 60 ? 60 : s.n), s.s);
    }
}

static void parse_module(struct ptx_parser *p) {
    bool version = false;
    ptx_next(p);
    while (p->t.kind != PTX_T_END) {
        struct ptx_str s = p->t.text;
        if (p->t.kind != PTX_T_DOT && version) ptx_fail(p, p->t.line, "a directive was expected here");
        if (!version && !ptx_is(s, "version") && !ptx_is(s, "file") && !ptx_is(s, "loc")) ptx_fail(p, p->t.line, "the text does not begin with '.version', so it is not PTX");
        if (ptx_is(s, "version")) {
            version = true;
            ptx_next(p);
            if (p->t.kind != PTX_T_FLOAT && p->t.kind != PTX_T_INT) ptx_fail(p, p->t.line, "'.version' needs a number");
            ptx_next(p);
        } else if (ptx_is(s, "target")) {
            ptx_next(p);
            do (void)ptx_word(p, "a target's name");
            while (ptx_accept(p, ','));
        } else if (ptx_is(s, "address_size")) {
            ptx_next(p);
            if (p->t.kind != PTX_T_INT || p->t.integer != 64) ptx_fail(p, p->t.line, "only addresses of 64 bits are supported");
            ptx_next(p);
        } else if (ptx_is(s, "file") || ptx_is(s, "loc")) {
            ptx_skip_line(p);
            ptx_next(p);
        } else if (ptx_is(s, "section")) {
            while (p->t.kind != PTX_T_END && !ptx_at(p, '}')) ptx_next(p);
            ptx_expect(p, '}');
        } else if (ptx_is(s, "pragma") || ptx_is(s, "alias")) {
            while (p->t.kind != PTX_T_END && !ptx_at(p, ';')) ptx_next(p);
            ptx_expect(p, ';');
        } else {
            parse_linked(p);
        }
    }
    if (!version) ptx_fail(p, p->t.line, "the text is empty");
}

static void build_constants(struct ptx_parser *p) {
    struct ptx_module *m = p->module;
    uint32_t bytes = (p->const_bytes + 63) & ~63u;
    m->constant_bytes = bytes;
    m->constants = aligned_alloc(64, bytes ? bytes : 64);
    if (m->constants == NULL) {
        p->error = PTX_OUT_OF_MEMORY;
        ptx_fail(p, p->line, "there is no memory left for this module");
    }
    for (uint32_t i = 0; i < p->const_count; i++)
        for (uint32_t lane = 0; lane < PTX_WARP; lane++) memcpy(m->constants + bytes - p->consts[i].offset + lane * p->consts[i].width, &p->consts[i].bits, p->consts[i].width);
}

/* Marks what a kernel can reach: its shared variables, and the depth of its local memory. */
struct reach {
    struct ptx_module *module;
    uint8_t *seen;       /* function: 1 on the path, 2 done */
    uint8_t *shared;
    uint32_t *stack;     /* local bytes of a function and of what it calls */
    bool endless;        /* recursion or an indirect call */
};

static void visit(struct reach *r, uint32_t index, uint32_t depth) {
    struct ptx_function *f = r->module->functions[index];
    if (r->seen[index] == 2) return;
    if (r->seen[index] == 1 || depth > 1000) {
        r->endless = true;
        return;
    }
    r->seen[index] = 1;
    r->endless = r->endless || f->indirect;
    uint32_t deepest = 0;
    for (uint32_t i = 0; i < f->shared_used_count; i++) r->shared[f->shared_used[i]] = 1;
    for (uint32_t i = 0; i < f->callee_count; i++) {
        visit(r, f->callees[i], depth + 1);
        if (r->stack[f->callees[i]] > deepest) deepest = r->stack[f->callees[i]];
    }
    uint64_t total = (uint64_t)deepest + ((f->local_bytes + 15) & ~15u);
    r->stack[index] = total > 1u << 30 ? 1u << 30 : (uint32_t)total;
    r->seen[index] = 2;
}

static void build_kernel(struct ptx_parser *p, struct reach *r, struct ptx_kernel *k, const struct ptx_function *f) {
    struct ptx_module *m = p->module;
    memset(r->seen, 0, m->function_count);
    memset(r->shared, 0, m->shared_count + 1);
    memset(r->stack, 0, m->function_count * sizeof *r->stack);
    r->endless = false;
    visit(r, f->index, 0);
    for (uint32_t i = 0; r->endless && i < m->function_count; i++) /* an address taken anywhere may be called */
        if (r->seen[i] == 0 && m->functions[i]->defined && !m->functions[i]->entry) visit(r, i, 0);
    uint64_t at = f->own_shared;
    k->module = m;
    k->function = f;
    k->shared_offset = ptx_alloc(p, (m->shared_count + 1) * sizeof *k->shared_offset);
    uint64_t dynamic_align = 16;
    for (uint32_t i = 0; i < m->shared_count; i++) {
        const struct ptx_shared *s = m->shared[i];
        if (s->dynamic && s->align > dynamic_align) dynamic_align = s->align;
        if (!r->shared[i] || s->dynamic) continue;
        at = (at + s->align - 1) & ~(s->align - 1);
        k->shared_offset[i] = (uint32_t)at;
        at += s->size;
        if (at > PTX_MAX_SHARED) ptx_fail(p, f->line, "the kernel '%s' uses more than %u bytes of shared memory", f->name, PTX_MAX_SHARED);
    }
    bool any_dynamic = false;
    for (uint32_t i = 0; i < m->shared_count; i++) any_dynamic = any_dynamic || (m->shared[i]->dynamic && r->shared[i]);
    k->static_shared = (uint32_t)(any_dynamic ? (at + dynamic_align - 1) & ~(dynamic_align - 1) : at);
    for (uint32_t i = 0; i < m->shared_count; i++)
        if (m->shared[i]->dynamic) k->shared_offset[i] = k->static_shared;
    k->stack = ((f->local_bytes + 15) & ~15u) > r->stack[f->index] ? ((f->local_bytes + 15) & ~15u) : r->stack[f->index];
    if (r->endless) k->stack += PTX_STACK;
    if (k->stack > 2 * PTX_MAX_LOCAL) ptx_fail(p, f->line, "the kernel '%s' uses too much local memory", f->name);
}

static void build_kernels(struct ptx_parser *p) {
    struct ptx_module *m = p->module;
    struct reach r = {.module = m};
    r.seen = ptx_alloc(p, m->function_count + 1);
    r.shared = ptx_alloc(p, m->shared_count + 1);
    r.stack = ptx_alloc(p, (m->function_count + 1) * sizeof *r.stack);
    for (uint32_t i = 0; i < m->function_count; i++) m->kernel_count += m->functions[i]->entry && m->functions[i]->defined;
    m->kernels = ptx_alloc(p, (m->kernel_count + 1) * sizeof *m->kernels);
    uint32_t at = 0;
    for (uint32_t i = 0; i < m->function_count; i++)
        if (m->functions[i]->entry && m->functions[i]->defined) build_kernel(p, &r, &m->kernels[at++], m->functions[i]);
}

int ptx_module_load(const char *text, size_t length, struct ptx_module **out, char *log, size_t log_size) {
    *out = NULL;
    if (log_size != 0) log[0] = '\0';
    while (length != 0 && text[length - 1] == '\0') length--;
    struct ptx_parser *p = calloc(1, sizeof *p);
    struct ptx_module *m = calloc(1, sizeof *m);
    if (p == NULL || m == NULL) {
        free(p);
        free(m);
        return PTX_OUT_OF_MEMORY;
    }
    p->p = text;
    p->end = text + length;
    p->line = 1;
    p->log = log;
    p->log_size = log_size;
    p->module = m;
    if (setjmp(p->fail) != 0) {
        int error = p->error;
        ptx_module_unload(p->module);
        free(p);
        return error;
    }
    parse_module(p);
    build_constants(p);
    build_kernels(p);
    free(p);
    *out = m;
    return PTX_OK;
}

void ptx_module_unload(struct ptx_module *m) {
    if (m == NULL) return;
    free(m->constants);
    while (m->arena != NULL) {
        struct ptx_arena_block *next = m->arena->next;
        free(m->arena);
        m->arena = next;
    }
    free(m);
}

size_t ptx_module_kernel_count(const struct ptx_module *m) { return m->kernel_count; }
const struct ptx_kernel *ptx_module_kernel(const struct ptx_module *m, size_t i) { return i < m->kernel_count ? &m->kernels[i] : NULL; }
const char *ptx_kernel_name(const struct ptx_kernel *k) { return k->function->name; }
size_t ptx_kernel_param_count(const struct ptx_kernel *k) { return k->function->param_count; }
void ptx_kernel_param(const struct ptx_kernel *k, size_t i, size_t *offset, size_t *size) {
    bool there = i < k->function->param_count;
    *offset = there ? k->function->params[i].offset : 0;
    *size = there ? k->function->params[i].size : 0;
}
size_t ptx_kernel_param_bytes(const struct ptx_kernel *k) { return k->function->param_bytes; }
size_t ptx_kernel_static_shared(const struct ptx_kernel *k) { return k->static_shared; }
unsigned ptx_kernel_registers(const struct ptx_kernel *k) { return k->function->frame_bytes / (4 * PTX_WARP) + 1; }
unsigned ptx_kernel_max_threads(const struct ptx_kernel *k) { return k->function->max_threads; }
size_t ptx_module_global_count(const struct ptx_module *m) { return m->variable_count; }
const struct ptx_global *ptx_module_global(const struct ptx_module *m, size_t i) { return i < m->variable_count ? &m->variables[i]->info : NULL; }

void ptx_module_global_init(const struct ptx_module *m, size_t i, const uint64_t *addresses, void *bytes) {
    const struct ptx_variable *v = m->variables[i];
    memset(bytes, 0, v->info.size);
    if (v->init_size != 0) memcpy(bytes, v->init, v->init_size);
    for (const struct ptx_reloc *r = v->relocs; r != NULL; r = r->next) {
        uint64_t value = (uint64_t)r->addend + (r->global >= 0 ? addresses[r->global] : PTX_WINDOW(PTX_WINDOW_CODE) + (uint64_t)r->function + 1);
        value >>= r->shift;
        memcpy((unsigned char *)bytes + r->offset, &value, r->size);
    }
}
