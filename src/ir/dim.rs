//! Sizes that may not be known before a model runs.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Atoms that a size is made of at most: a graph cannot make sizes that are larger than itself.
const MOST_ATOMS: usize = 64;

/// A size: a number, a name, or what follows from other sizes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dim {
    /// Known.
    Fixed(usize),
    /// Known when the model runs: `batch`, `sequence`, `height`.
    Named(String),
    /// `floor((of + offset) / stride) + 1`: positions of a sliding window.
    Window {
        /// The size that is slid over.
        of: Box<Dim>,
        /// Padding on both sides less the extent of the window.
        offset: i64,
        /// Step.
        stride: usize,
    },
    /// A sum of products, `2*batch*height+1`: a factor other than zero and the sizes that it is multiplied with, in order.
    Sum(Vec<(i64, Vec<Dim>)>),
    /// One size divided by another, which divides it.
    Quotient(Box<Dim>, Box<Dim>),
    /// The larger one of two sizes that are the same, or of which one is 1.
    Broadcast(Box<Dim>, Box<Dim>),
}

/// Products of sizes, and how often each is there.
type Terms = BTreeMap<Vec<Dim>, i64>;

/// `floor((size + offset) / stride) + 1`, where that is a size.
fn positions(size: usize, offset: i64, stride: usize) -> Option<usize> {
    let room = usize::try_from(i64::try_from(size).ok()?.checked_add(offset)?).ok()?;
    (room / stride.max(1)).checked_add(1)
}

/// Values of named sizes.
pub type Bindings = BTreeMap<String, usize>;

impl Dim {
    /// A name.
    pub fn named(name: &str) -> Dim {
        Dim::Named(name.to_owned())
    }

    /// The number, when it is known.
    pub fn fixed(&self) -> Option<usize> {
        if let Dim::Fixed(size) = self { Some(*size) } else { None }
    }

    /// Two axes in one.
    ///
    /// # Errors
    /// No memory holds as much.
    pub fn product(outer: usize, inner: usize) -> Result<Dim, String> {
        outer.checked_mul(inner).map(Dim::Fixed).ok_or_else(|| format!("{outer} times {inner} is more than any memory holds"))
    }

    /// Positions of a window of `extent` that moves by `stride` over this size with `padding` places more, on both sides together;
    /// `None` when the window does not fit.
    pub fn window(&self, extent: usize, padding: usize, stride: usize) -> Option<Dim> {
        let offset = i64::try_from(padding).ok()?.checked_sub(i64::try_from(extent).ok()?)?;
        match self {
            Dim::Fixed(size) => positions(*size, offset, stride).map(Dim::Fixed),
            other if offset == -1 && stride == 1 => Some(other.clone()),
            other => Dim::Window { of: Box::new(other.clone()), offset, stride }.held(),
        }
    }

    /// This size and another; `None` where that is no size, or more than can be written.
    pub fn plus(&self, other: &Dim) -> Option<Dim> {
        let mut sum = self.terms()?;
        for (product, count) in other.terms()? {
            let entry = sum.entry(product).or_default();
            *entry = entry.checked_add(count)?;
        }
        Dim::of_terms(sum)
    }

    /// So many more, or less; `None` where that is no size.
    pub fn moved(&self, by: i64) -> Option<Dim> {
        let mut sum = self.terms()?;
        let entry = sum.entry(Vec::new()).or_default();
        *entry = entry.checked_add(by)?;
        Dim::of_terms(sum)
    }

    /// This size times another; `None` where no memory holds as much.
    pub fn times(&self, other: &Dim) -> Option<Dim> {
        Dim::of_terms(product(&self.terms()?, &other.terms()?)?)
    }

    /// The product of sizes; `None` where no memory holds as much.
    pub fn all<'d>(sizes: impl IntoIterator<Item = &'d Dim>) -> Option<Dim> {
        sizes.into_iter().try_fold(Dim::Fixed(1), |all, size| all.times(size))
    }

    /// This size divided by another that divides it; `None` where it does not.
    pub fn divided(&self, by: &Dim) -> Option<Dim> {
        if self == by && *by != Dim::Fixed(0) {
            return Some(Dim::Fixed(1));
        }
        let (mut of, mut divisor) = (self.terms()?, by.terms()?);
        // What both have as a factor goes.
        let of_all = |of: &Terms, divisor: &Terms, factor: &Dim| of.keys().chain(divisor.keys()).all(|product| product.contains(factor));
        let mut factors = divisor.keys().next()?.clone();
        while let Some(factor) = factors.pop() {
            if of_all(&of, &divisor, &factor) {
                let without = |terms: Terms| {
                    let less = |(mut product, count): (Vec<Dim>, i64)| {
                        product.iter().position(|f| *f == factor).map(|at| product.remove(at));
                        (product, count)
                    };
                    terms.into_iter().map(less).collect::<Terms>()
                };
                (of, divisor) = (without(of), without(divisor));
            }
        }
        let common = of.values().chain(divisor.values()).fold(0, |a, b| greatest_common_divisor(a, b.unsigned_abs()));
        let common = i64::try_from(common).ok().filter(|common| *common > 0)?;
        of.values_mut().chain(divisor.values_mut()).for_each(|count| *count /= common);
        let (of, divisor) = (Dim::of_terms(of)?, Dim::of_terms(divisor)?);
        match (&of, &divisor) {
            (_, Dim::Fixed(1)) => Some(of),
            (Dim::Fixed(_), Dim::Fixed(_)) => None,
            _ => Dim::Quotient(Box::new(of), Box::new(divisor)).held(),
        }
    }

    /// The size of two axes that are worked on element by element; `None` where they cannot be the same.
    pub fn broadcast(&self, other: &Dim) -> Option<Dim> {
        match (self, other) {
            (a, b) if a == b => Some(a.clone()),
            (Dim::Fixed(1), size) | (size, Dim::Fixed(1)) => Some(size.clone()),
            (Dim::Fixed(_), Dim::Fixed(_)) => None,
            // An open size is that number then, or 1.
            (Dim::Fixed(size), _) | (_, Dim::Fixed(size)) => Some(Dim::Fixed(*size)),
            (a, b) => Dim::Broadcast(Box::new(a.min(b).clone()), Box::new(a.max(b).clone())).held(),
        }
    }

    /// The size of two axes that must have the same; `None` where they cannot.
    pub fn same(&self, other: &Dim) -> Option<Dim> {
        match (self, other) {
            (Dim::Fixed(a), Dim::Fixed(b)) if a != b => None,
            (_, Dim::Fixed(_)) => Some(other.clone()),
            _ => Some(self.clone()),
        }
    }

    /// The sum that it is.
    fn terms(&self) -> Option<Terms> {
        Some(match self {
            Dim::Fixed(0) => Terms::new(),
            Dim::Fixed(size) => Terms::from([(Vec::new(), i64::try_from(*size).ok()?)]),
            Dim::Sum(terms) => terms.iter().map(|(count, product)| (product.clone(), *count)).collect(),
            Dim::Window { of, offset, stride: 1 } => return of.moved(offset.checked_add(1)?)?.terms_or_atom(),
            other => Terms::from([(vec![other.clone()], 1)]),
        })
    }

    /// As [`terms`](Self::terms), of what is no window.
    fn terms_or_atom(&self) -> Option<Terms> {
        if let Dim::Window { .. } = self { Some(Terms::from([(vec![self.clone()], 1)])) } else { self.terms() }
    }

    fn of_terms(mut terms: Terms) -> Option<Dim> {
        terms.retain(|_, count| *count != 0);
        match terms.first_key_value() {
            None => Some(Dim::Fixed(0)),
            Some((product, count)) if terms.len() == 1 && product.is_empty() => usize::try_from(*count).ok().map(Dim::Fixed),
            Some((product, 1)) if terms.len() == 1 && product.len() == 1 => product.first().cloned(),
            // Longer products first, the number last.
            Some(_) => {
                let mut terms: Vec<_> = terms.into_iter().map(|(product, count)| (count, product)).collect();
                terms.sort_by(|(_, a), (_, b)| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
                Dim::Sum(terms).held()
            }
        }
    }

    /// Itself, if it is made of few others.
    fn held(self) -> Option<Dim> {
        (self.atoms() <= MOST_ATOMS || matches!(self, Dim::Window { .. })).then_some(self)
    }

    fn atoms(&self) -> usize {
        match self {
            Dim::Fixed(_) | Dim::Named(_) => 1,
            Dim::Window { of, .. } => of.atoms(),
            Dim::Sum(terms) => terms.iter().map(|(_, product)| 1 + product.iter().map(Dim::atoms).sum::<usize>()).sum(),
            Dim::Quotient(a, b) | Dim::Broadcast(a, b) => a.atoms() + b.atoms(),
        }
    }

    /// The number, given the named sizes.
    pub fn evaluate(&self, bindings: &Bindings) -> Option<usize> {
        match self {
            Dim::Fixed(size) => Some(*size),
            Dim::Named(name) => bindings.get(name).copied(),
            Dim::Window { of, offset, stride } => positions(of.evaluate(bindings)?, *offset, *stride),
            Dim::Sum(terms) => {
                let value = |product: &[Dim]| product.iter().try_fold(1i64, |all, size| all.checked_mul(i64::try_from(size.evaluate(bindings)?).ok()?));
                let sum = terms.iter().try_fold(0i64, |sum, (count, product)| sum.checked_add(count.checked_mul(value(product)?)?))?;
                usize::try_from(sum).ok()
            }
            Dim::Quotient(of, by) => {
                let (of, by) = (of.evaluate(bindings)?, by.evaluate(bindings)?);
                of.checked_rem(by).filter(|rest| *rest == 0).and_then(|_| of.checked_div(by))
            }
            Dim::Broadcast(a, b) => {
                let (a, b) = (a.evaluate(bindings)?, b.evaluate(bindings)?);
                (a == b || a == 1 || b == 1).then_some(if a == 1 { b } else { a })
            }
        }
    }
}

/// The product of two sums.
fn product(of: &Terms, with: &Terms) -> Option<Terms> {
    let mut sum = Terms::new();
    for (a, count) in of {
        for (b, other) in with {
            let mut product = [a.as_slice(), b].concat();
            product.sort();
            let entry = sum.entry(product).or_default();
            *entry = entry.checked_add(count.checked_mul(*other)?)?;
        }
    }
    Some(sum)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::Fixed(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Named(name) => f.write_str(name),
            Dim::Window { of, offset, stride } => write!(f, "window({of};{offset};{stride})"),
            Dim::Quotient(of, by) => write!(f, "quotient({of};{by})"),
            Dim::Broadcast(a, b) => write!(f, "broadcast({a};{b})"),
            Dim::Sum(terms) => terms.iter().enumerate().try_for_each(|(index, (count, product))| {
                let sign = if *count < 0 { "-" } else { "+" };
                f.write_str(if index == 0 && *count > 0 { "" } else { sign })?;
                let count = Some(count.unsigned_abs()).filter(|count| *count != 1 || product.is_empty());
                let factors = count.iter().map(ToString::to_string).chain(product.iter().map(ToString::to_string));
                f.write_str(&factors.collect::<Vec<_>>().join("*"))
            }),
        }
    }
}

impl FromStr for Dim {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no size");
        if let Ok(size) = text.parse() {
            return Ok(Dim::Fixed(size));
        }
        let mut terms = split(text, &['+', '-']);
        if terms.first().is_some_and(|(_, first)| first.is_empty()) && terms.len() > 1 {
            terms.remove(0);
        }
        let mut sum = Terms::new();
        for (sign, term) in &terms {
            let mut all = Terms::from([(Vec::new(), if *sign == '-' { -1 } else { 1 })]);
            for (_, factor) in split(term, &['*']) {
                let factor = if terms.len() == 1 && factor.len() == text.len() { atom(factor)? } else { factor.parse()? };
                all = product(&all, &factor.terms_or_atom().ok_or_else(wrong)?).ok_or_else(wrong)?;
            }
            for (product, count) in all {
                let entry = sum.entry(product).or_default();
                *entry = entry.checked_add(count).ok_or_else(wrong)?;
            }
        }
        Dim::of_terms(sum).ok_or_else(wrong)
    }
}

/// The parts between signs that stand outside of parentheses, each with the sign before it.
fn split<'t>(text: &'t str, signs: &[char]) -> Vec<(char, &'t str)> {
    let (mut parts, mut depth, mut sign, mut start) = (Vec::new(), 0usize, '+', 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            c if depth == 0 && signs.contains(&c) => {
                parts.push((sign, &text[start..at]));
                (sign, start) = (c, at + 1);
            }
            _ => {}
        }
    }
    parts.push((sign, &text[start..]));
    parts
}

/// A name, or a size in parentheses.
fn atom(text: &str) -> Result<Dim, String> {
    let wrong = || format!("`{text}` is no size");
    let Some((name, inner)) = text.strip_suffix(')').and_then(|text| text.split_once('(')) else {
        let name = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !text.starts_with(|c: char| c.is_ascii_digit());
        return if name { Ok(Dim::named(text)) } else { Err(wrong()) };
    };
    let parts: Vec<&str> = split(inner, &[';']).into_iter().map(|(_, part)| part).collect();
    match (name, parts.as_slice()) {
        ("window", [of, offset, stride]) => {
            let stride = stride.parse().ok().filter(|s| *s > 0).ok_or_else(wrong)?;
            Ok(Dim::Window { of: Box::new(of.parse()?), offset: offset.parse().map_err(|_| wrong())?, stride })
        }
        ("quotient", [of, by]) => Ok(Dim::Quotient(Box::new(of.parse()?), Box::new(by.parse()?))),
        ("broadcast", [a, b]) => Ok(Dim::Broadcast(Box::new(a.parse()?), Box::new(b.parse()?))),
        _ => Err(wrong()),
    }
}

impl Serialize for Dim {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Dim::Fixed(size) => serializer.serialize_u64(*size as u64),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::Number(n) => n.as_u64().map(|n| Dim::Fixed(n as usize)).ok_or_else(|| serde::de::Error::custom(format!("{n} is no size"))),
            serde_json::Value::String(text) => text.parse().map_err(serde::de::Error::custom),
            other => Err(serde::de::Error::custom(format!("{other} is no size"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_slide_and_text_comes_back() {
        let height = Dim::named("height");
        assert_eq!(height.window(3, 2, 1), Some(height.clone()));
        let half = height.window(7, 6, 2).unwrap();
        assert_eq!(half, height.window(1, 0, 2).unwrap());
        assert_eq!(half.evaluate(&Bindings::from([("height".into(), 224)])), Some(112));
        let nested = half.window(3, 2, 2).unwrap();
        assert_eq!(nested.to_string().parse::<Dim>().unwrap(), nested);
        assert_eq!(Dim::Fixed(32).window(3, 0, 1), Some(Dim::Fixed(30)));
        assert_eq!(Dim::Fixed(2).window(3, 0, 1), None);
    }
    #[test]
    fn sizes_are_calculated_with() {
        let (batch, height) = (Dim::named("batch"), Dim::named("height"));
        let flat = Dim::all([&batch, &Dim::Fixed(12), &height]).unwrap();
        assert_eq!(flat.to_string(), "12*batch*height");
        assert_eq!(flat.divided(&Dim::all([&height, &Dim::Fixed(4)]).unwrap()).unwrap().to_string(), "3*batch");
        assert_eq!(flat.divided(&flat), Some(Dim::Fixed(1)));
        assert_eq!(Dim::Fixed(12).divided(&Dim::Fixed(5)), None);
        let more = height.moved(-1).unwrap().plus(&flat).unwrap();
        assert_eq!(more.to_string(), "12*batch*height+height-1");
        assert_eq!(more.plus(&Dim::Fixed(1)).unwrap(), height.plus(&flat).unwrap());
        let half = height.divided(&Dim::Fixed(2)).unwrap();
        assert_eq!(half.to_string(), "quotient(height;2)");
        let sizes = Bindings::from([("height".into(), 6), ("batch".into(), 2)]);
        assert_eq!((half.evaluate(&sizes), more.evaluate(&sizes)), (Some(3), Some(149)));
        assert_eq!(height.moved(1).unwrap().divided(&Dim::Fixed(2)).unwrap().evaluate(&sizes), None);
        let both = batch.broadcast(&half).unwrap();
        assert_eq!((both.evaluate(&sizes), half.broadcast(&batch)), (None, Some(both.clone())));
        assert_eq!((batch.broadcast(&Dim::Fixed(5)), batch.broadcast(&Dim::Fixed(1))), (Some(Dim::Fixed(5)), Some(batch.clone())));
        let window = height.window(3, 0, 1).unwrap();
        assert_eq!(window.moved(2).unwrap(), height);
        for size in [flat, more, half, both, window.times(&batch).unwrap(), Dim::Fixed(3).plus(&height).unwrap(), window] {
            assert_eq!(size.to_string().parse::<Dim>().unwrap(), size);
        }
        for text in ["", "2*", "a+", "-", "a b", "quotient(a)", "other(a;b)", "a**b", "2(a)", "window(a;0;0)"] {
            assert!(text.parse::<Dim>().is_err(), "{text}");
        }
        // A graph cannot make sizes that double with each node.
        let doubled = (0..100).try_fold(height, |size, at| size.broadcast(&size.plus(&Dim::named(&format!("n{at}")))?));
        assert_eq!(doubled, None);
    }
}
