//! Layers that runtimes fuse (queries, keys and values; gate and up), and experts.

use std::collections::BTreeMap;

use super::facts::experts_of;
use super::folder::{Folder, Module};
use super::scheme::Group;
use super::{Finding, Target};
use crate::arch;
use crate::error::Result;

/// The stored parts of each layer that runtimes fuse, in the order in which they are concatenated. Empty for
/// unknown families, whose layers may have these names without being fused.
fn layers(folder: &Folder) -> BTreeMap<String, Vec<(&String, &Module)>> {
    let mut found: BTreeMap<String, Vec<(&String, &Module)>> = BTreeMap::new();
    if arch::family(folder.model_type()).is_none() {
        return found;
    }
    for (name, module) in &folder.modules {
        let layer = arch::fused_layer(folder.model_type(), &format!("{name}.weight"));
        if layer.contains('+') {
            found.entry(layer).or_default().push((name, module));
        }
    }
    for (layer, parts) in &mut found {
        let names: Vec<&str> = layer.rsplit('.').next().unwrap_or(layer).split('+').collect();
        let position = |module: &str| names.iter().position(|name| module.rsplit('.').next() == Some(*name));
        parts.sort_by_key(|(name, _)| position(name));
    }
    found.retain(|_, parts| parts.len() > 1);
    found
}

/// The last component of a module's name.
fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// `ignore` excludes all parts of a fused layer, or none.
pub(super) fn ignore(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let runtime = target.runtime().name();
    let differ = |(layer, parts): (&String, &Vec<(&String, &Module)>)| {
        let [ignored, other] = [true, false].map(|wanted| parts.iter().find(|(_, module)| folder.ignored(module).is_some() == wanted).map(|(name, _)| *name));
        let (ignored, other) = (ignored?, other?);
        let reason = format!("is excluded by `ignore`, but `{}` is not, and {runtime} fuses both into `{layer}`", short(other));
        Some(Finding::new(ignored.clone(), reason, "leave all parts of the layer unquantized and name them in `ignore`, or quantize all of them"))
    };
    Ok(layers(folder).iter().filter_map(differ).collect())
}

/// The quantization of a module: `None` for floats.
fn state<'f>(folder: &'f Folder, module: &Module) -> Option<Option<&'f Group>> {
    module.is_quantized.then(|| folder.group(module))
}

fn is_same(a: Option<Option<&Group>>, b: Option<Option<&Group>>) -> bool {
    match (a, b) {
        (Some(Some(a)), Some(Some(b))) => a.is_equal(b),
        (a, b) => (a.is_some(), a.flatten().is_some()) == (b.is_some(), b.flatten().is_some()),
    }
}

/// All parts of a fused layer have the same scheme.
pub(super) fn scheme(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let runtime = target.runtime().name();
    let differ = |(layer, parts): (&String, &Vec<(&String, &Module)>)| {
        let (first_name, first) = parts.first()?;
        let (name, _) = parts.iter().find(|(_, module)| !is_same(state(folder, module), state(folder, first)))?;
        let reason = format!("has another quantization than `{}`, and {runtime} fuses both into `{layer}`", short(first_name));
        Some(Finding::new((*name).clone(), reason, "quantize all parts of the layer with the same scheme and group size, or none"))
    };
    Ok(layers(folder).iter().filter_map(differ).collect())
}

/// All parts of a fused layer have the same global NVFP4 scales.
pub(super) fn global_scales(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for (layer, parts) in layers(folder) {
        for suffix in ["weight_global_scale", "input_global_scale"] {
            let tensors = parts.iter().filter_map(|(name, _)| {
                let name = format!("{name}.{suffix}");
                let tensor = folder.tensors.get(&name)?;
                Some((name, tensor))
            });
            let mut first: Option<(String, Vec<u8>)> = None;
            for (name, tensor) in tensors {
                let Some(value) = tensor.read(4)? else { continue };
                match &first {
                    None => first = Some((name, value)),
                    Some((other, expected)) if *expected != value => {
                        let reason = format!("differs from `{other}`, and {} uses one global scale for the fused layer `{layer}`", target.runtime().name());
                        found.push(Finding::new(name, reason, "quantize the parts with a shared global scale, as `compress quantize --scheme NVFP4` does"));
                    }
                    Some(_) => {}
                }
            }
        }
    }
    Ok(found)
}

/// In fused layers of FP8-BLOCK, the outputs of all parts but the last are multiples of the block size.
pub(super) fn block_rows(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for (layer, parts) in layers(folder) {
        let Some((_, before_last)) = parts.split_last() else { continue };
        for (name, module) in before_last {
            let block = folder.group(module).filter(|_| module.is_quantized).and_then(|group| group.weights.as_ref()?.block);
            let Some([rows, _]) = block.filter(|[rows, _]| *rows > 0) else { continue };
            let [outputs, _] = module.shape;
            if !(outputs as u64).is_multiple_of(rows) {
                let reason =
                    format!("has {outputs} outputs, which are not a multiple of the block size of {rows}, and {} fuses `{layer}`", target.runtime().name());
                found.push(Finding::new(format!("{name}.weight"), reason, "use FP8-DYNAMIC, which has one scale for each output"));
            }
        }
    }
    Ok(found)
}

/// The first module of each key whose quantization differs from that of another module with this key, and
/// the name of that module. Modules without a key are omitted.
pub(super) fn differing<'f, K: Ord + Copy>(folder: &'f Folder, key: impl Fn(&'f str, &Module) -> Option<K>) -> Vec<(&'f String, &'f String)> {
    let mut first: BTreeMap<K, (&String, &Module)> = BTreeMap::new();
    let mut found: BTreeMap<K, (&String, &String)> = BTreeMap::new();
    for (name, module) in &folder.modules {
        let Some(key) = key(name, module) else { continue };
        let (other, expected) = *first.entry(key).or_insert((name, module));
        if !is_same(state(folder, module), state(folder, expected)) {
            found.entry(key).or_insert((name, other));
        }
    }
    found.into_values().collect()
}

/// All experts of a layer have the same scheme.
pub(super) fn experts(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    let finding = |(name, other): (&String, &String)| {
        let reason = format!("has another quantization than `{other}`, and {} fuses all experts of a layer", target.runtime().name());
        Finding::new(name.clone(), reason, "quantize all projections of all experts with the same scheme, or none")
    };
    Ok(differing(folder, |name, _| experts_of(name)).into_iter().map(finding).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_found_by_their_number() {
        assert_eq!(experts_of("model.layers.0.mlp.experts.3.up_proj"), Some("model.layers.0.mlp.experts"));
        assert_eq!(experts_of("model.layers.0.mlp.experts.gate_up_proj"), None);
        assert_eq!(experts_of("model.layers.0.mlp.shared_experts.up_proj"), None);
    }
}
