#!/usr/bin/env python3
"""Checks that the code in a page is that of a program: check_docs.py PAGE PROGRAM

Each run of indented lines of the page must stand in the program, one line after another.
"""

import sys
from pathlib import Path


def blocks(page):
    """The indented blocks of a page, without their indentation, and the line where each begins."""
    found, block, begin = [], [], 0
    for number, line in enumerate(page.splitlines() + ["end"], 1):
        if line.startswith("    ") or (not line.strip() and block):
            begin = begin if block else number
            block.append(line[4:].rstrip())
        elif block:
            while not block[-1]:
                block.pop()
            found.append((begin, block))
            block = []
    return found


def main():
    page, program = (Path(name) for name in sys.argv[1:3])
    lines = [line.rstrip() for line in program.read_text(encoding="utf-8").splitlines()]
    wrong = 0
    found = blocks(page.read_text(encoding="utf-8"))
    for begin, block in found:
        if not any(lines[i : i + len(block)] == block for i in range(len(lines))):
            print(f"{page}:{begin}: this code does not stand in {program}")
            wrong += 1
    print(f"check_docs: {len(found)} blocks, {wrong} of them not in the program")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
