/* Autocast: scopes, the cache of casts, and that backward passes, checkpoints and threads see the right state. */
#include "runner.h"

#include "autograd/graph.h"

#include <tandem/tandem.h>

#include <math.h>
#include <pthread.h>
#include <string.h>

/* The default of the host, which accelerators, with f16 as theirs, are given. */
static const td_autocast_options *to_bf16(void)
{
    static const td_autocast_options options = {.dtype = TD_BF16};
    return td_test_on_host() ? NULL : &options;
}

static td_tensor *leaf(double value)
{
    td_tensor *x = td_full(TD_SHAPE(4, 4), value, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

/* ---- Scopes ----------------------------------------------------------------------------------------- */

TEST(scopes_nest)
{
    TD_SCOPE;
    td_tensor *x = td_ones(TD_SHAPE(2, 2), TD_F32, NULL);
    CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_F32);
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_BF16);
        CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_BF16);
        {
            TD_AUTOCAST(td_device_kind(NULL),
                        &(td_autocast_options){.dtype = TD_F16, .no_cache = true});
            CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_F16);
        }
        {
            TD_AUTOCAST(td_device_kind(NULL), &(td_autocast_options){.disabled = true});
            CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_F32);
            CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_F32);
            {
                TD_AUTOCAST(td_device_kind(NULL), to_bf16());
                CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_BF16);
            }
            CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_F32);
        }
        CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_BF16);
    }
    CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_F32);
    CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_F32);
    CHECK_EQ(td_tensor_dtype(td_matmul(td_tensor_to(x, td_device_get("cpu:1")),
                                       td_tensor_to(x, td_device_get("cpu:1")))),
             TD_F32);
}

TEST(a_numbered_device_is_of_the_kind, .host_only = "it is about numbered devices of the host")
{
    TD_SCOPE;
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    td_tensor *x = td_tensor_to(td_ones(TD_SHAPE(2, 2), TD_F32, NULL), td_device_get("cpu:1"));
    CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_BF16);
}

TEST(a_wrong_scope_changes_nothing)
{
    td_autocast scope = td_autocast_begin("toaster", NULL);
    CHECK_EQ(scope.status, TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "toaster");
    td_autocast_end(&scope);
    scope = td_autocast_begin(NULL, NULL);
    CHECK_EQ(scope.status, TD_ERR_INVALID);
    scope = td_autocast_begin("cpu", &(td_autocast_options){.dtype = TD_F64});
    CHECK_EQ(scope.status, TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "f16 or bf16");
    scope = td_autocast_begin("cpu", &(td_autocast_options){.reserved = {&scope}});
    CHECK_EQ(scope.status, TD_ERR_INVALID);
    CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_F32);
    scope = td_autocast_begin(td_device_kind(NULL), to_bf16());
    CHECK_OK(scope.status);
    td_autocast_end(&scope);
    td_autocast_end(&scope);
    td_autocast_end(NULL);
    CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_F32);
}

TEST(errors_are_those_of_the_operator)
{
    TD_SCOPE;
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    td_tensor *wide = td_ones(TD_SHAPE(2, 2), TD_F64, NULL),
              *x = td_ones(TD_SHAPE(2, 2), TD_F32, NULL);
    CHECK(!td_matmul(wide, x)); /* f64 is not cast */
    CHECK_CONTAINS(td_last_error(), "td_matmul: the operands are f64 and bf16");
    CHECK(!td_matmul(x, NULL));
    CHECK(!td_f_linear(NULL, x, NULL));
    CHECK(!td_cat(NULL, 2, 0));
    CHECK(!td_add(td_ones(TD_SHAPE(2, 2), TD_I64, NULL), x)); /* integers are not promoted */
    CHECK_EQ(td_tensor_dtype(td_matmul(x, x)), TD_BF16);
}

/* Results belong to the caller without a scope: nothing may be left (the sanitizer looks). */
TEST(without_a_scope_the_caller_owns_results)
{
    td_tensor *x = leaf(0.5), *half = td_to_dtype(x, TD_BF16),
              *w = td_ones(TD_SHAPE(4), TD_F32, NULL);
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    td_tensor *results[] = {
        td_matmul(x, x),
        td_add(half, x),
        td_f_layer_norm(half, TD_SHAPE(4), w, NULL, 1e-5),
        td_mse_loss(half, x),
        td_cat(TD_TENSORS(half, x), 0),
    };
    for (int i = 0; i < 5; i++) {
        CHECK(results[i]);
        td_tensor_release(results[i]);
    }
    td_tensor_release(w);
    td_tensor_release(half);
    td_tensor_release(x);
}

/* ---- Norms ------------------------------------------------------------------------------------------ */

/* bf16 with parameters of f32: computed in f32, and rounded once. */
TEST(norms_of_halves_use_parameters_of_f32,
     .host_only = "the rules are those of torch.autocast(\"cpu\")")
{
    TD_SCOPE;
    td_manual_seed(3);
    td_tensor *x = td_randn(TD_SHAPE(8, 6), TD_F32, NULL), *half = td_to_dtype(x, TD_BF16);
    td_tensor *w = td_randn(TD_SHAPE(6), TD_F32, NULL), *b = td_randn(TD_SHAPE(6), TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    td_tensor *expected = td_f_layer_norm(td_to_dtype(half, TD_F32), TD_SHAPE(6), w, b, 1e-5);
    td_tensor *y;
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        y = td_f_layer_norm(half, TD_SHAPE(6), w, b, 1e-5);
        CHECK_EQ(td_tensor_dtype(td_f_layer_norm(x, TD_SHAPE(6), w, b, 1e-5)), TD_F32);
    }
    CHECK_EQ(td_tensor_dtype(y), TD_BF16);
    CHECK(td_equal(y, td_to_dtype(expected, TD_BF16)));
    CHECK_OK(td_backward(td_sum(td_to_dtype(y, TD_F32))));
    CHECK_EQ(td_tensor_dtype(td_tensor_grad(w)), TD_F32);
}

TEST(running_statistics_stay_f32)
{
    TD_SCOPE;
    td_manual_seed(4);
    td_module *plain = td_batch_norm2d(3), *cast = td_batch_norm2d(3);
    td_module *sync = td_sync_batch_norm(3, NULL, NULL);
    td_tensor *half = td_to_dtype(td_randn(TD_SHAPE(4, 3, 5, 5), TD_F32, NULL), TD_BF16);
    td_tensor *expected = td_to_dtype(td_forward(plain, td_to_dtype(half, TD_F32)), TD_BF16), *y,
              *z;
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        y = td_forward(cast, half);
        z = td_forward(sync, half);
    }
    CHECK(y && z);
    CHECK(td_equal(y, expected));
    CHECK_EQ(td_tensor_dtype(z), TD_BF16);
    CHECK(td_allclose(td_to_dtype(z, TD_F32), td_to_dtype(expected, TD_F32), 0.01, 0.01));
    for (int i = 0; i < 2; i++) {
        CHECK(td_equal(td_buffer(cast, i), td_buffer(plain, i)));
        CHECK_EQ(td_tensor_dtype(td_buffer(sync, i)), TD_F32);
        CHECK(td_allclose(td_buffer(sync, i), td_buffer(plain, i), 1e-4, 1e-5));
    }
    CHECK_OK(td_backward(td_sum(td_to_dtype(z, TD_F32))));
    CHECK_EQ(td_tensor_dtype(td_tensor_grad(td_param(sync, 0))), TD_F32);
    td_module_destroy(plain);
    td_module_destroy(cast);
    td_module_destroy(sync);
}

/* ---- Layers ----------------------------------------------------------------------------------------- */

/* Encoder layers: projections and attention in bf16, residuals and norms as they come. `dropout` takes the attention
 * that is composed of other operators. */
static void check_encoder(bool norm_first, double dropout)
{
    TD_SCOPE;
    td_manual_seed(12);
    td_module *encoder = td_transformer_encoder(
        td_transformer_encoder_layer_with(8, 2,
                                          &(td_transformer_options){.feedforward = 16,
                                                                    .dropout = dropout,
                                                                    .norm_first = norm_first,
                                                                    .batch_first = true}),
        2, td_layer_norm(8));
    CHECK(encoder);
    td_tensor *x = td_randn(TD_SHAPE(3, 5, 8), TD_F32, NULL),
              *mask = td_zeros(TD_SHAPE(5, 5), TD_F32, NULL);
    mask = td_add(mask, td_triu(td_full(TD_SHAPE(5, 5), -10, TD_F32, NULL), 1));
    td_tensor *expected = td_forward_with(encoder, TD_TENSORS(x, mask)), *y;
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        y = td_forward_with(encoder, TD_TENSORS(x, mask));
    }
    CHECK(y && expected);
    if (signbit(dropout))
        CHECK(td_allclose(td_to_dtype(y, TD_F32), expected, 0.05, 0.05));
    CHECK_OK(td_backward(td_sum(td_square(td_to_dtype(y, TD_F32)))));
    td_state *parameters = td_module_parameters(encoder);
    for (int i = 0; i < td_state_count(parameters); i++)
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(td_state_tensor(parameters, i))), TD_F32);
    td_state_destroy(parameters);
    td_module_destroy(encoder);
}

TEST(encoder_layers_run_under_autocast)
{
    check_encoder(false, TD_ZERO);
    check_encoder(true, TD_ZERO);
    check_encoder(true, 0.2);
}

/* ---- The cache -------------------------------------------------------------------------------------- */

/* The node of the cast of a product's second operand. */
static const struct td_node *cast_of(td_tensor *product)
{
    return product->node->inputs[1].node;
}

TEST(a_parameter_is_cast_once)
{
    td_tensor *w = leaf(0.5);
    {
        TD_SCOPE;
        td_tensor *x = td_ones(TD_SHAPE(2, 4), TD_F32, NULL);
        {
            TD_AUTOCAST(td_device_kind(NULL), to_bf16());
            td_tensor *a = td_matmul(x, w), *b;
            {
                TD_AUTOCAST(td_device_kind(NULL),
                            to_bf16()); /* the cache is that of the outermost scope */
                b = td_matmul(x, w);
            }
            td_tensor *c = td_matmul(x, w);
            CHECK(cast_of(a) == cast_of(b) && cast_of(a) == cast_of(c));
            {
                TD_AUTOCAST(td_device_kind(NULL), &(td_autocast_options){.no_cache = true});
                CHECK(cast_of(td_matmul(x, w)) != cast_of(a));
            }
            {
                TD_AUTOCAST(td_device_kind(NULL), &(td_autocast_options){.dtype = TD_F16});
                CHECK_EQ(td_tensor_dtype(td_matmul(x, w)), TD_F16);
            }
            CHECK_OK(td_backward(td_sum(td_to_dtype(td_add(a, c), TD_F32))));
            CHECK(td_equal(td_tensor_grad(w), td_full(TD_SHAPE(4, 4), 4, TD_F32, NULL)));
            CHECK_OK(td_backward(td_sum(td_to_dtype(b, TD_F32)))); /* through the same cast again */
            CHECK(td_equal(td_tensor_grad(w), td_full(TD_SHAPE(4, 4), 6, TD_F32, NULL)));
        }
    }
    CHECK_EQ(atomic_load(&w->owners), 1); /* the cache is empty */
    td_tensor_release(w);
}

/* The parameters of a linear layer are inputs as they were given: their gradients are not rounded on the way. */
TEST(gradients_of_a_linear_layer_go_to_its_parameters)
{
    TD_SCOPE;
    td_tensor *w = leaf(0.5), *b = td_zeros(TD_SHAPE(4), TD_F32, NULL);
    td_tensor *x = td_full(TD_SHAPE(3, 4), 1.0078125, TD_F32, NULL); /* the next after 1 in bf16 */
    td_tensor_set_requires_grad(b, true);
    for (int pass = 1; pass <= 2; pass++) {
        td_tensor *y;
        {
            TD_AUTOCAST(td_device_kind(NULL), to_bf16());
            y = td_f_linear(x, w, b);
        }
        CHECK_EQ(td_tensor_dtype(y), TD_BF16);
        CHECK(y->node->inputs[1].node == w->node && y->node->inputs[2].node == b->node);
        CHECK_OK(td_backward(td_sum(td_to_dtype(y, TD_F32))));
        td_tensor *grad = td_tensor_grad(w);
        CHECK_EQ(td_tensor_dtype(grad), TD_F32);
        CHECK(td_allclose(grad, td_full(TD_SHAPE(4, 4), pass * 3.0234375, TD_F32, NULL), 4e-3, 0));
        CHECK(td_equal(td_tensor_grad(b), td_full(TD_SHAPE(4), 3 * pass, TD_F32, NULL)));
    }
}

/* A weight of another dtype than f32 is an input as it was cast. */
TEST(gradients_of_halves_have_their_dtype)
{
    TD_SCOPE;
    td_tensor *w = td_full(TD_SHAPE(2, 4), 0.5, TD_F16, NULL);
    td_tensor *x = td_ones(TD_SHAPE(3, 4), TD_F32, NULL), *y;
    td_tensor_set_requires_grad(w, true);
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        y = td_f_linear(x, w, NULL);
    }
    CHECK_OK(td_backward(td_sum(td_to_dtype(y, TD_F32))));
    CHECK(td_equal(td_tensor_grad(w), td_full(TD_SHAPE(2, 4), 3, TD_F16, NULL)));
}

TEST(a_changed_parameter_is_cast_again)
{
    TD_SCOPE;
    td_tensor *w = leaf(1), *x = td_ones(TD_SHAPE(1, 4), TD_F32, NULL);
    td_optimizer *sgd = td_sgd_of(&w, 1, &(td_sgd_options){.lr = 1});
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    CHECK(td_item(td_select(td_matmul(x, w), 1, 0)) == 4);
    {
        TD_NO_GRAD;
        CHECK_OK(td_mul_scalar_(w, 2));
    }
    td_tensor *y = td_matmul(x, w);
    CHECK(td_item(td_select(y, 1, 0)) == 8);
    CHECK_OK(td_backward(td_sum(td_to_dtype(y, TD_F32)))); /* a gradient of 1 */
    CHECK_OK(td_optimizer_step(sgd));
    CHECK(td_item(td_select(td_matmul(x, w), 1, 0)) == 4);
    td_optimizer_destroy(sgd);
}

TEST(a_cast_without_recording_is_not_used_with_it)
{
    TD_SCOPE;
    td_tensor *w = leaf(1), *x = td_ones(TD_SHAPE(1, 4), TD_F32, NULL);
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    {
        TD_NO_GRAD;
        CHECK(!td_tensor_requires_grad(td_matmul(x, w)));
    }
    td_tensor *y = td_matmul(x, w);
    CHECK(td_tensor_requires_grad(y));
    CHECK_OK(td_backward(td_sum(td_to_dtype(y, TD_F32))));
    CHECK(td_tensor_grad(w));
}

TEST(many_parameters_are_cached)
{
    enum { MANY = 300 };
    static td_tensor *w[MANY];
    TD_SCOPE;
    td_tensor *x = td_ones(TD_SHAPE(1, 4), TD_F32, NULL);
    for (int i = 0; i < MANY; i++)
        w[i] = leaf(i);
    {
        TD_AUTOCAST(td_device_kind(NULL), to_bf16());
        const struct td_node *casts[MANY];
        for (int i = 0; i < MANY; i++)
            casts[i] = cast_of(td_matmul(x, w[i]));
        for (int i = 0; i < MANY; i++) {
            td_tensor *y = td_matmul(x, w[i]);
            CHECK(cast_of(y) == casts[i]);
            CHECK(fabs(td_item(td_select(y, 1, 3)) - 4 * i) <= 4); /* four bf16 numbers */
        }
    }
    for (int i = 0; i < MANY; i++)
        CHECK_EQ(atomic_load(&w[i]->owners), 1);
}

/* ---- Backward --------------------------------------------------------------------------------------- */

static td_dtype seen_in_backward, seen_in_hook, seen_in_segment;

static td_status look_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    (void)node;
    seen_in_backward = td_autocast_dtype(td_device_kind(NULL));
    grad_x[0] = grad_y[0];
    return TD_OK;
}

static td_tensor *look(td_tensor *x)
{
    static const td_function function = {.name = "look", .backward = look_backward};
    td_tensor *y;
    {
        TD_NO_GRAD;
        y = td_clone(x);
    }
    return td_record(&function, y, &(td_node_spec){.inputs = {x}, .input_count = 1});
}

static td_status look_at_leaf(td_tensor *tensor, void *arg)
{
    (void)tensor, (void)arg;
    seen_in_hook = td_autocast_dtype(td_device_kind(NULL));
    return TD_OK;
}

TEST(backward_runs_without_autocast)
{
    TD_SCOPE;
    td_tensor *w = leaf(1);
    CHECK_OK(td_tensor_add_accumulated_hook(w, look_at_leaf, NULL, NULL));
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    seen_in_backward = seen_in_hook = TD_BF16;
    CHECK_OK(td_backward(td_sum(look(w))));
    CHECK_EQ(seen_in_backward, TD_F32);
    CHECK_EQ(seen_in_hook, TD_F32);
    CHECK_EQ(td_autocast_dtype(td_device_kind(NULL)), TD_BF16);
}

static td_tensor *segment(td_tensor *const *inputs, int count, void *arg)
{
    CHECK_EQ(count, 1);
    seen_in_segment = td_autocast_dtype(td_device_kind(NULL));
    td_tensor *y = td_f_relu(td_matmul(inputs[0], arg));
    return td_matmul(td_to_dtype(y, TD_F32), arg);
}

/* The gradient of w, from a segment with or without a checkpoint, and backward outside of the scope. */
static td_tensor *grad_of_segment(bool checkpointed, bool cast)
{
    td_manual_seed(9);
    td_tensor *w = td_randn(TD_SHAPE(4, 4), TD_F32, NULL),
              *x = td_randn(TD_SHAPE(3, 4), TD_F32, NULL), *y;
    CHECK_OK(td_tensor_set_requires_grad(w, true));
    {
        TD_AUTOCAST(td_device_kind(NULL), &(td_autocast_options){.disabled = !cast});
        y = checkpointed ? td_checkpoint(segment, w, &x, 1) : segment(&x, 1, w);
        CHECK_EQ(td_tensor_dtype(y), cast ? TD_BF16 : TD_F32);
    }
    td_tensor *loss = td_sum(td_to_dtype(y, TD_F32));
    {
        TD_AUTOCAST(td_device_kind(NULL),
                    &(td_autocast_options){.disabled = cast}); /* the other way round */
        CHECK_OK(td_backward(loss));
    }
    CHECK_EQ(seen_in_segment, cast ? TD_BF16 : TD_F32);
    return td_tensor_grad(w);
}

TEST(a_checkpointed_segment_runs_again_as_it_did,
     .host_only = "it expects the default dtype of the host")
{
    TD_SCOPE;
    td_tensor *cast = grad_of_segment(false, true), *again = grad_of_segment(true, true);
    CHECK(td_allclose(cast, again, 0.02, 0.02)); /* summed in bf16 without a checkpoint */
    td_tensor *plain = grad_of_segment(false, false), *twice = grad_of_segment(true, false);
    CHECK(td_equal(plain, twice));
    CHECK(!td_equal(plain, cast));
}

/* ---- Threads ---------------------------------------------------------------------------------------- */

static void *look_from_thread(void *arg)
{
    *(td_dtype *)arg = td_autocast_dtype(td_device_kind(NULL));
    return NULL;
}

TEST(autocast_belongs_to_the_thread)
{
    TD_AUTOCAST(td_device_kind(NULL), to_bf16());
    td_dtype seen = TD_BF16;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, look_from_thread, &seen), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(seen, TD_F32);
}

TEST(replicas_inherit_autocast, .host_only = "it is about numbered devices of the host")
{
    td_manual_seed(5);
    td_module *net = td_sequential(td_linear(4, 6), td_tanh(), td_linear(6, 2), NULL);
    td_device *devices[] = {td_device_get("cpu:0"), td_device_get("cpu:1"), td_device_get("cpu:2")};
    td_module *parallel = td_data_parallel(
        net, &(td_data_parallel_options){.device_ids = devices, .device_count = 3});
    CHECK(parallel);
    for (int round = 0; round < 3; round++) {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(9, 4), TD_F32, NULL), *y, *expected;
        {
            TD_AUTOCAST(td_device_kind(NULL), to_bf16());
            y = td_forward(parallel, x);
            expected = td_forward(net, x);
        }
        CHECK(y && expected);
        CHECK_EQ(td_tensor_dtype(y), TD_BF16);
        CHECK(td_allclose(td_to_dtype(td_tensor_to(y, td_device_get("cpu")), TD_F32),
                          td_to_dtype(expected, TD_F32), 0.01, 0.01));
        CHECK_OK(td_backward(td_sum(td_to_dtype(y, TD_F32))));
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(td_param(td_child(net, 0), 0))), TD_F32);
        CHECK_EQ(td_tensor_dtype(td_forward(parallel, x)), TD_F32);
    }
    td_module_destroy(parallel);
}

/* ---- DDP -------------------------------------------------------------------------------------------- */

RANKS(ddp_under_autocast_averages_f32, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    td_manual_seed(6);
    td_module *ddp = td_ddp(td_sequential(td_linear(4, 6), td_relu(), td_linear(6, 2), NULL), NULL);
    CHECK(ddp);
    td_optimizer *sgd = td_sgd(ddp, &(td_sgd_options){.lr = 0.1});
    td_manual_seed(20 + (uint64_t)td_get_rank(NULL));
    td_tensor *x = td_randn(TD_SHAPE(8, 4), TD_F32, NULL);
    double first = 0, last = 0;
    for (int step = 0; step < 20; step++) {
        TD_SCOPE;
        td_tensor *loss;
        CHECK_OK(td_optimizer_zero_grad(sgd));
        {
            TD_AUTOCAST(td_device_kind(NULL), to_bf16());
            td_tensor *y = td_forward(ddp, x);
            CHECK_EQ(td_tensor_dtype(y), TD_BF16);
            loss = td_mse_loss(y, td_narrow(x, 1, 0, 2));
        }
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_optimizer_step(sgd));
        last = td_item(loss);
        first = step == 0 ? last : first;
    }
    CHECK(last < first);
    td_tensor_release(x);
    td_state *parameters = td_module_parameters(ddp);
    for (int i = 0; i < td_state_count(parameters); i++) {
        TD_SCOPE;
        td_tensor *mine = td_detach(td_state_tensor(parameters, i)), *of_0 = td_clone(mine);
        CHECK_EQ(td_tensor_dtype(td_tensor_grad(td_state_tensor(parameters, i))), TD_F32);
        CHECK_OK(td_broadcast(of_0, 0, NULL, NULL));
        CHECK(td_equal(mine, of_0));
    }
    td_state_destroy(parameters);
    td_optimizer_destroy(sgd);
    td_module_destroy(ddp);
    CHECK_OK(td_destroy_process_group());
}
