//! Quantization schemes of modules: `config_groups` and `ignore` of compressed-tensors. Weights that
//! contradict them are rejected.

use serde_json::Value;

use super::quantization::{self, ActivationArgs, FORMATS, HINT, Refused};
use crate::error::{Error, Result};
use crate::store::{
    ActivationScheme, Codes, Encoding, Fp8Config, GptqConfig, Granularity, Nvfp4Config, Pattern, QuantizationSpec, StatedEncoding, Static, Weight, Weights,
};

/// Hint for a weight that contradicts its description.
const CORRECT: &str = "correct `quantization_config` in config.json, or start from the original checkpoint";

/// A name, class, or regular expression that selects modules.
#[derive(Debug)]
struct Target {
    text: String,
    /// The text as a regular expression, if it is one.
    expression: Option<Pattern>,
}

impl Target {
    /// The targets in a list of an object.
    fn list<'v>(object: &'v Value, key: &'static str) -> impl Iterator<Item = Result<Target, Refused>> + use<'v> {
        object.get(key).and_then(Value::as_array).into_iter().flatten().map(move |value| {
            let text = value.as_str().ok_or_else(|| (format!("the target {value} of `{key}`"), FORMATS))?;
            let expression = text.starts_with("re:").then(|| text.parse()).transpose();
            let expression = expression.map_err(|e: crate::error::ParseError| (format!("the target of `{key}`: {e}"), FORMATS))?;
            Ok(Target { text: text.to_owned(), expression })
        })
    }

    /// Whether the regular expression matches a module. Fails if it is too slow.
    fn matches(&self, module: &str) -> Result<bool, String> {
        self.expression.as_ref().map_or(Ok(false), |expression| expression.try_matches(module))
    }
}

/// Quantization scheme of the modules that a target selects.
#[derive(Debug)]
struct Scheme {
    target: Target,
    /// `None` if the group does not quantize weights.
    codes: Option<Codes>,
    /// Whether integers have no zero points.
    symmetric: bool,
    activations: ActivationArgs,
    granularity: Option<Granularity>,
}

impl Scheme {
    /// Everything except the target.
    fn arguments(&self) -> (Option<Codes>, bool, ActivationArgs, Option<Granularity>) {
        (self.codes, self.symmetric, self.activations, self.granularity)
    }
}

/// Quantization schemes of modules, selected by the targets of compressed-tensors.
#[derive(Debug, Default)]
pub(super) struct Schemes {
    list: Vec<Scheme>,
    /// Modules that are not quantized, even if a target selects them.
    ignore: Vec<Target>,
    /// Settings of GPTQ and AWQ.
    pub(super) gptq: GptqConfig,
    /// Settings of FP8 weights.
    pub(super) fp8: Option<Fp8Config>,
    /// Settings of NVFP4 weights of ModelOpt.
    pub(super) nvfp4: Option<Nvfp4Config>,
}

impl Schemes {
    /// The weights of a folder of GPTQ or AWQ.
    pub(super) fn from_gptq(gptq: GptqConfig) -> Schemes {
        Schemes { gptq, ..Schemes::default() }
    }

    /// The weights of a folder with `quant_method: fp8` or of ModelOpt, if there are settings.
    pub(super) fn from_floats(fp8: Option<Fp8Config>, nvfp4: Option<Nvfp4Config>) -> Schemes {
        Schemes { fp8, nvfp4, ..Schemes::default() }
    }

    /// Parses the groups and the ignored modules of a description.
    pub(super) fn parse(described: &Value) -> Result<Schemes, Refused> {
        let mut schemes = Schemes { ignore: Target::list(described, "ignore").collect::<Result<_, _>>()?, ..Schemes::default() };
        for (name, group) in described.get("config_groups").and_then(Value::as_object).into_iter().flatten() {
            let weights = group.get("weights").unwrap_or(&Value::Null);
            let num_bits = weights.get("num_bits").and_then(Value::as_u64).unwrap_or(8);
            let Some(codes) = Codes::from_type(quantization::is_integer(weights), num_bits) else {
                return Err((format!("weights of {num_bits} bits, type {}", weights.get("type").unwrap_or(&Value::Null)), FORMATS));
            };
            quantization::require_supported(group)?;
            let inputs = group.get("input_activations").unwrap_or(&Value::Null);
            let activations = if inputs.is_null() { ActivationArgs::Scheme(ActivationScheme::None) } else { quantization::activations(inputs)? };
            if weights.is_null() && !inputs.is_null() {
                return Err((format!("quantization of `input_activations` without `weights` in `{name}` of `config_groups`"), HINT));
            }
            let codes = Some(codes).filter(|_| !weights.is_null());
            let symmetric = weights.get("symmetric").and_then(Value::as_bool).unwrap_or(true);
            let granularity = quantization::granularity(weights)?;
            let targets = Target::list(group, "targets").collect::<Result<Vec<Target>, Refused>>()?;
            if codes.is_some() && targets.is_empty() {
                return Err((format!("`{name}` of `config_groups` without `targets`"), HINT));
            }
            schemes.list.extend(targets.into_iter().map(|target| Scheme { target, codes, symmetric, activations, granularity }));
        }
        Ok(schemes)
    }

    /// The scheme of a module. An exact name takes precedence over a regular expression, and that over a
    /// class. Fails if an expression is too slow to match.
    fn find(&self, module: &str, class: &str) -> Result<Option<&Scheme>, String> {
        Ok(self.candidates(module, class)?.first().copied())
    }

    /// The schemes of the targets that take precedence for a module.
    fn candidates(&self, module: &str, class: &str) -> Result<Vec<&Scheme>, String> {
        let named = |name: &str| self.list.iter().filter(|scheme| scheme.target.text == name).collect::<Vec<_>>();
        let mut found = named(module);
        if found.is_empty() {
            for scheme in &self.list {
                if scheme.target.matches(module)? {
                    found.push(scheme);
                }
            }
        }
        Ok(if found.is_empty() { named(class) } else { found })
    }

    /// The entry of `ignore` that excludes a module from quantization.
    fn ignored(&self, module: &str, class: &str) -> Result<Option<&str>, String> {
        for target in &self.ignore {
            if target.text == module || target.text == class || target.matches(module)? {
                return Ok(Some(&target.text));
            }
        }
        Ok(None)
    }

    /// The stated encoding of a module's weight. Modules for which matching fails are rejected by
    /// [`describe`](Schemes::describe).
    pub(super) fn encoding(&self, module: &str, class: &str) -> StatedEncoding {
        let Ok(Some(scheme)) = self.find(module, class) else { return StatedEncoding::default() };
        StatedEncoding { bits: scheme.codes.filter(|codes| codes.is_integer()).map(Codes::bits), granularity: scheme.granularity, floats: None }
    }

    /// Sets the activation scheme, which the tensors of a weight do not determine. Fails if the module is
    /// ignored, no target matches it, its codes have a different format, or a tensor is missing or
    /// contradicts the description.
    pub(super) fn describe(&self, module: &str, class: &str, affine: &mut QuantizationSpec) -> Result<()> {
        let weight = format!("{module}.weight");
        let too_slow = |reason: String| {
            let reason = format!("is quantized, but a target of `quantization_config` in config.json is too slow to match: {reason}");
            Error::tensor(&weight, reason, "rewrite the target without nested repetitions")
        };
        if let Some(target) = self.ignored(module, class).map_err(too_slow)? {
            return Err(Error::tensor(&weight, format!("is quantized, but `{target}` in `ignore` of config.json excludes it from quantization"), CORRECT));
        }
        if self.list.is_empty() {
            return Ok(());
        }
        let candidates = self.candidates(module, class).map_err(too_slow)?;
        // vLLM uses the first group whose expression matches, compressed-tensors the first expression in
        // alphabetical order.
        if let [first, others @ ..] = candidates.as_slice()
            && let Some(other) = others.iter().find(|other| other.arguments() != first.arguments())
        {
            let reason = format!(
                "is quantized, and the targets `{}` and `{}` of `config_groups` in config.json specify different quantizations of `{module}`",
                first.target.text, other.target.text
            );
            return Err(Error::tensor(&weight, reason, "remove the module from all groups but one: readers choose differently"));
        }
        let Some(scheme) = candidates.first() else {
            return Err(Error::tensor(
                &weight,
                format!("is quantized, but no target of `config_groups` in config.json matches `{module}` or its class {class}"),
                "add the module to the `targets` of its group, which specifies the quantization of its input",
            ));
        };
        if scheme.codes != Some(affine.codes) {
            let specified = scheme.codes.map_or("no quantization of its group's weights".to_owned(), |codes| codes.to_string());
            return Err(Error::tensor(&weight, format!("is stored as {}, but config.json specifies {specified}", affine.codes), CORRECT));
        }
        if affine.codes.is_integer() {
            require_zero_point(&format!("{weight}_zero_point"), scheme.symmetric, !affine.symmetric)?;
        }
        affine.activations = match (scheme.activations, affine.activations.parameters()) {
            (ActivationArgs::Scheme(activations), _) => activations,
            (ActivationArgs::Static { symmetric }, Some(by)) => {
                require_zero_point(&format!("{module}.input_zero_point"), symmetric, by.zero_point.is_some())?;
                affine.activations
            }
            (ActivationArgs::Static { .. }, None) => {
                let scale = affine.codes.static_activations(Static::new(1.0, None)).scale_name();
                return Err(Error::tensor(
                    &format!("{module}.{scale}"),
                    "is missing, but config.json specifies static quantization of this layer's input",
                    "the checkpoint is incomplete; save it again",
                ));
            }
        };
        Ok(())
    }

    /// Fails if a dense weight contains codes whose scales are missing.
    pub(super) fn require_scales(&self, name: &str, class: &str, weight: &Weight) -> Result<()> {
        let Some(module) = name.strip_suffix(".weight").filter(|_| !weight.is_float() && weight.elements() > 0) else { return Ok(()) };
        let is_quantized = matches!(self.find(module, class), Ok(Some(Scheme { codes: Some(_), .. }))) && self.ignored(module, class) == Ok(None);
        match is_quantized && weight.encoding == Encoding::Dense {
            false => Ok(()),
            true => Err(Error::tensor(
                &format!("{name}_scale"),
                format!("is missing, but config.json specifies that `{name}`, which contains {}, is quantized", weight.describe()),
                "the checkpoint is incomplete; save it again, or start from the original checkpoint",
            )),
        }
    }

    /// Fails if weights should be quantized, but none is.
    pub(super) fn require_quantized(&self, weights: &Weights) -> Result<(), Refused> {
        // Weights without elements have scales, but are not quantized.
        let is_quantized = |(name, weight): (&String, &Weight)| weight.encoding != Encoding::Dense || name.ends_with("_scale");
        match self.list.iter().any(|scheme| scheme.codes.is_some()) && !weights.by_name.iter().any(is_quantized) {
            false => Ok(()),
            true => Err((
                "`config_groups` for quantized weights in a model whose weights are all stored unquantized".to_owned(),
                "remove `quantization_config` if the weights are meant to be floats, or start from the original checkpoint",
            )),
        }
    }
}

/// Fails if a zero point is stored for symmetric quantization, or missing for asymmetric quantization.
fn require_zero_point(name: &str, symmetric: bool, is_stored: bool) -> Result<()> {
    match (symmetric, is_stored) {
        (true, false) | (false, true) => Ok(()),
        (true, true) => Err(Error::tensor(name, "is stored, but config.json specifies symmetric quantization", CORRECT)),
        (false, false) => Err(Error::tensor(
            name,
            "is missing, but config.json specifies asymmetric quantization",
            "the checkpoint is incomplete; save it again (if all zero points are 0, \"symmetric\": true in config.json describes it)",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::{Computed, DType, FloatFormat};

    #[test]
    fn targets_may_use_lookaround_and_must_cover_quantized_modules() {
        let weights = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"});
        let input = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true});
        let group = json!({"targets": ["re:^(?!.*down_proj).*mlp.*"], "weights": weights, "input_activations": input});
        let schemes = Schemes::parse(&json!({"config_groups": {"g": group}})).unwrap();
        let mut described = int8();
        schemes.describe("model.layers.0.mlp.up_proj", "Linear", &mut described).unwrap();
        assert_eq!(described.activations, ActivationScheme::DynamicToken);
        let error = schemes.describe("model.layers.0.mlp.down_proj", "Linear", &mut int8()).unwrap_err().to_string();
        assert!(error.contains("model.layers.0.mlp.down_proj.weight") && error.contains("config_groups"), "{error}");
    }

    /// A target that cannot be matched is rejected: the module would be taken for one of the class in
    /// another group.
    #[test]
    fn targets_that_exceed_the_limit_of_backtracking_are_refused() {
        let weights = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"});
        let groups = json!({
            "a": {"targets": ["re:(a|b|ab)*(?>c)"], "weights": weights},
            "b": {"targets": ["Linear"], "weights": weights},
        });
        let schemes = Schemes::parse(&json!({"config_groups": groups})).unwrap();
        let mut affine = int8();
        schemes.describe("model.up_proj", "Linear", &mut affine).unwrap();
        let module = "ab".repeat(28);
        let error = schemes.describe(&module, "Linear", &mut affine).unwrap_err().to_string();
        assert!(error.contains(&module) && error.contains("re:(a|b|ab)*(?>c)"), "{error}");
    }

    /// Readers resolve overlapping targets of different groups differently.
    #[test]
    fn overlapping_targets_with_different_arguments_are_refused() {
        let weights = |strategy: &str| json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": strategy});
        let schemes = |a: &str, b: &str, second: &str| {
            let groups = json!({"a": {"targets": [a], "weights": weights("channel")}, "b": {"targets": [b, "Linear"], "weights": weights(second)}});
            Schemes::parse(&json!({"config_groups": groups})).unwrap()
        };
        for (a, b) in [("re:.*up_proj", "re:.*mlp.*"), ("mlp.up_proj", "mlp.up_proj"), ("Linear", "other")] {
            let error = schemes(a, b, "tensor").describe("mlp.up_proj", "Linear", &mut int8()).unwrap_err().to_string();
            assert!(error.contains("mlp.up_proj.weight") && error.contains(&format!("`{a}`")), "{error}");
            schemes(a, b, "channel").describe("mlp.up_proj", "Linear", &mut int8()).unwrap();
        }
        // A name takes precedence over an expression, and an expression over a class.
        schemes("mlp.up_proj", "re:.*mlp.*", "tensor").describe("mlp.up_proj", "Linear", &mut int8()).unwrap();
        schemes("re:.*mlp.*", "other", "tensor").describe("mlp.up_proj", "Linear", &mut int8()).unwrap();
    }

    /// Weights of eight bits with one scale per row.
    fn int8() -> QuantizationSpec {
        let (codes, granularity) = (Codes::INT8, Granularity::Channel);
        QuantizationSpec { codes, granularity, symmetric: true, scale_dtype: DType::F32, activations: ActivationScheme::None }
    }

    /// Schemes of one group for the class Linear.
    fn schemes(weights: Value, inputs: Value, ignore: Value) -> Result<Schemes, Refused> {
        let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
        Schemes::parse(&json!({"config_groups": {"group_0": group}, "ignore": ignore}))
    }

    #[test]
    fn zero_points_must_match_the_description() {
        let described = |symmetric: bool, mut affine: QuantizationSpec| {
            let schemes = schemes(json!({"num_bits": 8, "symmetric": symmetric}), Value::Null, json!([])).unwrap();
            schemes.describe("a", "Linear", &mut affine).map_err(|e| e.to_string())
        };
        let asymmetric = || QuantizationSpec { symmetric: false, ..int8() };
        assert_eq!((described(true, int8()), described(false, asymmetric())), (Ok(()), Ok(())));
        assert!(described(true, asymmetric()).unwrap_err().contains("tensor `a.weight_zero_point`: is stored"));
        assert!(described(false, int8()).unwrap_err().contains("tensor `a.weight_zero_point`: is missing"));
        let inputs = |symmetric: bool, zero_point: Option<i8>| {
            let inputs = json!({"num_bits": 8, "symmetric": symmetric, "strategy": "tensor"});
            let mut affine = QuantizationSpec { activations: ActivationScheme::Static(Static::new(0.5, zero_point)), ..int8() };
            schemes(json!({"num_bits": 8}), inputs, json!([])).unwrap().describe("a", "Linear", &mut affine).map_err(|e| e.to_string())
        };
        assert_eq!((inputs(true, None), inputs(false, Some(3))), (Ok(()), Ok(())));
        assert!(inputs(false, None).unwrap_err().contains("tensor `a.input_zero_point`: is missing"));
        assert!(inputs(true, Some(3)).unwrap_err().contains("tensor `a.input_zero_point`: is stored"));
    }

    #[test]
    fn missing_input_scales_have_the_name_of_their_format() {
        let missing = |bits: u8, size: usize, mut affine: QuantizationSpec| {
            let weights = json!({"num_bits": bits, "type": "float"});
            let inputs = json!({"num_bits": bits, "type": "float", "strategy": "tensor_group", "group_size": size, "dynamic": "local"});
            let inputs = if size > 0 { inputs } else { json!({"num_bits": bits, "type": "float", "strategy": "tensor"}) };
            schemes(weights, inputs, json!([])).unwrap().describe("a", "Linear", &mut affine).unwrap_err().to_string()
        };
        let float = |format, granularity, scale_dtype| QuantizationSpec { codes: Codes::Float(format), granularity, scale_dtype, ..int8() };
        let nvfp4 = missing(4, 16, float(FloatFormat::E2m1, Granularity::Group(16), DType::F8_E4M3));
        assert!(nvfp4.contains("tensor `a.input_global_scale`: is missing"), "{nvfp4}");
        let fp8 = missing(8, 0, float(FloatFormat::E4m3, Granularity::Channel, DType::F32));
        assert!(fp8.contains("tensor `a.input_scale`: is missing"), "{fp8}");
    }

    #[test]
    fn ignored_modules_must_not_be_quantized() {
        for (ignore, excludes) in [("a.b", true), ("re:.*b$", true), ("Linear", true), ("a", false), ("re:b", false), ("Embedding", false)] {
            let schemes = schemes(json!({"num_bits": 8}), Value::Null, json!(["lm_head", ignore])).unwrap();
            let error = schemes.describe("a.b", "Linear", &mut int8()).err().map(|e| e.to_string());
            assert_eq!(error.is_some(), excludes, "{ignore}");
            assert!(error.is_none_or(|e| e.contains("tensor `a.b.weight`: is quantized, but `") && e.contains(ignore)), "{ignore}");
        }
        assert!(schemes(Value::Null, Value::Null, json!([7])).unwrap_err().0.contains("the target 7 of `ignore`"));
    }

    #[test]
    fn groups_without_weights_describe_no_quantization() {
        let inputs = json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
        let (reason, _) = schemes(Value::Null, inputs, json!([])).unwrap_err();
        assert!(reason.contains("`input_activations` without `weights` in `group_0`"), "{reason}");
        let error = schemes(Value::Null, Value::Null, json!([])).unwrap().describe("a", "Linear", &mut int8()).unwrap_err().to_string();
        assert!(error.contains("tensor `a.weight`: is stored as int8, but config.json specifies no quantization"), "{error}");
    }

    /// The quantization of inputs would be lost.
    #[test]
    fn groups_without_targets_are_refused() {
        for targets in [json!([]), Value::Null] {
            let group = json!({"targets": targets, "weights": {"num_bits": 8}});
            let (reason, _) = Schemes::parse(&json!({"config_groups": {"group_0": group}})).unwrap_err();
            assert_eq!(reason, "`group_0` of `config_groups` without `targets`");
        }
    }

    #[test]
    fn codes_without_scales_are_refused() {
        let weight = |dtype| Weight::new(dtype, vec![2, 2], Encoding::Dense, Computed { values: || Ok(vec![1.0; 4]) }.weight(vec![2, 2]).source());
        let missing = |name: &str, dtype, ignore: Value| {
            schemes(json!({"num_bits": 8}), Value::Null, ignore).unwrap().require_scales(name, "Linear", &weight(dtype)).err().map(|e| e.to_string())
        };
        let error = missing("a.weight", DType::I8, json!([])).unwrap();
        assert!(error.contains("tensor `a.weight_scale`: is missing") && error.contains("`a.weight`"), "{error}");
        assert_eq!(missing("a.weight", DType::F32, json!([])), None);
        assert_eq!((missing("a.ids", DType::I8, json!([])), missing("a.weight", DType::I8, json!(["a"]))), (None, None));
        let all = |dtype| Weights { by_name: [("a.weight".to_owned(), weight(dtype))].into(), ..Weights::default() };
        let schemes = schemes(json!({"num_bits": 8}), Value::Null, json!([])).unwrap();
        assert!(schemes.require_quantized(&all(DType::F32)).unwrap_err().0.contains("stored unquantized"));
    }
}
