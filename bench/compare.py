"""Runs benchmarks of Tandem and of its peers in turns, and prints their medians side by side.

Shared by scripts/bench-store, bench-start and bench-train. A benchmark is a command that prints JSON
lines; a line has "peer", "what", the size of the run ("clients", "ranks", or the "pass") and figures.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
TIMEOUT_S = 300  # for one command


def arguments(doc, program, rounds=3, quick=None):
    """The command line that the scripts have: the number of rounds; and --quick, if `quick` says what that does."""
    parser = argparse.ArgumentParser(
        prog=program, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", nargs="?", type=int, default=rounds, help=f"{rounds} by default")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parsed = parser.parse_args()
    if parsed.rounds < 1:
        parser.error("at least one round")
    return parsed


def build(*targets):
    """Builds the targets of the preset release, and ends the program when that fails."""
    for command in (["setup"], ["build", "release", *targets]):
        if subprocess.run([ROOT / "scripts" / command[0], *command[1:]]).returncode:
            sys.exit(1)


def python_with_torch():
    """An interpreter that imports torch: $PYTHON, or the first of the usual ones. None without."""
    for name in [os.environ.get("PYTHON"), "python3", "/usr/bin/python3"]:
        path = name and shutil.which(name)
        test = [path, "-c", "import torch.distributed"]
        if path and subprocess.run(test, capture_output=True).returncode == 0:
            return path
    print(
        "PyTorch is not installed, so there is nothing to compare with. On Debian and Ubuntu:\n"
        "    apt-get install python3-torch\n"
        "or set PYTHON to an interpreter that imports torch.\n",
        file=sys.stderr,
    )
    return None


def cores(count):
    """`count` processors that this program may use, each of a core of its own; None if there are not that many cores.

    A virtual machine may hide which processors are threads of one core: usually two neighbours are. So where each
    seems to be a core, every second one is taken, as long as they suffice, and then the others.
    """
    allowed, taken, found = sorted(os.sched_getaffinity(0)), set(), []
    for processor in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        siblings = path.read_text().strip() if path.exists() else str(processor)
        if siblings not in taken:
            found.append(processor)
        taken.add(siblings)
    if len(found) == len(allowed):
        found = found[::2] + found[1::2]
    return sorted(found[:count]) if len(found) >= count else None


def busy_s():
    """CPU time of all programs since boot."""
    fields = [int(field) for field in open("/proc/stat").readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_s():
    """CPU time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_rounds(name, commands, rounds):
    """Runs {label: command} one after the other, `rounds` times; returns the rows they printed.

    A command may be a function that returns one, called as it is about to run.
    They go to bench/results/<name>-<time>.jsonl as well. Says how much of the machine other
    programs used meanwhile: a measurement beside a compiler is worth little.
    """
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    path = results / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    rows = []
    start, busy, own = time.monotonic(), busy_s(), own_s()
    with path.open("w") as file:
        for number in range(rounds):
            for label, command in commands.items():
                show_progress(f"round {number + 1} of {rounds}: {label}")
                command = command() if callable(command) else command
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    sys.exit(f"{' '.join(map(str, command))} has not ended within {TIMEOUT_S} s")
                if done.returncode:
                    sys.exit(f"{done.stderr}{' '.join(map(str, command))} has failed")
                file.write(done.stdout)
                rows += [json.loads(line) for line in done.stdout.splitlines()]
    show_progress("")
    others = (busy_s() - busy) - (own_s() - own)
    share = others / (time.monotonic() - start) / (os.cpu_count() or 1)
    print(f"Median of {rounds} on {os.cpu_count()} processors; all rows: {path.relative_to(ROOT)}")
    if share > 0.03:
        print(f"Other programs used {share:.0%} of the machine meanwhile: expect noise.")
    print()
    return rows


def show_progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def medians(rows, size, fields):
    """{(what, size): {peer: {field: median over the rounds}}}, in the order of the rows."""
    table = {}
    for row in rows:
        peers = table.setdefault((row["what"], row[size]), {})
        peers.setdefault(row["peer"], []).append(row)
    return {
        key: {
            peer: {field: statistics.median(row[field] for row in found) for field in fields}
            for peer, found in peers.items()
        }
        for key, peers in table.items()
    }


def print_table(rows, size, fields, ratio_of, more_is_better):
    """One line for each what and size, one group of columns for each peer, then Tandem's advantage.

    `fields` are {field: heading}; the advantage is how many times `ratio_of` is better.
    """
    table = medians(rows, size, fields)
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    width = 2 + max(len(heading) for heading in [*fields.values(), "000000.0"])
    group = width * len(fields)

    names = max(16, 1 + max(len(row["what"]) for row in rows))
    sizes = max(8, 1 + max(len(str(row[size])) for row in rows))
    print(" " * (names + sizes) + "".join(f"{peer:>{group}}" for peer in peers))
    headings = "".join(f"{heading:>{width}}" for heading in fields.values())
    print(f"{'':{names}}{size:>{sizes}}" + headings * len(peers) + ("     times" if len(peers) > 1 else ""))
    for (what, count), found in table.items():
        line = f"{what:{names}}{count:>{sizes}}"
        for peer in peers:
            for field in fields:
                figure = found.get(peer, {}).get(field)
                line += f"{text_of(figure):>{width}}"
        others = [found[peer][ratio_of] for peer in peers if peer != "tandem" and peer in found]
        if others and "tandem" in found:
            ratio = found["tandem"][ratio_of] / others[0]
            line += f"{ratio if more_is_better else 1 / ratio:10.1f}"
        print(line)


def text_of(figure):
    if figure is None:
        return "-"
    return f"{figure:.0f}" if figure >= 1000 else f"{figure:.1f}"
