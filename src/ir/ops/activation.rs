//! Functions of single elements.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::host::activated;
use super::{Mode, OpSpec, require, require_arity};
use crate::ir::{Element, TensorType};
use crate::kernel::activation::Activation;

macro_rules! activation {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident : $ty:ty = $default:expr),* $(,)? }, |$op:ident, $x:ident| $kernel:expr, $eval:expr) => {
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

            fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
                if mode == Mode::Infer
                    && let Some(y) = activated(&inputs[0], self.kernel())
                {
                    return y;
                }
                let ($op, $x) = (self, &inputs[0]);
                let _ = $op;
                $eval
            }
        }

        impl $name {
            /// The function, as the kernels know it.
            pub fn kernel(&self) -> Activation {
                let $op = self;
                let _ = $op;
                $kernel
            }
        }
    };
}

activation!(
    /// `max(x, 0)`
    Relu {}, |op, x| Activation::Relu, x.relu()
);
activation!(
    /// `x Φ(x)` with the normal distribution's Φ (Hendrycks and Gimpel, 2016).
    Gelu {
        /// Whether Φ is approximated by a hyperbolic tangent.
        tanh: bool = false,
    }, |op, x| if op.tanh { Activation::GeluTanh } else { Activation::Gelu }, if op.tanh { x.gelu() } else { x.gelu_erf() }
);
activation!(
    /// `x · sigmoid(x)`
    Silu {}, |op, x| Activation::Silu, x.silu()
);
activation!(
    /// `1 / (1 + exp(-x))`
    Sigmoid {}, |op, x| Activation::Sigmoid, candle_nn::ops::sigmoid(x)
);
activation!(
    /// Hyperbolic tangent.
    Tanh {}, |op, x| Activation::Tanh, x.tanh()
);
activation!(
    /// Values held between two bounds; 0 and 6 make a ReLU6.
    Clip {
        /// Lower bound.
        min: f64 = 0.0,
        /// Upper bound.
        max: f64 = 6.0,
    }, |op, x| Activation::Clip { min: op.min as f32, max: op.max as f32 }, x.clamp(op.min, op.max)
);
