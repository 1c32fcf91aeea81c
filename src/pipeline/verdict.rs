//! Whether a result is ruined, and by what.

use super::Pipeline;
use crate::evaluation::{Fidelity, MeasuredFidelity, SamplesFrom};
use crate::run_state::RunState;

/// Mean cosine below which answers point elsewhere.
const COSINE: f64 = 0.5;
/// Divergence, in nats, that multiplies the perplexity by more than seven.
const DIVERGENCE: f64 = 2.0;
/// Part of the answers of which fewer have the same likeliest class.
const AGREEMENT: f64 = 0.2;

/// What ruins a result, in figures; nothing where it is not ruined.
fn reason(fidelity: &Fidelity) -> Option<String> {
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

/// A note where the output hardly answers as the input does: by which figures, which passes may have done it, and what helps.
pub(super) fn ruined(measured: &MeasuredFidelity, pipeline: &Pipeline, run: &RunState) -> Option<String> {
    let reason = reason(&measured.fidelity)?;
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
    Some(format!("the result hardly answers as the input does: on {}, {reason}{synthetic}{helps}", measured.describe()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fidelity(cosine: f64, kl: Option<f64>, top1_agreement: Option<f64>) -> Fidelity {
        Fidelity { output: "logits".into(), cosine, cosine_min: cosine, sqnr_db: None, kl, top1_agreement, max_abs_error: 1.0, largest: 1.0 }
    }

    #[test]
    fn what_is_ruined_is_told_by_each_figure() {
        assert_eq!(reason(&fidelity(0.9, Some(0.3), Some(0.8))), None);
        assert_eq!(reason(&fidelity(0.9, None, None)), None);
        assert!(reason(&fidelity(0.4, None, None)).unwrap().contains("cosine"));
        assert!(reason(&fidelity(0.99, Some(4.0), Some(0.5))).unwrap().contains("4.0 nats"));
        assert!(reason(&fidelity(0.99, Some(1.0), Some(0.1))).unwrap().contains("10 %"));
    }
}
