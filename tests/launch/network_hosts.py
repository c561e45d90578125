"""Several hosts on one machine, as far as a network goes: network namespaces that one bridge connects.

    host 0 ── 10.98.0.1 ──┐
    host 1 ── 10.98.0.2 ──┼── bridge
    host 2 ── 10.98.0.3 ──┘

enter() moves the calling script itself to a namespace that has the bridge, so that nothing is left on the machine
when it ends. Each host is a process that sleeps in a namespace of its own, with a host name of its own.
"""

import os
import shutil
import subprocess
import sys

MARK = "TD_TEST_NETWORK_SPACE"


def can_enter():
    """The words before a command that gives it a network namespace; None where that is not possible."""
    root = ["unshare", "--net", "--mount"]
    for words in (root, ["unshare", "--user", "--map-root-user", "--net", "--mount"]):
        try:
            done = subprocess.run([*words, "ip", "link", "add", "name", "td0", "type", "bridge"],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL, check=False)
        except OSError:
            return None
        if done.returncode == 0:
            return words
    return None


def enter():
    """Starts the calling script again inside; returns when it is, and None or why it cannot be."""
    if os.environ.get(MARK):
        ip("link", "set", "lo", "up")
        return None
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "there are no programs ip and unshare"
    words = can_enter()
    if not words:
        return "no network namespaces with a bridge can be made here"
    environment = {**os.environ, MARK: "1"}
    os.execvpe(words[0], [*words, sys.executable, *sys.argv], environment)


def ip(*words, before=()):
    subprocess.run([*before, "ip", *words], check=True, stdin=subprocess.DEVNULL)


class Hosts:
    def __init__(self, count, mtu=1500):
        self.holders = []
        ip("link", "add", "name", "td-bridge", "type", "bridge")
        ip("link", "set", "td-bridge", "mtu", str(mtu), "up")
        try:
            for number in range(count):
                self.add(number, mtu)
        except BaseException:
            self.close()
            raise

    def add(self, number, mtu):
        ready, write = os.pipe()
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", f"hostname host{number} && echo >&{write} && exec sleep 100000"],
            pass_fds=[write], stdin=subprocess.DEVNULL)
        os.close(write)
        self.holders.append(holder)
        told = os.read(ready, 1)  # the end of the pipe comes when the shell has failed
        os.close(ready)
        if not told:
            raise RuntimeError("a host could not be made")
        link = f"td-link{number}"
        ip("link", "add", "name", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        ip("link", "set", link, "mtu", str(mtu), "master", "td-bridge", "up")
        inside = self.on(number)
        ip("link", "set", "lo", "up", before=inside)
        ip("addr", "add", f"{self.address(number)}/24", "dev", "eth0", before=inside)
        ip("link", "set", "eth0", "mtu", str(mtu), "up", before=inside)

    def address(self, number):
        return f"10.98.0.{number + 1}"

    def on(self, number):
        """The words before a command that runs it on a host."""
        return ["nsenter", "--target", str(self.holders[number].pid), "--net", "--uts", "--"]

    def filter(self, number, rule):
        """Adds a rule of nft for packets that arrive at a host; False where the kernel has no such filters."""
        script = f"add table inet td\nadd chain inet td in {{ type filter hook input priority 0; }}\nadd rule inet td in {rule}\n"
        try:
            done = subprocess.run([*self.on(number), "nft", "-f", "-"], input=script, text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError:
            return False
        return done.returncode == 0

    def cut(self, number):
        ip("link", "set", f"td-link{number}", "down")

    def close(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()
        subprocess.run(["ip", "link", "delete", "td-bridge"], check=False, stdin=subprocess.DEVNULL)
        for number in range(len(self.holders)):
            subprocess.run(["ip", "link", "delete", f"td-link{number}"], check=False, stdin=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
        self.holders = []
