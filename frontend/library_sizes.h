/* How many bytes of device memory a documented argument stands for. 0: unknown. PHOS_LIBRARY_NOTHING: none. Every size
 * is from the lowest address touched to the last, gaps between columns included. */
#pragma once
#include "library.h"

/* Elements to bytes. `elements` < 0: not known. */
size_t span_elements(__int128 elements, int bits);

size_t span_vector(long long n, long long increment, int bits);

/* Column-major: `rows` are next to each other, columns `leading` apart. */
size_t span_matrix(long long rows, long long columns, long long leading, int bits);

/* A matrix that is rows x columns once the operation (0: none) is applied. */
static inline size_t span_op(int operation, long long rows, long long columns, long long leading, int bits)
{
    return operation ? span_matrix(columns, rows, leading, bits) : span_matrix(rows, columns, leading, bits);
}

/* The square matrix of a multiplication from the left (0) or right (1). */
static inline size_t span_side(int side, long long m, long long n, long long leading, int bits)
{
    return side ? span_matrix(n, n, leading, bits) : span_matrix(m, m, leading, bits);
}

/* `count` of them, `stride` elements apart. */
size_t span_batch(size_t one, long long stride, long long count, int bits);

static inline size_t span_pointers(long long count)
{
    return count > 0 ? (size_t)count * sizeof(void *) : PHOS_LIBRARY_NOTHING;
}

static inline size_t span_bytes(size_t bytes)
{
    return bytes ? bytes : PHOS_LIBRARY_NOTHING;
}

/* Bits of one element of a cudaDataType; 0: unknown. */
int span_type(int type);
/* `count` elements of an ncclDataType_t. */
size_t span_nccl(size_t count, int type);
/* The same for each rank of the communicator. `real`: the function that is called. */
size_t span_ranks(const void *real, void *communicator, size_t count, int type);
/* By what the library itself says of a cuDNN descriptor, a cuBLASLt layout. */
size_t span_tensor(const void *real, void *descriptor);
size_t span_filter(const void *real, void *descriptor);
size_t span_layout(const void *real, void *layout);

/* Adds to what a call of cuDNN documents: the states of random numbers that its dropout keeps. */
void document_dropout(struct phos_library_scope *scope, const void *real, void *handle, void *dropout);
void document_rnn(struct phos_library_scope *scope, const void *real, void *handle, void *network);

/* Adds to what cublasLtMatmul documents: the memory that the description of the multiplication names, and whether there
 * is more, where a layout says that its matrices lie where pointers in device memory say. */
void document_matmul(struct phos_library_scope *scope, const void *real, void *description, void *A, void *B, void *C,
                     void *D);
