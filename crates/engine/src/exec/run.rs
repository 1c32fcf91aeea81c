//! Execution of the nodes of a graph.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::inputs::Inputs;
use super::memory::{Account, Accounts};
use super::plan::{self, FusedNodes};
use super::pool::on_pool_thread;
use super::sizes::InputCheck;
use super::{MemoryTracker, Parameters, Rounding, bytes_of};
use crate::analysis;
use crate::error::{Error, Result};
use crate::ir::ops::{DecodingState, Fused, Op, PreparedOp, contiguous};
use crate::ir::{Graph, Kind, Node, ValueId};
use crate::store::ActivationScheme;

/// Observes values by name.
pub type Observe<'o> = &'o mut (dyn FnMut(&str, &Tensor) -> Result<()> + Send);

/// A graph with its parameters, ready to run.
#[derive(Debug)]
pub struct Executor<'g> {
    graph: &'g Graph,
    parameters: Parameters,
    device: Device,
    rounding: Rounding,
    input_check: InputCheck,
    /// Prepared op of each node.
    prepared: Vec<PreparedOp>,
    steps: Vec<FusedNodes>,
    accounts: Option<Accounts>,
}

impl<'g> Executor<'g> {
    /// Prepares a graph.
    pub fn new(graph: &'g Graph, parameters: Parameters, device: Device) -> Self {
        let prepared = graph.nodes().iter().map(|node| PreparedOp::new(&node.op, &device, parameters.compute())).collect();
        let steps = plan::steps(graph, &|id| graph.is_output(id));
        Self { graph, parameters, device, rounding: Rounding::Token, input_check: InputCheck::default(), prepared, steps, accounts: None }
    }

    /// Sets the rounding of inputs of layers with quantized weights; the default is per token.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// Records values in a memory tracker, if there is one.
    #[must_use]
    pub fn tracked(self, tracker: Option<&Arc<MemoryTracker>>) -> Self {
        let accounts = tracker.map(|tracker| Accounts::new(tracker.clone(), self.graph));
        accounts.iter().for_each(|accounts| accounts.load(self.parameters.bytes()));
        Self { accounts, ..self }
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// Device of the computation.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The steps in order.
    pub(super) fn steps(&self) -> &[FusedNodes] {
        &self.steps
    }

    /// Its parameters.
    pub(super) fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Loads or drops parameters in place.
    pub(super) fn change_parameters(&mut self, change: impl FnOnce(&mut Parameters)) {
        change(&mut self.parameters);
        self.accounts.iter().for_each(|accounts| accounts.load(self.parameters.bytes()));
    }

    /// Replaces a parameter.
    pub fn replace(&mut self, name: &str, tensor: Tensor) {
        self.parameters = self.parameters.clone().with(name, tensor);
    }

    /// Runs the graph. Outputs have their public names; floats are f32. Fails if an input is missing, has a
    /// wrong shape, or contains an index out of range for an embedding.
    pub fn run(&self, inputs: &Inputs) -> Result<BTreeMap<String, Tensor>> {
        let mut run = self.start(inputs)?;
        on_pool_thread(&self.device, || {
            for step in &self.steps {
                self.step(step, &mut run)?;
                run.drop_dead(step);
            }
            self.outputs(&run)
        })
    }

    /// The outputs of a finished run, under their public names; floats are f32.
    pub(super) fn outputs(&self, run: &PartialRun) -> Result<BTreeMap<String, Tensor>> {
        let output = |(name, id): &(String, ValueId)| {
            let value = self.graph.value(*id);
            let tensor = match value.kind {
                Kind::Param => self.parameters.get(&value.name).map_err(failed(&value.name))?,
                _ => run.get(self.graph, *id)?,
            };
            let tensor = if tensor.dtype().is_float() { tensor.to_dtype(DType::F32) } else { Ok(tensor) };
            Ok((name.clone(), tensor.and_then(|t| contiguous(&t)).map_err(failed(name))?))
        };
        self.graph.outputs().iter().map(output).collect()
    }

    /// Plans a run for observing the values selected by name. Nodes that none of them depends on are not
    /// computed, and nodes between them stay fused.
    pub fn observation(&self, observed: impl Fn(&str) -> bool) -> Observation {
        let observed: Vec<bool> = self.graph.values().iter().map(|value| observed(&value.name)).collect();
        Observation { steps: plan::steps(self.graph, &|id| observed[id.index()]), observed }
    }

    /// Calls `observe` with the selected values in the order of computation. The values of images may be
    /// stored by channel.
    pub fn run_observed(&self, observation: &Observation, inputs: &Inputs, observe: Observe) -> Result<()> {
        let mut run = self.start(inputs)?;
        on_pool_thread(&self.device, || {
            for step in &observation.steps {
                self.step(step, &mut run)?;
                let last = self.last(step).output;
                if observation.observed[last.index()] {
                    observe(&self.graph.value(last).name, &run.get(self.graph, last)?)?;
                }
                run.drop_dead(step);
            }
            Ok(())
        })
    }

    /// Runs the graph with the values of the named nodes replaced by the results of `replace`, and
    /// returns the outputs as [`run`](Executor::run) does.
    pub fn run_replacing(
        &self,
        is_replaced: impl Fn(&str) -> bool,
        inputs: &Inputs,
        replace: &mut (dyn FnMut(&str, Tensor) -> Result<Tensor> + Send),
    ) -> Result<BTreeMap<String, Tensor>> {
        let is_replaced: Vec<bool> = self.graph.values().iter().map(|value| is_replaced(&value.name)).collect();
        let mut run = self.start(inputs)?;
        let steps = plan::steps(self.graph, &|id| self.graph.is_output(id) || is_replaced[id.index()]);
        on_pool_thread(&self.device, || {
            for step in &steps {
                self.step(step, &mut run)?;
                let last = self.last(step).output;
                if is_replaced[last.index()] {
                    let replaced = replace(&self.graph.value(last).name, self.contiguous_value(&run, last)?)?;
                    run.set(last, replaced);
                }
                run.drop_dead(step);
            }
            self.outputs(&run)
        })
    }

    /// Starts a run that can be suspended.
    pub fn start(&self, inputs: &Inputs) -> Result<PartialRun> {
        self.start_at(inputs, 0, None)
    }

    /// Starts a run at position `tokens` of a sequence, with the decoding state of each node.
    pub(super) fn start_at(&self, inputs: &Inputs, tokens: usize, past: Option<Vec<Option<DecodingState>>>) -> Result<PartialRun> {
        let mut run = self.empty_run();
        run.past = past;
        for (id, tensor) in self.input_check.prepare(self.graph, inputs, tokens, &self.device, self.parameters.compute())? {
            run.set(id, tensor);
        }
        Ok(run)
    }

    /// A run without any values.
    fn empty_run(&self) -> PartialRun {
        PartialRun { values: vec![None; self.graph.values().len()], done: 0, past: None, account: self.accounts.as_ref().map(Accounts::begin) }
    }

    /// Continues a run until a selected value is computed, and returns it, contiguous. All calls for one
    /// run require the same observation; parameters that were not read yet may change between calls. Fails if
    /// the value was not selected.
    pub fn advance(&self, observation: &Observation, run: &mut PartialRun, value: &str) -> Result<Tensor> {
        let missing = || Error::graph(format!("graph value `{value}`"), "is not computed");
        let id = self.graph.ids().find(|id| self.graph.value(*id).name == value).ok_or_else(missing)?;
        on_pool_thread(&self.device, || {
            while run.values[id.index()].is_none() {
                let step = observation.steps.get(run.done).ok_or_else(missing)?;
                self.step(step, run)?;
                run.done += 1;
                if self.last(step).output == id {
                    let tensor = self.contiguous_value(run, id)?;
                    run.drop_dead(step);
                    return Ok(tensor);
                }
                run.drop_dead(step);
            }
            self.contiguous_value(run, id)
        })
    }

    /// Continues a run until `steps` steps of the observation are complete.
    pub(super) fn advance_to(&self, observation: &Observation, run: &mut PartialRun, steps: usize) -> Result<()> {
        on_pool_thread(&self.device, || {
            while run.done < steps {
                let step = &observation.steps[run.done];
                self.step(step, run)?;
                run.done += 1;
                run.drop_dead(step);
            }
            Ok(())
        })
    }

    /// A run that continues from a snapshot.
    pub(super) fn resume(&self, snapshot: &Snapshot) -> PartialRun {
        let mut run = PartialRun { done: snapshot.done, ..self.empty_run() };
        for (id, tensor) in self.graph.ids().zip(&snapshot.values) {
            tensor.iter().for_each(|tensor| run.set(id, tensor.clone()));
        }
        run
    }

    fn contiguous_value(&self, run: &PartialRun, id: ValueId) -> Result<Tensor> {
        contiguous(&run.get(self.graph, id)?).map_err(failed(&self.graph.value(id).name))
    }

    /// Computes the value of a step's last node.
    pub(super) fn step(&self, step: &FusedNodes, run: &mut PartialRun) -> Result<()> {
        if let Some(result) = self.run_fused(step, run)? {
            run.set(self.last(step).output, result);
            return Ok(());
        }
        for &index in &step.nodes {
            let result = self.run_node(index, run)?;
            run.set(self.graph.nodes()[index].output, result);
        }
        Ok(())
    }

    fn name(&self, node: &Node) -> &str {
        &self.graph.value(node.output).name
    }

    fn last(&self, step: &FusedNodes) -> &Node {
        &self.graph.nodes()[step.nodes[step.nodes.len() - 1]]
    }

    fn operands(&self, node: &Node, wanted: impl Fn(usize) -> bool, run: &PartialRun) -> Result<Vec<Tensor>> {
        let spec = node.op.spec();
        let operand = |(index, id): (usize, &ValueId)| {
            let value = self.graph.value(*id);
            match value.kind {
                Kind::Param if spec.accepts_half(index) => self.parameters.stored(&value.name).map_err(failed(&value.name)),
                Kind::Param => self.parameters.get(&value.name).map_err(failed(&value.name)),
                _ => run.get(self.graph, *id),
            }
        };
        let mut operands = node.inputs.iter().enumerate().filter(|(index, _)| wanted(*index)).map(operand).collect::<Result<Vec<Tensor>>>()?;
        if let Some(scheme) = input_scheme(self.graph, node, &self.parameters) {
            operands[0] = self.rounding.round_input(scheme, &operands[0]).map_err(failed(self.name(node)))?;
        }
        Ok(operands)
    }

    fn run_node(&self, index: usize, run: &mut PartialRun) -> Result<Tensor> {
        let node = &self.graph.nodes()[index];
        if let Some(result) = self.run_coded(index, &[], run)? {
            return Ok(result);
        }
        let operands = self.operands(node, |_| true, run)?;
        let result = match run.past.as_mut().and_then(|past| past.get_mut(index)?.as_mut()) {
            Some(past) => self.prepared[index].forward_next(&operands, past),
            None => self.prepared[index].forward(&operands),
        };
        let result = result.and_then(|result| in_precision(&node.op, result, self.parameters.compute())).map_err(failed(self.name(node)))?;
        self.count(node, &operands, &result, run);
        Ok(result)
    }

    /// The value of a node with an epilogue, if its weight consists of integers that a kernel multiplies.
    fn run_coded(&self, index: usize, epilogue: &[Fused<Tensor>], run: &PartialRun) -> Result<Option<Tensor>> {
        let node = &self.graph.nodes()[index];
        let Some(weight) = node.inputs.get(1).filter(|_| node.op.spec().accepts_codes(1)) else { return Ok(None) };
        let Some(matrix) = self.parameters.coded(&self.graph.value(*weight).name) else { return Ok(None) };
        let operands = self.operands(node, |input| input != 1, run)?;
        let result = self.prepared[index].coded(&operands, matrix, epilogue).map_err(failed(self.name(node)))?;
        result.iter().for_each(|result| self.count(node, &operands[..1], result, run));
        Ok(result)
    }

    /// Counts the work of a node, of which the first operands are given.
    fn count(&self, node: &Node, operands: &[Tensor], result: &Tensor, run: &PartialRun) {
        if let Some(account) = &run.account {
            account.count_macs(|| macs(self.graph, node, operands, result));
        }
    }

    /// The value of a step's last node, if a kernel supports the epilogue.
    fn run_fused(&self, step: &FusedNodes, run: &PartialRun) -> Result<Option<Tensor>> {
        let [index, rest @ ..] = step.nodes.as_slice() else { return Ok(None) };
        if rest.is_empty() {
            return Ok(None);
        }
        let first = &self.graph.nodes()[*index];
        let mut epilogue = Vec::with_capacity(rest.len());
        let mut value = first.output;
        for node in rest.iter().map(|index| &self.graph.nodes()[*index]) {
            let other = || node.inputs.iter().find(|id| **id != value).map(|id| run.get(self.graph, *id)).transpose();
            match (&node.op, node.op.activation()) {
                (_, Some(function)) => epilogue.push(Fused::Activate(function)),
                (Op::BatchNorm(op), _) => {
                    let name = self.name(node);
                    let vectors = self.operands(node, |input| input > 0, run)?;
                    let [weight, bias, mean, variance] = vectors.as_slice() else { return Ok(None) };
                    let (scale, shift) = op.scale_and_shift([weight, bias, mean, variance]).map_err(failed(name))?;
                    epilogue.extend([Fused::MultiplyRows(scale), Fused::AddToRows(shift)]);
                }
                (Op::Add(_) | Op::Mul(_), _) => {
                    let Some(other) = other()? else { return Ok(None) };
                    epilogue.push(if matches!(node.op, Op::Add(_)) { Fused::Add(other) } else { Fused::Multiply(other) });
                }
                _ => return Ok(None),
            }
            value = node.output;
        }
        if let Some(result) = self.run_coded(*index, &epilogue, run)? {
            return Ok(Some(result));
        }
        let operands = self.operands(first, |_| true, run)?;
        let result = self.prepared[*index].fused(&operands, &epilogue).map_err(failed(self.name(first)))?;
        result.iter().for_each(|result| self.count(first, &operands, result, run));
        Ok(result)
    }
}

/// A plan for observing values of a graph.
#[derive(Debug)]
pub struct Observation {
    pub(super) steps: Vec<FusedNodes>,
    /// Whether each value is observed.
    observed: Vec<bool>,
}

/// A suspended run: the values computed so far that are still needed.
#[derive(Debug)]
pub struct PartialRun {
    /// The values by id.
    pub(super) values: Vec<Option<Tensor>>,
    /// Number of completed steps of the observation.
    pub(super) done: usize,
    /// Decoding state of each node.
    pub(super) past: Option<Vec<Option<DecodingState>>>,
    account: Option<Account>,
}

/// A copy of a suspended run without memory accounting.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    /// The values by id.
    pub values: Vec<Option<Tensor>>,
    /// Number of completed steps of the observation.
    pub done: usize,
}

impl PartialRun {
    /// A snapshot that shares the tensors.
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot { values: self.values.clone(), done: self.done }
    }

    /// Bytes of its values; memory that several values share counts once for each.
    pub fn bytes(&self) -> u64 {
        self.values.iter().flatten().map(bytes_of).sum()
    }

    fn set(&mut self, id: ValueId, result: Tensor) {
        self.account.iter_mut().for_each(|account| account.record(id.index(), &result));
        self.values[id.index()] = Some(result);
    }

    pub(super) fn drop_dead(&mut self, step: &FusedNodes) {
        step.dead.iter().for_each(|id| self.drop_value(*id));
    }

    fn drop_value(&mut self, id: ValueId) {
        self.values[id.index()] = None;
        self.account.iter_mut().for_each(|account| account.release(id.index()));
    }

    /// Replaces a value.
    pub(super) fn replace(&mut self, id: ValueId, value: Tensor) {
        self.drop_value(id);
        self.set(id, value);
    }

    fn get(&self, graph: &Graph, id: ValueId) -> Result<Tensor> {
        self.values[id.index()].clone().ok_or_else(|| Error::graph(format!("graph value `{}`", graph.value(id).name), "is read before it is computed"))
    }
}

/// The result of an op in the precision of the computation, unless the op keeps 32 bits.
pub(super) fn in_precision(op: &Op, result: Tensor, compute: DType) -> candle_core::Result<Tensor> {
    if result.dtype().is_float() && !op.spec().is_wide() { result.to_dtype(compute) } else { Ok(result) }
}

/// Multiply-accumulate operations of a node that was computed.
pub(super) fn macs(graph: &Graph, node: &Node, operands: &[Tensor], result: &Tensor) -> u64 {
    let operand = |id: ValueId| node.inputs.iter().zip(operands).find(|(input, _)| **input == id).map(|(_, tensor)| tensor);
    analysis::macs_of_node(graph, node, |id| if id == node.output { result.dims() } else { operand(id).map_or(&[], Tensor::dims) })
}

/// Multiply-accumulate operations of a node, with the sizes of all values; those of parameters are fixed.
pub(super) fn macs_of_sizes(graph: &Graph, node: &Node, dims: &[Vec<usize>]) -> u64 {
    analysis::macs_of_node(graph, node, |id| dims.get(id.index()).map_or(&[] as &[usize], Vec::as_slice))
}

/// The scheme in which the first input of a node is rounded, if it is a linear layer with a quantized weight.
pub(super) fn input_scheme(graph: &Graph, node: &Node, parameters: &Parameters) -> Option<ActivationScheme> {
    match (&node.op, node.inputs.as_slice()) {
        (Op::Linear(_), [_, weight, ..]) => parameters.input_scheme(&graph.value(*weight).name),
        _ => None,
    }
}

pub(super) fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    let name = name.to_owned();
    move |e| Error::candle(format!("graph node `{name}`"), e)
}
