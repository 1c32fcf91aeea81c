//! Log-mel spectrograms of recordings for Whisper (Radford et al., 2022), like `WhisperFeatureExtractor`
//! of transformers: windows of 25 ms with a hop of 10 ms, Slaney-normalized triangular mel filters
//! (Slaney's Auditory Toolbox), and logarithms clamped to eight powers of ten below the maximum.

use std::f64::consts::TAU;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::shaped;
use super::wav::Wav;
use crate::arch::{Keys, ReadKeys, Settings};
use crate::error::{Error, Result};
use crate::kernel::fourier::Fourier;
use crate::model::{Config, SynthesizedFiles, processor_settings};

/// File with the preprocessing of recordings.
const FILE: &str = "preprocessor_config.json";
/// The supported feature extractor.
const CLASS: &str = "WhisperFeatureExtractor";
/// Upper frequency of the mel filters, in Hz.
const MAX_FREQUENCY: f64 = 8000.0;
/// Lower bound of filter outputs, before the logarithm.
const FLOOR: f64 = 1e-10;
/// Maximum number of samples of a recording.
const MAX_SAMPLES: usize = 1 << 26;

const KEYS: Keys = Keys {
    harmless: &[
        "feature_extractor_type",
        // These follow from the others.
        "mel_filters",
        "n_samples",
        "nb_max_frames",
        "padding_side",
        "processor_class",
        "return_attention_mask",
    ],
    neutral: &[("dither", "0.0"), ("do_normalize", "false")],
};

/// Settings of the log-mel spectrogram.
#[derive(Debug, Clone, PartialEq)]
pub struct Speech {
    /// Number of mel filters.
    bins: usize,
    /// Sampling rate, in Hz.
    rate: usize,
    /// Window length, in samples.
    window: usize,
    /// Hop length, in samples.
    step: usize,
    /// Number of samples that recordings are padded to.
    samples: usize,
    /// Padding value.
    padding: f64,
}

/// Whether a preprocessor configuration is that of the supported feature extractor.
pub(super) fn is_speech_processor(values: &serde_json::Map<String, serde_json::Value>) -> bool {
    values.get("feature_extractor_type").and_then(serde_json::Value::as_str) == Some(CLASS)
}

impl Speech {
    /// Reads the settings of the feature extractor of a folder.
    pub fn open(folder: &Path, synthesized: &SynthesizedFiles) -> Result<Speech> {
        let Some((path, config)) = processor_settings(folder, synthesized)? else {
            let reason = "is missing, and processor_config.json has no `feature_extractor`: one of them must define the preprocessing of recordings";
            return Err(Error::malformed(&folder.join(FILE), reason));
        };
        Speech::parse(&config, &path).map(|(speech, _)| speech)
    }

    /// Parses a preprocessor configuration. Also returns its unrecognized keys.
    pub(super) fn parse(config: &Config, path: &Path) -> Result<(Speech, Vec<String>)> {
        let file = &path.file_name().unwrap_or_default().to_string_lossy();
        if !is_speech_processor(config.values()) {
            let hint = format!("only {CLASS} is supported");
            return Err(Error::Unsupported { what: format!("{file}: a `feature_extractor_type` other than {CLASS}"), hint });
        }
        let read = ReadKeys::default();
        let values = Settings::new(config.values()).recording(&read);
        let (rate, seconds) = (values.size_or("sampling_rate", 16000)?, values.size_or("chunk_length", 30)?);
        let found = Speech {
            bins: values.size_or("feature_size", 80)?,
            rate,
            window: values.size_or("n_fft", 400)?,
            step: values.size_or("hop_length", 160)?,
            samples: rate.saturating_mul(seconds),
            padding: values.number_or("padding_value", 0.0)?,
        };
        if found.samples > MAX_SAMPLES || found.window > found.samples || found.bins > found.window || found.step > found.samples {
            return Err(Error::graph(file, "`chunk_length`, `sampling_rate`, `n_fft`, `hop_length` and `feature_size` are inconsistent"));
        }
        let unknown = KEYS.check(&values, file)?;
        Ok((found, unknown))
    }

    /// Computes the spectrogram of a WAV file, `[1, filters, windows]`. Fails if the file is not a
    /// single-channel WAV file with the model's sampling rate, or is longer than the model's input.
    pub fn read(&self, path: &Path) -> Result<Tensor> {
        let wav = Wav::open(path)?;
        let convert = format!("convert it with `ffmpeg -i FILE -ac 1 -ar {} OUT.wav`", self.rate);
        if wav.channels != 1 {
            return Err(Error::malformed(path, format!("has {} channels, but must have one: {convert}", wav.channels)));
        }
        if wav.rate != self.rate {
            return Err(Error::malformed(path, format!("has a sampling rate of {} Hz, but the model requires {} Hz: {convert}", wav.rate, self.rate)));
        }
        if wav.samples > self.samples as u64 {
            let seconds = |samples: u64| samples as f64 / self.rate.max(1) as f64;
            let (length, limit) = (seconds(wav.samples), seconds(self.samples as u64));
            return Err(Error::malformed(path, format!("is {length:.1} seconds long, but the model accepts at most {limit}: split it into shorter files")));
        }
        let spectrogram = self.spectrogram(&wav.read()?);
        let windows = spectrogram.len().checked_div(self.bins).unwrap_or(0);
        Tensor::from_vec(spectrogram, (1, self.bins, windows), &Device::Cpu).map_err(shaped)
    }

    /// The values of each filter for all windows, filter by filter.
    fn spectrogram(&self, recorded: &[f32]) -> Vec<f32> {
        let half = self.window / 2;
        let mut samples: Vec<f64> = recorded.iter().map(|sample| f64::from(*sample)).collect();
        samples.resize(self.samples, self.padding);
        // Windows are centered at multiples of the hop length, with reflection padding at the ends.
        let before = samples.iter().skip(1).take(half).rev();
        let after = samples.iter().rev().skip(1).take(half);
        let padded: Vec<f64> = before.chain(&samples).chain(after).copied().collect();
        let hann: Vec<f64> = (0..self.window).map(|n| 0.5 - 0.5 * (TAU * n as f64 / self.window.max(1) as f64).cos()).collect();
        let (fourier, filters) = (Fourier::new(self.window), self.filters());
        let windows = self.samples.checked_div(self.step).unwrap_or(0);
        let silence = FLOOR.log10();
        let mut by_window: Vec<Vec<f64>> = Vec::with_capacity(windows);
        for window in padded.windows(self.window).step_by(self.step).take(windows) {
            if window.iter().all(|sample| *sample == 0.0) {
                by_window.push(vec![silence; self.bins]);
                continue;
            }
            let weighted: Vec<f64> = window.iter().zip(&hann).map(|(sample, weight)| sample * weight).collect();
            let power = fourier.power(&weighted);
            let sum = |filter: &Vec<f64>| filter.iter().zip(&power).map(|(factor, power)| factor * power).sum::<f64>();
            by_window.push(filters.iter().map(|filter| sum(filter).max(FLOOR).log10()).collect());
        }
        let loudest = by_window.iter().flatten().copied().fold(silence, f64::max);
        let number = |window: &Vec<f64>, bin: usize| window.get(bin).map_or(0.0, |value| ((value.max(loudest - 8.0) + 4.0) / 4.0) as f32);
        (0..self.bins).flat_map(|bin| by_window.iter().map(move |window| number(window, bin))).collect()
    }

    /// Weights of each filter, by frequency bin.
    fn filters(&self) -> Vec<Vec<f64>> {
        let max_mel = mel(MAX_FREQUENCY);
        let corner = |at: usize| hertz(max_mel * at as f64 / (self.bins as f64 + 1.0));
        let count = self.window / 2;
        let frequency = |k: usize| (self.rate / 2) as f64 * k as f64 / count.max(1) as f64;
        let filter = |bin: usize| {
            let [low, middle, high] = [bin, bin.saturating_add(1), bin.saturating_add(2)].map(corner);
            let factor = |k: usize| {
                let sides = ((frequency(k) - low) / (middle - low)).min((high - frequency(k)) / (high - middle));
                sides.max(0.0) * 2.0 / (high - low)
            };
            (0..=count).map(factor).collect()
        };
        (0..self.bins).map(filter).collect()
    }
}

/// Transition of Slaney's mel scale from linear to logarithmic, in hertz and in mel.
const BEND: [f64; 2] = [1000.0, 15.0];

/// Mel per factor of e in the logarithmic part.
fn steepness() -> f64 {
    27.0 / 6.4f64.ln()
}

fn mel(hertz: f64) -> f64 {
    let [bend, mel] = BEND;
    if hertz < bend { hertz * mel / bend } else { mel + (hertz / bend).ln() * steepness() }
}

fn hertz(mel: f64) -> f64 {
    let [hertz, bend] = BEND;
    if mel < bend { mel * hertz / bend } else { hertz * ((mel - bend) / steepness()).exp() }
}
