#!/usr/bin/env python3
"""Records torch.autocast("cpu"): the dtypes of results and gradients, and the losses of a training.

    /usr/bin/python3 tests/reference/record_amp.py > tests/reference/amp_vectors.h

Needs PyTorch 1.13. Each operator is called with f32, with bf16, and with the first operand bf16 and the others f32.
test_autocast.c makes the same calls.
"""

import sys

import torch
import torch.nn.functional as F

CPU_DTYPES = {torch.float32: "TD_F32", torch.bfloat16: "TD_BF16", torch.float64: "TD_F64",
              torch.bool: "TD_BOOL", torch.int64: "TD_I64"}

target = torch.tensor([1, 2, 3, 0])


def operands():
    x = torch.linspace(0.1, 2, 24).reshape(4, 6)
    y = torch.linspace(1.5, 0.2, 24).reshape(4, 6)
    image = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    kernel = torch.linspace(-0.5, 0.5, 4 * 3 * 3 * 3).reshape(4, 3, 3, 3)
    heads = torch.linspace(-1, 1, 2 * 5 * 4).reshape(1, 2, 5, 4)
    return {"x": x, "y": y, "image": image, "kernel": kernel, "heads": heads}


# name: (operands, call)
OPERATORS = {
    "matmul": ("xy", lambda x, y: torch.matmul(x, y.t())),
    "bmm": ("xy", lambda x, y: torch.bmm(x.reshape(2, 2, 6), y.reshape(2, 6, 2))),
    "linear": ("xy", lambda x, y: F.linear(x, y)),
    "conv2d": ("ik", lambda i, k: F.conv2d(i, k)),
    "attention": ("h", lambda h: F._scaled_dot_product_attention(h, h, h)[0]),
    "exp": ("x", torch.exp),
    "ln": ("x", torch.log),
    "log1p": ("x", torch.log1p),
    "rsqrt": ("x", torch.rsqrt),
    "reciprocal": ("x", torch.reciprocal),
    "rdiv_scalar": ("x", lambda x: 2.0 / x),
    "square": ("x", torch.square),
    "pow": ("xy", torch.pow),
    "pow_scalar": ("x", lambda x: torch.pow(x, 3)),
    "sum": ("x", torch.sum),
    "sum_dims": ("x", lambda x: torch.sum(x, 1)),
    "mean": ("x", torch.mean),
    "prod": ("x", torch.prod),
    "norm": ("x", torch.norm),
    "softmax": ("x", lambda x: F.softmax(x, 1)),
    "log_softmax": ("x", lambda x: F.log_softmax(x, 1)),
    "layer_norm": ("x", lambda x: F.layer_norm(x, (6,))),
    "batch_norm": ("x", lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6), torch.ones(6),
                                               torch.zeros(6), True)),
    "nll_loss": ("x", lambda x: F.nll_loss(x, target)),
    "cross_entropy": ("x", lambda x: F.cross_entropy(x, target)),
    "cross_entropy_smoothed": ("x", lambda x: F.cross_entropy(x, target, label_smoothing=0.1,
                                                              weight=torch.ones(6))),
    "mse_loss": ("xy", F.mse_loss),
    "l1_loss": ("xy", F.l1_loss),
    "bce_with_logits": ("xy", F.binary_cross_entropy_with_logits),
    "add": ("xy", torch.add),
    "sub": ("xy", torch.sub),
    "mul": ("xy", torch.mul),
    "div": ("xy", torch.div),
    "add_scaled": ("xy", lambda x, y: torch.add(x, y, alpha=0.5)),
    "maximum": ("xy", torch.maximum),
    "minimum": ("xy", torch.minimum),
    "mul_by_number": ("xy", lambda x, y: x * y[0, 0]),
    "eq": ("xy", torch.eq),
    "ge": ("xy", torch.ge),
    "where": ("xy", lambda x, y: torch.where(torch.ones(4, 6).bool(), x, y)),
    "cat": ("xy", lambda x, y: torch.cat([x, y])),
    "stack": ("xy", lambda x, y: torch.stack([x, y])),
    "relu": ("x", F.relu),
    "gelu": ("x", F.gelu),
    "tanh": ("x", torch.tanh),
    "max_pool2d": ("i", lambda i: F.max_pool2d(i, 2)),
    "avg_pool2d": ("i", lambda i: F.avg_pool2d(i, 2)),
    "index_select": ("x", lambda x: torch.index_select(x, 0, target)),
    "add_": ("xy", lambda x, y: x.clone().add_(y)),
    "mul_": ("xy", lambda x, y: x.clone().mul_(y)),
}

# Which dtypes the first operand and the others have.
INPUTS = [("F32", torch.float32, torch.float32), ("BF16", torch.bfloat16, torch.bfloat16),
          ("mixed", torch.bfloat16, torch.float32), ("F64", torch.float64, torch.float64)]


def record_operators():
    letters = {"x": "x", "y": "y", "i": "image", "k": "kernel", "h": "heads"}
    print("static const struct recorded_cast recorded_casts[] = {")
    for name, (which, call) in OPERATORS.items():
        row = []
        for _, first, rest in INPUTS:
            tensors = operands()
            leaves = [tensors[letters[letter]].to(first if i == 0 else rest).requires_grad_()
                      for i, letter in enumerate(which)]
            try:
                with torch.autocast("cpu"):
                    result = call(*leaves)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                row.append("{NO_RESULT, 0, 0}")
                continue
            total = 0
            if result.requires_grad:
                slopes = torch.linspace(0, 40, result.numel()).cos().reshape(result.shape)
                result.backward(slopes.to(result.dtype))
                assert all(leaf.grad is None or leaf.grad.dtype == leaf.dtype for leaf in leaves)
                total = sum(leaf.grad.double().abs().sum().item() for leaf in leaves
                            if leaf.grad is not None)
            sums = result.double().abs().sum().item()
            row.append(f"{{{CPU_DTYPES[result.dtype]}, {sums!r}, {total!r}}}")
        print(f'    {{"{name}",\n     {{' + ",\n      ".join(row) + "}},")
    print("};\n")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc1 = torch.nn.Linear(4 * 6 * 6, 16)
        self.fc2 = torch.nn.Linear(16, 16)
        self.fc3 = torch.nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        x = self.fc1(torch.flatten(x, 1))
        x = x + F.softmax(self.fc2(F.gelu(x)).float(), 1)
        return self.fc3(x)


def record_training():
    torch.manual_seed(11)
    net = Net()
    x, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 4
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = F.cross_entropy(net(x), labels)
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        optimizer.step()
        losses.append(repr(loss.item()))
    print("static const double recorded_losses[] = {\n    " + ",\n    ".join(losses) + ",\n};")


print("/* Recorded by record_amp.py, from PyTorch " + torch.__version__.split("a")[0] + ". */")
print("/* clang-format off */")
record_operators()
record_training()
