//! Warns if compression has ruined the model: limits of scores and of output fidelity.

use std::collections::BTreeMap;

use super::Pipeline;
use super::measured::Measured;
use crate::evaluation::{Accuracy, Fidelity, MeasuredFidelity, Runtime, SamplesFrom, lower_is_better};
use crate::report::WARNING;
use crate::report::search::SearchLoss;
use crate::run_state::RunState;

/// Mean cosine similarity below which outputs count as unrelated.
const COSINE: f64 = 0.5;
/// Top-1 agreement below which a result is ruined.
const AGREEMENT: f64 = 0.2;

/// Fraction of the original score (accuracy, correlation) below which a result is ruined.
const SCORE: f64 = 0.5;
/// Factor of the original perplexity above which a result is ruined. Its logarithm is the limit of the
/// KL divergence in nats.
const PERPLEXITY: f64 = 3.0;

/// The metrics that exceed their limits: scores for data with labels, otherwise the fidelity of the
/// outputs. `None` if all are within limits.
fn violations(fidelity: &Fidelity, accuracy: Option<&Accuracy>) -> Option<String> {
    let first = |values: &BTreeMap<Runtime, f64>| values.values().next().copied();
    if let Some(accuracy) = accuracy
        && let (Some(metric), Some(before), Some(after)) = (&accuracy.metric, first(&accuracy.before), first(&accuracy.after))
    {
        let (is_within, limit) = if lower_is_better(metric) {
            (after <= PERPLEXITY * before, format!("above the limit {:.4}, {PERPLEXITY} times the original", PERPLEXITY * before))
        } else {
            let limit = before.min(SCORE * before);
            let text = if limit < before { format!("the limit {limit:.4}, {:.0} % of the original", 100.0 * SCORE) } else { "the original".to_owned() };
            (after >= limit, format!("below {text}"))
        };
        return (!is_within).then(|| format!("the {metric} went from {before:.4} to {after:.4}, {limit}"));
    }
    let found = [
        (fidelity.cosine < COSINE).then(|| format!("the mean cosine of `{}` is {:.2}, below {COSINE}", fidelity.output, fidelity.cosine)),
        fidelity.divergence().filter(|kl| *kl > PERPLEXITY.ln()).map(|kl| format!("the predictions diverge by {kl:.1} nats, more than {:.1}", PERPLEXITY.ln())),
        fidelity
            .top1_agreement
            .filter(|part| *part < AGREEMENT)
            .map(|part| format!("the top-1 agreement is {:.0} %, below {:.0} %", 100.0 * part, 100.0 * AGREEMENT)),
    ];
    let found: Vec<String> = found.into_iter().flatten().collect();
    (!found.is_empty()).then(|| found.join(", "))
}

/// The loss on labels, or on pairs of texts, at the first and the last step of the last pass that trained on
/// them, and what it is computed on. Steps without labels do not count.
fn label_loss(run: &RunState) -> Option<(&'static str, [f64; 2])> {
    run.history.iter().rev().find_map(|applied| {
        let curve = applied.details["training"]["curve"].as_array()?;
        [("hard", "labels"), ("contrastive", "pairs")].into_iter().find_map(|(loss, data)| {
            let mut losses = curve.iter().filter_map(|record| record["losses"][loss].as_f64());
            let first = losses.next()?;
            Some((data, [first, losses.next_back().unwrap_or(first)]))
        })
    })
}

/// The note about a draft whose outputs differ from the model's, which is not a defect.
const DRAFT: &str = "the loss `divergence: acceptance` trains a draft for speculative decoding, whose outputs may differ from the model's: `compress generate MODEL --draft DRAFT --prompt TEXT` prints how many of its proposals the model accepts";

/// Whether the last pass trained a draft for speculative decoding.
fn trains_draft(run: &RunState) -> bool {
    run.history.last().is_some_and(|applied| applied.options.pointer("/losses/soft/divergence").is_some_and(|divergence| divergence == "acceptance"))
}

/// A note about the quality of the result: its loss if a pass has trained on labels and there is no
/// score, otherwise a warning if the model is ruined.
pub(super) fn quality_note(measured: &Measured, pipeline: &Pipeline, run: &RunState) -> Option<String> {
    let accuracy = measured.accuracy.as_ref();
    let warning = measured.fidelity.as_ref().and_then(|fidelity| quality_warning(fidelity, accuracy, pipeline, run));
    let loss = label_loss(run).filter(|_| accuracy.is_none_or(|accuracy| accuracy.metric.is_none()));
    let Some((data, [first, last])) = loss else {
        let note = |reason| if trains_draft(run) { DRAFT.to_owned() } else { format!("{WARNING}{reason}") };
        return warning.map(note);
    };
    // Training on labels changes the outputs on purpose.
    let prefix = if warning.is_some() && (last >= first || last.is_nan()) { WARNING } else { "" };
    Some(format!(
        "{prefix}the loss on the {data} of the training data was {first:.4} at the first step and {last:.4} at the last; name evaluation data to measure the result"
    ))
}

/// A warning if the written model exceeds the limit of the search that chose its formats.
pub(super) fn limit_note(measured: &Measured, pipeline: &Pipeline) -> Option<String> {
    let search = pipeline.search.as_ref()?;
    let exceeded = |what: &str, limit: &str| {
        format!(
            "{WARNING}{what}, which exceeds {limit}: the search met this limit with weights rounded to nearest on its own samples; repeat it with a lower limit"
        )
    };
    let fidelity = measured.fidelity.as_ref();
    let divergence = search.max_kl.zip(fidelity).and_then(|(limit, fidelity)| {
        let divergence = fidelity.fidelity.kl.filter(|divergence| *divergence > limit)?;
        let what = format!("the KL divergence of the written model is {divergence:.6} nats on {}", fidelity.describe());
        Some(exceeded(&what, &format!("`--max-kl {limit}`")))
    });
    let percentage = |what: String, percent: f64| {
        let limit = search.max_loss?;
        (percent.is_nan() || percent > limit).then(|| exceeded(&what, &format!("`--max-loss {limit}%`")))
    };
    let score = || {
        let accuracy = measured.accuracy.as_ref()?;
        let (metric, before) = (accuracy.metric.as_ref()?, accuracy.before.values().next().filter(|before| **before != 0.0)?);
        let percent = 100.0 * accuracy.drop? / before.abs();
        percentage(format!("the {metric} of the written model is worse by {percent:.3}% on {} samples of {}", accuracy.samples, accuracy.data), percent)
    };
    // Without labels, the limit is one of the cosine distance.
    let distance = || {
        let fidelity = fidelity.filter(|_| search.metric.is_none() && search.loss == SearchLoss::CosineDistance)?;
        let percent = 100.0 * (1.0 - fidelity.fidelity.cosine);
        percentage(format!("the cosine distance of the outputs of the written model is {percent:.6}% on {}", fidelity.describe()), percent)
    };
    divergence.or_else(score).or_else(distance)
}

/// A warning if the outputs differ strongly from the original model's. It names the metrics, the passes
/// that may be the cause, and their remedies.
fn quality_warning(measured: &MeasuredFidelity, accuracy: Option<&Accuracy>, pipeline: &Pipeline, run: &RunState) -> Option<String> {
    let reason = violations(&measured.fidelity, accuracy)?;
    let synthetic =
        if measured.samples_from == SamplesFrom::Synthetic { "; your own evaluation data would be more conclusive than synthetic samples" } else { "" };
    let changed = |name: &str| run.history.iter().any(|applied| applied.name == name && !applied.tensors.is_empty());
    let mut causes: Vec<String> = Vec::new();
    for pass in pipeline.steps.iter().map(|step| step.pass()).filter(|pass| changed(pass.name()) && !pass.remedy().is_empty()) {
        let cause = format!("`{}`: {}", pass.name(), pass.remedy());
        if !causes.contains(&cause) {
            causes.push(cause);
        }
    }
    let remedies = match causes.is_empty() {
        true => ". No pass approximates weights, so the format of the output is the cause: choose one with more bits, or compare it with `compress eval OUTPUT --data FILE --against MODEL`".to_owned(),
        false => format!(". Remedies: after {}", causes.join("; after ")),
    };
    Some(format!("the outputs differ strongly from the original model's: on {}, {reason}{synthetic}{remedies}", measured.describe()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fidelity(cosine: f64, kl: Option<f64>, top1_agreement: Option<f64>) -> Fidelity {
        let output = json!({ "cosine": cosine, "cosine_min": cosine, "kl": kl, "top1_agreement": top1_agreement, "max_abs_error": 1.0, "largest": 1.0 });
        Fidelity::worst_of([("logits".to_owned(), serde_json::from_value(output).unwrap())].into(), BTreeMap::new())
    }

    #[test]
    fn each_metric_can_trigger_the_warning() {
        assert_eq!(violations(&fidelity(0.9, Some(0.3), Some(0.8)), None), None);
        assert_eq!(violations(&fidelity(0.9, None, None), None), None);
        assert!(violations(&fidelity(0.4, None, None), None).unwrap().contains("cosine"));
        assert_eq!(violations(&fidelity(0.99, Some(1.0), Some(0.5)), None), None);
        // The divergence of a model whose perplexity rose from 20.3 to 142.
        assert!(violations(&fidelity(0.99, Some(1.9), Some(0.5)), None).unwrap().contains("1.9 nats, more than 1.1"));
        assert!(violations(&fidelity(0.99, Some(1.0), Some(0.1)), None).unwrap().contains("10 %"));
        let mut labels = fidelity(0.99, None, None);
        labels.label_kl = Some(1.2);
        assert!(violations(&labels, None).unwrap().contains("1.2 nats, more than 1.1"));
    }

    #[test]
    fn a_divergence_above_the_limit_of_the_search_is_reported() {
        let note = |max_kl: Option<f64>, kl: f64| {
            let search = crate::report::FormatSearch { max_kl, ..crate::report::FormatSearch::default() };
            let found = MeasuredFidelity::new(SamplesFrom::HeldOut, 4, None, fidelity(0.99, Some(kl), Some(0.9)));
            limit_note(&Measured { fidelity: Some(found), ..Measured::default() }, &Pipeline::builder().search(search).build().unwrap())
        };
        let exceeded = note(Some(0.01), 0.0139).unwrap();
        assert!(exceeded.starts_with(WARNING) && exceeded.contains("0.013900 nats") && exceeded.contains("`--max-kl 0.01`"), "{exceeded}");
        assert_eq!((note(Some(0.01), 0.0099), note(None, 5.0)), (None, None));
    }

    #[test]
    fn a_score_below_the_limit_of_the_search_is_reported() {
        let note = |max_loss: Option<f64>, drop: f64| {
            let search = crate::report::FormatSearch { max_loss, ..crate::report::FormatSearch::default() };
            let values = |value: f64| BTreeMap::from([(Runtime::Candle, value)]);
            let accuracy = json!({ "task": "", "metric": "spearman", "data": "pairs.tsv", "samples": 8, "before": values(0.8), "after": values(0.8 - drop), "drop": drop, "more": {} });
            let measured = Measured { accuracy: serde_json::from_value(accuracy).unwrap(), ..Measured::default() };
            limit_note(&measured, &Pipeline::builder().search(search).build().unwrap())
        };
        let exceeded = note(Some(0.5), 0.008).unwrap();
        assert!(exceeded.starts_with(WARNING) && exceeded.contains("worse by 1.000% on 8 samples of pairs.tsv, which exceeds `--max-loss 0.5%`"), "{exceeded}");
        assert_eq!((note(Some(1.5), 0.008), note(Some(0.5), -0.1), note(None, 0.5)), (None, None, None));
    }

    /// A new head differs from the original one on purpose, so scores take precedence over fidelity.
    #[test]
    fn scores_take_precedence_over_fidelity() {
        let found = |metric: Option<&str>, before: f64, after: f64| {
            let score = |value| metric.map(|_| (Runtime::Candle, value)).into_iter().collect::<BTreeMap<_, f64>>();
            let accuracy = json!({ "task": "", "metric": metric, "data": "", "samples": 8, "before": score(before), "after": score(after), "more": {} });
            let accuracy: Accuracy = serde_json::from_value(accuracy).unwrap();
            violations(&fidelity(0.1, Some(4.0), Some(0.1)), Some(&accuracy))
        };
        assert_eq!((found(Some("accuracy"), 0.52, 0.81), found(Some("perplexity"), 20.0, 25.0)), (None, None));
        assert_eq!(found(Some("accuracy"), 0.9, 0.3).unwrap(), "the accuracy went from 0.9000 to 0.3000, below the limit 0.4500, 50 % of the original");
        assert!(found(Some("perplexity"), 20.0, 142.0).is_some());
        // Half of a negative score is better than the score.
        assert_eq!((found(Some("spearman"), -0.4, -0.3), found(Some("spearman"), -0.4, -0.4), found(Some("spearman"), 0.0, 0.0)), (None, None, None));
        assert_eq!(found(Some("spearman"), -0.4, -0.5).unwrap(), "the spearman went from -0.4000 to -0.5000, below the original");
        assert!(found(None, 0.0, 0.0).unwrap().contains("cosine"), "evaluation data without labels");
    }

    /// A training on labels is judged by its loss, unless there is a score.
    #[test]
    fn training_on_labels_is_judged_by_its_loss() {
        let note = |[first, last]: [f64; 2], loss: &str, cosine: f64| {
            // The first and the last step have no labels.
            let records = serde_json::json!([{ "losses": {} }, { "losses": { loss: first } }, { "losses": { loss: last } }, { "losses": {} }]);
            let details = serde_json::json!({ "training": { "curve": records } });
            let applied = crate::run_state::Applied { details, ..crate::run_state::Applied::new("finetune", serde_json::Value::Null) };
            let run = RunState { history: vec![applied], ..RunState::default() };
            let found = MeasuredFidelity::new(SamplesFrom::Synthetic, 4, None, fidelity(cosine, None, None));
            quality_note(&Measured { fidelity: Some(found), ..Measured::default() }, &Pipeline::builder().build().unwrap(), &run)
        };
        let learned = note([0.7, 0.01], "hard", 0.1).unwrap();
        assert!(learned.starts_with("the loss on the labels of the training data was 0.7000 at the first step and 0.0100 at the last"), "{learned}");
        assert!(note([0.7, 3.0], "hard", 0.1).unwrap().starts_with(WARNING));
        assert!(!note([0.7, 0.8], "hard", 0.99).unwrap().starts_with(WARNING));
        assert!(note([0.7, 0.01], "soft", 0.1).unwrap().contains("differ strongly"));
        assert_eq!(note([0.7, 0.01], "soft", 0.99), None);
    }

    /// A pass that preserves the outputs is not the cause, whether or not another pass is.
    #[test]
    fn passes_that_preserve_outputs_are_not_blamed() {
        let note = |passes: &[&str]| {
            let steps = passes.iter().map(|name| serde_json::from_value::<crate::pass::Step>(json!(name)).unwrap());
            let pipeline = steps.fold(Pipeline::builder(), |builder, step| builder.pass(step)).build().unwrap();
            let changed = |name: &&str| {
                let pass = pipeline.steps.iter().map(|step| step.pass()).find(|pass| pass.name() == *name).unwrap();
                crate::run_state::Applied { tensors: ["w".to_owned()].into(), ..crate::run_state::Applied::new(pass.name(), json!({})) }
            };
            let run = RunState { history: passes.iter().map(changed).collect(), ..RunState::default() };
            let found = MeasuredFidelity::new(SamplesFrom::Synthetic, 4, None, fidelity(0.1, None, None));
            quality_note(&Measured { fidelity: Some(found), ..Measured::default() }, &pipeline, &run).unwrap()
        };
        let both = note(&["rotate", "quantize"]);
        assert!(both.contains("Remedies: after `quantize`") && !both.contains("rotate"), "{both}");
        let format = note(&["rotate"]);
        assert!(format.contains("No pass approximates weights, so the format of the output is the cause"), "{format}");
        let cast = note(&["cast"]);
        assert!(cast.contains("after `cast`: `to: f16`") && !cast.contains("bf16"), "{cast}");
    }

    /// A draft is judged by the proposals that the model accepts.
    #[test]
    fn different_outputs_of_a_draft_are_no_defect() {
        let note = |divergence: &str, cosine: f64| {
            let options = json!({ "losses": { "soft": { "divergence": divergence } } });
            let run = RunState { history: vec![crate::run_state::Applied::new("distill", options)], ..RunState::default() };
            let found = MeasuredFidelity::new(SamplesFrom::Synthetic, 4, None, fidelity(cosine, None, None));
            quality_note(&Measured { fidelity: Some(found), ..Measured::default() }, &Pipeline::builder().build().unwrap(), &run)
        };
        assert!(note("forward", 0.1).unwrap().starts_with(WARNING));
        let draft = note("acceptance", 0.1).unwrap();
        assert!(!draft.starts_with(WARNING) && draft.contains("compress generate MODEL --draft"), "{draft}");
        assert_eq!(note("acceptance", 0.9), None);
    }
}
