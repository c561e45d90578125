/* Which kernels of the device were called. The wrappers of the library (tensor/wrapped_kernels.c) report each call. */
#include "tdcheck.h"

#include "tensor/fallback.h"

#include <stdio.h>
#include <string.h>

/* All slots of td_kernels, in its order. */
/* clang-format off */
#define SLOTS(X) \
    X(fill) X(copy) X(unary) X(unary_grad) X(binary) X(binary_scalar) X(add_scaled) X(where)       \
    X(clamp) X(reduce) X(arg_reduce) X(matmul) X(linear) X(conv2d) X(conv2d_grad_input)            \
    X(conv2d_grad_weight) X(max_pool2d) X(max_pool2d_grad) X(avg_pool2d) X(avg_pool2d_grad)        \
    X(adaptive_avg_pool2d) X(adaptive_avg_pool2d_grad) X(adaptive_max_pool2d) X(batch_norm)        \
    X(batch_norm_grad) X(layer_norm) X(layer_norm_grad) X(softmax) X(softmax_grad) X(attention)    \
    X(attention_grad) X(index_select) X(index_add) X(gather) X(scatter_add) X(nll_loss)            \
    X(nll_loss_grad) X(cross_entropy_grad) X(pair_loss) X(pair_loss_grad) X(dropout)               \
    X(dropout_grad) X(uniform) X(normal) X(bernoulli) X(random_range) X(sgd) X(adam) X(norm)       \
    X(scale) X(unscale) X(cross_entropy) X(binary_mixed) X(add_layer_norm)                         \
    X(add_layer_norm_grad) X(linear_gelu) X(linear_gelu_grad) X(matmul_f32) X(power_sums)          \
    X(batch_norm_relu) X(batch_norm_relu_grad)
/* clang-format on */

#define NAME(slot) {.name = #slot, .offset = offsetof(td_kernels, slot)},

static struct slot_use {
    const char *name;
    size_t offset;
    atomic_llong ran, missing;
} slots[] = {SLOTS(NAME)};

enum { SLOTS_COUNT = sizeof slots / sizeof slots[0] };

_Static_assert(offsetof(td_kernels, fill) + SLOTS_COUNT * sizeof(void (*)(void)) ==
                   offsetof(td_kernels, reserved),
               "a slot of td_kernels is not in the list");

static void note(const char *slot, td_status status)
{
    for (int i = 0; i < SLOTS_COUNT; i++)
        if (!strcmp(slots[i].name, slot)) {
            atomic_fetch_add(status == TD_ERR_UNSUPPORTED ? &slots[i].missing : &slots[i].ran, 1);
            return;
        }
}

void check_slots_watch(void)
{
    td__watch_kernels(note);
}

int check_slots_print(td_device *device, bool all_rows)
{
    if (device->is_host) {
        printf("kernels: those of the host, which operators call directly; not counted\n");
        return 0;
    }
    int reached = 0, unreached = 0;
    for (int i = 0; i < SLOTS_COUNT; i++)
        reached += slots[i].ran > 0;
    printf("kernels: %d of %d slots have run\n", reached, SLOTS_COUNT);
    for (int i = 0; i < SLOTS_COUNT && all_rows; i++) {
        void (*own)(void);
        memcpy(&own, (char *)&device->kind->kernels + slots[i].offset, sizeof own);
        if (slots[i].ran)
            continue;
        const char *why = !own               ? "the device has none"
                          : slots[i].missing ? "the device does not support what was asked"
                                             : "no operator has called it";
        unreached += own != NULL;
        printf("    %-26s %s\n", slots[i].name, why);
    }
    return unreached;
}
