//! Counted work of a search, before it runs.

use super::formats::{Formats, Unit};
use super::measure::Measurement;
use super::{Budget, ROUNDS, Search};
use crate::analysis;
use crate::error::Result;
use crate::evaluation::Subject;
use crate::ir::{Bindings, Graph, Op};
use crate::pass::{Score, Scores};
use crate::pipeline::running::time::SampleSizes;
use crate::pipeline::time::{Rates, StageWork};
use crate::report::search::SearchLoss;
use crate::run_state::ModelRun;

/// Runs of the model for the scores of all layers: forward, backward (twice the work), and forward to the
/// inputs of the layers.
const SCORES: u64 = 4;
/// Models that are compared for each layer of an ONNX file, without int4 weights.
const DAMAGES: u64 = 3;

impl Search<'_> {
    /// The counted work of the stages of the search, with estimated times at these rates: upper bounds,
    /// because the number of mixtures that are measured depends on the measurements. Latencies are not
    /// included.
    ///
    /// # Errors
    /// As [`run`](Search::run), as far as errors are known before the model runs.
    pub fn planned_work(&self, rates: Option<&Rates>) -> Result<Vec<StageWork>> {
        let formats = self.formats()?;
        self.require_samples()?;
        self.require_possible_size(&*formats)?;
        let stage = |name: &str, macs: u64| StageWork { name: name.to_owned(), macs: Some(macs), at_most: true, ..StageWork::default() }.timed(rates);
        let data = self.context.data;
        let Some(calibration) = &data.calibration else {
            // All weights are read once, and rounded once in each format.
            let read_bytes = self.model.stored_bytes().saturating_mul(formats.names().len() as u64);
            return Ok(vec![StageWork { read_bytes, ..stage("weight errors", 0) }.timed(rates)]);
        };
        let graph = self.model.graph()?;
        let forward = forward(&graph);
        let subject = Subject::from_model(self.model.clone())?;
        let used = SampleSizes::new(&*data.open(calibration, subject.target())?, calibration, &graph)?.macs(&forward);
        let held_out: u64 = Measurement::new(self.model, self.context, &*formats)?.held_out().iter().map(|sizes| forward.macs(sizes)).sum();
        let scored = match &data.evaluation {
            Some(set) if matches!(self.budget, Some(Budget::Drop(_))) => SampleSizes::new(&*data.open(set, subject.target())?, set, &graph)?.macs(&forward),
            _ => 0,
        };
        let units = self.expected_units(&*formats)?;
        let is_onnx = formats.loss() == SearchLoss::CosineDistance;
        let layers = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_))).count() as u64;
        let of_layers = if is_onnx { used.saturating_mul(DAMAGES * layers + 3) } else { used.saturating_mul(SCORES) };
        // Mixtures of ONNX files are calibrated.
        let calibrated = if is_onnx { used } else { 0 };
        let tried = |count: usize| (count as u64).saturating_mul(held_out + calibrated + scored).saturating_add(held_out + scored);
        let options = |unit: &Unit| unit.options.iter().rev().skip(1).flatten().count();
        let measured: usize = units.iter().filter(|unit| unit.measured).map(options).sum();
        let rounds = if self.budget.is_none_or(Budget::is_size) { 1 } else { ROUNDS };
        let mixtures = formats.references(&units)?.len() + self.points + rounds;
        Ok(vec![stage("scores of layers", of_layers), stage("measured units", tried(measured)), stage("mixtures", tried(mixtures))])
    }

    /// The units without their losses. Formats of ONNX files are known only with the scores: all are assumed.
    fn expected_units(&self, formats: &dyn Formats) -> Result<Vec<Unit>> {
        let count = formats.names().len() - 1;
        let assumed = || {
            let matrices = self.model.weights.by_name.iter().filter(|(_, weight)| weight.shape.len() > 1 && weight.is_float());
            let score = Some(Score { loss: 0.0, bytes: 1 });
            let by_weight = matrices.map(|(name, _)| (name.clone(), vec![score; count])).collect();
            Scores { by_weight, ..Scores::default() }
        };
        Ok(formats.units(&formats.sizes()?.unwrap_or_else(assumed)))
    }
}

/// A run that computes all outputs.
fn forward(graph: &Graph) -> ModelRun {
    let graph = graph.clone();
    ModelRun::new(move |sizes: &Bindings| analysis::cost(&graph, sizes).0)
}
