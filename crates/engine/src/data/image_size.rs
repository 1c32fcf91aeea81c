//! Target size of images.

/// Target size of resizing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// Height and width.
    Exactly(usize, usize),
    /// Length of the shorter side; the aspect ratio is kept.
    Shorter(usize),
    /// Length of the shorter side, unless the longer one would exceed its limit; the aspect ratio is kept.
    Limited { shorter: usize, longer: usize },
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

    /// Height and width of a resized image, as computed by transformers (`get_size_with_aspect_ratio` for a
    /// limit).
    pub fn of_image(self, height: usize, width: usize) -> (usize, usize) {
        let (short, long) = (height.min(width), height.max(width));
        let (edge, other) = match self {
            Size::Exactly(high, wide) => return (high, wide),
            Size::Shorter(edge) => (edge, edge.saturating_mul(long).checked_div(short).unwrap_or(0)),
            Size::Limited { shorter, longer } => {
                let (small, large, limit) = (short as f64, long as f64, longer as f64);
                let reduced = (large / small * shorter as f64 > limit).then_some(limit * small / large);
                let edge = reduced.map_or(shorter, |edge| edge.round_ties_even() as usize);
                (edge, if edge == short { long } else { (reduced.unwrap_or(edge as f64) * large / small) as usize })
            }
        };
        if height < width { (edge, other) } else { (other, edge) }
    }

    /// The crop with this size.
    pub fn crop(self) -> (usize, usize) {
        match self {
            Size::Exactly(height, width) => (height, width),
            Size::Shorter(side) | Size::Limited { shorter: side, .. } => (side, side),
        }
    }

    /// The option that gives all images the same size, in addition to this size and this crop.
    pub fn advice(size: Option<Size>, crop: Option<(usize, usize)>) -> String {
        match (size, crop) {
            (Some(Size::Shorter(side)), None) => {
                format!("only the shorter side is resized to {side}: also set `crop: {side}`, or the size of the model's input")
            }
            (Some(Size::Limited { .. }), None) => "the aspect ratio is kept: set `resize` to the size of the model's input".to_owned(),
            _ => "set `resize`".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of transformers 5.23.
    #[test]
    fn the_longer_side_is_limited() {
        let size = Size::Limited { shorter: 800, longer: 1333 };
        for ((height, width), expected) in [
            ((480, 640), (800, 1066)),
            ((640, 480), (1066, 800)),
            ((500, 1000), (666, 1333)),
            ((1000, 333), (1333, 444)),
            ((900, 800), (900, 800)),
            ((777, 1333), (777, 1333)),
            ((3, 2000), (2, 1333)),
        ] {
            assert_eq!(size.of_image(height, width), expected, "{height} x {width}");
        }
        assert_eq!(Size::Shorter(8).of_image(16, 32), (8, 16));
    }

    #[test]
    fn a_shorter_side_without_a_crop_leads_to_different_sizes() {
        assert_eq!(Size::advice(Some(Size::Shorter(8)), None), "only the shorter side is resized to 8: also set `crop: 8`, or the size of the model's input");
        let others = [(Some(Size::Shorter(8)), Some((8, 8))), (Some(Size::Exactly(8, 8)), None), (None, None)];
        assert_eq!(others.map(|(size, crop)| Size::advice(size, crop)), ["set `resize`"; 3]);
    }
}
