/* Sizes of vectors and matrices, and those that the libraries know: of types, and of what opaque descriptors describe.
 * Asked only while a window is open. */
#include "library_sizes.h"

size_t span_elements(__int128 elements, int bits)
{
    if (elements < 0 || bits <= 0 || elements > ((__int128)1 << 56))
        return 0;
    return elements ? (size_t)((elements * bits + 7) / 8) : PHOS_LIBRARY_NOTHING;
}

size_t span_vector(long long n, long long increment, int bits)
{
    if (n <= 0)
        return PHOS_LIBRARY_NOTHING;
    if (increment < 0) /* begins at its lowest address too, and is walked backwards */
        increment = -increment;
    return span_elements((__int128)(n - 1) * increment + 1, bits);
}

size_t span_matrix(long long rows, long long columns, long long leading, int bits)
{
    if (rows <= 0 || columns <= 0)
        return PHOS_LIBRARY_NOTHING;
    return leading < rows ? 0 : span_elements((__int128)(columns - 1) * leading + rows, bits);
}

size_t span_batch(size_t one, long long stride, long long count, int bits)
{
    if (count <= 0)
        return PHOS_LIBRARY_NOTHING;
    if (one == 0 || one == PHOS_LIBRARY_NOTHING)
        return one;
    if (stride < 0 || bits <= 0)
        return 0;
    __int128 bytes = ((__int128)(count - 1) * stride * bits + 7) / 8 + one;
    return bytes > ((__int128)1 << 56) ? 0 : (size_t)bytes;
}

int span_type(int type)
{
    /* cudaDataType, library_types.h of CUDA 13.0: bits of a real; complex ones have two. */
    static const unsigned char bits[] = {
        [0] = 32, [1] = 64,   [2] = 16,  [3] = 8,  [4] = 64, [5] = 128, [6] = 32, [7] = 16, [8] = 8,
        [9] = 16, [10] = 32,  [11] = 64, [12] = 32, [13] = 64, [14] = 16, [15] = 32, [16] = 4, [17] = 8,
        [18] = 4, [19] = 8,   [20] = 16, [21] = 32, [22] = 16, [23] = 32, [24] = 64, [25] = 128, [26] = 64,
        [27] = 128, [28] = 8, [29] = 8,  [30] = 8, [31] = 6, [32] = 6, [33] = 4,
    };
    return type >= 0 && type < (int)sizeof bits ? bits[type] : 0;
}

size_t span_nccl(size_t count, int type)
{
    /* ncclDataType_t, nccl.h 2.32. */
    static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (!count)
        return PHOS_LIBRARY_NOTHING;
    return type >= 0 && type < (int)sizeof bytes ? span_elements(count, bytes[type] * 8) : 0;
}

size_t span_ranks(const void *real, void *communicator, size_t count, int type)
{
    int (*ranks_of)(void *, int *) = (int (*)(void *, int *))phos_library_sibling(real, "ncclCommCount");
    size_t one = span_nccl(count, type);
    int ranks = 0;
    if (one == 0 || one == PHOS_LIBRARY_NOTHING)
        return one;
    return ranks_of && !ranks_of(communicator, &ranks) && ranks > 0 ? one * (size_t)ranks : 0;
}

static size_t asked(const void *real, const char *name, void *descriptor)
{
    int (*size_of)(void *, size_t *) = (int (*)(void *, size_t *))phos_library_sibling(real, name);
    size_t size = 0;
    if (!descriptor || !size_of || size_of(descriptor, &size))
        return 0;
    return size;
}

size_t span_tensor(const void *real, void *descriptor)
{
    return asked(real, "cudnnGetTensorSizeInBytes", descriptor);
}

size_t span_filter(const void *real, void *descriptor)
{
    return asked(real, "cudnnGetFilterSizeInBytes", descriptor);
}

void document_dropout(struct phos_library_scope *scope, const void *real, void *handle, void *dropout)
{
    int (*get_dropout)(void *, void *, float *, void **, unsigned long long *) =
        (int (*)(void *, void *, float *, void **, unsigned long long *))phos_library_sibling(
            real, "cudnnGetDropoutDescriptor");
    float probability;
    void *states = NULL;
    unsigned long long seed;
    if (dropout && get_dropout && !get_dropout(dropout, handle, &probability, &states, &seed))
        phos_library_document(scope, states, 0, PHOS_READS | PHOS_WRITES | PHOS_PERHAPS);
}

void document_rnn(struct phos_library_scope *scope, const void *real, void *handle, void *network)
{
    typedef int get_network(void *, int *, int *, int *, int *, int *, int *, int *, int *, int32_t *, int32_t *,
                            int32_t *, int32_t *, void **, uint32_t *);
    get_network *get = (get_network *)phos_library_sibling(real, "cudnnGetRNNDescriptor_v8");
    int kinds[8];
    int32_t sizes[4];
    void *dropout = NULL;
    uint32_t flags;
    if (network && get &&
        !get(network, &kinds[0], &kinds[1], &kinds[2], &kinds[3], &kinds[4], &kinds[5], &kinds[6], &kinds[7], &sizes[0],
             &sizes[1], &sizes[2], &sizes[3], &dropout, &flags))
        document_dropout(scope, real, handle, dropout);
}

/* cublasLtMatrixLayoutAttribute_t. */
enum { LAYOUT_TYPE, LAYOUT_ORDER, LAYOUT_ROWS, LAYOUT_COLUMNS, LAYOUT_LEADING, LAYOUT_BATCH, LAYOUT_STRIDE, LAYOUT_PLANE,
       LAYOUT_BATCH_MODE };
enum { ORDER_COLUMN, ORDER_ROW };

typedef int get_attribute(void *layout, int attribute, void *value, size_t size, size_t *written);

static bool get(get_attribute *attribute_of, void *layout, int attribute, void *value, size_t size)
{
    size_t written = 0;
    return !attribute_of(layout, attribute, value, size, &written) && written == size;
}

/* Newer than the other attributes: a library that does not know it has no such batches. */
static bool of_pointers(get_attribute *attribute_of, void *layout)
{
    uint32_t mode = 0;
    return get(attribute_of, layout, LAYOUT_BATCH_MODE, &mode, sizeof mode) && mode;
}

size_t span_layout(const void *real, void *layout)
{
    get_attribute *attribute_of = (get_attribute *)phos_library_sibling(real, "cublasLtMatrixLayoutGetAttribute");
    uint32_t type = 0;
    int32_t order = 0, batch = 0;
    uint64_t rows = 0, columns = 0;
    int64_t leading = 0, stride = 0, plane = 0;
    if (!layout || !attribute_of || !get(attribute_of, layout, LAYOUT_TYPE, &type, sizeof type) ||
        !get(attribute_of, layout, LAYOUT_ORDER, &order, sizeof order) ||
        !get(attribute_of, layout, LAYOUT_ROWS, &rows, sizeof rows) ||
        !get(attribute_of, layout, LAYOUT_COLUMNS, &columns, sizeof columns) ||
        !get(attribute_of, layout, LAYOUT_LEADING, &leading, sizeof leading) ||
        !get(attribute_of, layout, LAYOUT_BATCH, &batch, sizeof batch) ||
        !get(attribute_of, layout, LAYOUT_STRIDE, &stride, sizeof stride) ||
        !get(attribute_of, layout, LAYOUT_PLANE, &plane, sizeof plane))
        return 0;
    if (of_pointers(attribute_of, layout))
        return 0;
    if (plane || (order != ORDER_COLUMN && order != ORDER_ROW) || rows > INT64_MAX || columns > INT64_MAX)
        return 0;
    int bits = span_type((int)type);
    return span_batch(span_op(order == ORDER_ROW, (long long)rows, (long long)columns, leading, bits), stride, batch, bits);
}

/* cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t. */
enum { MATMUL_EPILOGUE = 7, MATMUL_BIAS = 8, MATMUL_AUXILIARY = 11, MATMUL_SCALE_A = 17, MATMUL_SCALE_D = 20, MATMUL_MOST_D = 21,
       MATMUL_AUXILIARY_SCALE = 23, MATMUL_AUXILIARY_MOST = 24, MATMUL_OUT_COUNTERS = 30, MATMUL_OUT_SCALE_D = 36 };
enum { EPILOGUE_BIAS = 4, EPILOGUE_AUXILIARY = 128, EPILOGUE_BACKWARD = 8 | 64, EPILOGUE_BIAS_GRADIENT = 16 | 256 | 512 };

/* Of most no size is said, and kernels have them among their arguments as a rule: they stand for what cannot be known. */
static void document_epilogue(struct phos_library_scope *scope, const void *real, void *description)
{
    get_attribute *attribute_of = (get_attribute *)phos_library_sibling(real, "cublasLtMatmulDescGetAttribute");
    uint32_t epilogue = 0;
    if (!description || !attribute_of || !get(attribute_of, description, MATMUL_EPILOGUE, &epilogue, sizeof epilogue))
        return;
    uint32_t writes = PHOS_READS | PHOS_WRITES, bias = 0, auxiliary = 0;
    if (epilogue & (EPILOGUE_BIAS | EPILOGUE_BIAS_GRADIENT))
        bias = epilogue & EPILOGUE_BIAS_GRADIENT ? writes : PHOS_READS;
    if (epilogue & EPILOGUE_AUXILIARY)
        auxiliary = epilogue & EPILOGUE_BACKWARD ? PHOS_READS : writes;
    const struct { int attribute; uint32_t access; size_t size; } named[] = {
        {MATMUL_BIAS, bias, 0},
        {MATMUL_AUXILIARY, auxiliary, 0},
        {MATMUL_MOST_D, writes, sizeof(float)},
        {MATMUL_AUXILIARY_MOST, writes, sizeof(float)},
        {MATMUL_OUT_SCALE_D, writes, 0},
        {MATMUL_OUT_COUNTERS, writes, 0},
        {MATMUL_SCALE_A, PHOS_READS, 0},
        {MATMUL_SCALE_A + 1, PHOS_READS, 0},
        {MATMUL_SCALE_A + 2, PHOS_READS, 0},
        {MATMUL_SCALE_D, PHOS_READS, 0},
        {MATMUL_AUXILIARY_SCALE, PHOS_READS, 0},
    };
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        const void *address = NULL;
        if (named[i].access && get(attribute_of, description, named[i].attribute, &address, sizeof address))
            phos_library_document(scope, address, named[i].size, named[i].access | PHOS_PERHAPS);
    }
}

void document_matmul(struct phos_library_scope *scope, const void *real, void *description, void *A, void *B, void *C,
                     void *D)
{
    get_attribute *attribute_of = (get_attribute *)phos_library_sibling(real, "cublasLtMatrixLayoutGetAttribute");
    void *layouts[] = {A, B, C, D};
    for (size_t i = 0; attribute_of && i < sizeof layouts / sizeof *layouts; i++)
        scope->elsewhere |= layouts[i] && of_pointers(attribute_of, layouts[i]);
    document_epilogue(scope, real, description);
}
