#!/usr/bin/env python3
"""How long a training under torchrun stands still when a rank is killed, as `bench_elastic kill` does with td_elastic.

    torch_elastic.py [--rounds N] [--ranks R] [--monitor-interval S]

Four workers train the network of the demo with DistributedDataParallel over Gloo, under torchrun --max-restarts, and the first
one writes a checkpoint every ten steps, from which all begin. One worker gets SIGKILL; torchrun notices it when it looks at its
workers, every five seconds unless --monitor-interval says otherwise, ends the others and starts all of them again. Printed is
the time until all have done the next step that none had done before the kill.
"""

import argparse
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, WARM_UP, CHECKPOINT_EVERY = 64, 20, 10
FIELDS = struct.Struct("qqqd")  # of a worker: its process, which start it is, steps, seconds of the last step
TIMEOUT_S = 120


class Board:
    """Memory of all processes, in which workers tell how far they are."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def tell(self, rank, start, steps, seconds):
        FIELDS.pack_into(self.memory, rank * FIELDS.size, os.getpid(), start, steps, seconds)

    def read(self, rank):
        return FIELDS.unpack_from(self.memory, rank * FIELDS.size)


# ---- A worker -------------------------------------------------------------------------------------------------------


def make_net(nn):
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(50, 10),
        nn.LogSoftmax(1),
    )


def save(torch, path, state):
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def work(folder):
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    board, path, steps = Board(f"{folder}/board"), f"{folder}/checkpoint", 0
    torch.manual_seed(1)
    model = DistributedDataParallel(make_net(torch.nn))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])
        steps = state["steps"]
    x, target = torch.randn(BATCH, 1, 28, 28), torch.arange(BATCH) % 10
    while True:
        begin = time.perf_counter()
        sgd.zero_grad()
        F.nll_loss(model(x), target).backward()
        sgd.step()
        steps += 1
        board.tell(rank, start, steps, time.perf_counter() - begin)
        if rank == 0 and steps % CHECKPOINT_EVERY == 0:
            save(torch, path, {"model": model.state_dict(), "sgd": sgd.state_dict(), "steps": steps})


# ---- The rounds -----------------------------------------------------------------------------------------------------


def torchrun(arguments, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max_restarts=1000"]
    command += [f"--nproc_per_node={arguments.ranks}", "--log_dir", f"{folder}/logs"]
    # A Flag of 0 or 3 in these options breaks torchrun 1.13 under Python 3.11: 2 is standard error.
    command += ["--redirects", "2", "--tee", "2"]
    if arguments.monitor_interval:
        command += [f"--monitor_interval={arguments.monitor_interval}"]
    with open(f"{folder}/output", "w") as output:
        return subprocess.Popen(
            [*command, __file__, "--worker", folder],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_until(job, condition):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if job.poll() is not None or time.monotonic() > end:
            raise SystemExit("torch_elastic: torchrun does not go on; run it by hand to see why")
        time.sleep(0.001)


def one_round(job, board, number, ranks):
    """Milliseconds from the kill to the next new step of the last rank; those of a step."""
    before = [board.read(r) for r in range(ranks)]
    started = max(start for _, start, _, _ in before)

    def has(start, steps):
        return all(board.read(r)[1] >= start and board.read(r)[2] >= steps for r in range(ranks))

    first = max(steps for _, _, steps, _ in before)
    wait_until(job, lambda: has(started, first + WARM_UP))
    now = [board.read(r) for r in range(ranks)]
    step_ms = statistics.median(seconds for *_, seconds in now) * 1e3
    begin = time.monotonic()
    os.kill(now[number % ranks][0], signal.SIGKILL)
    done = max(board.read(r)[2] for r in range(ranks)) + 1  # the one that is under way may still end on some
    wait_until(job, lambda: has(started + 1, done + 1))
    return (time.monotonic() - begin) * 1e3, step_ms


def measure(arguments, folder):
    path = Path(folder) / "board"
    path.write_bytes(bytes(FIELDS.size * arguments.ranks))
    board, job = Board(path), torchrun(arguments, folder)
    try:
        wait_until(job, lambda: all(board.read(r)[2] >= WARM_UP for r in range(arguments.ranks)))
        rounds = [one_round(job, board, i, arguments.ranks) for i in range(arguments.rounds)]
    finally:
        job.terminate()  # it ends its workers
        job.wait()
    times = sorted(ms for ms, _ in rounds)
    how = f"looking every {arguments.monitor_interval:g} s" if arguments.monitor_interval else "as it is"
    print(
        f"kill, under torchrun, {how}: {len(times)} rounds of {arguments.ranks} ranks: "
        f"median {statistics.median(times):.0f} ms, slowest {times[-1]:.0f} ms; "
        f"a step takes {statistics.median(ms for _, ms in rounds):.1f} ms"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--monitor-interval", type=float, default=0, metavar="S")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, folder)


if __name__ == "__main__":
    main()
