//! The mean square of what each column of linear layers is multiplied with, as the importance matrix of llama.cpp has it: searches that round
//! weights count errors by it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::calibrate::{self, computed, not_finite, numbers};
use super::{Context, walk};
use crate::data::Sides;
use crate::error::Result;
use crate::ir::{Graph, Kind, Node, Op, ValueId};
use crate::model::Model;
use crate::run_state::ColumnImportance;

/// What a column counts for at least, beside the mean of its layer: one that was zero on all samples need not be on others.
const LEAST: f64 = 1e-6;

/// A matrix that a linear layer multiplies with: a weight, or one of those that a weight holds.
struct Matrix<'g> {
    weight: &'g str,
    /// Which one, of how many.
    place: [usize; 2],
}

/// Sums over the rows of a value.
#[derive(Default)]
struct Sums {
    squares: Vec<f64>,
    /// Rows that are not all zeros: those of tokens that an expert does not see are.
    seen: f64,
}

impl Sums {
    /// The importance of columns; nothing where no row was seen.
    fn columns(&self) -> Option<Vec<f32>> {
        let mean = self.squares.iter().sum::<f64>() / self.squares.len().max(1) as f64;
        (mean > 0.0).then(|| self.squares.iter().map(|square| (square.max(LEAST * mean) / self.seen.max(1.0)) as f32).collect())
    }
}

/// What errors in the columns of linear layers count for. Of weights that others read too, like an embedding that is the head, nothing is
/// told.
///
/// # Errors
/// There is no calibration data or it does not fit, a value is not finite, memory that was asked for is too small, or the work is
/// cancelled.
pub(crate) fn input_importance(model: &Model, context: &Context) -> Result<ColumnImportance> {
    let graph = model.graph()?;
    let mut read: BTreeMap<&str, Vec<Matrix>> = BTreeMap::new();
    for node in graph.nodes() {
        if let (Some(matrix), Some(input)) = (matrix(&graph, node), node.inputs.first()) {
            read.entry(&graph.value(*input).name).or_default().push(matrix);
        }
    }
    let mut sums: BTreeMap<String, Sums> = BTreeMap::new();
    let mut samples = 0;
    let linear = Op::Linear(crate::ir::ops::Linear::default());
    let sides = Sides::of(&graph);
    calibrate::observe(
        &graph,
        model,
        |name| read.contains_key(name),
        context,
        |batch, name, value| {
            let Some((first, _)) = read.first_key_value().filter(|_| read.contains_key(name)) else { return Ok(()) };
            samples += if *first == name { batch.samples } else { 0 };
            let rows = calibrate::rows(value, &linear, batch, sides.token_axis(name))?;
            let [_, squares] = calibrate::column_moments(&rows)?;
            if squares.iter().any(|sum| !sum.is_finite()) {
                return Err(not_finite(name));
            }
            let so_far = sums.entry(name.to_owned()).or_default();
            so_far.squares.resize(squares.len(), 0.0);
            so_far.squares.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
            so_far.seen += numbers(&calibrate::seen(&rows).and_then(|seen| seen.sum_all()).map_err(computed)?)?.into_iter().sum::<f64>();
            Ok(())
        },
    )?;
    let mut importance = ColumnImportance { samples, ..ColumnImportance::default() };
    let mut columns: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
    for (value, matrices) in &read {
        let Some(found) = sums.get(*value) else { continue };
        let counts = found.columns();
        for Matrix { weight, place: [at, count] } in matrices {
            let width = found.squares.len();
            // Of what no sample came to, all columns count the same.
            let all = columns.entry(weight).or_insert_with(|| vec![1.0; width * count]);
            match (&counts, all.get_mut(at * width..(at + 1) * width)) {
                (Some(counts), Some(place)) => place.copy_from_slice(counts),
                _ => importance.unseen.push(if *count > 1 { format!("{weight} {at}") } else { (*weight).to_owned() }),
            }
        }
    }
    importance.columns = columns.into_iter().map(|(name, columns)| (name.to_owned(), Arc::new(columns))).collect();
    Ok(importance)
}

/// The matrix of a linear layer whose rows are outputs, where nothing else reads it.
fn matrix<'g>(graph: &'g Graph, node: &Node) -> Option<Matrix<'g>> {
    let Op::Linear(op) = &node.op else { return None };
    let id = *node.inputs.get(1).filter(|_| !op.input_major)?;
    let value = graph.value(id);
    if value.kind == Kind::Param {
        return walk::only_reader(graph, id).map(|_| Matrix { weight: &value.name, place: [0, 1] });
    }
    // One of several: a slice of the first axis.
    let made = |id: ValueId| if let Kind::Node(index) = graph.value(id).kind { graph.nodes().get(index) } else { None };
    let reshape = made(id).filter(|node| matches!(node.op, Op::Reshape(_)))?;
    let slice = made(*reshape.inputs.first()?)?;
    let Op::Slice(op) = &slice.op else { return None };
    let all = graph.value(*slice.inputs.first()?);
    let sizes: Vec<usize> = all.ty.shape.iter().filter_map(|dim| dim.fixed()).collect();
    let [count, rows, width] = sizes[..] else { return None };
    let whole = op.axis == 0 && op.length == Some(1) && op.step == 1 && value.ty.shape.iter().filter_map(|dim| dim.fixed()).eq([rows, width]);
    let at = usize::try_from(op.start).ok().filter(|at| *at < count)?;
    (whole && all.kind == Kind::Param).then_some(Matrix { weight: &all.name, place: [at, count] })
}
