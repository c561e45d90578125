#!/usr/bin/env python3
"""Operators and optimizers of PyTorch, as JSON lines: what bench_ops measures.

Each is called in samples of about a millisecond; a row has the median and the least time of a call. On
one thread it is the processor's time that counts, which other programs disturb less.
What PyTorch allocates for its results is part of the call, as it is in a program that uses it, except
where a result is given.
"""

import argparse
import json
import statistics
from time import perf_counter, thread_time

import torch
import torch.nn.functional as F


def time_calls(call, calls):
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) * 1e6


def measure(what, which, call, seconds):
    call()
    once = time_calls(call, 2) / 2
    calls = 1 if once > 1000 else int(1000 / once) + 1
    samples, end = [], perf_counter() + seconds
    while len(samples) < 3 or perf_counter() < end:
        samples.append(time_calls(call, calls) / calls)
    row = {"peer": "torch", "what": what, "pass": which, "threads": torch.get_num_threads()}
    row["median_us"] = round(statistics.median(samples), 2)
    row["least_us"] = round(min(samples), 2)
    print(json.dumps(row), flush=True)


def linear(n, inputs, outputs):
    x, w, b = torch.rand(n, inputs), torch.rand(outputs, inputs), torch.rand(outputs)
    y, grad_w, grad_x = torch.rand(n, outputs), torch.rand(outputs, inputs), torch.rand(n, inputs)
    yield "forward", lambda: F.linear(x, w, b)
    yield "grad_input", lambda: torch.mm(y, w, out=grad_x)
    yield "grad_weight", lambda: grad_w.addmm_(y.t(), x)


def batch(count, m, k, n, dtype=torch.float32):
    a, b, c = (torch.rand(count, *of).to(dtype) for of in ((m, k), (k, n), (m, n)))
    yield "forward", lambda: torch.bmm(a, b, out=c)
    yield "grad_a", lambda: torch.bmm(c, b.transpose(1, 2), out=a)
    yield "grad_b", lambda: torch.bmm(a.transpose(1, 2), c, out=b)


def conv(shape, outputs, kernel, stride, padding, dilation=1, groups=1):
    x, w, b = (torch.rand(of) for of in (shape, (outputs, shape[1] // groups, kernel, kernel), outputs))
    y = F.conv2d(x, w, b, stride, padding, dilation, groups)

    def gradient(*mask):
        return torch.ops.aten.convolution_backward(
            y, x, w, [outputs], [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups, mask
        )

    yield "forward", lambda: F.conv2d(x, w, b, stride, padding, dilation, groups)
    yield "grad_input", lambda: gradient(True, False, False)
    yield "grad_weight", lambda: gradient(False, True, True)


def depthwise(channels, kernel, stride, size):
    return conv((8, channels, size, size), channels, kernel, stride, kernel // 2, groups=channels)


def pool(n, channels, size):
    x = torch.rand(n, channels, size, size)
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    yield "forward", lambda: F.max_pool2d(x, 2, return_indices=True)
    yield "grad_input", lambda: backward(y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


def operation(call, *shapes, dtype=torch.float32, positive=False, constants=0):
    """What a program calls, and the gradients of all inputs but the last `constants`."""
    low, high = (0.125, 2.125) if positive else (-1, 1)
    inputs = [torch.empty(shape).uniform_(low, high).to(dtype) for shape in shapes]
    wanted = inputs[: len(inputs) - constants]
    for tensor in wanted:
        tensor.requires_grad_()
    yield "forward", lambda: call(*inputs)
    with torch.enable_grad():
        y = call(*inputs)
    grad_y = torch.ones_like(y)
    yield "backward", lambda: torch.autograd.grad(y, wanted, grad_y, retain_graph=True)


def optimizer(make):
    parameters = []
    for shape in [(512, 512), (512,)] * 8:
        parameter = torch.rand(shape).requires_grad_()
        parameter.grad = torch.rand(shape)
        parameters.append(parameter)
    chosen = make(parameters)
    yield "step", chosen.step


LINEAR = [(64, 784, 1024), (64, 1024, 1024), (64, 1024, 10), (64, 320, 50), (64, 50, 10)]
LINEAR += [(1, 1024, 1024), (1024, 256, 768), (1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256)]
ROWS = {f"linear_{n}_{i}_{o}": (linear, n, i, o) for n, i, o in LINEAR}
ROWS |= {
    "batch_32_128_64_128": (batch, 32, 128, 64, 128),
    "batch_bf16": (batch, 32, 128, 64, 128, {"dtype": torch.bfloat16}),
    "square_512": (batch, 1, 512, 512, 512),
    "conv_1_10_k5": (conv, (64, 1, 28, 28), 10, 5, 1, 0),
    "conv_10_20_k5": (conv, (64, 10, 12, 12), 20, 5, 1, 0),
    "conv_64_64_k3": (conv, (8, 64, 32, 32), 64, 3, 1, 1),
    "conv_64_64_k3_d2": (conv, (8, 64, 32, 32), 64, 3, 1, 2, 2),
    "conv_64_128_k3_s2": (conv, (8, 64, 32, 32), 128, 3, 2, 1),
    "conv_64_256_k1": (conv, (8, 64, 32, 32), 256, 1, 1, 0),
    "depthwise_64_k3": (depthwise, 64, 3, 1, 32),
    "depthwise_64_k3_s2": (depthwise, 64, 3, 2, 32),
    "depthwise_64_k5": (depthwise, 64, 5, 1, 32),
    "depthwise_96_k5": (depthwise, 96, 5, 1, 14),
    "max_pool_24": (pool, 64, 10, 24),
    "max_pool_56": (pool, 16, 64, 56),
    "max_pool_8": (pool, 64, 20, 8),
}


MATRIX, PICTURES = (1024, 1024), (16, 64, 56, 56)
BF16 = {"dtype": torch.bfloat16}
OPERATIONS = {
    "add": (torch.add, MATRIX, MATRIX),
    "add_row": (torch.add, MATRIX, (1024,)),
    "add_column": (torch.add, MATRIX, (1024, 1)),
    "add_outer": (torch.add, (1024, 1), (1, 1024)),
    "add_channels": (torch.add, PICTURES, (64, 1, 1)),
    "add_small": (torch.add, (1024,), (1024,)),
    "add_bf16": (torch.add, MATRIX, MATRIX, BF16),
    "mul": (torch.mul, MATRIX, MATRIX),
    "pow": (torch.pow, MATRIX, MATRIX, {"positive": True}),
    "pow_2": (lambda x: torch.pow(x, 2), MATRIX),
    "pow_3": (lambda x: torch.pow(x, 3), MATRIX),
    "pow_2.5": (lambda x: torch.pow(x, 2.5), MATRIX, {"positive": True}),
    "exp": (torch.exp, MATRIX),
    "tanh": (torch.tanh, MATRIX),
    "relu": (torch.relu, MATRIX),
    "gelu": (F.gelu, MATRIX),
    "to_bf16": (lambda x: x.to(torch.bfloat16), MATRIX),
    "transpose": (lambda x: x.t().contiguous(), MATRIX),
    "sum": (torch.sum, MATRIX),
    "sum_rows": (lambda x: x.sum(1), MATRIX),
    "sum_columns": (lambda x: x.sum(0), MATRIX),
    "max": (torch.max, MATRIX),
    "softmax": (lambda x: F.softmax(x, -1), MATRIX),
    "log_softmax": (lambda x: F.log_softmax(x, -1), MATRIX),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (1024,), w, b), MATRIX, (1024,), (1024,)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), PICTURES, (64,), (64,)),
    "mse_loss": (F.mse_loss, MATRIX, MATRIX, {"constants": 1}),
    "matmul_bf16": (torch.matmul, (512, 512), (512, 512), BF16),
}
ROWS |= {what: (operation, *given) for what, given in OPERATIONS.items()}
ROWS |= {
    "sgd": (optimizer, lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=1e-4)),
    "adam": (optimizer, lambda p: torch.optim.Adam(p, lr=1e-6)),
    "adamw": (optimizer, lambda p: torch.optim.AdamW(p, lr=1e-6)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="", help="only rows whose name contains it")
    parser.add_argument("--ms", type=int, default=100, help="for each row, 100 by default")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        for what, (make, *given) in ROWS.items():
            options = given.pop() if isinstance(given[-1], dict) else {}
            if arguments.what in what:
                for which, call in make(*given, **options):
                    measure(what, which, call, arguments.ms / 1000)


if __name__ == "__main__":
    main()
