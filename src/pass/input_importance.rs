//! Mean square of each input of linear layers, like the importance matrix of llama.cpp. Rounding searches
//! weight errors by it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::calibrate::{self, not_finite, numbers, tensor_error};
use super::{Context, consumers};
use crate::data::SequenceRoles;
use crate::error::Result;
use crate::ir::{Graph, Kind, Node, Op};
use crate::model::Model;
use crate::run_state::ColumnImportance;
use crate::store::gguf::InputSums;

/// The matrix of a linear layer: a weight, or one of several that are stacked in a weight.
struct Matrix<'g> {
    weight: &'g str,
    /// Index in the stack, and the size of the stack.
    position: [usize; 2],
}

/// Sums of squares over the rows of a value.
#[derive(Default)]
struct SquareSums {
    squares: Vec<f64>,
    /// Number of rows that are not all zeros. Tokens that are not routed to an expert have zero rows.
    rows: f64,
}

/// Minimum importance of a column relative to the mean of its layer. A column that is zero on all samples
/// may not be zero on other data.
const MIN_RELATIVE: f64 = 1e-6;

/// The importance of columns with these mean squares, or values proportional to them; `None` if all are zero.
pub(in crate::pass) fn importance_of(squares: &[f64]) -> Option<Vec<f32>> {
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    (mean > 0.0).then(|| squares.iter().map(|square| square.max(MIN_RELATIVE * mean) as f32).collect())
}

/// Computes the importance of the columns of linear weights on calibration data. Weights with other
/// readers, such as tied embeddings, are omitted.
pub(crate) fn input_importance(model: &Model, context: &Context) -> Result<ColumnImportance> {
    let graph = model.graph()?;
    let mut read: BTreeMap<&str, Vec<Matrix>> = BTreeMap::new();
    for node in graph.nodes() {
        if let (Some(matrix), Some(input)) = (matrix(&graph, node), node.inputs.first()) {
            read.entry(&graph.value(*input).name).or_default().push(matrix);
        }
    }
    let mut sums: BTreeMap<String, SquareSums> = BTreeMap::new();
    let mut samples = 0;
    let linear = Op::Linear(crate::ir::ops::Linear::default());
    let sides = SequenceRoles::new(&graph);
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
            let total = sums.entry(name.to_owned()).or_default();
            total.squares.resize(squares.len(), 0.0);
            total.squares.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
            total.rows += numbers(&calibrate::nonzero_rows(&rows).and_then(|rows| rows.sum_all()).map_err(tensor_error)?)?.into_iter().sum::<f64>();
            Ok(())
        },
    )?;
    let mut importance = ColumnImportance { samples, ..ColumnImportance::default() };
    for (value, matrices) in &read {
        let Some(found) = sums.get(*value) else { continue };
        let squares = importance_of(&found.squares);
        for Matrix { weight, position: [at, count] } in matrices {
            let width = found.squares.len();
            // Columns of layers without samples have equal importance.
            let empty = || InputSums { squares: vec![0.0; width * count], counts: vec![0.0; *count] };
            let all = importance.sums.entry((*weight).to_owned()).or_insert_with(empty);
            match (&squares, all.squares.get_mut(at * width..(at + 1) * width), all.counts.get_mut(*at)) {
                (Some(squares), Some(slice), Some(count)) => {
                    slice.copy_from_slice(squares);
                    *count = found.rows as f32;
                }
                _ => importance.unseen.push(if *count > 1 { format!("{weight} {at}") } else { (*weight).to_owned() }),
            }
        }
    }
    importance.columns = importance.sums.iter().map(|(name, sums)| (name.clone(), Arc::new(sums.means()))).collect();
    Ok(importance)
}

/// The matrix of a linear layer that is stored as `[out, in]` and has no other reader.
fn matrix<'g>(graph: &'g Graph, node: &Node) -> Option<Matrix<'g>> {
    let Op::Linear(op) = &node.op else { return None };
    let id = *node.inputs.get(1).filter(|_| !op.input_major)?;
    let value = graph.value(id);
    if value.kind == Kind::Param {
        return consumers::only_reader(graph, id).map(|_| Matrix { weight: &value.name, position: [0, 1] });
    }
    // One matrix of a stack: a slice of the first axis.
    let reshape = graph.producer(id).filter(|node| matches!(node.op, Op::Reshape(_)))?;
    let slice = graph.producer(*reshape.inputs.first()?)?;
    let Op::Slice(op) = &slice.op else { return None };
    let all = graph.value(*slice.inputs.first()?);
    let sizes: Vec<usize> = all.ty.shape.iter().filter_map(|dim| dim.fixed()).collect();
    let [count, rows, width] = sizes[..] else { return None };
    let is_matrix = op.axis == 0 && op.length == Some(1) && op.step == 1 && value.ty.shape.iter().filter_map(|dim| dim.fixed()).eq([rows, width]);
    let at = usize::try_from(op.start).ok().filter(|at| *at < count)?;
    (is_matrix && all.kind == Kind::Param).then_some(Matrix { weight: &all.name, position: [at, count] })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only slices of a parameter that are whole matrices have importance.
    #[test]
    fn matrices_of_stacks_are_found() {
        let found = |stack: &str, slice: &str, shape: &str| {
            let text = format!(
                "input x: float[batch, 4]\nparam all: float[2, 4, 4]\nn = Neg(all) -> float[2, 4, 4]\n\
                s = Slice{slice}({stack}) -> float[{shape}]\nm = Reshape{{\"shape\":[4,4]}}(s) -> float[4, 4]\n\
                y = Linear{{\"input_major\":false}}(x, m) -> float[batch, 4]\noutput y = y\noutput n = n\n"
            );
            let graph: Graph = text.parse().unwrap();
            matrix(&graph, graph.nodes().iter().find(|node| matches!(node.op, Op::Linear(_))).unwrap())
                .map(|matrix| (matrix.weight.to_owned(), matrix.position))
        };
        assert_eq!(found("all", "{\"axis\":0,\"start\":1}", "1, 4, 4"), Some(("all".to_owned(), [1, 2])));
        assert_eq!(found("all", "{\"axis\":1,\"length\":2}", "2, 2, 4"), None, "rows of both matrices");
        assert_eq!(found("n", "{\"axis\":0,\"start\":1}", "1, 4, 4"), None, "a computed stack");
    }
}
