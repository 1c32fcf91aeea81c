//! Sizes of axes, fixed or symbolic.

use std::collections::BTreeMap;

/// Maximum number of atoms in a symbolic size, so that sizes do not grow exponentially with the number of
/// nodes.
const MAX_ATOMS: usize = 64;

/// A size: a number, a name, or an expression over other sizes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dim {
    /// A fixed number.
    Fixed(usize),
    /// A name that is bound when the model runs: `batch`, `sequence`, `height`.
    Named(String),
    /// Number of positions of a sliding window: `floor((of + offset) / stride) + 1`.
    Window {
        /// The size that the window moves over.
        of: Box<Dim>,
        /// Padding on both sides minus the extent of the window.
        offset: i64,
        /// Stride of the window.
        stride: usize,
    },
    /// A sum of products, such as `2*batch*height+1`: nonzero coefficients, each with its sorted factors.
    Sum(Vec<(i64, Vec<Dim>)>),
    /// Exact quotient of two sizes.
    Quotient(Box<Dim>, Box<Dim>),
    /// Broadcast size of two sizes that are equal or of which one is 1: the larger one.
    Broadcast(Box<Dim>, Box<Dim>),
}

/// Coefficients of a sum, by product of sizes.
pub(super) type Terms = BTreeMap<Vec<Dim>, i64>;

/// `floor((size + offset) / stride) + 1`, or `None` if the window does not fit.
fn positions(size: usize, offset: i64, stride: usize) -> Option<usize> {
    let room = usize::try_from(i64::try_from(size).ok()?.checked_add(offset)?).ok()?;
    (room / stride.max(1)).checked_add(1)
}

/// Values of named sizes.
pub type Bindings = BTreeMap<String, usize>;

impl Dim {
    /// A symbolic size with this name.
    pub fn named(name: &str) -> Dim {
        Dim::Named(name.to_owned())
    }

    /// The number, if the size is fixed.
    pub fn fixed(&self) -> Option<usize> {
        if let Dim::Fixed(size) = self { Some(*size) } else { None }
    }

    /// Size of the product of two axes.
    pub fn product(outer: usize, inner: usize) -> Result<Dim, String> {
        outer.checked_mul(inner).map(Dim::Fixed).ok_or_else(|| format!("{outer} times {inner} overflows the range of sizes"))
    }

    /// Number of positions of a window of `extent` that moves by `stride` over this size with `padding`
    /// in total on both sides; `None` if the window does not fit.
    pub fn window(&self, extent: usize, padding: usize, stride: usize) -> Option<Dim> {
        let offset = i64::try_from(padding).ok()?.checked_sub(i64::try_from(extent).ok()?)?;
        match self {
            Dim::Fixed(size) => positions(*size, offset, stride).map(Dim::Fixed),
            other if offset == -1 && stride == 1 => Some(other.clone()),
            other => Dim::Window { of: Box::new(other.clone()), offset, stride }.limited(),
        }
    }

    /// The sum of two sizes; `None` if it is not a valid size or too complex.
    pub fn plus(&self, other: &Dim) -> Option<Dim> {
        let mut sum = self.terms()?;
        for (product, count) in other.terms()? {
            let entry = sum.entry(product).or_default();
            *entry = entry.checked_add(count)?;
        }
        Dim::of_terms(sum)
    }

    /// This size plus `by`; `None` if that is not a valid size.
    pub fn moved(&self, by: i64) -> Option<Dim> {
        let mut sum = self.terms()?;
        let entry = sum.entry(Vec::new()).or_default();
        *entry = entry.checked_add(by)?;
        Dim::of_terms(sum)
    }

    /// The product of two sizes; `None` on overflow.
    pub fn times(&self, other: &Dim) -> Option<Dim> {
        Dim::of_terms(product(&self.terms()?, &other.terms()?)?)
    }

    /// The product of all sizes; `None` on overflow.
    pub fn all<'d>(sizes: impl IntoIterator<Item = &'d Dim>) -> Option<Dim> {
        sizes.into_iter().try_fold(Dim::Fixed(1), |all, size| all.times(size))
    }

    /// The exact quotient of two sizes; `None` if the division leaves a remainder.
    pub fn divided(&self, by: &Dim) -> Option<Dim> {
        if self == by && *by != Dim::Fixed(0) {
            return Some(Dim::Fixed(1));
        }
        let (mut of, mut divisor) = (self.terms()?, by.terms()?);
        // Cancel common factors.
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
            _ => Dim::Quotient(Box::new(of), Box::new(divisor)).limited(),
        }
    }

    /// The broadcast size of two axes; `None` if they are incompatible.
    pub fn broadcast(&self, other: &Dim) -> Option<Dim> {
        match (self, other) {
            (a, b) if a == b => Some(a.clone()),
            (Dim::Fixed(1), size) | (size, Dim::Fixed(1)) => Some(size.clone()),
            (Dim::Fixed(_), Dim::Fixed(_)) => None,
            // At run time, the dynamic size is either this number or 1.
            (Dim::Fixed(size), _) | (_, Dim::Fixed(size)) => Some(Dim::Fixed(*size)),
            (a, b) => Dim::Broadcast(Box::new(a.min(b).clone()), Box::new(a.max(b).clone())).limited(),
        }
    }

    /// The common size of two axes that must be equal; `None` if they differ.
    pub fn same(&self, other: &Dim) -> Option<Dim> {
        match (self, other) {
            (Dim::Fixed(a), Dim::Fixed(b)) if a != b => None,
            (_, Dim::Fixed(_)) => Some(other.clone()),
            _ => Some(self.clone()),
        }
    }

    /// The size as a sum of products.
    fn terms(&self) -> Option<Terms> {
        Some(match self {
            Dim::Fixed(0) => Terms::new(),
            Dim::Fixed(size) => Terms::from([(Vec::new(), i64::try_from(*size).ok()?)]),
            Dim::Sum(terms) => terms.iter().map(|(count, product)| (product.clone(), *count)).collect(),
            Dim::Window { of, offset, stride: 1 } => return of.moved(offset.checked_add(1)?)?.terms_or_atom(),
            other => Terms::from([(vec![other.clone()], 1)]),
        })
    }

    /// As [`terms`](Self::terms), but windows are atoms.
    pub(super) fn terms_or_atom(&self) -> Option<Terms> {
        if let Dim::Window { .. } = self { Some(Terms::from([(vec![self.clone()], 1)])) } else { self.terms() }
    }

    pub(super) fn of_terms(mut terms: Terms) -> Option<Dim> {
        terms.retain(|_, count| *count != 0);
        match terms.first_key_value() {
            None => Some(Dim::Fixed(0)),
            Some((product, count)) if terms.len() == 1 && product.is_empty() => usize::try_from(*count).ok().map(Dim::Fixed),
            Some((product, 1)) if terms.len() == 1 && product.len() == 1 => product.first().cloned(),
            // Longer products first, the number last.
            Some(_) => {
                let mut terms: Vec<_> = terms.into_iter().map(|(product, count)| (count, product)).collect();
                terms.sort_by(|(_, a), (_, b)| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
                Dim::Sum(terms).limited()
            }
        }
    }

    /// The size, unless it exceeds [`MAX_ATOMS`].
    fn limited(self) -> Option<Dim> {
        (self.atoms() <= MAX_ATOMS || matches!(self, Dim::Window { .. })).then_some(self)
    }

    fn atoms(&self) -> usize {
        match self {
            Dim::Fixed(_) | Dim::Named(_) => 1,
            Dim::Window { of, .. } => of.atoms(),
            Dim::Sum(terms) => terms.iter().map(|(_, product)| 1 + product.iter().map(Dim::atoms).sum::<usize>()).sum(),
            Dim::Quotient(a, b) | Dim::Broadcast(a, b) => a.atoms() + b.atoms(),
        }
    }

    /// Appends the names that the size depends on, without duplicates.
    pub fn names<'d>(&'d self, names: &mut Vec<&'d str>) {
        match self {
            Dim::Fixed(_) => {}
            Dim::Named(name) if names.contains(&name.as_str()) => {}
            Dim::Named(name) => names.push(name),
            Dim::Window { of, .. } => of.names(names),
            Dim::Sum(terms) => terms.iter().flat_map(|(_, product)| product).for_each(|size| size.names(names)),
            Dim::Quotient(a, b) | Dim::Broadcast(a, b) => {
                a.names(names);
                b.names(names);
            }
        }
    }

    /// The value of the size for these bindings of names.
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
pub(super) fn product(of: &Terms, with: &Terms) -> Option<Terms> {
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
        // Sizes that double with each node are refused.
        let doubled = (0..100).try_fold(height, |size, at| size.broadcast(&size.plus(&Dim::named(&format!("n{at}")))?));
        assert_eq!(doubled, None);
    }
}
