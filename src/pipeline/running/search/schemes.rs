//! Schemes of compressed-tensors.

use std::collections::BTreeMap;

use super::formats::{Formats, Unit, Writing, Written, retain};
use crate::arch;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pass::{self, Context, Method, Pass, Quantize, Scheme, SchemeRule, Score, Scores, WeightFormat};
use crate::report::format::natural;
use crate::run_state::RunState;
use crate::store::Pattern;

/// The schemes that a runtime loads. Schemes with other activations are not offered, because a layer would
/// then also change the inputs of others.
pub(super) struct Schemes {
    model: Model,
    formats: Vec<WeightFormat>,
    passes: Vec<Quantize>,
}

impl Schemes {
    /// These schemes and group sizes, in ascending order of bits.
    pub fn new(model: &Model, schemes: &[(Scheme, i64)]) -> Schemes {
        let pass = |(scheme, size): &(Scheme, i64)| Quantize { scheme: *scheme, group_size: Some(*size), method: Method::Gptq, ..Quantize::default() };
        let passes: Vec<Quantize> = schemes.iter().map(pass).collect();
        Schemes { model: model.clone(), formats: passes.iter().cloned().map(WeightFormat::Scheme).collect(), passes }
    }
}

impl Formats for Schemes {
    fn names(&self) -> Vec<String> {
        let name = |pass: &Quantize| pass.group_size.map_or_else(|| pass.scheme.name().to_owned(), |size| format!("{}:{size}", pass.scheme.name()));
        self.passes.iter().map(name).chain(["floats".to_owned()]).collect()
    }

    fn retain(&mut self, kept: &[bool]) {
        retain(&mut self.passes, kept);
        self.formats = self.passes.iter().cloned().map(WeightFormat::Scheme).collect();
    }

    fn scores(&self, context: &Context) -> Result<Scores> {
        pass::scores(&self.formats, &self.model, context)
    }

    fn sizes(&self) -> Result<Option<Scores>> {
        pass::sizes(&self.formats, &self.model).map(Some)
    }

    fn units(&self, scores: &Scores) -> Vec<Unit> {
        let mut units: BTreeMap<String, Unit> = BTreeMap::new();
        for (name, options) in &scores.by_weight {
            let Some(weight) = self.model.weights.by_name.get(name) else { continue };
            let floats = Some(Score { loss: 0.0, bytes: weight.value_bytes() });
            let unit_name = unit_of(self.model.config.model_type(), name);
            let unit = units.entry(unit_name.clone()).or_insert_with(|| Unit::new(unit_name, options.len() + 1));
            unit.add(name, weight, options.iter().chain([&floats]).copied());
        }
        let mut units: Vec<Unit> = units.into_values().collect();
        units.sort_by(|a, b| natural(&a.name, &b.name));
        units
    }

    fn other_bytes(&self, units: &[Unit]) -> u64 {
        let weights = &self.model.weights.by_name;
        let searched: u64 = units.iter().flat_map(|unit| &unit.weights).filter_map(|name| weights.get(name)).map(|weight| weight.value_bytes()).sum();
        weights.values().map(|weight| weight.value_bytes()).sum::<u64>() - searched
    }

    /// Uniform schemes that all units have.
    fn references(&self, units: &[Unit]) -> Result<Vec<(String, Vec<usize>)>> {
        let has = |format: &usize| units.iter().all(|unit| unit.options[*format].is_some());
        let named = self.names().into_iter().enumerate().take(self.passes.len());
        Ok(named.filter(|(format, _)| has(format)).map(|(format, name)| (name, vec![format; units.len()])).collect())
    }

    fn rounded(&self, units: &[Unit], options: &[usize], _scores: &Scores, _context: &Context) -> Result<Option<Written>> {
        let pass = pass_of(&self.passes, units, options, Method::Rtn)?;
        pass.map(|pass| Ok(Written { model: pass.plan(&self.model, &RunState::default())?.model, bytes: None })).transpose()
    }

    fn writing(&self, units: &[Unit], options: &[usize], method: Option<Method>) -> Result<Option<Writing>> {
        let pass = pass_of(&self.passes, units, options, method.unwrap_or(Method::Gptq))?;
        Ok(pass.map(|pass| Writing { passes: vec![pass.into()], exports: Vec::new() }))
    }
}

/// Name of the unit of a weight: the fused layer, or all experts of a layer.
fn unit_of(model_type: &str, name: &str) -> String {
    match name.split_once(".experts.") {
        Some((layer, _)) => format!("{layer}.experts"),
        None => arch::fused_layer(model_type, name),
    }
}

/// The pass that quantizes the units in the formats with these indices; `None` if all are floats. Its scheme
/// is the one of most weights; the others have rules.
fn pass_of(passes: &[Quantize], units: &[Unit], options: &[usize], method: Method) -> Result<Option<Quantize>> {
    let mut weights: Vec<Vec<Pattern>> = vec![Vec::new(); passes.len() + 1];
    for (unit, option) in units.iter().zip(options) {
        for name in &unit.weights {
            weights[*option].push(name.parse().map_err(|e| Error::option("auto", e))?);
        }
    }
    let floats = weights.pop().unwrap_or_default();
    let most = weights.iter().enumerate().max_by_key(|(at, weights)| (weights.len(), usize::MAX - at)).filter(|(_, weights)| !weights.is_empty());
    let Some((most, _)) = most else { return Ok(None) };
    let rules = weights.into_iter().zip(passes).enumerate().filter(|(at, (weights, _))| *at != most && !weights.is_empty());
    let rules = rules.map(|(_, (targets, pass))| SchemeRule { targets, scheme: pass.scheme, group_size: pass.group_size });
    let (scheme, group_size) = (passes[most].scheme, passes[most].group_size);
    Ok(Some(Quantize { scheme, group_size, rules: rules.collect(), method, ignore: floats, ..Quantize::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_has_a_rule_for_each_other_scheme() {
        let passes = [(Scheme::W4A16, 128), (Scheme::W4A16, 32), (Scheme::W8A16, 32)];
        let passes = passes.map(|(scheme, size)| Quantize { scheme, group_size: Some(size), ..Quantize::default() });
        let (last, floats) = (passes.len() - 1, passes.len());
        let unit = |name: &str, weights: usize| Unit {
            name: name.to_owned(),
            weights: (0..weights).map(|at| format!("{name}.{at}.weight")).collect(),
            ..Unit::new(String::new(), 0)
        };
        let units = [unit("a", 1), unit("b", 3), unit("c", 1)];
        let pass = pass_of(&passes, &units, &[0, last, floats], Method::Gptq).unwrap().unwrap();
        assert_eq!((pass.scheme, pass.method, pass.rules.len()), (passes[last].scheme, Method::Gptq, 1));
        assert!(pass.rules[0].targets[0].matches("a.0.weight") && pass.ignore[0].matches("c.0.weight"));
        assert!(pass_of(&passes, &units, &[floats; 3], Method::Gptq).unwrap().is_none());
    }

    #[test]
    fn experts_of_a_layer_are_one_unit() {
        let names = ["model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.mlp.experts.7.w2.weight"].map(|name| unit_of("mixtral", name));
        assert_eq!(names[0], names[1]);
        assert_eq!(unit_of("llama", "model.layers.0.self_attn.q_proj.weight"), unit_of("llama", "model.layers.0.self_attn.v_proj.weight"));
        assert_ne!(unit_of("llama", "model.layers.0.self_attn.q_proj.weight"), unit_of("llama", "model.layers.1.self_attn.q_proj.weight"));
    }
}
