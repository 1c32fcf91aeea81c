//! Image files below a folder.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result, counted};

/// Extensions of the formats that are decoded.
const EXTENSIONS: [&str; 7] = ["png", "jpg", "jpeg", "webp", "bmp", "jpe", "jfif"];
/// Extensions of image formats that are not decoded.
const UNSUPPORTED: [&str; 22] = [
    "avif", "dds", "dng", "exr", "gif", "hdr", "heic", "heif", "ico", "j2k", "jp2", "jxl", "pbm", "pcx", "pgm", "pnm", "ppm", "psd", "svg", "tga", "tif",
    "tiff",
];
/// Maximum depth of nested folders, which links to a parent folder would make infinite.
const MAX_DEPTH: usize = 32;

/// Number of files of one kind, and the first of them.
#[derive(Debug, Default)]
struct Files {
    count: usize,
    first: Option<PathBuf>,
}

impl Files {
    fn add(&mut self, file: PathBuf) {
        self.count = self.count.saturating_add(1);
        self.first.get_or_insert(file);
    }
}

/// Files of a data set that are not read.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    /// Images in formats that are not decoded.
    unsupported: Files,
    /// Images outside of the class folders.
    outside: Files,
    /// Other files, and hidden files and folders.
    remaining: usize,
}

impl Skipped {
    /// The subfolders and the files of a folder, in alphabetical order and without hidden ones.
    pub fn entries(&mut self, folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
        let (hidden, visible): (Vec<PathBuf>, Vec<PathBuf>) = entries(folder)?.into_iter().partition(|entry| is_hidden(entry));
        self.remaining = self.remaining.saturating_add(hidden.len());
        Ok(visible.into_iter().partition(|entry| entry.is_dir()))
    }

    /// Returns the images among files.
    pub fn select_images(&mut self, files: Vec<PathBuf>) -> Vec<PathBuf> {
        let mut images = Vec::new();
        for file in files {
            match extension(&file) {
                extension if EXTENSIONS.contains(&extension.as_str()) => images.push(file),
                extension if UNSUPPORTED.contains(&extension.as_str()) => self.unsupported.add(file),
                _ => self.remaining = self.remaining.saturating_add(1),
            }
        }
        images
    }

    /// The images in a folder and in its subfolders at any depth.
    pub fn images_below(&mut self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut images = Vec::new();
        self.add_images(folder, 0, &mut images)?;
        Ok(images)
    }

    fn add_images(&mut self, folder: &Path, depth: usize, images: &mut Vec<PathBuf>) -> Result<()> {
        if depth > MAX_DEPTH {
            let reason = format!("is nested more than {MAX_DEPTH} folders deep: remove links to parent folders");
            return Err(Error::malformed(folder, reason));
        }
        let (folders, files) = self.entries(folder)?;
        images.extend(self.select_images(files));
        folders.iter().try_for_each(|folder| self.add_images(folder, depth.saturating_add(1), images))
    }

    /// Records files next to class folders, which belong to no class.
    pub fn add_outside(&mut self, files: Vec<PathBuf>) {
        for file in files {
            if is_image(&file) { self.outside.add(file) } else { self.remaining = self.remaining.saturating_add(1) }
        }
    }

    /// Descriptions of the files of a data set in `root` that are not read.
    pub fn notes(&self, root: &Path) -> Vec<String> {
        let verb = |count: usize| if count == 1 { "is" } else { "are" };
        let images = |files: &Files, kind: &str, advice: &str| {
            let first = files.first.as_deref()?;
            let (name, count) = (first.strip_prefix(root).unwrap_or(first).display(), counted(files.count, "image"));
            Some(format!("{count} {kind} {} not read, such as {name}: {advice}", verb(files.count)))
        };
        let remaining = (self.remaining > 0).then(|| format!("{} {} not read", counted(self.remaining, "other or hidden file"), verb(self.remaining)));
        let unsupported = images(&self.unsupported, "of an unsupported format", "save such images as .png or .jpg");
        let outside = images(&self.outside, "outside of the class folders", "move such images to the folder of their class");
        [unsupported, outside, remaining].into_iter().flatten().collect()
    }
}

/// An error for a folder without images.
pub(super) fn without_images(folder: &Path, expected: &str) -> Error {
    Error::malformed(folder, format!("contains no images: expected files with the extensions {}{expected}", EXTENSIONS.join(", ")))
}

/// Whether a folder contains subfolders that are not hidden.
pub(super) fn has_subfolders(path: &Path) -> Result<bool> {
    Ok(entries(path)?.iter().any(|entry| entry.is_dir() && !is_hidden(entry)))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("open", folder))? {
        found.push(entry.map_err(Error::io("read", folder))?.path());
    }
    found.sort();
    Ok(found)
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// Whether a file has the extension of an image, also of a format that is not decoded.
pub(super) fn is_image(path: &Path) -> bool {
    let extension = extension(path);
    EXTENSIONS.iter().chain(&UNSUPPORTED).any(|known| *known == extension)
}

/// The extension in lower case.
pub(super) fn extension(path: &Path) -> String {
    path.extension().map_or(String::new(), |extension| extension.to_string_lossy().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_images_are_found_and_other_files_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for file in ["b/z.PNG", "b/deep/er/a.jpg", "b/a.gif", "b/deep/c.tiff", "b/labels.txt", "b/.hidden.png", ".cache/a.png", "top.png", "top.gif", "a.md"] {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        assert!(has_subfolders(root).unwrap() && !has_subfolders(&root.join(".cache")).unwrap());
        let mut skipped = Skipped::default();
        let (folders, files) = skipped.entries(root).unwrap();
        assert_eq!(folders, [root.join("b")]);
        assert_eq!(skipped.images_below(&folders[0]).unwrap(), [root.join("b/z.PNG"), root.join("b/deep/er/a.jpg")]);
        skipped.add_outside(files);
        let unsupported =
            format!("2 images of an unsupported format are not read, such as {}: save such images as .png or .jpg", Path::new("b/a.gif").display());
        let outside = "2 images outside of the class folders are not read, such as top.gif: move such images to the folder of their class";
        assert_eq!(skipped.notes(root), [unsupported.as_str(), outside, "4 other or hidden files are not read"]);
        assert!(Skipped::default().notes(root).is_empty());
        let mut one = Skipped::default();
        assert_eq!(one.select_images(vec![root.join("x.json"), root.join("y.bmp")]), [root.join("y.bmp")]);
        assert_eq!(one.notes(root), ["1 other or hidden file is not read"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_to_a_parent_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("a/up")).unwrap();
        let error = Skipped::default().images_below(folder.path()).unwrap_err().to_string();
        assert!(error.contains("remove links to parent folders"), "{error}");
    }
}
