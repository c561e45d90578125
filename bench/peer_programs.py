"""The programs that scripts/bench runs: Tandem's own, and those of the peers that are installed.

Every one of them prints JSON lines with "peer", "op", "ranks", "bytes", "median_us", "min_us" and
"busbw_GBps", by the method that docs/benchmarks.md describes.
"""

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent

# What each peer is, as the table and the plot name it.
NAMES = {
    "tandem": "Tandem",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "gloo": "Gloo",
    "torch": "PyTorch (gloo)",
    "memcpy": "memcpy of all ranks",
}
PEERS = ["openmpi", "mpich", "gloo", "torch"]
PACKAGES = {
    "openmpi": "openmpi-bin libopenmpi-dev",
    "mpich": "mpich libmpich-dev",
    "gloo": "g++ libgloo-dev",
    "torch": "python3-torch, or set PYTHON to an interpreter that imports torch",
}


class Program:
    """How a program is started: command(ranks, operations, sizes, seconds), and its variables."""

    def __init__(self, name, command, variables=None):
        self.name = name
        self.command = command
        self.environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        self.environment.update(variables or {})


def comma(values):
    return ",".join(str(value) for value in values)


def tandem(build, mode):
    flags = {"tcp": ["--transport", "tcp"], "malloc": ["--memory", "malloc"]}.get(mode, [])

    def command(ranks, operations, sizes, seconds):
        run = [build / "bin" / "tdbench", *operations, "-n", ranks, "--bytes", comma(sizes)]
        return [*run, "--time", seconds, "--json", *flags]

    return Program("tandem", command)


def limits(build):
    def command(ranks, operations, sizes, seconds):
        large = [size for size in sizes if size >= 1 << 16] or sizes[-1:]
        return [build / "bench" / "limits", ranks, comma(large), seconds]

    return Program("memcpy", command)


def compiled(compiler, source, output, *libraries):
    """Compiles a peer's program; False where that is not possible."""
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler, "-O2", "-o", output, HERE / "peers" / source, *libraries]
    return subprocess.run(command, capture_output=True).returncode == 0


def find_mpi(name, says):
    """(compiler, launcher) of an MPI: under its Debian names, or as the only one there is."""
    for ending in [f".{name}", ""]:
        compiler, launcher = shutil.which(f"mpicc{ending}"), shutil.which(f"mpirun{ending}")
        if not compiler or not launcher:
            continue
        told = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
        if says in told:
            return compiler, launcher
    return None


def openmpi(mode, binaries):
    found = find_mpi("openmpi", "Open MPI")
    program = binaries / "openmpi_bench"
    if not found or not compiled([found[0]], "mpi_bench.c", program):
        return None
    flags = ["--allow-run-as-root", "--oversubscribe"]
    if mode == "tcp":
        flags += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        flags += ["--mca", "btl_tcp_if_include", "lo"]

    def command(ranks, operations, sizes, seconds):
        run = [found[1], *flags, "-n", ranks, program, "openmpi"]
        return [*run, comma(operations), comma(sizes), seconds]

    return Program("openmpi", command)


def mpich(mode, binaries):
    found = find_mpi("mpich", "HYDRA")
    program = binaries / "mpich_bench"
    if not found or not compiled([found[0]], "mpi_bench.c", program):
        return None
    tcp = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}

    def command(ranks, operations, sizes, seconds):
        run = [found[1], "-n", ranks, program, "mpich"]
        return [*run, comma(operations), comma(sizes), seconds]

    return Program("mpich", command, tcp if mode == "tcp" else None)


def gloo(mode, binaries):
    del mode  # it has sockets only
    program = binaries / "gloo_bench"
    if not compiled(["g++"], "gloo_bench.cc", program, "-lgloo", "-pthread"):
        return None

    def command(ranks, operations, sizes, seconds):
        return [program, ranks, "ring", comma(operations), comma(sizes), seconds]

    return Program("gloo", command)


def torch(mode, binaries):
    del mode, binaries
    for name in [os.environ.get("PYTHON"), "python3", "/usr/bin/python3"]:
        path = name and shutil.which(name)
        test = [path, "-c", "import torch.distributed"]
        if path and subprocess.run(test, capture_output=True).returncode == 0:
            break
    else:
        return None

    def command(ranks, operations, sizes, seconds):
        run = [path, HERE / "peers" / "torch_gloo.py", ranks]
        return [*run, comma(operations), comma(sizes), seconds]

    return Program("torch", command)


def find(names, mode, binaries):
    """The programs of the installed peers; prints which are not installed."""
    makers = {"openmpi": openmpi, "mpich": mpich, "gloo": gloo, "torch": torch}
    found = []
    for name in names:
        program = makers[name](mode, binaries)
        if program:
            found.append(program)
        else:
            print(f"{NAMES[name]} is not installed and is left out: apt-get install "
                  f"{PACKAGES[name]}")
    return found
