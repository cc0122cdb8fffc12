#include "runtime.h"
#include "audit.h"
#include "cleanup.h"
#include "control.h"
#include "driver_memcpy.h"
#include "gate.h"
#include "held.h"
#include "log.h"
#include "memory.h"
#include "track.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

_Atomic int phos_mode = PHOS_MODE_WAITING;
uint8_t phos_session[16];
struct phos_device phos_devices[PHOS_DEVICES];
int phos_device_count;
int phos_driver_version;
struct phos_policy phos_policy;

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the change from WAITING to SERVING */
static atomic_bool exiting;

bool phos_exiting(void)
{
    return atomic_load_explicit(&exiting, memory_order_relaxed);
}

/* Runs before the driver's own exit handler, which was registered earlier. */
static void process_exits(void)
{
    atomic_store(&exiting, true);
}

static bool flag(const char *name, bool usual)
{
    const char *value = getenv(name);
    return value && *value ? strcmp(value, "0") != 0 : usual;
}

static void policy_read(void)
{
    phos_policy.carry_device = flag("PHOS_CARRY_DEVICE", true);
    phos_policy.carry_host = flag("PHOS_CARRY_HOST", true);
    phos_policy.carry_pools = flag("PHOS_CARRY_POOLS", true);
    const char *cache = getenv("PHOS_CACHE_BYTES");
    if (!cache || !*cache)
        return;
    char *end;
    errno = 0;
    unsigned long long bytes = strtoull(cache, &end, 10); /* of a negative number, too: it takes the sign for a wish */
    static const char suffixes[] = "KMG";
    const char *suffix = *end ? strchr(suffixes, *end) : NULL;
    int shift = suffix ? 10 * (int)(suffix - suffixes + 1) : 0;
    end += suffix != NULL;
    bool wrong = *cache < '0' || *cache > '9' || errno || *end || bytes > ULLONG_MAX >> shift;
    bytes <<= shift;
    if (wrong)
        phos_warn("PHOS_CACHE_BYTES=%s is not a number of bytes (suffix K, M or G); the usual limit holds", cache);
    else {
        phos_policy.cache_set = true;
        phos_policy.cache_bytes = bytes;
    }
}

static int attribute(CUdevice device, CUdevice_attribute which)
{
    int value = 0;
    return phos_real.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static void uuid_read(CUdevice d)
{
    CUuuid uuid = {{0}};
    if (phos_real.cuDeviceGetUuid_v2(&uuid, d) != CUDA_SUCCESS)
        phos_real.cuDeviceGetUuid(&uuid, d);
    memcpy(phos_devices[d].uuid, uuid.bytes, sizeof phos_devices[d].uuid);
}

void phos_devices_restored(void)
{
    for (CUdevice d = 0; d < phos_device_count; d++)
        uuid_read(d);
}

static void device_read(CUdevice d)
{
    struct phos_device *device = &phos_devices[d];
    device->device = d;
    uuid_read(d);
    phos_real.cuDeviceTotalMem_v2(&device->total, d);
    device->rdma = attribute(d, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    device->host_pointers = attribute(d, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    device->carried = attribute(d, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                      attribute(d, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = d}};
    device->granularity = 0;
    if (device->carried && phos_real.cuMemGetAllocationGranularity(&device->granularity, &properties,
                                                                   CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS)
        device->carried = false;
    /* 2 MiB on every GPU so far. */
    if (device->granularity < PHOS_UNIT || device->granularity & (device->granularity - 1))
        device->granularity = PHOS_UNIT;
    if (!device->carried)
        phos_warn("device %d has no virtual memory management with descriptors: its memory is left to the driver", d);
}

static void fork_child(void)
{
    /* After cuInit the driver refuses to work in a forked child, and so do we. Before it, the child is as good as new. */
    if (phos_serving())
        atomic_store(&phos_mode, PHOS_MODE_PASSIVE);
    phos_gate_forked();
    phos_held_child();
    phos_audit_forked();
    phos_control_forked();
    phos_driver_memcpy_forked();
    pthread_mutex_init(&phos_memory_lock, NULL);
    pthread_mutex_init(&start_lock, NULL);
    phos_track_forked();
}

void phos_runtime_started(void)
{
    if (atomic_load_explicit(&phos_mode, memory_order_acquire) != PHOS_MODE_WAITING)
        return;
    PHOS_LOCKED(&start_lock);
    if (atomic_load(&phos_mode) != PHOS_MODE_WAITING)
        return;
    phos_log_init();
    policy_read();
    int count = 0;
    phos_real.cuDriverGetVersion(&phos_driver_version);
    if (phos_real.cuDeviceGetCount(&count) != CUDA_SUCCESS || count <= 0) {
        atomic_store(&phos_mode, PHOS_MODE_PASSIVE); /* no device: nothing to carry, ever */
        return;
    }
    if (count > PHOS_DEVICES) {
        phos_warn("%d devices are more than the %d that can be carried: nothing is", count, PHOS_DEVICES);
        atomic_store(&phos_mode, PHOS_MODE_PASSIVE);
        return;
    }
    phos_device_count = count;
    for (CUdevice d = 0; d < count; d++)
        device_read(d);
    size_t drawn = 0;
    while (drawn < sizeof phos_session) {
        ssize_t got = getrandom(phos_session + drawn, sizeof phos_session - drawn, 0);
        if (got < 0 && errno != EINTR) { /* seccomp: the clock and the pid will do */
            struct timespec now;
            clock_gettime(CLOCK_REALTIME, &now);
            uint64_t seed[2] = {(uint64_t)now.tv_sec * 1000000007u ^ (uint64_t)now.tv_nsec, (uint64_t)getpid()};
            memcpy(phos_session, seed, sizeof phos_session);
            break;
        }
        drawn += got > 0 ? (size_t)got : 0;
    }
    phos_gate_init();
    pthread_atfork(phos_held_forking, phos_held_parent, fork_child);
    atexit(process_exits);
    atomic_store_explicit(&phos_mode, PHOS_MODE_SERVING, memory_order_release);
    phos_control_start();
    phos_audit_start();
}
