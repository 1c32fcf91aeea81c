"""The shared package of the scripts: folders of the tree, and the access to the commands in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "scripts"
GOLDEN = ROOT / "tests" / "golden"
COMPRESS = ROOT / "target" / "release" / "compress"
