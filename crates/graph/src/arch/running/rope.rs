//! Rotary position embeddings, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
//! (transformers 4).

use super::Settings;
use crate::arch::{check_rope_keys, long_rope_attention};
use crate::error::{Error, Result};
use crate::ir::ops::{Concat, Rotary, RotaryScaling, Slice};
use crate::ir::{Builder, ValueId};

/// Defaults of a family for missing keys.
#[derive(Debug, Clone, Copy)]
pub struct RopeDefaults {
    /// Base of the frequencies.
    pub theta: f64,
    /// Key of the fraction of a head that is rotated, with its default; `None` if the family always
    /// rotates the entire head.
    pub partial: Option<(&'static str, f64)>,
    /// Longest sequence of the original training; `None` to use `max_position_embeddings`.
    pub original: Option<usize>,
    /// Whether positions may have three axes, which are equal in texts without images (Qwen2-VL).
    pub has_sections: bool,
}

impl Default for RopeDefaults {
    fn default() -> Self {
        Self { theta: 10_000.0, partial: None, original: None, has_sections: false }
    }
}

/// The parameters of rotary embeddings, under the key of transformers 5 or 4.
pub fn parameters<'c>(s: &Settings<'c>) -> Result<Option<Settings<'c>>> {
    check_rope_keys(|key| s.get(key))?;
    let group = |key| s.get(key).map(|_| s.group_or_empty(key)).transpose();
    Ok(group("rope_parameters")?.or(group("rope_scaling")?))
}

/// Fails if a configuration does not specify the base, of which versions of transformers have different
/// defaults.
pub fn require_theta(s: &Settings) -> Result<()> {
    if s.get("rope_theta").is_some() || s.get("rope_parameters").is_some() {
        return Ok(());
    }
    Err(Error::graph("config.json", "has neither `rope_parameters` nor `rope_theta`"))
}

/// The rotary embedding for heads of this width.
pub fn rotary(s: &Settings, head_dim: usize, defaults: RopeDefaults) -> Result<Rotary> {
    let base = s.group("rope_parameters").filter(|p| p.get("rope_theta").is_some()).unwrap_or(*s);
    let theta = base.number_or("rope_theta", defaults.theta)?;
    scaled(s, parameters(s)?, theta, head_dim, defaults)
}

/// The rotary embedding with this base and the scaling in `parameters`.
pub fn scaled(s: &Settings, parameters: Option<Settings>, theta: f64, head_dim: usize, defaults: RopeDefaults) -> Result<Rotary> {
    let turned = rotary_dim(s, parameters, head_dim, defaults)?;
    let width = Some(turned).filter(|turned| *turned != head_dim);
    if defaults.has_sections {
        // Texts without images do not depend on the axes of elements.
        parameters.iter().for_each(|p| ["mrope_section", "mrope_interleaved"].iter().for_each(|key| p.mark(key)));
    }
    let Some(p) = parameters else { return Ok(Rotary { theta, scaling: RotaryScaling::None, width }) };
    s.mark("max_position_embeddings");
    // Without a default, because those of architectures differ.
    let max_position = || s.size("max_position_embeddings");
    let original = || {
        let key = "original_max_position_embeddings";
        match [*s, p].map(|group| group.get(key).map(|_| group.size(key))) {
            [Some(size), _] | [None, Some(size)] => size,
            [None, None] => defaults.original.map_or_else(max_position, Ok),
        }
    };
    let scaling = match kind(&p)? {
        "default" => RotaryScaling::None,
        "mrope" if defaults.has_sections => RotaryScaling::None,
        "linear" => RotaryScaling::Linear { factor: p.number("factor")? },
        "dynamic" => RotaryScaling::Dynamic { factor: p.number("factor")?, max_position: max_position()? },
        "llama3" => {
            RotaryScaling::Llama3 { factor: p.number("factor")?, low: p.number("low_freq_factor")?, high: p.number("high_freq_factor")?, original: original()? }
        }
        "yarn" => {
            let factor = p.number("factor")?;
            RotaryScaling::Yarn {
                factor,
                beta_fast: p.number_or("beta_fast", 32.0)?,
                beta_slow: p.number_or("beta_slow", 1.0)?,
                original: original()?,
                attention: attention_factor(&p, factor)?,
                truncate: p.flag_or("truncate", true)?,
            }
        }
        "longrope" | "su" => {
            let original = original()?;
            let factor = if p.get("factor").is_some() { p.number("factor")? } else { max_position()? as f64 / original as f64 };
            let attention = p.number_or("attention_factor", long_rope_attention(factor, original as f64))?;
            RotaryScaling::LongRope { short: p.numbers("short_factor")?, long: p.numbers("long_factor")?, original, attention }
        }
        other => {
            return Err(Error::Unsupported {
                what: format!("rope scaling `{other}`"),
                hint: "supported: default, linear, dynamic, llama3, yarn, longrope".into(),
            });
        }
    };
    if turned < 4 && matches!(scaling, RotaryScaling::Dynamic { .. }) {
        return Err(Error::graph("config.json", "dynamic rope scaling needs heads of at least 4 elements"));
    }
    Ok(Rotary { theta, scaling, width })
}

/// The kind of scaling.
pub fn kind<'c>(p: &Settings<'c>) -> Result<&'c str> {
    p.text_or("rope_type", p.text_or("type", "default")?)
}

/// The rotary embedding of layers of one type: from the parameters under its name, the base under the key
/// of an older version with its default, and a separate scaling.
pub fn by_layer_type<'c>(
    s: &Settings<'c>,
    layers: &'static str,
    (key, default): (&str, f64),
    head_dim: usize,
    scaling: Option<Settings<'c>>,
    defaults: RopeDefaults,
) -> Result<Rotary> {
    let all = s.group("rope_parameters");
    if all.is_some_and(|all| all.get("rope_type").is_some()) {
        return Err(Error::graph("config.json", "`rope_parameters` has a `rope_type` for all layers, expected `full_attention` and `sliding_attention`"));
    }
    let own = all.and_then(|all| all.group(layers));
    let theta = match own.filter(|own| own.get("rope_theta").is_some()) {
        Some(own) => own.number("rope_theta")?,
        None if s.is_null(key) => return Err(Error::graph("config.json", format!("`{key}` is null, expected a number"))),
        None => s.number_or(key, default)?,
    };
    if scaling.is_some_and(|p| p.get("rope_type").is_none()) {
        return Err(Error::graph("config.json", "`rope_scaling` has no `rope_type`"));
    }
    let plain = |own: Settings| own.text_or("rope_type", "default").is_ok_and(|kind| kind == "default");
    if let (Some(_), Some(own)) = (scaling, own)
        && !plain(own)
    {
        return Err(Error::Unsupported {
            what: "config.json: `rope_scaling` in addition to scaling in `rope_parameters`".into(),
            hint: "keep the correct one and remove the other".into(),
        });
    }
    scaled(s, scaling.or(own), theta, head_dim, defaults)
}

/// Number of elements of a head that are rotated.
fn rotary_dim(s: &Settings, parameters: Option<Settings>, head_dim: usize, defaults: RopeDefaults) -> Result<usize> {
    const KEY: &str = "partial_rotary_factor";
    let specified = parameters.filter(|p| p.get(KEY).is_some());
    let Some((key, default)) = defaults.partial else {
        return match specified.map_or(Ok(1.0), |p| p.number(KEY))? {
            1.0 => Ok(head_dim),
            _ => Err(Error::Unsupported { what: "a partial rotary embedding".into(), hint: "partial_rotary_factor must be 1".into() }),
        };
    };
    let part = specified.map_or_else(|| s.number_or(key, default), |p| p.number(KEY))?;
    let turned = (head_dim as f64 * part) as usize;
    if !(0.0..=1.0).contains(&part) || turned == 0 || !turned.is_multiple_of(2) {
        return Err(Error::graph(
            "config.json",
            format!("`{key}` of {part} rotates {turned} of {head_dim} elements of a head, expected an even number of them"),
        ));
    }
    Ok(turned)
}

/// Reorders heads so that a [`Rotary`] over their first `width` elements, or all, rotates pairs of
/// neighbors: even elements, odd elements, and the rest. The same order of queries and keys does not
/// change their products.
pub fn neighbors(b: &mut Builder, node: &str, heads: ValueId, width: Option<usize>) -> Result<ValueId> {
    let all = b.width(heads)?;
    let turned = width.unwrap_or(all);
    let mut parts = pairs(b, node, heads, 0, turned)?.to_vec();
    if let Some(rest) = all.checked_sub(turned).filter(|rest| *rest > 0) {
        parts.push(b.node(&format!("{node}_plain"), Slice::last_axis(turned, rest), &[heads])?);
    }
    b.node(&format!("{node}_pairs"), Concat::default(), &parts)
}

/// Even and odd elements, which are rotated as pairs.
pub fn pairs(b: &mut Builder, node: &str, x: ValueId, from: usize, width: usize) -> Result<[ValueId; 2]> {
    let mut every_second = |name: &str, start: usize| b.node(&format!("{node}_{name}"), Slice { step: 2, ..Slice::last_axis(start, width.div_ceil(2)) }, &[x]);
    Ok([every_second("even", from)?, every_second("odd", from.saturating_add(1))?])
}

/// Attention scaling of YaRN for longer sequences.
fn yarn_scale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// The factor on queries and on keys, for families that include it in the attention scale.
pub fn attention_scale(p: &Settings) -> Result<f64> {
    let all = p.number_or("mscale_all_dim", 0.0)?;
    if all == 0.0 || kind(p)? == "default" { Ok(1.0) } else { Ok(yarn_scale(p.number("factor")?, all)) }
}

fn attention_factor(p: &Settings, factor: f64) -> Result<f64> {
    if p.get("attention_factor").is_some() {
        return p.number("attention_factor");
    }
    let scale = |m: f64| yarn_scale(factor, m);
    let (mscale, all) = (p.number_or("mscale", 0.0)?, p.number_or("mscale_all_dim", 0.0)?);
    Ok(if mscale != 0.0 && all != 0.0 { scale(mscale) / scale(all) } else { scale(1.0) })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn scaling(config: &Value) -> Result<RotaryScaling> {
        let Some(values) = config.as_object() else { return Err(Error::graph("config.json", "is not an object")) };
        rotary(&Settings::new(values), 16, RopeDefaults::default()).map(|rotary| rotary.scaling)
    }

    /// Default lengths of architectures differ.
    #[test]
    fn scaling_that_depends_on_the_length_requires_it() {
        let yarn = json!({ "rope_type": "yarn", "factor": 2.0 });
        for scaled in
            [yarn.clone(), json!({ "rope_type": "dynamic", "factor": 2.0 }), json!({ "type": "longrope", "short_factor": [1.0], "long_factor": [1.0] })]
        {
            let error = scaling(&json!({ "rope_scaling": scaled })).unwrap_err().to_string();
            assert!(error.contains("`max_position_embeddings` is missing"), "{error}");
            scaling(&json!({ "max_position_embeddings": 64, "rope_scaling": scaled })).unwrap();
        }
        let original = |outer: Value, inner: Value| {
            let mut config = json!({ "max_position_embeddings": 64, "original_max_position_embeddings": outer, "rope_scaling": yarn });
            config["rope_scaling"]["original_max_position_embeddings"] = inner;
            match scaling(&config).unwrap() {
                RotaryScaling::Yarn { original, .. } => original,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(original(Value::Null, Value::Null), 64);
        assert_eq!(original(Value::Null, 32.into()), 32);
        assert_eq!(original(16.into(), 32.into()), 16);
        assert!(matches!(scaling(&json!({ "rope_scaling": { "rope_type": "linear", "factor": 2.0 } })), Ok(RotaryScaling::Linear { .. })));
    }
}
