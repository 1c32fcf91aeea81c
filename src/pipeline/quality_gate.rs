//! Whether a result is ruined, and by what.

use std::collections::BTreeMap;

use super::Pipeline;
use crate::evaluation::{Accuracy, Fidelity, MeasuredFidelity, Runtime, SamplesFrom, lower_is_better};
use crate::run_state::RunState;

/// Mean cosine below which answers point elsewhere.
const COSINE: f64 = 0.5;
/// Divergence, in nats, that multiplies the perplexity by more than seven.
const DIVERGENCE: f64 = 2.0;
/// Part of the answers of which fewer have the same likeliest class.
const AGREEMENT: f64 = 0.2;

/// Fraction of a score (accuracy, correlation) below which a result is ruined.
const SCORE: f64 = 0.5;
/// Factor of the perplexity above which a result is ruined.
const PERPLEXITY: f64 = 3.0;

/// The figures that show a result to be ruined: scores for data with labels, otherwise the fidelity of the outputs.
fn reason(fidelity: &Fidelity, accuracy: Option<&Accuracy>) -> Option<String> {
    let first = |values: &BTreeMap<Runtime, f64>| values.values().next().copied();
    if let Some(accuracy) = accuracy
        && let (Some(metric), Some(before), Some(after)) = (&accuracy.metric, first(&accuracy.before), first(&accuracy.after))
    {
        let kept = if lower_is_better(metric) { after <= PERPLEXITY * before } else { after >= SCORE * before };
        return (!kept).then(|| format!("the {metric} went from {before:.4} to {after:.4}"));
    }
    let found = [
        (fidelity.cosine < COSINE).then(|| format!("the mean cosine of `{}` is {:.2}, below {COSINE}", fidelity.output, fidelity.cosine)),
        fidelity.kl.filter(|kl| *kl > DIVERGENCE).map(|kl| format!("the predictions diverge by {kl:.1} nats, more than {DIVERGENCE}")),
        fidelity
            .top1_agreement
            .filter(|part| *part < AGREEMENT)
            .map(|part| format!("{:.0} % of the likeliest classes are the same, fewer than {:.0} %", 100.0 * part, 100.0 * AGREEMENT)),
    ];
    let found: Vec<String> = found.into_iter().flatten().collect();
    (!found.is_empty()).then(|| found.join(", "))
}

/// A note where the outputs differ strongly from the input model's: by which figures, which passes may be the cause, and what helps.
pub(super) fn ruined(measured: &MeasuredFidelity, accuracy: Option<&Accuracy>, pipeline: &Pipeline, run: &RunState) -> Option<String> {
    let reason = reason(&measured.fidelity, accuracy)?;
    let synthetic = if measured.samples_from == SamplesFrom::Synthetic { "; evaluation data of your own would say more than synthetic samples" } else { "" };
    let changed = |name: &str| run.history.iter().any(|applied| applied.name == name && !applied.tensors.is_empty());
    let mut causes: Vec<String> = Vec::new();
    for pass in pipeline.steps.iter().map(|step| step.pass()).filter(|pass| changed(pass.name())) {
        let cause = format!("`{}`: {}", pass.name(), pass.remedy());
        if !causes.contains(&cause) {
            causes.push(cause);
        }
    }
    let helps = if causes.is_empty() { String::new() } else { format!(". What helps after {}", causes.join("; after ")) };
    Some(format!("the outputs differ strongly from the original model's: on {}, {reason}{synthetic}{helps}", measured.describe()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::OutputFidelity;

    fn fidelity(cosine: f64, kl: Option<f64>, top1_agreement: Option<f64>) -> Fidelity {
        let output = OutputFidelity { cosine, cosine_min: cosine, sqnr_db: None, kl, top1_agreement, max_abs_error: 1.0, largest: 1.0 };
        Fidelity::worst_of([("logits".to_owned(), output)].into(), BTreeMap::new())
    }

    #[test]
    fn what_is_ruined_is_told_by_each_figure() {
        assert_eq!(reason(&fidelity(0.9, Some(0.3), Some(0.8)), None), None);
        assert_eq!(reason(&fidelity(0.9, None, None), None), None);
        assert!(reason(&fidelity(0.4, None, None), None).unwrap().contains("cosine"));
        assert!(reason(&fidelity(0.99, Some(4.0), Some(0.5)), None).unwrap().contains("4.0 nats"));
        assert!(reason(&fidelity(0.99, Some(1.0), Some(0.1)), None).unwrap().contains("10 %"));
    }

    /// A new head differs from the old one on purpose: the labels decide.
    #[test]
    fn labels_decide_where_there_are_some() {
        let found = |metric: Option<&str>, before: f64, after: f64| {
            let score = |value| metric.map(|_| (Runtime::Candle, value)).into_iter().collect();
            let accuracy = Accuracy {
                task: String::new(),
                metric: metric.map(str::to_owned),
                data: String::new(),
                samples: 8,
                before: score(before),
                after: score(after),
                ci95: None,
                drop: None,
                fidelity: None,
                more: BTreeMap::new(),
            };
            reason(&fidelity(0.1, Some(4.0), Some(0.1)), Some(&accuracy))
        };
        assert_eq!((found(Some("accuracy"), 0.52, 0.81), found(Some("perplexity"), 20.0, 25.0)), (None, None));
        assert_eq!(found(Some("accuracy"), 0.9, 0.3).unwrap(), "the accuracy went from 0.9000 to 0.3000");
        assert!(found(Some("perplexity"), 20.0, 142.0).is_some());
        assert!(found(None, 0.0, 0.0).unwrap().contains("cosine"), "evaluation data without labels");
    }
}
