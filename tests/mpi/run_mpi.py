#!/usr/bin/env python3
"""Runs tests of the backend mpi, and of the backend native under an MPI launcher.

    run_mpi.py openmpi|mpich BUILD [NAME…]

Starts tests/mpi_program and examples of the build with the mpirun of that MPI. Exit code 77: it is skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT_S = 120
SKIPPED = 77
EVERYTHING = "reductions moves messages groups threads devices mismatch late abort".split()


class Mpi:
    """One MPI: its launcher, and what it needs to run as root with more ranks than processors."""

    def __init__(self, name, build):
        self.name = name
        self.build = build
        self.program = build / "tests" / "mpi_program"
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TANDEM_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "MASTER_"))
            and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        }
        self.environment.update(
            TANDEM_PLUGIN_PATH=str(build / "lib" / "tandem" / "plugins"),
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_rmaps_base_oversubscribe="1",
            OMPI_MCA_mpi_yield_when_idle="1",
            TANDEM_TOY_DELAY_US="0",
            # Both MPIs leave memory allocated, by components that are unloaded then, so that no suppression can name them.
            ASAN_OPTIONS=os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0",
        )

        self.launcher = shutil.which(f"mpirun.{name}") or shutil.which("mpirun")
        says = {"openmpi": ("Open MPI", "OpenRTE"), "mpich": ("HYDRA",)}[name]
        version = self.launcher and subprocess.run(
            [self.launcher, "--version"], capture_output=True, text=True, env=self.environment
        )
        if not version or not any(word in version.stdout for word in says):
            print(f"skipped: there is no mpirun of {name}")
            sys.exit(SKIPPED)

    def start(self, ranks, command, variables=None, flags=(), before=()):
        environment = dict(self.environment, **(variables or {}))
        words = [*before, self.launcher, *flags, "-n", ranks, *command]
        process = subprocess.Popen(
            [str(word) for word in words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            output, _ = process.communicate()
            return 124, output
        return process.returncode, output

    def well(self, ranks, command, **more):
        code, output = self.start(ranks, command, **more)
        if code:
            sys.exit(f"{command} with {ranks} ranks: exit code {code}:\n{output}")
        return output


def alone(mpi):
    mpi.well(1, [mpi.program, "alone", "suite"])


def two_ranks(mpi):
    mpi.well(2, [mpi.program, "suite", *EVERYTHING])


def three_ranks(mpi):
    mpi.well(3, [mpi.program, "suite", "reductions", "late", "abort"])


def eight_ranks(mpi):
    mpi.well(8, [mpi.program, "suite"])


def long_calls(mpi):
    """Calls that have more elements than one call of MPI takes."""
    mpi.well(2, [mpi.program, "reductions", "moves"], variables={"MPI_TEST_OPTIONS": "most_count=7"})


def serialized(mpi):
    """A program whose MPI has no MPI_THREAD_MULTIPLE."""
    mpi.well(
        2,
        [mpi.program, "suite", "moves", "messages", "threads", "mismatch"],
        variables={"TANDEM_MPI_THREADS": "serialized"},
    )


def several_hosts(mpi):
    """Ranks that count as being on hosts of their own meet by requests of MPI."""
    script = 'TANDEM_HOST_ID=h$OMPI_COMM_WORLD_RANK$PMI_RANK exec "$@"'
    cases = ["suite", "moves", "mismatch", "late", "abort"]
    mpi.well(3, ["sh", "-c", script, "sh", mpi.program, *cases])


def processors(mpi):
    """Ranks that are bound to a processor each do not share it, whatever the number of processors that each may use."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        print("processors: skipped, since there is only one")
        return
    rank = "OMPI_COMM_WORLD_RANK" if mpi.name == "openmpi" else "PMI_RANK"
    script = f'case ${rank} in 0) c={own[0]};; *) c=%s;; esac; exec taskset -c $c "$@"'
    for second, shared in ((own[0], True), (own[1], False)):
        command = ["sh", "-c", script % second, "sh", mpi.program, "moves"]
        output = mpi.well(2, command, variables={"TANDEM_LOG": "debug"})
        if ("2 ranks share 1 processor" in output) != shared:
            sys.exit(f"processors {own[0]} and {second}: the log should{'' if shared else ' not'} name them:\n{output}")


def native(mpi):
    """The default backend, with rank and size from the launcher."""
    mpi.well(3, [mpi.program, "native"])


def dead_rank(mpi):
    """A rank is killed, where the launcher lets the others live: MPICH's does not."""
    if mpi.name != "openmpi":
        return
    for case in ("dead", "dead_inside"):
        _, output = mpi.start(
            3, [mpi.program, case], variables={"OMPI_MCA_orte_enable_recovery": "1"}
        )
        for text in ("survivor 0: done", "survivor 2: done", "rank 1", "was killed by SIG"):
            if text not in output:
                sys.exit(f"{case}: «{text}» is missing:\n{output}")


def without_launcher(mpi):
    """Under tdrun each process is an MPI of its own."""
    run = [mpi.build / "bin" / "tdrun", "--nproc-per-node", "2", mpi.program, "suite"]
    done = subprocess.run(
        [str(word) for word in run],
        env=dict(mpi.environment, TANDEM_MPI=mpi.name),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if not done.returncode or "start the program with its mpirun" not in done.stdout + done.stderr:
        sys.exit(f"without a launcher: {done.returncode}\n{done.stdout}{done.stderr}")


def wrong_name(mpi):
    code, output = mpi.start(1, [mpi.program, "alone"], variables={"TANDEM_MPI": "lam"})
    if not code or "it is openmpi or mpich" not in output:
        sys.exit(f"TANDEM_MPI=lam: {code}\n{output}")


def training(mpi):
    """DDP and FSDP, with the losses of the backend native."""
    mpi.well(2, [mpi.program, "training"])
    mpi.well(3, [mpi.program, "training"])


def examples(mpi):
    """Programs as they are: DDP, remote calls, and both, over the default backend."""
    programs = ((2, "10_ddp_tdrun"), (2, "17_rpc_training"), (3, "18_parameter_server"), (3, "19_rpc_and_groups"))
    for ranks, name in programs:
        output = mpi.well(ranks, [mpi.build / "examples" / name])
        if "loss" not in output:
            sys.exit(f"{name} has printed no loss:\n{output}")


AGENT = """#!/bin/sh
# Stands for ssh: enters the network namespace of a host, whose name MPI must not see twice.
while case $1 in -*) true;; *) false;; esac; do shift; done
host=$1; shift
exec ip netns exec "%(prefix)s$host" unshare --uts sh -c "hostname td${host##*.}; $*"
"""


def real_hosts(mpi):
    """Two network namespaces as hosts, joined by a pair of interfaces; nothing says where rank 0 is."""
    prefix = f"tdmpi{os.getpid()}-"
    hosts = ("10.97.0.1", "10.97.0.2")

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True).returncode == 0

    spaces = [prefix + host for host in hosts]
    if os.geteuid() or not shutil.which("ip") or not ip("netns", "add", spaces[0]):
        print("real_hosts: skipped, since no network namespaces can be made here")
        return
    folder = Path(tempfile.mkdtemp())
    try:
        agent = folder / "agent"
        agent.write_text(AGENT % {"prefix": prefix})
        agent.chmod(0o755)
        well = ip("netns", "add", spaces[1]) and ip(
            *f"link add e0 netns {spaces[0]} type veth peer name e1 netns {spaces[1]}".split()
        )
        for number, (space, host) in enumerate(zip(spaces, hosts)):
            well = well and ip("-n", space, "addr", "add", f"{host}/24", "dev", f"e{number}")
            well = well and ip("-n", space, "link", "set", f"e{number}", "up")
            well = well and ip("-n", space, "link", "set", "lo", "up")
        if not well:
            print("real_hosts: skipped, since virtual interfaces cannot be made here")
            return
        both = ",".join(f"{host}:2" for host in hosts)
        if mpi.name == "openmpi":
            flags = ["--host", both, "--mca", "plm_rsh_agent", agent, "-x", "TANDEM_PLUGIN_PATH"]
            flags += ["-x", "OMPI_MCA_mpi_yield_when_idle"]
        else:
            flags = ["-localhost", hosts[0], "-hosts", both, "-launcher", "ssh"]
            flags += ["-launcher-exec", agent]
        before = ["ip", "netns", "exec", spaces[0], "unshare", "--uts", "sh", "-c"]
        before += [f'hostname td{hosts[0].split(".")[-1]}; exec "$@"', "sh"]
        mpi.well(4, [mpi.program, "mismatch", "groups"], flags=flags, before=before)
        # Processes that end at other times: the launcher must not take the first that ends for one that has failed.
        rank = "OMPI_COMM_WORLD_RANK" if mpi.name == "openmpi" else "PMI_RANK"
        script = f'"$@" && sleep 0.$((${rank} * 2)) && echo "rank ${rank} is over"'
        output = mpi.well(4, ["sh", "-c", script, "sh", mpi.program, "native"], flags=flags, before=before)
        if output.count("is over") != 4:
            sys.exit(f"native on two hosts: not all ranks have ended by themselves:\n{output}")
    finally:
        for space in spaces:
            ip("netns", "del", space)
        shutil.rmtree(folder)


TESTS = [
    alone, two_ranks, three_ranks, eight_ranks, long_calls, serialized, several_hosts, processors, native, dead_rank,
    without_launcher, wrong_name, training, examples, real_hosts,
]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    mpi = Mpi(sys.argv[1], Path(sys.argv[2]).resolve())
    for test in TESTS:
        if sys.argv[3:] and test.__name__ not in sys.argv[3:]:
            continue
        start = time.monotonic()
        test(mpi)
        print(f"{test.__name__}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
