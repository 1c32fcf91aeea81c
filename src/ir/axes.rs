//! How the axes of an op correspond, in letters.
//!
//! `* k, o k, o -> * o` reads: the last axis of the first input and the last of the second are the same axis `k`;
//! the output's last is the first of the second input. `*` stands for all leading axes. `_` and letters that end
//! in `!` cannot be taken apart (window positions, normalised axes). `(h d)` is one axis made of two, outer first.
//! The notation is that of einops (Rogozhnikov, ICLR 2022).

use crate::error::{Error, Result};

/// One axis of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Axis {
    /// All leading axes.
    Leading,
    /// An axis that nothing may be taken out of.
    Frozen,
    /// A named axis; whether slicing it commutes with the op.
    Letter {
        /// The letter, or word.
        name: String,
        /// Whether nothing may be taken out of it.
        frozen: bool,
    },
    /// Several axes in one, outer first.
    Product(Vec<Axis>),
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
    let mut product: Option<Vec<Axis>> = None;
    for word in text.replace('(', " ( ").replace(')', " ) ").split_whitespace() {
        let axis = match word {
            "(" if product.is_none() => {
                product = Some(Vec::new());
                continue;
            }
            ")" => Axis::Product(product.take().filter(|p| !p.is_empty())?),
            "*" => Axis::Leading,
            "_" | "1" => Axis::Frozen,
            word => {
                let name = word.trim_end_matches('!');
                let valid = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric());
                valid.then(|| Axis::Letter { name: name.to_owned(), frozen: word.ends_with('!') })?
            }
        };
        match &mut product {
            Some(inner) => inner.push(axis),
            None => axes.push(axis),
        }
    }
    product.is_none().then_some(axes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notation() {
        let axes = Axes::parse("* k, o k, o -> * o").unwrap();
        assert_eq!(axes.inputs.len(), 3);
        assert_eq!(axes.output, [Axis::Leading, Axis::Letter { name: "o".into(), frozen: false }]);
        let heads = Axes::parse("b s (h d!) -> b h s d!").unwrap();
        assert_eq!(heads.inputs[0][2], Axis::Product(vec![Axis::Letter { name: "h".into(), frozen: false }, Axis::Letter { name: "d".into(), frozen: true }]));
        for text in ["a b", "a (b -> a", "a b) -> a", "() -> a", "a-b -> c"] {
            assert!(Axes::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_op_speaks_it() {
        for op in crate::ir::ops::examples() {
            let axes = Axes::parse(&op.spec().axes(op.arity().end - 1)).unwrap_or_else(|e| panic!("{}: {e}", op.name()));
            assert_eq!(axes.inputs.len(), op.arity().end - 1, "{}", op.name());
        }
    }
}
