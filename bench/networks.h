/* Networks that more than one benchmark trains; bench/peers has the same ones for PyTorch. */
#ifndef TD_BENCH_NETWORKS_H
#define TD_BENCH_NETWORKS_H

#include <tandem/tandem.h>

static inline td_module *mlp(void)
{
    return td_sequential(td_flatten(), td_linear(784, 1024), td_relu(), td_linear(1024, 1024),
                         td_relu(), td_linear(1024, 10), NULL);
}

/* The network of PyTorch's tutorials on distributed training. */
static inline td_module *conv(void)
{
    return td_sequential(td_conv2d(1, 10, 5), td_max_pool2d(2), td_relu(), td_conv2d(10, 20, 5),
                         td_dropout2d(0.5), td_max_pool2d(2), td_relu(), td_flatten(),
                         td_linear(320, 50), td_relu(), td_dropout(0.5), td_linear(50, 10), NULL);
}

#endif
