#!/usr/bin/env python3
"""tdrun --hosts on several hosts, which are namespaces (spaces.py), over a stand-in for ssh (rsh.py), and over ssh itself.

    test_hosts.py path/to/tdrun path/to/examples path/to/postmortem_worker [test…]

Exits with 77, and says why, where there can be no namespaces.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import spaces  # noqa: E402
from spaces import BASE, wait_until  # noqa: E402

RSH = str(Path(__file__).resolve().parent / "rsh.py")
NAMES = ["a", "b", "c"]
STAY = "echo $$ > $DIR/pid.$RANK.tmp; mv $DIR/pid.$RANK.tmp $DIR/pid.$RANK; exec sleep 1000"


class Hosts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.hosts = spaces.Hosts("login", NAMES)
        cls.servers = [
            subprocess.Popen([*cls.hosts.enter(name), RSH, "serve", f"{BASE}/{name}.socket"],
                             env={**os.environ, "HOME": f"{BASE}/home"})
            for name in NAMES
        ]  # fmt: skip
        for name in NAMES:
            wait_until(lambda name=name: os.path.exists(f"{BASE}/{name}.socket"), f"the server on {name}")
        os.makedirs(f"{BASE}/home")

    @classmethod
    def tearDownClass(cls):
        for server in cls.servers:
            server.kill()
            server.wait()
        cls.hosts.close()

    def setUp(self):
        self.dir = f"{BASE}/{self.id().rpartition('.')[2]}"
        os.makedirs(self.dir)
        self.addCleanup(self.end_all)

    def end_all(self):
        for pid in spaces.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def start(self, *arguments, **more):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TANDEM_", "PET_", "OMP_", "MASTER_", "SLURM_")) and name != "RANK"
        }
        environment.update(HOME=f"{BASE}/home", RSH_DIR=BASE, TANDEM_RSH=RSH)
        environment["DIR"] = self.dir
        environment.update(more)
        return subprocess.Popen([TDRUN, "--export=DIR", *arguments], env=environment, cwd=self.dir, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

    def finish(self, job, code=None):
        job.out, job.err = job.communicate(timeout=90)
        if code is not None:
            self.assertEqual(job.returncode, code, f"{job.out}\n{job.err}")
        self.check_nothing_left()
        return job

    def run_job(self, *arguments, code=0, **more):
        return self.finish(self.start(*arguments, **more), code)

    def check_nothing_left(self):
        """What a killed process leaves behind is ended by others, which takes a moment."""
        try:
            wait_until(lambda: not spaces.processes(), "the end of all processes", 10)
        except AssertionError:
            self.fail(f"processes are left: {spaces.processes()}")

    def wait_workers(self, count):
        for rank in range(count):
            wait_until(lambda rank=rank: os.path.exists(f"{self.dir}/pid.{rank}"), f"worker {rank}")

    def find(self, pattern):
        """The pid of the process on a host whose command line matches."""
        return wait_until(lambda: [p for p, line in spaces.processes().items() if re.search(pattern, line)], pattern)

    def says(self, job, pattern):
        """One line says it, and no other one of this tdrun says anything."""
        own = [line for line in job.err.splitlines() if line.startswith("tdrun: ")]
        self.assertEqual(len(own), 1, job.err)
        self.assertRegex(own[0], pattern)

    # ---- Work -----------------------------------------------------------------------------------

    def test_work(self):
        show = "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $(hostname) $PWD $NEW $OLD; echo error >&2"
        job = self.run_job("--hosts", "a:2,b,c:1", "--export=NEW=1,OLD", "sh", "-c", show, OLD="0", HIDDEN="1")
        self.assertEqual(
            sorted(job.out.splitlines()),
            [f"[a:0] 0 0 4 0 a a {self.dir} 1 0", f"[a:1] 1 1 4 0 a a {self.dir} 1 0",
             f"[b:2] 2 0 4 1 a b {self.dir} 1 0", f"[c:3] 3 0 4 2 a c {self.dir} 1 0"],
        )  # fmt: skip
        self.assertEqual(sorted(job.err.splitlines()), [f"[{x}] error" for x in ("a:0", "a:1", "b:2", "c:3")])

    def test_all_reduce(self):
        job = self.run_job("--hosts=a:2,b:1,c:3", f"{EXAMPLES}/all_reduce")
        self.assertEqual(len(re.findall(r"^\[\w:\d\] rank \d of 6: the sum is", job.out, re.M)), 6)

    def test_hostfile_and_flags(self):
        path = spaces.write("hostfile", "# two hosts\na slots=2\n\nuser@b:1  # the other\n")
        shutil.copy(RSH, f"{BASE}/rsh")
        os.symlink(f"{BASE}/b.socket", f"{BASE}/user@b.socket")
        job = self.run_job("--hostfile", path, "--launch-agent", f"{RSH} {{host}}", "--nproc-per-node=3", "--role=x",
                           "--", "sh", "-c", "echo $RANK $WORLD_SIZE $ROLE_NAME $0", "--flag")  # fmt: skip
        self.assertEqual(sorted(job.out.splitlines()), ["[a:0] 0 3 x --flag", "[a:1] 1 3 x --flag", "[b:2] 2 3 x --flag"])

    def test_restarts(self):
        work = "echo $RANK.$TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ $RANK = 0 ] || exit 1; exit 0"
        job = self.run_job("--hosts=a:1,b:1", "--max-restarts=2", "sh", "-c", work)
        self.assertIn("[b:1] 1.1", job.out)
        self.assertIn("tdrun on b: starting all workers again (restart 1 of 2)", job.err)

    def test_secret_is_seen_by_no_one(self):
        """Neither arguments nor variables of what connects have it, nor the arguments on the hosts."""
        log = f"{self.dir}/log"
        for secret in (None, "s3cret"):
            more = {"TANDEM_SECRET": secret} if secret else {}
            job = self.start("--hosts=a:1,b:1", "sh", "-c", f"echo $TANDEM_SECRET; {STAY}", RSH_LOG=log, **more)
            self.wait_workers(2)
            lines = [line for line in spaces.processes().values()]
            for rank in range(2):
                os.unlink(f"{self.dir}/pid.{rank}")
            job.send_signal(signal.SIGINT)
            self.finish(job, 128 + signal.SIGINT)
            found = set(re.findall(r"\[\w:\d\] (\S+)", job.out))
            self.assertEqual(len(found), 1)
            found = found.pop()
            self.assertTrue(found == secret if secret else re.fullmatch(r"[0-9a-f]{64}", found), found)
            with open(log, encoding="utf-8") as file:
                self.assertNotIn(found, file.read())
            self.assertTrue(lines and not [line for line in lines if found in line])

    # ---- What can be wrong at the start ---------------------------------------------------------

    def test_unknown_host(self):
        job = self.run_job("--hosts=a:1,nowhere:1", "sleep", "1000", code=255)
        self.says(job, r"host nowhere: .*could not start tdrun there \(exit code 255\): ssh: Could not resolve hostname")

    def test_refused(self):
        os.symlink(f"{BASE}/hosts", f"{BASE}/d.socket")
        job = self.run_job("--hosts=d:1,a:1", "sleep", "1000", code=255)
        self.says(job, r"host d: .*could not start tdrun there \(exit code 255\): ssh: connect to host d .* refused")

    def test_no_tdrun_there(self):
        job = self.run_job("--hosts=a:1,b:1", "--remote-tdrun=/opt/no/tdrun", "sleep", "1000", code=127)
        self.says(job, r"host [ab]: tdrun cannot be started there: .*not found; install Tandem there .* --remote-tdrun")

    def test_another_version_there(self):
        other = spaces.write("other-tdrun", "#!/bin/sh\n[ $(hostname) = a ] && exec " + TDRUN + " serve\n"
                             "printf '\\001tandem 99.1.2\\n' >&2; read line; exit 1\n", 0o755)  # fmt: skip
        job = self.run_job("--hosts=a:1,b:1", f"--remote-tdrun={other}", "sleep", "1000", code=1)
        self.says(job, r"host b has Tandem 99.1.2, this host \d+\.\d+\.\d+: install the same version on all hosts")

    def test_another_version_here(self):
        done = subprocess.run([TDRUN, "serve"], input=b"tandem 99.1.2 10\n0123456789", capture_output=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"\1fail it has Tandem ", done.stderr)
        self.assertIn(b"the host that starts the job has 99.1.2", done.stderr)

    def test_malformed_messages(self):
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"tandem 0.1.0 99999999999\n", b"x" * 1000, b"tandem 0.1.0 8\n\xff\xff\xff\xff\xff\xff\xff\xff"):  # fmt: skip
            done = subprocess.run([TDRUN, "serve"], input=data, capture_output=True, timeout=30, check=False)
            self.assertEqual(done.returncode, 1, data)
            self.assertRegex(done.stderr, rb"^\x01tandem \S+\n\x01fail [^\n]+\n$")

    def test_missing_program_and_directory(self):
        job = self.run_job("--hosts=a:1,b:1", "./no-such-program", code=127)
        self.says(job, r"host [ab]: cannot run ./no-such-program")

    def test_wrong_lists(self):
        for flags, text in (
            (["--hosts=a:0"], "a number, gpu, cpu or auto"),
            (["--hosts=a,,b"], '"" is no host'),
            (["--hosts=-oProxyCommand=x"], "is no host"),
            (["--hosts=a;reboot"], "is no host"),
            (["--hosts=a:"], "is no host"),
            (["--hostfile=/no/such/file"], "cannot read /no/such/file"),
            (["--hosts=a", "--nnodes=2"], "have no place there"),
        ):
            job = self.run_job(*flags, "true", code=2)
            self.assertIn(text, job.err)
        job = self.run_job("--hosts=a", "--launch-agent=no-such-agent", "true", code=1)
        self.assertIn("--launch-agent: cannot run no-such-agent", job.err)
        spaces.write("pdsh", "#!/bin/sh\n", 0o755)
        job = self.run_job("--hosts=a", f"--launch-agent={BASE}/pdsh", "true", code=1)
        self.assertIn("pdsh does not pass on its standard input", job.err)

    # ---- Ends -----------------------------------------------------------------------------------

    def start_workers(self, *flags):
        job = self.start("--hosts=a:2,b:2", "--shutdown-timeout=5", *flags, "sh", "-c", STAY)
        self.wait_workers(4)
        return job

    def test_worker_fails(self):
        job = self.run_job("--hosts=a:2,b:2", "sh", "-c", "[ $RANK = 3 ] && { echo why >&2; exit 5; }; sleep 1000", code=5)
        self.assertIn("[b:3] why", job.err)
        self.assertRegex(job.err, r"tdrun on b: rank 3 \(local rank 1 on host b, pid \d+\) failed with exit code 5")
        self.says(job, r"the job has failed.*host b")

    def test_exit_code_of_ssh_itself(self):
        """255 and 127 of a worker are a worker's."""
        for code in (255, 127):
            job = self.run_job("--hosts=a:1,b:1", "sh", "-c", f"[ $RANK = 0 ] && exit {code}; sleep 1000", code=code)
            self.says(job, r"the job has failed.*host a")

    def test_interrupted(self):
        job = self.start_workers()
        job.send_signal(signal.SIGINT)
        self.finish(job, 128 + signal.SIGINT)

    def test_signal_is_passed_on(self):
        trap = "trap 'echo got it; exit 0' USR1; touch $DIR/pid.$RANK; while :; do sleep 0.05; done"
        job = self.start("--hosts=a:1,b:1", "sh", "-c", trap)
        self.wait_workers(2)
        job.send_signal(signal.SIGUSR1)
        self.finish(job, 0)
        self.assertEqual(sorted(job.out.splitlines()), ["[a:0] got it", "[b:1] got it"])

    def test_killed_here(self):
        for what in ("front", "agent"):
            job = self.start_workers()
            agents = self.find(rf"tandem-agent of process {job.pid}$")
            os.kill(job.pid if what == "front" else agents[0], signal.SIGKILL)
            self.finish(job)
            for rank in range(4):
                os.unlink(f"{self.dir}/pid.{rank}")

    def ended_there(self, pattern):
        """Kills a process of host b."""
        job = self.start_workers()
        mine = [p for p in self.find(pattern) if os.readlink(f"/proc/{p}/ns/net") == self.space("b")]
        os.kill(mine[0], signal.SIGKILL)
        self.finish(job)
        self.assertNotEqual(job.returncode, 0)
        return job

    def space(self, name):
        return os.readlink(f"/proc/{self.hosts.holders[NAMES.index(name)].pid}/ns/net")

    def test_launcher_killed_there(self):
        self.says(self.ended_there(r"tdrun serve"), r"host b: the connection was lost|the launcher of node 1 \(process \d+ on b\)")

    def test_agent_killed_there(self):
        self.says(self.ended_there(r"tandem-agent of"), r"host b|on b\)")

    def test_connection_is_lost(self):
        job = self.start_workers()
        os.kill(self.find(r"rsh.py b ")[0], signal.SIGKILL)
        self.finish(job)
        self.says(job, r"host b: the connection was lost, or tdrun was killed there")

    # ---- Networks -------------------------------------------------------------------------------

    def test_host_is_cut_off(self):
        """Its link is cut, while ssh, over another network, still works: the job ends, and the host is named."""
        job = self.start("--hosts=a:1,b:1", "sh", "-c", STAY, TANDEM_HEARTBEAT="2")
        self.wait_workers(2)
        self.hosts.link("b", "down")
        self.addCleanup(self.hosts.link, "b", "up")
        job.out, job.err = job.communicate(timeout=90)
        self.hosts.link("b", "up")
        wait_until(lambda: not spaces.processes(), "the end of all processes", 30)
        self.assertNotEqual(job.returncode, 0)
        self.says(job, r"host b|on b|node 0 \(at a")

    def test_host_comes_back(self):
        """Launcher and worker of a host that was cut off find another job at the address of theirs: they are refused, and
        that job is not disturbed."""
        self.hosts.link("b", "up")
        job = self.start("--hosts=a:1,b:1", "--master-port=29777", "sh", "-c", STAY)
        self.wait_workers(2)
        old = self.find("^sleep 1000")
        secret = [self.variable(pid, "TANDEM_SECRET") for pid in old]
        job.send_signal(signal.SIGINT)
        self.finish(job)
        other = self.start("--hosts=a:1,c:1", "--master-port=29777", "sh", "-c", STAY.replace("pid", "new"))
        for rank in range(2):
            wait_until(lambda rank=rank: os.path.exists(f"{self.dir}/new.{rank}"), "the other job")
        late = subprocess.run([*self.hosts.enter("b"), WORKER, "", "-1"], capture_output=True, text=True, check=False,
                              env={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29777",
                                   "TANDEM_AGENT_STORE": "a:29777", "TANDEM_SECRET": secret[0],
                                   "HOME": f"{BASE}/home"})  # fmt: skip
        self.assertNotEqual(late.returncode, 0)
        self.assertIn("refused the job's secret", late.stdout + late.stderr)
        self.assertIsNone(other.poll())
        other.send_signal(signal.SIGINT)
        self.finish(other, 128 + signal.SIGINT)

    def variable(self, pid, name):
        with open(f"/proc/{pid}/environ", encoding="utf-8") as file:
            return dict(item.partition("=")[::2] for item in file.read().split("\0"))[name]

    def test_firewall_that_lets_one_direction_through(self):
        """The sentence says which one does not work: to a worker, or to the first host."""
        if not shutil.which("nft", path=spaces.PATH):
            self.skipTest("there is no nft")
        rules = "table inet t { chain c { type filter hook input priority 0; ct state established,related accept; "
        rules += "iif lo accept; tcp flags syn drop; }; }"
        worker = os.path.join(os.path.dirname(TDRUN), "tdbench")
        for blocked, port, text in (
            ("b", [], r"rank 1 \(on b, pid \d+\) cannot be reached: connections to 10.78.0.12, port \d+, get no answer, "
                      "while those from it do"),
            ("a", ["--rdzv-conf=join_timeout=4"], r"cannot reach the store at a, port \d+, .*a firewall may drop what goes from [bc] to a"),
        ):  # fmt: skip
            command = [*self.hosts.enter(blocked), "nft"]
            done = subprocess.run([*command, "-f", "-"], input=rules, text=True, capture_output=True, check=False)
            if done.returncode:
                self.skipTest(f"nft cannot be used here: {done.stderr}")
            try:
                job = self.start("--hosts=a:1,b:1,c:1", *port, worker, "all_to_all", "-b", "64K", "-i", "3",
                                 TANDEM_HEARTBEAT="2")  # fmt: skip
                self.finish(job)
            finally:
                spaces.run(*command, "flush", "ruleset")
            self.assertNotEqual(job.returncode, 0)
            self.assertRegex(job.err, text)

    # ---- OpenSSH --------------------------------------------------------------------------------

    def test_ssh(self):
        """The same over ssh and sshd, with keys of their own."""
        absent = [name for name in ("sshd", "ssh", "ssh-keygen") if not shutil.which(name, path=spaces.PATH)]
        if absent:
            self.skipTest(f"there is no {absent[0]}")
        for name in ("host_key", "user_key"):
            spaces.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.dir}/{name}")
        settings = ["Port=2022", f"HostKey={self.dir}/host_key", f"AuthorizedKeysFile={self.dir}/user_key.pub",
                    "StrictModes=no", "UsePAM=no", f"PidFile={self.dir}/%h.pid"]  # fmt: skip
        spaces.run("mount", "-t", "tmpfs", "none", "/run")
        os.makedirs("/run/sshd")
        self.addCleanup(spaces.run, "umount", "/run")
        for name in ("a", "b"):
            command = [*self.hosts.enter(name), shutil.which("sshd"), "-D", "-e", "-f", "/dev/null"]
            for setting in settings:
                command += ["-o", setting.replace("%h", name)]
            server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            self.addCleanup(server.wait)
            self.addCleanup(server.kill)
            wait_until(lambda name=name: os.path.exists(f"{self.dir}/{name}.pid"), "sshd")
        agent = (f"ssh -p 2022 -i {self.dir}/user_key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
                 "-o LogLevel=ERROR -o BatchMode=yes")  # fmt: skip
        job = self.start("--hosts=a:2,b:1", "--launch-agent", agent, f"{EXAMPLES}/all_reduce")
        job.out, job.err = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 0, job.err)
        self.assertEqual(len(re.findall(r"^\[\w:\d\] rank \d of 3: the sum is", job.out, re.M)), 3)
        job = self.start("--hosts=a:1,b:1,c:1", "--launch-agent", agent, "sleep", "1000")
        job.out, job.err = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 255, job.err)
        self.says(job, r"host c: ssh could not start tdrun there \(exit code 255\): ssh: connect to host c port 2022: ")
        for number, what in enumerate(("interrupted", "killed", "connection")):
            job = self.start("--hosts=a:1,b:1", "--launch-agent", agent, "sh", "-c", STAY.replace("pid.", f"{what}."))
            for rank in range(2):
                wait_until(lambda rank=rank: os.path.exists(f"{self.dir}/{what}.{rank}"), "workers")  # noqa: B023
            pid = job.pid if number < 2 else self.find(r"^ssh .* b exec")[0]
            os.kill(pid, signal.SIGINT if number == 0 else signal.SIGKILL)
            job.out, job.err = job.communicate(timeout=60)
            wait_until(lambda: not [l for l in spaces.processes().values() if not l.startswith("sshd")], what)
            self.assertEqual(job.returncode, [130, -9, 137][number], job.err)


if __name__ == "__main__":
    spaces.enter_or_skip()
    TDRUN, EXAMPLES, WORKER = (os.path.abspath(sys.argv.pop(1)) for _ in range(3))
    unittest.main(verbosity=2)
