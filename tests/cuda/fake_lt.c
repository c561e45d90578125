/* A cuBLASLt for the emulated libcuda: the memory of the device is the host's, and a product is computed when the call is
 * made. For tests: TANDEM_CUBLASLT_SO names this file. What cuBLASLt would refuse, it refuses too.
 *
 *     FAKE_LT_CANDIDATES=N    how many algorithms it has for a product, 5 if not set
 *     FAKE_LT_FASTEST=N       all algorithms but this one take ten seconds more, as events see it
 *     FAKE_LT_FAIL=NAME:N     the Nth call of a function fails, as do all that follow
 *     FAKE_LT_VERSION=N       what cublasLtGetVersion() says
 *     FAKE_LT_LOG=FILE        a line for each call: "run ALGORITHM M N K EPILOGUE", "propose N", "check ALGORITHM"
 *
 * Algorithm 1 adds parts in place, and 3 in f32; 2 asks for 16 bytes of alignment of everything; 3 has a workspace. */
#include <cublasLt.h>

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAGIC = 0x7a11ed, ALGORITHMS = 5, WORKSPACE = 1 << 20, SECONDS = 10 };

struct operation {
    uint32_t magic;
    cublasComputeType_t compute;
    cublasOperation_t transposed[2];
    cublasLtEpilogue_t epilogue;
    void *bias, *aux;
    int64_t aux_ld;
};

struct layout {
    uint32_t magic;
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld, stride;
    int32_t batches;
};

struct preference {
    uint64_t workspace;
    uint32_t magic, schemes;
    uint32_t alignment[4]; /* A, B, C, D */
};

struct algorithm {
    uint32_t magic, number;
};

_Static_assert(sizeof(struct operation) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
_Static_assert(sizeof(struct preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
_Static_assert(sizeof(struct algorithm) <= sizeof(cublasLtMatmulAlgo_t), "fits");

static const uint32_t scheme_of[ALGORITHMS] = {0, CUBLASLT_REDUCTION_SCHEME_INPLACE, 0,
                                               CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 0};
static const uint32_t alignment_of[ALGORITHMS] = {0, 0, 16, 0, 0};
static const size_t workspace_of[ALGORITHMS] = {0, 0, 0, WORKSPACE, 0};

/* ---- Settings ----------------------------------------------------------------------------------------------- */

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static bool fails(const char *function)
{
    static long calls;
    const char *text = getenv("FAKE_LT_FAIL");
    size_t length = strlen(function);
    return text && !strncmp(text, function, length) && text[length] == ':' &&
           __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) >= strtol(text + length + 1, NULL, 10);
}

static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void note(const char *format, ...)
{
    const char *path = getenv("FAKE_LT_LOG");
    FILE *file = path && *path ? fopen(path, "a") : NULL;
    if (!file)
        return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fclose(file);
}

static void pass(long seconds)
{
    void *driver = dlopen(getenv("TANDEM_CUDA_SO"), RTLD_NOW | RTLD_NOLOAD);
    void (*emulated_pass)(long) = driver ? (void (*)(long))dlsym(driver, "emulated_pass") : NULL;
    if (!emulated_pass)
        abort();
    emulated_pass(seconds);
    dlclose(driver);
}

/* ---- Descriptions ------------------------------------------------------------------------------------------- */

EXPORT size_t cublasLtGetVersion(void)
{
    return (size_t)setting("FAKE_LT_VERSION", 130000);
}

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    if (fails("create"))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = (cublasLtHandle_t)MAGIC;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                                      cublasComputeType_t compute,
                                                      cudaDataType_t scale)
{
    (void)scale;
    memset(desc, 0, size);
    *(struct operation *)desc = (struct operation){
        .magic = MAGIC, .compute = compute, .epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set(void *member, size_t size, const void *value, size_t given)
{
    if (size != given)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(member, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

#define SET(member) set(&(member), sizeof(member), value, size)

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void *value, size_t size)
{
    struct operation *operation = (struct operation *)desc;
    switch ((int)attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return SET(operation->transposed[0]);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return SET(operation->transposed[1]);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return SET(operation->epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return SET(operation->bias);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return SET(operation->aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return SET(operation->aux_ld);
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

EXPORT cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                        cudaDataType type, uint64_t rows,
                                                        uint64_t columns, int64_t ld)
{
    memset(layout, 0, size);
    *(struct layout *)layout = (struct layout){
        .magic = MAGIC, .type = type, .rows = rows, .columns = columns, .ld = ld, .batches = 1};
    return ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t desc,
                                                       cublasLtMatrixLayoutAttribute_t attribute,
                                                       const void *value, size_t size)
{
    struct layout *layout = (struct layout *)desc;
    switch ((int)attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return SET(layout->batches);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return SET(layout->stride);
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t desc,
                                                            size_t size)
{
    memset(desc, 0, size);
    *(struct preference *)desc = (struct preference){.magic = MAGIC,
                                                     .schemes = CUBLASLT_REDUCTION_SCHEME_MASK,
                                                     .alignment = {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t desc, cublasLtMatmulPreferenceAttributes_t attribute,
    const void *value, size_t size)
{
    struct preference *preference = (struct preference *)desc;
    switch ((int)attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return SET(preference->workspace);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return SET(preference->schemes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return SET(preference->alignment[0]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return SET(preference->alignment[1]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return SET(preference->alignment[2]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return SET(preference->alignment[3]);
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

/* ---- Checks -------------------------------------------------------------------------------------------------- */

struct problem {
    const struct operation *operation;
    const struct layout *a, *b, *d;
    uint64_t rows, columns, depth; /* of D, and of the sums */
};

static int element_size(cudaDataType type)
{
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

static bool describe(struct problem *problem, cublasLtMatmulDesc_t operation,
                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d)
{
    struct problem it = {(const struct operation *)operation,
                         (const struct layout *)a,
                         (const struct layout *)b,
                         (const struct layout *)d,
                         0,
                         0,
                         0};
    bool a_turned = it.operation->transposed[0] == CUBLAS_OP_T,
         b_turned = it.operation->transposed[1] == CUBLAS_OP_T;
    bool has_aux = it.operation->epilogue & 128, has_bias = it.operation->epilogue & (4 | 16);
    it.rows = it.d->rows;
    it.columns = it.d->columns;
    it.depth = a_turned ? it.a->rows : it.a->columns;
    *problem = it;
    return it.operation->magic == MAGIC && it.a->magic == MAGIC && it.b->magic == MAGIC &&
           it.d->magic == MAGIC && it.a->type == it.b->type &&
           (it.a->type == it.d->type ||
            (element_size(it.a->type) == 2 && it.d->type == CUDA_R_32F && !has_bias && !has_aux)) &&
           (a_turned ? it.a->columns : it.a->rows) == it.rows &&
           (b_turned ? it.b->columns : it.b->rows) == it.depth &&
           (b_turned ? it.b->rows : it.b->columns) == it.columns &&
           it.a->batches == it.b->batches && it.a->batches == it.d->batches &&
           !has_bias == !it.operation->bias && !has_aux == !it.operation->aux &&
           (!has_aux || (it.d->batches == 1 && it.operation->aux_ld % 8 == 0 &&
                         it.operation->aux_ld >= (int64_t)it.rows && it.a->type != CUDA_R_64F)) &&
           (it.operation->compute == CUBLAS_COMPUTE_64F) == (it.a->type == CUDA_R_64F);
}

static bool is_aligned(const struct problem *problem, uint32_t needed, const uintptr_t *addresses,
                       int count)
{
    int64_t size = element_size(problem->a->type), size_of_d = element_size(problem->d->type);
    bool aligned = !needed || ((problem->a->ld * size) % needed == 0 &&
                               (problem->b->ld * size) % needed == 0 &&
                               (problem->d->ld * size_of_d) % needed == 0);
    for (int i = 0; i < count && aligned && needed; i++)
        aligned = addresses[i] % needed == 0;
    return aligned;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t desc, int most, cublasLtMatmulHeuristicResult_t results[],
    int *count)
{
    const struct preference *preference = (const struct preference *)desc;
    struct problem problem;
    (void)c;
    *count = 0;
    note("propose %d\n", most);
    if (handle != (cublasLtHandle_t)MAGIC || preference->magic != MAGIC || most < 1 ||
        !describe(&problem, operation, a, b, d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (fails("heuristic"))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    uintptr_t addresses[4];
    for (int i = 0; i < 4; i++)
        addresses[i] = preference->alignment[i];
    long algorithms = setting("FAKE_LT_CANDIDATES", ALGORITHMS);
    for (uint32_t i = 0; i < ALGORITHMS && i < algorithms && *count < most; i++) {
        cublasLtMatmulHeuristicResult_t *result = &results[*count];
        if ((scheme_of[i] & preference->schemes) != scheme_of[i] ||
            workspace_of[i] > preference->workspace ||
            !is_aligned(&problem, alignment_of[i], addresses, 4))
            continue;
        memset(result, 0, sizeof *result);
        memcpy(&result->algo, &(struct algorithm){MAGIC, i}, sizeof(struct algorithm));
        result->workspaceSize = workspace_of[i];
        ++*count;
    }
    return *count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

#ifndef FAKE_WITHOUT_CHECK
EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t *algo,
                                              cublasLtMatmulHeuristicResult_t *result)
{
    const struct algorithm *algorithm = (const struct algorithm *)algo;
    struct problem problem;
    (void)handle;
    (void)c;
    memset(result, 0, sizeof *result);
    note("check %u\n", algorithm->number);
    if (algorithm->magic != MAGIC || algorithm->number >= ALGORITHMS || fails("check") ||
        !describe(&problem, operation, a, b, d))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    result->workspaceSize = workspace_of[algorithm->number];
    return CUBLAS_STATUS_SUCCESS;
}
#endif

/* ---- Products ------------------------------------------------------------------------------------------------ */

static double load(const void *data, int64_t index, cudaDataType type)
{
    if (type == CUDA_R_64F)
        return ((const double *)data)[index];
    if (type == CUDA_R_32F)
        return (double)((const float *)data)[index];
    if (type == CUDA_R_16F)
        return (double)((const _Float16 *)data)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static void store(void *data, int64_t index, cudaDataType type, double value)
{
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (type == CUDA_R_64F)
        ((double *)data)[index] = value;
    else if (type == CUDA_R_32F)
        ((float *)data)[index] = single;
    else if (type == CUDA_R_16F)
        ((_Float16 *)data)[index] = (_Float16)single;
    else if (single != single)
        ((uint16_t *)data)[index] = 0x7fff;
    else
        ((uint16_t *)data)[index] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* An operand as rows of `depth` elements, one for each row (or column) of D. */
static double *gather(const void *data, const struct layout *layout, int64_t offset,
                      uint64_t vectors, uint64_t depth, bool contiguous)
{
    double *all = malloc(vectors * depth * sizeof *all);
    for (uint64_t v = 0; v < vectors; v++)
        for (uint64_t l = 0; l < depth; l++)
            all[v * depth + l] = load(data,
                                      offset + (int64_t)(contiguous ? v * (uint64_t)layout->ld + l
                                                                    : l * (uint64_t)layout->ld + v),
                                      layout->type);
    return all;
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static double gelu_derivative(double x)
{
    double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

/* One element of D from the sum, and what the epilogue reads and writes beside it. */
static double finish(const struct operation *operation, cudaDataType type, double sum, uint64_t row,
                     uint64_t column)
{
    int64_t at = (int64_t)(row + column * (uint64_t)operation->aux_ld);
    int epilogue = (int)operation->epilogue;
    if (epilogue & CUBLASLT_EPILOGUE_BIAS)
        sum += load(operation->bias, (int64_t)row, type);
    if (epilogue & CUBLASLT_EPILOGUE_GELU) {
        store(operation->aux, at, type, sum);
        return gelu(sum);
    }
    if ((epilogue & CUBLASLT_EPILOGUE_DGELU) == CUBLASLT_EPILOGUE_DGELU)
        return sum * gelu_derivative(load(operation->aux, at, type));
    return sum;
}

static void multiply(const struct problem *problem, const void *a, const void *b, void *d,
                     int batch, double alpha, double beta)
{
    const struct operation *operation = problem->operation;
    cudaDataType type = problem->d->type;
    uint64_t depth = problem->depth;
    double *left = gather(a, problem->a, batch * problem->a->stride, problem->rows, depth,
                          operation->transposed[0] == CUBLAS_OP_T);
    double *right = gather(b, problem->b, batch * problem->b->stride, problem->columns, depth,
                           operation->transposed[1] != CUBLAS_OP_T);
    double *sums = calloc(problem->rows, sizeof *sums);
    for (uint64_t j = 0; j < problem->columns; j++)
        for (uint64_t i = 0; i < problem->rows; i++) {
            double parts[4] = {0};
            const double *x = left + i * depth, *y = right + j * depth;
            int64_t at = batch * problem->d->stride + (int64_t)(i + j * (uint64_t)problem->d->ld);
            for (uint64_t l = 0; l < depth; l++)
                parts[l % 4] += x[l] * y[l];
            double sum = parts[0] + parts[1] + (parts[2] + parts[3]);
            sum = alpha * sum + (beta != 0 ? beta * load(d, at, type) : 0);
            sum = finish(operation, type, sum, i, j);
            sums[i] += sum;
            store(d, at, type, sum);
        }
    if (operation->epilogue & 16)
        for (uint64_t i = 0; i < problem->rows; i++)
            store(operation->bias, (int64_t)i, type, sums[i]);
    free(left);
    free(right);
    free(sums);
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                     const void *alpha, const void *a,
                                     cublasLtMatrixLayout_t a_layout, const void *b,
                                     cublasLtMatrixLayout_t b_layout, const void *beta,
                                     const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                                     cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t *algo, void *workspace,
                                     size_t workspace_size, cudaStream_t stream)
{
    const struct algorithm *algorithm = (const struct algorithm *)algo;
    struct problem problem;
    (void)c_layout;
    (void)stream;
    if (fails("matmul"))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (handle != (cublasLtHandle_t)MAGIC || c != d || algorithm->magic != MAGIC ||
        algorithm->number >= ALGORITHMS ||
        !describe(&problem, operation, a_layout, b_layout, d_layout))
        return CUBLAS_STATUS_INVALID_VALUE;
    uintptr_t addresses[] = {(uintptr_t)a, (uintptr_t)b, (uintptr_t)d,
                             (uintptr_t)problem.operation->aux};
    size_t needed = workspace_of[algorithm->number];
    if (workspace_size < needed || (needed && !workspace) ||
        !is_aligned(&problem, alignment_of[algorithm->number], addresses, 4))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (needed)
        memset(workspace, 0xff, needed);
    note("run %u %llu %llu %llu %d\n", algorithm->number, (unsigned long long)problem.columns,
         (unsigned long long)problem.rows, (unsigned long long)problem.depth,
         (int)problem.operation->epilogue);
    long fastest = setting("FAKE_LT_FASTEST", -1);
    if (fastest >= 0 && algorithm->number != (uint32_t)fastest)
        pass(SECONDS);
    bool is_f64 = problem.d->type == CUDA_R_64F;
    for (int i = 0; i < problem.d->batches; i++)
        multiply(&problem, a, b, d, i,
                 is_f64 ? *(const double *)alpha : (double)*(const float *)alpha,
                 is_f64 ? *(const double *)beta : (double)*(const float *)beta);
    return CUBLAS_STATUS_SUCCESS;
}
