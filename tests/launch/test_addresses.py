#!/usr/bin/env python3
"""Jobs that meet at IPv6 addresses, in each way to write one."""

import os
import socket
import sys

import harness
from harness import Test

WORKER = None  # set below


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def link_local():
    """An address with a zone, "fe80::1%eth0", where this host has one; or None."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            for line in file:
                digits, _, _, _, _, name = line.split()
                if digits.startswith("fe80"):
                    groups = [digits[i : i + 4] for i in range(0, 32, 4)]
                    return ":".join(groups) + "%" + name
    except OSError:
        pass
    return None


class Addresses(Test):
    def meets(self, *place, address):
        job = self.run_job("--nproc-per-node=2", *place, WORKER, "", "-1")
        self.check_code(job, 0)
        shown = self.run_job(*place, "sh", "-c", "echo $MASTER_ADDR $TANDEM_AGENT_STORE")
        given, store = shown.out.split()
        self.assertEqual(given, address)
        self.assertRegex(store, r"^(\[[^]]+\]|[^:]+):[0-9]+$")

    def setUp(self):
        super().setUp()
        if not has_ipv6():
            self.skipTest("this host has no ::1")

    def test_master_addr(self):
        for written, address in (
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("0:0:0:0:0:0:0:1", "0:0:0:0:0:0:0:1"),
            ("::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        ):
            with self.subTest(written):
                self.meets(f"--master-addr={written}", "--master-port=0", address=address)

    def test_rdzv_endpoint(self):
        for written, address in (("[::1]:0", "::1"), ("[0::1]:0", "0::1")):
            with self.subTest(written):
                self.meets(f"--rdzv-endpoint={written}", address=address)
                self.meets("--rdzv-backend=c10d", f"--rdzv-endpoint={written}", address=address)

    def test_zone(self):
        address = link_local()
        if not address:
            self.skipTest("this host has no link-local address")
        self.meets(f"--master-addr={address}", "--master-port=0", address=address)

    def test_two_nodes(self):
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
        jobs = [
            self.start(
                "--nnodes=2", f"--node-rank={node}", f"--master-addr={address}",
                f"--master-port={port}", WORKER, "", "-1", env={"TANDEM_SECRET": "two nodes"},
            )  # fmt: skip
            for node, address in enumerate(("::1", "[0:0::1]"))
        ]
        for job in jobs:
            self.check_code(job.finish(), 0)
        self.check_nothing_left()


if __name__ == "__main__":
    WORKER = os.path.abspath(sys.argv.pop(2))
    harness.main()
