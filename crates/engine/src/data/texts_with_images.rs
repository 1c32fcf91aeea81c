//! Texts with images, for language models with a vision tower. Each record has a text or a chat, and the file
//! of one image: as `image`, as the only one of `images`, or in the content of a message.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::image_input::ImageInput;
use super::images::read_images;
use super::largest::BatchSizes;
use super::options::{Data, Task};
use super::pixels::Pixels;
use super::records::Record;
use super::window::{Window, to_batch};
use super::windows::Windows;
use super::{Batch, Order, PendingBatches, SampleSource, Target, counted, in_batches};
use crate::arch;
use crate::error::{Error, Result};

pub(super) struct TextsWithImages {
    texts: Windows,
    options: Data,
    pixels: Pixels,
    input: ImageInput,
    /// The token of a patch, and the number of patches of an image.
    token: i64,
    patches: usize,
}

impl TextsWithImages {
    pub fn open(options: &Data, path: &Path, target: Target) -> Result<TextsWithImages> {
        let given = [("packing", options.packing == Some(true)), ("stride", options.stride.is_some()), ("sampling", options.is_spread())];
        if let Some((name, _)) = given.iter().find(|(_, given)| *given) {
            return Err(Error::option("data", format!("`{name}` does not apply to texts with images, which are not divided into windows")));
        }
        let input = target.images_of_texts().map(|port| ImageInput::from_port(options, port, path)).transpose()?;
        let with_tokens = |input: ImageInput| {
            let (height, width) = input.size()?;
            Some((arch::image_tokens(target.config, [height, width])?, input))
        };
        let Some(((token, patches), input)) = input.and_then(with_tokens) else {
            return Err(Error::option("data", format!("{}: the model's texts have no images: provide all inputs as `arrays`", path.display())));
        };
        let texts = Windows::open(options, path, target)?;
        let pixels = Pixels::open(options, &target, &input)?;
        Ok(TextsWithImages { texts, options: options.clone(), pixels, input, token, patches })
    }

    fn samples(&self) -> Result<impl Iterator<Item = Result<(Window, PathBuf)>> + Send> {
        let samples = self.texts.records()?.map(|record| record.and_then(|record| self.sample(&record)));
        // Chats without text of the assistant after truncation have no loss.
        let samples = samples.filter(|sample| !sample.as_ref().is_ok_and(|(window, _)| window.is_unpredicted()));
        Ok(samples.take(self.options.samples.unwrap_or(usize::MAX)))
    }

    /// Token ids of a record, with one for each patch, and the file of its image.
    fn sample(&self, record: &Record) -> Result<(Window, PathBuf)> {
        let wrong = |reason: String| Error::malformed(self.texts.path(), format!("line {} {reason}", record.line));
        let file = match record.image_files().as_slice() {
            [Value::String(file)] => file.clone(),
            [_] => return Err(wrong("has an image that is not the name of a file".into())),
            [] => return Err(wrong("has no `image`: each text needs the name of the file of its image".into())),
            files => return Err(wrong(format!("has {} images, expected one", files.len()))),
        };
        let (mut ids, mut positions, mut images) = (Vec::new(), Vec::new(), 0usize);
        for (id, is_target) in self.texts.tokens(record)? {
            if id == self.token {
                images = images.saturating_add(1);
                ids.extend(std::iter::repeat_n(id, self.patches));
                continue;
            }
            if is_target && !ids.is_empty() {
                positions.push(ids.len());
            }
            ids.push(id);
        }
        if images != 1 {
            let token = self.texts.tokenizer().token(self.token).unwrap_or_else(|| self.token.to_string());
            return Err(wrong(format!("has {images} image tokens `{token}`, expected one at the place of its image")));
        }
        let length = self.texts.length();
        let is_complete = ids.iter().take(length).filter(|id| **id == self.token).count() == self.patches;
        if !is_complete {
            let reason = format!("has its image after the first {length} tokens, of which an image takes {}: raise `max_length`", self.patches);
            return Err(wrong(reason));
        }
        ids.truncate(length);
        positions.retain(|at| *at < ids.len());
        if positions.is_empty() && !self.options.predicts_answers() {
            return Err(wrong("has no text to predict besides its image".into()));
        }
        let window = Window { start: 0, predicted: 1..ids.len(), ids, positions: Some(positions), packed: Vec::new() };
        Ok((window, self.texts.path().parent().unwrap_or(Path::new("")).join(file)))
    }

    fn batch(&self, samples: &[(Window, PathBuf)]) -> Result<Batch> {
        let windows: Vec<Window> = samples.iter().map(|(window, _)| window.clone()).collect();
        let mut batch = to_batch(self.texts.tokenizer(), &windows)?;
        let files: Vec<&Path> = samples.iter().map(|(_, file)| file.as_path()).collect();
        let (name, images) = read_images(&files, &self.pixels, &self.input)?;
        batch.inputs.insert(name, images);
        Ok(batch)
    }
}

impl SampleSource for TextsWithImages {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        let (size, bytes) = (self.options.batch(Task::LanguageModelling, Some(self.texts.length())), self.texts.length().saturating_mul(size_of::<i64>()));
        Ok(in_batches(self.samples()?, size, bytes, order, |samples| self.batch(samples)))
    }

    fn count(&self) -> Result<usize> {
        counted(self.samples()?)
    }

    fn needs_tokens_to_count(&self) -> bool {
        true
    }

    fn batch_sizes(&self) -> BatchSizes {
        BatchSizes::Varying { tokens: None }
    }

    fn notes(&self) -> Vec<String> {
        self.texts.notes()
    }

    fn images(&self) -> Option<(&Pixels, &ImageInput)> {
        Some((&self.pixels, &self.input))
    }
}
