/* Parts of what calls touch, shared by the calls themselves and by the nodes of graphs. They add to a list that was
 * begun. */
#pragma once
#include "touch.h"

void phos_touch_copy_3d(struct phos_touches *touches, const CUDA_MEMCPY3D *copy);
void phos_touch_copies(struct phos_touches *touches, const CUdeviceptr_v2 *to, const CUdeviceptr_v2 *from,
                       const size_t *sizes, size_t count);
void phos_touch_fabric_copies(struct phos_touches *touches, const CUDA_FABRIC_COPY_BATCH_OP_v1 *list, size_t count);
void phos_touch_memory_operations(struct phos_touches *touches, const CUstreamBatchMemOpParams *operations,
                                  unsigned int count);
void phos_touch_launch(struct phos_touches *touches, CUfunction function, void **parameters, void **extra);
