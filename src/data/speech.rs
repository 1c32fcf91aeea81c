//! From a recording to its log-mel spectrogram, as Whisper takes it (Radford et al., 2022) and `WhisperFeatureExtractor` of transformers makes
//! it: windows of 25 ms every 10 ms, triangular filters of equal area that are spread as Slaney's Auditory Toolbox has them, the logarithm of
//! their sums, of which nothing is eight powers of ten below the loudest.

use std::f64::consts::TAU;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::shaped;
use super::wav::Wav;
use crate::arch::{Keys, ReadKeys, Settings};
use crate::error::{Error, Result};
use crate::kernel::fourier::Fourier;
use crate::model::{Config, Made, config_beside};

/// The file of a folder that says how recordings are read.
pub(super) const FILE: &str = "preprocessor_config.json";
/// The class that reads them so.
const CLASS: &str = "WhisperFeatureExtractor";
/// The highest frequency that filters let pass.
const HIGHEST: f64 = 8000.0;
/// What sums are at least.
const FLOOR: f64 = 1e-10;
/// Samples of a recording at most.
const LARGEST: usize = 1 << 26;

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

/// How recordings become spectrograms.
#[derive(Debug, Clone)]
pub struct Speech {
    /// Filters.
    bins: usize,
    /// Samples of a second.
    rate: usize,
    /// Samples of a window, and from one window to the next.
    window: usize,
    step: usize,
    /// Samples of a recording, to which shorter ones are filled up.
    samples: usize,
    /// What they are filled up with.
    padding: f64,
}

/// Whether a folder's file is that of recordings.
pub(super) fn is_described(values: &serde_json::Map<String, serde_json::Value>) -> bool {
    values.get("feature_extractor_type").and_then(serde_json::Value::as_str) == Some(CLASS)
}

impl Speech {
    /// What `preprocessor_config.json` of a folder says.
    ///
    /// # Errors
    /// It is missing, or asks for something that is not done.
    pub fn open(folder: &Path, made: &Made) -> Result<Speech> {
        let config = config_beside(folder, made, FILE)?;
        if config.values().is_empty() {
            return Err(Error::malformed(
                &folder.join(FILE),
                "is missing: it says how recordings become what the model reads (transformers 5 writes it into processor_config.json, under `feature_extractor`: make a file of that part)",
            ));
        }
        Speech::parse(&config).map(|(speech, _)| speech)
    }

    /// What such a file says, and keys that are not known.
    pub(super) fn parse(config: &Config) -> Result<(Speech, Vec<String>)> {
        if !is_described(config.values()) {
            let hint = format!("recordings are read as {CLASS} reads them, and as nothing else");
            return Err(Error::Unsupported { what: format!("{FILE}: another `feature_extractor_type` than {CLASS}"), hint });
        }
        let read = ReadKeys::default();
        let values = Settings::new(config.values()).noting(&read);
        let (rate, seconds) = (values.size_or("sampling_rate", 16000)?, values.size_or("chunk_length", 30)?);
        let found = Speech {
            bins: values.size_or("feature_size", 80)?,
            rate,
            window: values.size_or("n_fft", 400)?,
            step: values.size_or("hop_length", 160)?,
            samples: rate.saturating_mul(seconds),
            padding: values.number_or("padding_value", 0.0)?,
        };
        if found.samples > LARGEST || found.window > found.samples || found.bins > found.window || found.step > found.samples {
            return Err(Error::graph(FILE, "`chunk_length`, `sampling_rate`, `n_fft`, `hop_length` and `feature_size` do not fit each other"));
        }
        let unknown = KEYS.sort(&values, FILE)?;
        Ok((found, unknown))
    }

    /// The spectrogram of a recording, `[1, filters, windows]`.
    ///
    /// # Errors
    /// It is no WAV file of one channel with as many samples a second as the model was trained with, or is longer than the model hears.
    pub fn read(&self, path: &Path) -> Result<Tensor> {
        let wav = Wav::open(path)?;
        let convert = format!("`ffmpeg -i FILE -ac 1 -ar {} OUT.wav` writes what is read", self.rate);
        if wav.channels != 1 {
            return Err(Error::malformed(path, format!("has {} channels, and one is read: {convert}", wav.channels)));
        }
        if wav.rate != self.rate {
            return Err(Error::malformed(path, format!("has {} samples a second, and the model reads {}: {convert}", wav.rate, self.rate)));
        }
        if wav.samples > self.samples as u64 {
            let seconds = |samples: u64| samples as f64 / self.rate.max(1) as f64;
            let (long, most) = (seconds(wav.samples), seconds(self.samples as u64));
            return Err(Error::malformed(path, format!("is {long:.1} seconds long, and the model hears {most} at once: cut it into pieces")));
        }
        let spectrogram = self.spectrogram(&wav.read()?);
        let windows = spectrogram.len().checked_div(self.bins).unwrap_or(0);
        Tensor::from_vec(spectrogram, (1, self.bins, windows), &Device::Cpu).map_err(shaped)
    }

    /// Filters one behind the other, each with a number for each window.
    fn spectrogram(&self, recorded: &[f32]) -> Vec<f32> {
        let half = self.window / 2;
        let mut samples: Vec<f64> = recorded.iter().map(|sample| f64::from(*sample)).collect();
        samples.resize(self.samples, self.padding);
        // Windows have their middle at every step: what is missing at the ends is mirrored.
        let before = samples.iter().skip(1).take(half).rev();
        let after = samples.iter().rev().skip(1).take(half);
        let mirrored: Vec<f64> = before.chain(&samples).chain(after).copied().collect();
        let hann: Vec<f64> = (0..self.window).map(|n| 0.5 - 0.5 * (TAU * n as f64 / self.window.max(1) as f64).cos()).collect();
        let (fourier, filters) = (Fourier::new(self.window), self.filters());
        let windows = self.samples.checked_div(self.step).unwrap_or(0);
        let silence = FLOOR.log10();
        let mut by_window: Vec<Vec<f64>> = Vec::with_capacity(windows);
        for window in mirrored.windows(self.window).step_by(self.step).take(windows) {
            if window.iter().all(|sample| *sample == 0.0) {
                by_window.push(vec![silence; self.bins]);
                continue;
            }
            let faded: Vec<f64> = window.iter().zip(&hann).map(|(sample, fade)| sample * fade).collect();
            let power = fourier.power(&faded);
            let sum = |filter: &Vec<f64>| filter.iter().zip(&power).map(|(factor, power)| factor * power).sum::<f64>();
            by_window.push(filters.iter().map(|filter| sum(filter).max(FLOOR).log10()).collect());
        }
        let loudest = by_window.iter().flatten().copied().fold(silence, f64::max);
        let number = |window: &Vec<f64>, bin: usize| window.get(bin).map_or(0.0, |value| ((value.max(loudest - 8.0) + 4.0) / 4.0) as f32);
        (0..self.bins).flat_map(|bin| by_window.iter().map(move |window| number(window, bin))).collect()
    }

    /// Factors of each filter on frequencies.
    fn filters(&self) -> Vec<Vec<f64>> {
        let highest = mel(HIGHEST);
        let corner = |at: usize| hertz(highest * at as f64 / (self.bins as f64 + 1.0));
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

/// Where Slaney's scale bends from steps to factors, in hertz and mel, and the mel of a factor of e.
const BEND: [f64; 2] = [1000.0, 15.0];

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
