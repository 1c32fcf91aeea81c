//! The choice of `method: best`, the default.

use super::{Method, NAME, Quantize, Scheme, WeightObserver};
use crate::error::counted;
use crate::model::Model;
use crate::pass::targets::SelectedWeights;
use crate::pass::{Samples, Step, layerwise};
use crate::run_state::WARNING;

/// Widths for which trained rounding measurably improves on `gptq`.
const TRAINED_BITS: u8 = 3;
/// Width from which rounding to nearest loses less than the noise of a perplexity.
const ROUNDED_BITS: u8 = 8;

impl Quantize {
    /// The method with the smallest error for the schemes of the pass. Without calibration samples, or for
    /// models that cannot run on them, it is rounding to nearest, and also if other methods would leave some
    /// of the selected weights unchanged.
    ///
    /// It depends neither on the time nor on the machine, so that a recipe has one result.
    pub(super) fn best_method(&self, model: &Model, sets: &[Samples]) -> Method {
        let schemes: Vec<Scheme> = self.schemes().collect();
        let narrowest = schemes.iter().map(|scheme| scheme.codes().bits()).min().unwrap_or(ROUNDED_BITS);
        let can_compensate = schemes.iter().all(|scheme| scheme.has_scales_within_rows()) && model.onnx.is_none() && !model.config.has_conv1d();
        // Errors that samples weight have no fourth power.
        let is_rounded = self.observer == Some(WeightObserver::L4);
        let can_run = || layerwise::require("quantize: method").is_ok() && self.are_all_layers(model);
        if !sets.contains(&Samples::Calibration) || is_rounded || !can_compensate || !can_run() {
            return Method::Rtn;
        }
        let round_activations = schemes.iter().all(|scheme| scheme.rounds_activations() && scheme.rounds_activations_like(self.scheme));
        match narrowest {
            // Trained rounding has no corrections. For blocks of GGUF files, whose scales are fixed, its gain
            // is within the noise.
            ..=TRAINED_BITS if self.correct.is_none() && !self.has_blocks() => Method::Autoround,
            ..ROUNDED_BITS => Method::Gptq,
            _ if round_activations => Method::Smoothquant,
            _ => Method::Rtn,
        }
    }

    /// A note if later passes train the codes that the method chooses. If they train all of them, the default
    /// method becomes rounding to nearest.
    pub(super) fn lost_codes(&mut self, model: &Model, later: &[Step], is_default: bool) -> Option<String> {
        // Codes of blocks of GGUF files cannot be trained, and a later pass that tries is rejected.
        if !self.method.compensates() || self.has_blocks() {
            return None;
        }
        let SelectedWeights { names, .. } = self.selected(&model.weights).ok()?;
        let trained = |step: &Step| names.iter().filter(|name| step.pass().trains_codes(name)).count();
        let pass = later.iter().rev().max_by_key(|step| trained(step))?.pass().name();
        let trained = names.iter().filter(|name| later.iter().any(|step| step.pass().trains_codes(name))).count();
        if trained == 0 {
            return None;
        }
        let method = if self.method == Method::Gptq { "gptq" } else { "autoround" };
        let from = "from their values before quantization";
        if is_default && trained == names.len() {
            self.method = Method::Rtn;
            return Some(format!("{NAME}: `method` is `rtn`, because `{pass}` trains the weights {from}, which replaces the codes of `{method}`"));
        }
        Some(format!(
            "{WARNING}{NAME}: `{pass}` trains {trained} of {} {from}, which replaces their codes of `method: {method}`: use `method: rtn`, which takes less time, or `scales: only` in `{pass}`",
            counted(names.len(), "weight")
        ))
    }

    /// Whether methods with samples support all selected weights.
    fn are_all_layers(&self, model: &Model) -> bool {
        let Ok(SelectedWeights { mut names, .. }) = self.selected(&model.weights) else { return false };
        layerwise::retain_supported(NAME, model, &mut names, &[]).is_ok_and(|notes| notes.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::pass::Pass;

    #[test]
    fn the_method_depends_on_schemes_model_and_samples() {
        let best = |name: &str, sets: &[Samples], options: serde_json::Value| {
            let model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap();
            serde_json::from_value::<Quantize>(options).unwrap().best_method(&model, sets)
        };
        let samples = [Samples::Calibration];
        for (scheme, method) in [
            ("W2A16", Method::Autoround),
            ("W4A16", Method::Gptq),
            ("W4A8", Method::Gptq),
            ("NVFP4", Method::Gptq),
            ("W8A8", Method::Smoothquant),
            ("W8A16", Method::Rtn),
            ("Q2_K", Method::Gptq),
            ("Q8_0", Method::Rtn),
            ("FP8", Method::Rtn),
        ] {
            assert_eq!(best("llama", &samples, json!({ "scheme": scheme })), method, "{scheme}");
            assert_eq!(best("llama", &[], json!({ "scheme": scheme })), Method::Rtn, "{scheme}");
        }
        let rules = json!([{ "targets": ["*mlp*"], "scheme": "W3A16" }]);
        for scheme in ["W8A16", "NVFP4A16"] {
            assert_eq!(best("llama", &samples, json!({ "scheme": scheme, "rules": rules })), Method::Autoround, "{scheme}");
        }
        assert_eq!(best("llama", &samples, json!({ "scheme": "W2A16", "correct": { "rank": 2 } })), Method::Gptq);
        assert_eq!(best("llama", &samples, json!({ "observer": "l4" })), Method::Rtn);
        let tables = json!({ "targets": ["*_proj.weight", "*embed_tokens.weight"] });
        assert_eq!(best("llama", &samples, tables), Method::Rtn);
        assert_eq!(best("llama", &[Samples::Train], json!({})), Method::Rtn);
        assert_eq!(best("gpt2", &samples, json!({ "scheme": "W4A16" })), Method::Rtn);
    }

    #[test]
    fn codes_that_later_passes_train_are_not_chosen() {
        let model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        for (options, later, method, words) in [
            (json!({}), json!({ "finetune": {} }), Method::Rtn, "quantize: `method` is `rtn`, because `finetune` trains"),
            (json!({ "scheme": "W2A16" }), json!({ "distill": { "scales": "learnable" } }), Method::Rtn, "the codes of `autoround`"),
            (json!({}), json!({ "finetune": { "adapter": { "absorb": true } } }), Method::Rtn, "because `finetune` trains"),
            (json!({}), json!({ "finetune": { "targets": ["*q_proj*"] } }), Method::Gptq, "warning: quantize: `finetune` trains 2 of 14 weights"),
            (
                json!({ "method": "gptq" }),
                json!({ "distill": { "student": { "every": 2 } } }),
                Method::Gptq,
                "warning: quantize: `distill` trains 14 of 14 weights",
            ),
            (json!({ "method": "autoround" }), json!({ "finetune": {} }), Method::Autoround, "use `method: rtn`"),
            (json!({ "method": "rtn" }), json!({ "finetune": {} }), Method::Rtn, ""),
            (json!({ "scheme": "W8A8" }), json!({ "finetune": {} }), Method::Smoothquant, ""),
            (json!({}), json!({ "distill": { "scales": "only" } }), Method::Gptq, ""),
            (json!({}), json!({ "finetune": { "adapter": { "merge": false } } }), Method::Gptq, ""),
            (json!({}), json!({ "finetune": { "targets": ["*norm*"] } }), Method::Gptq, ""),
            (json!({}), json!({ "distill": { "student": { "model": "other" } } }), Method::Gptq, ""),
            (json!({}), json!({ "cast": { "to": "bf16" } }), Method::Gptq, ""),
        ] {
            let mut pass: Quantize = serde_json::from_value(options.clone()).unwrap();
            let steps: Vec<Step> = vec![Step::from_name("cast").unwrap(), serde_json::from_value(later.clone()).unwrap()];
            let note = pass.resolve_before(&model, &[Samples::Calibration, Samples::Train], &steps).unwrap_or_default();
            assert_eq!(pass.method, method, "{options} {later}: {note}");
            assert!(if words.is_empty() { note.is_empty() } else { note.contains(words) }, "{options} {later}: {note}");
        }
        // Several passes train all codes together.
        let steps = [json!({ "finetune": { "targets": ["*q_proj*"] } }), json!({ "finetune": {} })];
        let steps = steps.map(|step| serde_json::from_value::<Step>(step).unwrap());
        let mut pass = Quantize::default();
        pass.resolve_before(&model, &[Samples::Calibration, Samples::Train], &steps);
        assert_eq!(pass.method, Method::Rtn);
    }
}
