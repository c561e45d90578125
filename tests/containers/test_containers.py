#!/usr/bin/env python3
"""The Dockerfile, compose.yaml, tandem.def and the manifest for Kubernetes agree with the tree and with each other.

usage: test_containers.py path/to/tdrun [test…]

Nothing is built here: build_in_chroot.py does that. The manifest is also checked against the schemas of Kubernetes
where node finds the npm packages kubernetes-models and yaml (NODE_PATH); with TD_TEST_LONG=1 they are installed to a
temporary folder for that.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

import dockerfile
import plain_yaml

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MANIFEST = os.path.join(ROOT, "examples/kubernetes/ddp.yaml")
TDRUN = None


def read_file(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def commands(text):
    """The commands of a shell script, a list of words each; "a && b" is two."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [part for line in joined.splitlines() for part in line.split("&&")]
    return [words for words in map(shlex.split, lines) if words]


def program_of(command):
    """The program that tdrun starts, and tdrun's options before it."""
    names = []
    words = iter(command[1:])
    for word in words:
        if not word.startswith("--"):
            return word, names
        names.append(word)
        next(words)  # all of these options have a value
    raise AssertionError(f"no program in {command}")


class Checks(unittest.TestCase):
    def check_command(self, command):
        help_text = subprocess.run([TDRUN, "--help"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(command[0], "tdrun")
        program, options = program_of(command)
        for option in options:
            self.assertIn(f" {option} ", help_text)
        self.assertIn(program, self.programs())

    def stages(self):
        return dockerfile.read(os.path.join(ROOT, "Dockerfile"))

    def programs(self):
        """The programs of the image."""
        copied = [words for command in self.stages()[0].values("RUN") for words in commands(command)
                  if words[0] == "cp" and words[-1] == "/image/usr/local/bin"]
        return [os.path.basename(path) for path in copied[0][1:-1]]

    def check_variables(self, environment, count):
        """What a node finds in its environment; the secret is no part of that."""
        self.assertEqual(environment["PET_NNODES"], str(count))
        self.assertNotIn("TANDEM_SECRET", environment)
        self.assertTrue(environment["TANDEM_SECRET_FILE"].startswith("/run/"))
        self.assertNotIn("TANDEM_INSECURE", environment)


class Dockerfile(Checks):
    def test_packages_are_those_of_setup(self):
        build, final = self.stages()
        needed = set(re.findall(r"^need (\S+)", read_file("scripts/setup"), re.MULTILINE))
        for_tests = {"dataset-fashion-mnist", "python3", "iproute2"}
        self.assertEqual(set(dockerfile.packages(build)), needed - for_tests)
        libraries = {name[:-len("-dev")] for name in dockerfile.packages(build) if name.endswith("-dev")}
        for name in dockerfile.packages(final):
            self.assertTrue(any(name.startswith(library) for library in libraries), name)
            self.assertFalse(name.endswith("-dev"))
        self.assertEqual(len(dockerfile.packages(final)), len(libraries))

    def test_what_is_copied_exists(self):
        context = dockerfile.Context(ROOT)
        stages = {stage.name for stage in self.stages()}
        for stage in self.stages():
            for origin, sources, _ in stage.values("COPY"):
                self.assertIn(origin, stages)
                for source in sources:
                    self.assertTrue(origin or context.has(source), source)

    def test_the_sources_are_complete(self):
        """CMake finds all files that it wants among those that are copied."""
        if not shutil.which("cmake") or not shutil.which("ninja"):
            self.skipTest("there is no cmake or no ninja")
        with tempfile.TemporaryDirectory(prefix="tandem-context-") as folder:
            for _, sources, destination in [value for value in self.stages()[0].values("COPY") if not value[0]]:
                for source in sources:
                    to = os.path.join(folder, destination, os.path.basename(source) if destination.endswith("/") else "")
                    os.makedirs(os.path.dirname(to.rstrip("/")), exist_ok=True)
                    os.symlink(os.path.join(ROOT, source), to.rstrip("/"))
            configure = next(words for command in self.stages()[0].values("RUN") for words in commands(command)
                             if words[:2] == ["cmake", "--preset"])
            done = subprocess.run([*configure, "-DTANDEM_NVCC=/nonexistent"], cwd=folder, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_user_is_an_ordinary_one(self):
        final = self.stages()[-1]
        self.assertEqual(final.values("USER"), ["tandem"])
        self.assertIn("useradd --uid 1000 --create-home tandem", " ".join(final.values("RUN")))
        after = [name for name, _ in final.steps[final.steps.index(("USER", "tandem")):]]
        self.assertNotIn("RUN", after)
        self.assertEqual(final.values("CMD"), [["tdrun", "doctor"]])

    def test_no_secret_gets_in(self):
        text = read_file("Dockerfile") + read_file("tandem.def")
        self.assertNotIn("SECRET", text.upper())
        context = dockerfile.Context(ROOT)
        self.assertNotIn("tandem-secret", context.named)
        self.assertIn("/tandem-secret", read_file(".gitignore").splitlines())

    def test_the_lists_of_packages_are_removed_where_they_are_made(self):
        for stage in self.stages():
            for command in stage.values("RUN"):
                if "apt-get update" in command:
                    self.assertIn("rm -rf /var/lib/apt/lists/*", command)


class Reader(unittest.TestCase):
    """What the readers of these files do not know, they refuse."""

    def read_dockerfile(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write(text)
            file.flush()
            return dockerfile.read(file.name)

    def test_steps(self):
        stages = self.read_dockerfile("ARG A=x\n# a comment\nFROM ${A} AS b\nRUN one \\\n  && two\nCOPY --from=b /a /b\n")
        self.assertEqual([(stage.base, stage.name) for stage in stages], [("x", "b")])
        self.assertEqual(stages[0].steps, [("RUN", "one && two"), ("COPY", ("b", ["/a"], "/b"))])

    def test_unknown_steps(self):
        for text in ("RUN x\n", "FROM x\nADD a b\n", "FROM x\nCOPY --chown=1 a b\n", "FROM x\nCOPY a\n", "FROM x\nENV A b\n",
                     "FROM x y z\n", "FROM x\nRUN a \\\n", "FROM x\nCOPY a b c\n", "from x\n"):
            with self.assertRaises((dockerfile.Unknown, json.JSONDecodeError), msg=text):
                self.read_dockerfile(text)

    def read_yaml(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            return plain_yaml.read(file.name)

    def test_yaml(self):
        text = 'a:\n  - b: 1\n    c: "x: y"\n  - d\nlist: ["a", "b"]\n---\ne:\n- true\n'
        self.assertEqual(self.read_yaml(text), [{"a": [{"b": 1, "c": "x: y"}, "d"], "list": ["a", "b"]}, {"e": [True]}])

    def test_unknown_yaml(self):
        for text in ("a: &x 1\n", "a: *x\n", "a: |\n  b\n", "a: 0440\n", "a: 1.0\n", "a:\n", "a: 1\na: 2\n", "a: {b: 1}\n",
                     "a: b # c\n", "a:\n\tb: 1\n", "a: yes\n", "a: 1\n   b: 2\n", "a: 'x'\n", "a: b: c\n"):
            with self.assertRaises((plain_yaml.Unknown, json.JSONDecodeError), msg=text):
                self.read_yaml(text)


class Compose(Checks):
    def setUp(self):
        (self.compose,) = plain_yaml.read(os.path.join(ROOT, "compose.yaml"))
        self.services = self.compose["services"]

    def test_the_nodes(self):
        ranks = {}
        for name, service in self.services.items():
            self.assertEqual(service["hostname"], name)
            self.check_command(service["command"])
            self.check_variables(service["environment"], len(self.services))
            ranks[int(service["environment"]["PET_NODE_RANK"])] = name
        self.assertEqual(sorted(ranks), list(range(len(self.services))))
        for service in self.services.values():
            self.assertEqual(service["environment"]["PET_MASTER_ADDR"], ranks[0])
        self.assertEqual(len({json.dumps(service["command"]) for service in self.services.values()}), 1)

    def test_the_secret_is_a_file(self):
        for service in self.services.values():
            (secret,) = service["secrets"]
            self.assertEqual(service["environment"]["TANDEM_SECRET_FILE"], f"/run/secrets/{secret}")
            self.assertEqual(self.compose["secrets"][secret], {"file": "./tandem-secret"})

    def test_the_time_to_end(self):
        for service in self.services.values():
            self.assertGreater(int(service["stop_grace_period"].rstrip("s")), 30)  # --shutdown-timeout


class Definition(unittest.TestCase):
    """tandem.def does what the Dockerfile does."""

    def sections(self):
        """[(stage, section, text)]"""
        found, stage, name = [], None, None
        for line in read_file("tandem.def").splitlines():
            if re.match(r"(Bootstrap|From): ", line):
                name = None
            elif line.startswith("Stage: "):
                stage = line[len("Stage: "):]
            elif line.startswith("%"):
                name = line[1:]
                found.append([stage, name, ""])
            elif name:
                found[-1][2] += line + "\n"
        return {(stage, name): text for stage, name, text in found}

    def test_the_same_steps(self):
        stages = dockerfile.read(os.path.join(ROOT, "Dockerfile"))
        sections = self.sections()
        for stage, post in (stages[0], sections["build", "post"]), (stages[1], sections["final", "post"]):
            def kept(all_words):
                return [words for words in all_words if words[0] not in ("rm", "set", "cd", "useradd", "ldconfig")]
            steps = [words for command in stage.values("RUN") for words in commands(command)]
            self.assertEqual(kept(commands(post)), kept(steps))

    def test_the_same_files(self):
        stages = dockerfile.read(os.path.join(ROOT, "Dockerfile"))
        copied = [source for _, sources, _ in stages[0].values("COPY") for source in sources]
        files = [words for words in commands(self.sections()["build", "files"])]
        self.assertEqual([source for source, _ in files], copied)
        for source, destination in files:
            self.assertEqual(destination, f"/tandem/{source}")
        bases = re.findall(r"^From: (.*)$", read_file("tandem.def"), re.MULTILINE)
        self.assertEqual(bases, [stage.base for stage in stages])

    def test_what_the_image_gets(self):
        copied = {words[0] for words in commands(self.sections()["final", "files from build"])}
        programs = {f"/image/usr/local/bin/{name}" for name in Checks().programs()}
        self.assertEqual(copied, programs | {"/image/usr/local/lib"})


class Kubernetes(Checks):
    def setUp(self):
        self.service, self.job = plain_yaml.read(MANIFEST)
        self.pod = self.job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.environment = {item["name"]: item.get("value") for item in self.container["env"]}

    def test_the_number_of_pods(self):
        spec = self.job["spec"]
        self.assertEqual(spec["completionMode"], "Indexed")
        self.assertEqual(spec["completions"], spec["parallelism"])
        self.check_variables(self.environment, spec["completions"])
        self.check_command(self.container["command"])
        self.assertEqual(spec["backoffLimit"] % spec["completions"], 0)

    def test_pod_0_is_found(self):
        name = self.job["metadata"]["name"]
        self.assertEqual(self.service["spec"]["clusterIP"], "None")
        self.assertTrue(self.service["spec"]["publishNotReadyAddresses"])
        self.assertEqual(self.service["spec"]["selector"], {"job-name": name})
        self.assertEqual(self.pod["subdomain"], self.service["metadata"]["name"])
        self.assertEqual(self.environment["PET_MASTER_ADDR"], f"{name}-0.{self.pod['subdomain']}")
        rank = next(item for item in self.container["env"] if item["name"] == "PET_NODE_RANK")
        self.assertEqual(rank["valueFrom"]["fieldRef"]["fieldPath"],
                         "metadata.annotations['batch.kubernetes.io/job-completion-index']")
        (first,) = self.pod["initContainers"]
        self.assertEqual(first["env"], [{"name": "PET_MASTER_ADDR", "value": self.environment["PET_MASTER_ADDR"]}])

    def test_the_port(self):
        options = read_file("src/launch/options.c")
        default = int(re.search(r"DEFAULT_PORT = (\d+)", options)[1])
        self.assertEqual([port["port"] for port in self.service["spec"]["ports"]], [default])
        self.assertEqual([port["containerPort"] for port in self.container["ports"]], [default])

    def test_the_secret_is_a_file(self):
        (mount,) = self.container["volumeMounts"]
        (volume,) = self.pod["volumes"]
        self.assertEqual(mount["name"], volume["name"])
        self.assertTrue(mount["readOnly"])
        self.assertEqual(self.environment["TANDEM_SECRET_FILE"], mount["mountPath"] + "/secret")
        self.assertEqual(volume["secret"]["defaultMode"], 0o440)
        self.assertIn(f"create secret generic {volume['secret']['secretName']} --from-file=secret=", read_file(MANIFEST))

    def test_the_end(self):
        self.assertGreater(self.pod["terminationGracePeriodSeconds"], 30)  # --shutdown-timeout
        self.assertEqual(self.pod["restartPolicy"], "Never")

    def test_rights(self):
        self.assertTrue(self.pod["securityContext"]["runAsNonRoot"])
        for container in (self.container, *self.pod["initContainers"]):
            self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
            self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"]})
            self.assertEqual(container["image"], plain_yaml.read(os.path.join(ROOT, "compose.yaml"))[0]["services"]["node0"]["image"])

    # ---- The schemas ----

    def packages(self):
        """The environment in which node finds the packages."""
        if not shutil.which("node"):
            self.skipTest("there is no node")
        probe = ["node", "-e", "require('kubernetes-models'); require('yaml')"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return dict(os.environ)
        if os.environ.get("TD_TEST_LONG") != "1" or not shutil.which("npm"):
            self.skipTest("node does not find the npm packages kubernetes-models and yaml (NODE_PATH)")
        folder = tempfile.mkdtemp(prefix="tandem-npm-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        done = subprocess.run(["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "kubernetes-models@4", "yaml@2"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            self.skipTest(f"npm cannot install kubernetes-models: {done.stderr[-200:]}")
        return {**os.environ, "NODE_PATH": os.path.join(folder, "node_modules")}

    def validate(self, *files, env):
        return subprocess.run(["node", os.path.join(HERE, "check_manifests.js"), *files], env=env, capture_output=True,
                              text=True, check=False)

    def test_the_schemas_of_kubernetes(self):
        environment = self.packages()
        done = self.validate(MANIFEST, os.path.join(ROOT, "compose.yaml"), env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        same = plain_yaml.read(MANIFEST) + plain_yaml.read(os.path.join(ROOT, "compose.yaml"))
        self.assertEqual(json.loads(done.stdout), same)
        for right, wrong, complaint in (
            ("completionMode:", "completionmode:", "completionmode is no field"),
            ("completions: 2", 'completions: "2"', "must be integer"),
            ("secretName:", "secretname:", "secretname is no field"),
            ('drop: ["ALL"]', 'dropped: ["ALL"]', "dropped is no field"),
            ("fieldPath:", "fieldpath:", "required property fieldPath"),
            ('cpu: "2"', "cpu: two", "quantity"),
        ):
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(read_file(MANIFEST).replace(right, wrong))
                file.flush()
                done = self.validate(file.name, env=environment)
            self.assertEqual(done.returncode, 1, wrong)
            self.assertIn(complaint, done.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    TDRUN = os.path.abspath(sys.argv.pop(1))
    unittest.main()
