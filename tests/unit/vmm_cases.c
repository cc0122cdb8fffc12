/* vmm.c, detach.c and pool_handle.c over a driver of this file's own: what must stay with the driver, and what must not be
 * taken from it. */
#include "blocks.h"
#include "check.h"
#include "detach.h"
#include "driver_shared.h"
#include "driver_vmm.h"
#include "pool_private.h"
#include "runtime.h"
#include "track.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MiB ((size_t)1 << 20)
#define MULTICAST 77
#define POSIX CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#define BOUND "sparse array, a multicast object or a logical endpoint"
#define DEVICE 3
#define ENDPOINT 9
#define SHARED "with other processes"
static CUmemGenericAllocationHandle last_handle = 100, seen_handle;
static CUresult array_result;
static bool locked; /* something was to wait for other threads with the lock held that these need */

static void waits(void)
{
    if (pthread_mutex_trylock(&phos_memory_lock))
        locked = true;
    else
        pthread_mutex_unlock(&phos_memory_lock);
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    (void)size, (void)properties, (void)flags;
    *handle = ++last_handle;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    return handle > 100 && handle <= last_handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)at, (void)size, (void)offset, (void)flags;
    if (handle == MULTICAST)
        waits();
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t size)
{
    (void)at, (void)size;
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count)
{
    (void)at, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}

static CUresult export_handle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                              unsigned long long flags)
{
    (void)shareable, (void)type, (void)flags;
    return handle <= last_handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult import_handle(CUmemGenericAllocationHandle *handle, void *os, CUmemAllocationHandleType type)
{
    (void)os, (void)type;
    *handle = last_handle; /* the same memory has the same one */
    return CUDA_SUCCESS;
}

static CUresult retain(CUmemGenericAllocationHandle *handle, void *address)
{
    (void)address;
    *handle = last_handle;
    return CUDA_SUCCESS;
}

static CUresult create_multicast(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties)
{
    if (!properties->size)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = ++last_handle;
    return CUDA_SUCCESS;
}

static CUresult bind_memory(CUmemGenericAllocationHandle multicast, size_t at, CUmemGenericAllocationHandle memory,
                            size_t offset, size_t size, unsigned long long flags)
{
    (void)at, (void)offset, (void)size, (void)flags;
    seen_handle = memory;
    waits();
    return multicast == MULTICAST ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult bind_address(CUmemGenericAllocationHandle multicast, size_t at, CUdeviceptr memory, size_t size,
                             unsigned long long flags)
{
    (void)at, (void)memory, (void)size, (void)flags;
    waits();
    return multicast == MULTICAST ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The forms of CUDA 13.1, and logical endpoints, of 13.3. */
static CUresult bind_memory_of(CUmemGenericAllocationHandle multicast, CUdevice device, size_t at,
                               CUmemGenericAllocationHandle memory, size_t offset, size_t size, unsigned long long flags)
{
    return device == DEVICE ? bind_memory(multicast, at, memory, offset, size, flags) : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult bind_address_of(CUmemGenericAllocationHandle multicast, CUdevice device, size_t at, CUdeviceptr memory,
                                size_t size, unsigned long long flags)
{
    return device == DEVICE ? bind_address(multicast, at, memory, size, flags) : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult bind_memory_to_endpoint(CUlogicalEndpointId endpoint, CUdevice device, cuuint64_t at,
                                        CUmemGenericAllocationHandle memory, cuuint64_t offset, cuuint64_t size,
                                        unsigned long long flags)
{
    return bind_memory_of(endpoint, device, at, memory, offset, size, flags);
}

static CUresult bind_address_to_endpoint(CUlogicalEndpointId endpoint, CUdevice device, cuuint64_t at, void *memory,
                                         cuuint64_t size, unsigned long long flags)
{
    return bind_address_of(endpoint, device, at, (CUdeviceptr)memory, size, flags);
}

static CUresult endpoint_create(CUlogicalEndpointId endpoint, const CUlogicalEndpointProp *properties)
{
    (void)properties;
    return endpoint == ENDPOINT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult endpoint_import(CUlogicalEndpointId endpoint, const void *handle, CUlogicalEndpointIpcHandleType type)
{
    (void)handle, (void)type;
    return endpoint_create(endpoint, NULL);
}

static CUresult endpoint_export(void *handle, CUlogicalEndpointId endpoint, CUlogicalEndpointIpcHandleType type)
{
    (void)handle, (void)type;
    return endpoint_create(endpoint, NULL);
}

static CUresult endpoint_result;
static CUresult endpoint_destroy(CUlogicalEndpointId endpoint)
{
    (void)endpoint;
    return endpoint_result;
}

static CUresult map_array(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    (void)stream;
    seen_handle = list[count - 1].memHandle.memHandle;
    return array_result;
}

static CUresult create_pool(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    (void)properties;
    *pool = (CUmemoryPool)&last_handle;
    return CUDA_SUCCESS;
}

static CUmemPoolProps pool_of(size_t most)
{
    return (CUmemPoolProps){.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}, .maxSize = most};
}

/* Another thread is given the handle as soon as it is free. */
static CUresult destroy_pool(CUmemoryPool pool)
{
    CUmemPoolProps properties = pool_of(2);
    return serve_cuMemPoolCreate(&pool, &properties);
}

static CUresult refuse_primary(CUdevice device, unsigned int *flags, int *active)
{
    (void)device, (void)flags;
    *active = 0;
    return CUDA_SUCCESS;
}

static CUmemGenericAllocationHandle made(CUmemLocationType type, int device)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = type, .id = device}};
    CUmemGenericAllocationHandle handle;
    CHECK(serve_cuMemCreate(&handle, 2 * MiB, &properties, 0) == CUDA_SUCCESS);
    return handle;
}

static struct phos_block *newest(void)
{
    return phos_blocks.previous == &phos_blocks ? NULL : phos_blocks.previous;
}

/* Whether phos_detach refuses, and says why. Nothing is mapped, so that refusing is all it can do wrong. */
static bool refused(const char *why)
{
    struct phos_detached done = {0};
    struct phos_error error = {0};
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
        b->given = true;
    bool detached = phos_detach(&(struct phos_reducers){0}, NULL, &done, &error);
    CHECK(detached == !error.text[0]);
    if (!detached)
        CHECK(strstr(error.text, why));
    return !detached;
}

/* A block that was carried and given back leaves nothing. */
static void freed(CUmemGenericAllocationHandle handle)
{
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS);
    CHECK(!newest());
}

static void on_the_host(void)
{
    static const CUmemLocationType kinds[] = {CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA,
                                              CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT};
    uint64_t count, bytes;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        CUmemGenericAllocationHandle handle = made(kinds[i], 0);
        CHECK(handle == last_handle); /* the driver's own */
        CHECK(!newest());
        phos_uncarried_get(PHOS_UNCARRIED_HOST_VMM, &count, &bytes);
        CHECK(count == i + 1 && bytes == 2 * MiB * (i + 1));
    }
    phos_uncarried_get(PHOS_UNCARRIED_VMM, &count, &bytes);
    CHECK(count == 0);
}

/* CUDA 13.4: where it is says two numbers in the place of one, which the device's number is not to be read from. */
static void in_part_of_a_device(void)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN}};
    CUmemPoolProps of_pool = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = properties.location};
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    uint64_t count, bytes;
    CHECK(serve_cuMemCreate(&handle, 2 * MiB, &properties, 0) == CUDA_SUCCESS && handle == last_handle && !newest());
    phos_uncarried_get(PHOS_UNCARRIED_VMM, &count, &bytes);
    CHECK(count == 1 && bytes == 2 * MiB);
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS);
    CHECK(serve_cuMemPoolCreate(&pool, &of_pool) == CUDA_SUCCESS && !phos_pools);
}

static uint64_t counted(enum phos_uncarried kind)
{
    uint64_t count, bytes;
    phos_uncarried_get(kind, &count, &bytes);
    return count;
}

/* What another process may have too must not be checkpointed, until neither a handle nor a mapping is left of it. */
static void shared_memory(void)
{
    uint64_t before = counted(PHOS_UNCARRIED_HOST_VMM), imported = counted(PHOS_UNCARRIED_IPC);
    CUdeviceptr at = 0x6000000000;
    CUmemGenericAllocationHandle handle = made(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
    CHECK(serve_cuMemMap(at, 2 * MiB, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(serve_cuMemExportToShareableHandle(NULL, last_handle + 1, POSIX, 0) == CUDA_ERROR_INVALID_VALUE);
    CHECK(!phos_driver_vmm_shared());
    CHECK(serve_cuMemExportToShareableHandle(NULL, handle, POSIX, 0) == CUDA_SUCCESS);
    CHECK(refused(SHARED));
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS && refused(SHARED));
    CHECK(serve_cuMemUnmap(at + 2 * MiB, 2 * MiB) == CUDA_SUCCESS && refused(SHARED));
    CHECK(serve_cuMemRetainAllocationHandle(&handle, (void *)at) == CUDA_SUCCESS);
    CHECK(serve_cuMemUnmap(at, 2 * MiB) == CUDA_SUCCESS && refused(SHARED));
    CHECK(counted(PHOS_UNCARRIED_HOST_VMM) == before + 1);
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS && !phos_driver_vmm_shared());
    CHECK(counted(PHOS_UNCARRIED_HOST_VMM) == before);

    last_handle++;
    for (int i = 0; i < 2; i++)
        CHECK(serve_cuMemImportFromShareableHandle(&handle, (void *)-1, POSIX) == CUDA_SUCCESS);
    CHECK(counted(PHOS_UNCARRIED_IPC) == imported + 1 && refused(SHARED));
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS && refused(SHARED));
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS && !phos_driver_vmm_shared());
    CHECK(counted(PHOS_UNCARRIED_IPC) == imported);
}

/* Who has looked where a chunk of a window is looks again before it copies that, if access to it may have been taken away. */
static void access_in_a_window(void)
{
    CUdeviceptr at = 0x5000000000;
    CUmemAccessDesc none = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}, .flags = CU_MEM_ACCESS_FLAGS_PROT_NONE};
    CUmemGenericAllocationHandle handle = made(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    CHECK(serve_cuMemMap(at, 2 * MiB, 0, handle, 0) == CUDA_SUCCESS);
    uint64_t version = phos_mappings_version;
    CHECK(serve_cuMemSetAccess(at, 2 * MiB, &none, 1) == CUDA_SUCCESS && phos_mappings_version == version);
    newest()->window_chunks = 1;
    CHECK(serve_cuMemSetAccess(at, 2 * MiB, &none, 1) == CUDA_SUCCESS && phos_mappings_version > version);
    CHECK(serve_cuMemUnmap(at, 2 * MiB) == CUDA_SUCCESS);
    freed(handle);
}

static CUresult by_memory(int form, CUmemGenericAllocationHandle to, CUmemGenericAllocationHandle memory)
{
    switch (form) {
    case 0:
        return serve_cuMulticastBindMem(to, 0, memory, 0, 2 * MiB, 0);
    case 1:
        return serve_cuMulticastBindMem_v2(to, DEVICE, 0, memory, 0, 2 * MiB, 0);
    default:
        return serve_cuLogicalEndpointBindMem((CUlogicalEndpointId)to, DEVICE, 0, memory, 0, 2 * MiB, 0);
    }
}

static CUresult by_address(int form, CUmemGenericAllocationHandle to, CUdeviceptr memory)
{
    switch (form) {
    case 0:
        return serve_cuMulticastBindAddr(to, 0, memory, 2 * MiB, 0);
    case 1:
        return serve_cuMulticastBindAddr_v2(to, DEVICE, 0, memory, 2 * MiB, 0);
    default:
        return serve_cuLogicalEndpointBindAddr((CUlogicalEndpointId)to, DEVICE, 0, (void *)memory, 2 * MiB, 0);
    }
}

static void bound(int form)
{
    CUmemGenericAllocationHandle handle = made(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    CHECK(handle != last_handle && newest());
    CHECK(by_memory(form, MULTICAST + 1, handle) == CUDA_ERROR_INVALID_VALUE);
    CHECK(!newest()->bound);
    CHECK(by_memory(form, MULTICAST, handle) == CUDA_SUCCESS);
    CHECK(seen_handle == last_handle && newest()->bound);
    CHECK(refused(BOUND));
    freed(handle);

    handle = made(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    CUmemGenericAllocationHandle other = made(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    CUdeviceptr at = 0x7000000000;
    CHECK(serve_cuMemMap(at, 2 * MiB, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(serve_cuMemMap(at + 2 * MiB, 2 * MiB, 0, other, 0) == CUDA_SUCCESS);
    CHECK(by_address(form, MULTICAST + 1, at) == CUDA_ERROR_INVALID_VALUE);
    CHECK(!newest()->bound && !newest()->previous->bound);
    CHECK(by_address(form, MULTICAST, at) == CUDA_SUCCESS);
    CHECK(!newest()->bound && newest()->previous->bound);
    CHECK(refused(BOUND));
    CHECK(serve_cuMemUnmap(at, 4 * MiB) == CUDA_SUCCESS);
    CHECK(serve_cuMemRelease(other) == CUDA_SUCCESS);
    freed(handle);

    CHECK(serve_cuMemMap(at, 2 * MiB, 0, MULTICAST, 0) == CUDA_SUCCESS);
    CHECK(!locked);
    CHECK(serve_cuMemUnmap(at, 2 * MiB) == CUDA_SUCCESS);
}

/* They are left to the driver, but not while another process may have them too; and counted as long as there is a handle or a
 * mapping of them. */
static void multicast_objects(void)
{
    CUmulticastObjectProp properties = {.numDevices = 1, .size = 0};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = 0x6000000000;
    uint64_t count, bytes;
    CHECK(serve_cuMulticastCreate(&handle, &properties) == CUDA_ERROR_INVALID_VALUE);
    properties.size = 8 * MiB;
    CHECK(serve_cuMulticastCreate(&handle, &properties) == CUDA_SUCCESS && handle == last_handle);
    phos_uncarried_get(PHOS_UNCARRIED_MULTICAST, &count, &bytes);
    CHECK(count == 1 && bytes == 8 * MiB && !phos_driver_vmm_shared());
    CHECK(serve_cuMemMap(at, 8 * MiB, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(serve_cuMemExportToShareableHandle(NULL, handle, POSIX, 0) == CUDA_SUCCESS && refused(SHARED));
    CHECK(serve_cuMemRelease(handle) == CUDA_SUCCESS && refused(SHARED));
    CHECK(counted(PHOS_UNCARRIED_MULTICAST) == 1);
    CHECK(serve_cuMemUnmap(at, 8 * MiB) == CUDA_SUCCESS && !phos_driver_vmm_shared());
    CHECK(counted(PHOS_UNCARRIED_MULTICAST) == 0);
}

/* Likewise. */
static void endpoints(void)
{
    CUlogicalEndpointProp properties = {.type = CU_LOGICAL_ENDPOINT_TYPE_UNICAST};
    char handle[64];
    CHECK(serve_cuLogicalEndpointCreate(1, &properties) == CUDA_ERROR_INVALID_VALUE);
    CHECK(serve_cuLogicalEndpointCreate(ENDPOINT, &properties) == CUDA_SUCCESS);
    CHECK(counted(PHOS_UNCARRIED_ENDPOINT) == 1 && !phos_driver_shared());
    CHECK(serve_cuLogicalEndpointExport(handle, 1, CU_LOGICAL_ENDPOINT_IPC_HANDLE_TYPE_FABRIC) == CUDA_ERROR_INVALID_VALUE);
    CHECK(!phos_driver_shared());
    for (int i = 0; i < 2; i++)
        CHECK(serve_cuLogicalEndpointExport(handle, ENDPOINT, CU_LOGICAL_ENDPOINT_IPC_HANDLE_TYPE_FABRIC) == CUDA_SUCCESS);
    CHECK(counted(PHOS_UNCARRIED_ENDPOINT) == 1 && refused(SHARED));
    endpoint_result = CUDA_ERROR_NOT_PERMITTED;
    CHECK(serve_cuLogicalEndpointDestroy(ENDPOINT) == CUDA_ERROR_NOT_PERMITTED);
    CHECK(counted(PHOS_UNCARRIED_ENDPOINT) == 1 && refused(SHARED));
    endpoint_result = CUDA_SUCCESS;
    CHECK(serve_cuLogicalEndpointDestroy(ENDPOINT) == CUDA_SUCCESS);
    CHECK(counted(PHOS_UNCARRIED_ENDPOINT) == 0 && !phos_driver_shared());
    CHECK(serve_cuLogicalEndpointImport(ENDPOINT, handle, CU_LOGICAL_ENDPOINT_IPC_HANDLE_TYPE_FABRIC) == CUDA_SUCCESS);
    CHECK(counted(PHOS_UNCARRIED_ENDPOINT) == 1 && refused(SHARED));
    CHECK(serve_cuLogicalEndpointDestroy(ENDPOINT) == CUDA_SUCCESS);
    CHECK(counted(PHOS_UNCARRIED_ENDPOINT) == 0 && !phos_driver_shared());
}

static void pools(void)
{
    CUmemPoolProps properties = pool_of(1);
    CUmemoryPool pool;
    CHECK(serve_cuMemPoolCreate(&pool, &properties) == CUDA_SUCCESS && phos_pool_of(pool)->most == 1);
    CHECK(serve_cuMemPoolDestroy(pool) == CUDA_SUCCESS && phos_pool_of(pool)->most == 2);
}

static void sparse(void)
{
    CUmemGenericAllocationHandle handle = made(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    CUarrayMapInfo list[2] = {{.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP},
                              {.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP}};
    list[1].memHandle.memHandle = handle;
    CHECK(serve_cuMemMapArrayAsync(list, 2, NULL) == CUDA_SUCCESS);
    CHECK(seen_handle == last_handle && list[1].memHandle.memHandle == handle && !newest()->bound);
    list[1].memOperationType = CU_MEM_OPERATION_TYPE_MAP;
    array_result = CUDA_ERROR_UNKNOWN; /* the first may have been mapped */
    CHECK(serve_cuMemMapArrayAsync(list, 2, NULL) == CUDA_ERROR_UNKNOWN);
    CHECK(newest()->bound && refused(BOUND));
    freed(handle);
}

static CUresult exchange_mode(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

int main(void)
{
    phos_real.cuMemCreate = create;
    phos_real.cuMemRelease = release;
    phos_real.cuMemMap = map;
    phos_real.cuMemUnmap = unmap;
    phos_real.cuMemSetAccess = set_access;
    phos_real.cuMemExportToShareableHandle = export_handle;
    phos_real.cuMemImportFromShareableHandle = import_handle;
    phos_real.cuMemRetainAllocationHandle = retain;
    phos_real.cuMulticastCreate = create_multicast;
    phos_real.cuMulticastBindMem = bind_memory;
    phos_real.cuMulticastBindAddr = bind_address;
    phos_real.cuMulticastBindMem_v2 = bind_memory_of;
    phos_real.cuMulticastBindAddr_v2 = bind_address_of;
    phos_real.cuLogicalEndpointBindMem = bind_memory_to_endpoint;
    phos_real.cuLogicalEndpointBindAddr = bind_address_to_endpoint;
    phos_real.cuLogicalEndpointCreate = endpoint_create;
    phos_real.cuLogicalEndpointImport = endpoint_import;
    phos_real.cuLogicalEndpointExport = endpoint_export;
    phos_real.cuLogicalEndpointDestroy = endpoint_destroy;
    phos_real.cuMemMapArrayAsync = map_array;
    phos_real.cuMemPoolCreate = create_pool;
    phos_real.cuMemPoolDestroy = destroy_pool;
    phos_real.cuDevicePrimaryCtxGetState = refuse_primary;
    phos_real.cuThreadExchangeStreamCaptureMode = exchange_mode;
    phos_policy.carry_device = true;
    phos_device_count = 1;
    phos_devices[0] = (struct phos_device){.granularity = 2 * MiB, .carried = true};
    on_the_host();
    in_part_of_a_device();
    shared_memory();
    access_in_a_window();
    for (int form = 0; form < 3; form++)
        bound(form);
    multicast_objects();
    endpoints();
    pools();
    sparse();
    CUmemGenericAllocationHandle handle = made(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    CHECK(!refused(BOUND)); /* last: now it is detached */
    (void)handle;
    return 0;
}
