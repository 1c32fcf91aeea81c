//! IDX files, the format of MNIST: a magic number, sizes, and unsigned bytes.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::image_input::ImageInput;
use super::labels::Classes;
use super::options::{Data, Task};
use super::pixels::Pixels;
use super::{Batch, MAX_SAMPLE_BYTES, Order, PendingBatches, References, SampleSource, Target, in_batches};
use crate::error::{Error, Result};
use crate::files;
use crate::store::DType;
use crate::store::header::byte_count;

/// Element type code of unsigned bytes, the only supported one.
const BYTES: u8 = 0x08;

/// An open file.
struct Reader {
    path: PathBuf,
    count: usize,
    /// Shape of a sample.
    sizes: Vec<usize>,
    /// Size of a sample, in bytes.
    bytes: u64,
    rest: Box<dyn Read + Send>,
}

/// Whether a file begins like an IDX file of bytes, maybe compressed by gzip.
pub(super) fn is_idx(path: &Path) -> bool {
    let mut magic = [0; 4];
    matches!(open(path).map(|mut bytes| bytes.read_exact(&mut magic).is_ok().then_some(magic)), Ok(Some([0, 0, BYTES, _])))
}

/// The bytes of a file, decompressed if its extension is that of gzip.
fn open(path: &Path) -> Result<Box<dyn Read + Send>> {
    let file = BufReader::new(files::stream(path).map_err(Error::io("open", path))?);
    Ok(if path.extension().is_some_and(|e| e == "gz") { Box::new(GzDecoder::new(file)) } else { Box::new(file) })
}

impl Reader {
    fn open(path: &Path, rank: std::ops::RangeInclusive<usize>) -> Result<Reader> {
        let mut rest = open(path)?;
        let not_idx = || {
            Error::malformed(path, "is neither an IDX file of bytes nor a folder of images: use `text` for texts, and `arrays` for .npz and .safetensors files")
        };
        let mut magic = [0; 4];
        rest.read_exact(&mut magic).map_err(|_| not_idx())?;
        let [0, 0, BYTES, dimensions] = magic else { return Err(not_idx()) };
        if !rank.contains(&usize::from(dimensions)) {
            return Err(not_idx());
        }
        let mut size = || {
            let mut size = [0; 4];
            rest.read_exact(&mut size).map_err(|_| not_idx())?;
            Ok(u32::from_be_bytes(size) as usize)
        };
        let count = size()?;
        let sizes = (1..dimensions).map(|_| size()).collect::<Result<Vec<_>>>()?;
        let bytes = byte_count(DType::U8, &sizes).filter(|bytes| (1..=MAX_SAMPLE_BYTES).contains(bytes));
        let bytes = bytes.ok_or_else(|| Error::malformed(path, format!("has samples of shape {sizes:?}, which are empty or too large")))?;
        Ok(Reader { path: path.to_owned(), count, sizes, bytes, rest })
    }

    /// Reads the next sample.
    fn next(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.rest.by_ref().take(self.bytes).read_to_end(&mut bytes).map_err(Error::io("read", &self.path))?;
        if bytes.len() as u64 == self.bytes {
            Ok(bytes)
        } else {
            Err(Error::malformed(&self.path, format!("is truncated: it should have {} samples", self.count)))
        }
    }
}

/// A stored image with its label.
struct Sample {
    index: usize,
    pixels: Vec<u8>,
    label: Option<u8>,
}

pub(super) struct Idx {
    images: PathBuf,
    /// Channels, height and width of an image.
    sizes: (usize, usize, usize),
    labels: Option<PathBuf>,
    count: usize,
    batch: usize,
    classes: Classes,
    pixels: Pixels,
    input: ImageInput,
}

impl Idx {
    pub fn open(options: &Data, path: &Path, task: Task, target: Target) -> Result<Idx> {
        let mut input = ImageInput::from_target(options, &target, path)?;
        let images = Reader::open(path, 3..=4)?;
        let labels = if task == Task::Classification {
            let labels = options.labels.as_ref().ok_or_else(|| Error::option("data", format!("{}: specify the file with `labels`", path.display())))?;
            let count = Reader::open(labels, 1..=1)?.count;
            if count != images.count {
                return Err(Error::malformed(labels, format!("contains {count} labels, but {} contains {} images", path.display(), images.count)));
            }
            Some(labels.clone())
        } else {
            None
        };
        let count = images.count.min(options.samples.unwrap_or(usize::MAX));
        let sizes = match *images.sizes {
            [height, width] => (1, height, width),
            [channels, height, width] => (channels, height, width),
            _ => return Err(Error::malformed(path, format!("has samples of shape {:?}, which are not images", images.sizes))),
        };
        input.require_channels(sizes.0, path)?;
        let pixels = Pixels::open(options, &target, &input)?;
        if pixels.resizes() && !matches!(sizes.0, 1 | 3) {
            return Err(Error::malformed(path, format!("has images with {} channels, which cannot be resized: remove `resize` and `crop`", sizes.0)));
        }
        Ok(Idx {
            images: path.to_owned(),
            sizes,
            labels,
            count,
            batch: options.batch(task, None),
            classes: Classes::from_target(options, &target),
            pixels,
            input,
        })
    }

    fn batch(&self, samples: &[Sample]) -> Result<Batch> {
        let count = samples.len();
        let (channels, height, width) = self.sizes;
        let mut numbers = Vec::new();
        let (mut output_height, mut output_width) = (height, width);
        let invalid_size = || Error::malformed(&self.images, "its samples have an invalid size");
        for image in samples.iter().map(|sample| &sample.pixels) {
            let pixels = height.saturating_mul(width);
            let decoded: image::DynamicImage = match channels {
                1 => image::GrayImage::from_raw(width as u32, height as u32, image.to_vec()).ok_or_else(invalid_size)?.into(),
                3 => {
                    let bytes = (0..pixels).flat_map(|at| image.iter().skip(at).step_by(pixels)).copied().collect();
                    image::RgbImage::from_raw(width as u32, height as u32, bytes).ok_or_else(invalid_size)?.into()
                }
                _ => {
                    numbers.append(&mut self.pixels.to_model_layout(image.iter().map(|byte| f32::from(*byte)).collect(), &self.input)?);
                    continue;
                }
            };
            let (mut pixels, h, w) = self.pixels.preprocess(&decoded, &self.input, &self.images)?;
            (output_height, output_width) = (h, w);
            numbers.append(&mut pixels);
        }
        self.input.require_size(output_height, output_width, &self.images, &self.pixels.size_advice())?;
        let input = self.input.batch(numbers, count, output_height, output_width)?;
        let labels = || samples.iter().filter_map(|sample| Some((sample.index, i64::from(sample.label?))));
        let references = self.labels.as_ref().map_or(Ok(References::None), |path| self.classes.references(labels(), path, |index| format!("label {index}")))?;
        Ok(Batch { inputs: [input].into(), references, samples: count })
    }
}

impl SampleSource for Idx {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        let mut images = Reader::open(&self.images, 3..=4)?;
        let bytes = images.bytes as usize;
        let mut labels = self.labels.as_ref().map(|path| Reader::open(path, 1..=1)).transpose()?;
        let read = move |index| {
            let label = labels.as_mut().map(|labels| labels.next()).transpose()?;
            Ok(Sample { index, pixels: images.next()?, label: label.and_then(|label| label.first().copied()) })
        };
        Ok(in_batches((0..self.count).map(read), self.batch, bytes, order, |samples| self.batch(samples)))
    }

    fn images(&self) -> Option<(&Pixels, &ImageInput)> {
        Some((&self.pixels, &self.input))
    }

    fn count(&self) -> Result<usize> {
        Ok(self.count)
    }
}
