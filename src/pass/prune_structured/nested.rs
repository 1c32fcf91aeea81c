//! Groups whose units divide the same axis: the groups of a grouped convolution, and the channels in each of them.

use std::collections::BTreeSet;

use super::NAME;
use crate::analysis::{Group, GroupUnit, Groups};

/// The parts of axes that the units of a group divide: tensor, axis, first element and number of elements.
fn extents(group: &Group) -> BTreeSet<(&str, usize, usize, usize)> {
    group.members.iter().map(|member| (member.param.as_str(), member.axis, member.layout.offset, member.layout.elements() * group.size)).collect()
}

/// Removes groups of channels from the selected ones if others divide their axis into more units: an amount of
/// both would remove more of the axis than requested. Returns a note if there are any.
pub(super) fn leave_out(groups: &Groups, selected: &mut Vec<usize>) -> Option<String> {
    let of = |index: usize| &groups.groups[index];
    let channels: Vec<usize> = selected.iter().copied().filter(|index| of(*index).unit == GroupUnit::Channels).collect();
    let is_finer = |other: usize, index: usize| (of(other).size, index) > (of(index).size, other);
    let divided = |index: &usize| {
        let own = extents(of(*index));
        channels.iter().any(|other| other != index && is_finer(*other, *index) && !own.is_disjoint(&extents(of(*other))))
    };
    let left: BTreeSet<usize> = channels.iter().copied().filter(divided).collect();
    selected.retain(|index| !left.contains(index));
    let first = left.first().map(|index| of(*index))?;
    let others = if left.len() > 1 { format!(" and {} more", left.len() - 1) } else { String::new() };
    Some(format!(
        "{NAME}: a convolution divides the channels of `{}`{others} into {} groups; channels are removed within these, so that `amount` applies once",
        first.name, first.size
    ))
}

#[cfg(test)]
mod tests {
    use super::super::selection::Selection;
    use super::super::{PruneStructured, PrunedPart};
    use super::*;
    use crate::pass::Amount;
    use crate::pass::testing::{model, numbers};

    #[test]
    fn an_amount_applies_to_the_channels_of_a_grouped_convolution_once() {
        let text = "input x: float[batch, 4, 6, 6]\nparam a.weight: float[16, 4, 1, 1]\nparam b.weight: float[16, 8, 3, 3]\n\
                    param c.weight: float[4, 16, 1, 1]\n\
                    h = Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}(x, a.weight) -> float[batch, 16, 6, 6]\n\
                    g = Conv{\"stride\":1,\"padding\":1,\"dilation\":1,\"groups\":2}(h, b.weight) -> float[batch, 16, 6, 6]\n\
                    y = Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}(g, c.weight) -> float[batch, 4, 6, 6]\noutput y = y\n";
        let (_folder, model) = model(text, |_, shape| numbers(shape)).unwrap();
        let pass = PruneStructured {
            dims: vec![PrunedPart::Channels],
            amount: Some(super::super::Amounts::All(Amount::fraction(0.25))),
            ..PruneStructured::default()
        };
        let graph = model.graph().unwrap();
        let selection = Selection::new(&pass, &model, &graph).unwrap();
        let found: Vec<(usize, String)> = selection.selected_groups().iter().map(|group| (group.size, group.members[0].param.clone())).collect();
        assert_eq!(found, [(8, "a.weight".to_owned()), (8, "b.weight".to_owned())]);
    }
}
