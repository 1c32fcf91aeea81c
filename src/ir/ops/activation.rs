//! Functions of single elements.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Mode, OpSpec, require, require_arity};
use crate::ir::{Element, TensorType};

macro_rules! activation {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident : $ty:ty = $default:expr),* $(,)? }, |$op:ident, $x:ident| $eval:expr) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $ty,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }

        impl OpSpec for $name {
            fn arity(&self) -> Range<usize> {
                1..2
            }

            fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
                require_arity(self, inputs)?;
                require(inputs[0], Element::Float, "the input")?;
                Ok(inputs[0].clone())
            }

            fn axes(&self, _inputs: usize) -> String {
                "* c -> * c".into()
            }

            fn eval(&self, inputs: &[Tensor], _mode: Mode) -> candle_core::Result<Tensor> {
                let ($op, $x) = (self, &inputs[0]);
                let _ = $op;
                $eval
            }
        }
    };
}

activation!(
    /// `max(x, 0)`
    Relu {}, |op, x| x.relu()
);
activation!(
    /// `x Φ(x)` with the normal distribution's Φ (Hendrycks and Gimpel, 2016).
    Gelu {
        /// Whether Φ is approximated by a hyperbolic tangent.
        tanh: bool = false,
    }, |op, x| if op.tanh { x.gelu() } else { x.gelu_erf() }
);
activation!(
    /// `x · sigmoid(x)`
    Silu {}, |op, x| x.silu()
);
activation!(
    /// `1 / (1 + exp(-x))`
    Sigmoid {}, |op, x| candle_nn::ops::sigmoid(x)
);
activation!(
    /// Hyperbolic tangent.
    Tanh {}, |op, x| x.tanh()
);
activation!(
    /// Values held between two bounds; 0 and 6 make a ReLU6.
    Clip {
        /// Lower bound.
        min: f64 = 0.0,
        /// Upper bound.
        max: f64 = 6.0,
    }, |op, x| x.clamp(op.min, op.max)
);
