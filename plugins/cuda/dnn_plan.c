/* Plans of cuDNN; see dnn_plan.h.
 *
 * The graph interface, and not cudnnConvolutionForward() and its like: its heuristic offers all kernels that there are for a
 * shape, where the other one has a single kernel behind each of its algorithms; and an offer comes with notes, which say
 * whether it uses TF32 or is not deterministic. Tensors are described as they are, NCHW: kernels that want NHWC come
 * with the transposition, and the measured time includes it. */
#include "cuda/dnn_plan.h"

#include <tandem/base.h>
#include <tandem/tensor.h>

#include <string.h>

/* The operands' numbers in a plan. */
static const int64_t ids[DNN_OPERANDS] = {1, 2, 3};

static bool is_right(int status)
{
    return status == 0;
}

static bool set_numbers(dnn_descriptor of, enum dnn_attribute attribute, int64_t count,
                        const int64_t *numbers)
{
    return is_right(td__dnn.set(of, (int)attribute, DNN_TYPE_INT64, count, numbers));
}

static bool set_descriptor(dnn_descriptor of, enum dnn_attribute attribute, dnn_descriptor value)
{
    return is_right(td__dnn.set(of, (int)attribute, DNN_TYPE_DESCRIPTOR, 1, &value));
}

static bool set_choice(dnn_descriptor of, enum dnn_attribute attribute, enum dnn_type type,
                       int choice)
{
    return is_right(td__dnn.set(of, (int)attribute, (int)type, 1, &choice));
}

static dnn_descriptor create(enum dnn_descriptor_kind kind)
{
    dnn_descriptor made = NULL;
    return is_right(td__dnn.create_descriptor((int)kind, &made)) ? made : NULL;
}

static void destroy(dnn_descriptor descriptor)
{
    if (descriptor)
        td__dnn.destroy_descriptor(descriptor);
}

/* ---- Describing a convolution --------------------------------------------------------------------------------- */

static int data_type(int32_t dtype)
{
    return dtype == TD_F64   ? DNN_DATA_F64
           : dtype == TD_F16 ? DNN_DATA_F16
           : dtype == TD_F32 ? DNN_DATA_F32
                             : DNN_DATA_BF16;
}

/* A contiguous tensor of four dimensions. */
static dnn_descriptor describe_tensor(const struct dnn_shape *shape, int operand)
{
    const struct dnn_shape *s = shape;
    const int64_t sizes[DNN_OPERANDS][4] = {
        {s->images, s->channels, s->in[0], s->in[1]},
        {s->filters, s->channels / s->groups, s->kernel[0], s->kernel[1]},
        {s->images, s->filters, s->out[0], s->out[1]},
    };
    const int64_t *size = sizes[operand];
    const int64_t strides[] = {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1};
    const int64_t alignment = s->alignment[operand];
    dnn_descriptor made = create(DNN_TENSOR);
    bool ok = made && set_choice(made, DNN_TENSOR_TYPE, DNN_TYPE_DATA_TYPE, data_type(s->dtype)) &&
              set_numbers(made, DNN_TENSOR_SIZES, 4, size) &&
              set_numbers(made, DNN_TENSOR_STRIDES, 4, strides) &&
              set_numbers(made, DNN_TENSOR_ID, 1, &ids[operand]) &&
              set_numbers(made, DNN_TENSOR_ALIGNMENT, 1, &alignment) &&
              is_right(td__dnn.finalize(made));
    if (!ok)
        destroy(made), made = NULL;
    return made;
}

static dnn_descriptor describe_window(const struct dnn_shape *shape)
{
    const int64_t dims = 2;
    dnn_descriptor made = create(DNN_CONVOLUTION);
    bool ok = made &&
              set_choice(made, DNN_CONVOLUTION_COMPUTE_TYPE, DNN_TYPE_DATA_TYPE,
                         shape->dtype == TD_F64 ? DNN_DATA_F64 : DNN_DATA_F32) &&
              set_choice(made, DNN_CONVOLUTION_MODE, DNN_TYPE_CONVOLUTION_MODE,
                         DNN_CROSS_CORRELATION) &&
              set_numbers(made, DNN_CONVOLUTION_DIMS, 1, &dims) &&
              set_numbers(made, DNN_CONVOLUTION_STRIDES, 2, shape->stride) &&
              set_numbers(made, DNN_CONVOLUTION_DILATIONS, 2, shape->dilation) &&
              set_numbers(made, DNN_CONVOLUTION_PRE_PADDINGS, 2, shape->padding) &&
              set_numbers(made, DNN_CONVOLUTION_POST_PADDINGS, 2, shape->padding) &&
              is_right(td__dnn.finalize(made));
    if (!ok)
        destroy(made), made = NULL;
    return made;
}

/* The names of an operation's attributes; x, w and y in this order. */
static const struct {
    enum dnn_descriptor_kind kind;
    enum dnn_attribute alpha, beta, window, operands[DNN_OPERANDS];
} operations[] = {
    [DNN_Y_OF_X_W] = {DNN_FORWARD,
                      DNN_FORWARD_ALPHA,
                      DNN_FORWARD_BETA,
                      DNN_FORWARD_CONVOLUTION,
                      {DNN_FORWARD_X, DNN_FORWARD_W, DNN_FORWARD_Y}},
    [DNN_GRAD_X_OF_Y_W] = {DNN_GRAD_INPUT,
                           DNN_GRAD_INPUT_ALPHA,
                           DNN_GRAD_INPUT_BETA,
                           DNN_GRAD_INPUT_CONVOLUTION,
                           {DNN_GRAD_INPUT_DX, DNN_GRAD_INPUT_W, DNN_GRAD_INPUT_DY}},
    [DNN_GRAD_W_OF_X_Y] = {DNN_GRAD_WEIGHT,
                           DNN_GRAD_WEIGHT_ALPHA,
                           DNN_GRAD_WEIGHT_BETA,
                           DNN_GRAD_WEIGHT_CONVOLUTION,
                           {DNN_GRAD_WEIGHT_X, DNN_GRAD_WEIGHT_DW, DNN_GRAD_WEIGHT_DY}},
};

static bool set_scalar(dnn_descriptor of, enum dnn_attribute attribute, bool is_f64, double value)
{
    float narrow = (float)value;
    return is_right(td__dnn.set(of, (int)attribute, is_f64 ? DNN_TYPE_DOUBLE : DNN_TYPE_FLOAT, 1,
                                is_f64 ? (const void *)&value : &narrow));
}

static dnn_descriptor describe_operation(const struct dnn_shape *shape, dnn_descriptor window,
                                         const dnn_descriptor tensors[DNN_OPERANDS])
{
    bool is_f64 = shape->dtype == TD_F64;
    int d = shape->direction;
    dnn_descriptor made = create(operations[d].kind);
    bool ok = made && set_descriptor(made, operations[d].window, window) &&
              set_scalar(made, operations[d].alpha, is_f64, 1) &&
              set_scalar(made, operations[d].beta, is_f64, shape->accumulate ? 1 : 0);
    for (int t = 0; t < DNN_OPERANDS && ok; t++)
        ok = set_descriptor(made, operations[d].operands[t], tensors[t]);
    if (!ok || !is_right(td__dnn.finalize(made)))
        destroy(made), made = NULL;
    return made;
}

static dnn_descriptor describe_graph(const struct dnn_handle *handle, const struct dnn_shape *shape)
{
    dnn_descriptor tensors[DNN_OPERANDS], window = describe_window(shape), operation = NULL,
                                          made = NULL;
    bool ok = window != NULL;
    for (int t = 0; t < DNN_OPERANDS; t++) {
        tensors[t] = describe_tensor(shape, t);
        ok = ok && tensors[t];
    }
    if (ok)
        operation = describe_operation(shape, window, tensors);
    if (operation)
        made = create(DNN_GRAPH);
    ok = made &&
         is_right(td__dnn.set(made, DNN_GRAPH_HANDLE, DNN_TYPE_HANDLE, 1, &handle->handle)) &&
         set_descriptor(made, DNN_GRAPH_OPERATIONS, operation) && is_right(td__dnn.finalize(made));
    if (!ok)
        destroy(made), made = NULL;
    destroy(operation);
    for (int t = 0; t < DNN_OPERANDS; t++)
        destroy(tensors[t]);
    destroy(window);
    return made;
}

/* ---- Offers ------------------------------------------------------------------------------------------------------ */

static bool get_number(dnn_descriptor of, enum dnn_attribute attribute, int64_t *number)
{
    int64_t found = 0;
    return is_right(td__dnn.get(of, (int)attribute, DNN_TYPE_INT64, 1, &found, number)) &&
           found == 1;
}

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t sum = (a ^ b) * 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 32;
}

/* A number for what a knob is set to; 0: unknown. */
static uint64_t mix_knob(dnn_descriptor choice)
{
    int type = 0;
    int64_t value = 0, found = 0;
    bool ok = is_right(td__dnn.get(choice, DNN_KNOB_TYPE, DNN_TYPE_KNOB_TYPE, 1, &found, &type)) &&
              get_number(choice, DNN_KNOB_VALUE, &value);
    return ok ? mix(mix(1, (uint64_t)type), (uint64_t)value) | 1 : 0;
}

/* The sum over all knobs, in whatever order they come; false if cuDNN does not tell them. */
static bool add_knobs(dnn_descriptor config, uint64_t *sum)
{
    enum { MOST_KNOBS = 64 };
    dnn_descriptor choices[MOST_KNOBS];
    int64_t count = 0, found = 0, made = 0;
    bool ok = is_right(td__dnn.get(config, DNN_CONFIG_KNOB_CHOICES, DNN_TYPE_DESCRIPTOR, 0, &count,
                                   NULL)) &&
              count <= MOST_KNOBS;
    while (ok && made < count && (choices[made] = create(DNN_KNOB_CHOICE)))
        made++;
    ok = ok && made == count &&
         (!count || is_right(td__dnn.get(config, DNN_CONFIG_KNOB_CHOICES, DNN_TYPE_DESCRIPTOR,
                                         count, &found, choices))) &&
         found == count;
    for (int64_t i = 0; i < count && ok; i++) {
        uint64_t knob = mix_knob(choices[i]);
        ok = knob != 0;
        *sum += knob;
    }
    for (int64_t i = 0; i < made; i++)
        destroy(choices[i]);
    return ok;
}

static uint64_t identify(dnn_descriptor config)
{
    dnn_descriptor engine = create(DNN_ENGINE);
    int64_t index = 0, found = 0;
    uint64_t sum = 0;
    bool ok = engine &&
              is_right(td__dnn.get(config, DNN_CONFIG_ENGINE, DNN_TYPE_DESCRIPTOR, 1, &found,
                                   &engine)) &&
              get_number(engine, DNN_ENGINE_INDEX, &index) && add_knobs(config, &sum);
    destroy(engine);
    return ok ? mix(sum, (uint64_t)index) | 1 : 0;
}

/* Drops those of the offers from `first` on that are there already. */
static void drop_repeated(struct dnn_offers *offers, int first)
{
    int kept = first;
    for (int i = first; i < offers->count; i++) {
        uint64_t identity = identify(offers->configs[i]);
        bool is_new = true;
        for (int k = 0; k < kept && identity; k++)
            is_new &= offers->identity[k] != identity;
        if (!is_new) {
            destroy(offers->configs[i]);
            continue;
        }
        offers->configs[kept] = offers->configs[i];
        offers->identity[kept++] = identity;
    }
    offers->count = kept;
}

/* Appends what one of cuDNN's heuristics offers. */
static void add_offers(struct dnn_offers *offers, enum dnn_heuristic_mode mode)
{
    dnn_descriptor heuristic = create(DNN_HEURISTIC);
    int64_t count = 0, room = DNN_MOST_CONFIGS - offers->count;
    bool ok = heuristic && set_descriptor(heuristic, DNN_HEURISTIC_GRAPH, offers->graph) &&
              set_choice(heuristic, DNN_HEURISTIC_MODE, DNN_TYPE_HEURISTIC_MODE, (int)mode) &&
              is_right(td__dnn.finalize(heuristic)) &&
              is_right(td__dnn.get(heuristic, DNN_HEURISTIC_RESULTS, DNN_TYPE_DESCRIPTOR, 0, &count,
                                   NULL));
    count = !ok ? 0 : count < room ? count : room;
    dnn_descriptor *configs = offers->configs + offers->count;
    int64_t made = 0, filled = 0;
    while (made < count && (configs[made] = create(DNN_ENGINE_CONFIG)))
        made++;
    if (made && !is_right(td__dnn.get(heuristic, DNN_HEURISTIC_RESULTS, DNN_TYPE_DESCRIPTOR, made,
                                      &filled, configs)))
        filled = 0;
    filled = filled < made ? filled : made;
    for (int64_t i = filled; i < made; i++)
        destroy(configs[i]);
    int first = offers->count;
    offers->count += (int)filled;
    drop_repeated(offers, first);
    destroy(heuristic);
}

bool td__dnn_ask(const struct dnn_handle *handle, const struct dnn_shape *shape,
                 struct dnn_offers *offers)
{
    memset(offers, 0, sizeof *offers);
    offers->graph = describe_graph(handle, shape);
    if (!offers->graph)
        return false;
    add_offers(offers, DNN_HEURISTIC_A);
    add_offers(offers, DNN_HEURISTIC_B);
    add_offers(offers, DNN_HEURISTIC_FALLBACK);
    return true;
}

void td__dnn_drop_offers(struct dnn_offers *offers, int kept)
{
    dnn_descriptor config = kept < 0 ? NULL : offers->configs[kept];
    for (int i = 0; i < offers->count; i++)
        if (i != kept)
            destroy(offers->configs[i]);
    offers->configs[0] = config;
    offers->identity[0] = kept < 0 ? 0 : offers->identity[kept];
    offers->count = config != NULL;
    if (!config)
        destroy(offers->graph), offers->graph = NULL;
}

/* ---- Plans ----------------------------------------------------------------------------------------------------------- */

/* Whether an engine computes what the dtype promises, with the same bits each time where these are asked for; its number goes
 * to `index`. */
static bool is_exact(dnn_descriptor config, const struct dnn_shape *shape, int64_t *index)
{
    dnn_descriptor engine = create(DNN_ENGINE);
    int notes[DNN_NOTE_COUNT];
    int64_t found = 0, count = 0;
    bool ok = engine &&
              is_right(td__dnn.get(config, DNN_CONFIG_ENGINE, DNN_TYPE_DESCRIPTOR, 1, &found,
                                   &engine)) &&
              is_right(td__dnn.get(engine, DNN_ENGINE_INDEX, DNN_TYPE_INT64, 1, &found, index)) &&
              is_right(td__dnn.get(engine, DNN_ENGINE_NUMERICAL_NOTES, DNN_TYPE_NUMERICAL_NOTE,
                                   DNN_NOTE_COUNT, &count, notes));
    for (int64_t i = 0; i < count && i < DNN_NOTE_COUNT && ok; i++)
        ok = (notes[i] != DNN_NOTE_NONDETERMINISTIC || shape->any_order) &&
             notes[i] != DNN_NOTE_DOWN_CONVERTS && notes[i] != DNN_NOTE_REDUCED_PRECISION &&
             !(notes[i] == DNN_NOTE_TENSOR_CORE && shape->dtype == TD_F32); /* that would be TF32 */
    destroy(engine);
    return ok;
}

bool td__dnn_make_plan(const struct dnn_handle *handle, const struct dnn_shape *shape,
                       const struct dnn_offers *offers, int position, size_t most,
                       struct dnn_plan *plan)
{
    int64_t workspace = 0, found = 0;
    memset(plan, 0, sizeof *plan);
    if (position < 0 || position >= offers->count ||
        !is_exact(offers->configs[position], shape, &plan->engine))
        return false;
    plan->plan = create(DNN_PLAN);
    bool ok = plan->plan &&
              is_right(
                  td__dnn.set(plan->plan, DNN_PLAN_HANDLE, DNN_TYPE_HANDLE, 1, &handle->handle)) &&
              set_descriptor(plan->plan, DNN_PLAN_CONFIG, offers->configs[position]) &&
              is_right(td__dnn.finalize(plan->plan)) &&
              is_right(td__dnn.get(plan->plan, DNN_PLAN_WORKSPACE, DNN_TYPE_INT64, 1, &found,
                                   &workspace)) &&
              workspace >= 0 && (size_t)workspace <= most;
    plan->workspace = (size_t)workspace;
    if (!ok)
        td__dnn_drop_plan(plan);
    return ok;
}

void td__dnn_drop_plan(struct dnn_plan *plan)
{
    destroy(plan->plan);
    plan->plan = NULL;
}

int td__dnn_execute(const struct dnn_handle *handle, const struct dnn_plan *plan,
                    void *const operands[DNN_OPERANDS], void *workspace)
{
    dnn_descriptor pack = NULL;
    int status = td__dnn.create_descriptor(DNN_VARIANT_PACK, &pack);
    if (status)
        return status;
    status = td__dnn.set(pack, DNN_PACK_POINTERS, DNN_TYPE_POINTER, DNN_OPERANDS, operands);
    if (!status)
        status = td__dnn.set(pack, DNN_PACK_IDS, DNN_TYPE_INT64, DNN_OPERANDS, ids);
    if (!status)
        status = td__dnn.set(pack, DNN_PACK_WORKSPACE, DNN_TYPE_POINTER, 1, &workspace);
    if (!status)
        status = td__dnn.finalize(pack);
    if (!status)
        status = td__dnn.execute(handle->handle, plan->plan, pack);
    destroy(pack);
    return status;
}
