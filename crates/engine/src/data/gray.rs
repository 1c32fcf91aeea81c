//! Gray images.

use image::DynamicImage;

/// Gray values of 8 bits, with the weights of colors of ITU-R BT.601, as in PIL, torchvision and OpenCV.
#[allow(clippy::arithmetic_side_effects, reason = "the sum is less than 2^24")]
pub fn gray(image: &DynamicImage) -> Vec<u8> {
    if !image.color().has_color() {
        return image.to_luma8().into_raw();
    }
    let value = |[r, g, b]: &[u8; 3]| ((19595 * u32::from(*r) + 38470 * u32::from(*g) + 7471 * u32::from(*b) + 32768) >> 16) as u8;
    image.to_rgb8().into_raw().as_chunks().0.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use image::DynamicImage;

    /// `Image.new("RGB", (1, 1), color).convert("L")` of PIL.
    #[test]
    fn colors_become_gray_as_in_pil() {
        for (color, gray) in [([0, 0, 255], 29), ([255, 0, 0], 76), ([0, 255, 0], 150), ([255, 255, 255], 255), ([12, 200, 97], 132)] {
            let image = DynamicImage::ImageRgb8(image::RgbImage::from_pixel(1, 1, image::Rgb(color)));
            assert_eq!(super::gray(&image), [gray], "{color:?}");
        }
    }
}
