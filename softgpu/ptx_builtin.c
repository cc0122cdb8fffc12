/* The functions that device code calls without having a body: vprintf, __assertfail, malloc, free. */
#include <stdio.h>
#include <string.h>

#include "ptx_exec.h"

#define TEXT 4096

/* Reads one byte, or more, of generic memory of a lane. */
static int read_bytes(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t lane, uint64_t at, void *to, uint32_t size) {
    uint64_t address[PTX_WARP] = {0};
    unsigned char *host[PTX_WARP];
    address[lane] = at;
    int error = ptx_resolve(w, warp, frame, in, PTX_GENERIC, 1u << lane, address, size, false, host);
    if (error == 0) memcpy(to, host[lane], size);
    return error;
}

static int read_text(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t lane, uint64_t at, char *to, uint32_t room) {
    for (uint32_t i = 0; i + 1 < room; i++) {
        int error = read_bytes(w, warp, frame, in, lane, at + i, &to[i], 1);
        if (error != 0) return error;
        if (to[i] == '\0') return 0;
    }
    to[room - 1] = '\0';
    return 0;
}

static uint64_t argument(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t lane, uint32_t which) {
    const struct ptx_move *move = &in->ext->in[which];
    uint64_t v = 0;
    memcpy(&v, warp->local + (size_t)lane * w->stride + frame->local_base + move->from, move->size < 8 ? move->size : 8);
    return v;
}

/* One lane's printf. Each conversion is checked and handed to snprintf with an argument of the size it asks for. */
static int format(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t lane, char *out, uint32_t room) {
    char text[TEXT], spec[32], string[TEXT];
    uint64_t args = argument(w, warp, frame, in, lane, 1);
    uint32_t used = 0;
    int error = read_text(w, warp, frame, in, lane, argument(w, warp, frame, in, lane, 0), text, sizeof text);
    if (error != 0) return error;
    for (const char *p = text; *p != '\0' && used + 1 < room;) {
        if (*p != '%' || p[1] == '%') {
            p += *p == '%';
            out[used++] = *p++;
            continue;
        }
        uint32_t n = 0, longs = 0;
        spec[n++] = *p++;
        while (*p != '\0' && strchr("-+ #0123456789.*hlLqjzt", *p) != NULL) {
            if (*p == '*') { /* a width out of the arguments */
                int32_t width = 0;
                args = (args + 3) & ~(uint64_t)3;
                if ((error = read_bytes(w, warp, frame, in, lane, args, &width, 4)) != 0) return error;
                args += 4;
                if (n + 12 < sizeof spec) n += (uint32_t)snprintf(spec + n, 12, "%d", width > 999 ? 999 : width < -999 ? -999 : width);
            } else if (strchr("lLqjzt", *p) != NULL) {
                longs++;
            } else if (*p != 'h' && n + 16 < sizeof spec) {
                spec[n++] = *p;
            }
            p++;
        }
        char kind = *p;
        if (kind == '\0') break;
        p++;
        int wrote = 0;
        if (strchr("diuoxXc", kind) != NULL) {
            uint32_t size = longs && kind != 'c' ? 8 : 4;
            uint64_t v = 0;
            args = (args + size - 1) & ~(uint64_t)(size - 1);
            if ((error = read_bytes(w, warp, frame, in, lane, args, &v, size)) != 0) return error;
            args += size;
            if (size == 4 && (kind == 'd' || kind == 'i')) v = (uint64_t)(int64_t)(int32_t)v;
            if (kind != 'c') spec[n++] = 'l', spec[n++] = 'l';
            spec[n++] = kind;
            spec[n] = '\0';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
            wrote = kind == 'c' ? snprintf(out + used, room - used, spec, (int)v) : snprintf(out + used, room - used, spec, (long long)v);
        } else if (strchr("eEfFgGaA", kind) != NULL) {
            double v = 0;
            args = (args + 7) & ~(uint64_t)7;
            if ((error = read_bytes(w, warp, frame, in, lane, args, &v, 8)) != 0) return error;
            args += 8;
            spec[n++] = kind;
            spec[n] = '\0';
            wrote = snprintf(out + used, room - used, spec, v);
        } else if (kind == 's' || kind == 'p') {
            uint64_t v = 0;
            args = (args + 7) & ~(uint64_t)7;
            if ((error = read_bytes(w, warp, frame, in, lane, args, &v, 8)) != 0) return error;
            args += 8;
            spec[n++] = kind;
            spec[n] = '\0';
            if (kind == 's' && v != 0 && (error = read_text(w, warp, frame, in, lane, v, string, sizeof string)) != 0) return error;
            if (kind == 'p') wrote = snprintf(out + used, room - used, "0x%llx", (unsigned long long)v);
            else wrote = snprintf(out + used, room - used, spec, v != 0 ? string : "(null)");
#pragma GCC diagnostic pop
        }
        if (wrote > 0) used += (uint32_t)wrote < room - used ? (uint32_t)wrote : room - used - 1;
    }
    out[used] = '\0';
    return 0;
}

static void result(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t lane, uint64_t v) {
    if (in->ext->out_count == 0) return;
    const struct ptx_move *move = &in->ext->out[0];
    memcpy(warp->local + (size_t)lane * w->stride + frame->local_base + move->to, &v, move->size < 8 ? move->size : 8);
}

int ptx_builtin(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m) {
    char text[TEXT];
    for (uint32_t left = m; left != 0; left &= left - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(left);
        switch (in->ext->builtin) {
        case PTX_BUILTIN_VPRINTF: {
            if (in->ext->in_count < 2) return ptx_fault(w, warp, in, m, PTX_ILLEGAL_INSTRUCTION, "vprintf without its two arguments");
            int error = format(w, warp, frame, in, lane, text, sizeof text);
            if (error != 0) return error;
            if (w->launch->print != NULL) w->launch->print(w->launch->cookie, text);
            result(w, warp, frame, in, lane, 0);
            break;
        }
        case PTX_BUILTIN_ASSERTFAIL: {
            char message[64] = "", file[64] = "";
            if (in->ext->in_count < 3) return ptx_fault(w, warp, in, m, PTX_ASSERT, "an assertion failed");
            if (read_text(w, warp, frame, in, lane, argument(w, warp, frame, in, lane, 0), message, sizeof message) != 0) message[0] = '\0';
            if (read_text(w, warp, frame, in, lane, argument(w, warp, frame, in, lane, 1), file, sizeof file) != 0) file[0] = '\0';
            return ptx_fault(w, warp, in, 1u << lane, PTX_ASSERT, "assertion `%s` failed at %s:%u", message, file, (unsigned)argument(w, warp, frame, in, lane, 2));
        }
        case PTX_BUILTIN_MALLOC: result(w, warp, frame, in, lane, 0); break; /* the device heap is empty: a null pointer */
        default: break;
        }
    }
    return 0;
}
