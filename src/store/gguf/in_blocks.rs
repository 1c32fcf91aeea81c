//! Weights as blocks that are to be written.

use std::sync::Arc;

use super::Kind;
use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::kernel::ggml::BlockType;
use crate::store::{BlockSink, DType, Decoded, Encoding, StorageFormat, View, Weight, WeightSource, least_common_multiple};

/// Another dense weight as the blocks that stand for it, and the values that these have.
pub struct InBlocks {
    upstream: Weight,
    kind: BlockType,
    name: String,
}

impl Weight {
    /// The weight as a GGUF file holds it, with what writes it.
    #[must_use]
    pub fn in_gguf(self, kind: Kind, name: &str) -> (Weight, StorageFormat) {
        match kind {
            Kind::Plain(dtype) if self.is_float() => {
                let source = Decoded { upstream: self.source(), dtype, name: name.to_owned() };
                (self.then(dtype, Encoding::Dense, Arc::new(source)), StorageFormat::Plain)
            }
            Kind::Plain(_) => (self, StorageFormat::Plain),
            Kind::Blocks(kind) => {
                let weight = self.clone();
                (weight.then(DType::F32, Encoding::Dense, Arc::new(InBlocks { upstream: self, kind, name: name.to_owned() })), StorageFormat::Gguf(kind))
            }
        }
    }
}

impl WeightSource for InBlocks {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (mut values, mut blocks, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        self.upstream.visit(least_common_multiple(unit, self.kind.elements()), &mut |block| {
            let count = block.now.elements();
            values.resize(count, 0f32);
            blocks.resize(count.checked_div(self.kind.elements()).unwrap_or(0).saturating_mul(self.kind.bytes()), 0);
            bytes.resize(count.saturating_mul(4), 0);
            let wrong = |reason: String| Error::tensor(&self.name, reason, "write it as F16, BF16 or F32");
            if !block.now.decode(0, &mut values) || !count.is_multiple_of(self.kind.elements()) {
                return Err(wrong(format!("cannot become blocks of {}", self.kind.name())));
            }
            if values.iter().any(|value| !value.is_finite()) {
                return Err(wrong("holds values that are not finite, which blocks cannot hold".into()));
            }
            if !self.kind.encode(&values, &mut blocks) {
                return Err(wrong(format!("cannot be written as {}", self.kind.name())));
            }
            self.kind.decode(&blocks, &mut values);
            if values.iter().any(|value| !value.is_finite()) {
                return Err(wrong(format!("holds values that scales of {} do not reach", self.kind.name())));
            }
            convert::f32_bytes(&values, &mut bytes);
            sink(block.becomes(View { blocks: &blocks, ..View::dense(DType::F32, &bytes) }))
        })
    }
}
