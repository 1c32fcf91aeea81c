"""The generated pages of docs/reference: recipes and reports from `compress schema`, commands from their help."""

import json
import os
import re
import subprocess
import textwrap

WIDTH = 118
NOTICE = "This page is generated (`scripts/book --pages`)."
TYPES = {"string": "string", "integer": "integer", "number": "number", "boolean": "true or false", "object": "mapping", "null": "null"}
# Lists of values that are longer have a section of their own.
INLINE_VALUES = 6
# Entries of lists that share one section.
ENTRIES = {"Step": "pass", "Export": "format"}
# Headings of `--help` that are the same for several commands.
GLOBAL, OUTPUT = "Global options", "Output"


def prose(text):
    """Text of a schema or of a help page as Markdown: characters of Markdown and HTML are escaped outside of code."""
    text = re.sub(r"\[(`[^`]*`)\]", r"\1", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("*", r"\*").replace("<", "&lt;") for part in parts)


def sentence(text):
    text = prose(text)
    return text if not text or text.endswith((".", ":", "…")) else text + "."


def paragraph(text):
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def either(kinds):
    kinds = dict.fromkeys(kind for kind in kinds if kind != "null")
    return " or ".join(kind for kind in kinds if not (kind == "integer" and "number" in kinds))


def choices(definition):
    """The values of an enumeration with their descriptions, or None if a definition has other types too."""
    if "enum" in definition:
        return [(value, "") for value in definition["enum"]]
    variants = definition.get("oneOf") or []
    if not variants or not all("const" in variant for variant in variants):
        return None
    return [(variant["const"], variant.get("description", "")) for variant in variants]


def listed(values):
    """Values with their descriptions in one line."""
    return "; ".join(f"`{value}`: {prose(text).rstrip('.')}" if text else f"`{value}`" for value, text in values)


class Schema:
    """A JSON Schema as tables: one section for each mapping, and for each long or shared list of values."""

    def __init__(self, schema, headings):
        self.schema, self.definitions = schema, schema["$defs"]
        self.headings = headings
        text = json.dumps(schema)
        self.uses = {name: text.count(f'"#/$defs/{name}"') for name in self.definitions}

    def has_section(self, name):
        definition = self.definitions[name]
        if "properties" in definition or name in self.headings:
            return True
        values = choices(definition)
        return values is not None and (len(values) > INLINE_VALUES or self.uses[name] > 2)

    def heading(self, name):
        return self.headings.get(name) or " ".join(re.findall(r"[A-Z][a-z0-9]*|[A-Z]+(?![a-z])", name)).capitalize()

    def kind(self, schema):
        """Type of a value as Markdown."""
        if schema is True or not schema:
            return "any value"
        if reference := schema.get("$ref"):
            return self.reference(reference.rsplit("/", 1)[1])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                kinds = [self.kind(part) for part in schema[key]]
                return either(kinds)
        if "const" in schema or "enum" in schema:
            return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return either(self.kind({**schema, "type": each}) for each in kind)
        if kind == "array":
            return f"list of {self.kind(schema.get('items', True))}"
        if kind == "object" and "properties" in schema:
            keys, kinds = schema["properties"], {self.kind(value) for value in schema["properties"].values()}
            return f"mapping with {', '.join(f'`{key}`' for key in keys)}: {' or '.join(sorted(kinds))}"
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            return f"mapping to {self.kind(schema['additionalProperties'])}"
        return TYPES.get(kind, "any value")

    def reference(self, name):
        definition = self.definitions[name]
        if name in ENTRIES:
            return f"[{ENTRIES[name]}](#passes-and-formats)"
        if self.has_section(name):
            heading = self.heading(name)
            return f"[{heading}](#{anchor(heading)})"
        return self.kind(definition)

    def values(self, schema):
        """The values of an enumeration without its own section that a property refers to, with descriptions."""
        names = [part["$ref"].rsplit("/", 1)[1] for part in [schema, *schema.get("anyOf", [])] if "$ref" in part]
        for name in names:
            values = choices(self.definitions[name])
            if values and not self.has_section(name) and any(text for _, text in values):
                return f" {listed(values)}."
        return ""

    def rows(self, definition, has_defaults):
        required = definition.get("required", [])
        for key, schema in definition["properties"].items():
            schema = {} if schema is True else schema
            values = self.values(schema)
            cells = [f"`{key}`", "choice" if values else self.kind(schema)]
            if has_defaults:
                default = schema.get("default")
                simple = isinstance(default, (str, bool, int, float))
                cells.append("required" if key in required else f"`{default if isinstance(default, str) else json.dumps(default)}`" if simple else "")
            yield [*cells, sentence(schema.get("description", "")) + values]

    def section(self, name, has_defaults):
        definition = self.definitions[name]
        out = f"\n## {self.heading(name)}\n\n"
        if description := definition.get("description"):
            out += paragraph(sentence(description)) + "\n"
        if values := choices(definition):
            return out + table(["value", "meaning"], [[f"`{value}`", sentence(text)] for value, text in values])
        if "properties" not in definition:
            return out + "It has no keys.\n"
        return out + table(header(has_defaults), self.rows(definition, has_defaults))

    def sections(self, has_defaults):
        return "".join(self.section(name, has_defaults) for name in self.definitions if self.has_section(name))


def header(has_defaults):
    return ["key", "value", "default", "meaning"] if has_defaults else ["key", "value", "meaning"]


def anchor(heading):
    """The anchor of a heading, as on GitHub and in mdBook."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entries(definition):
    """Name, definition and description of each pass or format."""
    for variant in definition["oneOf"]:
        for name, schema in variant.get("properties", {}).items():
            yield name, schema["$ref"].rsplit("/", 1)[1], variant["description"]


def recipes(schema):
    passes, formats = (list(entries(schema["$defs"][name])) for name in ("Step", "Export"))
    types = Schema(schema, {definition: name for name, definition, _ in passes + formats})
    links = [[f"[{name}](#{name})", sentence(text)] for name, _, text in passes]
    formats = ", ".join(f"[{name}](#{name})" for name, _, _ in formats)
    return (
        "# Keys of recipes\n\n"
        + paragraph(f"Look up the keys of a recipe: names, values and defaults, as in `compress schema recipe`. Empty defaults depend on the model or mean no value. {NOTICE}")
        + "\n"
        + paragraph("A step of `passes` is the name of a pass, or a mapping from its name to its options. Editors that load the schema complete the keys.")
        + "\n"
        + table(header(True), types.rows(schema, True))
        + "\n## Passes and formats\n\n"
        + table(["pass", "purpose"], links)
        + "\n"
        + paragraph(f"Formats of `export`: {formats}.")
        + types.sections(True)
    )


def reports(schema):
    types = Schema(schema, {})
    return (
        "# Keys of reports\n\n"
        + paragraph(f"Look up the figures of `report.json`, as in `compress schema report`. The Python package has the same names. {NOTICE}")
        + "\n"
        + table(header(False), types.rows(schema, False))
        + types.sections(False)
    )


class Help:
    """The parsed output of `--help`: summary, usage, options by heading, and the text after them."""

    def __init__(self, text):
        self.summary, self.usage, self.after, self.sections = "", "", "", {}
        options, is_value = None, False
        lines = text.splitlines()
        for at, line in enumerate(lines):
            words = line.strip()
            indent = len(line) - len(line.lstrip())
            if line.startswith("Usage: "):
                self.usage = "compress " + line.removeprefix("Usage: ").split(maxsplit=1)[1]
            elif words and indent == 0 and words.endswith(":") and words != "Examples:":
                options = self.sections.setdefault(words.removesuffix(":"), [])
            elif words and indent == 0 and options is None:
                self.summary += f"{words} "
            elif words and indent == 0:
                self.after = "\n".join(lines[at:])
                break
            elif words and options is not None and indent < 10:
                name, _, description = words.partition("  ")
                options.append([name, description.strip(), []])
                is_value = False
            elif words and options and words == "Possible values:":
                is_value = True
            elif words and options and is_value and words.startswith("- "):
                name, _, description = words[2:].partition(": ")
                options[-1][2].append([name, description.strip()])
            elif words and options and is_value and indent >= 12:
                options[-1][2][-1][1] += f" {words}"
            elif words and options:
                options[-1][1] += f" {words}"
                is_value = False

    def rows(self, heading):
        for name, description, values in self.sections.get(heading, []):
            if name.startswith(("-h, ", "-V, ")):
                continue
            values = f" {listed(values)}." if values else ""
            yield [f"`{name}`", sentence(description) + values]


def commands(program):
    def read(*command):
        environment = {**os.environ, "COLUMNS": "1000"}
        result = subprocess.run([program, *command, "--help"], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        return Help(result.stdout)

    main = read()
    groups = {heading: items for heading, items in main.sections.items() if heading != "Options"}
    helps = {name: read(name) for items in groups.values() for name, _, _ in items}
    # The options of the output are the same for all passes.
    shared = helps["cast"].rows(OUTPUT)
    out = (
        "# Commands\n\n"
        + paragraph(f"Look up a command and its options. `compress COMMAND --help` prints the same, and `compress man` manual pages. {NOTICE}")
        + "\n## Options of all commands\n\n"
        + table(["option", "meaning"], main.rows("Options"))
        + "\n## Options of all passes\n\n"
        + paragraph("Passes also have the options of their [keys in recipes](recipes.md#passes-and-formats), with hyphens: `group_size` is `--group-size`.")
        + "\n"
        + table(["option", "meaning"], shared)
    )
    for heading, items in groups.items():
        out += f"\n## {heading}\n"
        for name, _, _ in items:
            page = helps[name]
            out += f"\n### {name}\n\n{paragraph(sentence(page.summary))}\n```text\n{page.usage}\n```\n"
            if OUTPUT in page.sections and name not in ("chain", "draft"):
                names = [item[0] for item in page.sections["Options"] if not item[0].startswith("-h, ")]
                listing = ", ".join(f"`{each}`" for each in names) or "only those of all passes"
                out += "\n" + paragraph(f"[Options](recipes.md#{name}): {listing}.")
                continue
            rows = [row for section in page.sections if section not in (GLOBAL, OUTPUT) for row in page.rows(section)]
            if rows:
                out += "\n" + table(["option", "meaning"], rows)
            if page.after:
                out += f"\n```text\n{page.after.strip()}\n```\n"
    return out


def pages(program):
    """Name and text of each generated page."""

    def schema(kind):
        return json.loads(subprocess.run([program, "schema", kind], check=True, stdout=subprocess.PIPE).stdout)

    return {"recipes.md": recipes(schema("recipe")), "reports.md": reports(schema("report")), "commands.md": commands(program)}
