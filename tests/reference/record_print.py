#!/usr/bin/env python3
"""Records how PyTorch 1.13 prints tensors, for tests/test_print.c.

    tests/reference/record_print.py > tests/reference/print_texts.h

Element i of a case is values[i % len(values)] + i * step. dtypes get Tandem's names.
"""

import math

import torch

NAMES = {
    "F32": (torch.float32, "f32"),
    "F64": (torch.float64, "f64"),
    "F16": (torch.float16, "f16"),
    "BF16": (torch.bfloat16, "bf16"),
    "I8": (torch.int8, "i8"),
    "U8": (torch.uint8, "u8"),
    "I16": (torch.int16, "i16"),
    "I32": (torch.int32, "i32"),
    "I64": (torch.int64, "i64"),
    "BOOL": (torch.bool, "bool"),
    "COMPLEX64": (torch.complex64, "complex64"),
    "COMPLEX128": (torch.complex128, "complex128"),
}
NAN, INF = math.nan, math.inf
MIXED = [0.1234567, -2.5, 3.75, 10.0, -0.0625]

CASES = [
    ("F32", [], [3.5], 0),
    ("F32", [], [-0.0], 0),
    ("F32", [], [1e-5], 0),
    ("F32", [], [NAN], 0),
    ("F64", [], [2.0], 0),
    ("I64", [], [-7], 0),
    ("BOOL", [], [1], 0),
    ("F32", [0], [0], 0),
    ("F32", [2, 0], [0], 0),
    ("F64", [0], [0], 0),
    ("F64", [3, 0, 2], [0], 0),
    ("I64", [0], [0], 0),
    ("BOOL", [0, 1], [0], 0),
    ("COMPLEX64", [0], [0], 0),
    ("F32", [3], [0], 0),
    ("F32", [4], [1, 2, -3, 0], 0),
    ("F32", [3], [NAN, 1, INF], 0),
    ("F32", [3], [NAN, INF, -INF], 0),
    ("F32", [3], [1.5, NAN, -INF], 0),
    ("F32", [2], [1e10, 1], 0),
    ("F32", [2], [1000, 1], 0),
    ("F32", [2], [1001, 1], 0),
    ("F32", [2], [1001.5, 1], 0),
    ("F32", [3], [123456789, 2e8, 0], 0),
    ("F32", [2], [1e8, 99999999], 0),
    ("F32", [2], [0.0001, 0.001], 0),
    ("F32", [2], [0.00009, 0.0001], 0),
    ("F32", [3], [1e-40, NAN, 0], 0),
    ("F64", [3], [1e300, -1e-300, INF], 0),
    ("F64", [2], [0.5, 2.5], 0),
    ("F32", [2, 3], MIXED, 0),
    ("F32", [3, 2, 2], MIXED, 0),
    ("F32", [2, 1, 2, 3], MIXED, 0),
    ("F64", [2, 3], MIXED, 0),
    ("F16", [2, 3], MIXED, 0),
    ("BF16", [2, 3], MIXED, 0),
    ("F16", [2], [65504, 1], 0),
    ("F32", [9], MIXED, 0),
    ("F32", [40], MIXED, 0),
    ("F32", [2, 40], [1e-7, 3.25, -8], 0),
    ("F32", [8], [99999.5, -100000.25], 0),
    ("I32", [2, 5], [1, -200, 30], 0),
    ("I8", [3], [-128, 127, 0], 0),
    ("U8", [3], [255, 0, 7], 0),
    ("I16", [30], [12345, -1], 0),
    ("I64", [60], [0], 1),
    ("BOOL", [2, 3], [1, 0], 0),
    ("BOOL", [20], [1, 0, 0], 0),
    ("COMPLEX64", [2], [1.5], 1),
    ("COMPLEX64", [12], [-2, 0.25, NAN], 0),
    ("COMPLEX128", [2, 2], [1e-6, 3], 0),
    ("I64", [1000], [0], 1),
    ("I64", [1001], [0], 1),
    ("F32", [1001], MIXED, 0),
    ("F64", [7, 200], MIXED, 0.5),
    ("F32", [200, 7], MIXED, 0),
    ("F32", [200, 6], MIXED, 0),
    ("F32", [8, 9, 20], MIXED, 0.25),
    ("F32", [3, 2, 200], [1e-9, 5], 0),
    ("I32", [7, 1, 8, 30], [3], 1),
    ("F32", [1, 1, 1, 1001], MIXED, 0),
    ("BOOL", [1100], [1, 0, 0], 0),
    ("COMPLEX64", [1001], [1, 2], 0.5),
    ("F32", [7, 7, 7, 7], [0.5, 1e-3], 0),
    ("F64", [10], [1234567.125], 0),
    ("I32", [10], [12345], 0),
    ("I32", [9], [123456], 0),
    ("F16", [9], [1.5], 0),
]


def number(value):
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(float(value))


def make(dtype, shape, values, step):
    count = math.prod(shape)
    numbers = [values[i % len(values)] + i * step for i in range(count)]
    if dtype.is_complex:
        numbers = [complex(x, -x / 2) for x in numbers]
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


def text_of(tensor, name):
    """The text, with Tandem's name of the dtype before lines are broken."""
    add_suffixes = torch._tensor_str._add_suffixes

    def add(text, suffixes, indent, force_newline):
        renamed = [suffix.replace(str(tensor.dtype), name) for suffix in suffixes]
        return add_suffixes(text, renamed, indent, force_newline)

    torch._tensor_str._add_suffixes = add
    try:
        return repr(tensor)
    finally:
        torch._tensor_str._add_suffixes = add_suffixes


def literal(text):
    lines = text.replace("\\", "\\\\").replace('"', '\\"').split("\n")
    return "\n     ".join(
        '"%s%s"' % (line, "\\n" if i + 1 < len(lines) else "") for i, line in enumerate(lines)
    )


print("/* How PyTorch %s prints tensors; written by record_print.py. */" % torch.__version__)
print("/* clang-format off */")
print("static const struct print_case print_cases[] = {")
for name, shape, values, step in CASES:
    dtype, ours = NAMES[name]
    tensor = make(dtype, shape, values, step)
    print(
        "    {TD_%s, %d, {%s}, %d, {%s}, %s,\n     %s},"
        % (
            name,
            len(shape),
            ", ".join(map(str, shape)) or "0",
            len(values),
            ", ".join(map(number, values)),
            number(step),
            literal(text_of(tensor, ours)),
        )
    )
print("};")
