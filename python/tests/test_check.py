"""Checks of parameters."""

from __future__ import annotations

import importlib.util
import re
import unittest

from workspace import ROOT

from compress._check import ALIASES, matches


class Aliases(unittest.TestCase):
    def test_aliases_are_those_of_the_program(self) -> None:
        source = (ROOT / "crates" / "core" / "src" / "aliases.rs").read_text(encoding="utf-8")
        pairs = set(re.findall(r'^    \("([^"]+)", "([^"]+)"\),$', source, re.MULTILINE))
        # The program explains `--bits` in src/cli/usage.rs.
        for name, target in ALIASES.items() - {("bits", "scheme")}:
            with self.subTest(name):
                self.assertIn((name.replace("_", "-"), target.replace("_", "-")), pairs)


class Types(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("numpy"), "NumPy is not installed")
    def test_numbers_of_numpy_have_the_types_of_python(self) -> None:
        import numpy

        values = [numpy.int64(5), numpy.float32(0.5), numpy.True_, numpy.array(5), numpy.array([5, 6])]
        self.assertEqual([matches(value, int) for value in values], [True, False, False, True, False])
        self.assertEqual([matches(value, float) for value in values], [True, True, False, True, False])
        self.assertEqual([matches(value, bool) for value in values], [False, False, True, False, False])
