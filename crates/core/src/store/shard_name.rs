//! Names of the files of a model that is split over several: `name-00001-of-00003.safetensors`

use std::path::Path;

/// Splits the name of a file into base name, file number and number of files.
pub(super) fn parse<'p>(path: &'p Path, extension: &str) -> Option<(&'p str, u64, u64)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(extension)?.strip_suffix('.')?;
    let number = |text: &str| if text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse::<u16>().ok().map(u64::from) } else { None };
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, first) = rest.rsplit_once('-')?;
    let (first, count) = (number(first)?, number(count)?);
    (1..=count).contains(&first).then_some((name, first, count))
}
