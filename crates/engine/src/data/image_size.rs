//! Target size of images.

/// Target size of resizing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// Height and width.
    Exactly(usize, usize),
    /// Length of the shorter side; the aspect ratio is kept.
    Shorter(usize),
}

impl Size {
    /// From a recipe: a height and a width, or the shorter side.
    pub fn from_sides(sides: &[usize]) -> Option<Size> {
        match *sides {
            [shorter] => Some(Size::Shorter(shorter)),
            [height, width] => Some(Size::Exactly(height, width)),
            _ => None,
        }
    }

    /// The crop with this size.
    pub fn crop(self) -> (usize, usize) {
        match self {
            Size::Exactly(height, width) => (height, width),
            Size::Shorter(side) => (side, side),
        }
    }

    /// The option that gives all images the same size, in addition to this size and this crop.
    pub fn advice(size: Option<Size>, crop: Option<(usize, usize)>) -> String {
        match (size, crop) {
            (Some(Size::Shorter(side)), None) => {
                format!("only the shorter side is resized to {side}: also set `crop: {side}`, or the size of the model's input")
            }
            _ => "set `resize`".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_side_without_a_crop_leads_to_different_sizes() {
        assert_eq!(Size::advice(Some(Size::Shorter(8)), None), "only the shorter side is resized to 8: also set `crop: 8`, or the size of the model's input");
        let others = [(Some(Size::Shorter(8)), Some((8, 8))), (Some(Size::Exactly(8, 8)), None), (None, None)];
        assert_eq!(others.map(|(size, crop)| Size::advice(size, crop)), ["set `resize`"; 3]);
    }
}
