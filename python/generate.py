#!/usr/bin/env python3
"""Write the generated modules of the Python package: types of recipes and reports, and one function for each pass.

    python/generate.py [--check] [--program PROGRAM]

`compress schema` is the source, so that the package has the options of the program. --check writes nothing, and fails
if a module differs. The program is target/debug/compress, or --program.
"""

import argparse
import difflib
import json
import keyword
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "compress"

HEADER = '''"""{title}

Generated from `compress schema` by python/generate.py.
"""

from __future__ import annotations

{imports}
'''

# Definitions that callers construct by name. All other objects are typed dictionaries.
CLASSES = ["Data", "Evaluate"]
# Properties of recipes that name files. Their schema is that of any string.
PATHS = {"model", "text", "images", "arrays", "labels", "keep", "imatrix", "vocabulary", "config", "cache"}
PATHS |= {"teacher", "teacher_cache", "teacher_logits", "final_checkpoint"}
SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "object": "Mapping[str, Any]"}
# Properties that the functions of passes set from their own parameters.
OWN = {"model", "output", "passes", "data", "sweep"}

# Values in descriptions, from the syntax of the command line and of YAML to that of Python.
VALUES = {
    "a folder, or {model: FOLDER, weight: 1, cache: FOLDER}": '{"model": FOLDER, "weight": 1, "cache": FOLDER}',
    "amount per kind: heads=0.25,mlp=64": 'amount per kind: {"heads": 0.25, "mlp": 64}',
    "as for `--set`": "as for `overrides`",
    "for --resume: steps=N or minutes=N [default: minutes=10]": 'for `resume`: {"steps": N} or {"minutes": N} [default: {"minutes": 10}]',
    "its rank, or {rank: 32, importance: none} to": '{"rank": 32}, or {"rank": 32, "importance": "none"} to',
    "layers=0,2,4, every=2, model=FOLDER, config=FILE (random weights), or eagle3=FILE (": (
        '{"layers": [0, 2, 4]}, {"every": 2}, {"model": FOLDER}, {"config": FILE} (random weights), or {"eagle3": {"vocabulary": FILE}} ('
    ),
    "layers=0.5 (fraction of the parameters of all layers), params=12000000 or bytes=50MB": (
        '{"layers": 0.5} (fraction of the parameters of all layers), {"params": 12000000} or {"bytes": "50MB"}'
    ),
    "macs=0.5 or macs=50%, params=0.5 or latency=0.5": '{"macs": 0.5} or {"macs": "50%"}, {"params": 0.5} or {"latency": 0.5}',
    "or every=K layers": 'or {"every": K} layers',
    "such as en,de": 'such as ["en", "de"]',
    "the fraction of masked tokens, or {fraction: 0.15, mask_token: TOKEN}": '{"fraction": 0.15, "mask_token": TOKEN}',
    "the fraction, or {fraction: 0.5, prompt_tokens: 32, tokens: 64, temperature: 1}": (
        '{"fraction": 0.5, "prompt_tokens": 32, "tokens": 64, "temperature": 1}'
    ),
    "their rank, or {rank: 16, alpha: 32, targets: [PATTERN, ...], merge: false}": '{"rank": 16, "alpha": 32, "targets": [PATTERN, ...], "merge": False}',
    "{flip: true, shift: PIXELS}": '{"flip": True, "shift": PIXELS}',
    "{max_drop: 0.01} or {min_cosine: 0.99}": '{"max_drop": 0.01} or {"min_cosine": 0.99}',
    "{targets: [PATTERN, ...], learning_rate: RATE, weight_decay: DECAY}": '{"targets": [PATTERN, ...], "learning_rate": RATE, "weight_decay": DECAY}',
    "{type: fp8, scales: head} (fp8:head)": '{"type": "fp8", "scales": "head"}',
    "[default: 0.9,0.999]": "[default: [0.9, 0.999]]",
    ": --resume with": ": `resume` with",
}
SYNTAX = re.compile(r"(?<![\w-])\w+=[\w.]|(?<![\w-])--\w|\{\w+:")


def in_python(schema):
    """The schema with values in the syntax of Python in its descriptions."""
    if isinstance(schema, list):
        return [in_python(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: in_python(value) for key, value in schema.items()}
    if isinstance(text := found.get("description"), str):
        text = one_line(text)
        for old, new in VALUES.items():
            text = text.replace(old, new)
        if SYNTAX.search(text):
            sys.exit(f"add the syntax of Python to VALUES of python/generate.py for: {text}")
        found["description"] = text
    return found


def one_line(text):
    return " ".join(text.split()).rstrip(".")


def docstring(text, indent=4):
    """A docstring with lines of at most 110 characters."""
    lines = textwrap.wrap(one_line(text).replace("\\", "\\\\") + ".", 110 - indent - 6, break_long_words=False)
    return " " * indent + '"""' + f"\n{' ' * indent}".join(lines) + '"""\n'


def identifier(name):
    name = name.replace("-", "_")
    return name if not keyword.iskeyword(name) else sys.exit(f"`{name}` is a keyword of Python: rename it in the program")


def camel(name):
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_]", name))


def literal(values):
    return f"Literal[{', '.join(json.dumps(value) for value in values)}]"


def union(parts):
    """The union of types, without repetitions: one literal first, None last."""
    parts = list(dict.fromkeys(member for part in parts for member in part.split(" | ")))
    values = [part[len("Literal[") : -1] for part in parts if part.startswith("Literal[")]
    others = sorted((part for part in parts if not part.startswith("Literal[")), key=lambda part: part == "None")
    return " | ".join([*([f"Literal[{', '.join(values)}]"] if values else []), *others])


class Schema:
    """A JSON Schema as Python types. `mutable`: sequences are lists, for types that are only read."""

    def __init__(self, schema, classes, mutable=False):
        self.root, self.definitions = schema, schema.get("$defs", {})
        self.classes, self.mutable = classes, mutable
        self.dictionaries, self.aliases, self.literals = {}, {}, {}

    def expression(self, schema, name=""):
        """The type of a schema. `name` is for types without a definition."""
        if schema is True:
            return "Any"
        if reference := schema.get("$ref"):
            return self.reference(reference.rsplit("/", 1)[1])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return union(self.expression(part, name) for part in schema[key])
        if "enum" in schema or "const" in schema:
            return literal(schema.get("enum", [schema.get("const")]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return union(self.expression({**schema, "type": each}, name) for each in kind)
        if kind == "array":
            if items := schema.get("prefixItems"):
                return f"tuple[{', '.join(self.expression(item, name) for item in items)}]"
            items = schema["items"]
            if self.mutable and schema.get("minItems") and schema.get("minItems") == schema.get("maxItems"):
                return f"tuple[{', '.join([self.expression(items, name)] * schema['minItems'])}]"
            return f"Sequence[{self.expression(items, name)}]"
        if kind == "object" and "properties" in schema:
            return self.dictionary(name, schema)
        if kind == "object" and "additionalProperties" in schema:
            return f"Mapping[str, {self.expression(schema['additionalProperties'], name)}]"
        return SCALARS[kind] if kind else "Any"

    def reference(self, name):
        """The name of a definition, or its type if it is an alias of one."""
        definition = self.definitions[name]
        if name == "Data":
            return "Samples"
        if name in self.classes or name in ("Step", "Export"):
            return name
        if definition.get("type") == "object":
            return self.dictionary(name, definition)
        variants = definition.get("oneOf", [])
        if not variants or not any("const" in part or "properties" in part for part in variants):
            return self.expression(definition, name)
        if all("const" in part for part in variants):
            self.literals[name] = definition
        elif name not in self.aliases:
            self.aliases[name] = None
            members = [self.expression(part, name + camel(next(iter(part.get("properties", {"": 0}))))) for part in variants]
            self.aliases[name] = (union(members), definition.get("description", name))
        return name

    def dictionary(self, name, schema):
        if name not in self.dictionaries:
            self.dictionaries[name] = None
            required = schema.get("required", [])
            fields = [(key, self.property(name, key, value), key in required, value) for key, value in schema["properties"].items()]
            self.dictionaries[name] = (fields, schema.get("description", ""))
        return name

    def property(self, owner, key, schema):
        """The type of a property of a class or a dictionary."""
        kind = self.expression(schema, owner)
        # `output` of a loss is the name of an output.
        is_path = key in PATHS or (owner, key) == ("Recipe", "output")
        return kind.replace("str", "Path") if is_path and "str" in kind.split(" | ") and not self.mutable else kind

    def field(self, owner, key, schema, required):
        """Type and default of a field of a class."""
        kind = self.property(owner, key, schema)
        if required:
            return kind, ""
        default = schema.get("default")
        if isinstance(default, (str, bool, int, float)):
            return kind, repr(default) if not isinstance(default, str) else json.dumps(default)
        if kind.startswith(("Sequence[", "Mapping[")):
            return kind, "()" if kind.startswith("Sequence[") else "field(default_factory=dict)" if self.mutable else "None"
        return kind, "None"

    def fields(self, name, definition):
        """Name, type, default and description of each field; required fields first."""
        required = definition.get("required", [])
        found = []
        for key, schema in definition.get("properties", {}).items():
            schema = {} if schema is True else schema
            kind, default = self.field(name, key, schema, key in required)
            kind = union([kind, "None"]) if default == "None" else kind
            found.append((identifier(key), kind, default, schema.get("description", "")))
        return sorted(found, key=lambda each: each[2] != "")

    def dataclass(self, name, definition, tag=""):
        base = "" if self.mutable else "(Reusable)"
        out = f"\n\n@dataclass(frozen=True, kw_only=True)\nclass {name}{base}:\n" + docstring(definition.get("description", name))
        if tag:
            out += f'\n    NAME: ClassVar[Literal["{tag}"]] = "{tag}"\n'
        for key, kind, default, description in self.fields(name, definition):
            out += f"\n    {key}: {kind}{' = ' + default if default else ''}\n"
            out += docstring(description) if description else ""
        return out

    def types(self):
        """The dictionaries, literals and unions that the classes use."""
        out = ""
        for name, definition in sorted(self.literals.items()):
            values = [part["const"] for part in definition["oneOf"]]
            out += f"\n{name}: TypeAlias = {literal(values)}\n"
            lines = [f'- {part["const"]}: {one_line(part.get("description", ""))}' for part in definition["oneOf"]]
            text = "\n".join(textwrap.fill(line, 110, subsequent_indent="  ", break_long_words=False) for line in lines)
            out += f'"""{one_line(definition.get("description", name))}.\n\n{text}\n"""\n'
        for name, (fields, description) in sorted(self.dictionaries.items()):
            out += f"\n\nclass {name}(TypedDict, total=False):\n" + docstring(description or "Options by name")
            for key, kind, required, schema in fields:
                out += f"\n    {key}: {f'Required[{kind}]' if required else kind}\n"
                out += docstring(schema["description"]) if isinstance(schema, dict) and schema.get("description") else ""
        for name, (kind, description) in sorted(self.aliases.items()):
            out += f'\n\n{name}: TypeAlias = {kind}\n"""{one_line(description)}."""\n'
        return out


def qualified(kind):
    """A type with the names that the module of recipes defines qualified."""
    builtin = {"None", "Sequence", "Mapping", "Any", "Path", "Literal"}
    return re.sub(r'"[^"]*"|[A-Z]\w*', lambda found: found[0] if found[0][0] == '"' or found[0] in builtin else f"recipe.{found[0]}", kind)


def entries(definition):
    """Name and definition of each entry of a list of passes or formats, with its description."""
    found = []
    for variant in definition.get("oneOf") or definition["anyOf"]:
        for name, schema in variant.get("properties", {}).items():
            found.append((name, schema["$ref"].rsplit("/", 1)[1], variant["description"]))
    return found


def recipe_module(schema):
    passes, formats = (entries(schema["$defs"][name]) for name in ("Step", "Export"))
    types = Schema(schema, [*CLASSES, *(name for _, name, _ in passes + formats)])
    classes = ""
    for tag, name, _ in passes + formats:
        classes += types.dataclass(name, types.definitions[name], tag)
    for name in CLASSES:
        classes += types.dataclass(name, types.definitions[name])
    for name, found in (("Step", passes), ("Export", formats)):
        members = union([literal(tag for tag, _, _ in found), *(each for _, each, _ in found)])
        classes += f"\n\n{name}: TypeAlias = {members}\n"
        classes += f'"""{one_line(types.definitions[name]["description"])}."""\n'
    classes += types.dataclass("Recipe", schema)
    settings = "\n\nclass RecipeSettings(TypedDict, total=False):\n" + docstring("Settings of a recipe with one pass, as parameters of the function of the pass")
    for key, value in types.definitions["DataSets"]["properties"].items():
        settings += f"\n    {key}: {types.expression(value)}\n" + docstring(value["description"])
    for key, kind, _, description in types.fields("Recipe", schema):
        if key not in OWN:
            settings += f"\n    {key}: {kind}\n" + docstring(description)
    imports = (
        "from collections.abc import Mapping, Sequence\nfrom dataclasses import dataclass\n"
        "from typing import Any, ClassVar, Literal, Required, TypeAlias, TypedDict\n\n"
        "from ._check import Reusable\nfrom ._data import InMemory\nfrom ._process import Path"
    )
    settings += '\n\nSamples: TypeAlias = Data | Path | InMemory\n"""Samples: `Data`, a file or folder, or values in memory."""\n'
    return HEADER.format(title="Types of recipes.", imports=imports) + types.types() + classes + settings


def passes_module(schema):
    types = Schema(schema, [*CLASSES, *(name for key in ("Step", "Export") for _, name, _ in entries(schema["$defs"][key]))])
    settings = {*types.definitions["DataSets"]["properties"], *schema["properties"]}
    out = ""
    for tag, name, description in entries(types.definitions["Step"]):
        fields = types.fields(name, types.definitions[name])
        if clash := settings.intersection(key for key, *_ in fields):
            sys.exit(f"{tag}: the options {clash} have the names of settings: rename them in python/generate.py")
        out += f"\n\ndef {identifier(tag)}(\n    model: Path,\n    output: Path,\n"
        # Python rejects `*` before `**settings` alone.
        out += "    *,\n" if fields else ""
        for key, kind, default, _ in fields:
            out += f"    {key}: {qualified(kind)} = {default},\n"
        out += '    **settings: Unpack[Settings],\n) -> Report:\n    """' + one_line(description) + ".\n\n    Args:\n"
        args = [("model", "the model: a folder or a file, or a remote one like hf:org/name"), ("output", "folder to write")]
        args += [(key, text) for key, _, _, text in fields] + [("settings", "calibration, evaluation, force and more, as listed in `Settings`")]
        for key, text in args:
            out += textwrap.fill(f"{key}: {one_line(text)}.", 110, initial_indent=" " * 8, subsequent_indent=" " * 12, break_long_words=False).replace("\\", "\\\\") + "\n"
        out += '    """\n'
        call = ", ".join(f"{key}={key}" for key, *_ in fields)
        body = textwrap.fill(f"step = recipe.{name}({call})", 110, initial_indent="    ", subsequent_indent="        ", break_long_words=False)
        out += f"{body}\n    return run_pass(step, model, output, settings)\n"
    names = [identifier(tag) for tag, _, _ in entries(types.definitions["Step"])]
    imports = (
        "from collections.abc import Mapping, Sequence\nfrom typing import Literal, Unpack\n\n"
        "from . import recipe\nfrom ._process import Path\nfrom ._run import Settings, run_pass\nfrom .report import Report\n\n"
        f"__all__ = {json.dumps(names)}"
    )
    if "Mapping[" not in out:
        imports = imports.replace("Mapping, ", "")
    return HEADER.format(title="One function for each pass.", imports=imports) + out


def sections_module(schema):
    types = Schema(schema, [name for name, definition in schema["$defs"].items() if definition.get("type") == "object"], mutable=True)
    out = ""
    for name, definition in [*types.definitions.items(), ("Fields", schema)]:
        if definition.get("type") == "object":
            out += types.dataclass(name, definition)
        else:
            types.reference(name)
    imports = "from collections.abc import Mapping, Sequence\nfrom dataclasses import dataclass, field\nfrom typing import Any, Literal, TypeAlias"
    return HEADER.format(title="Sections of reports.", imports=imports) + types.types() + out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--program", default=ROOT / "target" / "debug" / "compress")
    args = parser.parse_args()

    def schema(kind):
        return json.loads(subprocess.run([args.program, "schema", kind], check=True, stdout=subprocess.PIPE).stdout)

    recipe = in_python(schema("recipe"))
    modules = {"recipe.py": recipe_module(recipe), "passes.py": passes_module(recipe), "sections.py": sections_module(schema("report"))}
    changed = 0
    for name, text in modules.items():
        path = PACKAGE / name
        current = path.read_text() if path.exists() else ""
        if text == current:
            continue
        changed = 1
        if args.check:
            sys.stderr.writelines(difflib.unified_diff(current.splitlines(True), text.splitlines(True), str(path), "generated", n=1))
        else:
            path.write_text(text)
    if args.check and changed:
        sys.exit("the Python package differs from `compress schema`: run python/generate.py")


if __name__ == "__main__":
    main()
