//! Resizing of images, with the filters of Pillow.

use fast_image_resize::images::Image;
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use serde_json::Value;

/// Maximum number of pixels of a resized image.
pub(super) const MAX_PIXELS: usize = 1 << 26;

/// The filter with this number in Pillow.
pub(super) fn filter(number: &Value) -> Option<ResizeAlg> {
    Some(match number.as_u64()? {
        0 => ResizeAlg::Nearest,
        1 => ResizeAlg::Convolution(FilterType::Lanczos3),
        2 => ResizeAlg::Convolution(FilterType::Bilinear),
        3 => ResizeAlg::Convolution(FilterType::CatmullRom),
        4 => ResizeAlg::Convolution(FilterType::Box),
        5 => ResizeAlg::Convolution(FilterType::Hamming),
        _ => return None,
    })
}

/// Resizes like Pillow: first along rows, rounded to bytes, then along columns.
pub(super) fn resize(bytes: Vec<u8>, from: (usize, usize), to: (usize, usize), channels: usize, filter: ResizeAlg) -> Result<Vec<u8>, String> {
    let pixels = from.0.max(to.0).checked_mul(to.1);
    if to.0 == 0 || to.1 == 0 || pixels.is_none_or(|pixels| pixels > MAX_PIXELS) {
        return Err(format!("is {} x {} and cannot be resized to {} x {}", from.0, from.1, to.0, to.1));
    }
    let bytes = if from.1 == to.1 { bytes } else { stretch(&bytes, from, (from.0, to.1), channels, filter)? };
    if from.0 == to.0 { Ok(bytes) } else { stretch(&bytes, (from.0, to.1), to, channels, filter) }
}

/// Resizes along one axis.
fn stretch(bytes: &[u8], from: (usize, usize), to: (usize, usize), channels: usize, filter: ResizeAlg) -> Result<Vec<u8>, String> {
    let kind = if channels == 1 { PixelType::F32 } else { PixelType::F32x3 };
    let side = |n: usize| u32::try_from(n).map_err(|_| format!("cannot be resized to {} x {}", to.0, to.1));
    let numbers: Vec<u8> = bytes.iter().flat_map(|b| f32::from(*b).to_ne_bytes()).collect();
    let image = Image::from_vec_u8(side(from.1)?, side(from.0)?, numbers, kind).map_err(|e| e.to_string())?;
    let mut resized = Image::new(side(to.1)?, side(to.0)?, kind);
    Resizer::new().resize(&image, &mut resized, &ResizeOptions::new().resize_alg(filter).use_alpha(false)).map_err(|e| e.to_string())?;
    let byte = |number: &[u8]| f32::from_ne_bytes(number.try_into().unwrap_or_default()).round().clamp(0.0, 255.0) as u8;
    Ok(resized.into_vec().chunks_exact(4).map(byte).collect())
}
