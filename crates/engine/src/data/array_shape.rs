//! Whether rows of arrays fit the shape of a model's input.

/// Maximum rank for which transpositions are searched.
const MAX_AXES: usize = 6;

/// The shape of a row that matches an input: the row's own shape, or the same axes with axes of length 1
/// added or removed. The order of elements in memory is unchanged by either. Rows of any other shape are
/// rejected, even with the right number of elements: their axes may be permuted.
pub(super) fn matched_shape(own: &[usize], wanted: &[Option<usize>]) -> Option<Vec<usize>> {
    let fits =
        |own: &[usize], wanted: &[Option<usize>]| own.len() == wanted.len() && own.iter().zip(wanted).all(|(have, want)| want.is_none_or(|w| w == *have));
    if fits(own, wanted) {
        return Some(own.to_vec());
    }
    let long: Vec<usize> = own.iter().copied().filter(|size| *size != 1).collect();
    let open: Vec<Option<usize>> = wanted.iter().copied().filter(|size| *size != Some(1)).collect();
    if own.len() == wanted.len() || !fits(&long, &open) {
        return None;
    }
    let mut sizes = long.into_iter();
    wanted.iter().map(|want| if *want == Some(1) { Some(1) } else { sizes.next() }).collect()
}

/// The NumPy transposition after which an array fits an input with the same number of axes, as the end
/// of an error message.
pub(super) fn transposition_hint(own: &[usize], wanted: &[Option<usize>]) -> String {
    fn search(own: &[usize], wanted: &[Option<usize>], axes: &mut Vec<usize>) -> bool {
        let Some((first, rest)) = wanted.split_first() else { return true };
        for (axis, size) in own.iter().enumerate() {
            if axes.contains(&axis) || first.is_some_and(|first| first != *size) {
                continue;
            }
            axes.push(axis);
            if search(own, rest, axes) {
                return true;
            }
            axes.pop();
        }
        false
    }
    // The batch axis stays first.
    let mut axes = vec![0];
    if own.len() != wanted.len() || own.len() > MAX_AXES || !search(own, wanted.get(1..).unwrap_or(&[]), &mut axes) {
        return String::new();
    }
    let axes = axes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("; transpose the array with numpy.transpose(array, ({axes}))")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permuted_axes_are_rejected_with_the_transposition_that_fits() {
        let fixed = |sizes: &[usize]| sizes.iter().copied().map(Some).collect::<Vec<_>>();
        assert_eq!(matched_shape(&[3, 4, 5], &[Some(3), None, None]), Some(vec![3, 4, 5]));
        assert_eq!(matched_shape(&[28, 28], &fixed(&[1, 28, 28])), Some(vec![1, 28, 28]));
        assert_eq!(matched_shape(&[1, 28, 28], &fixed(&[28, 28])), Some(vec![28, 28]));
        for (own, wanted) in [(&[3, 4, 4][..], &[4, 4, 3][..]), (&[28, 1, 28], &[1, 28, 28]), (&[784], &[1, 28, 28]), (&[2, 3], &[3, 2])] {
            assert_eq!(matched_shape(own, &fixed(wanted)), None, "{own:?} {wanted:?}");
        }
        let hint = transposition_hint(&[8, 3, 224, 224], &[None, Some(224), Some(224), Some(3)]);
        assert!(hint.contains("(0, 2, 3, 1)"), "{hint}");
        assert!(transposition_hint(&[8, 224, 224, 3], &[None, Some(3), None, None]).contains("(0, 3, 1, 2)"));
        assert_eq!(transposition_hint(&[8, 784], &[None, Some(1), Some(28), Some(28)]), "");
    }
}
