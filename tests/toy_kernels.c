/* Kernels of the toy accelerator. Each is the kernel of the host, run later by the thread of a stream:
 *
 *     toy_kernel_matmul(out, a, b, …)        the caller's thread
 *         struct matmul_arguments            the arguments as they are
 *         toy_launch()                       the layouts and addresses of the tensors among them
 *             │ queue of the stream
 *         run_launch()                       the stream's thread: tensors of the host over the device's mapping
 *         toy_run_call()                     toy_arithmetic.c: other roundings, or errors, on request
 *         run_matmul()                       calls the host's matmul with them
 *
 * The KERNEL() below writes these for a slot from the list of its arguments. */
#include "toy_machine.h"

#include <tandem/autograd.h>

#include <stdlib.h>
#include <string.h>

/* ---- Launching -------------------------------------------------------------------------------------------- */

/* A tensor, from the launch until the stream gets there: kernels keep no tensor. */
struct layout {
    struct toy_span span;
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS], strides[TD_MAX_DIMS];
};

struct launch {
    const char *slot;
    td_status (*run)(void *arguments);
    void *arguments;
    struct layout *layouts;
    size_t *places; /* of the pointers to the tensors, in the arguments */
    int count;
};

static td_status run_launch(void *payload)
{
    struct launch *launch = payload;
    TD_SCOPE; /* the tensors belong to it */
    TD_NO_GRAD;
    for (int i = 0; i < launch->count; i++) {
        struct layout *layout = &launch->layouts[i];
        td_tensor *tensor = td_from_blob(toy_span_reach(&layout->span, launch->slot), layout->shape,
                                         layout->ndim, layout->strides, layout->dtype,
                                         td_device_get("cpu"), NULL, NULL);
        if (!tensor)
            return td_last_status();
        memcpy((char *)launch->arguments + launch->places[i], &tensor, sizeof tensor);
    }
    return toy_run_call(&(struct toy_call){.slot = launch->slot,
                                           .run = launch->run,
                                           .arguments = launch->arguments,
                                           .places = launch->places,
                                           .count = launch->count});
}

static void drop_launch(void *payload)
{
    struct launch *launch = payload;
    free(launch->arguments);
    free(launch->layouts);
    free(launch->places);
}

/* How many bytes from the first element to the end of the last one. */
static size_t extent(const struct layout *layout)
{
    int64_t last = 0;
    for (int d = 0; d < layout->ndim; d++) {
        if (layout->shape[d] == 0)
            return 0;
        last += (layout->shape[d] - 1) * layout->strides[d];
    }
    return ((size_t)last + 1) * td_dtype_size(layout->dtype);
}

static td_status capture(struct layout *layout, const td_tensor *tensor, const char *slot)
{
    layout->dtype = td_tensor_dtype(tensor);
    if (layout->dtype == TD_COMPLEX64 || layout->dtype == TD_COMPLEX128)
        return toy_unsupported(slot, td_dtype_name(layout->dtype));
    layout->ndim = td_tensor_ndim(tensor);
    for (int d = 0; d < layout->ndim; d++) {
        layout->shape[d] = td_tensor_size(tensor, d);
        layout->strides[d] = td_tensor_stride(tensor, d);
    }
    layout->span = toy_span_on(td_device_self(td_tensor_device(tensor)), td_tensor_data(tensor),
                               extent(layout), slot);
    return TD_OK;
}

/* The device of the tensors; NULL where there is none among them. */
static td_device *device_of(const char *slot, const void *const *tensors, int count)
{
    td_device *device = NULL;
    for (int i = 0; i < count; i++) {
        const td_tensor *tensor = *(const td_tensor *const *)tensors[i];
        if (!tensor)
            continue;
        if (device && td_tensor_device(tensor) != device)
            toy_die("toy: %s with tensors of %s and %s", slot, td_device_name(device),
                    td_device_name(td_tensor_device(tensor)));
        device = td_tensor_device(tensor);
    }
    return device;
}

static td_status capture_all(struct launch *launch, const void *arguments, size_t size,
                             const void *const *tensors, int count)
{
    launch->arguments = malloc(size);
    launch->layouts = calloc((size_t)count, sizeof *launch->layouts);
    launch->places = calloc((size_t)count, sizeof *launch->places);
    if (!launch->arguments || !launch->layouts || !launch->places)
        return td_fail(TD_ERR_NOMEM, "toy: %s: out of host memory", launch->slot);
    memcpy(launch->arguments, arguments, size);
    for (int i = 0; i < count; i++) {
        const td_tensor *tensor = *(const td_tensor *const *)tensors[i];
        if (!tensor)
            continue;
        struct layout *layout = &launch->layouts[launch->count];
        launch->places[launch->count++] = (size_t)((const char *)tensors[i] -
                                                   (const char *)arguments);
        td_status status = capture(layout, tensor, launch->slot);
        if (status)
            return status;
    }
    return TD_OK;
}

td_status toy_launch(const char *slot, td_status (*run)(void *arguments), const void *arguments,
                     size_t size, const void *const *tensors, int count)
{
    td_device *device = device_of(slot, tensors, count);
    if (!device)
        return TD_OK; /* an empty list */
    if (toy_is_missing(slot))
        return toy_unsupported(slot, "any tensor");
    td_status status = toy_enter(td_device_self(device));
    if (status)
        return status;
    toy_unlock();

    struct launch launch = {.slot = slot, .run = run};
    td_stream *stream = td_current_stream(device);
    struct toy_job *job = NULL;
    status = stream ? capture_all(&launch, arguments, size, tensors, count) : td_last_status();
    if (!status) {
        job = toy_job_create(TOY_KERNEL, slot, run_launch, &launch, sizeof launch);
        status = job ? TD_OK : TD_ERR_NOMEM;
    }
    if (status) {
        drop_launch(&launch);
        return status;
    }
    job->drop = drop_launch;
    return toy_enqueue(td_device_self(device), td_stream_self(stream), job);
}

td_status toy_unsupported(const char *slot, const char *what)
{
    return td_fail(TD_ERR_UNSUPPORTED, "toy: %s has no kernel for %s", slot, what);
}

/* ---- One slot ---------------------------------------------------------------------------------------------
 *
 * KERNEL(slot, arguments…) defines toy_kernel_<slot>(). An argument is one of
 *
 *     OUT(x)            td_tensor *x
 *     IN(x)             const td_tensor *x
 *     VALUE(type, x)    type x
 *     WINDOW(x)         const td_window *x, which is copied
 *
 * EACH(PREFIX_, between, OUT(x), VALUE(t, y)) expands to PREFIX_OUT(x) between PREFIX_VALUE(t, y). */

#define FIELD_OUT(x) td_tensor *x
#define FIELD_IN(x) const td_tensor *x
#define FIELD_VALUE(type, x) type x
#define FIELD_WINDOW(x) td_window x

#define PARAMETER_OUT(x) td_tensor *x
#define PARAMETER_IN(x) const td_tensor *x
#define PARAMETER_VALUE(type, x) type x
#define PARAMETER_WINDOW(x) const td_window *x

#define STORED_OUT(x) x
#define STORED_IN(x) x
#define STORED_VALUE(type, x) x
#define STORED_WINDOW(x) *x

#define PASSED_OUT(x) a->x
#define PASSED_IN(x) a->x
#define PASSED_VALUE(type, x) a->x
#define PASSED_WINDOW(x) &a->x

#define PLACE_OUT(x) &arguments.x,
#define PLACE_IN(x) &arguments.x,
#define PLACE_VALUE(type, x)
#define PLACE_WINDOW(x)

#define NOTHING()
#define COMMA() ,
#define SEMICOLON() ;

#define EACH(m, between, ...)                                                                      \
    EACH_OF(__VA_ARGS__, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)(m, between, __VA_ARGS__)
#define EACH_OF(a, b, c, d, e, f, g, h, i, j, k, l, number, ...) EACH_##number
#define EACH_1(m, s, a) m##a
#define EACH_2(m, s, a, ...) m##a s() EACH_1(m, s, __VA_ARGS__)
#define EACH_3(m, s, a, ...) m##a s() EACH_2(m, s, __VA_ARGS__)
#define EACH_4(m, s, a, ...) m##a s() EACH_3(m, s, __VA_ARGS__)
#define EACH_5(m, s, a, ...) m##a s() EACH_4(m, s, __VA_ARGS__)
#define EACH_6(m, s, a, ...) m##a s() EACH_5(m, s, __VA_ARGS__)
#define EACH_7(m, s, a, ...) m##a s() EACH_6(m, s, __VA_ARGS__)
#define EACH_8(m, s, a, ...) m##a s() EACH_7(m, s, __VA_ARGS__)
#define EACH_9(m, s, a, ...) m##a s() EACH_8(m, s, __VA_ARGS__)
#define EACH_10(m, s, a, ...) m##a s() EACH_9(m, s, __VA_ARGS__)
#define EACH_11(m, s, a, ...) m##a s() EACH_10(m, s, __VA_ARGS__)
#define EACH_12(m, s, a, ...) m##a s() EACH_11(m, s, __VA_ARGS__)

#define KERNEL(slot, ...) KERNEL_UNLESS(slot, NULL, __VA_ARGS__)

/* Only for floats: `tensor` is one of the arguments. */
#define KERNEL_OF_FLOATS(slot, tensor, ...)                                                        \
    KERNEL_UNLESS(slot, is_float(tensor) ? NULL : dtype_of(tensor), __VA_ARGS__)

/* A kernel that lacks something: `lack` is an expression of the arguments, what they need that it does not have, or
 * NULL. Only the launch can return TD_ERR_UNSUPPORTED: later the library could not compute it on the host instead. */
#define KERNEL_UNLESS(slot, lack, ...)                                                             \
    struct slot##_arguments {                                                                      \
        EACH(FIELD_, SEMICOLON, __VA_ARGS__);                                                      \
    };                                                                                             \
    static td_status run_##slot(void *arguments)                                                   \
    {                                                                                              \
        const struct slot##_arguments *a = arguments;                                              \
        return td_host_kernels()->slot(EACH(PASSED_, COMMA, __VA_ARGS__));                         \
    }                                                                                              \
    static td_status toy_kernel_##slot(EACH(PARAMETER_, COMMA, __VA_ARGS__))                       \
    {                                                                                              \
        const char *lacks = lack;                                                                  \
        if (lacks)                                                                                 \
            return toy_unsupported(#slot, lacks);                                                  \
        const struct slot##_arguments arguments = {EACH(STORED_, COMMA, __VA_ARGS__)};             \
        const void *const tensors[] = {EACH(PLACE_, NOTHING, __VA_ARGS__)};                        \
        return toy_launch(#slot, run_##slot, &arguments, sizeof arguments, tensors,                \
                          sizeof tensors / sizeof tensors[0]);                                     \
    }

/* ---- All slots, as they are in td_kernels; adaptive_max_pool2d is left out -------------------------------- */

static const char *dtype_of(const td_tensor *tensor)
{
    return td_dtype_name(td_tensor_dtype(tensor));
}

static bool is_float(const td_tensor *tensor)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
}

static bool is_bool(const td_tensor *tensor)
{
    return td_tensor_dtype(tensor) == TD_BOOL;
}

static const char *unary_lacks(td_unary op, const td_tensor *x)
{
    switch (op) {
    case TD_UNARY_ERF:
        return "erf";
    case TD_UNARY_NOT:
    case TD_UNARY_ISNAN:
        return NULL;
    case TD_UNARY_NEG:
    case TD_UNARY_ABS:
    case TD_UNARY_SIGN:
    case TD_UNARY_SQUARE:
    case TD_UNARY_RELU:
        return is_bool(x) ? dtype_of(x) : NULL;
    default:
        return is_float(x) ? NULL : dtype_of(x);
    }
}

static const char *binary_lacks(td_binary op, const td_tensor *a)
{
    return is_bool(a) && (op == TD_BINARY_SUB || op == TD_BINARY_DIV || op == TD_BINARY_POW)
               ? dtype_of(a)
               : NULL;
}

static const char *reduce_lacks(td_reduce_kind kind, const td_tensor *x)
{
    bool floats = kind == TD_REDUCE_KIND_MEAN || kind == TD_REDUCE_KIND_SQUARES;
    return (floats && !is_float(x)) || (kind == TD_REDUCE_KIND_PROD && is_bool(x)) ? dtype_of(x)
                                                                                   : NULL;
}

KERNEL(fill, OUT(out), VALUE(double, value))
KERNEL(copy, OUT(out), IN(x))
KERNEL_UNLESS(unary, unary_lacks(op, x), VALUE(td_unary, op), OUT(out), IN(x))
KERNEL_UNLESS(unary_grad, unary_lacks(op, grad_y), VALUE(td_unary, op), OUT(grad_x), IN(grad_y),
              IN(saved))
KERNEL_UNLESS(binary, binary_lacks(op, a), VALUE(td_binary, op), OUT(out), IN(a), IN(b))
KERNEL_UNLESS(binary_scalar, binary_lacks(op, a), VALUE(td_binary, op), OUT(out), IN(a),
              VALUE(double, b), VALUE(bool, reversed))
KERNEL_UNLESS(add_scaled, is_bool(a) ? dtype_of(a) : NULL, OUT(out), IN(a), IN(b),
              VALUE(double, alpha))
KERNEL(where, OUT(out), IN(condition), IN(a), IN(b))
KERNEL_UNLESS(clamp, is_bool(x) ? dtype_of(x) : NULL, OUT(out), IN(x), VALUE(double, low),
              VALUE(double, high))

KERNEL_UNLESS(reduce, reduce_lacks(kind, x), VALUE(td_reduce_kind, kind), OUT(out), IN(x),
              VALUE(unsigned, dims))
KERNEL(arg_reduce, VALUE(bool, least), OUT(out), IN(x), VALUE(int, dim))

KERNEL_OF_FLOATS(matmul, out, OUT(out), IN(a), IN(b), VALUE(double, alpha), VALUE(bool, accumulate))
KERNEL_OF_FLOATS(linear, out, OUT(out), IN(x), IN(w), IN(bias))
KERNEL_OF_FLOATS(linear_gelu, out, OUT(out), OUT(pre), IN(x), IN(w), IN(bias))
KERNEL_OF_FLOATS(linear_gelu_grad, grad_pre, OUT(grad_pre), OUT(grad_bias), IN(grad_y), IN(w),
                 IN(pre))
KERNEL_OF_FLOATS(conv2d, out, OUT(out), IN(x), IN(w), IN(bias), WINDOW(window))
KERNEL_OF_FLOATS(conv2d_grad_input, grad_x, OUT(grad_x), IN(grad_y), IN(w), WINDOW(window))
KERNEL_OF_FLOATS(conv2d_grad_weight, grad_w, OUT(grad_w), OUT(grad_bias), IN(grad_y), IN(x),
                 WINDOW(window), VALUE(bool, accumulate))

KERNEL_OF_FLOATS(max_pool2d, out, OUT(out), OUT(indices), IN(x), WINDOW(window))
KERNEL_OF_FLOATS(max_pool2d_grad, grad_x, OUT(grad_x), IN(grad_y), IN(indices), WINDOW(window))
KERNEL_OF_FLOATS(avg_pool2d, out, OUT(out), IN(x), WINDOW(window))
KERNEL_OF_FLOATS(avg_pool2d_grad, grad_x, OUT(grad_x), IN(grad_y), WINDOW(window))
KERNEL_OF_FLOATS(adaptive_avg_pool2d, out, OUT(out), IN(x))
KERNEL_OF_FLOATS(adaptive_avg_pool2d_grad, grad_x, OUT(grad_x), IN(grad_y))

KERNEL_OF_FLOATS(batch_norm, out, OUT(out), OUT(mean), OUT(rstd), IN(x), IN(weight), IN(bias),
                 OUT(running_mean), OUT(running_var), VALUE(bool, training),
                 VALUE(double, momentum), VALUE(double, eps))
KERNEL_OF_FLOATS(batch_norm_grad, grad_y, OUT(grad_x), OUT(grad_weight), OUT(grad_bias), IN(grad_y),
                 IN(x), IN(weight), IN(mean), IN(rstd), VALUE(bool, training))
KERNEL_OF_FLOATS(layer_norm, out, OUT(out), OUT(mean), OUT(rstd), IN(x), IN(weight), IN(bias),
                 VALUE(double, eps))
KERNEL_OF_FLOATS(layer_norm_grad, grad_y, OUT(grad_x), OUT(grad_weight), OUT(grad_bias), IN(grad_y),
                 IN(x), IN(weight), IN(mean), IN(rstd))

KERNEL_OF_FLOATS(softmax, out, OUT(out), IN(x), VALUE(bool, logarithm))
KERNEL_OF_FLOATS(softmax_grad, grad_x, OUT(grad_x), IN(grad_y), IN(y), VALUE(bool, logarithm))

KERNEL_OF_FLOATS(attention, out, OUT(out), OUT(lse), IN(q), IN(k), IN(v), IN(mask),
                 VALUE(bool, causal), VALUE(double, scale))
KERNEL_OF_FLOATS(attention_grad, grad_y, OUT(grad_q), OUT(grad_k), OUT(grad_v), IN(grad_y), IN(q),
                 IN(k), IN(v), IN(y), IN(lse), IN(mask), VALUE(bool, causal), VALUE(double, scale))

KERNEL(index_select, OUT(out), IN(x), VALUE(int, dim), IN(index))
KERNEL(index_add, OUT(out), VALUE(int, dim), IN(index), IN(src))
KERNEL(gather, OUT(out), IN(x), VALUE(int, dim), IN(index))
KERNEL(scatter_add, OUT(out), VALUE(int, dim), IN(index), IN(src))

KERNEL_OF_FLOATS(nll_loss, out, OUT(out), OUT(factor), IN(x), IN(target), IN(weight),
                 VALUE(int64_t, ignore_index))
KERNEL_OF_FLOATS(nll_loss_grad, grad_x, OUT(grad_x), IN(grad_y), IN(factor), IN(target), IN(weight),
                 VALUE(int64_t, ignore_index))
KERNEL_OF_FLOATS(cross_entropy_grad, grad_x, OUT(grad_x), IN(grad_y), IN(factor), IN(x),
                 IN(statistics), IN(target), IN(weight), VALUE(int64_t, ignore_index))
KERNEL_OF_FLOATS(cross_entropy, out, OUT(out), OUT(statistics), OUT(factor), IN(x), IN(target),
                 IN(weight), VALUE(int64_t, ignore_index))
KERNEL_OF_FLOATS(pair_loss, x, VALUE(td_pair_loss, loss), OUT(out), IN(x), IN(y),
                 VALUE(double, scale))
KERNEL_OF_FLOATS(pair_loss_grad, x, VALUE(td_pair_loss, loss), OUT(grad_x), IN(grad_y), IN(x),
                 IN(y), VALUE(double, scale))

KERNEL_OF_FLOATS(dropout_grad, grad_x, OUT(grad_x), IN(grad_y), IN(keep), VALUE(double, p),
                 VALUE(int64_t, block))

#define SLOT(slot) .slot = toy_kernel_##slot
const td_kernels toy_kernels = {
    .version = TD_KERNELS_VERSION, .size = sizeof toy_kernels, TOY_KERNELS(SLOT)};
