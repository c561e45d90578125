#!/usr/bin/env python3
"""Runs the steps of the Dockerfile in a chroot that debootstrap makes, and checks the image that comes of it.

For machines without a container engine: `tests/containers/build_in_chroot.py --long`, as root. The base image is
what debootstrap makes of the release that the Dockerfile names, from the mirror and with the settings that apt has
on this machine. Exit code 77: it cannot be done here, for the reason that is printed; so CTest skips it.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import dockerfile
import plain_yaml

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "launch"))
import network_hosts  # noqa: E402
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SKIP = 77

# What an engine mounts, for one command. Its first argument is the root, the second one user:group, the others are
# the command, which becomes process 1 of its own process namespace.
ENTER = r"""
set -eu
root=$1 user=$2
shift 2
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom; do
    : >"$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
cd "$root"
exec chroot --userspec="$user" "$root" /bin/sh -c 'cd "$IMAGE_WORKDIR" && unset IMAGE_WORKDIR && exec "$@"' sh "$@"
"""


def skip(reason):
    print(f"containers: skipped: {reason}")
    sys.exit(SKIP)


def say(text):
    print(f"containers: {text}", flush=True)


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, **options)


def mirror_of(release):
    """Where apt on this machine gets the packages of this release from."""
    form = "$(SITE) $(CODENAME) $(RELEASE) $(COMPONENT)"
    targets = run("apt-get", "indextargets", "--format", form, "Created-By: Packages", capture_output=True)
    for line in targets.stdout.splitlines():
        site, codename, suite, component = (line.split() + ["", "", "", ""])[:4]
        if release in (codename, suite) and component == "main":
            return site
    return skip(f"apt has no packages of {release} on this machine")


def apt_settings():
    """How apt gets at its mirror here: proxies, certificates, and how old its lists may be."""
    dump = run("apt-config", "dump", "Acquire", capture_output=True).stdout
    kept = re.findall(r'^Acquire::(?:https?|Check-Valid-Until|Retries)\b.*"[^"]+";$', dump, re.MULTILINE)
    return "\n".join(kept) + "\n"


class Image:
    """A root file system, and what the steps before have set for the next ones."""

    def __init__(self, root, made=False):
        self.root = root
        self.user = "0:0"
        self.home = "/root"
        self.workdir = "/"
        self.env = {}
        self.command = None
        if not made:
            shutil.rmtree(root, ignore_errors=True)  # of an earlier run with --keep
            run("cp", "-a", "--reflink=auto", os.path.join(os.path.dirname(root), "base"), root)

    def inside(self, path):
        return os.path.join(self.root, os.path.join(self.workdir, path).lstrip("/"))

    def popen(self, *command, env=None, before=(), **options):
        variables = {"PATH": PATH, "HOME": self.home, "IMAGE_WORKDIR": self.workdir, **self.env, **(env or {})}
        for name in ("http_proxy", "https_proxy", "no_proxy"):
            if name in os.environ:
                variables[name] = os.environ[name]
        enter = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        return subprocess.Popen(
            [*before, *enter, "sh", "-c", ENTER, "sh", self.root, self.user, *command],
            env=variables, text=True, **options
        )

    def run(self, *command, env=None, **options):
        """Runs a command to its end; returns its output. A failure ends the test."""
        process = self.popen(*command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, **options)
        out, _ = process.communicate()
        if process.returncode:
            sys.exit(f"containers: {command} failed with exit code {process.returncode}:\n{out[-4000:]}")
        return out

    def lookup(self, name):
        """(user:group, home) of a user of this image."""
        with open(os.path.join(self.root, "etc/passwd"), encoding="utf-8") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if fields[0] == name:
                    return f"{fields[2]}:{fields[3]}", fields[5]
        return sys.exit(f"containers: USER {name}: the image has no such user")


def copy(image, context, stages, value):
    stage, sources, destination = value
    target = image.inside(destination)
    for source in sources:
        if stage:
            from_path = os.path.join(stages[stage].root, source.lstrip("/"))
        elif context.has(source):
            from_path = os.path.join(context.folder, source)
        else:
            sys.exit(f"containers: COPY {source}: it does not exist, or .dockerignore leaves it out")
        if not os.path.isdir(from_path):
            to = os.path.join(target, os.path.basename(source)) if destination.endswith("/") else target
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.copy2(from_path, to)
        elif stage:  # the contents of a folder, links as they are, into folders that may be links
            run("cp", "-a", from_path + "/.", target)
        else:
            shutil.copytree(from_path, target, symlinks=True, dirs_exist_ok=True,
                            ignore=lambda _, names: [name for name in names if context.ignored(name)])


def build(work, verbose):
    """Runs all steps; returns the image of the last stage."""
    stages, image = {}, None
    context = dockerfile.Context(ROOT)
    for number, stage in enumerate(dockerfile.read(os.path.join(ROOT, "Dockerfile"))):
        image = Image(os.path.join(work, f"stage{number}"))
        stages[stage.name or str(number)] = image
        for name, value in stage.steps:
            say(f"stage {number}: {name} {value}" if verbose else f"stage {number}: {name} {str(value)[:70]}")
            if name == "RUN":
                image.run("/bin/sh", "-c", value)
            elif name == "COPY":
                copy(image, context, stages, value)
            elif name == "ENV":
                image.env.update(value)
            elif name == "WORKDIR":
                image.workdir = os.path.join(image.workdir, value)
                os.makedirs(image.inside("."), exist_ok=True)
            elif name == "USER":
                image.user, image.home = image.lookup(value)
            elif name == "CMD":
                image.command = value
    return image


def make_base(work, release):
    say(f"debootstrap {release}")
    base = os.path.join(work, "base")
    log = os.path.join(work, "debootstrap.log")
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(["debootstrap", "--variant=minbase", release, base, mirror_of(release)],
                              stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        with open(log, encoding="utf-8", errors="replace") as file:
            skip(f"debootstrap failed: {file.read()[-500:]}")
    prepare_base(base)


def prepare_base(base):
    with open(os.path.join(base, "etc/apt/apt.conf.d/00-of-this-machine"), "w", encoding="utf-8") as file:
        file.write(apt_settings())
    if os.path.exists("/etc/resolv.conf"):
        shutil.copy("/etc/resolv.conf", os.path.join(base, "etc/resolv.conf"))


def check(condition, text):
    if not condition:
        sys.exit(f"containers: {text}")
    say(f"ok: {text}")


def check_contents(image):
    check(image.user == "1000:1000" and image.run("id", "-u").strip() == "1000", "it runs as an ordinary user")
    for name in ("cc", "gcc", "cmake", "ninja", "make", "pkg-config", "git"):
        present = image.run("sh", "-c", f"command -v {name} || true").strip()
        if present:
            sys.exit(f"containers: the final image has {present}")
    for folder in ("tandem", "usr/local/include", "usr/local/lib/cmake", "usr/local/lib/pkgconfig", "image"):
        entries = [name for _, _, names in os.walk(os.path.join(image.root, folder)) for name in names]
        if entries:
            sys.exit(f"containers: the final image has files below /{folder}: {entries[:5]}")
    say("ok: no compiler, sources or headers")
    lists = os.listdir(os.path.join(image.root, "var/lib/apt/lists"))
    check(not lists, "no lists of packages")
    out = image.run("sh", "-c", "for f in /usr/local/bin/*; do ldd $f; done; ldd /usr/local/lib/libtandem.so.*")
    check("not found" not in out, "all libraries are there")
    out = image.run("sh", "-c", "! touch /usr/local/bin/x 2>/dev/null && touch ~/x && rm ~/x && echo fine")
    check("fine" in out, "its user writes at home only")


def check_runs(image):
    out = image.run(*image.command)
    check("version" in out and "FAIL" not in out, "its command, tdrun doctor, finds nothing that is broken")
    out = image.run("tdrun", "--standalone", "--nproc-per-node", "2", "tandem-ddp")
    check("rank 1 of 2" in out and "loss" in out, "data-parallel training on 2 ranks")
    out = image.run("tdbench", "all_reduce", "-n", "2", "-b", "4,1M,64M", "-t", "0.1")
    check("64M" in out, "all_reduce up to 64 MiB on 2 ranks, with a /dev/shm of 64 MiB")
    process = image.popen("tdrun", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "3", "sh", "-c",
                          "echo started; exec sleep 1000", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    line = process.stdout.readline()
    while line and "started" not in line:
        line = process.stdout.readline()
    inner = children(process.pid)
    began = time.monotonic()
    os.kill(inner[0], signal.SIGTERM)
    process.communicate(timeout=60)
    check(time.monotonic() - began < 30 and not os.path.exists(f"/proc/{inner[0]}"),
          "as process 1 of its container, tdrun ends on SIGTERM, and its workers with it")


# ---- Several nodes: what compose.yaml and the manifest for Kubernetes start -----------------------------------------


def services_of_compose():
    """[(host name, command, environment)]"""
    compose = plain_yaml.read(os.path.join(ROOT, "compose.yaml"))[0]
    return [(service["hostname"], service["command"], service["environment"])
            for service in compose["services"].values()]


def pods_of_manifest():
    """The same of a Job's pods: the command of the first init container goes before that of the container."""
    documents = plain_yaml.read(os.path.join(ROOT, "examples/kubernetes/ddp.yaml"))
    job = next(document for document in documents if document["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    container, first = pod["containers"][0], pod["initContainers"][0]
    words = ["sh", "-c", '"$@"', "sh", *first["command"]], container["command"]
    command = ["sh", "-c", f"{quote(words[0])} && exec {quote(words[1])}"]
    pods = []
    for index in range(job["spec"]["completions"]):
        environment = {item["name"]: item.get("value", str(index)) for item in container["env"]}
        pods.append((f"{job['metadata']['name']}-{index}.{pod['subdomain']}", command, environment))
    return pods


def quote(words):
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def run_nodes(image, nodes, owner, mode, what):
    """Starts all nodes, each as a host of its own, with the job's secret in the file that their variable names."""
    hosts = network_hosts.Hosts(len(nodes))
    secret = os.path.join(image.root, nodes[0][2]["TANDEM_SECRET_FILE"].lstrip("/"))
    try:
        os.makedirs(os.path.dirname(secret), exist_ok=True)
        with open(secret, "w", encoding="utf-8") as file:
            file.write("the secret of these nodes\n")
        os.chown(secret, owner, 1000)
        os.chmod(secret, mode)
        with open(os.path.join(image.root, "etc/hosts"), "w", encoding="utf-8") as file:
            file.write("127.0.0.1 localhost\n")
            for number, (name, _, _) in enumerate(nodes):
                file.write(f"{hosts.address(number)} {name}\n")
        for doctor in (True, False):
            processes = [
                image.popen(*(["tdrun", "doctor"] if doctor else command), env=environment, before=hosts.on(number),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                for number, (_, command, environment) in enumerate(nodes)]
            outputs = [process.communicate(timeout=300)[0] for process in processes]
            text = "\n".join(outputs)
            if any(process.returncode for process in processes):
                sys.exit(f"containers: {what} failed:\n{text}")
            last = 2 * len(nodes) - 1
            wanted = "each node connects to each other one" if doctor else f"rank {last} of {last + 1}, local rank 1 of 2"
            if wanted not in text or "FAIL" in text or "warn" in text:
                sys.exit(f"containers: {what}: wanted \"{wanted}\" and no warnings:\n{text}")
            say(f"ok: {what}: " + ("tdrun doctor" if doctor else f"training, two ranks on each of {len(nodes)} nodes"))
    finally:
        if os.path.exists(secret):
            os.remove(secret)
        hosts.close()


def check_nodes(root):
    reason = network_hosts.enter()
    if reason:
        say(f"not checked: several nodes: {reason}")
        return
    image = Image(root, made=True)
    image.user, image.home = image.lookup("tandem")
    image.workdir = image.home
    run_nodes(image, services_of_compose(), 1000, 0o400, "compose.yaml")
    run_nodes(image, pods_of_manifest(), 0, 0o440, "the manifest for Kubernetes")


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as file:
        return [int(word) for word in file.read().split()]


def size_of(root):
    return int(run("du", "-sxm", root, capture_output=True).stdout.split()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="do it: it takes minutes and hundreds of megabytes")
    parser.add_argument("--work", metavar="DIR", help="where to build (a temporary folder, which is removed)")
    parser.add_argument("--keep", action="store_true", help="keep what was built, and go on from a base in DIR")
    parser.add_argument("--check-nodes", metavar="ROOT", help="only run several nodes in this image")
    parser.add_argument("--verbose", action="store_true", help="print each step in full")
    options = parser.parse_args()
    if not (options.long or os.environ.get("TD_TEST_LONG") == "1"):
        skip("it takes minutes; --long, or TD_TEST_LONG=1, runs it")
    if options.check_nodes:
        check_nodes(os.path.abspath(options.check_nodes))
        return
    if os.getuid():
        skip("it needs root, for chroot and mounts")
    for program in ("debootstrap", "apt-get", "unshare", "chroot"):
        if not shutil.which(program, path=PATH):
            skip(f"there is no program {program}")
    base = dockerfile.read(os.path.join(ROOT, "Dockerfile"))[0].base
    match = re.fullmatch(r"debian:(\w+)-slim", base)
    if not match:
        skip(f"the base image, {base}, is none of Debian's")
    work = os.path.abspath(options.work or tempfile.mkdtemp(prefix="tandem-image-"))
    try:
        os.makedirs(work, exist_ok=True)
        if os.path.isdir(os.path.join(work, "base")):
            prepare_base(os.path.join(work, "base"))
        else:
            make_base(work, match[1])
        image = build(work, options.verbose)
        check_contents(image)
        check_runs(image)
        run(sys.executable, os.path.abspath(__file__), "--long", "--check-nodes", image.root)
        base_size = size_of(os.path.join(work, "base"))
        say(f"the image has {size_of(image.root)} MiB, its base {base_size} MiB")
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
