/* Tensor maps as they are made. Their bytes are the driver's own form, so that only who saw one made can tell what memory
 * it stands for. Programs make them anew for every launch: the latest ones are kept, in a table of sets in which a new one
 * takes the oldest one's place. */
#include "tensor_maps.h"
#include "cleanup.h"

#include <stdlib.h>
#include <string.h>

#define WAYS 8
#define SETS 2048

struct entry {
    CUtensorMap map;
    CUdeviceptr address;
    uint32_t age; /* when it came, by `clock_`; 0: free */
};

_Atomic uint32_t phos_tensor_map_count;
static pthread_mutex_t map_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the table; taken last */
static struct entry *entries; /* SETS sets of WAYS; made for the first map */
static uint32_t clock_;

static struct entry *set_of(const CUtensorMap *map)
{
    uint64_t hash = 0xcbf29ce484222325ull, words[sizeof *map / 8];
    memcpy(words, map, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    return entries + (hash % SETS) * WAYS;
}

static struct entry *find(const CUtensorMap *map)
{
    struct entry *set = set_of(map);
    for (int i = 0; i < WAYS; i++)
        if (set[i].age && !memcmp(&set[i].map, map, sizeof *map))
            return &set[i];
    return NULL;
}

bool phos_tensor_map_find(const CUtensorMap *map, CUdeviceptr *address)
{
    PHOS_LOCKED(&map_lock);
    struct entry *entry = entries ? find(map) : NULL;
    if (entry)
        *address = entry->address;
    return entry != NULL;
}

static CUresult made(CUresult result, const CUtensorMap *map, const void *address)
{
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&map_lock);
    if (!entries && !(entries = calloc(SETS * WAYS, sizeof *entries)))
        return result; /* a kernel that gets it may touch anything */
    struct entry *entry = find(map);
    if (!entry) {
        struct entry *set = entry = set_of(map);
        for (int i = 1; i < WAYS; i++)
            if (set[i].age < entry->age)
                entry = &set[i];
    }
    entry->map = *map;
    entry->address = (CUdeviceptr)(uintptr_t)address;
    entry->age = ++clock_ ? clock_ : ++clock_;
    atomic_store_explicit(&phos_tensor_map_count, 1, memory_order_relaxed);
    return result;
}

CUresult serve_cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                      const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                      const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                      CUtensorMapFloatOOBfill fill)
{
    return made(phos_real.cuTensorMapEncodeTiled(map, type, rank, address, sizes, strides, box, element_strides,
                                                 interleave, swizzle, promotion, fill),
                map, address);
}

CUresult serve_cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const int *lower,
                                       const int *upper, cuuint32_t channels, cuuint32_t pixels,
                                       const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill)
{
    return made(phos_real.cuTensorMapEncodeIm2col(map, type, rank, address, sizes, strides, lower, upper, channels, pixels,
                                                  element_strides, interleave, swizzle, promotion, fill),
                map, address);
}

CUresult serve_cuTensorMapEncodeIm2colWide(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                           const cuuint64_t *sizes, const cuuint64_t *strides, int lower, int upper,
                                           cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *element_strides,
                                           CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                           CUtensorMapFloatOOBfill fill)
{
    return made(phos_real.cuTensorMapEncodeIm2colWide(map, type, rank, address, sizes, strides, lower, upper, channels,
                                                      pixels, element_strides, interleave, mode, swizzle, promotion, fill),
                map, address);
}

/* Of the map, which stays otherwise, other bytes. */
CUresult serve_cuTensorMapSetAllocationClass(CUtensorMap *map, CUtensorMapAllocClass wanted, CUtensorMapAllocClass *given)
{
    CUdeviceptr address;
    bool known = map && phos_tensor_map_find(map, &address);
    CUresult result = phos_real.cuTensorMapSetAllocationClass(map, wanted, given);
    return known ? made(result, map, (void *)(uintptr_t)address) : result;
}

CUresult serve_cuTensorMapReplaceAddress(CUtensorMap *map, void *address)
{
    return made(phos_real.cuTensorMapReplaceAddress(map, address), map, address);
}
