//! Correspondence of the axes of an op, in a notation like that of einops (Rogozhnikov, ICLR 2022).
//!
//! In `* k, o k, o -> * o`, the last axis of the first input and the last of the second are the same axis
//! `k`, and the last axis of the output is the first of the second input. `*` represents all leading
//! axes. Axes named `_` and letters with the suffix `!` cannot be sliced (window positions, softmax).
//! Letters with the suffix `~` can be sliced, but this changes the mean or norm that the op computes over
//! the axis. `(h d)` is the product of two axes, outer first; `(a+c)` is a concatenation. A size that
//! only an attribute determines follows its letter: `(a=4+c)`.

use crate::error::{Error, Result};

/// Whether an axis can be sliced, as structured pruning does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slicing {
    /// Slicing commutes with the op.
    Free,
    /// Can be sliced, but the op divides by a statistic over the axis, which changes.
    Normalised,
    /// Cannot be sliced.
    Frozen,
}

/// One axis of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Axis {
    /// All leading axes.
    Leading,
    /// An unnamed axis that cannot be sliced.
    Frozen,
    /// A named axis.
    Letter {
        /// The letter or word.
        name: String,
        /// Whether the axis can be sliced.
        slicing: Slicing,
        /// The size, where an attribute determines it.
        size: Option<usize>,
    },
    /// Product of several axes, outer first.
    Product(Vec<Axis>),
    /// Concatenation of several axes.
    Concatenation(Vec<Axis>),
}

/// The axes of every input and of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axes {
    /// Axes of each input.
    pub inputs: Vec<Vec<Axis>>,
    /// Axes of the output.
    pub output: Vec<Axis>,
}

impl Axes {
    /// Parses the notation.
    pub fn parse(text: &str) -> Result<Axes> {
        let invalid = || Error::graph("axes", format!("`{text}` is not of the form `a b, b c -> a c`"));
        let (inputs, output) = text.split_once("->").ok_or_else(invalid)?;
        let tensor = |part: &str| tensor(part).ok_or_else(invalid);
        Ok(Axes { inputs: inputs.split(',').map(tensor).collect::<Result<_>>()?, output: tensor(output)? })
    }
}

fn tensor(text: &str) -> Option<Vec<Axis>> {
    let mut axes = Vec::new();
    let mut inner: Option<Vec<&str>> = None;
    let spaced = text.replace('(', " ( ").replace(')', " ) ").replace('+', " + ");
    for word in spaced.split_whitespace() {
        match (word, &mut inner) {
            ("(", None) => inner = Some(Vec::new()),
            (")", Some(words)) => {
                axes.push(compound(words)?);
                inner = None;
            }
            (word, Some(words)) => words.push(word),
            ("*", None) => axes.push(Axis::Leading),
            (word, None) => axes.push(single(word)?),
        }
    }
    inner.is_none().then_some(axes)
}

/// Parses the contents of a pair of parentheses.
fn compound(words: &[&str]) -> Option<Axis> {
    if words.contains(&"+") {
        let parts: Option<Vec<Axis>> = words.split(|word| *word == "+").map(|part| if let [word] = part { single(word) } else { None }).collect();
        return parts.map(Axis::Concatenation);
    }
    let parts: Option<Vec<Axis>> = words.iter().map(|word| single(word)).collect();
    parts.filter(|parts| !parts.is_empty()).map(Axis::Product)
}

fn single(word: &str) -> Option<Axis> {
    if word == "_" || word == "1" {
        return Some(Axis::Frozen);
    }
    let (word, size) = match word.split_once('=') {
        Some((word, size)) => (word, Some(size.parse().ok()?)),
        None => (word, None),
    };
    let (name, slicing) = match (word.strip_suffix('!'), word.strip_suffix('~')) {
        (Some(name), _) => (name, Slicing::Frozen),
        (_, Some(name)) => (name, Slicing::Normalised),
        _ => (word, Slicing::Free),
    };
    let valid = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric());
    valid.then(|| Axis::Letter { name: name.to_owned(), slicing, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notation() {
        let letter = |name: &str, slicing| Axis::Letter { name: name.into(), slicing, size: None };
        let axes = Axes::parse("* k, o k, o -> * o").unwrap();
        assert_eq!(axes.inputs.len(), 3);
        assert_eq!(axes.output, [Axis::Leading, letter("o", Slicing::Free)]);
        let heads = Axes::parse("b s (h d!) -> b h s d!").unwrap();
        assert_eq!(heads.inputs[0][2], Axis::Product(vec![letter("h", Slicing::Free), letter("d", Slicing::Frozen)]));
        let slice = Axes::parse("* (a=4+k+b) -> * k").unwrap();
        let four = Axis::Letter { name: "a".into(), slicing: Slicing::Free, size: Some(4) };
        assert_eq!(slice.inputs[0][1], Axis::Concatenation(vec![four, letter("k", Slicing::Free), letter("b", Slicing::Free)]));
        assert_eq!(Axes::parse("* c~ -> * c~").unwrap().output[1], letter("c", Slicing::Normalised));
        for text in ["a b", "a (b -> a", "a b) -> a", "() -> a", "a-b -> c", "(a b + c) -> a", "(a +) -> a", "a=x -> a"] {
            assert!(Axes::parse(text).is_err(), "{text}");
        }
    }
}
