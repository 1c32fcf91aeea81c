//! Decoders that take keys and values of earlier tokens, under the names of [`ir::decoder`](crate::ir::decoder).

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::Session;
use crate::error::{Error, Result};
use crate::ir::Port;
use crate::ir::decoder::{MASK, POSITIONS, TOKENS, successor};

/// What a decoder keeps of the tokens that it has seen.
#[derive(Debug, Clone, Default)]
pub struct KeptTokens {
    /// Keys and values, by the input that takes them.
    values: BTreeMap<String, Tensor>,
}

fn computed(e: candle_core::Error) -> Error {
    Error::computed("a decoder with a cache", e)
}

/// Whether an input is for keys and values of earlier tokens.
fn is_past(port: &Port) -> bool {
    successor(&port.name).is_some()
}

impl Session {
    /// Whether the model takes keys and values of earlier tokens.
    pub fn keeps(&self) -> bool {
        self.ports().0.iter().any(is_past)
    }

    /// What people give to the model and take from it: of a decoder with a cache, nothing that the cache is made of.
    pub fn public_ports(&self) -> (Vec<Port>, Vec<Port>) {
        let (mut inputs, mut outputs) = self.ports();
        let kept: Vec<String> = inputs.iter().filter_map(|port| successor(&port.name)).collect();
        if !kept.is_empty() {
            inputs.retain(|port| !is_past(port) && port.name != POSITIONS);
            outputs.retain(|port| !kept.contains(&port.name));
        }
        (inputs, outputs)
    }

    /// Runs tokens `[batch, sequence]` that stand behind those which were seen, with the mask of all; then they were seen too. Positions are
    /// counted over tokens that are no padding.
    ///
    /// # Errors
    /// As [`run`](Session::run), or there are no tokens, or no mask for all of them.
    pub fn run_next(&mut self, inputs: &BTreeMap<String, Tensor>, seen: &mut KeptTokens) -> Result<BTreeMap<String, Tensor>> {
        let missing = |name: &str| Error::option("input", format!("`{name}` is missing, and decoders with a cache take it"));
        let (batch, count) = inputs.get(TOKENS).ok_or_else(|| missing(TOKENS))?.dims2().map_err(computed)?;
        let mask = inputs.get(MASK).ok_or_else(|| missing(MASK))?;
        let mut given = inputs.clone();
        given.insert(POSITIONS.to_owned(), positions(mask, count).map_err(computed)?);
        for port in self.ports().0.into_iter().filter(is_past) {
            let earlier = match seen.values.remove(&port.name) {
                Some(earlier) => earlier,
                None => Tensor::zeros(none_of(&port, batch)?, DType::F32, &Device::Cpu).map_err(computed)?,
            };
            given.insert(port.name, earlier);
        }
        let mut outputs = self.run(&given)?;
        for port in self.ports().0.iter().filter(|port| is_past(port)) {
            let kept = successor(&port.name).and_then(|name| outputs.remove(&name));
            seen.values.insert(port.name.clone(), kept.ok_or_else(|| missing(&port.name))?);
        }
        Ok(outputs)
    }
}

/// Numbers of the last tokens of a mask, counted over those that are no padding.
fn positions(mask: &Tensor, count: usize) -> candle_core::Result<Tensor> {
    let rows = mask.to_dtype(DType::I64)?.to_vec2::<i64>()?;
    let mut positions = Vec::new();
    for row in &rows {
        let counted = row.iter().scan(0i64, |seen, one| {
            *seen = seen.saturating_add(*one);
            Some(seen.saturating_sub(1).max(0))
        });
        positions.extend(counted.skip(row.len().saturating_sub(count)));
    }
    Tensor::from_vec(positions, (rows.len(), count), &Device::Cpu)
}

/// The shape of keys or values of no tokens.
fn none_of(port: &Port, batch: usize) -> Result<(usize, usize, usize, usize)> {
    match port.shape[..] {
        [_, Some(groups), _, Some(width)] => Ok((batch, groups, 0, width)),
        _ => Err(Error::option(format!("input `{}`", port.name), format!("is {}: the number of heads and their width must be known", port.sizes()))),
    }
}
