/* Pooling: x [N, C, H, W] to y [N, C, H', W'].
 *
 * Max pooling saves the index of each maximum in its image, as i32; average pooling saves only
 * shapes. */
#include "autograd/op_kernel.h"
#include "base/fail.h"
#include "base/option_rules.h"

struct pool {
    td_window window;
    struct td__image image; /* of x */
    int64_t sizes[2];       /* H', W' */
};

static struct td_tensor as_batch(const td_tensor *y, const struct pool *pool)
{
    const int64_t *x = pool->image.shape;
    return td__view_as(y, (int64_t[]){x[0], x[1], pool->sizes[0], pool->sizes[1]}, 4);
}

/* A tensor of the shape of the result, in the scope. */
static td_tensor *new_result(const char *call, const struct pool *pool, const td_tensor *x,
                             td_dtype dtype)
{
    int64_t shape[4];
    int ndim = td__image_shape(&pool->image, pool->image.shape[1], pool->sizes[0], pool->sizes[1],
                               shape);
    return td__adopt(td__empty(call, shape, ndim, dtype, x->storage->device));
}

/* ---- Backward -------------------------------------------------------------------------------------- */

enum kind { MAX, AVG, ADAPTIVE_AVG };

static td_status pool_backward(td_node *node, enum kind kind, td_tensor *grad_y, td_tensor **grad_x)
{
    const struct pool *pool = td_node_data(node);
    td_tensor *contiguous = td__scoped_contiguous(grad_y);
    struct td__grad_buffer buffer;
    if (!contiguous)
        return TD_ERR_NOMEM;
    TD_TRY(td__grad_buffer_open(&buffer, node, 0));
    struct td_tensor grad = as_batch(contiguous, pool);
    struct td_tensor into = td__view_as(buffer.into, pool->image.shape, 4);
    const td_kernels *kernels = td__kernels_of(grad_y);
    if (kind == MAX) {
        td_tensor *saved = td_node_saved(node, 0);
        TD_TRY(td__done(saved));
        struct td_tensor indices = as_batch(saved, pool);
        TD_TRY(kernels->max_pool2d_grad(&into, &grad, &indices, &pool->window));
    } else if (kind == AVG) {
        TD_TRY(kernels->avg_pool2d_grad(&into, &grad, &pool->window));
    } else {
        TD_TRY(kernels->adaptive_avg_pool2d_grad(&into, &grad));
    }
    return td__grad_buffer_close(&buffer, grad_x);
}

static td_status max_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return pool_backward(node, MAX, grad_y[0], grad_x);
}

static td_status avg_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return pool_backward(node, AVG, grad_y[0], grad_x);
}

static td_status adaptive_avg_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    return pool_backward(node, ADAPTIVE_AVG, grad_y[0], grad_x);
}

static const td_function max_function = {.name = "td_f_max_pool2d", .backward = max_backward};
static const td_function avg_function = {.name = "td_f_avg_pool2d", .backward = avg_backward};
static const td_function adaptive_max_function = {.name = "td_f_adaptive_max_pool2d",
                                                  .backward = max_backward};
static const td_function adaptive_avg_function = {.name = "td_f_adaptive_avg_pool2d",
                                                  .backward = adaptive_avg_backward};

/* ---- Forward --------------------------------------------------------------------------------------- */

static td_tensor *pooled(const td_function *function, td_tensor *x, const struct pool *pool)
{
    const td_kernels *kernels = td__kernels_of(x);
    bool is_max = function->backward == max_backward;
    bool is_adaptive = function == &adaptive_max_function || function == &adaptive_avg_function;
    td_tensor *in = td__scoped_contiguous(x);
    td_tensor *y = in ? new_result(function->name, pool, x, x->layout.dtype) : NULL;
    td_tensor *indices = y && is_max && td__would_record(x)
                             ? new_result(function->name, pool, x, TD_I32)
                             : NULL;
    if (!y || (is_max && td__would_record(x) && !indices))
        return NULL;
    struct td_tensor from = td__view_as(in, pool->image.shape, 4), out = as_batch(y, pool);
    struct td_tensor index_batch, *where = NULL;
    if (indices) {
        index_batch = as_batch(indices, pool);
        where = &index_batch;
    }
    td_status status;
    if (is_max)
        status = is_adaptive ? kernels->adaptive_max_pool2d(&out, where, &from)
                             : kernels->max_pool2d(&out, where, &from, &pool->window);
    else
        status = is_adaptive ? kernels->adaptive_avg_pool2d(&out, &from)
                             : kernels->avg_pool2d(&out, &from, &pool->window);
    if (status)
        return NULL;
    return td_record(function, y,
                     &(td_node_spec){.inputs = {x},
                                     .input_count = 1,
                                     .saved = {indices},
                                     .saved_count = is_max,
                                     .data = pool,
                                     .data_size = sizeof *pool});
}

static td_tensor *pooled_in_scope(const td_function *function, td_tensor *x,
                                  const struct pool *pool)
{
    td_tensor *y = NULL;
    {
        TD_SCOPE;
        y = td_scope_return(pooled(function, x, pool));
    }
    return y;
}

/* The kernels count the elements of an image in i32. */
static td_status check_size(const char *call, const struct pool *pool)
{
    const int64_t *shape = pool->image.shape;
    if (shape[3] == 0 || shape[2] <= INT32_MAX / shape[3])
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: an image of %lld times %lld elements; 2^31 - 1 at most",
                   call, (long long)shape[2], (long long)shape[3]);
}

static td_tensor *with_window(const td_function *function, td_tensor *x, int64_t height,
                              int64_t width, const td_pool2d_options *options)
{
    static const td_pool2d_options defaults;
    const char *call = function->name;
    struct pool pool = {.window = {.kernel = {height, width}, .groups = 1}};
    options = options ? options : &defaults;
    if (!x)
        return td__null(function->name);
    if (td__image_of(call, x, &pool.image) || check_size(call, &pool))
        return NULL;
    pool.window.count_include_pad = !options->exclude_padding;
    bool is_max = function == &max_function;
    for (int i = 0; i < 2; i++) {
        pool.window.stride[i] = td__or(options->stride[i], pool.window.kernel[i]);
        pool.window.padding[i] = options->padding[i];
        pool.window.dilation[i] = is_max ? td__or(options->dilation[i], 1) : 1;
        if (!is_max && options->dilation[i] > 1) {
            td_fail(TD_ERR_INVALID, "%s: average pooling has no dilation, %lld was given", call,
                    (long long)options->dilation[i]);
            return NULL;
        }
    }
    if (td__window_sizes(call, &pool.window, &pool.image, pool.sizes))
        return NULL;
    for (int i = 0; i < 2; i++)
        if (pool.window.padding[i] > pool.window.kernel[i] / 2) {
            td_fail(TD_ERR_INVALID,
                    "%s: a padding of %lld for a kernel of %lld; it must be at most half of the "
                    "kernel, so that no window is empty",
                    call, (long long)pool.window.padding[i], (long long)pool.window.kernel[i]);
            return NULL;
        }
    return pooled_in_scope(function, x, &pool);
}

static td_tensor *adaptive(const td_function *function, td_tensor *x, int64_t height, int64_t width)
{
    const char *call = function->name;
    struct pool pool = {.sizes = {height, width}};
    if (!x)
        return td__null(function->name);
    if (td__image_of(call, x, &pool.image) || check_size(call, &pool))
        return NULL;
    for (int i = 0; i < 2; i++)
        if (pool.sizes[i] < 0 || (pool.sizes[i] > 0 && pool.image.shape[2 + i] == 0)) {
            td_fail(TD_ERR_INVALID, "%s: x has the shape %s, and the output size is %lld by %lld",
                    call, td__shape_of(x), (long long)height, (long long)width);
            return NULL;
        }
    return pooled_in_scope(function, x, &pool);
}

td_tensor *td_f_max_pool2d(td_tensor *x, int64_t kernel_height, int64_t kernel_width,
                           const td_pool2d_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return with_window(&max_function, x, kernel_height, kernel_width, options);
}

td_tensor *td_f_avg_pool2d(td_tensor *x, int64_t kernel_height, int64_t kernel_width,
                           const td_pool2d_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return with_window(&avg_function, x, kernel_height, kernel_width, options);
}

td_tensor *td_f_adaptive_avg_pool2d(td_tensor *x, int64_t height, int64_t width)
{
    return adaptive(&adaptive_avg_function, x, height, width);
}

td_tensor *td_f_adaptive_max_pool2d(td_tensor *x, int64_t height, int64_t width)
{
    return adaptive(&adaptive_max_function, x, height, width);
}
