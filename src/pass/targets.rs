//! Which weights a pass takes.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::model::exempt_layers;
use crate::store::{Encoding, Pattern, Selection, Weight, Weights};

/// The weights that a pass takes, and how they were chosen.
pub struct Chosen<'a> {
    /// Names.
    pub names: BTreeSet<&'a str>,
    /// In plain words.
    pub rule: String,
}

/// A rule of the command line, `PATTERN=VALUE`, where `value` names what stands behind the sign.
///
/// # Errors
/// It has no sign, or one of its sides cannot be read.
pub(super) fn parse_rule<T: FromStr<Err = String>>(text: &str, value: &str) -> Result<(Pattern, T), String> {
    let (pattern, found) = text.rsplit_once('=').ok_or_else(|| format!("rule `{text}` is not PATTERN={value}"))?;
    Ok((pattern.parse()?, found.parse()?))
}

/// Resolves a selection.
///
/// # Errors
/// A pattern matches nothing, or nothing at all is selected.
pub fn choose<'a>(
    pass: &str,
    weights: &'a Weights,
    targets: &[Pattern],
    ignore: &[Pattern],
    rule: &str,
    eligible: impl Fn(&str, &Weight) -> bool,
) -> Result<Chosen<'a>> {
    let selection = Selection { targets, ignore };
    let names = selection.resolve(weights.by_name.iter().map(|(name, weight)| (name, weight.readers.as_slice())), |name| {
        weights.by_name.get(name).is_some_and(|w| eligible(name, w))
    })?;
    if names.is_empty() {
        let convolutions = weights.by_name.values().filter(|weight| weight.shape.len() > 2 && weight.is_float()).count();
        let advice = match (pass, convolutions) {
            ("quantize-dynamic" | "quantize", 1..) if targets.is_empty() => {
                format!("this model has {convolutions} convolutions, which need `quantize-static` and calibration data")
            }
            _ => "name some in `targets`, `compress inspect` lists them".to_owned(),
        };
        return Err(Error::option(pass, format!("no weight is selected ({rule}); {advice}")));
    }
    let list = |patterns: &[Pattern]| patterns.iter().map(Pattern::as_str).collect::<Vec<_>>().join(", ");
    let mut rule = if targets.is_empty() { rule.to_owned() } else { list(targets) };
    let exempt = || exempt_layers(weights.by_name.iter().filter(|(name, _)| !names.contains(name.as_str())).map(|(name, weight)| (name.as_str(), weight)));
    if let Some(exempt) = (targets.is_empty() && pass.starts_with("quantize")).then(exempt).flatten() {
        rule = format!("{rule}; unchanged: {exempt}");
    }
    if !ignore.is_empty() {
        rule = format!("{rule}; without {}", list(ignore));
    }
    Ok(Chosen { names, rule })
}

/// Holds a selected weight to what a pass of floats can take.
///
/// # Errors
/// It is quantized already, empty, or not of a float type.
pub fn require_float(pass: &str, name: &str, weight: &Weight) -> Result<()> {
    if weight.encoding != Encoding::Dense {
        return Err(Error::tensor(
            name,
            format!("is {} already, {pass} works on floats", weight.describe()),
            "quantize last, put `dequantize` before it, or add the tensor to `ignore`",
        ));
    }
    if !weight.is_float() {
        return Err(Error::tensor(name, format!("is {}, {pass} works on F16, BF16, F32 and F64", weight.dtype), "add it to `ignore`"));
    }
    if weight.elements() == 0 {
        return Err(Error::tensor(name, format!("is empty, shape {:?}", weight.shape), "add it to `ignore`"));
    }
    Ok(())
}
