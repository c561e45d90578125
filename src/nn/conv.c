/* Convolutions and pooling. */
#include "nn/module.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <stddef.h>
#include <stdio.h>

/* ---- Convolution -------------------------------------------------------------------------------- */

static td_tensor *conv2d_forward(td_module *self, td_tensor *const *inputs, int count)
{
    return td__takes(self, count, 1)
               ? td_f_conv2d(inputs[0], td_param(self, 0), td_param(self, 1), self->data)
               : NULL;
}

/* Appends ", name=(a, b)" if one of the two is not `usual`. */
static int put_pair(char *text, size_t size, int used, const char *name, const int64_t *pair,
                    int64_t usual)
{
    if (pair[0] == usual && pair[1] == usual)
        return used;
    size_t at = (size_t)used < size ? (size_t)used : size;
    return used + snprintf(text + at, size - at, ", %s=(%lld, %lld)", name, (long long)pair[0],
                           (long long)pair[1]);
}

static int conv2d_describe(const td_module *self, char *text, size_t size)
{
    const td_conv2d_options *options = self->data;
    const td_tensor *weight = td_param(self, 0);
    int used = snprintf(text, size, "%lld, %lld, kernel_size=(%lld, %lld), stride=(%lld, %lld)",
                        (long long)(td_tensor_size(weight, 1) * options->groups),
                        (long long)td_tensor_size(weight, 0), (long long)td_tensor_size(weight, 2),
                        (long long)td_tensor_size(weight, 3), (long long)options->stride[0],
                        (long long)options->stride[1]);
    used = put_pair(text, size, used, "padding", options->padding, 0);
    used = put_pair(text, size, used, "dilation", options->dilation, 1);
    size_t at = (size_t)used < size ? (size_t)used : size;
    if (options->groups != 1)
        used += snprintf(text + at, size - at, ", groups=%lld", (long long)options->groups);
    at = (size_t)used < size ? (size_t)used : size;
    if (options->no_bias)
        used += snprintf(text + at, size - at, ", bias=False");
    return used;
}

/* What a received module may have. A window of MAX_WINDOW with such a stride or dilation ends far within 64 bits;
 * results grow by the padding, and adaptive ones are of the size that is given: a message of some bytes must not
 * make forward allocate much more than the input's size. */
#define MAX_WINDOW 0x1p24
#define MAX_GROWTH 4096

#define WINDOW(text, type, member, least, most)                                                    \
    {                                                                                              \
        text, TD__OPTION_INT64, offsetof(type, member), least, most                                \
    }

static const struct td__kind_option conv2d_options[] = {
    WINDOW("stride_height", td_conv2d_options, stride[0], 1, MAX_WINDOW),
    WINDOW("stride_width", td_conv2d_options, stride[1], 1, MAX_WINDOW),
    WINDOW("padding_height", td_conv2d_options, padding[0], 0, MAX_GROWTH),
    WINDOW("padding_width", td_conv2d_options, padding[1], 0, MAX_GROWTH),
    WINDOW("dilation_height", td_conv2d_options, dilation[0], 1, MAX_WINDOW),
    WINDOW("dilation_width", td_conv2d_options, dilation[1], 1, MAX_WINDOW),
    {"groups", TD__OPTION_INT64, offsetof(td_conv2d_options, groups), 1, 0x1p31},
    {"no_bias", TD__OPTION_BOOL, offsetof(td_conv2d_options, no_bias), 0, 0},
};
enum { CONV2D_OPTIONS = sizeof conv2d_options / sizeof conv2d_options[0] };

static td_status conv2d_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, conv2d_options, CONV2D_OPTIONS);
}

static td_status conv2d_load(td_module *self, const td_state *options)
{
    const td_conv2d_options *given = self->data;
    const td_tensor *weight = td_param(self, 0);
    int64_t shape[4] = {0}, in_channels;
    for (int d = 0; d < 4 && weight && weight->layout.ndim == 4; d++)
        shape[d] = weight->layout.shape[d];
    TD_TRY(td__options_load(self, options, conv2d_options, CONV2D_OPTIONS));
    TD_TRY(td__check_parameters(
        self,
        (const struct td__kind_tensor[]){{"weight", shape, 4, false}, {"bias", shape, 1, false}},
        given->no_bias ? 1 : 2));
    if (!__builtin_mul_overflow(shape[1], given->groups, &in_channels) &&
        shape[0] % given->groups == 0 && shape[2] >= 1 && shape[2] <= MAX_WINDOW && shape[3] >= 1 &&
        shape[3] <= MAX_WINDOW)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "a received %s has a weight %s and %lld groups, which do not fit",
                   self->ops->name, td__shape_text(shape, 4), (long long)given->groups);
}

static const td_module_ops conv2d_ops = {.name = "Conv2d",
                                         .data_size = sizeof(td_conv2d_options),
                                         .forward = conv2d_forward,
                                         .describe = conv2d_describe,
                                         .save_options = conv2d_save,
                                         .load_options = conv2d_load};

/* Fills in defaults, and checks all. */
static td_status complete(const char *call, int64_t in_channels, int64_t out_channels,
                          const int64_t *kernel, td_conv2d_options *options)
{
    TD_TRY(td__check_size(call, "in_channels", in_channels, 0));
    TD_TRY(td__check_size(call, "out_channels", out_channels, 0));
    options->groups = options->groups ? options->groups : 1;
    TD_TRY(td__check_size(call, "groups", options->groups, 1));
    for (int d = 0; d < 2; d++) {
        options->stride[d] = options->stride[d] ? options->stride[d] : 1;
        options->dilation[d] = options->dilation[d] ? options->dilation[d] : 1;
        TD_TRY(td__check_size(call, "a size of the kernel", kernel[d], 1));
        TD_TRY(td__check_size(call, "a stride", options->stride[d], 1));
        TD_TRY(td__check_size(call, "a padding", options->padding[d], 0));
        TD_TRY(td__check_size(call, "a dilation", options->dilation[d], 1));
    }
    if (in_channels % options->groups || out_channels % options->groups)
        return td_fail(TD_ERR_INVALID,
                       "%s: %lld input and %lld output channels must be multiples of the number "
                       "of groups, %lld",
                       call, (long long)in_channels, (long long)out_channels,
                       (long long)options->groups);
    return TD_OK;
}

td_module *td_conv2d_with(int64_t in_channels, int64_t out_channels, int64_t kernel_height,
                          int64_t kernel_width, const td_conv2d_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_conv2d_options given = options ? *options : (td_conv2d_options){0};
    const int64_t kernel[] = {kernel_height, kernel_width};
    if (complete("td_conv2d", in_channels, out_channels, kernel, &given))
        return NULL;
    td_module *self = td_module_create(&conv2d_ops);
    int64_t shape[] = {out_channels, in_channels / given.groups, kernel_height, kernel_width};
    td_module_new_parameter(self, "weight", shape, 4, TD_F32);
    if (!given.no_bias)
        td_module_new_parameter(self, "bias", shape, 1, TD_F32);
    if (self && !self->failure) {
        *(td_conv2d_options *)self->data = given;
        td__module_set_failure(self, td__init_affine(td_param(self, 0), td_param(self, 1)));
    }
    return td_module_finish(self);
}

td_module *td_conv2d(int64_t in_channels, int64_t out_channels, int64_t kernel_size)
{
    return td_conv2d_with(in_channels, out_channels, kernel_size, kernel_size, NULL);
}

/* ---- Pooling ------------------------------------------------------------------------------------ */

struct pool {
    int64_t kernel[2]; /* of the window, or (adaptive) the size of the result */
    td_pool2d_options options;
};

static td_tensor *max_pool2d_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct pool *pool = self->data;
    return td__takes(self, count, 1)
               ? td_f_max_pool2d(inputs[0], pool->kernel[0], pool->kernel[1], &pool->options)
               : NULL;
}

static td_tensor *avg_pool2d_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct pool *pool = self->data;
    return td__takes(self, count, 1)
               ? td_f_avg_pool2d(inputs[0], pool->kernel[0], pool->kernel[1], &pool->options)
               : NULL;
}

static td_tensor *adaptive_avg_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct pool *pool = self->data;
    return td__takes(self, count, 1)
               ? td_f_adaptive_avg_pool2d(inputs[0], pool->kernel[0], pool->kernel[1])
               : NULL;
}

static td_tensor *adaptive_max_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct pool *pool = self->data;
    return td__takes(self, count, 1)
               ? td_f_adaptive_max_pool2d(inputs[0], pool->kernel[0], pool->kernel[1])
               : NULL;
}

/* Room for two numbers of 20 characters in parentheses, and for what avg_describe() writes of three of them. */
enum { PAIR_TEXT = 48, AVG_TEXT = 3 * PAIR_TEXT + 40 };

/* "2", or "(2, 3)" if the two differ, into `text`. */
static const char *pair_text(char text[static PAIR_TEXT], const int64_t *pair)
{
    if (pair[0] == pair[1])
        snprintf(text, PAIR_TEXT, "%lld", (long long)pair[0]);
    else
        snprintf(text, PAIR_TEXT, "(%lld, %lld)", (long long)pair[0], (long long)pair[1]);
    return text;
}

static int avg_describe(const td_module *self, char *text, size_t size)
{
    const struct pool *pool = self->data;
    char kernel[PAIR_TEXT], stride[PAIR_TEXT], padding[PAIR_TEXT];
    return snprintf(text, size, "kernel_size=%s, stride=%s, padding=%s",
                    pair_text(kernel, pool->kernel), pair_text(stride, pool->options.stride),
                    pair_text(padding, pool->options.padding));
}

static int max_describe(const td_module *self, char *text, size_t size)
{
    const struct pool *pool = self->data;
    char first[AVG_TEXT], dilation[PAIR_TEXT];
    avg_describe(self, first, sizeof first);
    return snprintf(text, size, "%s, dilation=%s, ceil_mode=False", first,
                    pair_text(dilation, pool->options.dilation));
}

static int adaptive_describe(const td_module *self, char *text, size_t size)
{
    const struct pool *pool = self->data;
    return snprintf(text, size, "output_size=(%lld, %lld)", (long long)pool->kernel[0],
                    (long long)pool->kernel[1]);
}

static const struct td__kind_option pool_options[] = {
    WINDOW("height", struct pool, kernel[0], 1, MAX_WINDOW),
    WINDOW("width", struct pool, kernel[1], 1, MAX_WINDOW),
    WINDOW("stride_height", struct pool, options.stride[0], 1, MAX_WINDOW),
    WINDOW("stride_width", struct pool, options.stride[1], 1, MAX_WINDOW),
    WINDOW("padding_height", struct pool, options.padding[0], 0, MAX_WINDOW),
    WINDOW("padding_width", struct pool, options.padding[1], 0, MAX_WINDOW),
    WINDOW("dilation_height", struct pool, options.dilation[0], 1, MAX_WINDOW),
    WINDOW("dilation_width", struct pool, options.dilation[1], 1, MAX_WINDOW),
    {"exclude_padding", TD__OPTION_BOOL, offsetof(struct pool, options.exclude_padding), 0, 0},
};
enum { POOL_OPTIONS = sizeof pool_options / sizeof pool_options[0] };

static td_status pool_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, pool_options, POOL_OPTIONS);
}

static td_status check_padding(const char *call, const struct pool *pool)
{
    for (int d = 0; d < 2; d++)
        if (pool->options.padding[d] > pool->kernel[d] / 2)
            return td_fail(
                TD_ERR_INVALID,
                "%s: the padding is %lld and the kernel %lld; the padding must be at most "
                "half of it",
                call, (long long)pool->options.padding[d], (long long)pool->kernel[d]);
    return TD_OK;
}

static td_status pool_load(td_module *self, const td_state *options)
{
    TD_TRY(td__options_load(self, options, pool_options, POOL_OPTIONS));
    return check_padding(self->ops->name, self->data);
}

static const struct td__kind_option adaptive_options[] = {
    WINDOW("height", struct pool, kernel[0], 1, MAX_GROWTH),
    WINDOW("width", struct pool, kernel[1], 1, MAX_GROWTH),
};
enum { ADAPTIVE_OPTIONS = sizeof adaptive_options / sizeof adaptive_options[0] };

static td_status adaptive_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, adaptive_options, ADAPTIVE_OPTIONS);
}

static td_status adaptive_load(td_module *self, const td_state *options)
{
    return td__options_load(self, options, adaptive_options, ADAPTIVE_OPTIONS);
}

static const td_module_ops max_pool2d_ops = {.name = "MaxPool2d",
                                             .data_size = sizeof(struct pool),
                                             .forward = max_pool2d_forward,
                                             .describe = max_describe,
                                             .save_options = pool_save,
                                             .load_options = pool_load};
static const td_module_ops avg_pool2d_ops = {.name = "AvgPool2d",
                                             .data_size = sizeof(struct pool),
                                             .forward = avg_pool2d_forward,
                                             .describe = avg_describe,
                                             .save_options = pool_save,
                                             .load_options = pool_load};
static const td_module_ops adaptive_avg_ops = {.name = "AdaptiveAvgPool2d",
                                               .data_size = sizeof(struct pool),
                                               .forward = adaptive_avg_forward,
                                               .describe = adaptive_describe,
                                               .save_options = adaptive_save,
                                               .load_options = adaptive_load};
static const td_module_ops adaptive_max_ops = {.name = "AdaptiveMaxPool2d",
                                               .data_size = sizeof(struct pool),
                                               .forward = adaptive_max_forward,
                                               .describe = adaptive_describe,
                                               .save_options = adaptive_save,
                                               .load_options = adaptive_load};

const td_module_ops *const td__conv_kinds[] = {
    &conv2d_ops, &max_pool2d_ops, &avg_pool2d_ops, &adaptive_avg_ops, &adaptive_max_ops, NULL};

static td_module *make_pool(const td_module_ops *ops, const char *call, int64_t height,
                            int64_t width, const td_pool2d_options *options)
{
    struct pool pool = {.kernel = {height, width}};
    if (options)
        pool.options = *options;
    for (int d = 0; d < 2; d++) {
        pool.options.stride[d] = pool.options.stride[d] ? pool.options.stride[d] : pool.kernel[d];
        pool.options.dilation[d] = pool.options.dilation[d] ? pool.options.dilation[d] : 1;
        if (td__check_size(call, "a size", pool.kernel[d], 1) ||
            td__check_size(call, "a stride", pool.options.stride[d], 1) ||
            td__check_size(call, "a padding", pool.options.padding[d], 0) ||
            td__check_size(call, "a dilation", pool.options.dilation[d], 1))
            return NULL;
    }
    if (check_padding(call, &pool))
        return NULL;
    td_module *self = td_module_create(ops);
    if (self)
        *(struct pool *)self->data = pool;
    return self;
}

td_module *td_max_pool2d_with(int64_t kernel_height, int64_t kernel_width,
                              const td_pool2d_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return make_pool(&max_pool2d_ops, "td_max_pool2d", kernel_height, kernel_width, options);
}

td_module *td_max_pool2d(int64_t kernel_size)
{
    return td_max_pool2d_with(kernel_size, kernel_size, NULL);
}

td_module *td_avg_pool2d_with(int64_t kernel_height, int64_t kernel_width,
                              const td_pool2d_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return make_pool(&avg_pool2d_ops, "td_avg_pool2d", kernel_height, kernel_width, options);
}

td_module *td_avg_pool2d(int64_t kernel_size)
{
    return td_avg_pool2d_with(kernel_size, kernel_size, NULL);
}

td_module *td_adaptive_avg_pool2d(int64_t height, int64_t width)
{
    return make_pool(&adaptive_avg_ops, "td_adaptive_avg_pool2d", height, width, NULL);
}

td_module *td_adaptive_max_pool2d(int64_t height, int64_t width)
{
    return make_pool(&adaptive_max_ops, "td_adaptive_max_pool2d", height, width, NULL);
}
