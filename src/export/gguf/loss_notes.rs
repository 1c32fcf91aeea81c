//! Notes about what a GGUF file cannot represent.

use std::collections::{BTreeMap, BTreeSet};

use super::file_type::FileType;
use super::tensors::{Planned, is_frequency};
use crate::error::counted;
use crate::model::Model;
use crate::run_state::{RunState, WARNING};
use crate::store::gguf::Kind;
use crate::store::{ActivationScheme, DType, Encoding, Weight};

/// Notes about precision and quantization that the file cannot represent.
pub(super) fn loss_notes(model: &Model, all: &[Planned], file_type: FileType, run: &RunState, file: &str) -> Vec<String> {
    let weights = &model.weights.by_name;
    let with_blocks = all.iter().filter(|planned| planned.keeps_blocks()).count();
    let with_codes: BTreeSet<&String> = all.iter().filter(|planned| planned.keeps_codes() && !planned.keeps_blocks()).map(|planned| &planned.name).collect();
    let is_dequantized = |(name, weight): &(&String, &Weight)| weight.encoding != Encoding::Dense && !with_codes.contains(name);
    let dequantized: BTreeMap<&String, &Weight> = weights.iter().filter(is_dequantized).collect();
    let by_pass = |name: &&String| run.history.iter().any(|applied| applied.tensors.contains(*name));
    let is_quantized_twice = dequantized.keys().any(by_pass) && !is_float(file_type);
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
    if !with_codes.is_empty() {
        notes.push(format!("{file}: {} written with the same codes, and scales as 16-bit floats", counted(with_codes.len(), "quantized weight")));
    }
    if !dequantized.is_empty() {
        let smaller = match (type_with_codes(weights, file_type), smaller_type(weights, file_type)) {
            (Some(kept), _) => format!(
                "; the file has their rounding errors, but is not smaller: use `--export 'gguf: {{ type: {kept:?} }}'`, which stores the same codes in blocks"
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

/// Whether most matrices of a file of this type are floats.
fn is_float(file_type: FileType) -> bool {
    matches!(file_type.most(), Kind::Plain(_))
}

/// The smallest file type whose blocks represent the codes of all quantized weights, if `file_type` is a
/// float type.
fn type_with_codes(weights: &BTreeMap<String, Weight>, file_type: FileType) -> Option<FileType> {
    let mut types = [FileType::Q4_0, FileType::Q4_1, FileType::Q5_0, FileType::Q5_1, FileType::Q8_0].into_iter().filter(|_| is_float(file_type));
    let quantized = || weights.iter().filter(|(_, weight)| weight.encoding != Encoding::Dense);
    let keeps_codes = |kind| quantized().all(|(name, weight)| weight.block_params(kind, name).is_some());
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
