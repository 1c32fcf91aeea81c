//! The choice of `method: best`, the default.

use super::{Method, NAME, Quantize, Scheme, WeightObserver};
use crate::model::Model;
use crate::pass::targets::SelectedWeights;
use crate::pass::{Samples, layerwise};

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
            // Trained rounding has neither corrections nor blocks of GGUF files.
            ..=TRAINED_BITS if self.correct.is_none() && !self.has_blocks() => Method::Autoround,
            ..ROUNDED_BITS => Method::Gptq,
            _ if round_activations => Method::Smoothquant,
            _ => Method::Rtn,
        }
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
}
