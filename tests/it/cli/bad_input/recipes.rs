//! Invalid recipes: errors contain the location and the accepted names.

use std::fs;
use std::path::Path;

use super::{Case, case, check};
use crate::cli::support::model;

const RUN: &str = "run recipe.yaml -o out";

fn recipe(name: &'static str, text: impl AsRef<[u8]> + 'static, message: &'static str) -> Case {
    with_args(name, text, RUN, 2, message)
}

fn with_args(name: &'static str, text: impl AsRef<[u8]> + 'static, args: &'static str, code: i32, message: &'static str) -> Case {
    let make = move |folder: &Path| {
        model(&folder.join("in"));
        fs::write(folder.join("recipe.yaml"), text.as_ref()).unwrap();
    };
    case(name, make, args, code, message, "")
}

#[test]
fn keys_and_names() {
    check([
        recipe(
            "an unknown key",
            "model: in\npases: []\n",
            "recipe.yaml: line 2 column 1: unknown key `pases`, did you mean `passes`?\n --> recipe.yaml:2:1…2 | pases: []…^\nExpected one of `model`, `seed`, `allow_nonfinite`, `sizes`, `measure`, `data`, `memory`, `passes`, `evaluate`, `export`",
        ),
        recipe(
            "an unknown option",
            "model: in\npasses:\n  - prune-unstructured: { amuont: 0.5 }\n",
            "line 3 column 27: unknown key `amuont`, did you mean `amount`? Expected one of `amount`, `importance`, `scope`, `pattern`, `targets`, `ignore`, `rules`",
        ),
        recipe(
            "an unknown pass",
            "model: in\npasses:\n  - prune: {}\n",
            "line 3 column 5: unknown name `prune`, did you mean `prune-unstructured`?…Expected one of `prune-unstructured`, `prune-structured`, `search-structure`, `prune-vocabulary`, `decompose`, `quantize`, `quantize-dynamic`",
        ),
        recipe(
            "an unknown pass by name alone",
            "model: in\npasses: [prune]\n",
            "line 2 column 10: unknown name `prune`, did you mean `prune-unstructured`?…Expected one of `prune-unstructured`",
        ),
        recipe("an unknown format", "model: in\nexport: [onxx]\n", "line 2 column 10: unknown name `onxx`, did you mean `onnx`? Expected one of `safetensors`"),
        recipe(
            "an unknown option of a format",
            "model: in\nexport:\n  - safetensors: { layuot: dense }\n",
            "line 3 column 20: unknown key `layuot`, did you mean `layout`? Expected one of `layout`, `shard_size`",
        ),
        recipe(
            "an unknown value",
            "model: in\npasses:\n  - prune-unstructured: { scope: layer }\n",
            "line 3 column 34: unknown name `layer`, expected one of `tensor`, `global`",
        ),
        recipe("no model", "passes: []\n", "line 1 column 1: the key `model` is missing"),
        recipe("a key twice", "model: in\nmodel: in\n", "line 2 column 1: the key `model` occurs twice"),
        recipe(
            "two formats in one entry",
            "model: in\nexport:\n  - safetensors: {}\n    onnx: {}\n",
            "line 3 column 5: `onnx` is a second format in one entry; start a new entry with `-`",
        ),
        recipe(
            "two passes in one entry",
            "model: in\npasses:\n  - cast: {}\n    quantize-dynamic: {}\n",
            "line 3 column 5: `quantize-dynamic` is a second pass in one entry; start a new entry with `-`",
        ),
        recipe("a format twice", "model: in\nexport: [safetensors, safetensors]\n", "export: `safetensors` is listed twice"),
        recipe(
            "a rule without an amount",
            "model: in\npasses:\n  - prune-unstructured: { rules: [{ targets: [\"*\"] }] }\n",
            "line 3 column…the key `amount` is missing",
        ),
        recipe(
            "a rule without targets",
            "model: in\npasses:\n  - prune-unstructured: { rules: [{ targets: [], amount: 0.1 }] }\n",
            "pass 1 (prune-unstructured): a rule has no `targets`",
        ),
    ]);
}

#[test]
fn types_and_ranges() {
    check([
        recipe("text for a number", "model: in\nseed: many\n", "recipe.yaml: line 2 column 7: expected a whole number"),
        recipe("a negative seed", "model: in\nseed: -1\n", "line 2 column 7: expected a whole number from 0 for `seed`"),
        recipe("a list for text", "model: [in]\n", "line 1 column 8: expected a plain value"),
        recipe("keys for a list", "model: in\npasses: { cast: {} }\n", "line 2 column 9: expected a list"),
        recipe(
            "no targets",
            "model: in\npasses:\n  - prune-unstructured: { amount: 0.3, targets: [] }\n",
            "line 3 column 49: expected at least one value for `targets`",
        ),
        with_args(
            "no targets, set",
            "model: in\npasses: [cast]\n",
            "run recipe.yaml -o out --set targets=[]",
            2,
            "--set targets=…: expected at least one value",
        ),
        recipe("text for a list", "model: in\npasses:\n  - cast: { targets: \"*\" }\n", "line 3 column 22: expected a list"),
        recipe(
            "a switch for a fraction",
            "model: in\npasses:\n  - prune-unstructured: { amount: true }\n",
            "column 27: expected a fraction from 0.0 to 1.0, a percentage like 50%, or a whole number, not `true`",
        ),
        recipe("a list for a fraction", "model: in\npasses:\n  - prune-unstructured: { amount: [0.5] }\n", "or a whole number, not a list"),
        recipe("a home folder", "model: ~/in\n", "recipe.yaml: line 1: `~/in`: `~` and variables are not expanded in recipes"),
        recipe("a variable", "model: in\npasses: []\noutput: $HOME/out\n", "recipe.yaml: line 3: `$HOME/out`: `~` and variables are not expanded"),
        recipe(
            "a type of GGUF files",
            "model: in\npasses: [quantize: { scheme: IQ3_S }]\n",
            "unknown scheme `IQ3_S`: it is a type of GGUF files; remove this pass, and add `export: [{ gguf: { type: IQ3_S } }]`",
        ),
        recipe("a scheme of another tool", "model: in\npasses: [quantize: { scheme: int4 }]\n", "unknown scheme `int4`, did you mean `W4A16`?"),
        recipe("an option of another tool", "model: in\npasses: [prune-unstructured: { sparsity: 0.5 }]\n", "unknown key `sparsity`, did you mean `amount`?"),
        recipe("text for a switch", "model: in\nallow_nonfinite: perhaps\n", "line 2 column 18: expected true or false for `allow_nonfinite`"),
        recipe(
            "text for a whole number of a pass",
            "model: in\npasses:\n  - quantize: { scheme: W4A16, group_size: \"abc\" }\n",
            "recipe.yaml: line 3 column 44: expected a whole number for `group_size`",
        ),
        #[cfg(feature = "run")]
        recipe("data of the Hub", "model: in\ndata: { calibration: 'hf:org/name' }\n", "`hf:org/name` is not a file: data sets are not downloaded"),
        #[cfg(feature = "run")]
        recipe(
            "data without an extension",
            "model: in\ndata: { calibration: images }\n",
            "the extension of `images` does not show what it contains: write { text: images }, or `images` or `arrays`",
        ),
        recipe(
            "an amount above one",
            "model: in\npasses:\n  - prune-unstructured:\n      amount: 1.5\n",
            "line 4 column 15: amount 1.5 is not a fraction from 0.0 to 1.0, a percentage like 50%, or a whole number",
        ),
        recipe("a negative amount", "model: in\npasses:\n  - prune-unstructured: { amount: -5 }\n", "line 3 column 35: amount -5 is not a fraction"),
        recipe(
            "an amount in words",
            "model: in\npasses:\n  - prune-unstructured: { amount: half }\n",
            "line 3 column 35: `half` is not a fraction from 0.0 to 1.0",
        ),
        recipe("five of four", "model: in\npasses:\n  - prune-unstructured: { pattern: \"5:4\" }\n", "line 3 column 36: pattern `5:4` is not N:M"),
        recipe(
            "a pattern and an amount",
            "model: in\npasses: [cast, prune-unstructured: { pattern: \"2:4\", amount: 0.5 }]\n",
            "pass 2 (prune-unstructured): `pattern` and `amount` exclude each other",
        ),
        recipe("a bad expression", "model: in\npasses:\n  - cast: { targets: [\"re:(\"] }\n", "line 3 column 23: pattern `re:(`: unclosed group"),
        recipe("no size", "model: in\nexport:\n  - safetensors: { shard_size: big }\n", "line 3 column 32: `big` is not a size like 5GB, 500MB or 2GiB"),
    ]);
}

#[test]
fn texts_that_are_not_recipes() {
    // Every use of the anchor expands to a thousand patterns.
    let bomb = format!(
        "model: in\npasses:\n  - prune-unstructured:\n      rules:\n        - &r {{ amount: 0.1, targets: [{}] }}\n{}",
        "\"*\",".repeat(1000),
        "        - *r\n".repeat(2000)
    );
    check([
        recipe("empty", "", "recipe.yaml: expected a value, but the text ends at line 1, column 1"),
        recipe("a comment", "# later\n", "recipe.yaml: line 2 column 1: expected a value, but the text ends"),
        recipe("a list", "- cast\n", "recipe.yaml: line 1 column 1: expected keys with values"),
        recipe("a word", "compress\n", "recipe.yaml: line 1 column 1: expected keys with values"),
        recipe("two documents", "model: in\n---\nmodel: in\n", "recipe.yaml: line 3 column 1: a second YAML document begins here"),
        recipe("an open list", "model: in\npasses: [\n", "recipe.yaml: line 2 column 9: the bracket `[` is not closed: add `]`"),
        recipe("an open list in place of a number", "model: in\npasses: [cast: { targets: [a }]\n", "recipe.yaml: line 2 column…bracket"),
        recipe("an open list of an option", "model: in\npasses:\n  - prune-unstructured: { amount: [0.5}\n", "recipe.yaml: line 3 column…bracket"),
        recipe("an open string", "model: \"in\n", "recipe.yaml: line 2 column 1: invalid indentation in multiline quoted scalar"),
        recipe("a tab", "model: in\npasses:\n\t- cast: {}\n", "recipe.yaml: line 3 column 2: tabs disallowed"),
        recipe("an alias of nothing", "model: *in\n", "recipe.yaml: line 1 column 8: reference to unknown value"),
        recipe("an alias bomb", bomb, "recipe.yaml: line…the aliases in this text expand to too many values"),
        recipe("nested too deeply", format!("model: in\npasses: {}", "[".repeat(100_000)), "recipe.yaml: line 2 column…"),
        recipe(
            "nested too deeply, and closed",
            format!("model: in\npasses: {}{}", "[".repeat(100_000), "]".repeat(100_000)),
            "recipe.yaml: line 2 column…recursion limit exceeded",
        ),
        recipe("keys nested too deeply", format!("model: in\npasses: [{}", "{ cast: ".repeat(10_000)), "recipe.yaml: line 2 column…"),
        with_args("not UTF-8", b"model: in # \xff\n", RUN, 1, "cannot read recipe.yaml: stream did not contain valid UTF-8"),
        with_args("not there", "", "run other.yaml -o out", 1, "cannot read other.yaml: No such file or directory"),
        with_args("a folder", "", "run in -o out", 2, "in: is a folder; a recipe is a YAML file"),
        with_args("a checkpoint", "", "plan in/model.safetensors", 1, "cannot read in/model.safetensors: stream did not contain valid UTF-8"),
        with_args("no model there", "model: nowhere\n", RUN, 1, "recipe.yaml: `model`: cannot open nowhere: No such file or directory"),
        with_args("no output", "model: in\n", "run recipe.yaml", 2, "recipe.yaml: no `output`: add one to the recipe, or use -o"),
    ]);
}

#[test]
fn values_set_on_the_command_line() {
    const TEXT: &str = "model: in\npasses:\n  - prune-unstructured: { amount: 0.5 }\n  - cast\n";
    let set = |name, args, message| with_args(name, TEXT, args, 2, message);
    check([
        set("an unknown key", "run recipe.yaml -o out --set sed=1", "--set sed=1: unknown key `sed`, did you mean `seed`? Expected one of `model`, `seed`"),
        set("an unknown key, in a plan", "plan recipe.yaml --set sed=1", "--set sed=1: unknown key `sed`, did you mean `seed`?"),
        set(
            "an unknown option",
            "run recipe.yaml -o out --set cast.too=f16",
            "--set cast.too=f16: unknown key `too`, did you mean `to`? Expected one of `to`, `overflow`, `targets`, `ignore`",
        ),
        set(
            "a pass that is not there",
            "run recipe.yaml -o out --set quantize-dynamic.observer=mse",
            "--set quantize-dynamic.observer: the recipe has no `quantize-dynamic`",
        ),
        set("a pass with a typing error", "run recipe.yaml -o out --set castt.to=f16", "--set castt.to: the recipe has no `castt`; did you mean `cast`?"),
        set("a group with a typing error", "run recipe.yaml -o out --set pases.0=cast", "--set pases.0: the recipe has no `pases`; did you mean `passes`?"),
        set("an entry that is not there", "run recipe.yaml -o out --set passes.2.cast.to=f16", "--set passes.2.cast.to: the list has no entry `2`"),
        set("a key of a number", "run recipe.yaml -o out --set seed.x=1", "--set seed.x: the value that contains `x` is neither a map nor a list"),
        set("a wrong type", "run recipe.yaml -o out --set seed=x", "--set seed=x: expected a whole number, not \"x\""),
        set("an unknown value", "run recipe.yaml -o out --set cast.to=f8", "--set cast.to=f8: unknown variant `f8`, expected one of `f32`, `f16`, `bf16`"),
        set("out of range", "run recipe.yaml -o out --set prune-unstructured.amount=1.5", "--set prune-unstructured.amount=1.5: amount 1.5 is not a fraction"),
        set("no YAML", "run recipe.yaml -o out --set passes=[", "--set passes: line 1 column 1: the bracket `[` is not closed"),
        set("no value", "run recipe.yaml -o out --set seed", "`seed` is not KEY=VALUE"),
        with_args(
            "a mistake of the recipe comes first",
            "model: in\npases: []\n",
            "run recipe.yaml -o out --set seed=1",
            2,
            "recipe.yaml: line 2 column 1: unknown key `pases`",
        ),
    ]);
}
