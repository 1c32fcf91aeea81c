"""The public items of a crate, from rustdoc's JSON, as sorted lines of text.

Items of other crates that it re-exports are described too, if their JSON is given.
"""


from collections import defaultdict


def only(tagged):
    """Name and content of a variant."""
    return next(iter(tagged.items())) if isinstance(tagged, dict) else (tagged, None)


class Crate:
    def __init__(self, data, parts=()):
        """`parts`: JSON of crates whose re-exported items are described."""
        self.read(data)
        self.root = self.index[str(data["root"])]
        self.public = {}
        self.names = []
        # Public paths of re-exported items of other crates, by the path of their definition.
        self.exported = {}
        self.collect(self.root, self.root["name"], set())
        self.parts = [Part(part, self.exported) for part in parts]

    def read(self, data):
        self.index, self.paths = data["index"], data["paths"]
        # Names of the traits in the line of a type, by its number.
        self.traits = defaultdict(set)
        for item in filter(self.is_in_line, self.index.values()):
            inner = item["inner"]["impl"]
            if not inner["trait"]["path"].endswith("StructuralPartialEq"):
                self.traits[only(inner["for"])[1]["id"]].add(inner["trait"]["path"].rsplit("::", 1)[-1])

    def is_in_line(self, item):
        """Whether an implementation is listed in the line of its type: those of traits of other crates, without type
        arguments and conditions. Dependent programs cannot tell whether they are derived."""
        kind, inner = only(item["inner"])
        if kind != "impl" or inner["trait"] is None or inner["is_negative"] or inner["blanket_impl"] is not None:
            return False
        if any("automatically_derived" in str(attribute) for attribute in item["attrs"]):
            return True
        kind, target = only(inner["for"])
        arguments = (inner["trait"]["args"] or {}).get("angle_bracketed", {"args": [], "constraints": []})
        parameters, conditions = inner["generics"]["params"], inner["generics"]["where_predicates"]
        is_foreign = str(inner["trait"]["id"]) not in self.index and kind == "resolved_path" and str(target["id"]) in self.index
        has_types = any("lifetime" not in argument for argument in arguments["args"]) or any("lifetime" not in parameter["kind"] for parameter in parameters)
        return is_foreign and not (inner["is_synthetic"] or has_types or conditions or arguments["constraints"])

    def item(self, number):
        return self.index.get(str(number))

    def collect(self, module, path, seen):
        """Finds all paths of an item."""
        if module["id"] in seen:
            return
        self.name(module, path)
        self.members(module, path, seen)

    def members(self, module, path, seen):
        for number in module["inner"]["module"]["items"]:
            item = self.item(number)
            if item is None or item["visibility"] != "public":
                continue
            kind, inner = only(item["inner"])
            name = item["name"]
            if kind == "use":
                target = self.item(inner["id"]) if inner["id"] is not None else None
                if target is None:
                    self.export(f"{path}::{inner['name']}", inner)
                    continue
                if inner["is_glob"]:
                    if only(target["inner"])[0] != "module":
                        raise SystemExit(f"{path}: a glob import of a non-module is not supported")
                    self.members(target, path, seen | {module["id"]})
                    continue
                item, name, kind = target, inner["name"], only(target["inner"])[0]
            if kind == "module":
                self.collect(item, f"{path}::{name}", seen | {module["id"]})
            else:
                self.name(item, f"{path}::{name}")

    def export(self, path, use):
        found = self.paths.get(str(use["id"]))
        definition = "::".join(found["path"]) if found else use["source"]
        self.names.append((path, None, definition))
        shorter = [path, self.exported.get(definition, path)]
        self.exported[definition] = min(shorter, key=lambda known: (known.count("::"), known))

    def name(self, item, path):
        self.names.append((path, item["id"], None))
        defined = self.paths.get(str(item["id"]), {}).get("path", [])
        parent = path.split("::")[:-1]
        # The canonical path is that of the module that defines the item, or of the innermost enclosing
        # module.
        rank = (len(parent) if defined[: len(parent)] == parent else -1, path)
        if rank > self.public.get(item["id"], ((-2, ""),))[0]:
            self.public[item["id"]] = (rank, path)

    def path(self, number, written):
        if number in self.public:
            return self.public[number][1]
        found = self.paths.get(str(number))
        if found is None:
            return written
        definition = "::".join(found["path"])
        if definition in self.exported:
            return self.exported[definition]
        first, *rest = found["path"]
        return "::".join(["std" if first in ("core", "alloc") else first, *rest])

    # Types

    def type(self, tagged):
        kind, t = only(tagged)
        match kind:
            case "resolved_path":
                return self.path(t["id"], t["path"]) + self.arguments(t["args"])
            case "dyn_trait":
                bounds = [self.higher(b["generic_params"]) + self.path(b["trait"]["id"], b["trait"]["path"]) + self.arguments(b["trait"]["args"]) for b in t["traits"]]
                return "dyn " + " + ".join(bounds + ([t["lifetime"]] if t["lifetime"] else []))
            case "generic" | "primitive":
                return t
            case "function_pointer":
                return self.higher(t["generic_params"]) + self.header(t["header"]) + "fn" + self.signature(t["sig"], named=False)
            case "tuple":
                return "(" + ", ".join(map(self.type, t)) + ("," if len(t) == 1 else "") + ")"
            case "slice":
                return f"[{self.type(t)}]"
            case "array":
                return f"[{self.type(t['type'])}; {t['len']}]"
            case "impl_trait":
                return "impl " + self.bounds(t)
            case "raw_pointer":
                return f"*{'mut' if t['is_mutable'] else 'const'} {self.type(t['type'])}"
            case "borrowed_ref":
                lifetime = f"{t['lifetime']} " if t["lifetime"] else ""
                return f"&{lifetime}{'mut ' if t['is_mutable'] else ''}{self.type(t['type'])}"
            case "qualified_path":
                owner = self.type(t["self_type"])
                if t["trait"] and t["trait"]["path"]:
                    owner = f"<{owner} as {self.path(t['trait']['id'], t['trait']['path'])}{self.arguments(t['trait']['args'])}>"
                return f"{owner}::{t['name']}{self.arguments(t['args'])}"
            case "infer":
                return "_"
        raise SystemExit(f"unsupported type: {tagged}")

    def arguments(self, tagged):
        if not tagged:
            return ""
        kind, args = only(tagged)
        if kind == "parenthesized":
            output = f" -> {self.type(args['output'])}" if args["output"] else ""
            return "(" + ", ".join(map(self.type, args["inputs"])) + ")" + output
        parts = []
        for argument in args["args"]:
            kind, value = only(argument)
            parts.append(self.type(value) if kind == "type" else value["expr"] if kind == "const" else value or "_")
        for constraint in args["constraints"]:
            kind, value = only(constraint["binding"])
            said = f" = {self.term(value)}" if kind == "equality" else f": {self.bounds(value)}"
            parts.append(constraint["name"] + self.arguments(constraint["args"]) + said)
        return f"<{', '.join(parts)}>" if parts else ""

    def term(self, tagged):
        kind, value = only(tagged)
        return self.type(value) if kind == "type" else value["expr"]

    def bounds(self, bounds):
        parts = []
        for bound in bounds:
            kind, value = only(bound)
            if kind == "trait_bound":
                trait = value["trait"]
                sign = {"none": "", "maybe": "?", "maybe_const": "~const "}[value["modifier"]]
                parts.append(sign + self.higher(value["generic_params"]) + self.path(trait["id"], trait["path"]) + self.arguments(trait["args"]))
            elif kind == "outlives":
                parts.append(value)
            else:
                parts.append("use<" + ", ".join(only(v)[1] for v in value) + ">")
        return " + ".join(parts)

    def higher(self, params):
        return f"for<{', '.join(p['name'] for p in params)}> " if params else ""

    def generics(self, generics):
        """Generic parameters, and the `where` clause."""
        params, where = [], []
        for param in generics["params"]:
            kind, value = only(param["kind"])
            if kind == "lifetime":
                params.append(param["name"] + (": " + " + ".join(value["outlives"]) if value["outlives"] else ""))
            elif kind == "const":
                params.append(f"const {param['name']}: {self.type(value['type'])}")
            elif not value["is_synthetic"]:
                bounds = f": {self.bounds(value['bounds'])}" if value["bounds"] else ""
                params.append(param["name"] + bounds + (f" = {self.type(value['default'])}" if value["default"] else ""))
        for predicate in generics["where_predicates"]:
            kind, value = only(predicate)
            if kind == "bound_predicate":
                where.append(self.higher(value["generic_params"]) + f"{self.type(value['type'])}: {self.bounds(value['bounds'])}")
            elif kind == "lifetime_predicate":
                where.append(f"{value['lifetime']}: {' + '.join(value['outlives'])}")
            else:
                where.append(f"{self.type(value['lhs'])} = {self.term(value['rhs'])}")
        return f"<{', '.join(params)}>" if params else "", f" where {', '.join(where)}" if where else ""

    # Items

    def header(self, header):
        abi = only(header["abi"])[0]
        words = [word for word, said in (("const", header["is_const"]), ("async", header["is_async"]), ("unsafe", header["is_unsafe"])) if said]
        return "".join(f"{word} " for word in words + ([f'extern "{abi}"'] if abi != "Rust" else []))

    def signature(self, sig, named=True):
        def argument(name, tagged):
            of = self.type(tagged)
            if name == "self":
                return {"Self": "self", "&Self": "&self", "&mut Self": "&mut self"}.get(of, f"self: {of}")
            return f"{name}: {of}" if named and name not in ("", "_") else of

        output = f" -> {self.type(sig['output'])}" if sig["output"] else ""
        return "(" + ", ".join(argument(name, t) for name, t in sig["inputs"]) + ")" + output

    def lines(self):
        for path, number, source in self.names:
            home = self.public[number][1] if number is not None else self.exported[source]
            if path == home:
                yield from self.described(self.item(number), path) if number is not None else []
            elif only(self.item(number)["inner"])[0] != "module" if number is not None else True:
                yield f"pub use {path} = {home}"
        yield from self.implementations()
        for part in self.parts:
            yield from part.lines()

    def implementations(self):
        for item in self.index.values():
            if only(item["inner"])[0] == "impl" and not self.is_in_line(item):
                yield from self.implemented(item)

    def described(self, item, path):
        kind, inner = only(item["inner"])
        traits = f", implements {', '.join(sorted(self.traits[item['id']]))}" if item["id"] in self.traits else ""
        mark = "#[non_exhaustive] " if any("non_exhaustive" in str(a) for a in item["attrs"]) else ""
        if kind == "function":
            params, where = self.generics(inner["generics"])
            yield f"{self.header(inner['header'])}fn {path}{params}{self.signature(inner['sig'])}{where}"
        elif kind in ("struct", "union"):
            params, where = self.generics(inner["generics"])
            shape, fields = only(inner["kind"]) if kind == "struct" else ("plain", inner)
            fields = fields if shape == "tuple" else fields["fields"] if fields else []
            shown = [f for f in fields if f is not None and self.item(f)]
            hidden = len(shown) < len(fields) or (shape == "plain" and only(inner["kind"])[1]["has_stripped_fields"] if kind == "struct" else False)
            yield f"{mark}{kind} {path}{params}{where}" + (" { .. }" if hidden else "") + traits
            for field in shown:
                yield f"field {path}::{self.item(field)['name']}: {self.type(self.item(field)['inner']['struct_field'])}"
        elif kind == "enum":
            params, where = self.generics(inner["generics"])
            yield f"{mark}enum {path}{params}{where}{traits}"
            for variant in map(self.item, inner["variants"]):
                shape, fields = only(variant["inner"]["variant"]["kind"])
                said = ""
                if shape == "tuple":
                    said = "(" + ", ".join("_" if f is None else self.type(self.item(f)["inner"]["struct_field"]) for f in fields) + ")"
                elif shape == "struct":
                    said = " { " + ", ".join(f"{self.item(f)['name']}: {self.type(self.item(f)['inner']['struct_field'])}" for f in fields["fields"]) + " }"
                yield f"variant {path}::{variant['name']}{said}"
        elif kind == "trait":
            params, where = self.generics(inner["generics"])
            bounds = f": {self.bounds(inner['bounds'])}" if inner["bounds"] else ""
            yield f"{'unsafe ' if inner['is_unsafe'] else ''}trait {path}{params}{bounds}{where}"
            for member in map(self.item, inner["items"]):
                required = only(member["inner"])[0] == "function" and not member["inner"]["function"]["has_body"]
                yield from (line + (" (required)" if required else "") for line in self.described(member, f"{path}::{member['name']}"))
        elif kind == "type_alias":
            params, where = self.generics(inner["generics"])
            yield f"type {path}{params}{where} = {self.type(inner['type'])}"
        elif kind == "assoc_type":
            params, where = self.generics(inner["generics"])
            bounds = f": {self.bounds(inner['bounds'])}" if inner["bounds"] else ""
            yield f"type {path}{params}{bounds}{where}" + (f" = {self.type(inner['type'])}" if inner["type"] else "")
        elif kind in ("constant", "assoc_const", "static"):
            yield f"{'static' if kind == 'static' else 'const'} {path}: {self.type(inner['type'])}"
        elif kind == "module":
            yield f"mod {path}"
        else:
            yield f"{kind} {path}"

    def implemented(self, item):
        """The members of an implementation, or the trait."""
        inner = item["inner"]["impl"]
        if inner["is_synthetic"] or inner["blanket_impl"] is not None:
            return
        kind, target = only(inner["for"])
        if kind == "resolved_path" and str(target["id"]) in self.index and target["id"] not in self.public:
            return
        params, where = self.generics(inner["generics"])
        trait = inner["trait"]
        if trait is None:
            path = self.path(target["id"], target["path"])
            for member in map(self.item, inner["items"]):
                if member and member["visibility"] == "public":
                    yield from self.described(member, f"{path}::{member['name']}")
            return
        if str(trait["id"]) in self.index and trait["id"] not in self.public:
            return
        sign = "!" if inner["is_negative"] else ""
        yield f"impl{params} {sign}{self.path(trait['id'], trait['path'])}{self.arguments(trait['args'])} for {self.type(inner['for'])}{where}"


class Part(Crate):
    """The items of a crate that another one re-exports."""

    def __init__(self, data, exported):
        self.read(data)
        self.exported = exported
        own = {int(number): "::".join(found["path"]) for number, found in self.paths.items() if found["crate_id"] == 0}
        self.public = {number: (0, exported[path]) for number, path in own.items() if path in exported}

    def lines(self):
        for number, (_, path) in self.public.items():
            yield from self.described(self.item(number), path)
        yield from self.implementations()

    def implemented(self, item):
        inner = item["inner"]["impl"]
        kind, target = only(inner["for"])
        ends = [target["id"] if kind == "resolved_path" else None, inner["trait"] and inner["trait"]["id"]]
        return super().implemented(item) if any(end in self.public for end in ends) else ()


def lines(data, parts):
    return sorted(set(Crate(data, parts).lines()))
