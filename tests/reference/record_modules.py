#!/usr/bin/env python3
"""Records modules and optimizers of PyTorch for test_layers.c, test_optim.c and test_learning_rates.c.

    tests/reference/record_modules.py modules > tests/reference/module_vectors.h
    tests/reference/record_modules.py optim > tests/reference/optim_vectors.h
    tests/reference/record_modules.py schedules > tests/reference/schedule_vectors.h

Modules: the seed is set to 1, the module is made, and each of its parameters and buffers is recorded
by its name, a checksum of its bits and its first elements. Results: input and target are drawn next,
from the same generator. Optimizers: a parameter and, before each step, a gradient are drawn.
Recorded with PyTorch 1.13.1 on a processor with AVX2.
"""

import math
import platform
import sys
import zlib

import torch
from torch import nn


class Net(nn.Module):
    """The network of the seeds."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)


def encoder_layer(**options):
    options = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True, **options}
    return nn.TransformerEncoderLayer(16, 4, **options)


MODULES = {
    "linear": lambda: nn.Linear(7, 5),
    "linear_no_bias": lambda: nn.Linear(40, 3, bias=False),
    "conv2d": lambda: nn.Conv2d(3, 4, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    "conv2d_groups": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "embedding": lambda: nn.Embedding(11, 6),
    "embedding_small": lambda: nn.Embedding(2, 3),
    "embedding_padding": lambda: nn.Embedding(9, 4, padding_idx=-2),
    "batch_norm": lambda: nn.BatchNorm2d(3),
    "layer_norm": lambda: nn.LayerNorm((2, 3)),
    "attention": lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    "attention_no_bias": lambda: nn.MultiheadAttention(8, 2, bias=False, batch_first=True),
    "encoder_layer": lambda: encoder_layer(),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(16)),
    "seeds": Net,
    "toy": lambda: nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)),
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10)),
    "lenet": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.Tanh(), nn.Dropout(0.25), nn.Linear(120, 10), nn.LogSoftmax(1)),
}


def causal(size):
    return torch.full((size, size), -math.inf).triu(1)


def cross(module):
    q, k, v = torch.randn(2, 3, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    return module(q, k, v, need_weights=False)[0]


def alone(module):
    x = torch.randn(2, 5, 16)
    return module(x, x, x, need_weights=False)[0]


def alone_causal(module):
    x = torch.randn(2, 5, 16)
    return module(x, x, x, need_weights=False, attn_mask=causal(5))[0]


# Name: (module, what is done with it).
RESULTS = {
    "attention": (MODULES["attention"], alone),
    "attention_causal": (MODULES["attention"], alone_causal),
    "attention_cross": (MODULES["attention"], cross),
    "attention_dropout": (
        lambda: nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True), alone),
    "attention_sequence_first": (lambda: nn.MultiheadAttention(16, 4), alone),
    "encoder_layer": (MODULES["encoder_layer"], lambda m: m(torch.randn(2, 5, 16))),
    "encoder_layer_norm_first": (
        lambda: encoder_layer(norm_first=True, activation="gelu"),
        lambda m: m(torch.randn(2, 5, 16), causal(5))),
    "encoder_layer_dropout": (
        lambda: encoder_layer(dropout=0.1), lambda m: m(torch.randn(2, 5, 16))),
    "encoder": (MODULES["encoder"], lambda m: m(torch.randn(2, 5, 16), causal(5))),
    "batch_norm": (MODULES["batch_norm"], lambda m: m(torch.randn(4, 3, 2, 2) * 2 + 1)),
    "batch_norm_cumulative": (
        lambda: nn.BatchNorm1d(3, momentum=None, eps=1e-3),
        lambda m: [m(torch.randn(6, 3)) for _ in range(3)][-1]),
    "lenet": (MODULES["lenet"], lambda m: m(torch.randn(3, 1, 28, 28))),
}


def bits(tensor):
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().reshape(-1).view(kind)


def checksum(tensor):
    return zlib.crc32(bits(tensor).numpy().tobytes())


def floats(tensor):
    return ", ".join(f"{float(x)!r}" for x in tensor.detach().reshape(-1))


def write_modules():
    print("static const struct recorded_tensor recorded_tensors[] = {")
    for name, make in MODULES.items():
        torch.manual_seed(1)
        module = make()
        for key, tensor in module.state_dict().items():
            first = [int(x) % (1 << 32) for x in bits(tensor)[:3]] if tensor.dtype == torch.float32 else []
            first = ", ".join(f"{x:#x}" for x in first + [0] * (3 - len(first)))
            print(f'    {{"{name}", "{key}", {tensor.numel()}, {checksum(tensor):#x}, {{{first}}}}},')
        print(f'    {{"{name}", "next", 1, {checksum(torch.rand(1)):#x}, {{0, 0, 0}}}},')
    print("};\n")


def write_results():
    for name, (make, run) in RESULTS.items():
        torch.manual_seed(1)
        module = make()
        y = run(module)
        (y * torch.randn(y.shape)).sum().backward()
        print(f"static const double {name}_result[] = {{{floats(y)}}};")
        norms = [float(p.grad.double().norm()) for p in module.parameters()]
        print(f"static const double {name}_grad_norms[] = {{{', '.join(map(repr, norms))}}};")
    print("\nstatic const struct recorded_result recorded_results[] = {")
    for name in RESULTS:
        print(f'    {{"{name}", {name}_result, {name}_grad_norms,')
        print(f"     sizeof {name}_result / 8, sizeof {name}_grad_norms / 8}},")
    print("};\n")


INITS = {
    "xavier_uniform": lambda t: nn.init.xavier_uniform_(t, 1.5),
    "xavier_normal": lambda t: nn.init.xavier_normal_(t),
    "kaiming_uniform": lambda t: nn.init.kaiming_uniform_(t),
    "kaiming_uniform_out": lambda t: nn.init.kaiming_uniform_(t, 0.2, "fan_out"),
    "kaiming_normal": lambda t: nn.init.kaiming_normal_(t, nonlinearity="relu"),
    "kaiming_normal_tanh": lambda t: nn.init.kaiming_normal_(t, nonlinearity="tanh"),
    "uniform": lambda t: nn.init.uniform_(t, -0.3, 0.7),
    "normal": lambda t: nn.init.normal_(t, 0.5, 0.1),
}


def write_inits():
    print("static const struct recorded_tensor recorded_inits[] = {")
    for name, init in INITS.items():
        torch.manual_seed(1)
        tensor = init(torch.empty(5, 4, 3))
        first = ", ".join(f"{int(x) % (1 << 32):#x}" for x in bits(tensor)[:3])
        print(f'    {{"{name}", "", 60, {checksum(tensor):#x}, {{{first}}}}},')
    print("};\n")
    torch.manual_seed(1)
    tensor = nn.init.trunc_normal_(torch.empty(40), 0.1, 0.5, -0.6, 1.2)
    print(f"static const double recorded_trunc_normal[] = {{{floats(tensor)}}};\n")
    write_trunc_normals()


def write_trunc_normals():
    """erf(), exp() and log() of the C library have a part in these bits."""
    print(f'static const char recorded_libc[] = "{platform.libc_ver()[1]}";')
    print("static const struct recorded_trunc_normal recorded_trunc_normals[] = {")
    for name, dtype in (("F32", torch.float32), ("F64", torch.float64), ("BF16", torch.bfloat16)):
        for count, *numbers in ((7, 0, 1, -2, 2), (1003, 0.1, 0.5, -0.6, 1.2), (5000, 0, 0.02, -4, 4)):
            torch.manual_seed(1)
            tensor = nn.init.trunc_normal_(torch.empty(count, dtype=dtype), *numbers)
            listed = ", ".join(map(repr, numbers))
            print(f"    {{TD_{name}, {count}, {listed}, {checksum(tensor):#x}}},")
    print("};\n")


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.03),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5),
    "sgd_dampening": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd_nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: torch.optim.Adam(p),
    "adam_options": lambda p: torch.optim.Adam(
        p, lr=0.02, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, weight_decay=0.1),
    "adam_no_beta1": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.0, 0.999)),
    "adam_maximize": lambda p: torch.optim.Adam(p, lr=0.02, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw_options": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3, amsgrad=True),
    "adamw_no_decay": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.0),
}


def write_optimizers():
    print("static const struct recorded_path recorded_paths[] = {")
    for dtype, wide in ((torch.float32, "false"), (torch.float64, "true")):
        for name, make in OPTIMIZERS.items():
            torch.manual_seed(1)
            parameter = nn.Parameter(torch.randn(37, dtype=dtype))
            optimizer = make([parameter])
            sums = []
            for _ in range(20):
                parameter.grad = torch.randn(37, dtype=dtype)
                optimizer.step()
                sums.append(f"{checksum(parameter):#x}")
            print(f'    {{"{name}", {wide}, {{{", ".join(sums)}}},')
            print(f"     {{{floats(parameter[:4])}}}}},")
    print("};\n")


SCHEDULES = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.3),
    "multi_step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 4, 20], 0.5),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12, 0.01),
    "long_cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, 1.0, 8),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warmup": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)], [5]),
    "three": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
            torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [4, 15]),
}


# Several schedules of one optimizer, stepped one after another.
MIXES = [[name] for name in SCHEDULES] + [
    ["exponential", "step"],
    ["linear", "long_cosine"],
    ["long_cosine", "multi_step"],
    ["exponential", "lambda"],
    ["three", "exponential"],
    ["step", "warmup"],
    ["step", "exponential", "long_cosine"],
]


def lr_curve(names, by_hand):
    """Learning rates of two groups over 30 steps. By hand, the first gets another one at step 6, and both
    do at step 17."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))]},
              {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.3}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedules = [SCHEDULES[name](optimizer) for name in names]
    curve = []
    for step in range(30):
        if by_hand and step in (6, 17):
            for group in optimizer.param_groups[: 1 if step == 6 else 2]:
                group["lr"] = 0.05 * step
        curve += [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    return curve


def write_schedules():
    print("static const struct recorded_curve recorded_curves[] = {")
    for names in MIXES:
        for by_hand in ("false", "true"):
            listed = ", ".join(f'"{name}"' for name in names)
            rates = ", ".join(map(repr, lr_curve(names, by_hand == "true")))
            print(f"    {{{{{listed}}}, {by_hand}, {{{rates}}}}},")
    print("};\n")


def write_clips():
    print("static const struct recorded_clip recorded_clips[] = {")
    for kind, limit in ((2.0, 1.0), (2.0, 100.0), (math.inf, 0.5), (1.0, 3.0), (3.0, 0.7)):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 30)]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        norm = float(nn.utils.clip_grad_norm_(parameters, limit, norm_type=kind))
        kind = "INFINITY" if math.isinf(kind) else repr(kind)
        print(f"    {{{kind}, {limit}, {norm!r}, {{{floats(parameters[1].grad[:4])}}}}},")
    print("};")


print("/* Written by record_modules.py. */\n/* clang-format off */")
if sys.argv[1:] == ["modules"]:
    write_modules()
    write_results()
    write_inits()
elif sys.argv[1:] == ["schedules"]:
    write_schedules()
else:
    write_optimizers()
    write_clips()
print("/* clang-format on */")
