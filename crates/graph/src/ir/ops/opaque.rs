//! Subgraphs that no op represents, executed by an external function.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, FakeQuantize, OpSpec};
use crate::ir::{Dim, TensorType};

/// An external function of tensors.
pub trait Function: fmt::Debug + Send + Sync {
    /// The shape of the output for inputs of these shapes.
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>, String>;
    /// Whether the shape of the output depends on the values of the inputs. No node reads such an output.
    fn has_open_shape(&self) -> bool {
        false
    }
    /// Computes the output.
    fn run(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor>;
    /// The function with quantized inputs of layers within it, by the names of the weights.
    fn with_quantizers(&self, _quantizers: &BTreeMap<String, FakeQuantize>) -> Result<Arc<dyn Function>, String> {
        Err("has no layers whose inputs can be quantized".into())
    }
    /// For downcasts by the code that created the function.
    fn as_any(&self) -> &dyn Any;
}

/// An external function without a description of its computation. The text form of a graph omits the
/// function and keeps the types.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Opaque {
    /// Description for messages.
    pub label: String,
    /// Types of the inputs.
    pub inputs: Vec<TensorType>,
    /// Type of the output for inputs of these types.
    pub output: Option<TensorType>,
    /// Quantizers of the inputs of layers within the subgraph, by the names of the weights.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub quantizers: BTreeMap<String, FakeQuantize>,
    /// The function.
    #[serde(skip)]
    pub function: Option<Arc<dyn Function>>,
}

impl PartialEq for Opaque {
    fn eq(&self, other: &Self) -> bool {
        self.is_same_subgraph(other) && self.quantizers == other.quantizers
    }
}

impl Opaque {
    /// Whether the subgraphs are equal except for quantizers.
    pub fn is_same_subgraph(&self, other: &Opaque) -> bool {
        (&self.label, &self.inputs, &self.output) == (&other.label, &other.inputs, &other.output)
    }

    /// The subgraph with quantized inputs of layers within it, by the names of the weights.
    pub fn with_quantizers(mut self, quantizers: BTreeMap<String, FakeQuantize>) -> Result<Opaque, String> {
        if let Some(function) = self.function.as_ref().filter(|_| !quantizers.is_empty()) {
            self.function = Some(function.with_quantizers(&quantizers)?);
        }
        self.quantizers = quantizers;
        Ok(self)
    }

    /// Whether the shape of the output depends on the values of the inputs. No node reads such an output.
    pub fn has_open_shape(&self) -> bool {
        self.function.as_ref().is_some_and(|function| function.has_open_shape())
    }

    fn lost<T>(&self) -> Result<T, String> {
        Err(format!("{} can only be computed from the .onnx file that contains it", self.label))
    }
}

impl OpSpec for Opaque {
    fn arity(&self) -> Range<usize> {
        self.inputs.len()..self.inputs.len().saturating_add(1)
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let Some(output) = &self.output else { return self.lost() };
        let alike = |(given, known): (&&TensorType, &TensorType)| given.element == known.element && given.shape.len() == known.shape.len();
        if let Some((given, known)) = inputs.iter().zip(&self.inputs).find(|(given, known)| !alike((given, known))) {
            return Err(format!("it requires {known}, got {given}"));
        }
        let sizes: Option<Vec<Vec<usize>>> = inputs.iter().map(|ty| ty.shape.iter().map(Dim::fixed).collect()).collect();
        match (sizes, &self.function) {
            _ if self.has_open_shape() || inputs.iter().zip(&self.inputs).all(|(given, known)| **given == *known) => Ok(output.clone()),
            (Some(sizes), Some(function)) => Ok(TensorType { element: output.element, shape: function.shape(&sizes)?.into_iter().map(Dim::Fixed).collect() }),
            (Some(_), None) => self.lost(),
            (None, _) => Ok(output.clone()),
        }
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let held = |rank: usize| vec!["_"; rank].join(" ");
        let inputs: Vec<String> = inputs.iter().map(|ty| held(ty.shape.len())).collect();
        format!("{} -> {}", inputs.join(", "), held(self.output.as_ref().map_or(0, |ty| ty.shape.len())))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        match &self.function {
            Some(function) => function.run(inputs),
            None => self.lost().map_err(super::shape_error),
        }
    }

    fn backward(&self, _backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        candle_core::bail!("{} has no gradient: layers before it cannot be trained", self.label)
    }
}
