//! Soft targets (Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015) and hard targets.
//!
//! If a linear layer computes the logits, they are computed and discarded in chunks of rows, so that the
//! full logits are never in memory.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Tensor};

use super::divergence::{Soft, with_gradient};
use super::head::LogitsSource;
use super::host::{LogitTargets, is_host_slice};
use super::mask::require_rows_of_samples;
use super::teacher_outputs::TeacherOutputs;
use super::{LossOutput, divisor};
use crate::data::{Batch, References, SequenceRole};
use crate::error::{Error, Result};
use crate::exec::Parameters;
use crate::exec::transfer::{self, Cause};

/// Number of logits per chunk on the host.
const CHUNK: usize = 1 << 24;
/// Number of logits per chunk on a GPU, which needs several hundred rows to be busy at a vocabulary of
/// 150,000.
const CHUNK_ON_GPU: usize = 1 << 26;

/// Soft and hard losses over logits.
#[derive(Debug, Clone)]
pub struct Logits {
    /// Soft targets.
    pub soft: Option<Soft>,
    /// Weight and label smoothing.
    pub hard: Option<(f64, f64)>,
    /// Source of the student's logits.
    pub student: LogitsSource,
    /// Source of the teacher's logits.
    pub teacher: Option<LogitsSource>,
    /// Number of columns that student and teacher have in common.
    pub classes: usize,
    /// Role of the tokens that have logits; `None` if there is one row of logits per sample.
    pub tokens: Option<SequenceRole>,
}

/// Values of a graph, by name, and parameters.
pub type ModelValues<'a> = (&'a BTreeMap<String, Tensor>, &'a Parameters);

/// Rows of logits that contribute to the loss, and the target class of each.
struct Rows {
    indices: Vec<u32>,
    targets: Vec<u32>,
}

impl Logits {
    /// Number of rows that contribute to the loss. Fails if a hard loss lacks labels.
    pub fn items(&self, batch: &Batch) -> Result<f64> {
        Ok(self.rows(batch)?.indices.len() as f64)
    }

    /// Positions in each sample whose logits contribute to the loss.
    pub fn positions(&self, batch: &Batch) -> Result<Vec<Vec<u32>>> {
        let mut positions = vec![Vec::new(); batch.samples];
        let tokens = self.tokens.and_then(|side| batch.tokens(side));
        let sequence = tokens.map_or(1, |ids| ids.elem_count() / batch.samples.max(1)).max(1) as u32;
        for index in self.rows(batch)?.indices {
            positions[(index / sequence) as usize].push(index % sequence);
        }
        Ok(positions)
    }

    /// Calls `each` with a teacher's logits of all rows that contribute to the loss, in chunks of rows.
    pub fn for_each_teacher_chunk(
        &self,
        (source, teacher): (&LogitsSource, ModelValues),
        batch: &Batch,
        each: &mut dyn FnMut(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let value = teacher.0.get(source.value()).ok_or_else(|| missing(source.value()))?;
        let failed = |e| Error::candle("the teacher's logits", e);
        let value = flat(value).map_err(failed)?;
        for indices in self.rows(batch)?.indices.chunks(self.rows_per_chunk(value.device())) {
            let logits = select_rows(&value, indices).and_then(|rows| self.teacher_logits(source, &rows, teacher.1)?.to_dtype(DType::F32));
            each(&logits.map_err(failed)?)?;
        }
        Ok(())
    }

    /// Number of rows per chunk.
    fn rows_per_chunk(&self, device: &Device) -> usize {
        let chunk = if device.is_cpu() { CHUNK } else { CHUNK_ON_GPU };
        (chunk / self.classes.max(1)).max(1)
    }

    /// The teacher's logits of rows, without columns that the student lacks.
    fn teacher_logits(&self, source: &LogitsSource, rows: &Tensor, parameters: &Parameters) -> candle_core::Result<Tensor> {
        source.logits(rows, parameters)?.narrow(1, 0, self.classes)
    }

    /// The teacher's logits of rows, for the student's logits of the same rows; `from` counts the previous
    /// rows with a loss. `None` without a teacher.
    fn soft_targets(
        &self,
        (source, teacher): (&LogitsSource, &TeacherOutputs),
        (indices, from): (&[u32], usize),
        student: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        Ok(match teacher {
            TeacherOutputs::None => None,
            TeacherOutputs::Values(values, parameters) => {
                let Some(value) = values.get(source.value()) else {
                    candle_core::bail!("the value `{}` of the teacher is not among its outputs", source.value())
                };
                let logits = self.teacher_logits(source, &select_rows(&flat(value)?, indices)?, parameters)?;
                // The teacher may be on another device.
                Some(transfer::move_to(&logits, student.device(), Cause::Offload)?)
            }
            TeacherOutputs::Cached(entries, cache) => Some(cache.logits(entries, from..from + indices.len(), student)?),
            TeacherOutputs::Several(teachers) => {
                let temperature = self.soft.map_or(1.0, |soft| soft.temperature);
                let total: f64 = teachers.iter().map(|teacher| teacher.weight).sum();
                let mut logarithms = Vec::new();
                for teacher in teachers {
                    let logits = self.soft_targets((teacher.source, &teacher.outputs), (indices, from), student)?;
                    let Some(logits) = logits else { candle_core::bail!("one of several teachers has no outputs") };
                    logarithms.push((log_softmax(&(logits.to_dtype(DType::F32)? / temperature)?)? + (teacher.weight / total).ln())?);
                }
                let all = Tensor::stack(&logarithms, 0)?;
                let largest = all.max_keepdim(0)?;
                let sum = all.broadcast_sub(&largest)?.exp()?.sum_keepdim(0)?.log()?;
                Some(((sum + largest)?.squeeze(0)? * temperature)?)
            }
        })
    }

    fn rows(&self, batch: &Batch) -> Result<Rows> {
        let missing = |what: &str| Error::option("losses: hard", format!("needs {what}"));
        let Some(side) = self.tokens else {
            let labelled = match (&batch.references, self.hard) {
                (References::Classes(classes), Some(_)) => (0..).zip(classes).filter_map(|(row, class)| Some((row, (*class)? as u32))),
                (_, Some(_)) => return Err(missing("the class of every sample: specify `label_column`, or the file `labels`")),
                (_, None) => return Ok(Rows { indices: (0..batch.samples as u32).collect(), targets: Vec::new() }),
            };
            let (indices, targets): (Vec<u32>, Vec<u32>) = labelled.unzip();
            if let Some(class) = targets.iter().find(|class| **class as usize >= self.classes) {
                return Err(Error::option("losses: hard", format!("class {class} is out of range, the model has {} classes", self.classes)));
            }
            return Ok(Rows { indices, targets });
        };
        let ids = batch.tokens(side).ok_or_else(|| missing("the token ids of the model's input"))?;
        let sequence = ids.dims().last().copied().unwrap_or(0);
        let row = |sample: usize, at: usize| (sample * sequence + at) as u32;
        let mut rows = Rows { indices: Vec::new(), targets: Vec::new() };
        if let Some(targets) = batch.next_tokens()? {
            let class = |token: i64| {
                let reason = || format!("token {token} is out of range, the model has {} tokens", self.classes);
                u32::try_from(token).ok().filter(|token| (*token as usize) < self.classes).ok_or_else(|| Error::option("losses: hard", reason()))
            };
            for (sample, targets) in targets.iter().enumerate() {
                for (at, token) in targets {
                    rows.indices.push(row(sample, *at));
                    rows.targets.push(if self.hard.is_some() { class(*token)? } else { 0 });
                }
            }
            return Ok(rows);
        }
        if self.hard.is_some() {
            return Err(missing("target tokens: set `task: language-modelling`"));
        }
        let mask = batch.mask(side).map(transfer::read::<i64>).transpose().map_err(|e| Error::candle("the attention mask", e))?;
        let real = |at: &usize| mask.as_ref().is_none_or(|mask| mask.get(*at) != Some(&0));
        rows.indices.extend((0..ids.elem_count()).filter(real).map(|at| at as u32));
        Ok(rows)
    }

    /// Adds the losses and gradients of a micro-batch to `output`. `items` is the number of items of the
    /// whole step; `scale` multiplies only the gradients.
    #[allow(clippy::too_many_arguments)]
    pub fn add(
        &self,
        output: &mut LossOutput,
        student: ModelValues,
        teacher: TeacherOutputs,
        batch: &Batch,
        trained: &dyn Fn(&str) -> bool,
        (items, scale): (f64, f64),
    ) -> Result<()> {
        let rows = self.rows(batch)?;
        let ours = student.0.get(self.student.value()).ok_or_else(|| missing(self.student.value()))?;
        let mut compute = || {
            let values = flat(ours)?;
            if self.tokens.is_none() {
                require_rows_of_samples(&format!("value `{}`", self.student.value()), &values, batch)?;
            }
            let count = self.rows_per_chunk(values.device());
            let mut gradients: Vec<Tensor> = Vec::new();
            let mut weights: Vec<(String, Tensor)> = Vec::new();
            for (number, indices) in rows.indices.chunks(count).enumerate() {
                let targets = rows.targets.chunks(count).nth(number).unwrap_or(&[]);
                let hidden = select_rows(&values, indices)?;
                let logits = self.student.logits(&hidden, student.1)?;
                let soft = match &self.teacher {
                    Some(source) if self.soft.is_some() => {
                        let from = number * count;
                        self.soft_targets((source, &teacher), (indices, from), &logits.narrow(1, 0, self.classes)?)?
                    }
                    _ => None,
                };
                let gradient = self.gradient(output, logits, soft.as_ref(), targets, (items, scale))?.to_dtype(values.dtype())?;
                gradients.push(match &self.student {
                    LogitsSource::Value(_) => gradient,
                    LogitsSource::Head(head) => head.backward(&hidden, &gradient, student.1, trained, &mut weights)?,
                });
            }
            if rows.indices.is_empty() {
                // Ranks reduce losses and gradients by name, so a rank whose labels are all -100 must
                // contribute zeros.
                let zero = Tensor::zeros((), DType::F64, values.device())?;
                let soft = self.soft.filter(|_| !matches!(teacher, TeacherOutputs::None)).map(|_| "soft");
                soft.into_iter().chain(self.hard.map(|_| "hard")).try_for_each(|name| output.add_loss(name, &zero, 0.0))?;
                if let LogitsSource::Head(head) = &self.student {
                    for name in head.parameters.iter().filter(|name| trained(name)) {
                        weights.push((name.clone(), student.1.get(name)?.zeros_like()?.to_dtype(DType::F32)?));
                    }
                }
            }
            let gradient = match rows.indices.len() {
                0 => values.zeros_like()?,
                count if count == values.dim(0)? => Tensor::cat(&gradients, 0)?,
                _ => transfer::place_rows(&Tensor::cat(&gradients, 0)?, &rows.indices, values.dim(0)?)?,
            };
            output.parameters.append(&mut weights);
            output.add_value(self.student.value(), gradient.reshape(ours.dims())?)
        };
        compute().map_err(|e: candle_core::Error| Error::candle("losses over logits", e))
    }

    /// Adds the losses, and returns their gradient with respect to logits `[rows, columns]`, multiplied
    /// by the scale.
    fn gradient(
        &self,
        output: &mut LossOutput,
        logits: Tensor,
        teacher: Option<&Tensor>,
        targets: &[u32],
        (items, scale): (f64, f64),
    ) -> candle_core::Result<Tensor> {
        let items = divisor(items);
        if let Some(gradient) = self.gradient_on_gpu(output, &logits, teacher, targets, (items, scale))? {
            return Ok(gradient);
        }
        let teacher = teacher.map(|teacher| teacher.to_dtype(DType::F32)).transpose()?;
        let teacher = teacher.as_ref();
        // Logits of a head are a temporary that can be overwritten.
        if matches!(self.student, LogitsSource::Head(_)) && [Some(&logits), teacher].into_iter().flatten().all(is_host_slice) {
            let soft = self.soft.zip(teacher).map(|(soft, teacher)| (soft, soft.weight * soft.temperature / items * scale, teacher));
            let hard = self.hard.map(|(weight, smoothing)| (smoothing, weight / items * scale, targets));
            let sums = LogitTargets { classes: self.classes, soft, hard }.replace_by_gradient(&logits)?;
            let soft_sum = soft.map(|(soft, ..)| ("soft", sums[0], soft.temperature * soft.temperature));
            for (name, sum, factor) in soft_sum.into_iter().chain(hard.map(|_| ("hard", sums[1], 1.0))) {
                output.add_loss(name, &Tensor::new(sum, logits.device())?, factor / items)?;
            }
            return Ok(logits);
        }
        let columns = logits.dim(1)?;
        let wide = logits.to_dtype(DType::F32)?;
        let class_logits = wide.narrow(1, 0, self.classes)?.contiguous()?;
        let mut sum: Option<Tensor> = None;
        let mut add = |part: Tensor| {
            sum = Some(match sum.take() {
                Some(other) => (other + part)?,
                None => part,
            });
            Ok::<_, candle_core::Error>(())
        };
        if let (Some(Soft { weight, temperature, divergence }), Some(teacher)) = (self.soft, teacher) {
            let ours = log_softmax(&(&class_logits / temperature)?)?;
            let theirs = log_softmax(&(teacher / temperature)?)?;
            let (loss, gradient) = with_gradient(divergence, &ours, &theirs)?;
            output.add_loss("soft", &loss, temperature * temperature / items)?;
            add((gradient * (weight * temperature / items))?)?;
        }
        if let Some((weight, smoothing)) = self.hard {
            let ours = log_softmax(&class_logits)?;
            let target_columns = transfer::to_device(&Tensor::new(targets, &Device::Cpu)?, logits.device(), Cause::Batch)?.unsqueeze(1)?;
            let target_log_probabilities = ours.gather(&target_columns, 1)?;
            let uniform = smoothing / self.classes as f64;
            output.add_loss("hard", &target_log_probabilities.sum_all()?, (smoothing - 1.0) / items)?;
            if smoothing > 0.0 {
                output.add_loss("hard", &ours.sum_all()?, -uniform / items)?;
            }
            let peak = Tensor::full((1.0 - smoothing) as f32, target_columns.shape(), logits.device())?;
            let target = Tensor::full(uniform as f32, class_logits.shape(), logits.device())?.scatter_add(&target_columns, &peak, 1)?;
            add(((ours.exp()? - target)? * (weight / items))?)?;
        }
        let gradient = match sum {
            Some(gradient) => gradient,
            None => class_logits.zeros_like()?,
        };
        let gradient = (gradient * scale)?;
        if self.classes == columns { Ok(gradient) } else { gradient.pad_with_zeros(1, 0, columns - self.classes) }
    }
}

fn missing(name: &str) -> Error {
    Error::graph(format!("graph value `{name}`"), "is not among the outputs")
}

/// Flattens all axes except the last.
fn flat(value: &Tensor) -> candle_core::Result<Tensor> {
    value.contiguous()?.flatten_to(value.rank() - 2)
}

pub(super) fn index_tensor(indices: &[u32], device: &Device) -> candle_core::Result<Tensor> {
    transfer::to_device(&Tensor::new(indices, &Device::Cpu)?, device, Cause::Batch)
}

/// Selects rows by index; returns all rows unchanged if there are as many indices.
fn select_rows(rows: &Tensor, indices: &[u32]) -> candle_core::Result<Tensor> {
    if indices.len() == rows.dim(0)? { Ok(rows.clone()) } else { rows.index_select(&index_tensor(indices, rows.device())?, 0) }
}

/// Log-softmax over the last axis.
pub(super) fn log_softmax(logits: &Tensor) -> candle_core::Result<Tensor> {
    let moved = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
    let sums = moved.exp()?.sum_keepdim(D::Minus1)?.log()?;
    moved.broadcast_sub(&sums)
}

#[cfg(test)]
mod tests {
    use super::super::divergence::Divergence;
    use super::super::head::Head;
    use super::*;
    use crate::ir::ops::Linear;

    #[test]
    fn a_chunk_has_at_least_one_row_and_more_only_within_the_limit() {
        for classes in [1, 1000, CHUNK / 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK] {
            let student = LogitsSource::Value("x".into());
            let logits = Logits { soft: None, hard: None, student, teacher: None, classes, tokens: None };
            let rows = logits.rows_per_chunk(&Device::Cpu);
            assert!(rows == 1 || rows > 1 && rows * classes <= CHUNK, "{classes}: {rows}");
            assert!((rows + 1) * classes > CHUNK, "{classes}: {rows}");
        }
    }

    /// Ranks average these maps by name.
    #[test]
    fn unlabelled_samples_contribute_zeros() {
        let tensor = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let head = LogitsSource::Head(Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() });
        let parameters = Parameters::from_tensors([("w".to_owned(), tensor(&[5, 4]))].into(), DType::F32);
        let values = BTreeMap::from([("x".to_owned(), tensor(&[1, 3, 4]))]);
        let ids = Tensor::new(&[[1i64, 2, 3]], &Device::Cpu).unwrap();
        let found = |label: Option<i64>| {
            let logits = Logits {
                soft: Some(Soft { weight: 1.0, temperature: 2.0, divergence: Divergence::Forward }),
                hard: Some((1.0, 0.0)),
                student: head.clone(),
                teacher: Some(head.clone()),
                classes: 5,
                tokens: Some(SequenceRole::Input),
            };
            let references = References::Tokens(vec![vec![label, None, None]]);
            let batch = Batch { inputs: [("input_ids".to_owned(), ids.clone())].into(), references, samples: 1 };
            let mut output = LossOutput::default();
            logits.add(&mut output, (&values, &parameters), TeacherOutputs::Values(&values, &parameters), &batch, &|_| true, (1.0, 1.0)).unwrap();
            output
        };
        let (some, none) = (found(Some(2)), found(None));
        assert!(some.losses.keys().eq(none.losses.keys()) && some.values.keys().eq(none.values.keys()));
        let shapes =
            |output: &LossOutput| output.parameters.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec(), tensor.dtype())).collect::<Vec<_>>();
        assert_eq!(shapes(&some), shapes(&none));
        let all = none.losses.values().chain(none.values.values()).chain(none.parameters.iter().map(|(_, gradient)| gradient));
        all.for_each(|tensor| assert!(transfer::values::<f64>(tensor, Cause::Step).unwrap().iter().all(|value| *value == 0.0)));
    }

    /// Logits of a head are overwritten by kernels, those of a graph value are not modified.
    #[test]
    fn in_place_gradients_equal_those_of_tensor_operations() {
        let tensor = |seed: u32, columns: u32| {
            let values = (0..5 * columns).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) as f32 / 512.0 - 4.0);
            Tensor::from_vec(values.collect::<Vec<_>>(), (5, columns as usize), &Device::Cpu).unwrap()
        };
        let head = LogitsSource::Head(Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() });
        let soft = |divergence| Some(Soft { weight: 0.5, temperature: 2.0, divergence });
        let cases = [
            (soft(Divergence::Forward), None),
            (None, Some((1.5, 0.1))),
            (soft(Divergence::Forward), Some((1.5, 0.0))),
            (soft(Divergence::Reverse), None),
            (soft(Divergence::JensenShannon(0.25)), None),
            (soft(Divergence::TotalVariation), None),
            (soft(Divergence::Acceptance), None),
        ];
        for (soft, hard) in cases {
            let found = |student: LogitsSource| {
                let logits = Logits { soft, hard, student, teacher: None, classes: 33, tokens: Some(SequenceRole::Input) };
                let mut output = LossOutput::default();
                let gradient = logits.gradient(&mut output, tensor(1, 35), Some(&tensor(77, 33)), &[3, 0, 32, 7, 7], (5.0, 4.0)).unwrap();
                let losses: Vec<f64> = output.losses.values().map(|loss| transfer::number(loss, Cause::Step).unwrap()).collect();
                (transfer::values::<f64>(&gradient, Cause::Step).unwrap(), losses)
            };
            let (in_place, copied) = (found(head.clone()), found(LogitsSource::Value("logits".into())));
            for (a, b) in in_place.0.iter().zip(&copied.0).chain(in_place.1.iter().zip(&copied.1)) {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} and {b} with {soft:?} and {hard:?}");
            }
            assert_eq!((in_place.0.len(), in_place.1.len()), (5 * 35, copied.1.len()));
            assert_eq!(in_place.0[33..35], [0.0, 0.0]);
            assert!(in_place.0.iter().filter(|x| x.abs() > 1e-3).count() > 20);
        }
    }
}
