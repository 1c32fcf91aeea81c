//! Estimated times: counted work, and the rates of this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cache;
use crate::report::{Report, Timing, processor};

/// Name of the stage that reads, transforms, hashes and writes the weights.
pub(super) const WRITING: &str = "read and write";
/// Largest number of earlier runs whose times correct an estimate.
const MAX_RUNS: usize = 16;
/// Shortest estimate without correction, in seconds, from which a ratio is learned: constant costs dominate
/// shorter stages.
const MIN_ESTIMATE: f64 = 0.2;

/// Measured rates of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Multiply-accumulates per second of a matrix product in 32 bits.
    pub macs_per_second: f64,
    /// Bytes that are read and hashed per second.
    pub read_bytes_per_second: f64,
    /// Bytes that are written and synchronized per second.
    pub write_bytes_per_second: f64,
    /// Actual times of earlier runs relative to their estimates without this correction, by stage.
    #[serde(default)]
    pub ratios: BTreeMap<String, Vec<f64>>,
}

impl Rates {
    /// The geometric mean of the ratios of a stage; 1 without earlier runs.
    fn ratio(&self, stage: &str) -> f64 {
        let logarithms = || self.ratios.get(stage).into_iter().flatten().filter(|ratio| **ratio > 0.0 && ratio.is_finite()).map(|ratio| ratio.ln());
        let count = logarithms().count();
        if count == 0 { 1.0 } else { (logarithms().sum::<f64>() / count as f64).exp() }
    }

    /// Adds the times of a run, except those of short stages.
    fn add(&mut self, timing: &Timing) {
        for stage in &timing.stages {
            let (Some(estimated), Some(actual)) = (stage.estimated_seconds, stage.seconds) else { continue };
            let raw = estimated / self.ratio(&stage.name);
            if raw >= MIN_ESTIMATE && actual > 0.0 {
                let ratios = self.ratios.entry(stage.name.clone()).or_default();
                ratios.push(actual / raw);
                ratios.drain(..ratios.len().saturating_sub(MAX_RUNS));
            }
        }
    }
}

/// The file of the rates of machines, by processor, version, device and number of threads.
#[derive(Debug, Clone)]
pub struct RateFile {
    path: PathBuf,
    key: String,
}

impl RateFile {
    /// The file that `COMPRESS_RATES` names, or `rates.json` in the user's cache folder; `None` if there is
    /// no such folder, or if the variable is `off`.
    pub fn of_user(device: &str, threads: usize) -> Option<RateFile> {
        let path = match cache::variable("COMPRESS_RATES") {
            Some(path) => Some(path).filter(|path| path != Path::new("off")),
            None => cache::folder(cache::variable).map(|folder| folder.join("rates.json")),
        };
        path.map(|path| RateFile::new(path, device, threads))
    }

    /// The file at a path.
    pub fn new(path: PathBuf, device: &str, threads: usize) -> RateFile {
        let processor = processor().unwrap_or_default();
        let key = format!("{processor} | {} | {device} | {threads} threads", env!("CARGO_PKG_VERSION"));
        RateFile { path, key }
    }

    /// The folder of the file.
    pub fn folder(&self) -> Option<&Path> {
        self.path.parent()
    }

    fn all(&self) -> BTreeMap<String, Rates> {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// The stored rates of this machine. A damaged file counts as empty.
    pub fn load(&self) -> Option<Rates> {
        self.all().remove(&self.key)
    }

    /// Stores the rates of this machine. The file is a cache: failures are ignored.
    pub fn store(&self, rates: &Rates) {
        let mut all = self.all();
        all.insert(self.key.clone(), rates.clone());
        let temporary = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let text = serde_json::to_string_pretty(&all).unwrap_or_default();
        if std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, &self.path)).is_err() {
            drop(std::fs::remove_file(&temporary));
        }
    }

    /// Adds the times of a run, from which later estimates are corrected.
    pub fn record(&self, report: &Report) {
        if let (Some(mut rates), Some(timing)) = (self.load(), &report.timing) {
            rates.add(timing);
            self.store(&rates);
        }
    }
}

/// Counted work of a stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StageWork {
    /// Name of the pass, or of the stage.
    pub(crate) name: String,
    /// Multiply-accumulates of models on samples; those of a backward pass count twice. `None` if they are
    /// not known in advance.
    pub(crate) macs: Option<u64>,
    /// Bytes read.
    pub(crate) read_bytes: u64,
    /// Bytes written.
    pub(crate) written_bytes: u64,
    /// Whether the stage may do less.
    pub(crate) at_most: bool,
    /// Estimated time; `None` if the work or the rates of the machine are not known.
    pub(crate) estimated_seconds: Option<f64>,
}

impl StageWork {
    /// With the estimated time at these rates.
    pub(in crate::pipeline) fn timed(self, rates: Option<&Rates>) -> StageWork {
        let estimate = |rates: &Rates, macs: u64| {
            let bytes = self.read_bytes as f64 / rates.read_bytes_per_second + self.written_bytes as f64 / rates.write_bytes_per_second;
            (bytes + macs as f64 / rates.macs_per_second) * rates.ratio(&self.name)
        };
        let estimated_seconds = rates.zip(self.macs).map(|(rates, macs)| estimate(rates, macs)).filter(|seconds| seconds.is_finite());
        StageWork { estimated_seconds, ..self }
    }
}

/// Sum of the known estimates of stages; `None` if there is none.
pub fn sum_of(stages: &[StageWork]) -> Option<f64> {
    stages.iter().filter_map(|stage| stage.estimated_seconds).reduce(|sum, seconds| sum + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::StageTime;

    fn rates() -> Rates {
        Rates { macs_per_second: 1e9, read_bytes_per_second: 1e8, write_bytes_per_second: 5e7, ratios: BTreeMap::new() }
    }

    #[test]
    fn times_follow_from_work_and_rates() {
        let stage = StageWork { name: "gptq".into(), macs: Some(2_000_000_000), read_bytes: 100_000_000, written_bytes: 50_000_000, ..StageWork::default() };
        assert_eq!(stage.clone().timed(Some(&rates())).estimated_seconds, Some(4.0));
        assert_eq!(stage.clone().timed(None).estimated_seconds, None);
        let unknown = StageWork { macs: None, ..stage };
        assert_eq!(unknown.timed(Some(&rates())).estimated_seconds, None);
    }

    /// After runs that took three times as long as their estimates, the next estimate is three times as long,
    /// whether or not the estimates were already corrected.
    #[test]
    fn earlier_runs_correct_estimates() {
        let (mut rates, work) = (rates(), StageWork { name: "gptq".into(), macs: Some(1_000_000_000), ..StageWork::default() });
        for expected in [1.0, 3.0, 3.0] {
            let estimated_seconds = work.clone().timed(Some(&rates)).estimated_seconds;
            assert!((estimated_seconds.unwrap() - expected).abs() < 1e-9, "{estimated_seconds:?}");
            let stage = StageTime { name: "gptq".into(), estimated_seconds, at_most: false, seconds: Some(3.0) };
            rates.add(&Timing { estimated_seconds, stages: vec![stage] });
        }
        assert_eq!(rates.ratio("other"), 1.0);
        let many = Timing {
            estimated_seconds: None,
            stages: vec![StageTime { name: "gptq".into(), estimated_seconds: Some(3.0), at_most: false, seconds: Some(3.0) }],
        };
        (0..40).for_each(|_| rates.add(&many));
        assert_eq!(rates.ratios["gptq"].len(), MAX_RUNS);
    }

    /// A stage of milliseconds, such as loading a tiny model, does not correct estimates of large ones.
    #[test]
    fn short_stages_do_not_correct_estimates() {
        let mut rates = rates();
        let short = StageTime { name: "gptq".into(), estimated_seconds: Some(0.001), at_most: false, seconds: Some(0.5) };
        rates.add(&Timing { estimated_seconds: Some(0.001), stages: vec![short.clone()] });
        assert!(rates.ratios.is_empty());
        rates.add(&Timing { estimated_seconds: Some(1.0), stages: vec![StageTime { estimated_seconds: Some(1.0), ..short }] });
        assert_eq!(rates.ratio("gptq"), 0.5);
    }

    #[test]
    fn rates_are_stored_by_machine() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = [1, 2].map(|threads| RateFile::new(folder.path().join("rates.json"), "cpu", threads));
        assert_eq!(one.load(), None);
        one.store(&rates());
        two.store(&Rates { macs_per_second: 2e9, ..rates() });
        assert_eq!((one.load(), two.load().map(|rates| rates.macs_per_second)), (Some(rates()), Some(2e9)));
        std::fs::write(folder.path().join("rates.json"), "{").unwrap();
        assert_eq!(one.load(), None);
    }
}
