#!/usr/bin/env python3
"""init_process_group of PyTorch's gloo backend, as JSON lines.

It is timed from inside forked processes, so that the import of torch is not in it. A figure is the
slowest rank's. It does more than td_rendezvous(): each rank connects to all the others as well.
"""

import argparse
import json
import os
import socket
import statistics
import time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def init(dist, ranks):
    """Seconds that the slowest of `ranks` processes needs."""
    read, write = os.pipe()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo"
    )
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            start = time.perf_counter()
            dist.init_process_group("gloo", rank=rank, world_size=ranks)
            os.write(write, f"{time.perf_counter() - start}\n".encode())
            dist.barrier()
            os._exit(0)
        pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    os.close(write)
    times = [float(line) for line in os.read(read, 65536).split()]
    os.close(read)
    if failed or len(times) != ranks:
        raise SystemExit(f"init_process_group of {ranks} ranks has failed")
    return max(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for ranks in (2, 4, 8, 16):
        times = [init(dist, ranks) * 1e3 for _ in range(arguments.rounds)]
        row = {
            "peer": "torch",
            "what": "rendezvous",
            "ranks": ranks,
            "median_ms": round(statistics.median(times), 2),
            "min_ms": round(min(times), 2),
        }
        print(json.dumps(row, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
