#!/usr/bin/env python3
"""srun ./program, srun tdrun and the scripts of examples/slurm, on a Slurm cluster of this test's own (cluster.py).

    test_slurm.py path/to/tdrun path/to/examples path/to/source [test…]

Exits with 77, and says why, where there can be no such cluster.
"""

import glob
import os
import re
import subprocess
import sys
import time
import unittest

import cluster
from cluster import BASE, wait_until
from spaces import PATH, enter_or_skip

TDRUN = EXAMPLES = SOURCE = None  # set in the end
SEED = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node={tasks}
#SBATCH --cpus-per-task=1
#SBATCH --output={base}/seed.log
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=12345
srun {tdrun} --nproc_per_node=2 --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID \\
    --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT {program}
"""


def environment(**more):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TANDEM_", "SLURM_", "PET_", "OMP_", "MASTER_")) or name == "SLURM_CONF"
    }
    clean.update(HOME=f"{BASE}/home", **more)
    clean["PATH"] = f"{os.path.dirname(TDRUN)}:{PATH}"
    return clean


def run(*command, **more):
    return subprocess.run(command, env=environment(**more), cwd=BASE, capture_output=True, text=True, check=False)


def read(name):
    try:
        with open(f"{BASE}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.makedirs(f"{BASE}/home")
        cls.cluster = cluster.Cluster()
        try:
            cls.cluster.start()
        except Exception:
            print(cls.cluster.logs())
            raise

    @classmethod
    def tearDownClass(cls):
        cls.cluster.stop()

    def check(self, done, code=0):
        self.assertEqual(done.returncode, code, f"{done.stdout}\n{done.stderr}")
        return done.stdout

    def sums(self, text, world):
        """Every rank of all_reduce has said the sum."""
        self.assertEqual(len(re.findall(r"^rank \d+", text, re.M)), world, text)

    def submit(self, *arguments, **more):
        return run("sbatch", "--parsable", *arguments, **more).stdout.strip()

    def submit_and_wait(self, *arguments, **more):
        job = self.submit(*arguments, **more)
        self.wait_state(job, ["COMPLETED", "FAILED"])
        return job

    def wait_state(self, job, states):
        def reached():
            state = re.search(r"JobState=(\S+)", run("scontrol", "show", "job", job).stdout)
            return state and state[1] in states

        wait_until(reached, f"job {job} in {states}", 60)

    # ---- srun ./program -----------------------------------------------------------------------

    def test_program_on_three_nodes(self):
        """By the environment alone: n1 is a name that only Slurm knows, and there is no secret."""
        text = self.check(run("srun", "-N3", "--ntasks-per-node=2", f"{EXAMPLES}/all_reduce"))
        self.sums(text, 6)
        self.assertEqual(os.stat(f"{BASE}/home/.config/tandem/secret").st_mode & 0o777, 0o600)

    def test_two_steps_at_once(self):
        script = f"for i in 1 2; do srun -N2 -n2 --overlap {EXAMPLES}/all_reduce & done; wait"
        text = self.check(run("salloc", "-Q", "-N2", "--ntasks-per-node=2", "bash", "-c", script))
        self.sums(text, 4)

    def test_heterogeneous_step(self):
        text = self.check(run("srun", "-N1", "-n1", f"{EXAMPLES}/all_reduce", ":", "-N1", "-n2", f"{EXAMPLES}/all_reduce"))
        self.sums(text, 3)

    def test_homes_that_are_not_shared(self):
        script = f"export HOME={BASE}/home.$SLURMD_NODENAME; mkdir -p $HOME; exec {EXAMPLES}/all_reduce"
        # Of a task that ends a step, srun loses the last lines now and then.
        done = run("srun", "--kill-on-bad-exit=1", "-N2", "-n2", "bash", "-c", script + " 2>$HOME/errors")
        self.assertNotEqual(done.returncode, 0)
        said = "".join(read(os.path.relpath(path, BASE)) for path in glob.glob(f"{BASE}/home.*/errors"))
        self.assertIn("must be the same file on all nodes", said)
        shown = run("srun", "-N2", "-n2", "bash", "-c", script, TANDEM_SECRET="from the batch script")
        self.sums(self.check(shown), 2)

    # ---- srun tdrun -----------------------------------------------------------------------------

    def test_launcher_on_two_nodes(self):
        show = "echo $RANK $WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $OMP_NUM_THREADS $MASTER_ADDR"
        text = self.check(run("srun", "-N2", "--ntasks-per-node=1", "-c4", "tdrun", "--nproc-per-node=2", "sh", "-c", show))
        self.assertEqual(sorted(text.splitlines()), [f"{rank} 4 {rank // 2} 2 2 10.78.0.11" for rank in range(4)])
        text = self.check(run("srun", "-N2", "--ntasks-per-node=1", "tdrun", "--nproc-per-node=2", f"{EXAMPLES}/all_reduce"))
        self.sums(text, 4)

    def test_a_part_of_the_nodes(self):
        """A step on the last two of three nodes counts its own."""
        script = f"srun -N2 -r1 --ntasks-per-node=1 tdrun --nproc-per-node=1 {EXAMPLES}/all_reduce"
        self.sums(self.check(run("salloc", "-Q", "-N3", "bash", "-c", script)), 2)

    def test_example(self):
        job = self.submit_and_wait("--gres=none", "--mem=0", "--cpus-per-task=4", "--time=5", f"--output={BASE}/ddp.log",
                          f"{SOURCE}/examples/slurm/ddp.sbatch", f"{EXAMPLES}/10_ddp_tdrun", WORKERS="2")  # fmt: skip
        self.assertIn("JobState=COMPLETED", run("scontrol", "show", "job", job).stdout, read("ddp.log"))
        self.assertIn("rank 3", read("ddp.log"))

    def test_four_launchers_a_node(self):
        """The script of people who come from torch.distributed.launch: one sentence says what to write."""
        with open(f"{BASE}/seed.sbatch", "w", encoding="ascii") as file:
            file.write(SEED.format(base=BASE, tasks=4, tdrun=TDRUN, program=f"{EXAMPLES}/all_reduce"))
        self.submit_and_wait(f"{BASE}/seed.sbatch")
        text = read("seed.log")
        self.assertEqual(text.count("srun has started 4 launchers on this node (--ntasks-per-node=4)"), 1, text)
        self.assertIn("srun --ntasks-per-node=1 --cpus-per-task=4 tdrun --nproc-per-node=2", text)
        self.assertIn("$SLURM_NODEID in a batch script is 0 for every node", text)

    def test_node_rank_of_the_batch_shell(self):
        """The same with one launcher a node: all say --node_rank=0, and the master's name cannot be looked up."""
        with open(f"{BASE}/seed.sbatch", "w", encoding="ascii") as file:
            file.write(SEED.format(base=BASE, tasks=1, tdrun=TDRUN, program=f"{EXAMPLES}/all_reduce"))
        self.submit_and_wait(f"{BASE}/seed.sbatch")
        text = read("seed.log")
        self.sums(text, 4)
        self.assertEqual(text.count("--node-rank 0 is wrong here, since Slurm says that this is node 1"), 1, text)

    # ---- The end of a job's time ----------------------------------------------------------------

    def test_requeue(self):
        script = f"{SOURCE}/examples/slurm/requeue.sbatch"
        log = "requeue.log"
        job = self.submit("--time=5", f"--output={BASE}/{log}", script, f"{BASE}/checkpoints", "150", "20",
                          PROGRAM=f"{EXAMPLES}/22_requeue", WORKERS="2")  # fmt: skip
        wait_until(lambda: "begins at step 0" in read(log), "the first run")
        run("scancel", "--signal=USR1", job)  # as Slurm does for --signal
        wait_until(lambda: "stopped at step" in read(log), "the checkpoint")
        self.wait_state(job, ["PENDING"])
        # slurmd refuses a start whose credential is not newer, in whole seconds, than the end of the first run; that
        # is why Slurm itself waits for two minutes.
        time.sleep(2.1)

        def finished():
            run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return "finished at step 150" in read(log)

        try:
            wait_until(finished, "the second run", 15)
        except AssertionError:
            self.fail(f"{read(log)}\n{run('scontrol', 'show', 'job', job).stdout}\n{self.cluster.logs()}")
        first = re.search(r"stopped at step (\d+)", read(log))[1]
        self.assertIn(f"goes on at step {first}\n", read(log))
        self.wait_state(job, ["COMPLETED"])

    def test_time_is_over(self):
        """SIGTERM, which Slurm sends when a job's time is over, does the same."""
        process = subprocess.Popen(["srun", "-Q", "-N2", "--ntasks-per-node=1", "tdrun", f"{EXAMPLES}/22_requeue",
                                    f"{BASE}/terminated", "100000", "10"], env=environment(), cwd=BASE,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        self.assertIn("begins at step 0", process.stdout.readline())
        job = run("squeue", "-h", "-o", "%i").stdout.split()[0]
        run("scancel", "--signal=TERM", job)
        text = process.communicate(timeout=60)[0]
        self.assertRegex(text, r"stopped at step \d+")


if __name__ == "__main__":
    enter_or_skip(*cluster.PROGRAMS)
    TDRUN, EXAMPLES, SOURCE = (os.path.abspath(sys.argv.pop(1)) for _ in range(3))
    unittest.main(verbosity=2)
