#!/usr/bin/env python3
"""Matrix products, convolutions and pooling of PyTorch, as JSON lines: what bench_ops measures.

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
    while not samples or perf_counter() < end:
        samples.append(time_calls(call, calls) / calls)
    row = {"peer": "torch", "what": what, "pass": which}
    row["median_us"] = round(statistics.median(samples), 2)
    row["least_us"] = round(min(samples), 2)
    print(json.dumps(row), flush=True)


def linear(n, inputs, outputs):
    x, w, b = torch.rand(n, inputs), torch.rand(outputs, inputs), torch.rand(outputs)
    y, grad_w, grad_x = torch.rand(n, outputs), torch.rand(outputs, inputs), torch.rand(n, inputs)
    yield "forward", lambda: F.linear(x, w, b)
    yield "grad_input", lambda: torch.mm(y, w, out=grad_x)
    yield "grad_weight", lambda: grad_w.addmm_(y.t(), x)


def batch(count, m, k, n):
    a, b, c = torch.rand(count, m, k), torch.rand(count, k, n), torch.rand(count, m, n)
    yield "forward", lambda: torch.bmm(a, b, out=c)
    yield "grad_a", lambda: torch.bmm(c, b.transpose(1, 2), out=a)
    yield "grad_b", lambda: torch.bmm(a.transpose(1, 2), c, out=b)


def conv(shape, outputs, kernel, stride, padding):
    x, w, b = torch.rand(shape), torch.rand(outputs, shape[1], kernel, kernel), torch.rand(outputs)
    y = F.conv2d(x, w, b, stride, padding)

    def gradient(*mask):
        return torch.ops.aten.convolution_backward(
            y, x, w, [outputs], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask
        )

    yield "forward", lambda: F.conv2d(x, w, b, stride, padding)
    yield "grad_input", lambda: gradient(True, False, False)
    yield "grad_weight", lambda: gradient(False, True, True)


def pool(n, channels, size):
    x = torch.rand(n, channels, size, size)
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    yield "forward", lambda: F.max_pool2d(x, 2, return_indices=True)
    yield "grad_input", lambda: backward(y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


LINEAR = [(64, 784, 1024), (64, 1024, 1024), (64, 1024, 10), (64, 320, 50), (64, 50, 10)]
LINEAR += [(1, 1024, 1024), (1024, 256, 768), (1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256)]
ROWS = {f"linear_{n}_{i}_{o}": (linear, n, i, o) for n, i, o in LINEAR}
ROWS |= {
    "batch_32_128_64_128": (batch, 32, 128, 64, 128),
    "square_512": (batch, 1, 512, 512, 512),
    "conv_1_10_k5": (conv, (64, 1, 28, 28), 10, 5, 1, 0),
    "conv_10_20_k5": (conv, (64, 10, 12, 12), 20, 5, 1, 0),
    "conv_64_64_k3": (conv, (8, 64, 32, 32), 64, 3, 1, 1),
    "conv_64_128_k3_s2": (conv, (8, 64, 32, 32), 128, 3, 2, 1),
    "conv_64_256_k1": (conv, (8, 64, 32, 32), 256, 1, 1, 0),
    "max_pool_24": (pool, 64, 10, 24),
    "max_pool_8": (pool, 64, 20, 8),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="", help="only rows whose name contains it")
    parser.add_argument("--ms", type=int, default=200, help="for each row, 200 by default")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        for what, (make, *sizes) in ROWS.items():
            if arguments.what in what:
                for which, call in make(*sizes):
                    measure(what, which, call, arguments.ms / 1000)


if __name__ == "__main__":
    main()
