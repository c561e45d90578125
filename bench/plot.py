"""Draws all_reduce of Tandem and its peers as an SVG: time over size, both logarithmic.

    python3 bench/plot.py ROWS.jsonl... PLOT.svg

One panel for each number of ranks. Only the standard library is used.
"""

import json
import math
import sys
import time
from html import escape
from pathlib import Path

import collectives
import peer_programs

OP = "all_reduce"
# Colours that differ in brightness too, and a marker for each: the lines stay apart without colour.
STYLES = {
    "tandem": ("#0b57c2", "circle"),
    "openmpi": ("#d9730d", "square"),
    "mpich": ("#7a3fa0", "triangle"),
    "gloo": ("#1d8a5f", "diamond"),
    "torch": ("#b3203a", "cross"),
    "memcpy": ("#8a8f98", None),
}
INK, FAINT, PAPER = "#1f2328", "#d8dce1", "#ffffff"
WIDTH, HEIGHT = 1040, 520
LEFT, RIGHT, TOP, BOTTOM, GAP = 70, 20, 108, 84, 62


def time_label(us):
    for unit, factor in (("s", 1e6), ("ms", 1e3), ("µs", 1)):
        if us >= factor:
            return f"{us / factor:.0f} {unit}"
    return f"{us:g} µs"


class Axes:
    """Where a size and a time stand in a panel."""

    def __init__(self, x, width, sizes, times):
        self.x, self.width = x, width
        self.y, self.height = TOP, HEIGHT - TOP - BOTTOM
        self.sizes = sizes
        self.low = math.floor(math.log10(min(times)))
        self.high = math.ceil(math.log10(max(times)))

    def at(self, size, us):
        span = math.log2(self.sizes[-1] / self.sizes[0]) or 1
        right = math.log2(size / self.sizes[0]) / span
        up = (math.log10(us) - self.low) / ((self.high - self.low) or 1)
        return self.x + right * self.width, self.y + (1 - up) * self.height


def text(x, y, words, size=13, anchor="start", colour=INK, extra=""):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}" {extra}>{escape(words)}</text>'
    )


def line(x1, y1, x2, y2, colour, width=1, dash=""):
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{dash}/>'
    )


def marker(x, y, peer):
    colour, shape = STYLES[peer]
    r = 4.5 if peer == "tandem" else 3.6
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}"/>'
    if shape == "square":
        side = 2 * r - 0.6
        return (
            f'<rect x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" '
            f'height="{side:.1f}" fill="{colour}"/>'
        )
    outlines = {
        "triangle": [(0, -r - 0.8), (r + 0.6, r), (-r - 0.6, r)],
        "diamond": [(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)],
    }
    if shape in outlines:
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in outlines[shape])
        return f'<polygon points="{points}" fill="{colour}"/>'
    if shape == "cross":
        return line(x - r, y - r, x + r, y + r, colour, 2) + line(
            x - r, y + r, x + r, y - r, colour, 2
        )
    return ""


def curve(axes, peer, points):
    colour, _ = STYLES[peer]
    width = 3.2 if peer == "tandem" else 1.8
    dash = ' stroke-dasharray="5 4"' if peer == "memcpy" else ""
    places = [axes.at(size, us) for size, us in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash} '
        'stroke-linejoin="round"/>'
    ]
    parts += [marker(x, y, peer) for x, y in places]
    return parts


def grid(axes, ranks):
    parts = []
    for power in range(axes.low, axes.high + 1):
        x, y = axes.at(axes.sizes[0], 10**power)
        parts.append(line(x, y, x + axes.width, y, FAINT))
        parts.append(text(x - 8, y + 4, time_label(10**power), 12, "end"))
    for size in axes.sizes:
        x, y = axes.at(size, 10**axes.low)
        parts.append(line(x, axes.y, x, y, FAINT))
        parts.append(text(x, y + 18, collectives.size_text(size), 12, "middle"))
    parts.append(text(axes.x, axes.y - 12, f"{ranks} ranks", 15, extra='font-weight="600"'))
    return parts


def legend(peers):
    parts, x = [], LEFT
    for peer in peers:
        colour, _ = STYLES[peer]
        dash = "5 4" if peer == "memcpy" else ""
        parts.append(line(x, 58, x + 26, 58, colour, 3.2 if peer == "tandem" else 1.8, dash))
        parts.append(marker(x + 13, 58, peer))
        name = peer_programs.NAMES[peer]
        weight = 'font-weight="600"' if peer == "tandem" else ""
        parts.append(text(x + 33, 62, name, 13, extra=weight))
        x += 33 + 7.4 * len(name) + 24
    return parts


def series(table, ranks):
    """{peer: [(size, µs)…]} of all_reduce, and of the memcpy beside it."""
    found = {}
    for (op, count, size), times in sorted(table.items(), key=lambda item: item[0][2]):
        if op in (OP, "memcpy") and count == ranks and size:
            for peer, us in times.items():
                found.setdefault(peer, []).append((size, us))
    return {peer: found[peer] for peer in STYLES if peer in found}


def draw(table, rank_counts, path):
    """Draws the medians of collectives.medians() for each number of ranks to `path`."""
    panels = [(ranks, series(table, ranks)) for ranks in rank_counts]
    panels = [(ranks, curves) for ranks, curves in panels if "tandem" in curves]
    if not panels:
        raise ValueError(f"there are no rows of Tandem's {OP}")
    points = [point for _, curves in panels for found in curves.values() for point in found]
    sizes = sorted({size for size, _ in points})
    times = [us for _, us in points]
    width = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
    shown = [peer for peer in STYLES if any(peer in curves for _, curves in panels)]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        text(LEFT, 32, "all_reduce on one host: time by size of the buffer (lower is better)", 17,
             extra='font-weight="600"'),
        *legend(shown),
    ]
    for index, (ranks, curves) in enumerate(panels):
        axes = Axes(LEFT + index * (width + GAP), width, sizes, times)
        parts += grid(axes, ranks)
        for peer in reversed(list(curves)):  # Tandem last, on top
            parts += curve(axes, peer, curves[peer])
    about = f"f32, sum, in place; {collectives.machine()}; {time.strftime('%Y-%m-%d')}"
    axis = "bytes of one rank's buffer (K, M: powers of 1024)"
    parts.append(text(LEFT, HEIGHT - 38, axis, 12))
    parts.append(text(LEFT, HEIGHT - 16, about, 11, colour="#656c76"))
    parts.append("</svg>")
    Path(path).write_text("\n".join(parts) + "\n", encoding="utf-8")


def main():
    if len(sys.argv) < 3 or not sys.argv[-1].endswith(".svg"):
        sys.exit(__doc__)
    rows = [json.loads(line) for name in sys.argv[1:-1] for line in open(name, encoding="utf-8")]
    table = collectives.medians(rows, collectives.SIZES)
    counts = sorted({row["ranks"] for row in rows if row["op"] == OP})
    chosen = [count for count in (2, 8) if count in counts] or counts[:2]
    draw(table, chosen, sys.argv[-1])


if __name__ == "__main__":
    main()
