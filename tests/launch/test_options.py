#!/usr/bin/env python3
"""tdrun's command line: flags, defaults from the environment, and mistakes."""

import os

import harness
from harness import Test


class Mistakes(Test):
    """Each is one sentence on standard error, and exit code 2."""

    def check(self, arguments, *parts):
        job = self.run_job(*arguments)
        self.check_code(job, 2)
        self.assertEqual(job.out, "")
        self.assertTrue(job.err.startswith("tdrun: "), job.err)
        self.assertEqual(job.err.count("\n"), 1, job.err)
        for part in parts:
            self.assertIn(part, job.err)

    def test_no_program(self):
        self.check([], "no program")
        self.check(["--nproc-per-node", "2"], "no program")
        self.check(["--nproc-per-node", "2", "--"], "no program")

    def test_typing_mistakes(self):
        for typed, meant in [
            ("--nproc-per-nod", "--nproc-per-node"),
            ("--nproc_per_nodes", "--nproc-per-node"),
            ("--nnode", "--nnodes"),
            ("--master_prot", "--master-port"),
            ("--max-restart=3", "--max-restarts"),
            ("--nproc", "--nproc-per-node"),
            ("--standalon", "--standalone"),
        ]:
            name = typed.partition("=")[0]
            self.check([typed, "2", "true"], f"unknown option {name}; did you mean {meant}?")

    def test_unknown(self):
        self.check(["--zzzzzz", "true"], "unknown option --zzzzzz", "--help")
        self.check(["-q", "true"], "unknown option -q")
        self.check(["-help", "true"], "unknown option -help")

    def test_values(self):
        self.check(["--nnodes"], "--nnodes needs a value")
        self.check(["--nnodes", "--standalone", "true"], "--nnodes needs a value")
        self.check(["--standalone=1", "true"], "--standalone takes no value")
        self.check(["--nnodes=0", "true"], "--nnodes", '"0"')
        self.check(["--nnodes=1:2", "true"], "fixed number")
        self.check(["--nnodes=x:2", "true"], "MIN:MAX")
        self.check(["--nproc-per-node=none", "true"], "auto, cpu or gpu")
        self.check(["--nproc-per-node=-1", "true"], '"-1"')
        self.check(["--node-rank=2", "--nnodes=2", "true"], "from 0 to 1")
        self.check(["--master-port=70000", "true"], "65535")
        self.check(["--master-port=0", "--nnodes=2", "true"], "--master-port")
        self.check(["--rdzv-backend=etcd", "true"], "static", "c10d")
        self.check(["--rdzv-endpoint=host:x", "true"], "HOST:PORT")
        self.check(["--rdzv-conf=join=3", "true"], '"join"', "join_timeout", "read_timeout")
        self.check(["--rdzv-conf=join_timeout", "true"], "join_timeout=60")
        self.check(["--max-restarts=-1", "true"], "--max-restarts")
        self.check(["--monitor-interval=often", "true"], "seconds")
        self.check(["--shutdown-timeout=nan", "true"], "seconds")
        self.check(["--role=", "true"], "empty")
        self.check(["-r", "4", "true"], "--redirects")
        self.check(["-t", "1:3", "true"], "no local rank 1")
        self.check(["--tee=0:9", "true"], "--tee")
        self.check(["--local-ranks-filter=1", "true"], "from 0 to 0")
        self.check(["--signals-to-handle=SIGFOO", "true"], "SIGFOO")
        self.check(["--signals-to-handle=SIGKILL", "true"], "cannot be handled")
        self.check(["--numa-binding=nodes", "true"], "core-complex")
        self.check(["--standalone", "--nnodes=2", "true"], "one node")

    def test_no_gpu(self):
        if any(name.startswith("nvidia") for name in os.listdir("/dev")):
            self.skipTest("there is a GPU here")
        self.check(["--nproc-per-node=gpu", "true"], "no GPU")

    def test_python_module(self):
        self.check(["-m", "train", "x"], "tdrun … python3 -m train")
        self.check(["--module=train"], "tdrun … python3 -m train")
        self.check(["--run-path", "train.py"], "python3 train.py")

    def test_variable(self):
        job = self.run_job("true", env={"PET_NNODES": "many"})
        self.check_code(job, 2)
        self.assertIn("many", job.err)
        job = self.run_job("true", env={"PET_MASTER_PORT": "x"})
        self.assertIn("PET_MASTER_PORT", job.err)
        job = self.run_job("true", env={"PET_STANDALONE": "yes"})
        self.assertIn("PET_STANDALONE", job.err)


class Programs(Test):
    """What cannot be run costs no worker, and the exit code is a shell's."""

    def check(self, program, code, *parts):
        job = self.run_job("--nproc-per-node", "2", program)
        self.check_code(job, code)
        self.assertEqual(job.err.count("\n"), 1, job.err)
        for part in parts:
            self.assertIn(part, job.err)

    def test_missing(self):
        self.check("./trian", 127, "tdrun: cannot run ./trian: No such file or directory")
        self.check("no-such-program-anywhere", 127, "no such program in PATH")
        self.check("", 127)

    def test_not_executable(self):
        self.script("train", "#!/bin/sh\n", 0o644)
        self.check("./train", 126, "not executable", "chmod +x")
        self.check("train", 127, "./train")
        self.check(".", 127)
        self.check("./", 126, "directory")

    def test_python_script(self):
        self.script("train.py", "print(1)\n", 0o644)
        self.check("./train.py", 126, "not executable", "tdrun … python3 ./train.py")
        self.check("train.py", 127, "tdrun … python3 train.py")

    def test_missing_interpreter(self):
        self.check(self.script("odd", "#!/no/such/interpreter\n"), 127, "interpreter")

    def test_script_without_first_line(self):
        job = self.run_job(self.script("plain", "echo $1\n"), "as execvp does it")
        self.check_code(job, 0)
        self.assertEqual(job.out, "as execvp does it\n")

    def test_found_in_path(self):
        os.mkdir(self.path("bin"))
        os.mkdir(self.path("first"))
        self.script("bin/my-train", "#!/bin/sh\necho found\n")
        self.script("first/my-train", "#!/bin/sh\n", 0o644)
        path = f"{self.path('first')}:{self.path('bin')}:{os.environ['PATH']}"
        job = self.run_job("my-train", env={"PATH": path})
        self.check_code(job, 0)
        self.assertEqual(job.out, "found\n")


class Flags(Test):
    def test_help_and_version(self):
        job = self.run_job("--help")
        self.check_code(job, 0)
        self.assertIn("--nproc-per-node N|auto|cpu|gpu", job.out)
        self.assertIn("-r, --redirects", job.out)
        self.assertEqual(self.run_job("-h").out, job.out)
        self.assertRegex(self.run_job("-V").out, r"^tdrun \d+\.\d+\.\d+\n$")

    def test_arguments_go_untouched(self):
        arguments = ["--nnodes", "-x", "", "a b", "--", "--help", "*"]
        show = ["python3", "-c", "import sys; print(sys.argv[1:])"]
        for first in [[], ["--"]]:
            job = self.run_job("--standalone", *first, *show, *arguments)
            self.assertEqual(job.out, f"{arguments}\n")

    def test_forms(self):
        for form in [
            ["--nproc-per-node", "3"],
            ["--nproc_per_node=3"],
            ["--nproc-per-node=1", "--nproc-per-node=3"],
            ["--nnodes=1:1", "--nproc_per_node", "3", "--no-python", "--monitor-interval=5"],
        ]:
            job = self.run_job("--standalone", *form, "sh", "-c", "echo $WORLD_SIZE")
            self.assertEqual(job.out, "3\n" * 3)

    def test_automatic_number(self):
        cpus = len(os.sched_getaffinity(0))
        job = self.run_job("--standalone", "--nproc-per-node=cpu", "sh", "-c", "echo $RANK")
        self.assertEqual(len(job.out.split()), cpus)
        gpus = [name for name in os.listdir("/dev") if name[:6] == "nvidia" and name[6:].isdigit()]
        job = self.run_job("--standalone", "--nproc-per-node=auto", "sh", "-c", "echo $RANK")
        self.assertEqual(len(job.out.split()), len(gpus) or cpus)

    def test_defaults_from_environment(self):
        variables = {"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "1", "PET_ROLE": "actor"}
        job = self.run_job("sh", "-c", "echo $WORLD_SIZE $ROLE_NAME", env=variables)
        self.assertEqual(job.out, "2 actor\n" * 2)
        job = self.run_job("--nproc-per-node=1", "sh", "-c", "echo $WORLD_SIZE", env=variables)
        self.assertEqual(job.out, "1\n")

    def test_what_has_no_effect_is_said(self):
        job = self.run_job("--standalone", "--master-port=1234", "true")
        self.check_code(job, 0)
        self.assertIn("not used", job.err)
        job = self.run_job("--standalone", "--log-dir", self.path("logs"), "true")
        self.assertIn("no effect", job.err)


if __name__ == "__main__":
    harness.main()
