//! Static checks whether a runtime loads an output: a table of rules for each runtime, by version.
//!
//! Rules read configuration, headers and small tensors, and run nothing. Every rule names the file of the
//! runtime that it was derived from. An output that a runtime loads and runs with the stored weights is not
//! rejected.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod compressed_tensors;
mod config_values;
mod defects;
mod draft_head;
pub(crate) mod facts;
mod folder;
mod fused;
pub(crate) mod llama_cpp;
mod llama_cpp_names;
#[cfg(feature = "run")]
pub(crate) mod running;
#[cfg(not(feature = "run"))]
#[path = "weights_only.rs"]
mod running;
mod scheme;
mod sglang;
mod shared;
mod tokenizer_files;
mod transformers;
mod transformers_names;
mod vllm;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(crate) use self::defects::Defects;
use self::folder::Folder;
use crate::error::{Error, ParseError, Result};
use crate::files;

/// Maximum number of violations that are listed for a rule.
const MOST: usize = 10;

/// A runtime whose rules are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Runtime {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// Hugging Face transformers with compressed-tensors.
    Transformers,
    /// llama.cpp.
    LlamaCpp,
    /// ONNX Runtime.
    OnnxRuntime,
}

impl Runtime {
    /// All runtimes.
    pub const ALL: [Runtime; 5] = [Runtime::Vllm, Runtime::Sglang, Runtime::Transformers, Runtime::LlamaCpp, Runtime::OnnxRuntime];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Runtime::Vllm => "vllm",
            Runtime::Sglang => "sglang",
            Runtime::Transformers => "transformers",
            Runtime::LlamaCpp => "llama.cpp",
            Runtime::OnnxRuntime => "onnxruntime",
        }
    }

    /// Name of the format that it loads, which is also the extension of its files.
    pub(crate) fn format(self) -> &'static str {
        match self {
            Runtime::Vllm | Runtime::Sglang | Runtime::Transformers => "safetensors",
            Runtime::LlamaCpp => "gguf",
            Runtime::OnnxRuntime => "onnx",
        }
    }

    /// Versions whose rules are known, the newest last. The version of llama.cpp is that of llama-cpp-python
    /// 0.3.36.
    pub fn versions(self) -> &'static [&'static str] {
        match self {
            Runtime::Vllm => &["0.11", "0.33"],
            Runtime::Sglang => &["0.5"],
            Runtime::Transformers => &["5.23"],
            Runtime::LlamaCpp => &["2026"],
            Runtime::OnnxRuntime => &["1.16", "1.17", "1.18", "1.19", "1.20", "1.23", "1.31"],
        }
    }
}

/// A version of a runtime, written as `vllm@0.33`. Without a version, the newest one whose rules are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    runtime: Runtime,
    version: &'static str,
}

impl Target {
    /// The newest version of a runtime whose rules are known.
    pub fn newest(runtime: Runtime) -> Target {
        Target { runtime, version: runtime.versions().last().copied().unwrap_or_default() }
    }

    /// The runtime.
    pub fn runtime(self) -> Runtime {
        self.runtime
    }

    /// The version.
    pub fn version(self) -> &'static str {
        self.version
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.runtime.name(), self.version)
    }
}

impl FromStr for Target {
    type Err = ParseError;

    /// Parses `RUNTIME` or `RUNTIME@VERSION`. A patch release has the rules of its minor version.
    fn from_str(text: &str) -> Result<Target, ParseError> {
        let (name, version) = text.split_once('@').map_or((text, None), |(name, version)| (name, Some(version)));
        let Some(runtime) = Runtime::ALL.into_iter().find(|runtime| runtime.name() == name) else {
            let names = Runtime::ALL.map(Runtime::name).join(", ");
            return Err(format!("unknown runtime `{name}`: use one of {names}").into());
        };
        let Some(version) = version else { return Ok(Target::newest(runtime)) };
        let is_known = |known: &&str| version == *known || version.strip_prefix(*known).is_some_and(|rest| rest.starts_with('.'));
        match runtime.versions().iter().copied().find(is_known) {
            Some(version) => Ok(Target { runtime, version }),
            None => Err(format!("the rules of {name} {version} are not known: use one of {}", runtime.versions().join(", ")).into()),
        }
    }
}

impl Serialize for Target {
    /// Writes `RUNTIME@VERSION`.
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}@{}", self.runtime.name(), self.version))
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Target, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A row of the table of a runtime, for outputs of type `S`.
struct Rule<S> {
    name: &'static str,
    /// The rule as a sentence.
    sentence: &'static str,
    /// File of the runtime, or its documentation.
    source: &'static str,
    /// Versions that the rule applies to; all if the list is empty.
    versions: &'static [&'static str],
    needs: Needs,
    check: fn(&S, Target) -> Result<Vec<Finding>>,
}

/// The input of a rule, in the order in which a run determines it. Later variants include the earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Needs {
    /// Neither names nor shapes and types of weights.
    Configuration,
    /// Names, shapes and planned types of weights.
    Weights,
    /// Final types and values of the written tensors.
    Tensors,
    /// The written files.
    Files,
}

/// Part of an output that violates a rule.
struct Finding {
    subject: String,
    reason: String,
    hint: String,
    /// The next step for a run, whose output does not exist; `None` if it is the same.
    hint_for_run: Option<&'static str>,
}

impl Finding {
    fn new(subject: impl Into<String>, reason: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { subject: subject.into(), reason: reason.into(), hint: hint.into(), hint_for_run: None }
    }

    fn for_run(self, hint: &'static str) -> Finding {
        Finding { hint_for_run: Some(hint), ..self }
    }
}

/// Most layers of a model, so that an invalid count is not expanded.
const MOST_LAYERS: u64 = 1 << 16;

/// The number of the layer to which a tensor belongs, if its name starts with `prefix` and that number.
fn layer_number(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.split('.').next()?.parse().ok()
}

/// A finding for each layer, up to a `specified` count, of which no tensor is stored. The names of the
/// tensors of a layer start with `prefix` and its number. Files without such names have none.
fn missing_layers<'n>(names: impl Iterator<Item = &'n str>, prefix: &str, count: u64, specified: &str, hint: &str) -> Vec<Finding> {
    let stored: BTreeSet<u64> = names.filter_map(|name| layer_number(name, prefix)).collect();
    if stored.is_empty() || count > MOST_LAYERS {
        return Vec::new();
    }
    let finding = |layer: u64| Finding::new(format!("{prefix}{layer}"), format!("is missing, but {specified}"), hint);
    (0..count).filter(|layer| !stored.contains(layer)).map(finding).collect()
}

/// The stored layers whose number is `count` or higher.
fn extra_layers<'n>(names: impl Iterator<Item = &'n str>, prefix: &str, count: u64) -> impl Iterator<Item = String> {
    let stored: BTreeSet<u64> = names.filter_map(|name| layer_number(name, prefix)).collect();
    stored.into_iter().filter(move |layer| *layer >= count).map(move |layer| format!("{prefix}{layer}"))
}

/// A violated rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Violation {
    /// Name of the rule.
    pub rule: &'static str,
    /// The tensor, key or file.
    pub subject: String,
    /// Why the runtime does not load it.
    pub reason: String,
    /// The next step.
    pub hint: String,
    /// File of the runtime, or its documentation.
    pub source: &'static str,
    #[serde(skip)]
    hint_for_run: Option<&'static str>,
}

impl Violation {
    /// The next step after a run that was refused, so that its output does not exist.
    pub(crate) fn hint_for_run(&self) -> &str {
        self.hint_for_run.unwrap_or(&self.hint)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: `{}` {}; {}", self.rule, self.subject, self.reason, self.hint)
    }
}

/// A rule that was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CheckedRule {
    /// Name.
    pub name: &'static str,
    /// The rule as a sentence.
    pub sentence: &'static str,
    /// File of the runtime, or its documentation.
    pub source: &'static str,
    /// Whether the output complies with it.
    pub is_met: bool,
}

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Checked {
    /// Name of the runtime.
    pub runtime: &'static str,
    /// Version of the runtime.
    pub version: &'static str,
    /// The rules of this version.
    pub rules: Vec<CheckedRule>,
    /// All violations, at most ten for each rule and file.
    pub violations: Vec<Violation>,
}

impl Checked {
    /// The result without any rule.
    pub(crate) fn new(target: Target) -> Checked {
        Checked { runtime: target.runtime.name(), version: target.version, rules: Vec::new(), violations: Vec::new() }
    }

    /// The result for an output without a file that the runtime loads.
    fn without_file(target: Target, path: &Path) -> Checked {
        let reason = format!("has no .{} file", target.runtime.format());
        Checked::of_other_format(target, path.display().to_string(), reason)
    }

    /// The result for a run that writes no file that the runtime loads.
    pub(crate) fn without_format(target: Target) -> Checked {
        Checked::of_other_format(target, "export".to_owned(), format!("does not contain `{}`, the format of {target}", target.runtime.format()))
    }

    fn of_other_format(target: Target, subject: String, reason: String) -> Checked {
        let (name, sentence, source) = ("file-format", "The output has a file in the format of the runtime.", "documentation of the runtime");
        let mut checked = Checked::new(target);
        checked.rules.push(CheckedRule { name, sentence, source, is_met: false });
        let hint = format!("write one with `--export {}`", target.runtime.format());
        checked.violations.push(Violation { rule: name, subject, reason, hint, source, hint_for_run: None });
        checked
    }

    /// Whether the output complies with all rules.
    pub fn is_met(&self) -> bool {
        self.violations.is_empty()
    }
}

/// The files of a format, as runtimes read them.
trait ReadByRuntime {
    /// Checks the rules of a runtime that loads the format and that need only what is `determined`.
    fn check(&self, target: Target, determined: Needs) -> Result<Checked>;
}

impl ReadByRuntime for Folder {
    fn check(&self, target: Target, determined: Needs) -> Result<Checked> {
        match target.runtime {
            Runtime::Vllm => apply(vllm::RULES, self, target, determined),
            Runtime::Sglang => apply(sglang::RULES, self, target, determined),
            Runtime::Transformers => apply(transformers::RULES, self, target, determined),
            Runtime::LlamaCpp | Runtime::OnnxRuntime => Ok(Checked::without_format(target)),
        }
    }
}

impl ReadByRuntime for llama_cpp::Contents {
    fn check(&self, target: Target, determined: Needs) -> Result<Checked> {
        apply(llama_cpp::RULES, self, target, determined)
    }
}

/// The files of a format that a run will write, from its plan.
#[doc(hidden)]
pub struct Planned {
    files: Box<dyn ReadByRuntime>,
    /// The extent of the plan, unless it is an estimate.
    determined: Needs,
}

impl Planned {
    /// Checks the rules of a runtime that the plan decides. `is_estimate`: whether the weights of the output
    /// may differ from the planned ones.
    pub(crate) fn check(&self, target: Target, is_estimate: bool) -> Result<Checked> {
        self.files.check(target, if is_estimate { Needs::Configuration } else { self.determined })
    }
}

/// Checks an output against the rules of a runtime.
///
/// # Errors
/// The output cannot be read: a file is missing or malformed.
pub fn check(path: impl AsRef<Path>, target: Target) -> Result<Checked> {
    WrittenOutput::new(path.as_ref()).check(target)
}

/// A written output. Runtimes that load model folders share the contents of the folder, which is read once.
pub(crate) struct WrittenOutput<'p> {
    path: &'p Path,
    folder: Option<Folder>,
}

impl<'p> WrittenOutput<'p> {
    pub(crate) fn new(path: &'p Path) -> WrittenOutput<'p> {
        WrittenOutput { path, folder: None }
    }

    /// As [`check`].
    pub(crate) fn check(&mut self, target: Target) -> Result<Checked> {
        let path = self.path;
        files::kind(path).map_err(Error::io("open", path))?;
        match target.runtime {
            Runtime::Vllm | Runtime::Sglang | Runtime::Transformers => {
                let folder = self.folder.take().map_or_else(|| Folder::open(path, target), Ok)?;
                self.folder.insert(folder).check(target, Needs::Files)
            }
            Runtime::LlamaCpp => match llama_cpp::find(path)? {
                Some(file) => llama_cpp::Contents::open(&file)?.check(target, Needs::Files),
                None => Ok(Checked::without_file(target, path)),
            },
            Runtime::OnnxRuntime => running::check(path, target),
        }
    }
}

/// Checks the rules of a table that apply to a version and need only what is `determined`.
fn apply<S>(rules: &[Rule<S>], output: &S, target: Target, determined: Needs) -> Result<Checked> {
    let mut checked = Checked::new(target);
    let applies = |rule: &&Rule<S>| rule.needs <= determined && (rule.versions.is_empty() || rule.versions.contains(&target.version));
    for rule in rules.iter().filter(applies) {
        let mut findings = (rule.check)(output, target)?;
        checked.rules.push(CheckedRule { name: rule.name, sentence: rule.sentence, source: rule.source, is_met: findings.is_empty() });
        let unlisted = findings.len().saturating_sub(MOST);
        findings.truncate(MOST);
        if unlisted > 0
            && let Some(last) = findings.last_mut()
        {
            last.reason += &format!(" (and {unlisted} more)");
        }
        checked.violations.extend(findings.into_iter().map(|found| Violation {
            rule: rule.name,
            subject: found.subject,
            reason: found.reason,
            hint: found.hint,
            source: rule.source,
            hint_for_run: found.hint_for_run,
        }));
    }
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_parsed() {
        let version = |text: &str| text.parse::<Target>().map(Target::version).map_err(|e| e.to_string());
        assert_eq!(version("vllm"), Ok("0.33"));
        assert_eq!(version("vllm@0.11.2"), Ok("0.11"));
        assert_eq!(version("onnxruntime@1.18"), Ok("1.18"));
        assert_eq!(version("vllm@0.1").unwrap_err(), "the rules of vllm 0.1 are not known: use one of 0.11, 0.33");
        assert_eq!(version("tgi").unwrap_err(), "unknown runtime `tgi`: use one of vllm, sglang, transformers, llama.cpp, onnxruntime");
        for runtime in Runtime::ALL {
            let newest = Target::newest(runtime);
            assert_eq!(serde_json::from_value::<Target>(serde_json::to_value(newest).unwrap()).unwrap(), newest);
        }
    }

    #[test]
    fn tables_name_known_versions() {
        fn named<S>(runtime: Runtime, rules: &[Rule<S>]) {
            let mut names: Vec<&str> = rules.iter().map(|rule| rule.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), rules.len(), "{runtime:?}");
            let versions = rules.iter().flat_map(|rule| rule.versions);
            versions.for_each(|version| assert!(runtime.versions().contains(version), "{runtime:?}: {version}"));
        }
        named(Runtime::Vllm, vllm::RULES);
        named(Runtime::Sglang, sglang::RULES);
        named(Runtime::Transformers, transformers::RULES);
        named(Runtime::LlamaCpp, llama_cpp::RULES);
    }
}
