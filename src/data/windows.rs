//! Running text in windows, for perplexity.
//!
//! A plain file is one text; in other files every record is one. Windows have `max_length` tokens, begin with the
//! token that the tokenizer puts first, and start `stride` tokens apart; where they overlap, a token is predicted
//! in the first window that holds it only.

use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::chat::ChatTemplate;
use super::options::{self, Data, Task};
use super::records::{self, Record, TextFormat};
use super::tokens::{Tokenizer, Tokens};
use super::{Batch, Order, PendingBatches, References, SampleSource, Target, counted, in_batches};
use crate::error::{Error, Result};
use crate::files;

/// Window when neither the data nor the model asks for a shorter one.
const LENGTH: usize = 1024;
/// Bytes of a plain file that are tokenized at once: no file of usual size is cut.
const PIECE: usize = 1 << 22;

/// Texts, each with whether special tokens stand in it.
type Texts<'a> = Box<dyn Iterator<Item = Result<(String, bool)>> + Send + 'a>;

pub(super) struct Windows {
    options: Data,
    path: PathBuf,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    cut: Cut,
}

impl Windows {
    pub fn open(options: &Data, path: &Path, target: Target) -> Result<Windows> {
        if options::is_masked(&target) {
            return Err(Error::Unsupported {
                what: "perplexity of a model that fills in masked tokens".into(),
                hint: "compare it with another model: `task: fidelity`".into(),
            });
        }
        let tokenizer = Tokenizer::open(&target, options.max_length)?;
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
            let pieces = Pieces { file, path: self.path.clone(), rest: Vec::new(), size: PIECE };
            return Ok(Box::new(pieces.map(|piece| piece.map(|text| (text, false)))));
        }
        let written = |record: Record| record.written(self.template.as_ref(), &self.path).map(|(text, whole)| (text.into_owned(), whole));
        Ok(Box::new(self.records()?.map(move |record| record.and_then(written))))
    }

    fn windows(&self) -> Result<impl Iterator<Item = Result<Window>> + Send> {
        let tokens =
            |(text, whole): (String, bool)| Ok((self.tokenizer.plain(&text)?, if whole { self.cut.without_first(self.options.stride) } else { self.cut }));
        let windows = self.texts()?.flat_map(move |text| match text.and_then(tokens) {
            Ok((tokens, cut)) => cut.windows(&tokens).into_iter().map(Ok).collect::<Vec<_>>(),
            Err(e) => vec![Err(e)],
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

    fn windows(&self, tokens: &[i64]) -> Vec<Window> {
        let lead = usize::from(self.first.is_some());
        let (mut windows, mut start, mut done) = (Vec::new(), 0usize, 0usize);
        while done < tokens.len() {
            let end = tokens.len().min(start.saturating_add(self.room));
            let ids: Vec<i64> = self.first.into_iter().chain(tokens.get(start..end).unwrap_or(&[]).iter().copied()).collect();
            // The first token of a window has nothing before it.
            let predicted = done.saturating_sub(start).saturating_add(lead).max(1)..ids.len();
            if !predicted.is_empty() {
                windows.push(Window { ids, predicted });
            }
            done = end;
            start = start.saturating_add(self.stride);
        }
        windows
    }
}

/// A file in pieces that end where a line, or at least a word, ends.
struct Pieces {
    file: Box<dyn Read + Send>,
    path: PathBuf,
    rest: Vec<u8>,
    size: usize,
}

impl Iterator for Pieces {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut bytes = std::mem::take(&mut self.rest);
        let wanted = (self.size as u64).saturating_sub(bytes.len() as u64);
        if let Err(e) = self.file.by_ref().take(wanted).read_to_end(&mut bytes) {
            return Some(Err(Error::io("read", &self.path)(e)));
        }
        if bytes.is_empty() {
            return None;
        }
        if bytes.len() >= self.size {
            let last = |wanted: fn(&u8) -> bool| bytes.iter().rposition(wanted).filter(|at| *at > 0);
            // Without a blank, behind a character: bytes within one begin with 10.
            let whole = || last(|b| *b & 0xc0 != 0x80);
            let at = last(|b| *b == b'\n').or_else(|| last(u8::is_ascii_whitespace)).or_else(whole).unwrap_or(bytes.len());
            self.rest = bytes.split_off(at);
        }
        Some(String::from_utf8(bytes).map_err(|_| Error::malformed(&self.path, "is not UTF-8")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predicted(first: Option<i64>, room: usize, stride: usize, count: usize) -> Vec<(usize, Vec<i64>)> {
        let tokens: Vec<i64> = (100..100 + count as i64).collect();
        let windows = Cut { first, room, stride }.windows(&tokens);
        windows.iter().map(|w| (w.ids.len(), w.ids[w.predicted.clone()].to_vec())).collect()
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

    #[test]
    fn pieces_are_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        for text in
            ["one two\nthree\nfour five six seven eight\nnine", "\nä b\n\näöüß漢字かな交じり文漢字かな交じり文", "漢字かな交じり文漢字かな交じり文🙂🙂", "\n"]
        {
            std::fs::write(&path, text).unwrap();
            for size in [8, 9, 10, 11, 12, 40, 100] {
                let pieces = Pieces { file: files::stream(&path).unwrap(), path: path.clone(), rest: Vec::new(), size };
                let pieces: Vec<String> = pieces.map(Result::unwrap).collect();
                assert_eq!(pieces.concat(), text);
                assert!(pieces.iter().all(|piece| (1..=size).contains(&piece.len())));
                assert!(size < 100 || pieces.len() == 1);
            }
        }
    }
}
