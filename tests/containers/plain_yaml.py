"""Reads the YAML of this tree, which is a small part of the language: block mappings and lists, lists of texts in
brackets, and scalars on one line. Anything else is an error, so that no file means something else than is read here.
check_manifests.js, where it can run, compares the result with that of a whole reader of YAML.
"""

import json
import re


class Unknown(Exception):
    pass


def scalar(text):
    if text.startswith('"'):
        return json.loads(text)
    if text.startswith("["):
        return json.loads(text)
    if re.fullmatch(r"-?(0|[1-9]\d*)", text):
        return int(text)
    if re.fullmatch(r"[-+.]?\d[\d._xobe+-]*", text):  # versions of YAML differ on these
        raise Unknown(f"{text} is a number, or is it?")
    if text.lower() in ("yes", "no", "on", "off", "y", "n", "null", "~"):
        raise Unknown(text)
    if text in ("true", "false"):
        return text == "true"
    if not text or text[0] in "&*!|>'%@`{},?-" or ": " in text or " #" in text or text.endswith(":"):
        raise Unknown(text)
    return text


def lines_of(text):
    """(indent, text) of each line that says something."""
    found = []
    for line in text.splitlines():
        bare = line.lstrip(" ")
        if bare and not bare.startswith("#"):
            if "\t" in line:
                raise Unknown(line)
            found.append((len(line) - len(bare), bare.rstrip()))
    return found


def block(lines):
    """Reads the block at the beginning of `lines`, which it takes away."""
    indent = lines[0][0]
    return items(lines, indent) if lines[0][1].startswith("- ") else mapping(lines, indent)


def items(lines, indent):
    result = []
    while lines and lines[0][0] == indent and lines[0][1].startswith("- "):
        rest = lines[0][1][2:]
        if re.match(r"[\w.-]+:( |$)", rest):
            lines[0] = (indent + 2, rest)
            result.append(mapping(lines, indent + 2))
        else:
            lines.pop(0)
            result.append(scalar(rest))
    return result


def mapping(lines, indent):
    result = {}
    while lines and lines[0][0] == indent and not lines[0][1].startswith("- "):
        match = re.fullmatch(r"([\w.-]+):(?: (.+))?", lines[0][1])
        if not match or match[1] in result:
            raise Unknown(lines[0][1])
        lines.pop(0)
        if match[2]:
            result[match[1]] = scalar(match[2])
            continue
        deeper = lines and (lines[0][0] > indent or (lines[0][0] == indent and lines[0][1].startswith("- ")))
        if not deeper:
            raise Unknown(f"{match[1]}: nothing follows")
        result[match[1]] = block(lines)
    if lines and lines[0][0] > indent:
        raise Unknown(lines[0][1])
    return result


def read(path):
    """The documents of a file."""
    with open(path, encoding="utf-8") as file:
        parts = re.split(r"(?m)^---$", file.read())
    documents = []
    for part in parts:
        lines = lines_of(part)
        documents.append(block(lines))
        if lines:
            raise Unknown(lines[0][1])
    return documents
