//! How the axes of an op correspond, in letters.
//!
//! `* k, o k, o -> * o` reads: the last axis of the first input and the last of the second are the same axis `k`;
//! the output's last is the first of the second input. `*` stands for all leading axes. Of `_` and letters that end
//! in `!` nothing can be taken out (window positions, softmax); of letters that end in `~` something can, but the
//! rest then has another mean or norm. `(h d)` is one axis made of two, outer first; `(a+c)` is one behind the other.
//! A size that only an attribute knows is written behind the letter: `(a=4+c)`. The notation is that of einops
//! (Rogozhnikov, ICLR 2022), and more.

use crate::error::{Error, Result};

/// Whether something may be taken out of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Yes: slicing commutes with the op.
    Free,
    /// Yes, but the op divides by a statistic over the axis, which changes.
    Normalised,
    /// No.
    Frozen,
}

/// One axis of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Axis {
    /// All leading axes.
    Leading,
    /// An axis that nothing may be taken out of.
    Frozen,
    /// A named axis.
    Letter {
        /// The letter, or word.
        name: String,
        /// Whether something may be taken out of it.
        hold: Hold,
        /// The size, where an attribute says it.
        size: Option<usize>,
    },
    /// Several axes in one, outer first.
    Product(Vec<Axis>),
    /// Several axes one behind the other.
    Concatenation(Vec<Axis>),
}

/// The axes of every input and of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axes {
    /// Of each input.
    pub inputs: Vec<Vec<Axis>>,
    /// Of the output.
    pub output: Vec<Axis>,
}

impl Axes {
    /// Reads the notation.
    ///
    /// # Errors
    /// It is not well formed.
    pub fn parse(text: &str) -> Result<Axes> {
        let wrong = || Error::graph("axes", format!("`{text}` is not of the form `a b, b c -> a c`"));
        let (inputs, output) = text.split_once("->").ok_or_else(wrong)?;
        let tensor = |part: &str| tensor(part).ok_or_else(wrong);
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

/// What stands between parentheses.
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
    let (name, hold) = match (word.strip_suffix('!'), word.strip_suffix('~')) {
        (Some(name), _) => (name, Hold::Frozen),
        (_, Some(name)) => (name, Hold::Normalised),
        _ => (word, Hold::Free),
    };
    let valid = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric());
    valid.then(|| Axis::Letter { name: name.to_owned(), hold, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notation() {
        let letter = |name: &str, hold| Axis::Letter { name: name.into(), hold, size: None };
        let axes = Axes::parse("* k, o k, o -> * o").unwrap();
        assert_eq!(axes.inputs.len(), 3);
        assert_eq!(axes.output, [Axis::Leading, letter("o", Hold::Free)]);
        let heads = Axes::parse("b s (h d!) -> b h s d!").unwrap();
        assert_eq!(heads.inputs[0][2], Axis::Product(vec![letter("h", Hold::Free), letter("d", Hold::Frozen)]));
        let slice = Axes::parse("* (a=4+k+b) -> * k").unwrap();
        let four = Axis::Letter { name: "a".into(), hold: Hold::Free, size: Some(4) };
        assert_eq!(slice.inputs[0][1], Axis::Concatenation(vec![four, letter("k", Hold::Free), letter("b", Hold::Free)]));
        assert_eq!(Axes::parse("* c~ -> * c~").unwrap().output[1], letter("c", Hold::Normalised));
        for text in ["a b", "a (b -> a", "a b) -> a", "() -> a", "a-b -> c", "(a b + c) -> a", "(a +) -> a", "a=x -> a"] {
            assert!(Axes::parse(text).is_err(), "{text}");
        }
    }
}
