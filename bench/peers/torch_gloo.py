#!/usr/bin/env python3
"""Collective operations and messages of torch.distributed over gloo, as JSON lines of rank 0.

The ranks are forks that meet over loopback. The same method as mpi_bench.c: a barrier before each
iteration, each rank times its call, an iteration's time is the maximum over the ranks. An operation
that the backend does not have is passed over.
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist

WARMUP, MIN_ITERATIONS, MAX_ITERATIONS = 3, 5, 1000
WHOLE = {"all_reduce", "broadcast", "reduce", "sendrecv"}


def bus_factor(op, ranks):
    if op == "barrier":
        return 0
    others = (ranks - 1) / ranks
    return 2 * others if op == "all_reduce" else 1 if op in WHOLE else others


def make(op, size, rank, ranks):
    """A function that carries out `op` once, on tensors of its own with every page touched."""
    whole = torch.ones(max(1, size // 4)).zero_()
    part = torch.ones(max(1, size // 4 // ranks)).zero_()
    parts = list(whole.split(part.numel()))[:ranks]
    at_root = parts if rank == 0 else None
    other = torch.ones_like(whole).zero_() if op == "all_to_all" else None

    def round_trip():
        if rank == 0:
            dist.send(whole, 1)
        if rank <= 1:
            dist.recv(whole, 1 - rank)
        if rank == 1:
            dist.send(whole, 0)

    return {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "gather": lambda: dist.gather(part, at_root, 0),
        "scatter": lambda: dist.scatter(part, at_root, 0),
        "sendrecv": round_trip,
    }[op]


def once(call):
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(call, seconds):
    """The times of the iterations, sorted."""
    fastest = torch.tensor([min(once(call) for _ in range(WARMUP))])
    dist.all_reduce(fastest, op=dist.ReduceOp.MAX)
    wanted = int(seconds / (fastest.item() + 1e-9))
    count = min(MAX_ITERATIONS, max(MIN_ITERATIONS, wanted))
    times = torch.tensor([once(call) for _ in range(count)], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return sorted(times.tolist())


def measure_operation(op, rank, arguments):
    ranks = arguments.ranks
    for size in arguments.sizes:
        if op == "barrier":
            size = 0
        elif op not in WHOLE:
            size = max(size, 4 * ranks)
        try:
            times = measure(make(op, size, rank, ranks), arguments.seconds)
        except (RuntimeError, ValueError):
            return
        share = 0.5 if op == "sendrecv" else 1
        median = statistics.median_high(times) * share
        row = {
            "peer": "torch-gloo",
            "op": op,
            "ranks": ranks,
            "bytes": size,
            "iters": len(times),
            "median_us": round(median * 1e6, 3),
            "min_us": round(times[0] * share * 1e6, 3),
            "busbw_GBps": round(size / median * bus_factor(op, ranks) / 1e9, 4),
        }
        if rank == 0:
            print(json.dumps(row), flush=True)
        if not size:
            return


def work(rank, arguments):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=arguments.ranks)
    ones = torch.ones(1024)
    dist.all_reduce(ones)
    assert bool((ones == arguments.ranks).all()), "a sum is wrong"
    for op in arguments.ops:
        measure_operation(op, rank, arguments)
    dist.barrier()
    dist.destroy_process_group()


def fork_rank(rank, arguments):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(rank, arguments)
            code = 0
        finally:
            os._exit(code)
    return pid


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("ops", type=lambda text: text.split(","), help="with commas")
    parser.add_argument(
        "sizes", type=lambda text: [int(size) for size in text.split(",")], help="with commas"
    )
    parser.add_argument("seconds", type=float, help="for a row, about")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    pids = [fork_rank(rank, arguments) for rank in range(arguments.ranks)]
    raise SystemExit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main()
