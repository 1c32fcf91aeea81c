//! Distillation losses over values of the student's and the teacher's graph.
//!
//! Each loss is a sum over items (samples, tokens, pairs of layers), divided by the number of items of
//! the whole step. The result therefore does not depend on how a step is split into micro-batches.

mod attention;
mod contrastive;
mod divergence;
mod embedding;
mod head;
mod hidden;
mod host;
mod logits;
mod logits_on_gpu;
mod mask;
mod options;
mod teacher_outputs;

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

pub use attention::{Attention, Heads};
pub use contrastive::Contrastive;
pub use divergence::{Divergence, Soft};
pub use embedding::Embedding;
pub use head::{Head, LogitsSource};
pub use hidden::{Hidden, Pair};
pub use logits::{Logits, ModelValues};
pub use options::{AttentionLoss, AttentionTarget, ContrastiveLoss, Distance, EmbeddingLoss, HardLoss, HiddenLoss, Losses, SoftDivergence, SoftLoss};
pub use teacher_outputs::{TeacherOutputs, WeightedTeacher};

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// A loss over values of the two graphs.
pub trait Loss: Send {
    /// Name in recipes.
    fn name(&self) -> &'static str;
    /// Names of the student's values that the loss reads.
    fn student(&self) -> Vec<String>;
    /// Names of the teacher's values that the loss reads.
    fn teacher(&self) -> Vec<String>;
    /// Learned projections of the loss: name, input width, output width.
    fn projections(&self) -> Vec<(String, usize, usize)> {
        Vec::new()
    }
    /// Number of items in a batch. Fails if the batch lacks an input or label of the loss.
    fn items(&self, batch: &Batch) -> Result<f64>;
    /// Computes the sum over all items and its gradients, from f32 values in the order of
    /// [`student`](Loss::student), [`teacher`](Loss::teacher) and [`projections`](Loss::projections).
    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> candle_core::Result<LossSum>;
}

/// Loss of a batch, summed over its items, with gradients.
pub struct LossSum {
    /// The sum over all items, a scalar.
    pub value: Tensor,
    /// Gradients with respect to the student's values.
    pub student: Vec<Tensor>,
    /// Gradients with respect to the projections.
    pub projections: Vec<Tensor>,
}

/// A loss and its weight.
pub struct Term {
    /// Factor on the loss.
    pub weight: f64,
    /// The loss.
    pub loss: Box<dyn Loss>,
}

/// Losses and gradients of one micro-batch.
#[derive(Debug, Default)]
pub struct LossOutput {
    /// Contribution to the mean of each loss over the step, by name: f64 scalars on the device of the
    /// values.
    pub losses: BTreeMap<&'static str, Tensor>,
    /// Gradients with respect to the student's values, by name.
    pub values: BTreeMap<String, Tensor>,
    /// Gradients with respect to projections and parameters of the head, by name.
    pub parameters: Vec<(String, Tensor)>,
}

impl LossOutput {
    fn add_loss(&mut self, name: &'static str, sum: &Tensor, factor: f64) -> candle_core::Result<()> {
        let share = sum.to_dtype(DType::F64)?.affine(factor, 0.0)?;
        let sum = match self.losses.remove(name) {
            Some(other) => (other + share)?,
            None => share,
        };
        self.losses.insert(name, sum);
        Ok(())
    }

    fn add_value(&mut self, name: &str, gradient: Tensor) -> candle_core::Result<()> {
        let sum = match self.values.remove(name) {
            Some(other) => (other + gradient)?,
            None => gradient,
        };
        self.values.insert(name.to_owned(), sum);
        Ok(())
    }
}

/// The divisor of sums over `items` items, which may be fractional as a mean over ranks; 1 if there are
/// none, since the sums are then 0.
fn divisor(items: f64) -> f64 {
    if items > 0.0 { items } else { 1.0 }
}

impl Term {
    /// Adds the loss and the gradients of a micro-batch to `output`. `items` is the number of items of
    /// the whole step; `scale` multiplies only the gradients.
    pub fn add(
        &self,
        output: &mut LossOutput,
        student: &BTreeMap<String, Tensor>,
        teacher: &BTreeMap<String, Tensor>,
        projections: &BTreeMap<String, Tensor>,
        batch: &Batch,
        (items, scale): (f64, f64),
    ) -> Result<()> {
        let name = self.loss.name();
        let missing = |name: &str| Error::graph(format!("graph value `{name}`"), "is not among the outputs");
        let pick = |from: &BTreeMap<String, Tensor>, name: &String| from.get(name).cloned().ok_or_else(|| missing(name));
        let names = self.loss.student();
        let values: Vec<Tensor> = names.iter().map(|name| pick(student, name)).collect::<Result<_>>()?;
        let teacher: Vec<Tensor> = self.loss.teacher().iter().map(|name| pick(teacher, name)).collect::<Result<_>>()?;
        let learned: Vec<String> = self.loss.projections().into_iter().map(|(name, ..)| name).collect();
        let projections: Vec<Tensor> = learned.iter().map(|name| pick(projections, name)).collect::<Result<_>>()?;
        let mut compute = || {
            let Some(device) = values.first().map(Tensor::device) else { candle_core::bail!("the loss has no values") };
            let floats = |tensors: &[Tensor]| {
                let float = |tensor: &Tensor| transfer::move_to(tensor, device, Cause::Offload)?.to_dtype(DType::F32);
                tensors.iter().map(float).collect::<candle_core::Result<Vec<_>>>()
            };
            let sum = self.loss.sum(&floats(&values)?, &floats(&teacher)?, &floats(&projections)?, batch)?;
            let items = divisor(items);
            let factor = self.weight / items * scale;
            output.add_loss(name, &sum.value, 1.0 / items)?;
            for (name, (gradient, value)) in names.iter().zip(sum.student.iter().zip(&values)) {
                output.add_value(name, (gradient * factor)?.to_dtype(value.dtype())?)?;
            }
            for (name, gradient) in learned.iter().zip(&sum.projections) {
                output.parameters.push((name.clone(), (gradient * factor)?));
            }
            Ok(())
        };
        compute().map_err(|e: candle_core::Error| Error::candle(format!("loss `{name}`"), e))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::data::{References, SequenceRole};
    use crate::exec::Parameters;
    use crate::ir::ops::Linear;

    pub(super) fn tensor(seed: usize, dims: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..dims.iter().product()).map(|i: usize| ((i * 7919 + seed * 104_729) % 97) as f32 / 40.0 - 1.0).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    }

    /// Compares the gradients of a loss with central differences.
    pub(super) fn require_gradients(what: &str, values: &[Tensor], gradients: &[Tensor], loss: impl Fn(&[Tensor]) -> f64) {
        assert_eq!(gradients.len(), values.len(), "{what}");
        for (at, gradient) in gradients.iter().enumerate() {
            assert_eq!(gradient.dims(), values[at].dims(), "{what}, value {at}");
            let gradient = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let moved = |element: usize, by: f32| {
                let mut values = values.to_vec();
                let mut changed = values[at].flatten_all().unwrap().to_vec1::<f32>().unwrap();
                changed[element] += by;
                values[at] = Tensor::from_vec(changed, values[at].dims(), &Device::Cpu).unwrap();
                loss(&values)
            };
            for (element, found) in gradient.iter().enumerate() {
                let difference = (moved(element, 0.01) - moved(element, -0.01)) / 0.02;
                assert!((difference - f64::from(*found)).abs() < 1e-3, "{what}, value {at}, element {element}: {found} instead of {difference}");
            }
            assert!(gradient.iter().any(|gradient| gradient.abs() > 1e-2), "{what}, value {at}: the gradient is zero");
        }
    }

    /// The same for a loss over values, with its projections.
    pub(super) fn require_loss_gradients(what: &str, loss: &dyn Loss, student: &[Tensor], teacher: &[Tensor], batch: &Batch) {
        let projections = loss.projections().into_iter().enumerate().map(|(at, (_, inner, outer))| tensor(at + 50, &[inner, outer]));
        let values: Vec<Tensor> = student.iter().cloned().chain(projections).collect();
        let sum = |values: &[Tensor]| {
            let (student, projections) = values.split_at(student.len());
            loss.sum(student, teacher, projections, batch).unwrap()
        };
        let LossSum { student: gradients, projections, .. } = sum(&values);
        require_gradients(what, &values, &[gradients, projections].concat(), |values| sum(values).value.to_scalar::<f32>().unwrap().into());
    }

    fn token_batch() -> Batch {
        let inputs = [
            ("input_ids".to_owned(), Tensor::ones((2, 3), DType::I64, &Device::Cpu).unwrap()),
            ("attention_mask".to_owned(), Tensor::new(&[[1i64, 1, 1], [1, 0, 0]], &Device::Cpu).unwrap()),
        ];
        Batch { inputs: inputs.into(), references: References::Tokens(vec![vec![Some(2), None, Some(1)], vec![Some(4), None, None]]), samples: 2 }
    }

    #[test]
    fn gradients_of_hidden_states_and_embeddings_equal_finite_differences() {
        let batch = token_batch();
        for distance in [Distance::Mse, Distance::Cosine] {
            let pair = |widths, tokens| Pair { student: "a".into(), teacher: "b".into(), widths, tokens };
            let pairs = vec![pair((4, 4), Some(SequenceRole::Input)), pair((4, 6), Some(SequenceRole::Input)), pair((4, 6), None)];
            let dims = |width: usize| [vec![2, 3, width], vec![2, 3, width], vec![2, width, 2, 2]];
            let student: Vec<Tensor> = dims(4).iter().enumerate().map(|(at, dims)| tensor(at + 1, dims)).collect();
            let teacher: Vec<Tensor> = pairs.iter().enumerate().map(|(at, pair)| tensor(at + 11, &dims(pair.widths.1)[at])).collect();
            require_loss_gradients(&format!("hidden, {distance:?}"), &Hidden { distance, pairs }, &student, &teacher, &batch);
            for width in [4, 6] {
                let loss = Embedding { distance, student: ("a".into(), 4), teacher: ("b".into(), width) };
                require_loss_gradients(&format!("embedding, {distance:?}, {width}"), &loss, &[tensor(1, &[2, 4])], &[tensor(2, &[2, width])], &batch);
            }
        }
    }

    /// The gradients of a step are those of the weighted mean loss, in however many micro-batches its items
    /// are, and only they are multiplied by the loss scale.
    #[test]
    fn terms_are_weighted_means_over_the_items_of_a_step() {
        let (width, rows) = (4, 6);
        let term = |weight| Term { weight, loss: Box::new(Embedding { distance: Distance::Mse, student: ("a".into(), width), teacher: ("b".into(), width) }) };
        let (student, teacher) = (tensor(1, &[rows, width]), tensor(2, &[rows, width]));
        let batch = |samples| Batch { inputs: BTreeMap::new(), references: References::None, samples };
        let step = |weight: f64, scale: f64, size: usize| {
            let (mut output, mut gradients) = (LossOutput::default(), Vec::new());
            for begin in (0..rows).step_by(size) {
                let part = |name: &str, value: &Tensor| BTreeMap::from([(name.to_owned(), value.narrow(0, begin, size).unwrap())]);
                let scales = (rows as f64, scale);
                term(weight).add(&mut output, &part("a", &student), &part("b", &teacher), &BTreeMap::new(), &batch(size), scales).unwrap();
                gradients.push(output.values.remove("a").unwrap());
            }
            let loss = output.losses["embedding"].to_scalar::<f64>().unwrap();
            (loss, Tensor::cat(&gradients, 0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
        };
        let (loss, gradient) = step(1.0, 1.0, rows);
        let mean = |values: &Tensor| {
            let squares = (values - &teacher).unwrap().sqr().unwrap().mean_all().unwrap();
            f64::from(squares.to_scalar::<f32>().unwrap())
        };
        assert!((loss - mean(&student)).abs() < 1e-5, "{loss}");
        require_gradients("mean", std::slice::from_ref(&student), &[Tensor::from_vec(gradient.clone(), (rows, width), &Device::Cpu).unwrap()], |values| {
            mean(&values[0])
        });
        for (weight, scale, size) in [(0.5, 1.0, 6), (3.0, 8.0, 6), (1.0, 1.0, 2), (2.0, 4.0, 3)] {
            let (other_loss, other) = step(weight, scale, size);
            assert!((other_loss - loss).abs() < 1e-6, "{weight}, {scale}, {size}");
            let factor = (weight * scale) as f32;
            assert!(other.iter().zip(&gradient).all(|(a, b)| (a - factor * b).abs() < 1e-5), "{weight}, {scale}, {size}");
        }
    }

    /// Divergences are those of trl's GKD, times the square of the temperature, and the hard loss is that of
    /// transformers over trl's labels of a completion (`scripts/goldens losses`).
    #[test]
    fn losses_over_logits_equal_those_of_trl() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training/losses.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let number = |name: &str| f64::from(golden[name].to_vec1::<f32>().unwrap()[0]);
        // The labels of the logits at each position.
        let labels = |name: &str| -> Vec<Vec<Option<i64>>> {
            let rows = golden[name].to_vec2::<i64>().unwrap();
            rows.into_iter().map(|row| row.into_iter().map(|label| (label != -100).then_some(label)).collect()).collect()
        };
        let require = |case: &str, (soft, hard): (Option<Soft>, Option<(f64, f64)>), logits: &str, labels: Vec<Vec<Option<i64>>>, factor: f64| {
            let (values, parameters) = (BTreeMap::from([("x".to_owned(), golden[logits].clone())]), Parameters::from_tensors(BTreeMap::new(), DType::F32));
            let (samples, sequence, classes) = golden[logits].dims3().unwrap();
            let inputs = [("input_ids".to_owned(), Tensor::ones((samples, sequence), DType::I64, &Device::Cpu).unwrap())];
            let batch = Batch { inputs: inputs.into(), references: References::Tokens(labels), samples };
            let source = LogitsSource::Value("x".into());
            let losses = Logits { soft, hard, student: source.clone(), teacher: Some(source), classes, tokens: Some(SequenceRole::Input) };
            let teacher = BTreeMap::from([("x".to_owned(), golden.get(&format!("{case}/teacher")).unwrap_or(&golden[logits]).clone())]);
            let mut output = LossOutput::default();
            let items = losses.items(&batch).unwrap();
            let outputs = if soft.is_some() { TeacherOutputs::Values(&teacher, &parameters) } else { TeacherOutputs::None };
            losses.add(&mut output, (&values, &parameters), outputs, &batch, &|_| true, (items, 1.0)).unwrap();
            let (found, expected) = (output.losses.values().next().unwrap().to_scalar::<f64>().unwrap(), factor * number(&format!("{case}/loss")));
            assert!((found - expected).abs() < 1e-5, "{case}: {found} instead of {expected}");
            let gradient = (&golden[&format!("{case}/gradient")] * factor).unwrap();
            let apart = (&output.values["x"] - gradient).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(apart < 1e-5, "{case}: {apart}");
        };
        for (name, divergence) in [
            ("forward", Divergence::Forward),
            ("reverse", Divergence::Reverse),
            ("half", Divergence::JensenShannon(0.5)),
            ("quarter", Divergence::JensenShannon(0.25)),
        ] {
            let case = format!("divergence/{name}");
            let temperature = number(&format!("{case}/temperature"));
            let soft = Soft { weight: 1.0, temperature, divergence };
            require(&case, (Some(soft), None), &format!("{case}/student"), labels(&format!("{case}/labels")), temperature * temperature);
        }
        // Logits predict the next token.
        let next = labels("completion/labels").into_iter().map(|row| row.into_iter().skip(1).chain([None]).collect()).collect();
        require("completion", (None, Some((1.0, 0.0))), "completion/logits", next, 1.0);
    }

    /// The teacher's probabilities are the weighted mean of those of several, at the temperature of the loss.
    #[test]
    fn probabilities_of_several_teachers_are_averaged() {
        let (batch, parameters) = (token_batch(), Parameters::from_tensors(BTreeMap::new(), DType::F32));
        let source = LogitsSource::Value("x".into());
        let named = |seed: usize| BTreeMap::from([("x".to_owned(), (tensor(seed, &[2, 3, 5]) * 3.0).unwrap())]);
        let (student, teachers) = (named(1), [named(2), named(3)]);
        let temperature = 2.0;
        let soft = Some(Soft { weight: 1.0, temperature, divergence: Divergence::Forward });
        let logits = Logits { soft, hard: None, student: source.clone(), teacher: Some(source.clone()), classes: 5, tokens: Some(SequenceRole::Input) };
        let loss = |outputs: TeacherOutputs| {
            let mut output = LossOutput::default();
            logits.add(&mut output, (&student, &parameters), outputs, &batch, &|_| true, (3.0, 1.0)).unwrap();
            let gradient = output.values["x"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            (output.losses["soft"].to_scalar::<f64>().unwrap(), gradient)
        };
        let several = |weights: [f64; 2], teachers: [usize; 2], values: &[BTreeMap<String, Tensor>; 2]| {
            let of = |at: usize| WeightedTeacher { weight: weights[at], source: &source, outputs: TeacherOutputs::Values(&values[teachers[at]], &parameters) };
            loss(TeacherOutputs::Several(vec![of(0), of(1)]))
        };
        let require_equal = |a: (f64, Vec<f32>), b: (f64, Vec<f32>)| {
            assert!((a.0 - b.0).abs() < 1e-5 && a.1.iter().zip(&b.1).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} {b:?}");
        };
        let one = loss(TeacherOutputs::Values(&teachers[0], &parameters));
        require_equal(several([0.3, 0.9], [0, 0], &teachers), one.clone());
        let softmax = |values: &Tensor| losses_softmax(&(values / temperature).unwrap());
        let mean = ((softmax(&teachers[0]["x"]) * 0.75).unwrap() + (softmax(&teachers[1]["x"]) * 0.25).unwrap()).unwrap();
        let averaged = BTreeMap::from([("x".to_owned(), (mean.log().unwrap() * temperature).unwrap())]);
        let expected = loss(TeacherOutputs::Values(&averaged, &parameters));
        assert!((expected.0 - one.0).abs() > 1e-3);
        require_equal(several([3.0, 1.0], [0, 1], &teachers), expected.clone());
        require_equal(several([0.5, 1.5], [1, 0], &teachers), expected);
    }

    fn losses_softmax(values: &Tensor) -> Tensor {
        let exponentials = values.exp().unwrap();
        exponentials.broadcast_div(&exponentials.sum_keepdim(candle_core::D::Minus1).unwrap()).unwrap()
    }

    #[test]
    fn gradients_of_logits_equal_finite_differences() {
        let batch = token_batch();
        let head = LogitsSource::Head(Head { input: "x".into(), parameters: vec!["w".into()], op: Linear::default() });
        let named = |values: &[Tensor]| BTreeMap::from([("x".to_owned(), values[0].clone())]);
        let parameters = |values: &[Tensor]| Parameters::from_tensors(values[1..].iter().map(|weight| ("w".to_owned(), weight.clone())).collect(), DType::F32);
        let soft = |weight, temperature, divergence| Some(Soft { weight, temperature, divergence });
        let cases = [
            (soft(0.5, 2.0, Divergence::Forward), None),
            (None, Some((1.5, 0.0))),
            (None, Some((1.5, 0.2))),
            (soft(0.5, 3.0, Divergence::Forward), Some((1.5, 0.1))),
            (soft(0.5, 2.0, Divergence::Reverse), None),
            (soft(1.0, 1.0, Divergence::JensenShannon(0.25)), Some((0.5, 0.0))),
            (soft(2.0, 2.0, Divergence::TotalVariation), None),
        ];
        for (soft, hard) in cases {
            // Logits of a graph value, with a column more than there are classes, and logits of a layer.
            for (source, values) in
                [(LogitsSource::Value("x".into()), vec![tensor(1, &[2, 3, 6])]), (head.clone(), vec![tensor(1, &[2, 3, 4]), tensor(2, &[5, 4])])]
            {
                let logits = Logits { soft, hard, student: source.clone(), teacher: Some(head.clone()), classes: 5, tokens: Some(SequenceRole::Input) };
                let teacher = [tensor(3, &[2, 3, 4]), tensor(4, &[5, 4])];
                let (teacher_values, teacher_parameters) = (named(&teacher), parameters(&teacher));
                let add = |values: &[Tensor]| {
                    let mut output = LossOutput::default();
                    let teacher = TeacherOutputs::Values(&teacher_values, &teacher_parameters);
                    logits.add(&mut output, (&named(values), &parameters(values)), teacher, &batch, &|_| true, (3.0, 1.0)).unwrap();
                    output
                };
                let weights = BTreeMap::from([("soft", soft.map_or(0.0, |soft| soft.weight)), ("hard", hard.map_or(0.0, |(weight, _)| weight))]);
                let total = |values: &[Tensor]| {
                    let losses = add(values).losses;
                    losses.iter().map(|(name, loss)| weights[name] * transfer::number(loss, Cause::Step).unwrap()).sum::<f64>()
                };
                let output = add(&values);
                let gradients: Vec<Tensor> = output.values.into_values().chain(output.parameters.into_iter().map(|(_, gradient)| gradient)).collect();
                require_gradients(&format!("{source:?}, soft {soft:?}, hard {hard:?}"), &values, &gradients, total);
            }
        }
    }
}
