/* cuGetProcAddress: name, version and default-stream flavour to function, from the generated table. */
#include <string.h>

#include "softgpu.h"

static CUresult lookup(const char *symbol, void **pfn, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found)
{
    if (found)
        *found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (!symbol || !pfn || (flags & ~(cuuint64_t)3) || flags == 3)
        return CUDA_ERROR_INVALID_VALUE;
    *pfn = NULL;
    bool per_thread = flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    const struct sg_entry *best = NULL;
    bool known = false;
    for (unsigned i = 0; i < sg_entry_count; i++) {
        const struct sg_entry *entry = &sg_entries[i];
        if (strcmp(entry->name, symbol) || entry->version > sg_settings()->driver_version)
            continue;
        if (entry->stream == (per_thread ? SG_STREAM_LEGACY : SG_STREAM_PTSZ))
            continue;
        known = true;
        if (entry->version <= version && (!best || entry->version > best->version))
            best = entry;
    }
    if (best) {
        *pfn = (void *)best->function;
        if (found)
            *found = CU_GET_PROC_ADDRESS_SUCCESS;
        return CUDA_SUCCESS;
    }
    if (known && found)
        *found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_ERROR_NOT_FOUND;
}

CUresult softgpu_cuGetProcAddress_v2(const char *symbol, void **pfn, int driverVersion, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult *symbolFound)
{
    return lookup(symbol, pfn, driverVersion, flags, symbolFound);
}

CUresult softgpu_cuGetProcAddress(const char *symbol, void **pfn, int driverVersion, cuuint64_t flags)
{
    return lookup(symbol, pfn, driverVersion, flags, NULL);
}

/* The tables are private to NVIDIA's libraries: there is none here. */
CUresult softgpu_cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
    if (!ppExportTable || !pExportTableId)
        return CUDA_ERROR_INVALID_VALUE;
    *ppExportTable = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
