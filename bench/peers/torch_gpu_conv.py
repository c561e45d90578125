#!/usr/bin/env python3
"""Trains convolutional networks with PyTorch, as bench_gpu_conv does with Tandem.

usage: torch_gpu_conv.py conv|resnet18 [--device cuda] [--bf16] [--batch N] [--side N] [--steps N] [--log N] [--compile]
                         [--cudnn default|deterministic]

PyTorch's cuDNN measures the algorithms (torch.backends.cudnn.benchmark), but for --cudnn: «default» does not, and
«deterministic» takes only those with the same bits in each run, as Tandem does.
With --compile the network is compiled, and pictures and weights are channels_last, which cuDNN prefers.
"""

import argparse
import resource
import time

import torch
from torch import nn
from torch.nn import functional as F

from torch_networks import Conv


def conv(inputs, outputs, kernel, stride):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.layers = nn.Sequential(
            conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU(),
            conv(outputs, outputs, 3, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet18():
    blocks, inputs = [], 64
    for outputs in 64, 128, 256, 512:
        blocks += [BasicBlock(inputs, outputs, 1 if outputs == 64 else 2), BasicBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(
        conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    )  # fmt: skip


def peak_mib(device):
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(arguments):
    small = arguments.network == "conv"
    network = (Conv() if small else resnet18()).to(arguments.device)
    channels, side, classes = (1, 28, 10) if small else (3, arguments.side, 1000)
    x = torch.randn(arguments.batch, channels, side, side, device=arguments.device)
    y = torch.randint(0, classes, (arguments.batch,), device=arguments.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    run = network
    if arguments.compile:
        network.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
        run = torch.compile(network)
    kind, since, line_time = arguments.device.split(":")[0], 0, time.monotonic()
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=arguments.bf16):
            loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        since += 1
        if step == 1 or step % arguments.log == 0 or step == arguments.steps:
            value = loss.item()  # waits for the device
            if kind == "cuda":
                torch.cuda.synchronize()
            seconds = (time.monotonic() - line_time) / since
            print(
                f"step {step:5}/{arguments.steps}  loss {value:.6f}  "
                f"{arguments.batch / seconds:8.0f} pictures/s  {1e3 * seconds:7.2f} ms a step",
                flush=True,
            )
            since, line_time = 0, time.monotonic()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("network", choices=["conv", "resnet18"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cudnn", choices=["default", "deterministic"])
    for name, value in ("batch", 64), ("side", 224), ("steps", 100), ("log", 10):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = arguments.cudnn != "default"
    torch.backends.cudnn.deterministic = arguments.cudnn == "deterministic"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    train(arguments)
    print(f"  peak memory          {peak_mib(arguments.device):10.1f} MiB")


if __name__ == "__main__":
    main()
