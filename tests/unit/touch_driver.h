/* What touch_cases.c knows of the driver in touch_driver.c. */
#pragma once
#include "phos_api.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Where the memory begins that there is: a GiB. */
#define LOW 0x700000000000ull

/* The context of every thread. */
#define CONTEXT ((CUcontext)16)

/* A module, a library, a function or a kernel: all are found by address. */
struct thing {
    const char *name;
    struct thing *holder;
    bool is_kernel;
};

struct node {
    CUgraphNodeType type;
    CUfunction function;
    void *parameters[3];
    uint64_t values[3];
    bool updatable;
    CUDA_MEMSET_NODE_PARAMS_v1 set;
    struct graph *child;
    CUstreamBatchMemOpParams operation;
    CUgraphNodeParams all; /* of other kinds */
};
struct graph {
    struct node nodes[8];
    size_t count;
};

/* What another thread does when the frontend has noted a kernel that it did not know, and holds no lock; once. */
typedef void driver_event(void);
extern _Atomic(driver_event *) driver_meanwhile;

/* To be called first: the frontend calls this driver, and knows of its memory. */
void driver_install(void);

static inline void check(bool holds, const char *what)
{
    if (!holds) {
        printf("%s\n", what);
        exit(1);
    }
}
