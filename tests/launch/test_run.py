#!/usr/bin/env python3
"""Jobs on one node: what workers get, how they end, and what tdrun makes of it."""

import os
import re
import resource
import signal
import socket
import subprocess
import time

import harness
from harness import Test, read_file

# Rank 2 dies; the others fail at once because its end of a pipe closes. They often end first.
CAUSE_AND_CONSEQUENCE = """
import os, sys
rank = int(os.environ["RANK"])
pipes = [os.environ["TEST_DIR"] + f"/fifo{i}" for i in range(4) if i != 2]
if rank == 2:
    held = [os.open(path, os.O_WRONLY) for path in pipes]
    os.kill(os.getpid(), int(sys.argv[1])) if len(sys.argv) > 1 else os._exit(7)
os.read(os.open(os.environ["TEST_DIR"] + f"/fifo{rank}", os.O_RDONLY), 1)
os._exit(1)
"""


class Environment(Test):
    def variables(self, *arguments, **popen):
        """The environments of all workers, by rank."""
        job = self.run_job(*arguments, "sh", "-c", "env > $TEST_DIR/env.$RANK", **popen)
        self.check_code(job, 0)
        return [
            dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            for text in iter(self.next_file("env"), None)
        ]

    def next_file(self, name):
        numbers = iter(range(1000))
        return lambda: read_file(self.path(f"{name}.{next(numbers)}"))

    def test_all_variables(self):
        workers = self.variables(
            "--standalone", "--nproc-per-node=3", "--role=actor", "--rdzv-id=run7",
            "--max-restarts=2",
        )  # fmt: skip
        self.assertEqual(len(workers), 3)
        for rank, worker in enumerate(workers):
            expected = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "ROLE_RANK": str(rank),
                "ROLE_NAME": "actor",
                "ROLE_WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "2",
                "TORCHELASTIC_RUN_ID": "run7",
                "OMP_NUM_THREADS": "1",
                "TANDEM_AGENT_STORE": f"127.0.0.1:{worker['MASTER_PORT']}",
            }
            self.assertEqual({name: worker.get(name) for name in expected}, expected)
            self.assertRegex(worker["TANDEM_SECRET"], "^[0-9a-f]{64}$")
        self.assertEqual(len({worker["MASTER_PORT"] for worker in workers}), 1)

    def test_what_is_there_already(self):
        (worker,) = self.variables(env={"RANK": "9", "WORLD_SIZE": "10", "MINE": "a=b"})
        self.assertEqual(worker["RANK"], "0")
        self.assertEqual(worker["MINE"], "a=b")
        self.assertNotIn("OMP_NUM_THREADS", worker)
        self.assertEqual(worker["TORCHELASTIC_RUN_ID"], "none")
        workers = self.variables("--nproc-per-node=2", env={"OMP_NUM_THREADS": "5"})
        self.assertEqual([worker["OMP_NUM_THREADS"] for worker in workers], ["5", "5"])

    def test_secret(self):
        (worker,) = self.variables("--standalone", env={"TANDEM_SECRET": "the user's"})
        self.assertEqual(worker["TANDEM_SECRET"], "the user's")
        with open(self.path("secret"), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write("from a file")
        (worker,) = self.variables(
            "--standalone", env={"TANDEM_SECRET_FILE": self.path("secret")}
        )
        self.assertNotIn("TANDEM_SECRET", worker)

    def test_run_ids_differ(self):
        ids = {self.variables("--standalone")[0]["TORCHELASTIC_RUN_ID"] for _ in range(2)}
        self.assertEqual(len(ids), 2)

    def test_limits_and_signals_are_the_users(self):
        show = (
            "import resource, signal;"
            "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0],"
            "      signal.getsignal(signal.SIGTTOU) == signal.SIG_DFL,"
            "      len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
        )
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        job = self.run_job(
            "--standalone", "python3", "-c", show,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard)),
        )  # fmt: skip
        self.assertEqual(job.out, "100 True 0\n")

    def test_no_descriptors_leak(self):
        show = (
            "import os; orders = os.environ['TANDEM_ORDERS_FD']\n"
            "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd') if fd != orders)[:-1])"
        )
        job = self.run_job("--standalone", "--nproc-per-node=2", "python3", "-c", show)
        for line in job.out.splitlines():
            self.assertRegex(line, r"^\[0, 1, 2, 3(, 1023)?\]$")  # 3 is the listing itself


class Ports(Test):
    def test_two_runs_beside_each_other(self):
        hold = 'touch $TEST_DIR/up.$1; until [ -e $TEST_DIR/go ]; do sleep 0.01; done; echo $MASTER_PORT'
        jobs = [self.start("sh", "-c", hold, "-", str(i)) for i in range(2)]
        self.wait_files("up.0", "up.1")
        open(self.path("go"), "w").close()
        ports = [job.finish().out for job in jobs]
        self.assertNotEqual(ports[0], ports[1])

    def test_taken_port(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            job = self.run_job(f"--master-port={port}", "true")
            self.check_code(job, 1)
            self.assertIn(str(port), job.err)
            job = self.run_job(f"--rdzv-endpoint=localhost:{port}", "true")
            self.check_code(job, 1)

    def test_chosen_port(self):
        port = harness.free_port()
        job = self.run_job(f"--master-port={port}", "sh", "-c", "echo $MASTER_PORT")
        self.assertEqual(job.out, f"{port}\n")


class Ends(Test):
    def test_success(self):
        job = self.run_job("--standalone", "--nproc-per-node=4", "true")
        self.check_code(job, 0)
        self.assertEqual((job.out, job.err), ("", ""))

    def test_exit_code(self):
        fail = "echo out; echo first >&2; echo last >&2; [ $RANK = 1 ] && exit 3; sleep 1000"
        job = self.run_job("--standalone", "--nproc-per-node=3", "sh", "-c", fail)
        self.check_code(job, 3)
        self.assertRegex(
            job.err,
            r"tdrun: rank 1 \(local rank 1, pid \d+\) failed with exit code 3 after [\d.e-]+ s; "
            r"the last lines on its stderr:\n    \| first\n    \| last\n",
        )

    def test_signal(self):
        crash = "echo about to crash; [ $RANK = 1 ] && kill -SEGV $$; sleep 1000"
        job = self.run_job("--standalone", "--nproc-per-node=2", "sh", "-c", crash)
        self.check_code(job, 128 + signal.SIGSEGV)
        self.assertRegex(job.err, r"rank 1 .* was killed by SIGSEGV.*on its stdout:\n    \| about to")
        job = self.run_job("--standalone", "sh", "-c", "kill -KILL $$")
        self.check_code(job, 128 + signal.SIGKILL)
        self.assertRegex(job.err, "SIGKILL.*memory runs out.*; it wrote nothing")

    def test_last_lines(self):
        job = self.run_job("--standalone", "sh", "-c", "seq 1000 >&2; exit 1")
        report = job.err.partition("tdrun: ")[2]
        lines = re.findall(r"^    \| (.*)$", report, re.MULTILINE)
        self.assertEqual(lines, [str(i) for i in range(981, 1001)])

    def test_progress_in_last_lines(self):
        show = r"printf 'a\n10%%\r20%%\r30%%\nb' >&2; exit 1"
        job = self.run_job("--standalone", "sh", "-c", show)
        self.assertIn("    | a\n    | 30%\n    | b\n", job.err)

    def test_first_failure_is_the_cause(self):
        """Also when its consequences are over first."""
        for _ in range(10):
            for i in (0, 1, 3):
                os.mkfifo(self.path(f"fifo{i}"))
            job = self.run_job(
                "--standalone", "--nproc-per-node=4", "python3", "-c", CAUSE_AND_CONSEQUENCE
            )
            self.check_code(job, 7)
            self.assertIn("tdrun: rank 2 ", job.err)
            for i in (0, 1, 3):
                os.unlink(self.path(f"fifo{i}"))

    def test_first_signal_is_the_cause(self):
        for i in (0, 1, 3):
            os.mkfifo(self.path(f"fifo{i}"))
        job = self.run_job(
            "--standalone", "--nproc-per-node=4",
            "python3", "-c", CAUSE_AND_CONSEQUENCE, str(int(signal.SIGKILL)),
        )  # fmt: skip
        self.check_code(job, 128 + signal.SIGKILL)

    def test_a_worker_that_ends_early(self):
        """… is no failure, and the others go on."""
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "sh", "-c",
            "if [ $RANK = 1 ]; then while kill -0 $(cat pid) 2>&-; do sleep 0.01; done; echo late;"
            "else echo $$ > pid.tmp; mv pid.tmp pid; fi",
        )  # fmt: skip
        self.check_code(job, 0)
        self.assertEqual(job.out, "late\n")

    def test_failures_are_ended_by_sigterm(self):
        stay = (
            "import os, signal, sys, time\n"
            "rank = os.environ['RANK']\n"
            "def on_term(*_):\n"
            "    open(f'ended.{rank}', 'w').close()\n"
            "    sys.exit(5)\n"
            "signal.signal(signal.SIGTERM, on_term)\n"
            "open(f'up.{rank}', 'w').close()\n"
            "while rank != '0' or not (os.path.exists('up.1') and os.path.exists('up.2')):\n"
            "    time.sleep(0.01)\n"
            "sys.exit(4)\n"
        )
        job = self.run_job("--standalone", "--nproc-per-node=3", "python3", "-c", stay)
        self.check_code(job, 4)
        self.assertTrue(os.path.exists(self.path("ended.1")))
        self.assertTrue(os.path.exists(self.path("ended.2")))
        self.assertEqual(job.err.count("failed with"), 1, job.err)

    def test_worker_that_ignores_sigterm(self):
        stubborn = (
            "trap '' TERM; touch up.$RANK;"
            "[ $RANK = 0 ] && { until [ -e up.1 ]; do sleep 0.01; done; exit 9; };"
            "exec sleep 1000"
        )
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "--shutdown-timeout=0.2", "sh", "-c", stubborn
        )
        self.check_code(job, 9)
        self.assertIn("did not end within 0.2 s; killed", job.err)

    def test_wrapper_leaves_time_to_the_program(self):
        """A shell around the program dies at once; the program may finish what it does."""
        wrapper = (
            "if [ $RANK = 1 ]; then until [ -e up ]; do sleep 0.01; done; exit 1; fi\n"
            "python3 -c \"\n"
            "import signal, time\n"
            "def on_term(*_):\n"
            "    time.sleep(0.3)\n"
            "    open('saved', 'w').close()\n"
            "    raise SystemExit\n"
            "signal.signal(signal.SIGTERM, on_term)\n"
            "open('up', 'w').close()\n"
            "time.sleep(1000)\n"
            "\"\n"
            "echo after\n"
        )
        job = self.run_job("--standalone", "--nproc-per-node=2", "sh", "-c", wrapper)
        self.check_code(job, 1)
        self.assertTrue(os.path.exists(self.path("saved")))


class Restarts(Test):
    def test_until_it_works(self):
        work = (
            "echo $RANK.$TORCHELASTIC_RESTART_COUNT.$TORCHELASTIC_MAX_RESTARTS;"
            "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && exit 3; sleep 1000"
        )
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "--max-restarts=3", "sh", "-c", work
        )
        self.check_code(job, 0)
        self.assertIn("1.2.3", job.out)
        self.assertEqual(job.err.count("exit code 3"), 2)
        self.assertIn("starting all workers again (restart 2 of 3)", job.err)
        self.assertNotIn("restart 3 of 3", job.err)

    def test_until_they_are_used_up(self):
        job = self.run_job("--standalone", "--max-restarts=2", "sh", "-c", "echo x; exit 6")
        self.check_code(job, 6)
        self.assertEqual(job.out, "x\n" * 3)

    def test_not_after_a_signal(self):
        job = self.start(
            "--standalone", "--max-restarts=5", "sh", "-c", "touch up; exec sleep 1000"
        )
        self.wait_files("up")
        job.signal(signal.SIGTERM)
        self.check_code(job.finish(), 128 + signal.SIGTERM)
        self.assertNotIn("again", job.err)


class Input(Test):
    def test_first_worker_reads(self):
        job = self.start(
            "--standalone", "--nproc-per-node=3", "sh", "-c", "cat > got.$RANK",
            stdin=subprocess.PIPE,
        )  # fmt: skip
        job.process.stdin.write(b"for the first")
        job.process.stdin.close()
        job.process.stdin = None
        self.check_code(job.finish(), 0)
        self.assertEqual(
            [read_file(self.path(f"got.{rank}")) for rank in range(3)], ["for the first", "", ""]
        )

    def test_closed_descriptors(self):
        """tdrun started without standard streams does not mistake its own files for them."""
        command = f'exec "{harness.TDRUN}" --standalone sh -c "echo x; echo y >&2" <&- >&- 2>&-'
        result = subprocess.run(["sh", "-c", command], cwd=self.dir, timeout=harness.DEADLINE)
        self.assertEqual(result.returncode, 0)


class Many(Test):
    def test_64(self):
        job = self.run_job("--standalone", "--nproc-per-node=64", "sh", "-c", "echo $RANK")
        self.check_code(job, 0)
        self.assertEqual(sorted(map(int, job.out.split())), list(range(64)))

    def test_256(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 2000:
            self.skipTest("the limit of open files is too low")
        begin = time.monotonic()
        job = self.run_job(
            "--standalone", "--nproc-per-node=256", "true",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
        )  # fmt: skip
        self.check_code(job, 0)
        print(f"256 workers: {time.monotonic() - begin:.2f} s")

    def test_too_few_descriptors(self):
        job = self.run_job(
            "--standalone", "--nproc-per-node=64", "sleep", "1000",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
        )  # fmt: skip
        self.check_code(job, 1)
        self.assertIn("Too many open files", job.err)


class Binding(Test):
    def test_cpus(self):
        show = "import os; print(sorted(os.sched_getaffinity(0)))"
        node = "/sys/devices/system/node/node0/cpulist"
        if not os.path.exists(node):
            self.skipTest("this machine does not describe its NUMA nodes")
        cpus = len(os.sched_getaffinity(0))
        job = self.run_job(
            "--standalone", f"--nproc-per-node={cpus}", "--numa-binding=exclusive",
            "python3", "-c", show,
        )  # fmt: skip
        if "cannot be divided" in job.err:
            self.skipTest("more CPUs than cores")
        self.check_code(job, 0)
        self.assertEqual(len(set(job.out.splitlines())), cpus)


if __name__ == "__main__":
    harness.main()
