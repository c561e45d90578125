#!/usr/bin/env python3
"""Jobs whose nodes come and go (--nnodes MIN:MAX), and launchers that die or are cut off: one tdrun for each node."""

import os
import re
import signal
import sys
import time

import harness
import network_hosts
from harness import Test, free_port, processes_with, read_file, wait_until

# A worker says where it is, in a file for each start, and stays until there is the file `go`.
STAY = (
    'echo "$RANK/$WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE '
    '$TORCHELASTIC_RESTART_COUNT $TANDEM_ROUND ${TANDEM_JOIN:-0} $MASTER_PORT" >> says.$TANDEM_ROUND;'
    "until [ -e go ]; do sleep 0.01; done"
)
CONF = "last_call_timeout=0.2,join_timeout=20"


class ElasticTest(Test):
    def setUp(self):
        super().setUp()
        self.port = free_port()

    def start_node(self, *arguments, nnodes="2:3", nproc=2, conf=CONF, program=STAY, **popen):
        return self.start(
            f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}",
            f"--rdzv-conf={conf}", f"--nproc-per-node={nproc}", *arguments, "sh", "-c", program,
            **popen,
        )  # fmt: skip

    def says(self, round):
        return sorted((read_file(self.path(f"says.{round}")) or "").splitlines())

    def wait_round(self, round, workers):
        wait_until(lambda: len(self.says(round)) == workers, f"{workers} workers in round {round}")
        return self.says(round)

    def start_nodes(self, count, *arguments, **options):
        """Starts nodes one after another, so that they have the ranks of their places in the list."""
        jobs = []
        for _ in range(count):
            jobs.append(self.start_node(*arguments, **options))
            wait_until(lambda: self.has_joined(jobs[-1]), "the launcher to join")
        return jobs

    def has_joined(self, job):
        tasks = f"/proc/{job.agent()}/task"
        return "td-member\n" in [read_file(f"{tasks}/{task}/comm") for task in os.listdir(tasks)]

    def go(self):
        open(self.path("go"), "w").close()

    def finish(self, jobs, code=0):
        for job in jobs:
            self.check_code(job.finish(), code)
        self.wait_nothing_left()

    def kill(self, job):
        job.signal(signal.SIGKILL)
        job.finish()


class RestartAll(ElasticTest):
    def test_starts_with_the_least_number(self):
        """… when the last call is over."""
        jobs = self.start_nodes(2)
        says = self.wait_round(0, 4)
        for rank, line in enumerate(says):
            self.assertEqual(
                line, f"{rank}/4 {rank // 2}/2 {rank % 2}/2 0 0 0 {self.port}"
            )
        self.go()
        self.finish(jobs)
        self.assertEqual([job.err for job in jobs], ["", ""])

    def test_does_not_wait_when_all_are_there(self):
        jobs = self.start_nodes(3, nproc=1, conf="last_call_timeout=1000")
        self.wait_round(0, 3)
        self.go()
        self.finish(jobs)

    def test_a_node_that_joins_and_one_that_dies(self):
        """All workers start again, with the right numbers; that is no restart after a failure."""
        jobs = self.start_nodes(2)
        self.wait_round(0, 4)
        jobs.append(self.start_node())
        says = self.wait_round(1, 6)
        self.assertEqual([line.split()[0] for line in says], [f"{rank}/6" for rank in range(6)])
        self.assertEqual({line.split()[1] for line in says}, {"0/3", "1/3", "2/3"})
        self.kill(jobs.pop(1))
        says = self.wait_round(2, 4)
        self.assertEqual([line.split()[0] for line in says], [f"{rank}/4" for rank in range(4)])
        self.assertEqual({line.split()[3] for line in says}, {"0"})
        self.go()
        self.finish(jobs)
        for job in jobs:
            self.assertRegex(job.err, r"the launcher of node 1 \(process \d+ on \S+\) has ended; all workers")
            self.assertIn("starting all workers again, on 2 nodes", job.err)

    def test_the_node_that_has_the_store_dies(self):
        """Another one takes over, with a store of its own."""
        jobs = self.start_nodes(3, nproc=1)
        self.wait_round(0, 3)
        self.kill(jobs.pop(0))
        says = self.wait_round(1, 2)
        ports = {line.split()[-1] for line in says}
        self.assertEqual(len(ports), 1)
        self.assertNotEqual(ports, {str(self.port)})
        self.go()
        self.finish(jobs)
        for job in jobs:
            self.assertRegex(job.err, r"the launcher of node 0 .* has ended; node 1 \(on \S+\) has taken over")

    def test_too_few_are_left(self):
        jobs = self.start_nodes(2, nproc=1, conf="last_call_timeout=0,join_timeout=0.5")
        self.wait_round(0, 2)
        self.kill(jobs.pop(1))
        self.finish(jobs, 1)
        self.assertIn("1 of at least 2 nodes is left, and no other has joined within 0.5 s", jobs[0].err)

    def test_too_few_are_left_until_one_joins(self):
        jobs = self.start_nodes(2, nproc=1)
        self.wait_round(0, 2)
        self.kill(jobs.pop(1))
        wait_until(lambda: b"has ended" in jobs[0].process.stderr.readline(), "the loss")
        jobs.append(self.start_node(nproc=1))
        self.wait_round(1, 2)
        self.go()
        self.finish(jobs)

    def test_too_few_arrive(self):
        job = self.start_node(conf="join_timeout=0.3").finish()
        self.check_code(job, 1)
        self.assertIn("1 of at least 2 nodes has arrived within 0.3 s", job.err)

    def test_a_failure_is_a_restart(self):
        work = 'case $RANK$TANDEM_ROUND in 10) exit 3;; esac;' + STAY
        jobs = self.start_nodes(2, "--max-restarts=1", nproc=1, program=work)
        says = self.wait_round(1, 2)
        self.assertEqual({line.split()[3] for line in says}, {"1"})
        self.go()
        self.finish(jobs)
        for job in jobs:
            self.assertIn("starting all workers again (restart 1 of 1)", job.err)

    def test_workers_that_fail_because_a_node_has_died(self):
        """That is no failure of theirs: no restart is left here, and the job goes on."""
        work = (
            "if [ $TANDEM_ROUND = 0 ] && [ $RANK = 0 ]; then until [ -e pid ]; do sleep 0.01; done;"
            "while kill -0 $(cat pid) 2>&-; do sleep 0.01; done; exit 5; fi;"
            "[ $TANDEM_ROUND$RANK = 01 ] && { echo $$ > pid.tmp; mv pid.tmp pid; };" + STAY
        )
        conf = "last_call_timeout=100"  # nobody starts before both are there
        jobs = self.start_nodes(2, nnodes="1:2", nproc=1, program=work, conf=conf)
        self.wait_files("pid")
        self.kill(jobs.pop(1))
        self.wait_round(1, 1)
        self.go()
        self.finish(jobs)

    def test_interrupted(self):
        """In each state a signal to one ends all."""
        for count, rounds in (1, 0), (2, 1):
            for victim in range(count):
                jobs = self.start_nodes(count, nproc=1)
                self.wait_round(0, 2) if rounds else None
                jobs[victim].signal(signal.SIGINT)
                self.finish(jobs, 128 + signal.SIGINT)
                if rounds:
                    os.unlink(self.path("says.0"))
                    self.port = free_port()

    def test_one_too_many(self):
        jobs = self.start_nodes(2, nnodes="1:2", nproc=1, conf="last_call_timeout=100")
        self.wait_round(0, 2)
        late = self.start_node(nnodes="1:2", nproc=1).finish()
        self.check_code(late, 1)
        self.assertIn("has all of its 2 nodes already", late.err)
        self.go()
        self.finish(jobs)


class OthersGoOn(ElasticTest):
    def test_a_node_that_joins(self):
        """Its workers are newcomers, with ranks that no living worker has."""
        jobs = self.start_nodes(3, "--on-failure=replace", nproc=1, nnodes="1:3", conf="last_call_timeout=100")
        self.wait_round(0, 3)
        self.kill(jobs.pop(1))
        self.assertRegex(
            jobs[0].process.stderr.readline().decode(),
            r"the launcher of node 1 \(process \d+ on \S+\) has ended; its workers are lost with it",
        )
        jobs.append(self.start_node("--on-failure=replace", nproc=1, nnodes="1:3"))
        says = self.wait_round(0, 4)
        self.assertEqual([line.split()[0] for line in says], ["0/3", "1/3", "1/3", "2/3"])
        self.assertEqual(sorted(line.split()[5] for line in says), ["0", "0", "0", "1"])
        self.assertEqual(len({line.split()[-1] for line in says}), 1)
        self.go()
        self.finish(jobs)

    def test_every_launcher_may_die(self):
        jobs = self.start_nodes(4, "--on-failure=shrink", nproc=1, nnodes="1:4", conf="last_call_timeout=100")
        self.wait_round(0, 4)
        for _ in range(3):
            self.kill(jobs.pop(0))
        self.go()
        self.finish(jobs)
        self.assertEqual(len(self.says(0)), 4)


# A worker that leaves when the page of orders says so, and reports that.
LEAVES = """
import mmap, os, struct, sys, time
page = mmap.mmap(int(os.environ["TANDEM_ORDERS_FD"]), 4096, prot=mmap.PROT_READ)
while not os.path.exists("go"):
    magic, version, leave = struct.unpack_from("3I", page)
    if leave:
        print("leaves", version)
        sys.exit(0)
    time.sleep(0.01)
"""


class Drain(ElasticTest):
    def drain(self, name):
        return self.start("drain", name).finish()

    def test_others_start_again_without_it(self):
        for victim in (2, 0):
            jobs = self.start_nodes(3, nproc=1, nnodes="2:3")
            self.wait_round(0, 3)
            asked = self.drain(str(victim))
            self.check_code(asked, 0)
            self.assertIn(f"node {victim} (on ", asked.out)
            gone = jobs.pop(victim).finish()
            self.check_code(gone, 0)
            self.assertIn("this node leaves the job", gone.err)
            says = self.wait_round(1, 2)
            self.assertEqual([line.split()[0] for line in says], ["0/2", "1/2"])
            self.go()
            self.finish(jobs)
            for name in ("go", "says.0", "says.1"):
                os.unlink(self.path(name))
            self.port = free_port()

    def test_others_go_on(self):
        """The workers of that node see the order, and leave by themselves."""
        program = STAY.split(";")[0] + f"; exec python3 -c '{LEAVES}'"
        jobs = self.start_nodes(2, "--on-failure=replace", nproc=1, nnodes="1:2", program=program)
        self.wait_round(0, 2)
        self.check_code(self.drain("1"), 0)
        gone = jobs.pop(1).finish()
        self.check_code(gone, 0)
        self.assertEqual(gone.out, "leaves 1\n")
        self.assertRegex(jobs[0].process.stderr.readline().decode(), r"node 1 \(on \S+\) leaves the job\n")
        self.go()
        self.finish(jobs)

    def test_what_cannot_be_drained(self):
        jobs = self.start_nodes(2, nproc=1, nnodes="2:3")
        self.wait_round(0, 2)
        for name, why in ("7", "no node of it is number 7"), ("nohost", "no node of it is on host nohost"), ("1", "it needs all of its 2 nodes"):
            asked = self.drain(name)
            self.check_code(asked, 1)
            self.assertIn(why, asked.err)
        self.go()
        self.finish(jobs)
        self.check_code(self.drain("1"), 1)


class CutOff(ElasticTest):
    """Hosts that are cut off: namespaces of a network."""

    def setUp(self):
        super().setUp()
        if REASON:
            self.skipTest(REASON)
        self.hosts = network_hosts.Hosts(3)
        self.addCleanup(self.hosts.close)

    def start_hosts(self, *arguments):
        jobs = []
        env = {"TANDEM_SECRET": "of this test", "TANDEM_HEARTBEAT": "1"}
        for number in range(3):
            words = [*self.hosts.on(number), harness.TDRUN]
            jobs.append(
                self.start(
                    *words[1:], "--nnodes=1:3", "--rdzv-backend=c10d",
                    f"--rdzv-endpoint={self.hosts.address(0)}:29500", "--rdzv-conf=last_call_timeout=100",
                    *arguments, "sh", "-c", STAY, program=words[0], env=env,
                )
            )  # fmt: skip
            if number == 0:
                wait_until(lambda: self.is_listening(0), "node 0's store")
            else:
                time.sleep(0.3)
        self.wait_round(0, 3)
        return jobs

    def is_listening(self, number):
        pid = self.hosts.holders[number].pid
        return ":733C " in (read_file(f"/proc/{pid}/net/tcp") or "") + (read_file(f"/proc/{pid}/net/tcp6") or "")

    def check_cut(self, victim, *arguments):
        jobs = self.start_hosts(*arguments)
        self.hosts.cut(victim)
        begin = time.monotonic()
        cut = jobs.pop(victim)
        lines = [job.process.stderr.readline().decode() for job in jobs]
        for line in lines:
            self.assertRegex(
                line,
                rf"the launcher of node {victim} \(process \d+ on host{victim}\) has not answered for 1 s: "
                "its host is down, or cut off from the network",
            )
        passed = time.monotonic() - begin
        self.check_code(cut.finish(), 1)
        self.assertRegex(cut.err, "1 of the 3 nodes of the job can reach each other here")
        return jobs, passed

    def test_a_member(self):
        jobs, passed = self.check_cut(2)
        self.assertLess(passed, 2 * int(os.environ.get("TD_TEST_SLOWNESS", "1")) + 5)
        self.wait_round(1, 2)
        self.go()
        self.finish(jobs)

    def test_the_coordinator(self):
        jobs, _ = self.check_cut(0)
        self.wait_round(1, 2)
        self.go()
        self.finish(jobs)

    def test_the_coordinator_while_the_others_go_on(self):
        jobs, _ = self.check_cut(0, "--on-failure=shrink")
        self.go()
        self.finish(jobs)


if __name__ == "__main__":
    REASON = network_hosts.enter()
    harness.main()
