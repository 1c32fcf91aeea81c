//! Palettes whose values are chosen by what errors cost on calibration samples: each weight counts as much as the mean square of its input.

use std::collections::{BTreeMap, BTreeSet};

use super::rounding::costs;
use super::{Layer, Layerwise, Method, Moments, Wanted};
use crate::error::{Error, Result};
use crate::ir::Op;
use crate::kernel::palette::nearest;
use crate::model::Model;
use crate::pass::palettize::{Palettize, filled, fit, group_of};
use crate::pass::{Context, Pass, walk};
use crate::run_state::{Applied, RunState};
use crate::store::{Affine, Scales, Weight};

/// Palettizes the weights that linear layers alone read; the others are left as they are. Gives the number of samples.
///
/// # Errors
/// As [`Layerwise::run`].
pub(in crate::pass) fn palettize(
    pass: &Palettize,
    encodings: &BTreeMap<String, Affine>,
    model: &mut Model,
    run: &RunState,
    context: &Context,
    applied: &mut Applied,
) -> Result<usize> {
    let graph = model.graph()?;
    let once = |name: &str| {
        let Some((id, _)) = graph.params().find(|(_, value)| value.name == name) else { return false };
        let linear = |node: usize| matches!(graph.nodes()[node].op, Op::Linear(_)) && walk::weight_input(&graph, &graph.nodes()[node]) == name;
        walk::only_reader(&graph, id).is_some_and(linear)
    };
    let (weighted, plain): (BTreeSet<&str>, BTreeSet<&str>) = encodings.keys().map(String::as_str).partition(|name| once(name));
    if let Some(first) = plain.first() {
        applied.notes.push(format!(
            "palettize: errors of {} weights count the same for all inputs: a linear layer does not read them, or others do too (the first: `{first}`)",
            plain.len()
        ));
    }
    if weighted.is_empty() {
        return Ok(0);
    }
    let options = pass.options();
    let work = Layerwise { name: pass.name(), options: &options, context, targets: &weighted, wanted: Wanted::default(), rescale: None, together: false };
    let mut method = Palettes { encodings, costs: Vec::new(), notes: Vec::new() };
    let done = work.run(model, run, &mut method)?;
    applied.notes.append(&mut method.notes);
    Ok(done.samples)
}

struct Palettes<'a> {
    encodings: &'a BTreeMap<String, Affine>,
    costs: Vec<f32>,
    notes: Vec<String>,
}

impl Method for Palettes<'_> {
    fn check(&self, _layer: &Layer, _weight: &Weight) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, _value: &str, moments: Moments) -> Result<()> {
        self.costs = costs(&moments.squares);
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let name = &layer.weight;
        let affine = self.encodings.get(name).ok_or_else(|| Error::tensor(name, "has no encoding", "add it to `ignore`"))?;
        let (values, row) = (layer.stored(values.to_vec()), weight.row().max(1));
        let group = group_of(affine, row);
        let mut places = vec![0u8; values.len()];
        let mut scales = Scales { run: row, scales: Vec::new(), zero_points: Vec::new(), global_scale: 1.0 };
        for (index, (values, places)) in values.chunks(group).zip(places.chunks_mut(group)).enumerate() {
            let first = index * group;
            let cost = |at: usize| self.costs[if layer.input_major { (first + at) / row } else { at % row }];
            let palette = fit(name, affine, values, cost)?;
            nearest(values, &palette, places);
            let palette = filled(palette, affine);
            (0..values.len() / row).for_each(|_| scales.scales.extend_from_slice(&palette));
        }
        let new = weight.quantized(name, affine.clone(), places.into_iter().map(|place| place as i8).collect(), &scales)?;
        Ok(vec![(layer.weight.clone(), new)])
    }
    fn notes(&mut self) -> &mut Vec<String> {
        &mut self.notes
    }
}
