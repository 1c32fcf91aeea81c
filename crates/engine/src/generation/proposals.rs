//! Tokens that a draft proposes, in one or several continuations of a text.

use super::sampling::Proposal;

/// Minimum probability that a proposal and those before it in the step are accepted. Others are rejected too
/// often to be worth the time of their verification: with f32 weights and AVX-512, each of eight rows adds
/// 4 % to the time of a product.
pub(super) const LEAST_PROBABILITY: f64 = 0.05;

/// Proposals, each after the ones before it in its continuation.
#[derive(Default)]
pub(super) struct Proposals {
    list: Vec<Proposal>,
    /// For each proposal, the one before it; `None` after the text.
    parents: Vec<Option<usize>>,
}

impl Proposals {
    /// A single continuation.
    pub fn chain(list: Vec<Proposal>) -> Proposals {
        let parents = (0..list.len()).map(|index: usize| index.checked_sub(1)).collect();
        Proposals { list, parents }
    }

    /// Adds a proposal after another one, or after the text, and returns its index.
    pub fn push(&mut self, proposal: Proposal, parent: Option<usize>) -> usize {
        self.list.push(proposal);
        self.parents.push(parent);
        self.list.len().saturating_sub(1)
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn tokens(&self) -> impl Iterator<Item = i64> + '_ {
        self.list.iter().map(|proposal| proposal.token)
    }

    /// The proposals after another one, or after the text, with their indices.
    pub fn after(&self, parent: Option<usize>) -> Vec<(usize, &Proposal)> {
        self.list.iter().enumerate().zip(&self.parents).filter(|(_, of)| **of == parent).map(|(found, _)| found).collect()
    }

    /// The proposed tokens from the end of the text to a proposal, which is the last one.
    pub fn path(&self, end: Option<usize>) -> Vec<i64> {
        let before = |index: &usize| self.parents.get(*index).copied().flatten();
        let mut path: Vec<i64> = std::iter::successors(end, before).filter_map(|index| self.list.get(index).map(|proposal| proposal.token)).collect();
        path.reverse();
        path
    }

    /// Whether there are several continuations.
    pub fn are_branches(&self) -> bool {
        self.parents.iter().enumerate().any(|(index, parent)| *parent != index.checked_sub(1))
    }

    /// For each of the last `count` tokens in the sequence of the text and all proposals, the index among
    /// these of the token before it.
    pub fn parents_after(&self, count: usize) -> Vec<Option<usize>> {
        let first = count.saturating_sub(self.len());
        let of_text = (0..first).map(|index| index.checked_sub(1));
        let of_proposals = self.parents.iter().map(|parent| parent.map_or(first.checked_sub(1), |parent| first.checked_add(parent)));
        of_text.chain(of_proposals).collect()
    }

    /// Number of proposals by their position in a continuation.
    pub fn by_position(&self) -> Vec<usize> {
        let mut counts = Vec::new();
        for index in 0..self.len() {
            let position = self.path(Some(index)).len();
            counts.resize(counts.len().max(position), 0usize);
            counts.get_mut(position.saturating_sub(1)).into_iter().for_each(|count| *count = count.saturating_add(1));
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::super::sampling::Sampler;
    use super::*;

    #[test]
    fn branches_share_their_beginnings() {
        let proposal = Sampler::suggest;
        let chain = Proposals::chain([7, 8, 9].map(proposal).into());
        assert!(!chain.are_branches() && !Proposals::default().are_branches());
        assert_eq!((chain.parents_after(5), chain.by_position()), (vec![None, Some(0), Some(1), Some(2), Some(3)], vec![1, 1, 1]));
        let mut tree = Proposals::default();
        let first = tree.push(proposal(4), None);
        let second = tree.push(proposal(5), Some(first));
        tree.push(proposal(6), None);
        let last = tree.push(proposal(7), Some(second));
        assert!(tree.are_branches());
        assert_eq!((tree.path(Some(last)), tree.path(None)), (vec![4, 5, 7], Vec::new()));
        assert_eq!(tree.parents_after(5), [None, Some(0), Some(1), Some(0), Some(2)]);
        assert_eq!(tree.by_position(), [2, 1, 1]);
        assert_eq!(tree.after(None).iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 2]);
    }
}
