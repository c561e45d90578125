/* Linear layers with a GELU between them.
 *
 * cuBLASLt computes the GELU behind a product, and its gradient, in the same kernel or in a slow one behind it, as shapes and
 * versions have it. So the ways to compute the gradient are measured, and the fastest is kept (choices.h):
 *
 *     composed     the product; the derivative; the sums for the bias
 *     epilogue     the product with the derivative; the sums
 *     all in one   the product with the derivative and the sums */
#include "cuda/choices.h"
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/lt_products.h"
#include "cuda/products.h"

#include <pthread.h>
#include <string.h>

enum way { COMPOSED, EPILOGUE, ALL_IN_ONE, WAYS };

static const char *const way_names[] = {"composed", "by an epilogue", "all in one"};

/* Whether cuBLASLt may compute it: what it writes beside the product must lie as it asks for. */
static bool takes_epilogue(const td_tensor *out)
{
    enum { GROUP = 8 };
    td_dtype dtype = td_tensor_dtype(out);
    return (dtype == TD_F16 || dtype == TD_BF16) && td_tensor_size(out, 1) % GROUP == 0 &&
           td_tensor_size(out, 0);
}

td_status td__cuda_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                               const td_tensor *w, const td_tensor *bias)
{
    struct product_args args = td__cuda_linear_args(out, x, w, bias);
    struct lt_extra extra = {.kind = LT_GELU, .aux = td_tensor_data(pre)};
    bool done = false;
    td_status status = takes_epilogue(out) ? td__lt_multiply(&args, &extra, out, &done) : TD_OK;
    if (status || done)
        return status;
    status = td__cuda_linear(pre, x, w, bias);
    return status ? status : td__cuda_unary(TD_UNARY_GELU_TANH, out, pre);
}

/* ---- The gradient -------------------------------------------------------------------------------------------------- */

struct gelu_grad {
    struct product_args args;
    td_tensor *grad_pre, *grad_bias; /* grad_bias may be NULL */
    const td_tensor *pre;
};

static td_status run_way(const struct gelu_grad *call, enum way way)
{
    bool done = false;
    td_status status = TD_OK;
    if (way != COMPOSED) {
        void *sums = way == ALL_IN_ONE && call->grad_bias ? td_tensor_data(call->grad_bias) : NULL;
        struct lt_extra extra = {
            .kind = LT_GELU_GRAD, .aux = td_tensor_data(call->pre), .grad_bias = sums};
        status = td__lt_multiply(&call->args, &extra, call->grad_pre, &done);
        if (status || (done && (way == ALL_IN_ONE || !call->grad_bias)))
            return status;
    }
    if (!done) {
        status = td__cuda_multiply(&call->args, call->grad_pre);
        if (!status)
            status = td__cuda_unary_grad(TD_UNARY_GELU_TANH, call->grad_pre, call->grad_pre,
                                         call->pre);
    }
    if (status || !call->grad_bias)
        return status;
    return td__cuda_reduce(TD_REDUCE_KIND_SUM, call->grad_bias, call->grad_pre, 1u << 0);
}

/* ---- Which way ------------------------------------------------------------------------------------------------------ */

/* The key of a choice; it has no padding. */
struct gelu_shape {
    char what[8];
    int64_t m, n, k;
    int32_t dtype, has_bias, device, reserved;
};

/* What was chosen in this process. */
enum { MOST_KNOWN = 64 };
static struct {
    struct gelu_shape shape;
    enum way way;
} known[MOST_KNOWN];
static int known_count;
static pthread_mutex_t choosing = PTHREAD_MUTEX_INITIALIZER;

static bool is_large(const struct gelu_shape *shape)
{
    return (double)shape->m * (double)shape->n * (double)shape->k >= 1 << 24;
}

/* Milliseconds of a way; negative: it cannot be measured. The first run also measures the product itself. */
static float measure(const struct gelu_grad *call, enum way way, CUevent begin, CUevent end)
{
    enum { RUNS = 5 };
    CUstream stream = td__cuda_stream_of(call->grad_pre);
    float ms = -1;
    bool good = !run_way(call, way) && !run_way(call, way) &&
                !td__cuda.cuEventRecord(begin, stream);
    for (int i = 0; i < RUNS && good; i++)
        good = !run_way(call, way);
    good = good && !td__cuda.cuEventRecord(end, stream) && !td__cuda.cuEventSynchronize(end) &&
           !td__cuda.cuEventElapsedTime_v2(&ms, begin, end);
    return good ? ms / RUNS : -1;
}

static enum way find_fastest(const struct gelu_grad *call)
{
    CUevent events[2] = {NULL, NULL};
    enum way best = COMPOSED;
    float fastest = -1;
    bool good = !td__cuda.cuEventCreate(&events[0], CU_EVENT_DEFAULT) &&
                !td__cuda.cuEventCreate(&events[1], CU_EVENT_DEFAULT);
    for (enum way way = COMPOSED; way < WAYS && good; way++) {
        if (way == ALL_IN_ONE && !call->grad_bias)
            continue;
        float ms = measure(call, way, events[0], events[1]);
        if (ms >= 0 && (fastest < 0 || ms < fastest * 0.98f)) { /* noise does not choose */
            fastest = ms;
            best = way;
        }
    }
    for (int i = 0; i < 2; i++)
        if (events[i])
            td__cuda.cuEventDestroy_v2(events[i]);
    td_log(TD_LOG_DEBUG, "cuda: the gradient of a GELU, [%lld, %lld]: %s is the fastest, %.3f ms",
           (long long)call->args.m, (long long)call->args.n, way_names[best], (double)fastest);
    return best;
}

static bool may_measure(const struct gelu_grad *call)
{
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    CUstream stream = td__cuda_stream_of(call->grad_pre);
    return td__cuda_may_measure() && !td__cuda.cuStreamIsCapturing(stream, &capturing) &&
           capturing == CU_STREAM_CAPTURE_STATUS_NONE && !td__cuda.cuStreamSynchronize(stream);
}

/* With the lock held: from disk, or by measuring; *certain: it will not be another one in the next call. */
static enum way choose(const struct gelu_grad *call, const struct gelu_shape *shape, bool *certain)
{
    const struct cuda_device *device = td__cuda_device_of(call->grad_pre);
    struct gelu_shape key = *shape;
    int32_t stored = -1;
    key.device = 0;
    *certain = true;
    if (td__cuda_choice_get(device, td__lt.name, &key, sizeof key, &stored, sizeof stored) &&
        stored >= 0 && stored < WAYS)
        return (enum way)stored;
    *certain = may_measure(call);
    if (!*certain)
        return COMPOSED;
    stored = (int32_t)find_fastest(call);
    td__cuda_choice_put(device, td__lt.name, &key, sizeof key, &stored, sizeof stored);
    return (enum way)stored;
}

static enum way find_way(const struct gelu_grad *call)
{
    struct gelu_shape shape = {.what = "dgelu",
                               .m = call->args.m,
                               .n = call->args.n,
                               .k = call->args.k,
                               .dtype = (int32_t)td_tensor_dtype(call->grad_pre),
                               .has_bias = call->grad_bias != NULL,
                               .device = td__cuda_device_of(call->grad_pre)->device};
    if (!takes_epilogue(call->grad_pre) || !is_large(&shape) || !td__lt_open() ||
        td__cuda_enter(td__cuda_device_of(call->grad_pre)))
        return COMPOSED;
    pthread_mutex_lock(&choosing);
    int at = 0;
    while (at < known_count && memcmp(&known[at].shape, &shape, sizeof shape) != 0)
        at++;
    bool certain = true;
    enum way way = at < known_count ? known[at].way : choose(call, &shape, &certain);
    if (at == known_count && at < MOST_KNOWN && certain) {
        known[at].shape = shape;
        known[at].way = way;
        known_count++;
    }
    pthread_mutex_unlock(&choosing);
    return way;
}

td_status td__cuda_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                    const td_tensor *grad_y, const td_tensor *w,
                                    const td_tensor *pre)
{
    int64_t inner = td_tensor_size(grad_y, 1), outer = td_tensor_size(grad_pre, 1);
    struct gelu_grad call = {
        .args = {.a = td_tensor_data(grad_y),
                 .b = td_tensor_data(w),
                 .out = td_tensor_data(grad_pre),
                 .m = td_tensor_size(grad_pre, 0),
                 .n = outer,
                 .k = inner,
                 .a_row = inner,
                 .a_column = 1,
                 .b_row = outer,
                 .b_column = 1,
                 .out_row = outer,
                 .batches = 1,
                 .alpha = 1},
        .grad_pre = grad_pre,
        .grad_bias = grad_bias,
        .pre = pre,
    };
    return run_way(&call, find_way(&call));
}
