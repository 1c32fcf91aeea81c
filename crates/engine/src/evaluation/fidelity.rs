//! Fidelity: differences between the outputs of two models.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::embedding::cosine_from_products;
use super::fidelity_rows::{Row, clamp_negative, rows};
use super::{Fidelity, OutputFidelity, Outputs, tensor_error};
use crate::arch::BOXES;
use crate::data::{Batch, Padding, SequenceRole, TokenAxis};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::model::LogitKind;

/// Lower bound of the signal to quantization noise ratio, in decibels.
const MIN_SQNR: f64 = -300.0;

/// Accumulates the differences of all outputs of two models over batches.
#[derive(Debug, Clone, Default)]
pub struct FidelityAccumulator {
    logits: LogitKind,
    outputs: BTreeMap<String, OutputAccumulator>,
    not_compared: BTreeMap<String, String>,
    /// Numbers of equal and of all values of the outputs of integers.
    integers: BTreeMap<String, [f64; 2]>,
    /// Whether a model may have only outputs of integers.
    accepts_integers: bool,
}

impl FidelityAccumulator {
    /// For models with outputs `logits` of this kind, if each sample has one row.
    pub fn new(logits: LogitKind) -> FidelityAccumulator {
        FidelityAccumulator { logits, ..FidelityAccumulator::default() }
    }

    /// Also for models with only outputs of integers, whose figures are only those in `equal`.
    pub fn accepting_integers() -> FidelityAccumulator {
        FidelityAccumulator { accepts_integers: true, ..FidelityAccumulator::default() }
    }

    /// Adds the outputs of both models on one batch. Fails without a comparable output, which must be one of
    /// floats unless `accepts_integers`.
    pub fn add(&mut self, batch: &Batch, before: &Outputs, after: &Outputs) -> Result<()> {
        let padding = Padding::from_batch(batch).map_err(tensor_error)?;
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let (mut compared, mut reasons) = (false, Vec::new());
        for name in names {
            let reason = match (before.get(name), after.get(name)) {
                (Some(a), Some(b)) if a.dims() == b.dims() => {
                    if a.dtype().is_float() || b.dtype().is_float() {
                        let layout = Layout::new(name, (before, self.logits), a.dims(), batch);
                        self.outputs.entry(name.clone()).or_default().add((name, layout), batch, &padding, a, b)?;
                        compared = true;
                    } else {
                        // A row of floats corresponds to each integer.
                        let rows = [a.dims(), &[1]].concat();
                        let found = equal_values(a, b, padding.token_rows(tokens_of(name, batch), &rows).as_deref()).map_err(tensor_error)?;
                        compared |= self.accepts_integers;
                        self.integers.entry(name.clone()).or_default().iter_mut().zip(found).for_each(|(sum, count)| *sum += count);
                    }
                    continue;
                }
                (Some(a), Some(b)) => format!("has the shape {:?} in the first model and {:?} in the second", a.dims(), b.dims()),
                _ => "exists in only one of the models".to_owned(),
            };
            reasons.push(format!("output `{name}` {reason}"));
            self.not_compared.insert(name.clone(), reason);
        }
        if compared {
            return Ok(());
        }
        let names = |outputs: &Outputs| outputs.keys().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
        let outputs = format!("the first model has {}, the second has {}", names(before), names(after));
        let reasons: Vec<String> = std::iter::once(outputs).chain(reasons).collect();
        Err(Error::option("evaluation", format!("the models have no comparable float output in common: {}", reasons.join("; "))))
    }

    /// Fidelity of all outputs, of which the worst counts.
    pub fn finish(self) -> Fidelity {
        let fidelity = Fidelity::worst_of(self.outputs.into_iter().map(|(name, output)| (name, output.finish())).collect(), self.not_compared);
        let equal = self.integers.into_iter().filter(|(_, [_, all])| *all > 0.0).map(|(name, [equal, all])| (name, equal / all)).collect();
        Fidelity { equal, ..fidelity }
    }
}

/// The token axis of an output. Exported encoder-decoder models also return the encoder's hidden states.
fn tokens_of(name: &str, batch: &Batch) -> TokenAxis {
    let role = if name.starts_with("encoder_") { SequenceRole::Input } else { batch.output_role() };
    TokenAxis { role, axis: Some(1) }
}

/// The numbers of equal and of all values of two tensors of integers of the same shape, without those of
/// padding.
fn equal_values(a: &Tensor, b: &Tensor, kept: Option<&[bool]>) -> candle_core::Result<[f64; 2]> {
    let integers = |tensor: &Tensor| transfer::values::<i64>(tensor, Cause::Answers);
    let (a, b) = (integers(a)?, integers(b)?);
    let is_kept = |at: usize| kept.is_none_or(|kept| kept.get(at) != Some(&false));
    let compared = a.iter().zip(&b).enumerate().filter(|(at, _)| is_kept(*at)).map(|(_, (a, b))| a == b);
    Ok(compared.fold([0.0; 2], |[equal, all], is_equal| [equal + f64::from(u8::from(is_equal)), all + 1.0]))
}

/// Division of an output into rows that are compared.
struct Layout {
    /// Elements per row.
    width: usize,
    /// Whether each row belongs to a token.
    tokens: bool,
    /// Kind of each row.
    kind: LogitKind,
}

impl Layout {
    fn new(name: &str, (outputs, kind): (&Outputs, LogitKind), dims: &[usize], batch: &Batch) -> Layout {
        let tokens = dims.len() == 3 && batch.inputs.values().any(|input| input.rank() == 2 && dims.starts_with(input.dims()));
        let logits = name == "logits" && matches!(dims.len(), 2 | 3) && dims.last() > Some(&1);
        let width = match dims {
            [] | [_] => 1,
            [.., last] if tokens || logits => *last,
            [_, sample @ ..] => sample.iter().product(),
        };
        let kind = match dims.len() {
            // The scores of a detector are sigmoids.
            _ if !logits || outputs.contains_key(BOXES) => LogitKind::Values,
            2 => kind,
            _ => LogitKind::Classes,
        };
        Layout { width: width.max(1), tokens, kind }
    }
}

/// Sums over all rows of an output with one element per row. The cosine of a single element depends only
/// on its sign, so such an output is compared as one column.
#[derive(Debug, Clone, Default)]
struct ColumnSums {
    rows: f64,
    a: f64,
    b: f64,
    aa: f64,
    bb: f64,
    ab: f64,
}

/// Ratio of variance to mean square below which a column counts as constant.
const CONSTANT: f64 = 1e-6;

impl ColumnSums {
    fn add(&mut self, row: &Row) {
        self.rows += 1.0;
        self.a += row.first[0];
        self.b += row.first[1];
        self.aa += row.signal;
        self.bb += row.first[1] * row.first[1];
        self.ab += row.first[0] * row.first[1];
    }

    /// The cosine of the differences of both columns from the mean of the first. If the first column is
    /// constant, that of a vector with the same relative error.
    fn cosine(&self) -> f64 {
        let mean = self.a / self.rows.max(1.0);
        let variance = self.aa - mean * self.a;
        if variance.is_finite() && variance <= CONSTANT * self.aa {
            let noise = clamp_negative(self.aa + self.bb - 2.0 * self.ab);
            return cosine_from_products(self.aa, self.aa, self.aa + noise);
        }
        let other = self.bb - mean * (2.0 * self.b - mean * self.rows);
        cosine_from_products(self.ab - mean * self.b, variance, other)
    }
}

/// Accumulated differences of one output.
#[derive(Debug, Clone, Default)]
struct OutputAccumulator {
    kind: LogitKind,
    /// The sums over all rows, if each has one element.
    column: Option<ColumnSums>,
    rows: u64,
    cosines: f64,
    least: Option<f64>,
    signal: f64,
    noise: f64,
    divergence: f64,
    agreements: u64,
    error: f64,
    largest: f64,
}

impl OutputAccumulator {
    fn add(&mut self, (name, layout): (&str, Layout), batch: &Batch, padding: &Padding, a: &Tensor, b: &Tensor) -> Result<()> {
        self.kind = layout.kind;
        if layout.width == 1 {
            self.column.get_or_insert_default();
        }
        let kept = if layout.tokens { padding.token_rows(tokens_of(name, batch), a.dims()) } else { None };
        let rows = rows(a, b, layout.width, layout.kind).map_err(tensor_error)?;
        // Rows are computed in parallel and summed in order, so that results do not depend on the number
        // of threads.
        for (index, row) in rows.iter().enumerate() {
            if kept.as_ref().is_none_or(|kept| kept.get(index) != Some(&false)) {
                self.add_row(row);
            }
        }
        Ok(())
    }

    fn add_row(&mut self, row: &Row) {
        self.rows += 1;
        self.column.iter_mut().for_each(|column| column.add(row));
        self.cosines += row.cosine;
        self.least = Some(self.least.map_or(row.cosine, |least| if row.cosine < least || row.cosine.is_nan() { row.cosine } else { least }));
        self.signal += row.signal;
        self.noise += row.noise;
        if row.error > self.error || row.error.is_nan() {
            self.error = row.error;
        }
        if row.largest > self.largest || row.largest.is_nan() {
            self.largest = row.largest;
        }
        self.divergence += row.divergence;
        self.agreements += u64::from(row.agrees);
    }

    fn finish(self) -> OutputFidelity {
        let rows = self.rows.max(1) as f64;
        let column = self.column.as_ref().map(ColumnSums::cosine);
        OutputFidelity {
            cosine: column.unwrap_or(self.cosines / rows),
            cosine_min: column.or(self.least).unwrap_or(1.0),
            // Clamped, because JSON has no minus infinity, which results if all outputs of the first
            // model are zero.
            sqnr_db: (self.noise > 0.0).then(|| (10.0 * (self.signal / self.noise).log10()).max(MIN_SQNR)),
            kl: (self.kind == LogitKind::Classes).then_some(self.divergence / rows),
            label_kl: (self.kind == LogitKind::Labels).then_some(self.divergence / rows),
            top1_agreement: (self.kind == LogitKind::Classes).then_some(self.agreements as f64 / rows),
            max_abs_error: self.error,
            largest: self.largest,
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::super::fidelity_rows::rows_on_device;
    use super::*;
    use crate::data::References;

    fn compare(name: &str, a: &[[f32; 3]; 2], b: &[[f32; 3]; 2], mask: Option<[i64; 2]>) -> Fidelity {
        let tensor = |rows: &[[f32; 3]; 2]| {
            let tensor = Tensor::new(rows, &Device::Cpu).unwrap();
            if mask.is_some() { tensor.unsqueeze(0).unwrap() } else { tensor }
        };
        let inputs = mask.map(|mask| ("attention_mask".to_owned(), Tensor::new(&[mask], &Device::Cpu).unwrap()));
        let batch = Batch { inputs: inputs.into_iter().collect(), references: References::None, samples: 2 };
        compared(&batch, &[(name, tensor(a))], &[(name, tensor(b))]).unwrap()
    }

    fn compared(batch: &Batch, before: &[(&str, Tensor)], after: &[(&str, Tensor)]) -> Result<Fidelity> {
        let outputs = |named: &[(&str, Tensor)]| named.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect::<Outputs>();
        let mut fidelity = FidelityAccumulator::default();
        fidelity.add(batch, &outputs(before), &outputs(after))?;
        Ok(fidelity.finish())
    }

    fn numbers(shape: &[usize], seed: u32) -> Tensor {
        let count = shape.iter().product::<usize>() as u32;
        let values: Vec<f32> = (0..count).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 977) >> 16) as f32 / 8192.0 - 3.9).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// Corrupting any output of a detector lowers the fidelity, and an additional output does not change
    /// the results of the others.
    #[test]
    fn every_float_output_counts() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
        let names = ["boxes", "logits", "scores", "segments"];
        let shapes: [&[usize]; 4] = [&[2, 5, 4], &[2, 7], &[2], &[2, 3, 6, 6]];
        let outputs = |seed: u32| -> Vec<(&str, Tensor)> { names.iter().zip(shapes).map(|(name, shape)| (*name, numbers(shape, seed))).collect() };
        let before = outputs(1);
        let slightly: Vec<(&str, Tensor)> = before.iter().map(|(name, tensor)| (*name, (tensor + 0.01).unwrap())).collect();
        let good = compared(&batch, &before, &slightly).unwrap();
        assert_eq!(good.outputs.keys().map(String::as_str).collect::<Vec<_>>(), names);
        for index in 0..names.len() {
            for corrupt in [slightly[index].1.zeros_like().unwrap(), numbers(shapes[index], 9).neg().unwrap()] {
                let mut after = slightly.clone();
                after[index].1 = corrupt;
                let bad = compared(&batch, &before, &after).unwrap();
                assert!(bad.cosine < good.cosine && bad.cosine_min < good.cosine_min && bad.sqnr_db < good.sqnr_db, "{}: {bad:?}", names[index]);
                assert_eq!(bad.output, names[index]);
                assert!(good.outputs.iter().all(|(name, output)| name == names[index] || bad.outputs[name] == *output));
            }
            let without = |outputs: &[(&'static str, Tensor)]| outputs.iter().filter(|(name, _)| *name != names[index]).cloned().collect::<Vec<_>>();
            let fewer = compared(&batch, &without(&before), &without(&slightly)).unwrap();
            assert!(fewer.outputs.iter().all(|(name, output)| good.outputs[name] == *output));
            let lost = compared(&batch, &before, &without(&slightly)).unwrap();
            assert!(lost.not_compared.keys().eq([names[index]]) && lost.outputs == fewer.outputs, "{lost:?}");
        }
        let other = [("boxes", numbers(&[2, 4, 5], 1)), ("scores", before[2].1.clone())];
        assert!(compared(&batch, &before, &other).unwrap().not_compared["boxes"].contains("[2, 5, 4]"));
        let error = compared(&batch, &before[..1], &other[..1]).unwrap_err().to_string();
        assert!(error.contains("`boxes`") && error.contains("[2, 4, 5]"), "{error}");
    }

    #[test]
    fn values_of_outputs_without_floats_are_counted() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
        let scores = numbers(&[2, 3], 1);
        let outputs = |labels: [u32; 4], dtype: DType| {
            let labels = Tensor::new(&labels, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            [("labels", labels), ("scores", scores.clone())]
        };
        let fidelity = compared(&batch, &outputs([1, 0, 1, 1], DType::U8), &outputs([1, 1, 1, 0], DType::I64)).unwrap();
        assert_eq!((fidelity.equal, fidelity.not_compared.len()), ([("labels".to_owned(), 0.5)].into(), 0));
        // Padding is not compared, and other outputs are named.
        let tokens = |rows: [[u32; 3]; 2]| ("tokens", Tensor::new(&rows, &Device::Cpu).unwrap());
        let mask = Tensor::new(&[[1i64, 1, 0], [1, 0, 0]], &Device::Cpu).unwrap();
        let padded = Batch { inputs: [("attention_mask".to_owned(), mask)].into(), ..batch.clone() };
        let (a, b) = (tokens([[1, 2, 3], [4, 5, 6]]), tokens([[1, 0, 0], [4, 0, 0]]));
        let fidelity =
            compared(&padded, &[("scores", scores.clone()), a], &[("scores", scores.clone()), b, ("more", Tensor::new(&[1u32], &Device::Cpu).unwrap())]);
        let fidelity = fidelity.unwrap();
        assert_eq!((fidelity.equal["tokens"], &*fidelity.not_compared["more"]), (2.0 / 3.0, "exists in only one of the models"));
        let other = [("labels", scores.clone()), ("scores", scores.clone())];
        let fidelity = compared(&batch, &outputs([1; 4], DType::U8)[..1].iter().chain(&other[1..]).cloned().collect::<Vec<_>>(), &other).unwrap();
        assert_eq!(fidelity.equal.len(), 0);
        assert!(fidelity.not_compared["labels"].contains("[4] in the first model"), "{:?}", fidelity.not_compared);
        let error = compared(&batch, &outputs([1; 4], DType::U8)[..1], &outputs([1; 4], DType::U8)[..1]).unwrap_err().to_string();
        assert!(error.ends_with("the second has `labels`"), "{error}");
    }

    /// Outputs of images are compared by sample: a row of pixels that is zero in one model changes the
    /// cosine only a little.
    #[test]
    fn outputs_without_tokens_are_compared_by_sample() {
        let dark = Tensor::cat(&[Tensor::zeros((2, 1, 1, 6), DType::F32, &Device::Cpu).unwrap(), numbers(&[2, 1, 5, 6], 1)], 2).unwrap();
        let lit = Tensor::cat(&[Tensor::full(0.01f32, (2, 1, 1, 6), &Device::Cpu).unwrap(), numbers(&[2, 1, 5, 6], 1)], 2).unwrap();
        let pixels = Batch { inputs: [("pixel_values".to_owned(), numbers(&[2, 3, 6, 6], 1))].into(), references: References::None, samples: 2 };
        assert!(compared(&pixels, &[("mask", dark.clone())], &[("mask", lit.clone())]).unwrap().cosine_min > 0.999);
        let depth = |tensor: &Tensor| tensor.squeeze(1).unwrap();
        assert!(compared(&pixels, &[("depth", depth(&dark))], &[("depth", depth(&lit))]).unwrap().cosine_min > 0.999);
        let tokens = Batch { inputs: [("input_ids".to_owned(), Tensor::zeros((2, 6), DType::I64, &Device::Cpu).unwrap())].into(), ..pixels };
        assert_eq!(compared(&tokens, &[("states", depth(&dark))], &[("states", depth(&lit))]).unwrap().cosine_min, 0.0);
        let segments = compared(&tokens, &[("logits", dark.clone())], &[("logits", lit)]).unwrap();
        assert_eq!((segments.kl, segments.top1_agreement), (None, None));
    }

    /// Detectors have scores of each query instead of a distribution, which are compared query by query.
    #[test]
    fn scores_of_detectors_are_not_a_distribution() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
        let outputs = |seed: u32| [("logits", numbers(&[2, 5, 3], seed)), (BOXES, numbers(&[2, 5, 4], 1))];
        let found = compared(&batch, &outputs(1), &outputs(2)).unwrap();
        assert_eq!((found.kl, found.top1_agreement, found.outputs["logits"].kl), (None, None, None));
        let logits = |seed| [outputs(seed)[0].clone()];
        let alone = compared(&batch, &logits(1), &logits(2)).unwrap();
        assert!(alone.kl > Some(0.0) && alone.cosine == found.outputs["logits"].cosine, "{alone:?} {found:?}");
    }

    /// Each label of a multi-label classifier has its own probability, but tokens have a distribution.
    #[test]
    fn figures_depend_on_the_kind_of_logits() {
        let found = |kind, shape: &[usize]| {
            let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
            let outputs = |seed| -> Outputs { [("logits".to_owned(), numbers(shape, seed))].into() };
            let mut fidelity = FidelityAccumulator::new(kind);
            fidelity.add(&batch, &outputs(1), &outputs(2)).unwrap();
            let found = fidelity.finish();
            assert_eq!(found.label_kl, found.outputs["logits"].label_kl);
            [found.kl, found.top1_agreement, found.label_kl].map(|figure| figure.is_some())
        };
        assert_eq!(found(LogitKind::Classes, &[2, 5]), [true, true, false]);
        assert_eq!(found(LogitKind::Labels, &[2, 5]), [false, false, true]);
        assert_eq!(found(LogitKind::Values, &[2, 5]), [false; 3]);
        assert_eq!(found(LogitKind::Labels, &[2, 4, 5]), [true, true, false]);
    }

    /// The cosine of one element depends only on its sign.
    #[test]
    fn outputs_with_one_element_per_sample_are_compared_over_all_samples() {
        let values = [3.0f32, 5.0, 4.5, 7.0, 6.25, 3.5];
        for shape in [&[6][..], &[6, 1], &[6, 1, 1]] {
            let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 6 };
            let against = |other: &[f32]| {
                let tensor = |values: &[f32]| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
                compared(&batch, &[("logits", tensor(&values))], &[("logits", tensor(other))]).unwrap()
            };
            assert_eq!(against(&values).cosine, 1.0);
            let close = against(&values.map(|value| value + 0.01)).cosine;
            assert!(close < 1.0 && close > 0.9999, "{close}");
            for bad in [[4.875; 6], values.map(|value| value + 10.0), [5.0, 3.0, 7.0, 4.5, 3.5, 6.25]] {
                let bad = against(&bad);
                assert!(bad.cosine < 0.8 && bad.cosine_min < 0.8, "{bad:?}");
            }
        }
        // One sample, or equal ones: the relative error counts.
        let one = |before: f32, after: f32| {
            let batch = Batch { inputs: BTreeMap::new(), references: References::None, samples: 2 };
            let tensor = |value: f32| Tensor::full(value, (2, 1), &Device::Cpu).unwrap();
            compared(&batch, &[("y", tensor(before))], &[("y", tensor(after))]).unwrap().cosine
        };
        assert_eq!((one(5.0, 5.0), one(0.0, 0.0), one(0.0, 1.0)), (1.0, 1.0, 0.0));
        assert!(one(5.0, 5.001) > 0.999_999 && one(5.0, 10.0) < 0.71 && one(5.0, 0.0) < 0.71 && one(5.0, f32::NAN) == 0.0);
    }

    #[test]
    fn zero_signal_has_the_minimum_sqnr() {
        let fidelity = compare("x", &[[0.0; 3]; 2], &[[1.0; 3]; 2], None);
        assert_eq!((fidelity.cosine, fidelity.sqnr_db), (0.0, Some(MIN_SQNR)));
    }

    #[test]
    fn equal_outputs_have_no_error() {
        let rows = [[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]];
        let fidelity = compare("logits", &rows, &rows, None);
        assert!((fidelity.cosine - 1.0).abs() < 1e-12 && fidelity.sqnr_db.is_none());
        assert_eq!((fidelity.kl, fidelity.top1_agreement, fidelity.max_abs_error), (Some(0.0), Some(1.0), 0.0));
    }

    #[test]
    fn results_match_their_definitions() {
        let fidelity = compare("logits", &[[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], &[[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]], None);
        assert_eq!((fidelity.cosine, fidelity.cosine_min, fidelity.top1_agreement), (0.5, 0.0, Some(0.5)));
        // scipy.stats.entropy of the softmax of both second rows, over two rows.
        assert!((fidelity.kl.unwrap() - 3.787_466_5 / 2.0).abs() < 1e-3, "{:?}", fidelity.kl);
        assert!((fidelity.sqnr_db.unwrap() - 10.0 * (30f64 / 32.0).log10()).abs() < 1e-9);
        assert_eq!(compare("x", &[[1.0; 3]; 2], &[[1.0; 3]; 2], None).kl, None);
    }

    #[test]
    fn host_and_device_rows_are_equal() {
        let numbers = |seed: u32| (0..4 * 33).map(move |i: u32| ((i.wrapping_mul(2_654_435_761).wrapping_add(seed * 977) >> 16) as f32 / 8192.0) - 4.0);
        let (mut a, mut b): (Vec<f32>, Vec<f32>) = (numbers(1).collect(), numbers(2).collect());
        (a[7], b[7], b[33]) = (f32::NEG_INFINITY, f32::NEG_INFINITY, a[33]);
        (66..99).for_each(|i| b[i] = a[i]);
        (a[100], b[131]) = (f32::NAN, f32::INFINITY);
        let tensor = |values: &[f32]| Tensor::from_slice(values, (4, 33), &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        for kind in [LogitKind::Classes, LogitKind::Labels, LogitKind::Values] {
            let device = rows_on_device(&tensor(&a), &tensor(&b), kind).unwrap();
            for (index, (device, (a, b))) in device.iter().zip(a.chunks(33).zip(b.chunks(33))).enumerate() {
                let host = Row::from_values(a, b, kind);
                let figures =
                    |row: &Row| [row.cosine, row.signal, row.noise, row.error, row.divergence, f64::from(u8::from(row.agrees)), row.first[0], row.first[1]];
                for (host, device) in figures(&host).into_iter().zip(figures(device)) {
                    assert!((host - device).abs() < 1e-9 || host == device || host.is_nan() && device.is_nan(), "{index}: {host} and {device}");
                }
            }
            assert_eq!(device.len(), 4);
        }
        // A token with probability zero in both models does not make the divergence NaN.
        assert!(Row::from_values(&a[..33], &b[..33], LogitKind::Classes).divergence > 0.0);
    }

    #[test]
    fn padding_does_not_count() {
        let fidelity = compare("logits", &[[1.0; 3], [1.0; 3]], &[[1.0; 3], [-9.0; 3]], Some([1, 0]));
        assert_eq!((fidelity.cosine_min, fidelity.max_abs_error), (1.0, 0.0));
    }
}
