//! Counts the work of a run on its samples, and measures the rates of this machine.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

use crate::analysis;
use crate::data::{Data, DataSet};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::exec::{Executor, Inputs, Parameters, sizes_of};
use crate::ir::{Bindings, Graph};
use crate::model::Model;
use crate::pass::Samples;
use crate::pipeline::Pipeline;
use crate::pipeline::time::{RateFile, Rates, StageWork, WRITING};
use crate::run_state::{ModelRun, RunState};

/// Name of the stage that measures the output.
const MEASURING: &str = "measure";
/// Width of the matrices whose product is measured, and rows of its input.
const WIDTH: usize = 768;
const ROWS: usize = 256;
/// Bytes of the file that is written and read.
const FILE_BYTES: usize = 32 << 20;
/// Number of measurements of products, and their time. The fastest run of all counts, because other programs
/// may use the processor at some moments.
const MOMENTS: usize = 4;
const PERIOD: Duration = Duration::from_millis(50);
/// Time between two measurements.
const PAUSE: Duration = Duration::from_millis(75);
/// Number of measurements of the disk, of which the fastest counts.
const FILES: usize = 2;
/// Multiply-accumulates per byte of the input that fidelity takes at most if no pass runs the model, and the
/// least number (`fidelity.rs`).
const FIDELITY_MACS: [u64; 2] = [4, 50_000_000];
/// Largest number of samples of fidelity.
const FIDELITY_SAMPLES: u64 = 16;

/// Sizes of the batches of a data set, with the number of batches of each.
pub(super) struct SampleSizes(BTreeMap<Bindings, u64>);

impl SampleSizes {
    /// Texts are read to the end, because their lengths differ; other samples have the sizes of the first
    /// batch.
    pub fn new(data: &DataSet, set: &Data, graph: &Graph) -> Result<SampleSizes> {
        let mut sizes = BTreeMap::new();
        if set.has_texts() {
            data.for_each(|batch| {
                *sizes.entry(sizes_of(graph, &batch.inputs)).or_default() += 1;
                Ok(())
            })?;
            return Ok(SampleSizes(sizes));
        }
        let (first, count) = (data.first()?, data.count()?);
        let (own, batch) = (sizes_of(graph, &first.inputs), first.samples.max(1));
        sizes.insert(own.clone(), (count / batch) as u64);
        if count % batch > 0 {
            *sizes.entry(with_batch(&own, batch, count % batch)).or_default() += 1;
        }
        Ok(SampleSizes(sizes))
    }

    /// Multiply-accumulates of runs over the samples.
    pub fn macs(&self, run: &ModelRun) -> u64 {
        let sum = |sized: &dyn Fn(&Bindings) -> Bindings| {
            let macs = self.0.iter().map(|(sizes, count)| u128::from(run.macs(&sized(sizes))).saturating_mul((*count).into()));
            macs.fold(0, u128::saturating_add)
        };
        let once = || sum(&Bindings::clone);
        let macs = match run.batches {
            // The mean over the batches of the data set, whose texts differ in length.
            Some((batches, size)) => {
                let all = sum(&|sizes| with_batch(sizes, sizes.get("batch").copied().unwrap_or(1), size));
                let macs = all.saturating_mul(batches.into()) / u128::from(self.0.values().sum::<u64>().max(1));
                if run.is_cached { macs.min(once()) } else { macs }
            }
            None => once(),
        };
        u64::try_from(macs).unwrap_or(u64::MAX)
    }
}

/// Sizes with another number of samples.
fn with_batch(sizes: &Bindings, before: usize, batch: usize) -> Bindings {
    // Some inputs have several rows for each sample.
    let scaled = |(name, size): (&String, &usize)| (name.clone(), if name == "batch" { size * batch / before.max(1) } else { *size });
    sizes.iter().map(scaled).collect()
}

impl Pipeline {
    /// The counted work of the stages of a run, with estimated times if the rates of the machine are known.
    /// `bytes`: those of the input and the output.
    pub(in crate::pipeline) fn planned_work(&self, model: &Model, run: &RunState, bytes: [u64; 2]) -> Result<Vec<StageWork>> {
        let graph = model.graph().ok();
        let mut sizes: BTreeMap<&'static str, SampleSizes> = BTreeMap::new();
        let mut stages = Vec::new();
        for (step, applied) in self.steps.iter().zip(&run.history) {
            let Some(samples) = step.pass().runs_on() else { continue };
            let (mut macs, mut at_most) = (None, false);
            if let (Some((key, Some(set))), Some(graph), Some(runs)) = (self.running.data_set(samples), &graph, &applied.model_runs) {
                let set = match sizes.entry(key) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(self.sample_sizes(model, graph, samples, set)?),
                };
                macs = Some(runs.iter().map(|run| set.macs(run)).fold(0, u64::saturating_add));
                at_most = runs.iter().any(|run| run.at_most);
            }
            stages.push(StageWork { name: applied.name.to_owned(), macs, at_most, ..StageWork::default() });
        }
        let [read, written] = bytes;
        // Written files are read back.
        stages.push(StageWork { name: WRITING.into(), macs: Some(0), read_bytes: read + written, written_bytes: written, ..StageWork::default() });
        if let Some(graph) = &graph
            && (self.measures || self.running.evaluates())
        {
            stages.push(self.measuring(model, graph, run, bytes)?);
        }
        Ok(stages.into_iter().map(|stage| stage.timed(self.rates.as_deref())).collect())
    }

    /// The work of measuring the input and the output.
    fn measuring(&self, model: &Model, graph: &Graph, run: &RunState, [read, _]: [u64; 2]) -> Result<StageWork> {
        let whole = graph.clone();
        let forward = ModelRun::new(move |sizes| analysis::cost(&whole, sizes).0).times(2);
        let name = MEASURING.to_owned();
        if let Some(set) = &self.running.data.evaluation {
            let data = self.running.data.open(set, Subject::from_model(model.clone())?.target())?;
            let macs = SampleSizes::new(&data, set, graph)?.macs(&forward);
            return Ok(StageWork { name, macs: Some(macs), ..StageWork::default() });
        }
        let runs_model = run.history.iter().any(|applied| applied.model_runs.is_some());
        let [per_byte, least] = FIDELITY_MACS;
        let macs = if runs_model {
            FIDELITY_SAMPLES.saturating_mul(forward.macs(&analysis::usual_sizes(graph)))
        } else {
            2 * least.max(per_byte.saturating_mul(read))
        };
        Ok(StageWork { name, macs: Some(macs), at_most: true, ..StageWork::default() })
    }

    /// Sizes of the samples that passes read.
    fn sample_sizes(&self, model: &Model, graph: &Graph, samples: Samples, set: &Data) -> Result<SampleSizes> {
        let (data, subject) = (&self.running.data, Subject::from_model(model.clone())?);
        let used = if samples == Samples::Calibration { data.reserve_held_out(set, subject.target())? } else { set.clone() };
        SampleSizes::new(&*data.open(&used, subject.target())?, &used, graph)
    }
}

impl RateFile {
    /// The stored rates of this machine; otherwise they are measured and stored, which takes less than a
    /// second.
    ///
    /// # Errors
    /// The device cannot multiply matrices.
    pub fn load_or_measure(&self, device: &Device) -> Result<Rates> {
        if let Some(rates) = self.load() {
            return Ok(rates);
        }
        let disk = (0..FILES).map(|_| self.disk()).reduce(|one, other| [one[0].max(other[0]), one[1].max(other[1])]);
        let [read_bytes_per_second, write_bytes_per_second] = disk.unwrap_or([f64::INFINITY; 2]);
        let rates = Rates { macs_per_second: macs_per_second(device)?, read_bytes_per_second, write_bytes_per_second, ratios: BTreeMap::new() };
        self.store(&rates);
        Ok(rates)
    }

    /// Bytes per second of the disk of the cache, read and hashed, and written. If the folder is not
    /// writable, only hashing counts.
    fn disk(&self) -> [f64; 2] {
        let block: Vec<u8> = (0..FILE_BYTES).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        let per_second = |start: Instant| FILE_BYTES as f64 / start.elapsed().as_secs_f64().max(1e-9);
        let start = Instant::now();
        std::hint::black_box(blake3::hash(&block));
        let hashed = per_second(start);
        let measured = self.folder().and_then(|folder| {
            fs::create_dir_all(folder).ok()?;
            let path = folder.join(format!("rates-{}.tmp", std::process::id()));
            let start = Instant::now();
            let write = || fs::File::create(&path).and_then(|mut file| file.write_all(&block).and_then(|()| file.sync_all()));
            let written = write().is_ok().then(|| per_second(start));
            let start = Instant::now();
            let read = fs::read(&path).map(|bytes| std::hint::black_box(blake3::hash(&bytes))).is_ok().then(|| per_second(start));
            drop(fs::remove_file(&path));
            Some([read?, written?])
        });
        measured.unwrap_or([hashed; 2])
    }
}

/// Multiply-accumulates per second of a matrix product, as layers of models compute it.
fn macs_per_second(device: &Device) -> Result<f64> {
    let text = format!("input x: float[batch, {WIDTH}]\nparam w: float[{WIDTH}, {WIDTH}]\ny = Linear(x, w) -> float[batch, {WIDTH}]\noutput y = y\n");
    let graph: Graph = text.parse()?;
    let tensor = |rows: usize, device: &Device| {
        let values = (0..rows * WIDTH).map(|at| (at % 31) as f32 / 31.0 - 0.5).collect::<Vec<f32>>();
        Tensor::from_vec(values, (rows, WIDTH), device).map_err(|e| Error::candle("the speed of matrix products", e))
    };
    let parameters = Parameters::from_tensors([("w".to_owned(), tensor(WIDTH, device)?)].into(), DType::F32);
    let inputs = Inputs::from([("x".to_owned(), tensor(ROWS, &Device::Cpu)?)]);
    let executor = Executor::new(&graph, parameters, device.clone());
    executor.run(&inputs)?;
    let mut fastest = Duration::MAX;
    for moment in 0..MOMENTS {
        thread::sleep(if moment > 0 { PAUSE } else { Duration::ZERO });
        let begin = Instant::now();
        while begin.elapsed() < PERIOD {
            let start = Instant::now();
            executor.run(&inputs)?;
            device.synchronize().map_err(|e| Error::candle("the speed of matrix products", e))?;
            fastest = fastest.min(start.elapsed());
        }
    }
    Ok((ROWS * WIDTH * WIDTH) as f64 / fastest.as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_batches_count_the_mean_of_all_lengths() {
        let sizes = |batch: usize, sequence: usize| Bindings::from([("batch".to_owned(), batch), ("sequence".to_owned(), sequence)]);
        let samples = SampleSizes([(sizes(1, 10), 3), (sizes(2, 20), 1)].into());
        let run = ModelRun::new(|sizes| (sizes["batch"] * sizes["sequence"]) as u64);
        assert_eq!(samples.macs(&run), 3 * 10 + 40);
        let batches = |count, is_cached| samples.macs(&ModelRun { batches: Some((count, 2)), is_cached, ..run.clone() });
        assert_eq!((batches(8, false), batches(2, true)), (8 * (3 * 20 + 40) / 4, 2 * (3 * 20 + 40) / 4));
        // Cached results are computed once for each sample.
        assert_eq!(batches(8, true), 3 * 10 + 40);
    }
}
