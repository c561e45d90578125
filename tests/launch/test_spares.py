#!/usr/bin/env python3
"""tdrun --spares: processes that wait for the rank of a worker that dies, on its node or on another one."""

import json
import os
import re
import signal
import sys

import harness
import test_examples
from harness import Test, free_port, is_alive, read_file, wait_until

SURVIVE = ELASTIC = None  # set below
STEPS = 300 if os.environ.get("TD_TEST_SLOWNESS", "1") == "1" else 40

# What a program does that calls td_init_process_group(), in so far as tdrun sees it. Then it says in a file what it is, and
# stays until there is the file `go`, or one with its pid.
WORKER = """
import os, signal, socket, struct, sys, time

def receive(link, size):
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            sys.exit("the launcher has ended")
        data += more
    return data

def take_rank():
    link = socket.socket(fileno=int(os.environ.pop("TANDEM_SPARE_FD")))
    for name in "RANK", "LOCAL_RANK", "ROLE_RANK":
        assert name not in os.environ, name
    link.setblocking(True)
    print("warm", flush=True)
    link.sendall(b"w")
    note("warm")
    size, = struct.unpack("=I", receive(link, 4))
    for variable in receive(link, size).split(b"\\0")[:-1]:
        name, _, value = variable.decode().partition("=")
        os.environ[name] = value
    link.sendall(b"j")

def note(what, text=""):
    name = f"{what}.{os.getpid()}"
    with open(name + ".tmp", "w") as file:
        file.write(text)
    os.rename(name + ".tmp", name)

def main(ends=lambda: False):
    if "TANDEM_SPARE_FD" in os.environ:
        take_rank()
    print("rank", os.environ["RANK"], flush=True)
    note("rank", "".join(f"{name}={value}\\n" for name, value in os.environ.items()))
    while not os.path.exists("go") and not os.path.exists(f"die.{os.getpid()}"):
        time.sleep(0.005)
    if os.path.exists(f"die.{os.getpid()}"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


class SparesTest(Test):
    def setUp(self):
        super().setUp()
        with open(self.path("worker.py"), "w", encoding="utf-8") as file:
            file.write(WORKER)

    def start_job(self, *options, program="main()", workers=2, spares=1, **popen):
        return self.start(
            "--standalone", f"--nproc-per-node={workers}", "--on-failure=replace", f"--spares={spares}",
            *options, "python3", "-c", f"from worker import *; {program}", **popen,
        )  # fmt: skip

    def notes(self, what):
        """The pids of processes that have noted this, and what."""
        found = {}
        for name in os.listdir(self.dir):
            match = re.fullmatch(what + r"\.(\d+)", name)
            if match:
                text = read_file(self.path(name))
                found[int(match[1])] = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return found

    def wait_ranks(self, count):
        """All that have had a rank: rank, restart count and pid, sorted."""
        wait_until(lambda: len(self.notes("rank")) == count, f"{count} processes with a rank")
        return sorted(
            (int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"]), pid)
            for pid, env in self.notes("rank").items()
        )

    def wait_warm(self, count):
        """All that have ever waited for a rank, by pid."""
        wait_until(lambda: len(self.notes("warm")) == count, f"{count} spares")
        return sorted(self.notes("warm"))

    def die(self, pid):
        open(self.path(f"die.{pid}"), "w").close()

    def next_line(self, job):
        return job.process.stderr.readline().decode()

    def go(self):
        open(self.path("go"), "w").close()

    def finish(self, job, code=0):
        job.finish()
        self.check_code(job, code)
        self.check_nothing_left()


class Ranks(SparesTest):
    def test_a_rank_is_taken_at_once(self):
        """… by the process that was there already, with the variables of its predecessor; another spare follows."""
        job = self.start_job()
        (spare,) = self.wait_warm(1)
        first = self.wait_ranks(2)
        self.die(first[1][2])
        self.assertRegex(
            self.next_line(job),
            rf"^tdrun: rank 1 \(pid {first[1][2]}\) was killed by SIGKILL; "
            rf"spare 0 \(pid {spare}\) takes its place \(restart 1 of 10\)\n$",
        )
        ranks = self.wait_ranks(3)
        self.assertEqual(ranks[2], (1, 1, spare))
        self.assertEqual(len(self.wait_warm(2)), 2)
        before, after = (self.notes("rank")[pid] for pid in (first[1][2], spare))
        self.assertEqual(after.pop("TANDEM_REJOIN"), "1")
        self.assertEqual(after.pop("TORCHELASTIC_RESTART_COUNT"), "1")
        self.assertEqual(before.pop("TORCHELASTIC_RESTART_COUNT"), "0")
        before.pop("TANDEM_FLIGHT"), after.pop("TANDEM_FLIGHT")
        self.assertEqual(before, after)
        self.go()
        self.finish(job)
        self.assertEqual((sorted(job.out.split("\n"))[1:], job.err), (["rank 0", "rank 1", "rank 1", "warm", "warm"], ""))

    def test_one_after_another(self):
        """Each death of a rank takes a spare, also of a rank that was a spare."""
        job = self.start_job(workers=1)
        for number in range(3):
            self.wait_warm(number + 1)
            ranks = self.wait_ranks(number + 1)
            self.assertEqual([rank[:2] for rank in ranks], [(0, restart) for restart in range(number + 1)])
            self.die(ranks[-1][2])
        self.wait_ranks(4)
        self.go()
        self.finish(job)

    def test_several_at_once(self):
        job = self.start_job(workers=3, spares=2)
        spares = self.wait_warm(2)
        for _, _, pid in self.wait_ranks(3):
            self.die(pid)
        ranks = self.wait_ranks(6)
        self.assertEqual([rank[:2] for rank in ranks], [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
        self.assertLessEqual(set(spares), {rank[2] for rank in ranks})
        self.go()
        self.finish(job)

    def test_a_program_that_is_not_warm_yet(self):
        """Before any spare has come to where it waits, nobody knows that it would: the rank is started as without spares."""
        job = self.start_job(program="os.path.exists('go') or main() if 'RANK' in os.environ else time.sleep(1000)")
        ranks = self.wait_ranks(2)
        self.die(ranks[0][2])
        self.assertIn("starting it again (restart 1 of 10)", self.next_line(job))
        self.wait_ranks(3)
        self.go()
        self.finish(job)

    def test_output(self):
        """What a spare writes is kept apart until it has a rank."""
        options = ["--log-dir=logs", "--rdzv-id=id", "--tee=1"]
        job = self.start_job(*options)
        (spare,) = self.wait_warm(1)
        self.die(self.wait_ranks(2)[1][2])
        self.wait_ranks(3)
        self.wait_warm(2)
        self.go()
        self.finish(job)
        kept = {name: read_file(self.path(f"logs/id/attempt_{name}/stdout.log"))
                for name in ("0/0", "0/1", "0/spare_0", "1/1", "1/spare_0")}  # fmt: skip
        self.assertEqual(
            kept, {"0/0": "rank 0\n", "0/1": "rank 1\n", "0/spare_0": "warm\n", "1/1": "rank 1\n", "1/spare_0": "warm\n"}
        )
        self.assertEqual(
            sorted(job.out.splitlines()),
            ["[default0]:rank 0", "[default1]:rank 1", "[default1]:rank 1", "[spare 0]:warm", "[spare 0]:warm"],
        )

    def test_cpus(self):
        job = self.start_job("--numa-binding=node", program="main(); print('cpus', os.sched_getaffinity(0))")
        self.wait_warm(1)
        self.die(self.wait_ranks(2)[0][2])
        self.wait_ranks(3)
        self.go()
        self.finish(job)
        self.assertEqual(len(set(re.findall("cpus .*", job.out))), 1)

    def test_status(self):
        job = self.start_job(spares=2)
        self.wait_warm(2)
        self.wait_ranks(2)
        table = self.run_status(job).out
        self.assertRegex(table, rf"job {job.pid} on \S+, 2 of 2 ranks")
        self.assertEqual(len(re.findall(r"(?m)^ +- +\d+  spare .* waits for a rank$", table)), 2, table)
        state = json.loads(self.run_status(job, "--json").out)[0]
        self.assertEqual([rank["rank"] for rank in state["ranks"]], [0, 1])
        self.assertEqual([(spare["spare"], spare["waits"]) for spare in state["spares"]], [(0, True), (1, True)])
        self.assertEqual({spare["pid"] for spare in state["spares"]}, set(self.notes("warm")))
        self.go()
        self.finish(job)

    def run_status(self, job, *options):
        return self.start("status", *options, str(job.pid)).finish()


class Deaths(SparesTest):
    def test_of_a_spare(self):
        """It is no failure of the job; another one follows."""
        job = self.start_job()
        (spare,) = self.wait_warm(1)
        os.kill(spare, signal.SIGKILL)
        self.assertRegex(
            self.next_line(job),
            rf"^tdrun: spare 0 \(pid {spare}\) was killed by SIGKILL; starting another one in 0.1 s\n$",
        )
        self.wait_warm(2)
        self.go()
        self.finish(job)

    def test_again_and_again(self):
        """A spare, and a rank, that die soon after each start are given up after a while; others go on."""
        program = "sys.exit(3) if 'RANK' not in os.environ else sys.exit(4) if os.environ['RANK'] == '1' else main()"
        job = self.start_job(program=program)
        lines = {"spare 0": [], "rank 1": []}
        while any(not of or " in a row" not in of[-1] for of in lines.values()):
            line = self.next_line(job)
            lines[re.match(r"tdrun: (rank \d|spare \d) \(pid", line)[1]].append(line)
        for of, first in (("spare 0", 0), ("rank 1", 1)):
            self.assertEqual(len(lines[of]), 8 + first)
            for line, pause in zip(lines[of][first:], ("0.1", "0.2", "0.4", "0.8", "1.6", "3.2", "5.0")):
                self.assertIn(f" in {pause} s", line)
        self.assertIn(
            "ended with exit code 3; that was the 8th time in a row soon after its start, and it is not started any more; "
            "does the program call td_init_process_group()?", lines["spare 0"][-1],
        )  # fmt: skip
        self.assertIn("it has died soon after its start 8 times in a row; 1 worker goes on", lines["rank 1"][-1])
        self.go()
        self.finish(job)

    def test_a_program_that_does_not_wait(self):
        job = self.start_job(program="main() if 'RANK' in os.environ else 0")
        self.assertRegex(
            self.next_line(job),
            r"^tdrun: spare 0 \(pid \d+\) has run to its end without waiting for a rank: the program does not call "
            r"td_init_process_group\(\), so that --spares has no use for it; no spare is started any more\n$",
        )
        self.die(self.wait_ranks(2)[1][2])
        self.assertIn("starting it again (restart 1 of 10)", self.next_line(job))
        self.wait_ranks(3)
        self.go()
        self.finish(job)
        self.assertEqual(job.err, "")

    def test_of_the_last_worker(self):
        """A spare keeps no job alive."""
        job = self.start_job("--max-restarts=0", workers=1)
        self.wait_warm(1)
        self.die(self.wait_ranks(1)[0][2])
        self.finish(job, 1)
        self.assertIn("was killed by SIGKILL; no worker is left", job.err)
        self.assertIn("0 of 1 workers ended with exit code 0", job.err)

    def test_ctrl_c(self):
        """Spares end at once, whatever they do with signals; a worker gets its time."""
        work = "signal.signal(signal.SIGINT, signal.SIG_IGN if 'RANK' not in os.environ else signal.SIG_DFL); main()"
        job = self.start_job(program=work, spares=3)
        self.wait_warm(3)
        self.wait_ranks(2)
        job.signal(signal.SIGINT)
        self.finish(job, 128 + signal.SIGINT)
        self.assertNotIn("spare", job.err)

    def test_kill(self):
        job = self.start_job(spares=2)
        self.wait_warm(2)
        job.signal(signal.SIGKILL)
        job.finish()
        self.wait_nothing_left()

    def test_what_a_wrapper_leaves_behind_is_ended(self):
        program = "os.fork() or (note('left'), time.sleep(1000)) if 'RANK' not in os.environ else None; main()"
        job = self.start_job(program=program)
        (spare,) = self.wait_warm(1)
        wait_until(lambda: self.notes("left"), "the child")
        (left,) = self.notes("left")
        os.kill(spare, signal.SIGKILL)
        wait_until(lambda: not is_alive(left), "the end of what was left")
        self.wait_warm(2)
        self.go()
        self.finish(job)


class OtherNodes(SparesTest):
    """Ranks of a node that is no more go to spares of other nodes."""

    def start_node(self, *arguments, workers=1, spares=0):
        return self.start(
            "--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-conf=last_call_timeout=100",
            f"--nproc-per-node={workers}", "--on-failure=replace", f"--spares={spares}", *arguments,
            env={"TANDEM_SECRET": "of this test", "TANDEM_DATA": self.dir},
        )  # fmt: skip

    def start_both(self, *arguments, workers=1, spares=0):
        self.port = free_port()
        first = self.start_node(*arguments, workers=workers, spares=spares)
        wait_until(lambda: self.has_joined(first), "the launcher to join")
        return first, self.start_node(*arguments, workers=workers)

    def has_joined(self, job):
        tasks = f"/proc/{job.agent()}/task"
        return "td-member\n" in [read_file(f"{tasks}/{task}/comm") for task in os.listdir(tasks)]

    def test_a_node_that_is_lost(self):
        first, second = self.start_both("python3", "-c", "from worker import *; main()", workers=2, spares=3)
        spares = self.wait_warm(3)
        self.assertEqual([rank[0] for rank in self.wait_ranks(4)], [0, 1, 2, 3])
        second.signal(signal.SIGKILL)
        second.finish()
        self.assertRegex(self.next_line(first), r"the launcher of node 1 .* has ended; its workers are lost with it")
        for rank in 2, 3:
            self.assertRegex(
                self.next_line(first),
                rf"^tdrun: spare \d \(pid \d+ on node 0\) takes rank {rank} of node 1 \(on \S+\)\n$",
            )
        ranks = self.wait_ranks(6)
        self.assertEqual([rank[0] for rank in ranks], [0, 1, 2, 2, 3, 3])
        taken = {env["RANK"]: env for pid, env in self.notes("rank").items() if pid in spares}
        self.assertEqual({rank: env["LOCAL_RANK"] for rank, env in taken.items()}, {"2": "2", "3": "3"})
        self.assertEqual({env["TANDEM_REJOIN"] for env in taken.values()}, {"1"})

        # That rank is a worker of node 0 from now on: where it dies, the last spare takes its place.
        (pid,) = [pid for pid, env in self.notes("rank").items() if pid in spares and env["RANK"] == "3"]
        self.die(pid)
        self.assertRegex(self.next_line(first), rf"rank 3 \(pid {pid} on node 0\) .*; spare \d .* takes its place")
        self.wait_ranks(7)
        third = self.start_node("python3", "-c", "from worker import *; main()", workers=2)
        ranks = self.wait_ranks(9)
        self.assertEqual([rank[0] for rank in ranks[-2:]], [4, 5])  # the others are taken
        self.go()
        third.finish()
        self.finish(first)

    def test_a_node_that_leaves(self):
        """In the middle of a training: no step is lost, and there are as many ranks as before in the end."""
        test_examples.write_pictures(self.path("fashion-mnist"), 256)
        weights = self.path("weights.moved")
        first, second = self.start_both(ELASTIC, str(STEPS), weights, workers=2, spares=2)
        step = re.compile(r"step +\d+  4 ranks  loss")
        while not step.match(first.process.stdout.readline().decode()):
            pass
        self.check_code(self.start("drain", "1").finish(), 0)
        self.check_code(second.finish(), 0)
        self.finish(first)
        self.assertRegex(first.err, r"(?s)node 1 .* leaves the job.*takes rank 2 of node 1.*takes rank 3 of node 1")
        after = first.out[first.out.rindex("has joined") :]
        self.assertRegex(after, step.pattern)
        Programs.train(self, False)
        self.assertEqual(read_file(weights, "rb"), read_file(self.path("weights"), "rb"))


class Flags(Test):
    def test_what_has_no_use(self):
        replace = "--on-failure=replace"
        for flags, why in (
            (["--spares=1"], "with --on-failure restart-all all workers end and start again"),
            (["--spares=1", "--on-failure=shrink"], "with --on-failure shrink no worker is replaced"),
            (["--spares=1", replace, "--pass-local-rank"], "--pass-local-rank cannot put it among its arguments"),
            (["--spares=-1", replace], "--spares"),
            (["--spares=two", replace], "--spares"),
            (["--spares=65536", "--nproc-per-node=2", replace], "with 2 workers a node has at most 65534"),
            (["--spare=1", replace], "--spares"),
        ):
            job = self.run_job("--standalone", *flags, "true")
            self.check_code(job, 2)
            self.assertIn(why, job.err)
            self.assertEqual(job.err.count("\n"), 1)


class Programs(SparesTest):
    def test_a_rank_that_rejoins(self):
        job = self.start("--standalone", "--nproc-per-node=3", "--on-failure=replace", "--spares=1", SURVIVE, "--die", "1", "3")
        self.finish(job)
        self.assertRegex(job.err, r"rank 1 .* was killed by SIGKILL .*; (spare 0 \(pid \d+\) takes its place|starting it again) \(")
        self.assertIn("rank 1: is back\n", job.out)
        self.assertEqual(job.out.count("done, 6 steps, 3 ranks"), 3, job.out)

    def train(self, kill):
        weights = self.path("weights")
        job = self.start(
            "--standalone", "--nproc-per-node=3", "--on-failure=replace", "--spares=1", ELASTIC, str(STEPS), weights,
            env={"TANDEM_DATA": self.dir},
        )  # fmt: skip
        step = r"step +(\d+)  "
        while kill:
            line = job.process.stdout.readline().decode()
            if re.match(step + "3 ranks  loss", line):
                status = json.loads(self.start("status", "--json", str(job.pid)).finish().out)[0]
                if status["spares"][0]["waits"]:
                    break
        if kill:
            os.kill(max(status["ranks"], key=lambda rank: rank["rank"])["pid"], signal.SIGKILL)
            self.assertRegex(self.next_line(job), rf"spare 0 \(pid {status['spares'][0]['pid']}\) takes its place")
        self.finish(job)
        return job, read_file(weights, "rb")

    def test_one_that_comes_too_late(self):
        """A rank is killed shortly before the end, and the process that replaces it finds nobody: that is no failure."""
        test_examples.write_pictures(self.path("fashion-mnist"), 256)
        work = (
            'if [ -n "$TANDEM_REJOIN" ]; then until [ -e done ]; do sleep 0.01; done; fi; '
            f'"{ELASTIC}" {STEPS} weights && touch done'
        )
        job = self.start(
            "--standalone", "--nproc-per-node=2", "--on-failure=replace", "sh", "-c", work, env={"TANDEM_DATA": self.dir}
        )
        while not re.match(r"step +\d+  2 ranks  loss", job.process.stdout.readline().decode()):
            pass
        status = json.loads(self.start("status", "--json", str(job.pid)).finish().out)[0]
        os.kill(max(status["ranks"], key=lambda rank: rank["rank"])["pid"], signal.SIGKILL)
        self.finish(job)
        self.assertRegex(job.err, r"rank 1 \(pid \d+\) came too late: the others have ended; it is not started again")

    def test_training(self):
        """A spare of td_elastic joins the others, and the weights are those of a run in which nobody was killed."""
        test_examples.write_pictures(self.path("fashion-mnist"), 256)
        whole = self.train(False)[1]
        job, weights = self.train(True)
        self.assertRegex(job.out, r"step +\d+  rank \d has joined")
        self.assertEqual(whole, weights)


if __name__ == "__main__":
    SURVIVE = os.path.abspath(sys.argv.pop(2)) if len(sys.argv) > 2 else None
    ELASTIC = os.path.abspath(sys.argv.pop(2)) if len(sys.argv) > 2 else None
    harness.main()
