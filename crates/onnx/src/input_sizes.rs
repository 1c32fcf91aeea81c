//! Open dimensions of the inputs, and the sizes that the user specifies for them.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::sync::PoisonError;

use super::model_file::ModelFile;
use super::opaque_subgraph;
use super::proto::ValueInfoProto;
use super::value_info::{dim_name, input_shape};
use crate::error::{Error, Result};
use crate::ir::decoder::successor;
use crate::ir::{Dim, Element};
use crate::store::{OpenSize, OpenSizes};

impl ModelFile {
    /// Fixes open dimensions of the inputs and of the graph. Call it before either is used. Fails if a name
    /// is neither an open dimension nor an input, a size contradicts the file or another size, or other sizes
    /// were specified before.
    pub fn fix_sizes(&self, sizes: &OpenSizes) -> Result<()> {
        let wrong = |reason: String| Error::option("sizes", format!("{reason}; {}", self.describe_open()));
        let found = self.resolve(sizes).map_err(wrong)?;
        // Subgraphs that are already loaded were tested with other sizes.
        let store = || {
            self.subgraphs.lock().unwrap_or_else(PoisonError::into_inner).clear();
            found.clone()
        };
        if sizes.is_empty() || *self.fixed_sizes.get_or_init(store) == found {
            return Ok(());
        }
        Err(Error::option("sizes", format!("{} was already opened with other sizes", self.path.display())))
    }

    /// The user-specified size of an open dimension.
    pub(super) fn fixed_size(&self, size: &Dim) -> Option<usize> {
        if let Dim::Named(name) = size { self.fixed_sizes.get()?.get(name).copied() } else { None }
    }

    /// The user-specified value of a scalar integer input.
    pub fn fixed_scalar(&self, input: &str) -> Option<i64> {
        i64::try_from(*self.fixed_sizes.get()?.get(&scalar_key(input))?).ok()
    }

    /// Shape of an input, with `None` for unknown sizes; `None` if the file has no such input.
    pub fn input_sizes(&self, name: &str) -> Option<Vec<Option<usize>>> {
        let input = self.inputs().find(|input| input.name() == name)?;
        Some(input_shape(input)?.iter().map(|size| size.fixed().or_else(|| self.fixed_size(size))).collect())
    }

    /// Inputs with open dimensions, as text.
    pub fn open_sizes(&self) -> Vec<String> {
        let open = |input: &ValueInfoProto| {
            let open = input_shape(input).is_some_and(|sizes| sizes.iter().any(|size| size.fixed().is_none() && self.fixed_size(size).is_none()));
            open.then(|| super::model_file::describe_value(input))
        };
        self.inputs().filter_map(open).collect()
    }

    fn describe_open(&self) -> String {
        match self.open_sizes().as_slice() {
            [] => format!("{} has no open dimensions", self.path.display()),
            open => format!("{} has open dimensions in {}", self.path.display(), open.join(", ")),
        }
    }

    /// Whether the model is a decoder with a KV cache, all of whose inputs are outputs too.
    pub fn has_kv_cache(&self) -> bool {
        let is_returned = |name: String| self.model.graph.iter().flat_map(|graph| &graph.output).any(|output| output.name() == name);
        let mut past = self.inputs().filter_map(|input| successor(input.name())).peekable();
        past.peek().is_some() && past.all(is_returned)
    }

    fn inputs(&self) -> impl Iterator<Item = &ValueInfoProto> {
        let inputs = self.model.graph.iter().flat_map(|graph| &graph.input);
        inputs.filter(move |input| !self.weights_as_inputs.contains(input.name()))
    }

    /// The requested sizes by dimension name of the graph.
    fn resolve(&self, requested: &OpenSizes) -> Result<BTreeMap<String, usize>, String> {
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        let mut note = |name: &str, size: usize, by: &str| match found.insert(name.to_owned(), size) {
            _ if size == 0 && !name.starts_with(SCALAR_PREFIX) => Err(format!("`{by}` has a size of zero")),
            Some(before) if before != size => Err(format!("`{by}` sets a dimension to {size} that is {before} elsewhere")),
            _ => Ok(()),
        };
        let named: Vec<Dim> = self.inputs().filter_map(input_shape).flatten().filter(|size| size.fixed().is_none()).collect();
        for (name, size) in requested {
            let given = match size {
                OpenSize::One(size) => std::slice::from_ref(size),
                OpenSize::All(sizes) => sizes,
            };
            if let Some(size) = given.iter().find(|size| i64::try_from(**size).is_err()) {
                return Err(format!("`{name}` is {size}, which exceeds the maximum size {}", i64::MAX));
            }
            let input = self.inputs().find(|input| input.name() == name);
            match (size, input) {
                (OpenSize::One(size), None) => {
                    let dim = Dim::Named(dim_name(name));
                    if !named.contains(&dim) {
                        return Err(format!("`{name}` is neither an open dimension nor an input"));
                    }
                    note(&dim_name(name), *size, name)?;
                }
                (OpenSize::All(_), None) => return Err(format!("`{name}` is not an input")),
                (OpenSize::One(number), Some(input)) if input_shape(input).is_some_and(|sizes| sizes.is_empty()) => {
                    if !is_integer(input) {
                        return Err(format!("`{name}` is a scalar of another type than integer: its value cannot be specified"));
                    }
                    note(&scalar_key(name), *number, name)?;
                }
                (_, Some(input)) => {
                    let own = input_shape(input).ok_or_else(|| format!("`{name}` is not a tensor of known rank"))?;
                    if own.len() != given.len() {
                        return Err(format!("`{name}` has {} axes, but {} sizes are specified", own.len(), given.len()));
                    }
                    for (own, given) in own.iter().zip(given) {
                        match own {
                            Dim::Fixed(own) if own != given => return Err(format!("`{name}` has a size of {own}, but {given} is specified")),
                            Dim::Named(open) => note(open, *given, name)?,
                            _ => {}
                        }
                    }
                }
            }
        }
        Ok(found)
    }
}

/// Prefix of the keys of scalar inputs.
const SCALAR_PREFIX: char = '=';

/// The key of a scalar input, which no dimension name can equal.
fn scalar_key(input: &str) -> String {
    format!("{SCALAR_PREFIX}{input}")
}

fn is_integer(input: &ValueInfoProto) -> bool {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref());
    tensor.and_then(|tensor| opaque_subgraph::element(tensor.elem_type?)) == Some(Element::Int)
}
