/* PTX on the CPU: the interface between the software GPU's driver and its PTX interpreter.
 *
 * Every function that returns int gives 0 (CUDA_SUCCESS) or a CUresult value; the values used are listed in enum ptx_result,
 * so that this header needs no cuda.h. A module may be shared by threads once loaded; launches of one kernel, or of several,
 * may run concurrently. Nothing here keeps global mutable state.
 */
#ifndef SOFTGPU_PTX_H
#define SOFTGPU_PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The CUresult values that this interface gives, by their numbers in cuda.h. */
enum ptx_result {
    PTX_OK = 0,
    PTX_INVALID_VALUE = 1,
    PTX_OUT_OF_MEMORY = 2,
    PTX_INVALID_PTX = 218,
    PTX_ILLEGAL_ADDRESS = 700,
    PTX_OUT_OF_RESOURCES = 701,
    PTX_ASSERT = 710,
    PTX_STACK_ERROR = 714,
    PTX_ILLEGAL_INSTRUCTION = 715,
    PTX_MISALIGNED_ADDRESS = 716,
    PTX_LAUNCH_FAILED = 719,
    PTX_NOT_SUPPORTED = 801,
};

struct ptx_module;
struct ptx_kernel;

/* Parses and decodes `length` bytes of PTX text (a terminating zero byte may be counted in). On PTX_INVALID_PTX `log` holds
 * "line N: sentence". Instructions that are not known do not fail the load: they fault when executed. */
int ptx_module_load(const char *text, size_t length, struct ptx_module **out, char *log, size_t log_size);
void ptx_module_unload(struct ptx_module *module);

size_t ptx_module_kernel_count(const struct ptx_module *module);
const struct ptx_kernel *ptx_module_kernel(const struct ptx_module *module, size_t index);
const char *ptx_kernel_name(const struct ptx_kernel *kernel);
size_t ptx_kernel_param_count(const struct ptx_kernel *kernel);
void ptx_kernel_param(const struct ptx_kernel *kernel, size_t index, size_t *offset, size_t *size);
size_t ptx_kernel_param_bytes(const struct ptx_kernel *kernel);
size_t ptx_kernel_static_shared(const struct ptx_kernel *kernel);
unsigned ptx_kernel_registers(const struct ptx_kernel *kernel); /* of a thread, in words: as declared, none used twice */
unsigned ptx_kernel_max_threads(const struct ptx_kernel *kernel); /* .maxntid product, or 1024 */

/* A module-scope .global or .const variable. */
struct ptx_global {
    const char *name;
    size_t size, align;
    bool constant;
};
size_t ptx_module_global_count(const struct ptx_module *module);
const struct ptx_global *ptx_module_global(const struct ptx_module *module, size_t index);
/* Writes the initial value of a global, all of its `size` bytes. `addresses`: where each global of the module lies. */
void ptx_module_global_init(const struct ptx_module *module, size_t index, const uint64_t *addresses, void *bytes);

/* Accessible memory [begin, end). Device addresses are host addresses. */
struct ptx_range {
    uint64_t begin, end;
    bool writable;
};

struct ptx_launch {
    const struct ptx_kernel *kernel;
    unsigned grid[3], block[3];
    unsigned cluster[3]; /* 0 or 1 in each dimension: no cluster */
    size_t dynamic_shared;
    const void *params; /* ptx_kernel_param_bytes bytes */
    const uint64_t *addresses;
    unsigned threads; /* host threads to use at most; 0 is taken as 1 */
    /* Called when an access misses the ranges this host thread knows. Fills in the accessible range that contains
     * [address, address + size), or returns false, which is a fault. Called from several host threads at once. */
    bool (*access)(void *cookie, uint64_t address, size_t size, bool write, struct ptx_range *range);
    void *cookie;
    void (*print)(void *cookie, const char *text); /* device printf; may be null; called from any host thread */
};

struct ptx_fault {
    uint64_t address;
    bool write;
    unsigned block[3], thread[3];
    char message[256];
};

/* Whether a launch of this shape can be run at all; if not, fault->message says why. */
int ptx_launch_check(const struct ptx_launch *launch, struct ptx_fault *fault);
/* Runs one launch to its end. After a fault the launch has stopped and *fault (may be null) says what happened and where. */
int ptx_launch_run(const struct ptx_launch *launch, struct ptx_fault *fault);

#endif
