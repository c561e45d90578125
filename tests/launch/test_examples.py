#!/usr/bin/env python3
"""The numbered examples, and the programs of the README, each run for real, and its output checked.

usage: test_examples.py path/to/tdrun path/to/examples path/to/readme/programs [test…]
"""

import json
import os
import random
import re
import select
import signal
import struct
import sys
from pathlib import Path

import harness
from harness import Test, free_port

SOURCES = Path(__file__).resolve().parents[2] / "examples"


class Programs(Test):
    def run_alone(self, name, *arguments, **popen):
        """Runs a program that needs no launcher; returns its lines, sorted."""
        job = harness.Job(self, arguments, program=os.path.join(EXAMPLES, name), **popen).finish()
        self.check_nothing_left()
        return self.lines(job)

    def run_ranks(self, ranks, name, *arguments, folder=None, **popen):
        """Runs a program under tdrun; returns its lines, sorted."""
        job = self.run_job(
            "--standalone", f"--nproc-per-node={ranks}", os.path.join(folder or EXAMPLES, name),
            *arguments, **popen,
        )  # fmt: skip
        return self.lines(job)

    def lines(self, job):
        self.check_code(job, 0)
        self.assertEqual(job.err, "")
        return sorted(job.out.splitlines())

    def check_falls(self, lines, pattern):
        """Each line that matches names a loss before and after; returns what the third group says."""
        found = [re.search(pattern, line) for line in lines]
        found = [match for match in found if match]
        self.assertTrue(found, lines)
        for match in found:
            self.assertLess(float(match[2]), float(match[1]) / 5, lines)
        return [match[3] for match in found if match.re.groups > 2]

    def check_same(self, values, count):
        self.assertEqual(len(values), count)
        self.assertEqual(len(set(values)), 1, values)


class Examples(Programs):
    def test_01_send_recv(self):
        self.assertEqual(
            self.run_alone("01_send_recv"), ["rank 0 has data 1", "rank 1 has data 1"]
        )

    def test_02_isend_irecv(self):
        self.assertEqual(
            self.run_alone("02_isend_irecv"),
            ["rank 0 has data 1", "rank 0 started sending"]
            + ["rank 1 has data 1", "rank 1 started receiving"],
        )

    def test_03_groups(self):
        self.assertEqual(
            self.run_ranks(3, "03_groups"),
            [f"rank {r}: 2 in the group of ranks 0 and 1, 3 in the world" for r in range(2)]
            + ["rank 2: not in the group, 3 in the world"],
        )

    def test_04_collectives(self):
        for size in 1, 2, 4:
            ranks = range(size)
            expected = []
            for r in ranks:
                own = [i + 1 for i in ranks]
                results = {
                    "broadcast": [1],
                    "reduce": [sum(own) if r == 0 else r + 1],
                    "all_reduce": [sum(own)],
                    "scatter": [10 + r],
                    "gather": own if r == 0 else [],
                    "all_gather": own,
                    "reduce_scatter": [sum(10 * (s + 1) + r for s in ranks)],
                    "all_to_all": [10 * (s + 1) + r for s in ranks],
                    "barrier": [],
                }
                expected += [
                    " ".join([f"rank {r}: {call:16}", *map(str, values)])
                    for call, values in results.items()
                ]
            self.assertEqual(self.run_ranks(size, "04_collectives"), sorted(expected))

    def test_05_scatter_gather(self):
        expected = [
            line
            for r in range(3)
            for way in ("messages", "halves")
            for line in (
                f"rank {r} got {r} by {way}",
                f"rank 0 gathered {r * r} of rank {r} by {way}",
            )
        ]
        self.assertEqual(self.run_ranks(3, "05_scatter_gather"), sorted(expected))

    def test_06_synchronous_sgd(self):
        lines = self.run_ranks(2, "06_synchronous_sgd")
        loss = {
            (int(match[1]), int(match[2])): float(match[3])
            for match in map(re.compile(r"rank (\d), epoch (\d): loss (.*)").match, lines)
            if match
        }
        self.assertEqual(len(loss), 20, lines)
        for rank in range(2):
            self.assertGreater(loss[rank, 0], 2)
            self.assertLess(loss[rank, 9], 1)
        self.check_same([line.split()[-1] for line in lines if "norm" in line], 2)

    def test_06_synchronous_sgd_with_files(self):
        write_pictures(self.path("fashion-mnist"), 96)
        lines = self.run_ranks(
            3, "06_synchronous_sgd", "fashion-mnist", env={"TANDEM_DATA": self.dir}
        )
        self.check_same([line.split()[-1] for line in lines if "norm" in line], 3)

    def test_07_data_parallel(self):
        lines = self.run_alone("07_data_parallel")
        for line in (
            "inside: 15 of 30 samples on cpu:0",
            "inside: 15 of 30 samples on cpu:1",
            "outside: 30 results on cpu:0",
        ):
            self.assertEqual(lines.count(line), 1, lines)
        loss = [float(line.split()[-1]) for line in lines if line.startswith("epoch")]
        self.assertEqual(len(loss), 5)
        self.assertLess(loss[4], loss[0] / 5)

    def test_08_ddp_spawn(self):
        for ranks in "1", "2", "3":
            lines = self.run_alone("08_ddp_spawn", ranks)
            loss = [float(re.fullmatch(r"epoch \d: loss (.*)", line)[1]) for line in lines]
            self.assertEqual(len(loss), 5)
            self.assertLess(loss[4], loss[0] / 5)

    def test_09_ddp_nodes(self):
        port = free_port()
        env = {
            "NODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TANDEM_SECRET": "of the test",
        }
        program = os.path.join(EXAMPLES, "09_ddp_nodes")
        jobs = [
            harness.Job(self, [], env={**env, "NODE_RANK": str(node)}, program=program)
            for node in range(2)
        ]
        lines = [line for job in jobs for line in self.lines(job.finish())]
        self.check_nothing_left()
        for rank, line in enumerate(lines):
            self.assertIn(
                f"node {rank // 2}, local rank {rank % 2} on cpu:{rank % 2}, "
                f"global rank {rank} of 4:",
                line,
            )
        self.check_same(self.check_falls(lines, r"loss (\S+) to (\S+), weights (\S+)"), 4)

    def test_10_ddp_tdrun(self):
        lines = self.run_ranks(2, "10_ddp_tdrun")
        self.assertEqual([line for line in lines if "local rank 1 of 2" in line], [lines[2]])
        self.assertIn("50 synchronised passes", lines[1])
        self.check_falls(lines, r"loss (\S+) to (\S+),")

    def test_10_ddp_tdrun_on_nodes(self):
        port = free_port()
        jobs = [
            self.start(
                "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2",
                f"--master-port={port}", os.path.join(EXAMPLES, "10_ddp_tdrun"),
            )
            for node in range(2)
        ]  # fmt: skip
        lines = [line for job in jobs for line in self.lines(job.finish())]
        for rank in range(4):
            self.assertIn(f"rank {rank} of 4, local rank {rank % 2} of 2", lines)
        self.check_falls(lines, r"loss (\S+) to (\S+),")
        self.check_nothing_left()

    def test_11_model_parallel(self):
        lines = self.run_ranks(2, "11_model_parallel")
        self.check_same(
            self.check_falls(
                lines, r"net1 on cpu:0, net2 on cpu:1, loss (\S+) to (\S+), weights (\S+)"
            ),
            2,
        )

    def test_12_checkpoint(self):
        for begin, end in ("begins at step 0", 10), ("goes on at step 10", 20):
            lines = self.run_ranks(2, "12_checkpoint", self.dir)
            for rank in range(2):
                self.assertEqual(lines[2 * rank], f"rank {rank}: {begin}")
                self.assertRegex(lines[2 * rank + 1], rf"^rank {rank}: step {end}, loss \d")

    def test_13_ring_all_reduce(self):
        """The bytes are those that the flight recorder has seen, not those that the program prints."""
        for ranks in 1, 2, 3, 4:
            self.assertEqual(
                self.run_ranks(ranks, "13_ring_all_reduce", "0", "12"),
                [
                    f"rank {r}: the ring and all_reduce agree on {count} elements, "
                    f"{2 * 4 * count * (ranks - 1) // ranks} bytes sent"
                    for r in range(ranks)
                    for count in (0, 12)
                ],
            )
            for count in 1, 1000, 1003:
                sent = self.count_ring(ranks, count)
                self.assertEqual(sum(sent), 2 * 4 * count * (ranks - 1))
                share = 2 * 4 * count * (ranks - 1) / ranks
                for bytes_of_rank in sent:
                    self.assertLess(abs(bytes_of_rank - share), 2 * 4 * ranks)

    def count_ring(self, ranks, count):
        """Runs the ring, and returns how many bytes of messages each rank has sent."""
        program = os.path.join(EXAMPLES, "13_ring_all_reduce")
        job = self.run_job(
            "--standalone", f"--nproc-per-node={ranks}", "sh", "-c",
            f'TANDEM_FLIGHT="$TEST_DIR/page" exec {program} {count}',
        )  # fmt: skip
        reported = [int(line.split()[-3]) for line in self.lines(job)]
        pages = [self.path(f"page.{rank}") for rank in range(ranks)]
        postmortem = json.loads(self.run_job("postmortem", "--json", *pages).out)
        sent = [
            sum(
                4 * operation["count"]
                for operation in rank["operations"]
                if operation["operation"] == "send"
            )
            for rank in postmortem["ranks"]
        ]
        self.assertEqual(sent, reported)
        self.assertEqual(
            [len(rank["operations"]) for rank in postmortem["ranks"]], [4 * (ranks - 1) + 1] * ranks
        )
        return sent

    def test_14_reducer(self):
        lines = self.run_ranks(3, "14_reducer")
        self.check_same(self.check_falls(lines, r"loss (\S+) to (\S+), w2\[0\] (\S+)"), 3)

    def test_own_store(self):
        for _ in range(2):  # the second time through what the first job has left there
            self.assertEqual(
                self.run_ranks(3, "own_store", self.dir),
                [f"rank {rank} of 3: the sum is 3" for rank in range(3)],
            )
        job = self.run_job("--standalone", os.path.join(EXAMPLES, "own_store"), "/no/such/place")
        self.check_code(job, 1)
        self.assertIn("/no/such/place/lock: cannot be locked: No such file", job.err)

    def test_15_tour(self):
        job = harness.Job(self, [], program=os.path.join(EXAMPLES, "15_tour")).finish()
        self.lines(job)
        for text in (
            "tensor([[ 5., 14.],\n        [14., 50.]])\n",
            "5 elements above 0, the mean is 3.83333\n",
            "tensor([12., 12., 12.], dtype=f64)\n",
            "tensor([0.8000, 0.8000, 0.8000], dtype=f64, requires_grad=True)\n",
            "as expected: td_add: the shapes [2, 3] and [4]",
            "  (1): ReLU()\n",
        ):
            self.assertIn(text, job.out)

    def test_16_pipeline(self):
        for ranks, drawing in (1, "F0 B0 F1 B1"), (3, "F0 F1 F2 .  .  B0 F3 B1"):
            lines = self.run_ranks(ranks, "16_pipeline")
            self.check_falls(lines, r"loss (\S+) to (\S+), on")
            self.assertEqual(len(lines), ranks + 1)
            self.assertTrue(lines[1].startswith(f"rank 0  {drawing}"), lines)

    def test_17_rpc_training(self):
        lines = self.run_ranks(2, "17_rpc_training")
        self.assertEqual(len(lines), 2)
        self.check_falls(lines[:1], r"node A: loss (\S+) to (\S+)")
        self.assertRegex(lines[1], r"Linear\(in_features=2, out_features=1, bias=False\), has the weight")

    def test_18_parameter_server(self):
        lines = sorted(self.run_ranks(4, "18_parameter_server"))
        self.assertEqual(lines[0], "server: 300 updates")
        self.assertEqual([line.split(":")[0] for line in lines[1:]], [f"trainer {r}" for r in (1, 2, 3)])

    def test_19_rpc_and_groups(self):
        lines = self.run_ranks(3, "19_rpc_and_groups")
        self.assertEqual(len(lines), 2)
        self.check_falls(lines, r"trainer \d: loss (\S+) to (\S+)")

    def test_20_mixed_precision(self):
        lines = self.run_ranks(2, "20_mixed_precision")
        self.assertEqual([line.split(":")[0] for line in lines], ["bf16", "f16"])
        self.check_falls(lines, r"loss (\S+) to (\S+),")
        self.assertTrue(lines[0].endswith(", 0 steps skipped, the scale is 1"), lines)
        self.assertRegex(lines[1], r", [1-9]\d* steps skipped, the scale is \d+$")

    def test_21_fsdp(self):
        for ranks in 2, 3, 1:  # the checkpoint of those before is there
            job = self.run_job(
                "--standalone", f"--nproc-per-node={ranks}", os.path.join(EXAMPLES, "21_fsdp"),
                self.path("checkpoints"),
            )  # fmt: skip
            self.check_code(job, 0)
            warnings = job.err.count("td_fsdp: the whole model is one unit")
            self.assertEqual((warnings, len(job.err.splitlines())), (ranks if ranks > 1 else 0,) * 2)
            lines = job.out.splitlines()
            self.assertEqual(len(lines), 14)
            whole, kept = re.fullmatch(r"3 units; of (\d+) parameters rank 0 keeps (\d+)", lines[0]).groups()
            self.assertAlmostEqual(int(kept), int(whole) / ranks, delta=3 * 1024)
            for line, when in zip(lines[1:10], "ff f  bbb"):
                self.assertEqual(line[0], when)
                is_whole = when != " " or ranks == 1
                self.assertRegex(line, r"is \[\d+, \d+\], " if is_whole else r"is \[\d+\], a shard again$")
            self.check_falls(lines, r"^loss (\S+) to (\S+)$")
            units, one = re.search(r"gradients: (\d+) KiB with units, (\d+) KiB", lines[12]).groups()
            self.assertTrue(int(units) < 0.6 * int(one) or ranks == 1, lines[12])
            self.assertRegex(lines[13], r'^step 80 of ".*checkpoints" has the loss 0\.0')

    def test_22_requeue(self):
        """Stopped by a signal to tdrun and started again, it ends as it does without."""
        program = os.path.join(EXAMPLES, "22_requeue")
        job = self.start("--standalone", "--nproc-per-node=2", program, "stopped", "40", "50")
        harness.wait_until(lambda: job.process.stdout.readline(), "the first line")
        job.signal(signal.SIGUSR1)
        job.finish()
        self.check_code(job, 75)
        step = re.search(r"rank 0: stopped at step (\d+)", job.out)[1]
        again = self.run_ranks(2, "22_requeue", "stopped", "40")
        whole = self.run_ranks(2, "22_requeue", "whole", "40")
        self.assertIn(f"rank 0: goes on at step {step}", again)
        self.assertEqual(again[0], whole[1], "the same loss at the end")
        self.check_nothing_left()

    def train_elastically(self, policy, kill):
        """Steps of three processes, of which one is killed; returns what is written, and the weights."""
        weights = self.path("weights")
        job = self.start(
            "--standalone", "--nproc-per-node=3", "--on-failure", policy, os.path.join(EXAMPLES, "23_elastic"),
            "200", weights, env={"TANDEM_DATA": self.dir},
        )  # fmt: skip
        first = job.process.stdout.readline()
        first = first.decode() if isinstance(first, bytes) else first
        self.assertRegex(first, r"^step   20  3 ranks  loss \d")
        if kill:
            workers = harness.children_of(job.agent())
            names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in workers}
            os.kill([pid for pid in workers if names[pid] == "23_elastic"][-1], signal.SIGKILL)
        job.finish()
        self.check_code(job, 0)
        self.check_nothing_left()
        self.assertEqual(job.out.count("step  200 "), 1, job.out)
        return job, Path(weights).read_bytes()

    def test_23_elastic(self):
        """The weights are those of a run in which nobody was killed."""
        write_pictures(self.path("fashion-mnist"), 256)
        whole = self.train_elastically("shrink", False)[1]
        for policy in "shrink", "replace":
            job, weights = self.train_elastically(policy, True)
            self.assertRegex(job.out, r"step +\d+  rank \d .* was killed by SIGKILL")
            self.assertIn("  2 ranks go on after ", job.out)
            self.assertEqual(whole, weights, policy)
        self.assertEqual(whole, self.drain_a_node(), "drained")

    def drain_a_node(self):
        """The same on two nodes, of which one is to leave; returns the weights."""
        weights = self.path("weights")
        os.unlink(weights)
        port = free_port()
        jobs = [
            self.start(
                "--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                "--nproc-per-node=2", "--on-failure=shrink", os.path.join(EXAMPLES, "23_elastic"),
                "200", weights, env={"TANDEM_DATA": self.dir},
            )
            for _ in range(2)
        ]  # fmt: skip
        first = None
        while first is None:  # of the node that has rank 0
            for job in jobs:
                if select.select([job.process.stdout], [], [], 0.05)[0]:
                    first = job
        self.assertRegex(first.process.stdout.readline().decode(), r"^step   20  4 ranks  loss \d")
        other = jobs[first is jobs[0]]
        asked = self.start("drain", "1").finish()
        self.check_code(asked, 0)
        for job in jobs:
            job.finish()
            self.check_code(job, 0)
        self.assertIn("this node leaves the job", other.err)
        self.assertRegex(first.out, r"step +\d+  rank \d .* has left")
        self.assertRegex(first.out, r"step  200  2 ranks  loss")
        self.check_nothing_left()
        return Path(weights).read_bytes()


class Pages(Programs):
    def test_readme_first(self):
        self.assertEqual(
            self.run_ranks(2, "readme_first", folder=PROGRAMS),
            ["rank 0: the sum is 3", "rank 1: the sum is 3"],
        )

    def test_readme_train(self):
        write_pictures(self.path("fashion-mnist"), 256)
        lines = self.run_ranks(2, "readme_train", folder=PROGRAMS, env={"TANDEM_DATA": self.dir})
        self.assertEqual(len(lines), 10)
        loss = [float(re.fullmatch(r"epoch \d: loss (.*)", line)[1]) for line in lines]
        self.assertLess(loss[9], loss[0] / 2)

    def test_readme_train_without_files(self):
        job = harness.Job(
            self, [], env={"TANDEM_DATA": self.dir}, program=os.path.join(PROGRAMS, "readme_train")
        ).finish()
        self.check_code(job, 1)
        self.assertIn("train-images-idx3-ubyte", job.err)

    def test_every_example_is_in_the_table(self):
        page = (SOURCES / "README.md").read_text(encoding="utf-8")
        for source in SOURCES.glob("*.c"):
            self.assertIn(f"[{source.name}]({source.name})", page)


def write_pictures(directory, count):
    """Files like those of Fashion-MNIST: pictures of ten classes that can be learned."""
    numbers = random.Random(1)
    classes = [bytes(numbers.randrange(256) for _ in range(28 * 28)) for _ in range(10)]
    labels = bytes(numbers.randrange(10) for _ in range(count))
    os.mkdir(directory)
    Path(directory, "train-images-idx3-ubyte").write_bytes(
        struct.pack(">IIII", 0x803, count, 28, 28) + b"".join(classes[label] for label in labels)
    )
    Path(directory, "train-labels-idx1-ubyte").write_bytes(
        struct.pack(">II", 0x801, count) + labels
    )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    EXAMPLES = os.path.abspath(sys.argv.pop(2))
    PROGRAMS = os.path.abspath(sys.argv.pop(2))
    harness.main()
