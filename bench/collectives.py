"""The rounds and the table of scripts/bench.

A round runs every program once for every number of ranks, so that a change of the machine's state affects all
programs. The result is the median over the rounds.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import compare
import peer_programs

SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
LIMIT_S = 400  # for one program with one number of ranks
BUSY = 0.03  # share of the machine that others may use


def size_text(size):
    for letter, unit in (("M", 1 << 20), ("K", 1 << 10)):
        if size >= unit:
            return f"{size // unit}{letter}"
    return str(size)


def parse_size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def machine():
    """The name of the processor."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    model = line.split(":", 1)[1].strip()
                    break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} processors"


# ---- Running -------------------------------------------------------------------------------------


def run_program(program, ranks, operations, sizes, seconds):
    """The rows that it printed; a failure is reported, and its rows are missing."""
    command = [str(word) for word in program.command(ranks, operations, sizes, seconds)]
    process = subprocess.Popen(
        command, env=program.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
        trouble = process.returncode and f"has failed: {' '.join(err.split()[-40:])}"
    except subprocess.TimeoutExpired:
        process.terminate()  # an mpirun ends its ranks
        out, err = process.communicate()
        trouble = f"took more than {LIMIT_S} s"
    if trouble:
        print(f"{program.name} with {ranks} ranks {trouble}", file=sys.stderr)
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    for row in rows:
        if row["peer"] not in ("tandem", "memcpy", "spin"):
            row["peer"] = program.name
    return rows


def is_left_out(program, ranks, asked):
    """MPICH spins without yielding: with more ranks than processors each step costs time slices."""
    return program.name == "mpich" and not asked and ranks > (os.cpu_count() or 1)


def run_rounds(programs, settings, path):
    """Runs everything and returns all rows, which also go to `path`."""
    rows = []
    busy, own, start = compare.busy_s(), compare.own_s(), time.monotonic()
    with path.open("w", encoding="utf-8") as file:
        for number in range(settings.rounds):
            for ranks in settings.ranks:
                for program in programs:
                    if is_left_out(program, ranks, settings.asked):
                        continue
                    compare.show_progress(
                        f"round {number + 1} of {settings.rounds}, {ranks} ranks: {program.name}"
                    )
                    for row in run_program(
                        program, ranks, settings.operations, settings.sizes, settings.seconds
                    ):
                        row.update(round=number, mode=settings.mode)
                        file.write(json.dumps(row) + "\n")
                        rows.append(row)
    compare.show_progress("")
    others = (compare.busy_s() - busy) - (compare.own_s() - own)
    share = others / (time.monotonic() - start) / (os.cpu_count() or 1)
    return rows, share


# ---- The table -----------------------------------------------------------------------------------


def medians(rows, sizes):
    """{(op, ranks, size): {peer: median µs over the rounds}}.

    The size is the one that was asked for: a buffer of whole parts may be a little different.
    """
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["op"] == "spin":
            continue
        size = min(sizes, key=lambda asked: abs(asked - row["bytes"])) if row["bytes"] else 0
        found[row["op"], row["ranks"], size][row["peer"]].append(row["median_us"])
    return {
        key: {peer: statistics.median(times) for peer, times in peers.items()}
        for key, peers in found.items()
    }


def read_targets(path):
    targets = []
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].split()
        if line:
            mode, operations, ranks, low, high, ratio = line
            high = float("inf") if high == "-" else parse_size(high)
            ranks = None if ranks == "*" else int(ranks)
            targets.append((mode, operations.split(","), ranks, parse_size(low), high, float(ratio)))
    return targets


def target_of(targets, mode, op, ranks, size):
    """The ratio that a row should reach, or None."""
    wanted = None
    for target_mode, operations, number, low, high, ratio in targets:
        fits = target_mode == mode or (target_mode == "*" and mode != "limit")
        fits = fits and number in (None, ranks)
        if fits and low <= size <= high and (op in operations or "*" in operations):
            wanted = ratio
    return wanted


def time_text(us):
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def against(ratio, target):
    """A ratio, marked where it misses its target."""
    if ratio is None:
        return f"{'-':>8}{'':14}"
    missed = target is not None and ratio < target
    return f"{ratio:8.2f}" + (f" missed {target:<5.4g} " if missed else " " * 14)


def table_lines(rows, settings, targets):
    """The comparison, line by line, and the number of targets that were missed."""
    table = medians(rows, settings.sizes)
    lines = [
        f"{'operation':15}{'ranks':>6}{'size':>7}{'tandem':>12}{'best peer':>12} {'':10}"
        f"{'ratio':>8}{'':14}{'memcpy':>8}"
    ]
    missed = 0
    order = {op: index for index, op in enumerate(settings.operations)}
    for op, ranks, size in sorted(
        (key for key in table if key[0] in order), key=lambda key: (order[key[0]], key[1:])
    ):
        times = table[op, ranks, size]
        own = times.get("tandem")
        best = min((peer for peer in times if peer != "tandem"), key=times.get, default=None)
        ratio = times[best] / own if best and own else None
        target = target_of(targets, settings.mode, op, ranks, size)
        line = f"{op:15}{ranks:6}{size_text(size):>7}"
        line += f"{time_text(own) if own else '-':>12}"
        line += f"{time_text(times[best]) if best else '-':>12} {best or '':10}"
        line += against(ratio, target)
        missed += ratio is not None and target is not None and ratio < target
        copy = table.get(("memcpy", ranks, size), {}).get("memcpy")
        if op == "all_reduce" and copy and own and settings.mode != "tcp":
            wanted = target_of(targets, "limit", op, ranks, size)
            line += against(copy / own, wanted)
            missed += wanted is not None and copy / own < wanted
        lines.append(line.rstrip())
    return lines, missed


def notes(rows, settings, programs, share):
    """The notes on the table, line by line."""
    lines = [
        f"Mode {settings.mode}; median of {settings.rounds} rounds; {machine()};"
        f" {time.strftime('%Y-%m-%d')}.",
        "Times in µs. ratio: the best peer's time over Tandem's; memcpy: the time in which all",
        "ranks copy such a buffer at once, over Tandem's. Above 1, Tandem is faster.",
    ]
    if any(is_left_out(program, ranks, settings.asked) for program in programs
           for ranks in settings.ranks):
        lines.append("MPICH, which spins without yielding, is left out where there are more ranks "
                     "than processors.")
    trips = [row["median_us"] for row in rows if row["op"] == "spin"]
    if trips:
        lines.append(f"A round trip between two processors took {min(trips):.2f} to "
                     f"{max(trips):.2f} µs: where that differs, so do small messages.")
    if share > BUSY:
        lines.append(f"Other programs used {share:.0%} of the machine meanwhile: expect noise.")
    wrong = sum(1 for row in rows if row.get("wrong"))
    if wrong:
        lines.append(f"WRONG RESULTS in {wrong} rows of Tandem.")
    return lines


def write_table(rows, settings, programs, share, path):
    """Prints the table and saves it; returns whether all results were right."""
    targets = read_targets(peer_programs.HERE / "targets.txt")
    lines, missed = table_lines(rows, settings, targets)
    if any(peer != "tandem" and peer in peer_programs.PEERS for peer in {r["peer"] for r in rows}):
        lines += ["", f"Targets missed: {missed} (bench/targets.txt)."]
    text = "\n".join([*notes(rows, settings, programs, share), "", *lines]) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text, end="")
    return not any(row.get("wrong") for row in rows)
