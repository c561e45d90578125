#!/usr/bin/env python3
"""Nodes of one machine in namespaces of their own, as containers have them: what they share they use, and the end of
a process that others cannot see is noticed all the same.

usage: test_namespaces.py path/to/tdrun path/to/tdbench path/to/postmortem_worker [test…]
"""

import os
import re
import subprocess
import sys

import harness
import network_hosts
from harness import Job, Test, free_port

TDBENCH = WORKER = None
NO_HOSTS = None  # why there are none
USER = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
PROCESSES = ["unshare", *USER, "--pid", "--fork", "--kill-child", "--mount-proc"]
USERS = ["unshare", "--user", "--map-root-user"]
BOTH = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Namespaces(Test):
    def run_nodes(self, befores, *words, address="127.0.0.1"):
        port = free_port()
        jobs = []
        for node, before in enumerate(befores):
            command = [*before, harness.TDRUN, "--nnodes", str(len(befores)), "--node-rank", str(node), "--master-addr",
                       address, "--master-port", str(port), *words]
            jobs.append(Job(self, command[1:], program=command[0], env={"TANDEM_SECRET": "of all these nodes"}))
        for job in jobs:
            job.finish()
        self.wait_nothing_left()
        return jobs

    def possible(self, before, *command):
        try:
            done = subprocess.run([*before, *(command or ["true"])], capture_output=True, check=False)
        except OSError:
            done = None
        if not done or done.returncode:
            self.skipTest(f"{' '.join(before)} is not possible here")

    def check_results(self, befores, **options):
        """Small and large messages, with a rank on each node: tdbench checks all elements."""
        jobs = self.run_nodes(befores, TDBENCH, "all_reduce", "all_gather", "sendrecv", "-b", "4,1M", "--iters", "2", "--warmup", "1", **options)
        for job in jobs:
            self.check_code(job, 0)
        rows = [line.split() for line in jobs[0].out.splitlines() if line.startswith("  ") and re.match(r" +[a-z]", line)]
        self.assertEqual(len(rows), 6, jobs[0].out)

    def check_loss(self, befores, **options):
        """Rank 1 kills itself: a survivor names it, and the other one it or that survivor, which ends because of it."""
        jobs = self.run_nodes(befores, "--on-failure=shrink", WORKER, "kill", "1", **options)
        self.assertIn("SIGKILL", jobs[1].err)
        for job in (jobs[0], jobs[2]):
            self.assertNotEqual(job.code, 0)
            self.assertRegex(job.err, r"rank \d \(on \S+, pid \d+\)")
        self.assertRegex(jobs[0].err + jobs[2].err, r"rank 1 \(on \S+, pid \d+\)")

    def test_one_outside(self):
        self.possible(PROCESSES)
        self.check_results([[], PROCESSES, PROCESSES])
        self.check_loss([[], PROCESSES, []])

    def test_users(self):
        self.possible(USERS)
        self.check_results([USERS] * 3)

    def test_a_user_inside_and_outside(self):
        """The same user, whose number differs."""
        self.possible(USERS)
        self.check_results([[], USERS])

    def test_users_who_only_look_alike(self):
        """Each is user 0 in its own namespace, and another one outside: they use TCP."""
        if os.getuid():
            self.skipTest("only root can be several users")
        os.chmod(self.dir, 0o777)
        befores = [["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", *USERS] for user in (1234, 1235)]
        self.possible(befores[0], TDBENCH, "--help")
        self.check_results(befores)

    def test_users_and_processes(self):
        self.possible(BOTH)
        self.check_results([BOTH] * 3)
        self.check_loss([BOTH] * 3)

    def test_networks(self):
        if NO_HOSTS:
            self.skipTest(NO_HOSTS)
        hosts = network_hosts.Hosts(3)
        self.addCleanup(hosts.close)
        befores = [[*hosts.on(node), *PROCESSES] for node in range(3)]
        self.check_results(befores, address=hosts.address(0))
        self.check_loss(befores, address=hosts.address(0))


if __name__ == "__main__":
    NO_HOSTS = network_hosts.enter()
    TDBENCH = os.path.abspath(sys.argv.pop(2))
    WORKER = os.path.abspath(sys.argv.pop(2))
    harness.main()
