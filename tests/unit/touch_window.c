/* A window that only writes down what each call touches, in place of window.c: for test_frontend_touch.py, which links it
 * with the rest of the frontend. The program under test begins and ends it, and takes what was written. */
#include "gate.h"
#include "phos_api.h"
#include "window.h"
#include "window_private.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOR_TESTS __attribute__((visibility("default")))

static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the text and counts */
static char *text;
static size_t length;
static int before, after;

void phos_window_before(struct phos_touches *touches)
{
    pthread_mutex_lock(&text_lock);
    char *line = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&line, &size);
    fprintf(to, "%s %llu %u %llx %d %u %d %d", touches->kernel, (unsigned long long)touches->module, touches->source,
            (unsigned long long)(uintptr_t)touches->stream, touches->nothing, touches->anything, touches->host_copy,
            touches->synchronous);
    for (size_t i = 0; i < touches->count; i++)
        fprintf(to, " %llu:%zu:%u", (unsigned long long)touches->list[i].address, touches->list[i].size,
                touches->list[i].access);
    fputc('\n', to);
    fclose(to);
    text = realloc(text, length + size + 1);
    memcpy(text + length, line, size + 1);
    length += size;
    before++;
    free(line);
    pthread_mutex_unlock(&text_lock);
}

void phos_window_after(struct phos_touches *touches, CUresult result)
{
    (void)touches, (void)result;
    pthread_mutex_lock(&text_lock);
    after++;
    pthread_mutex_unlock(&text_lock);
}

FOR_TESTS void phos_test_trace(int on)
{
    phos_gate_trace(on, NULL);
}

/* One line a call; the memory is the caller's, and is never freed. */
FOR_TESTS char *phos_test_touches(void)
{
    pthread_mutex_lock(&text_lock);
    char *taken = before == after ? text : strdup("unbalanced\n");
    text = NULL;
    length = 0;
    pthread_mutex_unlock(&text_lock);
    return taken ? taken : strdup("");
}

bool phos_window_begin(const int *descriptors, size_t count, bool computes, struct phos_error *error)
{
    (void)descriptors, (void)count, (void)computes, (void)error;
    return true;
}

void phos_window_watched(void)
{
}

void phos_window_end(void)
{
}

bool phos_window_is_open(void)
{
    return false;
}

bool phos_window_copies(void)
{
    return false;
}

void phos_window_forked(void)
{
}

/* Nothing is copied aside. */
void phos_window_stand_still(void)
{
}

void phos_window_go_on(void)
{
}

void phos_window_follow(struct phos_touches *touches, uint32_t access, bool rested)
{
    (void)touches, (void)access, (void)rested;
}

/* Nothing is loaded in these tests. */
atomic_bool phos_window_strict, phos_window_shadows;

bool phos_window_loading(void)
{
    return false;
}

void phos_window_abandoned(void)
{
}

bool phos_window_shuts(const struct phos_block *block)
{
    (void)block;
    return false;
}

void phos_window_failed(CUresult result)
{
    (void)result;
}

/* Twins are launched while a window is open, which this one never is. */
struct phos_window phos_window;

bool phos_window_closed(void)
{
    return true;
}

struct phos_chunk_range phos_window_chunks(const struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end)
{
    (void)mapping, (void)begin, (void)end;
    return (struct phos_chunk_range){0, 0};
}

void phos_window_visit(const struct phos_touch *touch, phos_window_visitor *visit, void *cookie)
{
    (void)touch, (void)visit, (void)cookie;
}
