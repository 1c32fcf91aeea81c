//! Weights to write, and the files that they are written to.

use super::header::Header;
use super::{StorageFormat, Weight};

/// A weight to write.
#[derive(Debug, Clone)]
pub struct Item {
    /// Name of the logical tensor.
    pub name: String,
    /// The weight.
    pub weight: Weight,
    /// How to store it.
    pub storage_format: StorageFormat,
}

impl Item {
    /// A description of how the tensor is stored.
    pub fn describe(&self) -> String {
        let suffix = match self.storage_format {
            StorageFormat::Original(_) => return self.weight.describe_stored(),
            StorageFormat::Sparse { .. } => " sparse",
            StorageFormat::Packed => " packed",
            _ => "",
        };
        self.weight.describe() + suffix
    }
}

/// A planned file. Its tensor names do not include the file's folder.
#[derive(Debug)]
pub(super) struct PlannedFile {
    pub name: String,
    pub header: Header,
}

impl PlannedFile {
    /// The full name of a tensor of this file.
    pub fn full_name(&self, tensor: &str) -> String {
        self.name.rsplit_once('/').map_or_else(|| tensor.to_owned(), |(folder, _)| format!("{folder}/{tensor}"))
    }
}
