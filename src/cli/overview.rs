//! The list of commands by purpose, and examples for the files of a folder.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use crate::model::Model;
use crate::report::escape::display;

/// Commands by purpose. Commands that no group names, such as new passes, belong to the first one.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Compress", &["init", "auto", "draft", "plan", "run", "chain", "merge"]),
    ("Convert", &["cast", "dequantize", "densify", "split-experts", "extract-language-model"]),
    ("Measure", &["eval", "generate", "analyze", "report", "check"]),
    ("Inspect", &["inspect", "diff", "verify"]),
    ("Machine", &["doctor", "cache", "schema", "completions", "man"]),
];

/// Columns of the text, as for the options.
const COLUMNS: usize = 100;
/// Entries of a folder that are considered for examples.
const MAX_ENTRIES: usize = 1000;
/// Bytes of a YAML file that are searched for passes.
const MAX_RECIPE: u64 = 1 << 20;

/// A template of the help of `compress`, in which commands are grouped by purpose.
pub(super) fn template(command: &clap::Command) -> String {
    let commands: Vec<(&str, String)> =
        command.get_subcommands().map(|sub| (sub.get_name(), sub.get_about().map(ToString::to_string).unwrap_or_default())).collect();
    let width = commands.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 4;
    let mut text = String::from("{about-with-newline}\n{usage-heading} {usage}\n");
    for (index, (heading, names)) in GROUPS.iter().enumerate() {
        let is_named = |name: &str| GROUPS.iter().any(|(_, names)| names.contains(&name));
        let listed = names.iter().filter_map(|name| commands.iter().find(|(other, _)| other == name));
        let others = commands.iter().filter(|(name, _)| index == 0 && !is_named(name));
        text += &format!("\n{heading}:\n");
        for (name, about) in listed.chain(others) {
            text += &entry(name, about, width);
        }
    }
    text + "\nOptions:\n{options}\n{after-help}"
}

/// A name and its description, which is wrapped and indented by `width`.
fn entry(name: &str, about: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in about.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width + line.len() + 1 + word.len() <= COLUMNS => *line += &format!(" {word}"),
            _ => lines.push(word.to_owned()),
        }
    }
    format!("  {name:<0$}{1}\n", width - 2, lines.join(&format!("\n{:width$}", "")))
}

/// Prints commands to begin with, for the files of the current folder.
pub(super) fn print() {
    let examples = examples(Path::new("."));
    let (about, lines) = (super::command().get_about().map(ToString::to_string).unwrap_or_default(), examples.join("\n  "));
    let text = format!("{about}\n\nExamples for this folder:\n  {lines}\n\n`compress --help` lists all commands.\n");
    let _ = io::stderr().lock().write_all(display(&text).as_bytes());
}

/// Files of a folder that commands accept.
#[derive(Default)]
struct Found {
    recipe: Option<String>,
    model: Option<String>,
    output: Option<String>,
}

impl Found {
    fn search(folder: &Path) -> Found {
        let entries = fs::read_dir(folder).into_iter().flatten().take(MAX_ENTRIES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = entries.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        let mut found = Found::default();
        if folder.join("config.json").is_file() {
            found.model = Some(".".to_owned());
        }
        for name in names {
            let path = folder.join(&name);
            let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
            let slot = match extension {
                "yaml" | "yml" if is_recipe(&path) => &mut found.recipe,
                _ if path.join(crate::report::FILE).is_file() => &mut found.output,
                _ if path.join("config.json").is_file() => &mut found.model,
                "safetensors" | "onnx" | "gguf" | "pt" | "pth" if path.is_file() => &mut found.model,
                _ => continue,
            };
            slot.get_or_insert(name);
        }
        found
    }
}

/// Whether a YAML file has a list of passes.
fn is_recipe(path: &Path) -> bool {
    let is_small = fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MAX_RECIPE);
    is_small && fs::read_to_string(path).is_ok_and(|text| text.lines().any(|line| line.starts_with("passes:")))
}

/// Three commands for the files of a folder.
fn examples(folder: &Path) -> Vec<String> {
    let Found { recipe, model, output } = Found::search(folder);
    let mut commands = Vec::new();
    if let Some(recipe) = recipe.as_deref().map(quoted) {
        commands.extend([format!("compress plan {recipe}"), format!("compress run {recipe}")]);
    }
    if let Some(output) = output.as_deref().map(quoted) {
        commands.push(format!("compress report {output}"));
    }
    let (shown, first) = match &model {
        Some(model) => (quoted(model), pass(&folder.join(model))),
        None => ("hf:HuggingFaceTB/SmolLM2-135M-Instruct".to_owned(), "quantize"),
    };
    // An output inside the folder of the model is refused.
    let place = if shown == "." { "../" } else { "" };
    commands.extend([
        format!("compress inspect {shown}"),
        format!("compress {first} {shown} -o {place}out/{first}"),
        format!("compress init {shown} -o {place}first.yaml"),
    ]);
    commands.truncate(3);
    commands
}

/// The pass for a first attempt: weight formats of language model runtimes, a float format for quantized
/// files, and int8 for other models.
fn pass(path: &Path) -> &'static str {
    let Ok(model) = Model::open(path) else { return "quantize-dynamic" };
    let is_quantized = model.weights.by_name.values().any(|weight| weight.encoding != crate::store::Encoding::Dense || weight.stored_type.is_some());
    let architectures = model.config.get("architectures").map(ToString::to_string).unwrap_or_default();
    match (is_quantized, architectures.contains("CausalLM")) {
        (true, _) => "cast",
        (false, true) => "quantize",
        (false, false) => "quantize-dynamic",
    }
}

/// A file name as an argument of a shell, with `./` in front of names that are not plain.
fn quoted(name: &str) -> String {
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c)) && !name.starts_with('-');
    if is_plain { name.to_owned() } else { format!("'./{}'", name.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_lists_each_command_once() {
        let command = super::super::command();
        let text = template(&command);
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let lines = text.lines().filter(|line| line.starts_with(&format!("  {} ", sub.get_name()))).count();
            assert_eq!(lines, 1, "{}", sub.get_name());
        }
        assert!(text.lines().all(|line| line.len() <= COLUMNS), "{text}");
    }

    #[test]
    fn examples_match_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            fs::create_dir_all(folder.path().join(name).parent().unwrap()).unwrap();
            fs::write(folder.path().join(name), text).unwrap();
        };
        let first = |count: usize| examples(folder.path())[..count].join("; ");
        assert_eq!(first(1), "compress inspect hf:HuggingFaceTB/SmolLM2-135M-Instruct");
        write("my model/config.json", "{}");
        write("other.yaml", "key: value");
        assert_eq!(
            first(3),
            "compress inspect './my model'; compress quantize-dynamic './my model' -o out/quantize-dynamic; compress init './my model' -o first.yaml"
        );
        write("small/report.json", "{}");
        write("small/config.json", "{}");
        assert_eq!(first(2), "compress report small; compress inspect './my model'");
        write("recipe.yaml", "model: x\npasses: []\n");
        assert_eq!(first(3), "compress plan recipe.yaml; compress run recipe.yaml; compress report small");
        // Inside the folder of a model.
        let inside = examples(&folder.path().join("my model")).join("; ");
        assert_eq!(inside, "compress inspect .; compress quantize-dynamic . -o ../out/quantize-dynamic; compress init . -o ../first.yaml");
    }
}
