"""Network namespaces as the hosts of one network, and programs in them.

    host 0 ── eth0 10.98.0.1 ──┐
    host 1 ── eth0 10.98.0.2 ──┼── bridge, in a namespace of its own
    host 2 ── eth0 10.98.0.3 ──┘

Nothing of it is in the namespace of this machine, so no address of it can be in the way.
"""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

LIMIT_S = 300  # for one command


def ip(*words):
    subprocess.run(["ip", *[str(word) for word in words]], check=True, capture_output=True)


class Network:
    """As many hosts; `rate` is what a link carries in each direction, in bits/s as tc writes it."""

    def __init__(self, hosts, rate=None):
        self.prefix = f"tdb{os.getpid()}"
        self.hosts = hosts
        self.rate = rate
        self.made = []

    def name(self, host):
        return f"{self.prefix}h{host}"

    @staticmethod
    def address(host):
        return f"10.98.0.{host + 1}"

    def _space(self, name):
        ip("netns", "add", name)
        self.made.append(name)
        ip("-n", name, "link", "set", "lo", "up")

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_):
        self.remove()

    def _make(self):
        switch = f"{self.prefix}s"
        self._space(switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name = self.name(host)
            self._space(name)
            ip("-n", switch, "link", "add", f"p{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", f"p{host}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            if self.rate:
                limit = ["root", "tbf", "rate", self.rate, "burst", "1mb", "latency", "50ms"]
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit], check=True)

    def remove(self):
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self.made = []

    def processors(self, host):
        """Those of a host, as taskset writes them: real hosts do not share theirs. Where there are too few, some do."""
        own = sorted(os.sched_getaffinity(0))
        return ",".join(map(str, own[host :: self.hosts] or [own[host % len(own)]]))

    def enter(self, host):
        """The beginning of a command that runs on a host: its network, its processors, and its name."""
        return ["ip", "netns", "exec", self.name(host), "taskset", "-c", self.processors(host), "unshare", "--uts",
                "sh", "-c", f'hostname td-host{host}; exec "$@"', "sh"]


def run_all(commands):
    """Runs (command, variables) at the same time; returns the output of the first, None if one fails or takes too long."""
    out = tempfile.TemporaryFile("w+")
    error = tempfile.TemporaryFile("w+")
    children = []
    try:
        for command, variables in commands:
            children.append(subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                             stdout=error if children else out, stderr=error,
                                             env=dict(os.environ, **variables), start_new_session=True))
        end = time.monotonic() + LIMIT_S
        for child in children:
            child.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:  # with all that they have started
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    out.seek(0)
    error.seek(0)
    if any(child.returncode for child in children):
        return None, error.read()[-600:]
    return out.read(), ""


# ---- Programs: (command, variables) for each host ------------------------------------------------


def tandem(build, flat=False, tls=False):
    def commands(network, ranks, operations, sizes, seconds):
        program = [build / "bin" / "tdbench", *operations, "--bytes", ",".join(map(str, sizes)), "--time", seconds,
                   "--json", "--no-check", *(["--transport", "tcp"] if flat else [])]
        for host in range(network.hosts):
            launcher = [build / "bin" / "tdrun", "--nnodes", network.hosts, "--node-rank", host,
                        "--master-addr", network.address(0), "--nproc-per-node", ranks]
            variables = {"TANDEM_SECRET": "of a benchmark", "TANDEM_TLS": "1" if tls else "0"}
            yield [*network.enter(host), *launcher, *program], variables

    return commands


def openmpi(launcher, program, directory):
    """Its daemons are started by a script in place of ssh, which enters the namespace of an address."""

    def commands(network, ranks, operations, sizes, seconds):
        agent = Path(directory) / "agent"
        cases = "".join(f"{network.address(host)}) n={host} c={network.processors(host)};; " for host in range(network.hosts))
        agent.write_text(
            f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\ncase "$1" in {cases}esac\nshift\n'
            f'exec ip netns exec {network.prefix}h$n taskset -c $c unshare --uts sh -c "hostname td-host$n; $*"\n'
        )
        agent.chmod(0o755)
        slots = ",".join(f"{network.address(host)}:{ranks}" for host in range(network.hosts))
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--host", slots]
        for name, value in [("plm_rsh_agent", agent), ("pml", "ob1"), ("btl", "tcp,self,vader"),
                            ("btl_tcp_if_include", "eth0"), ("oob_tcp_if_include", "eth0")]:
            flags += ["--mca", name, value]
        yield ([*network.enter(0), launcher, *flags, "-n", network.hosts * ranks, program, "openmpi",
                ",".join(operations), ",".join(map(str, sizes)), seconds], {})

    return commands


def gloo(program, algorithm, directory):
    def commands(network, ranks, operations, sizes, seconds):
        meeting = tempfile.mkdtemp(dir=directory)
        for host in range(network.hosts):
            own = ",".join(str(host * ranks + rank) for rank in range(ranks))
            variables = {"GLOO_SOCKET_IFNAME": "eth0", "GLOO_BENCH_RANKS": own, "GLOO_BENCH_DIRECTORY": meeting}
            yield ([*network.enter(host), program, network.hosts * ranks, algorithm, ",".join(operations),
                    ",".join(map(str, sizes)), seconds], variables)

    return commands
