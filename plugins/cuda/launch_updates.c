/* Launches the kernels of updates.cu: steps of optimizers, and lists of tensors, many tensors a launch.
 *
 * Optimizers change all parameters or none. What can fail is done before the first launch: kernels are loaded, memory is
 * allocated, and faults of earlier kernels are looked for. A kernel that fails later on the device, but before the step,
 * is noticed there: the first launch notes whether there was a fault, and the others do nothing then. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/updates_args.h"

#include <tandem/tensor.h>

enum { THREADS = 256, MOST_ARGS = 4096 };

_Static_assert(sizeof(struct sgd_args) <= MOST_ARGS && sizeof(struct adam_args) <= MOST_ARGS &&
                   sizeof(struct strided_args) <= MOST_ARGS,
               "the arguments of a kernel");

#define FLOATS(name)                                                                               \
    {                                                                                              \
        [TD_F32] = TD__CUDA_KERNEL(updates, #name "_f32"),                                         \
        [TD_F64] = TD__CUDA_KERNEL(updates, #name "_f64"),                                         \
        [TD_F16] = TD__CUDA_KERNEL(updates, #name "_f16"),                                         \
        [TD_BF16] = TD__CUDA_KERNEL(updates, #name "_bf16"),                                       \
    }

static struct cuda_kernel sgds[] = FLOATS(sgd), adams[] = FLOATS(adam);
static struct cuda_kernel note_stopped = TD__CUDA_KERNEL(updates, "note_stopped");

static bool is_aligned(const void *data)
{
    return (uintptr_t)data % 16 == 0;
}

static struct cuda_grid grid_of(int32_t blocks)
{
    return (struct cuda_grid){.blocks = {(unsigned)blocks}, .threads = THREADS};
}

static int32_t chunks_of(int64_t count, int chunk)
{
    return (int32_t)((count + chunk - 1) / chunk);
}

/* ---- Optimizers ---------------------------------------------------------------------------------------------------- */

/* Where kernels of a step find whether they are to do nothing; NULL if the step cannot begin. It belongs to the scope. */
static int32_t *begin_step(const td_tensor *tensor)
{
    td_tensor *memory = td__cuda_workspace(tensor, sizeof(int32_t));
    return memory && !td__cuda_prepare(&note_stopped, tensor, 0) ? td_tensor_data(memory) : NULL;
}

static td_status enqueue_note(const td_tensor *tensor, int32_t *stopped)
{
    const void *fault = (const void *)td__cuda_device_of(tensor)->fault_address; /* NOLINT */
    struct stopped_args args = {.fault = fault, .stopped = stopped};
    return td__cuda_enqueue(&note_stopped, tensor, (struct cuda_grid){.threads = 1}, &args);
}

/* Whether two updates may be in one launch. */
static bool same_sgd(const td_sgd_update *a, const td_sgd_update *b)
{
    return td_tensor_dtype(a->parameter) == td_tensor_dtype(b->parameter) && a->lr == b->lr &&
           a->momentum == b->momentum && a->dampening == b->dampening &&
           a->weight_decay == b->weight_decay && a->nesterov == b->nesterov &&
           a->maximize == b->maximize && a->first == b->first && a->numbers == b->numbers;
}

/* The next launch, from update number *next on. */
static int32_t collect_sgd(struct sgd_args *args, const td_sgd_update *updates, int count,
                           int *next)
{
    const td_sgd_update *head = &updates[*next];
    int32_t blocks = 0;
    args->numbers = head->numbers;
    args->rate = -head->lr;
    args->momentum = head->momentum;
    args->share = 1 - head->dampening;
    args->weight_decay = head->weight_decay;
    args->sign = head->maximize ? -1 : 1;
    args->nesterov = head->nesterov;
    args->first = head->first;
    args->entries = 0;
    for (; *next < count && args->entries < SGD_ENTRIES && same_sgd(head, &updates[*next]);
         ++*next) {
        const td_sgd_update *u = &updates[*next];
        struct sgd_entry entry = {.parameter = td_tensor_data(u->parameter),
                                  .grad = td_tensor_data(u->grad),
                                  .buffer = u->buffer ? td_tensor_data(u->buffer) : NULL,
                                  .count = td_tensor_numel(u->parameter),
                                  .first_block = blocks};
        entry.aligned = is_aligned(entry.parameter) && is_aligned(entry.grad) &&
                        is_aligned(entry.buffer);
        if (entry.count)
            args->entry[args->entries++] = entry;
        blocks += chunks_of(entry.count, UPDATE_CHUNK);
    }
    return blocks;
}

td_status td__cuda_sgd(const td_sgd_update *updates, int count)
{
    TD_SCOPE;
    const td_tensor *tensor = updates[0].parameter;
    struct sgd_args args = {.stopped = begin_step(tensor)};
    td_status status = args.stopped ? TD_OK : td_last_status();
    for (int i = 0; i < count && !status; i++)
        status = td__cuda_prepare(&sgds[td_tensor_dtype(updates[i].parameter)], tensor, 0);
    if (!status)
        status = enqueue_note(tensor, (int32_t *)args.stopped);
    for (int next = 0; next < count && !status;) {
        struct cuda_kernel *kernel = &sgds[td_tensor_dtype(updates[next].parameter)];
        int32_t blocks = collect_sgd(&args, updates, count, &next);
        if (blocks)
            status = td__cuda_enqueue(kernel, tensor, grid_of(blocks), &args);
    }
    return status;
}

static bool same_adam(const td_adam_update *a, const td_adam_update *b)
{
    return td_tensor_dtype(a->parameter) == td_tensor_dtype(b->parameter) && a->beta1 == b->beta1 &&
           a->beta2 == b->beta2 && a->eps == b->eps && a->weight_decay == b->weight_decay &&
           a->shrink == b->shrink && a->size == b->size &&
           a->root_correction == b->root_correction && a->maximize == b->maximize &&
           a->numbers == b->numbers;
}

static int32_t collect_adam(struct adam_args *args, const td_adam_update *updates, int count,
                            int *next)
{
    const td_adam_update *head = &updates[*next];
    int32_t blocks = 0;
    args->numbers = head->numbers;
    args->beta1 = head->beta1;
    args->rest1 = 1 - head->beta1;
    args->beta2 = head->beta2;
    args->rest2 = 1 - head->beta2;
    args->eps = head->eps;
    args->weight_decay = head->weight_decay;
    args->shrink = head->shrink;
    args->size = -head->size;
    args->root_correction = head->root_correction;
    args->sign = head->maximize ? -1 : 1;
    args->entries = 0;
    for (; *next < count && args->entries < ADAM_ENTRIES && same_adam(head, &updates[*next]);
         ++*next) {
        const td_adam_update *u = &updates[*next];
        struct adam_entry entry = {.parameter = td_tensor_data(u->parameter),
                                   .grad = td_tensor_data(u->grad),
                                   .mean = td_tensor_data(u->mean),
                                   .square = td_tensor_data(u->square),
                                   .greatest = u->greatest ? td_tensor_data(u->greatest) : NULL,
                                   .count = td_tensor_numel(u->parameter),
                                   .first_block = blocks};
        entry.aligned = is_aligned(entry.parameter) && is_aligned(entry.grad) &&
                        is_aligned(entry.mean) && is_aligned(entry.square) &&
                        is_aligned(entry.greatest);
        if (entry.count)
            args->entry[args->entries++] = entry;
        blocks += chunks_of(entry.count, UPDATE_CHUNK);
    }
    return blocks;
}

td_status td__cuda_adam(const td_adam_update *updates, int count)
{
    TD_SCOPE;
    const td_tensor *tensor = updates[0].parameter;
    struct adam_args args = {.stopped = begin_step(tensor)};
    td_status status = args.stopped ? TD_OK : td_last_status();
    for (int i = 0; i < count && !status; i++)
        status = td__cuda_prepare(&adams[td_tensor_dtype(updates[i].parameter)], tensor, 0);
    if (!status)
        status = enqueue_note(tensor, (int32_t *)args.stopped);
    for (int next = 0; next < count && !status;) {
        struct cuda_kernel *kernel = &adams[td_tensor_dtype(updates[next].parameter)];
        int32_t blocks = collect_adam(&args, updates, count, &next);
        if (blocks)
            status = td__cuda_enqueue(kernel, tensor, grid_of(blocks), &args);
    }
    return status;
}

/* ---- Lists of tensors -------------------------------------------------------------------------------------------------- */

/* A kernel over a list, and the one for tensors with strides. */
struct list_kernels {
    struct cuda_kernel list, strided;
};

static struct list_kernels scales = {TD__CUDA_KERNEL(updates, "scale_list"),
                                     TD__CUDA_KERNEL(updates, "scale_strided")};
static struct list_kernels unscales = {TD__CUDA_KERNEL(updates, "unscale_list"),
                                       TD__CUDA_KERNEL(updates, "unscale_strided")};

static td_status launch_strided(struct cuda_kernel *kernel, td_tensor *x,
                                const struct cuda_space *space, const struct list_args *list)
{
    struct strided_args args = {.space = *space, .list = *list};
    args.list.entry[0] = (struct list_entry){
        .x = td_tensor_data(x), .count = space->count, .dtype = (int16_t)td_tensor_dtype(x)};
    return td__cuda_launch(kernel, x, grid_of(chunks_of(space->count, LIST_CHUNK)), &args);
}

static td_status launch_list(struct cuda_kernel *kernel, td_tensor *x, struct list_args *args,
                             int32_t *blocks)
{
    td_status status = TD_OK;
    if (args->entries)
        status = td__cuda_launch(kernel, x, grid_of(*blocks), args);
    args->entries = *blocks = 0;
    return status;
}

/* Runs over all tensors. */
static td_status run_list(struct list_kernels *kernels, td_tensor *const *x, int count,
                          struct list_args *args)
{
    int32_t blocks = 0;
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++) {
        struct cuda_space space = td__cuda_space((const td_tensor *[]){x[i]}, 1, false);
        bool full = args->entries == LIST_ENTRIES;
        if (!space.count)
            continue;
        if (full || !space.plain)
            status = launch_list(&kernels->list, x[i], args, &blocks);
        if (space.plain) {
            struct list_entry entry = {.x = td_tensor_data(x[i]),
                                       .count = space.count,
                                       .first_block = blocks,
                                       .dtype = (int16_t)td_tensor_dtype(x[i])};
            entry.aligned = is_aligned(entry.x);
            args->entry[args->entries++] = entry;
            blocks += chunks_of(space.count, LIST_CHUNK);
        } else if (!status) {
            status = launch_strided(&kernels->strided, x[i], &space, args);
        }
    }
    return status || !args->entries ? status : launch_list(&kernels->list, x[0], args, &blocks);
}

td_status td__cuda_scale(td_tensor *const *x, int count, const td_tensor *factor)
{
    struct list_args args = {.multiple = td_tensor_data(factor),
                             .wide = td_tensor_dtype(factor) == TD_F64};
    return run_list(&scales, x, count, &args);
}

td_status td__cuda_unscale(td_tensor *const *x, int count, double factor, td_tensor *found)
{
    struct list_args args = {.factor = factor, .found = td_tensor_data(found)};
    return run_list(&unscales, x, count, &args);
}
