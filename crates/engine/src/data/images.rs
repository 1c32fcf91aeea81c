//! Folders of images, optionally with one subfolder per class.

mod jpeg;

use std::io::{BufRead, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, ImageResult, Limits};

use super::held_out::hash;
use super::image_files::{self, Skipped};
use super::image_input::ImageInput;
use super::labels::Classes;
use super::options::{Data, Task};
use super::pixels::Pixels;
use super::{Batch, Identities, Order, PendingBatches, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};
use crate::files;

/// Number of bytes at the start of an image file that are hashed.
const HASHED_BYTES: u64 = 1 << 16;

pub(super) struct ClassFolders {
    files: Vec<(PathBuf, usize)>,
    batch: usize,
    labelled: bool,
    /// Whether classes are numbered in the alphabetical order of their folders.
    alphabetical: bool,
    /// The files that are not read.
    skipped: Vec<String>,
    pixels: Pixels,
    input: ImageInput,
}

/// Whether a folder contains subfolders, which are classes.
pub(super) fn has_classes(path: &Path) -> Result<bool> {
    Ok(path.is_dir() && image_files::has_subfolders(path)?)
}

impl ClassFolders {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<ClassFolders> {
        let input = ImageInput::from_target(options, &target, path)?;
        let mut skipped = Skipped::default();
        let (folders, own) = skipped.entries(path)?;
        let labelled = task == Task::Classification;
        let mut alphabetical = false;
        let mut files = Vec::new();
        if labelled {
            let names = folders.iter().map(|folder| class_name(folder)).collect::<Result<Vec<String>>>()?;
            let classes;
            (classes, alphabetical) = Classes::from_target(options, &target).for_folders(&names, path)?;
            for (folder, class) in folders.iter().zip(classes) {
                let images = skipped.images_below(folder)?;
                if images.is_empty() {
                    return Err(image_files::without_images(folder, "; save images of other formats as .png or .jpg, or remove the class folder"));
                }
                files.extend(images.into_iter().map(|file| (file, class)));
            }
            skipped.add_outside(own);
        } else {
            for folder in &folders {
                files.extend(skipped.images_below(folder)?.into_iter().map(|file| (file, 0)));
            }
            files.extend(skipped.select_images(own).into_iter().map(|file| (file, 0)));
        }
        if files.is_empty() {
            return Err(image_files::without_images(path, ", in one folder per class for classification"));
        }
        if let Some(limit) = options.samples.filter(|limit| *limit < files.len()) {
            // Deterministically spread over all classes.
            let count = files.len();
            files = (0..limit).filter_map(|i| files.get(count.checked_mul(i)?.checked_div(limit)?).cloned()).collect();
        }
        let (batch, skipped, pixels) = (options.batch(task, None), skipped.notes(path), Pixels::open(options, &target, &input)?);
        Ok(ClassFolders { files, batch, labelled, alphabetical, skipped, pixels, input })
    }

    fn batch(&self, files: &[&(PathBuf, usize)]) -> Result<Batch> {
        let paths: Vec<&Path> = files.iter().map(|(file, _)| file.as_path()).collect();
        let input = read_images(&paths, &self.pixels, &self.input)?;
        let references = if self.labelled { References::Classes(files.iter().map(|(_, class)| Some(*class)).collect()) } else { References::None };
        Ok(Batch { inputs: [input].into(), references, samples: files.len() })
    }
}

/// The name of an image input, and the tensor of these files for it.
pub(super) fn read_images(files: &[&Path], pixels: &Pixels, input: &ImageInput) -> Result<(String, Tensor)> {
    let mut numbers = Vec::new();
    let mut first = None;
    for file in files {
        let bytes = files::read(file).map_err(Error::io("open", file))?;
        if image::guess_format(&bytes).ok() == Some(ImageFormat::Jpeg) && !jpeg::is_complete(&bytes) {
            return Err(Error::malformed(file, "is truncated: the end of the JPEG image is missing; save it again or remove it"));
        }
        let mut image = ImageReader::new(Cursor::new(bytes));
        // Formats that cannot be recognized by their contents.
        ImageFormat::from_path(file).into_iter().for_each(|format| image.set_format(format));
        let image = decode(image.with_guessed_format().map_err(Error::io("read", file))?).map_err(|e| unreadable(file, &e))?;
        let (mut own, height, width) = pixels.preprocess(&image, input, file)?;
        input.require_size(height, width, file, &pixels.size_advice())?;
        if *first.get_or_insert((height, width)) != (height, width) {
            let reason = format!("differs in size from earlier images: {}, or `batch_size: 1`", pixels.size_advice());
            return Err(Error::malformed(file, reason));
        }
        numbers.append(&mut own);
    }
    let (height, width) = first.unwrap_or_default();
    input.batch(numbers, files.len(), height, width)
}

/// Decodes an image, and applies the orientation of its EXIF metadata, as `load_image` of transformers does.
fn decode<R: BufRead + Seek>(reader: ImageReader<R>) -> ImageResult<DynamicImage> {
    let mut decoder = reader.into_decoder()?;
    // As in `ImageReader::decode`.
    let mut limits = Limits::default();
    limits.reserve(decoder.total_bytes())?;
    decoder.set_limits(limits)?;
    // Images with invalid metadata are decoded without an orientation.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder)?;
    image.apply_orientation(orientation);
    Ok(image)
}

fn unreadable(file: &Path, error: &ImageError) -> Error {
    match error {
        ImageError::Limits(_) => Error::malformed(file, "is too large to decode: shrink or remove the image"),
        _ => Error::malformed(file, format!("cannot be decoded as an image ({error}): save it again or remove it")),
    }
}

impl SampleSource for ClassFolders {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        Ok(in_batches(self.files.iter().map(Ok), self.batch, size_of::<&(PathBuf, usize)>(), order, |files| self.batch(files)))
    }

    /// Hashes the length and the first bytes of each file: pixels depend on the preprocessing.
    fn identities(&self, _: usize, _: bool) -> Result<Identities<'_>> {
        Ok(Box::new(self.files.iter().map(|(path, _)| {
            let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
            let mut bytes = file.metadata().map_err(Error::io("read", path))?.len().to_le_bytes().to_vec();
            file.take(HASHED_BYTES).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
            Ok(vec![hash(&bytes)])
        })))
    }

    fn images(&self) -> Option<(&Pixels, &ImageInput)> {
        Some((&self.pixels, &self.input))
    }

    fn count(&self) -> Result<usize> {
        Ok(self.files.len())
    }

    fn notes(&self) -> Vec<String> {
        let order = "no class folder has the name of a label of config.json: classes are numbered in the alphabetical order of the folders";
        self.alphabetical.then(|| order.to_owned()).into_iter().chain(self.skipped.iter().cloned()).collect()
    }
}

/// The name of a class folder.
fn class_name(folder: &Path) -> Result<String> {
    let name = folder.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    name.ok_or_else(|| Error::malformed(folder, "the name of a class folder is not UTF-8: rename the folder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `exif_transpose` of Pillow.
    #[test]
    fn the_exif_orientation_is_applied() {
        let mut wide = image::GrayImage::new(16, 8);
        (0..8).for_each(|y| (0..8).for_each(|x| wide.put_pixel(x, y, image::Luma([255]))));
        // A TIFF header, and a directory with the tag 0x112: one value of type 3.
        let tiff = |orientation: u8| [&b"MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0"[..], &[orientation, 0, 0, 0, 0, 0, 0]].concat();
        let written = |format: ImageFormat| {
            let mut file = Cursor::new(Vec::new());
            wide.write_to(&mut file, format).unwrap();
            file.into_inner()
        };
        let jpeg = |metadata: Vec<u8>| {
            let segment = [b"Exif\0\0", metadata.as_slice()].concat();
            let (start, rest) = (&[0xff, 0xd8, 0xff, 0xe1, 0, segment.len() as u8 + 2], written(ImageFormat::Jpeg));
            [start, segment.as_slice(), &rest[2..]].concat()
        };
        // Width, height, and the values of the top left and the bottom right pixel.
        let decoded = |bytes: Vec<u8>| {
            let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().unwrap();
            let image = decode(reader).unwrap().into_luma8();
            let (width, height) = image.dimensions();
            let is_white = |x, y| image.get_pixel(x, y)[0] > 128;
            (width, height, is_white(0, 0), is_white(width - 1, height - 1))
        };
        let stored = (16, 8, true, false);
        for (orientation, expected) in
            [(1, stored), (2, (16, 8, false, true)), (3, (16, 8, false, true)), (6, (8, 16, true, false)), (8, (8, 16, false, true)), (9, stored)]
        {
            assert_eq!(decoded(jpeg(tiff(orientation))), expected, "{orientation}");
        }
        for bytes in [jpeg(b"MM".to_vec()), written(ImageFormat::Jpeg), written(ImageFormat::Png), written(ImageFormat::Bmp)] {
            assert_eq!(decoded(bytes), stored);
        }
    }
}
