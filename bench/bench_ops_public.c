/* Rows of public functions: operators, which allocate their results, backward passes, and steps of
 * optimizers. */
#include "bench_ops.h"

#include <tandem/autograd.h>
#include <tandem/optim.h>

enum { MOST_INPUTS = 3 };

typedef td_tensor *operation_fn(td_tensor *const *x);

struct operation {
    const char *what;
    operation_fn *forward;
    td_dtype dtype;                 /* of all inputs */
    int64_t shapes[MOST_INPUTS][4]; /* the first 0 ends a shape */
    bool positive;                  /* the inputs are */
    int constants;                  /* how many of the last inputs do not require grad */
};

/* ---- The operators ---------------------------------------------------------------------------- */

static td_tensor *add(td_tensor *const *x)
{
    return td_add(x[0], x[1]);
}

static td_tensor *mul(td_tensor *const *x)
{
    return td_mul(x[0], x[1]);
}

static td_tensor *power(td_tensor *const *x)
{
    return td_pow(x[0], x[1]);
}

static td_tensor *power_2(td_tensor *const *x)
{
    return td_pow_scalar(x[0], 2);
}

static td_tensor *power_3(td_tensor *const *x)
{
    return td_pow_scalar(x[0], 3);
}

static td_tensor *power_25(td_tensor *const *x)
{
    return td_pow_scalar(x[0], 2.5);
}

static td_tensor *exponential(td_tensor *const *x)
{
    return td_exp(x[0]);
}

static td_tensor *hyperbolic(td_tensor *const *x)
{
    return td_f_tanh(x[0]);
}

static td_tensor *relu(td_tensor *const *x)
{
    return td_f_relu(x[0]);
}

static td_tensor *gelu(td_tensor *const *x)
{
    return td_f_gelu(x[0]);
}

static td_tensor *to_bf16(td_tensor *const *x)
{
    return td_to_dtype(x[0], TD_BF16);
}

static td_tensor *transposed(td_tensor *const *x)
{
    return td_contiguous(td_transpose(x[0], 0, 1));
}

static td_tensor *sum(td_tensor *const *x)
{
    return td_sum(x[0]);
}

static td_tensor *sum_rows(td_tensor *const *x)
{
    return td_sum_dims(x[0], TD_DIMS(1), false);
}

static td_tensor *sum_columns(td_tensor *const *x)
{
    return td_sum_dims(x[0], TD_DIMS(0), false);
}

static td_tensor *greatest(td_tensor *const *x)
{
    return td_max(x[0]);
}

static td_tensor *softmax(td_tensor *const *x)
{
    return td_f_softmax(x[0], -1);
}

static td_tensor *log_softmax(td_tensor *const *x)
{
    return td_f_log_softmax(x[0], -1);
}

static td_tensor *layer_norm(td_tensor *const *x)
{
    return td_f_layer_norm(x[0], &(int64_t){td_tensor_size(x[0], 1)}, 1, x[1], x[2], 1e-5);
}

static td_tensor *batch_norm(td_tensor *const *x)
{
    return td_batch_norm(x[0], NULL, NULL, x[1], x[2], true, 0.1, 1e-5);
}

static td_tensor *mse(td_tensor *const *x)
{
    return td_mse_loss(x[0], x[1]);
}

static td_tensor *product(td_tensor *const *x)
{
    return td_matmul(x[0], x[1]);
}

#define MATRIX                                                                                     \
    {                                                                                              \
        1024, 1024                                                                                 \
    }
#define PICTURES                                                                                   \
    {                                                                                              \
        16, 64, 56, 56                                                                             \
    }

static const struct operation operations[] = {
    {"add", add, TD_F32, .shapes = {MATRIX, MATRIX}},
    {"add_row", add, TD_F32, .shapes = {MATRIX, {1024}}},
    {"add_column", add, TD_F32, .shapes = {MATRIX, {1024, 1}}},
    {"add_outer", add, TD_F32, .shapes = {{1024, 1}, {1, 1024}}},
    {"add_channels", add, TD_F32, .shapes = {PICTURES, {64, 1, 1}}},
    {"add_small", add, TD_F32, .shapes = {{1024}, {1024}}},
    {"add_bf16", add, TD_BF16, .shapes = {MATRIX, MATRIX}},
    {"mul", mul, TD_F32, .shapes = {MATRIX, MATRIX}},
    {"pow", power, TD_F32, .shapes = {MATRIX, MATRIX}, .positive = true},
    {"pow_2", power_2, TD_F32, .shapes = {MATRIX}},
    {"pow_3", power_3, TD_F32, .shapes = {MATRIX}},
    {"pow_2.5", power_25, TD_F32, .shapes = {MATRIX}, .positive = true},
    {"exp", exponential, TD_F32, .shapes = {MATRIX}},
    {"tanh", hyperbolic, TD_F32, .shapes = {MATRIX}},
    {"relu", relu, TD_F32, .shapes = {MATRIX}},
    {"gelu", gelu, TD_F32, .shapes = {MATRIX}},
    {"to_bf16", to_bf16, TD_F32, .shapes = {MATRIX}},
    {"transpose", transposed, TD_F32, .shapes = {MATRIX}},
    {"sum", sum, TD_F32, .shapes = {MATRIX}},
    {"sum_rows", sum_rows, TD_F32, .shapes = {MATRIX}},
    {"sum_columns", sum_columns, TD_F32, .shapes = {MATRIX}},
    {"max", greatest, TD_F32, .shapes = {MATRIX}},
    {"softmax", softmax, TD_F32, .shapes = {MATRIX}},
    {"log_softmax", log_softmax, TD_F32, .shapes = {MATRIX}},
    {"layer_norm", layer_norm, TD_F32, .shapes = {MATRIX, {1024}, {1024}}},
    {"batch_norm", batch_norm, TD_F32, .shapes = {PICTURES, {64}, {64}}},
    {"mse_loss", mse, TD_F32, .shapes = {MATRIX, MATRIX}, .constants = 1},
    {"matmul_bf16", product, TD_BF16, .shapes = {{512, 512}, {512, 512}}},
};

/* ---- A row ------------------------------------------------------------------------------------ */

struct pass {
    const struct operation *of;
    int count;
    td_tensor *x[MOST_INPUTS], *y, *grad_y;
};

static void call_forward(const struct ops_row *row)
{
    const struct pass *pass = row->arg;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        bench_made(pass->of->forward(pass->x));
    }
}

static void call_backward(const struct ops_row *row)
{
    const struct pass *pass = row->arg;
    td_tensor *results[MOST_INPUTS];
    {
        TD_SCOPE;
        bench_check(td_gradients(&pass->y, &pass->grad_y, 1, pass->x,
                                 pass->count - pass->of->constants, results,
                                 &(td_backward_options){.retain_graph = true}));
    }
}

static td_tensor *input_of(const struct operation *of, const int64_t shape[4])
{
    int ndim = 0;
    while (ndim < 4 && shape[ndim])
        ndim++;
    td_tensor *x = bench_filled(shape, ndim);
    if (of->positive)
        x = td_add_scalar(x, 1.125);
    return bench_made(td_to_dtype(x, of->dtype));
}

static void bench_operation(const struct operation *of)
{
    {
        TD_SCOPE;
        struct pass pass = {.of = of};
        for (; pass.count < MOST_INPUTS && of->shapes[pass.count][0]; pass.count++)
            pass.x[pass.count] = td_clone(input_of(of, of->shapes[pass.count]));
        for (int i = 0; i < pass.count - of->constants; i++)
            bench_check(td_tensor_set_requires_grad(pass.x[i], true));
        ops_row(&(struct ops_row){of->what, "forward", .call = call_forward, .arg = &pass});
        pass.y = bench_made(of->forward(pass.x));
        {
            TD_NO_GRAD;
            pass.grad_y = bench_made(td_ones_like(pass.y));
        }
        ops_row(&(struct ops_row){of->what, "backward", .call = call_backward, .arg = &pass});
    }
}

/* ---- Optimizers: the parameters of a small transformer's layer, four times ------------------------ */

enum { PARAMETERS = 16 };

static void call_step(const struct ops_row *row)
{
    bench_check(td_optimizer_step((td_optimizer *)row->arg));
}

static td_optimizer *optimizer_of(const char *what, td_tensor *const *parameters)
{
    if (!strcmp(what, "sgd"))
        return td_sgd_of(parameters, PARAMETERS,
                         &(td_sgd_options){.lr = 1e-4, .momentum = 0.9, .weight_decay = 1e-4});
    return (!strcmp(what, "adam") ? td_adam_of : td_adamw_of)(parameters, PARAMETERS,
                                                              &(td_adam_options){.lr = 1e-6});
}

static void bench_optimizer(const char *what)
{
    {
        TD_SCOPE;
        td_tensor *parameters[PARAMETERS];
        for (int i = 0; i < PARAMETERS; i++) {
            parameters[i] = i % 2 ? bench_filled(SHAPE(512)) : bench_filled(SHAPE(512, 512));
            bench_check(td_tensor_set_requires_grad(parameters[i], true));
            td_tensor *grad = i % 2 ? bench_filled(SHAPE(512)) : bench_filled(SHAPE(512, 512));
            bench_check(td_tensor_set_grad(parameters[i], grad));
        }
        td_optimizer *optimizer = optimizer_of(what, parameters);
        if (!optimizer)
            bench_die("%s", td_last_error());
        ops_row(&(struct ops_row){what, "step", .call = call_step, .arg = optimizer});
        td_optimizer_destroy(optimizer);
    }
}

void bench_public(void)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (bench_is_wanted(operations[i].what))
            bench_operation(&operations[i]);
    static const char *const optimizers[] = {"sgd", "adam", "adamw"};
    for (size_t i = 0; i < 3; i++)
        if (bench_is_wanted(optimizers[i]))
            bench_optimizer(optimizers[i]);
}
