"""Checks Python files for names that are imported or assigned and never used, with nothing but the standard library.

    python3 scripts/lib/lint.py FILE...

Names that begin with `_` may stay unused.
"""

import ast
import sys
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def used(tree):
    """The names that are read in a tree, those in annotations and `__all__` included."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
    shared = [node for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
    exports = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"]
    exported = [node.value for export in exports for node in ast.walk(export) if isinstance(node, ast.Constant)]
    return names.union(exported, *(node.names for node in shared))


def own_nodes(function):
    """The nodes of a function without those of the functions and classes in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))


def problems(tree):
    """Line and message of each unused name."""
    read = used(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", None) != "__future__":
            for alias in node.names:
                name = (alias.asname or alias.name).split(".")[0]
                if name not in read and name != "*":
                    yield node.lineno, f"`{name}` is imported and not used"
        if isinstance(node, FUNCTIONS):
            read_inside = used(node)
            for assigned in own_nodes(node):
                unused = isinstance(assigned, ast.Name) and isinstance(assigned.ctx, ast.Store) and assigned.id not in read_inside
                if unused and not assigned.id.startswith("_"):
                    yield assigned.lineno, f"`{assigned.id}` is assigned and not used"


def main():
    found = []
    for path in sys.argv[1:]:
        tree = ast.parse(Path(path).read_text(), path)
        found += [f"{path}:{line}: {message}" for line, message in sorted(problems(tree))]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
