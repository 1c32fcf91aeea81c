//! Scores of all options of all branches.
//!
//! Each option is measured separately, in the otherwise unchanged model: the layer that reads removed units
//! is refitted to calibration samples, and the outputs are compared on held-out samples. As earlier layers
//! are unchanged, the sums of products over all units of a branch suffice to refit all of its widths.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::branches::{Branch, Units};
use super::choice::Chosen;
use super::samples::Measurement;
use super::structure::{Retained, Structure};
use super::training::{Masked, Training};
use crate::calibration::select_rows;
use crate::data::SequenceRoles;
use crate::error::Result;
use crate::exec::{Blockwise, Parameters};
use crate::ir::Node;
use crate::model::Model;
use crate::pass::calibrate::{self, tensor_error};
use crate::pass::prune_structured::Repair;
use crate::pass::prune_structured::cut::{self, Surviving};
use crate::pass::prune_structured::repair::least_squares::{FeatureProducts, Sums, row_weights};
use crate::pass::prune_structured::repair::{Refit, parameters_of, set_weight};
use crate::pass::prune_structured::scores::by_unit;
use crate::pass::prune_structured::selection::least_important;
use crate::pass::prune_structured::sensitivity::sum_except;
use crate::work::{Event, ProgressUnit};

/// How the remaining units of a branch are adjusted.
#[derive(Clone, Copy)]
pub(super) struct Fitting {
    pub repair: Repair,
    pub training: Training,
}

/// Results of the measurement.
pub(super) struct Library {
    /// Importance of the units of each branch; empty for branches without units.
    pub importance: Vec<Vec<f64>>,
    /// Loss of each option of each branch.
    pub losses: Vec<Vec<f64>>,
    /// Loss of the removal of each layer; empty if no layer can be removed as a whole.
    pub layers: Vec<f64>,
}

impl Library {
    /// Measures the options of all branches, and the removal of whole layers if `uniform`.
    pub fn measure(structure: &Structure, fitting: Fitting, uniform: bool, measurement: &Measurement) -> Result<Library> {
        let mut runs = runs(structure, measurement)?;
        let work = measurement.context.work;
        let layers = structure.found.layers.len();
        let removed_layers = if uniform && layers > 1 { layers } else { 0 };
        let options = structure.options.iter().map(|options| options.len() - 1).sum::<usize>() + removed_layers;
        work.progress.on(Event::Begin { stage: "Scoring options", total: (options * measurement.held_out) as u64, done: 0, unit: ProgressUnit::Samples });
        let mut all = || {
            let mut library = Library { importance: Vec::new(), losses: Vec::new(), layers: Vec::new() };
            for (branch, options) in structure.branches.iter().zip(&structure.options) {
                let fitted = branch.units.as_ref().map(|units| Fitted::new(structure, (branch, units), fitting, &mut runs, measurement)).transpose()?;
                let importance = fitted.as_ref().map(Fitted::importance).transpose()?.unwrap_or_default();
                let mut losses = Vec::with_capacity(options.len());
                for kept in options {
                    losses.push(match (kept, &fitted) {
                        (Retained::Whole, _) => 0.0,
                        (Retained::Units(count), Some(fitted)) => measurement.loss(&fitted.model(*count, &importance, &runs, measurement)?)?,
                        (Retained::Units(_) | Retained::Nothing, _) => measurement.loss(&structure.without(branch)?)?,
                    });
                    if *kept != Retained::Whole {
                        work.advance(measurement.held_out as u64)?;
                    }
                }
                library.importance.push(importance);
                library.losses.push(losses);
            }
            for layer in 0..removed_layers {
                library.layers.push(measurement.loss(&structure.without_layer(layer)?)?);
                work.advance(measurement.held_out as u64)?;
            }
            Ok(library)
        };
        let library = all();
        work.progress.on(Event::End);
        library
    }
}

/// Runs of all samples that stop at the inputs of the layers that read units.
fn runs<'r>(structure: &'r Structure, measurement: &'r Measurement) -> Result<Blockwise<'r>> {
    let graph = structure.graph;
    let readers = structure.branches.iter().filter_map(|branch| branch.units.as_ref()).map(|units| &graph.nodes()[units.reader]);
    let values: BTreeSet<&str> = readers.map(|node| graph.value(node.inputs[0]).name.as_str()).collect();
    let (options, work) = (calibrate::blockwise_options(measurement.context), measurement.context.work.quiet());
    let mut runs = Blockwise::new(graph, &structure.model.weights, |name| values.contains(name), options, &work);
    measurement.batches.iter().try_for_each(|batch| runs.push(batch.clone()))?;
    Ok(runs)
}

/// The model with the adjusted weights of the branches of which a choice keeps a part. Those of removed units
/// are zero in the layers that read them.
pub(super) fn adjusted(structure: &Structure, chosen: &Chosen, library: &Library, fitting: Fitting, measurement: &Measurement) -> Result<Model> {
    let (mut runs, mut model) = (runs(structure, measurement)?, structure.model.clone());
    let mut kept: Vec<(usize, &Branch, Retained)> = structure.retained(chosen).collect();
    kept.sort_by_key(|(index, ..)| *index);
    for (index, branch, kept) in kept {
        let (Retained::Units(count), Some(units)) = (kept, &branch.units) else { continue };
        let fitted = Fitted::new(structure, (branch, units), fitting, &mut runs, measurement)?;
        // The final cut removes the units with the least importance in the library.
        for (name, tensor) in fitted.parameters(count, &library.importance[index], &runs, measurement)? {
            set_weight(&mut model, &name, &tensor)?;
        }
    }
    Ok(model)
}

/// The layer that reads the units of a branch, with sums of products over calibration samples.
struct Fitted<'s, 'a> {
    structure: &'s Structure<'a>,
    branch: &'s Branch,
    units: &'s Units,
    node: &'s Node,
    fitting: Fitting,
    original: Parameters,
    products: [FeatureProducts; 2],
}

impl<'s, 'a> Fitted<'s, 'a> {
    /// Continues the runs to the input of the layer.
    fn new(
        structure: &'s Structure<'a>,
        (branch, units): (&'s Branch, &'s Units),
        fitting: Fitting,
        runs: &mut Blockwise,
        measurement: &Measurement,
    ) -> Result<Fitted<'s, 'a>> {
        let (graph, member) = (structure.graph, &units.member);
        let node = &graph.nodes()[units.reader];
        let value = &graph.value(node.inputs[0]).name;
        let features = structure.model.weights.get(&member.param)?.shape[member.axis];
        let tokens = SequenceRoles::new(graph).token_axis(value);
        let mut products = [0, 1].map(|_| FeatureProducts::new(features));
        let mut first = 0;
        runs.reach(value)?;
        runs.each(value, |batch, x| {
            let (x, sizes) = calibrate::rows_by_sample(x, &node.op, batch, tokens)?;
            let weights = row_weights(&x)?;
            for (half, products) in products.iter_mut().enumerate() {
                let rows = measurement.split.rows(half, first, &sizes);
                if !rows.is_empty() {
                    let part = |tensor: &Tensor| select_rows(tensor, rows.clone()).map_err(tensor_error);
                    products.add(&part(&x)?, &part(&weights)?)?;
                }
            }
            first += sizes.len();
            Ok(())
        })?;
        let original = parameters_of(graph, node, structure.model, measurement.context)?;
        Ok(Fitted { structure, branch, units, node, fitting, original, products })
    }

    /// The importance of each unit: the sum of squares of its products with the weights that read it.
    fn importance(&self) -> Result<Vec<f64>> {
        let member = &self.units.member;
        let squares = self.original.get(&member.param).and_then(|weight| weight.sqr()).map_err(tensor_error)?;
        let squares = sum_except(&squares, member.axis)?.into_iter().enumerate();
        let contributions: Vec<f64> = squares.map(|(at, weight)| weight * self.products.iter().map(|products| products.squares(at)).sum::<f64>()).collect();
        Ok(by_unit(member, self.units.size, &contributions))
    }

    /// The model without all but this number of units of the branch, which are the most important ones. Their
    /// weights are zero in the layer that reads them.
    fn model(&self, count: usize, importance: &[f64], runs: &Blockwise, measurement: &Measurement) -> Result<Model> {
        let mut model = self.structure.model.clone();
        for (name, tensor) in self.parameters(count, importance, runs, measurement)? {
            set_weight(&mut model, &name, &tensor)?;
        }
        Ok(model)
    }

    /// The changed parameters with this number of units.
    fn parameters(&self, count: usize, importance: &[f64], runs: &Blockwise, measurement: &Measurement) -> Result<Vec<(String, Tensor)>> {
        let (member, graph) = (&self.units.member, self.structure.graph);
        let removed = least_important(self.units.size, self.units.size - count, Some(importance));
        let mut surviving = cut::surviving(self.structure.model, &self.structure.groups, &BTreeMap::from([(self.units.group, removed)]))?;
        surviving.retain(|(weight, axis), _| *weight == member.param && *axis == member.axis);
        let start = self.weights(&surviving)?;
        let Some(own) = surviving.values().next().filter(|_| self.fitting.training.steps > 0) else { return Ok(start) };
        let block = &runs.blocks()[runs.block_of(self.units.reader)];
        let names: BTreeSet<String> = self.branch.tensors.intersection(&block.parameters).cloned().collect();
        let full = self.original.get(&member.param).map_err(tensor_error)?;
        let ones = || indices(own, &full).and_then(|indices| expanded(&full.ones_like()?.index_select(&indices, member.axis)?, &full, &indices, member.axis));
        let mask = ones().map_err(tensor_error)?;
        let tokens = SequenceRoles::new(graph).token_axis(&block.value);
        let masked = Masked { weight: &member.param, mask: &mask };
        self.fitting.training.run(runs, (&names, start), &masked, (measurement.split, tokens), measurement.context)
    }

    /// The refitted parameters of the layer for the surviving features of its weight.
    fn weights(&self, surviving: &Surviving) -> Result<Vec<(String, Tensor)>> {
        let mut changed = Vec::new();
        for ((weight, axis), own) in surviving {
            let full = self.original.get(weight).map_err(tensor_error)?;
            let indices = indices(own, &full).map_err(tensor_error)?;
            let parameters = if self.fitting.repair == Repair::None {
                vec![(weight.clone(), full.index_select(&indices, *axis).map_err(tensor_error)?)]
            } else {
                let sums = Sums::from_halves(self.products.each_ref().map(|products| products.surviving(own)));
                let refit = Refit { surviving, repair: self.fitting.repair };
                refit.layer(self.structure.graph, self.node, &self.original, own, (&sums, &sums.all))?
            };
            for (name, tensor) in parameters {
                let tensor = if name == *weight { expanded(&tensor, &full, &indices, *axis).map_err(tensor_error)? } else { tensor };
                changed.push((name, tensor));
            }
        }
        Ok(changed)
    }
}

/// Indices on the device of a tensor.
fn indices(own: &[usize], like: &Tensor) -> candle_core::Result<Tensor> {
    Tensor::from_vec(own.iter().map(|at| *at as u32).collect::<Vec<u32>>(), own.len(), like.device())
}

/// A tensor in the shape of another one: slices of an axis at these indices, and zeros elsewhere.
fn expanded(tensor: &Tensor, full: &Tensor, indices: &Tensor, axis: usize) -> candle_core::Result<Tensor> {
    full.zeros_like()?.index_add(indices, &tensor.contiguous()?, axis)
}
