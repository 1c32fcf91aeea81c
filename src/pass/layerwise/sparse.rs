//! Pruning with calibration samples: Wanda (Sun et al. 2023, <https://arxiv.org/abs/2306.11695>), which
//! ranks the weights of a row by `|w| ‖x‖` with the inputs of the unpruned block, and SparseGPT, which
//! updates the remaining weights to compensate (`kernel/compensation.rs`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::compensated::{Attempt, Choosing, Chosen, Compensating, Prepared};
use super::held_out::LayerChoice;
use super::solver::Steps;
use super::{Flow, Layer, Layerwise, Method, MethodReport, Moments, MomentsRequest, Readers, Summary};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Op, ValueId};
use crate::kernel::column_solver::{ColumnSolver, Grid, Zeros};
use crate::model::Model;
use crate::pass::prune_unstructured::{Importance, too_many};
use crate::pass::{Context, NOfM, Pass, PruneUnstructured};
use crate::run_state::Applied;
use crate::store::Weight;

/// Columns that SparseGPT ranks and prunes at once, as in its reference implementation.
const BLOCK: usize = 128;
/// Largest supported M of N:M patterns.
const MAX_PATTERN: usize = 64;
/// Options of SparseGPT.
const SPARSEGPT: Choosing = Choosing { name: "sparsegpt", ordered: false, damping: None, propagation: None, sweeps: 0, keeps_products: false };

/// Checks whether the build can run models. Always succeeds here; see `no_layerwise.rs`.
pub(in crate::pass) fn require(_option: &str) -> Result<()> {
    Ok(())
}

/// The axes of each weight along which layers read their inputs. Empty if the model has no graph.
pub(in crate::pass) fn input_axes(model: &Model) -> BTreeMap<String, BTreeSet<usize>> {
    model.graph().map_or_else(|_| BTreeMap::new(), |graph| axes_of_inputs(&graph))
}

/// The axes of each parameter along which layers read their inputs: of a matrix `[out, in]` the second, of
/// the kernel of a transposed convolution the first. Slices of a parameter and permutations of its axes
/// count as the parameter. Parameters that are not read by layers are omitted.
fn axes_of_inputs(graph: &Graph) -> BTreeMap<String, BTreeSet<usize>> {
    let mut found: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    // The parameter that a value consists of, and the axis of the parameter for each axis of the value.
    let mut parts: BTreeMap<ValueId, (&str, Vec<Option<usize>>)> =
        graph.params().map(|(id, value)| (id, (value.name.as_str(), (0..value.ty.shape.len()).map(Some).collect()))).collect();
    for node in graph.nodes() {
        for (at, (name, axes)) in node.inputs.iter().enumerate().filter_map(|(at, id)| Some((at, parts.get(id)?))) {
            let read = match (&node.op, at) {
                (Op::Linear(op), 1) => usize::from(!op.input_major),
                (Op::Conv(_), 1) => 1,
                (Op::ConvTranspose(_), 1) => 0,
                (Op::Recurrent(_), 1 | 2) => 2,
                (Op::MatMul(_), 0) => axes.len().saturating_sub(1),
                (Op::MatMul(_), 1) => axes.len().saturating_sub(2),
                _ => continue,
            };
            if let Some(axis) = axes.get(read).copied().flatten() {
                found.entry((*name).to_owned()).or_default().insert(axis);
            }
        }
        let Some((id, (name, axes))) = node.inputs.first().and_then(|id| Some((*id, parts.get(id)?))) else { continue };
        let axes = match &node.op {
            Op::Slice(_) | Op::FakeQuantize(_) => axes.clone(),
            Op::Transpose(op) if op.perm.is_empty() => axes.iter().rev().copied().collect(),
            Op::Transpose(op) => op.perm.iter().map(|axis| axes.get(*axis).copied().flatten()).collect(),
            Op::Reshape(_) => match reshaped(&graph.value(id).ty.shape, &graph.value(node.output).ty.shape, axes) {
                Some(axes) => axes,
                None => continue,
            },
            _ => continue,
        };
        let name = *name;
        parts.insert(node.output, (name, axes));
    }
    found
}

/// The axes of a reshaped value, if it differs only by axes of size 1, which are not the axes of a layer.
fn reshaped(from: &[Dim], to: &[Dim], axes: &[Option<usize>]) -> Option<Vec<Option<usize>>> {
    let one = Dim::Fixed(1);
    if !from.iter().filter(|size| **size != one).eq(to.iter().filter(|size| **size != one)) {
        return None;
    }
    let mut rest = from.iter().zip(axes).filter(|(size, _)| **size != one).map(|(_, axis)| *axis);
    Some(to.iter().map(|size| if *size == one { None } else { rest.next().flatten() }).collect())
}

/// Prunes the named weights of a model using calibration samples. Returns details for the report.
pub(in crate::pass) fn prune(pass: &PruneUnstructured, names: &BTreeSet<&str>, model: &mut Model, context: &Context, applied: &mut Applied) -> Result<Value> {
    let mut method = Sparse { zeros: Amounts(pass), inputs: Inputs::Norms(Vec::new()), report: MethodReport::default() };
    let requested = if pass.importance == Importance::Sparsegpt { SPARSEGPT.request() } else { MomentsRequest::default() };
    let flow = Flow { whole_block: pass.importance == Importance::Wanda, ..Flow::default() };
    let work = Layerwise { name: pass.name(), context, targets: names, requested, rescale: None, flow };
    let Summary { samples, report, .. } = work.run(model, &mut method)?;
    applied.notes.extend(report.notes);
    let of: u64 = names.iter().map(|name| Ok(model.weights.get(name)?.elements() as u64)).sum::<Result<u64>>()?;
    let removed = names.iter().map(|name| model.weights.get(name)?.zeros()).sum::<Result<u64>>()?;
    let mut details = Map::from_iter([("zeroed".to_owned(), json!(removed)), ("of".to_owned(), json!(of)), ("samples".to_owned(), json!(samples))]);
    LayerChoice::describe(&report.choices, (pass.name(), SPARSEGPT.name), &mut details, &mut applied.notes);
    Ok(details.into())
}

/// Weights to remove from each layer.
struct Amounts<'a>(&'a PruneUnstructured);

/// The inputs of the next layers.
enum Inputs {
    /// Norms of features, for Wanda.
    Norms(Vec<f32>),
    Sparsegpt(Chosen),
}

/// Pruning method.
struct Sparse<'a> {
    zeros: Amounts<'a>,
    inputs: Inputs,
    report: MethodReport,
}

impl Amounts<'_> {
    fn zeros(&self, layer: &Layer) -> Result<Zeros> {
        let pass = self.0;
        match pass.pattern {
            Some(NOfM { m, .. }) if !layer.size.is_multiple_of(m) => Err(Error::tensor(
                &layer.weight,
                format!("has {} inputs, which is not a multiple of {m}", layer.size),
                "add it to `ignore`, or choose another pattern",
            )),
            Some(NOfM { m, .. }) if m > MAX_PATTERN => Err(Error::option("pattern", format!("M must be at most {MAX_PATTERN} with `wanda` and `sparsegpt`"))),
            Some(NOfM { n, m }) => Ok(Zeros::AllBut { n, m }),
            None => {
                let (name, weights) = (&layer.weight, (layer.rows * layer.size) as u64);
                let amount = pass.rule(name).map_or_else(|| pass.amount(), |rule| pass.rules[rule].amount);
                let count = amount.of(weights).ok_or_else(|| too_many(amount, &format!("tensor `{name}`"), weights))?;
                Ok(Zeros::Part(count as f64 / weights.max(1) as f64))
            }
        }
    }
}

impl Compensating for Amounts<'_> {
    fn plain(&self) -> &'static [&'static str] {
        &["l1", "wanda"]
    }

    fn solve(&self, layer: &Layer, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<()> {
        let zeros = self.zeros(layer)?;
        match (attempt, &prepared.solver) {
            (Attempt::Compensated(correction), Some(solver)) => {
                let block = if let Zeros::AllBut { m, .. } = zeros { BLOCK / m * m } else { BLOCK };
                let rule = |_: &[f32]| ColumnSolver::<fn(f64) -> f32>::new(zeros, None::<Grid<_>>);
                solver.solve(values, &prepared.order, correction, Steps { block, frozen: &[], sweeps: 0 }, rule)?;
            }
            // Magnitudes are compared over the complete weight.
            (Attempt::Plain(0), _) => remove(values, &vec![1.0; values.len()], zeros),
            _ => remove(values, &norms(&prepared.squares), zeros),
        }
        Ok(())
    }
}

/// Norms of inputs. If no token reaches a layer, weights are compared by their magnitudes.
fn norms(squares: &[f64]) -> Vec<f32> {
    if squares.iter().all(|square| *square == 0.0) {
        return vec![1.0; squares.len()];
    }
    squares.iter().map(|square| square.sqrt() as f32).collect()
}

impl Method for Sparse<'_> {
    fn check(&self, layer: &Layer) -> Result<()> {
        self.zeros.zeros(layer).map(|_| ())
    }

    fn read(&mut self, value: &str, moments: Moments, readers: &Readers) -> Result<()> {
        // The previous solver may occupy much of a GPU's memory.
        self.inputs = Inputs::Norms(Vec::new());
        self.inputs = if self.zeros.0.importance == Importance::Sparsegpt {
            Inputs::Sparsegpt(SPARSEGPT.run(value, moments, readers, &self.zeros, &mut self.report)?)
        } else {
            Inputs::Norms(norms(&moments.squares))
        };
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        match &self.inputs {
            Inputs::Norms(norms) => remove(values, norms, self.zeros.zeros(layer)?),
            Inputs::Sparsegpt(chosen) => self.zeros.solve(layer, values, &chosen.prepared, chosen.attempt(layer, values, &self.zeros)?)?,
        }
        let new = weight.with_values(&layer.weight, &layer.stored(values.to_vec()))?;
        Ok(vec![(layer.weight.clone(), new)])
    }

    fn report(&mut self) -> &mut MethodReport {
        &mut self.report
    }
}

/// Zeros the weights of each row with the smallest products of magnitude and input norm.
fn remove(values: &mut [f32], norms: &[f32], zeros: Zeros) {
    let size = norms.len().max(1);
    // Weights processed and zeroed, so that rounding does not accumulate over rows.
    let mut total = (0, 0);
    for row in values.chunks_exact_mut(size) {
        let mut drop = |from: usize, width: usize, count: usize| {
            let mut ranked: Vec<usize> = (from..from + width).collect();
            let cost = |at: usize| row[at].abs() * norms[at];
            if count > 0 {
                ranked.select_nth_unstable_by(count - 1, |a, b| cost(*a).total_cmp(&cost(*b)).then(a.cmp(b)));
                ranked[..count].iter().for_each(|at| row[*at] = 0.0);
            }
        };
        match zeros {
            Zeros::None => {}
            Zeros::Part(part) => {
                total.0 += size;
                let count = ((part * total.0 as f64).round() as usize).saturating_sub(total.1).min(size);
                total.1 += count;
                drop(0, size, count);
            }
            Zeros::AllBut { n, m } => (0..size).step_by(m).for_each(|from| {
                let width = m.min(size - from);
                drop(from, width, width.saturating_sub(n));
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_that_no_token_reaches_have_equal_norms() {
        assert_eq!(norms(&[4.0, 0.0]), [2.0, 0.0]);
        assert_eq!(norms(&[0.0, 0.0]), [1.0, 1.0]);
    }

    /// The example of the reference implementation (locuslab/wanda).
    #[test]
    fn the_most_important_weights_of_rows_remain() {
        let mut weights = vec![0.9, -0.35, 0.5, -0.12, 0.26, 0.74, -0.6, 0.33];
        remove(&mut weights, &[14f32.sqrt(), 14f32.sqrt(), 6f32.sqrt(), 14f32.sqrt()], Zeros::AllBut { n: 2, m: 4 });
        assert_eq!(weights, [0.9, -0.35, 0.0, 0.0, 0.0, 0.74, -0.6, 0.0]);
        let mut weights = vec![1.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, 5.0, 1.0];
        remove(&mut weights, &[1.0, 1.0, 1.0], Zeros::Part(0.5));
        assert_eq!(weights.iter().filter(|w| **w == 0.0).count(), 5, "{weights:?}");
    }

    #[test]
    fn layers_read_their_inputs_along_different_axes() {
        let text = "input x: float[batch, 4]\ninput image: float[batch, 8, 5, 5]\n\
            param a: float[6, 4]\nparam b: float[6, 8]\nparam stack: float[2, 3, 8]\nparam both: float[4, 4]\nparam up: float[8, 12, 2, 2]\nparam scale: float[8]\n\
            h = Linear(x, a) -> float[batch, 6]\nk = Linear{\"input_major\":true}(h, b) -> float[batch, 8]\n\
            one = Slice{\"axis\":0,\"start\":1}(stack) -> float[1, 3, 8]\nmatrix = Reshape{\"shape\":[{\"copy\":1},{\"copy\":2}]}(one) -> float[3, 8]\n\
            expert = Linear(k, matrix) -> float[batch, 3]\nscaled = Mul(k, scale) -> float[batch, 8]\n\
            s = Linear(x, both) -> float[batch, 4]\nturned = Transpose(both) -> float[4, 4]\nt = Linear(s, turned) -> float[batch, 4]\n\
            large = ConvTranspose{\"stride\":2}(image, up) -> float[batch, 12, 10, 10]\n\
            output e = expert\noutput m = scaled\noutput t = t\noutput large = large\n";
        let axes = axes_of_inputs(&text.parse::<Graph>().unwrap());
        let found: Vec<(&str, Vec<usize>)> = axes.iter().map(|(name, axes)| (name.as_str(), axes.iter().copied().collect())).collect();
        assert_eq!(found, [("a", vec![1]), ("b", vec![0]), ("both", vec![0, 1]), ("stack", vec![2]), ("up", vec![0])]);
    }
}
