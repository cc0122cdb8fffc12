/* The frontend over a driver of this file's own, in which another thread imports a pool while one is destroyed, and is given its
 * handle: then a pool is still shared, which keeps the process from being detached. */
#include "check.h"
#include "driver_shared.h"
#include "runtime.h"

#define POOL ((CUmemoryPool)0x4000)

static bool fails;

static CUresult import(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type, unsigned long long flags)
{
    (void)handle, (void)type, (void)flags;
    *pool = POOL;
    return CUDA_SUCCESS;
}

static void import_elsewhere(void)
{
    CUmemoryPool pool;
    CHECK(serve_cuMemPoolImportFromShareableHandle(&pool, NULL, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS);
}

static CUresult destroy(CUmemoryPool pool)
{
    CHECK(pool == POOL);
    if (fails)
        return CUDA_ERROR_INVALID_VALUE;
    static bool once;
    if (!once)
        import_elsewhere();
    once = true;
    return CUDA_SUCCESS;
}

int main(void)
{
    phos_real.cuMemPoolImportFromShareableHandle = import;
    phos_real.cuMemPoolDestroy = destroy;

    import_elsewhere();
    CHECK(serve_cuMemPoolDestroy(POOL) == CUDA_SUCCESS);
    CHECK(phos_driver_shared());

    fails = true;
    CHECK(serve_cuMemPoolDestroy(POOL) == CUDA_ERROR_INVALID_VALUE);
    CHECK(phos_driver_shared());

    fails = false;
    CHECK(serve_cuMemPoolDestroy(POOL) == CUDA_SUCCESS);
    CHECK(!phos_driver_shared());
    return 0;
}
