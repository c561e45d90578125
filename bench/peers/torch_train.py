#!/usr/bin/env python3
"""Trains a network with PyTorch, as bench_train does with Tandem; prints a line of JSON.

    torch_train.py NETWORK [--seconds S] [--started NS]

NETWORK is mlp, conv or transformer. --started is the time of CLOCK_MONOTONIC at which this process
was started, for the time to its first step.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from torch_networks import Conv, Mlp

WARM_UP = 5
VOCABULARY, WIDTH, HEADS, FEED_FORWARD, LAYERS, SEQUENCE = 256, 256, 4, 1024, 4, 128


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, FEED_FORWARD, dropout=0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE)
        self.range = torch.arange(SEQUENCE)

    def forward(self, x):
        x = self.tokens(x) + self.positions(self.range)
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x).flatten(0, 1)


def make(name):
    """The network, its input, its target, and the size of a batch."""
    if name == "transformer":
        text = torch.randint(0, VOCABULARY, (8, SEQUENCE + 1))
        return Transformer(), text[:, :-1].contiguous(), text[:, 1:].flatten(), 8
    network = Mlp() if name == "mlp" else Conv()
    return network, torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)), 64


def peak_mib():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=["mlp", "conv", "transformer"])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    network, x, target, batch = make(arguments.network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.5)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    ready = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    step()
    first = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for _ in range(WARM_UP):
        step()
    times, end = [], time.monotonic() + arguments.seconds
    busy = time.process_time()
    while not times or time.monotonic() < end:
        begin = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - begin)
    busy = time.process_time() - busy
    row = {
        "peer": "torch",
        "what": arguments.network,
        "batch": batch,
        "steps": len(times),
        "steps_per_s": 1 / statistics.median(times),
        "cpu_ms": busy * 1e3 / len(times),
        "peak_mib": peak_mib(),
        "loss": loss,
    }
    if arguments.started:
        row["ready_ms"] = (ready - arguments.started) / 1e6
        row["first_step_ms"] = (first - arguments.started) / 1e6
    print(json.dumps(row))


main()
