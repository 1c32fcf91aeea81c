//! Initial values of new weights, as transformers and torchvision initialize them.

use crate::arch;
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Op, ValueId};
use crate::model::Config;
use crate::store::header::element_count;
use crate::store::{Computed, Weight};

/// Elements of a new weight at most.
const LARGEST: u64 = 1 << 32;

/// Creates the parameters of a graph for which `is_fresh` returns true, from a seed. `what` names the
/// option in errors.
///
/// # Errors
/// A shape is not known, or a weight is too large.
pub(in crate::pass) fn fresh_weights(graph: &Graph, config: &Config, seed: u64, what: &str, is_fresh: impl Fn(&str) -> bool) -> Result<Vec<(String, Weight)>> {
    let wrong = |reason| Error::option(what, reason);
    let setting = |key: &str| config.get(key).and_then(serde_json::Value::as_f64);
    let deviation = setting("initializer_range").unwrap_or(0.02);
    let default = arch::family(config.model_type()).map_or(1.0, |family| family.layer_scale);
    let layer_scale = setting("layerscale_value").or(setting("layer_scale_init_value")).unwrap_or(default);
    let mut weights = Vec::new();
    for (number, (id, value)) in graph.params().enumerate().filter(|(_, (_, value))| is_fresh(&value.name)) {
        let shape: Option<Vec<usize>> = value.ty.shape.iter().map(Dim::fixed).collect();
        let shape = shape.ok_or_else(|| wrong(format!("the shape of `{}` is not known", value.name)))?;
        let elements = element_count(&shape).filter(|count| *count <= LARGEST);
        let elements = elements.ok_or_else(|| wrong(format!("`{}` of shape {shape:?} would have more than {LARGEST} elements", value.name)))?;
        let filling = filling(graph, id, &shape, (deviation, layer_scale));
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64);
        weights.push((value.name.clone(), Computed { values: move || Ok(filling.values(elements as usize, random)) }.weight(shape)));
    }
    Ok(weights)
}

/// The values of a new weight.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Filling {
    Constant(f32),
    /// Normally distributed with this deviation.
    Normal(f64),
}

/// The initialization in transformers and torchvision: normal matrices, and convolutions by their fan-in
/// (He et al., 2015).
fn filling(graph: &Graph, id: ValueId, shape: &[usize], (deviation, layer_scale): (f64, f64)) -> Filling {
    let consumer = graph.nodes().iter().find_map(|node| Some((&node.op, node.inputs.iter().position(|input| *input == id)?)));
    match consumer {
        Some((Op::RmsNorm(op), _)) => Filling::Constant((1.0 - op.offset) as f32),
        Some((Op::LayerNorm(_) | Op::BatchNorm(_), at)) => Filling::Constant(if at == 1 || at == 4 { 1.0 } else { 0.0 }),
        Some((Op::Conv(_), 1)) => Filling::Normal((2.0 / shape[1..].iter().product::<usize>().max(1) as f64).sqrt()),
        Some((Op::Mul(_), _)) if shape.len() == 1 => Filling::Constant(layer_scale as f32),
        _ if shape.len() > 1 => Filling::Normal(deviation),
        _ => Filling::Constant(0.0),
    }
}

impl Filling {
    fn values(self, count: usize, seed: u64) -> Vec<f32> {
        match self {
            Filling::Constant(value) => vec![value; count],
            Filling::Normal(deviation) => {
                let mut random = fastrand::Rng::with_seed(seed);
                // Box and Muller, 1958: one of the two numbers.
                let mut next = || (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos();
                (0..count).map(|_| (deviation * next()) as f32).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_weights_have_the_requested_deviation() {
        let values = Filling::Normal(0.5).values(20_000, 1);
        let (mean, square) = values.iter().fold((0.0, 0.0), |(m, s), v| (m + f64::from(*v), s + f64::from(v * v)));
        assert!((mean / 20_000.0).abs() < 0.02 && (square / 20_000.0 - 0.25).abs() < 0.01);
        assert_eq!(values, Filling::Normal(0.5).values(20_000, 1));
    }
}
