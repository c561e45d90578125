/* Convolutions by cuDNN; see dnn_convolution.h.
 *
 * The first call for a shape asks cuDNN for its offers, measures some of them, and keeps the fastest: in the process, and on
 * disk, so that the next run takes the same one and computes the same bits. Nothing is measured with TANDEM_CUDA_TUNE=0 and while
 * a stream is captured; then cuDNN's first offer counts. Whatever fails here, kernels of our own compute. */
#include "cuda/dnn_convolution.h"

#include "cuda/choices.h"
#include "cuda/cuda_launch.h"

#include <tandem/device.h>

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* So many plans are measured in any case, and so many while there is time. */
enum { LEAST_MEASURED = 10, MOST_MEASURED = 24, MEASURING_MS = 300 };
enum { ROUNDS = 3, RUNS = 4, MOST_ALIGNED = 16, BUCKETS = 512, MOST_GPUS = 64 };
static const float hopeless =
    3; /* times the shortest time, after which a plan is not measured further */

static const size_t most_workspace = (size_t)1 << 30;

struct dnn_entry {
    struct dnn_shape shape;
    struct dnn_entry *next;
    struct dnn_plan plan;
    struct dnn_offers offers; /* on which the plan is built */
};

/* What a call works with. */
struct dnn_call {
    struct dnn_handle *handle;
    struct cuda_device *device;
    CUstream stream;
    void *operands[DNN_OPERANDS];
    td_tensor *to;
};

static struct dnn_entry *tables[MOST_GPUS][BUCKETS]; /* under the lock of the GPU's handle */

/* ---- Shapes ------------------------------------------------------------------------------------------------------- */

static int32_t alignment(const void *data)
{
    uintptr_t bits = (uintptr_t)data | MOST_ALIGNED;
    return (int32_t)(bits & -bits);
}

static struct dnn_shape shape_of(enum dnn_direction direction, const struct convolution_args *args,
                                 td_dtype dtype, void *const operands[DNN_OPERANDS])
{
    struct dnn_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.images = args->images;
    shape.channels = args->channels;
    shape.filters = args->filters;
    shape.groups = args->groups;
    for (int d = 0; d < 2; d++) {
        shape.in[d] = args->in[d];
        shape.out[d] = args->out[d];
        shape.kernel[d] = args->kernel[d];
        shape.stride[d] = args->stride[d];
        shape.padding[d] = args->padding[d];
        shape.dilation[d] = args->dilation[d];
    }
    shape.direction = (int32_t)direction;
    shape.dtype = (int32_t)dtype;
    shape.accumulate = args->accumulate;
    shape.any_order = !td__cuda_is_deterministic();
    for (int t = 0; t < DNN_OPERANDS; t++)
        shape.alignment[t] = alignment(operands[t]);
    return shape;
}

static unsigned hash(const struct dnn_shape *shape)
{
    const uint64_t *words = (const uint64_t *)shape;
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof *shape / sizeof *words; i++)
        sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
    return (unsigned)(sum % BUCKETS);
}

/* How much workspace a plan may have: a third of the memory that is free or in the allocator's cache. */
static size_t workspace_limit(const struct dnn_call *call)
{
    td_memory_stats stats = {0};
    if (td_device_memory_stats(td_tensor_device(call->to), &stats) || !stats.total)
        return most_workspace;
    int64_t usable = (stats.available + stats.reserved - stats.allocated) / 3;
    return usable < 0 ? 0 : (size_t)usable < most_workspace ? (size_t)usable : most_workspace;
}

/* ---- Choosing a plan ------------------------------------------------------------------------------------------------ */

/* What is kept on disk: which engine with which knobs, wherever it is in the list of offers; and its place in the list, which
 * counts where cuDNN does not tell the knobs. */
struct dnn_choice {
    uint64_t identity;
    int32_t position, engine;
};

/* The time of one of `runs`; FLT_MAX where they fail. */
static float time_of(const struct dnn_call *call, const struct dnn_plan *plan,
                     void *const operands[DNN_OPERANDS], void *workspace, CUevent events[2],
                     int runs)
{
    float elapsed = FLT_MAX;
    int failed = (int)td__cuda.cuEventRecord(events[0], call->stream);
    for (int i = 0; i < runs && !failed; i++)
        failed = td__dnn_execute(call->handle, plan, operands, workspace);
    if (failed || td__cuda.cuEventRecord(events[1], call->stream) ||
        td__cuda.cuEventSynchronize(events[1]) ||
        td__cuda.cuEventElapsedTime_v2(&elapsed, events[0], events[1]))
        return FLT_MAX;
    return elapsed / (float)runs;
}

/* The first run loads the kernels, the second shows whether the plan can be faster than `best`. */
static float shortest(const struct dnn_call *call, const struct dnn_plan *plan,
                      void *const operands[DNN_OPERANDS], void *workspace, CUevent events[2],
                      float best)
{
    if (td__dnn_execute(call->handle, plan, operands, workspace))
        return FLT_MAX;
    float least = time_of(call, plan, operands, workspace, events, 1);
    if (least / hopeless > best)
        return least;
    for (int round = 0; round < ROUNDS; round++) {
        float time = time_of(call, plan, operands, workspace, events, RUNS);
        if (time == FLT_MAX)
            return FLT_MAX;
        least = round && least < time ? least : time;
    }
    return least;
}

/* The time of a plan, in its own workspace. What accumulates is measured on a copy of nothing, not on the result. */
static float measure(const struct dnn_call *call, const struct dnn_shape *shape,
                     const struct dnn_plan *plan, CUevent events[2], float best)
{
    TD_SCOPE;
    void *operands[DNN_OPERANDS], *space = NULL;
    memcpy(operands, call->operands, sizeof operands);
    td_tensor *workspace = td__cuda_workspace(call->to, plan->workspace), *result = NULL;
    if (workspace && shape->accumulate) {
        result = td__cuda_workspace(call->to, (size_t)td_tensor_numel(call->to) *
                                                  td_dtype_size(td_tensor_dtype(call->to)));
        for (int t = 0; t < DNN_OPERANDS && result; t++)
            if (operands[t] == td_tensor_data(call->to))
                operands[t] = td_tensor_data(result);
    }
    if (!workspace || (shape->accumulate && !result))
        return FLT_MAX;
    if (plan->workspace)
        space = td_tensor_data(workspace);
    return shortest(call, plan, operands, space, events, best);
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* The fastest of the first offers that run. */
static int find_fastest(const struct dnn_call *call, struct dnn_entry *entry, size_t limit)
{
    CUevent events[2] = {NULL, NULL};
    int best = -1;
    float best_time = FLT_MAX;
    double end = now_ms() + td__cuda_measuring_ms(MEASURING_MS);
    if (!td__cuda.cuEventCreate(&events[0], CU_EVENT_DEFAULT) &&
        !td__cuda.cuEventCreate(&events[1], CU_EVENT_DEFAULT))
        for (int i = 0, measured = 0; i < entry->offers.count && measured < MOST_MEASURED; i++) {
            struct dnn_plan plan;
            if (measured >= LEAST_MEASURED && now_ms() > end)
                break;
            if (!td__dnn_make_plan(call->handle, &entry->shape, &entry->offers, i, limit, &plan))
                continue;
            measured++;
            float time = measure(call, &entry->shape, &plan, events, best_time);
            if (time < best_time) {
                td__dnn_drop_plan(&entry->plan);
                entry->plan = plan;
                best = i;
                best_time = time;
            } else {
                td__dnn_drop_plan(&plan);
            }
        }
    for (int i = 0; i < 2; i++)
        if (events[i])
            td__cuda.cuEventDestroy_v2(events[i]);
    return best;
}

static int find_first(const struct dnn_call *call, struct dnn_entry *entry, size_t limit)
{
    for (int i = 0; i < entry->offers.count; i++)
        if (td__dnn_make_plan(call->handle, &entry->shape, &entry->offers, i, limit, &entry->plan))
            return i;
    return -1;
}

/* Where in the list a choice is; -1: nowhere. */
static int position_of(const struct dnn_offers *offers, const struct dnn_choice *choice)
{
    if (!choice->identity)
        return choice->position;
    for (int i = 0; i < offers->count; i++)
        if (offers->identity[i] == choice->identity)
            return i;
    return -1;
}

/* The one of an earlier run. */
static int find_chosen(const struct dnn_call *call, struct dnn_entry *entry, const char *library,
                       size_t limit)
{
    struct dnn_choice choice;
    if (!td__cuda_choice_get(call->device, library, &entry->shape, sizeof entry->shape, &choice,
                             sizeof choice))
        return -1;
    int position = position_of(&entry->offers, &choice);
    if (!td__dnn_make_plan(call->handle, &entry->shape, &entry->offers, position, limit,
                           &entry->plan))
        return -1;
    if (entry->plan.engine == choice.engine)
        return position;
    td__dnn_drop_plan(&entry->plan);
    return -1;
}

static int find_measured(const struct dnn_call *call, struct dnn_entry *entry, const char *library,
                         size_t limit)
{
    if (td__cuda.cuStreamSynchronize(call->stream))
        return -1;
    td__cuda_choice_lock(call->device, library);
    int found = find_chosen(call, entry, library, limit);
    if (found < 0) {
        found = find_fastest(call, entry, limit);
        if (found >= 0) {
            struct dnn_choice choice = {entry->offers.identity[found], (int32_t)found,
                                        (int32_t)entry->plan.engine};
            td__cuda_choice_put(call->device, library, &entry->shape, sizeof entry->shape, &choice,
                                sizeof choice);
        }
    }
    td__cuda_choice_unlock(call->device, library);
    return found;
}

static bool is_capturing(CUstream stream)
{
    CUstreamCaptureStatus status;
    return td__cuda.cuStreamIsCapturing(stream, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Why a convolution is not computed by cuDNN: a warning the first time. */
static void report(const struct dnn_call *call, const struct dnn_shape *shape, const char *why)
{
    static _Atomic bool warned;
    td_log(atomic_exchange(&warned, true) ? TD_LOG_DEBUG : TD_LOG_WARN,
           "%s: a convolution of %lld images with %lld channels and %lld filters is computed "
           "without cuDNN, slowly: %s",
           call->device->name, (long long)shape->images, (long long)shape->channels,
           (long long)shape->filters, why);
}

static void choose(const struct dnn_call *call, struct dnn_entry *entry)
{
    char library
        [48]; /* a file of its own for what is asked and stored as it is now: the second kind */
    snprintf(library, sizeof library, "cudnn %zu choices 2", td__dnn.version);
    int found = -1;
    if (td__dnn_ask(call->handle, &entry->shape, &entry->offers)) {
        size_t limit = workspace_limit(call);
        bool measures = td__cuda_may_measure();
        found = measures ? find_chosen(call, entry, library, limit) : -1;
        if (found < 0 && measures && !is_capturing(call->stream))
            found = find_measured(call, entry, library, limit);
        if (found < 0)
            found = find_first(call, entry, limit);
        td__dnn_drop_offers(&entry->offers, found);
    }
    if (found < 0)
        report(call, &entry->shape, "it has no plan for it");
}

/* A plan without a workspace, for there is no memory for that of the one that was chosen. */
static void choose_small(const struct dnn_call *call, struct dnn_entry *entry)
{
    td__dnn_drop_plan(&entry->plan);
    td__dnn_drop_offers(&entry->offers, -1);
    if (td__dnn_ask(call->handle, &entry->shape, &entry->offers))
        td__dnn_drop_offers(&entry->offers, find_first(call, entry, 0));
    if (!entry->plan.plan)
        report(call, &entry->shape, "there is no memory for its workspace");
}

/* The entry of a shape; NULL without memory. */
static struct dnn_entry *find(const struct dnn_call *call, const struct dnn_shape *shape)
{
    struct dnn_entry **bucket = &tables[call->device->device][hash(shape)], *entry = *bucket;
    while (entry && memcmp(&entry->shape, shape, sizeof *shape))
        entry = entry->next;
    if (entry)
        return entry;
    entry = calloc(1, sizeof *entry);
    if (entry) {
        entry->shape = *shape;
        choose(call, entry);
        entry->next = *bucket;
        *bucket = entry;
    }
    return entry;
}

/* ---- The call ---------------------------------------------------------------------------------------------------------- */

static bool run(const struct dnn_call *call, struct dnn_entry *entry)
{
    TD_SCOPE;
    td_tensor *workspace = NULL;
    if (entry->plan.workspace) {
        workspace = td__cuda_workspace(call->to, entry->plan.workspace);
        if (!workspace)
            choose_small(call, entry);
        if (!entry->plan.plan)
            return false;
    }
    int status = td__dnn_execute(call->handle, &entry->plan, call->operands,
                                 workspace ? td_tensor_data(workspace) : NULL);
    if (!status)
        return true;
    report(call, &entry->shape, td__dnn.explain(status));
    td__dnn_drop_plan(&entry->plan);
    td__dnn_drop_offers(&entry->offers, -1);
    return false;
}

static bool is_empty(const struct convolution_args *args)
{
    return !args->images || !args->channels || !args->filters || !args->in[0] || !args->in[1] ||
           !args->out[0] || !args->out[1] || !args->kernel[0] || !args->kernel[1];
}

td_status td__dnn_convolve(enum dnn_direction direction, const struct convolution_args *args,
                           td_tensor *to, bool *done)
{
    *done = false;
    td_dtype dtype = td_tensor_dtype(to);
    struct dnn_call call = {.device = td__cuda_device_of(to), .to = to};
    td_status status = td__cuda_enter(call.device);
    if (status || dtype > TD_BF16 || is_empty(args))
        return status;
    call.handle = td__dnn_handle_of(call.device);
    if (!call.handle)
        return TD_OK;
    call.stream = td__cuda_stream_of(to);
    call.operands[0] = direction == DNN_GRAD_X_OF_Y_W ? args->to : (void *)args->x;
    call.operands[1] = direction == DNN_GRAD_W_OF_X_Y ? args->to : (void *)args->w;
    call.operands[2] = direction == DNN_Y_OF_X_W ? args->to : (void *)args->y;
    struct dnn_shape shape = shape_of(direction, args, dtype, call.operands);
    pthread_mutex_lock(&call.handle->lock);
    int failed = td__dnn.set_stream(call.handle->handle, call.stream);
    if (failed) {
        report(&call, &shape, td__dnn.explain(failed));
    } else {
        struct dnn_entry *entry = find(&call, &shape);
        *done = entry && entry->plan.plan && run(&call, entry);
    }
    pthread_mutex_unlock(&call.handle->lock);
    return TD_OK;
}
