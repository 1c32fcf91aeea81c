//! Counted work of a search, before it runs.

use super::formats::{Formats, Unit};
use super::measure::{Measurement, measured_options};
use super::{Budget, ROUNDS, Search};
use crate::analysis;
use crate::error::Result;
use crate::evaluation::Subject;
use crate::ir::{Bindings, Graph};
use crate::pass::{Score, Scores};
use crate::pipeline::running::time::SampleSizes;
use crate::pipeline::time::{Rates, StageWork};
use crate::report::search::SearchLoss;
use crate::run_state::ModelRun;

impl Search<'_> {
    /// The counted work of the stages of the search, with estimated times at these rates: upper bounds,
    /// because the number of mixtures that are measured depends on the measurements. Latencies are not
    /// included.
    ///
    /// # Errors
    /// As [`run`](Search::run), as far as errors are known before the model runs.
    pub fn planned_work(&self, rates: Option<&Rates>) -> Result<Vec<StageWork>> {
        let formats = self.formats()?;
        self.require_distribution(&*formats)?;
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
        let of_layers = used.saturating_mul(formats.score_runs()?);
        // Mixtures of ONNX files are calibrated.
        let calibrated = used.saturating_mul(u64::from(is_onnx) + formats.prune_runs());
        let tried = |count: usize| (count as u64).saturating_mul(held_out + calibrated + scored).saturating_add(held_out + scored);
        let each = formats.structure_options();
        let measured: usize = units.iter().filter(|unit| unit.measured).map(|unit| measured_options(unit, each)).sum();
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{Device, Tensor};

    use super::super::onnx_layers::{Arithmetics, OnnxLayers};
    use super::super::schemes::Schemes;
    use super::*;
    use crate::data::{Data, DataSets};
    use crate::exec::MemoryTracker;
    use crate::model::Model;
    use crate::pass::{Context, Scheme};
    use crate::work::{Cancel, MemoryLimit, Silent, Work};

    /// Executed multiply-accumulates relative to those of a run over the calibration samples.
    fn executed(model: &Model, run: impl FnOnce(&Context)) -> f64 {
        let folder = tempfile::tempdir().unwrap();
        let ids = Tensor::from_vec((0..48i64).map(|at| at * at * 7 % 41 % 40).collect::<Vec<_>>(), (6, 8), &Device::Cpu).unwrap();
        let path = folder.path().join("ids.safetensors");
        let arrays = [("attention_mask".to_owned(), ids.ones_like().unwrap()), ("input_ids".to_owned(), ids)];
        candle_core::safetensors::save(&arrays.into(), &path).unwrap();
        let set = Data { arrays: Some(path), ..Data::default() };
        let data = DataSets { calibration: Some(set.clone()), ..DataSets::default() };
        let (tracker, cancel) = (Arc::new(MemoryTracker::default().counting()), Cancel::default());
        let (device, memory, work) = (Device::Cpu, MemoryLimit::default(), Work { threads: 2, progress: &Silent, cancel: &cancel });
        run(&Context { work, seed: 0, data: &data, device, memory, memory_tracker: Some(tracker.clone()), checkpoints: None });
        let (graph, subject) = (model.graph().unwrap(), Subject::from_model(model.clone()).unwrap());
        let once = SampleSizes::new(&data.open(&set, subject.target()).unwrap(), &set, &graph).unwrap().macs(&forward(&graph));
        tracker.macs().unwrap() as f64 / once as f64
    }

    /// Planned runs are an upper bound that exceeds the executed work by less than one run.
    #[test]
    fn the_runs_for_scores_are_those_of_the_search() {
        let model = Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        let formats: [Box<dyn Formats>; 2] =
            [Box::new(Schemes::new(&model, &[(Scheme::W4A16, 8)])), Box::new(OnnxLayers::new(&model, Arithmetics::Fast).unwrap())];
        for formats in formats {
            let runs = executed(&model, |context| drop(formats.scores(context).unwrap()));
            let planned = formats.score_runs().unwrap() as f64;
            assert!(runs <= planned && runs > planned - 1.0, "{runs} of {planned} runs: {:?}", formats.names());
        }
    }
}
