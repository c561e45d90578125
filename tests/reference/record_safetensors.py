#!/usr/bin/env python3
"""Writes files in the safetensors format, as the published description of the format has it, for
tests/test_safetensors.c. Nothing but the standard library is used; numbers are packed by struct.

    record_safetensors.py              writes tests/reference/safetensors/*.safetensors
    record_safetensors.py --read FILE  prints the header of a file and a sum over each tensor's bytes,
                                       checked as strictly as the reference implementation does
"""

import argparse
import hashlib
import json
import struct
import sys
from pathlib import Path

WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "U32": 4, "U64": 8, "C64": 8,
}  # fmt: skip


def pack(dtype, values):
    """The bytes of a list of numbers; bf16 are the upper halves of f32, which lose no bit here."""
    if dtype == "BF16":
        return b"".join(struct.pack("<f", v)[2:] for v in values)
    if dtype == "C64":
        return b"".join(struct.pack("<ff", v.real, v.imag) for v in values)
    code = {
        "F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b",
        "U8": "B", "BOOL": "?", "U32": "I", "U64": "Q",
    }[dtype]  # fmt: skip
    return struct.pack(f"<{len(values)}{code}", *values)


def entries_of(tensors):
    """Header entries and data, in the order of the list: (name, dtype, shape, values)."""
    header, data = {}, b""
    for name, dtype, shape, values in tensors:
        begin = len(data)
        data += pack(dtype, values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    return header, data


def file_of(text, data, pad_to=8):
    text = text.encode() if isinstance(text, str) else text
    text += b" " * (-len(text) % pad_to)
    return struct.pack("<Q", len(text)) + text + data


ALL = [
    ("f64", "F64", [2], [0.1, -1e300]),
    ("i64", "I64", [2], [-(2**63), 2**63 - 1]),
    ("u64", "U64", [2], [0, 2**64 - 1]),
    ("c64", "C64", [2], [1.5 - 2.5j, 0.25 + 4j]),
    ("f32", "F32", [2, 3], [0.0, 1.0, 2.0, 3.0, 4.5, -5.25]),
    ("i32", "I32", [2], [-(2**31), 2**31 - 1]),
    ("u32", "U32", [2], [0, 2**32 - 1]),
    ("f16", "F16", [3], [1.0, -2.5, 65504.0]),
    ("bf16", "BF16", [2], [1.0, -3.5]),
    ("i16", "I16", [2], [-32768, 32767]),
    ("i8", "I8", [3], [-128, 0, 127]),
    ("u8", "U8", [3], [0, 1, 255]),
    ("bool", "BOOL", [3], [True, False, True]),
]


def compact(header):
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False)


def files():
    header, data = entries_of(ALL)
    yield "all_dtypes", file_of(compact({"__metadata__": {"format": "pt"}, **header}), data)

    # Keys in another order than the data, fields in another order, and much white space.
    backwards = {
        name: {k: header[name][k] for k in ("data_offsets", "shape", "dtype")}
        for name in reversed(header)
    }
    yield "backwards", file_of(json.dumps(backwards, indent=3), data)

    # A header with more padding than it needs, one without any, and metadata at the end.
    yield "padded", file_of(compact(header), data, 4096)
    last = {**header, "__metadata__": {"note": "behind the tensors", "empty": ""}}
    yield "unpadded", file_of(compact(last), data, 1)

    # Scalars, tensors without elements, and files without any tensor.
    small, small_data = entries_of([
        ("none", "F32", [0], []),
        ("scalar", "F64", [], [3.25]),
        ("none_of_many", "I64", [4, 0, 7], []),
        ("one", "I8", [1, 1, 1, 1, 1, 1, 1, 1], [-7]),
        ("none_at_the_end", "BOOL", [0, 2], []),
    ])  # fmt: skip
    yield "small", file_of(compact(small), small_data)
    yield "nothing", file_of("{}", b"")
    yield "only_metadata", file_of('{"__metadata__":{"a":"b"}}', b"")

    # Names beyond ASCII: as they are, and as escape sequences.
    names = ["größe", "重み.0", "😀", 'quote"back\\slash', "tab\tline\nend", "a/b c"]
    odd, odd_data = entries_of([(n, "U8", [1], [i]) for i, n in enumerate(names)])
    notes = {"__metadata__": {"spräche": "日本語 😀"}}
    yield "unicode", file_of(compact({**notes, **odd}), odd_data)
    yield "unicode_escaped", file_of(json.dumps({**notes, **odd}), odd_data)

    # A field that readers do not know, with all kinds of values in it.
    extra = {"x": {**header["f64"], "future": [None, True, {"a": [-1.5e3, "\\"]}], "z": {}}}
    yield "unknown_field", file_of(compact(extra), data[:16])


def read(path):
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text, data = raw[8 : 8 + length], raw[8 + length :]
    assert length <= 100_000_000 and len(text) == length and text.startswith(b"{")
    assert (8 + length) % 8 == 0, "the data are not aligned"

    def unique(pairs):
        assert len({k for k, _ in pairs}) == len(pairs), "a key stands twice"
        return dict(pairs)

    header = json.loads(text.decode(), object_pairs_hook=unique)
    notes = header.pop("__metadata__", {})
    assert all(isinstance(v, str) for v in notes.values())
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        size = WIDTHS[entry["dtype"]]
        assert begin == end and begin % size == 0, f"{name}: gap, overlap or not aligned"
        for n in entry["shape"]:
            size *= n
        assert stop - begin == size, f"{name}: wrong size"
        end = stop
    assert end == len(data), "bytes are left over"
    digest = notes.get("tandem.sha256")
    if digest:
        zeros = raw[: 8 + length].replace(digest.encode(), b"0" * 64) + data
        assert hashlib.sha256(zeros).hexdigest() == digest, "the checksum is wrong"
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        print(name, entry["dtype"], entry["shape"], sum(data[begin:stop]))
    for key, value in notes.items():
        print(f"{key} = {value}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--read", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.read:
        return read(arguments.read)
    directory = Path(__file__).resolve().parent / "safetensors"
    directory.mkdir(exist_ok=True)
    for name, content in files():
        (directory / f"{name}.safetensors").write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
