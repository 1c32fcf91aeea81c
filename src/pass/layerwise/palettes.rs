//! Palettization with calibration samples: errors of weights are weighted by the mean squares of their
//! inputs.

use std::collections::{BTreeMap, BTreeSet};

use super::layer_format::costs;
use super::{Flow, Layer, Layerwise, Method, MethodReport, Moments, MomentsRequest, Readers, unsupported};
use crate::error::{Error, Result, counted};
use crate::kernel::palette::nearest;
use crate::model::Model;
use crate::pass::palettize::{Palettize, fit, group_of, padded};
use crate::pass::{Context, Pass};
use crate::run_state::Applied;
use crate::store::{QuantizationSpec, Scales, Weight};

/// Palettizes the weights that only linear layers read, and leaves other weights unchanged. Returns the
/// number of samples.
pub(in crate::pass) fn palettize(
    pass: &Palettize,
    encodings: &BTreeMap<String, QuantizationSpec>,
    model: &mut Model,
    context: &Context,
    applied: &mut Applied,
) -> Result<usize> {
    let mut weighted: BTreeSet<&str> = encodings.keys().map(String::as_str).collect();
    let plain: BTreeSet<&str> = unsupported(model, &weighted)?.into_values().flatten().collect();
    weighted.retain(|name| !plain.contains(name));
    if let Some(first) = plain.first() {
        applied.notes.push(format!(
            "palettize: errors of {} not weighted by inputs, because not exactly one linear layer of activations reads the weight (the first: `{first}`)",
            counted(plain.len(), "weight")
        ));
    }
    if weighted.is_empty() {
        return Ok(0);
    }
    let requested = MomentsRequest::default();
    let work = Layerwise { name: pass.name(), context, targets: &weighted, requested, rescale: None, flow: Flow::default() };
    let mut method = Palettes { encodings, costs: Vec::new(), report: MethodReport::default() };
    let summary = work.run(model, &mut method)?;
    applied.notes.extend(summary.report.notes);
    Ok(summary.samples)
}

struct Palettes<'a> {
    encodings: &'a BTreeMap<String, QuantizationSpec>,
    costs: Vec<f32>,
    report: MethodReport,
}

impl Method for Palettes<'_> {
    fn check(&self, _layer: &Layer) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, _value: &str, moments: Moments, _readers: &Readers) -> Result<()> {
        self.costs = costs(&moments.squares);
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let name = &layer.weight;
        let affine = self.encodings.get(name).ok_or_else(|| Error::tensor(name, "has no encoding", "add it to `ignore`"))?;
        let (values, row) = (layer.stored(values.to_vec()), weight.row().max(1));
        let group = group_of(affine, row);
        let mut indices = vec![0u8; values.len()];
        let mut scales = Scales { run: row, scales: Vec::new(), zero_points: Vec::new(), global_scale: 1.0 };
        for (index, (values, indices)) in values.chunks(group).zip(indices.chunks_mut(group)).enumerate() {
            let first = index * group;
            let cost = |at: usize| self.costs[if layer.input_major { (first + at) / row } else { at % row }];
            let palette = fit(name, affine, values, cost)?;
            nearest(values, &palette, indices);
            let palette = padded(palette, affine);
            (0..values.len() / row).for_each(|_| scales.scales.extend_from_slice(&palette));
        }
        let new = weight.quantized(name, affine.clone(), indices.into_iter().map(|index| index as i8).collect(), &scales)?;
        Ok(vec![(layer.weight.clone(), new)])
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::{Bytes, DType, Encoding};

    /// Inputs 0 and 3 of a weight that is stored as `[in, out]` are large, and have weights of four values.
    /// Each shares a palette of four values with an input that is nearly zero.
    #[test]
    fn palettes_of_input_major_weights_follow_the_inputs_of_their_group() {
        let (outputs, inputs) = (8, 4);
        let value = |at: usize| if [0, 3].contains(&(at / outputs)) { [1.0, -2.0, 3.0, 0.5][at % 4] } else { 0.1 + at as f32 / 16.0 };
        let stored: Vec<f32> = (0..inputs * outputs).map(value).collect();
        let bytes = Bytes { dtype: DType::F32, bytes: stored.iter().flat_map(|value| value.to_le_bytes()).collect() };
        let weight = Weight::new(DType::F32, vec![inputs, outputs], Encoding::Dense, Arc::new(bytes));
        let layer = Layer { weight: "w".into(), rows: outputs, size: inputs, input_major: true };
        let encodings = BTreeMap::from([("w".to_owned(), QuantizationSpec::palettes(2, 2, &weight.shape, DType::F32))]);
        let mut method = Palettes { encodings: &encodings, costs: vec![1.0, 1e-6, 1e-6, 1.0], report: MethodReport::default() };
        let changed = method.change(&layer, &weight, &mut layer.output_major(stored.clone())).unwrap();
        let found = changed[0].1.floats("w").unwrap();
        for (row, (found, expected)) in found.chunks(outputs).zip(stored.chunks(outputs)).enumerate() {
            let error = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs()).fold(0f32, f32::max);
            assert!((error < 1e-3) == [0, 3].contains(&row), "{row}: {found:?}, not {expected:?}");
        }
    }
}
