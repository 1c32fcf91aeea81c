//! The matrices of a GGUF file, for a search over their types.

use std::collections::BTreeMap;

use crate::arch::GgufFamily;
use crate::error::Result;
use crate::export::Gguf;
use crate::model::Model;
use crate::run_state::RunState;
use crate::store::gguf::Kind;
use crate::store::writer::Piece;
use crate::store::{DType, StorageFormat};

/// A matrix of a GGUF file.
#[derive(Debug)]
pub(super) struct Matrix {
    /// Name in the file.
    pub tensor: String,
    /// Names of its weights in the model: several for stacked experts.
    pub weights: Vec<String>,
    /// Its type.
    pub kind: Kind,
    /// Its shape, from the slowest axis.
    pub shape: Vec<usize>,
}

/// The matrices in the order of the file, and the size of the file in bytes. Vectors and routers, which are
/// always 32-bit floats, are not matrices.
///
/// # Errors
/// If the format cannot represent the model.
pub(super) fn matrices(format: &Gguf, model: &Model) -> Result<(Vec<Matrix>, u64)> {
    let prepared = format.prepare(model, &RunState::default(), true)?;
    let mut matrices: Vec<Matrix> = Vec::new();
    let mut by_tensor: BTreeMap<String, usize> = BTreeMap::new();
    for (item, name) in prepared.items.iter().zip(&prepared.names) {
        let kind = match item.storage_format {
            StorageFormat::Gguf(kind) => Kind::Blocks(kind),
            _ => Kind::Plain(item.weight.dtype),
        };
        if kind == Kind::Plain(DType::F32) {
            continue;
        }
        let expert = GgufFamily::split_expert(&item.name);
        let (tensor, is_expert) = expert.map_or_else(|| (item.name.clone(), false), |(stacked, _)| (stacked, true));
        let at = *by_tensor.entry(tensor.clone()).or_insert(matrices.len());
        if at == matrices.len() {
            let shape = if is_expert { [&[0], item.weight.shape.as_slice()].concat() } else { item.weight.shape.clone() };
            matrices.push(Matrix { tensor, weights: Vec::new(), kind, shape });
        }
        let matrix = &mut matrices[at];
        matrix.shape[0] += usize::from(is_expert);
        matrix.weights.push(name.clone());
    }
    Ok((matrices, prepared.pieces.iter().map(Piece::len).sum()))
}
