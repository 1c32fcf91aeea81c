//! Maps the weights of a model to the tensors of a GGUF file.

use std::collections::{BTreeMap, BTreeSet};

use super::types::mixed_experts;
use crate::arch::GgufFamily;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::gguf::Arrangement;
use crate::store::Weight;
use crate::store::gguf::{BlockScales, Kind, Outputs, expert_outputs, expert_rows, latent_parts};

/// Checks that the configuration, from which the metadata are written, describes the weights: the file has no
/// config.json that could be corrected later, and llama.cpp adds all biases in the file.
pub(super) fn require_described(model: &Model, layers: usize, tensors: &[Planned]) -> Result<()> {
    let last = model.weights.by_name.keys().filter_map(|name| GgufFamily::layer(name)).max();
    let stored = last.map_or(0, |last| last as usize + 1);
    if stored < layers {
        let reason = format!("`num_hidden_layers` in config.json is {layers}, but the checkpoint has {stored}");
        let hint = "correct config.json if all layers are stored, otherwise download the checkpoint again";
        return Err(Error::run(format!("gguf: {}", model.path.display()), reason, hint));
    }
    model.require_matching_weights()?;
    model.require_used_biases(tensors.iter().map(|planned| planned.name.as_str()))
}

/// Whether a tensor has the frequencies of rotary position embeddings, which earlier versions of transformers
/// stored and all runtimes compute from the configuration.
pub(super) fn is_frequency(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

/// A tensor of a file, or one expert of a tensor that stacks all experts.
pub(super) struct Planned {
    /// Name in the model.
    pub name: String,
    /// Name in the file; for an expert, with its number.
    pub gguf_name: String,
    pub weight: Weight,
    /// The type for matrices of this kind.
    pub target: Kind,
    /// The type that is written, which differs from the target if rows are not a multiple of its block size.
    pub kind: Kind,
    /// Whether the rows are permuted, split or changed, so that the hash of the bytes read is not that
    /// of the weight.
    pub rearranged: bool,
    /// Number of the expert, if it belongs to one.
    pub expert: Option<usize>,
    /// How the scales of its blocks are found.
    pub scales: BlockScales,
}

impl Planned {
    /// Whether errors are weighted by the importance of columns.
    pub fn is_weighted(&self) -> bool {
        matches!(self.scales, BlockScales::Weighted(_))
    }

    /// Whether the codes and scales of a quantized weight are written.
    pub fn keeps_codes(&self) -> bool {
        self.keeps_blocks() || matches!(self.scales, BlockScales::Existing(_))
    }

    /// Whether the blocks of a pass are written.
    pub fn keeps_blocks(&self) -> bool {
        matches!(self.scales, BlockScales::Blocks(_))
    }
}

/// Sizes by which weights are split.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub experts: usize,
    pub heads: usize,
    /// Rows of keys and of values of a head that are computed from latent vectors.
    pub latent_rows: [usize; 2],
    /// The heads of recurrent layers.
    pub arrangement: Arrangement,
}

/// Whether a weight that was read from a file has the shape of the tensor there, in which filters lack their
/// axis of length one.
pub(super) fn is_shape_of(gguf_name: &str, weight: &[usize], tensor: &[usize]) -> bool {
    match weight {
        // Vectors of state space layers, which are matrices in files.
        [count] => tensor.iter().product::<usize>() == *count,
        [channels, 1, length] if GgufFamily::is_filter(gguf_name) => *tensor == [*channels, *length],
        _ => weight == tensor,
    }
}

/// The tensors of a weight, by their names in the file. A weight that fuses the gate and up projections
/// of all experts, or those of keys and values, becomes two tensors.
///
/// # Errors
/// The family has no name for the weight, or it contains a wrong number of experts.
pub(super) fn split_fused(family: &GgufFamily, name: &str, weight: Weight, layout: &Layout) -> Result<Vec<(String, Weight)>> {
    let experts = layout.experts;
    if let Some(gguf_names) = family.latent_tensors(name) {
        return Ok(gguf_names.into_iter().zip(latent_parts(&weight, layout.heads, layout.latent_rows, name)?).collect());
    }
    if let Some(tensors) = layout.arrangement.to_gguf(name, &weight)? {
        return Ok(tensors);
    }
    let Some(gguf_names) = family.fused_tensors(name) else {
        let nameless = || Error::tensor(name, format!("has no name in GGUF files of `{}`", family.architecture), "");
        let (gguf_name, mut weight) = (family.to_gguf(name).ok_or_else(nameless)?, weight);
        if GgufFamily::is_filter(&gguf_name) && weight.shape.get(1) == Some(&1) {
            weight.shape.remove(1);
        }
        return Ok(vec![(gguf_name, weight)]);
    };
    let mismatch = |weight: &Weight| {
        let reason = format!("has the shape {:?}, but the model has {experts} experts", weight.shape);
        Error::tensor(name, reason, "the checkpoint does not match config.json")
    };
    if family.is_input_major(name) {
        let outputs = weight.shape.last().copied().unwrap_or(0);
        if weight.shape.first() != Some(&experts) || !outputs.is_multiple_of(gguf_names.len()) {
            return Err(mismatch(&weight));
        }
        let parts = gguf_names.len();
        let count = outputs / parts;
        let inputs = if weight.shape.len() == 3 { weight.shape.get(1).copied().unwrap_or(1) } else { 1 };
        let alternates = family.experts.is_some_and(|experts| experts.alternates);
        let of = |part: usize| if alternates { (part, parts) } else { (part * count, 1) };
        let part = |(start, step)| expert_outputs(&weight, Outputs { inputs: 0..inputs, start, step, count }, name);
        return Ok(gguf_names.into_iter().enumerate().map(|(at, gguf_name)| (gguf_name, part(of(at)))).collect());
    }
    let rows = match weight.shape[..] {
        [count, rows, _] if count == experts && rows.is_multiple_of(gguf_names.len()) => rows / gguf_names.len(),
        _ => return Err(mismatch(&weight)),
    };
    if gguf_names.len() == 1 {
        return Ok(gguf_names.into_iter().map(|gguf_name| (gguf_name, weight.clone())).collect());
    }
    Ok(gguf_names.into_iter().enumerate().map(|(part, gguf_name)| (gguf_name, expert_rows(&weight, part * rows, rows, name))).collect())
}

/// Sorts `all` and returns the tensors of the file in this order. The experts of a layer are stacked in
/// one tensor.
pub(super) fn tensors(all: &mut [Planned], experts: usize) -> Result<Vec<(String, Kind, Vec<usize>)>> {
    let stacked_name = |gguf_name: &str| GgufFamily::split_expert(gguf_name).map_or_else(|| gguf_name.to_owned(), |(stacked, _)| stacked);
    if experts > 0 {
        all.sort_by_cached_key(|planned| (stacked_name(&planned.gguf_name), planned.expert));
    }
    let mut tensors: Vec<(String, Kind, Vec<usize>)> = Vec::new();
    let mut last: Option<&Planned> = None;
    for planned in &*all {
        let Planned { name, gguf_name, weight, kind, .. } = planned;
        let Some(expert) = planned.expert else {
            tensors.push((gguf_name.clone(), *kind, weight.shape.clone()));
            last = None;
            continue;
        };
        let before = last.filter(|other| stacked_name(&other.gguf_name) == stacked_name(gguf_name));
        let next = before.and_then(|other| other.expert).map_or(0, |expert| expert.saturating_add(1));
        if let Some(other) = before.filter(|other| other.weight.shape == weight.shape && other.kind != *kind) {
            return Err(mixed_experts(&stacked_name(gguf_name), (other.name.as_str(), other.kind), (name.as_str(), *kind)));
        }
        let is_uniform = before.is_none_or(|other| other.weight.shape == weight.shape);
        if expert != next || expert >= experts || !is_uniform || weight.shape.len() != 2 {
            return Err(Error::tensor(name, format!("is not one of {experts} experts of the same shape"), "the checkpoint does not match config.json"));
        }
        if expert.saturating_add(1) == experts {
            tensors.push((stacked_name(gguf_name), *kind, [&[experts], weight.shape.as_slice()].concat()));
        }
        last = Some(planned);
    }
    let mut names = BTreeSet::new();
    if let Some((name, ..)) = tensors.iter().find(|(name, ..)| !names.insert(name)) {
        let two: Vec<&str> = all.iter().filter(|planned| stacked_name(&planned.gguf_name) == *name).map(|planned| planned.name.as_str()).collect();
        let reason = format!("has the same name in GGUF files as `{}`: `{name}`", two.last().copied().unwrap_or_default());
        return Err(Error::tensor(two.first().copied().unwrap_or_default(), reason, "remove one of them from the checkpoint"));
    }
    // If the last expert is missing, the stacked tensor was not added above.
    let stacked = all.iter().filter(|planned| planned.expert.is_some()).map(|planned| stacked_name(&planned.gguf_name));
    match stacked.into_iter().find(|name| !tensors.iter().any(|(tensor, ..)| tensor == name)) {
        None => Ok(tensors),
        Some(name) => Err(Error::tensor(&name, format!("has fewer than {experts} experts"), "the checkpoint does not match config.json")),
    }
}

/// A note about matrices whose rows are not a multiple of the block size of their target type.
pub(super) fn fallback_note(all: &[Planned], file: &str) -> Option<String> {
    let mut found: BTreeMap<(String, String, usize), usize> = BTreeMap::new();
    for Planned { weight, target, kind, .. } in all.iter().filter(|planned| planned.target != planned.kind) {
        *found.entry((target.to_string(), kind.to_string(), width(weight))).or_default() += 1;
    }
    let (mut bits, mut elements) = (0u64, 0u64);
    for Planned { weight, kind, .. } in all {
        bits += kind.byte_count(&weight.shape).unwrap_or(0) * 8;
        elements += weight.elements() as u64;
    }
    let describe = |((target, kind, row), count): (&(String, String, usize), &usize)| format!("{count} of {target} with rows of {row} are {kind}");
    let all = found.iter().map(describe).collect::<Vec<_>>().join(", ");
    (!found.is_empty()).then(|| {
        format!(
            "{file}: matrices whose rows are not a multiple of the block size use larger types: {all}; {:.2} bits per weight overall",
            bits as f64 / elements.max(1) as f64
        )
    })
}

/// Number of elements of a row.
pub(super) fn width(weight: &Weight) -> usize {
    weight.shape.last().copied().unwrap_or(1)
}
