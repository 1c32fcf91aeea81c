//! Notes about what a GGUF file cannot represent.

use std::collections::{BTreeMap, BTreeSet};

use super::Gguf;
use super::file_type::FileType;
use super::tensors::{Planned, is_frequency};
use crate::arch::GgufFamily;
use crate::error::counted;
use crate::model::Model;
use crate::run_state::{Applied, RunState, WARNING};
use crate::store::gguf::Kind;
use crate::store::{ActivationScheme, DType, Encoding, Pattern, Weight};

/// Name of the pass that chooses blocks.
const QUANTIZE: &str = "quantize";

/// Notes about precision and quantization that the file cannot represent.
/// `split`: the weights of which the file has no tensor with the same rows.
pub(super) fn loss_notes(options: &Gguf, model: &Model, (all, split): (&[Planned], &BTreeSet<String>), run: &RunState, file: &str) -> Vec<String> {
    let file_type = options.file_type;
    let weights = &model.weights.by_name;
    let with_blocks = all.iter().filter(|planned| planned.keeps_blocks()).count();
    let with_codes: BTreeSet<&String> = all.iter().filter(|planned| planned.keeps_codes() && !planned.keeps_blocks()).map(|planned| &planned.name).collect();
    let is_dequantized = |(name, weight): &(&String, &Weight)| weight.encoding != Encoding::Dense && !with_codes.contains(name);
    let dequantized: BTreeMap<&String, &Weight> = weights.iter().filter(is_dequantized).collect();
    let is_quantized_twice = dequantized.keys().any(|name| run.is_changed(name)) && !is_float(file_type);
    let activations = quantized_inputs(model);
    let mut notes = Vec::new();
    let halves: BTreeSet<&str> = all.iter().filter(|planned| planned.target == Kind::Plain(DType::F16)).map(|planned| planned.name.as_str()).collect();
    let rounded = halves.into_iter().filter(|name| weights.get(*name).is_some_and(|weight| weight.dtype == DType::BF16)).count();
    if rounded > 0 {
        notes.push(format!(
            "{file}: {rounded} BF16 matrices are converted to F16, which represents small values less precisely: use the type BF16 to keep them"
        ));
    }
    let frequencies = weights.keys().filter(|name| is_frequency(name)).count();
    if frequencies > 0 {
        notes.push(format!(
            "{file}: {} of rotary frequencies (`inv_freq`) not written: runtimes compute them from the metadata",
            counted(frequencies, "tensor")
        ));
    }
    if with_blocks > 0 {
        notes.push(format!("{file}: {} written with the blocks of `quantize`", counted(with_blocks, "weight")));
    }
    notes.extend(excluded_note(options, model, all, run, file));
    if !with_codes.is_empty() {
        notes.push(format!("{file}: {} written with the same codes, and scales as 16-bit floats", counted(with_codes.len(), "quantized weight")));
    }
    if !dequantized.is_empty() {
        let smaller = match (type_with_codes(weights, split, file_type), smaller_type(weights, file_type)) {
            (Some(kept), _) => format!(
                "; the file has their rounding errors, but is not smaller: use `--export \"gguf: {{ type: {kept:?}{} }}\"`, which stores the same codes in blocks",
                types_of_floats(options, kept, model, run)
            ),
            (None, Some(smaller)) => format!(
                "; the file has their rounding errors, but is not smaller: no type of GGUF files stores these codes; for blocks of the same width, use `compress cast MODEL -o {file} --to f32 --export 'gguf: {{ type: {smaller:?} }}'` on the original model, without `quantize`"
            ),
            (None, None) => String::new(),
        };
        let once = format!("`compress cast MODEL -o {file} --to f32 --export 'gguf: {{ type: {file_type:?} }}'`");
        let twice = format!("; the weights are quantized twice, with the errors of both: quantize them only to the types of the file, as in {once}");
        let twice = if is_quantized_twice { twice } else { String::new() };
        let warning = if smaller.is_empty() && twice.is_empty() { "" } else { WARNING };
        notes.push(format!(
            "{warning}{file}: {} dequantized and converted to the types of the file{smaller}{twice}",
            counted(dequantized.len(), "quantized weight")
        ));
    }
    if activations > 0 {
        notes.push(format!(
            "{file}: the recipe quantizes the inputs of {}, which a GGUF file cannot specify: runtimes use their own settings",
            counted(activations, "layer")
        ));
    }
    notes
}

/// A warning about matrices that `targets` or `ignore` of the passes that choose blocks exclude, but that the
/// file stores in blocks, unless `types` selects their type.
fn excluded_note(options: &Gguf, model: &Model, all: &[Planned], run: &RunState, file: &str) -> Option<String> {
    let has_blocks = |name: &String| model.weights.by_name.get(name).is_some_and(|weight| weight.exact_blocks().is_some());
    // Later passes may have renamed the weights.
    let with_blocks: Vec<&String> = model.weights.by_name.keys().filter(|name| has_blocks(name)).collect();
    let chooses_blocks =
        |applied: &&Applied| applied.name == QUANTIZE && with_blocks.iter().any(|name| applied.tensors.contains(run.name_after(applied, name)));
    let passes = run.history.iter().filter(chooses_blocks);
    let patterns = |applied: &Applied, key: &str| -> Vec<Pattern> {
        applied.options.get(key).and_then(|patterns| serde_json::from_value(patterns.clone()).ok()).unwrap_or_default()
    };
    let passes: Vec<(&Applied, [Vec<Pattern>; 2])> = passes.map(|applied| (applied, [patterns(applied, "targets"), patterns(applied, "ignore")])).collect();
    let matches = |patterns: &[Pattern], name: &str| patterns.iter().any(|pattern| pattern.matches(name));
    let is_excluded = |(applied, [targets, ignore]): &(&Applied, [Vec<Pattern>; 2]), name: &str| {
        let name = run.name_after(applied, name);
        (!targets.is_empty() && !matches(targets, name)) || matches(ignore, name)
    };
    let is_requested = |planned: &Planned| {
        let stacked = GgufFamily::split_expert(&planned.gguf_name).map(|(stacked, _)| stacked);
        let names = [Some(&planned.name), Some(&planned.gguf_name), stacked.as_ref()];
        options.types.iter().any(|(pattern, _)| names.into_iter().flatten().any(|name| pattern.matches(name)))
    };
    let in_blocks = all.iter().filter(|planned| matches!(planned.kind, Kind::Blocks(_)) && !has_blocks(&planned.name) && !is_requested(planned));
    let excluded = in_blocks.filter(|planned| !passes.is_empty() && passes.iter().all(|pass| is_excluded(pass, &planned.name)));
    let excluded: BTreeSet<&String> = excluded.map(|planned| &planned.name).collect();
    let first = excluded.first()?;
    let ignored = passes.iter().flat_map(|(_, [_, ignore])| ignore).find(|pattern| pattern.matches(first));
    // A pattern that also matches blocks of a pass would be an error.
    let pattern = pattern_for(first, ignored.map(ToString::to_string), &model.weights.by_name, |name, _| has_blocks(name));
    Some(format!(
        "{WARNING}{file}: the types of the file also quantize {} that `targets` or `ignore` of `quantize` exclude, such as `{first}`; `types` keep them as floats, as in `--export \"gguf: {{ types: {{ '{pattern}': F16 }} }}\"`",
        counted(excluded.len(), "weight")
    ))
}

/// A pattern that matches a weight, but no weights that `is_other`: the preferred one, that of the same
/// matrix of all layers, or the name.
fn pattern_for(name: &str, preferred: Option<String>, weights: &BTreeMap<String, Weight>, is_other: impl Fn(&String, &Weight) -> bool) -> String {
    let of_layers = name.split('.').map(|part| if part.parse::<usize>().is_ok() { "*" } else { part }).collect::<Vec<_>>().join(".");
    let is_distinct = |pattern: &String| {
        let matches = |pattern: Pattern| weights.iter().any(|(name, weight)| is_other(name, weight) && pattern.matches(name));
        pattern.parse::<Pattern>().is_ok_and(|pattern| !matches(pattern))
    };
    preferred.into_iter().chain([of_layers]).find(is_distinct).unwrap_or_else(|| name.to_owned())
}

/// The option `types` that keeps matrices of floats as in the current file, such as embeddings, if a file of
/// type `kept` would quantize them; empty otherwise.
fn types_of_floats(options: &Gguf, kept: FileType, model: &Model, run: &RunState) -> String {
    let Ok(planned) = (Gguf { file_type: kept, ..options.clone() }).prepare(model, run, false) else { return String::new() };
    let weights = &model.weights.by_name;
    let is_quantized = |name: &String, weight: &Weight| weight.encoding != Encoding::Dense && planned.names.contains(name);
    let in_blocks = |encoding: &str| !["f64", "f32", "f16", "bf16"].contains(&encoding);
    let rounded = planned
        .names
        .iter()
        .zip(&planned.encodings)
        .filter(|(name, encoding)| weights.get(*name).is_some_and(|weight| weight.encoding == Encoding::Dense && in_blocks(encoding)));
    let patterns: BTreeSet<String> = rounded.map(|(name, _)| pattern_for(name, None, weights, is_quantized)).collect();
    let selected = options.types.iter().map(|(pattern, kind)| format!("'{pattern}': {}", serde_json::json!(kind).as_str().unwrap_or_default()));
    let types: Vec<String> = selected.chain(patterns.iter().map(|pattern| format!("'{pattern}': {:?}", options.file_type))).collect();
    if types.is_empty() { String::new() } else { format!(", types: {{ {} }}", types.join(", ")) }
}

/// Whether most matrices of a file of this type are floats.
fn is_float(file_type: FileType) -> bool {
    matches!(file_type.most(), Kind::Plain(_))
}

/// The smallest file type whose blocks represent the codes of all quantized weights, if `file_type` is a
/// float type.
fn type_with_codes(weights: &BTreeMap<String, Weight>, split: &BTreeSet<String>, file_type: FileType) -> Option<FileType> {
    let mut types = [FileType::Q4_0, FileType::Q4_1, FileType::Q5_0, FileType::Q5_1, FileType::Q8_0].into_iter().filter(|_| is_float(file_type));
    let quantized = || weights.iter().filter(|(_, weight)| weight.encoding != Encoding::Dense);
    let keeps_codes = |kind| quantized().all(|(name, weight)| !split.contains(name) && weight.block_params(kind, name).is_some());
    types.find(|file_type| matches!(file_type.most(), Kind::Blocks(kind) if keeps_codes(kind)))
}

/// The file type with about as many bits as the quantized weights, if `file_type` is a float type.
fn smaller_type(weights: &BTreeMap<String, Weight>, file_type: FileType) -> Option<FileType> {
    if !is_float(file_type) {
        return None;
    }
    let widths = weights.values().filter_map(|weight| match &weight.encoding {
        Encoding::Quantized(spec) => Some((spec.codes.bits(), weight.shape.last().is_some_and(|row| row.is_multiple_of(256)))),
        Encoding::Dense => None,
    });
    let (bits, fits) = widths.reduce(|(most, all), (bits, fits)| (most.max(bits), all && fits))?;
    Some(match (bits, fits) {
        (..=4, true) => FileType::Q4_K_M,
        (..=4, false) => FileType::Q4_0,
        (5, true) => FileType::Q5_K_M,
        (5, false) => FileType::Q5_0,
        (6, true) => FileType::Q6_K,
        _ => FileType::Q8_0,
    })
}

/// Number of layers whose inputs are quantized.
pub(super) fn quantized_inputs(model: &Model) -> usize {
    let quantized = |weight: &&Weight| matches!(&weight.encoding, Encoding::Quantized(spec) if spec.activations != ActivationScheme::None);
    model.weights.by_name.values().filter(quantized).count()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::{Bytes, Codes, Granularity, QuantizationSpec};

    /// The codes of weights whose rows are stored in other tensors are not kept.
    #[test]
    fn no_type_keeps_the_codes_of_split_weights() {
        let (codes, granularity) = (Codes::INT8, Granularity::Group(32));
        let spec = QuantizationSpec { codes, granularity, symmetric: true, scale_dtype: DType::F32, activations: ActivationScheme::None };
        let source = Bytes { dtype: DType::F32, bytes: vec![0; 256] };
        let weight = Weight::new(DType::F32, vec![2, 32], Encoding::Quantized(spec), Arc::new(source));
        let (name, weights) = ("a".to_owned(), BTreeMap::from([("a".to_owned(), weight)]));
        assert_eq!(type_with_codes(&weights, &BTreeSet::new(), FileType::F16), Some(FileType::Q8_0));
        assert_eq!(type_with_codes(&weights, &BTreeSet::from([name]), FileType::F16), None);
    }
}
