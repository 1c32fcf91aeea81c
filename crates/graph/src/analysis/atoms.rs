//! Axes as terms: an axis is an atom, a product of several axes (outer first), or a concatenation.
//! Unifying two axes splits their terms until their atoms are equal.

use serde::Serialize;

/// Id of an axis or of a part of one.
pub(super) type AxisId = usize;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Term {
    Atom,
    Same(AxisId),
    Product(Vec<AxisId>),
    Concatenation(Vec<AxisId>),
}

/// Union-find over axes.
#[derive(Debug, Default)]
pub(super) struct Atoms {
    terms: Vec<Term>,
    sizes: Vec<usize>,
    frozen: Vec<Option<String>>,
}

/// Layout of an atom's units on an axis: unit `u` takes `block` elements from `offset + u · block` on,
/// repeated with the strides in `repeats`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnitLayout {
    /// First element.
    pub offset: usize,
    /// Consecutive elements of a unit.
    pub block: usize,
    /// Count and stride of each repetition, outermost first.
    pub repeats: Vec<(usize, usize)>,
}

impl UnitLayout {
    /// Calls `visit` with the first element of every block of a unit.
    pub fn blocks(&self, unit: usize, visit: &mut dyn FnMut(usize)) {
        fn descend(repeats: &[(usize, usize)], at: usize, visit: &mut dyn FnMut(usize)) {
            match repeats {
                [] => visit(at),
                [(count, stride), rest @ ..] => (0..*count).for_each(|i| descend(rest, at + i * stride, visit)),
            }
        }
        descend(&self.repeats, self.offset + unit * self.block, visit);
    }

    /// Number of elements of one unit.
    pub fn elements(&self) -> usize {
        self.block * self.repeats.iter().map(|(count, _)| count).product::<usize>()
    }
}

impl Atoms {
    /// Adds an atomic axis.
    pub fn atom(&mut self, size: usize) -> AxisId {
        self.add(Term::Atom, size)
    }

    /// Adds the product of axes, outer first.
    pub fn product(&mut self, parts: Vec<AxisId>) -> AxisId {
        let size = parts.iter().fold(1usize, |all, part| all.saturating_mul(self.size(*part)));
        match self.lasting(parts, 1).as_slice() {
            [] => self.atom(size),
            [only] => *only,
            parts => self.add(Term::Product(parts.to_vec()), size),
        }
    }

    /// Adds the concatenation of axes.
    pub fn concatenation(&mut self, parts: Vec<AxisId>) -> AxisId {
        let size = parts.iter().fold(0usize, |all, part| all.saturating_add(self.size(*part)));
        match self.lasting(parts, 0).as_slice() {
            [] => self.atom(size),
            [only] => *only,
            parts => self.add(Term::Concatenation(parts.to_vec()), size),
        }
    }

    /// The parts whose size is not the neutral one.
    fn lasting(&self, parts: Vec<AxisId>, neutral: usize) -> Vec<AxisId> {
        parts.into_iter().filter(|part| self.size(*part) != neutral).collect()
    }

    fn add(&mut self, term: Term, size: usize) -> AxisId {
        self.terms.push(term);
        self.sizes.push(size);
        self.frozen.push(None);
        self.terms.len() - 1
    }

    /// Number of elements.
    pub fn size(&self, axis: AxisId) -> usize {
        self.sizes[axis]
    }

    /// The reason why an atom cannot be sliced, if it is frozen.
    pub fn reason(&self, atom: AxisId) -> Option<&str> {
        self.frozen[self.find(atom)].as_deref()
    }

    /// The representative of all axes that are unified with this one.
    pub fn find(&self, mut axis: AxisId) -> AxisId {
        while let Term::Same(other) = self.terms[axis] {
            axis = other;
        }
        axis
    }

    /// Marks an axis as frozen; the first reason is retained.
    pub fn freeze(&mut self, axis: AxisId, reason: &str) {
        let axis = self.find(axis);
        match self.terms[axis].clone() {
            Term::Product(parts) | Term::Concatenation(parts) => parts.into_iter().for_each(|part| self.freeze(part, reason)),
            _ => {
                self.frozen[axis].get_or_insert_with(|| reason.to_owned());
            }
        }
    }

    /// Unifies two axes. If their terms cannot be aligned, both are frozen with this reason.
    pub fn unify(&mut self, a: AxisId, b: AxisId, reason: &str) {
        let (a, b) = (self.find(a), self.find(b));
        if a == b {
            return;
        }
        let fits = self.sizes[a] == self.sizes[b]
            && match (self.terms[a].clone(), self.terms[b].clone()) {
                (Term::Atom, _) => self.link(a, b),
                (_, Term::Atom) => self.link(b, a),
                (Term::Concatenation(_), _) | (_, Term::Concatenation(_)) => {
                    let (x, y) = (self.parts(a), self.parts(b));
                    self.align_parts(x, y, reason)
                }
                _ => {
                    let (x, y) = (self.factors(a), self.factors(b));
                    self.align_factors(x, y, reason)
                }
            };
        if !fits {
            self.freeze(a, reason);
            self.freeze(b, reason);
        }
    }

    fn link(&mut self, atom: AxisId, to: AxisId) -> bool {
        if let Some(reason) = self.frozen[atom].take() {
            self.freeze(to, &reason);
        }
        self.terms[atom] = Term::Same(to);
        true
    }

    /// The factors of an axis, outer first; none of them is a product or has size 1.
    fn factors(&self, axis: AxisId) -> Vec<AxisId> {
        let axis = self.find(axis);
        match &self.terms[axis] {
            Term::Product(parts) => parts.iter().flat_map(|part| self.factors(*part)).collect(),
            _ if self.sizes[axis] == 1 => Vec::new(),
            _ => vec![axis],
        }
    }

    /// The parts of an axis in order; none of them is a concatenation or empty.
    fn parts(&self, axis: AxisId) -> Vec<AxisId> {
        let axis = self.find(axis);
        match &self.terms[axis] {
            Term::Concatenation(parts) => parts.iter().flat_map(|part| self.parts(*part)).collect(),
            _ if self.sizes[axis] == 0 => Vec::new(),
            _ => vec![axis],
        }
    }

    fn align_factors(&mut self, mut a: Vec<AxisId>, mut b: Vec<AxisId>, reason: &str) -> bool {
        a.reverse();
        b.reverse();
        while let (Some(x), Some(y)) = (a.pop(), b.pop()) {
            let (large, small, rest) = if self.size(x) >= self.size(y) { (x, y, &mut a) } else { (y, x, &mut b) };
            let (size, outer) = (self.size(large), self.size(small));
            if size == outer {
                self.unify(x, y, reason);
                continue;
            }
            if !size.is_multiple_of(outer) || self.terms[large] != Term::Atom {
                return false;
            }
            let (first, second) = (self.atom(outer), self.atom(size / outer));
            let split = self.product(vec![first, second]);
            self.link(large, split);
            self.unify(first, small, reason);
            rest.push(second);
        }
        a.is_empty() && b.is_empty()
    }

    fn align_parts(&mut self, mut a: Vec<AxisId>, mut b: Vec<AxisId>, reason: &str) -> bool {
        a.reverse();
        b.reverse();
        while let (Some(x), Some(y)) = (a.pop(), b.pop()) {
            let (large, small, rest) = if self.size(x) >= self.size(y) { (x, y, &mut a) } else { (y, x, &mut b) };
            let (size, head) = (self.size(large), self.size(small));
            if size == head {
                self.unify(x, y, reason);
                continue;
            }
            let Some((first, second)) = self.split(large, head) else { return false };
            self.unify(first, small, reason);
            rest.push(second);
        }
        a.is_empty() && b.is_empty()
    }

    /// Splits an axis, which must not be a concatenation, in two.
    fn split(&mut self, axis: AxisId, head: usize) -> Option<(AxisId, AxisId)> {
        let axis = self.find(axis);
        let size = self.sizes[axis];
        match self.terms[axis].clone() {
            Term::Atom => {
                let (first, second) = (self.atom(head), self.atom(size - head));
                let both = self.concatenation(vec![first, second]);
                self.link(axis, both);
                Some((first, second))
            }
            Term::Product(_) => {
                let factors = self.factors(axis);
                let (outer, inner) = factors.split_first()?;
                let block = size / self.size(*outer);
                if !head.is_multiple_of(block) || self.terms[*outer] != Term::Atom {
                    return None;
                }
                let (first, second) = self.split(*outer, head / block)?;
                let with = |part| [&[part], inner].concat();
                Some((self.product(with(first)), self.product(with(second))))
            }
            _ => None,
        }
    }

    /// Calls `visit` with every atom of an axis and the layout of its units.
    pub fn layouts(&self, axis: AxisId, visit: &mut dyn FnMut(AxisId, UnitLayout)) {
        self.descend(axis, UnitLayout { offset: 0, block: 1, repeats: Vec::new() }, visit);
    }

    fn descend(&self, axis: AxisId, layout: UnitLayout, visit: &mut dyn FnMut(AxisId, UnitLayout)) {
        let axis = self.find(axis);
        match &self.terms[axis] {
            Term::Product(parts) => {
                let mut block = layout.block * self.sizes[axis];
                let mut repeats = layout.repeats;
                for part in parts {
                    let size = self.sizes[*part];
                    block /= size.max(1);
                    self.descend(*part, UnitLayout { offset: layout.offset, block, repeats: repeats.clone() }, visit);
                    repeats.push((size, block));
                }
            }
            Term::Concatenation(parts) => {
                let mut offset = layout.offset;
                for part in parts {
                    self.descend(*part, UnitLayout { offset, ..layout.clone() }, visit);
                    offset += self.sizes[*part] * layout.block;
                }
            }
            _ => {
                let mut repeats: Vec<(usize, usize)> = Vec::new();
                for (count, stride) in layout.repeats.iter().copied().filter(|(count, _)| *count != 1) {
                    match repeats.last_mut() {
                        Some((outer, far)) if *far == count * stride => (*outer, *far) = (*outer * count, stride),
                        _ => repeats.push((count, stride)),
                    }
                }
                visit(axis, UnitLayout { repeats, ..layout });
            }
        }
    }

    /// The size of an axis for the given sizes of atoms.
    pub fn resized(&self, axis: AxisId, size: &dyn Fn(AxisId) -> usize) -> usize {
        let axis = self.find(axis);
        match &self.terms[axis] {
            Term::Product(parts) => parts.iter().fold(1usize, |all, part| all.saturating_mul(self.resized(*part, size))),
            Term::Concatenation(parts) => parts.iter().fold(0usize, |all, part| all.saturating_add(self.resized(*part, size))),
            _ => size(axis),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Size, offset, block and repeats of an atom.
    type Shown = (usize, usize, usize, Vec<(usize, usize)>);

    fn shown(atoms: &Atoms, axis: AxisId) -> Vec<Shown> {
        let mut found = Vec::new();
        atoms.layouts(axis, &mut |atom, layout| found.push((atoms.size(atom), layout.offset, layout.block, layout.repeats)));
        found
    }

    #[test]
    fn a_width_is_split_into_heads_with_offsets() {
        let mut atoms = Atoms::default();
        let width = atoms.atom(24);
        let mut heads = Vec::new();
        for part in 0..3 {
            let (before, own, after) = (atoms.atom(8 * part), atoms.atom(8), atoms.atom(16 - 8 * part));
            let slice = atoms.concatenation(vec![before, own, after]);
            atoms.unify(width, slice, "test");
            let (h, d) = (atoms.atom(2), atoms.atom(4));
            let split = atoms.product(vec![h, d]);
            atoms.unify(own, split, "test");
            heads.push(h);
            atoms.freeze(d, "inside a head");
        }
        atoms.unify(heads[0], heads[1], "test");
        atoms.unify(heads[0], heads[2], "test");
        let head = atoms.find(heads[0]);
        let mut offsets = Vec::new();
        atoms.layouts(width, &mut |atom, layout| {
            if atom == head {
                offsets.push((layout.offset, layout.block));
            }
        });
        assert_eq!(offsets, [(0, 4), (8, 4), (16, 4)]);
        assert_eq!(atoms.resized(width, &|atom| if atom == head { 1 } else { atoms.size(atom) }), 12);
    }

    #[test]
    fn products_align_or_are_frozen() {
        let mut atoms = Atoms::default();
        let parts = [atoms.atom(2), atoms.atom(6)];
        let a = atoms.product(parts.to_vec());
        let parts = [atoms.atom(4), atoms.atom(3)];
        let b = atoms.product(parts.to_vec());
        atoms.unify(a, b, "test");
        assert_eq!(shown(&atoms, a), shown(&atoms, b));
        assert_eq!(shown(&atoms, a), [(2, 0, 6, vec![]), (2, 0, 3, vec![(2, 6)]), (3, 0, 1, vec![(4, 3)])]);
        let parts = [atoms.atom(3), atoms.atom(4)];
        let c = atoms.product(parts.to_vec());
        atoms.unify(a, c, "uneven");
        assert_eq!(atoms.reason(parts[0]), Some("uneven"));
        let mut seen = Vec::new();
        UnitLayout { offset: 1, block: 2, repeats: vec![(2, 10)] }.blocks(3, &mut |at| seen.push(at));
        assert_eq!(seen, [7, 17]);
    }
}
