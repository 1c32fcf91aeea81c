//! Tensors of recurrent layers, in which rows, columns or values differ between GGUF files and checkpoints.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use super::MAX_EXPERTS;
use crate::arch::{GgufFamily, StoredShape, Tiling};
use crate::error::{Error, Result};
use crate::store::gguf::{GgufFile, RowPermutation, concatenated_rows, expert_rows};
use crate::store::{Computed, Weight};

/// Maximum number of heads of a layer.
const MAX_HEADS: usize = 1 << 16;

/// The heads of recurrent layers, for conversion of their tensors in both directions.
#[derive(Debug, Clone, Copy)]
pub struct Arrangement {
    family: &'static GgufFamily,
    /// Number of heads of keys.
    keys: usize,
    /// Number of heads of values for each of them.
    each: usize,
    /// Width of a key, which is that of a value.
    width: usize,
    /// Number of groups of heads of state space layers.
    groups: usize,
}

impl Arrangement {
    /// The heads of a configuration.
    pub fn new(family: &'static GgufFamily, config: &Map<String, Json>) -> Arrangement {
        let size = |key: &str| {
            let default = family.settings.iter().find(|setting| setting.key == key).map(|setting| setting.default_value());
            let value = config.get(key).cloned().or(default).and_then(|value| value.as_u64());
            value.and_then(|value| usize::try_from(value).ok()).unwrap_or(0)
        };
        let (keys, values) = (size("linear_num_key_heads"), size("linear_num_value_heads"));
        let groups = family.settings.iter().find(|setting| setting.gguf == "ssm.group_count").map_or(0, |setting| size(setting.key));
        Arrangement { family, groups, keys, each: values.checked_div(keys).unwrap_or(0), width: size("linear_key_head_dim") }
    }

    /// Whether the order of value heads differs from that of checkpoints.
    fn tiling(&self, gguf_name: &str) -> Option<Tiling> {
        self.family.tiling(gguf_name).filter(|_| self.each > 1)
    }

    /// Whether a GGUF tensor differs from the one of checkpoints in more than its name.
    pub fn is_changed(&self, gguf_name: &str) -> bool {
        self.tiling(gguf_name).is_some() || GgufFamily::is_decay(gguf_name) || self.family.stored_shape(gguf_name).is_some()
    }

    fn mismatch(&self, name: &str, shape: &[usize]) -> Error {
        let reason = format!(
            "has the shape {shape:?}, but config.json specifies {} key heads with {} value heads each, of {} elements",
            self.keys, self.each, self.width
        );
        Error::tensor(name, reason, "the checkpoint and its config.json do not match")
    }

    /// The GGUF tensors of a checkpoint tensor; `None` if it only has another name.
    ///
    /// # Errors
    /// The shape does not match the configuration.
    pub fn to_gguf(&self, name: &str, weight: &Weight) -> Result<Option<Vec<(String, Weight)>>> {
        if let Some(gguf_names) = self.family.delta_tensors(name) {
            let values = self.each.saturating_mul(self.width);
            let keys = self.width.saturating_mul(2);
            let [rows, columns] = weight.shape[..] else { return Err(self.mismatch(name, &weight.shape)) };
            let head = keys.saturating_add(values.saturating_mul(2));
            if self.keys == 0 || self.keys.checked_mul(head) != Some(rows) {
                return Err(self.mismatch(name, &weight.shape));
            }
            let by_head = with_shape(weight, vec![self.keys, head, columns]);
            let part = |from: usize, count: usize| expert_rows(&by_head, from, count, name);
            let count = |rows: usize| self.keys.saturating_mul(rows);
            let qkv = vec![part(0, self.width), part(self.width, self.width), part(keys, values)];
            let gate = vec![part(keys.saturating_add(values), values)];
            let whole = |parts, rows| concatenated_rows(parts, vec![count(rows), columns], name);
            let parts = [whole(qkv, keys.saturating_add(values))?, whole(gate, values)?];
            return Ok(Some(gguf_names.into_iter().zip(parts).collect()));
        }
        if let Some(gguf_names) = self.family.concatenated_tensors(name) {
            let (matrices, [rows, columns]) = match weight.shape[..] {
                [matrices, rows, columns] => (Some(matrices), [rows, columns]),
                [rows, columns] => (None, [rows, columns]),
                _ => return Err(self.mismatch(name, &weight.shape)),
            };
            let half = rows.checked_div(2).filter(|half| half.checked_mul(2) == Some(rows) && *half > 0);
            let half = half.ok_or_else(|| self.mismatch(name, &weight.shape))?;
            let whole = with_shape(weight, vec![matrices.unwrap_or(1), rows, columns]);
            let shape: Vec<usize> = matrices.into_iter().chain([half, columns]).collect();
            let part = |from: usize| with_shape(&expert_rows(&whole, from, half, name), shape.clone());
            return Ok(Some(gguf_names.into_iter().zip([part(0), part(half)]).collect()));
        }
        let Some(gguf_name) = self.family.to_gguf(name).filter(|gguf_name| self.is_changed(gguf_name)) else { return Ok(None) };
        let mut weight = weight.clone();
        if GgufFamily::is_filter(&gguf_name) && weight.shape.get(1) == Some(&1) {
            weight.shape.remove(1);
        }
        if let Some(tiling) = self.tiling(&gguf_name) {
            weight = self.tiled(&weight, tiling, name)?;
        }
        if GgufFamily::is_decay(&gguf_name) {
            weight = mapped(&weight, name, |logarithm| -logarithm.exp());
        }
        if let Some(shape) = self.family.stored_shape(&gguf_name) {
            let (&[count], groups) = (weight.shape.as_slice(), self.groups) else { return Err(self.mismatch(name, &weight.shape)) };
            weight.shape = match (shape, count.checked_div(groups)) {
                (StoredShape::Column, _) => vec![count, 1],
                (StoredShape::Groups, Some(width)) if width.checked_mul(groups) == Some(count) => vec![groups, width],
                _ => return Err(self.mismatch(name, &weight.shape)),
            };
        }
        Ok(Some(vec![(gguf_name, weight)]))
    }

    /// Orders value heads by their number within the key head.
    fn tiled(&self, weight: &Weight, tiling: Tiling, name: &str) -> Result<Weight> {
        let (rows, columns) = (weight.shape.first().copied().unwrap_or(0), weight.shape.get(1).copied().unwrap_or(1));
        if tiling == Tiling::Columns {
            return self.reordered_columns(weight, name, self.tiled_order());
        }
        let width = if tiling == Tiling::Heads { 1 } else { self.width };
        let heads = self.keys.saturating_mul(self.each);
        let keys = if tiling == Tiling::RowsAfterKeys { self.keys.saturating_mul(width).saturating_mul(2) } else { 0 };
        let values = heads.saturating_mul(width);
        if values == 0 || keys.checked_add(values) != Some(rows) {
            return Err(self.mismatch(name, &weight.shape));
        }
        let whole = with_shape(weight, vec![1, rows, columns]);
        let of_values = with_shape(&expert_rows(&whole, keys, values, name), vec![self.keys, self.each.saturating_mul(width), columns]);
        let mut parts = if keys > 0 { vec![expert_rows(&whole, 0, keys, name)] } else { Vec::new() };
        parts.extend((0..self.each).map(|value| expert_rows(&of_values, value.saturating_mul(width), width, name)));
        concatenated_rows(parts, weight.shape.clone(), name)
    }

    /// A matrix with other positions of its groups of columns, one for each value head: `order` has the
    /// source of each group.
    fn reordered_columns(&self, weight: &Weight, name: &str, order: Vec<usize>) -> Result<Weight> {
        let [rows, columns] = weight.shape[..] else { return Err(self.mismatch(name, &weight.shape)) };
        if order.is_empty() || order.len().checked_mul(self.width) != Some(columns) {
            return Err(self.mismatch(name, &weight.shape));
        }
        let upstream = with_shape(weight, vec![rows.saturating_mul(order.len()), self.width]);
        let reordered = RowPermutation { upstream, order: Some(Arc::new(order)), added: 0.0, name: name.to_owned() }.weight()?;
        Ok(with_shape(&reordered, vec![rows, columns]))
    }

    /// For each value head in the order of GGUF files, its position in checkpoints.
    fn tiled_order(&self) -> Vec<usize> {
        let head = |value: usize| move |key: usize| key.saturating_mul(self.each).saturating_add(value);
        (0..self.each).flat_map(|value| (0..self.keys).map(head(value))).collect()
    }

    /// For each value head in the order of checkpoints, its position in GGUF files.
    fn order_by_key(&self) -> Vec<usize> {
        let head = |key: usize| move |value: usize| value.saturating_mul(self.keys).saturating_add(key);
        (0..self.keys).flat_map(|key| (0..self.each).map(head(key))).collect()
    }

    /// The importance of the columns of a GGUF tensor, from that of the checkpoint tensor.
    pub fn columns(&self, gguf_name: &str, importance: Arc<Vec<f32>>) -> Arc<Vec<f32>> {
        if self.tiling(gguf_name) != Some(Tiling::Columns) {
            return importance;
        }
        let heads: Vec<&[f32]> = importance.chunks(self.width.max(1)).collect();
        Arc::new(self.tiled_order().into_iter().flat_map(|head| heads.get(head).copied().unwrap_or_default()).copied().collect())
    }

    /// Removes the tensors that differ from those of checkpoints from a file, and returns the latter by their
    /// names.
    ///
    /// # Errors
    /// The shapes do not match the configuration.
    pub(super) fn read_gguf(&self, file: &mut GgufFile) -> Result<BTreeMap<String, Weight>> {
        let mut found = BTreeMap::new();
        let heads = self.keys.saturating_mul(self.each);
        if self.family.recurrent.is_delta() && (heads == 0 || heads > MAX_HEADS || self.keys > MAX_HEADS || self.width == 0) {
            return Err(Error::malformed(&file.path, format!("specifies {} key heads with {} value heads each", self.keys, self.each)));
        }
        let names: Vec<String> = file.tensors.keys().cloned().collect();
        let mut experts = 0;
        for name in names {
            if let Some((checkpoint, gates)) = self.family.delta_projection(&name) {
                found.insert(checkpoint.clone(), self.joint_projection(file, &checkpoint, [&name, &gates])?);
                for part in [&name, &gates] {
                    file.tensors.remove(part);
                }
                continue;
            }
            if let Some((checkpoint, other)) = self.family.concatenation(&name) {
                found.insert(checkpoint.clone(), concatenated(file, &checkpoint, [&name, &other], &mut experts)?);
                for part in [&name, &other] {
                    file.tensors.remove(part);
                }
                continue;
            }
            if !self.is_changed(&name) {
                continue;
            }
            let (Some(checkpoint), Some(stored)) = (self.family.to_checkpoint(&name), file.tensors.get(&name).cloned()) else { continue };
            let mut weight = match self.tiling(&name) {
                Some(Tiling::Columns) => self.reordered_columns(&stored, &name, self.order_by_key())?,
                Some(tiling) => self.rows_by_key(file, &name, tiling)?,
                None => stored,
            };
            if GgufFamily::is_decay(&name) {
                weight = mapped(&weight, &checkpoint, |rate| (-rate).ln());
            }
            if self.family.stored_shape(&name).is_some() {
                weight.shape = vec![weight.elements()];
            }
            if GgufFamily::is_filter(&name) && weight.shape.len() == 2 {
                weight.shape.insert(1, 1);
            }
            file.tensors.remove(&name);
            found.insert(checkpoint, weight);
        }
        Ok(found)
    }

    /// The rows of a GGUF tensor, with value heads ordered by key head.
    fn rows_by_key(&self, file: &mut GgufFile, name: &str, tiling: Tiling) -> Result<Weight> {
        let keys = if tiling == Tiling::RowsAfterKeys { self.keys.saturating_mul(2) } else { 0 };
        let (shape, heads) = self.heads(file, name, keys.saturating_add(self.keys.saturating_mul(self.each)))?;
        let (of_keys, of_values) = heads.split_at_checked(keys).unwrap_or_default();
        let by_key = self.order_by_key().into_iter().filter_map(|head| of_values.get(head).cloned());
        concatenated_rows(of_keys.iter().cloned().chain(by_key).collect(), shape, name)
    }

    /// Queries, keys, values and gates of each key head, as one projection.
    fn joint_projection(&self, file: &mut GgufFile, checkpoint: &str, [qkv, gates]: [&str; 2]) -> Result<Weight> {
        let values = self.keys.saturating_mul(self.each);
        let (keys, each) = (self.keys, self.each);
        let (shape, qkv) = self.heads(file, qkv, keys.saturating_mul(2).saturating_add(values))?;
        let (gate_shape, gates) = self.heads(file, gates, values)?;
        let rows = [&shape, &gate_shape].iter().fold(0usize, |sum, shape| sum.saturating_add(shape.first().copied().unwrap_or(0)));
        let mut parts: Vec<Weight> = Vec::new();
        for key in 0..keys {
            let first = keys.saturating_mul(2).saturating_add(key.saturating_mul(each));
            parts.extend(
                [key, keys.saturating_add(key)].into_iter().chain((0..each).map(|value| first.saturating_add(value))).filter_map(|at| qkv.get(at).cloned()),
            );
            parts.extend(gates.iter().skip(key.saturating_mul(each)).take(each).cloned());
        }
        concatenated_rows(parts, vec![rows, shape.get(1).copied().unwrap_or(0)], checkpoint)
    }

    /// The shape of a GGUF tensor, and its rows in `count` parts of equal size.
    fn heads(&self, file: &mut GgufFile, name: &str, count: usize) -> Result<(Vec<usize>, Vec<Weight>)> {
        let missing = || Error::tensor(name, "is missing", "the file is incomplete");
        let tensor = file.tensors.get_mut(name).ok_or_else(missing)?;
        let shape = tensor.shape.clone();
        let rows = shape.first().copied().unwrap_or(0);
        let each = rows.checked_div(count).filter(|each| *each > 0 && each.checked_mul(count) == Some(rows));
        let each = each.ok_or_else(|| self.mismatch(name, &shape))?;
        tensor.shape = [count, each].into_iter().chain(shape.iter().skip(1).copied()).collect();
        let slices = file.slices(name)?.ok_or_else(|| self.mismatch(name, &shape))?;
        Ok((shape, slices))
    }
}

/// The rows of two GGUF tensors, for experts those of each expert, whose number is added to `experts`.
fn concatenated(file: &GgufFile, checkpoint: &str, [first, second]: [&str; 2], experts: &mut usize) -> Result<Weight> {
    let tensor = |name: &str| file.tensors.get(name).cloned().ok_or_else(|| Error::tensor(name, "is missing", "the file is incomplete"));
    let [one, other] = [tensor(first)?, tensor(second)?];
    let mismatch = || Error::tensor(checkpoint, "is stored in parts of different shapes", "the tensors do not match each other");
    let mut shape = one.shape.clone();
    let axis = shape.len().checked_sub(2).filter(|axis| *axis < 2 && one.shape == other.shape).ok_or_else(mismatch)?;
    shape.get_mut(axis).into_iter().for_each(|rows| *rows = rows.saturating_mul(2));
    if axis == 0 {
        return concatenated_rows(vec![one, other], shape, checkpoint);
    }
    // Checked before allocating, since the count is untrusted.
    *experts = experts.saturating_add(one.shape.first().copied().unwrap_or(0));
    if *experts > MAX_EXPERTS {
        return Err(Error::malformed(&file.path, format!("has at least {experts} expert tensors, more than are supported")));
    }
    let slices = |name: &str| file.slices(name)?.ok_or_else(mismatch);
    let (first, second) = (slices(first)?, slices(second)?);
    concatenated_rows(first.into_iter().zip(second).flat_map(|(one, other)| [one, other]).collect(), shape, checkpoint)
}

/// The same elements with another shape.
fn with_shape(weight: &Weight, shape: Vec<usize>) -> Weight {
    let mut weight = weight.clone();
    weight.shape = shape;
    weight
}

/// A function of each element of a small tensor, as F32.
fn mapped(weight: &Weight, name: &str, function: impl Fn(f64) -> f64 + Send + Sync + 'static) -> Weight {
    let (upstream, name) = (weight.clone(), name.to_owned());
    let values = move || -> Result<Vec<f32>> { Ok(upstream.floats(&name)?.into_iter().map(|value| function(f64::from(value)) as f32).collect()) };
    let mut mapped = Computed { values }.weight(weight.shape.clone()).with_origin(weight.origin);
    (mapped.stored_bytes, mapped.stored_as) = (weight.stored_bytes, weight.stored_as.clone());
    (mapped.stored_type, mapped.remote_position) = (weight.stored_type, weight.remote_position);
    mapped
}
