//! Running text in windows, for perplexity.
//!
//! A plain file is one text; in other files every record is one. Windows have `max_length` tokens, begin with the
//! token that the tokenizer puts first, and start `stride` tokens apart; where they overlap, a token is predicted
//! in the first window that holds it only.

use std::io::{Cursor, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::chat::ChatTemplate;
use super::held_out::token_hashes;
use super::options::{self, Data, Task};
use super::records::{self, Record, TextFormat};
use super::tokens::TokenStream;
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, Identities, Order, PendingBatches, References, SampleSource, Target, counted, in_batches};
use crate::error::{Error, Result};
use crate::files;

/// Window when neither the data nor the model asks for a shorter one.
const LENGTH: usize = 1024;

/// A text, and whether it contains its special tokens.
type Text = (Box<dyn Read + Send>, bool);
type Texts<'a> = Box<dyn Iterator<Item = Result<Text>> + Send + 'a>;

pub(super) struct Windows {
    options: Data,
    path: PathBuf,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    cut: Cut,
}

impl Windows {
    pub fn open(options: &Data, path: &Path, target: Target) -> Result<Windows> {
        options::require_next_tokens(&target)?;
        let tokenizer = Tokenizer::open(&target, options.max_length)?;
        let unread =
            [("pair_column", options.pair_column.is_some()), ("label_column", options.label_column.is_some()), ("label_kind", options.label_kind.is_some())];
        if let Some((name, _)) = unread.iter().find(|(_, given)| *given) {
            let reason = "language modelling predicts every token in one column: put both texts in it, or give arrays whose `labels` are -100 in prompts";
            return Err(Error::option("data", format!("`{name}` is not read: {reason}")));
        }
        let length = options.max_length.unwrap_or_else(|| tokenizer.longest().map_or(LENGTH, |longest| longest.min(LENGTH)));
        let first = tokenizer.first()?;
        let room = length.saturating_sub(usize::from(first.is_some()));
        if room < 2 {
            return Err(Error::option("data", format!("`max_length: {length}` leaves no token to predict")));
        }
        let stride = options.stride.unwrap_or(room);
        if stride > room {
            return Err(Error::option("data", format!("`stride` is {stride}, but a window has room for {room} tokens: some would be skipped")));
        }
        let windows = Windows { options: options.clone(), path: path.to_owned(), tokenizer, template: None, cut: Cut { first, room, stride } };
        let template = if windows.is_one_text()? { None } else { records::template(windows.records()?, &target)? };
        Ok(Windows { template, ..windows })
    }

    fn is_one_text(&self) -> Result<bool> {
        Ok(records::layout(&self.options, &self.path)? == TextFormat::Lines)
    }

    fn records(&self) -> Result<records::Records> {
        records::open(&self.options, &self.path, false)
    }

    fn texts(&self) -> Result<Texts<'_>> {
        if self.is_one_text()? {
            let file = files::stream(&self.path).map_err(Error::io("open", &self.path))?;
            return Ok(Box::new(std::iter::once(Ok((file, false)))));
        }
        let read = |text: String| Box::new(Cursor::new(text.into_bytes())) as Box<dyn Read + Send>;
        let written = move |record: Record| record.written(self.template.as_ref(), &self.path).map(|(text, whole)| (read(text.into_owned()), whole));
        Ok(Box::new(self.records()?.map(move |record| record.and_then(written))))
    }

    /// The windows. Text is read and tokenized lazily.
    fn windows(&self) -> Result<impl Iterator<Item = Result<Window>> + Send> {
        let windows = |(text, whole): Text| {
            let cut = if whole { self.cut.without_first(self.options.stride) } else { self.cut };
            cut.windows(TokenStream::new(&self.tokenizer, text, self.path.clone()))
        };
        let windows = self.texts()?.flat_map(move |text| match text {
            Ok(text) => Either::Windows(windows(text)),
            Err(e) => Either::Failed(Some(e)),
        });
        Ok(windows.take(self.options.samples.unwrap_or(usize::MAX)))
    }

    fn batch(&self, windows: &[Window]) -> Result<Batch> {
        let rows: Vec<Tokens> = windows.iter().map(|w| Tokens { ids: w.ids.clone(), types: vec![0; w.ids.len()] }).collect();
        let references = References::Next(windows.iter().map(|w| w.predicted.clone()).collect());
        Ok(Batch { inputs: self.tokenizer.collate(&rows)?, references, samples: windows.len() })
    }
}

impl SampleSource for Windows {
    fn works(&self, order: Order) -> Result<PendingBatches<'_>> {
        let (together, bytes) = (self.options.batch(Task::LanguageModelling, Some(self.cut.room)), self.cut.room.saturating_mul(size_of::<i64>()));
        Ok(in_batches(self.windows()?, together, bytes, order, |windows| self.batch(windows)))
    }

    fn identities(&self, _: usize, everywhere: bool) -> Result<Identities<'_>> {
        let text = |ids: &[i64]| ids.strip_prefix(self.cut.first.as_slice()).unwrap_or(ids).to_vec();
        Ok(Box::new(self.windows()?.map(move |window| window.map(|window| token_hashes(&text(&window.ids), everywhere)))))
    }

    fn count(&self) -> Result<usize> {
        counted(self.windows()?)
    }

    fn counts_by_tokens(&self) -> bool {
        true
    }
}

/// Tokens of one window, and the places that are predicted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Window {
    ids: Vec<i64>,
    predicted: Range<usize>,
}

/// How texts are cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// What every window begins with.
    first: Option<i64>,
    /// Tokens of the text in a window.
    room: usize,
    /// From the start of a window to that of the next.
    stride: usize,
}

impl Cut {
    /// For texts that begin with what they are to begin with.
    fn without_first(self, stride: Option<usize>) -> Cut {
        let room = self.room.saturating_add(usize::from(self.first.is_some()));
        Cut { first: None, room, stride: stride.unwrap_or(room) }
    }

    /// Cuts a token sequence, given in parts, into windows.
    fn windows<I: Iterator<Item = Result<Vec<i64>>>>(self, parts: I) -> Cutter<I> {
        Cutter { cut: self, parts, tokens: Vec::new(), start: 0, done: 0 }
    }
}

/// Windows of a text.
struct Cutter<I> {
    cut: Cut,
    parts: I,
    /// Tokens starting with the next window.
    tokens: Vec<i64>,
    /// Position of the next window.
    start: usize,
    /// End of the previous window.
    done: usize,
}

impl<I: Iterator<Item = Result<Vec<i64>>>> Iterator for Cutter<I> {
    type Item = Result<Window>;

    fn next(&mut self) -> Option<Self::Item> {
        let Cut { first, room, stride } = self.cut;
        loop {
            while self.tokens.len() < room {
                match self.parts.next() {
                    Some(Ok(part)) => self.tokens.extend(part),
                    Some(Err(e)) => return Some(Err(e)),
                    None => break,
                }
            }
            let own = self.tokens.get(..room).unwrap_or(&self.tokens);
            let end = self.start.saturating_add(own.len());
            if own.is_empty() || end <= self.done {
                return None;
            }
            let ids: Vec<i64> = first.into_iter().chain(own.iter().copied()).collect();
            // The first token of a window has nothing before it.
            let predicted = self.done.saturating_sub(self.start).saturating_add(usize::from(first.is_some())).max(1)..ids.len();
            self.done = end;
            self.start = self.start.saturating_add(stride);
            self.tokens.drain(..stride.min(self.tokens.len()));
            if !predicted.is_empty() {
                return Some(Ok(Window { ids, predicted }));
            }
        }
    }
}

/// The windows of a text, or an error.
enum Either<W> {
    Windows(W),
    Failed(Option<Error>),
}

impl<W: Iterator<Item = Result<Window>>> Iterator for Either<W> {
    type Item = Result<Window>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Either::Windows(windows) => windows.next(),
            Either::Failed(error) => error.take().map(Err),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predicted(first: Option<i64>, room: usize, stride: usize, count: usize) -> Vec<(usize, Vec<i64>)> {
        let tokens: Vec<i64> = (100..100 + count as i64).collect();
        let windows = |part: usize| Cut { first, room, stride }.windows(tokens.chunks(part).map(|part| Ok(part.to_vec()))).collect::<Result<Vec<_>>>().unwrap();
        assert!([1, 2, 5].into_iter().all(|part| windows(part) == windows(100)), "same windows for parts of any size");
        windows(100).iter().map(|w| (w.ids.len(), w.ids[w.predicted.clone()].to_vec())).collect()
    }

    #[test]
    fn every_token_is_predicted_once() {
        assert_eq!(predicted(Some(1), 3, 3, 7), [(4, vec![100, 101, 102]), (4, vec![103, 104, 105]), (2, vec![106])]);
        assert_eq!(predicted(Some(1), 4, 2, 7), [(5, vec![100, 101, 102, 103]), (5, vec![104, 105]), (4, vec![106])]);
        for (room, stride) in [(5, 1), (5, 3), (8, 8), (2, 1)] {
            let all: Vec<i64> = predicted(Some(1), room, stride, 40).into_iter().flat_map(|(_, p)| p).collect();
            assert_eq!(all, (100..140).collect::<Vec<_>>(), "{room} {stride}");
        }
    }

    #[test]
    fn without_a_first_token_the_first_of_the_text_cannot_be_predicted() {
        assert_eq!(predicted(None, 4, 2, 6), [(4, vec![101, 102, 103]), (4, vec![104, 105])]);
        assert_eq!(predicted(None, 4, 4, 5), [(4, vec![101, 102, 103])]);
    }
}
