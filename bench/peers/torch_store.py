#!/usr/bin/env python3
"""Calls on PyTorch's TCPStore, as JSON lines: what bench_store measures, step by step the same.

The server runs in a process of its own, the clients are 1 and 8 processes. They warm up together,
agree on a number of calls that takes about a second, meet at a barrier of the store, and make that
many calls each. The rate is all calls over the time from the first client's start to the last one's
end. A set is not answered, so a get follows the last one inside the measured time.
"""

import argparse
import json
import mmap
import os
import signal
import sys
from datetime import timedelta
from time import monotonic_ns

MAX_CALLS = 2_000_000  # of one client
TIMEOUT = timedelta(seconds=60)
KEYS = [f"key/{i}" for i in range(16)]

# what -> how a call of it on a client is made. multi_get is there since PyTorch 2.1.
OPERATIONS = {
    "set": lambda store: lambda: store.set("key", "value"),
    "get": lambda store: lambda: store.get("key"),
    "add": lambda store: lambda: store.add("counter", 1),
    "compare_set": lambda store: lambda: store.compare_set("key", "value", "value"),
    "wait": lambda store: lambda: store.wait(["key"]),
    "multi_get_16": lambda store: lambda: store.multi_get(KEYS),
}
SILENT = {"set"}


def barrier(store, run, name, clients):
    if store.add(f"run/{run}/{name}/arrived", 1) == clients:
        store.set(f"run/{run}/{name}/go", "1")
    store.wait([f"run/{run}/{name}/go"])


def warm_up(store, call, silent, run, clients, seconds):
    """Calls for a fifth of the time; returns how many calls each client makes in the whole time."""
    calls, start, length = 0, monotonic_ns(), seconds / 5 * 1e9
    while monotonic_ns() - start < length:
        call()
        calls += 1
    if silent:
        store.get("key")
    store.add(f"run/{run}/rate", int(calls / ((monotonic_ns() - start) / 1e9)))
    barrier(store, run, "warm", clients)
    calls = int(store.add(f"run/{run}/rate", 0) / clients * seconds)
    return min(max(calls, 10), MAX_CALLS)


def run_client(dist, port, what, run, clients, seconds, result):
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=TIMEOUT, wait_for_workers=False)
    call, silent = OPERATIONS[what](store), what in SILENT
    barrier(store, run, "open", clients)
    calls = warm_up(store, call, silent, run, clients, seconds)
    moments = [0] * calls
    each = range(calls)
    barrier(store, run, "start", clients)

    start = monotonic_ns()
    for i in each:
        call()
        moments[i] = monotonic_ns()
    if silent:
        store.get("key")
    end = monotonic_ns()

    result[0], result[1], result[2] = start, end, calls
    before = start
    for i, moment in enumerate(moments):
        result[3 + i] = moment - before
        before = moment


def start_process(body):
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except Exception as error:
        print(f"torch_store.py: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def start_server(dist):
    """Starts the server, and returns its process and its port."""
    ready, tell = os.pipe()

    def serve():
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)
        for key in ["key", *KEYS]:
            store.set(key, "value")
        store.get("key")
        os.write(tell, str(store.port).encode())
        signal.pause()

    pid = start_process(serve)
    os.close(tell)
    return pid, int(os.read(ready, 16))


def measure(dist, port, what, run, clients, seconds):
    shared = mmap.mmap(-1, clients * (3 + MAX_CALLS) * 8)
    with memoryview(shared) as view, view.cast("q") as numbers:
        results = [numbers[i * (3 + MAX_CALLS) : (i + 1) * (3 + MAX_CALLS)] for i in range(clients)]
        pids = [
            start_process(lambda r=r: run_client(dist, port, what, run, clients, seconds, r))
            for r in results
        ]
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            raise RuntimeError(f"{what}: a client has failed")
        calls = sum(r[2] for r in results)
        elapsed = max(r[1] for r in results) - min(r[0] for r in results)
        times = sorted(t for r in results for t in r[3 : 3 + r[2]])
        for r in results:
            r.release()
    return {
        "peer": "torch-tcpstore",
        "what": what,
        "clients": clients,
        "calls_per_s": round(calls / (elapsed / 1e9)),
        "median_us": round(times[int(0.5 * (calls - 1))] / 1e3, 2),
        "min_us": round(times[0] / 1e3, 2),
        "p99_us": round(times[int(0.99 * (calls - 1))] / 1e3, 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", metavar="WHAT", help="an operation; all by default")
    parser.add_argument("--clients", type=int, action="append", help="instead of 1 and 8")
    parser.add_argument("--ms", type=int, default=1000, help="of each measurement, about")
    arguments = parser.parse_args()
    unknown = set(arguments.what) - set(OPERATIONS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(OPERATIONS)}")

    import torch.distributed as dist

    wanted = list(arguments.what or OPERATIONS)
    if "multi_get_16" in wanted and not hasattr(dist.Store, "multi_get"):
        wanted.remove("multi_get_16")
    server, port = start_server(dist)
    try:
        run = 0
        for clients in arguments.clients or [1, 8]:
            for what in wanted:
                run += 1
                row = measure(dist, port, what, run, clients, arguments.ms / 1000)
                print(json.dumps(row, separators=(",", ":")), flush=True)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


if __name__ == "__main__":
    main()
