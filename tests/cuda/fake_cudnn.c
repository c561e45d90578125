/* A cuDNN for machines without a GPU: descriptors that keep their attributes, and convolutions by plain loops over the memory of
 * emulated_cuda. For tests: TANDEM_CUDNN_SO names this file. It is as strict as cuDNN: what is not finalized, missing or of a wrong
 * type is refused, and two plans of one engine with the same knobs: who makes them takes cuDNN's lists for different ones. It offers an engine that uses TF32 and one that is not deterministic first, whose results are wrong, so that
 * who takes them is noticed; then one that is slow, one that is fast, and one with a workspace.
 *
 *     FAKE_CUDNN_VERSION=8907    what cudnnGetVersion() says
 *     FAKE_CUDNN_FAIL=NAME:N     the Nth call of a function fails, as do all that follow
 *     FAKE_CUDNN_WORKSPACE=N     bytes that its fast engine asks for
 *     FAKE_CUDNN_MOST_RUNS=N     more runs of plans than this are refused: so many are not needed without measuring */
#include "cuda/dnn_library.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { GOOD = 0, BAD_PARAM = 2000, NOT_FINALIZED = 2004, NOT_SUPPORTED = 3000, FAILED = 5000 };
enum { MOST_ATTRIBUTES = 16, MOST_VALUES = 8 };
enum { ENGINE_TF32, ENGINE_RANDOM, ENGINE_SLOW, ENGINE_FAST, ENGINE_SPACE, ENGINES };

struct fake_attribute {
    int name, type, count;
    union {
        int64_t number;
        double real;
        void *pointer;
    } values[MOST_VALUES];
};

struct fake_descriptor {
    int kind, finalized, count, engine;
    struct fake_descriptor *graph; /* of an engine and its configuration */
    struct fake_attribute attributes[MOST_ATTRIBUTES];
    int references;
    const void *planned
        [ENGINES]; /* of a graph: the configuration of each engine of which there is a plan */
};

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static bool fails(const char *function)
{
    static long calls;
    const char *text = getenv("FAKE_CUDNN_FAIL");
    size_t length = strlen(function);
    return text && !strncmp(text, function, length) && text[length] == ':' &&
           __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) >= strtol(text + length + 1, NULL, 10);
}

#define MAY_FAIL                                                                                   \
    if (fails(__func__))                                                                           \
    return FAILED

/* ---- Descriptors ------------------------------------------------------------------------------------------------------ */

static size_t size_of_type(int type)
{
    return type == DNN_TYPE_INT64 || type == DNN_TYPE_DOUBLE || type == DNN_TYPE_POINTER ||
                   type == DNN_TYPE_HANDLE || type == DNN_TYPE_DESCRIPTOR
               ? 8
               : 4; /* enums and floats */
}

/* The type that cuDNN's documentation gives an attribute, and how many values it has; 0: any. */
static int type_of(int name, int *count)
{
    *count = 1;
    switch (name) {
    case DNN_TENSOR_TYPE:
    case DNN_CONVOLUTION_COMPUTE_TYPE:
        return DNN_TYPE_DATA_TYPE;
    case DNN_TENSOR_SIZES:
    case DNN_TENSOR_STRIDES:
        *count = 4;
        return DNN_TYPE_INT64;
    case DNN_CONVOLUTION_DILATIONS:
    case DNN_CONVOLUTION_STRIDES:
    case DNN_CONVOLUTION_POST_PADDINGS:
    case DNN_CONVOLUTION_PRE_PADDINGS:
        *count = 2;
        return DNN_TYPE_INT64;
    case DNN_TENSOR_ID:
    case DNN_TENSOR_ALIGNMENT:
    case DNN_CONVOLUTION_DIMS:
        return DNN_TYPE_INT64;
    case DNN_CONVOLUTION_MODE:
        return DNN_TYPE_CONVOLUTION_MODE;
    case DNN_HEURISTIC_MODE:
        return DNN_TYPE_HEURISTIC_MODE;
    case DNN_GRAPH_HANDLE:
    case DNN_PLAN_HANDLE:
        return DNN_TYPE_HANDLE;
    case DNN_PACK_IDS:
        *count = 0;
        return DNN_TYPE_INT64;
    case DNN_PACK_POINTERS:
        *count = 0;
        return DNN_TYPE_POINTER;
    case DNN_PACK_WORKSPACE:
        return DNN_TYPE_POINTER;
    case DNN_FORWARD_ALPHA:
    case DNN_FORWARD_BETA:
    case DNN_GRAD_INPUT_ALPHA:
    case DNN_GRAD_INPUT_BETA:
    case DNN_GRAD_WEIGHT_ALPHA:
    case DNN_GRAD_WEIGHT_BETA:
        return -1; /* float or double */
    default:
        return DNN_TYPE_DESCRIPTOR;
    }
}

static const struct fake_attribute *find(const struct fake_descriptor *of, int name)
{
    for (int i = 0; i < of->count; i++)
        if (of->attributes[i].name == name)
            return &of->attributes[i];
    fprintf(stderr, "fake_cudnn: a descriptor of kind %d lacks attribute %d\n", of->kind, name);
    abort();
}

static struct fake_descriptor *descriptor_of(const struct fake_descriptor *of, int name)
{
    return find(of, name)->values[0].pointer;
}

static int64_t number_of(const struct fake_descriptor *of, int name, int i)
{
    return find(of, name)->values[i].number;
}

static void let_go(struct fake_descriptor *descriptor)
{
    if (!descriptor || --descriptor->references)
        return;
    let_go(descriptor->graph);
    for (int i = 0; i < descriptor->count; i++)
        if (descriptor->attributes[i].type == DNN_TYPE_DESCRIPTOR)
            let_go(descriptor->attributes[i].values[0].pointer);
    free(descriptor);
}

EXPORT int cudnnBackendCreateDescriptor(int kind, dnn_descriptor *descriptor);
int cudnnBackendCreateDescriptor(int kind, dnn_descriptor *descriptor)
{
    MAY_FAIL;
    struct fake_descriptor *made = calloc(1, sizeof *made);
    made->kind = kind;
    made->references = 1;
    *descriptor = made;
    return GOOD;
}

EXPORT int cudnnBackendDestroyDescriptor(dnn_descriptor descriptor);
int cudnnBackendDestroyDescriptor(dnn_descriptor descriptor)
{
    let_go(descriptor);
    return GOOD;
}

EXPORT int cudnnBackendSetAttribute(dnn_descriptor descriptor, int name, int type, int64_t count,
                                    const void *values);
int cudnnBackendSetAttribute(dnn_descriptor descriptor, int name, int type, int64_t count,
                             const void *values)
{
    MAY_FAIL;
    struct fake_descriptor *of = descriptor;
    int wanted_count, wanted = type_of(name, &wanted_count);
    bool fits = wanted == -1 ? type == DNN_TYPE_FLOAT || type == DNN_TYPE_DOUBLE : type == wanted;
    if (of->finalized || of->count == MOST_ATTRIBUTES || !fits || count > MOST_VALUES ||
        (wanted_count && count != wanted_count))
        return BAD_PARAM;
    struct fake_attribute *attribute = &of->attributes[of->count++];
    *attribute = (struct fake_attribute){.name = name, .type = type, .count = (int)count};
    for (int64_t i = 0; i < count; i++) {
        const char *from = (const char *)values + (size_t)i * size_of_type(type);
        if (type == DNN_TYPE_FLOAT) {
            float real;
            memcpy(&real, from, sizeof real);
            attribute->values[i].real = (double)real;
        } else if (size_of_type(type) == 4) {
            int number;
            memcpy(&number, from, sizeof number);
            attribute->values[i].number = number;
        } else {
            memcpy(&attribute->values[i], from, 8);
        }
        if (type == DNN_TYPE_DESCRIPTOR) {
            struct fake_descriptor *held = attribute->values[i].pointer;
            if (!held || !held->finalized)
                return of->count--, NOT_FINALIZED;
            held->references++;
        }
    }
    return GOOD;
}

EXPORT int cudnnBackendFinalize(dnn_descriptor descriptor);
int cudnnBackendFinalize(dnn_descriptor descriptor)
{
    MAY_FAIL;
    struct fake_descriptor *of = descriptor;
    of->finalized = 1;
    if (of->kind != DNN_PLAN)
        return GOOD;
    const struct fake_descriptor *config = descriptor_of(of, DNN_PLAN_CONFIG);
    const void **planned = &config->graph->planned[config->engine];
    if (*planned && *planned != config) {
        fprintf(stderr, "fake_cudnn: engine %d is planned twice\n", config->engine);
        abort();
    }
    *planned = config;
    return GOOD;
}

/* The offers of a heuristic are its results: those of mode B are those of A from the last one on, and a fallback has the slow engine alone. */
static int offers(const struct fake_descriptor *heuristic, int64_t room, int64_t *count, void *to)
{
    int64_t mode = number_of(heuristic, DNN_HEURISTIC_MODE, 0);
    bool fallback = mode == DNN_HEURISTIC_FALLBACK;
    int64_t offered = fallback ? 1 : ENGINES;
    struct fake_descriptor *const *configs = to;
    for (int64_t i = 0; i < room && i < offered; i++) {
        if (configs[i]->kind != DNN_ENGINE_CONFIG)
            return BAD_PARAM;
        configs[i]->engine = fallback                  ? ENGINE_SLOW
                             : mode == DNN_HEURISTIC_B ? ENGINES - 1 - (int)i
                                                       : (int)i;
        configs[i]->graph = descriptor_of(heuristic, DNN_HEURISTIC_GRAPH);
        configs[i]->graph->references++;
        configs[i]->finalized = 1;
    }
    *count = room && room < offered ? room : offered;
    return GOOD;
}

static int notes_of(int engine, int64_t *count, int *notes)
{
    *count = 0;
    if (engine == ENGINE_TF32)
        notes[(*count)++] = DNN_NOTE_TENSOR_CORE, notes[(*count)++] = DNN_NOTE_DOWN_CONVERTS;
    if (engine == ENGINE_RANDOM)
        notes[(*count)++] = DNN_NOTE_NONDETERMINISTIC;
    return GOOD;
}

EXPORT int cudnnBackendGetAttribute(dnn_descriptor descriptor, int name, int type, int64_t room,
                                    int64_t *count, void *values);
int cudnnBackendGetAttribute(dnn_descriptor descriptor, int name, int type, int64_t room,
                             int64_t *count, void *values)
{
    MAY_FAIL;
    struct fake_descriptor *of = descriptor;
    if (!of->finalized)
        return NOT_FINALIZED;
    if (of->kind == DNN_HEURISTIC && name == DNN_HEURISTIC_RESULTS && type == DNN_TYPE_DESCRIPTOR)
        return offers(of, room, count, values);
    if (of->kind == DNN_ENGINE_CONFIG && name == DNN_CONFIG_ENGINE && type == DNN_TYPE_DESCRIPTOR) {
        struct fake_descriptor *engine = *(struct fake_descriptor **)values;
        engine->engine = of->engine;
        engine->finalized = 1;
    } else if (of->kind == DNN_ENGINE_CONFIG && name == DNN_CONFIG_KNOB_CHOICES &&
               type == DNN_TYPE_DESCRIPTOR) {
        if (room) {
            struct fake_descriptor *choice = *(struct fake_descriptor **)values;
            choice->engine = of->engine;
            choice->finalized = choice->kind == DNN_KNOB_CHOICE;
        }
    } else if (of->kind == DNN_KNOB_CHOICE && name == DNN_KNOB_TYPE && type == DNN_TYPE_KNOB_TYPE) {
        *(int *)values = 2;
    } else if (of->kind == DNN_KNOB_CHOICE && name == DNN_KNOB_VALUE && type == DNN_TYPE_INT64) {
        *(int64_t *)values = of->engine / 2;
    } else if (of->kind == DNN_ENGINE && name == DNN_ENGINE_INDEX && type == DNN_TYPE_INT64) {
        *(int64_t *)values = 100 + of->engine;
    } else if (of->kind == DNN_ENGINE && name == DNN_ENGINE_NUMERICAL_NOTES &&
               type == DNN_TYPE_NUMERICAL_NOTE && room >= 2) {
        return notes_of(of->engine, count, values);
    } else if (of->kind == DNN_PLAN && name == DNN_PLAN_WORKSPACE && type == DNN_TYPE_INT64) {
        int engine = descriptor_of(of, DNN_PLAN_CONFIG)->engine;
        *(int64_t *)values = engine == ENGINE_SPACE  ? 1000
                             : engine == ENGINE_FAST ? setting("FAKE_CUDNN_WORKSPACE", 0)
                                                     : 0;
    } else {
        return BAD_PARAM;
    }
    *count = 1;
    return GOOD;
}

/* ---- Elements ------------------------------------------------------------------------------------------------------------ */

static double read_element(const void *data, int64_t i, int type)
{
    if (type == DNN_DATA_F64)
        return ((const double *)data)[i];
    if (type == DNN_DATA_F32)
        return (double)((const float *)data)[i];
    if (type == DNN_DATA_F16)
        return (double)((const _Float16 *)data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static void write_element(void *data, int64_t i, int type, double value)
{
    if (type == DNN_DATA_F64) {
        ((double *)data)[i] = value;
    } else if (type == DNN_DATA_F32) {
        ((float *)data)[i] = (float)value;
    } else if (type == DNN_DATA_F16) {
        ((_Float16 *)data)[i] = (_Float16)value;
    } else {
        float narrow = (float)value;
        uint32_t bits;
        memcpy(&bits, &narrow, sizeof bits);
        bool is_nan = value != value;
        ((uint16_t *)data)[i] = (uint16_t)(is_nan ? bits >> 16 | 64
                                                  : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* ---- Convolutions ---------------------------------------------------------------------------------------------------------- */

struct fake_tensor {
    int64_t size[4], stride[4];
    void *data;
    int type;
};

struct fake_convolution {
    struct fake_tensor x, w, y;
    int64_t stride[2], dilation[2], padding[2];
    double beta;
    int direction; /* the kind of the operation */
};

static struct fake_tensor tensor_of(const struct fake_descriptor *operation, int name,
                                    const struct fake_descriptor *pack)
{
    struct fake_descriptor *descriptor = descriptor_of(operation, name);
    struct fake_tensor tensor = {.type = (int)number_of(descriptor, DNN_TENSOR_TYPE, 0)};
    const struct fake_attribute *ids = find(pack, DNN_PACK_IDS);
    for (int i = 0; i < ids->count; i++)
        if (ids->values[i].number == number_of(descriptor, DNN_TENSOR_ID, 0))
            tensor.data = find(pack, DNN_PACK_POINTERS)->values[i].pointer;
    for (int d = 0; d < 4; d++) {
        tensor.size[d] = number_of(descriptor, DNN_TENSOR_SIZES, d);
        tensor.stride[d] = number_of(descriptor, DNN_TENSOR_STRIDES, d);
    }
    if (!tensor.data ||
        (uintptr_t)tensor.data % (uint64_t)number_of(descriptor, DNN_TENSOR_ALIGNMENT, 0)) {
        fprintf(stderr, "fake_cudnn: an operand is missing, or not aligned as it was promised\n");
        abort();
    }
    return tensor;
}

static int64_t at(const struct fake_tensor *tensor, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return a * tensor->stride[0] + b * tensor->stride[1] + c * tensor->stride[2] +
           d * tensor->stride[3];
}

/* Adds every product of an element of each of two operands to the sum of the third. */
static void add_products(const struct fake_convolution *conv, double *sums)
{
    const struct fake_tensor *x = &conv->x, *w = &conv->w, *y = &conv->y;
    int64_t each = w->size[0] / (x->size[1] / w->size[1]); /* filters of a group */
    for (int64_t n = 0; n < y->size[0]; n++)
        for (int64_t f = 0; f < y->size[1]; f++)
            for (int64_t c = 0; c < w->size[1]; c++)
                for (int64_t i = 0; i < y->size[2] * y->size[3]; i++)
                    for (int64_t k = 0; k < w->size[2] * w->size[3]; k++) {
                        int64_t oy = i / y->size[3], ox = i % y->size[3], ky = k / w->size[3],
                                kx = k % w->size[3];
                        int64_t r = oy * conv->stride[0] - conv->padding[0] +
                                    ky * conv->dilation[0];
                        int64_t q = ox * conv->stride[1] - conv->padding[1] +
                                    kx * conv->dilation[1];
                        if (r < 0 || r >= x->size[2] || q < 0 || q >= x->size[3])
                            continue;
                        int64_t in_x = at(x, n, f / each * w->size[1] + c, r, q);
                        int64_t in_w = at(w, f, c, ky, kx), in_y = at(y, n, f, oy, ox);
                        if (conv->direction == DNN_FORWARD)
                            sums[in_y] += read_element(x->data, in_x, x->type) *
                                          read_element(w->data, in_w, w->type);
                        else if (conv->direction == DNN_GRAD_INPUT)
                            sums[in_x] += read_element(y->data, in_y, y->type) *
                                          read_element(w->data, in_w, w->type);
                        else
                            sums[in_w] += read_element(x->data, in_x, x->type) *
                                          read_element(y->data, in_y, y->type);
                    }
}

static void convolve(const struct fake_convolution *conv, double error)
{
    const struct fake_tensor *to = conv->direction == DNN_FORWARD      ? &conv->y
                                   : conv->direction == DNN_GRAD_INPUT ? &conv->x
                                                                       : &conv->w;
    int64_t count = to->size[0] * to->size[1] * to->size[2] * to->size[3];
    double *sums = calloc((size_t)count, sizeof *sums);
    add_products(conv, sums);
    for (int64_t i = 0; i < count; i++)
        write_element(to->data, i, to->type,
                      sums[i] + error +
                          (conv->beta != 0 ? conv->beta * read_element(to->data, i, to->type) : 0));
    free(sums);
}

/* ---- The other functions ------------------------------------------------------------------------------------------------------ */

static void count_run(void)
{
    static long runs;
    if (__atomic_add_fetch(&runs, 1, __ATOMIC_SEQ_CST) <= setting("FAKE_CUDNN_MOST_RUNS", 1L << 40))
        return;
    fprintf(stderr, "fake_cudnn: these are too many runs\n");
    abort();
}

EXPORT int cudnnBackendExecute(void *handle, dnn_descriptor plan, dnn_descriptor pack);
int cudnnBackendExecute(void *handle, dnn_descriptor plan, dnn_descriptor pack)
{
    static const int names[][5] = {
        {DNN_FORWARD_X, DNN_FORWARD_W, DNN_FORWARD_Y, DNN_FORWARD_BETA, DNN_FORWARD_CONVOLUTION},
        {DNN_GRAD_WEIGHT_X, DNN_GRAD_WEIGHT_DW, DNN_GRAD_WEIGHT_DY, DNN_GRAD_WEIGHT_BETA,
         DNN_GRAD_WEIGHT_CONVOLUTION},
        {DNN_GRAD_INPUT_DX, DNN_GRAD_INPUT_W, DNN_GRAD_INPUT_DY, DNN_GRAD_INPUT_BETA,
         DNN_GRAD_INPUT_CONVOLUTION},
    };
    MAY_FAIL;
    struct fake_descriptor *config = descriptor_of(plan, DNN_PLAN_CONFIG);
    struct fake_descriptor *operation = descriptor_of(config->graph, DNN_GRAPH_OPERATIONS);
    const int *name = names[operation->kind - DNN_FORWARD];
    struct fake_descriptor *window = descriptor_of(operation, name[4]);
    if (!handle || (config->engine == ENGINE_SPACE && !descriptor_of(pack, DNN_PACK_WORKSPACE)))
        return BAD_PARAM;
    struct fake_convolution conv = {
        .x = tensor_of(operation, name[0], pack),
        .w = tensor_of(operation, name[1], pack),
        .y = tensor_of(operation, name[2], pack),
        .beta = find(operation, name[3])->values[0].real,
        .direction = operation->kind,
    };
    for (int d = 0; d < 2; d++) {
        conv.stride[d] = number_of(window, DNN_CONVOLUTION_STRIDES, d);
        conv.dilation[d] = number_of(window, DNN_CONVOLUTION_DILATIONS, d);
        conv.padding[d] = number_of(window, DNN_CONVOLUTION_PRE_PADDINGS, d);
    }
    if (config->engine == ENGINE_SLOW || config->engine == ENGINE_SPACE)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    convolve(&conv, config->engine < ENGINE_SLOW ? 1 : 0);
    count_run();
    return GOOD;
}

EXPORT size_t cudnnGetVersion(void);
size_t cudnnGetVersion(void)
{
    return (size_t)setting("FAKE_CUDNN_VERSION", 91900);
}

EXPORT const char *cudnnGetErrorString(int status);
const char *cudnnGetErrorString(int status)
{
    return status == FAILED ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_BAD_PARAM";
}

#ifndef FAKE_CUDNN_INCOMPLETE
EXPORT int cudnnCreate(void **handle);
int cudnnCreate(void **handle)
{
    MAY_FAIL;
    *handle = malloc(1);
    return GOOD;
}
#endif

EXPORT int cudnnSetStream(void *handle, void *stream);
int cudnnSetStream(void *handle, void *stream)
{
    MAY_FAIL;
    return handle && stream ? GOOD : BAD_PARAM;
}
