"""Examples in docstrings and pages, and the notebook."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import json
import os
import pkgutil
import re
import shutil
import unittest
from typing import Any

from workspace import ROOT, InWorkspace, Workspace

import compress

PAGES = [ROOT / "README.md", ROOT / "python" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = ROOT / "examples" / "minilm.ipynb"


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """Adds the examples in the docstrings of all modules."""
    current: list[Workspace] = []

    def enter(test: Any) -> None:
        current.append(Workspace())
        compress.quantize_dynamic("minilm", "out/int8", embeddings=True) if test.name.endswith("Report") else None

    def leave(_: Any) -> None:
        current.pop().close()

    names = [module.name for module in pkgutil.iter_modules(compress.__path__) if module.name != "__main__"]
    for name in ["compress", *(f"compress.{name}" for name in names)]:
        # Modules without examples are errors for doctest of Python 3.11.
        tests.addTests(doctest.DocTestSuite(name, setUp=enter, tearDown=leave, test_finder=doctest.DocTestFinder(exclude_empty=True)))
    return tests


class Pages(InWorkspace):
    def test_the_code_of_each_page_runs(self) -> None:
        count = 0
        for page in PAGES:
            names: dict[str, Any] = {}
            shutil.rmtree("out", ignore_errors=True)
            for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
                count += 1
                needed = [module for module in ("numpy", "pandas") if f"import {module}" in block or f"to_{module}" in block]
                if is_installed(*needed):
                    with self.subTest(page=page.name, block=block), contextlib.redirect_stdout(io.StringIO()):
                        exec(compile(block, page, "exec"), names)
        self.assertGreater(count, 8)


class Notebook(InWorkspace):
    def test_the_code_of_the_notebook_runs(self) -> None:
        cells = json.loads(NOTEBOOK.read_text())["cells"]
        self.assertEqual([cell.get("outputs", []) for cell in cells if cell.get("outputs")], [], "clear the outputs of the notebook")
        if not is_installed("nbclient", "ipykernel"):
            self.skipTest("nbclient is not installed")
        import nbclient
        import nbformat

        notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)
        nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": os.getcwd()}}).execute()
        shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "execute_result"]
        self.assertTrue(any("srcdoc" in data.get("text/html", "") for data in shown))


if __name__ == "__main__":
    unittest.main()
