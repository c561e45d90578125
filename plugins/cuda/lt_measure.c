/* How fast cuBLASLt's algorithms compute a product, measured on the stream by events.
 *
 * Each candidate runs once to warm up and then RUNS times; the median counts. A later candidate must be faster by
 * more than a tolerance, so that noise does not choose. Where the product is added to its output, it is added to memory
 * of the same size and alignment instead; otherwise the real call comes after, and overwrites what these wrote. */
#include "cuda/choices.h"
#include "cuda/cuda_launch.h"
#include "cuda/lt_products.h"

#include <stdlib.h>

enum { RUNS = 5, FIRST_RUNS = 4, MEASURING_MS = 20 }; /* milliseconds of the GPU's time */
static const double tolerance = 0.98;

struct measuring {
    const struct lt_shape *shape;
    const struct lt_product *product;
    const struct product_args *args;
    const td_tensor *tensor;
    void *out, *workspace;
    size_t workspace_size;
    CUstream stream;
    CUevent events[RUNS + 2];
    double spent; /* milliseconds */
};

static bool run(const struct measuring *it, const cublasLtMatmulHeuristicResult_t *candidate)
{
    return !td__lt_run(it->shape, it->product, it->args, &candidate->algo, it->out, it->workspace,
                       candidate->workspaceSize, it->stream);
}

static int compare(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

/* The median of its times in milliseconds; negative: it cannot be measured. */
static double measure(struct measuring *it, const cublasLtMatmulHeuristicResult_t *candidate)
{
    float times[RUNS], whole;
    bool good = !td__cuda.cuEventRecord(it->events[RUNS + 1], it->stream) && run(it, candidate) &&
                !td__cuda.cuEventRecord(it->events[0], it->stream);
    for (int i = 0; i < RUNS && good; i++)
        good = run(it, candidate) && !td__cuda.cuEventRecord(it->events[i + 1], it->stream);
    good = good && !td__cuda.cuEventSynchronize(it->events[RUNS]);
    for (int i = 0; i < RUNS && good; i++)
        good = !td__cuda.cuEventElapsedTime_v2(&times[i], it->events[i], it->events[i + 1]);
    good = good && !td__cuda.cuEventElapsedTime_v2(&whole, it->events[RUNS + 1], it->events[RUNS]);
    if (!good)
        return -1;
    it->spent += (double)whole;
    qsort(times, RUNS, sizeof times[0], compare);
    return (double)times[RUNS / 2];
}

static int find_fastest(struct measuring *it, const cublasLtMatmulHeuristicResult_t *candidates,
                        int count)
{
    int best = 0;
    double fastest = -1, budget = td__cuda_measuring_ms(MEASURING_MS);
    for (int i = 0; i < FIRST_RUNS; i++) /* the clock of an idle GPU rises first */
        run(it, &candidates[0]);
    for (int i = 0; i < count && it->spent < budget; i++) {
        double time = measure(it, &candidates[i]);
        if (time >= 0 && (fastest < 0 || time < fastest * tolerance)) {
            fastest = time;
            best = i;
        }
    }
    td_log(TD_LOG_DEBUG,
           "cuda: a product [%lld, %lld] [%lld, %lld]: candidate %d of %d is the fastest, %.3f ms",
           (long long)it->shape->m, (long long)it->shape->k, (long long)it->shape->k,
           (long long)it->shape->n, best + 1, count, fastest);
    return best;
}

static size_t bytes_of_out(const struct lt_shape *shape)
{
    int64_t elements = (shape->m - 1) * shape->out_ld + shape->n +
                       (shape->batches - 1) * shape->out_batch;
    return (size_t)elements * td_dtype_size(shape->is_wide ? TD_F32 : (td_dtype)shape->dtype);
}

/* Memory for the workspace, and for the results where the real ones must stay. */
static bool add_memory(struct measuring *it, const cublasLtMatmulHeuristicResult_t *candidates,
                       int count)
{
    for (int i = 0; i < count; i++)
        if (candidates[i].workspaceSize > it->workspace_size)
            it->workspace_size = candidates[i].workspaceSize;
    if (it->workspace_size) {
        td_tensor *workspace = td__cuda_workspace(it->tensor, it->workspace_size);
        if (!workspace)
            return false;
        it->workspace = td_tensor_data(workspace);
    }
    it->out = it->args->out;
    if (it->shape->accumulate) {
        size_t offset = (size_t)it->shape->out_alignment;
        td_tensor *copy = td__cuda_workspace(it->tensor, bytes_of_out(it->shape) + offset);
        if (!copy)
            return false;
        it->out = (char *)td_tensor_data(copy) + offset;
    }
    return true;
}

int td__lt_measure(const struct lt_shape *shape, const struct lt_product *product,
                   const struct product_args *args,
                   const cublasLtMatmulHeuristicResult_t *candidates, int count,
                   const td_tensor *out)
{
    TD_SCOPE;
    struct measuring it = {.shape = shape,
                           .product = product,
                           .args = args,
                           .tensor = out,
                           .stream = td__cuda_stream_of(out)};
    int made = 0, best = 0;
    if (!add_memory(&it, candidates, count))
        return 0;
    while (made < RUNS + 2 && !td__cuda.cuEventCreate(&it.events[made], CU_EVENT_DEFAULT))
        made++;
    if (made == RUNS + 2)
        best = find_fastest(&it, candidates, count);
    while (made)
        td__cuda.cuEventDestroy_v2(it.events[--made]);
    return best;
}
