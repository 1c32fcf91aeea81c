//! Selection of the weights that a pass processes.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use crate::arch;
use crate::error::{Error, ParseError, Result, counted};
use crate::model::{Model, exempt_layers, is_convolution, is_linear};
use crate::run_state::WARNING;
use crate::store::{Encoding, Pattern, Selection, Weight, Weights, select};

/// Selected weights of a pass.
pub struct SelectedWeights<'a> {
    /// Names of the weights.
    pub names: BTreeSet<&'a str>,
    /// Description of the selection for reports.
    pub rule: String,
    /// Layers that the default selection leaves unchanged, and why. Irrelevant for passes that do not
    /// distinguish layers from other tensors.
    pub notes: Vec<String>,
}

/// Whether a weight belongs to an expert.
pub(super) fn is_expert(name: &str) -> bool {
    name.contains("experts.")
}

/// Parses a rule `PATTERN=VALUE` of the command line. `value` is the placeholder of the value in error
/// messages.
pub(super) fn parse_rule<T: FromStr<Err = ParseError>>(text: &str, value: &str) -> Result<(Pattern, T), ParseError> {
    let (pattern, found) = text.rsplit_once('=').ok_or_else(|| format!("rule `{text}` is not PATTERN={value}"))?;
    Ok((pattern.parse()?, found.parse()?))
}

/// Classes of layers, which other tools accept as targets.
const CLASSES: [&str; 5] = ["Linear", "Embedding", "Conv1d", "Conv1D", "Conv2d"];

/// The reason why a pattern matches no tensor, if it is the name of a class or of a tied head.
fn explain_pattern(error: Error, weights: &Weights) -> Error {
    let Error::NoMatch { field, pattern, .. } = &error else { return error };
    let has_embedding = || weights.by_name.keys().any(|name| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight"));
    let reason = match pattern.as_str() {
        name if CLASSES.contains(&name) => "is the name of a class, and patterns are names of tensors: without `targets`, linear weights are selected",
        name if name.trim_start_matches('*').starts_with("lm_head") && has_embedding() => {
            "is a head that is tied to the embedding table, and embeddings and heads are left unchanged by default: omit the pattern"
        }
        _ => return error,
    };
    Error::option(format!("{field}: {pattern}"), reason)
}

/// Selects the weights that match `targets`, or all `eligible` weights without `targets`, except for
/// those that match `ignore`. `rule` describes the eligible weights.
///
/// # Errors
/// If a pattern does not match any weight, or if no weight is selected.
pub fn select_weights<'a>(
    pass: &str,
    weights: &'a Weights,
    targets: &[Pattern],
    ignore: &[Pattern],
    rule: &str,
    eligible: impl Fn(&str, &Weight) -> bool,
) -> Result<SelectedWeights<'a>> {
    let selection = Selection { targets, ignore };
    let names = selection.resolve(weights.by_name.iter().map(|(name, weight)| (name, weight.readers.as_slice())), |name| {
        weights.by_name.get(name).is_some_and(|w| eligible(name, w))
    });
    let names = names.map_err(|error| explain_pattern(error, weights))?;
    if names.is_empty() {
        let convolutions = weights.by_name.iter().filter(|(name, weight)| is_convolution(name, weight)).count();
        let advice = match (pass, convolutions) {
            ("quantize-dynamic" | "quantize", 1..) if targets.is_empty() => {
                format!("{} can be quantized by `quantize-static` with calibration data", counted(convolutions, "convolution"))
            }
            _ => "list weights in `targets`; `compress inspect` prints their names".to_owned(),
        };
        let exempt = exempt_layers(weights.by_name.iter().map(|(name, weight)| (name.as_str(), weight)));
        let exempt = exempt.filter(|_| targets.is_empty()).map_or_else(String::new, |exempt| format!("; not selected: {exempt}"));
        return Err(Error::option(pass, format!("no weight is selected ({rule}){exempt}; {advice}")));
    }
    let list = |patterns: &[Pattern]| patterns.iter().map(Pattern::as_str).collect::<Vec<_>>().join(", ");
    let mut rule = if targets.is_empty() { rule.to_owned() } else { list(targets) };
    if !ignore.is_empty() {
        rule = format!("{rule}; without {}", list(ignore));
    }
    let unchanged = if targets.is_empty() { unchanged_layers(pass, weights, &names) } else { None };
    let notes = unchanged.map(|layers| format!("{pass} leaves unchanged: {layers}")).into_iter().collect();
    Ok(SelectedWeights { names, rule, notes })
}

/// Checks the patterns of the `rules` of a pass. The first rule that matches one of the selected `names`
/// applies to it, and every rule must apply to at least one.
///
/// # Errors
/// If a pattern does not match any weight, or if a rule has no effect.
pub(super) fn check_rules<'r>(pass: &str, rules: impl Iterator<Item = &'r [Pattern]>, weights: &Weights, names: &BTreeSet<&str>) -> Result<()> {
    let rules: Vec<&[Pattern]> = rules.collect();
    for patterns in &rules {
        select::check("rules", patterns, weights.by_name.keys())?;
    }
    let mut left = names.clone();
    for patterns in rules {
        let matched: BTreeSet<&str> = names.iter().copied().filter(|name| patterns.iter().any(|pattern| pattern.matches(name))).collect();
        if left.is_disjoint(&matched) {
            let reason = match matched.first() {
                Some(name) => format!("rules before it apply to all weights that it matches (the first: `{name}`); move it before them, or remove it"),
                None => "no selected weight matches it; add its weights to `targets`, remove them from `ignore`, or remove the rule".to_owned(),
            };
            let pattern = patterns.first().map_or("", Pattern::as_str);
            return Err(Error::option(format!("{pass}: rules"), format!("the rule of `{pattern}` has no effect: {reason}")));
        }
        left.retain(|name| !matched.contains(name));
    }
    Ok(())
}

/// Notes on rules that apply only to selected weights that a pass leaves unchanged. `modified` are the
/// weights that it modifies; the first rule that matches applies.
pub(super) fn unused_rules<'r, 'n>(pass: &str, rules: impl Iterator<Item = &'r [Pattern]>, modified: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut left: BTreeSet<&str> = modified.collect();
    let mut notes = Vec::new();
    for patterns in rules {
        let count = left.len();
        left.retain(|name| !patterns.iter().any(|pattern| pattern.matches(name)));
        if left.len() == count {
            let pattern = patterns.first().map_or("", Pattern::as_str);
            notes.push(format!("{pass}: the rule of `{pattern}` has no effect, because all weights that it applies to are left unchanged"));
        }
    }
    notes
}

/// Passes that process matrices, but not convolutions.
const MATRICES_ONLY: [&str; 3] = ["quantize", "quantize-dynamic", "decompose"];

/// Description of the layers that are not selected, and why.
fn unchanged_layers(pass: &str, weights: &Weights, selected: &BTreeSet<&str>) -> Option<String> {
    let others = || weights.by_name.iter().map(|(name, weight)| (name.as_str(), weight)).filter(|(name, _)| !selected.contains(name));
    let mut convolutions = others().filter(|(name, weight)| MATRICES_ONLY.contains(&pass) && is_convolution(name, weight));
    let convolutions = convolutions.next().map(|(first, _)| {
        let count = convolutions.count().saturating_add(1);
        format!("{} (the first: `{first}`), because the pass processes only matrices", counted(count, "convolution"))
    });
    let layers: Vec<String> = exempt_layers(others()).into_iter().chain(convolutions).chain(narrow_floats(others())).collect();
    (!layers.is_empty()).then(|| layers.join(", "))
}

/// Description of the weights with a float type of less than 16 bits, which passes do not process.
pub fn narrow_floats<'w>(weights: impl Iterator<Item = (&'w str, &'w Weight)>) -> Option<String> {
    let mut found = weights.filter(|(name, weight)| weight.is_narrow_float() && weight.shape.len() >= 2 && name.ends_with(".weight"));
    let (first, weight) = found.next()?;
    Some(format!("{} without scales in {} (the first: `{first}`)", counted(found.count().saturating_add(1), "weight"), weight.dtype))
}

/// A warning if a pass that quantizes only matrices leaves most of the parameters in convolutions.
pub fn unquantized_convolutions(pass: &str, weights: &Weights, targets: &[Pattern]) -> Option<String> {
    let elements = |weights: &mut dyn Iterator<Item = (&String, &Weight)>| weights.map(|(_, weight)| weight.elements()).sum::<usize>();
    let all = elements(&mut weights.by_name.iter().filter(|(_, weight)| weight.is_float()));
    let of_convolutions = elements(&mut weights.by_name.iter().filter(|(name, weight)| is_convolution(name, weight)));
    (targets.is_empty() && of_convolutions > all / 2).then(|| {
        let part = 100.0 * of_convolutions as f64 / all as f64;
        format!("{WARNING}{pass} quantizes only linear layers: {part:.0} % of the parameters are in convolutions, which stay floats; `quantize-static` with calibration data quantizes them")
    })
}

/// A note if the default selection leaves matrices of the model unchanged because of their names, since the
/// table of families does not contain it.
pub fn naming_note(pass: &str, model: &Model, targets: &[Pattern]) -> Option<String> {
    let model_type = model.config.model_type();
    let is_known = model_type.is_empty() || model.onnx.is_some() || arch::family(model_type).is_some();
    let is_exempt = |(name, weight): (&String, &Weight)| weight.shape.len() == 2 && name.ends_with(".weight") && weight.is_float() && !is_linear(name, weight);
    (targets.is_empty() && !is_known && model.weights.by_name.iter().any(is_exempt)).then(|| {
        format!("{pass}: `model_type` {model_type} is not in the table of families, so the unchanged layers were selected by their names; check that they are complete")
    })
}

/// A warning about weights that a file stores in quantized blocks, which a pass quantizes again.
pub fn requantized<'n>(pass: &str, weights: &Weights, names: impl Iterator<Item = &'n str>) -> Option<String> {
    // Checkpoints in formats of other tools may have been published only in this form.
    let stored = |name: &'n str| weights.by_name.get(name).filter(|weight| weight.original_format.is_none())?.stored_type;
    let types: Vec<&str> = names.filter_map(stored).filter(|stored| *stored != Weight::INTEGERS).collect();
    let first = types.first()?;
    Some(format!(
        "{WARNING}{pass}: the weights are quantized twice, with the errors of both: the file stores {} in blocks, such as {first}; start from the original checkpoint",
        counted(types.len(), "weight")
    ))
}

/// Checks that a weight consists of floats.
///
/// # Errors
/// If the weight is already quantized, or does not have a float dtype.
pub fn require_float_type(pass: &str, name: &str, weight: &Weight) -> Result<()> {
    if weight.encoding != Encoding::Dense {
        return Err(Error::tensor(
            name,
            format!("is already {}, but {pass} needs floats", weight.describe()),
            "quantize last, run `dequantize` before this pass, or add the tensor to `ignore`",
        ));
    }
    if !weight.is_float() {
        return Err(Error::tensor(name, format!("has the dtype {}, but {pass} needs F16, BF16, F32 or F64", weight.dtype), "add it to `ignore`"));
    }
    Ok(())
}

/// Checks that a weight can be processed as floats, of which there is at least one.
///
/// # Errors
/// As [`require_float_type`], and if the weight is empty.
pub fn require_float(pass: &str, name: &str, weight: &Weight) -> Result<()> {
    require_float_type(pass, name, weight)?;
    if weight.elements() == 0 {
        return Err(Error::tensor(name, format!("is empty (shape {:?})", weight.shape), "add it to `ignore`"));
    }
    Ok(())
}

/// Checks that a weight is a matrix of floats.
///
/// # Errors
/// As [`require_float`], and if the weight has another number of axes.
pub fn require_matrix(pass: &str, name: &str, weight: &Weight) -> Result<()> {
    require_float(pass, name, weight)?;
    if weight.shape.len() != 2 {
        let hint = if is_convolution(name, weight) {
            "add it to `ignore`, or use `quantize-static` with calibration data, which quantizes convolutions too"
        } else {
            "add it to `ignore`"
        };
        return Err(Error::tensor(name, format!("has the shape {:?}, but {pass} supports only matrices", weight.shape), hint));
    }
    Ok(())
}

/// Notes on selected layers that a pass does not support, by the reason: continues "the weight is".
/// `is_empty` is whether no other layer is selected.
///
/// # Errors
/// If `targets` names one of them without a wildcard, or if no other layer is selected.
pub fn left_unchanged(pass: &str, skipped: &BTreeMap<&str, Vec<&str>>, targets: &[Pattern], is_empty: bool) -> Result<Vec<String>> {
    for (reason, names) in skipped {
        if let Some(name) = names.iter().find(|name| targets.iter().any(|pattern| pattern.is_literal() && pattern.matches(name))) {
            return Err(Error::tensor(name, format!("is {reason}, which {pass} does not support"), "remove it from `targets`"));
        }
    }
    let all = |(reason, names): (&&str, &Vec<&str>)| {
        let first = names.first().copied().unwrap_or_default();
        format!("{reason}: {} (the first: `{first}`)", counted(names.len(), "weight"))
    };
    match skipped.iter().next().filter(|_| is_empty).map(all) {
        Some(first) => Err(Error::option(pass, format!("supports none of the selected layers: {first}"))),
        None => Ok(skipped.iter().map(|skipped| format!("{pass}: left unchanged, {}", all(skipped))).collect()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::store::DType;

    fn golden(name: &str) -> Weights {
        Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap().weights
    }

    #[test]
    fn unquantized_convolutions_are_a_warning() {
        for (name, warns) in [("resnet-basic", true), ("torchvision-mobilenet-v2", true), ("vit", false), ("bert", false), ("mixtral-fused", false)] {
            let note = unquantized_convolutions("quantize-dynamic", &golden(name), &[]);
            assert_eq!(note.as_ref().is_some_and(|note| note.starts_with(WARNING)), warns, "{name}: {note:?}");
        }
        assert_eq!(unquantized_convolutions("quantize-dynamic", &golden("resnet-basic"), &["classifier.*".parse().unwrap()]), None);
    }

    /// The first rule that matches applies.
    #[test]
    fn rules_without_effect_are_refused() {
        let weights = golden("llama");
        let names: BTreeSet<&str> = weights.by_name.keys().map(String::as_str).filter(|name| name.contains("mlp")).collect();
        let check = |rules: &[&str]| {
            let rules: Vec<Vec<Pattern>> = rules.iter().map(|pattern| vec![pattern.parse().unwrap()]).collect();
            check_rules("quantize", rules.iter().map(Vec::as_slice), &weights, &names).map_err(|error| error.to_string())
        };
        assert_eq!(check(&["*down_proj*", "*mlp*"]), Ok(()));
        for (rules, part) in [
            (["*mlp*", "*down_proj*"], "the rule of `*down_proj*` has no effect: rules before it apply to all weights"),
            (["*down_proj*", "*q_proj*"], "the rule of `*q_proj*` has no effect: no selected weight matches it"),
            (["*down_proj*", "*absent*"], "`*absent*` matches no tensor"),
        ] {
            let error = check(&rules).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn narrow_floats_are_noted() {
        let mut weights = golden("llama");
        let name = "model.layers.1.self_attn.q_proj.weight";
        weights.by_name.get_mut(name).unwrap().dtype = DType::F8_E4M3;
        let notes = select_weights("quantize", &weights, &[], &[], "", is_linear).unwrap().notes;
        let expected = format!("quantize leaves unchanged: the output head `lm_head.weight`, 1 weight without scales in F8_E4M3 (the first: `{name}`)");
        assert_eq!(notes, [expected]);
    }

    #[test]
    fn rules_for_unchanged_weights_are_noted() {
        let rules: Vec<Vec<Pattern>> = ["*query*", "*mlp*", "*down*"].iter().map(|pattern| vec![pattern.parse().unwrap()]).collect();
        let notes = unused_rules("quantize", rules.iter().map(Vec::as_slice), ["0.mlp.down", "0.mlp.up"].into_iter());
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("the rule of `*query*` has no effect") && notes[1].contains("`*down*`"), "{notes:?}");
    }

    /// Names are only in doubt if the configuration states a family that the table does not contain.
    #[test]
    fn unknown_families_are_noted() {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama");
        std::fs::copy(golden.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        for (config, noted) in [(None, false), (Some(r#"{"model_type": "unheard"}"#), true), (Some(r#"{"model_type": "llama"}"#), false)] {
            config.iter().for_each(|config| std::fs::write(folder.path().join("config.json"), config).unwrap());
            assert_eq!(naming_note("quantize", &Model::open(folder.path()).unwrap(), &[]).is_some(), noted, "{config:?}");
        }
    }

    /// Stacked experts have as many axes as one-dimensional convolutions.
    #[test]
    fn experts_are_not_convolutions() {
        let error = |name: &str| select_weights("quantize", &golden(name), &[], &["*".parse().unwrap()], "", |_, _| true).map(drop).unwrap_err().to_string();
        assert!(error("resnet-basic").contains("convolutions can be quantized by `quantize-static`"), "{}", error("resnet-basic"));
        assert!(!error("mixtral-fused").contains("convolution"), "{}", error("mixtral-fused"));
    }
}
