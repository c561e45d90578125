"""What the tests of tdrun have in common: jobs that are started for real, and cleaned up after.

Every process that a test starts, at any remove, carries the variable TD_TEST_MARK with a value of the
test's own. So a test can see what a job has left behind, and nothing outlives a test. Nothing here
sleeps for luck: wait_until() polls, with a deadline that is long enough for a slow machine.
"""

import os
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
import unittest

DEADLINE = 60 * int(os.environ.get("TD_TEST_SLOWNESS", "1"))  # seconds for anything that is bound to happen

TDRUN = None  # set by main()


def wait_until(condition, what, deadline=DEADLINE):
    """Returns the first true value of condition()."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {deadline} s")
        time.sleep(0.002)


def free_port():
    """A port of the loopback interface below those that the kernel gives out, so that no connection takes it meanwhile."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        lowest = int(file.read().split()[0])
    while True:
        port = random.randrange(min(10000, lowest // 2), lowest)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            pass


def read_file(path, mode="r"):
    try:
        with open(path, mode) as file:
            return file.read()
    except FileNotFoundError:
        return None


def is_alive(pid):
    """Whether a process exists and is not just waiting to be reaped."""
    stat = read_stat(pid)
    return stat is not None and stat[0] not in "ZX"


def read_stat(pid):
    """(state, parent) of a process, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            return fields[0], int(fields[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None


def processes_with(text):
    """The pids of all live processes that have `text` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                has_it = text.encode() in file.read()
        except OSError:
            continue
        if has_it and is_alive(int(name)):
            found.append(int(name))
    return found


def children_of(pid):
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and (read_stat(name) or ("", 0))[1] == pid
    ]


class Job:
    """A running tdrun, or another program that starts a job."""

    def __init__(self, test, arguments, env=None, program=None, **popen):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PET_", "TANDEM_", "TORCHELASTIC_", "MASTER_"))
            and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "NO_COLOR")
        }
        environment["TD_TEST_MARK"] = test.mark
        environment["TEST_DIR"] = test.dir
        environment.update(env or {})
        popen.setdefault("stdin", subprocess.DEVNULL)
        popen.setdefault("stdout", subprocess.PIPE)
        popen.setdefault("stderr", subprocess.PIPE)
        self.process = subprocess.Popen(
            [program or TDRUN, *arguments], env=environment, cwd=test.dir, **popen
        )
        self.pid = self.process.pid

    def agent(self):
        """The pid of the agent behind this tdrun."""
        agents = wait_until(lambda: children_of(self.pid) or self.process.poll() is not None, "the agent")
        if agents is True:
            raise AssertionError(f"tdrun has ended: {vars(self.finish())}")
        return agents[0]

    def finish(self, deadline=DEADLINE):
        """Waits for the end; sets code, out and err."""
        out, err = self.process.communicate(timeout=deadline)
        self.code = self.process.returncode
        self.out = out.decode(errors="replace") if isinstance(out, bytes) else out
        self.err = err.decode(errors="replace") if isinstance(err, bytes) else err
        return self

    def signal(self, number):
        self.process.send_signal(number)


class Test(unittest.TestCase):
    """A test with a directory of its own that leaves neither files nor processes behind."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="tdrun-test-")
        self.mark = os.path.basename(self.dir)
        home = tempfile.mkdtemp(prefix="tdrun-home-")  # where a job finds its user's secret
        os.environ["HOME"] = home
        os.environ.pop("XDG_CONFIG_HOME", None)
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.addCleanup(shutil.rmtree, home, ignore_errors=True)
        self.addCleanup(self.kill_all)

    def kill_all(self):
        for pid in processes_with(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def start(self, *arguments, **popen):
        return Job(self, arguments, **popen)

    def run_job(self, *arguments, **popen):
        """Runs tdrun to its end, and checks that nothing is left."""
        job = self.start(*arguments, **popen).finish()
        self.check_nothing_left()
        return job

    def check_nothing_left(self):
        """When tdrun has ended, nothing of the job may be there any more."""
        left = processes_with(self.mark)
        if left:
            commands = [read_file(f"/proc/{pid}/cmdline") for pid in left]
            self.fail(f"processes were left behind: {left} {commands}")

    def wait_nothing_left(self):
        """The same where it is not tdrun itself that says so, because it was killed."""
        wait_until(lambda: not processes_with(self.mark), "the end of all processes")

    def path(self, name):
        return os.path.join(self.dir, name)

    def wait_files(self, *names):
        """Waits until workers have made these files."""
        for name in names:
            wait_until(lambda: os.path.exists(self.path(name)), f"the file {name}")

    def script(self, name, text, mode=0o755):
        """Writes a script into the test's directory; returns how it is called."""
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(self.path(name), mode)
        return "./" + name

    def check_code(self, job, code):
        self.assertEqual(job.code, code, f"stdout:\n{job.out}\nstderr:\n{job.err}")


class Terminal:
    """A terminal in which tdrun runs as a shell would start it: in a foreground process group."""

    def __init__(self, test, *arguments, env=None, tostop=False):
        self.text = b""
        pid, self.master = pty.fork()
        if pid == 0:
            os.environ["TD_TEST_MARK"] = test.mark
            os.environ["TEST_DIR"] = test.dir
            os.environ["TERM"] = "xterm"
            os.environ.pop("NO_COLOR", None)
            os.environ.update(env or {})
            os.chdir(test.dir)
            if tostop:  # output of processes in the background is held
                settings = termios.tcgetattr(0)
                settings[3] |= termios.TOSTOP
                termios.tcsetattr(0, termios.TCSANOW, settings)
            os.execv(TDRUN, [TDRUN, *arguments])
        self.pid = pid
        test.addCleanup(os.close, self.master)

    def read(self, seconds=0.01):
        """Takes what is there; False at the end."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.text += data
        return bool(data)

    def wait_text(self, pattern):
        """Waits until the output matches."""

        def matches():
            self.read()
            return re.search(pattern, self.text)

        try:
            return wait_until(matches, f"the text {pattern!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; there was: {self.text!r}") from None

    def type(self, keys):
        os.write(self.master, keys)

    def finish(self):
        """Waits for the end; returns the exit code as a shell shows it."""
        while self.read(DEADLINE):
            pass
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def main():
    """Runs the tests of the calling script. Its first argument is the path of tdrun."""
    global TDRUN
    if len(sys.argv) < 2 or not os.access(sys.argv[1], os.X_OK):
        sys.exit(f"usage: {sys.argv[0]} path/to/tdrun [test…]")
    TDRUN = os.path.abspath(sys.argv.pop(1))
    unittest.main()
