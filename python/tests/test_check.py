"""Checks of parameters."""

from __future__ import annotations

import re
import unittest

from workspace import ROOT

from compress._check import ALIASES


class Aliases(unittest.TestCase):
    def test_aliases_are_those_of_the_program(self) -> None:
        source = (ROOT / "crates" / "core" / "src" / "aliases.rs").read_text(encoding="utf-8")
        pairs = set(re.findall(r'^    \("([^"]+)", "([^"]+)"\),$', source, re.MULTILINE))
        # The program explains `--bits` in src/cli/usage.rs.
        for name, target in ALIASES.items() - {("bits", "scheme")}:
            with self.subTest(name):
                self.assertIn((name.replace("_", "-"), target.replace("_", "-")), pairs)
