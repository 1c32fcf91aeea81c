//! Several typed ops that are one: what exporters take apart is put together again, each pattern a row of the table.
//!
//! A pattern is recognised at its last node. What it stands for reads the values that the pattern begins with; inner values that something else
//! reads too stay.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod attention;
mod rotary;

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::super::piece::Piece;
use crate::error::Result;
use crate::ir::ops::{BinaryKind, Clip, Gelu, HardSigmoid, HardSwish, LayerNorm, Linear, Power, Reduce, ReduceKind, RmsNorm, Silu};
use crate::ir::{Builder, Graph, Kind, Node, Op, TensorType, ValueId, rebuild};
use crate::store::Weights;

/// What stands for a pattern whose last node this is, and what that reads.
type Pattern = fn(&Seen, &Node) -> Found;

/// An op and what it reads.
type Found = Option<(Op, Vec<Read>)>;

/// A value that is read, through an op of its own where the file has it in another order of axes.
#[derive(Debug, Clone)]
struct Read {
    value: ValueId,
    through: Option<Op>,
}

impl From<ValueId> for Read {
    fn from(value: ValueId) -> Read {
        Read { value, through: None }
    }
}

/// The patterns, by what they are; the first that fits counts.
const PATTERNS: [(&str, Pattern); 10] = [
    ("LayerNorm", layer_norm),
    ("RmsNorm", rms_norm),
    ("Gelu", gelu),
    ("Silu", silu),
    ("HardSwish", hard_swish),
    ("Linear with its bias", with_bias),
    ("SplitHeads", attention::split_heads),
    ("MergeHeads", attention::merge_heads),
    ("Attention", attention::attention),
    ("Rotary", rotary::rotary),
];

/// How far constants may be from what they stand for, relative to it: they are floats of 32 bits.
const CLOSE: f64 = 1e-6;
/// Values that are multiplied, at most.
const FACTORS: usize = 4;
/// Nodes that are looked at for a product, at most.
const STEPS: usize = 16;

/// Puts patterns together.
///
/// # Errors
/// The graph does not fit the weights.
pub(super) fn together(graph: &Graph, weights: &Weights) -> Result<Graph> {
    let seen = Seen::new(graph, weights);
    // What is read, in the graph that is made.
    let (mut made, mut turned) = (BTreeMap::<ValueId, ValueId>::new(), Turned::default());
    rebuild(graph, weights, &mut |step| {
        made.extend(step.node.inputs.iter().copied().zip(step.inputs.iter().copied()));
        for (_, pattern) in PATTERNS {
            if let Some((op, reads)) = pattern(&seen, step.node)
                && let Some(inputs) = reads.into_iter().map(|read| turned.read(graph, read, &made, step.builder)).collect::<Option<Vec<_>>>()
                && fits(&op, &inputs, step.builder, &graph.value(step.node.output).ty)
                && let Ok(whole) = step.builder.node(step.name, op, &inputs)
            {
                return Ok(whole);
            }
        }
        step.keep()
    })
}

/// Whether an op of such inputs gives what the pattern gives.
fn fits(op: &Op, inputs: &[ValueId], builder: &Builder, wanted: &TensorType) -> bool {
    let types: Vec<&TensorType> = inputs.iter().map(|id| builder.ty(*id)).collect();
    op.spec().output(&types).is_ok_and(|ty| ty == *wanted)
}

/// Values that are read through an op, in the graph that is made, by name.
#[derive(Default)]
struct Turned(BTreeMap<(ValueId, String), ValueId>);

impl Turned {
    fn read(&mut self, graph: &Graph, read: Read, made: &BTreeMap<ValueId, ValueId>, builder: &mut Builder) -> Option<ValueId> {
        let (value, Some(op)) = (made.get(&read.value).copied()?, read.through) else { return made.get(&read.value).copied() };
        let key = (read.value, op.to_string());
        if let Some(id) = self.0.get(&key) {
            return Some(*id);
        }
        let id = builder.node(&format!("{}/{}", graph.value(read.value).name, op.name()), op, &[value]).ok()?;
        self.0.insert(key, id);
        Some(id)
    }
}

/// Bases of rotary embeddings, or that there is none, by tables of cosines and sines and what names their length and width.
type Bases = BTreeMap<(ValueId, ValueId, Vec<String>), Option<f64>>;

/// A graph that is looked at.
struct Seen<'g> {
    graph: &'g Graph,
    weights: &'g Weights,
    /// Nodes by what they compute.
    makers: BTreeMap<ValueId, &'g Node>,
    /// How many read a value.
    readers: BTreeMap<ValueId, usize>,
    /// As far as they were asked for.
    bases: RefCell<Bases>,
}

/// Values that are multiplied with each other and a number.
struct Product {
    values: Vec<ValueId>,
    factor: f64,
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= CLOSE * b.abs()
}

impl<'g> Seen<'g> {
    fn new(graph: &'g Graph, weights: &'g Weights) -> Self {
        let mut readers: BTreeMap<ValueId, usize> = BTreeMap::new();
        for id in graph.nodes().iter().flat_map(|node| &node.inputs).chain(graph.outputs().iter().map(|(_, id)| id)) {
            let count = readers.entry(*id).or_default();
            *count = count.saturating_add(1);
        }
        Seen { graph, weights, makers: graph.nodes().iter().map(|node| (node.output, node)).collect(), readers, bases: RefCell::default() }
    }

    fn maker(&self, id: ValueId) -> Option<&'g Node> {
        self.makers.get(&id).copied()
    }

    /// The number that a value is, where it follows from weights of one element.
    fn number(&self, id: ValueId) -> Option<f64> {
        let mut steps = STEPS;
        self.number_within(id, &mut steps)
    }

    fn number_within(&self, id: ValueId, steps: &mut usize) -> Option<f64> {
        if let Some(node) = self.maker(id) {
            let mut of = |at: usize| {
                *steps = steps.checked_sub(1)?;
                self.number_within(*node.inputs.get(at)?, steps)
            };
            let single = || self.graph.value(id).ty.shape.iter().all(|size| size.fixed() == Some(1));
            return match &node.op {
                Op::Opaque(opaque) if node.inputs.is_empty() && single() => opaque.function.as_ref()?.as_any().downcast_ref::<Piece>()?.number(),
                Op::Sqrt(_) => of(0).map(f64::sqrt),
                Op::Reciprocal(_) => of(0).map(f64::recip),
                Op::Power(Power { exponent }) => of(0).map(|number| number.powf(*exponent)),
                Op::Binary(binary) if binary.kind == BinaryKind::Div => Some(of(0)? / of(1)?),
                Op::Mul(_) => Some(of(0)? * of(1)?),
                _ => None,
            };
        }
        let value = self.graph.value(id);
        let weight = self.weights.by_name.get(&value.name).filter(|weight| value.kind == Kind::Param && weight.elements() == 1)?;
        weight.floats(&value.name).ok()?.first().map(|number| f64::from(*number))
    }

    /// Whether a value is a weight with a number for each place of the last axis of another.
    fn is_vector(&self, id: ValueId, of: ValueId) -> bool {
        let (value, of) = (self.graph.value(id), self.graph.value(of));
        value.kind == Kind::Param && value.ty.shape.len() == 1 && value.ty.shape.last() == of.ty.shape.last()
    }

    /// What a value is the sum of, and the number that is added.
    fn plus(&self, id: ValueId) -> Option<(ValueId, f64)> {
        let node = self.maker(id).filter(|node| matches!(node.op, Op::Add(_)))?;
        let [a, b] = node.inputs.as_slice() else { return None };
        self.number(*b).map(|number| (*a, number)).or_else(|| self.number(*a).map(|number| (*b, number)))
    }

    /// The only input of an op.
    fn of(&self, id: ValueId, is: impl Fn(&Op) -> bool) -> Option<ValueId> {
        self.maker(id).filter(|node| is(&node.op)).and_then(|node| node.inputs.first().copied())
    }

    /// The mean over the last axis, which stays: what it is the mean of.
    fn mean(&self, id: ValueId) -> Option<ValueId> {
        let node = self.maker(id)?;
        let (Op::Reduce(Reduce { kind: ReduceKind::Mean, axes, keep: true }), [x]) = (&node.op, node.inputs.as_slice()) else { return None };
        let last = i64::try_from(self.graph.value(*x).ty.shape.len()).ok()?.saturating_sub(1);
        (axes.as_slice() == [-1] || axes.as_slice() == [last]).then_some(*x)
    }

    /// What a value is the square of.
    fn square(&self, id: ValueId) -> Option<ValueId> {
        let node = self.maker(id)?;
        match (&node.op, node.inputs.as_slice()) {
            (Op::Power(Power { exponent }), [x]) if *exponent == 2.0 => Some(*x),
            (Op::Mul(_), [a, b]) if a == b => Some(*a),
            _ => None,
        }
    }

    /// What is over the root of the mean of its square plus a number: that, what is squared, and the number.
    fn over_root(&self, id: ValueId) -> Option<(ValueId, ValueId, f64)> {
        let node = self.maker(id)?;
        let (x, sum) = match (&node.op, node.inputs.as_slice()) {
            (Op::Binary(binary), [x, root]) if binary.kind == BinaryKind::Div => (*x, self.root(*root)?),
            (Op::Mul(_), [a, b]) => self.one_over_root(*b).map(|sum| (*a, sum)).or_else(|| self.one_over_root(*a).map(|sum| (*b, sum)))?,
            _ => return None,
        };
        let (mean, epsilon) = self.plus(sum)?;
        Some((x, self.square(self.mean(mean)?)?, epsilon))
    }

    fn root(&self, id: ValueId) -> Option<ValueId> {
        self.of(id, |op| matches!(op, Op::Sqrt(_)) || matches!(op, Op::Power(Power { exponent }) if *exponent == 0.5))
    }

    fn one_over_root(&self, id: ValueId) -> Option<ValueId> {
        let direct = self.of(id, |op| matches!(op, Op::Power(Power { exponent }) if *exponent == -0.5));
        let over = || {
            let maker = self.maker(id).filter(|maker| matches!(&maker.op, Op::Binary(binary) if binary.kind == BinaryKind::Div))?;
            maker.inputs.get(1).copied().filter(|_| maker.inputs.first().is_some_and(|one| self.number(*one) == Some(1.0)))
        };
        direct.or_else(|| self.root(self.of(id, |op| matches!(op, Op::Reciprocal(_))).or_else(over)?))
    }

    /// The values and the number that a value is the product of.
    fn product(&self, id: ValueId) -> Product {
        let (mut values, mut factor, mut open, mut steps) = (Vec::new(), 1.0, vec![id], 0usize);
        while let Some(id) = open.pop() {
            steps = steps.saturating_add(1);
            if let Some(number) = self.number(id) {
                factor *= number;
                continue;
            }
            match self.maker(id).filter(|_| steps <= STEPS).map(|node| (&node.op, node.inputs.as_slice())) {
                Some((Op::Mul(_), [a, b])) if open.len().saturating_add(values.len()) < FACTORS => open.extend([*a, *b]),
                Some((Op::Binary(binary), [a, b])) if binary.kind == BinaryKind::Div && self.number(*b).is_some_and(|by| by != 0.0) => {
                    factor /= self.number(*b).unwrap_or(1.0);
                    open.push(*a);
                }
                _ => values.push(id),
            }
        }
        Product { values, factor }
    }

    /// Of a product of two values: both orders.
    fn both(&self, id: ValueId, factor: f64) -> Vec<(ValueId, ValueId)> {
        match (self.product(id), factor) {
            (Product { values, factor }, wanted) if close(factor, wanted) => match values.as_slice() {
                [a, b] => vec![(*a, *b), (*b, *a)],
                _ => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Whether a value is another one times a number.
    fn is_times(&self, id: ValueId, x: ValueId, factor: f64) -> bool {
        let product = self.product(id);
        product.values == [x] && close(product.factor, factor)
    }
}

/// `(x - mean) / sqrt(mean((x - mean)²) + epsilon) · weight + bias`.
fn layer_norm(seen: &Seen, node: &Node) -> Found {
    let [a, b] = node.inputs.as_slice() else { return None };
    [(*a, *b), (*b, *a)].into_iter().find_map(|(value, vector)| match &node.op {
        Op::Add(_) => {
            let scaled = seen.maker(value).filter(|_| seen.is_vector(vector, node.output))?;
            let (op, mut inputs) = layer_norm(seen, Some(scaled).filter(|scaled| matches!(scaled.op, Op::Mul(_)))?)?;
            inputs.push(vector.into());
            Some((op, inputs))
        }
        Op::Mul(_) if seen.is_vector(vector, node.output) => {
            let (centred, squared, epsilon) = seen.over_root(value)?;
            let difference = |id: ValueId| {
                let maker = seen.maker(id).filter(|maker| matches!(&maker.op, Op::Binary(binary) if binary.kind == BinaryKind::Sub))?;
                let [x, mean] = maker.inputs.as_slice() else { return None };
                (seen.mean(*mean)? == *x).then_some(*x)
            };
            let x = difference(centred)?;
            (centred == squared || difference(squared) == Some(x)).then(|| (LayerNorm { epsilon }.into(), vec![x.into(), vector.into()]))
        }
        _ => None,
    })
}

/// `x / sqrt(mean(x²) + epsilon) · weight`.
fn rms_norm(seen: &Seen, node: &Node) -> Found {
    let [a, b] = node.inputs.as_slice() else { return None };
    let sides = [(*a, *b), (*b, *a)].into_iter().filter(|(_, weight)| matches!(node.op, Op::Mul(_)) && seen.is_vector(*weight, node.output));
    sides.into_iter().find_map(|(normed, weight)| {
        let (x, squared, epsilon) = seen.over_root(normed)?;
        (x == squared).then(|| (RmsNorm { epsilon, offset: 0.0 }.into(), vec![x.into(), weight.into()]))
    })
}

/// `x · (1 + erf(x / sqrt(2))) / 2`, or the same by a hyperbolic tangent.
fn gelu(seen: &Seen, node: &Node) -> Found {
    seen.both(node.output, 0.5).into_iter().find_map(|(x, sum)| {
        let (inner, one) = seen.plus(sum)?;
        let tanh = if let Some(argument) = seen.of(inner, |op| matches!(op, Op::Erf(_))) {
            seen.is_times(argument, x, std::f64::consts::FRAC_1_SQRT_2).then_some(false)?
        } else {
            let argument = seen.of(inner, |op| matches!(op, Op::Tanh(_)))?;
            let Product { values, factor } = seen.product(argument);
            let [sum] = values.as_slice() else { return None };
            let [a, b] = seen.maker(*sum).filter(|maker| matches!(maker.op, Op::Add(_)))?.inputs.as_slice() else { return None };
            let cubic = |id: ValueId| {
                let Product { values, factor } = seen.product(id);
                let cube = |id: &ValueId| seen.of(*id, |op| matches!(op, Op::Power(Power { exponent }) if *exponent == 3.0)) == Some(x);
                let whole = values == [x, x, x] || (values.len() == 1 && values.iter().all(cube));
                let square = values.len() == 2 && values.contains(&x) && values.iter().any(|id| seen.square(*id) == Some(x));
                (whole || square) && close(factor, 0.044_715)
            };
            let root = close(factor, (2.0 / std::f64::consts::PI).sqrt());
            (root && ((*a == x && cubic(*b)) || (*b == x && cubic(*a)))).then_some(true)?
        };
        (one == 1.0).then(|| (Gelu { tanh }.into(), vec![x.into()]))
    })
}

/// `x · sigmoid(x)`.
fn silu(seen: &Seen, node: &Node) -> Found {
    let mut both = seen.both(node.output, 1.0).into_iter();
    both.find_map(|(x, gate)| {
        let argument = seen.of(gate, |op| matches!(op, Op::Sigmoid(_)))?;
        (argument == x || seen.is_times(argument, x, 1.0)).then(|| (Silu {}.into(), vec![x.into()]))
    })
}

/// `x · clip(x + 3, 0, 6) / 6`, or `x · hardsigmoid(x)` with a slope of a sixth.
fn hard_swish(seen: &Seen, node: &Node) -> Found {
    let sixth = 1.0 / 6.0;
    let clipped = |(x, gate): (ValueId, ValueId)| {
        let sum = seen.of(gate, |op| matches!(op, Op::Clip(Clip { min, max }) if *min == 0.0 && *max == 6.0))?;
        (seen.plus(sum)? == (x, 3.0)).then_some(x)
    };
    let gated = |(x, gate): (ValueId, ValueId)| {
        let hard = |op: &Op| matches!(op, Op::HardSigmoid(HardSigmoid { alpha, beta }) if close(*alpha, sixth) && *beta == 0.5);
        (seen.of(gate, hard)? == x).then_some(x)
    };
    let x = seen.both(node.output, sixth).into_iter().find_map(clipped).or_else(|| seen.both(node.output, 1.0).into_iter().find_map(gated))?;
    Some((HardSwish {}.into(), vec![x.into()]))
}

/// Products whose only reader adds a vector take it as their bias.
fn with_bias(seen: &Seen, node: &Node) -> Found {
    let [a, b] = node.inputs.as_slice() else { return None };
    let sides = [(*a, *b), (*b, *a)].into_iter().filter(|(_, bias)| matches!(node.op, Op::Add(_)) && seen.is_vector(*bias, node.output));
    sides.into_iter().find_map(|(product, bias)| {
        let maker = seen.maker(product).filter(|maker| matches!(maker.op, Op::Linear(_)) && seen.readers.get(&product) == Some(&1))?;
        let [x, weight] = maker.inputs.as_slice() else { return None };
        Some((Linear { input_major: false }.into(), vec![(*x).into(), (*weight).into(), bias.into()]))
    })
}
