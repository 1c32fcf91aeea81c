//! Groups whose units divide the same axis: the groups of a grouped convolution, and the channels in each of
//! them.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::NAME;
use crate::analysis::{Group, GroupUnit, Groups};
use crate::error::counted;

/// The parts of axes that the units of a group divide: tensor, axis, first element and number of elements.
fn extents(group: &Group) -> BTreeSet<(&str, usize, usize, usize)> {
    group.members.iter().map(|member| (member.param.as_str(), member.axis, member.layout.offset, member.layout.elements() * group.size)).collect()
}

/// Removes groups of channels from the selected ones if a selected group divides one of their axes into more
/// units: an amount of both would remove more of the axis than requested. Returns a note if there are any.
pub(super) fn leave_out(groups: &Groups, selected: &mut Vec<usize>) -> Option<String> {
    let of = |index: usize| &groups.groups[index];
    let mut channels: Vec<usize> = selected.iter().copied().filter(|index| of(*index).unit == GroupUnit::Channels).collect();
    channels.sort_by_key(|index| Reverse(of(*index).size));
    let (mut divided, mut left) = (BTreeSet::new(), BTreeSet::new());
    for index in channels {
        let own = extents(of(index));
        if divided.is_disjoint(&own) {
            divided.extend(own);
        } else {
            left.insert(index);
        }
    }
    selected.retain(|index| !left.contains(index));
    let first = left.first().map(|index| of(*index))?;
    let others = if left.len() > 1 { format!(" and {} more", counted(left.len() - 1, "group")) } else { String::new() };
    Some(format!(
        "{NAME}: left unchanged, the group of {} units of `{}`{others}: their channels are also divided into more units, which are removed instead",
        first.size, first.name
    ))
}

#[cfg(test)]
mod tests {
    use super::super::selection::Selection;
    use super::super::{Amounts, PruneStructured, PrunedPart};
    use crate::pass::Amount;
    use crate::pass::testing::{model, numbers};

    /// The first two convolutions share the groups of the second one. Of each axis, the larger number of
    /// units is selected.
    #[test]
    fn an_amount_applies_to_the_channels_of_a_grouped_convolution_once() {
        for ([inner, outer, parts], expected) in [([16, 16, 2], [("a.weight", 8), ("b.weight", 8)]), ([32, 128, 8], [("a.weight", 4), ("b.weight", 16)])] {
            let conv = |parts: usize, output: &str, inputs: &str, width: usize| {
                format!("{output} = Conv{{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":{parts}}}({inputs}) -> float[batch, {width}, 6, 6]\n")
            };
            let text = format!(
                "input x: float[batch, 4, 6, 6]\nparam a.weight: float[{inner}, 4, 1, 1]\nparam b.weight: float[{outer}, {}, 1, 1]\n\
                 param c.weight: float[4, {outer}, 1, 1]\n{}{}{}output y = y\n",
                inner / parts,
                conv(1, "h", "x, a.weight", inner),
                conv(parts, "g", "h, b.weight", outer),
                conv(1, "y", "g, c.weight", 4)
            );
            let (_folder, model) = model(&text, |_, shape| numbers(shape)).unwrap();
            let pass = PruneStructured { dims: vec![PrunedPart::Channels], amount: Some(Amounts::All(Amount::fraction(0.25))), ..PruneStructured::default() };
            let selection = Selection::new(&pass, &model, &model.graph().unwrap()).unwrap();
            let groups = selection.selected_groups();
            let found: Vec<(&str, usize)> = groups.iter().map(|group| (group.members[0].param.as_str(), group.size)).collect();
            assert_eq!(found, expected);
            let sizes: Vec<usize> = groups.iter().map(|group| group.size).collect();
            let notes = selection.notes(&pass, &sizes);
            assert!(notes[0].contains(&format!("left unchanged, the group of {parts} units of `a`: ")), "{notes:?}");
        }
    }
}
