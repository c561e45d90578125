#!/usr/bin/env python3
"""Checks a manual page against its program: check_man.py PAGE PROGRAM [COMMAND…]

Every option that `PROGRAM --help` and `PROGRAM COMMAND --help` print must be in the page, the page must have
no option that they do not print, and groff, where it is installed, must have nothing to say about it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

OPTION = re.compile(r"--[a-z][a-z-]*|(?<![\w-])-[a-zA-Z](?![\w-])")


def options_of_help(program, command):
    """The options at the beginning of the lines that describe them, and those of the usage."""
    text = subprocess.run([program, *command, "--help"], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in text.splitlines():
        described = re.match(r" {2,6}(-[^ ].*?)(?:  |$)", line)
        if described:
            found.update(OPTION.findall(described[1]))
    for usage in re.findall(r"(?m)^(?:usage:|      ) \w+ .*$", text):
        found.update(OPTION.findall(usage.split("     ")[0]))
    return found


def options_of_page(page):
    """The options of its lines with the macro Fl: `.It Fl h , -help`, `.Op Fl -json`."""
    found = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith(".") or line.startswith('.\\"') or " Fl " not in f" {line[1:]}":
            continue
        if line.startswith(".It Fl"):
            line = line.replace(" , -", " Fl -")
        found.update("-" + name for name in re.findall(r"\bFl (-?[a-zA-Z][a-z-]*)", line))
    return found


def warnings_of_groff(page):
    if not shutil.which("groff"):
        print("check_man: groff is not installed; the page's markup was not checked")
        return []
    run = subprocess.run(["groff", "-mdoc", "-ww", "-z", "-Tutf8", "-Kutf8", page], capture_output=True, text=True)
    return run.stderr.splitlines() + ([f"groff ended with {run.returncode}"] if run.returncode else [])


def main():
    page, program = Path(sys.argv[1]), sys.argv[2]
    printed = options_of_help(program, [])
    for command in sys.argv[3:]:
        printed |= options_of_help(program, [command])
    written = options_of_page(page)
    wrong = [f"{page}: no word about {option}, which --help prints" for option in sorted(printed - written)]
    wrong += [f"{page}: {option} is not in --help" for option in sorted(written - printed)]
    wrong += warnings_of_groff(page)
    print("\n".join(wrong + [f"check_man: {page.name}: {len(printed)} options, {len(wrong)} faults"]))
    return 1 if wrong or not printed else 0


if __name__ == "__main__":
    sys.exit(main())
