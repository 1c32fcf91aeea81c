//! Accuracy of classifiers.

use std::collections::BTreeMap;

use candle_core::DType;

use super::fidelity_rows::argmax;
use super::{Metric, Outputs, Score, select_output, statistics, tensor_error};
use crate::data::{Batch, References};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// The predicted class of samples whose logits contain NaN.
const UNDEFINED: usize = usize::MAX;

/// Confusion matrix: counts by true and predicted class.
#[derive(Debug, Default)]
pub(super) struct Classification {
    confusion: BTreeMap<(usize, usize), u64>,
}

impl Metric for Classification {
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()> {
        let References::Classes(classes) = &batch.references else { return Ok(()) };
        let (name, logits) = select_output(outputs, &["logits"], 2)?;
        let count = logits.dim(1).map_err(tensor_error)?;
        let values = logits.to_dtype(DType::F32).and_then(|logits| transfer::values::<f32>(&logits, Cause::Answers)).map_err(tensor_error)?;
        let rows = logits.dim(0).map_err(tensor_error)?;
        if rows != classes.len() {
            return Err(Error::option("evaluation", format!("output `{name}` has {rows} rows for {} samples", classes.len())));
        }
        for (label, row) in classes.iter().zip(values.chunks(count.max(1))) {
            let Some(label) = label else { continue };
            if *label >= count {
                return Err(Error::option("data", format!("a label is {label}, but the model has {count} classes, numbered from 0")));
            }
            let predicted = argmax(row).unwrap_or(UNDEFINED);
            *self.confusion.entry((*label, predicted)).or_default() += 1;
        }
        Ok(())
    }

    fn score(&self) -> Result<Score> {
        let count: u64 = self.confusion.values().sum();
        if count == 0 {
            return Err(Error::option("task", "accuracy needs labels, and the data has no labels, or only the label -100"));
        }
        let hits: u64 = self.confusion.iter().filter(|((label, predicted), _)| label == predicted).map(|(_, n)| n).sum();
        let (mut labels, mut predictions) = (BTreeMap::<usize, u64>::new(), BTreeMap::<usize, u64>::new());
        for ((label, predicted), n) in &self.confusion {
            *labels.entry(*label).or_default() += n;
            *predictions.entry(*predicted).or_default() += n;
        }
        // The mean of 2 TP / (2 TP + FP + FN) over the classes that occur.
        let classes: std::collections::BTreeSet<usize> = labels.keys().chain(predictions.keys()).copied().collect();
        let f1 = |class: &usize| {
            let both = labels.get(class).unwrap_or(&0) + predictions.get(class).unwrap_or(&0);
            2.0 * *self.confusion.get(&(*class, *class)).unwrap_or(&0) as f64 / both as f64
        };
        let macro_f1 = classes.iter().map(f1).sum::<f64>() / classes.len().max(1) as f64;
        let undefined = predictions.get(&UNDEFINED).map(|count| ("nan_outputs", *count as f64));
        Ok(Score {
            metric: "accuracy".into(),
            value: hits as f64 / count.max(1) as f64,
            ci95: statistics::proportion_interval(hits, count),
            more: [("f1_macro", macro_f1), ("correct", hits as f64)].into_iter().chain(undefined).map(|(name, value)| (name.to_owned(), value)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn accuracy_and_f1() {
        let mut metric = Classification::default();
        let logits = Tensor::new(&[[1f32, 0., 0.], [0., 1., 0.], [0., 1., 0.], [0., 0., 1.]], &Device::Cpu).unwrap();
        let batch = Batch { inputs: Default::default(), references: References::Classes([0, 1, 2, 2].map(Some).to_vec()), samples: 4 };
        metric.add(&batch, &[("logits".to_owned(), logits.clone())].into()).unwrap();
        let score = metric.score().unwrap();
        assert_eq!(score.value, 0.75);
        // sklearn: f1_score([0, 1, 2, 2], [0, 1, 1, 2], average="macro")
        assert!((score.more["f1_macro"] - 0.777_777_77).abs() < 1e-6);
        // A sample with the label -100 is ignored.
        let unlabelled = Batch { references: References::Classes(vec![Some(0), Some(1), None, Some(2)]), ..batch.clone() };
        let mut metric = Classification::default();
        assert!(metric.score().unwrap_err().to_string().contains("-100"));
        metric.add(&unlabelled, &[("logits".to_owned(), logits.clone())].into()).unwrap();
        assert_eq!((metric.score().unwrap().value, metric.score().unwrap().more["correct"]), (1.0, 3.0));
        // A row with NaN has no class, whatever the label is; one with infinities has.
        let logits_with_nan =
            Tensor::new(&[[f32::NAN, 0., 0.], [0., 1., f32::NAN], [0., 1., 0.], [f32::NEG_INFINITY, 0., f32::INFINITY]], &Device::Cpu).unwrap();
        let mut metric = Classification::default();
        metric.add(&batch, &[("logits".to_owned(), logits_with_nan)].into()).unwrap();
        let score = metric.score().unwrap();
        assert_eq!((score.value, score.more["nan_outputs"]), (0.25, 2.0));
        let wrong = Batch { references: References::Classes([0, 1, 2, 3].map(Some).to_vec()), ..batch };
        let logits = Tensor::zeros((4, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert!(metric.add(&wrong, &[("logits".to_owned(), logits)].into()).unwrap_err().to_string().contains("a label is 3"));
    }
}
