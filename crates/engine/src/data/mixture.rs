//! Texts that are mixed in given proportions.
//!
//! In training, each sample comes from a text that is drawn with the probability of its weight. A text
//! that ends begins again in another order, and an epoch has as many samples as all texts together. Without
//! a seed, each sample occurs once, and the shares are kept until a text ends.

use std::sync::OnceLock;

use super::interleaved::{Interleaved, Set};
use super::largest::BatchSizes;
use super::options::{Data, Task};
use super::window::{Window, to_batch};
use super::windows::Windows;
use super::{Identities, Order, PendingBatches, SampleSource, Target, in_batches};
use crate::error::{Error, Result};

/// Windows of several texts.
pub(super) struct Mixture {
    options: Data,
    texts: Vec<Windows>,
    weights: Vec<f64>,
    /// Tokens of the longest windows.
    room: usize,
    /// Number of windows of all texts, once it is known.
    total: OnceLock<usize>,
}

impl Mixture {
    pub fn open(options: &Data, task: Task, target: Target) -> Result<Mixture> {
        if task != Task::LanguageModelling || target.is_encoder_decoder() {
            let reason = "`mix` mixes texts of language models that predict the next token: specify one data set for this model and task";
            return Err(Error::option("data", reason));
        }
        if target.images_of_texts().is_some() {
            return Err(Error::option("data", "`mix` does not support texts with images: name one file"));
        }
        let (mut texts, mut weights) = (Vec::new(), Vec::new());
        for (part, weight) in options.parts()? {
            let Some(path) = part.text.clone() else { return Err(Error::option("data", "`mix` requires `text` in each of its entries")) };
            texts.push(Windows::open(&part, &path, target)?);
            weights.push(weight);
        }
        let room = texts.iter().map(Windows::room).max().unwrap_or(0);
        Ok(Mixture { options: options.clone(), texts, weights, room, total: OnceLock::new() })
    }

    /// The windows in an order, each with the index of its text.
    fn windows(&self, shuffle: Option<u64>) -> impl Iterator<Item = Result<(usize, Window)>> + Send {
        let sets = self.texts.iter().zip(&self.weights).enumerate().map(|(index, (text, weight))| {
            let seed = move |pass: u64| {
                shuffle.map(|seed| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(pass).wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(index as u64))
            };
            // All texts share the memory of one shuffle buffer.
            let bytes = text.room().saturating_mul(size_of::<i64>()).saturating_mul(self.texts.len());
            Set::new(text.path(), *weight, move |pass| Ok(Order { shuffle: seed(pass), ..Order::default() }.shuffled(text.windows()?, bytes)))
        });
        Interleaved::new(sets.collect(), shuffle, move || self.total()).take(self.options.samples.unwrap_or(usize::MAX))
    }

    /// Number of windows of all texts.
    fn total(&self) -> Result<usize> {
        match self.total.get() {
            Some(total) => Ok(*total),
            None => self.texts.iter().map(SampleSource::count).sum::<Result<usize>>().map(|total| *self.total.get_or_init(|| total)),
        }
    }
}

impl SampleSource for Mixture {
    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        let windows = self.windows(order.shuffle).map(|window| window.map(|(_, window)| window));
        let size = self.options.batch(Task::LanguageModelling, Some(self.room));
        let order = Order { shuffle: None, ..order };
        Ok(in_batches(windows, size, 0, order, |windows| match self.texts.first() {
            Some(text) => to_batch(text.tokenizer(), windows),
            None => Err(Error::option("data", "`mix` is empty")),
        }))
    }

    fn identities(&self, _: usize, everywhere: bool) -> Result<Identities<'_>> {
        let hashes = move |(index, window): (usize, Window)| self.texts.get(index).map_or_else(Vec::new, |text| text.hashes(&window, everywhere));
        Ok(Box::new(self.windows(None).map(move |window| window.map(hashes))))
    }

    fn count(&self) -> Result<usize> {
        self.total().map(|count| count.min(self.options.samples.unwrap_or(usize::MAX)))
    }

    fn needs_tokens_to_count(&self) -> bool {
        true
    }

    fn notes(&self) -> Vec<String> {
        self.texts.iter().flat_map(SampleSource::notes).collect()
    }

    fn batch_sizes(&self) -> BatchSizes {
        BatchSizes::Varying { tokens: self.texts.iter().map(Windows::length).max() }
    }
}
