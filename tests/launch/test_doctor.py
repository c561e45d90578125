#!/usr/bin/env python3
"""tdrun doctor and tdbench --devices: what this installation has, and what is broken."""

import os
import sys

import harness
from harness import Test

TDBENCH = PLUGINS = None  # set below


class Doctor(Test):
    def doctor(self, *samples):
        """The lines of `tdrun doctor` with these sample plug-ins, as (verdict, subject, text), and its exit code."""
        path = ":".join(os.path.join(PLUGINS, sample) for sample in samples)
        job = self.run_job("doctor", env={"TANDEM_PLUGIN_PATH": path})
        self.assertEqual(job.err, "")
        return [tuple(line.split(None, 2)) for line in job.out.splitlines()], job.code

    def test_nothing_broken(self):
        lines, code = self.doctor("good")
        self.assertEqual(code, 0)
        verdicts = {verdict for verdict, _, _ in lines}
        self.assertLessEqual(verdicts, {"ok", "note"})
        self.assertEqual([subject for _, subject, _ in lines][0], "tandem")
        self.assertIn(("ok", "backend", "native"), lines)
        self.assertIn(("ok", "backend", "good"), lines)
        good = [text for _, subject, text in lines if subject == "plug-in" and text.startswith("good 1.5, ")]
        self.assertEqual(len(good), 1)
        self.assertTrue(good[0].endswith("/tandem_good.so: backends good"), good[0])

    def test_broken_plugins_are_named(self):
        lines, code = self.doctor("good", "old", "failing")
        self.assertEqual(code, 1)
        broken = [text for verdict, _, text in lines if verdict == "FAIL"]
        self.assertEqual(len(broken), 1, broken)
        self.assertIn("too old for this library", broken[0])
        noted = [text for verdict, _, text in lines if verdict == "note"]
        self.assertTrue(any("the driver is version 1; 2 is needed" in text for text in noted), lines)
        self.assertIn(("ok", "backend", "good"), lines)

    def test_devices_are_those_of_tdbench(self):
        lines, _ = self.doctor()
        job = self.run_job("--devices", program=TDBENCH)
        self.assertEqual(job.code, 0)
        devices = [text for _, subject, text in lines if subject == "device"]
        self.assertEqual(job.out.splitlines(), devices)
        self.assertTrue(devices[0].startswith("cpu: "))

    def test_a_missing_driver_is_no_defect(self):
        _, code = self.doctor("good", "failing")
        self.assertEqual(code, 0)

    def test_the_device_of_a_plugin(self):
        lines, code = self.doctor("device")
        self.assertEqual(code, 0)
        self.assertIn(("ok", "device", "device: 3 devices; a sample"), lines)

    def test_mistakes(self):
        job = self.run_job("doctor", "who")
        self.assertEqual(job.code, 2)
        self.assertIn("tdrun ./doctor", job.err)


if __name__ == "__main__":
    TDBENCH = os.path.abspath(sys.argv.pop(2))
    PLUGINS = os.path.abspath(sys.argv.pop(2))
    harness.main()
