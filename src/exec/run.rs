//! Walking the nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::account::{Account, Accounts};
use super::plan::{self, FusedNodes};
use super::sizes::Sizes;
use super::{MemoryTracker, Parameters, Rounding, bytes_of};
use crate::error::{Error, Result};
use crate::ir::ops::{Fused, Op, Past, PreparedOp, contiguous};
use crate::ir::{Graph, Kind, Node, ValueId};

/// Values for the graph's inputs, by name.
pub type Inputs = BTreeMap<String, Tensor>;

/// A graph with its parameters, ready to run.
#[derive(Debug)]
pub struct Executor<'g> {
    graph: &'g Graph,
    parameters: Parameters,
    device: Device,
    rounding: Rounding,
    sizes: Sizes,
    /// By node.
    prepared: Vec<PreparedOp>,
    steps: Vec<FusedNodes>,
    accounts: Option<Accounts>,
}

impl<'g> Executor<'g> {
    /// Prepares a graph.
    pub fn new(graph: &'g Graph, parameters: Parameters, device: Device) -> Self {
        let prepared = graph.nodes().iter().map(|node| PreparedOp::new(&node.op, &device, parameters.compute())).collect();
        let steps = plan::fused(graph, &|id| graph.is_output(id));
        Self { graph, parameters, device, rounding: Rounding::Token, sizes: Sizes::default(), prepared, steps, accounts: None }
    }

    /// Rounds inputs of layers with quantized weights in another way than for each token.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// Enters values into accounts of memory, where there are any.
    #[must_use]
    pub fn tracked(self, tracker: Option<&Arc<MemoryTracker>>) -> Self {
        let accounts = tracker.map(|tracker| Accounts::new(tracker.clone(), self.graph));
        accounts.iter().for_each(|accounts| accounts.load(self.parameters.bytes()));
        Self { accounts, ..self }
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        self.graph
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What is computed together, in order.
    pub(super) fn steps(&self) -> &[FusedNodes] {
        &self.steps
    }

    /// Its parameters.
    pub(super) fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Loads and drops parameters by a function.
    pub(super) fn change_parameters(&mut self, change: impl FnOnce(&mut Parameters)) {
        change(&mut self.parameters);
        self.accounts.iter().for_each(|accounts| accounts.load(self.parameters.bytes()));
    }

    /// Puts a tensor in the place of a parameter.
    pub fn replace(&mut self, name: &str, tensor: Tensor) {
        self.parameters = self.parameters.clone().with(name, tensor);
    }

    /// Runs the graph; outputs have their public names, floats as f32.
    ///
    /// # Errors
    /// An input is missing, has a wrong shape, or names a row that an embedding does not have; memory runs out.
    pub fn run(&self, inputs: &Inputs) -> Result<BTreeMap<String, Tensor>> {
        let mut run = self.start(inputs)?;
        for step in &self.steps {
            self.step(step, &mut run)?;
            run.forget(step);
        }
        self.outputs(&run)
    }

    /// The outputs of a run that is over, under their public names, floats as f32.
    pub(super) fn outputs(&self, run: &PartialRun) -> Result<BTreeMap<String, Tensor>> {
        let output = |(name, id): &(String, ValueId)| {
            let tensor = run.get(self.graph, *id)?;
            let tensor = if tensor.dtype().is_float() { tensor.to_dtype(DType::F32) } else { Ok(tensor) };
            Ok((name.clone(), tensor.and_then(|t| contiguous(&t)).map_err(failed(name))?))
        };
        self.graph.outputs().iter().map(output).collect()
    }

    /// A plan for looking at the values that are wanted, by name: what none of them depends on is not computed, and what is hidden
    /// between them stays fused.
    pub fn observation(&self, wanted: impl Fn(&str) -> bool) -> Observation {
        let wanted: Vec<bool> = self.graph.values().iter().map(|value| wanted(&value.name)).collect();
        Observation { steps: plan::fused(self.graph, &|id| wanted[id.index()]), wanted }
    }

    /// Shows the wanted values that nodes compute, contiguous, in the order in which they are computed.
    ///
    /// # Errors
    /// As [`run`](Executor::run), and whatever the observer says.
    pub fn run_observed(&self, observation: &Observation, inputs: &Inputs, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<()> {
        let mut run = self.start(inputs)?;
        for step in &observation.steps {
            self.step(step, &mut run)?;
            let last = self.last(step).output;
            if observation.wanted[last.index()] {
                observe(&self.graph.value(last).name, &self.shown(&run, last)?)?;
            }
            run.forget(step);
        }
        Ok(())
    }

    /// Runs the graph with the values of the named nodes replaced by the results of `replace`, and returns the outputs as [`run`](Executor::run) does.
    ///
    /// # Errors
    /// As [`run`](Executor::run), and the errors of `replace`.
    pub fn run_replacing(
        &self,
        is_replaced: impl Fn(&str) -> bool,
        inputs: &Inputs,
        replace: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<BTreeMap<String, Tensor>> {
        let is_replaced = |id: ValueId| is_replaced(&self.graph.value(id).name);
        let mut run = self.start(inputs)?;
        for step in &plan::fused(self.graph, &|id| self.graph.is_output(id) || is_replaced(id)) {
            self.step(step, &mut run)?;
            let last = self.last(step).output;
            if is_replaced(last) {
                let replaced = replace(&self.graph.value(last).name, self.shown(&run, last)?)?;
                run.keep(last, replaced);
            }
            run.forget(step);
        }
        self.outputs(&run)
    }

    /// Begins a run that can be stopped.
    ///
    /// # Errors
    /// As [`run`](Executor::run), for the inputs.
    pub fn start(&self, inputs: &Inputs) -> Result<PartialRun> {
        self.start_behind(inputs, 0, None)
    }

    /// The same behind so many tokens of a sequence, of which ops have kept this, by node.
    pub(super) fn start_behind(&self, inputs: &Inputs, tokens: usize, past: Option<Vec<Option<Past>>>) -> Result<PartialRun> {
        let mut run = self.nothing();
        run.past = past;
        for (id, tensor) in self.sizes.take(self.graph, inputs, tokens, &self.device, self.parameters.compute())? {
            run.keep(id, tensor);
        }
        Ok(run)
    }

    /// A run that has computed nothing.
    fn nothing(&self) -> PartialRun {
        PartialRun { values: vec![None; self.graph.values().len()], done: 0, past: None, account: self.accounts.as_ref().map(Accounts::begin) }
    }

    /// Goes on with a run until a wanted value is computed, which is the answer, contiguous. All calls for one run take the same
    /// observation; parameters that were not read so far may be others by then.
    ///
    /// # Errors
    /// As [`run`](Executor::run), or the value is not wanted.
    pub fn advance(&self, observation: &Observation, run: &mut PartialRun, value: &str) -> Result<Tensor> {
        let missing = || Error::graph(format!("graph value `{value}`"), "is not computed");
        let id = self.graph.ids().find(|id| self.graph.value(*id).name == value).ok_or_else(missing)?;
        while run.values[id.index()].is_none() {
            let step = observation.steps.get(run.done).ok_or_else(missing)?;
            self.step(step, run)?;
            run.done += 1;
            if self.last(step).output == id {
                let shown = self.shown(run, id)?;
                run.forget(step);
                return Ok(shown);
            }
            run.forget(step);
        }
        self.shown(run, id)
    }

    /// Goes on with a run until so many steps of an observation are done.
    pub(super) fn advance_to(&self, observation: &Observation, run: &mut PartialRun, steps: usize) -> Result<()> {
        while run.done < steps {
            let step = &observation.steps[run.done];
            self.step(step, run)?;
            run.done += 1;
            run.forget(step);
        }
        Ok(())
    }

    /// A run that goes on where another one was.
    pub(super) fn resume(&self, snapshot: &Snapshot) -> PartialRun {
        let mut run = PartialRun { done: snapshot.done, ..self.nothing() };
        for (id, tensor) in self.graph.ids().zip(&snapshot.values) {
            tensor.iter().for_each(|tensor| run.keep(id, tensor.clone()));
        }
        run
    }

    fn shown(&self, run: &PartialRun, id: ValueId) -> Result<Tensor> {
        contiguous(&run.get(self.graph, id)?).map_err(failed(&self.graph.value(id).name))
    }

    /// Computes the value of a step's last node.
    pub(super) fn step(&self, step: &FusedNodes, run: &mut PartialRun) -> Result<()> {
        if let Some(result) = self.together(step, run)? {
            run.keep(self.last(step).output, result);
            return Ok(());
        }
        for &index in &step.nodes {
            let result = self.alone(index, run)?;
            run.keep(self.graph.nodes()[index].output, result);
        }
        Ok(())
    }

    fn name(&self, node: &Node) -> &str {
        &self.graph.value(node.output).name
    }

    fn last(&self, step: &FusedNodes) -> &Node {
        &self.graph.nodes()[step.nodes[step.nodes.len() - 1]]
    }

    fn operands(&self, node: &Node, ids: &[ValueId], run: &PartialRun) -> Result<Vec<Tensor>> {
        let spec = node.op.spec();
        let operand = |(index, id): (usize, &ValueId)| {
            let value = self.graph.value(*id);
            match value.kind {
                Kind::Param if spec.reads_stored(index) => self.parameters.stored(&value.name).map_err(failed(&value.name)),
                Kind::Param => self.parameters.get(&value.name).map_err(failed(&value.name)),
                _ => run.get(self.graph, *id),
            }
        };
        let mut operands = ids.iter().enumerate().map(operand).collect::<Result<Vec<Tensor>>>()?;
        if let (Op::Linear(_), [_, weight, ..]) = (&node.op, node.inputs.as_slice())
            && let Some(scheme) = self.parameters.rounds_inputs(&self.graph.value(*weight).name)
        {
            operands[0] = self.rounding.of(scheme, &operands[0]).map_err(failed(self.name(node)))?;
        }
        Ok(operands)
    }

    fn alone(&self, index: usize, run: &mut PartialRun) -> Result<Tensor> {
        let node = &self.graph.nodes()[index];
        let operands = self.operands(node, &node.inputs, run)?;
        let result = match run.past.as_mut().and_then(|past| past.get_mut(index)?.as_mut()) {
            Some(past) => self.prepared[index].follow(&operands, past),
            None => self.prepared[index].forward(&operands),
        };
        let compute = self.parameters.compute();
        result.and_then(|t| if t.dtype().is_float() { t.to_dtype(compute) } else { Ok(t) }).map_err(failed(self.name(node)))
    }

    /// The value of a step's last node, if the others can be done within the first.
    fn together(&self, step: &FusedNodes, run: &PartialRun) -> Result<Option<Tensor>> {
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
                    let vectors = self.operands(node, &node.inputs[1..], run)?;
                    let [weight, bias, mean, variance] = vectors.as_slice() else { return Ok(None) };
                    let (scale, shift) = op.channels([weight, bias, mean, variance]).map_err(failed(name))?;
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
        self.prepared[*index].fused(&self.operands(first, &first.inputs, run)?, &epilogue).map_err(failed(self.name(first)))
    }
}

/// Values of a graph that are looked at, and what is computed for them.
#[derive(Debug)]
pub struct Observation {
    pub(super) steps: Vec<FusedNodes>,
    /// By the value's position.
    wanted: Vec<bool>,
}

/// What a run has computed so far and still needs.
#[derive(Debug)]
pub struct PartialRun {
    /// By the value's position.
    pub(super) values: Vec<Option<Tensor>>,
    /// Steps of an observation that are done.
    pub(super) done: usize,
    /// What ops have kept of tokens before, by node.
    pub(super) past: Option<Vec<Option<Past>>>,
    account: Option<Account>,
}

/// Where a run was, without accounts: what it had computed and still needed.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    /// By the value's position.
    pub values: Vec<Option<Tensor>>,
    /// Steps of an observation that are done.
    pub done: usize,
}

impl PartialRun {
    /// Where it is; tensors are shared.
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot { values: self.values.clone(), done: self.done }
    }

    /// Bytes that it holds, of memory that several values share once for each.
    pub fn bytes(&self) -> u64 {
        self.values.iter().flatten().map(bytes_of).sum()
    }

    fn keep(&mut self, id: ValueId, result: Tensor) {
        self.account.iter_mut().for_each(|account| account.take(id.index(), &result));
        self.values[id.index()] = Some(result);
    }

    pub(super) fn forget(&mut self, step: &FusedNodes) {
        step.dead.iter().for_each(|id| self.drop_value(*id));
    }

    fn drop_value(&mut self, id: ValueId) {
        self.values[id.index()] = None;
        self.account.iter_mut().for_each(|account| account.give(id.index()));
    }

    /// Puts a value in the place of another one.
    pub(super) fn replace(&mut self, id: ValueId, value: Tensor) {
        self.drop_value(id);
        self.keep(id, value);
    }

    fn get(&self, graph: &Graph, id: ValueId) -> Result<Tensor> {
        self.values[id.index()].clone().ok_or_else(|| Error::graph(format!("graph value `{}`", graph.value(id).name), "is read before it is computed"))
    }
}

pub(super) fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    let name = name.to_owned();
    move |e| Error::computed(format!("graph node `{name}`"), e)
}
