/* Mutates PTX texts and loads them; what loads is also run, in a child with a time limit. Built with ASan and UBSan by test_ptx_fuzz.py.
 *
 * Usage: fuzz_ptx SECONDS SEED FILE...   Prints the number of texts, loads and runs. A crash is a sanitizer's report and exit code. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../../../softgpu/ptx.h"

static unsigned char arena[1 << 16];

static bool allow(void *cookie, uint64_t address, size_t size, bool write, struct ptx_range *range) {
    (void)cookie;
    (void)write;
    uint64_t begin = (uint64_t)(uintptr_t)arena, end = begin + sizeof arena;
    if (address < begin || address > end || size > end - address) return false;
    *range = (struct ptx_range){begin, end, true};
    return true;
}

static void quiet(void *cookie, const char *text) {
    (void)cookie;
    (void)text;
}

static uint64_t state;
static uint32_t random_below(uint32_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? (uint32_t)(state >> 16) % n : 0;
}

static char *read_file(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    if (f == NULL) return NULL;
    char *text = malloc(1 << 20);
    *size = fread(text, 1, 1 << 20, f);
    fclose(f);
    return text;
}

/* A few edits: bytes, numbers, words swapped within the text, pieces removed, repeated, or taken from another text. */
static size_t mutate(char *text, size_t size, size_t room, const char *other, size_t other_size) {
    static const char *const words[] = {"%r1", "%rd1", "%p1", "4294967295", "-1", "0", ".b8", ".u64", ".v4", ".f16x2", "{", "}", ";", "[", "]", ".param", ".shared", "bra", "call", "<4000000000>", "ret", "0d7FF0000000000000", "\"", "/*", ".sat", ".wide", ".pred", "!", "@", "_", "|"};
    for (uint32_t edits = 1 + random_below(4); edits-- != 0 && size > 8;) {
        size_t at = random_below((uint32_t)size), n = 1 + random_below(40);
        if (n > size - at) n = size - at;
        switch (random_below(7)) {
        case 0: text[at] = (char)random_below(256); break;
        case 1: text[at] = "0123456789%.,;{}[]()<>-+:rpbusf"[random_below(31)]; break;
        case 2: memmove(text + at, text + at + n, size - at - n), size -= n; break;
        case 3:
            if (size + n >= room) break;
            memmove(text + at + n, text + at, size - at);
            size += n;
            break;
        case 4: {
            const char *word = words[random_below(sizeof words / sizeof words[0])];
            size_t length = strlen(word);
            if (size + length >= room) break;
            memmove(text + at + length, text + at, size - at);
            memcpy(text + at, word, length);
            size += length;
            break;
        }
        case 5: {
            size_t from = random_below((uint32_t)other_size);
            if (n > other_size - from) n = other_size - from;
            if (n > size - at) n = size - at;
            memcpy(text + at, other + from, n);
            break;
        }
        default: { /* one type for another */
            static const char types[] = "8163264";
            for (size_t i = at; i + 3 < size && i < at + 200; i++)
                if (text[i] == '.' && strchr("busf", text[i + 1]) != NULL) {
                    text[i + 1] = "busf"[random_below(4)];
                    text[i + 2] = types[random_below(7)];
                    break;
                }
        }
        }
    }
    return random_below(50) == 0 ? random_below((uint32_t)size) : size;
}

static int run_kernels(const struct ptx_module *m) {
    uint64_t addresses[64];
    for (size_t i = 0; i < 64; i++) addresses[i] = (uint64_t)(uintptr_t)arena + i * 1024;
    if (ptx_module_global_count(m) > 64) return 0;
    for (size_t i = 0; i < ptx_module_global_count(m); i++) {
        const struct ptx_global *g = ptx_module_global(m, i);
        if (g->size > 1024) continue;
        ptx_module_global_init(m, i, addresses, arena + i * 1024);
    }
    for (size_t i = 0; i < ptx_module_kernel_count(m); i++) {
        const struct ptx_kernel *k = ptx_module_kernel(m, i);
        unsigned char params[65536];
        for (size_t at = 0; at < sizeof params; at += 8) {
            uint64_t v = at % 24 == 0 || at < 64 ? (uint64_t)(uintptr_t)arena + 4096 : 40;
            memcpy(params + at, &v, 8);
        }
        struct ptx_launch l = {.kernel = k, .grid = {2, 1, 1}, .block = {40, 2, 1}, .params = params, .addresses = addresses, .threads = 1, .dynamic_shared = 512, .access = allow, .print = quiet};
        struct ptx_fault fault;
        (void)ptx_launch_run(&l, &fault);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    double seconds = atof(argv[1]);
    state = strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15u + 1;
    size_t sizes[256];
    char *texts[256];
    int count = 0;
    for (int i = 3; i < argc && count < 256; i++)
        if ((texts[count] = read_file(argv[i], &sizes[count])) != NULL) count++;
    if (count == 0) return 2;
    unsigned long tried = 0, loaded = 0, ran = 0, slow = 0;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        int which = (int)random_below((uint32_t)count), other = (int)random_below((uint32_t)count);
        size_t room = sizes[which] + 4096;
        char *copy = malloc(room), log[256];
        memcpy(copy, texts[which], sizes[which]);
        size_t size = mutate(copy, sizes[which], room, texts[other], sizes[other]);
        char *exact = malloc(size ? size : 1); /* the end is where the sanitizer watches */
        memcpy(exact, copy, size);
        free(copy);
        struct ptx_module *m;
        int error = ptx_module_load(exact, size, &m, log, sizeof log);
        tried++;
        if (error == 0) {
            loaded++;
            pid_t child = loaded % 4 == 0 ? fork() : -1;
            if (child == 0) {
                alarm(1);
                _exit(run_kernels(m));
            }
            if (child > 0) {
                int status;
                waitpid(child, &status, 0);
                ran++;
                if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) slow++;
                else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
                    FILE *f = fopen("crash.ptx", "wb");
                    if (f != NULL) fwrite(exact, 1, size, f), fclose(f);
                    fprintf(stderr, "a run ended with status %d; its text is in crash.ptx\n", status);
                    return 1;
                }
            }
            ptx_module_unload(m);
        } else if (error == PTX_INVALID_PTX && strncmp(log, "line ", 5) != 0) {
            fprintf(stderr, "an error without a line: %s\n", log);
            return 1;
        }
        free(exact);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) < seconds);
    printf("%lu texts, %lu loaded, %lu run, %lu stopped\n", tried, loaded, ran, slow);
    for (int i = 0; i < count; i++) free(texts[i]);
    return 0;
}
