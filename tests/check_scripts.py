#!/usr/bin/env python3
"""Checks that each script of scripts/ explains itself: --help prints its usage, and does nothing else."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def fault(script):
    if not os.access(script, os.X_OK):
        return "cannot be executed"
    run = subprocess.run([script, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    if run.returncode or run.stderr:
        return f"--help ended with {run.returncode}: {run.stderr.strip()}"
    if not run.stdout.startswith("usage: "):
        return "--help does not begin with its usage"
    return None


def main():
    scripts = sorted(path for path in SCRIPTS.iterdir() if path.is_file())
    faults = [f"scripts/{script.name}: {found}" for script in scripts if (found := fault(script))]
    print("\n".join(faults + [f"check_scripts: {len(scripts)} scripts, {len(faults)} faults"]))
    return 1 if faults or not scripts else 0


if __name__ == "__main__":
    sys.exit(main())
