#!/usr/bin/env python3
"""Writes the files of torch.save() that tests/test_torch_file.c reads, to tests/reference/torch."""

import collections
import os

import torch

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch")


def tensor_of(dtype, *shape):
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) - 2).reshape(shape).to(dtype)


def save(name, value, **options):
    torch.save(value, os.path.join(FOLDER, name), **options)


def main():
    os.makedirs(FOLDER, exist_ok=True)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(4, 3))
    with torch.no_grad():
        for i, value in enumerate(net.state_dict().values()):
            value.copy_(torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape) + 100 * i)
    save("module.pt", net.state_dict())
    dtypes = "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128".split()
    save("dtypes.pt", {name: tensor_of(getattr(torch, name), 2, 3) for name in dtypes})
    base = tensor_of(torch.float32, 4, 6)
    save(
        "views.pt",
        {
            "base": base,
            "row": base[1],
            "columns": base[:, 1:4],
            "transposed": base.t(),
            "every_second": base[::2, ::3],
            "expanded": torch.tensor([7.0]).expand(3, 2),
            "scalar": torch.tensor(5.0),
            "empty": torch.empty(0, 3),
        },
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net[2](torch.ones(1, 4)).sum().backward()
    sgd.step()
    save(
        "checkpoint.pt",
        {
            "epoch": 3,
            "best": 0.25,
            "done": False,
            "name": "a net",
            "nothing": None,
            "large": 1 << 40,
            "negative": -70000,
            "dtype": torch.float16,
            "device": torch.device("cuda", 1),
            "size": torch.Size([2, 3]),
            "betas": (0.9, 0.999),
            "losses": [1.5, 0.5],
            "nested": collections.OrderedDict(a={"b": {5: torch.ones(2)}}),
            "parameter": torch.nn.Parameter(torch.full((2,), 3.0)),
            "optimizer": sgd.state_dict(),
        },
    )
    save("protocol4.pt", {"x": tensor_of(torch.float32, 3), "text": "ä" * 3}, pickle_protocol=4)
    save("tensor.pt", tensor_of(torch.int64, 3))
    save("legacy.pt", {"x": torch.ones(1)}, _use_new_zipfile_serialization=False)
    save("whole_module.pt", torch.nn.ReLU())
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), os.path.join(FOLDER, "script.pt"))


main()
