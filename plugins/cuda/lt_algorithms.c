/* Which of cuBLASLt's algorithms computes a product.
 *
 * It is found once a shape and process: the one that was measured before (choices.h), else the fastest of some that
 * cuBLASLt proposes, else the first that it proposes: for small products, with TANDEM_CUDA_TUNE=0, and while a stream is
 * captured into a graph, when nothing can be timed.
 *
 * Where an algorithm cuts K into parts, these are summed in f32 in a step of its own (REDUCTION_SCHEME_COMPUTE_TYPE). The
 * others are not asked for: INPLACE adds to the output in its dtype, one part after the other by counters, and OUTPUT_TYPE
 * rounds the parts to the dtype of the output, so a sum in bf16 would lose bits. */
#include "cuda/choices.h"
#include "cuda/cuda_launch.h"
#include "cuda/lt_products.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORKSPACE = 32 << 20, BUCKETS = 1024, MOST_CANDIDATES = 8, MEASURED_FROM = 1 << 24 };

static _Atomic(struct lt_algorithm *) buckets[BUCKETS]; /* lists that only grow */
static pthread_mutex_t searching = PTHREAD_MUTEX_INITIALIZER;

static unsigned hash(const struct lt_shape *shape)
{
    uint64_t words[sizeof *shape / sizeof(uint64_t)], sum = 0;
    _Static_assert(sizeof words == sizeof *shape, "shapes have no padding");
    memcpy(words, shape, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
    return (unsigned)(sum % BUCKETS);
}

static const struct lt_algorithm *look_up(unsigned bucket, const struct lt_shape *shape)
{
    const struct lt_algorithm *entry = atomic_load_explicit(&buckets[bucket], memory_order_acquire);
    while (entry && memcmp(&entry->shape, shape, sizeof *shape) != 0)
        entry = entry->next;
    return entry;
}

/* Whether measuring pays. */
static bool is_large(const struct lt_shape *shape)
{
    return (double)shape->m * (double)shape->n * (double)shape->k * (double)shape->batches >=
           MEASURED_FROM;
}

/* What cuBLASLt proposes, the best first by its own estimate. Returns how many. */
static int propose(const struct lt_shape *shape, const struct lt_product *product,
                   cublasLtMatmulHeuristicResult_t *candidates, int most)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    uint64_t workspace = MOST_WORKSPACE;
    uint32_t left = (uint32_t)shape->left_alignment, right = (uint32_t)shape->right_alignment,
             out = (uint32_t)shape->out_alignment, schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t size;
    } settings[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &left, sizeof left},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &right, sizeof right},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out, sizeof out},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out, sizeof out},
    };
    bool failed = td__lt.init_preference(&preference, sizeof preference);
    for (size_t i = 0; i < sizeof settings / sizeof settings[0] && !failed; i++)
        failed = td__lt.set_preference(&preference, settings[i].attribute, settings[i].value,
                                       settings[i].size);
    int count = 0, usable = 0;
    if (failed || td__lt.find_algorithms(td__lt.handle, (cublasLtMatmulDesc_t)product->operation,
                                         (cublasLtMatrixLayout_t)&product->layouts->left,
                                         (cublasLtMatrixLayout_t)&product->layouts->right,
                                         (cublasLtMatrixLayout_t)&product->layouts->out,
                                         (cublasLtMatrixLayout_t)&product->layouts->out,
                                         &preference, most, candidates, &count))
        return 0;
    for (int i = 0; i < count && i < most; i++)
        if (!candidates[i].state && candidates[i].workspaceSize <= MOST_WORKSPACE)
            candidates[usable++] = candidates[i];
    return usable;
}

/* The choice on disk for a shape, if cuBLASLt still takes it. The key is the shape; devices of one model share it. */
static bool read_choice(struct lt_algorithm *entry, const struct lt_product *product,
                        const struct cuda_device *device)
{
    struct lt_shape key = entry->shape;
    cublasLtMatmulAlgo_t stored;
    cublasLtMatmulHeuristicResult_t result;
    key.device = 0;
    if (!td__cuda_choice_get(device, td__lt.name, &key, sizeof key, &stored, sizeof stored) ||
        td__lt.check_algorithm(td__lt.handle, (cublasLtMatmulDesc_t)product->operation,
                               (cublasLtMatrixLayout_t)&product->layouts->left,
                               (cublasLtMatrixLayout_t)&product->layouts->right,
                               (cublasLtMatrixLayout_t)&product->layouts->out,
                               (cublasLtMatrixLayout_t)&product->layouts->out, &stored, &result) ||
        result.state || result.workspaceSize > MOST_WORKSPACE)
        return false;
    entry->algorithm = stored;
    entry->workspace = result.workspaceSize;
    entry->found = true;
    return true;
}

static void measure(struct lt_algorithm *entry, const struct lt_product *product,
                    const struct product_args *args, const td_tensor *out)
{
    const struct cuda_device *device = td__cuda_device_of(out);
    cublasLtMatmulHeuristicResult_t candidates[MOST_CANDIDATES];
    td__cuda_choice_lock(device, td__lt.name);
    if (!read_choice(entry, product, device)) { /* no other process has measured it meanwhile */
        int count = propose(&entry->shape, product, candidates, MOST_CANDIDATES), best = 0;
        if (count > 1)
            best = td__lt_measure(&entry->shape, product, args, candidates, count, out);
        entry->found = count > 0;
        if (entry->found) {
            struct lt_shape key = entry->shape;
            key.device = 0;
            entry->algorithm = candidates[best].algo;
            entry->workspace = candidates[best].workspaceSize;
            td__cuda_choice_put(device, td__lt.name, &key, sizeof key, &entry->algorithm,
                                sizeof entry->algorithm);
        }
    }
    td__cuda_choice_unlock(device, td__lt.name);
}

static void search(struct lt_algorithm *entry, const struct lt_product *product,
                   const struct product_args *args, const td_tensor *out, bool measured)
{
    cublasLtMatmulHeuristicResult_t first;
    if (is_large(&entry->shape) && read_choice(entry, product, td__cuda_device_of(out)))
        return;
    if (measured) {
        measure(entry, product, args, out);
        return;
    }
    entry->found = propose(&entry->shape, product, &first, 1) == 1;
    if (entry->found) {
        entry->algorithm = first.algo;
        entry->workspace = first.workspaceSize;
    }
}

/* Whether a shape is to be measured here. What is on the stream has run then: a collective there may wait for another rank,
 * which must not have to wait for this one's measuring. */
static bool may_measure(const struct lt_shape *shape, const td_tensor *out)
{
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    CUstream stream = td__cuda_stream_of(out);
    return is_large(shape) && td__cuda_may_measure() &&
           !td__cuda.cuStreamIsCapturing(stream, &capturing) &&
           capturing == CU_STREAM_CAPTURE_STATUS_NONE && !td__cuda.cuStreamSynchronize(stream);
}

/* The descriptions that calls of one shape share, and what computes it. */
static void fill_in(struct lt_algorithm *entry, const struct product_args *args,
                    const struct lt_extra *extra, const td_tensor *out, bool measured)
{
    struct lt_product product = {&entry->operation, &entry->layouts};
    if (td__lt_set_layouts(&entry->shape, &entry->layouts) &&
        td__lt_set_operation(&entry->shape, args, extra, &entry->operation))
        search(entry, &product, args, out, measured);
}

const struct lt_algorithm *td__lt_find(const struct lt_shape *shape,
                                       const struct product_args *args,
                                       const struct lt_extra *extra, const td_tensor *out)
{
    unsigned bucket = hash(shape);
    const struct lt_algorithm *known = look_up(bucket, shape);
    if (known)
        return known;
    bool measured = may_measure(shape, out);
    pthread_mutex_lock(&searching);
    known = look_up(bucket, shape);
    struct lt_algorithm *entry = known ? NULL : calloc(1, sizeof *entry);
    if (entry) {
        entry->shape = *shape;
        fill_in(entry, args, extra, out, measured);
        entry->next = atomic_load(&buckets[bucket]);
        atomic_store_explicit(&buckets[bucket], entry, memory_order_release);
        known = entry;
    }
    pthread_mutex_unlock(&searching);
    return known;
}
