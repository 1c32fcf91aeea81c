//! Fusion of patterns of typed ops into single ops, which exporters had decomposed.
//!
//! A pattern is matched at its last node. The fused op reads the inputs of the pattern. Inner values
//! with other consumers remain.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod attention;
mod mish;
mod normalize;
mod rotary;
mod rows;
mod tokens;

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::super::check;
use super::super::opaque_subgraph::OpaqueSubgraph;
use crate::error::Result;
use crate::ir::ops::{BinaryKind, Clip, Gelu, HardSigmoid, HardSwish, LayerNorm, Linear, Power, Reduce, ReduceKind, RmsNorm, Silu};
use crate::ir::{Builder, Graph, Kind, Node, Op, TensorType, ValueId, rebuild};
use crate::store::Weights;

/// Matches a pattern that ends at a node.
type Pattern = fn(&Matcher, &Node) -> Match;

/// The fused op and its operands.
type Match = Option<(Op, Vec<Operand>)>;

/// A value of the graph, after an optional op that rearranges its axes.
#[derive(Debug, Clone)]
struct Operand {
    value: ValueId,
    through: Option<Op>,
}

impl From<ValueId> for Operand {
    fn from(value: ValueId) -> Operand {
        Operand { value, through: None }
    }
}

/// The patterns by name. The first match is used.
const PATTERNS: &[(&str, Pattern)] = &[
    ("LayerNorm", layer_norm),
    ("RmsNorm", rms_norm),
    ("Gelu", gelu),
    ("Silu", silu),
    ("HardSwish", hard_swish),
    ("Mish", mish::mish),
    ("Normalize", normalize::normalize),
    ("Linear with bias", with_bias),
    ("Linear of rows", rows::linear),
    ("Prepend", tokens::prepend),
    ("SplitHeads", attention::split_heads),
    ("MergeHeads", attention::merge_heads),
    ("Attention", attention::attention),
    ("Rotary", rotary::rotary),
    ("Rotary of a part of the head", rotary::partial),
];

/// Relative tolerance for constants, which are 32-bit floats.
const CLOSE: f64 = 1e-6;
/// Maximum number of factors of a product.
const FACTORS: usize = 4;
/// Maximum number of visited nodes per product.
const STEPS: usize = 16;

/// Fuses all patterns of a graph.
pub(super) fn fuse(graph: &Graph, weights: &Weights) -> Result<Graph> {
    let matcher = Matcher::new(graph, weights);
    // Values of the rebuilt graph, by value of the original one.
    let (mut rebuilt, mut views) = (BTreeMap::<ValueId, ValueId>::new(), OperandViews::default());
    rebuild(graph, weights, &mut |step| {
        rebuilt.extend(step.node.inputs.iter().copied().zip(step.inputs.iter().copied()));
        for (_, pattern) in PATTERNS {
            if let Some((op, operands)) = pattern(&matcher, step.node)
                && let Some(inputs) = operands.into_iter().map(|operand| views.resolve(graph, operand, &rebuilt, step.builder)).collect::<Option<Vec<_>>>()
                && fits(&op, &inputs, step.builder, &graph.value(step.node.output).ty)
                && let Ok(fused) = step.builder.node(step.name, op, &inputs)
            {
                return Ok(fused);
            }
        }
        step.copy()
    })
}

/// Whether an op with these inputs has the output type of the pattern.
fn fits(op: &Op, inputs: &[ValueId], builder: &Builder, expected: &TensorType) -> bool {
    let types: Vec<&TensorType> = inputs.iter().map(|id| builder.ty(*id)).collect();
    op.spec().output(&types).is_ok_and(|ty| ty == *expected)
}

/// Rearranged operands in the rebuilt graph, by value and op.
#[derive(Default)]
struct OperandViews(BTreeMap<(ValueId, String), ValueId>);

impl OperandViews {
    fn resolve(&mut self, graph: &Graph, operand: Operand, rebuilt: &BTreeMap<ValueId, ValueId>, builder: &mut Builder) -> Option<ValueId> {
        let (value, Some(op)) = (rebuilt.get(&operand.value).copied()?, operand.through) else { return rebuilt.get(&operand.value).copied() };
        let key = (operand.value, op.to_string());
        if let Some(id) = self.0.get(&key) {
            return Some(*id);
        }
        let id = builder.node(&format!("{}/{}", graph.value(operand.value).name, op.name()), op, &[value]).ok()?;
        self.0.insert(key, id);
        Some(id)
    }
}

/// Bases of rotary embeddings (`None` if the tables have none), by cosine table, sine table, and the
/// dimensions of length and width.
type Bases = BTreeMap<(ValueId, ValueId, Vec<String>), Option<f64>>;

/// A graph with lookup tables for pattern matching.
struct Matcher<'g> {
    graph: &'g Graph,
    weights: &'g Weights,
    /// Producers of values.
    producers: BTreeMap<ValueId, &'g Node>,
    /// Number of consumers of each value.
    readers: BTreeMap<ValueId, usize>,
    /// Cached bases.
    bases: RefCell<Bases>,
}

/// A product of values and a constant factor.
struct Product {
    values: Vec<ValueId>,
    factor: f64,
}

fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= CLOSE * b.abs()
}

impl<'g> Matcher<'g> {
    fn new(graph: &'g Graph, weights: &'g Weights) -> Self {
        let mut readers: BTreeMap<ValueId, usize> = BTreeMap::new();
        for id in graph.nodes().iter().flat_map(|node| &node.inputs).chain(graph.outputs().iter().map(|(_, id)| id)) {
            let count = readers.entry(*id).or_default();
            *count = count.saturating_add(1);
        }
        Matcher { graph, weights, producers: graph.nodes().iter().map(|node| (node.output, node)).collect(), readers, bases: RefCell::default() }
    }

    fn producer(&self, id: ValueId) -> Option<&'g Node> {
        self.producers.get(&id).copied()
    }

    /// The constant that a value equals, if it is computed from weights of one element.
    fn number(&self, id: ValueId) -> Option<f64> {
        let mut steps = STEPS;
        self.number_within(id, &mut steps)
    }

    fn number_within(&self, id: ValueId, steps: &mut usize) -> Option<f64> {
        if let Some(node) = self.producer(id) {
            let mut of = |at: usize| {
                *steps = steps.checked_sub(1)?;
                self.number_within(*node.inputs.get(at)?, steps)
            };
            let single = || self.graph.value(id).ty.shape.iter().all(|size| size.fixed() == Some(1));
            return match &node.op {
                Op::Opaque(opaque) if node.inputs.is_empty() && single() => opaque.function.as_ref()?.as_any().downcast_ref::<OpaqueSubgraph>()?.number(),
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

    /// Whether a value is a weight `[n]`, where `n` is the last size of `of`.
    fn is_vector(&self, id: ValueId, of: ValueId) -> bool {
        let (value, of) = (self.graph.value(id), self.graph.value(of));
        value.kind == Kind::Param && value.ty.shape.len() == 1 && value.ty.shape.last() == of.ty.shape.last()
    }

    /// For the sum of a value and a constant: both.
    fn plus_constant(&self, id: ValueId) -> Option<(ValueId, f64)> {
        let node = self.producer(id).filter(|node| matches!(node.op, Op::Add(_)))?;
        let [a, b] = node.inputs.as_slice() else { return None };
        self.number(*b).map(|number| (*a, number)).or_else(|| self.number(*a).map(|number| (*b, number)))
    }

    /// The first input of the producer of a value, if the op matches.
    fn input_of(&self, id: ValueId, is: impl Fn(&Op) -> bool) -> Option<ValueId> {
        self.producer(id).filter(|node| is(&node.op)).and_then(|node| node.inputs.first().copied())
    }

    /// For a value that an opaque subgraph computes with this operator as its last node: the value of the
    /// graph that the node reads first.
    fn first_operand(&self, id: ValueId, operator: &str) -> Option<ValueId> {
        let node = self.producer(id)?;
        let Op::Opaque(opaque) = &node.op else { return None };
        let subgraph = opaque.function.as_ref()?.as_any().downcast_ref::<OpaqueSubgraph>()?;
        let parts = subgraph.parts();
        let last = parts.nodes.last().filter(|last| last.op_type() == operator && check::is_own(last.domain()))?;
        let first = last.input.first().filter(|_| last.output.first() == Some(&subgraph.output))?;
        node.inputs.get(parts.inputs.iter().position(|(name, _)| name == first)?).copied()
    }

    /// The input of a reduction over the last axis that keeps the axis.
    fn reduced(&self, id: ValueId, wanted: ReduceKind) -> Option<ValueId> {
        let node = self.producer(id)?;
        let (Op::Reduce(Reduce { kind, axes, keep_dims: true }), [x]) = (&node.op, node.inputs.as_slice()) else { return None };
        let last = i64::try_from(self.graph.value(*x).ty.shape.len()).ok()?.saturating_sub(1);
        (*kind == wanted && (axes.as_slice() == [-1] || axes.as_slice() == [last])).then_some(*x)
    }

    /// The value of which this is the square.
    fn square(&self, id: ValueId) -> Option<ValueId> {
        let node = self.producer(id)?;
        match (&node.op, node.inputs.as_slice()) {
            (Op::Power(Power { exponent }), [x]) if *exponent == 2.0 => Some(*x),
            (Op::Mul(_), [a, b]) if a == b => Some(*a),
            _ => None,
        }
    }

    /// For `x / sqrt(mean(y²) + epsilon)`: `x`, `y` and `epsilon`.
    fn divided_by_rms(&self, id: ValueId) -> Option<(ValueId, ValueId, f64)> {
        let node = self.producer(id)?;
        let (x, sum) = match (&node.op, node.inputs.as_slice()) {
            (Op::Binary(binary), [x, root]) if binary.kind == BinaryKind::Div => (*x, self.root(*root)?),
            (Op::Mul(_), [a, b]) => self.one_over_root(*b).map(|sum| (*a, sum)).or_else(|| self.one_over_root(*a).map(|sum| (*b, sum)))?,
            _ => return None,
        };
        let (mean, epsilon) = self.plus_constant(sum)?;
        Some((x, self.square(self.reduced(mean, ReduceKind::Mean)?)?, epsilon))
    }

    fn root(&self, id: ValueId) -> Option<ValueId> {
        self.input_of(id, |op| matches!(op, Op::Sqrt(_)) || matches!(op, Op::Power(Power { exponent }) if *exponent == 0.5))
    }

    fn one_over_root(&self, id: ValueId) -> Option<ValueId> {
        let direct = self.input_of(id, |op| matches!(op, Op::Power(Power { exponent }) if *exponent == -0.5));
        let over = || {
            let producer = self.producer(id).filter(|producer| matches!(&producer.op, Op::Binary(binary) if binary.kind == BinaryKind::Div))?;
            producer.inputs.get(1).copied().filter(|_| producer.inputs.first().is_some_and(|one| self.number(*one) == Some(1.0)))
        };
        direct.or_else(|| self.root(self.input_of(id, |op| matches!(op, Op::Reciprocal(_))).or_else(over)?))
    }

    /// Decomposes a value into factors.
    fn product(&self, id: ValueId) -> Product {
        self.product_of(id, |_| true)
    }

    /// Decomposes a value into factors, except inner values that are not `divisible`.
    fn product_of(&self, product: ValueId, divisible: impl Fn(ValueId) -> bool) -> Product {
        let (mut values, mut factor, mut open, mut steps) = (Vec::new(), 1.0, vec![product], 0usize);
        while let Some(id) = open.pop() {
            steps = steps.saturating_add(1);
            if let Some(number) = self.number(id) {
                factor *= number;
                continue;
            }
            let is_divided = steps <= STEPS && (id == product || divisible(id));
            match self.producer(id).filter(|_| is_divided).map(|node| (&node.op, node.inputs.as_slice())) {
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

    /// The two factors of a product with this constant factor, in both orders. A factor with several
    /// consumers can be a product itself.
    fn factor_pairs(&self, id: ValueId, wanted: f64) -> Vec<(ValueId, ValueId)> {
        let pairs = |Product { values, factor }: Product| match values.as_slice() {
            [a, b] if is_close(factor, wanted) => vec![(*a, *b), (*b, *a)],
            _ => Vec::new(),
        };
        let found = pairs(self.product(id));
        if found.is_empty() { pairs(self.product_of(id, |inner| self.readers.get(&inner) == Some(&1))) } else { found }
    }

    /// Whether a value is `x` times a constant.
    fn is_times(&self, id: ValueId, x: ValueId, factor: f64) -> bool {
        let product = self.product_of(id, |inner| inner != x);
        product.values == [x] && is_close(product.factor, factor)
    }
}

/// `(x - mean) / sqrt(mean((x - mean)²) + epsilon) · weight + bias`.
fn layer_norm(matcher: &Matcher, node: &Node) -> Match {
    let [a, b] = node.inputs.as_slice() else { return None };
    [(*a, *b), (*b, *a)].into_iter().find_map(|(value, vector)| match &node.op {
        Op::Add(_) => {
            let scaled = matcher.producer(value).filter(|_| matcher.is_vector(vector, node.output))?;
            let (op, mut inputs) = layer_norm(matcher, Some(scaled).filter(|scaled| matches!(scaled.op, Op::Mul(_)))?)?;
            inputs.push(vector.into());
            Some((op, inputs))
        }
        Op::Mul(_) if matcher.is_vector(vector, node.output) => {
            let (centred, squared, epsilon) = matcher.divided_by_rms(value)?;
            let difference = |id: ValueId| {
                let producer = matcher.producer(id).filter(|producer| matches!(&producer.op, Op::Binary(binary) if binary.kind == BinaryKind::Sub))?;
                let [x, mean] = producer.inputs.as_slice() else { return None };
                (matcher.reduced(*mean, ReduceKind::Mean)? == *x).then_some(*x)
            };
            let x = difference(centred)?;
            (centred == squared || difference(squared) == Some(x)).then(|| (LayerNorm { epsilon }.into(), vec![x.into(), vector.into()]))
        }
        _ => None,
    })
}

/// `x / sqrt(mean(x²) + epsilon) · weight`.
fn rms_norm(matcher: &Matcher, node: &Node) -> Match {
    let [a, b] = node.inputs.as_slice() else { return None };
    let sides = [(*a, *b), (*b, *a)].into_iter().filter(|(_, weight)| matches!(node.op, Op::Mul(_)) && matcher.is_vector(*weight, node.output));
    sides.into_iter().find_map(|(normed, weight)| {
        let (x, squared, epsilon) = matcher.divided_by_rms(normed)?;
        (x == squared).then(|| (RmsNorm { epsilon, offset: 0.0 }.into(), vec![x.into(), weight.into()]))
    })
}

/// `x · (1 + erf(x / sqrt(2))) / 2`, or its tanh approximation.
fn gelu(matcher: &Matcher, node: &Node) -> Match {
    matcher.factor_pairs(node.output, 0.5).into_iter().find_map(|(x, sum)| {
        let (inner, one) = matcher.plus_constant(sum)?;
        let tanh = if let Some(argument) = matcher.input_of(inner, |op| matches!(op, Op::Erf(_))) {
            matcher.is_times(argument, x, std::f64::consts::FRAC_1_SQRT_2).then_some(false)?
        } else {
            let argument = matcher.input_of(inner, |op| matches!(op, Op::Tanh(_)))?;
            let Product { values, factor } = matcher.product(argument);
            let [sum] = values.as_slice() else { return None };
            let [a, b] = matcher.producer(*sum).filter(|producer| matches!(producer.op, Op::Add(_)))?.inputs.as_slice() else { return None };
            let cubic = |id: ValueId| {
                let Product { values, factor } = matcher.product_of(id, |inner| inner != x);
                let cube = |id: &ValueId| matcher.input_of(*id, |op| matches!(op, Op::Power(Power { exponent }) if *exponent == 3.0)) == Some(x);
                let fused = values == [x, x, x] || (values.len() == 1 && values.iter().all(cube));
                let square = values.len() == 2 && values.contains(&x) && values.iter().any(|id| matcher.square(*id) == Some(x));
                (fused || square) && is_close(factor, 0.044_715)
            };
            let root = is_close(factor, (2.0 / std::f64::consts::PI).sqrt());
            (root && ((*a == x && cubic(*b)) || (*b == x && cubic(*a)))).then_some(true)?
        };
        (one == 1.0).then(|| (Gelu { tanh }.into(), vec![x.into()]))
    })
}

/// `x · sigmoid(x)`.
fn silu(matcher: &Matcher, node: &Node) -> Match {
    let mut factor_pairs = matcher.factor_pairs(node.output, 1.0).into_iter();
    factor_pairs.find_map(|(x, gate)| {
        let argument = matcher.input_of(gate, |op| matches!(op, Op::Sigmoid(_)))?;
        (argument == x || matcher.is_times(argument, x, 1.0)).then(|| (Silu {}.into(), vec![x.into()]))
    })
}

/// `x · clip(x + 3, 0, 6) / 6`, or `x · hardsigmoid(x)` with a slope of 1/6.
fn hard_swish(matcher: &Matcher, node: &Node) -> Match {
    let sixth = 1.0 / 6.0;
    let clipped = |(x, gate): (ValueId, ValueId)| {
        let sum = matcher.input_of(gate, |op| matches!(op, Op::Clip(Clip { min, max }) if *min == 0.0 && *max == 6.0))?;
        (matcher.plus_constant(sum)? == (x, 3.0)).then_some(x)
    };
    let gated = |(x, gate): (ValueId, ValueId)| {
        let hard = |op: &Op| matches!(op, Op::HardSigmoid(HardSigmoid { alpha, beta }) if is_close(*alpha, sixth) && *beta == 0.5);
        (matcher.input_of(gate, hard)? == x).then_some(x)
    };
    let x = matcher
        .factor_pairs(node.output, sixth)
        .into_iter()
        .find_map(clipped)
        .or_else(|| matcher.factor_pairs(node.output, 1.0).into_iter().find_map(gated))?;
    Some((HardSwish {}.into(), vec![x.into()]))
}

/// Adds the bias to a linear layer whose only consumer adds a vector.
fn with_bias(matcher: &Matcher, node: &Node) -> Match {
    let [a, b] = node.inputs.as_slice() else { return None };
    let sides = [(*a, *b), (*b, *a)].into_iter().filter(|(_, bias)| matches!(node.op, Op::Add(_)) && matcher.is_vector(*bias, node.output));
    sides.into_iter().find_map(|(product, bias)| {
        let producer = matcher.producer(product).filter(|producer| matches!(producer.op, Op::Linear(_)) && matcher.readers.get(&product) == Some(&1))?;
        let [x, weight] = producer.inputs.as_slice() else { return None };
        Some((Linear { input_major: false }.into(), vec![(*x).into(), (*weight).into(), bias.into()]))
    })
}
