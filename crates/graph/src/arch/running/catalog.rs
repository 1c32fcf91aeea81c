//! Shapes of the weights of a checkpoint, from which graphs are built.

use crate::ir::Catalog;
use crate::store::{Weights, select};

impl Catalog for Weights {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.find(name).map(|w| w.shape.clone())
    }

    fn nearest(&self, name: &str) -> Option<String> {
        select::nearest(name, self.by_name.keys().map(String::as_str))
    }
}
