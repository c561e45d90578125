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
            ("--nprocs", "--nproc-per-node"),
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
        self.check(["--nnodes=1:2", "true"], "that needs --rdzv-backend c10d")
        self.check(["--nnodes=3:2", "true"], "the smaller one comes first")
        self.check(["--nnodes=1:x", "true"], "neither N nor MIN:MAX")
        self.check(["--nnodes=1:2", "--rdzv-backend=c10d", "--node-rank=1", "true"], "numbered as they arrive")
        self.check(["--rdzv-conf=last_call=3", "true"], "known are timeout, join_timeout, last_call_timeout")
        self.check(["--rdzv-conf=is_host=2", "true"], "is_host is 1 or 0")
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
        self.check(["--on-failure=restart", "true"], 'none of restart-all')
        self.check(["--on-failure=shrink", "--max-restarts=1", "true"], "replace starts it again")
        self.check(["--keep-going", "true"], "--on-failure shrink")
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
        self.check(["--nproc-per-node=gpu", "true"], "there is no GPU here")

    def test_python(self):
        self.check(["-m"], "there is no module to start: tdrun [options] -m module")
        self.check(["--module=train"], "--module takes no value")
        self.check(["--module", "--no-python", "train"], "--no-python and --module exclude")
        self.check(["--no-python", "--run-path", "train.py"], "--no-python and --run-path exclude")

    def test_local_rank(self):
        self.check(["--pass-local-rank=", "true"], '"" is not the name of an argument')
        self.check(["--pass-local-rank=a b", "true"], "local_rank or local-rank")
        self.check(["--pass-local-ranks", "true"], "did you mean --pass-local-rank?")
        self.check(["--use-env=1", "true"], "--use-env takes no value")

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

    def test_no_python_script(self):
        self.check("./train.py", 127, "tdrun: cannot run ./train.py: No such file or directory")
        self.check("train.py", 127, "no such file in this directory", "no such program in PATH")

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


SHOW = "import sys; print(sys.argv, *sys.orig_argv[1:])\n"


class Python(Test):
    """Scripts and modules, as torchrun starts them."""

    def show(self, *arguments, code=0, **popen):
        job = self.run_job("--standalone", *arguments, **popen)
        self.check_code(job, code)
        return job.out if code == 0 else job.err

    def test_script(self):
        script = self.script("train.py", SHOW, 0o644)
        self.assertEqual(
            self.show(script, "-x", "a b"), "['./train.py', '-x', 'a b'] -u ./train.py -x a b\n"
        )
        self.assertEqual(self.show("train.py"), "['train.py'] -u train.py\n")
        self.assertEqual(self.show(self.path("train.py"))[2:], self.path("train.py") + "'] -u "
                         + self.path("train.py") + "\n")  # fmt: skip

    def test_executable_script_runs_by_its_first_line(self):
        self.script("train.py", "#!/bin/sh\necho shell $PYTHONUNBUFFERED $1\n")
        for name in "./train.py", "train.py":
            self.assertEqual(self.show(name, "x"), "shell 1 x\n")

    def test_executable_script_without_first_line(self):
        self.assertIn("-u ./train.py", self.show(self.script("train.py", SHOW)))

    def test_script_is_found_here_first_then_in_path(self):
        os.mkdir(self.path("bin"))
        self.script("bin/tool.py", "#!/bin/sh\necho in the path\n")
        path = f"{self.path('bin')}:{os.environ['PATH']}"
        self.assertEqual(self.show("tool.py", env={"PATH": path}), "in the path\n")
        self.script("tool.py", "print('here')\n", 0o644)
        self.assertEqual(self.show("tool.py", env={"PATH": path}), "here\n")

    def test_module(self):
        self.script("train.py", "import sys; print(*sys.orig_argv[1:])\n", 0o644)
        env = {"PYTHONPATH": self.dir}
        for flag in "-m", "--module":
            self.assertEqual(self.show(flag, "train", "-x", env=env), "-u -m train -x\n")
        job = self.run_job("train", env={**env, "PET_MODULE": "1"})
        self.assertEqual(job.out, "-u -m train\n")
        self.assertIn("No module named", self.show("-m", "trian", code=1, env=env))

    def test_run_path(self):
        script = self.script("train", SHOW, 0o644)
        self.assertIn("-u ./train", self.show("--run-path", script))

    def test_no_python(self):
        self.script("train.py", "print(1)\n", 0o644)
        error = self.show("--no-python", "./train.py", code=126)
        self.assertIn("not executable (without --no-python", error)
        self.script("train.py", "#!/bin/sh\necho $1\n")
        self.assertEqual(self.show("--no-python", "./train.py", "x"), "x\n")
        error = self.show("--no-python", "train.py", code=127)
        self.assertIn("the one in this directory is ./train.py", error)

    def test_interpreter(self):
        self.script("other", '#!/bin/sh\necho other "$@"\n')
        self.script("train.py", "#!/bin/sh\necho its own\n")
        env = {"PYTHON_EXEC": "./other"}
        self.assertEqual(self.show("train.py", "x", env=env), "other -u train.py x\n")
        self.assertEqual(self.show("-m", "train", env=env), "other -u -m train\n")
        self.assertEqual(self.show("train.py", env={"PYTHON_EXEC": ""}), "its own\n")
        error = self.show("train.py", code=127, env={"PYTHON_EXEC": "./none"})
        self.assertEqual(error, "tdrun: PYTHON_EXEC: cannot run ./none: No such file or directory\n")
        error = self.show("-m", "train", code=127, env={"PATH": self.dir})
        self.assertIn("a Python program needs its interpreter: cannot run python3", error)

    def test_output_is_seen_at_once(self):
        text = "import os, signal; print('before the end'); os.kill(os.getpid(), signal.SIGKILL)\n"
        for first in "", "#!/usr/bin/env python3\n":
            script = self.script("train.py", first + text, 0o755 if first else 0o644)
            job = self.run_job("--standalone", script)
            self.assertEqual(job.out, "before the end\n")

    def test_pass_local_rank(self):
        script = self.script("train.py", "import sys; print(*sys.argv[1:])\n", 0o644)
        for flags, name in [
            (["--pass-local-rank"], "local_rank"),
            (["--pass_local_rank=local-rank"], "local-rank"),
            (["--pass-local-rank=--device"], "device"),
            (["--use-env", "--pass-local-rank"], "local_rank"),
        ]:
            out = self.show("--nproc-per-node=2", *flags, script, "--epochs", "3")
            self.assertEqual(
                sorted(out.splitlines()), [f"--{name}={rank} --epochs 3" for rank in range(2)]
            )
        self.assertEqual(self.show("--pass-local-rank", "--use-env", script, "a"), "a\n")
        env = {"PET_PASS_LOCAL_RANK": "1", "PYTHONPATH": self.dir}
        self.assertEqual(self.show("-m", "train", "a", env=env), "--local_rank=0 a\n")
        self.assertEqual(self.show("--use-env", script, "a", env=env), "a\n")
        env["PET_PASS_LOCAL_RANK"] = "0"
        self.assertEqual(self.show("echo", "a", env=env), "a\n")
        env["PET_PASS_LOCAL_RANK"] = "rank"
        self.assertEqual(self.show("echo", "a", env=env), "--rank=0 a\n")


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
            ["--nproc_per_node=3", "--use_env"],
        ]:
            job = self.run_job("--standalone", *form, "sh", "-c", "echo $WORLD_SIZE")
            self.assertEqual(job.out, "3\n" * 3)

    def test_automatic_number(self):
        cpus = len(os.sched_getaffinity(0))
        job = self.run_job("--standalone", "--nproc-per-node=cpu", "sh", "-c", "echo $RANK")
        self.assertEqual(len(job.out.split()), cpus)
        gpus = [name for name in os.listdir("/dev") if name[:6] == "nvidia" and name[6:].isdigit()]
        for hidden in False, True:
            job = self.run_job(
                "--standalone", "--nproc-per-node=auto", "sh", "-c", "echo $RANK",
                env={"CUDA_VISIBLE_DEVICES": "" if hidden else ",".join(map(str, range(256)))},
            )  # fmt: skip
            self.assertEqual(len(job.out.split()), not hidden and len(gpus) or cpus)

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
