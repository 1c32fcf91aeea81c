"""A working directory with small models, for tests and examples."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
FILES = {
    "minilm/config.json": "models/bert/config.json",
    "minilm/model.safetensors": "models/bert/model.safetensors",
    "minilm/tokenizer.json": "evaluation/word-pieces.json",
    "classifier/tokenizer.json": "evaluation/word-pieces.json",
    "llama/config.json": "models/llama/config.json",
    "llama/model.safetensors": "models/llama/model.safetensors",
    "llama/tokenizer.json": "evaluation/characters.json",
    "classifier/config.json": "models/bert-sequence-classification/config.json",
    "classifier/model.safetensors": "models/bert-sequence-classification/model.safetensors",
    "book.txt": "evaluation/book.txt",
    "pairs.tsv": "evaluation/pairs.tsv",
}


class Workspace:
    """Changes to a new folder with the models `minilm`, `llama` and `classifier`, and `tmp` for temporary files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="compress-test-"))
        for target, source in FILES.items():
            path = self.folder / target
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(GOLDEN / source, path)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self._before = os.getcwd(), tempfile.tempdir, os.environ.get("COMPRESS_CACHE")
        os.chdir(self.folder)
        tempfile.tempdir = str(self.temporary)
        os.environ["COMPRESS_CACHE"] = str(self.folder / "cache")

    def close(self) -> None:
        """Returns to the previous folder and deletes this one."""
        folder, tempfile.tempdir, cache = self._before
        os.chdir(folder)
        if cache is None:
            del os.environ["COMPRESS_CACHE"]
        else:
            os.environ["COMPRESS_CACHE"] = cache
        shutil.rmtree(self.folder)

    def left(self) -> list[str]:
        """Temporary files that have not been deleted."""
        return sorted(os.listdir(self.temporary))


class InWorkspace(unittest.TestCase):
    """Tests in a new working directory. Each test fails if it leaves temporary files."""

    def setUp(self) -> None:
        self.workspace = Workspace()
        self.addCleanup(self.workspace.close)
        self.addCleanup(lambda: self.assertEqual(self.workspace.left(), []))
