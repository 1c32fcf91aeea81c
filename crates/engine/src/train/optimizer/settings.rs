//! Hyperparameters of optimizers.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};

/// Hyperparameters. The defaults are those of PyTorch, and of transformers for Adafactor.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// AdamW and Muon: decay of the first moment.
    pub beta1: f64,
    /// AdamW and Muon: decay of the second moment.
    pub beta2: f64,
    /// AdamW and Muon: added to the square root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, multiplied by the learning rate; with SGD, L2 regularization that is
    /// added to the gradient.
    pub weight_decay: f64,
    /// Exempts parameters with at most one axis (biases, norm weights) from weight decay.
    pub exempt_vectors: bool,
    /// SGD and Muon: momentum.
    pub momentum: f64,
    /// SGD: Nesterov momentum.
    pub nesterov: bool,
    /// Adafactor: the decay of the second moment in step `t` is `1 - t^(-decay_power)`.
    pub decay_power: f64,
    /// Adafactor: maximum root mean square of an update, before the learning rate is applied.
    pub clip_threshold: f64,
    /// Adafactor: added to the squared gradient.
    pub square_epsilon: f64,
    /// Muon: names of the weights of linear layers, which are updated by the orthogonalized momentum.
    pub linear_weights: BTreeSet<String>,
    /// Rates of some parameters, by name.
    pub groups: BTreeMap<String, Rates>,
}

/// Learning rate and weight decay of a parameter that differ from those of others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Factor on the learning rate.
    pub factor: f64,
    /// Weight decay; `None` for that of other parameters.
    pub weight_decay: Option<f64>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            exempt_vectors: true,
            momentum: 0.0,
            nesterov: false,
            decay_power: 0.8,
            clip_threshold: 1.0,
            square_epsilon: 1e-30,
            linear_weights: BTreeSet::new(),
            groups: BTreeMap::new(),
        }
    }
}

impl Settings {
    /// Validates the hyperparameters.
    pub fn check(&self) -> Result<()> {
        let decays = [("beta1", self.beta1), ("beta2", self.beta2), ("momentum", self.momentum)];
        if let Some((name, value)) = decays.into_iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return Err(Error::option(name, format!("{value} is not at least 0 and less than 1")));
        }
        let amounts = [("epsilon", self.epsilon), ("weight_decay", self.weight_decay), ("square_epsilon", self.square_epsilon)];
        if let Some((name, value)) = amounts.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            return Err(Error::option(name, format!("{value} is not a finite number of at least 0")));
        }
        let positive = [("decay_power", self.decay_power), ("clip_threshold", self.clip_threshold)];
        if let Some((name, value)) = positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            return Err(Error::option(name, format!("{value} is not a finite number greater than 0")));
        }
        match self.nesterov && self.momentum == 0.0 {
            true => Err(Error::option("nesterov", "requires a `momentum` greater than 0")),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::{Kind, build};
    use super::*;
    use crate::exec::Placement;

    #[test]
    fn invalid_settings_are_rejected() {
        let wrong = [
            Settings { beta1: 1.0, ..Settings::default() },
            Settings { epsilon: f64::NAN, ..Settings::default() },
            Settings { clip_threshold: 0.0, ..Settings::default() },
            Settings { nesterov: true, ..Settings::default() },
        ];
        for settings in wrong {
            assert!(build(Kind::Sgd, &settings, &Placement::Memory(Device::Cpu)).err().unwrap().is_misuse(), "{settings:?}");
        }
        assert_eq!(serde_json::to_value(Kind::AdamW8bit).unwrap(), "adamw8bit");
        assert_eq!(serde_json::from_str::<Kind>("\"adamw\"").unwrap(), Kind::default());
    }
}
