#!/usr/bin/env python3
"""tdcheck finds what is wrong: test_tdcheck.py TDCHECK PLUGINS SOURCE

Runs tdcheck on the device "plain" (plain_plugin.c) with one fault at a time, each of which must be found by the operator
that it breaks, and by that one only; on the device "toy" with other roundings, which must pass, and with errors in all
kernels (toy_arithmetic.c), which nearly all operators must find; and checks that its table has every operator of ops.h.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# Fault -> operator that fails, what stands in the report, operators that pass all the same.
FAULTS = {
    "unary": ("exp", "on the host and", "f_tanh"),
    "last": ("add", "element 4098 is", "mul"),
    "nan": ("f_relu", "is nan on the host and 0 on the device", "exp"),
    "beside": ("clamp_", "the memory of operand 0", "clamp"),
    "gradient": ("f_tanh", "the gradient of operand 0", "f_sigmoid"),
    "wait": ("matmul", "the host has waited", "add"),
    "bits": ("linear", "on the host and", "matmul"),
    "uniform": ("uniform_", "element 0 is", "normal_"),
    "copy_in": ("transfers", "element", ""),  # whatever comes back to the host is wrong, too
}

# TANDEM_TOY_ARITHMETIC -> what it does, and the operators of f32 that it does not change.
UNCHANGED = "arange linspace pinned_copies devices item all any"  # computed by the host, or one element
ARITHMETIC = {
    2: ("few bits", "full sign eq ne lt le gt ge eq_scalar ne_scalar lt_scalar le_scalar gt_scalar ge_scalar logical_and "
        "logical_or logical_xor logical_not isnan equal fill_ zero_ bernoulli_ random_range_ "
        "linear_autocast"),  # fit into few bits, or are rounded to fewer
    3: ("last row", "transfers"),
    4: ("odd sizes", "transfers"),
    5: ("no strides", "expand expand_grad full streams equal dropout dropout2d uniform_ normal_ bernoulli_ random_ "
        "random_range_ sgd adam adamw clip_grad_norm_ clip_grad_value_ cross_entropy_rows"),  # their operands are contiguous, or none
}

program, plugins, source = sys.argv[1], sys.argv[2], Path(sys.argv[3])
failures = []


def run(*arguments, fault="", device="plain", **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    environment.update(TANDEM_PLUGIN_PATH=f"{plugins}/{device}", TANDEM_PLAIN_FAULT=fault, **variables)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


def expect(what, condition, output):
    if not condition:
        failures.append(f"{what}\n{output}")


def check_faults():
    for fault, (broken, text, sound) in FAULTS.items():
        code, output = run("plain:0", "--only", f"{broken},{sound}".rstrip(","), fault=fault)
        expect(f"{fault}: {broken} must fail", code == 1 and re.search(rf"(?m)^failed +{broken} ", output), output)
        expect(f"{fault}: the report says \"{text}\"", text in output, output)
        expect(f"{fault}: {sound} must pass", not sound or re.search(rf"(?m)^passed +{sound} ", output), output)
        again = re.search(rf"again: tdcheck (plain:0 --only {broken} --dtype \w+ --seed 1)$", output, re.M)
        expect(f"{fault}: the command to repeat it", again, output)
        if again:
            code, output = run(*again[1].split(), fault=fault)
            expect(f"{fault}: it is repeated", code == 1 and text in output, output)
        code, output = run("plain:0", "--only", broken)
        expect(f"{broken} passes without the fault", code == 0, output)


def check_arithmetic():
    def run_toy(number, *arguments):
        return run("toy:0", *arguments, device="toy", TANDEM_TOY_DELAY_US="0", TANDEM_TOY_ARITHMETIC=str(number))

    code, output = run_toy(1)
    expect("other roundings are no failure", code == 0, output)
    for number, (what, unchanged) in ARITHMETIC.items():
        code, output = run_toy(number, "--dtype", "f32")
        passed = set(re.findall(r"(?m)^passed +(\S+)", output)) - set(f"{UNCHANGED} {unchanged}".split())
        expect(f"{what}: {' '.join(sorted(passed))} must fail", code == 1 and not passed, "")


def check_missing():
    only = ("plain:0", "--only", "softmax,where,add")
    code, output = run(*only, fault="missing")
    expect("missing operators are no failure", code == 0 and re.search(r"(?m)^missing +softmax ", output), output)
    code, output = run(*only, "--strict", fault="missing")
    expect("with --strict they are", code == 1, output)
    code, output = run(*only, "--strict", fault="missing", TANDEM_FALLBACK="cpu")
    expect("TANDEM_FALLBACK=cpu computes them", code == 0 and "missing " not in output.split("\n")[0], output)


def check_command_line():
    for wrong in (["plain:0", "--only", "nonsense"], ["plain:0", "--dtype", "f3"], [], ["plain:0", "plain:1"]):
        code, output = run(*wrong)
        expect(f"tdcheck {' '.join(wrong)} is a wrong command line", code == 2, output)
    code, output = run("absent:0")
    expect("a device that is not there", code == 1 and "absent" in output, output)


def check_table():
    """Every function of ops.h is called by a row: td_exp as UNARY(exp, …), or by its name."""
    header = (source / "include/tandem/ops.h").read_text(encoding="utf-8")
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((source / "tools").glob("tdcheck*.c")))
    named = set(re.findall(r"\btd_\w+", text))
    named |= {f"td_{name}" for name in re.findall(r"\b(?:UNARY|BINARY|SCALAR)\((\w+)", text)}
    # Each of these is its longer form without options.
    named |= {name[: -len("_with")] for name in named if name.endswith("_with")}
    absent = set(re.findall(r"(?m)^TD_API [^(]*?\b(td_\w+)\(", header)) - named
    expect("operators of ops.h that are not in the table", not absent, " ".join(sorted(absent)))


check_faults()
check_arithmetic()
check_missing()
check_command_line()
check_table()
print("\n".join(failures) or "test_tdcheck: all faults were found")
sys.exit(1 if failures else 0)
