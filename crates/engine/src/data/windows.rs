//! Text in windows, for perplexity.
//!
//! A plain file is one text; in other files, every record is one. Windows have `max_length` tokens
//! including the tokenizer's first special token, and a distance of `stride` tokens. In overlapping
//! windows, a token is predicted only in the first window that contains it. With `sampling: spread`,
//! windows of a plain file start at lines spread evenly over it. With `loss_on: assistant`, only the text
//! of the assistant in chats is predicted. With `packing`, a window contains several texts, and its
//! attention mask numbers them.

use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::chat::{ChatTemplate, RenderedChat};
use super::held_out::token_hashes;
use super::largest::BatchSizes;
use super::options::{self, Data, Task};
use super::records::{self, Record, TextFormat};
use super::tokens::{TokenStream, Tokenizer};
use super::window::{Window, packed, to_batch};
use super::{Identities, Order, PendingBatches, SampleSource, Target, counted, in_batches};
use crate::arch;
use crate::error::{Error, Result, redact_path};
use crate::files::{self, File, Kind};

/// Default window length, in tokens.
const DEFAULT_LENGTH: usize = 1024;

/// Advice for a model with a tower that can be run.
const WITH_IMAGES: &str = "set `sizes` to the height and width of images, as in `{ height: 448, width: 448 }`, or remove it from the file";

/// Maximum distance of the start of a line from the position for which it is searched, in bytes.
const LONGEST_LINE: u64 = 1 << 16;
/// Bytes of text per token to read at a time where one window is taken.
const BYTES_PER_TOKEN: usize = 8;

/// A text that is split into windows.
enum Text {
    Plain(Box<dyn Read + Send>),
    /// A chat, which contains its special tokens.
    Chat(Box<dyn Read + Send>),
    /// A chat of which only the text of the assistant is predicted.
    Answers(RenderedChat),
}

type Texts<'a> = Box<dyn Iterator<Item = Result<Text>> + Send + 'a>;
type WindowsOfText<'a> = Box<dyn Iterator<Item = Result<Window>> + Send + 'a>;

pub(super) struct Windows {
    options: Data,
    path: PathBuf,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    cut: Cut,
    /// The token that is appended to texts.
    end: Option<i64>,
    /// Advice for texts with images, if the model has a vision tower.
    tower: Option<&'static str>,
}

impl Windows {
    pub fn open(options: &Data, path: &Path, target: Target) -> Result<Windows> {
        options::require_next_tokens(&target)?;
        let tokenizer = Tokenizer::open(&target, options.max_length)?;
        let unsupported =
            [("pair_column", options.pair_column.is_some()), ("label_column", options.label_column.is_some()), ("label_kind", options.label_kind.is_some())];
        if let Some((name, _)) = unsupported.iter().find(|(_, given)| *given) {
            let reason = "language modelling predicts every token of one column: concatenate both texts in it, or use arrays with `labels` of -100 in prompts";
            return Err(Error::option("data", format!("`{name}` does not apply: {reason}")));
        }
        let length = options.max_length.unwrap_or_else(|| tokenizer.max_length().map_or(DEFAULT_LENGTH, |limit| limit.min(DEFAULT_LENGTH)));
        let first = tokenizer.first()?;
        let room = length.saturating_sub(usize::from(first.is_some()));
        if room < 2 {
            return Err(Error::option("data", format!("`max_length: {length}` leaves no token to predict")));
        }
        let stride = options.stride.unwrap_or(room);
        if stride > room {
            return Err(Error::option("data", format!("`stride` is {stride}, but a window has only {room} tokens: some tokens would be skipped")));
        }
        if options.is_spread() && matches!(files::kind(path), Ok(Kind::Special)) {
            return Err(Error::option("data", format!("`sampling: spread` reads {} at several positions, and it is not a file", redact_path(path).display())));
        }
        let end = if options.append_eos == Some(true) { Some(tokenizer.end().ok_or_else(|| no_end(&target))?) } else { None };
        let is_run = arch::tower(target.config).is_some();
        let tower = arch::has_tower(arch::model_type(target.config)).then_some(if is_run { WITH_IMAGES } else { "remove it from the file" });
        let windows = Windows { options: options.clone(), path: path.to_owned(), tokenizer, template: None, cut: Cut { first, room, stride }, end, tower };
        let template = if windows.is_one_text()? { None } else { records::template(windows.records()?, &target)? };
        match template {
            None if options.loss_on.is_some() => Err(options.requires_chats()),
            Some(_) if end.is_some() => {
                let reason = "`append_eos` does not apply to chats, whose template writes the end of a text: remove it";
                Err(Error::option("data", format!("{}: {reason}", redact_path(path).display())))
            }
            _ => Ok(Windows { template, ..windows }),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Number of tokens in a complete window.
    pub fn length(&self) -> usize {
        self.cut.length()
    }

    /// Length of the text in a window, in tokens.
    pub fn room(&self) -> usize {
        self.cut.room
    }

    fn is_one_text(&self) -> Result<bool> {
        Ok(records::layout(&self.options, &self.path)? == TextFormat::Lines)
    }

    /// Tokenizes a record of any length; returns each token, and whether it is predicted.
    pub fn tokens(&self, record: &Record) -> Result<Vec<(i64, bool)>> {
        if let Some(template) = self.template.as_ref().filter(|_| self.options.predicts_answers()) {
            let chat = record.rendered_with_answers(template, &self.path)?;
            return self.tokenizer.with_targets(&chat.text, &chat.answers);
        }
        let (text, is_chat) = record.rendered(self.template.as_ref(), &self.path)?;
        let (first, ids) = (self.cut.first.filter(|_| !is_chat), self.tokenizer.plain(&text)?);
        let ids: Result<Vec<_>> = with_end(std::iter::once(Ok(ids)), self.end).collect();
        Ok(first.into_iter().chain(ids?.into_iter().flatten()).map(|id| (id, true)).collect())
    }

    pub fn records(&self) -> Result<records::Records> {
        records::open(&self.options, &self.path, false)
    }

    fn texts(&self) -> Result<Texts<'_>> {
        if let (true, Some(count)) = (self.options.is_spread(), self.options.samples) {
            return self.spread(count).map_err(Error::io("read", &self.path));
        }
        if self.is_one_text()? {
            let file = files::stream(&self.path).map_err(Error::io("open", &self.path))?;
            let text = records::without_byte_order_mark(file).map_err(Error::io("read", &self.path))?;
            return Ok(Box::new(std::iter::once(Ok(Text::Plain(text)))));
        }
        let read = |text: String| Box::new(Cursor::new(text.into_bytes())) as Box<dyn Read + Send>;
        let rendered = move |record: Record| match self.template.as_ref().filter(|_| self.options.predicts_answers()) {
            Some(template) => record.rendered_with_answers(template, &self.path).map(Text::Answers),
            None => record.rendered(self.template.as_ref(), &self.path).map(|(text, is_chat)| {
                let text = read(text.into_owned());
                if is_chat { Text::Chat(text) } else { Text::Plain(text) }
            }),
        };
        let without_image = |record: Record| match self.tower.filter(|_| record.has_images()) {
            Some(hint) => Err(Error::malformed(&self.path, format!("line {} has an image, but the model is run on texts only: {hint}", record.line))),
            None => Ok(record),
        };
        Ok(Box::new(self.records()?.map(move |record| record.and_then(without_image).and_then(rendered))))
    }

    /// The text from each of `count` lines spread evenly over the file.
    fn spread(&self, count: usize) -> io::Result<Texts<'_>> {
        let file = File::open(&self.path)?;
        let starts = spread_lines(&file, count)?;
        Ok(Box::new(starts.into_iter().map(move |start| {
            let mut reader = file.reader();
            reader.seek(SeekFrom::Start(start)).map_err(Error::io("read", &self.path))?;
            let text: io::Result<Box<dyn Read + Send>> = if start == 0 { records::without_byte_order_mark(reader) } else { Ok(Box::new(reader)) };
            text.map(Text::Plain).map_err(Error::io("read", &self.path))
        })))
    }

    /// The windows, packed if that is requested. Text is read and tokenized lazily.
    pub fn windows(&self) -> Result<impl Iterator<Item = Result<Window>> + Send> {
        let windows =
            self.texts()?.flat_map(move |text| text.and_then(|text| self.windows_of_text(text)).unwrap_or_else(|e| Box::new(std::iter::once(Err(e)))));
        let windows: WindowsOfText = match self.options.packing {
            Some(true) => Box::new(packed(windows, self.cut.length())),
            _ => Box::new(windows),
        };
        Ok(windows.take(self.options.samples.unwrap_or(usize::MAX)))
    }

    fn windows_of_text(&self, text: Text) -> Result<WindowsOfText<'_>> {
        let (piece, each) = if self.options.is_spread() { (self.cut.room.saturating_mul(BYTES_PER_TOKEN), 1) } else { (usize::MAX, usize::MAX) };
        let stream = |text| TokenStream::new(&self.tokenizer, text, self.path.clone()).with_piece(piece);
        let chat_cut = self.cut.without_first(self.options.stride);
        Ok(match text {
            Text::Plain(text) => {
                let (cut, end) = (self.cut, self.end);
                // A window that contains only the appended token would teach a model to write nothing.
                let is_end = move |ids: &[i64]| end.is_some() && ids.strip_prefix(cut.first.as_slice()).unwrap_or(ids) == end.as_slice();
                let windows = cut.windows(with_end(stream(text), end));
                Box::new(windows.filter(move |window| !window.as_ref().is_ok_and(|window| is_end(&window.ids))).take(each))
            }
            Text::Chat(text) => Box::new(chat_cut.windows(stream(text)).take(each)),
            Text::Answers(chat) => {
                let (ids, is_target): (Vec<i64>, Vec<bool>) = self.tokenizer.with_targets(&chat.text, &chat.answers)?.into_iter().unzip();
                let windows = chat_cut.windows(std::iter::once(Ok(ids)));
                Box::new(windows.map(move |window| window.map(|window| window.restricted_to(&is_target))).filter(|window| {
                    // Windows without text of the assistant have no loss.
                    !window.as_ref().is_ok_and(Window::is_unpredicted)
                }))
            }
        })
    }

    /// Hashes of the content of each text in a window, without special tokens.
    pub fn hashes(&self, window: &Window, everywhere: bool) -> Vec<u64> {
        let (mut rest, mut hashes) = (window.ids.as_slice(), Vec::new());
        for length in window.lengths() {
            let (ids, after) = rest.split_at(length.min(rest.len()));
            rest = after;
            let ids = ids.strip_prefix(self.cut.first.as_slice()).unwrap_or(ids);
            hashes.extend(token_hashes(ids.strip_suffix(self.end.as_slice()).unwrap_or(ids), everywhere));
        }
        hashes
    }
}

fn no_end(target: &Target) -> Error {
    let what = format!("{}: `append_eos` for a model without an end-of-text token", target.folder.display());
    Error::Unsupported { what, hint: "add `eos_token` to tokenizer_config.json, or remove `append_eos`".into() }
}

/// Appends a token to a text that does not end with it. An empty text remains empty.
fn with_end(mut parts: impl Iterator<Item = Result<Vec<i64>>>, end: Option<i64>) -> impl Iterator<Item = Result<Vec<i64>>> {
    let mut last = None;
    std::iter::from_fn(move || match parts.next() {
        Some(part) => {
            last = part.as_ref().ok().and_then(|part| part.last().copied()).or(last);
            Some(part)
        }
        None => {
            let missing = end.filter(|end| last.is_some_and(|last| last != *end));
            last = None;
            missing.map(|end| Ok(vec![end]))
        }
    })
}

impl SampleSource for Windows {
    fn notes(&self) -> Vec<String> {
        records::header_note(&self.options, &self.path).into_iter().collect()
    }

    fn pending_batches(&self, order: Order) -> Result<PendingBatches<'_>> {
        let (size, bytes) = (self.options.batch(Task::LanguageModelling, Some(self.cut.room)), self.cut.room.saturating_mul(size_of::<i64>()));
        Ok(in_batches(self.windows()?, size, bytes, order, |windows| to_batch(&self.tokenizer, windows)))
    }

    fn identities(&self, _: usize, everywhere: bool) -> Result<Identities<'_>> {
        Ok(Box::new(self.windows()?.map(move |window| window.map(|window| self.hashes(&window, everywhere)))))
    }

    fn count(&self) -> Result<usize> {
        counted(self.windows()?)
    }

    fn needs_tokens_to_count(&self) -> bool {
        true
    }

    fn batch_sizes(&self) -> BatchSizes {
        BatchSizes::Varying { tokens: Some(self.length()) }
    }
}

/// Starts of lines at positions spread evenly over a file, in ascending order. Lines that several
/// positions have in common are returned once.
fn spread_lines(file: &File, count: usize) -> io::Result<Vec<u64>> {
    let mut starts = Vec::new();
    for index in 0..count {
        let position = u128::from(file.length()).saturating_mul(index as u128).checked_div(count as u128).unwrap_or(0);
        let start = line_start(file, u64::try_from(position).unwrap_or(u64::MAX))?;
        if start < file.length() && starts.last() != Some(&start) {
            starts.push(start);
        }
    }
    Ok(starts)
}

/// The start of the first line at or after a position, or of the first character if there is no line
/// near it.
fn line_start(file: &File, position: u64) -> io::Result<u64> {
    let Some(before) = position.checked_sub(1) else { return Ok(0) };
    let mut reader = file.reader();
    reader.seek(SeekFrom::Start(before))?;
    let mut skipped = Vec::new();
    BufReader::new(reader).take(LONGEST_LINE).read_until(b'\n', &mut skipped)?;
    let count = match skipped.last() {
        Some(b'\n') => skipped.len(),
        // Continuation bytes of UTF-8 begin with the bits 10.
        _ => skipped.iter().skip(1).position(|byte| byte & 0xc0 != 0x80).map_or(skipped.len(), |at| at.saturating_add(1)),
    };
    Ok(before.saturating_add(count as u64))
}

/// Parameters of the windows.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Special token at the start of every window.
    first: Option<i64>,
    /// Number of text tokens per window.
    room: usize,
    /// Distance between the starts of consecutive windows.
    stride: usize,
}

impl Cut {
    /// The parameters for texts that already contain their special tokens.
    fn without_first(self, stride: Option<usize>) -> Cut {
        let room = self.length();
        Cut { first: None, room, stride: stride.unwrap_or(room) }
    }

    /// Number of tokens per window.
    fn length(self) -> usize {
        self.room.saturating_add(usize::from(self.first.is_some()))
    }

    /// Splits a token sequence, given in parts, into windows.
    fn windows<I: Iterator<Item = Result<Vec<i64>>>>(self, parts: I) -> Cutter<I> {
        Cutter { cut: self, parts, tokens: Vec::new(), start: 0, done: 0 }
    }
}

/// Iterator over the windows of a text.
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
            // The first token of a window has no context, and cannot be predicted.
            let predicted = self.done.saturating_sub(self.start).saturating_add(usize::from(first.is_some())).max(1)..ids.len();
            let start = self.start;
            self.done = end;
            self.start = self.start.saturating_add(stride);
            self.tokens.drain(..stride.min(self.tokens.len()));
            if !predicted.is_empty() {
                return Some(Ok(Window { ids, start, predicted, positions: None, packed: Vec::new() }));
            }
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

    /// Lines are found from the beginning to the end of a file, and only the text around them is read.
    #[test]
    fn spread_lines_cover_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let starts = |text: &str, count: usize| {
            let path = folder.path().join("text.txt");
            std::fs::write(&path, text).unwrap();
            let file = File::open(&path).unwrap();
            let starts = spread_lines(&file, count).unwrap();
            assert_eq!(starts, spread_lines(&file, count).unwrap());
            starts
        };
        let lines: String = (0..1000).map(|line| format!("line {line:04}\n")).collect();
        assert_eq!(starts(&lines, 4), [0, 2500, 5000, 7500]);
        assert_eq!(starts(&lines, 3), [0, 3340, 6670]);
        assert_eq!(starts(&lines, 2000).len(), 1000);
        assert_eq!(starts("one\ntwo\nthree", 3), [0, 4, 8]);
        assert!(starts("", 3).is_empty());
        // Without lines, windows start at characters.
        assert_eq!(starts(&"ä".repeat(50_000), 4), [0, 25_000, 50_000, 75_000]);
        assert_eq!(starts(&"ä".repeat(50_001), 4), [0, 25_000, 50_002, 75_002]);
    }

    #[test]
    fn only_texts_that_do_not_end_with_the_token_get_it() {
        let ended = |parts: &[&[i64]], end| with_end(parts.iter().map(|part| Ok(part.to_vec())), end).collect::<Result<Vec<_>>>().unwrap().concat();
        assert_eq!(ended(&[&[3, 4], &[5]], Some(2)), [3, 4, 5, 2]);
        assert_eq!(ended(&[&[3, 2]], Some(2)), [3, 2]);
        assert_eq!(ended(&[&[3, 2], &[4]], None), [3, 2, 4]);
        assert!(ended(&[], Some(2)).is_empty());
    }

    /// Overlapping windows predict each target once.
    #[test]
    fn windows_predict_the_targets_of_a_text() {
        let is_target: Vec<bool> = (0..40).map(|at| at % 7 == 3 || at == 11).collect();
        for (room, stride) in [(5, 1), (5, 3), (8, 8), (40, 40)] {
            let windows = Cut { first: None, room, stride }.windows(std::iter::once(Ok((100..140).collect())));
            let windows: Vec<Window> = windows.map(|window| window.unwrap().restricted_to(&is_target)).collect();
            let labels = |window: &Window| {
                assert!(window.labels().iter().zip(&window.ids[1..]).all(|(label, next)| label.is_none_or(|label| label == *next)));
                assert_eq!(window.is_unpredicted(), window.labels().iter().all(Option::is_none));
                window.labels().into_iter().flatten().collect::<Vec<_>>()
            };
            let found: Vec<i64> = windows.iter().flat_map(labels).collect();
            let expected = (0..40).filter(|at| is_target[*at]).map(|at| 100 + at as i64).collect::<Vec<_>>();
            // The first token of a window that does not overlap the previous one has no context.
            let is_predicted = |id: &i64| stride < room || !((id - 100) as usize).is_multiple_of(room);
            assert_eq!(found, expected.into_iter().filter(is_predicted).collect::<Vec<_>>(), "{room} {stride}");
        }
    }

    #[test]
    fn without_a_first_token_the_first_of_the_text_cannot_be_predicted() {
        assert_eq!(predicted(None, 4, 2, 6), [(4, vec![101, 102, 103]), (4, vec![104, 105])]);
        assert_eq!(predicted(None, 4, 4, 5), [(4, vec![101, 102, 103])]);
    }
}
