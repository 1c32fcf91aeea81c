//! Statistics of the batch, with which batch normalization is trained.

use candle_core::Tensor;

use crate::error::{Error, Result, counted};
use crate::ir::{Graph, Node, ops};

/// Mean and unbiased variance of the input of a batch normalization, by the names of its running statistics.
/// Fails if a channel has a single value, whose variance is 0.
pub(super) fn moments(graph: &Graph, node: &Node, x: &Tensor) -> Result<Vec<(String, Tensor)>> {
    let name = |at: usize| node.inputs.get(at).map(|id| graph.value(*id).name.clone()).unwrap_or_default();
    let failed = |e: candle_core::Error| Error::candle("statistics of a batch", e);
    let count = x.elem_count() / x.dim(1).map_err(failed)?.max(1);
    if count < 2 {
        let shape = x.dims();
        let samples = counted(shape.first().copied().unwrap_or(0), "sample");
        return Err(Error::run(
            format!("batch normalization `{}`", graph.value(node.output).name),
            format!("needs at least 2 values per channel in training, but its input has the shape {shape:?} in a batch of {samples}"),
            "use a larger `batch_size` with as many samples, larger images, or `batch_norm: fixed`",
        ));
    }
    let compute = || {
        let (mean, variance) = ops::moments(x)?;
        let count = count as f64;
        Ok(vec![(name(3), mean), (name(4), variance.affine(count / (count - 1.0), 0.0)?)])
    };
    compute().map_err(failed)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::exec::transfer;

    #[test]
    fn channels_with_a_single_value_are_rejected() {
        let graph: Graph = "input x: float[batch, 2, 1, 1]\nparam a: float[2]\nparam b: float[2]\nparam mean: float[2]\nparam variance: float[2]\n\
                            y = BatchNorm{\"batch\":true}(x, a, b, mean, variance) -> float[batch, 2, 1, 1]\noutput y = y\n"
            .parse()
            .unwrap();
        let of = |samples: usize| {
            moments(&graph, &graph.nodes()[0], &Tensor::arange(0f32, 2.0 * samples as f32, &Device::Cpu).unwrap().reshape((samples, 2, 1, 1)).unwrap())
        };
        let error = of(1).unwrap_err();
        assert!(error.to_string().contains("`y`") && error.to_string().contains("[1, 2, 1, 1] in a batch of 1 sample"), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("`batch_norm: fixed`")), "{error}");
        let [(mean, _), (variance, unbiased)] = &of(2).unwrap()[..] else { panic!("two statistics") };
        assert_eq!((mean.as_str(), variance.as_str(), transfer::read::<f32>(unbiased).unwrap()), ("mean", "variance", vec![2.0, 2.0]));
    }
}
