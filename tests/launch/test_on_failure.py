#!/usr/bin/env python3
"""tdrun --on-failure replace, shrink: a worker that fails does not end the others."""

import json
import os
import re
import signal
import sys

import harness
from harness import Test, free_port, is_alive, processes_with, read_file, wait_until

WORKER = SURVIVE = None  # set below

# Rank 1 runs its argument; the others wait for the file that ends them.
HOLD = "touch up.$RANK; until [ -e go ]; do sleep 0.01; done; echo $RANK ends"


AFTER_THEM = "until [ -e up.0 ] && [ -e up.2 ]; do sleep 0.01; done;"


def mode(restarts):
    """The flags for workers that are started again so often."""
    return ["--on-failure=replace", f"--max-restarts={restarts}"] if restarts else ["--on-failure=shrink"]


def odd(what, then=HOLD):
    return f"if [ $RANK = 1 ]; then {what}; fi; {then}"


class OutliveTest(Test):
    def start_job(self, *program, workers=3, restarts=0, options=()):
        return self.start(
            "--standalone", f"--nproc-per-node={workers}", *mode(restarts), *options, *program
        )

    def next_line(self, job):
        """The next line on standard error, while the job runs."""
        return job.process.stderr.readline().decode()

    def go(self):
        open(self.path("go"), "w").close()

    def finish(self, job, code):
        job.finish()
        self.check_code(job, code)
        self.check_nothing_left()


class Failures(OutliveTest):
    def test_the_others_go_on(self):
        """It is reported at once, and they end by themselves."""
        job = self.start_job("sh", "-c", odd("echo out; echo last words >&2; exit 3"))
        self.assertEqual(self.next_line(job), "last words\n")
        self.assertRegex(
            self.next_line(job),
            r"^tdrun: rank 1 \(pid \d+\) failed with exit code 3; 2 workers go on\n$",
        )
        self.go()
        self.finish(job, 0)
        self.assertEqual(sorted(job.out.splitlines()), ["0 ends", "2 ends", "out"])
        self.assertRegex(
            job.err,
            r"^tdrun: 2 of 3 workers ended with exit code 0\n"
            r"tdrun: rank 1 \(local rank 1, pid \d+\) failed with exit code 3 after \S+ s; "
            r"the last lines on its stderr:\n    \| last words\n$",
        )

    def test_a_signal(self):
        job = self.start_job("sh", "-c", odd("kill -KILL $$"))
        self.assertIn("was killed by SIGKILL; 2 workers go on", self.next_line(job))
        self.go()
        self.finish(job, 0)

    def test_several(self):
        job = self.start_job("sh", "-c", f"[ $RANK -lt 2 ] || exit $RANK; {HOLD}", workers=4)
        lines = sorted(self.next_line(job) for _ in range(2))
        for rank, line in zip((2, 3), lines):
            self.assertRegex(line, rf"rank {rank} .* exit code {rank}; [23] workers go on")
        self.go()
        self.finish(job, 0)
        self.assertIn("2 of 4 workers ended with exit code 0", job.err)

    def test_no_worker_is_left(self):
        job = self.start_job("sh", "-c", "exit $((RANK + 5))")
        self.finish(job, 1)
        self.assertEqual(len(re.findall(r"^tdrun: rank \d \(pid", job.err, re.MULTILINE)), 3)
        self.assertIn("no worker is left", job.err)
        self.assertIn("0 of 3 workers ended with exit code 0", job.err)
        self.assertEqual(job.err.count("it wrote nothing"), 3)

    def test_many_are_reported_in_short(self):
        job = self.start_job("sh", "-c", "exit 1", workers=12)
        self.finish(job, 1)
        self.assertEqual(job.err.count("it wrote nothing"), 8)
        self.assertIn("tdrun: and 4 more failed\n", job.err)

    def test_a_failure_after_a_success_counts(self):
        """A worker that fails after another one has exited with 0 counts."""
        late = (
            "if [ $RANK = 0 ]; then echo $$ > pid.tmp; mv pid.tmp pid; exit 0; fi;"
            "until [ -e pid ]; do sleep 0.01; done;"
            "while kill -0 $(cat pid) 2>&-; do sleep 0.01; done; exit 4"
        )
        job = self.start_job("sh", "-c", late, workers=2)
        self.finish(job, 1)
        self.assertIn("1 of 2 workers ended with exit code 0", job.err)

    def test_without_failures_nothing_is_said(self):
        job = self.start_job("true", restarts=3)
        self.finish(job, 0)
        self.assertEqual((job.out, job.err), ("", ""))

    def test_what_a_wrapper_leaves_behind_is_ended(self):
        leave = "sleep 1000 & echo $! > left.tmp; mv left.tmp left; kill -KILL $$"
        job = self.start_job("sh", "-c", odd(leave))
        self.wait_files("left")
        left = int(read_file(self.path("left")))
        wait_until(lambda: not is_alive(left), "the end of what was left")
        self.go()
        self.finish(job, 0)


class Restarts(OutliveTest):
    def test_by_itself_with_its_rank(self):
        show = "env > env.$RANK.$(ls | grep -c ^env.$RANK); [ $RANK.$TANDEM_REJOIN = 1. ] && exit 3;"
        job = self.start_job("sh", "-c", show + HOLD, restarts=2)
        self.assertIn("starting it again (restart 1 of 2)", self.next_line(job))
        self.wait_files("up.0", "up.1", "up.2")
        self.go()
        self.finish(job, 0)
        self.assertEqual(sorted(job.out.splitlines()), ["0 ends", "1 ends", "2 ends"])
        self.assertEqual(job.err, "")
        self.assertEqual(len([name for name in os.listdir(self.dir) if name[:4] == "env."]), 4)
        first, second = (
            dict(line.split("=", 1) for line in read_file(self.path(name)).splitlines())
            for name in ("env.1.0", "env.1.1")
        )
        self.assertNotIn("TANDEM_REJOIN", first)
        self.assertEqual(second.pop("TANDEM_REJOIN"), "1")
        self.assertNotIn("TANDEM_JOIN", second)
        for number, variables in enumerate((first, second)):
            self.assertEqual(variables.pop("TORCHELASTIC_RESTART_COUNT"), str(number))
            variables.pop("_", None)
        self.assertEqual(first, second)

    def test_each_worker_has_its_own(self):
        """One that has used up its restarts ends for good; the others go on."""
        job = self.start_job("sh", "-c", "echo $RANK; " + odd("exit 6"), restarts=2)
        for number in (1, 2):
            self.assertIn(f"(restart {number} of 2)", self.next_line(job))
        self.assertIn("exit code 6; it has no restarts left; 2 workers go on", self.next_line(job))
        self.go()
        self.finish(job, 0)
        self.assertEqual(job.out.splitlines().count("1"), 3)

    def test_until_they_are_used_up(self):
        job = self.start_job("sh", "-c", "echo x; exit 6", workers=1, restarts=3)
        self.finish(job, 1)
        self.assertEqual(job.out, "x\n" * 4)
        self.assertEqual(job.err.count("starting it again"), 3)

    def test_dying_at_once_again_and_again(self):
        """The pauses between the starts become longer."""
        job = self.start_job("sh", "-c", "date +%s%N >> starts; exit 6", workers=1, restarts=4)
        self.finish(job, 1)
        starts = [int(line) / 1e9 for line in read_file(self.path("starts")).split()]
        pauses = [b - a for a, b in zip(starts, starts[1:])]
        for pause, least in zip(pauses, (0, 0.1, 0.2, 0.4)):
            self.assertGreaterEqual(pause, least)
        self.assertIn("starting it again in 0.4 s (restart 4 of 4)", job.err)
        self.assertIn("exit code 6; it has no restarts left; no worker is left", job.err)

    def test_interrupted_in_a_pause(self):
        job = self.start_job("sh", "-c", odd("exit 6"), restarts=8)
        wait_until(lambda: "in 0.8 s" in self.next_line(job), "the pause")
        job.signal(signal.SIGINT)
        self.finish(job, 128 + signal.SIGINT)

    def test_many_at_once(self):
        job = self.start_job(
            "sh", "-c", 'echo $RANK; [ "$TANDEM_REJOIN" ] || kill -KILL $$', workers=32, restarts=1
        )
        self.finish(job, 0)
        self.assertEqual(sorted(job.out.split()), sorted(2 * [str(rank) for rank in range(32)]))

    def test_a_program_that_was_removed(self):
        program = self.script("program", "#!/bin/sh\n" + odd(AFTER_THEM + "rm program; exit 3"))
        job = self.start_job(program, restarts=1)
        self.assertIn("starting it again", self.next_line(job))
        self.assertRegex(
            self.next_line(job), "^tdrun: worker 1 cannot be started: .*; the others go on without it"
        )
        self.go()
        self.finish(job, 0)
        self.assertIn("2 of 3 workers ended with exit code 0", job.err)

    def test_log_files(self):
        say = 'echo $RANK "$TANDEM_REJOIN"; [ "$RANK$TANDEM_REJOIN" = 1 ] && exit 3; exit 0'
        for option in ("--redirects=1", "--tee=1"):
            job = self.start_job(
                "sh", "-c", say, restarts=1, options=["--log-dir=logs", "--rdzv-id=id", option]
            )
            job.finish()
            self.assertEqual("1]:1 1\n" in job.out, option == "--tee=1")
            kept = {
                name: read_file(self.path(f"logs/id/attempt_{name}/stdout.log"))
                for name in ("0/0", "0/1", "0/2", "1/0", "1/1", "1/2")
            }
            self.assertEqual(
                kept,
                {"0/0": "0 \n", "0/1": "1 \n", "0/2": "2 \n",
                 "1/0": None, "1/1": "1 1\n", "1/2": None},
            )  # fmt: skip


class Ending(OutliveTest):
    def start_restarted(self, *more, options=()):
        """A job in which rank 1 was started again."""
        stay = "; ".join([*more, "touch up.$RANK", "exec sleep 1000"])
        work = odd('[ "$TANDEM_REJOIN" ] || exit 3', stay)
        job = self.start_job("sh", "-c", work, restarts=5, options=options)
        self.assertIn("starting it again", self.next_line(job))
        self.wait_files("up.0", "up.1", "up.2")
        return job

    def test_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            job = self.start_restarted()
            job.signal(number)
            self.finish(job, 128 + number)
            self.assertNotIn("starting it again", job.err)
            for rank in range(3):
                os.unlink(self.path(f"up.{rank}"))

    def test_kill(self):
        job = self.start_restarted()
        job.signal(signal.SIGKILL)
        job.finish()
        self.wait_nothing_left()

    def test_shutdown_timeout(self):
        job = self.start_restarted("trap '' TERM", options=["--shutdown-timeout=0.2"])
        job.signal(signal.SIGTERM)
        self.finish(job, 128 + signal.SIGTERM)
        self.assertIn("3 workers did not end within 0.2 s; killed", job.err)


class Nodes(OutliveTest):
    def start_nodes(self, *program, restarts=0, flags=None):
        port = free_port()
        return [
            self.start(
                "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=2", f"--master-port={port}",
                *flag, *program,
                env={"TANDEM_SECRET": "of this test"},
            )  # fmt: skip
            for rank, flag in enumerate(flags or 2 * [mode(restarts)])
        ]

    def test_a_failure_stays_on_its_node(self):
        jobs = self.start_nodes("sh", "-c", "[ $GROUP_RANK = 1 ] && exit 3; " + HOLD)
        for _ in range(2):
            self.assertRegex(self.next_line(jobs[1]), r"rank [23] \(pid \d+ on node 1\) failed")
        self.wait_files("up.0", "up.1")
        self.go()
        for job, code in zip(jobs, (0, 1)):
            job.finish()
            self.check_code(job, code)
        self.assertEqual(jobs[0].err, "")
        self.assertEqual(sorted(jobs[0].out.splitlines()), ["0 ends", "1 ends"])

    def test_restart(self):
        work = '[ "$RANK$TANDEM_REJOIN" = 2 ] && exit 3; ' + HOLD
        jobs = self.start_nodes("sh", "-c", work, restarts=1)
        self.assertIn("(restart 1 of 1)", self.next_line(jobs[1]))
        self.wait_files(*[f"up.{rank}" for rank in range(4)])
        self.go()
        for job in jobs:
            self.check_code(job.finish(), 0)

    def test_a_launcher_that_dies(self):
        """… takes its own workers with it, and no others."""
        jobs = self.start_nodes("sh", "-c", HOLD)
        self.wait_files(*[f"up.{rank}" for rank in range(4)])
        jobs[1].signal(signal.SIGKILL)
        jobs[1].finish()
        workers = "GROUP_RANK=1\0"
        wait_until(
            lambda: not set(processes_with(self.mark)) & set(processes_with(workers)),
            "the end of node 1",
        )
        self.assertIsNone(jobs[0].process.poll())
        self.go()
        self.check_code(jobs[0].finish(), 0)
        self.assertEqual(sorted(jobs[0].out.splitlines()), ["0 ends", "1 ends"])
        self.assertRegex(
            jobs[0].err, r"^tdrun: the launcher of node 1 .* has ended; its workers are lost with it\n$"
        )

    def test_the_launcher_that_has_the_store(self):
        """Another one takes its place."""
        jobs = self.start_nodes("sh", "-c", HOLD)
        self.wait_files(*[f"up.{rank}" for rank in range(4)])
        jobs[0].signal(signal.SIGKILL)
        jobs[0].finish()
        self.assertIn("the launcher of node 0", self.next_line(jobs[1]))
        self.go()
        self.check_code(jobs[1].finish(), 0)
        self.assertEqual(sorted(jobs[1].out.splitlines()), ["2 ends", "3 ends"])
        self.wait_nothing_left()

    def test_the_example(self):
        for die, restarts in ((1, 1), (3, 0)):
            jobs = self.start_nodes(SURVIVE, "--die", str(die), "3", restarts=restarts)
            for job in jobs:
                self.check_code(job.finish(), 0)
            done = [line for line in (jobs[0].out + jobs[1].out).splitlines() if "done" in line]
            self.assertEqual(len(done), 3 + restarts)
            for line in done:
                self.assertIn(f"done, 6 steps, {3 + restarts} ranks, model 6", line)

    def test_the_flag_is_that_of_all_nodes(self):
        jobs = self.start_nodes("true", flags=(["--on-failure=shrink"], []))
        for job in jobs:
            self.check_code(job.finish(), 1)
            self.assertIn("--on-failure must be the same on all nodes", job.err)


class Postmortem(OutliveTest):
    def read_postmortem(self):
        with open(self.path("postmortem.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_last_operation(self):
        job = self.start_job(WORKER, "kill", options=["--postmortem-file=postmortem.json"])
        self.finish(job, 1)
        self.assertRegex(
            job.err,
            r"(?m)^tdrun: rank 1 \(pid \d+\) was killed by SIGKILL in no call, .* after "
            r'barrier #2 on "world"; (\d workers? go|no worker is left)',
        )
        self.assertEqual(job.err.count("where the workers were"), 1)
        self.assertRegex(job.err, r"\n  rank 1 \(pid \d+\) failed first: killed by SIGKILL")
        self.assertEqual(self.read_postmortem()["first"], 1)

    def test_a_failure_that_was_outlived_is_no_cause(self):
        job = self.start_job(WORKER, "outlived")
        self.finish(job, 1)
        for rank in (0, 2):
            self.assertRegex(
                job.err,
                rf"(?m)^tdrun: rank {rank} \(pid \d+\) failed with exit code 5 in no call, .* after "
                r'barrier #1 on "rest"',
            )
        self.assertRegex(job.err, r"\n  rank 1 \(pid \d+\) failed first: killed by SIGKILL")
        self.assertNotIn("because of another", job.err)

    def test_a_worker_that_is_started_again_has_an_empty_page(self):
        job = self.start_job(
            WORKER, "exit", "0", workers=1, restarts=1, options=["--postmortem-file=postmortem.json"]
        )
        self.finish(job, 1)
        (rank,) = self.read_postmortem()["ranks"]
        self.assertEqual(
            [call["operation"] for call in rank["operations"]], ["all_reduce", "barrier"]
        )
        self.assertEqual(rank["ended"]["how"], "exit code 3")
        self.assertRegex(job.err, rf"\n  rank 0 \(pid {rank['pid']}\) failed first: exit code 3")


class Survive(OutliveTest):
    """The example: a process dies, and the others go on, or it rejoins."""

    def survive(self, die, size, restarts):
        job = self.start_job(SURVIVE, "--die", str(die), "3", restarts=restarts)
        self.finish(job, 0)
        done = [line for line in job.out.splitlines() if "done" in line]
        expected = [
            f"rank {rank}: done, 6 steps, {size} ranks, model 6"
            for rank in range(3)
            if restarts or rank != die
        ]
        self.assertEqual(sorted(done), expected, job.out + job.err)
        self.assertRegex(job.err, rf"tdrun: rank {die} \(pid \d+\) was killed by SIGKILL in no call")
        return job

    def test_without_it(self):
        for die in range(3):
            job = self.survive(die, 2, 0)
            self.assertEqual(job.out.count("2 ranks are left"), 2)
            self.assertIn("2 of 3 workers ended with exit code 0", job.err)
            self.assertRegex(job.err, rf"\n  rank {die} \(pid \d+\) failed first: killed by SIGKILL")

    def test_one_that_fails_before_it_joins(self):
        work = f'[ $RANK$TANDEM_REJOIN = 1 ] && exit 3; exec "{SURVIVE}"'
        job = self.start_job("sh", "-c", work, restarts=1)
        self.finish(job, 0)
        self.assertEqual(job.out.count("done, 6 steps, 3 ranks"), 3)

    def test_with_it_again(self):
        for die in range(3):
            job = self.survive(die, 3, 1)
            self.assertIn(f"rank {die}: is back\n", job.out)
            self.assertEqual(job.out.count("all 3 ranks are there again"), 2)
            self.assertNotIn("where the workers were", job.err)


if __name__ == "__main__":
    WORKER = os.path.abspath(sys.argv.pop(2)) if len(sys.argv) > 2 else None
    SURVIVE = os.path.abspath(sys.argv.pop(2)) if len(sys.argv) > 2 else None
    harness.main()
