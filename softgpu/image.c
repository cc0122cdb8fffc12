/* Module images: PTX text, fatbins and their wrappers, down to the PTX text this GPU can run.
 *
 * A fatbin (the formats are NVIDIA's, found by looking at nvcc's output; FIELD_NOTES):
 *   wrapper    u32 0x466243b1, u32 version, pointer to the container, pointer (unused)
 *   container  u32 0xBA55ED50, u16 version, u16 header size, u64 size of the entries; then the entries
 *   entry      u16 kind (1 PTX, 2 ELF), u16 version, u32 header size, u64 payload size, u32 compressed size, ...,
 *              u32 architecture at 28, u64 flags at 40 (0x2000 LZ4-like, 0x8000 zstd), u64 decompressed size at 56 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softgpu.h"

#define WRAPPER_MAGIC 0x466243b1u
#define CONTAINER_MAGIC 0xBA55ED50u
#define KIND_PTX 1
#define FLAG_LZ4 0x2000u
#define FLAG_ZSTD 0x8000u
#define MAX_TEXT ((uint64_t)1 << 30)

static uint64_t little(const unsigned char *at, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

/* LZ4's block format: a token (literal count, match length - 4; 15 goes on in further bytes), literals, 16-bit distance. */
static bool lz4(const unsigned char *in, size_t size, unsigned char *out, size_t room)
{
    const unsigned char *end = in + size;
    size_t at = 0;
    while (in < end) {
        unsigned token = *in++;
        size_t literals = token >> 4, match = (token & 15) + 4;
        if (literals == 15)
            for (unsigned more = 255; more == 255; literals += more) {
                if (in == end)
                    return false;
                more = *in++;
            }
        if (literals > (size_t)(end - in) || literals > room - at)
            return false;
        memcpy(out + at, in, literals);
        in += literals;
        at += literals;
        if (in == end)
            break; /* the last sequence has no match */
        if (end - in < 2)
            return false;
        size_t distance = in[0] | (size_t)in[1] << 8;
        in += 2;
        if ((token & 15) == 15)
            for (unsigned more = 255; more == 255; match += more) {
                if (in == end)
                    return false;
                more = *in++;
            }
        if (!distance || distance > at || match > room - at)
            return false;
        for (size_t i = 0; i < match; i++, at++)
            out[at] = out[at - distance];
    }
    return at == room;
}

static bool zstd(const unsigned char *in, size_t size, unsigned char *out, size_t room)
{
    void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        sg_log("this module's PTX is compressed with zstd, and libzstd.so.1 is not installed (package libzstd1)");
        return false;
    }
    size_t (*decompress)(void *, size_t, const void *, size_t) =
        (size_t(*)(void *, size_t, const void *, size_t))dlsym(library, "ZSTD_decompress");
    bool ok = decompress && decompress(out, room, in, size) == room;
    dlclose(library);
    return ok;
}

static CUresult entry_text(const unsigned char *entry, char **text, size_t *length)
{
    const unsigned char *payload = entry + little(entry + 4, 4);
    uint64_t size = little(entry + 8, 8), packed = little(entry + 16, 4), flags = little(entry + 40, 8);
    bool compressed = flags & (FLAG_LZ4 | FLAG_ZSTD);
    uint64_t room = compressed ? little(entry + 56, 8) : size;
    if (room > MAX_TEXT || (compressed && packed > size))
        return CUDA_ERROR_INVALID_IMAGE;
    char *made = malloc(room + 1);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool ok = true;
    if (flags & FLAG_ZSTD)
        ok = zstd(payload, packed, (unsigned char *)made, room);
    else if (flags & FLAG_LZ4)
        ok = lz4(payload, packed, (unsigned char *)made, room);
    else
        memcpy(made, payload, room);
    if (!ok) {
        free(made);
        sg_log("the PTX of this module could not be decompressed");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    made[room] = 0;
    *text = made;
    *length = strlen(made);
    return CUDA_SUCCESS;
}

/* The PTX made for the newest architecture up to this GPU's, or for the oldest above it: the interpreter takes any. */
static CUresult container_text(const unsigned char *container, char **text, size_t *length)
{
    const unsigned char *at = container + little(container + 6, 2), *end = at + little(container + 8, 8);
    const unsigned char *best = NULL;
    unsigned best_architecture = 0, others = 0;
    while (at + 64 <= end) {
        uint64_t header = little(at + 4, 4), size = little(at + 8, 8);
        if (header < 64 || header > (uint64_t)(end - at) || size > (uint64_t)(end - at) - header)
            return CUDA_ERROR_INVALID_IMAGE;
        unsigned architecture = (unsigned)little(at + 28, 4);
        if (little(at, 2) == KIND_PTX) {
            bool fits = architecture <= 90, had = best_architecture <= 90;
            if (!best || (fits && (!had || architecture > best_architecture)) || (!fits && !had && architecture < best_architecture)) {
                best = at;
                best_architecture = architecture;
            }
        } else {
            others++;
        }
        at += header + size;
    }
    if (best)
        return entry_text(best, text, length);
    sg_log("this module holds %u machine-code images and no PTX: the software GPU runs PTX only (compile with "
           "-gencode arch=compute_90,code=compute_90)", others);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
}

CUresult sg_image_ptx(const void *image, char **text, size_t *length)
{
    const unsigned char *bytes = image;
    if (!image)
        return CUDA_ERROR_INVALID_VALUE;
    /* One byte at a time: a short text may end at the end of its page. */
    if (bytes[0] == 0xb1 && bytes[1] == 0x43 && little(bytes, 4) == WRAPPER_MAGIC) {
        memcpy(&bytes, bytes + 8, sizeof(bytes));
        if (!bytes)
            return CUDA_ERROR_INVALID_IMAGE;
    }
    if (bytes[0] == 0x50 && bytes[1] == 0xed && little(bytes, 4) == CONTAINER_MAGIC)
        return container_text(bytes, text, length);
    if (bytes[0] == 0x7f && !memcmp(bytes, "\177ELF", 4)) {
        sg_log("this module is machine code (a cubin): the software GPU runs PTX only");
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    size_t size = 0;
    while (bytes[size] && (isprint(bytes[size]) || isspace(bytes[size]) || bytes[size] >= 0x80))
        size++;
    if (bytes[size] || !strstr((const char *)bytes, ".version"))
        return CUDA_ERROR_INVALID_IMAGE;
    *text = strdup((const char *)bytes);
    *length = size;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sg_image_load(const void *image, struct ptx_module **out, char *log, size_t log_size)
{
    char *text = NULL;
    size_t length = 0;
    if (log_size)
        log[0] = 0;
    CUresult result = sg_image_ptx(image, &text, &length);
    if (result != CUDA_SUCCESS)
        return result;
    result = (CUresult)ptx_module_load(text, length, out, log, log_size);
    free(text);
    if (result != CUDA_SUCCESS && log_size && log[0])
        sg_log("PTX not accepted: %s", log);
    return result;
}

CUresult sg_read_file(const char *path, char **text, size_t *size)
{
    struct stat status;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
    char *made = NULL;
    size_t done = 0;
    if (fstat(fd, &status) == 0 && (uint64_t)status.st_size <= MAX_TEXT)
        made = malloc((size_t)status.st_size + 1);
    while (made && done < (size_t)status.st_size) {
        ssize_t part = read(fd, made + done, (size_t)status.st_size - done);
        if (part <= 0 && !(part < 0 && errno == EINTR))
            break;
        done += part > 0 ? (size_t)part : 0;
    }
    close(fd);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made[done] = 0;
    *text = made;
    *size = done;
    return CUDA_SUCCESS;
}
