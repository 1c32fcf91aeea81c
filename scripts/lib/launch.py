"""Runs one of several scripts by name: `scripts/goldens models` is the module `lib.goldens.models`.

The scripts of a command are the modules of the folder of this package with its name.
"""

import ast
import runpy
import sys
from pathlib import Path


def names(command: str) -> dict[str, Path]:
    """The scripts of a command by name."""
    folder = Path(__file__).parent / command
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("*.py"))}


def summary(path: Path) -> str:
    """The first sentence of the docstring of a module."""
    return " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())


def launch(usage: str, prepare=lambda name: None) -> None:
    """Runs the script that the first argument names; `prepare` gets its name before."""
    command, every = Path(sys.argv[0]).name, names(Path(sys.argv[0]).name)
    name = sys.argv[1] if sys.argv[1:] else "--help"
    if name in ("-h", "--help"):
        width = max(map(len, every)) + 2
        print(usage.strip(), "", *(f"{name:{width}}{summary(path)}" for name, path in every.items()), sep="\n")
        return
    if name not in every:
        sys.exit(f"scripts/{command} has no script `{name}`: {', '.join(every)}")
    prepare(name)
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    runpy.run_module(f"lib.{command}.{every[name].stem}", run_name="__main__")
