//! A folder of images, or with one folder of them for each class.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::held_out::hash;
use super::labels::Classes;
use super::options::{Data, Task};
use super::pixels::Pixels;
use super::plane::Plane;
use super::{Batch, Identities, Order, PendingBatches, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};

const ENDINGS: [&str; 5] = ["png", "jpg", "jpeg", "webp", "bmp"];

/// Length of the hashed beginning of an image file, in bytes.
const IDENTIFYING: u64 = 1 << 16;

pub(super) struct ClassFolders {
    files: Vec<(PathBuf, usize)>,
    batch: usize,
    labelled: bool,
    /// Whether classes are numbered in the alphabetical order of their folders.
    alphabetical: bool,
    pixels: Pixels,
    plane: Plane,
}

/// Whether there is a folder in a folder: that of a class.
pub(super) fn has_classes(path: &Path) -> Result<bool> {
    Ok(path.is_dir() && entries(path)?.iter().any(|entry| entry.is_dir()))
}

impl ClassFolders {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<ClassFolders> {
        let plane = Plane::of(options, &target, path)?;
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
            (classes, alphabetical) = Classes::of(options, &target).for_folders(&names, path)?;
            for (name, class) in names.iter().zip(classes) {
                files.extend(pictures(&path.join(name))?.into_iter().map(|file| (file, class)));
            }
        } else {
            let folders = names.iter().map(|name| path.join(name)).chain([path.to_owned()]);
            for folder in folders {
                files.extend(pictures(&folder)?.into_iter().map(|file| (file, 0)));
            }
        }
        if files.is_empty() {
            return Err(Error::malformed(
                path,
                format!("holds no images; there must be files {}, in a folder for each class where they have classes", ENDINGS.join(", ")),
            ));
        }
        if let Some(wanted) = options.samples.filter(|wanted| *wanted < files.len()) {
            // Spread over all classes, always the same ones.
            let count = files.len();
            files = (0..wanted).filter_map(|i| files.get(count.checked_mul(i)?.checked_div(wanted)?).cloned()).collect();
        }
        Ok(ClassFolders { files, batch: options.batch(task, None), labelled, alphabetical, pixels: Pixels::open(options, &target, &plane)?, plane })
    }

    fn batch(&self, files: &[&(PathBuf, usize)]) -> Result<Batch> {
        let mut numbers = Vec::new();
        let mut first = None;
        for (file, _) in files {
            let image = image::ImageReader::open(file).map_err(Error::io("open", file))?;
            let image = image.with_guessed_format().map_err(Error::io("read", file))?.decode().map_err(|e| unreadable(file, &e))?;
            let (mut pixels, height, width) = self.pixels.numbers(&image, &self.plane, file)?;
            self.plane.require_size(height, width, file)?;
            if *first.get_or_insert((height, width)) != (height, width) {
                return Err(Error::malformed(file, "differs in size from images before it: choose `resize`, or `batch_size: 1`"));
            }
            numbers.append(&mut pixels);
        }
        let (height, width) = first.unwrap_or_default();
        let input = self.plane.batch(numbers, files.len(), height, width)?;
        let references = if self.labelled { References::Classes(files.iter().map(|(_, class)| Some(*class)).collect()) } else { References::None };
        Ok(Batch { inputs: [input].into(), references, samples: files.len() })
    }
}

fn unreadable(file: &Path, error: &image::ImageError) -> Error {
    match error {
        image::ImageError::Limits(_) => Error::malformed(file, "is too large a picture to be unpacked: make it smaller, or leave it out"),
        _ => Error::malformed(file, format!("is no picture that can be read ({error}): save it again, or leave it out")),
    }
}

impl SampleSource for ClassFolders {
    fn works(&self, order: Order) -> Result<PendingBatches<'_>> {
        Ok(in_batches(self.files.iter().map(Ok), self.batch, size_of::<&(PathBuf, usize)>(), order, |files| self.batch(files)))
    }

    /// Hashes the length and the first bytes of each file, since pixels depend on the preprocessing.
    fn identities(&self, _: usize, _: bool) -> Result<Identities<'_>> {
        Ok(Box::new(self.files.iter().map(|(path, _)| {
            let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
            let mut bytes = file.metadata().map_err(Error::io("read", path))?.len().to_le_bytes().to_vec();
            file.take(IDENTIFYING).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
            Ok(vec![hash(&bytes)])
        })))
    }

    fn images(&self) -> Option<(&Pixels, &Plane)> {
        Some((&self.pixels, &self.plane))
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

fn pictures(folder: &Path) -> Result<Vec<PathBuf>> {
    let picture = |path: &PathBuf| path.extension().and_then(|e| e.to_str()).is_some_and(|e| ENDINGS.contains(&e.to_ascii_lowercase().as_str()));
    Ok(entries(folder)?.into_iter().filter(picture).collect())
}
