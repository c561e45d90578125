#!/usr/bin/env python3
"""Records the orders of PyTorch's loaders and samplers for tests/test_data_order.c.

    tests/reference/record_data.py > tests/reference/data_vectors.h

Long lists are recorded as a checksum of their 64-bit numbers and their first three.
"""

import random
import zlib

import torch
from torch.utils.data import DataLoader, DistributedSampler


def digest(values):
    checksum = zlib.crc32(b"".join(v.to_bytes(8, "little") for v in values))
    first = ", ".join(str(v) for v in (values + [-1, -1, -1])[:3])
    return f"{len(values)}, 0x{checksum:08x}, {{{first}}}"


def loaders():
    print("static const struct recorded_loader recorded_loaders[] = {")
    for size, batch, shuffle, drop_last in (
        (10, 3, True, False),
        (10, 3, False, False),
        (1, 1, True, False),
        (1000, 64, True, True),
        (60000, 64, True, False),
    ):
        torch.manual_seed(1234)
        loader = DataLoader(range(size), batch, shuffle, drop_last=drop_last)
        for epoch in range(4):
            order = [int(i) for b in loader for i in b]
            state = torch.get_rng_state()
            following = torch.empty((), dtype=torch.int64).random_().item()
            torch.set_rng_state(state)
            print(
                f"    {{{size}, {batch}, {str(shuffle).lower()}, {str(drop_last).lower()}, {epoch},"
                f" {{{digest(order)}}}, 0x{following:x}}},"
            )
    print("};")


def shares():
    print("\nstatic const struct recorded_share recorded_shares[] = {")
    for size, replicas in (10, 1), (10, 3), (3, 7), (1, 5), (12, 4), (1000, 6), (60000, 8):
        for shuffle in False, True:
            for drop_last in False, True:
                for seed, epoch in (0, 0), (0, 3), (4294967295, 2):
                    for rank in sorted({0, replicas // 2, replicas - 1}):
                        sampler = DistributedSampler(
                            range(size), replicas, rank, shuffle, seed, drop_last
                        )
                        sampler.set_epoch(epoch)
                        print(
                            f"    {{{size}, {replicas}, {rank}, {str(shuffle).lower()},"
                            f" {str(drop_last).lower()}, {seed}u, {epoch}, {{{digest(list(sampler))}}}}},"
                        )
                    if not shuffle:
                        break
    print("};")


def partitions():
    """What DataPartitioner does."""
    print("\nstatic const struct recorded_part recorded_parts[] = {")
    for size, fractions, seed in (
        (50, [0.7, 0.2, 0.1], 1234),
        (60000, [1.0 / 4] * 4, 1234),
        (1000, [1.0 / 3] * 3, 1234),
        (2, [1.0], 1234),
        (1, [1.0], 1234),
        (0, [1.0], 1234),
        (100, [0.5, 0.25], 1 << 40 | 77),
    ):
        generator = random.Random()
        generator.seed(seed)
        indexes = list(range(size))
        generator.shuffle(indexes)
        for which, fraction in enumerate(fractions):
            length = int(fraction * size)
            part, indexes = indexes[:length], indexes[length:]
            listed = ", ".join(map(repr, fractions))
            print(
                f"    {{{size}, {len(fractions)}, {which}, {{{listed}}}, {seed}u, {{{digest(part)}}}}},"
            )
    print("};")


print("/* Written by record_data.py. */\n/* clang-format off */")
loaders()
shares()
partitions()
