/* Modules without parameters: activations, dropout, flatten, identity. */
#include "nn/module.h"

#include "base/fail.h"

#include <stddef.h>
#include <stdio.h>

/* ---- Activations -------------------------------------------------------------------------------- */

#define ACTIVATION(module, text, function)                                                         \
    static td_tensor *module##_forward(td_module *self, td_tensor *const *inputs, int count)       \
    {                                                                                              \
        return td__takes(self, count, 1) ? function(inputs[0]) : NULL;                             \
    }                                                                                              \
    static const td_module_ops module##_ops = {.name = text, .forward = module##_forward};         \
    td_module *td_##module(void)                                                                   \
    {                                                                                              \
        return td_module_create(&module##_ops);                                                    \
    }

ACTIVATION(relu, "ReLU", td_f_relu)
ACTIVATION(silu, "SiLU", td_f_silu)
ACTIVATION(tanh, "Tanh", td_f_tanh)
ACTIVATION(sigmoid, "Sigmoid", td_f_sigmoid)

struct gelu {
    bool by_tanh;
};

static td_tensor *gelu_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct gelu *gelu = self->data;
    if (!td__takes(self, count, 1))
        return NULL;
    return gelu->by_tanh ? td_f_gelu_tanh(inputs[0]) : td_f_gelu(inputs[0]);
}

static int gelu_describe(const td_module *self, char *text, size_t size)
{
    const struct gelu *gelu = self->data;
    return snprintf(text, size, "approximate='%s'", gelu->by_tanh ? "tanh" : "none");
}

static const struct td__kind_option gelu_options[] = {
    {"by_tanh", TD__OPTION_BOOL, offsetof(struct gelu, by_tanh), 0, 0}};
enum { GELU_OPTIONS = sizeof gelu_options / sizeof gelu_options[0] };

static td_status gelu_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, gelu_options, GELU_OPTIONS);
}

static td_status gelu_load(td_module *self, const td_state *options)
{
    return td__options_load(self, options, gelu_options, GELU_OPTIONS);
}

static const td_module_ops gelu_ops = {.name = "GELU",
                                       .data_size = sizeof(struct gelu),
                                       .forward = gelu_forward,
                                       .describe = gelu_describe,
                                       .save_options = gelu_save,
                                       .load_options = gelu_load};

bool td__is_relu(const td_module *module)
{
    return module->ops == &relu_ops && !module->failure;
}

bool td__is_gelu_tanh(const td_module *module)
{
    return module->ops == &gelu_ops && ((const struct gelu *)module->data)->by_tanh &&
           !module->failure;
}

static td_module *make_gelu(bool by_tanh)
{
    td_module *module = td_module_create(&gelu_ops);
    if (module)
        *(struct gelu *)module->data = (struct gelu){.by_tanh = by_tanh};
    return module;
}

td_module *td_gelu(void)
{
    return make_gelu(false);
}

td_module *td_gelu_tanh(void)
{
    return make_gelu(true);
}

/* ---- Softmax ------------------------------------------------------------------------------------ */

struct softmax {
    int dim;
};

static td_tensor *softmax_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct softmax *softmax = self->data;
    return td__takes(self, count, 1) ? td_f_softmax(inputs[0], softmax->dim) : NULL;
}

static td_tensor *log_softmax_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct softmax *softmax = self->data;
    return td__takes(self, count, 1) ? td_f_log_softmax(inputs[0], softmax->dim) : NULL;
}

static int softmax_describe(const td_module *self, char *text, size_t size)
{
    return snprintf(text, size, "dim=%d", ((const struct softmax *)self->data)->dim);
}

/* Any dimension that a tensor may have; negative ones count from the end. */
#define LEAST_DIM -TD_MAX_DIMS
#define MOST_DIM (TD_MAX_DIMS - 1)

static const struct td__kind_option softmax_options[] = {
    {"dim", TD__OPTION_INT, offsetof(struct softmax, dim), LEAST_DIM, MOST_DIM}};
enum { SOFTMAX_OPTIONS = sizeof softmax_options / sizeof softmax_options[0] };

static td_status softmax_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, softmax_options, SOFTMAX_OPTIONS);
}

static td_status softmax_load(td_module *self, const td_state *options)
{
    return td__options_load(self, options, softmax_options, SOFTMAX_OPTIONS);
}

static const td_module_ops softmax_ops = {.name = "Softmax",
                                          .data_size = sizeof(struct softmax),
                                          .forward = softmax_forward,
                                          .describe = softmax_describe,
                                          .save_options = softmax_save,
                                          .load_options = softmax_load};
static const td_module_ops log_softmax_ops = {.name = "LogSoftmax",
                                              .data_size = sizeof(struct softmax),
                                              .forward = log_softmax_forward,
                                              .describe = softmax_describe,
                                              .save_options = softmax_save,
                                              .load_options = softmax_load};

static td_module *make_softmax(const td_module_ops *ops, int dim)
{
    td_module *module = td_module_create(ops);
    if (module)
        *(struct softmax *)module->data = (struct softmax){.dim = dim};
    return module;
}

td_module *td_softmax(int dim)
{
    return make_softmax(&softmax_ops, dim);
}

td_module *td_log_softmax(int dim)
{
    return make_softmax(&log_softmax_ops, dim);
}

/* ---- Dropout ------------------------------------------------------------------------------------ */

struct dropout {
    double p;
};

static td_tensor *dropout_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct dropout *dropout = self->data;
    return td__takes(self, count, 1) ? td_f_dropout(inputs[0], dropout->p, self->training) : NULL;
}

static td_tensor *dropout2d_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct dropout *dropout = self->data;
    return td__takes(self, count, 1) ? td_f_dropout2d(inputs[0], dropout->p, self->training) : NULL;
}

static int dropout_describe(const td_module *self, char *text, size_t size)
{
    return snprintf(text, size, "p=%g, inplace=False", ((const struct dropout *)self->data)->p);
}

static const struct td__kind_option dropout_options[] = {
    {"p", TD__OPTION_DOUBLE, offsetof(struct dropout, p), 0, 1}};
enum { DROPOUT_OPTIONS = sizeof dropout_options / sizeof dropout_options[0] };

static td_status dropout_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, dropout_options, DROPOUT_OPTIONS);
}

static td_status dropout_load(td_module *self, const td_state *options)
{
    return td__options_load(self, options, dropout_options, DROPOUT_OPTIONS);
}

static const td_module_ops dropout_ops = {.name = "Dropout",
                                          .data_size = sizeof(struct dropout),
                                          .forward = dropout_forward,
                                          .describe = dropout_describe,
                                          .save_options = dropout_save,
                                          .load_options = dropout_load};
static const td_module_ops dropout2d_ops = {.name = "Dropout2d",
                                            .data_size = sizeof(struct dropout),
                                            .forward = dropout2d_forward,
                                            .describe = dropout_describe,
                                            .save_options = dropout_save,
                                            .load_options = dropout_load};

static td_module *make_dropout(const td_module_ops *ops, const char *call, double p)
{
    if (td__check_probability(call, p))
        return NULL;
    td_module *module = td_module_create(ops);
    if (module)
        *(struct dropout *)module->data = (struct dropout){.p = p};
    return module;
}

td_module *td_dropout(double p)
{
    return make_dropout(&dropout_ops, "td_dropout", p);
}

td_module *td_dropout2d(double p)
{
    return make_dropout(&dropout2d_ops, "td_dropout2d", p);
}

/* ---- Shapes ------------------------------------------------------------------------------------- */

struct flatten {
    int first, last;
};

static td_tensor *flatten_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct flatten *flatten = self->data;
    return td__takes(self, count, 1) ? td_f_flatten(inputs[0], flatten->first, flatten->last)
                                     : NULL;
}

static int flatten_describe(const td_module *self, char *text, size_t size)
{
    const struct flatten *flatten = self->data;
    return snprintf(text, size, "start_dim=%d, end_dim=%d", flatten->first, flatten->last);
}

static const struct td__kind_option flatten_options[] = {
    {"first", TD__OPTION_INT, offsetof(struct flatten, first), LEAST_DIM, MOST_DIM},
    {"last", TD__OPTION_INT, offsetof(struct flatten, last), LEAST_DIM, MOST_DIM}};
enum { FLATTEN_OPTIONS = sizeof flatten_options / sizeof flatten_options[0] };

static td_status flatten_save(const td_module *self, td_state *options)
{
    return td__options_save(self, options, flatten_options, FLATTEN_OPTIONS);
}

static td_status flatten_load(td_module *self, const td_state *options)
{
    return td__options_load(self, options, flatten_options, FLATTEN_OPTIONS);
}

static const td_module_ops flatten_ops = {.name = "Flatten",
                                          .data_size = sizeof(struct flatten),
                                          .forward = flatten_forward,
                                          .describe = flatten_describe,
                                          .save_options = flatten_save,
                                          .load_options = flatten_load};

td_module *td_flatten_with(int first, int last)
{
    td_module *module = td_module_create(&flatten_ops);
    if (module)
        *(struct flatten *)module->data = (struct flatten){.first = first, .last = last};
    return module;
}

td_module *td_flatten(void)
{
    return td_flatten_with(1, -1);
}

static td_tensor *identity_forward(td_module *self, td_tensor *const *inputs, int count)
{
    return td__takes(self, count, 1) ? inputs[0] : NULL;
}

static const td_module_ops identity_ops = {.name = "Identity", .forward = identity_forward};

td_module *td_identity(void)
{
    return td_module_create(&identity_ops);
}

const td_module_ops *const td__activation_kinds[] = {
    &relu_ops,        &silu_ops,    &tanh_ops,      &sigmoid_ops, &gelu_ops,     &softmax_ops,
    &log_softmax_ops, &dropout_ops, &dropout2d_ops, &flatten_ops, &identity_ops, NULL};

/* ---- Checks of layers -------------------------------------------------------------------------- */

bool td__takes(const td_module *module, int count, int most)
{
    if (count <= most)
        return true;
    td_fail(TD_ERR_INVALID, "td_forward: a %s has %d input%s at most, not %d", module->ops->name,
            most, most == 1 ? "" : "s", count);
    return false;
}

td_status td__check_probability(const char *call, double p)
{
    if (p >= 0 && p <= 1)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: the probability is %g; it must be 0 to 1", call, p);
}
