#!/usr/bin/env python3
"""The workers' output: on a pipe, on a terminal, in files, and where it cannot be written."""

import glob
import os
import re
import resource
import signal
import subprocess

import harness
from harness import Terminal, Test, read_file

MANY_LINES = """
import os, sys
rank = os.environ["RANK"]
for i in range(3000):
    sys.stdout.write(f"{rank} {i} " + rank * (i * 7 % 300) + "\\n")
    if i % 10 == 0:
        sys.stdout.flush()
"""


class Pipe(Test):
    def test_lines_never_mix(self):
        job = self.run_job("--standalone", "--nproc-per-node=4", "python3", "-c", MANY_LINES)
        self.check_code(job, 0)
        seen = {str(rank): 0 for rank in range(4)}
        for line in job.out.splitlines():
            rank, number, rest = line.split(" ")
            self.assertEqual(int(number), seen[rank])
            self.assertEqual(rest, rank * (seen[rank] * 7 % 300))
            seen[rank] += 1
        self.assertEqual(set(seen.values()), {3000})

    def test_bytes_are_kept(self):
        with open(self.path("data"), "wb") as file:
            file.write(os.urandom(300000))
        with open(self.path("data"), "rb") as file:
            data = file.read()
        job = self.start("--standalone", "sh", "-c", "cat data; cat data >&2")
        out, err = job.process.communicate(timeout=harness.DEADLINE)
        self.assertEqual(out, data)
        self.assertEqual(err, data)

    def test_unfinished_line(self):
        job = self.run_job("--standalone", "printf", "no end")
        self.assertEqual(job.out, "no end")
        job = self.run_job("--standalone", "sh", "-c", "printf 'no end' >&2; exit 1")
        self.assertTrue(job.err.startswith("no end\ntdrun: rank 0 "), job.err)

    def test_long_line(self):
        """It is passed on before it ends, in pieces."""
        long_line = "head -c 1000000 /dev/zero | tr '\\0' x; touch up; until [ -e go ]; do sleep 0.01; done"
        job = self.start("--standalone", "sh", "-c", long_line)
        got = b""
        while len(got) < 900000:
            got += os.read(job.process.stdout.fileno(), 65536)
        open(self.path("go"), "w").close()
        job.finish()
        self.assertEqual((got + job.out.encode()).count(b"x"), 1000000)

    def test_order_of_both_streams_at_the_end(self):
        job = self.run_job(
            "--standalone", "sh", "-c", "echo out; exit 1", stderr=subprocess.STDOUT
        )
        self.assertTrue(job.out.startswith("out\ntdrun: rank 0"), job.out)

    def test_reader_goes(self):
        """tdrun … | head -1"""
        command = f'"{harness.TDRUN}" --standalone --nproc-per-node=2 yes; echo $? > code'
        env = dict(os.environ, TD_TEST_MARK=self.mark)
        result = subprocess.run(
            ["sh", "-c", f"{{ {command}; }} | head -1"],
            cwd=self.dir, env=env, capture_output=True, timeout=harness.DEADLINE,
        )  # fmt: skip
        self.assertEqual(result.stdout, b"y\n")
        self.assertEqual(result.stderr, b"")
        harness.wait_until(lambda: read_file(self.path("code")), "the exit code")
        self.assertEqual(read_file(self.path("code")), "141\n")
        self.check_nothing_left()

    def test_slow_reader_holds_the_workers_back(self):
        read_end, write_end = os.pipe()
        count = "i=0; while [ $i -lt 400000 ]; do echo 0123456789 $i; i=$((i+1)); done; touch all"
        job = self.start("--standalone", "sh", "-c", count, stdout=write_end)
        os.close(write_end)
        total = 0
        with os.fdopen(read_end, "rb") as reader:
            last = b""
            while data := reader.read1(65536):
                total += len(data)
                last = data
        self.check_code(job.finish(), 0)
        self.assertTrue(last.endswith(b"0123456789 399999\n"))
        self.assertEqual(total, sum(12 + len(str(i)) for i in range(400000)))

    def test_full_output(self):
        with open("/dev/full", "wb") as full:
            job = self.run_job("--standalone", "sh", "-c", "echo x; echo y", stdout=full)
        self.check_code(job, 1)
        self.assertEqual(job.err.count("cannot write to standard output"), 1, job.err)
        self.assertIn("No space left", job.err)


class Files(Test):
    WORK = "echo out $RANK; echo err $RANK >&2"

    def logs(self, directory):
        names = sorted(glob.glob(f"{directory}/**/*.log", recursive=True))
        return {os.path.relpath(name, directory): read_file(name) for name in names}

    def test_redirect(self):
        logs = self.path("logs")
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "--log-dir", logs, "--rdzv-id=r1", "-r", "3",
            "sh", "-c", self.WORK,
        )  # fmt: skip
        self.check_code(job, 0)
        self.assertEqual((job.out, job.err), ("", ""))
        self.assertEqual(
            self.logs(logs),
            {
                "r1/attempt_0/0/stdout.log": "out 0\n",
                "r1/attempt_0/0/stderr.log": "err 0\n",
                "r1/attempt_0/1/stdout.log": "out 1\n",
                "r1/attempt_0/1/stderr.log": "err 1\n",
            },
        )

    def test_redirect_of_one_stream(self):
        logs = self.path("logs")
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "--log-dir", logs, "--rdzv-id=r1",
            "--redirects=1:1", "sh", "-c", self.WORK,
        )  # fmt: skip
        self.assertEqual(self.logs(logs), {"r1/attempt_0/1/stdout.log": "out 1\n"})
        self.assertEqual(job.out, "out 0\n")
        self.assertEqual(sorted(job.err.splitlines()), ["err 0", "err 1"])

    def test_tee(self):
        logs = self.path("logs")
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "--log-dir", logs, "--rdzv-id=r1", "-t3",
            "--role=worker", "sh", "-c", self.WORK,
        )  # fmt: skip
        self.assertEqual(len(self.logs(logs)), 4)
        self.assertEqual(sorted(job.out.splitlines()), ["[worker0]:out 0", "[worker1]:out 1"])
        self.assertEqual(sorted(job.err.splitlines()), ["[worker0]:err 0", "[worker1]:err 1"])

    def test_tee_over_redirect(self):
        job = self.run_job(
            "--standalone", "--log-dir", self.path("logs"), "-r3", "-t1", "sh", "-c", self.WORK
        )
        self.assertEqual((job.out, job.err), ("[default0]:out 0\n", ""))

    def test_fresh_directory(self):
        job = self.run_job("--standalone", "-r1", "sh", "-c", self.WORK, env={"TMPDIR": self.dir})
        directory = re.search(r"kept in (.*)\n", job.err).group(1)
        self.assertTrue(directory.startswith(self.dir))
        self.assertEqual(self.logs(directory), {"attempt_0/0/stdout.log": "out 0\n"})

    def test_attempts(self):
        logs = self.path("logs")
        job = self.run_job(
            "--log-dir", logs, "-r", "1", "--max-restarts=1",
            "sh", "-c", "echo $TORCHELASTIC_RESTART_COUNT; exit 1",
        )  # fmt: skip
        self.check_code(job, 1)
        self.assertEqual(
            self.logs(logs),
            {"none/attempt_0/0/stdout.log": "0\n", "none/attempt_1/0/stdout.log": "1\n"},
        )
        self.assertIn("    | 0\n", job.err)

    def test_filter(self):
        job = self.run_job(
            "--standalone", "--nproc-per-node=4", "--local-ranks-filter=1,3", "sh", "-c", self.WORK
        )
        self.assertEqual(sorted(job.out.splitlines()), ["out 1", "out 3"])
        self.assertEqual(sorted(job.err.splitlines()), ["err 1", "err 3"])

    def test_hidden_failure_is_reported(self):
        job = self.run_job(
            "--standalone", "--nproc-per-node=2", "--local-ranks-filter=0",
            "sh", "-c", "[ $RANK = 1 ] && { echo hidden >&2; exit 1; }; sleep 1000",
        )  # fmt: skip
        self.assertIn("    | hidden\n", job.err)

    def test_full_disk(self):
        """Said once for each file; the job goes on, but has not done all that was asked."""
        logs = self.path("logs")
        os.makedirs(f"{logs}/none/attempt_0/0")
        os.symlink("/dev/full", f"{logs}/none/attempt_0/0/stdout.log")
        job = self.run_job(
            "--nproc-per-node=2", "--log-dir", logs, "-r3",
            "sh", "-c", "echo 1; sleep 0.05; echo 2; touch done.$RANK",
        )  # fmt: skip
        self.check_code(job, 1)
        self.assertEqual(job.err.count("No space left"), 1, job.err)
        self.assertIn(f"{logs}/none/attempt_0/0/stdout.log", job.err)
        self.assertTrue(os.path.exists(self.path("done.0")))
        self.assertEqual(read_file(f"{logs}/none/attempt_0/1/stdout.log"), "1\n2\n")

    def test_limit_of_file_size(self):
        """As a full disk; for the workers the limit is what it would be without tdrun."""
        limit = 1 << 18
        job = self.run_job(
            "--log-dir", self.path("logs"), "-r1",
            "sh", "-c", "head -c 300000 /dev/zero; grep SigIgn /proc/self/status >&2",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )  # fmt: skip
        self.check_code(job, 1)
        self.assertEqual(job.err.count("File too large"), 1, job.err)
        ignored = int(re.search(r"SigIgn:\s*(\w+)", job.err)[1], 16)
        self.assertFalse(ignored >> (signal.SIGXFSZ - 1) & 1)

    def test_failure_outweighs_full_disk(self):
        logs = self.path("logs")
        os.makedirs(f"{logs}/none/attempt_0/0")
        os.symlink("/dev/full", f"{logs}/none/attempt_0/0/stdout.log")
        job = self.run_job("--log-dir", logs, "-r1", "sh", "-c", "echo 1; exit 9")
        self.check_code(job, 9)

    def test_impossible_directory(self):
        open(self.path("file"), "w").close()
        job = self.run_job("--log-dir", self.path("file/logs"), "-r1", "touch", "ran")
        self.check_code(job, 1)
        self.assertIn(self.path("file"), job.err)
        self.assertFalse(os.path.exists(self.path("ran")))


class Screen(Test):
    def test_prefix_and_colour(self):
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "sh", "-c", "echo hello $RANK; echo e >&2"
        )
        self.assertEqual(terminal.finish(), 0)
        for rank, colour in (0, 36), (1, 33):
            prefix = b"\x1b[%dm[%d]\x1b[0m " % (colour, rank)
            self.assertIn(prefix + b"hello %d\r\n" % rank, terminal.text)
            self.assertIn(prefix + b"e\r\n", terminal.text)

    def test_no_color(self):
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "sh", "-c", "echo hello", env={"NO_COLOR": "1"}
        )
        terminal.finish()
        self.assertEqual(sorted(terminal.text.split(b"\r\n")), [b"", b"[0] hello", b"[1] hello"])

    def test_one_worker_is_as_without_tdrun(self):
        terminal = Terminal(self, "--standalone", "sh", "-c", "printf 'a\\tb\\033[1m'; echo c")
        terminal.finish()
        self.assertEqual(terminal.text, b"a\tb\x1b[1mc\r\n")

    def test_workers_see_a_terminal(self):
        see = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty())"
        terminal = Terminal(self, "--standalone", "--nproc-per-node=2", "python3", "-c", see)
        terminal.finish()
        self.assertEqual(terminal.text.count(b"True True False"), 2, terminal.text)

    def test_lines_appear_at_once(self):
        """A program that writes to a terminal line by line does so here, and the lines come through."""
        wait = "import os, time\nprint('waiting')\nwhile not os.path.exists('go'): time.sleep(0.01)"
        terminal = Terminal(self, "--standalone", "--nproc-per-node=2", "python3", "-c", wait)
        terminal.wait_text(rb"(?s)waiting.*waiting")
        open(self.path("go"), "w").close()
        self.assertEqual(terminal.finish(), 0)

    def test_progress_and_prompts_appear(self):
        progress = (
            "[ $RANK = 1 ] && exit 0; printf ' 10%%\\r 20%%\\r'; printf ' 30%%';"
            "until [ -e go ]; do sleep 0.01; done; printf '\\r 40%%\\n'"
        )
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "sh", "-c", progress, env={"NO_COLOR": "1"}
        )
        terminal.wait_text(rb"\[0\]  30%$")
        open(self.path("go"), "w").close()
        terminal.finish()
        self.assertEqual(terminal.text, b"[0]  10%\r[0]  20%\r[0]  30%\r[0]  40%\r\n")

    def test_another_worker_begins_a_new_line(self):
        between = (
            "if [ $RANK = 1 ]; then until [ -e one ]; do sleep 0.01; done; echo other; else "
            "printf unfinished; until [ -e go ]; do sleep 0.01; done; printf 'business\\n'; fi"
        )
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "sh", "-c", between, env={"NO_COLOR": "1"}
        )
        terminal.wait_text(rb"\[0\] unfinished$")
        open(self.path("one"), "w").close()
        terminal.wait_text(rb"other\r\n")
        open(self.path("go"), "w").close()
        terminal.finish()
        self.assertEqual(terminal.text, b"[0] unfinished\r\n[1] other\r\n[0] business\r\n")

    def test_report_begins_a_new_line(self):
        terminal = Terminal(self, "--standalone", "sh", "-c", "printf oops; exit 1")
        self.assertEqual(terminal.finish(), 1)
        self.assertTrue(terminal.text.startswith(b"oops\r\ntdrun: rank 0 "), terminal.text)

    def test_held_background_output(self):
        """The agent writes from the background; `stty tostop` does not stop it."""
        terminal = Terminal(
            self, "--standalone", "--nproc-per-node=2", "echo", "through", tostop=True
        )
        self.assertEqual(terminal.finish(), 0)
        self.assertEqual(terminal.text.count(b"through"), 2, terminal.text)

    def test_window_size(self):
        see = "import os; print(os.get_terminal_size(1))"
        terminal = Terminal(self, "--standalone", "python3", "-c", see)
        terminal.finish()
        self.assertIn(b"columns=0, lines=0", terminal.text)  # as that of this terminal


if __name__ == "__main__":
    harness.main()
