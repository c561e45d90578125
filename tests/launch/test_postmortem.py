#!/usr/bin/env python3
"""The postmortem of tdrun, and tdrun status."""

import fcntl
import glob
import json
import os
import re
import signal
import struct
import subprocess
import sys

import harness
from harness import Terminal, Test, free_port, wait_until

WORKER = None  # set below


class PostmortemTest(Test):
    def start_job(self, *arguments, workers=3, options=(), **popen):
        return self.start(
            "--standalone", f"--nproc-per-node={workers}", *options, WORKER, *arguments, **popen
        )

    def ask(self, *arguments, **more):
        """Runs `tdrun status` or `tdrun postmortem` as a user would."""
        return subprocess.run(
            [harness.TDRUN, *arguments],
            capture_output=True, text=True, timeout=harness.DEADLINE, cwd=self.dir, **more,
        )

    def status(self, job):
        """The job as `tdrun status` sees it, None when it does not."""
        answer = self.ask("status", "--json", str(job.pid))
        jobs = json.loads(answer.stdout)
        return jobs[0] if jobs else None

    def lines(self, text):
        """The lines of the postmortem, each one whole again."""
        self.assertIn("where the workers were", text)
        lines = text.split("the worst first:\n")[1].splitlines()
        lines = [line for line in lines if line.startswith("  ")]  # others are the workers' own
        for line in lines:
            self.assertLessEqual(len(line), 100)
        lines = "\n".join(lines).replace("\n      ", " ")
        return [line.strip() for line in lines.splitlines()]

    def start_late(self, then):
        """A job whose rank 1 does not join, until there is a file named go."""
        late = f"[ $RANK != 1 ] || {{ until [ -e go ]; do sleep 0.01; done; {then}; }}"
        return self.start(
            "--standalone", "--nproc-per-node=3", "sh", "-c", f'{late}; exec "$0"', WORKER
        )

    def wait_joining(self, job, ranks):
        def are_there():
            seen = self.status(job)
            return seen and all(seen["ranks"][r]["state"] == "joining" for r in ranks)

        wait_until(are_there, f"ranks {ranks} waiting for the others")

    def wait_in_calls(self, job, ranks):
        """Waits until these ranks are in call 3; the last call of the others was call 2, which has ended."""

        def is_there(rank, seen):
            current = seen.get("current") or {}
            if rank in ranks:
                return seen["state"] == "in a call" and current.get("sequence") == 3
            return seen["state"] != "in a call" or current.get("sequence") != 2

        def are_there():
            seen = self.status(job)
            return seen and all(is_there(r, seen["ranks"][r]) for r in range(len(seen["ranks"])))

        wait_until(are_there, f"ranks {ranks} in their call")


class Failures(PostmortemTest):
    def test_killed(self):
        job = self.start_job("kill", options=["--postmortem-file", "postmortem.json"]).finish()
        self.check_code(job, 128 + signal.SIGKILL)
        lines = self.lines(job.err)
        self.assertRegex(
            lines[0],
            r'^rank 1 \(pid \d+\) failed first: killed by SIGKILL in no call, .* after barrier #2 on "world"$',
        )
        self.assertRegex(lines[1], r"^rank [02] \(pid \d+\) (was in|failed because of another)")
        with open(self.path("postmortem.json"), encoding="utf-8") as file:
            postmortem = json.load(file)
        self.assertEqual(postmortem["first"], 1)
        self.assertEqual(len(postmortem["ranks"]), 3)
        self.assertEqual(postmortem["ranks"][1]["ended"]["how"], "killed by SIGKILL")
        self.assertEqual(
            [call["operation"] for call in postmortem["ranks"][1]["operations"]],
            ["all_reduce", "barrier"],
        )

    def test_exit_code(self):
        job = self.start_job("exit").finish()
        self.check_code(job, 3)
        self.assertRegex(self.lines(job.err)[0], r"^rank 1 .* failed first: exit code 3 in no call")

    def test_a_consequence_is_not_the_cause(self):
        job = self.start_job("kill", "2").finish()
        for line in self.lines(job.err)[1:]:
            self.assertNotIn("first", line)

    def test_mismatch(self):
        job = self.start_job("mismatch").finish()
        self.check_code(job, 1)
        first = self.lines(job.err)[0]
        self.assertIn("failed first: exit code 1", first)
        self.assertIn("it got: call #3 on group", first)

    def test_never_joined(self):
        job = self.start_job("absent").finish()
        self.check_code(job, 4)
        lines = self.lines(job.err)
        self.assertIn("failed first: exit code 4 before it joined the others", lines[0])

    def test_others_wait_to_join(self):
        job = self.start_late("exit 7")
        self.wait_joining(job, [0, 2])
        self.script("go", "")
        job.finish()
        self.check_code(job, 7)
        lines = self.lines(job.err)
        self.assertIn("failed first: exit code 7 before it joined the others", lines[0])
        self.assertRegex(lines[1], r"^rank 0 .* waited to join the others for ")
        self.assertRegex(lines[2], r"^rank 2 .* waited to join the others for ")
        self.assertEqual(
            lines[3], "rank 1 had not come to td_init_process_group(), where ranks 0, 2 waited"
        )

    def test_programs_without_operations_have_no_postmortem(self):
        job = self.run_job("--standalone", "--nproc-per-node=2", "sh", "-c", "exit $RANK")
        self.check_code(job, 1)
        self.assertNotIn("where the workers were", job.err)

    def test_labels_do_nothing_to_the_terminal(self):
        job = self.start_job("hang")
        self.wait_in_calls(job, [0, 2])
        job.signal(signal.SIGTERM)
        job.finish()
        self.assertNotIn("\033", job.err)
        self.assertIn('(bucket ?[31m3)', " ".join(self.lines(job.err)))

    def test_a_postmortem_file_that_cannot_be_made(self):
        job = self.start_job("exit", options=["--postmortem-file", "no/where"]).finish()
        self.check_code(job, 3)
        self.assertIn("--postmortem-file no/where: No such file", job.err)

    def test_half_a_postmortem_file_is_removed(self):
        """On a full disk, which takes a file system for the test."""
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            self.skipTest("no right to make a mount namespace")
        os.mkdir(self.path("full"))
        job = harness.Job(
            self,
            [
                "-rm", "sh", "-c",
                "mount -t tmpfs -o size=4k none full && head -c 4096 /dev/zero >full/rest &&"
                ' { "$@"; code=$?; ls full; exit $code; }',
                "sh", harness.TDRUN, "--standalone", "--nproc-per-node=3",
                "--postmortem-file", "full/postmortem", WORKER, "exit",
            ],
            program="unshare",
        ).finish()  # fmt: skip
        self.check_code(job, 3)
        self.assertIn("--postmortem-file full/postmortem: No space left on device", job.err)
        self.assertEqual(job.out.split(), ["rest"])

    def test_each_round_has_its_postmortem(self):
        job = self.start_job("exit", options=["--max-restarts", "1"]).finish()
        self.check_code(job, 3)
        self.assertEqual(job.err.count("where the workers were"), 2)


class Interrupted(PostmortemTest):
    def test_missing_ranks(self):
        job = self.start_job("hang")
        self.wait_in_calls(job, [0, 2])
        job.signal(signal.SIGINT)
        job.finish()
        self.check_code(job, 128 + signal.SIGINT)
        lines = self.lines(job.err)
        self.assertRegex(
            lines[0], r"^rank 1 \(pid \d+\) was in no call; barrier #2 on \"world\" had ended"
        )
        self.assertRegex(lines[1], r"^rank 0 .* was in all_reduce #3 of 4 f32 on \"world\"")
        self.assertRegex(
            lines[3], r"^rank 1 had not come to all_reduce #3 .*, where ranks 0, 2 waited$"
        )

    def test_ranks_that_have_not_joined(self):
        job = self.start_late("true")
        self.wait_joining(job, [0, 2])
        table = self.ask("status", str(job.pid)).stdout
        self.assertRegex(table, r"(?m)^ +0 +\d+  joining +\d")
        self.assertRegex(table, r"(?m)^ +1 +\d+  not joined ")
        job.signal(signal.SIGINT)
        job.finish()
        self.check_code(job, 128 + signal.SIGINT)
        lines = self.lines(job.err)
        self.assertRegex(lines[0], r"^rank 1 \(pid \d+\) never joined$")
        self.assertRegex(lines[1], r"^rank 0 .* waited to join the others for ")
        self.assertIn("rank 1 had not come to td_init_process_group()", lines[3])

    def test_a_rank_that_left(self):
        job = self.start_job("leave", workers=1)
        # The only rank leaves and stays.
        job2 = self.start_job("leave", "0", workers=1)
        wait_until(
            lambda: (self.status(job2) or {"ranks": [{}]})["ranks"][0].get("state") == "left",
            "the rank to leave",
        )
        job2.signal(signal.SIGTERM)
        job2.finish()
        self.assertRegex(self.lines(job2.err)[0], r"^rank 0 .* had left in order")
        job.finish()
        self.check_code(job, 0)

    def test_many_ranks_share_lines(self):
        job = self.start_job("hang", workers=18)
        self.wait_in_calls(job, [0, 17])
        wait_until(lambda: os.path.exists(self.path("going.17")), "the last one")
        self.wait_in_calls(job, [r for r in range(18) if r != 1])
        job.signal(signal.SIGTERM)
        job.finish()
        lines = self.lines(job.err)
        self.assertEqual(len(lines), 3)
        self.assertRegex(lines[1], r"^ranks 0, 2-17: each was in all_reduce #3")


class Status(PostmortemTest):
    def test_table(self):
        job = self.start_job("hang")
        self.wait_in_calls(job, [0, 2])
        answer = self.ask("status", str(job.pid))
        self.assertEqual(answer.returncode, 0)
        lines = answer.stdout.splitlines()
        self.assertRegex(lines[0], rf"^job {job.pid} on \S+, 3 of 3 ranks, for .*: \S+ hang$")
        self.assertRegex(lines[1], r"^ +RANK +PID  STATE +FOR +OPS/S  OPERATION$")
        self.assertRegex(lines[2], r"^ +0 +\d+  in a call +.* all_reduce #3 of 4 f32 on \"world\"")
        self.assertRegex(lines[3], r"^ +1 +\d+  in no call +.* last: barrier #2 on \"world\"")
        worker = self.status(job)["ranks"][1]["pid"]
        self.assertIn(f"job {job.pid} ", self.ask("status", str(worker)).stdout)
        self.assertIn(f"job {job.pid} ", self.ask("status").stdout)
        os.kill(worker, signal.SIGSTOP)
        wait_until(
            lambda: re.search(r"^ +1 +\d+  stopped", self.ask("status").stdout, re.M), "a stop"
        )
        os.kill(worker, signal.SIGCONT)
        job.signal(signal.SIGTERM)
        job.finish()

    def test_a_page_that_claims_too_much(self):
        """Memory of the size that it claims is not allocated."""
        job = self.start_job("hang")
        self.wait_in_calls(job, [0, 2])
        book = next(
            path
            for path in glob.glob(f"/proc/{job.agent()}/fd/*")
            if "tandem-flight" in os.readlink(path)
        )
        with open(book, "rb") as file:
            head = bytearray(file.read(4096))
        job.signal(signal.SIGTERM)
        job.finish()
        slots, log_size = 65536, struct.unpack_from("<I", head, 16)[0]
        struct.pack_into("<I", head, 12, slots)
        struct.pack_into("<i", head, 20, os.getpid())
        memory = os.memfd_create("tandem-flight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.addCleanup(os.close, memory)
        os.write(memory, head)
        os.ftruncate(memory, 4096 + slots * log_size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        answer = self.ask("status", str(os.getpid()))
        self.assertEqual(answer.returncode, 0)
        self.assertRegex(
            answer.stdout, rf"^job {os.getpid()} on \S+ names 65536 ranks, and has .*\n$"
        )
        (job,) = json.loads(self.ask("status", "--json", str(os.getpid())).stdout)
        self.assertEqual(job["ranks"], [])
        self.assertLess(os.fstat(memory).st_blocks, 100)

    def test_watching(self):
        job = self.start_job("hang")
        self.wait_in_calls(job, [0, 2])
        watcher = subprocess.Popen(
            [harness.TDRUN, "status", str(job.pid), "--watch", "0.1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(12):
            self.assertTrue(watcher.stdout.readline())
        job.signal(signal.SIGTERM)
        job.finish()
        _, err = watcher.communicate(timeout=harness.DEADLINE)
        self.assertEqual(watcher.returncode, 1)
        self.assertIn("is neither the launcher", err)

    def test_watching_on_a_terminal(self):
        job = self.start_job("hang")
        self.wait_in_calls(job, [0, 2])
        terminal = Terminal(self, "status", str(job.pid), "--watch")
        terminal.wait_text(rb"\x1b\[H\x1b\[Jjob")
        terminal.type(b"\x03")
        terminal.finish()
        job.signal(signal.SIGTERM)
        job.finish()

    def test_no_such_job(self):
        own = str(os.getpid())  # and not 1: another test's launcher may be that in a namespace
        answer = self.ask("status", own)
        self.assertEqual(answer.returncode, 1)
        self.assertIn("is neither the launcher of a job nor a worker", answer.stderr)
        self.assertEqual(json.loads(self.ask("status", "--json", own).stdout), [])

    def test_wrong_arguments(self):
        for arguments, sentence in (
            (["status", "x"], "is not the number of a process"),
            (["status", "1", "2"], "one too many"),
            (["status", "--jsn"], "did you mean --json?"),
            (["postmortem"], "there is no file to read"),
            (["postmortem", "/etc/passwd"], "too few for a flight recorder's page"),
            (["postmortem", "nowhere"], "No such file"),
        ):
            answer = self.ask(*arguments)
            self.assertNotEqual(answer.returncode, 0)
            self.assertIn(sentence, answer.stderr)
        self.assertIn("usage: tdrun status", self.ask("status", "--help").stdout)
        self.assertIn("usage: tdrun postmortem", self.ask("postmortem", "--help").stdout)

    def test_programs_of_these_names(self):
        self.script("status", "#!/bin/sh\necho it is $0\n")
        job = self.run_job("./status")
        self.assertIn("it is ./status", job.out)
        job = self.run_job("--", "status", env={"PATH": f"{self.dir}:{os.environ['PATH']}"})
        self.assertIn("it is", job.out)


class Files(PostmortemTest):
    def test_pages_without_a_launcher(self):
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TANDEM_FLIGHT": self.path("flight"),
            "TD_TEST_MARK": self.mark,
        }
        ranks = [
            subprocess.Popen(
                [WORKER, "kill"],
                env={**os.environ, **common, "RANK": str(rank)},
                cwd=self.dir,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.wait(timeout=harness.DEADLINE)
        files = [self.path("flight.0"), self.path("flight.1")]
        answer = self.ask("postmortem", *files)
        text = answer.stdout.replace("\n    ", " ")
        self.assertRegex(text, r"(?m)^rank 1 \(pid \d+ on \S+\) failed first: ended without leaving")
        self.assertRegex(text, r"(?m)^rank 0 .* failed because of another rank")
        postmortem = json.loads(self.ask("postmortem", "--json", *files).stdout)
        self.assertEqual(postmortem["first"], 1)
        self.assertEqual(postmortem["ranks"][0]["failure"]["status"], "TD_ERR_PEER")


if __name__ == "__main__":
    WORKER = os.path.abspath(sys.argv.pop(2)) if len(sys.argv) > 2 else None
    harness.main()
