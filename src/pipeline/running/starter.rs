//! A first recipe for a model, with the reasons for every line.
//!
//! A line that begins with `#` and a space explains; one that begins with `#` and no space is YAML to be switched on.

use std::collections::BTreeMap;
use std::path::Path;

use crate::arch::{self, ModelKind, Settings};
use crate::model::{Model, ModelPart, is_linear, part};
use crate::report::format::{bytes, count, percent};
use crate::store::Encoding;

/// From this part of all bytes on, embedding tables are worth making smaller.
const LARGE_TABLE: f64 = 0.15;

/// What was found out about a model.
struct Facts<'m> {
    model: &'m Model,
    /// As far as that decides what to do with it; none of a family that `compress` does not know.
    kind: Option<ModelKind>,
    /// Whether it can be run here: measured, exported to ONNX, pruned in structure.
    runs: bool,
    quantized: bool,
    has_linear: bool,
    /// The float format that most bytes are stored in.
    dtype: String,
    /// Bytes by part, the largest first.
    parts: Vec<(ModelPart, u64)>,
}

impl Facts<'_> {
    fn of(model: &Model) -> Facts<'_> {
        let (mut dtypes, mut parts) = (BTreeMap::<String, u64>::new(), BTreeMap::<ModelPart, u64>::new());
        for (name, weight) in &model.weights.by_name {
            *dtypes.entry(weight.dtype.to_string().to_lowercase()).or_default() += weight.stored_bytes;
            *parts.entry(part(name, &weight.shape)).or_default() += weight.stored_bytes;
        }
        let mut parts: Vec<(ModelPart, u64)> = parts.into_iter().collect();
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let runs = model.graph().is_ok();
        let convolutions = parts.first().is_some_and(|(part, _)| *part == ModelPart::Convolutions);
        let known = arch::family(model.config.model_type()).map(|family| family.kind_of(&Settings::new(model.config.values())));
        let kind = known.or((runs && convolutions).then_some(ModelKind::Convolutional));
        Facts {
            model,
            kind,
            runs,
            quantized: model.weights.by_name.values().any(|weight| weight.encoding != Encoding::Dense),
            has_linear: model.weights.by_name.iter().any(|(name, weight)| is_linear(name, weight)),
            dtype: dtypes.into_iter().max_by_key(|(_, bytes)| *bytes).map_or_else(|| "f32".into(), |(dtype, _)| dtype),
            parts,
        }
    }

    fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    fn share(&self, of: ModelPart) -> f64 {
        let bytes = self.parts.iter().find(|(part, _)| *part == of).map_or(0, |(_, bytes)| *bytes);
        bytes as f64 / self.total().max(1) as f64
    }

    fn large_table(&self) -> bool {
        self.share(ModelPart::Embeddings) >= LARGE_TABLE
    }

    fn has_file(&self, name: &str) -> bool {
        self.model.beside.files.iter().chain(self.model.beside.made.keys()).any(|file| file == Path::new(name))
    }

    fn architecture(&self) -> &str {
        self.model.config.get("architectures").and_then(|names| names.get(0)).and_then(serde_json::Value::as_str).unwrap_or("")
    }
}

/// A commented recipe for a model that a recipe calls `path`, to be kept under the name `file`.
pub fn starter(model: &Model, path: &str, file: &str) -> String {
    let facts = Facts::of(model);
    let name = Path::new(path).file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    let name = name.strip_suffix(".safetensors").unwrap_or(&name).to_owned();
    let mut out = Vec::new();
    head(&facts, &name, file, &mut out);
    out.push(String::new());
    out.push(format!("model: {}", scalar(path)));
    out.push(String::new());
    data(&facts, &mut out);
    passes(&facts, &mut out);
    out.push(String::new());
    export(&facts, &mut out);
    out.push(String::new());
    out.push("# The folder appears complete or not at all; an existing folder is replaced only with --force.".into());
    out.push(format!("output: {}", scalar(&format!("out/{name}"))));
    out.join("\n") + "\n"
}

/// A text as a YAML value; what it holds cannot end it.
fn scalar(text: &str) -> String {
    let plain = !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
        && text.starts_with(|c: char| c.is_alphabetic() || "/.".contains(c));
    let word = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"].contains(&text.to_lowercase().as_str());
    if plain && !word && text != "." { text.to_owned() } else { serde_json::Value::from(text).to_string() }
}

/// A text in a comment: one line, nothing that steers.
fn said(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn head(facts: &Facts, name: &str, file: &str, out: &mut Vec<String>) {
    let (model, total) = (facts.model, facts.total());
    let family = Some(model.config.model_type()).filter(|family| !family.is_empty()).map_or(String::new(), |family| format!("{family}, "));
    let parts: Vec<String> = facts.parts.iter().filter(|(_, b)| b * 100 >= total).map(|(part, b)| format!("{} {}", part.name(), percent(*b, total))).collect();
    out.push(format!("# A recipe for {}: {}{} parameters in {}, {}.", said(name), said(&family), count(model.weights.parameters()), facts.dtype, bytes(total)));
    out.push(format!("# Where the bytes are: {}.", parts.join(", ")));
    if model.tied_names().iter().any(|(alias, _)| !alias.ends_with("embed_tokens.weight")) {
        out.push("# The output head shares the embedding table: it is stored once, and changed once.".into());
    }
    out.push("#".into());
    out.push(format!("#     compress plan {file}     shows what it would do; no tensor is read"));
    out.push(format!("#     compress run {file}      does it, and writes report.html"));
    out.push("#".into());
    out.push("# Lines that begin with # and no space are suggestions: remove the # to switch them on.".into());
    out.push("# `compress PASS --help` explains the options of a pass, `compress schema` gives an editor all of them.".into());
}

fn data(facts: &Facts, out: &mut Vec<String>) {
    if !facts.runs {
        out.push("# compress cannot run this model: it can change and verify weights, but not measure accuracy:".into());
        out.push("# `compress inspect --graph` shows why; a graph.json beside the weights would describe it.".into());
        out.push(String::new());
        return;
    }
    let text = matches!(facts.kind, Some(ModelKind::Encoder | ModelKind::Decoder));
    let images = matches!(facts.kind, Some(ModelKind::VisionTransformer | ModelKind::Convolutional));
    out.push("# Samples, relative to this file. `evaluation` is what the model is measured on before and after: with labels there is a".into());
    out.push("# score, without any only the closeness to the original. `calibration` is what passes look at that need to see the model run:".into());
    out.push("# a hundred samples like those that it will meet, labels are not looked at.".into());
    if text && !facts.has_file("tokenizer.json") {
        out.push("# The folder has no tokenizer.json, which text needs; arrays of token ids do without: { arrays: tokens.safetensors }.".into());
    }
    if images && !facts.has_file("preprocessor_config.json") {
        out.push("# The folder has no preprocessor_config.json: say how images become pixels with resize, rescale, mean and std.".into());
    }
    let architecture = facts.architecture();
    let (evaluation, calibration) = match facts.kind {
        Some(ModelKind::Encoder) if architecture.ends_with("ForSequenceClassification") => {
            ("{ text: test.tsv, text_column: text, label_column: label }", "{ text: sentences.txt, samples: 128 }")
        }
        Some(ModelKind::Encoder) if facts.has_file("modules.json") => {
            ("{ text: pairs.tsv, text_column: first, pair_column: second, label_column: score }", "{ text: sentences.txt, samples: 128 }")
        }
        Some(ModelKind::Encoder) => ("{ text: sentences.txt, task: fidelity }", "{ text: sentences.txt, samples: 128 }"),
        Some(ModelKind::Decoder) => ("{ text: book.txt, task: language-modelling, max_length: 512 }", "{ text: book.txt, max_length: 512, samples: 64 }"),
        Some(ModelKind::VisionTransformer | ModelKind::Convolutional) => ("{ images: test }", "{ images: train, samples: 256 }"),
        Some(ModelKind::Pair | ModelKind::EncoderDecoder) | None => ("{ arrays: test.safetensors }", "{ arrays: train.safetensors, samples: 128 }"),
    };
    if images {
        out.push("# A folder of images holds one folder for each class.".into());
    }
    if needs_calibration(facts) {
        out.push("# The pass below needs calibration samples: put the path of yours here.".into());
        out.push("data:".into());
        out.push(format!("  calibration: {calibration}"));
        out.push(format!("#  evaluation: {evaluation}"));
    } else {
        out.push("#data:".into());
        out.push(format!("#  evaluation: {evaluation}"));
        out.push(format!("#  calibration: {calibration}"));
    }
    out.push(String::new());
    out.push("# How long one batch takes before and after; needs the evaluation samples above.".into());
    out.push("#evaluate: { latency: true }".into());
    out.push(String::new());
}

/// Whether what is proposed has to see the model run.
fn needs_calibration(facts: &Facts) -> bool {
    facts.kind == Some(ModelKind::Convolutional) && facts.runs && !facts.quantized
}

fn passes(facts: &Facts, out: &mut Vec<String>) {
    if facts.quantized {
        out.push("# The weights are int8 already: start from the original checkpoint for another scheme. Without a pass the folder is".into());
        out.push("# written again, in the format below.".into());
        out.push("passes: []".into());
        return;
    }
    out.push("passes:".into());
    let mut say = |text: &str| out.push(text.to_owned());
    if facts.runs {
        say("  # Takes a part of the heads and neurons (or channels) out: smaller and faster in any runtime;");
        say("  # `repair` adjusts the remaining weights on calibration samples.");
        say("#  - prune-structured: { amount: 0.25, importance: activation, repair: least-squares }");
    } else {
        say("  # Zeroes half of the linear weights; saves bytes only with `layout: sparse` below.");
        say("#  - prune-unstructured: { amount: 0.5 }");
    }
    match facts.kind {
        Some(ModelKind::Convolutional) if facts.runs => {
            say("  # int8 weights and activations, with scales found on calibration samples: a quarter of the size, and on a CPU two to three");
            say("  # times as fast in ONNX Runtime. Batch normalisations are folded into the convolutions.");
            say("  - quantize-static: { observer: mse, smooth: auto }");
            say("  # Keeps the most sensitive layers in floats until the outputs are close enough; use it in place of the line above.");
            say("#  - quantize-static: { accuracy_goal: { min_cosine: 0.995 } }");
        }
        _ if facts.has_linear => {
            say("  # int8 weights, one scale for each output channel, chosen by least squared error; activations are quantized while the");
            say("  # model runs. Needs no data, and is the first thing to try.");
            if facts.large_table() {
                say("  # `embeddings: true` makes the table int8 as well: it is a large part of this model, and hardly costs accuracy. vLLM does");
                say("  # not load int8 embeddings; transformers 5 and ONNX Runtime do.");
                say("  - quantize-dynamic: { granularity: channel, observer: mse, embeddings: true }");
            } else {
                say("  - quantize-dynamic: { granularity: channel, observer: mse }");
            }
            if facts.kind == Some(ModelKind::Decoder) {
                say("  # For small batches, where reading the weights takes the time: int8 weights in groups of 128, activations stay floats.");
                say("#  - quantize-dynamic: { granularity: group, group_size: 128, activations: none, observer: mse }");
            } else if facts.runs {
                say("  # Faster on a CPU in ONNX Runtime, but needs calibration samples; in place of the line above.");
                say("#  - quantize-static: { observer: mse, smooth: auto }");
            }
        }
        _ => {
            say("  # No linear layers were found, which int8 is for; 16 bits are half of the size.");
            say(if facts.dtype == "f32" { "  - cast: { to: bf16 }" } else { "  - cast: { to: f16 }" });
        }
    }
    if facts.dtype == "f32" {
        say("  # What is not quantized at half the size: the range of f32, eight bits of precision.");
        say("#  - cast: { to: bf16 }");
    }
}

fn export(facts: &Facts, out: &mut Vec<String>) {
    out.push("export:".into());
    let mut say = |text: &str| out.push(text.to_owned());
    if needs_calibration(facts) {
        say("  # For ONNX Runtime, where int8 is fast.");
        say("  - onnx");
        say("  # The same for compress and for Python.");
        say("#  - safetensors");
        return;
    }
    if facts.model.config.has_conv1d() && facts.runs && !facts.quantized {
        say("  # This family stores linear weights the other way round, which int8 folders for transformers and vLLM cannot express;");
        say("  # ONNX can, and so can a folder that compress reads.");
        say("  - onnx");
        say("#  - safetensors: { layout: sparse }");
        return;
    }
    say("  # A folder for transformers and vLLM (int8 in the format of compressed-tensors), with config, tokenizer and all.");
    say("  - safetensors");
    if facts.runs {
        say("  # One file for ONNX Runtime, on servers, desktops and phones.");
        say("#  - onnx");
    } else {
        say("  # Stores only non-zero values, after pruning; read by compress alone, `compress densify` converts it back.");
        say("#  - safetensors: { layout: sparse }");
    }
}
