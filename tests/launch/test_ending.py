#!/usr/bin/env python3
"""Nothing is left behind: signals, the keys of a terminal, kill -9, daemons."""

import contextlib
import os
import signal
import subprocess

import harness
from harness import Terminal, Test, is_alive, processes_with, read_file, read_stat, wait_until

STAY = "echo $$ > pid.$RANK.tmp; mv pid.$RANK.tmp pid.$RANK; exec sleep 1000"

# Records each of the usual signals in a file, and goes on, or ends where the test says so.
NOTE_SIGNALS = """
import os, signal, sys, time
rank = os.environ["RANK"]
def on_signal(number, _):
    open(f"got.{rank}.{number}", "a").write("x")
    if "end" in sys.argv:
        sys.exit(0)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, on_signal)
with open(f"pid.{rank}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pid.{rank}.tmp", f"pid.{rank}")
while True:  # a signal that comes just before a sleep is handled after it
    time.sleep(0.1)
"""

# A grandchild in a session of its own, whose parent has ended: nothing connects it to the worker.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "quiet" in sys.argv:
            null = os.open("/dev/null", os.O_RDWR)
            for fd in 0, 1, 2:
                os.dup2(null, fd)
        with open("daemon.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename("daemon.tmp", "daemon")
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists("daemon"):
    time.sleep(0.01)
while "stay" in sys.argv:
    time.sleep(1000)
sys.exit(3 if "fail" in sys.argv else 0)
"""


class Ending(Test):
    def start_workers(self, count=2, *flags, command=("sh", "-c", STAY)):
        """Starts workers that stay, and waits until they are there; returns the job and their pids."""
        job = self.start("--standalone", f"--nproc-per-node={count}", *flags, *command)
        return job, self.worker_pids(count)

    def worker_pids(self, count):
        names = [f"pid.{rank}" for rank in range(count)]
        self.wait_files(*names)
        return [int(read_file(self.path(name))) for name in names]


class Signals(Ending):
    def test_each_is_passed_on(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            job, _ = self.start_workers(command=("python3", "-c", NOTE_SIGNALS, "end"))
            job.signal(number)
            self.check_code(job.finish(), 128 + number)
            self.check_nothing_left()
            self.assertNotIn("failed", job.err)
            for rank in range(2):
                self.assertEqual(read_file(self.path(f"got.{rank}.{int(number)}")), "x")
                os.unlink(self.path(f"pid.{rank}"))

    def test_chosen_signals(self):
        job, _ = self.start_workers(1, "--signals-to-handle=SIGUSR1")
        job.signal(signal.SIGUSR1)
        self.check_code(job.finish(), 128 + signal.SIGUSR1)
        os.unlink(self.path("pid.0"))
        job, _ = self.start_workers(1, "--signals-to-handle=SIGUSR1")
        job.signal(signal.SIGTERM)  # not handled: it ends tdrun, and so all the rest
        self.assertEqual(job.finish().code, -signal.SIGTERM)
        self.wait_nothing_left()

    def test_ignored_signals_stay_ignored(self):
        """nohup tdrun … survives the end of its terminal."""
        job = self.start(
            "--standalone", "sh", "-c", "touch up; until [ -e go ]; do sleep 0.01; done; echo done",
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )  # fmt: skip
        self.wait_files("up")
        job.signal(signal.SIGHUP)
        open(self.path("go"), "w").close()
        self.check_code(job.finish(), 0)
        self.assertEqual(job.out, "done\n")

    def test_sent_to_every_process(self):
        """As a service manager does: front, agent and workers all get it, and it counts once."""
        job, pids = self.start_workers()
        for pid in [job.pid, job.agent(), *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.check_code(job.finish(), 128 + signal.SIGTERM)
        self.check_nothing_left()

    def test_stubborn_worker(self):
        job, _ = self.start_workers(
            2, "--shutdown-timeout=0.2", command=("sh", "-c", "trap '' INT TERM; " + STAY)
        )
        job.signal(signal.SIGINT)
        self.check_code(job.finish(), 128 + signal.SIGINT)
        self.assertIn("did not end within 0.2 s", job.err)
        self.check_nothing_left()

    def test_while_output_is_stuck(self):
        """tdrun ends also when its output is not read."""
        read_end, write_end = os.pipe()
        job = self.start(
            "--standalone", "sh", "-c", "echo $$ > pid.0; while :; do echo 0123456789abcdef; done",
            stdout=write_end,
        )  # fmt: skip
        os.close(write_end)
        self.wait_files("pid.0")
        job.signal(signal.SIGTERM)
        job.process.wait(harness.DEADLINE)
        self.assertEqual(job.process.returncode, 128 + signal.SIGTERM)
        self.check_nothing_left()
        os.close(read_end)
        job.process.stderr.close()

    def test_failure_while_output_is_stuck(self):
        """A failed job does not wait for a reader for ever."""
        read_end, write_end = os.pipe()
        work = "[ $RANK = 1 ] && { until [ -e pid.0 ]; do sleep 0.01; done; exit 5; }"
        flood = "head -c 200000 /dev/zero; echo > pid.0; sleep 1000"
        job = self.start(
            "--standalone", "--nproc-per-node=2", "--shutdown-timeout=0.5",
            "sh", "-c", f"{work}; {flood}",
            stdout=write_end,
        )  # fmt: skip
        os.close(write_end)
        job.finish()
        self.check_code(job, 5)
        self.assertEqual(job.err.count("standard output is not read; up to "), 1, job.err)
        self.check_nothing_left()
        os.close(read_end)


class Keys(Ending):
    def test_ctrl_c(self):
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "python3", "-c", NOTE_SIGNALS, "end"
        )
        self.worker_pids(2)
        terminal.type(b"\x03")
        self.assertEqual(terminal.finish(), 128 + signal.SIGINT)
        for rank in range(2):
            self.assertEqual(read_file(self.path(f"got.{rank}.2")), "x")  # once, not twice
        self.check_nothing_left()

    def test_ctrl_c_twice(self):
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "python3", "-c", NOTE_SIGNALS
        )
        self.worker_pids(2)
        terminal.type(b"\x03")
        self.wait_files("got.0.2", "got.1.2")
        terminal.type(b"\x03")
        self.assertEqual(terminal.finish(), 128 + signal.SIGINT)
        self.check_nothing_left()

    def test_ctrl_z(self):
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "python3", "-c", NOTE_SIGNALS, "end"
        )
        pids = self.worker_pids(2)
        terminal.type(b"\x1a")
        for pid in [terminal.pid, *pids]:
            wait_until(lambda: read_stat(pid)[0] == "T", "the process stops")
        os.kill(terminal.pid, signal.SIGCONT)
        for pid in [terminal.pid, *pids]:
            wait_until(lambda: read_stat(pid)[0] != "T", "the process goes on")
        terminal.type(b"\x03")
        self.assertEqual(terminal.finish(), 128 + signal.SIGINT)
        self.check_nothing_left()

    def test_stopped_workers_can_be_ended(self):
        job, pids = self.start_workers()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job.signal(signal.SIGTERM)
        self.check_code(job.finish(), 128 + signal.SIGTERM)

    def test_terminal_is_closed(self):
        terminal = Terminal(self, "--standalone", "--nproc-per-node=2", "sh", "-c", STAY)
        self.worker_pids(2)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, terminal.master)  # closes it
        os.close(null)
        self.wait_nothing_left()
        os.waitpid(terminal.pid, 0)


class Killed(Ending):
    def test_front(self):
        job, _ = self.start_workers()
        job.signal(signal.SIGKILL)
        job.finish()
        self.wait_nothing_left()

    def test_agent(self):
        job, _ = self.start_workers()
        os.kill(job.agent(), signal.SIGKILL)
        self.check_code(job.finish(), 128 + signal.SIGKILL)
        self.assertIn("its agent", job.err)
        self.check_nothing_left()

    def test_by_name(self):
        """What pkill -9 tdrun, or pkill -9 -f tdrun, would hit is not the agent."""
        job, pids = self.start_workers()
        hit = [
            pid
            for pid in processes_with(self.mark)
            if read_file(f"/proc/{pid}/comm") == "tdrun\n"
            or "tdrun " in read_file(f"/proc/{pid}/cmdline").replace("\0", " ")
        ]
        self.assertEqual(hit, [job.pid])
        self.assertIn(f"of process {job.pid}", read_file(f"/proc/{job.agent()}/cmdline"))
        job.signal(signal.SIGKILL)
        job.finish()
        self.wait_nothing_left()
        self.assertFalse(any(is_alive(pid) for pid in pids))

    def test_front_with_daemon(self):
        job = self.start("--standalone", "python3", "-c", DAEMON, "stay")
        self.wait_files("daemon")
        job.signal(signal.SIGKILL)
        job.finish()
        self.wait_nothing_left()

    def test_agent_with_daemon(self):
        job = self.start("--standalone", "python3", "-c", DAEMON, "stay", "quiet")
        self.wait_files("daemon")
        os.kill(job.agent(), signal.SIGKILL)
        job.finish()
        self.check_nothing_left()

    def test_both(self):
        """The workers themselves die with the agent."""
        job, pids = self.start_workers()
        agent = job.agent()
        os.kill(job.pid, signal.SIGSTOP)  # so that it cannot clean up
        os.kill(agent, signal.SIGKILL)
        job.signal(signal.SIGKILL)
        job.finish()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the workers' end")


class Daemons(Ending):
    def test_after_success(self):
        job = self.run_job("--standalone", "python3", "-c", DAEMON)
        self.check_code(job, 0)

    def test_after_failure(self):
        job = self.run_job("--standalone", "--max-restarts=1", "python3", "-c", DAEMON, "fail")
        self.check_code(job, 3)

    def test_after_ctrl_c(self):
        job = self.start("--standalone", "python3", "-c", DAEMON, "stay", "quiet")
        self.wait_files("daemon")
        job.signal(signal.SIGINT)
        self.check_code(job.finish(), 128 + signal.SIGINT)
        self.check_nothing_left()

    def test_background_child(self):
        """It holds the worker's output open; that is no reason to wait for it."""
        job = self.run_job("--standalone", "sh", "-c", "sleep 1000 & echo done")
        self.check_code(job, 0)
        self.assertEqual(job.out, "done\n")

    def test_background_child_of_failure(self):
        job = self.run_job("--standalone", "sh", "-c", "sleep 1000 & exit 2")
        self.check_code(job, 2)

    def test_child_goes_on_writing(self):
        job = self.run_job("--standalone", "sh", "-c", "yes & exit 0", stdout=subprocess.DEVNULL)
        self.check_code(job, 0)

    def test_orphans_are_reaped(self):
        """A worker that leaves many short-lived orphans does not fill the process table."""
        leave = "for i in 1 2 3 4 5 6 7 8; do (sh -c 'exit 0' &); done; touch pid.0; sleep 1000"
        job = self.start("--standalone", "sh", "-c", leave)
        self.wait_files("pid.0")
        agent = job.agent()

        def zombies():
            return [p for p in harness.children_of(agent) if (read_stat(p) or " ")[0] == "Z"]

        wait_until(lambda: not zombies(), "orphans are reaped")
        job.signal(signal.SIGTERM)
        job.finish()

    def test_worker_closes_its_output(self):
        close = "exec >&- 2>&-; touch pid.0; until [ -e go ]; do sleep 0.01; done; exit 4"
        job = self.start("--standalone", "sh", "-c", close)
        self.wait_files("pid.0")
        open(self.path("go"), "w").close()
        self.check_code(job.finish(), 4)

    def test_first_process_of_a_container(self):
        """As process 1 it must reap itself, and signals have no default action."""
        unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
        allowed = subprocess.run([*unshare, "true"], capture_output=True, check=False)
        if allowed.returncode:
            self.skipTest("a process namespace needs more rights")
        command = [*unshare, harness.TDRUN, "--standalone", "python3", "-c", DAEMON]
        result = subprocess.run(
            [*command, "fail"], cwd=self.dir, env=dict(os.environ, TD_TEST_MARK=self.mark),
            capture_output=True, timeout=harness.DEADLINE, check=False,
        )  # fmt: skip
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn(b"failed with exit code 3", result.stderr)

    def test_nested(self):
        """tdrun under tdrun, killed from above."""
        job = self.start("--standalone", harness.TDRUN, "--standalone", "sh", "-c", STAY)
        self.worker_pids(1)
        job.signal(signal.SIGKILL)
        job.finish()
        self.wait_nothing_left()


if __name__ == "__main__":
    harness.main()
