//! Folders of images, optionally with one subfolder per class.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::held_out::hash;
use super::image_input::ImageInput;
use super::labels::Classes;
use super::options::{Data, Task};
use super::pixels::Pixels;
use super::{Batch, Identities, Order, PendingBatches, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};

const EXTENSIONS: [&str; 5] = ["png", "jpg", "jpeg", "webp", "bmp"];

/// Number of bytes at the start of an image file that are hashed.
const HASHED_BYTES: u64 = 1 << 16;

pub(super) struct ClassFolders {
    files: Vec<(PathBuf, usize)>,
    batch: usize,
    labelled: bool,
    /// Whether classes are numbered in the alphabetical order of their folders.
    alphabetical: bool,
    pixels: Pixels,
    input: ImageInput,
}

/// Whether a folder contains subfolders, which are classes.
pub(super) fn has_classes(path: &Path) -> Result<bool> {
    Ok(path.is_dir() && entries(path)?.iter().any(|entry| entry.is_dir()))
}

impl ClassFolders {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<ClassFolders> {
        let input = ImageInput::from_target(options, &target, path)?;
        let mut names: Vec<String> = Vec::new();
        for entry in entries(path)? {
            if entry.is_dir() {
                names.extend(entry.file_name().and_then(|n| n.to_str()).map(str::to_owned));
            }
        }
        let labelled = task == Task::Classification;
        let mut alphabetical = false;
        let mut files = Vec::new();
        if labelled {
            let classes;
            (classes, alphabetical) = Classes::from_target(options, &target).for_folders(&names, path)?;
            for (name, class) in names.iter().zip(classes) {
                files.extend(image_files(&path.join(name))?.into_iter().map(|file| (file, class)));
            }
        } else {
            let folders = names.iter().map(|name| path.join(name)).chain([path.to_owned()]);
            for folder in folders {
                files.extend(image_files(&folder)?.into_iter().map(|file| (file, 0)));
            }
        }
        if files.is_empty() {
            return Err(Error::malformed(
                path,
                format!("contains no images: expected files with the extensions {}, in one folder per class for classification", EXTENSIONS.join(", ")),
            ));
        }
        if let Some(limit) = options.samples.filter(|limit| *limit < files.len()) {
            // Deterministically spread over all classes.
            let count = files.len();
            files = (0..limit).filter_map(|i| files.get(count.checked_mul(i)?.checked_div(limit)?).cloned()).collect();
        }
        Ok(ClassFolders { files, batch: options.batch(task, None), labelled, alphabetical, pixels: Pixels::open(options, &target, &input)?, input })
    }

    fn batch(&self, files: &[&(PathBuf, usize)]) -> Result<Batch> {
        let mut numbers = Vec::new();
        let mut first = None;
        for (file, _) in files {
            let image = image::ImageReader::open(file).map_err(Error::io("open", file))?;
            let image = image.with_guessed_format().map_err(Error::io("read", file))?.decode().map_err(|e| unreadable(file, &e))?;
            let (mut pixels, height, width) = self.pixels.preprocess(&image, &self.input, file)?;
            self.input.require_size(height, width, file)?;
            if *first.get_or_insert((height, width)) != (height, width) {
                return Err(Error::malformed(file, "differs in size from earlier images: set `resize`, or `batch_size: 1`"));
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

    fn note(&self) -> Option<&'static str> {
        self.alphabetical.then_some("no class folder has the name of a label of config.json: classes are numbered in the alphabetical order of the folders")
    }
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("open", folder))? {
        found.push(entry.map_err(Error::io("read", folder))?.path());
    }
    found.sort();
    Ok(found)
}

fn image_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let is_image = |path: &PathBuf| path.extension().and_then(|e| e.to_str()).is_some_and(|e| EXTENSIONS.contains(&e.to_ascii_lowercase().as_str()));
    Ok(entries(folder)?.into_iter().filter(is_image).collect())
}
