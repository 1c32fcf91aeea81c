//! Soft targets (Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015) and hard ones, over logits that may
//! never be whole in memory: where a linear layer makes them, they are made, used and forgotten a few rows at a time.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor};

use super::host::{Wanted, add_to, is_readable};
use super::mask::require_rows_of_samples;
use super::{Said, divisor};
use crate::data::{Batch, References, Side};
use crate::error::{Error, Result};
use crate::exec::Parameters;
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::{Backward, Linear, PreparedOp, Saved};
use crate::train::cache::Cache;

/// Logits that are in memory at a time: on the host, and on a GPU, which needs products of several hundred rows to be busy at a
/// vocabulary of 150,000.
const CHUNK: usize = 1 << 24;
const CHUNK_ON_GPU: usize = 1 << 26;

/// A linear layer that makes logits.
#[derive(Debug, Clone)]
pub struct Head {
    /// The value that it reads, `[batch, sequence, width]`.
    pub input: String,
    /// Its weight and its bias.
    pub parameters: Vec<String>,
    /// How the weight lies.
    pub op: Linear,
}

/// Where logits come from.
#[derive(Debug, Clone)]
pub enum LogitsSource {
    /// A value of the graph.
    Value(String),
    /// A layer that is computed row by row.
    Head(Head),
}

impl LogitsSource {
    /// The value of the graph that is read.
    pub fn value(&self) -> &String {
        match self {
            LogitsSource::Value(name) => name,
            LogitsSource::Head(head) => &head.input,
        }
    }

    /// Logits of rows.
    fn logits(&self, rows: &Tensor, parameters: &Parameters) -> candle_core::Result<Tensor> {
        match self {
            LogitsSource::Value(_) => Ok(rows.clone()),
            LogitsSource::Head(head) => head.prepared(rows).forward(&head.operands(rows, parameters)?),
        }
    }
}

impl Head {
    fn prepared(&self, rows: &Tensor) -> PreparedOp {
        PreparedOp::new(&self.op.into(), rows.device(), rows.dtype())
    }

    fn operands(&self, rows: &Tensor, parameters: &Parameters) -> candle_core::Result<Vec<Tensor>> {
        std::iter::once(Ok(rows.clone())).chain(self.parameters.iter().map(|name| parameters.get(name))).collect()
    }
}

/// Losses over logits.
#[derive(Debug, Clone)]
pub struct Logits {
    /// Weight and temperature.
    pub soft: Option<(f64, f64)>,
    /// Weight and label smoothing.
    pub hard: Option<(f64, f64)>,
    /// The student's logits.
    pub student: LogitsSource,
    /// The teacher's.
    pub teacher: Option<LogitsSource>,
    /// Columns that both have.
    pub classes: usize,
    /// Whose tokens have logits each; else a sample has some.
    pub tokens: Option<Side>,
}

/// Values of a graph, by name, and parameters.
pub type ModelValues<'a> = (&'a BTreeMap<String, Tensor>, &'a Parameters);

/// Where the teacher's logits come from in a step.
pub enum Answers<'a> {
    /// There is none.
    None,
    /// Values of its graph, and its parameters.
    Values(&'a BTreeMap<String, Tensor>, &'a Parameters),
    /// Largest logits of all rows, and the cache that they are from.
    Known(&'a [(u32, half::f16)], &'a Cache),
}

/// Rows of logits that count, and the class of each.
struct Rows {
    indices: Vec<u32>,
    targets: Vec<u32>,
}

impl Logits {
    /// How many rows the samples hold.
    ///
    /// # Errors
    /// The samples have no labels where they are needed.
    pub fn items(&self, batch: &Batch) -> Result<f64> {
        Ok(self.rows(batch)?.indices.len() as f64)
    }

    /// The places in each sample whose logits count.
    ///
    /// # Errors
    /// As [`items`](Logits::items).
    pub fn places(&self, batch: &Batch) -> Result<Vec<Vec<u32>>> {
        let mut places = vec![Vec::new(); batch.samples];
        let tokens = self.tokens.and_then(|side| batch.tokens(side));
        let sequence = tokens.map_or(1, |ids| ids.elem_count() / batch.samples.max(1)).max(1) as u32;
        for index in self.rows(batch)?.indices {
            places[(index / sequence) as usize].push(index % sequence);
        }
        Ok(places)
    }

    /// Hands over the teacher's logits of all rows that count, a few rows at a time.
    ///
    /// # Errors
    /// Those of `each`; labels are missing, or memory runs out.
    pub fn for_each_of_teacher(&self, teacher: ModelValues, batch: &Batch, each: &mut dyn FnMut(&Tensor) -> Result<()>) -> Result<()> {
        let Some(source) = &self.teacher else { return Ok(()) };
        let value = teacher.0.get(source.value()).ok_or_else(|| missing(source.value()))?;
        let failed = |e| Error::computed("the teacher's logits", e);
        let value = flat(value).map_err(failed)?;
        for indices in self.rows(batch)?.indices.chunks(self.rows_per_chunk(value.device())) {
            let logits = picked(&value, indices).and_then(|rows| self.of_teacher(source, &rows, teacher.1));
            each(&logits.map_err(failed)?)?;
        }
        Ok(())
    }

    /// Rows whose logits are in memory at a time.
    fn rows_per_chunk(&self, device: &Device) -> usize {
        let chunk = if device.is_cpu() { CHUNK } else { CHUNK_ON_GPU };
        (chunk / self.classes.max(1)).max(1)
    }

    /// The teacher's logits of rows, in 32 bits: another model's may have other ones, and more columns.
    fn of_teacher(&self, source: &LogitsSource, rows: &Tensor, parameters: &Parameters) -> candle_core::Result<Tensor> {
        source.logits(rows, parameters)?.narrow(1, 0, self.classes)?.to_dtype(DType::F32)
    }

    fn rows(&self, batch: &Batch) -> Result<Rows> {
        let missing = |what: &str| Error::option("losses: hard", format!("needs {what}"));
        let Some(side) = self.tokens else {
            let labelled = match (&batch.references, self.hard) {
                (References::Classes(classes), Some(_)) => (0..).zip(classes).filter_map(|(row, class)| Some((row, (*class)? as u32))),
                (_, Some(_)) => return Err(missing("the class of every sample: name `label_column`, or the file of `labels`")),
                (_, None) => return Ok(Rows { indices: (0..batch.samples as u32).collect(), targets: Vec::new() }),
            };
            let (indices, targets): (Vec<u32>, Vec<u32>) = labelled.unzip();
            if let Some(class) = targets.iter().find(|class| **class as usize >= self.classes) {
                return Err(Error::option("losses: hard", format!("class {class} is out of range, the model has {}", self.classes)));
            }
            return Ok(Rows { indices, targets });
        };
        let ids = batch.tokens(side).ok_or_else(|| missing("the model's tokens"))?;
        let sequence = ids.dims().last().copied().unwrap_or(0);
        let place = |sample: usize, at: usize| (sample * sequence + at) as u32;
        let mut rows = Rows { indices: Vec::new(), targets: Vec::new() };
        if let Some(asked) = batch.next_tokens()? {
            let known = |token: i64| {
                let reason = || format!("token {token} is out of range, the model has {}", self.classes);
                u32::try_from(token).ok().filter(|token| (*token as usize) < self.classes).ok_or_else(|| Error::option("losses: hard", reason()))
            };
            for (sample, asked) in asked.iter().enumerate() {
                for (at, token) in asked {
                    rows.indices.push(place(sample, *at));
                    rows.targets.push(if self.hard.is_some() { known(*token)? } else { 0 });
                }
            }
            return Ok(rows);
        }
        if self.hard.is_some() {
            return Err(missing("tokens to predict: `task: language-modelling`"));
        }
        let mask = batch.mask(side).map(transfer::read::<i64>).transpose().map_err(|e| Error::computed("the mask of tokens", e))?;
        let real = |at: &usize| mask.as_ref().is_none_or(|mask| mask.get(*at) != Some(&0));
        rows.indices.extend((0..ids.elem_count()).filter(real).map(|at| at as u32));
        Ok(rows)
    }

    /// Adds what the losses say; `items` are those of the whole step, `scale` multiplies gradients only.
    ///
    /// # Errors
    /// Labels are missing or out of range, or memory runs out.
    #[allow(clippy::too_many_arguments)]
    pub fn add(
        &self,
        said: &mut Said,
        student: ModelValues,
        teacher: Answers,
        batch: &Batch,
        trained: &dyn Fn(&str) -> bool,
        (items, scale): (f64, f64),
    ) -> Result<()> {
        let rows = self.rows(batch)?;
        let ours = student.0.get(self.student.value()).ok_or_else(|| missing(self.student.value()))?;
        let theirs = match (&self.teacher, &teacher) {
            (Some(source), Answers::Values(values, ..)) if self.soft.is_some() => Some(values.get(source.value()).ok_or_else(|| missing(source.value()))?),
            _ => None,
        };
        let mut compute = || {
            let (values, theirs) = (flat(ours)?, theirs.map(flat).transpose()?);
            if self.tokens.is_none() {
                require_rows_of_samples(&format!("value `{}`", self.student.value()), &values, batch)?;
            }
            let count = self.rows_per_chunk(values.device());
            let mut back: Vec<Tensor> = Vec::new();
            let mut weights: Vec<(String, Tensor)> = Vec::new();
            for (number, indices) in rows.indices.chunks(count).enumerate() {
                let targets = rows.targets.chunks(count).nth(number).unwrap_or(&[]);
                let hidden = picked(&values, indices)?;
                let logits = self.student.logits(&hidden, student.1)?;
                let soft = match (&self.teacher, &teacher, &theirs) {
                    (Some(source), Answers::Values(_, parameters), Some(value)) => {
                        let logits = self.of_teacher(source, &picked(value, indices)?, parameters)?;
                        // The teacher may be elsewhere.
                        Some(transfer::beside(&logits, values.device(), Cause::Offload)?)
                    }
                    (_, Answers::Known(entries, cache), _) => {
                        let from = number * count * cache.top();
                        let entries = entries.get(from..from + indices.len() * cache.top()).unwrap_or(&[]);
                        Some(cache.logits(entries, self.classes, values.device())?)
                    }
                    _ => None,
                };
                let along = self.gradient(said, logits, soft.as_ref(), targets, (items, scale))?.to_dtype(values.dtype())?;
                back.push(match &self.student {
                    LogitsSource::Value(_) => along,
                    LogitsSource::Head(head) => head.back(&hidden, &along, student.1, trained, &mut weights)?,
                });
            }
            if rows.indices.is_empty() {
                // Ranks sum losses and gradients name by name: none may lack one because its labels are all -100.
                let zero = Tensor::zeros((), DType::F64, values.device())?;
                let soft = self.soft.filter(|_| !matches!(teacher, Answers::None)).map(|_| "soft");
                soft.into_iter().chain(self.hard.map(|_| "hard")).try_for_each(|name| said.add_loss(name, &zero, 0.0))?;
                if let LogitsSource::Head(head) = &self.student {
                    for name in head.parameters.iter().filter(|name| trained(name)) {
                        weights.push((name.clone(), student.1.get(name)?.zeros_like()?.to_dtype(DType::F32)?));
                    }
                }
            }
            let gradient = match rows.indices.len() {
                0 => values.zeros_like()?,
                count if count == values.dim(0)? => Tensor::cat(&back, 0)?,
                _ => values.zeros_like()?.index_add(&places(&rows.indices, values.device())?, &Tensor::cat(&back, 0)?, 0)?,
            };
            said.parameters.append(&mut weights);
            said.add_value(self.student.value(), gradient.reshape(ours.dims())?)
        };
        compute().map_err(|e: candle_core::Error| Error::computed("losses over logits", e))
    }

    /// The gradient of the losses with respect to logits `[rows, columns]`, times the scale.
    fn gradient(&self, said: &mut Said, logits: Tensor, teacher: Option<&Tensor>, targets: &[u32], (items, scale): (f64, f64)) -> candle_core::Result<Tensor> {
        let items = divisor(items);
        // Those of a head are nobody else's.
        if matches!(self.student, LogitsSource::Head(_)) && [Some(&logits), teacher].into_iter().flatten().all(is_readable) {
            let soft = self.soft.zip(teacher).map(|((weight, temperature), teacher)| (temperature, weight * temperature / items * scale, teacher));
            let hard = self.hard.map(|(weight, smoothing)| (smoothing, weight / items * scale, targets));
            let sums = Wanted { classes: self.classes, soft, hard }.put_gradient(&logits)?;
            let of_soft = soft.map(|(temperature, ..)| ("soft", sums[0], temperature * temperature));
            for (name, sum, factor) in of_soft.into_iter().chain(hard.map(|_| ("hard", sums[1], 1.0))) {
                said.add_loss(name, &Tensor::new(sum, logits.device())?, factor / items)?;
            }
            return Ok(logits);
        }
        let columns = logits.dim(1)?;
        let wide = logits.to_dtype(DType::F32)?;
        let known = wide.narrow(1, 0, self.classes)?.contiguous()?;
        let mut sum: Option<Tensor> = None;
        let mut add = |part: Tensor| {
            sum = Some(match sum.take() {
                Some(other) => (other + part)?,
                None => part,
            });
            Ok::<_, candle_core::Error>(())
        };
        if let (Some((weight, temperature)), Some(teacher)) = (self.soft, teacher) {
            let ours = log_softmax(&(&known / temperature)?)?;
            let theirs = log_softmax(&(teacher / temperature)?)?;
            let target = theirs.exp()?;
            let loss = (&target * (theirs - &ours)?)?.sum_all()?;
            said.add_loss("soft", &loss, temperature * temperature / items)?;
            add(((ours.exp()? - target)? * (weight * temperature / items))?)?;
        }
        if let Some((weight, smoothing)) = self.hard {
            let ours = log_softmax(&known)?;
            let places = transfer::to_device(&Tensor::new(targets, &Device::Cpu)?, logits.device(), Cause::Batch)?.unsqueeze(1)?;
            let chosen = ours.gather(&places, 1)?;
            let even = smoothing / self.classes as f64;
            said.add_loss("hard", &chosen.sum_all()?, (smoothing - 1.0) / items)?;
            if smoothing > 0.0 {
                said.add_loss("hard", &ours.sum_all()?, -even / items)?;
            }
            let at = Tensor::full((1.0 - smoothing) as f32, places.shape(), logits.device())?;
            let wanted = Tensor::full(even as f32, known.shape(), logits.device())?.scatter_add(&places, &at, 1)?;
            add(((ours.exp()? - wanted)? * (weight / items))?)?;
        }
        let gradient = match sum {
            Some(gradient) => gradient,
            None => known.zeros_like()?,
        };
        let gradient = (gradient * scale)?;
        if self.classes == columns { Ok(gradient) } else { gradient.pad_with_zeros(1, 0, columns - self.classes) }
    }
}

fn missing(name: &str) -> Error {
    Error::graph(format!("graph value `{name}`"), "is not among the outputs")
}

/// All rows of a value, one below the other.
fn flat(value: &Tensor) -> candle_core::Result<Tensor> {
    value.contiguous()?.flatten_to(value.rank() - 2)
}

fn places(indices: &[u32], device: &Device) -> candle_core::Result<Tensor> {
    transfer::to_device(&Tensor::new(indices, &Device::Cpu)?, device, Cause::Batch)
}

/// Some rows; all of them, where there are as many.
fn picked(rows: &Tensor, indices: &[u32]) -> candle_core::Result<Tensor> {
    if indices.len() == rows.dim(0)? { Ok(rows.clone()) } else { rows.index_select(&places(indices, rows.device())?, 0) }
}

/// Logarithms of probabilities, row by row.
pub(super) fn log_softmax(logits: &Tensor) -> candle_core::Result<Tensor> {
    let moved = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
    let sums = moved.exp()?.sum_keepdim(D::Minus1)?.log()?;
    moved.broadcast_sub(&sums)
}

impl Head {
    /// The gradient with respect to the rows that the layer reads; those of its parameters are added up.
    fn back(
        &self,
        rows: &Tensor,
        gradient: &Tensor,
        parameters: &Parameters,
        trained: &dyn Fn(&str) -> bool,
        sums: &mut Vec<(String, Tensor)>,
    ) -> candle_core::Result<Tensor> {
        let inputs: Vec<Saved> = self.operands(rows, parameters)?.into_iter().map(Saved::whole).collect();
        let wanted: Vec<bool> = std::iter::once(true).chain(self.parameters.iter().map(|name| trained(name))).collect();
        let output = Saved::shape(gradient.dims());
        let mut found = self.prepared(rows).backward(&Backward { inputs: &inputs, output: &output, gradient, wanted: &wanted })?.into_iter();
        let back = found.next().flatten();
        for (name, gradient) in self.parameters.iter().zip(found) {
            let Some(gradient) = gradient else { continue };
            // Many rows at a time are added up, which 16 bits are too few for.
            let gradient = gradient.to_dtype(DType::F32)?;
            match sums.iter_mut().find(|(other, _)| other == name) {
                Some((_, sum)) if [&*sum, &gradient].into_iter().all(is_readable) => add_to(sum, &gradient)?,
                Some((_, sum)) => *sum = (&*sum + gradient)?,
                None => sums.push((name.clone(), gradient)),
            }
        }
        match back {
            Some(back) => Ok(back),
            None => candle_core::bail!("a linear layer gave no gradient"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand gradients that are too small beside their sum for 16 bits.
    #[test]
    fn gradients_of_many_rows_add_up_in_32_bits() {
        let tensor = |value: f64, dims: (usize, usize)| (Tensor::ones(dims, DType::BF16, &Device::Cpu).unwrap() * value).unwrap();
        let head = Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() };
        let parameters = Parameters::of([("w".to_owned(), tensor(1.0, (4, 2)))].into(), DType::BF16);
        let mut sums = Vec::new();
        for _ in 0..1000 {
            head.back(&tensor(1.0, (1, 2)), &tensor(1.0, (1, 4)), &parameters, &|_| true, &mut sums).unwrap();
        }
        assert_eq!(transfer::values::<f32>(&sums[0].1, Cause::Step).unwrap(), [1000.0; 8]);
    }

    /// Ranks average what is in these maps name by name.
    #[test]
    fn samples_without_labels_have_the_losses_and_gradients_of_others_with_zeros() {
        let tensor = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let head = LogitsSource::Head(Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() });
        let parameters = Parameters::of([("w".to_owned(), tensor(&[5, 4]))].into(), DType::F32);
        let values = BTreeMap::from([("x".to_owned(), tensor(&[1, 3, 4]))]);
        let ids = Tensor::new(&[[1i64, 2, 3]], &Device::Cpu).unwrap();
        let found = |label: Option<i64>| {
            let logits = Logits {
                soft: Some((1.0, 2.0)),
                hard: Some((1.0, 0.0)),
                student: head.clone(),
                teacher: Some(head.clone()),
                classes: 5,
                tokens: Some(Side::Read),
            };
            let references = References::Tokens(vec![vec![label, None, None]]);
            let batch = Batch { inputs: [("input_ids".to_owned(), ids.clone())].into(), references, samples: 1 };
            let mut said = Said::default();
            logits.add(&mut said, (&values, &parameters), Answers::Values(&values, &parameters), &batch, &|_| true, (1.0, 1.0)).unwrap();
            said
        };
        let (some, none) = (found(Some(2)), found(None));
        assert!(some.losses.keys().eq(none.losses.keys()) && some.values.keys().eq(none.values.keys()));
        let shapes = |said: &Said| said.parameters.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec(), tensor.dtype())).collect::<Vec<_>>();
        assert_eq!(shapes(&some), shapes(&none));
        let all = none.losses.values().chain(none.values.values()).chain(none.parameters.iter().map(|(_, gradient)| gradient));
        all.for_each(|tensor| assert!(transfer::values::<f64>(tensor, Cause::Step).unwrap().iter().all(|value| *value == 0.0)));
    }

    /// Rows of a head are changed in place by kernels, those of a graph's value are computed anew.
    #[test]
    fn gradients_in_the_place_of_logits_are_those_of_tensors() {
        let tensor = |seed: u32, columns: u32| {
            let values = (0..5 * columns).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) as f32 / 512.0 - 4.0);
            Tensor::from_vec(values.collect::<Vec<_>>(), (5, columns as usize), &Device::Cpu).unwrap()
        };
        let head = LogitsSource::Head(Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() });
        for (soft, hard) in [(Some((0.5, 2.0)), None), (None, Some((1.5, 0.1))), (Some((0.5, 2.0)), Some((1.5, 0.0)))] {
            let found = |student: LogitsSource| {
                let logits = Logits { soft, hard, student, teacher: None, classes: 33, tokens: Some(Side::Read) };
                let mut said = Said::default();
                let gradient = logits.gradient(&mut said, tensor(1, 35), Some(&tensor(77, 33)), &[3, 0, 32, 7, 7], (5.0, 4.0)).unwrap();
                let losses: Vec<f64> = said.losses.values().map(|loss| transfer::number(loss, Cause::Step).unwrap()).collect();
                (transfer::values::<f64>(&gradient, Cause::Step).unwrap(), losses)
            };
            let (in_place, anew) = (found(head.clone()), found(LogitsSource::Value("logits".into())));
            for (a, b) in in_place.0.iter().zip(&anew.0).chain(in_place.1.iter().zip(&anew.1)) {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} and {b} with {soft:?} and {hard:?}");
            }
            assert_eq!((in_place.0.len(), in_place.1.len()), (5 * 35, anew.1.len()));
            assert_eq!(in_place.0[33..35], [0.0, 0.0]);
            assert!(in_place.0.iter().filter(|x| x.abs() > 1e-3).count() > 20);
        }
    }
}
