/* Matrix products by cuBLASLt.
 *
 * It computes in columns, so a product of rows, out = a b, is given to it as out^T = b^T a^T, without a copy: the rows of
 * a matrix are the columns of its transpose. Which of its algorithms computes a shape is asked once, and kept. */
#include "cuda/cuda_launch.h"
#include "cuda/cuda_library.h"
#include "cuda/products.h"

#include <cublasLt.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORKSPACE = 32 << 20, BUCKETS = 1024, MOST_LOOPS = 64, MOST_ALIGNED = 256 };

static struct {
    __typeof__(&cublasLtCreate) create;
    __typeof__(&cublasLtMatmul) multiply;
    __typeof__(&cublasLtMatmulAlgoGetHeuristic) find_algorithm;
    __typeof__(&cublasLtMatmulDescInit_internal) init_product;
    __typeof__(&cublasLtMatmulDescSetAttribute) set_product;
    __typeof__(&cublasLtMatrixLayoutInit_internal) init_layout;
    __typeof__(&cublasLtMatrixLayoutSetAttribute) set_layout;
    __typeof__(&cublasLtMatmulPreferenceInit_internal) init_preference;
    __typeof__(&cublasLtMatmulPreferenceSetAttribute) set_preference;
    cublasLtHandle_t handle; /* NULL: without cuBLASLt */
} lt;

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_library(void)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                        "/usr/local/cuda/lib64/libcublasLt.so.13",
                                        "/usr/local/cuda/lib64/libcublasLt.so.12", NULL};
    const struct cuda_symbol symbols[] = {
        {"cublasLtCreate", (void **)&lt.create},
        {"cublasLtMatmul", (void **)&lt.multiply},
        {"cublasLtMatmulAlgoGetHeuristic", (void **)&lt.find_algorithm},
        {"cublasLtMatmulDescInit_internal", (void **)&lt.init_product},
        {"cublasLtMatmulDescSetAttribute", (void **)&lt.set_product},
        {"cublasLtMatrixLayoutInit_internal", (void **)&lt.init_layout},
        {"cublasLtMatrixLayoutSetAttribute", (void **)&lt.set_layout},
        {"cublasLtMatmulPreferenceInit_internal", (void **)&lt.init_preference},
        {"cublasLtMatmulPreferenceSetAttribute", (void **)&lt.set_preference},
    };
    if (!td__cuda_open("cuBLASLt", "TANDEM_CUBLASLT_SO", names, symbols,
                       (int)(sizeof symbols / sizeof symbols[0])))
        return;
    cublasStatus_t status = lt.create(&lt.handle);
    if (status) {
        td_log(TD_LOG_WARN, "cuda: without cuBLASLt, which fails to start with status %d",
               (int)status);
        lt.handle = NULL;
    }
}

/* ---- Shapes --------------------------------------------------------------------------------------------------- */

/* A product as cuBLASLt gets it, and what its algorithm depends on. Without padding, since it is hashed as bytes. */
struct shape {
    int64_t m, n, k;
    int64_t left_ld, right_ld, out_ld;
    int64_t batches, left_batch, right_batch, out_batch;
    int32_t dtype, left_transposed, right_transposed, has_bias, accumulate;
    int32_t left_alignment, right_alignment, out_alignment;
    int32_t device, reserved;
};

/* How one operand lies in memory, as a matrix whose columns are the rows of `outer` by `inner` elements. */
static bool find_layout(int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                        int64_t *ld, int32_t *transposed)
{
    if (inner_stride == 1 || inner == 1) {
        *ld = outer == 1 ? inner : outer_stride;
        *transposed = 0;
        if (*ld >= inner)
            return true;
    }
    if (outer_stride == 1 || outer == 1) {
        *ld = inner == 1 ? outer : inner_stride;
        *transposed = 1;
        return *ld >= outer;
    }
    return false;
}

static int32_t alignment(const void *data)
{
    uintptr_t bits = (uintptr_t)data | MOST_ALIGNED;
    return (int32_t)(bits & -bits);
}

static bool describe(const struct product_args *args, td_dtype dtype, struct shape *shape)
{
    memset(shape, 0, sizeof *shape);
    shape->m = args->m;
    shape->n = args->n;
    shape->k = args->k;
    shape->dtype = (int32_t)dtype;
    shape->has_bias = args->bias != NULL;
    shape->accumulate = args->accumulate;
    shape->batches = args->batch_dims ? args->size[0] : 1;
    if (args->batch_dims) {
        shape->out_batch = args->stride[0][0];
        shape->right_batch = args->stride[1][0];
        shape->left_batch = args->stride[2][0];
    }
    shape->left_alignment = alignment(args->b);
    shape->right_alignment = alignment(args->a);
    shape->out_alignment = alignment(args->out);
    shape->out_ld = args->m == 1 ? args->n : args->out_row;
    return shape->out_ld >= args->n && shape->left_batch >= 0 && shape->right_batch >= 0 &&
           find_layout(args->k, args->n, args->b_row, args->b_column, &shape->left_ld,
                       &shape->left_transposed) &&
           find_layout(args->m, args->k, args->a_row, args->a_column, &shape->right_ld,
                       &shape->right_transposed);
}

/* ---- Descriptions for cuBLASLt -------------------------------------------------------------------------------- */

struct product {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t left, right, out;
};

static cudaDataType_t data_type(int32_t dtype)
{
    return dtype == TD_F64   ? CUDA_R_64F
           : dtype == TD_F16 ? CUDA_R_16F
           : dtype == TD_F32 ? CUDA_R_32F
                             : CUDA_R_16BF;
}

static int set_layout(cublasLtMatrixLayoutOpaque_t *layout, int32_t dtype, int64_t rows,
                      int64_t columns, int64_t ld, int64_t batches, int64_t stride)
{
    int32_t number = (int32_t)batches;
    int failed = (int)lt.init_layout(layout, sizeof *layout, data_type(dtype), (uint64_t)rows,
                                     (uint64_t)columns, ld);
    if (!failed && batches > 1)
        failed = lt.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &number,
                               sizeof number) ||
                 lt.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                               sizeof stride);
    return failed;
}

/* `bias`: its address counts for the search of an algorithm as well. */
static bool make_product(const struct shape *shape, const void *bias, struct product *product)
{
    bool is_f64 = shape->dtype == TD_F64;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDesc_t operation = &product->operation;
    int failed = (int)lt.init_product(operation, sizeof *operation,
                                      is_f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                      is_f64 ? CUDA_R_64F : CUDA_R_32F);
    if (!failed && shape->left_transposed)
        failed = (int)lt.set_product(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                     sizeof transposed);
    if (!failed && shape->right_transposed)
        failed = (int)lt.set_product(operation, CUBLASLT_MATMUL_DESC_TRANSB, &transposed,
                                     sizeof transposed);
    if (!failed && bias)
        failed = lt.set_product(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                sizeof epilogue) ||
                 lt.set_product(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    int64_t m = shape->m, n = shape->n, k = shape->k;
    return !failed &&
           !set_layout(&product->left, shape->dtype, shape->left_transposed ? k : n,
                       shape->left_transposed ? n : k, shape->left_ld, shape->batches,
                       shape->left_batch) &&
           !set_layout(&product->right, shape->dtype, shape->right_transposed ? m : k,
                       shape->right_transposed ? k : m, shape->right_ld, shape->batches,
                       shape->right_batch) &&
           !set_layout(&product->out, shape->dtype, n, m, shape->out_ld, shape->batches,
                       shape->out_batch);
}

/* ---- Algorithms ------------------------------------------------------------------------------------------------- */

struct algorithm {
    struct shape shape;
    struct algorithm *next;
    bool found;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
};

static _Atomic(struct algorithm *) buckets[BUCKETS]; /* lists that only grow */
static pthread_mutex_t searching = PTHREAD_MUTEX_INITIALIZER;

static unsigned hash(const struct shape *shape)
{
    const uint64_t *words = (const uint64_t *)shape;
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof *shape / sizeof *words; i++)
        sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
    return (unsigned)(sum % BUCKETS);
}

static const struct algorithm *look_up(unsigned bucket, const struct shape *shape)
{
    const struct algorithm *entry = atomic_load_explicit(&buckets[bucket], memory_order_acquire);
    while (entry && memcmp(&entry->shape, shape, sizeof *shape))
        entry = entry->next;
    return entry;
}

static void search(struct algorithm *entry, struct product *product)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    const struct shape *shape = &entry->shape;
    uint64_t most = MOST_WORKSPACE;
    uint32_t left = (uint32_t)shape->left_alignment, right = (uint32_t)shape->right_alignment,
             out = (uint32_t)shape->out_alignment;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t size;
    } settings[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &left, sizeof left},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &right, sizeof right},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out, sizeof out},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out, sizeof out},
    };
    int failed = (int)lt.init_preference(&preference, sizeof preference);
    for (size_t i = 0; i < sizeof settings / sizeof settings[0] && !failed; i++)
        failed = (int)lt.set_preference(&preference, settings[i].attribute, settings[i].value,
                                        settings[i].size);
    cublasLtMatmulHeuristicResult_t result;
    int count = 0;
    entry->found = !failed &&
                   !lt.find_algorithm(lt.handle, &product->operation, &product->left,
                                      &product->right, &product->out, &product->out, &preference, 1,
                                      &result, &count) &&
                   count == 1 && !result.state;
    if (entry->found) {
        entry->algorithm = result.algo;
        entry->workspace = result.workspaceSize;
    }
}

/* The algorithm for a shape; NULL without memory. */
static const struct algorithm *find_algorithm(const struct shape *shape, struct product *product)
{
    unsigned bucket = hash(shape);
    const struct algorithm *known = look_up(bucket, shape);
    if (known)
        return known;
    pthread_mutex_lock(&searching);
    known = look_up(bucket, shape);
    struct algorithm *entry = known ? NULL : calloc(1, sizeof *entry);
    if (entry) {
        entry->shape = *shape;
        search(entry, product);
        entry->next = atomic_load(&buckets[bucket]);
        atomic_store_explicit(&buckets[bucket], entry, memory_order_release);
        known = entry;
    }
    pthread_mutex_unlock(&searching);
    return known;
}

/* ---- The call ---------------------------------------------------------------------------------------------------- */

static td_status run(const struct algorithm *algorithm, const struct product *product,
                     const struct product_args *args, td_tensor *out)
{
    TD_SCOPE;
    bool is_f64 = algorithm->shape.dtype == TD_F64;
    float alpha = (float)args->alpha, beta = args->accumulate ? 1 : 0;
    double alpha_f64 = args->alpha, beta_f64 = args->accumulate ? 1 : 0;
    td_tensor *workspace = algorithm->workspace ? td__cuda_workspace(out, algorithm->workspace)
                                                : NULL;
    if (algorithm->workspace && !workspace)
        return TD_ERR_NOMEM;
    cublasStatus_t status = lt.multiply(
        lt.handle, (cublasLtMatmulDesc_t)&product->operation,
        is_f64 ? (void *)&alpha_f64 : (void *)&alpha, args->b,
        (cublasLtMatrixLayout_t)&product->left, args->a, (cublasLtMatrixLayout_t)&product->right,
        is_f64 ? (void *)&beta_f64 : (void *)&beta, args->out,
        (cublasLtMatrixLayout_t)&product->out, args->out, (cublasLtMatrixLayout_t)&product->out,
        &algorithm->algorithm, workspace ? td_tensor_data(workspace) : NULL, algorithm->workspace,
        (cudaStream_t)td__cuda_stream_of(out));
    return status ? td_fail(TD_ERR_SYSTEM,
                            "%s: cuBLASLt fails with status %d at a product of [%lld, %lld] and "
                            "[%lld, %lld]",
                            td__cuda_device_of(out)->name, (int)status, (long long)args->m,
                            (long long)args->k, (long long)args->k, (long long)args->n)
                  : TD_OK;
}

/* One product, or one batch of products with even strides. */
static td_status multiply(const struct product_args *args, td_tensor *out, bool *done)
{
    struct shape shape;
    struct product product;
    *done = false;
    if (!describe(args, td_tensor_dtype(out), &shape))
        return TD_OK;
    shape.device = td__cuda_device_of(out)->device;
    if (!make_product(&shape, args->bias, &product))
        return TD_OK;
    const struct algorithm *algorithm = find_algorithm(&shape, &product);
    if (!algorithm || !algorithm->found)
        return TD_OK;
    *done = true;
    return run(algorithm, &product, args, out);
}

td_status td__lt_multiply(const struct product_args *args, td_tensor *out, bool *done)
{
    *done = false;
    td_status status = td__cuda_enter(td__cuda_device_of(out));
    if (status)
        return status;
    pthread_once(&once, open_library);
    int64_t loops = 1;
    for (int d = 1; d < args->batch_dims; d++)
        loops *= args->size[d];
    if (!lt.handle || !args->k || loops > MOST_LOOPS)
        return TD_OK;
    size_t size = td_dtype_size(td_tensor_dtype(out));
    for (int64_t i = 0; i < loops; i++) {
        struct product_args one = *args;
        int64_t rest = i, offset[3] = {0};
        for (int d = 1; d < args->batch_dims; rest /= args->size[d++])
            for (int t = 0; t < 3; t++)
                offset[t] += rest % args->size[d] * args->stride[t][d];
        one.out = (char *)args->out + offset[0] * (int64_t)size;
        one.a = (const char *)args->a + offset[1] * (int64_t)size;
        one.b = (const char *)args->b + offset[2] * (int64_t)size;
        one.batch_dims = args->batch_dims ? 1 : 0;
        status = multiply(&one, out, done);
        if (status || !*done) /* the same shape: all of them are done, or none */
            return status;
    }
    return TD_OK;
}
