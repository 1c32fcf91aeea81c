//! Property of axis rules: free axes commute with slicing, and for reduced axes, removing a unit equals
//! zeroing it. This includes axes within products and concatenations.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use compress_graph::ir::ops::TargetSize::Number;
use compress_graph::ir::ops::*;
use compress_graph::ir::{Axes, Axis, Op, Slicing};

use crate::ops::cases::{Case, cases, tensors};
use crate::ops::{distance, infer, types};

/// The components of an axis with their sizes: factors, outermost first, or concatenated parts.
enum AxisParts {
    Product(Vec<(String, usize)>),
    Concatenation(Vec<(String, usize)>),
}

impl AxisParts {
    /// The elements of unit `u` of a component.
    fn elements(&self, letter: &str, unit: usize) -> Vec<usize> {
        match self {
            AxisParts::Product(parts) => {
                let total: usize = parts.iter().map(|p| p.1).product();
                (0..total)
                    .filter(|index| {
                        let mut rest = *index;
                        parts.iter().rev().all(|(name, size)| {
                            let at = rest % size;
                            rest /= size;
                            name != letter || at == unit
                        })
                    })
                    .collect()
            }
            AxisParts::Concatenation(parts) => {
                let mut at = 0;
                let mut found = Vec::new();
                for (name, size) in parts {
                    found.extend((name == letter && unit < *size).then_some(at + unit));
                    at += size;
                }
                found
            }
        }
    }

    fn mentions(&self, letter: &str) -> bool {
        let (AxisParts::Product(parts) | AxisParts::Concatenation(parts)) = self;
        parts.iter().any(|(name, _)| name == letter)
    }
}

fn name(axis: &Axis) -> &str {
    if let Axis::Letter { name, .. } = axis { name } else { "_" }
}

/// The axes of a tensor without leading ones, with their positions.
fn positions<'a>(axes: &'a [Axis], shape: &[usize]) -> Vec<(usize, &'a Axis)> {
    let lead = shape.len() + usize::from(axes.contains(&Axis::Leading)) - axes.len();
    let mut at = 0;
    let mut found = Vec::new();
    for axis in axes {
        if *axis == Axis::Leading {
            at += lead;
        } else {
            found.push((at, axis));
            at += 1;
        }
    }
    found
}

/// Sizes of all axes, and the free axes.
fn letters(axes: &Axes, shapes: &[Vec<usize>]) -> (BTreeMap<String, usize>, Vec<String>) {
    let all: Vec<(&Axis, usize)> =
        axes.inputs.iter().chain([&axes.output]).zip(shapes).flat_map(|(a, s)| positions(a, s).into_iter().map(|(at, axis)| (axis, s[at]))).collect();
    let mut sizes = BTreeMap::new();
    let mut holds: BTreeMap<String, bool> = BTreeMap::new();
    let mut note = |axis: &Axis, own: Option<usize>, sizes: &mut BTreeMap<String, usize>| {
        if let Axis::Letter { name, slicing, size } = axis {
            *holds.entry(name.clone()).or_insert(true) &= *slicing == Slicing::Free;
            if let Some(size) = size.or(own) {
                sizes.insert(name.clone(), size);
            }
        }
    };
    for (axis, size) in &all {
        note(axis, Some(*size), &mut sizes);
    }
    for (axis, _) in &all {
        if let Axis::Product(parts) | Axis::Concatenation(parts) = axis {
            parts.iter().for_each(|part| note(part, None, &mut sizes));
        }
    }
    for (axis, total) in &all {
        let (Axis::Product(parts) | Axis::Concatenation(parts)) = axis else { continue };
        let known = parts.iter().filter_map(|part| sizes.get(name(part)).copied());
        let rest = if matches!(axis, Axis::Product(_)) { total / known.product::<usize>() } else { total - known.sum::<usize>() };
        for part in parts {
            sizes.entry(name(part).to_owned()).or_insert(rest);
        }
    }
    (sizes, holds.into_iter().filter(|(_, free)| *free).map(|(letter, _)| letter).collect())
}

fn place(axis: &Axis, sizes: &BTreeMap<String, usize>) -> AxisParts {
    let part = |part: &Axis| (name(part).to_owned(), sizes.get(name(part)).copied().unwrap_or(1));
    match axis {
        Axis::Product(parts) => AxisParts::Product(parts.iter().map(part).collect()),
        Axis::Concatenation(parts) => AxisParts::Concatenation(parts.iter().map(part).collect()),
        single => AxisParts::Product(vec![part(single)]),
    }
}

/// A tensor with one unit of an axis removed or zeroed.
fn without(tensor: &Tensor, axes: &[Axis], sizes: &BTreeMap<String, usize>, letter: &str, unit: usize, zero: bool) -> Tensor {
    let mut tensor = tensor.contiguous().unwrap();
    for (at, axis) in positions(axes, tensor.dims()) {
        let place = place(axis, sizes);
        if !place.mentions(letter) {
            continue;
        }
        let gone = place.elements(letter, unit);
        let kept: Vec<u32> = (0..tensor.dims()[at]).filter(|i| !gone.contains(i)).map(|i| i as u32).collect();
        tensor = if zero {
            let keep: Vec<u8> = (0..tensor.dims()[at]).map(|i| u8::from(!gone.contains(&i))).collect();
            let mut shape = vec![1; tensor.rank()];
            shape[at] = keep.len();
            let mask = Tensor::from_vec(keep, shape, &Device::Cpu).unwrap().to_dtype(tensor.dtype()).unwrap();
            tensor.broadcast_mul(&mask).unwrap()
        } else {
            tensor.index_select(&Tensor::from_vec(kept.clone(), kept.len(), &Device::Cpu).unwrap(), at).unwrap()
        };
    }
    tensor
}

/// Checks the axis rule of an op. Returns the number of checked axes, or the axis that violates the
/// property.
fn law(case: &Case, text: &str) -> Result<usize, String> {
    let inputs = tensors(case);
    let axes = Axes::parse(text).unwrap();
    let whole = case.op.spec().eval(&inputs).unwrap();
    let shapes: Vec<Vec<usize>> = inputs.iter().chain([&whole]).map(|t| t.dims().to_vec()).collect();
    let (sizes, free) = letters(&axes, &shapes);
    let mut held = 0;
    for letter in free {
        let size = sizes[&letter];
        for unit in 0..if size > 1 { size } else { 0 } {
            let cut = |zero| inputs.iter().zip(&axes.inputs).map(|(t, a)| without(t, a, &sizes, &letter, unit, zero)).collect::<Vec<_>>();
            let op = case.op.resized(&|name| sizes.get(name).map_or(0, |size| size - usize::from(name == letter)));
            infer(&op, &cut(false)).map_err(|e| format!("{} without one `{letter}`: {e}", case.op))?;
            let result = op.spec().eval(&cut(false)).map_err(|e| format!("{} without one `{letter}`: {e}", case.op))?;
            let summed = !positions(&axes.output, whole.dims()).iter().any(|(_, axis)| place(axis, &sizes).mentions(&letter));
            let expected = if summed { case.op.spec().eval(&cut(true)).unwrap() } else { without(&whole, &axes.output, &sizes, &letter, unit, false) };
            if result.dims() != expected.dims() || distance(&result, &expected) > 1e-5 {
                return Err(format!("{}, letter `{letter}`, unit {unit}", case.op));
            }
            held += 1;
        }
    }
    Ok(held)
}

/// The axis rule of an op for the inputs of a case.
fn axes(case: &Case) -> String {
    let types = types(&tensors(case));
    case.op.spec().axes(&types.iter().collect::<Vec<_>>())
}

#[test]
fn free_axes_commute_with_slicing() {
    let held: usize = cases().iter().map(|case| law(case, &axes(case)).unwrap_or_else(|e| panic!("{e}"))).sum();
    assert!(held > 300, "only {held} units were held");
}

#[test]
fn a_wrong_rule_is_found() {
    let wrong = [
        (Op::from(Softmax::default()), "* c -> * c"),
        (Reshape { shape: vec![TargetSize::Copy(0), Number(3), Number(2), TargetSize::Rest] }.into(), "a (o2 o1) o3 -> a o1 o2 o3"),
        (Transpose::default().into(), "a b c -> a b c"),
        (Concat { axis: 1 }.into(), "a b c d, a e c d -> a (e+b) c d"),
        (Reduce::default().into(), "a b c -> a b _"),
        (LayerNorm::default().into(), "* c, c, c -> * c"),
        (RmsNorm::default().into(), "* c, c -> * c"),
        (Normalize::default().into(), "* c -> * c"),
        (SplitHeads { head_dim: 3 }.into(), "b s (d! h) -> b h s d!"),
        (Flatten { channels_last: true }.into(), "b c h! w! -> b (c h! w!)"),
        (Rotary::default().into(), "b h s! d -> b h s! d"),
        (Slice::last_axis(2, 3).into(), "* (a=1+k=3+b) -> * k"),
        (Conv { groups: 2, stride: 2.into(), ..Conv::default() }.into(), "b (c g=2) _ _, (g=2 o) c _ _, (g=2 o) -> b (g=2 o) _ _"),
        (Attention { scale: 0.5, ..Attention::default() }.into(), "b (r g) s! d, b g t! d, b g t! e -> b (r g) s! e"),
    ];
    for (op, text) in wrong {
        let case = cases().into_iter().find(|case| case.op == op).unwrap_or_else(|| panic!("{op} has no case"));
        assert!(law(&case, text).is_err(), "{op} as `{text}`");
    }
}
