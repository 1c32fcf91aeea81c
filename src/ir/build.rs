//! Building a graph: every node is typed when it is wired, so a graph that does not fit cannot be built.

use std::collections::BTreeMap;

use super::graph::{Graph, Kind, Node, TensorType, Value, ValueId};
use super::{Dim, Op};
use crate::error::{Error, Result};

/// Where parameters are looked up: names and shapes of a checkpoint.
pub trait Catalog {
    /// The shape of a tensor, if there is one of this name.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;
    /// The most similar name, for errors.
    fn nearest(&self, name: &str) -> Option<String>;
}

impl Catalog for BTreeMap<String, Vec<usize>> {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.get(name).cloned()
    }

    fn nearest(&self, _name: &str) -> Option<String> {
        None
    }
}

/// Values of a graph at most: without a checkpoint, a configuration could ask for any number of layers.
const MOST: usize = 1 << 18;

/// Wires nodes.
pub struct Builder<'c> {
    graph: Graph,
    names: BTreeMap<String, ValueId>,
    catalog: Option<&'c dyn Catalog>,
}

impl<'c> Builder<'c> {
    /// A builder that holds every parameter to a checkpoint.
    pub fn new(catalog: &'c dyn Catalog) -> Self {
        Self { graph: Graph::default(), names: BTreeMap::new(), catalog: Some(catalog) }
    }

    /// A builder that takes parameters as they are asked for.
    pub fn unchecked() -> Self {
        Self { graph: Graph::default(), names: BTreeMap::new(), catalog: None }
    }

    fn add(&mut self, name: &str, ty: TensorType, kind: Kind) -> Result<ValueId> {
        if self.graph.values.len() >= MOST {
            return Err(Error::graph("graph", format!("has more than {MOST} values")));
        }
        if name.is_empty() {
            return Err(Error::graph("graph", "a value has no name"));
        }
        let id = ValueId(self.graph.values.len() as u32);
        if self.names.insert(name.to_owned(), id).is_some() {
            return Err(Error::graph("graph", format!("two values are named `{name}`")));
        }
        self.graph.values.push(Value { name: name.to_owned(), ty, kind });
        Ok(id)
    }

    /// A value given for each run.
    ///
    /// # Errors
    /// The name is taken.
    pub fn input(&mut self, name: &str, ty: TensorType) -> Result<ValueId> {
        self.add(name, ty, Kind::Input)
    }

    /// A tensor of the checkpoint; asked for again, it is the same value.
    ///
    /// # Errors
    /// The checkpoint has no such tensor, or it has another shape.
    pub fn param(&mut self, name: &str, shape: &[usize]) -> Result<ValueId> {
        if let Some(id) = self.names.get(name) {
            return Ok(*id);
        }
        if let Some(catalog) = self.catalog {
            match catalog.shape(name) {
                None => {
                    let hint = catalog.nearest(name).map_or(String::new(), |n| format!("the nearest there is: `{n}`"));
                    return Err(Error::tensor(name, format!("is missing; the configuration asks for shape {shape:?}"), hint));
                }
                Some(stored) if stored != shape => {
                    return Err(Error::tensor(
                        name,
                        format!("has shape {stored:?}, the configuration asks for {shape:?}"),
                        "config.json does not belong to these weights",
                    ));
                }
                Some(_) => {}
            }
        }
        self.add(name, TensorType::float(shape.iter().copied()), Kind::Param)
    }

    /// Whether the checkpoint has a tensor of this name; without a checkpoint, yes.
    pub fn has(&self, name: &str) -> bool {
        self.catalog.is_none_or(|c| c.shape(name).is_some())
    }

    /// Whether the checkpoint has a tensor of this name; without a checkpoint, no.
    pub(crate) fn stores(&self, name: &str) -> bool {
        self.stored_shape(name).is_some()
    }

    /// The shape of a tensor of the checkpoint.
    pub fn stored_shape(&self, name: &str) -> Option<Vec<usize>> {
        self.catalog.and_then(|c| c.shape(name))
    }

    /// An op at work.
    ///
    /// # Errors
    /// The inputs do not fit the op, or the name is taken.
    pub fn node(&mut self, name: &str, op: impl Into<Op>, inputs: &[ValueId]) -> Result<ValueId> {
        let op = op.into();
        let types: Vec<&TensorType> = inputs.iter().map(|id| &self.graph.value(*id).ty).collect();
        let ty = op.spec().output(&types).map_err(|reason| {
            let types = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            Error::graph(format!("graph node `{name}`"), format!("{} of ({types}): {reason}", op.name()))
        })?;
        let output = self.add(name, ty, Kind::Node(self.graph.nodes.len()))?;
        self.graph.nodes.push(Node { op, inputs: inputs.to_vec(), output });
        Ok(output)
    }

    /// Declares a result.
    pub fn output(&mut self, name: &str, value: ValueId) {
        self.graph.outputs.push((name.to_owned(), value));
    }

    /// The value behind a result.
    pub fn found_output(&self, name: &str) -> Option<ValueId> {
        self.graph.outputs.iter().find(|(public, _)| public == name).map(|(_, id)| *id)
    }

    /// A value by name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.names.get(name).copied()
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.graph.value(id).ty
    }

    /// The last size of a value.
    ///
    /// # Errors
    /// It is not known.
    pub fn width(&self, id: ValueId) -> Result<usize> {
        let value = self.graph.value(id);
        value
            .ty
            .shape
            .last()
            .and_then(Dim::fixed)
            .ok_or_else(|| Error::graph(format!("graph value `{}`", value.name), format!("the width of {} is not known", value.ty)))
    }

    /// The graph.
    ///
    /// # Errors
    /// It has no outputs.
    pub fn finish(self) -> Result<Graph> {
        if self.graph.outputs.is_empty() {
            return Err(Error::graph("graph", "has no outputs"));
        }
        Ok(self.graph)
    }
}
