#!/usr/bin/env python3
"""tdrun doctor on several nodes at the same time: what it compares, and the connections that it tries."""

import os
import select
import signal
import subprocess
import sys

import harness
import network_hosts
from harness import Job, Test, free_port

SECRET = "a secret that is long enough"
NO_HOSTS = None  # why there are none
SLOWNESS = int(os.environ.get("TD_TEST_SLOWNESS", "1"))
LATE = str(120 * SLOWNESS)  # for nodes that come
SOON = str(5 * SLOWNESS)    # for nodes that do not, while others do: the timeout of node 0, which is started last
SOME = str(30 * SLOWNESS)   # for nodes that come, or are killed before
SOONER = "3"                # where none can come


class Nodes(Test):
    """Nodes with addresses of this machine, or of hosts that the test makes."""

    def arguments(self, node, count, address, port, timeout):
        return ["doctor", "--nnodes", str(count), "--node-rank", str(node), "--master-addr", address,
                "--master-port", str(port), "--timeout", timeout]

    def finish_all(self, jobs):
        for job in jobs:
            job.finish()
        self.wait_nothing_left()
        return jobs

    def wait_looking(self, *jobs):
        """Until they have examined their machine, and look for node 0."""
        for job in jobs:
            harness.wait_until(lambda: select.select([job.process.stdout], [], [], 0)[0], "the findings about the machine")

    def lines(self, job, verdict, subject=None):
        found = [line.split(None, 2) for line in job.out.splitlines()]
        return [words[2] for words in found if words[0] == verdict and subject in (None, words[1])]

    def check_fine(self, jobs):
        for job in jobs:
            self.check_code(job, 0)
            self.assertEqual(self.lines(job, "FAIL"), [])
        self.assertIn(f"all {len(jobs)} have come", self.lines(jobs[0], "ok", "nodes"))
        self.assertTrue(self.lines(jobs[0], "ok", "network"), jobs[0].out)
        self.assertTrue(self.lines(jobs[0], "ok", "clocks"), jobs[0].out)


class OneMachine(Nodes):
    def on_loopback(self, *environments, timeout=LATE, ranks=None, count=None):
        """Runs a node for each environment. `timeout` is that of node 0, which is started when the others look for it."""
        port = free_port()

        def begin(i, timeout):
            return self.start(*self.arguments(ranks[i] if ranks else i, count or len(environments), "127.0.0.1", port, timeout),
                              env={"TANDEM_SECRET": SECRET, **environments[i]})

        others = [begin(i, LATE) for i in range(1, len(environments))]
        self.wait_looking(*others)
        return self.finish_all([begin(0, timeout), *others])

    def test_nothing_wrong(self):
        self.check_fine(self.on_loopback({}, {}, {}))

    def test_without_a_secret(self):
        self.check_fine(self.on_loopback({"TANDEM_SECRET": ""}, {"TANDEM_SECRET": ""}))

    def test_encrypted(self):
        self.check_fine(self.on_loopback({"TANDEM_TLS": "1"}, {"TANDEM_TLS": "1"}))

    def test_from_the_environment(self):
        port = str(free_port())
        jobs = [self.start("doctor", "--timeout", LATE, env={
            "TANDEM_SECRET": SECRET, "PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port}) for node in range(2)]
        self.check_fine(self.finish_all(jobs))

    def test_nodes_that_are_numbered_as_they_arrive(self):
        port = str(free_port())
        jobs = [self.start("doctor", "--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                           "--timeout", LATE, env={"TANDEM_SECRET": SECRET}) for _ in range(3)]
        for job in self.finish_all(jobs):
            self.check_code(job, 0)
        self.assertEqual(sum("all 3 have come" in job.out for job in jobs), 1)

    def test_another_secret(self):
        first, second = self.on_loopback({}, {"TANDEM_SECRET": "quite another secret"}, timeout=SOON)
        self.check_code(first, 1)
        self.check_code(second, 1)
        self.assertIn("TANDEM_SECRET is not the same", self.lines(second, "FAIL", "store")[0])
        self.assertIn(f"node 1 of 2 has not come within {SOON} s", self.lines(first, "FAIL", "nodes")[0])

    def test_tls_on_one_side(self):
        for job in self.on_loopback({}, {"TANDEM_TLS": "1"}):
            self.check_code(job, 1)
            self.assertTrue(any("TANDEM_TLS" in line for line in self.lines(job, "FAIL")), job.out)

    def test_nodes_that_do_not_come(self):
        first, other = self.on_loopback({}, {}, ranks=[0, 2], count=5, timeout=SOON)
        for job, limit in ((first, SOON), (other, LATE)):
            self.check_code(job, 1)
            self.assertIn(f"nodes 1, 3, 4 of 5 have not come within {limit} s", self.lines(job, "FAIL", "nodes")[0])
        self.assertTrue(self.lines(first, "ok", "network"), first.out)  # those that came were connected

    def test_a_node_that_is_killed(self):
        port = free_port()
        words = [self.arguments(node, 3, "127.0.0.1", port, SOME) for node in range(3)]
        second = self.start(*words[1], env={"TANDEM_SECRET": SECRET})
        first = self.start(*words[0], env={"TANDEM_SECRET": SECRET})
        harness.wait_until(lambda: self.listens(second.pid), "the listener of node 1")
        second.signal(signal.SIGKILL)
        third = self.start(*words[2], env={"TANDEM_SECRET": SECRET})
        self.finish_all([first, second, third])
        self.check_code(first, 1)
        (line,) = self.lines(first, "FAIL", "nodes")
        self.assertRegex(line, r"^(of nodes 1: they came, and were gone|node 1 of 3 has not come)")
        self.assertEqual(self.lines(first, "FAIL", "network"), [])

    def listens(self, pid):
        """Whether the thread is there that serves the other nodes."""
        try:
            names = [harness.read_file(f"/proc/{pid}/task/{task}/comm") for task in os.listdir(f"/proc/{pid}/task")]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return "td-doctor\n" in names

    def test_no_node_0(self):
        port = free_port()
        job = self.run_job(*self.arguments(1, 2, "127.0.0.1", port, "1"), env={"TANDEM_SECRET": SECRET})
        self.check_code(job, 1)
        self.assertIn(f"127.0.0.1:{port} (Connection refused)", self.lines(job, "FAIL", "store")[0])

    def test_a_number_that_is_given_twice(self):
        # Node 2 does not come: node 0 waits for it, and is still there when the second twin comes late.
        jobs = self.on_loopback({}, {}, {}, ranks=[0, 1, 1], count=3, timeout=SOON)
        twins = [job for job in jobs[1:] if "--node-rank 1 was given twice" in job.out]
        self.assertTrue(twins, jobs[1].out + jobs[2].out)
        self.assertTrue(all(job.code == 1 for job in twins))

    def test_other_numbers_of_nodes(self):
        port = free_port()
        jobs = self.finish_all([
            self.start(*self.arguments(node, count, "127.0.0.1", port, LATE), env={"TANDEM_SECRET": SECRET})
            for node, count in ((0, 2), (1, 3))])
        self.check_code(jobs[0], 1)
        self.check_code(jobs[1], 1)
        self.assertIn('--nnodes: "2" on nodes 0, but "3" on nodes 1', self.lines(jobs[0], "FAIL", "differs")[0])
        self.assertIn("--nnodes is 3 here, and 2 on node 0", self.lines(jobs[1], "FAIL", "nodes")[0])

    def test_settings_that_differ(self):
        first, second, third = self.on_loopback({}, {"TANDEM_HEARTBEAT": "20"}, {})
        for job in (first, second, third):
            self.check_code(job, 0)
        for job in (first, second):
            self.assertIn('TANDEM_HEARTBEAT: "not set" on nodes 0, 2, but "20" on nodes 1',
                          self.lines(job, "note", "differs")[0])
        self.assertEqual(self.lines(third, "note", "differs"), [])

    def test_few_descriptors(self):
        port = free_port()
        limited = ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", harness.TDRUN]
        jobs = self.finish_all([
            self.start(*self.arguments(0, 2, "127.0.0.1", port, LATE), env={"TANDEM_SECRET": SECRET}),
            Job(self, limited[1:] + self.arguments(1, 2, "127.0.0.1", port, LATE), program="sh",
                env={"TANDEM_SECRET": SECRET})])
        self.check_code(jobs[1], 1)
        self.assertIn("100 descriptors for a process are too few", self.lines(jobs[1], "FAIL", "limits")[0])
        self.check_code(jobs[0], 1)  # node 0 says what fails on the others
        self.assertRegex(self.lines(jobs[0], "FAIL", "machine")[0], r"^node 1 \(.*\): limits: 100 descriptors")

    def test_a_secret_that_is_short(self):
        first, _ = self.on_loopback({"TANDEM_SECRET": "abc"}, {"TANDEM_SECRET": "abc"})
        self.check_code(first, 0)
        self.assertIn("has 3 characters", self.lines(first, "note", "secret")[0])
        self.assertNotIn("abc", first.out)

    def test_a_secret_file_that_is_missing(self):
        job = self.run_job("doctor", env={"TANDEM_SECRET_FILE": "/nonexistent/secret"})
        self.check_code(job, 1)
        self.assertIn("/nonexistent/secret", self.lines(job, "FAIL", "secret")[0])

    def test_files_that_may_not_grow(self):
        job = Job(self, ["-c", 'ulimit -f 100; exec "$@"', "sh", harness.TDRUN, "doctor"], program="sh").finish()
        self.check_code(job, 1)
        self.assertIn("ulimit -f", self.lines(job, "FAIL", "memory")[0])

    def test_mistakes(self):
        for words, text in ((["--nnodes", "2", "--node-rank", "2"], "--node-rank 2"), (["--nnodes", "x"], "nnodes"),
                            (["--timeout", "soon"], "timeout"), (["--rdzv-backend", "etcd"], "etcd")):
            job = self.run_job("doctor", *words)
            self.check_code(job, 2)
            self.assertIn(text, job.err)


class Hosts(Nodes):
    """Hosts with a network between them."""

    def setUp(self):
        super().setUp()
        if NO_HOSTS:
            self.skipTest(NO_HOSTS)

    def make(self, count):
        self.hosts = network_hosts.Hosts(count)
        self.addCleanup(self.hosts.close)

    def begin(self, node, count, timeout=LATE, address=None, **env):
        words = [*self.hosts.on(node), harness.TDRUN,
                 *self.arguments(node, count, address or self.hosts.address(0), 29500, timeout)]
        return Job(self, words[1:], program=words[0], env={"TANDEM_SECRET": SECRET, **env})

    def run_on(self, count, **options):
        return self.finish_all([self.begin(node, count, **options) for node in range(count)])

    def filter(self, host, rule):
        if not self.hosts.filter(host, rule):
            self.skipTest("there is no nft, or this kernel does not have it")

    def test_nothing_wrong(self):
        self.make(3)
        jobs = self.run_on(3)
        self.check_fine(jobs)
        self.assertTrue(any("eth0 10.98.0.1, MTU 1500" in text for text in self.lines(jobs[0], "ok", "interface")))
        self.assertIn("containers of one machine", self.lines(jobs[0], "note", "places")[0])

    def test_encrypted(self):
        self.make(2)
        self.check_fine(self.run_on(2, TANDEM_TLS="1"))

    def test_firewalls(self):
        """Of node 0 only the port of the store is open, node 1 drops connections, node 2 rejects them, and node 3
        lets all of them in: each firewall lets its own host's connections out."""
        self.make(4)
        connects = "tcp flags & (syn | ack) == syn"
        self.filter(0, f"iifname eth0 {connects} tcp dport != 29500 drop")
        self.filter(1, f"iifname eth0 {connects} drop")
        self.filter(2, f"iifname eth0 {connects} reject with tcp reset")
        jobs = self.run_on(4)
        reasons = ("no answer within 5 s, .*", "no answer within 5 s, .*", "refused, .*")
        expected = [(origin, target) for origin in range(4) for target in range(3) if origin != target]
        for rank, job in enumerate(jobs):
            self.check_code(job, 1)
            mine = [pair for pair in expected if rank in (0, *pair)]
            broken = self.lines(job, "FAIL", "network")
            self.assertEqual(len(broken), len(mine), job.out)
            for line, (origin, target) in zip(broken, mine):
                back = "works" if origin == 3 else "fails, too"
                self.assertRegex(line, rf"^from node {origin} \(host{origin}\) to node {target} \(host{target}\) at "
                                       rf"10\.98\.0\.{target + 1}, port \d+: {reasons[target]}; the other direction {back}$")
            if len(mine) < len(expected):
                self.assertIn(f"node 0 prints {len(expected) - len(mine)} more that fail", job.out)

    def test_tls_on_one_side(self):
        self.make(2)
        second = self.begin(1, 2, TANDEM_TLS="1")
        self.wait_looking(second)
        self.finish_all([self.begin(0, 2, timeout=SOON), second])
        self.assertIn("TANDEM_TLS is 1 here, but not 1 there", self.lines(second, "FAIL", "store")[0])

    def test_large_packets_are_lost(self):
        self.make(2)
        self.filter(1, "iifname eth0 meta length > 1400 drop")
        for job in self.run_on(2):
            self.check_code(job, 1)
            self.assertTrue(any("packets of full size are lost" in line for line in self.lines(job, "FAIL", "network")), job.out)

    def test_the_store_cannot_be_reached(self):
        self.make(2)
        self.filter(0, "iifname eth0 tcp flags & (syn | ack) == syn drop")
        first, second = self.run_on(2, timeout=SOONER)
        self.assertIn(f"node 1 of 2 has not come within {SOONER} s", self.lines(first, "FAIL", "nodes")[0])
        self.assertIn("10.98.0.1:29500 (", self.lines(second, "FAIL", "store")[0])

    def test_the_address_of_another_host(self):
        self.make(2)
        first, _ = self.run_on(2, address="10.98.0.2", timeout=SOONER)
        self.assertIn("is no address of this machine, though this is node 0", self.lines(first, "FAIL", "master")[0])

    def test_a_host_that_disappears(self):
        self.make(2)
        jobs = [self.begin(0, 3, timeout=SOONER, TANDEM_HEARTBEAT="2"), self.begin(1, 3, timeout=SOONER, TANDEM_HEARTBEAT="2")]
        self.wait_port()
        self.hosts.cut(1)
        self.finish_all(jobs)
        for job in jobs:
            self.check_code(job, 1)

    def wait_port(self):
        """Until node 0 listens."""

        def listens():
            table = subprocess.run([*self.hosts.on(0), "cat", "/proc/net/tcp", "/proc/net/tcp6"], text=True, check=False,
                                   stdout=subprocess.PIPE).stdout
            return ":733C " in table  # 29500

        harness.wait_until(listens, "the store of node 0")


if __name__ == "__main__":
    NO_HOSTS = network_hosts.enter()
    harness.main()
