//! Integers chosen by what rounding costs on calibration samples: each weight by itself, or so that the weights behind it make up for it
//! (GPTQ, `kernel/compensation.rs`).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::rescale::Rounds;
use super::solved::{Solved, reorder, restore};
use super::{Done, Layer, Layerwise, Method, Moments, Rescale, Strength, Wanted};
use crate::error::{Error, Result};
use crate::kernel::choices::{Choices, Grid, Range, Zeros};
use crate::kernel::convert;
use crate::kernel::grid::{Integers, Step};
use crate::model::Model;
use crate::pass::quantize::{Method as By, Quantize};
use crate::pass::{Context, Pass, WeightObserver};
use crate::run_state::{Applied, RunState};
use crate::store::{ActivationScheme, Affine, Codes, Granularity, Pattern, Scales, Weight};

/// How integers are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    /// The nearest.
    Nearest,
    /// The nearest to what makes up for the columns before.
    Gptq {
        /// Added to the diagonal of sums of products, in parts of its mean.
        damping: f64,
        /// Columns of large inputs first, each in the group that it is stored in.
        ordered: bool,
    },
}

/// How a model is rounded.
struct Rounded<'a> {
    name: &'static str,
    options: &'a Value,
    encodings: &'a BTreeMap<String, Affine>,
    rule: Rule,
    /// Whether scales are chosen by the least error, and not from the largest values.
    search: bool,
    /// How range is moved before.
    strength: Option<Strength>,
    /// Weights that stay as they are.
    ignored: Vec<Pattern>,
}

/// Rounds weights of a model to their encodings by calibration samples; gives what the report tells of it.
///
/// # Errors
/// As [`Layerwise::run`].
pub(in crate::pass) fn quantize(
    pass: &Quantize,
    encodings: &BTreeMap<String, Affine>,
    model: &mut Model,
    run: &RunState,
    context: &Context,
    applied: &mut Applied,
) -> Result<Map<String, Value>> {
    let options = pass.options();
    let rule = if pass.method == By::Gptq { Rule::Gptq { damping: pass.damping(), ordered: pass.ordered() } } else { Rule::Nearest };
    let strength = match pass.method {
        By::Awq => Some(Strength::Awq),
        By::Smoothquant => Some(Strength::Smooth),
        _ => None,
    };
    let rounded = Rounded {
        name: pass.name(),
        options: &options,
        encodings,
        rule,
        search: pass.observer() == WeightObserver::Mse,
        strength,
        ignored: pass.ignore.clone(),
    };
    let done = rounded.run(model, run, context, &mut applied.notes)?;
    applied.tensors.extend(done.changed);
    let mut details = Map::new();
    details.insert("samples".into(), json!(done.samples));
    if strength.is_some() {
        details.insert("rescaled".into(), json!(done.rescaled));
        if done.rescaled == 0 {
            applied.notes.push("no layers could share range, or none gained by it: weights were rounded as they are".into());
        }
    }
    Ok(details)
}

/// Columns that are rounded before the others make up for them.
const BLOCK: usize = 128;
/// Down to how many hundredths of a range scales are searched.
const LEAST: u32 = 40;
/// Of a weight with so many zeros in a hundred, zeros stay: they were meant.
const MEANT: u64 = 5;

impl Rounded<'_> {
    /// Rounds the weights of a model; plain words for the report are added to `notes`.
    ///
    /// # Errors
    /// As [`Layerwise::run`].
    fn run(&self, model: &mut Model, run: &RunState, context: &Context, notes: &mut Vec<String>) -> Result<Done> {
        let targets: BTreeSet<&str> = self.encodings.keys().map(String::as_str).collect();
        let rescale = self.strength.map(|strength| {
            let (encodings, range) = (self.encodings.clone(), self.range());
            let round = move |layer: &Layer, weight: &Weight, values: &mut [f32], squares: &[f64], rounds: Rounds| {
                let order: Vec<usize> = (0..layer.size).collect();
                // A layer that stays as it is loses nothing.
                if let Some(mut grid) = encodings.get(&layer.weight).and_then(|affine| grid(layer, weight, affine, &order).ok()) {
                    grid.fix(values, &costs(squares), if rounds == Rounds::Written { range } else { Range::MinMax });
                    grid.round(values);
                }
            };
            let activations = self.encodings.values().next().map_or(ActivationScheme::None, |affine| affine.activations);
            let groups = self.encodings.iter().filter_map(|(name, affine)| match affine.granularity {
                Granularity::Group(size) => Some((name.clone(), size)),
                _ => None,
            });
            Rescale { strength, activations, groups: groups.collect(), ignored: self.ignored.clone(), round: Box::new(round) }
        });
        let compensates = self.rule != Rule::Nearest;
        let wanted = Wanted { products: compensates, original: compensates, ..Wanted::default() };
        let work = Layerwise { name: self.name, options: self.options, context, targets: &targets, wanted, rescale, together: false };
        let mut method = Solver { rounded: self, notes, costs: Vec::new(), order: Vec::new(), solved: None };
        work.run(model, run, &mut method)
    }

    fn range(&self) -> Range {
        if self.search { Range::LeastError(LEAST) } else { Range::MinMax }
    }
}

/// Weights of columns from their mean squares; of columns that no sample has, small ones.
pub(super) fn costs(squares: &[f64]) -> Vec<f32> {
    let mean = squares.iter().sum::<f64>() / squares.len().max(1) as f64;
    let least = if mean > 0.0 { 1e-3 } else { 1.0 };
    squares.iter().map(|square| (square / mean.max(f64::MIN_POSITIVE) + least) as f32).collect()
}

/// The grids of a layer, in the order of columns that is given.
fn grid<'o>(layer: &Layer, weight: &Weight, affine: &Affine, order: &'o [usize]) -> Result<Grid<'o, impl Fn(f64) -> f32 + Sync + use<'o>>> {
    let group = match affine.granularity {
        Granularity::Channel => Some(layer.size),
        Granularity::Group(size) => Some(size),
        Granularity::Tensor | Granularity::Block(_) => None,
    };
    let (Codes::Integer(bits), Some(group), false) = (affine.codes, group, layer.input_major) else {
        return Err(Error::tensor(
            &layer.weight,
            format!("cannot be rounded by samples to {} of {:?} in shape {:?}", affine.codes, affine.granularity, weight.shape),
            "use `method: rtn`, or add it to `ignore`",
        ));
    };
    let dtype = affine.scale_dtype;
    let store = move |exact| convert::scale(dtype, exact);
    Ok(Grid { integers: Integers { bits: bits.into(), symmetric: affine.symmetric }, group, steps: Vec::new(), order, store })
}

/// Rounds layer by layer.
struct Solver<'a, 'n> {
    rounded: &'a Rounded<'a>,
    notes: &'n mut Vec<String>,
    costs: Vec<f32>,
    order: Vec<usize>,
    solved: Option<Solved>,
}

impl Solver<'_, '_> {
    fn affine(&self, layer: &Layer) -> Result<&Affine> {
        self.rounded.encodings.get(&layer.weight).ok_or_else(|| Error::tensor(&layer.weight, "has no encoding", "add it to `ignore`"))
    }
}

impl Method for Solver<'_, '_> {
    fn check(&self, layer: &Layer, weight: &Weight) -> Result<()> {
        self.affine(layer).and_then(|affine| grid(layer, weight, affine, &[])).map(|_| ())
    }

    fn read(&mut self, value: &str, moments: Moments) -> Result<()> {
        self.costs = costs(&moments.squares);
        self.order = (0..moments.size).collect();
        self.solved = None;
        if let Rule::Gptq { damping, ordered } = self.rounded.rule {
            if ordered {
                self.order.sort_by(|a, b| moments.squares[*b].total_cmp(&moments.squares[*a]).then(a.cmp(b)));
            }
            let solved = Solved::of(value, moments, &self.order, damping, self.notes)?;
            // What an error costs after the columns behind it have made up for it.
            self.order.iter().zip(solved.compensation.costs()).for_each(|(column, cost)| self.costs[*column] = *cost);
            self.solved = Some(solved);
        }
        Ok(())
    }

    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>> {
        let affine = self.affine(layer)?;
        let mut grid = grid(layer, weight, affine, &self.order)?;
        let rows = values.chunks_exact(layer.size.max(1));
        let zeros: Vec<bool> = rows.flat_map(|row| self.order.iter().map(|column| row[*column] == 0.0)).collect();
        let meant = 100 * zeros.iter().filter(|zero| **zero).count() as u64 >= MEANT * values.len() as u64;
        if let Some(solved) = &self.solved {
            solved.correct(values);
        }
        grid.fix(values, &self.costs, self.rounded.range());
        let mut choices = Choices::new(Zeros::None, Some(grid));
        if meant {
            choices.zeroed = zeros;
        }
        if let Some(solved) = &self.solved {
            reorder(values, &self.order);
            solved.compensation.apply(values, BLOCK, &mut choices);
            restore(values, &self.order);
        }
        let Some(grid) = choices.grid.take() else { return Err(Error::tensor(&layer.weight, "has no grid", "")) };
        if self.solved.is_none() {
            grid.round(values);
        }
        let integers = grid.integers_of(values);
        let (scales, zero_points) = grid.steps.iter().map(|Step { scale, zero }| (*scale, *zero)).unzip();
        let new = weight.quantized(&layer.weight, affine.clone(), integers, &Scales { run: grid.group, scales, zero_points, global_scale: 1.0 })?;
        Ok(vec![(layer.weight.clone(), new)])
    }

    fn notes(&mut self) -> &mut Vec<String> {
        self.notes
    }
}
