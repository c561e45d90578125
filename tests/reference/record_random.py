#!/usr/bin/env python3
"""Records random numbers of PyTorch for tests/test_random.c and the tests of the samplers.

    tests/reference/record_random.py > tests/reference/random_vectors.h

Each line says how a tensor is filled, and has a checksum of its elements in the order of their
indices, its first elements as hexadecimal bits, and the number that the generator gives next.
Recorded with PyTorch 1.13.1 on a processor with AVX2.
"""

import random
import zlib

import torch

DTYPES = {
    "TD_F32": torch.float32,
    "TD_F64": torch.float64,
    "TD_U8": torch.uint8,
    "TD_I8": torch.int8,
    "TD_I16": torch.int16,
    "TD_I32": torch.int32,
    "TD_I64": torch.int64,
    "TD_BOOL": torch.bool,
    "TD_F16": torch.float16,
    "TD_BF16": torch.bfloat16,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make(shape, layout, dtype):
    """A tensor of zeros; tests/test_random.c makes the same ones."""
    tensor = torch.zeros(shape, dtype=dtype)
    if layout == "TRANSPOSED":
        return tensor.transpose(0, 2)
    if layout == "STEPPED":
        return tensor[:, :, ::2]
    if layout == "MIXED":
        return tensor[:, 1:].transpose(0, 1)
    return tensor


def bits_of(tensor):
    tensor = tensor.contiguous()
    size = tensor.element_size()
    return [v & (1 << 8 * size) - 1 for v in tensor.view(BITS[size]).flatten().tolist()]


def case(kind, dtype, shape, a=0.0, b=0.0, layout="CONTIGUOUS", seed=1234):
    torch.manual_seed(seed)
    tensor = make(shape, layout, DTYPES[dtype])
    if kind == "UNIFORM":
        tensor.uniform_(a, b)
    elif kind == "NORMAL":
        tensor.normal_(a, b)
    elif kind == "BERNOULLI":
        tensor.bernoulli_(a)
    elif kind == "RANDOM":
        tensor.random_()
    elif kind == "RANGE":
        tensor.random_(int(a), int(b))
    elif kind == "RANDPERM":
        tensor = torch.randperm(shape[0], dtype=DTYPES[dtype])
    elif kind == "DROPOUT":
        tensor = torch.nn.functional.dropout(torch.ones(shape), a) != 0
    elif kind == "DROPOUT2D":
        tensor = torch.nn.functional.dropout2d(torch.ones(shape), a)[:, :, 0, 0] != 0
        tensor = tensor.contiguous()
    following = torch.empty((), dtype=torch.int64).random_().item()
    bits = bits_of(tensor)
    size = tensor.element_size()
    checksum = zlib.crc32(b"".join(v.to_bytes(size, "little") for v in bits))
    shape = list(shape) + [1] * (4 - len(shape))
    first = ", ".join(f"0x{v:x}" for v in (bits + [0, 0, 0])[:3])
    print(
        f"    {{{kind}, {dtype}, {{{', '.join(map(str, shape))}}}, {layout}, {seed},"
        f" {a!r}, {b!r}, 0x{checksum:08x}, {{{first}}}, 0x{following:x}}},"
    )


def cases():
    for dtype in "TD_F32", "TD_F64":
        for n in 1, 7, 16, 623, 624, 625, 20000:
            case("UNIFORM", dtype, [n], 0.0, 1.0, seed=n)
            case("UNIFORM", dtype, [n], -0.03571428571428571, 0.0357, seed=n + 1)
        for n in 1, 2, 3, 15, 16, 17, 31, 32, 500, 511, 512, 513, 624, 20001:
            case("NORMAL", dtype, [n], 0.0, 1.0, seed=n)
            case("NORMAL", dtype, [n], 0.1, 0.02, seed=n + 1)
        for layout in "TRANSPOSED", "STEPPED", "MIXED":
            case("UNIFORM", dtype, [5, 6, 7], -1.0, 2.0, layout)
            case("UNIFORM", dtype, [20, 30, 40], -1.0, 2.0, layout)
            case("NORMAL", dtype, [5, 6, 7], -1.0, 2.0, layout)
            case("NORMAL", dtype, [2, 3, 2], -1.0, 2.0, layout)
            case("BERNOULLI", dtype, [5, 6, 7], 0.3, 0.0, layout)
            case("RANGE", dtype, [5, 6, 7], -100, 1000, layout)
        case("UNIFORM", dtype, [1, 0, 3], 0.0, 1.0)
        case("UNIFORM", dtype, [1, 9, 1], 0.0, 1.0, "TRANSPOSED")
        case("UNIFORM", dtype, [100], 3.0, 3.0)
        case("NORMAL", dtype, [100], 3.0, 0.0)
    for dtype in "TD_F16", "TD_BF16":
        case("UNIFORM", dtype, [1000], 0.0, 1.0)
        case("UNIFORM", dtype, [1000], -0.3, 0.7)
    for dtype in DTYPES:
        if dtype != "TD_F16":
            case("BERNOULLI", dtype, [1000], 0.5)
            case("BERNOULLI", dtype, [700], 0.013)
        case("RANDOM", dtype, [1000])
        case("RANGE", dtype, [1000], 0, 2)
        if dtype != "TD_BOOL":
            case("RANGE", dtype, [1000], 3, 100)
    for dtype in "TD_I64", "TD_I32", "TD_I16", "TD_I8", "TD_F64":
        case("RANGE", dtype, [1000], -128, 127)
    case("RANGE", "TD_I64", [1000], 0, 1 << 32)
    case("RANGE", "TD_I64", [1000], -(1 << 40), 1 << 52)
    case("RANGE", "TD_I32", [1000], -(1 << 31), (1 << 31) - 1)
    for dtype in "TD_I64", "TD_I32", "TD_F32", "TD_U8":
        for n in 0, 1, 2, 10, 200:
            case("RANDPERM", dtype, [n])
    case("RANDPERM", "TD_I64", [60000])
    for p in 0.0, 0.1, 0.5, 0.9, 1.0:
        case("DROPOUT", "TD_BOOL", [33, 100], p)
        case("DROPOUT2D", "TD_BOOL", [33, 10, 3, 3], p)


def array(name, kind, values, width=12):
    print(f"\nstatic const {kind} {name}[] = {{")
    for i in range(0, len(values), width):
        print("    " + ", ".join(map(str, values[i : i + width])) + ",")
    print("};")


def states():
    """The state of a generator, fresh, in the middle, and with a normal number that waits."""
    print("\n/* Checksums of torch.get_rng_state(), and the seed that is drawn next. */")
    print("static const struct recorded_state recorded_states[] = {")
    for draws, normals in (0, 0), (1, 0), (623, 0), (624, 0), (1000, 0), (5, 1), (0, 2), (0, 3):
        torch.manual_seed(99)
        torch.empty(draws).uniform_()
        torch.empty(normals).normal_()
        state = bytes(torch.get_rng_state().tolist())
        following = torch.empty((), dtype=torch.int64).random_().item()
        print(f"    {{{draws}, {normals}, 0x{zlib.crc32(state):08x}, 0x{following:x}}},")
    print("};")


def main():
    print("/* Written by record_random.py. */\n/* clang-format off */")
    print("static const struct recorded_case recorded_cases[] = {")
    cases()
    print("};")
    states()
    r = random.Random(1234)
    array("python_words", "uint32_t", [r.getrandbits(32) for _ in range(10)])


main()
