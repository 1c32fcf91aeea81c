//! The structure of JPEG files (ITU-T T.81, annex B): the decoder fills missing parts of truncated images
//! with gray.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

/// The marker of the start of the image, which has no segment.
const START: u8 = 0xd8;
/// The marker of the end of the image.
const END: u8 = 0xd9;

/// Whether an image has an end.
pub(super) fn is_complete(mut bytes: &[u8]) -> bool {
    // Compressed data contains only stuffed bytes and the markers of restarts.
    let begins_segment = |pair: &[u8]| matches!(pair, [0xff, marker] if !matches!(marker, 0x00 | 0x01 | 0xd0..=0xd7 | 0xff));
    while let Some(at) = bytes.windows(2).position(begins_segment) {
        let rest = bytes.get(at..).unwrap_or_default();
        let size = match rest {
            [_, END, ..] => return true,
            [_, START, ..] => 2,
            [_, _, high, low, ..] => usize::from(u16::from_be_bytes([*high, *low])).saturating_add(2),
            _ => return false,
        };
        bytes = rest.get(size..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use image::codecs::jpeg::JpegEncoder;

    use super::*;

    #[test]
    fn only_whole_images_are_complete() {
        let mut bytes = Vec::new();
        let pixels: Vec<u8> = (0..64 * 48 * 3u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        JpegEncoder::new(&mut bytes).encode(&pixels, 64, 48, image::ExtendedColorType::Rgb8).unwrap();
        assert!(is_complete(&bytes));
        for length in [0, 1, 3, 30, bytes.len() / 2, bytes.len() - 2, bytes.len() - 1] {
            assert!(!is_complete(&bytes[..length]), "{length}");
        }
        // An embedded preview has an end of its own.
        let preview = [&[0xff, 0xe1, 0x00, 0x06][..], &[0xff, 0xd8, 0xff, 0xd9]].concat();
        let embedded = [&bytes[..2], &preview, &bytes[2..]].concat();
        assert!(is_complete(&embedded) && !is_complete(&embedded[..embedded.len() - 2]));
        bytes.extend([0; 20]);
        assert!(is_complete(&bytes));
    }
}
