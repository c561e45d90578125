"""Reads a Dockerfile and its .dockerignore, in the forms that the ones of this tree have; anything else is an error.

This is what lets the tests run the steps of the Dockerfile itself where there is no container engine.
"""

import fnmatch
import os
import re
import shlex
import json

KNOWN = ("ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "CMD")


class Unknown(Exception):
    """Something that this reader does not know."""


class Stage:
    """One FROM and what follows: steps is a list of (instruction, value)."""

    def __init__(self, base, name):
        self.base = base
        self.name = name
        self.steps = []

    def values(self, instruction):
        return [value for name, value in self.steps if name == instruction]


def logical_lines(text):
    """Lines without comments, those that end with a backslash joined to the next one."""
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not line.strip() and not joined):
            continue
        if line.endswith("\\"):
            joined += line[:-1].strip() + " "
            continue
        yield (joined + line.strip()).strip()
        joined = ""
    if joined:
        raise Unknown("the last line ends with a backslash")


def read_copy(value):
    """(stage or None, sources, destination)"""
    words = shlex.split(value)
    stage = None
    if words and words[0].startswith("--from="):
        stage = words.pop(0)[len("--from="):]
    if len(words) < 2 or any(word.startswith("--") for word in words):
        raise Unknown(f"COPY {value}")
    if len(words) > 2 and not words[-1].endswith("/"):
        raise Unknown(f"COPY {value}: several sources need a folder, which ends with a slash")
    return stage, words[:-1], words[-1]


def read_env(value):
    """[(name, text)] of NAME=VALUE ..."""
    pairs = [word.partition("=") for word in shlex.split(value)]
    if not all(equals for _, equals, _ in pairs):
        raise Unknown(f"ENV {value}: wanted NAME=VALUE")
    return [(name, text) for name, _, text in pairs]


READERS = {"COPY": read_copy, "ENV": read_env, "CMD": json.loads}


def read(path, **arguments):
    """The stages, in order. ARG before the first FROM has defaults, which `arguments` replace."""
    stages = []
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for line in logical_lines(text):
        name, _, value = line.partition(" ")
        value = value.strip()
        if name not in KNOWN or not value:
            raise Unknown(line)
        if name == "ARG":
            argument, equals, default = value.partition("=")
            if stages or not equals:
                raise Unknown(line)
            arguments.setdefault(argument, default)
        elif name == "FROM":
            value = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], value)
            match = re.fullmatch(r"(\S+)(?: AS (\w+))?", value)
            if not match:
                raise Unknown(line)
            stages.append(Stage(match[1], match[2]))
        elif not stages:
            raise Unknown(f"{line}: there is no FROM before it")
        else:
            stages[-1].steps.append((name, READERS.get(name, str)(value)))
    return stages


def packages(stage):
    """What the RUN steps install by apt-get install."""
    found = []
    for command in stage.values("RUN"):
        for part in command.split("&&"):
            words = shlex.split(part)
            if words[:2] == ["apt-get", "install"]:
                found += [word for word in words[2:] if not word.startswith("-")]
    return found


class Context:
    """The files that a build sees: those of a folder which its .dockerignore leaves."""

    def __init__(self, folder):
        self.folder = folder
        self.named, self.patterns = set(), []
        with open(os.path.join(folder, ".dockerignore"), encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
        if not lines or lines[0] != "*":
            raise Unknown(".dockerignore: its first line is not *")
        for line in lines[1:]:
            if line.startswith("!"):
                self.named.add(line[1:])
            elif line.startswith("**/") and "/" not in line[3:]:
                self.patterns.append(line[3:])
            else:
                raise Unknown(f".dockerignore: {line}")

    def ignored(self, name):
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)

    def has(self, path):
        """Whether COPY finds this path."""
        return (
            path.split("/")[0] in self.named
            and not any(self.ignored(name) for name in path.split("/"))
            and os.path.exists(os.path.join(self.folder, path))
        )
