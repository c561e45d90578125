#!/usr/bin/env python3
"""examples/gpt2, the program: it learns, its runs repeat, and ranks, batches, devices and interruptions do not matter.

usage: test_gpt2.py path/to/tdrun path/to/gpt2 path/to/directory/of/toy/plugin [test…]
"""

import os
import random
import shutil
import struct
import sys

import harness

MODEL = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "32"]
STEPS = ["--steps", "30", "--lr", "3e-3", "--peak", "1"]


class Gpt2(harness.Test):
    def setUp(self):
        super().setUp()
        words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"]
        numbers = random.Random(1)
        with open(self.path("text"), "w", encoding="utf-8") as file:
            file.write(" ".join(numbers.choice(words) for _ in range(6000)))

    def gpt2(self, *arguments, ranks=0, code=0, env=None):
        """Runs the program, alone or on ranks; returns the job."""
        variables = {"OMP_NUM_THREADS": "1", **(env or {})}
        if ranks:
            job = self.run_job(
                "--standalone", f"--nproc-per-node={ranks}", GPT2, *arguments, env=variables
            )
        else:
            job = harness.Job(self, arguments, program=GPT2, env=variables).finish()
            self.check_nothing_left()
        self.check_code(job, code)
        return job

    def train(self, out, *arguments, **job):
        """Trains; returns the losses of all steps."""
        self.gpt2(
            "--data", "text", *STEPS, "--out", out, "--save", f"{out}.weights", "--generate", "0",
            *arguments, **job,
        )  # fmt: skip
        return self.losses(out)

    def losses(self, out):
        lines = harness.read_file(self.path(f"{out}/loss.csv")).splitlines()
        self.assertEqual(lines[0], "step,loss")
        steps = [line.split(",") for line in lines[1:]]
        self.assertEqual([int(step) for step, _ in steps][-1], 30)
        return [float(loss) for _, loss in steps]

    def check_close(self, a, b, tolerance):
        self.assertEqual(len(a), len(b))
        difference = max(abs(x - y) for x, y in zip(a, b))
        self.assertLessEqual(difference, tolerance, f"{a}\n{b}")

    def weights(self, out):
        return harness.read_file(self.path(f"{out}.weights"), "rb")

    def test_learns_and_repeats(self):
        arguments = [*MODEL, "--batch", "4", "--dropout", "0.1"]
        losses = self.train("a", *arguments)
        self.assertEqual(len(losses), 30)
        self.assertGreater(losses[0], 5)
        self.assertLess(losses[-1], 3.5)
        self.assertEqual(self.train("b", *arguments), losses)
        self.assertEqual(self.weights("a"), self.weights("b"))
        self.assertIn("<polyline", harness.read_file(self.path("a/loss.svg")))

    def test_ranks_and_accumulation_make_one_batch(self):
        whole = self.train("whole", *MODEL, "--batch", "8")
        self.check_close(whole, self.train("ranks", *MODEL, "--batch", "4", ranks=2), 2e-5)
        parts = self.train("parts", *MODEL, "--batch", "4", "--accumulate", "2")
        self.check_close(whole, parts, 2e-5)
        both = [*MODEL, "--batch", "2", "--accumulate", "2"]
        self.check_close(whole, self.train("both", *both, ranks=2), 2e-5)

    def test_resumes(self):
        arguments = [*MODEL, "--batch", "4", "--dropout", "0.1", "--save-every", "10"]
        for ranks in 0, 2:
            whole = self.train(f"whole{ranks}", *arguments, ranks=ranks)
            folder = f"{self.dir}/whole{ranks}/checkpoints"
            names = sorted(os.listdir(folder))
            self.assertEqual(len(names), 2)  # of steps 20 and 30
            os.makedirs(self.path(f"again{ranks}/checkpoints"))
            shutil.copy(f"{folder}/{names[0]}", self.path(f"again{ranks}/checkpoints"))
            again = self.train(f"again{ranks}", *arguments, "--resume", ranks=ranks)
            self.assertEqual(again, whole[20:])
            self.assertEqual(self.weights(f"again{ranks}"), self.weights(f"whole{ranks}"))

    def test_an_accelerator_has_the_losses_of_the_host(self):
        begin = ["--data", "text", "--steps", "0", "--save", "first", "--generate", "0"]
        self.gpt2(*begin, *MODEL)
        model = ["--from", "first", "--heads", "2", "--batch", "4"]
        toy = {"TANDEM_PLUGIN_PATH": PLUGINS, "TANDEM_TOY_DELAY_US": "0"}
        here = self.train("here", *model)
        self.check_close(here, self.train("there", *model, "--device", "toy", env=toy), 1e-6)
        self.assertEqual(here, self.train("graph", *model, "--graph"))
        halves = self.train("halves", *model, "--device", "toy", "--bf16", env=toy)
        self.check_close(here, halves, 0.1)
        self.assertNotEqual(here, halves)
        job = self.gpt2(*model, "--device", "toy", "--generate", "20", "--prompt", "the", env=toy)
        self.assertTrue(job.out.splitlines()[1].startswith("the"), job.out)

    def test_sharded(self):
        arguments = [*MODEL, "--batch", "2", "--accumulate", "2", "--dropout", "0.1", "--memory", "3"]
        whole = self.train("out", *arguments, "--save-every", "10", ranks=2)
        weights = self.weights("out")
        shutil.rmtree(self.path("out/checkpoints"))
        for strategy in "full_shard", "shard_grad_op", "no_shard", "hybrid_shard":
            chosen = ["--fsdp"] if strategy == "full_shard" else ["--fsdp", "--strategy", strategy]
            chosen += ["--no-shared-memory"] if strategy == "shard_grad_op" else []
            self.assertEqual(self.train("out", *arguments, *chosen, ranks=2), whole, strategy)
            self.assertEqual(self.weights("out"), weights, strategy)
        self.check_memory("out", ["ddp", "full_shard", "hybrid_shard", "no_shard", "shard_grad_op-gathers"])
        # from a checkpoint, with as many ranks and with others
        self.train("saves", *arguments, "--fsdp", "--save-every", "10", ranks=2)
        names = sorted(os.listdir(self.path("saves/checkpoints")))
        self.assertTrue(len(names) == 2 and names[0].endswith(".sharded"), names)
        for ranks, option in (2, "--fsdp"), (1, "--fsdp"), (3, "--fsdp"), (2, "--seed=1"):
            shutil.rmtree(self.path("again"), ignore_errors=True)
            os.makedirs(self.path("again/checkpoints"))
            shutil.copytree(self.path(f"saves/checkpoints/{names[0]}"), self.path(f"again/checkpoints/{names[0]}"))
            chosen = [option] if option == "--fsdp" else option.split("=")
            again = self.train("again", *arguments, *chosen, "--resume", ranks=ranks)
            self.assertEqual(len(again), 10)
            if ranks == 2:
                self.assertEqual(again, whole[20:])
                self.assertEqual(self.weights("again"), weights)
            self.assertLess(max(again), whole[0] / 1.3)
        toy = {"TANDEM_PLUGIN_PATH": PLUGINS, "TANDEM_TOY_DELAY_US": "0"}
        there = [*MODEL, "--batch", "2", "--device", "toy"]
        expected = self.train("there", *there, ranks=2, env=toy)
        self.assertEqual(self.train("there", *there, "--fsdp", ranks=2, env=toy), expected)
        alone = self.train("alone", *MODEL, "--batch", "4")
        self.assertEqual(self.train("alone", *MODEL, "--batch", "4", "--fsdp"), alone)

    def check_memory(self, out, runs):
        """The numbers of the drawing: what is divided, and that the most was not left out."""
        peaks = {}
        for run in runs:
            lines = harness.read_file(self.path(f"{out}/memory-{run}.csv")).splitlines()
            self.assertEqual(lines[0].split(",")[:3], ["rank", "ms", "part"])
            rows = [[float(number) for number in line.split(",")] for line in lines[1:]]
            self.assertEqual({row[0] for row in rows}, {0, 1})
            self.assertEqual({row[2] for row in rows}, {0, 1, 2})
            for row in rows:
                self.assertLessEqual(sum(row[3:8]), row[8] + 4096, row)
                self.assertAlmostEqual(row[4], 2 * row[3], delta=4096)
            peaks[run] = rows[0][8], rows[0][3]
        for run in runs:
            divides = run not in ("ddp", "no_shard")
            share = peaks[run][1] / peaks["ddp"][1]
            self.assertTrue(0.2 < share < 0.8 if divides else share == 1, (run, peaks))
        drawing = harness.read_file(self.path(f"{out}/memory.svg"))
        self.assertEqual(drawing.count("rank 0</text>"), min(len(runs), 4))
        self.assertEqual(drawing.count("</svg>"), 1)

    def test_tokens(self):
        numbers = [(7 * i) % 40 + 300 for i in range(4000)]
        plain = struct.pack(f"<{len(numbers)}H", *numbers)
        header = struct.pack("<256i", 20240520, 1, len(numbers), *[0] * 253)
        wide = struct.pack(f"<{len(numbers)}I", *numbers)
        files = {"plain.bin": plain, "header.bin": header + plain, "wide": wide}
        found = {}
        for name, content in files.items():
            with open(self.path(name), "wb") as file:
                file.write(content)
            kind = ["--tokens", "u32"] if name == "wide" else []
            job = self.gpt2(
                "--data", name, *kind, *MODEL, *STEPS, "--vocabulary", "512", "--out", f"o-{name}",
                "--generate", "8", "--temperature", "0", "--prompt", "300 307",
            )  # fmt: skip
            found[name] = self.losses(f"o-{name}"), job.out.splitlines()[-1]
        self.assertEqual(found["plain.bin"], found["header.bin"])
        self.assertEqual(found["plain.bin"], found["wide"])
        losses, text = found["wide"]
        self.assertLess(losses[-1], losses[0] - 2)
        self.assertRegex(text, r"^300 307 (\d+ ){8}$")

    def test_mistakes(self):
        for arguments, error in (
            (["--lyers", "3"], "there is no option --lyers; did you mean --layers?"),
            (["--nonsense"], "--help lists all"),
            (["--layers", "few"], "--layers few: a whole number of at least 1 was expected"),
            (["--lr"], "--lr needs a value"),
            (["--lr", "0"], "--lr must be above 0"),
            (["--size", "125M"], "--size is 124M, 350M, 774M or 1.5B"),
            (["--tokens", "u8"], "--tokens is bytes, u16 or u32"),
            (["--peak", "fast"], "--peak fast"),
            (["--resume"], "checkpoints need a directory"),
            (["--memory", "3"], "the drawing of the memory needs a directory"),
            (["--memory", "1"], "--memory 1: a whole number of at least 2"),
            (["--strategy", "no_shard"], "are for --fsdp"),
            (["--fsdp", "--strategy", "half"], "--strategy is full_shard, shard_grad_op"),
        ):
            self.assertIn(error, self.gpt2("--data", "text", *arguments, code=2).err)
        self.assertIn("--data FILE is missing", self.gpt2(code=2).err)
        for arguments, error in (
            (["--data", "nothing"], "nothing cannot be opened"),
            (["--data", "text", "--batch", "100000"], "a batch needs 100000"),
            (["--data", "text", "--heads", "3"], "must be a multiple of the heads, 3"),
            (["--data", "text", "--device", "nothing"], "nothing"),
            (["--data", "text", "--from", "text"], "text"),
        ):
            self.assertIn(error, self.gpt2(*arguments, code=1).err)
        self.assertIn("--accumulate N", self.gpt2("--help").out)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    GPT2 = os.path.abspath(sys.argv.pop(2))
    PLUGINS = os.path.abspath(sys.argv.pop(2))
    harness.main()
