"""A Slurm cluster of this machine's own: munged, slurmctld, and a slurmd for each node.

    controller 10.78.0.1 ── bridge ──┬── n1 10.78.0.11   (a network and a host name of its own each)
                                     ├── n2 10.78.0.12
                                     └── n3 10.78.0.13

All of it is in namespaces (../spaces.py): nothing of the host's own Slurm is read or written, and nothing is left. The
node names are known to Slurm only: no resolver finds them.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from spaces import BASE, Hosts, wait_until  # noqa: E402

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")

CONFIGURATION = """
ClusterName=tandem
SlurmctldHost=controller(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=60
StateSaveLocation={base}/state
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmdSpoolDir={base}/spool.%n
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self, nodes=3, cpus=64):
        self.names = [f"n{number + 1}" for number in range(nodes)]
        self.cpus = cpus
        self.hosts = None
        self.daemons = []

    def start(self):
        os.environ["SLURM_CONF"] = f"{BASE}/slurm.conf"
        self.hosts = Hosts("controller", self.names, known=False)
        self.write_files()
        self.daemon("munged", "--foreground", f"--key-file={BASE}/munge.key", f"--socket={BASE}/munge.socket",
                    f"--pid-file={BASE}/munge.pid", f"--log-file={BASE}/munge.log",
                    f"--seed-file={BASE}/munge.seed", "--num-threads=2")  # fmt: skip
        wait_until(lambda: os.path.exists(f"{BASE}/munge.socket"), "munged")
        self.daemon("slurmctld", "-D", "-i", "-c")
        for name in self.names:
            self.daemon("slurmd", "-D", node=name)
        wait_until(self.is_ready, "the nodes of the cluster")
        return self

    def stop(self):
        for process in reversed(self.daemons):
            process.kill()
            process.wait()
        if self.hosts:
            self.hosts.close()

    def write_files(self):
        with open(f"{BASE}/munge.key", "wb") as file:
            file.write(os.urandom(128))
        os.chmod(f"{BASE}/munge.key", 0o400)
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={self.hosts.address(name)} CPUs={self.cpus} State=UNKNOWN"
            for name in self.names
        ]
        os.makedirs(f"{BASE}/state")
        for name in self.names:
            os.makedirs(f"{BASE}/spool.{name}")
        with open(f"{BASE}/slurm.conf", "w", encoding="ascii") as file:
            file.write(CONFIGURATION.format(base=BASE, nodes="\n".join(lines)))
        with open(f"{BASE}/cgroup.conf", "w", encoding="ascii") as file:
            file.write("CgroupPlugin=autodetect\n")

    def daemon(self, *command, node=None):
        prefix = [] if node is None else self.hosts.enter(node)
        with open(f"{BASE}/{command[0]}.out", "ab") as log:
            self.daemons.append(
                subprocess.Popen([*prefix, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def is_ready(self):
        for process in self.daemons:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args}: ended\n{self.logs()}")
        states = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False)
        return states.stdout.split() == ["idle"] * len(self.names)

    def logs(self):
        """The ends of the daemons' logs, for a failure."""
        text = ""
        for name in sorted(os.listdir(BASE)):
            if name.endswith((".log", ".out")):
                with open(f"{BASE}/{name}", encoding="utf-8", errors="replace") as file:
                    text += f"--- {name}\n" + "".join(file.readlines()[-15:])
        return text
