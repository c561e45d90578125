#!/usr/bin/env python3
"""Trains a network with PyTorch's DistributedDataParallel over Gloo, and without, as bench_ddp does with
Tandem; prints a line of JSON.

    torch_ddp.py NETWORK [--ranks N] [--seconds S]

NETWORK is mlp or conv. All ranks train at the same time, one thread each, with communication and
without it in turns of ten steps; a turn lasts from when all ranks begin until all have ended, and the time
of a step is a tenth of the median turn.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from torch_networks import Conv, Mlp

WARM_UP, TURN = 10, 10


NETWORKS = {"mlp": Mlp, "conv": Conv}


class Training:
    def __init__(self, name, ddp):
        torch.manual_seed(1)
        self.model = NETWORKS[name]()
        if ddp:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.times = []

    def step(self, x, target):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), target).backward()
        self.optimizer.step()

    def turn(self, x, target):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(TURN):
            self.step(x, target)
        dist.barrier()
        self.times.append(time.perf_counter() - begin)

    def median(self):
        """Of a step of the median turn, in seconds."""
        return statistics.median(self.times) / TURN


def train_in_turns(both, seconds):
    x, target = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    for training in both:
        for _ in range(WARM_UP):
            training.step(x, target)
    end = time.monotonic() + seconds
    more = torch.ones(1)
    while more.item():
        for training in both:
            training.turn(x, target)
        more.fill_(time.monotonic() < end)
        dist.broadcast(more, 0)


def run(rank, arguments, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=arguments.ranks)
    both = [Training(arguments.network, False), Training(arguments.network, True)]
    train_in_turns(both, arguments.seconds)
    alone, ddp = (training.median() for training in both)
    if rank == 0:
        row = {
            "peer": "torch",
            "what": arguments.network,
            "ranks": arguments.ranks,
            "steps": len(both[1].times) * TURN,
            "steps_per_s": 1 / ddp,
            "alone_per_s": 1 / alone,
            "overhead": ddp / alone,
        }
        print(json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)  # taking the group down now and then hangs with PyTorch 1.13


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "store")
        torch.multiprocessing.spawn(run, (arguments, path), arguments.ranks)


if __name__ == "__main__":
    main()
