//! Data sets: text, images, arrays and recordings, streamed and never held in memory as a whole. One thread
//! reads in order, several threads tokenize and decode, and batches are returned in order.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod array_shape;
mod arrays;
mod batch;
mod chat;
mod check;
mod columns;
mod contents;
mod corpus;
mod custom_source;
mod decoder_targets;
mod gray;
mod held_out;
mod idx;
mod image_files;
mod image_input;
mod image_processors;
mod image_size;
mod images;
mod interleaved;
mod kind;
mod labels;
mod largest;
mod loader;
mod mixture;
mod name_or_options;
mod npy;
mod open_sets;
mod options;
mod order;
mod padding;
mod pairs;
mod pixels;
mod preprocessing;
mod qwen_vl;
mod record;
mod records;
mod resample;
mod rows;
mod runs;
mod sentences;
mod sequence_role;
mod source_registry;
mod speech;
mod synthetic;
mod target;
mod task;
mod text;
mod text_format;
mod texts_with_images;
mod tokens;
mod wav;
mod window;
mod windows;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::OnceLock;

pub use batch::{Batch, References};
pub use chat::{ChatTemplate, Message};
pub use compress_core::one_or_several;
pub use corpus::{Corpus, CorpusText};
pub use labels::{IGNORED, class_difference, class_names};
use largest::BatchSizes;
pub use largest::LargestInputs;
pub use open_sets::{DataSets, OpenSets};
pub use options::{ChannelOrder, Column, Data, ImageLayout, LabelKind, LossOn, Task, WindowSampling};
pub use order::Order;
pub use padding::Padding;
pub use preprocessing::{has_renumbered_tokens, has_same_preprocessing};
pub(crate) use sequence_role::{ATTENTION_MASK, INPUT_IDS, NextTokens};
pub use sequence_role::{DECODER_INPUT_IDS, SequenceRole, SequenceRoles, TokenAxis};
pub use source_registry::{Array, DataSource, Sample, register_source};
pub use speech::Speech;
pub use synthetic::{KINDS, max_positions, synthetic, synthetic_for_ports, synthetic_with_sizes};
pub use target::{Target, fixed_batch};
pub use tokens::{Tokenizer, special_tokens, token_text, unreadable_tokenizer};

use crate::error::{Error, Result};
use crate::ir::Port;
use crate::model::{LogitKind, SynthesizedFiles, processor_settings};
use crate::work::{Event, ProgressUnit, Work};

/// Unrecognized keys in a folder's preprocessing files, each prefixed with its file name.
pub fn unknown_keys(folder: &Path) -> Result<Vec<String>> {
    let mut unknown = sentences::Sentences::open(folder)?.unknown;
    let Some((path, processor)) = processor_settings(folder, &SynthesizedFiles::new())? else { return Ok(unknown) };
    let keys = match speech::is_speech_processor(processor.values()) {
        true => Speech::parse(&processor, &path)?.1,
        false => pixels::Pixels::parse(processor.values(), &path, None, &serde_json::Map::new())?.1,
    };
    unknown.extend(keys.into_iter().map(|key| format!("{}: {key}", path.file_name().unwrap_or_default().display())));
    Ok(unknown)
}

/// Maximum size of a sample, in bytes.
const MAX_SAMPLE_BYTES: u64 = i32::MAX as u64;

/// The remaining work for a batch after its data was read.
type Pending<'s> = Box<dyn FnOnce() -> Result<Batch> + Send + 's>;

/// Pending batches in order, produced by reading.
type PendingBatches<'s> = Box<dyn Iterator<Item = Result<Pending<'s>>> + Send + 's>;

/// Content hashes, sample by sample.
type Identities<'s> = Box<dyn Iterator<Item = Result<Vec<u64>>> + 's>;

/// A source of samples.
trait SampleSource: Send + Sync {
    /// Starts reading.
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>>;
    /// Exact number of samples that are read, after `samples` and skipped records.
    fn count(&self) -> Result<usize>;
    /// Content hashes of each sample, in file order, reading `batch` samples at a time. Two samples with
    /// the same content share a hash if one of the sources hashes at every offset (`everywhere`).
    fn identities(&self, batch: usize, _everywhere: bool) -> Result<Identities<'_>> {
        let batches = self.pending_batches(Order { batch: Some(batch), ..Order::default() })?;
        Ok(Box::new(batches.flat_map(|pending| match pending.and_then(|pending| pending()) {
            Ok(batch) => {
                // Of pairs, the first text counts.
                let batch = Batch { references: References::None, ..batch };
                (0..batch.samples).map(|sample| held_out::identity(&batch.narrow(sample, 1)?).map(|hash| vec![hash])).collect()
            }
            Err(e) => vec![Err(e)],
        })))
    }
    /// How the sizes of inputs differ between batches.
    fn batch_sizes(&self) -> BatchSizes {
        BatchSizes::Equal
    }
    /// Whether every batch consists of one sample.
    fn is_unbatched(&self) -> bool {
        false
    }
    /// Whether counting requires tokenizing everything.
    fn needs_tokens_to_count(&self) -> bool {
        false
    }
    /// Assumptions about the data that the user should verify, and files that are not read.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
    /// The preprocessing of images, and the model input for them.
    fn images(&self) -> Option<(&pixels::Pixels, &image_input::ImageInput)> {
        None
    }
}

/// A data set that matches a model.
pub struct DataSet {
    source: Box<dyn SampleSource>,
    task: Task,
    metric: Option<String>,
    /// Kind of the output `logits` of the model.
    logits: LogitKind,
    /// Names of the classes of the model, by index.
    classes: BTreeMap<usize, String>,
    description: String,
    /// The batch size, if the model accepts only one, and that is larger than 1.
    fixed_batch: Option<usize>,
    /// Maximum number of samples.
    limit: Option<usize>,
    /// The number of samples, including those of an incomplete last batch.
    count: OnceLock<usize>,
}

impl DataSet {
    /// Opens the files of the options and checks them against the model. Fails if the data does not fit the
    /// model's inputs.
    pub fn open(options: &Data, target: Target) -> Result<DataSet> {
        options.check()?;
        options.check_remote()?;
        kind::require_kind(options, &target)?;
        let task = options.task(&target)?;
        if task == Task::Classification {
            labels::require_single_label(&target)?;
        }
        let runs = options.arrays.as_ref().map_or(Ok(false), |path| runs::Runs::is_run_folder(options, path, &target))?;
        let batch_size = options.batch_size.or(target.default_batch().filter(|_| !runs));
        let options = &Data { batch_size, ..options.clone() };
        let fixed_batch = target.fixed_batch().filter(|batch| !runs && *batch > 1);
        let made = |source, description| DataSet {
            source,
            task,
            metric: options.metric.clone(),
            logits: LogitKind::from_config(target.config),
            classes: labels::class_names(target.config),
            description,
            fixed_batch,
            limit: options.samples,
            count: OnceLock::new(),
        };
        if options.mix.is_empty() {
            options.reject_unread_options(target.images_of_texts().is_some())?;
        }
        if let Some(name) = &options.source {
            return Ok(made(Box::new(custom_source::CustomSource::open(options, name, task, target)?), name.clone()));
        }
        if !options.mix.is_empty() {
            return Ok(made(Box::new(mixture::Mixture::open(options, task, target)?), options.names().unwrap_or_default()));
        }
        let (source, path): (Box<dyn SampleSource>, &Path) = match (&options.text, &options.images, &options.arrays) {
            (Some(path), None, None) if target.is_encoder_decoder() => (Box::new(pairs::Pairs::open(options, path, task, target)?), path),
            (Some(path), None, None) if target.images_of_texts().is_some() => {
                (Box::new(texts_with_images::TextsWithImages::open(options, path, target)?), path)
            }
            (Some(path), None, None) if task == Task::LanguageModelling => (Box::new(windows::Windows::open(options, path, target)?), path),
            (Some(path), None, None) => (Box::new(text::Sentences::open(options, path, task, target)?), path),
            (None, Some(path), None) if path.is_dir() => (Box::new(images::ClassFolders::open(options, path, task, target)?), path),
            (None, Some(path), None) => (Box::new(idx::Idx::open(options, path, task, target)?), path),
            (None, None, Some(path)) if runs => (Box::new(runs::Runs::open(options, path, task, target)?), path),
            (None, None, Some(path)) => (Box::new(arrays::Arrays::open(options, path, task, target)?), path),
            _ => return Err(Error::option("data", "requires exactly one of `text`, `images`, `arrays`, `source` and `mix`")),
        };
        Ok(made(source, path.display().to_string()))
    }

    /// The task.
    pub fn task(&self) -> Task {
        self.task
    }

    /// The registered metric to compute instead of that of the task.
    pub fn metric(&self) -> Option<&str> {
        self.metric.as_deref()
    }

    /// Kind of the output `logits` of the model that the data was opened for.
    pub fn logits(&self) -> LogitKind {
        self.logits
    }

    /// Path of the data, or name of its source.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Assumptions about the data that the user should verify, and files that are not read.
    pub fn notes(&self) -> Vec<String> {
        self.source.notes()
    }

    /// Description of the image preprocessing; `None` for other samples.
    pub fn preprocessing(&self) -> Option<String> {
        self.source.images().map(|(pixels, _)| pixels.to_string())
    }

    /// Minimum, mean and maximum of each channel of the preprocessed images of the first batch; empty
    /// for other samples.
    pub fn channel_ranges(&self) -> Result<Vec<[f64; 3]>> {
        self.source.images().map_or(Ok(Vec::new()), |(_, input)| input.channel_ranges(&self.first()?))
    }

    /// Number of samples, without those of an incomplete last batch that the model does not accept. The
    /// first call reads texts, and tokenizes them if samples are windows.
    pub fn count(&self) -> Result<usize> {
        self.count_all().map(|count| count.saturating_sub(self.dropped(count)))
    }

    fn count_all(&self) -> Result<usize> {
        match self.count.get() {
            Some(count) => Ok(*count),
            None => self.source.count().map(|count| *self.count.get_or_init(|| count)),
        }
    }

    /// Number of samples in an incomplete last batch that the model does not accept.
    fn dropped(&self, count: usize) -> usize {
        self.fixed_batch.and_then(|batch| count.checked_rem(batch)).unwrap_or(0)
    }

    /// A note on samples that are not used because the model accepts only complete batches.
    pub fn dropped_note(&self) -> Result<Option<String>> {
        let Some(batch) = self.fixed_batch else { return Ok(None) };
        let dropped = self.dropped(self.count_all()?);
        let samples = crate::error::counted(dropped, "sample");
        Ok((dropped > 0).then(|| format!("the model accepts only batches of {batch}: the last {samples} of {} cannot be used", self.description)))
    }

    /// An error because the data set has no batch in an order.
    fn empty(&self, order: Order) -> Error {
        let malformed = |reason: String| Error::malformed(Path::new(&self.description), reason);
        let (count, fixed) = match (self.count_all(), self.fixed_batch) {
            (Err(e), _) => return e,
            (Ok(0), _) | (_, None) => return malformed("contains no samples: name data with at least one sample".to_owned()),
            (Ok(count), Some(fixed)) => (crate::error::counted(count, "sample"), fixed),
        };
        match (order.batch.filter(|batch| *batch != fixed), self.limit) {
            (Some(batch), _) => Error::option("batch_size", format!("the model accepts only batches of {fixed}, not of {batch}")),
            (None, Some(limit)) if limit < fixed => Error::option("samples", format!("the model accepts only batches of {fixed}, but the limit is {limit}")),
            _ => malformed(format!("contains {count}, but the model accepts only batches of {fixed}")),
        }
    }

    /// Whether `samples` limits the number of samples.
    #[doc(hidden)]
    pub fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Number of samples, if it is known or can be determined without tokenizing.
    pub fn samples(&self) -> Option<usize> {
        if self.source.needs_tokens_to_count() && self.count.get().is_none() { None } else { self.count().ok() }
    }

    /// Calls `consume` with the batches in order, while other threads prepare the next ones. Fails if the
    /// data set is empty.
    pub fn for_each(&self, consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
        let mut consume = consume;
        self.for_each_in(Order::default(), |batch| consume(batch).map(ControlFlow::Continue))
    }

    /// Like [`for_each`](DataSet::for_each), in the given order, until `consume` returns `Break`.
    pub fn for_each_in(&self, order: Order, mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<()> {
        let mut has_samples = order.skip > 0;
        loader::prefetch(self.source.pending_batches(self.complete(order))?, loader::WORKERS, |batch| {
            has_samples = true;
            consume(batch)
        })?;
        match (has_samples, order.part.1) {
            (true, _) => Ok(()),
            (false, 0 | 1) => Err(self.empty(order)),
            (false, processes) => Err(Error::malformed(Path::new(&self.description), format!("contains fewer batches than the {processes} processes"))),
        }
    }

    /// An order without an incomplete batch, if the model accepts only one batch size.
    fn complete(&self, order: Order) -> Order {
        Order { drop_incomplete: self.fixed_batch.is_some(), ..order }
    }

    /// Like [`for_each`](DataSet::for_each), with progress events and cancellation.
    pub fn for_each_batch(&self, stage: &str, work: &Work, mut consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
        work.progress.on(Event::Begin { stage, total: self.samples().unwrap_or(0) as u64, done: 0, unit: ProgressUnit::Samples });
        let done = self.for_each(|batch| {
            work.cancel.check()?;
            let samples = batch.samples as u64;
            consume(batch)?;
            work.advance(samples)
        });
        work.progress.on(Event::End);
        done
    }

    /// Like [`for_each_in`](DataSet::for_each_in), but passes groups of batches, until they have at least
    /// `most` samples. `capacity` returns how many batches like the given one fit into a group.
    pub fn for_each_group<C>(
        &self,
        (order, most): (Order, usize),
        work: &Work,
        consumer: &mut C,
        capacity: impl Fn(&C, &Batch) -> usize,
        consume: impl Fn(&mut C, &[Batch]) -> Result<()>,
    ) -> Result<()> {
        let (mut group, mut filled): (Vec<Batch>, f64) = (Vec::new(), 0.0);
        let mut samples = 0usize;
        self.for_each_in(order, |batch| {
            work.cancel.check()?;
            let share = 1.0 / capacity(consumer, &batch).max(1) as f64;
            if !group.is_empty() && filled + share > 1.0 + 1e-9 {
                consume(consumer, &std::mem::take(&mut group))?;
                filled = 0.0;
            }
            filled += share;
            samples = samples.saturating_add(batch.samples);
            group.push(batch);
            Ok(if samples < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        consume(consumer, &group)
    }

    /// Number of batches per process in an order; counted by reading if it cannot be computed.
    pub fn batches(&self, order: Order) -> Result<usize> {
        let order = self.complete(order);
        let Some(size) = order.batch else { return counted(self.source.pending_batches(order)?) };
        let count = self.count()?;
        let (whole, rest) = (count.checked_div(size).unwrap_or(0), count.checked_rem(size).unwrap_or(0));
        let all = whole.saturating_add(usize::from(order.accepts(rest, whole, size)));
        Ok(all.checked_div(order.part.1).unwrap_or(0).saturating_sub(order.skip))
    }

    /// The first batch.
    pub fn first(&self) -> Result<Batch> {
        match self.source.pending_batches(self.complete(Order::default()))?.next() {
            Some(pending) => pending?(),
            None => Err(self.empty(Order::default())),
        }
    }
}

/// Number of items; fails at the first error.
fn counted<T>(mut items: impl Iterator<Item = Result<T>>) -> Result<usize> {
    items.try_fold(0usize, |count, item| item.map(|_| count.saturating_add(1)))
}

/// Groups items into batches of `order.batch` or else `size` items, in the given order; `bytes` is the
/// approximate memory per item.
fn in_batches<'s, T: Send + 's>(
    items: impl Iterator<Item = Result<T>> + Send + 's,
    size: usize,
    bytes: usize,
    order: Order,
    make: impl Fn(&[T]) -> Result<Batch> + Send + Copy + 's,
) -> PendingBatches<'s> {
    let mut items = order.shuffled(items, bytes);
    let size = order.batch.unwrap_or(size);
    let (part, parts) = order.part;
    let skipped = order.skip.saturating_mul(parts);
    let mut number = 0usize;
    let batches = std::iter::from_fn(move || {
        loop {
            let mut own = Vec::new();
            // One batch for each process: either all processes get one, or none.
            for process in 0..parts {
                let batch: Result<Vec<T>> = items.by_ref().take(size).collect();
                match batch {
                    Ok(batch) if !order.accepts(batch.len(), number, size) => return None,
                    Ok(batch) if process == part => own = batch,
                    Ok(_) => {}
                    Err(e) => return Some(Err(e)),
                }
                number = number.saturating_add(1);
            }
            if number > skipped {
                return Some(Ok(Box::new(move || make(&own)) as Pending));
            }
        }
    });
    Box::new(batches)
}

/// Converts an error from building a tensor.
fn shaped(e: candle_core::Error) -> Error {
    Error::option("data", e)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::Tensor;

    use super::*;

    /// A data set whose samples consist of their index, in the input `number`.
    fn numbered(count: usize) -> DataSet {
        struct Numbers(usize);

        impl SampleSource for Numbers {
            fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
                let make = |numbers: &[u32]| {
                    let tensor = Tensor::new(numbers, &candle_core::Device::Cpu).map_err(shaped)?;
                    Ok(Batch { inputs: [("number".to_owned(), tensor)].into(), references: References::None, samples: numbers.len() })
                };
                Ok(in_batches((0..self.0 as u32).map(Ok), 4, 4, order, make))
            }

            fn count(&self) -> Result<usize> {
                Ok(self.0)
            }
        }

        DataSet {
            source: Box::new(Numbers(count)),
            task: Task::Fidelity,
            metric: None,
            logits: LogitKind::default(),
            classes: BTreeMap::new(),
            description: "numbers".into(),
            fixed_batch: None,
            limit: None,
            count: OnceLock::new(),
        }
    }

    #[test]
    fn processes_get_equal_numbers_of_batches() {
        let sizes = |count, order| {
            let sizes = numbered(count).source.pending_batches(order).unwrap().map(|pending| pending.unwrap()().unwrap().samples).collect::<Vec<_>>();
            assert_eq!(sizes.len(), numbered(count).batches(order).unwrap(), "{count} samples, {order:?}");
            sizes
        };
        for (count, size, parts) in (0..20).flat_map(|count| (1..5).flat_map(move |size| (1..4).map(move |parts| (count, size, parts)))) {
            let order = |part, skip| Order { batch: Some(size), shuffle: Some(7), skip, part: (part, parts), drop_single: true, ..Order::default() };
            let all: Vec<Vec<usize>> = (0..parts).map(|part| sizes(count, order(part, 0))).collect();
            assert!(all.iter().all(|own| own.len() == all[0].len()), "{all:?}");
            assert!(size == 1 || count == 1 || all.iter().flatten().all(|samples| *samples > 1), "{all:?}");
            let lost = count - all.iter().flatten().sum::<usize>();
            assert!(lost <= 1 + (parts - 1) * size, "{count} samples in batches of {size} for {parts}: {lost} are lost");
            assert_eq!(sizes(count, order(parts - 1, 2)), all[parts - 1][all[0].len().min(2)..]);
        }
    }
}
