//! Incremental decoding with a KV cache. The tensor names are those of
//! [`ir::decoder`](crate::ir::decoder).

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::Session;
use crate::error::{Error, Result};
use crate::ir::Port;
use crate::ir::decoder::{MASK, POSITIONS, TOKENS, successor};

/// The KV cache of a decoder: keys and values of all processed tokens.
#[derive(Debug, Clone, Default)]
pub struct DecoderCache {
    /// Keys and values by input name.
    values: BTreeMap<String, Tensor>,
}

fn computed(e: candle_core::Error) -> Error {
    Error::candle("a decoder with a cache", e)
}

/// Whether an input holds cached keys or values.
fn is_past(port: &Port) -> bool {
    successor(&port.name).is_some()
}

impl Session {
    /// Whether the model is a decoder with a KV cache, all of whose inputs are outputs too. The decoder of an
    /// encoder-decoder model also reads keys and values that it does not return.
    pub fn has_kv_cache(&self) -> bool {
        let (inputs, outputs) = self.ports();
        let is_returned = |name: String| outputs.iter().any(|output| output.name == name);
        let mut past = inputs.iter().filter_map(|port| successor(&port.name)).peekable();
        past.peek().is_some() && past.all(is_returned)
    }

    /// The input and output ports without the KV cache and the position ids of decoders that have a
    /// cache.
    pub fn public_ports(&self) -> (Vec<Port>, Vec<Port>) {
        let (mut inputs, mut outputs) = self.ports();
        let cache_outputs: Vec<String> = inputs.iter().filter_map(|port| successor(&port.name)).collect();
        if self.has_kv_cache() {
            inputs.retain(|port| !is_past(port) && port.name != POSITIONS);
            outputs.retain(|port| !cache_outputs.contains(&port.name));
        }
        (inputs, outputs)
    }

    /// Runs the next tokens, `[batch, sequence]`, and adds their keys and values to `cache`. The
    /// attention mask covers cached and new tokens. Positions count the tokens that are not padding. Fails if
    /// `input_ids` or `attention_mask` is missing, or the model returns no keys or values for a part of the
    /// cache.
    pub fn run_next(&mut self, inputs: &BTreeMap<String, Tensor>, cache: &mut DecoderCache) -> Result<BTreeMap<String, Tensor>> {
        let missing = |name: &str| Error::option("input", format!("`{name}` is missing; decoders with a KV cache require it"));
        let (batch, count) = inputs.get(TOKENS).ok_or_else(|| missing(TOKENS))?.dims2().map_err(computed)?;
        let mask = inputs.get(MASK).ok_or_else(|| missing(MASK))?;
        let mut named_inputs = inputs.clone();
        named_inputs.insert(POSITIONS.to_owned(), positions(mask, count).map_err(computed)?);
        for port in self.ports().0.into_iter().filter(is_past) {
            let earlier = match cache.values.remove(&port.name) {
                Some(earlier) => earlier,
                None => Tensor::zeros(empty_shape(&port, batch)?, DType::F32, &Device::Cpu).map_err(computed)?,
            };
            named_inputs.insert(port.name, earlier);
        }
        let mut outputs = self.run(&named_inputs)?;
        for port in self.ports().0.iter().filter(|port| is_past(port)) {
            let output = successor(&port.name).and_then(|name| outputs.remove(&name));
            cache.values.insert(port.name.clone(), output.ok_or_else(|| missing(&port.name))?);
        }
        Ok(outputs)
    }
}

/// Positions of the last `count` columns of a mask, which count only non-zero entries.
fn positions(mask: &Tensor, count: usize) -> candle_core::Result<Tensor> {
    let rows = mask.to_dtype(DType::I64)?.to_vec2::<i64>()?;
    let mut positions = Vec::new();
    for row in &rows {
        let counted = row.iter().scan(0i64, |count, one| {
            *count = count.saturating_add(*one);
            Some(count.saturating_sub(1).max(0))
        });
        positions.extend(counted.skip(row.len().saturating_sub(count)));
    }
    Tensor::from_vec(positions, (rows.len(), count), &Device::Cpu)
}

/// The shape of an empty cache tensor, `[batch, heads, 0, width]`.
fn empty_shape(port: &Port, batch: usize) -> Result<(usize, usize, usize, usize)> {
    match port.shape[..] {
        [_, Some(groups), _, Some(width)] => Ok((batch, groups, 0, width)),
        _ => Err(Error::option(format!("input `{}`", port.name), format!("is {}: the number of heads and their width must be known", port.sizes()))),
    }
}
