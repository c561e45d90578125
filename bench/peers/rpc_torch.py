#!/usr/bin/env python3
"""Calls of torch.distributed.rpc (TensorPipe) between two workers of this host, as JSON lines: what bench_rpc measures,
step by step the same.

The worker "a" calls and prints, the worker "b" serves. The rows that end with _tcp are measured by another pair of
workers, with the transport "uv" of TensorPipe (TCP) alone. Tensors always go by value.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from time import monotonic_ns

MOST = 1 << 20
IN_FLIGHT = 100
BATCH = 2000
REFERENCES = 100
SILENCE_S = 0.05
IDLE_S = 1
ELEMENTS = 16 << 20


# What the callee serves.


def increment(x):
    return x + 1


def first(x):
    return float(x[0])


def sum_all(x):
    return float(x.sum())


def same(x):
    return x


class Counter:
    def __init__(self):
        self.count = 0

    def count_up(self):
        self.count += 1
        return self.count


# The rows: each function makes one repetition, and returns its time in nanoseconds.


class Rows:
    def __init__(self, rpc, torch):
        self.rpc = rpc
        self.torch = torch
        self.tensor = torch.ones(ELEMENTS)
        self.counter = rpc.remote("b", Counter)
        # The clock of another process's processor time; clock_getcpuclockid(3) makes it the same way.
        self.clock = (~rpc.rpc_sync("b", os.getpid) << 3) | 2

    def call(self):
        start = monotonic_ns()
        self.rpc.rpc_sync("b", increment, args=(1,))
        return monotonic_ns() - start

    def call_asleep(self):
        time.sleep(SILENCE_S)
        return self.call()

    def calls_in_flight(self):
        def begin():
            return self.rpc.rpc_async("b", increment, args=(1,))

        futures = [begin() for _ in range(IN_FLIGHT)]
        start = monotonic_ns()
        for i in range(BATCH):
            futures[i % IN_FLIGHT].wait()
            futures[i % IN_FLIGHT] = begin()
        end = monotonic_ns()
        for future in futures:
            future.wait()
        return (end - start) // BATCH

    def send(self, function, tensor):
        start = monotonic_ns()
        self.rpc.rpc_sync("b", function, args=(tensor,))
        return monotonic_ns() - start

    def first_byte(self):
        return self.send(first, self.tensor)

    def first_byte_new(self):
        tensor = self.torch.ones(ELEMENTS)
        self.call()
        return self.send(first, tensor)

    def sum_by_reference(self):
        return self.send(sum_all, self.tensor)

    def there_and_back(self):
        return self.send(same, self.tensor)

    def reference(self):
        start = monotonic_ns()
        for _ in range(REFERENCES):
            self.rpc.remote("b", Counter)
        self.call()
        return (monotonic_ns() - start) // REFERENCES

    def method(self):
        start = monotonic_ns()
        self.counter.rpc_sync().count_up()
        return monotonic_ns() - start

    def idle_process(self):
        time.sleep(SILENCE_S)
        before = time.clock_gettime_ns(self.clock)
        time.sleep(IDLE_S)
        return time.clock_gettime_ns(self.clock) - before


# what: (unit, method, over TCP, at least so many repetitions)
ROWS = {
    "call": ("us", Rows.call, False, 1000),
    "call_asleep": ("us", Rows.call_asleep, False, 20),
    "calls_in_flight": ("per_s", Rows.calls_in_flight, False, 2),
    "first_byte": ("us", Rows.first_byte, False, 5),
    "first_byte_new": ("us", Rows.first_byte_new, False, 5),
    "sum_by_reference": ("ms", Rows.sum_by_reference, False, 5),
    "there_and_back": ("us", Rows.there_and_back, False, 5),
    "there_and_back_by_value": ("ms", Rows.there_and_back, False, 5),
    "reference": ("us", Rows.reference, False, 5),
    "method": ("us", Rows.method, False, 1000),
    "idle_process": ("us", Rows.idle_process, False, 1),
    "call_tcp": ("us", Rows.call, True, 1000),
    "calls_in_flight_tcp": ("per_s", Rows.calls_in_flight, True, 2),
    "there_and_back_tcp": ("ms", Rows.there_and_back, True, 5),
}
IN_UNIT = {"us": lambda ns: ns / 1e3, "ms": lambda ns: ns / 1e6, "per_s": lambda ns: 1e9 / ns}


def measure(rows, what, seconds, ending):
    unit, once, _, at_least = ROWS[what]
    end = monotonic_ns() + seconds / 5 * 1e9
    while what != "idle_process":
        once(rows)
        if monotonic_ns() >= end:
            break
    times = []
    end = monotonic_ns() + seconds * 1e9
    while len(times) < MOST and (len(times) < at_least or monotonic_ns() < end):
        times.append(once(rows))
    times.sort()
    row = {
        "peer": "torch",
        "what": what + ending,
        "unit": unit,
        "median": round(IN_UNIT[unit](times[(len(times) - 1) // 2]), 2),
        "best": round(IN_UNIT[unit](times[0]), 2),
        "repetitions": len(times),
    }
    print(json.dumps(row, separators=(",", ":")), flush=True)


def run_worker(arguments):
    if arguments.pin:
        os.sched_setaffinity(0, {int(arguments.pin.split(",")[arguments.rank])})
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    transports = {"_transports": ["uv"]} if arguments.tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{arguments.meet}", **transports)
    rpc.init_rpc("ab"[arguments.rank], rank=arguments.rank, world_size=2, rpc_backend_options=options)
    if arguments.rank == 0:
        rows = Rows(rpc, torch)
        for what in arguments.what:
            measure(rows, what, arguments.ms / 1000, "_pinned" if arguments.pin else "")
        del rows
    rpc.shutdown()


def run_pair(arguments, wanted, tcp):
    """Runs the two workers, with the rows of one kind of transport."""
    environment = dict(os.environ, TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="rpc-torch-") as folder:
        command = [sys.executable, __file__, "--ms", str(arguments.ms), "--meet", f"{folder}/meet", *wanted]
        command += ["--tcp"] if tcp else []
        command += ["--pin", arguments.pin] if arguments.pin else []
        workers = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for worker in workers:
            _, errors = worker.communicate()
            if worker.returncode:
                for other in workers:
                    other.kill()
                sys.exit(errors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help="a row; all by default")
    parser.add_argument("--ms", type=int, default=300, help="of each row, about")
    parser.add_argument("--pin", metavar="A,B", help="the caller on processor A, the callee on processor B")
    for name in ["--rank", "--meet"]:  # of the workers, which this program starts
        parser.add_argument(name, type=int if name == "--rank" else str, help=argparse.SUPPRESS)
    parser.add_argument("--tcp", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.what) - set(ROWS) - {"idle", "tcp_ping_pong"}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    if arguments.rank is not None:
        return run_worker(arguments)
    for tcp in [False, True]:
        wanted = [what for what, row in ROWS.items() if row[2] == tcp and what in (arguments.what or ROWS)]
        if wanted:
            run_pair(arguments, wanted, tcp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
