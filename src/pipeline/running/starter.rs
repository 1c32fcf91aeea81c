//! Writes a commented first recipe for a model.
//!
//! Lines that start with `# ` are explanations. Lines that start with `#` and no space are YAML that the
//! user can enable.

use std::collections::BTreeMap;
use std::path::Path;

use crate::arch::{self, ModelKind, Settings};
use crate::model::{Model, ModelPart, is_linear, part};
use crate::report::format::{bytes, count, percent};
use crate::store::Encoding;

/// Share of all bytes from which quantizing the embedding tables is suggested.
const LARGE_TABLE: f64 = 0.15;

/// Extensions of models that are files.
const FILES: [&str; 3] = [".safetensors", ".gguf", ".onnx"];
/// Length of suggested texts in tokens, unless the model accepts fewer.
const LENGTH: u64 = 512;
/// Stands for the folder of the user's images.
const PLACEHOLDER: &str = "path/to/images";

/// Properties of a model that the recipe depends on.
struct Facts<'m> {
    model: &'m Model,
    /// Kind of the model; `None` if its family is not supported.
    kind: Option<ModelKind>,
    /// Whether the model has a graph, and so can be evaluated, exported to ONNX and pruned structurally.
    runs: bool,
    quantized: bool,
    /// Whether the weights are blocks of a quantized GGUF file.
    has_blocks: bool,
    has_linear: bool,
    /// The dtype of most of the bytes.
    dtype: String,
    /// How most of the bytes are stored.
    stored: String,
    /// Bytes of each part of the model, the largest first.
    parts: Vec<(ModelPart, u64)>,
}

impl Facts<'_> {
    fn new(model: &Model) -> Facts<'_> {
        let (mut dtypes, mut stored, mut parts) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::<ModelPart, u64>::new());
        for (name, weight) in &model.weights.by_name {
            *dtypes.entry(weight.dtype.to_string().to_lowercase()).or_default() += weight.stored_bytes;
            *stored.entry(weight.describe_stored()).or_default() += weight.stored_bytes;
            *parts.entry(part(name, &weight.shape)).or_default() += weight.stored_bytes;
        }
        let mut parts: Vec<(ModelPart, u64)> = parts.into_iter().collect();
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let runs = model.graph().is_ok();
        let convolutions = parts.first().is_some_and(|(part, _)| *part == ModelPart::Convolutions);
        let supported =
            arch::family(model.config.model_type()).filter(|family| family.is_run()).map(|family| family.kind_of(&Settings::new(model.config.values())));
        let kind = supported.or((runs && convolutions).then_some(ModelKind::Convolutional));
        let has_blocks = is_gguf(model) && model.weights.by_name.values().any(|weight| weight.stored_type.is_some());
        Facts {
            model,
            kind,
            runs,
            quantized: has_blocks || model.weights.by_name.values().any(|weight| weight.encoding != Encoding::Dense),
            has_blocks,
            has_linear: model.weights.by_name.iter().any(|(name, weight)| is_linear(name, weight)),
            dtype: most(dtypes),
            stored: most(stored),
            parts,
        }
    }

    /// The file type of fewer bits per weight that is suggested for a quantized GGUF file; `None` for files
    /// with so few bits that rounding them again would ruin them.
    fn smaller_type(&self) -> Option<&'static str> {
        let bits = 8.0 * self.total() as f64 / self.model.weights.parameters().max(1) as f64;
        [(5.0, "Q4_K_M"), (4.0, "Q3_K_M")].into_iter().find(|(least, _)| bits > *least).map(|(_, name)| name)
    }

    fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Share of a part in all bytes.
    fn share(&self, part: ModelPart) -> f64 {
        let bytes = self.parts.iter().find(|(other, _)| *other == part).map_or(0, |(_, bytes)| *bytes);
        bytes as f64 / self.total().max(1) as f64
    }

    fn has_large_table(&self) -> bool {
        self.share(ModelPart::Embeddings) >= LARGE_TABLE
    }

    fn has_file(&self, name: &str) -> bool {
        self.model.auxiliary.files.iter().chain(self.model.auxiliary.synthesized.keys()).any(|file| file == Path::new(name))
    }
}

/// The name with the most bytes.
fn most(bytes: BTreeMap<String, u64>) -> String {
    bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map_or_else(|| "f32".into(), |(name, _)| name)
}

/// Whether a model was opened from a GGUF file.
fn is_gguf(model: &Model) -> bool {
    model.weight_files.iter().any(|file| file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")))
}

/// Returns a commented recipe for a model, which is referred to as `path`. `file` is the name of the
/// recipe file, for the commands in the comments.
pub fn starter(model: &Model, path: &str, file: &str) -> String {
    let facts = Facts::new(model);
    let name = Path::new(path).file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    let name = FILES.iter().find_map(|extension| name.strip_suffix(extension)).unwrap_or(&name).to_owned();
    let mut out = Vec::new();
    head(&facts, &name, file, &mut out);
    out.push(String::new());
    out.push(format!("model: {}", scalar(path)));
    out.push(String::new());
    data(&facts, path, &mut out);
    passes(&facts, &mut out);
    out.push(String::new());
    export(&facts, &mut out);
    out.push(String::new());
    out.push("# The folder appears complete or not at all; an existing folder is replaced only with --force.".into());
    out.push(format!("output: {}", scalar(&format!("out/{name}"))));
    out.join("\n") + "\n"
}

/// A string as a YAML scalar, quoted if necessary.
fn scalar(text: &str) -> String {
    let is_plain = !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
        && text.starts_with(|c: char| c.is_alphabetic() || "/.".contains(c));
    let is_keyword = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"].contains(&text.to_lowercase().as_str());
    if is_plain && !is_keyword && text != "." { text.to_owned() } else { serde_json::Value::from(text).to_string() }
}

/// A string for a comment, with control characters replaced.
fn comment_text(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn head(facts: &Facts, name: &str, file: &str, out: &mut Vec<String>) {
    let (model, total) = (facts.model, facts.total());
    let family = Some(model.config.model_type()).filter(|family| !family.is_empty()).map_or(String::new(), |family| format!("{family}, "));
    let parts: Vec<String> = facts.parts.iter().filter(|(_, b)| b * 100 >= total).map(|(part, b)| format!("{} {}", part.name(), percent(*b, total))).collect();
    out.push(format!(
        "# A recipe for {}: {}{} parameters in {}, {}.",
        comment_text(name),
        comment_text(&family),
        count(model.weights.parameters()),
        facts.stored,
        bytes(total)
    ));
    out.push(format!("# Size by part: {}.", parts.join(", ")));
    if model.tied_names().iter().any(|(alias, _)| !alias.ends_with("embed_tokens.weight")) {
        out.push("# The output head is tied to the embedding table: they are one weight.".into());
    }
    out.push("#".into());
    out.push(format!("#     compress plan {file}     shows what the recipe would do, without reading a tensor"));
    out.push(format!("#     compress run {file}      runs it, and writes report.html"));
    out.push("#".into());
    out.push("# Lines that begin with # and no space are suggestions: remove the # to enable them.".into());
    out.push("# `compress PASS --help` explains the options of a pass; `compress schema` writes a schema of all options for editors.".into());
}

fn data(facts: &Facts, path: &str, out: &mut Vec<String>) {
    if let Err(error) = facts.model.require_matching_weights() {
        out.push(format!("# config.json does not match the weights: {error}."));
        out.push("# Correct it first: runtimes are likely to refuse the model, and accuracy cannot be measured.".into());
        out.push(String::new());
        return;
    }
    if !facts.runs {
        out.push("# compress cannot run this model: it can transform and verify the weights, but not measure accuracy.".into());
        out.push("# `compress inspect --graph` shows the reason. You can describe the model with a graph.json next to the weights.".into());
        out.push(String::new());
        return;
    }
    let has_text = matches!(facts.kind, Some(ModelKind::Encoder | ModelKind::Decoder));
    let has_images = matches!(facts.kind, Some(ModelKind::VisionTransformer | ModelKind::Convolutional | ModelKind::Detector));
    out.push("# Samples; paths are relative to this file. The model is measured on `evaluation` before and after compression: with labels".into());
    out.push("# by a score, without labels by the fidelity to the original. Passes that run the model use `calibration`: a hundred samples".into());
    out.push("# similar to those in production; labels are ignored.".into());
    if has_text && !facts.has_file("tokenizer.json") {
        out.push("# The folder has no tokenizer.json, which text data needs; use arrays of token ids instead: { arrays: tokens.safetensors }.".into());
    }
    if has_images && !["preprocessor_config.json", "processor_config.json"].iter().any(|file| facts.has_file(file)) {
        out.push("# The folder has no preprocessor_config.json: specify the preprocessing with resize, rescale, mean and std.".into());
    }
    let architecture = facts.model.config.class();
    let text = |task: &str, more: &str| {
        let positions = ["max_position_embeddings", "n_positions"].iter().find_map(|key| arch::text_values(facts.model.config.values()).get(*key)?.as_u64());
        format!("{{ text: book.txt{task}, max_length: {}{more} }}", positions.map_or(LENGTH, |positions| positions.min(LENGTH)))
    };
    let (language, windows, images) = (text(", task: language-modelling", ""), text("", ", samples: 64"), format!("{{ images: {PLACEHOLDER}, samples: 256 }}"));
    let (evaluation, calibration) = match facts.kind {
        Some(ModelKind::Encoder) if architecture.ends_with("ForSequenceClassification") => {
            ("{ text: test.tsv, text_column: text, label_column: label }", "{ text: sentences.txt, samples: 128 }")
        }
        Some(ModelKind::Encoder) if facts.has_file("modules.json") => {
            ("{ text: pairs.tsv, text_column: first, pair_column: second, label_column: score }", "{ text: sentences.txt, samples: 128 }")
        }
        Some(ModelKind::Encoder) => ("{ text: sentences.txt, task: fidelity }", "{ text: sentences.txt, samples: 128 }"),
        Some(ModelKind::Decoder) => (language.as_str(), windows.as_str()),
        Some(ModelKind::VisionTransformer | ModelKind::Convolutional) => ("{ images: test }", images.as_str()),
        Some(ModelKind::Detector) => ("{ images: test, task: fidelity }", images.as_str()),
        Some(ModelKind::DualEncoder | ModelKind::EncoderDecoder | ModelKind::DraftHead) | None => {
            ("{ arrays: test.safetensors }", "{ arrays: train.safetensors, samples: 128 }")
        }
    };
    if has_images {
        out.push("# A folder of images contains one subfolder for each class.".into());
    }
    if needs_calibration(facts) {
        out.push(format!("# The pass below needs calibration samples: replace {PLACEHOLDER} by the folder of yours."));
        out.push("data:".into());
        out.push(format!("  calibration: {calibration}"));
        out.push(format!("#  evaluation: {evaluation}"));
    } else {
        out.push("#data:".into());
        out.push(format!("#  evaluation: {evaluation}"));
        out.push(format!("#  calibration: {calibration}"));
    }
    out.push(String::new());
    out.push("# Measures the latency of one batch before and after; needs the evaluation samples above.".into());
    out.push("#evaluate: { latency: true }".into());
    out.push(String::new());
    search(facts, path, calibration, out);
}

/// Suggests a search for the formats of layers, which replaces the passes below.
fn search(facts: &Facts, path: &str, calibration: &str, out: &mut Vec<String>) {
    let is_text = match facts.kind {
        Some(ModelKind::Encoder | ModelKind::Decoder) => true,
        Some(ModelKind::VisionTransformer | ModelKind::Convolutional | ModelKind::Detector) => false,
        Some(ModelKind::DualEncoder | ModelKind::EncoderDecoder | ModelKind::DraftHead) | None => return,
    };
    if facts.quantized || (is_text && !facts.has_file("tokenizer.json")) {
        return;
    }
    let generates =
        arch::has_tower(facts.model.config.model_type()) || ["ForCausalLM", "LMHeadModel"].iter().any(|end| facts.model.config.class().ends_with(end));
    let is_language_model = facts.kind == Some(ModelKind::Decoder) && generates && !has_transposed_weights(facts) && facts.model.onnx.is_none();
    let limit = if is_language_model { "vllm --max-size 5bits" } else { "onnxruntime --max-loss 0.5%" };
    out.push("# Instead of the passes below, `compress auto` chooses the format of each layer for a limit of the size or the loss:".into());
    out.push("#".into());
    out.push(format!("#     compress auto {} -o out/auto \\", scalar(path)));
    out.push(format!("#         --for {limit} --calibration '{calibration}'"));
    out.push(String::new());
}

/// Whether the recipe of a model contains a placeholder.
pub fn has_placeholder(recipe: &str) -> bool {
    recipe.lines().any(|line| !line.starts_with('#') && line.contains(PLACEHOLDER))
}

/// Whether the suggested pass needs calibration samples.
fn needs_calibration(facts: &Facts) -> bool {
    facts.kind == Some(ModelKind::Convolutional) && facts.runs && !facts.quantized
}

/// Whether the family stores linear weights transposed, which int8 folders for other libraries cannot
/// express.
fn has_transposed_weights(facts: &Facts) -> bool {
    facts.model.config.has_conv1d() && facts.runs && !facts.quantized
}

/// Whether only an ONNX file is suggested, whose `precision` determines the type of floats.
fn exports_onnx(facts: &Facts) -> bool {
    needs_calibration(facts) || has_transposed_weights(facts)
}

fn passes(facts: &Facts, out: &mut Vec<String>) {
    if facts.has_blocks {
        out.push(format!("# The weights are blocks of {}: int8 and 16-bit floats would be larger or not much smaller. Rounding them again adds", facts.stored));
        out.push("# errors: for the best result, start from the original checkpoint.".into());
        out.push("passes: []".into());
        return;
    }
    if facts.quantized {
        out.push("# The weights are already quantized: for another scheme, start from the original checkpoint. Without a pass the model".into());
        out.push("# is only converted to the format below.".into());
        out.push("passes: []".into());
        return;
    }
    out.push("passes:".into());
    let mut line = |text: &str| out.push(text.to_owned());
    if facts.runs && !arch::has_tower(facts.model.config.model_type()) {
        line("  # Removes a part of the heads and neurons (or channels): smaller and faster in any runtime;");
        line("  # `repair` adjusts the remaining weights on calibration samples.");
        line("#  - prune-structured: { target: { macs: 0.75 }, importance: activation, repair: least-squares }");
    } else {
        line("  # Zeroes half of the linear weights; this saves bytes only with `layout: sparse` below.");
        line("#  - prune-unstructured: { amount: 0.5 }");
    }
    match facts.kind {
        Some(ModelKind::Convolutional) if facts.runs => {
            line("  # int8 weights and activations, with scales from calibration samples: a quarter of the size, and on a CPU two to three");
            line("  # times as fast in ONNX Runtime. Batch norms are folded into the convolutions.");
            line("  - quantize-static: { observer: mse, smooth: auto }");
            line("  # Leaves the most sensitive layers in floating point until the outputs are close enough; use it instead of the line above.");
            line("#  - quantize-static: { accuracy_goal: { min_cosine: 0.995 } }");
        }
        _ if facts.has_linear => {
            line("  # int8 weights with one scale per output channel, chosen by least squared error; activations are quantized while the");
            line("  # model runs. Needs no data; try this first.");
            if facts.has_large_table() {
                line("  # `embeddings: true` also quantizes the embedding table, a large part of this model, at almost no loss of accuracy. vLLM does");
                line("  # not load int8 embeddings; transformers 5 and ONNX Runtime do.");
                line("  - quantize-dynamic: { granularity: channel, observer: mse, embeddings: true }");
            } else {
                line("  - quantize-dynamic: { granularity: channel, observer: mse }");
            }
            if facts.kind == Some(ModelKind::Decoder) {
                line("  # For small batches, which are limited by memory bandwidth: int8 weights in groups of 128, floating-point activations.");
                line("#  - quantize-dynamic: { granularity: group, group_size: 128, activations: none, observer: mse }");
            } else if facts.runs {
                line("  # Faster on a CPU in ONNX Runtime, but needs calibration samples; use it instead of the line above.");
                line("#  - quantize-static: { observer: mse, smooth: auto }");
            }
        }
        _ => {
            line("  # The model has no linear layers to quantize to int8; 16-bit floats halve the size.");
            line(if facts.dtype == "f32" { "  - cast: { to: bf16 }" } else { "  - cast: { to: f16 }" });
        }
    }
    if facts.dtype == "f32" && !exports_onnx(facts) {
        line("  # Halves the size of the other weights: bf16 has the range of f32 and eight bits of precision.");
        line("#  - cast: { to: bf16 }");
    }
}

fn export(facts: &Facts, out: &mut Vec<String>) {
    out.push("export:".into());
    let mut line = |text: &str| out.push(text.to_owned());
    if facts.has_blocks {
        match facts.smaller_type() {
            Some(name) => {
                line("  # A file with fewer bits per weight for llama.cpp; docs/gguf.md lists the types.");
                line(&format!("  - gguf: {{ type: {name} }}"));
                line("  # 16-bit floats for transformers and vLLM; several times as large.");
                line("#  - safetensors");
            }
            None => {
                line("  # Fewer bits would ruin the model: this only converts it, to 16-bit floats for transformers and vLLM. It is several");
                line("  # times as large.");
                line("  - safetensors");
            }
        }
        return;
    }
    if facts.model.onnx.is_some() {
        line("  # The same file with smaller weights.");
        line("  - onnx");
        return;
    }
    if needs_calibration(facts) {
        line("  # For ONNX Runtime, which has fast int8 kernels.");
        line("  - onnx");
        line("  # The same model for compress and for Python.");
        line("#  - safetensors");
        return;
    }
    if has_transposed_weights(facts) {
        line("  # This family stores linear weights transposed, which int8 folders for transformers and vLLM cannot express;");
        line("  # ONNX can, and so can a folder that compress reads.");
        line("  - onnx");
        line("#  - safetensors: { layout: sparse }");
        return;
    }
    line("  # A folder for transformers and vLLM (int8 in the format of compressed-tensors), with configuration and tokenizer.");
    line("  - safetensors");
    if facts.runs {
        line("  # One file for ONNX Runtime, on servers, desktops and phones.");
        line("#  - onnx");
    } else {
        line("  # Stores only non-zero values, for pruned weights. Only compress reads it; `compress densify` converts it back.");
        line("#  - safetensors: { layout: sparse }");
    }
}
