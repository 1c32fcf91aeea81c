//! Error compensation and input correction, computed once for all layers that read the same value, and
//! their choice by the errors on held-out tokens.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::held_out::{Errors, HeldOut, LayerChoice};
use super::output_feedback::OutputFeedback;
use super::sampled::{Sampled, outputs_step, stacks};
use super::solver::{Change, Correction, Part, Solver};
use super::{Layer, MethodReport, Moments, MomentsRequest, Readers};
use crate::error::{Error, Result};

/// Damping that is tried first, and the limits of the search, as fractions of the mean of the diagonal.
const DAMPING: f64 = 0.1;
const DAMPING_LIMITS: [f64; 2] = [1e-3, 10.0];
/// Ratio of dampings that are tried.
const DAMPING_STEP: f64 = 3.0;
/// Smallest fraction of the input correction that is applied.
const MIN_PROPAGATION: f32 = 0.02;

/// Second moments of the inputs of layers, prepared for solving.
pub(super) struct Prepared<'m> {
    /// Sum of squares of each feature.
    pub squares: Vec<f64>,
    /// Columns in processing order.
    pub order: Vec<usize>,
    /// Compensation for the errors of previous columns, and coordinate descent.
    pub solver: Option<Solver>,
    /// `(X₀ - X)ᵀX` `[size, size]`, where the original model's layers read `X₀` and these read `X`; empty
    /// if they are equal, or on the device of the solver.
    differences: Cow<'m, [f32]>,
}

/// A solution of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Solution {
    /// A solution without compensation, by its index.
    Plain(usize),
    /// Error compensation, and this fraction of the input correction.
    Compensated(f32),
}

/// A solution of a weight, with the correction that it uses.
pub(super) enum Attempt {
    /// A solution without compensation, by its index.
    Plain(usize),
    Compensated(Correction),
}

/// A method with error compensation.
pub(super) trait Compensating {
    /// Names of the solutions without compensation. The first one needs no samples.
    fn plain(&self) -> &'static [&'static str];

    /// Whether the outputs of two layers can be solved together, as outputs of either of them.
    fn can_stack(&self, _layers: [&Layer; 2]) -> bool {
        false
    }

    /// Compensation between outputs of a layer at a distance of `step`, if there is any.
    fn feedback(&self, _layer: &Layer, _step: usize) -> Result<Option<Rc<OutputFeedback>>> {
        Ok(None)
    }

    /// Replaces values `[n, size]` of a weight by a solution, for some or all outputs of the layer.
    fn solve(&self, layer: &Layer, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<()>;
}

/// The chosen solutions of the layers that read a value.
pub(super) struct Chosen {
    pub prepared: Prepared<'static>,
    /// The upper triangle of the sums of products, if it is requested.
    pub products: Vec<f32>,
    solutions: BTreeMap<String, Solution>,
}

impl Chosen {
    /// The solution of a layer.
    fn solution(&self, layer: &Layer) -> Solution {
        self.solutions.get(&layer.weight).copied().unwrap_or(Solution::Plain(0))
    }

    /// The solution of the weight of a layer.
    pub fn attempt(&self, layer: &Layer, values: &[f32], method: &dyn Compensating) -> Result<Attempt> {
        let fraction = match self.solution(layer) {
            Solution::Plain(index) => return Ok(Attempt::Plain(index)),
            Solution::Compensated(fraction) => fraction,
        };
        let change = if fraction == 0.0 { None } else { self.prepared.change(values)? };
        let parts = vec![Part { rows: values.len() / layer.size.max(1), fraction }];
        Ok(Attempt::Compensated(Correction { parts, change, feedback: method.feedback(layer, 1)? }))
    }

    /// The values of a weight that its solution approximates.
    pub fn target(&self, layer: &Layer, values: &[f32]) -> Result<Vec<f32>> {
        let mut target = values.to_vec();
        if let Solution::Compensated(propagation) = self.solution(layer) {
            self.prepared.correct(&mut target, propagation)?;
        }
        Ok(target)
    }
}

/// Options of the choice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choosing {
    /// Name of the solution with compensation.
    pub name: &'static str,
    /// Whether columns with large inputs are processed first.
    pub ordered: bool,
    /// Damping of the diagonal; `None` to choose it.
    pub damping: Option<f64>,
    /// Fraction of the input correction; `None` to choose it.
    pub propagation: Option<f32>,
    /// Sweeps of coordinate descent after compensation.
    pub sweeps: usize,
    /// Whether the sums of products are needed after the choice.
    pub keeps_products: bool,
}

/// How second moments are prepared.
#[derive(Debug, Clone, Copy, Default)]
struct Preparation {
    /// Damping of the factorization; `None` if there is none.
    damping: Option<f64>,
    /// Whether columns with large inputs are processed first.
    ordered: bool,
    /// Whether coordinate descent follows.
    descends: bool,
}

/// A solution that is tried.
#[derive(Debug, Clone, Copy)]
enum Tried {
    /// A solution without compensation, by its index.
    Plain(usize),
    /// Compensation with this damping.
    Damping(f64),
}

/// Errors of a layer for a damping.
#[derive(Default)]
struct Trial {
    errors: Errors,
    /// Numerator and denominator of the best fraction of the input correction.
    propagation: [f64; 2],
}

impl Choosing {
    /// Statistics to collect of the inputs of layers.
    pub fn request(&self) -> MomentsRequest {
        MomentsRequest { products: true, original: self.propagation != Some(0.0), held_out: self.holds_out(), on_device: true, ..MomentsRequest::default() }
    }

    /// Whether tokens are held out. If all options are given, there is nothing to choose.
    fn holds_out(&self) -> bool {
        self.damping.is_none() || self.propagation.is_none()
    }

    /// Chooses the solution of each layer that reads a value by its errors on held-out tokens, and prepares
    /// the moments of all tokens.
    pub fn run(&self, value: &str, mut moments: Moments, readers: &Readers, method: &dyn Compensating, report: &mut MethodReport) -> Result<Chosen> {
        if !self.holds_out() {
            let (prepared, products) = self.prepare(value, moments, self.damping, report)?;
            let solution = Solution::Compensated(self.propagation.unwrap_or_default());
            return Ok(Chosen { prepared, products, solutions: readers.layers.iter().map(|layer| (layer.weight.clone(), solution)).collect() });
        }
        // The host solves rows one after another anyway.
        let stacks = stacks(readers.layers, |layers| moments.is_on_device() && method.can_stack(layers));
        let sampled = stacks.into_iter().map(|stack| {
            let sampled = Sampled::new(readers, stack, &moments.folds)?;
            let feedback = method.feedback(&sampled.layer, outputs_step(&sampled.layer))?;
            Ok(Sampled { feedback, ..sampled })
        });
        let sampled: Vec<Sampled> = sampled.collect::<Result<_>>()?;
        let tried = (0..method.plain().len()).map(Tried::Plain);
        let plain: Vec<Vec<Trial>> = tried.map(|tried| self.trials(value, &moments, &sampled, method, tried)).collect::<Result<_>>()?;
        let (damping, trials) = self.best_damping(value, &moments, &sampled, (method, &plain[0]))?;
        drop(sampled);
        moments.merge()?;
        let mut solutions = BTreeMap::new();
        for (at, (layer, trial)) in readers.layers.iter().zip(&trials).enumerate() {
            let reference = &plain[0][at].errors;
            let mut best = (Solution::Plain(0), reference);
            for (index, trials) in plain.iter().enumerate().skip(1) {
                if trials[at].errors.are_below(best.1) {
                    best = (Solution::Plain(index), &trials[at].errors);
                }
            }
            if trial.errors.are_below(best.1) {
                best = (Solution::Compensated(self.fraction(trial.propagation)), &trial.errors);
            }
            let relative = (reference.total() > 0.0).then(|| best.1.total() / reference.total());
            report.choices.push(self.choice(layer, method, best.0, damping, relative));
            solutions.insert(layer.weight.clone(), best.0);
        }
        let is_used = solutions.values().any(|solution| matches!(solution, Solution::Compensated(_)));
        let (prepared, products) = self.prepare(value, moments, is_used.then_some(damping), report)?;
        Ok(Chosen { prepared, products, solutions })
    }

    /// Prepares moments, and returns their sums of products if they are requested.
    fn prepare(&self, value: &str, mut moments: Moments, damping: Option<f64>, report: &mut MethodReport) -> Result<(Prepared<'static>, Vec<f32>)> {
        let differences = Cow::Owned(std::mem::take(&mut moments.differences));
        let prepared = Prepared::new(value, &moments, differences, self.preparation(damping), &mut report.notes)?;
        if !self.keeps_products {
            return Ok((prepared, Vec::new()));
        }
        moments.drop_differences();
        moments.download(value)?;
        Ok((prepared, moments.products))
    }

    fn preparation(&self, damping: Option<f64>) -> Preparation {
        Preparation { damping, ordered: self.ordered, descends: self.sweeps > 0 }
    }

    fn choice(&self, layer: &Layer, method: &dyn Compensating, solution: Solution, damping: f64, relative_error: Option<f64>) -> LayerChoice {
        let (choice, damping, propagation) = match solution {
            Solution::Plain(index) => (method.plain()[index], None, None),
            Solution::Compensated(fraction) => (self.name, Some(damping), Some(fraction)),
        };
        LayerChoice { weight: layer.weight.clone(), choice: choice.to_owned(), damping, propagation, relative_error }
    }

    /// The fraction of the input correction from its numerator and denominator.
    fn fraction(&self, [gain, cost]: [f64; 2]) -> f32 {
        self.propagation.unwrap_or_else(|| {
            let fraction = if cost > 0.0 { (gain / cost).clamp(0.0, 1.0) as f32 } else { 0.0 };
            if fraction < MIN_PROPAGATION { 0.0 } else { fraction }
        })
    }

    /// The damping with the least error, of all layers in proportion to those of the plain solution: tries
    /// larger or smaller values until the error rises.
    fn best_damping(&self, value: &str, moments: &Moments, sampled: &[Sampled], compared: (&dyn Compensating, &[Trial])) -> Result<(f64, Vec<Trial>)> {
        let (method, plain) = compared;
        let attempt = |damping: f64| {
            let trials = self.trials(value, moments, sampled, method, Tried::Damping(damping))?;
            // A layer with a worse error than the plain solution will use that one.
            let relative = |(trial, plain): (&Trial, &Trial)| {
                let [error, plain] = [trial, plain].map(|trial| trial.errors.total());
                if plain > 0.0 { (error / plain).min(1.0) } else { 1.0 }
            };
            let error: f64 = trials.iter().zip(plain).map(relative).sum();
            Ok::<_, Error>((error, damping, trials))
        };
        let mut best = attempt(self.damping.unwrap_or(DAMPING))?;
        if self.damping.is_none() && moments.folds.iter().any(|fold| !fold.rows.is_empty()) {
            let [least, most] = DAMPING_LIMITS;
            for step in [DAMPING_STEP, 1.0 / DAMPING_STEP] {
                let first = best.1;
                while (least..=most).contains(&(best.1 * step)) {
                    let next = attempt(best.1 * step)?;
                    if next.0 >= best.0 {
                        break;
                    }
                    best = next;
                }
                if best.1 != first {
                    break;
                }
            }
        }
        Ok((best.1, best.2))
    }

    /// Errors of a solution of each layer that is fitted to the tokens outside of the fold. Compensation uses
    /// the best fraction of the input correction.
    fn trials(&self, value: &str, moments: &Moments, sampled: &[Sampled], method: &dyn Compensating, tried: Tried) -> Result<Vec<Trial>> {
        let mut trials: Vec<Trial> = sampled.iter().flat_map(|sampled| &sampled.layers).map(|_| Trial::default()).collect();
        let damping = if let Tried::Damping(damping) = tried { Some(damping) } else { None };
        for (fold, held_out) in moments.folds.iter().enumerate().filter(|(_, fold)| !fold.rows.is_empty()) {
            let fitted = moments.without(fold)?;
            let fitted = fitted.as_ref().unwrap_or(moments);
            let prepared = Prepared::new(value, fitted, Cow::Borrowed(&fitted.differences), self.preparation(damping), &mut Vec::new())?;
            for sampled in sampled {
                let Sampled { layer, layers, values, outputs, feedback } = sampled;
                let attempt = match tried {
                    Tried::Plain(index) => Attempt::Plain(index),
                    Tried::Damping(_) => Attempt::Compensated(self.correction(sampled, &prepared, (held_out, &outputs[fold]), &mut trials)?),
                };
                let mut solved = values.clone();
                method.solve(layer, &mut solved, &prepared, attempt)?;
                let mut solved = held_out.outputs(&solved, layer.size)?;
                let mut targets = Cow::Borrowed(&outputs[fold][0]);
                if let Some(feedback) = feedback {
                    solved = feedback.weighted_errors(&solved, &targets);
                    targets = Cow::Owned(vec![0.0; solved.len()]);
                }
                for (index, columns) in layers {
                    trials[*index].errors.add_held_out_columns(held_out, [&solved, &targets], sampled.width(), columns.clone());
                }
            }
        }
        Ok(trials)
    }

    /// The correction with the best fraction of each layer for held-out rows, for which the outputs of the
    /// original model and of the layers are given.
    fn correction(&self, sampled: &Sampled, prepared: &Prepared, (held_out, outputs): (&HeldOut, &[Vec<f32>; 2]), trials: &mut [Trial]) -> Result<Correction> {
        let (Sampled { layers, values, .. }, width) = (sampled, sampled.width().max(1));
        let change = if self.propagation == Some(0.0) { None } else { prepared.change(values)? };
        let mut sums = vec![[0.0; 2]; layers.len()];
        if let (None, Some(change)) = (self.propagation, &change) {
            let corrected = sampled.corrected_outputs(held_out, change)?;
            let [targets, current] = outputs.each_ref().map(|outputs| outputs.chunks_exact(width));
            for ((targets, current), corrected) in targets.zip(current).zip(corrected.chunks_exact(width)) {
                for ((_, columns), sums) in layers.iter().zip(&mut sums) {
                    for at in columns.clone() {
                        let (missing, change) = (f64::from(targets[at] - current[at]), f64::from(corrected[at] - current[at]));
                        sums[0] += missing * change;
                        sums[1] += change * change;
                    }
                }
            }
        }
        let mut parts = Vec::with_capacity(layers.len());
        for ((index, columns), sums) in layers.iter().zip(sums) {
            trials[*index].propagation.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            parts.push(Part { rows: columns.len(), fraction: self.fraction(sums) });
        }
        Ok(Correction { parts, change, feedback: sampled.feedback.clone() })
    }
}

impl<'m> Prepared<'m> {
    /// Factorizes the sums of products of a value if there is a damping. Increases it until the matrix is
    /// positive definite, and adds a note if it does. Returns an error if it is not even with a damping of 1.
    fn new(value: &str, moments: &Moments, differences: Cow<'m, [f32]>, preparation: Preparation, notes: &mut Vec<String>) -> Result<Prepared<'m>> {
        let squares = &moments.squares;
        let mut order: Vec<usize> = (0..moments.size).collect();
        if preparation.ordered {
            order.sort_by(|a, b| squares[*b].total_cmp(&squares[*a]).then(a.cmp(b)));
        }
        let mut prepared = Prepared { squares: squares.clone(), order, solver: None, differences };
        if let Some(damping) = preparation.damping {
            let (mut tried, sums) = (damping, moments.device_sums()?);
            prepared.solver = loop {
                let found = Solver::new(moments, sums.as_ref(), &prepared.order, tried, preparation.descends)?;
                if found.is_some() {
                    break found;
                }
                if tried >= 1.0 {
                    let hint = "use other or more calibration samples";
                    return Err(Error::run(format!("graph value `{value}`"), "has a Hessian that is not positive definite with any damping", hint));
                }
                tried = (2.0 * tried).clamp(0.01, 1.0);
            };
            if tried > damping {
                notes.push(format!("the features of `{value}` are nearly linearly dependent: damping {tried:.2} instead of {damping}"));
            }
        }
        Ok(prepared)
    }

    /// Prepares moments only for [`correct`](Prepared::correct).
    pub fn for_correction<'d>(value: &str, moments: &Moments, differences: Cow<'d, [f32]>, damping: f64) -> Result<Prepared<'d>> {
        Prepared::new(value, moments, differences, Preparation { damping: Some(damping), ..Preparation::default() }, &mut Vec::new())
    }

    /// The change of a weight `[rows, size]` to the least-squares solution for the outputs of the original
    /// model. `None` if the inputs have not changed, or without a solver.
    fn change(&self, values: &[f32]) -> Result<Option<Change>> {
        self.solver.as_ref().map_or(Ok(None), |solver| solver.change(values, &self.order, &self.differences))
    }

    /// Corrects a weight `[rows, size]` for changed inputs: moves it by a fraction towards the least-squares
    /// solution for the outputs of the original model (Li et al. 2025, GPTAQ,
    /// <https://arxiv.org/abs/2504.02692>).
    pub fn correct(&self, values: &mut [f32], fraction: f32) -> Result<()> {
        if fraction == 0.0 {
            return Ok(());
        }
        match self.change(values)? {
            Some(change) => change.add_to(values, &vec![fraction; values.len() / self.order.len().max(1)]),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::MomentsRequest;
    use super::super::solver::Steps;
    use super::*;
    use crate::kernel::column_solver::{ColumnSolver, Grid, Zeros};
    use crate::kernel::grid::{IntegerGrid, Levels, QuantizationParams};

    const SIZE: usize = 20;

    fn number(i: usize) -> f32 {
        ((i as u32).wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0
    }

    /// Rounds to multiples of 1/2.
    struct Halves;

    impl Compensating for Halves {
        fn plain(&self) -> &'static [&'static str] {
            &["rtn"]
        }

        fn solve(&self, _layer: &Layer, values: &mut [f32], prepared: &Prepared, attempt: Attempt) -> Result<()> {
            let steps = vec![QuantizationParams { scale: 0.5, zero: 0.0 }; values.len() / SIZE];
            let levels = Levels::Integers(IntegerGrid { bits: 4, symmetric: true });
            let grid = Grid { levels, group: SIZE, steps, order: &prepared.order, store: Some((|scale: f64| scale as f32) as fn(f64) -> f32) };
            match (attempt, &prepared.solver) {
                (Attempt::Compensated(correction), Some(solver)) => {
                    let rule = |_: &[f32]| ColumnSolver::new(Zeros::None, Some(grid));
                    solver.solve(values, &prepared.order, correction, Steps { block: 8, frozen: &[], sweeps: 0 }, rule).map(drop)
                }
                _ => {
                    grid.round(values);
                    Ok(())
                }
            }
        }
    }

    /// Layers that are solved together have the same errors and fractions as separate ones.
    #[test]
    fn trials_of_a_stack_equal_those_of_its_layers() {
        let tensor = |factor: f32, rows: usize, seed: usize| {
            let values: Vec<f32> = (0..rows * SIZE).map(|i| number(i * i + seed) + factor * number(i * 7 + 3)).collect();
            Tensor::from_vec(values, (rows, SIZE), &Device::Cpu).unwrap()
        };
        let mut moments = Moments::new(SIZE, MomentsRequest { products: true, original: true, held_out: true, ..MomentsRequest::default() });
        for fold in 0..2 {
            moments.hold_out("x", fold, &tensor(0.4, 80, fold), Some(&tensor(0.0, 80, fold))).unwrap();
        }
        let layer = |rows: usize| Layer { weight: "w".into(), rows, size: SIZE, input_major: false };
        let values = |rows: usize| (0..rows * SIZE).map(|i| number(i * 31 + rows)).collect::<Vec<f32>>();
        let sampled = |parts: &[(usize, usize)]| {
            let parts = parts.iter().map(|(index, rows)| (*index, values(*rows))).collect();
            Sampled::with_values(&layer(9), parts, &moments.folds).unwrap()
        };
        let choosing = Choosing { name: "gptq", ordered: true, damping: None, propagation: None, sweeps: 0, keeps_products: false };
        for tried in [Tried::Plain(0), Tried::Damping(0.1)] {
            let trials = |sampled: &[Sampled]| choosing.trials("x", &moments, sampled, &Halves, tried).unwrap();
            let stacked = trials(&[sampled(&[(0, 4), (2, 1)]), sampled(&[(1, 9)])]);
            let separate = trials(&[sampled(&[(0, 4)]), sampled(&[(1, 9)]), sampled(&[(2, 1)])]);
            let is_near = |a: f64, b: f64| (a - b).abs() <= 0.02 * b.abs();
            for (stacked, separate) in stacked.iter().zip(&separate) {
                assert!(separate.errors.total() > 0.0 && is_near(stacked.errors.total(), separate.errors.total()));
                assert!(stacked.propagation.iter().zip(separate.propagation).all(|(a, b)| is_near(*a, b)));
                assert_eq!(separate.propagation[1] > 0.0, matches!(tried, Tried::Damping(_)));
            }
            assert_eq!(stacked.len(), 3);
        }
    }

    /// At the least-squares solution, the residual of the outputs is orthogonal to the inputs of the layer.
    #[test]
    fn layers_are_corrected_for_changed_inputs() {
        let (count, size, rows) = (300, 40, 7);
        let original: Vec<f32> = (0..count * size).map(|i| number(i * i)).collect();
        // Each feature has an error that depends on another one.
        let read: Vec<f32> = (0..count * size).map(|i| original[i] - 0.5 * original[i / size * size + (i % size * 7 + 3) % size]).collect();
        let tensor = |values: &[f32]| Tensor::from_slice(values, (count, size), &Device::Cpu).unwrap();
        let mut moments = Moments::new(size, MomentsRequest { products: true, original: true, ..MomentsRequest::default() });
        moments.add_original("x", &tensor(&original), (0..count as u32).collect(), &tensor(&read)).unwrap();
        moments.add("x", &tensor(&read)).unwrap();
        let weight: Vec<f32> = (0..rows * size).map(|i| number(i * 31)).collect();
        let mut corrected = weight.clone();
        let differences = Cow::Borrowed(&*moments.differences);
        let preparation = Preparation { damping: Some(1e-6), ordered: true, ..Preparation::default() };
        let prepared = Prepared::new("x", &moments, differences, preparation, &mut Vec::new()).unwrap();
        prepared.correct(&mut corrected, 1.0).unwrap();
        let output = |x: &[f32], w: &[f32], at: usize, row: usize| (0..size).map(|i| f64::from(x[at * size + i]) * f64::from(w[row * size + i])).sum::<f64>();
        for (row, feature) in (0..rows * size).map(|i| (i / size, i % size)) {
            let along = |w: &[f32]| {
                let left = |at: usize| output(&original, &weight, at, row) - output(&read, w, at, row);
                (0..count).map(|at| left(at) * f64::from(read[at * size + feature])).sum::<f64>()
            };
            assert!(along(&corrected).abs() < 0.05, "{} of {}", along(&corrected), along(&weight));
        }
    }
}
