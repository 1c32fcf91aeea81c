//! Quantization to blocks of GGUF files with calibration samples. The scales are those of the encoder of the
//! type; GPTQ chooses the codes.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::compensated::{Attempt, Choosing, Chosen, Compensating, Prepared};
use super::held_out::LayerChoice;
use super::preserved_zeros::preserved_zeros;
use super::rounding::{BLOCK, GPTQ};
use super::solver::Steps;
use super::{Flow, Layer, Layerwise, Method, MethodReport, Moments, Readers};
use crate::error::{Error, Result};
use crate::kernel::column_solver::{ColumnSolver, Grid, Zeros};
use crate::kernel::ggml::BlockType;
use crate::kernel::grid::Levels;
use crate::model::Model;
use crate::pass::input_importance::importance_of;
use crate::pass::{Context, Pass, Quantize};
use crate::run_state::Applied;
use crate::store::{ExactBlocks, Weight};

/// Quantizes weights of a model to blocks using calibration samples. Returns details for the report.
pub(in crate::pass) fn quantize_blocks(
    pass: &Quantize,
    blocks: &BTreeMap<String, ExactBlocks>,
    model: &mut Model,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let choosing = Choosing {
        name: GPTQ,
        ordered: pass.ordered(),
        damping: pass.damping,
        propagation: pass.propagation.map(|fraction| fraction as f32),
        sweeps: pass.sweeps(),
        keeps_products: false,
    };
    let targets = blocks.keys().map(String::as_str).collect();
    let work = Layerwise { name: pass.name(), context, targets: &targets, requested: choosing.request(), rescale: None, flow: Flow::default() };
    let mut rounder = Rounder { rounding: BlockRounding { blocks, sweeps: choosing.sweeps }, choosing, chosen: None, report: MethodReport::default() };
    let summary = work.run(model, &mut rounder)?;
    applied.tensors.extend(summary.changed);
    applied.notes.extend(summary.report.notes);
    let mut details = Map::from_iter([("samples".to_owned(), json!(summary.samples))]);
    LayerChoice::describe(&summary.report.choices, (pass.name(), GPTQ), &mut details, &mut applied.notes);
    Ok(details)
}

struct BlockRounding<'a> {
    blocks: &'a BTreeMap<String, ExactBlocks>,
    /// Maximum number of sweeps of coordinate descent.
    sweeps: usize,
}

/// The blocks of a weight with rows of `size` elements, which the encoder of their type finds for the
/// importance of the columns.
fn encoded(kind: BlockType, values: &[f32], size: usize, importance: &[f32]) -> Vec<u8> {
    let row = size / kind.elements() * kind.bytes();
    let mut blocks = vec![0; values.len() / size.max(1) * row];
    blocks.par_chunks_mut(row.max(1)).zip(values.par_chunks(size.max(1))).for_each(|(blocks, values)| kind.encode_row(values, importance, blocks));
    blocks
}

impl BlockRounding<'_> {
    fn exact(&self, layer: &Layer) -> Result<ExactBlocks> {
        self.blocks.get(&layer.weight).copied().ok_or_else(|| Error::tensor(&layer.weight, "has no type", "add it to `ignore`"))
    }

    /// Replaces a weight `[rows, size]` by the values of its blocks, which are returned.
    fn round(&self, layer: &Layer, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<Vec<u8>> {
        let ExactBlocks { kind, .. } = self.exact(layer)?;
        let blocks = match (&prepared.solver, attempt, kind.levels()) {
            (Some(solver), Attempt::Compensated(correction), Some((levels, group))) => {
                let order = &prepared.order;
                // Errors are weighted after compensation by later columns.
                let mut costs = vec![0f32; layer.size];
                order.iter().zip(solver.costs()).for_each(|(column, cost)| costs[*column] = *cost);
                // With a minimum, or uneven levels, zero is not a value of every group.
                let has_zero = matches!(levels, Levels::Integers(integers) if integers.symmetric);
                let zeros = if has_zero { preserved_zeros(values, layer.size, &correction.parts) } else { Vec::new() };
                let mut blocks = Vec::new();
                let rule = |values: &[f32]| {
                    blocks = encoded(kind, values, layer.size, &costs);
                    let grid = Grid { levels, group, steps: kind.params(&blocks), order, store: None::<fn(f64) -> f32> };
                    let mut choices = ColumnSolver::new(Zeros::None, Some(grid));
                    choices.zeroed = zeros.chunks(layer.size.max(1)).flat_map(|row| order.iter().map(|column| row[*column])).collect();
                    choices
                };
                let solved = solver.solve(values, order, correction, Steps { block: BLOCK, frozen: &zeros, sweeps: self.sweeps }, rule)?;
                kind.put_codes(&solved.grid.map(|grid| grid.codes_of(values)).unwrap_or_default(), &mut blocks);
                blocks
            }
            _ => encoded(kind, values, layer.size, &importance_of(&prepared.squares).unwrap_or_default()),
        };
        kind.decode(&blocks, values);
        if super::parallel::are_finite(values) {
            return Ok(blocks);
        }
        let reason = format!("contains values beyond the range of {} scales", kind.name());
        Err(Error::tensor(&layer.weight, reason, "add it to `ignore`"))
    }
}

impl Compensating for BlockRounding<'_> {
    fn plain(&self) -> &'static [&'static str] {
        &["importance"]
    }

    fn can_stack(&self, layers: [&Layer; 2]) -> bool {
        let [one, other] = layers.map(|layer| self.blocks.get(&layer.weight).map(|exact| exact.kind));
        one.is_some() && one == other
    }

    fn solve(&self, layer: &Layer, _weight: &Weight, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<()> {
        self.round(layer, values, prepared, attempt).map(drop)
    }
}

/// Rounds layer by layer.
struct Rounder<'a> {
    rounding: BlockRounding<'a>,
    choosing: Choosing,
    chosen: Option<Chosen>,
    report: MethodReport,
}

impl Method for Rounder<'_> {
    fn check(&self, layer: &Layer, weight: &Weight) -> Result<()> {
        if !layer.input_major {
            return self.rounding.exact(layer).map(drop);
        }
        let reason = format!("is stored as [in, out] ({:?}), so that blocks do not consist of inputs", weight.shape);
        Err(Error::tensor(&layer.weight, reason, "use `method: rtn`, or add it to `ignore`"))
    }

    fn bytes(&self, layer: &Layer) -> usize {
        // Blocks are decoded twice to find their parameters. Sweeps also hold the targets, the gradients, and
        // a full set of second moments.
        let descent = if self.rounding.sweeps > 0 { 8 * layer.rows * layer.size + 4 * layer.size * layer.size } else { 0 };
        24 * layer.rows * layer.size + descent
    }

    fn read(&mut self, value: &str, moments: Moments, readers: &Readers) -> Result<()> {
        // The previous solver may occupy much of a GPU's memory.
        self.chosen = None;
        self.chosen = Some(self.choosing.run(value, moments, readers, &self.rounding, &mut self.report)?);
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let chosen = self.chosen.as_ref().ok_or_else(|| Error::tensor(&layer.weight, "has no statistics of its inputs", "report this error"))?;
        let attempt = chosen.attempt(layer, values, &self.rounding)?;
        let blocks = self.rounding.round(layer, values, &chosen.prepared, attempt)?;
        Ok(vec![(layer.weight.clone(), weight.with_blocks(self.rounding.exact(layer)?, &layer.weight, blocks))])
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}
