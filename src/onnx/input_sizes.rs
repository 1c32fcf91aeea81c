//! Sizes that a file leaves open, as a user tells them.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::sync::PoisonError;

use super::lift;
use super::model_file::ModelFile;
use super::piece;
use super::proto::{Dimension, DimensionProto, ValueInfoProto};
use crate::error::{Error, Result};
use crate::ir::decoder::successor;
use crate::ir::{Dim, Element};
use crate::store::{OpenSize, OpenSizes};

impl ModelFile {
    /// Fixes sizes that the file leaves open, for whoever asks for its graph or its inputs from now on.
    ///
    /// # Errors
    /// A name is none of an open size or of an input, a size contradicts the file or another one, or others were told before.
    pub fn tell_sizes(&self, sizes: &OpenSizes) -> Result<()> {
        let wrong = |reason: String| Error::option("sizes", format!("{reason}; {}", self.describe_open()));
        let found = self.resolved(sizes).map_err(wrong)?;
        // What was loaded before was tried with other sizes and numbers.
        let told = || {
            self.pieces.lock().unwrap_or_else(PoisonError::into_inner).clear();
            found.clone()
        };
        if sizes.is_empty() || *self.told.get_or_init(told) == found {
            return Ok(());
        }
        Err(Error::option("sizes", format!("{} was opened with others", self.path.display())))
    }

    /// The size that was told for one that is open.
    pub(super) fn told(&self, size: &Dim) -> Option<usize> {
        if let Dim::Named(name) = size { self.told.get()?.get(name).copied() } else { None }
    }

    /// The whole number that was told for an input that is one.
    pub(crate) fn told_number(&self, input: &str) -> Option<i64> {
        i64::try_from(*self.told.get()?.get(&number_of(input))?).ok()
    }

    /// Sizes of an input, as far as the file says or somebody told them; nothing for what is no input of the file.
    pub fn input_sizes(&self, name: &str) -> Option<Vec<Option<usize>>> {
        let input = self.inputs().find(|input| input.name() == name)?;
        Some(sizes(input)?.iter().map(|size| size.fixed().or_else(|| self.told(size))).collect())
    }

    /// Open sizes of the inputs, as a person may tell them.
    pub fn open_sizes(&self) -> Vec<String> {
        let open = |input: &ValueInfoProto| {
            let open = sizes(input).is_some_and(|sizes| sizes.iter().any(|size| size.fixed().is_none() && self.told(size).is_none()));
            open.then(|| super::model_file::port(input))
        };
        self.inputs().filter_map(open).collect()
    }

    fn describe_open(&self) -> String {
        match self.open_sizes().as_slice() {
            [] => format!("{} leaves no size open", self.path.display()),
            open => format!("{} leaves sizes open in {}", self.path.display(), open.join(", ")),
        }
    }

    /// Whether it is a decoder that takes keys and values of earlier tokens.
    pub(crate) fn keeps(&self) -> bool {
        self.inputs().any(|input| successor(input.name()).is_some())
    }

    fn inputs(&self) -> impl Iterator<Item = &ValueInfoProto> {
        let inputs = self.model.graph.iter().flat_map(|graph| &graph.input);
        inputs.filter(move |input| !self.weights_as_inputs.contains(input.name()))
    }

    /// What is told, by the names that the graph has for open sizes.
    fn resolved(&self, told: &OpenSizes) -> Result<BTreeMap<String, usize>, String> {
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        let mut note = |name: &str, size: usize, by: &str| match found.insert(name.to_owned(), size) {
            _ if size == 0 && !name.starts_with(NUMBER) => Err(format!("`{by}` has a size of zero")),
            Some(before) if before != size => Err(format!("`{by}` makes {size} of a size that is {before} elsewhere")),
            _ => Ok(()),
        };
        let named: Vec<Dim> = self.inputs().filter_map(sizes).flatten().filter(|size| size.fixed().is_none()).collect();
        for (name, size) in told {
            let given = match size {
                OpenSize::One(size) => std::slice::from_ref(size),
                OpenSize::All(sizes) => sizes,
            };
            if let Some(size) = given.iter().find(|size| i64::try_from(**size).is_err()) {
                return Err(format!("`{name}` is {size}, and {} is the largest size", i64::MAX));
            }
            let input = self.inputs().find(|input| input.name() == name);
            match (size, input) {
                (OpenSize::One(size), None) => {
                    let dim = Dim::Named(lift::plain(name));
                    if !named.contains(&dim) {
                        return Err(format!("`{name}` is neither an open size nor an input"));
                    }
                    note(&lift::plain(name), *size, name)?;
                }
                (OpenSize::All(_), None) => return Err(format!("`{name}` is no input")),
                (OpenSize::One(number), Some(input)) if sizes(input).is_some_and(|sizes| sizes.is_empty()) => {
                    if !is_whole(input) {
                        return Err(format!("`{name}` is no whole number: no other is told"));
                    }
                    note(&number_of(name), *number, name)?;
                }
                (_, Some(input)) => {
                    let own = sizes(input).ok_or_else(|| format!("`{name}` is no tensor whose number of axes is known"))?;
                    if own.len() != given.len() {
                        return Err(format!("`{name}` has {} axes, and {} sizes are told", own.len(), given.len()));
                    }
                    for (own, given) in own.iter().zip(given) {
                        match own {
                            Dim::Fixed(own) if own != given => return Err(format!("`{name}` has a size of {own}, and {given} is told")),
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

/// What names of numbers begin with.
const NUMBER: char = '=';

/// What the number of an input is noted as: no size is called so.
fn number_of(input: &str) -> String {
    format!("{NUMBER}{input}")
}

fn is_whole(input: &ValueInfoProto) -> bool {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref());
    tensor.and_then(|tensor| piece::element(tensor.elem_type?)) == Some(Element::Int)
}

/// Sizes of an input; those that are open have the names that graphs have for them.
pub(super) fn sizes(input: &ValueInfoProto) -> Option<Vec<Dim>> {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref())?;
    // A size that nothing is known about has a name of its own.
    let open = |axis: usize| Dim::Named(lift::plain(&format!("{}_{axis}", input.name())));
    let size = |(axis, dim): (usize, &DimensionProto)| match &dim.value {
        Some(Dimension::DimValue(size)) if *size > 0 => usize::try_from(*size).map_or_else(|_| open(axis), Dim::Fixed),
        Some(Dimension::DimParam(name)) if !name.is_empty() => Dim::Named(lift::plain(name)),
        _ => open(axis),
    };
    Some(tensor.shape.as_ref()?.dim.iter().enumerate().map(size).collect())
}
