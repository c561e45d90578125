"""Hosts on one machine: namespaces of networks and host names, joined by a bridge.

    this script 10.78.0.1 ── bridge ──┬── a 10.78.0.11
                                      └── b 10.78.0.12

The script is started again (isolate()) in namespaces of processes, mounts and networks: so every port is free, and when
it ends, or is killed, the kernel ends every process in them, and its files, which are on a file system in memory, are
gone with them.
"""

import os
import re
import shutil
import subprocess
import sys
import time

BASE = "/mnt/tandem-test"  # on a file system of the namespace
INSIDE = "TD_TEST_INSIDE_SPACES"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("ip", "unshare", "nsenter", "mount")
ADDRESS = "10.78.0."


def missing(*programs):
    """Why there can be no such hosts here; None where there can."""
    absent = [name for name in (*PROGRAMS, *programs) if not shutil.which(name, path=PATH)]
    if absent:
        return f"there is no {', '.join(absent)}"
    if os.geteuid():
        return "it needs root, for namespaces"
    probe = ["unshare", "--mount", "--net", "--pid", "--uts", "--fork", "--mount-proc", "sh", "-c"]
    probe += ["mount -t tmpfs none /mnt && ip link add br0 type bridge && ip link add va type veth peer name vb"]
    probed = subprocess.run(probe, capture_output=True, text=True, check=False)
    if probed.returncode:
        return f"namespaces cannot be made here: {probed.stderr.strip()}"
    return None


def enter_or_skip(*programs):
    """Goes on in namespaces; ends with 77, and says why, where there can be none."""
    reason = None if os.environ.get(INSIDE) else missing(*programs)
    if reason:
        print(f"skipped: {reason}")
        sys.exit(77)
    isolate()


def isolate():
    if not os.environ.get(INSIDE):
        os.environ[INSIDE] = "1"
        os.environ["PATH"] = PATH
        command = ["unshare", "--mount", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        os.execvp("unshare", [*command, sys.executable, *sys.argv])
    run("mount", "-t", "tmpfs", "-o", "mode=755", "none", "/mnt")
    os.makedirs(BASE)
    write("resolv.conf", "")  # no name server: a query fails at once instead of waiting for one that is not reachable
    run("mount", "--bind", f"{BASE}/resolv.conf", os.path.realpath("/etc/resolv.conf"))


def write(name, text, mode=0o644):
    with open(f"{BASE}/{name}", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{BASE}/{name}", mode)
    return f"{BASE}/{name}"


def run(*command, **options):
    options = {"check": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    try:
        return subprocess.run(command, **options).stdout
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(command)}: {error.output}") from error


def wait_until(condition, what, seconds=30):
    end = time.monotonic() + seconds * int(os.environ.get("TD_TEST_SLOWNESS", "1"))
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


class Hosts:
    def __init__(self, here, names, known=True):
        """`known`: the names can be looked up."""
        self.names = names
        self.holders = []  # a process in the namespaces of each host
        run("hostname", here)
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "br0", "type", "bridge")
        run("ip", "addr", "add", f"{ADDRESS}1/24", "dev", "br0")
        run("ip", "link", "set", "br0", "up")
        for number, name in enumerate(names):
            self.open(number, name)
        if known:
            table = "".join(f"{self.address(name)} {name}\n" for name in names)
            write("hosts", f"127.0.0.1 localhost\n{ADDRESS}1 {here}\n{table}")
            run("mount", "--bind", f"{BASE}/hosts", "/etc/hosts")

    def open(self, number, name):
        script = f"hostname {name} && echo ready && exec sleep infinity"
        holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", script], stdout=subprocess.PIPE)
        holder.stdout.readline()
        holder.stdout.close()
        self.holders.append(holder)
        run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        run("ip", "link", "set", f"v{name}", "master", "br0", "up")
        for command in (
            "link set lo up",
            f"addr add {ADDRESS}{11 + number}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {ADDRESS}1",
        ):
            run(*self.enter(name), "ip", *command.split())

    def address(self, name):
        return f"{ADDRESS}{11 + self.names.index(name)}"

    def enter(self, name):
        """What to put in front of a command that is to run on that host."""
        return ["nsenter", "-t", str(self.holders[self.names.index(name)].pid), "--net", "--uts"]

    def link(self, name, state):
        """Cuts the host off the network, "down", or joins it again, "up"."""
        run("ip", "link", "set", f"v{name}", state)

    def close(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()


def processes():
    """The command lines of all processes of the namespace but this one and the hosts' own."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if line and not re.match(r"sleep infinity|.*rsh\.py serve", line):
            found[int(name)] = line
    return found
