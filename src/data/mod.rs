//! Samples for models: text, images and arrays, read as they are needed, never the data set in memory.
//!
//! A source hands out pieces of work: reading is done in order by one thread, what follows (tokenizing, decoding)
//! by several, and the batches come back in order.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod arrays;
mod batch;
mod chat;
mod check;
mod held_out;
mod idx;
mod images;
mod labels;
mod loader;
pub(crate) mod one_or_several;
mod opened;
mod options;
mod order;
mod padding;
mod pairs;
mod pixels;
mod plane;
mod records;
mod rows;
mod runs;
mod said;
mod sentences;
mod side;
mod speech;
mod synthetic;
mod text;
mod tokens;
mod wav;
mod windows;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value};

pub use batch::{Batch, References};
pub use chat::{ChatTemplate, Message};
pub use opened::OpenedSets;
pub use options::{ChannelOrder, Column, Data, DataSets, ImageLayout, LabelKind, Task};
pub use order::Order;
pub(crate) use padding::Padding;
pub use side::Side;
pub(crate) use side::{DECODED, Sides, TokenAxis};
pub use speech::Speech;
pub use synthetic::{KINDS, longest, synthetic, synthetic_for, synthetic_of};
pub(crate) use tokens::Tokenizer;

use crate::error::{Error, Result};
use crate::ir::Port;
use crate::model::{Config, Made, text_beside};
use crate::work::{Event, ProgressUnit, Work};

/// Keys of a folder's files about samples that are not known and change nothing here, each behind its file's name.
///
/// # Errors
/// A file cannot be read, or asks for something that is not supported.
pub fn unknown_keys(folder: &Path) -> Result<Vec<String>> {
    let mut unknown = sentences::Sentences::open(folder)?.unknown;
    let beside = Config::open(&folder.join(speech::FILE))?;
    unknown.extend(match speech::is_described(beside.values()) {
        true => Speech::parse(&beside)?.1.into_iter().map(|key| format!("{}: {key}", speech::FILE)).collect(),
        false => pixels::unknown_keys(folder)?,
    });
    Ok(unknown)
}

/// Bytes of a sample at most.
const LARGEST: u64 = i32::MAX as u64;

/// The model that data must fit.
#[derive(Debug, Clone, Copy)]
pub struct Target<'m> {
    /// Folder that holds the tokenizer or the image processor.
    pub folder: &'m Path,
    /// Files that would lie there, and that the file of weights holds.
    pub made: &'m Made,
    /// Values of `config.json`.
    pub config: &'m Map<String, Value>,
    /// What the model takes.
    pub inputs: &'m [Port],
    /// What it gives.
    pub outputs: &'m [Port],
}

impl Target<'_> {
    /// Whether it has a decoder behind an encoder.
    fn decodes(&self) -> bool {
        self.inputs.iter().any(|port| port.name == DECODED)
    }

    /// The number of classes, if it is known.
    fn classes(&self) -> Option<usize> {
        let logits = self.outputs.iter().find(|port| port.name == "logits").or(self.outputs.first());
        logits.filter(|port| port.shape.len() == 2).and_then(|port| port.shape.last().copied().flatten())
    }

    /// How many samples it takes at a time, where it takes no other number.
    pub fn fixed_batch(&self) -> Option<usize> {
        let mut sizes = self.inputs.iter().filter_map(|port| port.shape.first());
        let first = (*sizes.next()?)?;
        sizes.all(|size| *size == Some(first)).then_some(first)
    }
}

/// Files of a folder that specify how samples are prepared.
const PREPARATION: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
    "config_sentence_transformers.json",
];

/// Whether two models take the same samples, prepared in the same way.
///
/// # Errors
/// A file cannot be read.
pub fn prepares_alike([a, b]: [Target; 2]) -> Result<bool> {
    let text = |target: Target, name: &str| text_beside(target.folder, target.made, name);
    let differs = |name: &str| Ok::<_, Error>(text(a, name)? != text(b, name)?);
    Ok(a.inputs == b.inputs && !PREPARATION.into_iter().map(differs).collect::<Result<Vec<_>>>()?.contains(&true))
}

/// What remains to be done for a batch once its part of the files was read.
type Pending<'s> = Box<dyn FnOnce() -> Result<Batch> + Send + 's>;

/// Batches in order; made by reading.
type PendingBatches<'s> = Box<dyn Iterator<Item = Result<Pending<'s>>> + Send + 's>;

/// Content hashes, sample by sample.
type Identities<'s> = Box<dyn Iterator<Item = Result<Vec<u64>>> + 's>;

/// Something that samples come from.
trait SampleSource: Send + Sync {
    /// Begins to read.
    fn works(&self, order: Order) -> Result<PendingBatches<'_>>;
    /// How many samples `works` hands out: the cap, what is left out and where records end are taken into account.
    fn count(&self) -> Result<usize>;
    /// Content hashes of each sample, in file order, reading `batch` samples at a time. Two samples with the same content share a hash if
    /// one of the sources hashes at every offset (`everywhere`).
    fn identities(&self, batch: usize, _everywhere: bool) -> Result<Identities<'_>> {
        let works = self.works(Order { batch: Some(batch), ..Order::default() })?;
        Ok(Box::new(works.flat_map(|pending| match pending.and_then(|pending| pending()) {
            Ok(batch) => (0..batch.samples).map(|sample| held_out::identity(&batch.narrow(sample, 1)?).map(|hash| vec![hash])).collect(),
            Err(e) => vec![Err(e)],
        })))
    }
    /// Whether each sample is a batch.
    fn runs_alone(&self) -> bool {
        false
    }
    /// Whether counting takes as long as tokenizing everything.
    fn counts_by_tokens(&self) -> bool {
        false
    }
    /// An assumption about the data that the user should verify.
    fn note(&self) -> Option<&'static str> {
        None
    }
    /// The preprocessing of images, and the axes of the input that takes them.
    fn images(&self) -> Option<(&pixels::Pixels, &plane::Plane)> {
        None
    }
}

/// A data set that fits a model.
pub struct DataSet {
    source: Box<dyn SampleSource>,
    task: Task,
    description: String,
    count: OnceLock<usize>,
}

impl DataSet {
    /// Opens the files that the options name and holds them to the model.
    ///
    /// # Errors
    /// A file is missing or is not what its name says, a column does not exist, the tokenizer is missing, or the
    /// data cannot be made to fit the model's inputs.
    pub fn open(options: &Data, target: Target) -> Result<DataSet> {
        options.check()?;
        let task = options.task(&target)?;
        if task == Task::Classification {
            labels::require_one_of_several(&target)?;
        }
        let runs = options.arrays.as_ref().map_or(Ok(false), |path| runs::Runs::are_in(options, path, &target))?;
        let options = &Data { batch_size: options.batch_size.or(target.fixed_batch().filter(|_| !runs)), ..options.clone() };
        let (source, path): (Box<dyn SampleSource>, &Path) = match (&options.text, &options.images, &options.arrays) {
            (Some(path), None, None) if target.decodes() => (Box::new(pairs::Pairs::open(options, path, task, target)?), path),
            (Some(path), None, None) if task == Task::LanguageModelling => (Box::new(windows::Windows::open(options, path, target)?), path),
            (Some(path), None, None) => (Box::new(text::Sentences::open(options, path, task, target)?), path),
            (None, Some(path), None) if path.is_dir() => (Box::new(images::ClassFolders::open(options, path, task, target)?), path),
            (None, Some(path), None) => (Box::new(idx::Idx::open(options, path, task, target)?), path),
            (None, None, Some(path)) if runs => (Box::new(runs::Runs::open(options, path, task, target)?), path),
            (None, None, Some(path)) => (Box::new(arrays::Arrays::open(options, path, task, target)?), path),
            _ => return Err(Error::option("data", "needs exactly one of `text`, `images` and `arrays`")),
        };
        Ok(DataSet { source, task, description: path.display().to_string(), count: OnceLock::new() })
    }

    /// What the data asks of the model.
    pub fn task(&self) -> Task {
        self.task
    }

    /// Where the data is.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// An assumption about the data that the user should verify.
    pub fn note(&self) -> Option<&'static str> {
        self.source.note()
    }

    /// How images are preprocessed; nothing for other samples.
    pub fn preprocessing(&self) -> Option<String> {
        self.source.images().map(|(pixels, _)| pixels.to_string())
    }

    /// Minimum, mean and maximum of each channel of the preprocessed images of the first batch; empty for other samples.
    ///
    /// # Errors
    /// As [`first`](DataSet::first).
    pub fn channel_ranges(&self) -> Result<Vec<[f64; 3]>> {
        self.source.images().map_or(Ok(Vec::new()), |(_, plane)| plane.channel_ranges(&self.first()?))
    }

    /// How many samples there are: those that a sweep sees. Texts are read for it the first time, windows of them tokenized.
    ///
    /// # Errors
    /// Reading fails.
    pub fn count(&self) -> Result<usize> {
        match self.count.get() {
            Some(count) => Ok(*count),
            None => self.source.count().map(|count| *self.count.get_or_init(|| count)),
        }
    }

    /// How many samples there are, where that is known or found without tokenizing.
    pub fn samples(&self) -> Option<usize> {
        if self.source.counts_by_tokens() { self.count.get().copied() } else { self.count().ok() }
    }

    /// Goes through the batches in order, while other threads prepare the next ones.
    ///
    /// # Errors
    /// Those of reading and preparing, of `consume`, and when there is no sample at all.
    pub fn for_each(&self, consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
        let mut consume = consume;
        self.for_each_in(Order::default(), |batch| consume(batch).map(ControlFlow::Continue))
    }

    /// As [`for_each`](DataSet::for_each), in another order and until `consume` has enough.
    ///
    /// # Errors
    /// As [`for_each`](DataSet::for_each).
    pub fn for_each_in(&self, order: Order, mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<()> {
        let mut any = order.skip > 0;
        loader::prefetch(self.source.works(order)?, loader::WORKERS, |batch| {
            any = true;
            consume(batch)
        })?;
        match (any, order.part.1) {
            (true, _) => Ok(()),
            (false, 0 | 1) => Err(Error::malformed(Path::new(&self.description), "holds no samples")),
            (false, processes) => Err(Error::malformed(Path::new(&self.description), format!("holds fewer batches than there are processes, {processes}"))),
        }
    }

    /// As [`for_each`](DataSet::for_each), with progress for a stage and the wish to stop.
    ///
    /// # Errors
    /// As [`for_each`](DataSet::for_each), or the work is cancelled.
    pub fn for_each_batch(&self, stage: &str, work: &Work, mut consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
        work.progress.on(Event::Begin { stage, total: self.samples().unwrap_or(0) as u64, unit: ProgressUnit::Samples });
        let done = self.for_each(|batch| {
            work.cancel.check()?;
            let samples = batch.samples as u64;
            consume(batch)?;
            work.advance(samples)
        });
        work.progress.on(Event::End);
        done
    }

    /// As [`for_each`](DataSet::for_each), several batches at a time: as many as together are no more than a whole, of which `part` says
    /// how many like a batch there are in it.
    ///
    /// # Errors
    /// As [`for_each`](DataSet::for_each), or the work is cancelled.
    pub fn for_each_group<C>(
        &self,
        work: &Work,
        consumer: &mut C,
        part: impl Fn(&C, &Batch) -> usize,
        consume: impl Fn(&mut C, &[Batch]) -> Result<()>,
    ) -> Result<()> {
        let (mut waiting, mut filled): (Vec<Batch>, f64) = (Vec::new(), 0.0);
        self.for_each(|batch| {
            work.cancel.check()?;
            let takes = 1.0 / part(consumer, &batch).max(1) as f64;
            if !waiting.is_empty() && filled + takes > 1.0 + 1e-9 {
                consume(consumer, &std::mem::take(&mut waiting))?;
                filled = 0.0;
            }
            filled += takes;
            waiting.push(batch);
            Ok(())
        })?;
        consume(consumer, &waiting)
    }

    /// How many batches there are in an order for each process, counted by reading where it cannot be said otherwise.
    ///
    /// # Errors
    /// Reading fails.
    pub fn batches(&self, order: Order) -> Result<usize> {
        let Some(size) = order.batch else { return counted(self.source.works(order)?) };
        let count = self.count()?;
        let (whole, rest) = (count.checked_div(size).unwrap_or(0), count.checked_rem(size).unwrap_or(0));
        let all = whole.saturating_add(usize::from(order.takes(rest, whole, size)));
        Ok(all.checked_div(order.part.1).unwrap_or(0).saturating_sub(order.skip))
    }

    /// The first batch.
    ///
    /// # Errors
    /// As [`for_each`](DataSet::for_each).
    pub fn first(&self) -> Result<Batch> {
        match self.source.works(Order::default())?.next() {
            Some(work) => work?(),
            None => Err(Error::malformed(Path::new(&self.description), "holds no samples")),
        }
    }
}

/// How many there are, unless one of them is an error.
fn counted<T>(mut items: impl Iterator<Item = Result<T>>) -> Result<usize> {
    items.try_fold(0usize, |count, item| item.map(|_| count.saturating_add(1)))
}

/// Batches over items, in an order, up to `size` together where the order asks for no other number; `bytes` is about what an
/// item takes in memory.
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
    let left_out = order.skip.saturating_mul(parts);
    let mut number = 0usize;
    let batches = std::iter::from_fn(move || {
        loop {
            let mut own = Vec::new();
            // A batch of each process: either all have one, or none has.
            for process in 0..parts {
                let batch: Result<Vec<T>> = items.by_ref().take(size).collect();
                match batch {
                    Ok(batch) if !order.takes(batch.len(), number, size) => return None,
                    Ok(batch) if process == part => own = batch,
                    Ok(_) => {}
                    Err(e) => return Some(Err(e)),
                }
                number = number.saturating_add(1);
            }
            if number > left_out {
                return Some(Ok(Box::new(move || make(&own)) as Pending));
            }
        }
    });
    Box::new(batches)
}

/// An error of a tensor that could not be put together.
fn shaped(e: candle_core::Error) -> Error {
    Error::option("data", e)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::Tensor;

    use super::*;

    /// Samples that are nothing but their numbers, in the input `number`.
    fn numbered(count: usize) -> DataSet {
        struct Numbers(usize);

        impl SampleSource for Numbers {
            fn works(&self, order: Order) -> Result<PendingBatches<'_>> {
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

        DataSet { source: Box::new(Numbers(count)), task: Task::Fidelity, description: "numbers".into(), count: OnceLock::new() }
    }

    #[test]
    fn processes_share_all_batches_but_those_that_not_all_can_have() {
        let sizes = |count, order| {
            let works = numbered(count).source.works(order).unwrap().map(|work| work.unwrap()().unwrap().samples).collect::<Vec<_>>();
            assert_eq!(works.len(), numbered(count).batches(order).unwrap(), "{count} samples, {order:?}");
            works
        };
        for (count, size, parts) in (0..20).flat_map(|count| (1..5).flat_map(move |size| (1..4).map(move |parts| (count, size, parts)))) {
            let order = |part, skip| Order { batch: Some(size), shuffle: Some(7), skip, part: (part, parts), drop_single: true };
            let all: Vec<Vec<usize>> = (0..parts).map(|part| sizes(count, order(part, 0))).collect();
            assert!(all.iter().all(|own| own.len() == all[0].len()), "{all:?}");
            assert!(size == 1 || count == 1 || all.iter().flatten().all(|samples| *samples > 1), "{all:?}");
            let lost = count - all.iter().flatten().sum::<usize>();
            assert!(lost <= 1 + (parts - 1) * size, "{count} samples in batches of {size} for {parts}: {lost} are lost");
            assert_eq!(sizes(count, order(parts - 1, 2)), all[parts - 1][all[0].len().min(2)..]);
        }
    }

    #[test]
    fn a_batch_has_no_more_than_its_samples() {
        let batch = Batch { inputs: BTreeMap::new(), references: References::Classes(vec![Some(3), None, Some(5)]), samples: 3 };
        assert_eq!(batch.narrow(1, 2).unwrap().references, References::Classes(vec![None, Some(5)]));
        for (from, count) in [(2, 2), (4, 0), (1, usize::MAX)] {
            assert!(batch.narrow(from, count).is_err(), "{from} {count}");
        }
    }
}
