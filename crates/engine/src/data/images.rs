//! Folders of images, optionally with one subfolder per class.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::held_out::hash;
use super::image_files::{self, Skipped};
use super::image_input::ImageInput;
use super::labels::Classes;
use super::options::{Data, Task};
use super::pixels::Pixels;
use super::{Batch, Identities, Order, PendingBatches, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};

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
        let mut numbers = Vec::new();
        let mut first = None;
        for (file, _) in files {
            let image = image::ImageReader::open(file).map_err(Error::io("open", file))?;
            let image = image.with_guessed_format().map_err(Error::io("read", file))?.decode().map_err(|e| unreadable(file, &e))?;
            let (mut pixels, height, width) = self.pixels.preprocess(&image, &self.input, file)?;
            self.input.require_size(height, width, file, &self.pixels.size_advice())?;
            if *first.get_or_insert((height, width)) != (height, width) {
                let reason = format!("differs in size from earlier images: {}, or `batch_size: 1`", self.pixels.size_advice());
                return Err(Error::malformed(file, reason));
            }
            numbers.append(&mut pixels);
        }
        let (height, width) = first.unwrap_or_default();
        let input = self.input.batch(numbers, files.len(), height, width)?;
        let references = if self.labelled { References::Classes(files.iter().map(|(_, class)| Some(*class)).collect()) } else { References::None };
        Ok(Batch { inputs: [input].into(), references, samples: files.len() })
    }
}

fn unreadable(file: &Path, error: &image::ImageError) -> Error {
    match error {
        image::ImageError::Limits(_) => Error::malformed(file, "is too large to decode: shrink or remove the image"),
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
