//! Walking the nodes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::Parameters;
use crate::error::{Error, Result};
use crate::ir::ops::Mode;
use crate::ir::{Element, Graph, Kind, ValueId};

/// Values for the graph's inputs, by name.
pub type Inputs = BTreeMap<String, Tensor>;

/// A graph with its parameters, ready to run.
#[derive(Debug)]
pub struct Executor<'g> {
    graph: &'g Graph,
    parameters: Parameters,
    device: Device,
    /// For each node, the values that nobody reads after it.
    dead: Vec<Vec<ValueId>>,
}

impl<'g> Executor<'g> {
    /// Prepares a graph.
    pub fn new(graph: &'g Graph, parameters: Parameters, device: Device) -> Self {
        let mut last = BTreeMap::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            for id in node.inputs.iter().chain([&node.output]) {
                last.insert(*id, index);
            }
        }
        let mut dead = vec![Vec::new(); graph.nodes().len()];
        for (id, index) in last {
            let kept = graph.outputs().iter().any(|(_, out)| *out == id);
            if !kept && graph.value(id).kind != Kind::Param {
                dead[index].push(id);
            }
        }
        Self { graph, parameters, device, dead }
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        self.graph
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Runs the graph; outputs have their public names, floats as f32.
    ///
    /// # Errors
    /// An input is missing, has a wrong shape, or names a row that an embedding does not have; memory runs out.
    pub fn run(&self, inputs: &Inputs) -> Result<BTreeMap<String, Tensor>> {
        self.run_observed(inputs, &mut |_, _| Ok(()))
    }

    /// Runs the graph and shows every value that a node computes.
    ///
    /// # Errors
    /// As [`run`](Executor::run), and whatever the observer says.
    pub fn run_observed(&self, inputs: &Inputs, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<BTreeMap<String, Tensor>> {
        let mut values: Vec<Option<Tensor>> = vec![None; self.graph.values().len()];
        for (id, value) in self.graph.inputs() {
            let given = match (inputs.get(&value.name), inputs.get("input_ids")) {
                (Some(given), _) => given.clone(),
                // One text, of the first type: what a tokenizer leaves out.
                (None, Some(tokens)) if value.name == "token_type_ids" => tokens.zeros_like().map_err(failed(&value.name))?,
                _ => return Err(Error::option("input", format!("`{}` is missing, {}", value.name, value.ty))),
            };
            if given.rank() != value.ty.shape.len() || value.ty.shape.iter().zip(given.dims()).any(|(want, have)| want.fixed().is_some_and(|w| w != *have)) {
                return Err(Error::option("input", format!("`{}` has shape {:?}, the model takes {}", value.name, given.dims(), value.ty)));
            }
            let dtype = if value.ty.element == Element::Int { DType::I64 } else { self.parameters.compute() };
            values[id.index()] = Some(given.to_device(&self.device).and_then(|t| t.to_dtype(dtype)).map_err(failed(&value.name))?);
        }
        for (index, node) in self.graph.nodes().iter().enumerate() {
            let name = &self.graph.value(node.output).name;
            let mut operands = Vec::with_capacity(node.inputs.len());
            for id in &node.inputs {
                let value = self.graph.value(*id);
                let operand = match (value.kind, &values[id.index()]) {
                    (Kind::Param, _) => self.parameters.get(&value.name).map_err(failed(&value.name))?,
                    (_, Some(tensor)) => tensor.clone(),
                    (_, None) => return Err(Error::option(format!("graph node `{name}`"), format!("reads `{}`, which is gone", value.name))),
                };
                operands.push(operand);
            }
            let result = node.op.spec().eval(&operands, Mode::Infer).map_err(failed(name))?;
            observe(name, &result)?;
            values[node.output.index()] = Some(result);
            for id in &self.dead[index] {
                values[id.index()] = None;
            }
        }
        let output = |(name, id): &(String, ValueId)| {
            let tensor = values[id.index()].clone().ok_or_else(|| Error::option("graph", format!("output `{name}` was not computed")))?;
            let tensor = if tensor.dtype().is_float() { tensor.to_dtype(DType::F32).map_err(failed(name))? } else { tensor };
            Ok((name.clone(), tensor))
        };
        self.graph.outputs().iter().map(output).collect()
    }
}

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    let name = name.to_owned();
    move |e| Error::option(format!("graph node `{name}`"), e)
}
