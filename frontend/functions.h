/* Kernels: which module and name a handle stands for, how its arguments lie, and what phosd says they are for. */
#pragma once
#include "phos_api.h"
#include "touch.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One kernel of one module, under however many handles. Never freed: whoever has one may keep it. */
struct phos_kernel;

/* A module or library was loaded; `number` is module.c's, 0: unknown. */
void phos_functions_module(CUmodule module, uint64_t number);
void phos_functions_library(CUlibrary library, uint64_t number);
/* A context ends, and what was loaded into it: the driver will use those handles for others. */
void phos_functions_context_ends(CUcontext context);

/* The kernel behind a handle, asking the driver about those that came past us. NULL: nobody knows it. */
struct phos_kernel *phos_kernel_of(CUfunction function);

/* The arguments of a launch, as an array of pointers or as one block; or a copy of the block. */
struct phos_arguments {
    void *const *parameters;
    const void *block;
    size_t block_size;
};
struct phos_arguments phos_arguments_of(void **parameters, void **extra);
/* A copy of the block, by the driver's layout of the kernel; freed by the caller. False: the layout is not known, or there
 * is no host memory for it. A kernel without arguments has *block NULL. */
bool phos_kernel_copy(struct phos_kernel *kernel, const struct phos_arguments *arguments, void **block, size_t *size);
/* Adds what a launch with these arguments touches. */
void phos_kernel_touch(struct phos_touches *touches, struct phos_kernel *kernel, const struct phos_arguments *arguments);

/* What the above depends on besides its arguments: grows with every new table of descriptors, and as device memory is
 * mapped outside the range of addresses in which there was any before. */
uint64_t phos_kernel_touch_version(void);
/* Where device memory is, or was: a number that lies elsewhere is no address. */
void phos_device_range(CUdeviceptr *low, CUdeviceptr *high);

/* AccessTable came: takes a copy of the table in the file. NULL, or a sentence why it was not taken. */
const char *phos_access_table_take(int descriptor);

/* Names of kernels of the modules up to number `upto` that phosd was not told of, by `send`. False: `send` did. */
bool phos_kernels_tell(uint64_t upto, bool (*send)(uint64_t module, const char *const *names, size_t count));
/* How many kernels there are of which phosd can be told, and how many names it was told over this connection. True: of
 * all. For audits. */
bool phos_kernels_count(uint64_t *count, uint64_t *told);
/* NULL: unknown. */
const char *phos_kernel_name(const struct phos_kernel *kernel);
/* A new connection: all are to be told of again. */
void phos_kernels_untell(void);
