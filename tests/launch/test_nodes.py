#!/usr/bin/env python3
"""Jobs of several nodes, all of them on this host: one tdrun for each."""

import os
import signal
import socket
import time

import harness
from harness import Test, free_port, is_alive, read_file, wait_until

STAY = "echo $$ > pid.$RANK.tmp; mv pid.$RANK.tmp pid.$RANK; exec sleep 1000"


class Nodes(Test):
    def setUp(self):
        super().setUp()
        self.port = free_port()

    def start_node(self, nnodes, rank, *arguments, nproc=2, **popen):
        return self.start(
            f"--nnodes={nnodes}", f"--node-rank={rank}", f"--nproc-per-node={nproc}",
            f"--master-port={self.port}", *arguments, **popen,
        )  # fmt: skip

    def start_nodes(self, nnodes, *arguments, nproc=2):
        return [self.start_node(nnodes, rank, *arguments, nproc=nproc) for rank in range(nnodes)]

    def finish(self, jobs, code):
        for job in jobs:
            job.finish()
        for job in jobs:
            self.check_code(job, code)
        self.check_nothing_left()

    def wait_workers(self, count):
        names = [f"pid.{rank}" for rank in range(count)]
        self.wait_files(*names)
        return [int(read_file(self.path(name))) for name in names]


class Work(Nodes):
    def test_two(self):
        show = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE"
        jobs = self.start_nodes(2, "sh", "-c", show)
        self.finish(jobs, 0)
        self.assertEqual(sorted(jobs[0].out.splitlines()), ["0 0 4 2 0 2", "1 1 4 2 0 2"])
        self.assertEqual(sorted(jobs[1].out.splitlines()), ["2 0 4 2 1 2", "3 1 4 2 1 2"])
        self.assertEqual([job.err for job in jobs], ["", ""])

    def test_different_numbers_of_workers_and_roles(self):
        show = "echo $RANK/$WORLD_SIZE $ROLE_RANK/$ROLE_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"
        jobs = [
            self.start_node(3, rank, f"--role={role}", "sh", "-c", show, nproc=nproc)
            for rank, (nproc, role) in reversed(list(enumerate([(1, "a"), (2, "b"), (2, "a")])))
        ]
        self.finish(jobs, 0)
        lines = sorted(line for job in jobs for line in job.out.splitlines())
        where = f"127.0.0.1:{self.port}"
        self.assertEqual(
            lines,
            [f"0/5 0/3 {where}", f"1/5 0/2 {where}", f"2/5 1/2 {where}"]
            + [f"3/5 1/3 {where}", f"4/5 2/3 {where}"],
        )

    def test_numbered_as_they_arrive(self):
        jobs = [
            self.start(
                "--nnodes=3", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=x",
                f"--rdzv-endpoint=localhost:{self.port}", "sh", "-c", "echo $RANK $WORLD_SIZE",
            )
            for _ in range(3)
        ]  # fmt: skip
        self.finish(jobs, 0)
        self.assertEqual(sorted(job.out for job in jobs), ["0 3\n", "1 3\n", "2 3\n"])

    def test_nodes_wait_for_each_other(self):
        """… before the start, and at the end."""
        first = self.start_node(2, 0, "sh", "-c", "touch up.$RANK", nproc=1)
        second = self.start_node(
            2, 1, "sh", "-c", "touch up.$RANK; until [ -e go ]; do sleep 0.01; done", nproc=1
        )
        self.wait_files("up.0", "up.1")
        wait_until(
            lambda: len(harness.children_of(first.agent())) == 0, "the end of the first worker"
        )
        self.assertIsNone(first.process.poll())
        open(self.path("go"), "w").close()
        self.finish([first, second], 0)

    def test_logs_do_not_collide(self):
        jobs = self.start_nodes(2, "--log-dir=logs", "-r1", "sh", "-c", "echo $RANK", nproc=1)
        self.finish(jobs, 0)
        for node in range(2):
            path = self.path(f"logs/none/node_{node}/attempt_0/0/stdout.log")
            self.assertEqual(read_file(path), f"{node}\n")


class Failures(Nodes):
    def test_one_ends_all(self):
        fail = "[ $RANK = 3 ] && { echo failed >&2; exit 5; }; exec sleep 1000"
        jobs = self.start_nodes(3, "sh", "-c", fail)
        self.finish(jobs, 5)
        for job in jobs:
            self.assertRegex(job.err, r"rank 3 \(local rank 1 on node 1, pid \d+\).* exit code 5")
        self.assertIn("    | failed", jobs[1].err)

    def test_signal(self):
        crash = "[ $RANK = 0 ] && kill -ABRT $$; exec sleep 1000"
        jobs = self.start_nodes(2, "sh", "-c", crash)
        self.finish(jobs, 128 + signal.SIGABRT)

    def test_after_others_have_finished(self):
        fail = "[ $GROUP_RANK = 0 ] && exit 0; until [ -e go ]; do sleep 0.01; done; exit 6"
        jobs = self.start_nodes(2, "sh", "-c", fail)
        wait_until(
            lambda: len(harness.children_of(jobs[0].agent())) == 0
            and len(harness.children_of(jobs[1].agent())) == 2,
            "the first node's workers to end",
        )
        open(self.path("go"), "w").close()
        self.finish(jobs, 6)

    def test_restart(self):
        work = (
            "echo $RANK.$TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0;"
            "[ $RANK = $TORCHELASTIC_RESTART_COUNT ] && exit 1; exec sleep 1000"
        )
        jobs = self.start_nodes(2, "--max-restarts=2", "sh", "-c", work, nproc=1)
        self.finish(jobs, 0)
        for rank, job in enumerate(jobs):
            self.assertIn(f"{rank}.2\n", job.out)
            self.assertIn("restart 2 of 2", job.err)

    def test_time_to_end_is_over_with_the_round(self):
        """A failure after a node's own workers had ended leaves nothing for its next workers."""
        work = (
            "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then touch again.$RANK; sleep 0.5; exit 0; fi;"
            "[ $RANK = 0 ] && exit 0; until [ -e go ]; do sleep 0.01; done; exit 1"
        )
        jobs = self.start_nodes(
            2, "--max-restarts=1", "--shutdown-timeout=0.2", "sh", "-c", work, nproc=1
        )
        wait_until(
            lambda: len(harness.children_of(jobs[0].agent())) == 0
            and len(harness.children_of(jobs[1].agent())) == 1,
            "the first node's worker to end",
        )
        open(self.path("go"), "w").close()
        self.finish(jobs, 0)
        self.assertNotIn("killed", jobs[0].err + jobs[1].err)

    def test_restarts_are_used_up(self):
        jobs = self.start_nodes(
            2, "--max-restarts=3", "sh", "-c", "echo x; [ $RANK = 2 ] && exit 4; sleep 1000"
        )
        self.finish(jobs, 4)
        self.assertEqual(jobs[1].err.count("starting all workers again"), 3)

    def test_program_is_missing_on_one(self):
        with open(self.path("odd"), "w", encoding="utf-8") as file:
            file.write("#!/no/such/interpreter\n")
        os.chmod(self.path("odd"), 0o755)
        jobs = [
            self.start_node(2, 0, "sh", "-c", STAY),
            self.start_node(2, 1, "./odd"),
        ]
        self.finish(jobs, 127)
        self.assertIn("interpreter", jobs[0].err)


class Endings(Nodes):
    def test_signal_on_one(self):
        for victim in range(2):
            jobs = self.start_nodes(2, "sh", "-c", STAY)
            self.wait_workers(4)
            jobs[victim].signal(signal.SIGINT)
            self.finish(jobs, 128 + signal.SIGINT)
            self.assertIn("was ended by SIGINT", jobs[1 - victim].err)
            for rank in range(4):
                os.unlink(self.path(f"pid.{rank}"))
            self.port = free_port()

    def killed(self, jobs, victim, process):
        pids = self.wait_workers(2 * len(jobs))
        begin = time.monotonic()
        os.kill(jobs[victim].agent() if process == "agent" else jobs[victim].pid, signal.SIGKILL)
        for rank, job in enumerate(jobs):
            job.finish()
            if rank != victim:
                self.check_code(job, 1)
                self.assertIn(f"the launcher of node {victim} ", job.err)
        self.wait_nothing_left()
        self.assertFalse(any(is_alive(pid) for pid in pids))
        # At once, and not after a time-out of any kind; the least of those is 3 s.
        self.assertLess(time.monotonic() - begin, 30)

    def test_front_of_first_is_killed(self):
        self.killed(self.start_nodes(2, "sh", "-c", STAY), 0, "front")

    def test_front_of_second_is_killed(self):
        self.killed(self.start_nodes(3, "sh", "-c", STAY), 1, "front")

    def test_agent_of_first_is_killed(self):
        self.killed(self.start_nodes(3, "sh", "-c", STAY), 0, "agent")

    def test_agent_of_second_is_killed(self):
        self.killed(self.start_nodes(2, "sh", "-c", STAY), 1, "agent")

    def test_killed_while_others_are_missing(self):
        jobs = [self.start_node(3, rank, "sh", "-c", STAY) for rank in range(2)]
        wait_until(lambda: self.has_arrived(jobs[1]), "the second has arrived")
        jobs[1].signal(signal.SIGKILL)
        jobs[1].finish()
        self.check_code(jobs[0].finish(), 1)
        self.assertIn("the launcher of node 1 ", jobs[0].err)
        self.wait_nothing_left()

    def has_arrived(self, job):
        """The thread of a launcher that has joined the others has another name."""
        tasks = f"/proc/{job.agent()}/task"
        return "td-member\n" in [read_file(f"{tasks}/{task}/comm") for task in os.listdir(tasks)]


class Rendezvous(Nodes):
    def test_missing_nodes_are_named(self):
        jobs = [
            self.start_node(4, rank, "--rdzv-conf=join_timeout=0.5", "true") for rank in (0, 2)
        ]
        self.finish(jobs, 1)
        for job in jobs:
            self.assertRegex(job.err, r"nodes 1, 3 of 4 have not arrived within 0.5 s")

    def test_first_node_is_missing(self):
        job = self.start_node(2, 1, "--rdzv-conf=join_timeout=0.3", "true")
        self.finish([job], 1)
        self.assertIn(str(self.port), job.err)

    def test_same_rank_twice(self):
        jobs = [self.start_node(3, rank, "true") for rank in (0, 1, 1)]
        self.finish(jobs, 1)
        for job in jobs:
            self.assertIn("two launchers were started with --node-rank 1", job.err)

    def test_same_rank_too_late(self):
        """A job that has begun is not disturbed by a launcher too many."""
        jobs = self.start_nodes(2, "sh", "-c", "touch pid.$RANK; until [ -e go ]; do sleep 0.01; done")
        self.wait_files("pid.0", "pid.3")
        late = self.start_node(2, 1, "true").finish()
        self.check_code(late, 1)
        self.assertIn("two launchers", late.err)
        open(self.path("go"), "w").close()
        self.finish(jobs, 0)

    def test_one_too_many(self):
        flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--nnodes=2"]
        hold = "touch pid.$RANK; until [ -e go ]; do sleep 0.01; done"
        jobs = [self.start(*flags, "sh", "-c", hold) for _ in range(2)]
        self.wait_files("pid.0", "pid.1")
        late = self.start(*flags, "true").finish()
        self.check_code(late, 1)
        self.assertIn("has all of its 2 nodes already", late.err)
        open(self.path("go"), "w").close()
        self.finish(jobs, 0)

    def test_differences(self):
        for flag, left, right in [
            ("--max-restarts", "1", "2"),
            ("--rdzv-id", "a", "b"),
        ]:
            self.port = free_port()
            jobs = [
                self.start_node(2, rank, flag, value, "true")
                for rank, value in enumerate([left, right])
            ]
            self.finish(jobs, 1)
            for job in jobs:
                self.assertIn(f"{flag} must be the same on all nodes", job.err)

    def test_different_numbers_of_nodes(self):
        for numbers in (2, 3), (3, 2):
            self.port = free_port()
            jobs = [self.start_node(number, rank, "true") for rank, number in enumerate(numbers)]
            self.finish(jobs, 1)
            for job in jobs:
                self.assertIn("--nnodes must be the same on all nodes", job.err)

    def test_taken_port(self):
        with socket.create_server(("127.0.0.1", self.port)):
            job = self.start_node(2, 0, "true").finish()
        self.check_code(job, 1)
        self.assertIn(str(self.port), job.err)

    def test_interrupted_while_waiting(self):
        for rank in range(2):
            job = self.start_node(2, rank, "true")
            job.agent()
            job.signal(signal.SIGINT)
            self.check_code(job.finish(), 128 + signal.SIGINT)
            self.check_nothing_left()

    def test_secret(self):
        job = self.start_node(2, 0, "--master-addr=192.0.2.1", "true").finish()
        self.check_code(job, 1)
        self.assertIn("TANDEM_SECRET", job.err)
        jobs = [
            self.start_node(2, rank, "sh", "-c", "echo $TANDEM_SECRET", nproc=1,
                            env={"TANDEM_SECRET": "s3cret"})
            for rank in range(2)
        ]  # fmt: skip
        self.finish(jobs, 0)
        self.assertEqual([job.out for job in jobs], ["s3cret\n"] * 2)

    # Node 0 listens on all addresses, and no unix socket belongs to that of node 1: it comes by TCP.
    ADDRESSES = ["--master-addr=0.0.0.0", "--master-addr=127.0.0.2"]

    def test_encrypted(self):
        env = {"TANDEM_TLS": "1", "TANDEM_SECRET": "s3cret", "TANDEM_TRANSPORT": "tcp"}
        bench = [os.path.join(os.path.dirname(harness.TDRUN), "tdbench"), "all_reduce", "-b", "4,64K"]
        jobs = [
            self.start_node(2, rank, address, *bench, "-i", "5", nproc=1, env=env)
            for rank, address in enumerate(self.ADDRESSES)
        ]
        self.finish(jobs, 0)
        self.assertIn("all_reduce", jobs[0].out + jobs[1].out)

    def test_encrypted_on_one_only(self):
        for tls in 0, 1:
            self.port = free_port()
            first, second = [
                self.start_node(2, rank, address, "--rdzv-conf=join_timeout=30", "true", nproc=1,
                                env={"TANDEM_SECRET": "s3cret", "TANDEM_TLS": str(tls ^ rank)})
                for rank, address in enumerate(self.ADDRESSES)
            ]  # fmt: skip
            self.check_code(second.finish(), 1)
            self.assertIn("TANDEM_TLS", second.err)
            first.signal(signal.SIGTERM)
            first.finish()
            self.assertIn("TANDEM_TLS", first.err)

    def test_encryption_needs_a_secret_and_a_sound_value(self):
        job = self.start_node(2, 0, "true", env={"TANDEM_TLS": "1"}).finish()
        self.check_code(job, 1)
        self.assertIn("TANDEM_TLS=1 needs the job's secret", job.err)
        job = self.start("--standalone", "true", env={"TANDEM_TLS": "maybe"}).finish()
        self.check_code(job, 1)
        self.assertIn("TANDEM_TLS", job.err)

    def test_different_secrets(self):
        first = self.start_node(
            2, 0, "--rdzv-conf=join_timeout=20", "true", env={"TANDEM_SECRET": "a"}
        )
        second = self.start_node(2, 1, "true", env={"TANDEM_SECRET": "b"}).finish()
        self.check_code(second, 1)
        self.assertIn("secret", second.err)
        first.signal(signal.SIGTERM)
        first.finish()


if __name__ == "__main__":
    harness.main()
