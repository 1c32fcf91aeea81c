//! Walking the nodes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::plan::{self, FusedNodes};
use super::sizes::Sizes;
use super::{Parameters, Rounding, inputs};
use crate::error::{Error, Result};
use crate::ir::ops::{After, Mode, Op};
use crate::ir::{Graph, Kind, Node, ValueId};

/// Values for the graph's inputs, by name.
pub type Inputs = BTreeMap<String, Tensor>;

/// Is told every value that is computed, with its node's name.
type ValueObserver<'o> = &'o mut dyn FnMut(&str, &Tensor) -> Result<()>;

/// A graph with its parameters, ready to run.
#[derive(Debug)]
pub struct Executor<'g> {
    graph: &'g Graph,
    parameters: Parameters,
    device: Device,
    rounding: Rounding,
    mode: Mode,
    sizes: Sizes,
    /// Every node by itself, for observers.
    single: Vec<FusedNodes>,
    /// Nodes that are computed together, where nobody looks.
    chained: Vec<FusedNodes>,
}

impl<'g> Executor<'g> {
    /// Prepares a graph.
    pub fn new(graph: &'g Graph, parameters: Parameters, device: Device) -> Self {
        let (single, chained) = (plan::single(graph), plan::chained(graph));
        Self { graph, parameters, device, rounding: Rounding::Token, mode: Mode::Infer, sizes: Sizes::default(), single, chained }
    }

    /// Rounds inputs of layers with int8 weights in another way than for each token.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// Computes with primitives that have gradients, node by node; parameters that are variables gather them.
    #[must_use]
    pub fn for_training(self) -> Self {
        Self { mode: Mode::Train, chained: plan::single(self.graph), ..self }
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
        self.walk(&self.chained, inputs, None)
    }

    /// Runs the graph and shows every value that a node computes.
    ///
    /// # Errors
    /// As [`run`](Executor::run), and whatever the observer says.
    pub fn run_observed(&self, inputs: &Inputs, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<BTreeMap<String, Tensor>> {
        self.walk(&self.single, inputs, Some(observe))
    }

    fn walk(&self, steps: &[FusedNodes], inputs: &Inputs, mut observe: Option<ValueObserver>) -> Result<BTreeMap<String, Tensor>> {
        let mut values = Values(vec![None; self.graph.values().len()]);
        for (id, tensor) in self.sizes.take(self.graph, inputs, &self.device, self.parameters.compute())? {
            values.0[id.index()] = Some(tensor);
        }
        for step in steps {
            match self.together(step, &values)? {
                Some(result) => values.keep(self.last(step), result),
                None => {
                    for node in step.nodes.iter().map(|index| &self.graph.nodes()[*index]) {
                        let result = self.alone(node, &values)?;
                        if let Some(observe) = &mut observe {
                            let name = self.name(node);
                            observe(name, &result.contiguous().map_err(failed(name))?)?;
                        }
                        values.keep(node, result);
                    }
                }
            }
            for id in &step.dead {
                values.0[id.index()] = None;
            }
        }
        let output = |(name, id): &(String, ValueId)| {
            let tensor = values.get(self.graph, *id)?;
            let tensor = if tensor.dtype().is_float() { tensor.to_dtype(DType::F32) } else { Ok(tensor) };
            Ok((name.clone(), tensor.and_then(|t| t.contiguous()).map_err(failed(name))?))
        };
        self.graph.outputs().iter().map(output).collect()
    }

    fn name(&self, node: &Node) -> &str {
        &self.graph.value(node.output).name
    }

    fn last(&self, step: &FusedNodes) -> &Node {
        &self.graph.nodes()[step.nodes[step.nodes.len() - 1]]
    }

    fn operands(&self, node: &Node, values: &Values) -> Result<Vec<Tensor>> {
        let spec = node.op.spec();
        let operand = |(index, id): (usize, &ValueId)| {
            let value = self.graph.value(*id);
            match value.kind {
                Kind::Param if spec.takes_kept(index) => self.parameters.kept(&value.name).map_err(failed(&value.name)),
                Kind::Param => self.parameters.get(&value.name).map_err(failed(&value.name)),
                _ => values.get(self.graph, *id),
            }
        };
        let mut operands = node.inputs.iter().enumerate().map(operand).collect::<Result<Vec<Tensor>>>()?;
        if let (Op::Linear(_), [_, weight, ..]) = (&node.op, node.inputs.as_slice())
            && self.parameters.rounds_inputs(&self.graph.value(*weight).name)
        {
            operands[0] = self.rounding.apply(&operands[0]).map_err(failed(self.name(node)))?;
        }
        Ok(operands)
    }

    fn alone(&self, node: &Node, values: &Values) -> Result<Tensor> {
        let operands = self.operands(node, values)?;
        if let (Op::Embedding(_), [indices, table]) = (&node.op, operands.as_slice()) {
            inputs::require_rows(self.graph, node, indices, table)?;
        }
        let result = node.op.spec().eval(&operands, self.mode);
        let compute = self.parameters.compute();
        result.and_then(|t| if t.dtype().is_float() { t.to_dtype(compute) } else { Ok(t) }).map_err(failed(self.name(node)))
    }

    /// The value of a step's last node, if the others can be done within the first.
    fn together(&self, step: &FusedNodes, values: &Values) -> Result<Option<Tensor>> {
        let [first, rest @ ..] = step.nodes.as_slice() else { return Ok(None) };
        if rest.is_empty() {
            return Ok(None);
        }
        let first = &self.graph.nodes()[*first];
        let mut after = Vec::with_capacity(rest.len());
        let mut value = first.output;
        for node in rest.iter().map(|index| &self.graph.nodes()[*index]) {
            let other = || node.inputs.iter().find(|id| **id != value).map(|id| values.get(self.graph, *id)).transpose();
            after.push(match (&node.op, plan::activation(&node.op)) {
                (_, Some(function)) => After::Activate(function),
                (Op::BatchNorm(op), _) => {
                    let name = self.name(node);
                    let mut vectors = Vec::with_capacity(4);
                    for id in &node.inputs[1..] {
                        vectors.push(self.parameters.get(&self.graph.value(*id).name).map_err(failed(name))?);
                    }
                    let [weight, bias, mean, variance] = vectors.as_slice() else { return Ok(None) };
                    let (scale, shift) = op.channels([weight, bias, mean, variance]).map_err(failed(name))?;
                    After::Channels { scale, shift }
                }
                (Op::Add(_), _) => match other()? {
                    Some(tensor) => After::Add(tensor),
                    None => return Ok(None),
                },
                (Op::Mul(_), _) => match other()? {
                    Some(tensor) => After::Multiply(tensor),
                    None => return Ok(None),
                },
                _ => return Ok(None),
            });
            value = node.output;
        }
        first.op.spec().eval_then(&self.operands(first, values)?, &after).map_err(failed(self.name(first)))
    }
}

/// What has been computed and is still needed, by the value's position.
struct Values(Vec<Option<Tensor>>);

impl Values {
    fn keep(&mut self, node: &Node, result: Tensor) {
        self.0[node.output.index()] = Some(result);
    }

    fn get(&self, graph: &Graph, id: ValueId) -> Result<Tensor> {
        self.0[id.index()].clone().ok_or_else(|| Error::graph(format!("graph value `{}`", graph.value(id).name), "is read before it is computed"))
    }
}

pub(super) fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    let name = name.to_owned();
    move |e| Error::computed(format!("graph node `{name}`"), e)
}
