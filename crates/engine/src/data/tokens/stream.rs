//! Incremental tokenization of a text of any length.
//!
//! The text is read and tokenized in overlapping chunks. Two chunks are joined at a run of tokens on
//! which they agree. The result equals the tokenization of the whole text if a token does not depend on
//! text that is farther away than such a run. Without agreement, chunks grow up to a limit and are then
//! split.

use std::io::Read;
use std::path::PathBuf;

use super::Tokenizer;
use crate::data::text_format::{NOT_UTF8, not_text};
use crate::error::{Error, Result};

/// Bytes that are read at a time.
const READ_BYTES: usize = 1 << 16;
/// Bytes by which consecutive chunks overlap.
const OVERLAP: usize = 1 << 11;
/// Minimum length of the run of tokens on which two chunks must agree.
const RUN: usize = 8;
/// Maximum size of a chunk, in bytes; a longer chunk is split without agreement.
const MAX_CHUNK: usize = 1 << 22;

/// Iterator over consecutive parts of the token sequence.
pub struct TokenStream<'t> {
    tokenizer: &'t Tokenizer,
    pieces: Pieces<'t>,
    chunk: String,
    /// Pending tokens of the chunk, each with its start in bytes.
    tokens: Vec<(i64, usize)>,
    is_finished: bool,
}

impl<'t> TokenStream<'t> {
    pub fn new(tokenizer: &'t Tokenizer, text: Box<dyn Read + Send + 't>, path: PathBuf) -> TokenStream<'t> {
        TokenStream {
            tokenizer,
            pieces: Pieces { file: text, path, rest: Vec::new(), size: READ_BYTES },
            chunk: String::new(),
            tokens: Vec::new(),
            is_finished: false,
        }
    }

    /// The same, reading at least `bytes` at a time, which suffices where few tokens are taken.
    pub fn with_piece(mut self, bytes: usize) -> TokenStream<'t> {
        self.pieces.size = bytes.clamp(OVERLAP.saturating_mul(4), READ_BYTES);
        self
    }

    /// The next tokens that do not depend on text that has not been read yet.
    fn part(&mut self) -> Result<Option<Vec<i64>>> {
        while !self.is_finished {
            let Some(piece) = self.pieces.next().transpose()? else {
                self.is_finished = true;
                break;
            };
            let piece = self.tokenizer.apply_case(&piece);
            if self.chunk.is_empty() {
                self.start(piece.into_owned())?;
                continue;
            }
            let mut from = self.chunk.len().saturating_sub(OVERLAP);
            while !self.chunk.is_char_boundary(from) {
                from = from.saturating_sub(1);
            }
            let next = [self.chunk.get(from..).unwrap_or_default(), &piece].concat();
            let mut tokens = self.tokenizer.with_offsets(&next)?;
            if let Some((ours, theirs)) = agreement(&self.tokens, from, &tokens) {
                let part: Vec<i64> = self.tokens.iter().take(ours).map(|(id, _)| *id).collect();
                self.tokens = tokens.split_off(theirs);
                self.chunk = next;
                if !part.is_empty() {
                    return Ok(Some(part));
                }
            } else if self.chunk.len() < MAX_CHUNK {
                // Retry with a longer chunk; tokens that were returned before are final.
                let at = self.tokens.first().map_or(self.chunk.len(), |(_, at)| *at);
                self.chunk.push_str(&piece);
                let mut tokens = self.tokenizer.with_offsets(&self.chunk)?;
                self.tokens = tokens.split_off(tokens.partition_point(|(_, start)| *start < at));
            } else {
                let part = self.rest();
                self.start(piece.into_owned())?;
                return Ok(Some(part));
            }
        }
        Ok(Some(self.rest()).filter(|part| !part.is_empty()))
    }

    fn start(&mut self, chunk: String) -> Result<()> {
        self.tokens = self.tokenizer.with_offsets(&chunk)?;
        self.chunk = chunk;
        Ok(())
    }

    fn rest(&mut self) -> Vec<i64> {
        std::mem::take(&mut self.tokens).into_iter().map(|(id, _)| id).collect()
    }
}

impl Iterator for TokenStream<'_> {
    type Item = Result<Vec<i64>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.part().transpose()
    }
}

/// Positions in both lists of a common run of tokens; the second list starts `from` bytes after the first.
/// The run has at least half of the tokens that overlap: fewer agree by chance if the lists group digits
/// differently.
fn agreement(ours: &[(i64, usize)], from: usize, theirs: &[(i64, usize)]) -> Option<(usize, usize)> {
    let first = ours.partition_point(|(_, start)| *start < from);
    let length = RUN.max(ours.len().saturating_sub(first) / 2);
    let same = |a: &[(i64, usize)], b: &[(i64, usize)]| a.iter().zip(b).all(|((a, a_start), (b, b_start))| a == b && *a_start == b_start.saturating_add(from));
    ours.windows(length).enumerate().skip(first).find_map(|(position, run)| {
        let start = run.first()?.1;
        // Byte-level tokens of one character have the same start and must not be separated.
        if position.checked_sub(1).and_then(|before| ours.get(before)).is_some_and(|before| before.1 == start) {
            return None;
        }
        let start = start.saturating_sub(from);
        let near = theirs.partition_point(|(_, at)| *at < start);
        let found = theirs.get(near..)?.windows(length).take(RUN).position(|other| same(run, other))?;
        Some((position, near.saturating_add(found)))
    })
}

/// Iterator over pieces of a file, split before a newline, or else between words.
struct Pieces<'t> {
    file: Box<dyn Read + Send + 't>,
    path: PathBuf,
    rest: Vec<u8>,
    size: usize,
}

impl Iterator for Pieces<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut bytes = std::mem::take(&mut self.rest);
        let missing = (self.size as u64).saturating_sub(bytes.len() as u64);
        if let Err(e) = self.file.by_ref().take(missing).read_to_end(&mut bytes) {
            return Some(Err(Error::io("read", &self.path)(e)));
        }
        if bytes.is_empty() {
            return None;
        }
        if bytes.len() >= self.size {
            let last = |predicate: fn(&u8) -> bool| bytes.iter().rposition(predicate).filter(|at| *at > 0);
            // Without whitespace, at a character boundary: continuation bytes of UTF-8 begin with the
            // bits 10.
            let boundary = || last(|b| *b & 0xc0 != 0x80);
            let at = last(|b| *b == b'\n').or_else(|| last(u8::is_ascii_whitespace)).or_else(boundary).unwrap_or(bytes.len());
            self.rest = bytes.split_off(at);
        }
        let text = String::from_utf8(bytes).map_err(|_| NOT_UTF8).and_then(|text| not_text(&text).map_or(Ok(text), Err));
        Some(text.map_err(|what| Error::malformed(&self.path, format!("is {what}"))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::tests::byte_level;
    use super::*;

    #[test]
    fn utf16_is_rejected() {
        let mut pieces = Pieces { file: Box::new(b"o\0n\0".as_slice()), path: PathBuf::new(), rest: Vec::new(), size: 8 };
        assert!(pieces.next().unwrap().unwrap_err().to_string().contains("iconv -f UTF-16LE"));
    }

    #[test]
    fn pieces_concatenate_to_the_file() {
        for text in
            ["one two\nthree\nfour five six seven eight\nnine", "\nä b\n\näöüß漢字かな交じり文漢字かな交じり文", "漢字かな交じり文漢字かな交じり文🙂🙂", "\n"]
        {
            for size in [8, 9, 10, 11, 12, 40, 100] {
                let pieces = Pieces { file: Box::new(text.as_bytes()), path: PathBuf::new(), rest: Vec::new(), size };
                let pieces: Vec<String> = pieces.map(Result::unwrap).collect();
                assert_eq!(pieces.concat(), text);
                assert!(pieces.iter().all(|piece| (1..=size).contains(&piece.len())));
                assert!(size < 100 || pieces.len() == 1);
            }
        }
    }

    const SMALL: usize = 1 << 12;

    /// A tokenizer that divides digits into groups of three, from the left, like that of Llama 3.
    fn grouping_digits(folder: &std::path::Path) -> Tokenizer {
        byte_level(folder, "A", false);
        let file = folder.join("tokenizer.json");
        let mut settings: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let split = serde_json::json!({ "type": "Split", "pattern": { "Regex": "\\p{N}{1,3}" }, "behavior": "Isolated", "invert": false });
        let bytes = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
        settings["pre_tokenizer"] = serde_json::json!({ "type": "Sequence", "pretokenizers": [split, bytes] });
        settings["model"]["vocab"]["12"] = 300.into();
        settings["model"]["merges"].as_array_mut().unwrap().push("1 2".into());
        std::fs::write(&file, settings.to_string()).unwrap();
        Tokenizer::open(&crate::data::Target::new(folder, &crate::model::SynthesizedFiles::new(), &serde_json::Map::new()), None).unwrap()
    }

    /// Tokenizes a text that is read in pieces of this size.
    fn in_pieces<'t>(tokenizer: &'t Tokenizer, file: impl Read + Send + 't, size: usize) -> TokenStream<'t> {
        let pieces = Pieces { file: Box::new(file), path: PathBuf::new(), rest: Vec::new(), size };
        TokenStream { tokenizer, pieces, chunk: String::new(), tokens: Vec::new(), is_finished: false }
    }

    /// Counts the bytes that are read.
    struct Counted<'a>(&'a [u8], &'a AtomicUsize);

    impl Read for Counted<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.0.read(buffer)?;
            self.1.fetch_add(count, Ordering::Relaxed);
            Ok(count)
        }
    }

    fn text(seed: u64, words: usize, separators: &[&str]) -> String {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut text = String::new();
        for _ in 0..words {
            (0..random.usize(1..9)).for_each(|_| text.push_str(["a", "b", "er", "n", "ä", "漢", "1"][random.usize(..7)]));
            text.push_str(separators[random.usize(..separators.len())]);
        }
        text
    }

    #[test]
    fn tokens_equal_those_of_the_whole_text_and_reading_is_lazy() {
        let folder = tempfile::tempdir().unwrap();
        for (seed, prefix) in [(1, false), (2, true)] {
            let tokenizer = byte_level(folder.path(), "<s> A", prefix);
            for separators in [&[" ", "\n", "\n\n", "  \n \n", ". "][..], &["\n\n\n"], &[""], &["    "]] {
                let text = text(seed, 5_000, separators);
                let read = AtomicUsize::new(0);
                let stream = || in_pieces(&tokenizer, Counted(text.as_bytes(), &read), SMALL);
                let tokens: Vec<i64> = stream().map(Result::unwrap).collect::<Vec<_>>().concat();
                assert!(tokens == tokenizer.plain(&text).unwrap(), "{separators:?}");
                assert!(text.len() > 3 * SMALL && read.swap(0, Ordering::Relaxed) == text.len());
                let first = stream().next().unwrap().unwrap();
                assert!(first.len() > 100 && tokens.starts_with(&first));
                assert!(read.load(Ordering::Relaxed) <= 2 * SMALL || separators == [""], "{} bytes read", read.load(Ordering::Relaxed));
            }
        }
        let tokenizer = grouping_digits(folder.path());
        let mut random = fastrand::Rng::with_seed(3);
        let text: String = (0..50_000).map(|_| random.digit(10)).collect();
        for size in SMALL..SMALL + 6 {
            assert!(in_pieces(&tokenizer, text.as_bytes(), size).map(Result::unwrap).collect::<Vec<_>>().concat() == tokenizer.plain(&text).unwrap(), "{size}");
        }
        let tokenizer = byte_level(folder.path(), "A", false);
        assert_eq!(TokenStream::new(&tokenizer, Box::new(&b""[..]), PathBuf::new()).count(), 0);
        assert!(TokenStream::new(&tokenizer, Box::new(&b"a\xff"[..]), "x.txt".into()).next().unwrap().unwrap_err().to_string().contains("UTF-8"));
    }
}
