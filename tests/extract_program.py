#!/usr/bin/env python3
"""Writes a C program of a page to a file: extract_program.py PAGE NUMBER FILE

The page's blocks of C (between ```c and ```) are counted from 1.
"""

import re
import sys
from pathlib import Path


def main():
    page, number, file = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"(?ms)^```c\n(.*?)^```$", text))
    if not 1 <= number <= len(blocks):
        sys.exit(f"extract_program: {page} has {len(blocks)} programs, and not one number {number}")
    line = text.count("\n", 0, blocks[number - 1].start(1)) + 1
    file.write_text(f'#line {line} "{page}"\n{blocks[number - 1][1]}', encoding="utf-8")


if __name__ == "__main__":
    main()
