//! Weights of a file that was read back, by their names in the model.

use std::collections::BTreeMap;

use super::tensors::is_shape_of;
use crate::arch::GgufFamily;
use crate::model::Model;
use crate::store::Weight;
use crate::store::writer::{Item, WeightMeasurement};

/// The weight to which an expert is joined when the file is read back, if it is separate in the model.
fn joined_expert(family: &GgufFamily, gguf_name: &str) -> Option<String> {
    let (stacked, _) = GgufFamily::split_expert(gguf_name)?;
    family.joined_name(&stacked).map(|(name, _)| name)
}

/// Whether experts have other names when the file is read back: stacked experts become separate tensors or
/// the reverse, and names of modules are normalized.
pub(super) fn has_renamed_experts(family: &GgufFamily, names: &[String]) -> bool {
    let read_back = |gguf_name: String| joined_expert(family, &gguf_name).or_else(|| family.to_checkpoint(&gguf_name));
    let is_same = |name: &String| family.to_gguf(name).and_then(read_back).is_none_or(|back| back == *name);
    family.experts.is_some()
        && names.iter().filter(|name| family.joined_tensors(name).is_none()).any(|name| family.fused_tensors(name).is_some() || !is_same(name))
}

/// The weights of a file that was read back, by their names in the model, or by their names in the
/// opened file if experts are renamed.
pub(super) fn weights_by_name(family: &GgufFamily, opened: &Model, names: &[String], items: &[Item]) -> std::result::Result<BTreeMap<String, Weight>, String> {
    let (back, mut by_name) = (&opened.weights.by_name, BTreeMap::new());
    let renamed = has_renamed_experts(family, names);
    for (name, Item { name: gguf_name, weight, .. }) in names.iter().zip(items) {
        let missing = |_| format!("`{name}` is missing or has another shape when read back");
        let find = |gguf_name: &str, shape: &[usize]| {
            let name = family.to_checkpoint(gguf_name).ok_or(())?;
            back.get(&name).filter(|weight| is_shape_of(gguf_name, &weight.shape, shape)).map(|weight| (name, weight.clone())).ok_or(())
        };
        if let Some(whole) = joined_expert(family, gguf_name) {
            let weight = back.get(&whole).cloned().ok_or(()).map_err(missing)?;
            by_name.insert(whole, weight);
        } else if family.joined_tensors(name).is_some() {
            by_name.insert(name.clone(), back.get(name).cloned().ok_or(()).map_err(missing)?);
        } else if let (Some(_), [experts, matrix @ ..]) = (family.fused_tensors(name), weight.shape.as_slice()) {
            let module = gguf_name.trim_end_matches(".weight");
            for expert in 0..*experts {
                by_name.extend([find(&format!("{module}.{expert}.weight"), matrix).map_err(missing)?]);
            }
        } else if family.to_checkpoint(gguf_name).is_some() {
            let (opened_name, weight) = find(gguf_name, &weight.shape).map_err(missing)?;
            by_name.insert(if renamed { opened_name } else { name.clone() }, weight);
        }
    }
    Ok(by_name)
}

/// Measurements and encodings by weight. The measurements of weights that became two tensors are merged.
pub(super) fn merge_split_weights(tensors: impl Iterator<Item = ((String, WeightMeasurement), String)>) -> (Vec<(String, WeightMeasurement)>, Vec<String>) {
    let (mut weights, mut encodings): (Vec<(String, WeightMeasurement)>, Vec<String>) = (Vec::new(), Vec::new());
    let mut indices: BTreeMap<String, usize> = BTreeMap::new();
    for ((name, part), encoding) in tensors {
        let index = *indices.entry(name.clone()).or_insert(weights.len());
        match weights.get_mut(index) {
            None => {
                weights.push((name, part));
                encodings.push(encoding);
            }
            Some((_, all)) => {
                all.difference.add(&part.difference);
                all.changed |= part.changed;
                all.nonfinite += part.nonfinite;
                all.bytes += part.bytes;
                // Histograms of the parts have different bins.
                all.histogram = None;
            }
        }
    }
    (weights, encodings)
}
