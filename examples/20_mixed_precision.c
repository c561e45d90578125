/* Mixed precision: the products of a network run in bf16 or f16, its parameters stay f32.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./20_mixed_precision
 *     bf16: loss 10.4… to 0.01…, 0 steps skipped, the scale is 1
 *     f16: loss 10.4… to 0.01…, 8 steps skipped, the scale is 65536
 *
 * f16 has few exponents: a scaler multiplies the loss, so that small gradients do not become 0, and skips steps whose
 * gradients became infinite. It begins with a scale that is too large here, on purpose. bf16 has the exponents of f32, and
 * needs no scaler. All ranks skip the same steps, since td_ddp() gives them the same gradients. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { INPUTS = 16, OUTPUTS = 4, BATCH = 32, STEPS = 150 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "20_mixed_precision: rank %d: %s\n", td_get_rank(NULL), td_last_error());
    exit(1);
}

/* The loss for random inputs, whose first elements, times 3, are the targets. */
static td_tensor *forward(td_module *model, td_dtype dtype)
{
    td_tensor *x = td_randn(TD_SHAPE(BATCH, INPUTS), TD_F32, NULL);
    td_tensor *target = td_mul_scalar(td_narrow(x, 1, 0, OUTPUTS), 3);
    TD_AUTOCAST("cpu", &(td_autocast_options){.dtype = dtype});
    td_tensor *y = td_forward(model, x); /* bf16 or f16 */
    return td_mse_loss(y, target);       /* in f32 */
}

static void train(td_dtype dtype)
{
    td_manual_seed((uint64_t)td_get_rank(NULL));
    td_module *model = td_ddp(
        td_sequential(td_linear(INPUTS, 64), td_gelu(), td_linear(64, OUTPUTS), NULL), NULL);
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.02});
    td_grad_scaler *scaler = td_grad_scaler_create(
        &(td_grad_scaler_options){.init_scale = 16777216, .disabled = dtype == TD_BF16});
    check(adam && scaler);

    double first = 0, last = 0;
    int skipped = 0;
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        bool stepped;
        td_tensor *loss = forward(model, dtype);
        td_optimizer_zero_grad(adam);
        check(!td_backward(td_grad_scaler_scale(scaler, loss)));
        check(!td_grad_scaler_unscale(scaler, adam)); /* only for the next line */
        check(!td_clip_grad_norm_(model, 10, NULL, NULL));
        check(!td_grad_scaler_step(scaler, adam, &stepped));
        check(!td_grad_scaler_update(scaler, 0));
        last = td_item(loss);
        first = step == 0 ? last : first;
        skipped += !stepped;
    }
    if (td_get_rank(NULL) == 0)
        printf("%s: loss %.4f to %.4f, %d steps skipped, the scale is %g\n", td_dtype_name(dtype),
               first, last, skipped, td_grad_scaler_get_scale(scaler));
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
}

int main(void)
{
    check(!td_init_process_group(NULL));
    train(TD_BF16);
    train(TD_F16);
    check(!td_destroy_process_group());
    return 0;
}
