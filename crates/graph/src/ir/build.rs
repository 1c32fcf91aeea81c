//! Builds a graph. Every node is type-checked when it is added, so that an invalid graph cannot be built.

use std::collections::BTreeMap;

use super::graph::{Graph, Kind, Node, Value, ValueId};
use super::tensor_type::TensorType;
use super::{Dim, Op};
use crate::error::{Error, Result};

/// Names and shapes of a checkpoint's tensors.
pub trait Catalog {
    /// The shape of the tensor with this name.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;
    /// The most similar tensor name, for error messages.
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

/// Maximum number of values in a graph. Without a checkpoint, a configuration could request any number of
/// layers.
const MAX_VALUES: usize = 1 << 18;

/// Whether a tensor of this name belongs to one of these modules.
pub fn is_in_modules(name: &str, modules: &[&str]) -> bool {
    modules.iter().any(|module| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.')))
}

/// Builder of a graph.
pub struct Builder<'c> {
    graph: Graph,
    names: BTreeMap<String, ValueId>,
    catalog: Option<&'c dyn Catalog>,
    /// Modules whose parameters the checkpoint may lack, because they are created.
    new_modules: &'c [&'c str],
    /// Prefix of the names of parameters and nodes.
    scope: String,
}

impl<'c> Builder<'c> {
    /// A builder that checks every parameter against a checkpoint.
    pub fn new(catalog: &'c dyn Catalog) -> Self {
        Self { graph: Graph::default(), names: BTreeMap::new(), catalog: Some(catalog), new_modules: &[], scope: String::new() }
    }

    /// A builder that also accepts parameters of `modules` that the checkpoint lacks.
    pub fn with_new_modules(catalog: &'c dyn Catalog, modules: &'c [&'c str]) -> Self {
        Self { new_modules: modules, ..Self::new(catalog) }
    }

    /// A builder that accepts any parameter.
    pub fn unchecked() -> Self {
        Self { graph: Graph::default(), names: BTreeMap::new(), catalog: None, new_modules: &[], scope: String::new() }
    }

    /// A builder that continues a graph, and accepts any parameter.
    pub fn continuing(graph: Graph) -> Self {
        let names = graph.ids().map(|id| (graph.value(id).name.clone(), id)).collect();
        Self { graph, names, ..Self::unchecked() }
    }

    /// Adds parameters and nodes with a prefix before their names.
    pub fn within<T>(&mut self, prefix: &str, add: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = std::mem::replace(&mut self.scope, prefix.to_owned());
        let added = add(self);
        self.scope = outer;
        added
    }

    fn scoped(&self, name: &str) -> String {
        format!("{}{name}", self.scope)
    }

    fn add(&mut self, name: &str, ty: TensorType, kind: Kind) -> Result<ValueId> {
        if self.graph.values.len() >= MAX_VALUES {
            return Err(Error::graph("graph", format!("has more than {MAX_VALUES} values")));
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

    /// Adds an input of the graph. Fails if the name is already used.
    pub fn input(&mut self, name: &str, ty: TensorType) -> Result<ValueId> {
        self.add(name, ty, Kind::Input)
    }

    /// Adds a tensor of the checkpoint, or returns it if it was added before. Fails if the checkpoint has no
    /// such tensor, or it has another shape.
    pub fn param(&mut self, name: &str, shape: &[usize]) -> Result<ValueId> {
        let name = &self.scoped(name);
        if let Some(id) = self.names.get(name) {
            return Ok(*id);
        }
        if let Some(catalog) = self.catalog {
            match catalog.shape(name) {
                None if self.is_new(name) => {}
                None => {
                    let hint = catalog.nearest(name).map_or(String::new(), |n| format!("the nearest name in the checkpoint is `{n}`"));
                    return Err(Error::tensor(name, format!("is missing; the configuration requires shape {shape:?}"), hint));
                }
                Some(stored) if stored != shape => {
                    return Err(Error::tensor(
                        name,
                        format!("has shape {stored:?}, but the configuration requires {shape:?}"),
                        "config.json does not belong to these weights",
                    ));
                }
                Some(_) => {}
            }
        }
        self.add(name, TensorType::float(shape.iter().copied()), Kind::Param)
    }

    /// Whether the checkpoint has a tensor of this name, or may lack it; true without a checkpoint.
    pub fn has(&self, name: &str) -> bool {
        let name = &self.scoped(name);
        self.catalog.is_none_or(|c| c.shape(name).is_some()) || self.is_new(name)
    }

    fn is_new(&self, name: &str) -> bool {
        is_in_modules(name, self.new_modules)
    }

    /// Whether the checkpoint has a tensor of this name; false without a checkpoint.
    pub fn stores(&self, name: &str) -> bool {
        self.stored_shape(name).is_some()
    }

    /// The shape of a tensor in the checkpoint.
    pub fn stored_shape(&self, name: &str) -> Option<Vec<usize>> {
        self.catalog.and_then(|c| c.shape(&self.scoped(name)))
    }

    /// Adds a node. Fails if the op does not accept the inputs, or the name is already used.
    pub fn node(&mut self, name: &str, op: impl Into<Op>, inputs: &[ValueId]) -> Result<ValueId> {
        let (op, name) = (op.into(), &self.scoped(name));
        let types: Vec<&TensorType> = inputs.iter().map(|id| &self.graph.value(*id).ty).collect();
        let ty = op.spec().output(&types).map_err(|reason| {
            let types = types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            Error::graph(format!("graph node `{name}`"), format!("{} of ({types}): {reason}", op.name()))
        })?;
        let output = self.add(name, ty, Kind::Node(self.graph.nodes.len()))?;
        self.graph.nodes.push(Node { op, inputs: inputs.to_vec(), output });
        Ok(output)
    }

    /// Declares an output of the graph.
    pub fn output(&mut self, name: &str, value: ValueId) {
        self.graph.outputs.push((name.to_owned(), value));
    }

    /// Removes the outputs that were declared before, and returns them.
    pub fn take_outputs(&mut self) -> Vec<(String, ValueId)> {
        std::mem::take(&mut self.graph.outputs)
    }

    /// The value of an output that was declared before.
    pub fn found_output(&self, name: &str) -> Option<ValueId> {
        self.graph.outputs.iter().find(|(public, _)| public == name).map(|(_, id)| *id)
    }

    /// The value with this name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.names.get(name).copied()
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.graph.value(id).ty
    }

    /// The size of the last axis of a value. Fails if the size is dynamic.
    pub fn width(&self, id: ValueId) -> Result<usize> {
        let value = self.graph.value(id);
        value
            .ty
            .shape
            .last()
            .and_then(Dim::fixed)
            .ok_or_else(|| Error::graph(format!("graph value `{}`", value.name), format!("the size of the last axis of {} is dynamic", value.ty)))
    }

    /// Returns the graph. Fails if the graph has no outputs.
    pub fn finish(self) -> Result<Graph> {
        if self.graph.outputs.is_empty() {
            return Err(Error::graph("graph", "has no outputs"));
        }
        Ok(self.graph)
    }
}
