#!/usr/bin/env python3
"""Records ranges of PyTorch for tests/test_ranges.c.

    tests/reference/record_ranges.py > tests/reference/range_vectors.h

A case is a dtype, two ends (or a start and a step), how many numbers come of it, and a checksum of their
bits. Recorded on a processor with AVX2, with one thread.
"""

import random
import zlib

import torch

DTYPES = {
    "TD_F32": torch.float32,
    "TD_F64": torch.float64,
    "TD_F16": torch.float16,
    "TD_BF16": torch.bfloat16,
    "TD_I8": torch.int8,
    "TD_U8": torch.uint8,
    "TD_I16": torch.int16,
    "TD_I32": torch.int32,
    "TD_I64": torch.int64,
}
COUNTS = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 100, 127, 128, 129, 1000]


def checksum(tensor):
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.view(torch.int16)
    return f"0x{zlib.crc32(tensor.numpy().tobytes()):08x}"


def ends_of(dtype):
    if dtype.is_floating_point:
        yield 0, 1
        yield -1, 1
        yield 3, -2.5
        yield random.uniform(-10, 10), random.uniform(-10, 10)
        yield random.uniform(0, 1), random.uniform(-1000, 1000)
        return
    low, high = (0, 255) if dtype == torch.uint8 else (-128, 127)
    if dtype not in (torch.uint8, torch.int8):
        low, high = -30000, 30000
    for _ in range(3):
        yield random.randint(low, high), random.randint(low, high)
    yield low + 0.75, high - 0.25


def steps_of(dtype):
    if dtype.is_floating_point:
        yield 0, 0.1
        yield 0.1, 0.3
        yield 3, -0.7
        yield random.uniform(-10, 10), random.uniform(0, 1)
        return
    yield 0, 1
    if dtype != torch.uint8:
        yield 60, -1
    if dtype not in (torch.int8, torch.uint8):
        yield random.randint(-100, 100), 7
        yield random.randint(-100, 100), -5


def print_cases(name, cases):
    print(f"static const struct recorded_range {name}[] = {{")
    for dtype, a, b, tensor in cases:
        print(f"    {{{dtype}, {a!r}, {b!r}, {len(tensor)}, {checksum(tensor)}}},")
    print("};\n")


def main():
    random.seed(11)
    torch.set_num_threads(1)
    linspaces, aranges = [], []
    for name, dtype in DTYPES.items():
        for count in COUNTS:
            for a, b in ends_of(dtype):
                linspaces.append((name, a, b, torch.linspace(a, b, count, dtype=dtype)))
            for a, step in steps_of(dtype):
                if dtype in (torch.int8, torch.uint8) and count > 127:
                    continue
                end = a + step * (count - 0.5)
                if not dtype.is_floating_point:
                    end = a + step * count
                aranges.append((name, a, step, torch.arange(a, end, step, dtype=dtype)))
    print(f"/* Recorded by record_ranges.py with PyTorch {torch.__version__}. */")
    print("/* clang-format off */")
    print_cases("recorded_linspaces", linspaces)
    print_cases("recorded_aranges", aranges)


main()
