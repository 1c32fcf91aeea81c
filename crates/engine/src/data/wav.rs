//! WAV files, read at any offset, also remotely.
//!
//! The crate `hound` reads them in order, and takes the length of the data from the header, which streams do
//! not know.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files::File;

/// Sample format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// Integers of this many bytes; single bytes are unsigned.
    Integer(usize),
    /// Floats of this many bytes.
    Float(usize),
}

/// An open recording.
pub(super) struct Wav {
    path: PathBuf,
    file: File,
    format: Format,
    /// Sampling rate, in Hz.
    pub rate: usize,
    /// Number of channels.
    pub channels: usize,
    /// Offset of the first sample.
    start: u64,
    /// Number of samples per channel.
    pub samples: u64,
}

/// Size of a chunk that was written as a stream.
const UNKNOWN_SIZE: u32 = u32::MAX;
/// Format tag of integers.
const INTEGER: u16 = 1;
/// Format tag of floats.
const FLOAT: u16 = 3;
/// Format tag of `WAVE_FORMAT_EXTENSIBLE`, with the actual tag in the extension.
const EXTENSIBLE: u16 = 0xfffe;

impl Wav {
    /// Reads the header. Fails for other files, truncated files and unsupported sample formats.
    pub fn open(path: &Path) -> Result<Wav> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let wrong = |reason: String| Error::malformed(path, reason);
        let bytes = |at: u64, count: usize| {
            let mut bytes = vec![0; count];
            let exists = at.checked_add(count as u64).is_some_and(|end| end <= file.length());
            let read = exists.then(|| file.read_exact_at(&mut bytes, at).map_err(Error::io("read", path)));
            read.unwrap_or_else(|| Err(wrong("is truncated".into()))).map(|()| bytes)
        };
        let not_wav = || wrong("is not a WAV file; convert it with `ffmpeg -i FILE -ac 1 -ar 16000 OUT.wav`".into());
        let head = bytes(0, 12).map_err(|_| not_wav())?;
        if !head.starts_with(b"RIFF") || !head.ends_with(b"WAVE") {
            return Err(not_wav());
        }
        let (mut at, mut format) = (12u64, None);
        loop {
            let head = bytes(at, 8)?;
            let size = number(&head, 4, 4).unwrap_or(0);
            let start = at.saturating_add(8);
            match (head.get(..4), format) {
                (Some(b"fmt "), _) => {
                    let text = bytes(start, size.clamp(16, 40) as usize)?;
                    format = Some(parse_format(&text).ok_or_else(|| wrong(unsupported_format(&text)))?);
                }
                (Some(b"data"), Some((format, channels, rate))) => {
                    let rest = file.length().saturating_sub(start);
                    // Streams may also have a size of 0.
                    let size = if size == u64::from(UNKNOWN_SIZE) || size == 0 { rest } else { size };
                    if size > rest {
                        return Err(wrong(format!("is truncated: it should have {size} bytes of samples, but has {rest}")));
                    }
                    let (Format::Integer(width) | Format::Float(width)) = format;
                    let samples = size.checked_div(width.saturating_mul(channels) as u64).unwrap_or(0);
                    if samples == 0 {
                        return Err(wrong("has no samples".into()));
                    }
                    return Ok(Wav { path: path.to_owned(), format, rate, channels, start, samples, file });
                }
                (Some(b"data"), None) => return Err(wrong("has no `fmt ` chunk before its samples".into())),
                _ => {}
            }
            // Chunks are aligned to even offsets.
            at = start.saturating_add(size).saturating_add(size % 2);
        }
    }

    /// Reads the samples of a single-channel file; integers are scaled to -1..1. Fails for floats that
    /// are not finite.
    pub fn read(&self) -> Result<Vec<f32>> {
        let (Format::Integer(width) | Format::Float(width)) = self.format;
        let mut bytes = vec![0; (self.samples as usize).saturating_mul(width)];
        self.file.read_exact_at(&mut bytes, self.start).map_err(Error::io("read", &self.path))?;
        let sample = |bytes: &[u8]| {
            let raw = number(bytes, 0, width).unwrap_or(0);
            match self.format {
                Format::Integer(1) => (raw as f64 - 128.0) / 128.0,
                // Shifts the sign bit to the top.
                Format::Integer(width) => {
                    let above = 64u32.saturating_sub((width as u32).saturating_mul(8));
                    (raw << above).cast_signed() as f64 / -(i64::MIN as f64)
                }
                Format::Float(4) => f64::from(f32::from_bits(raw as u32)),
                Format::Float(_) => f64::from_bits(raw),
            }
        };
        let samples: Vec<f32> = bytes.chunks_exact(width).map(|bytes| sample(bytes) as f32).collect();
        match samples.iter().position(|sample| !sample.is_finite()) {
            Some(at) => Err(Error::malformed(&self.path, format!("sample {at} is not a finite number"))),
            None => Ok(samples),
        }
    }
}

/// A little-endian integer of `width` bytes.
fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let end = at.checked_add(width)?;
    Some(bytes.get(at..end)?.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
}

/// Format, channels and sampling rate of a `fmt ` chunk; `None` if they are not supported.
fn parse_format(text: &[u8]) -> Option<(Format, usize, usize)> {
    let field = |at: usize, width: usize| number(text, at, width);
    let (bits, channels, rate) = (field(14, 2)?, field(2, 2)?, field(4, 4)?);
    let kind = if tag(text)? == EXTENSIBLE { field(24, 2)? as u16 } else { tag(text)? };
    let format = match (kind, bits) {
        (INTEGER, 8 | 16 | 24 | 32) => Format::Integer(bits as usize / 8),
        (FLOAT, 32 | 64) => Format::Float(bits as usize / 8),
        _ => return None,
    };
    (channels > 0 && rate > 0 && field(12, 2)? == channels.checked_mul(bits / 8)?).then_some((format, channels as usize, rate as usize))
}

fn tag(text: &[u8]) -> Option<u16> {
    number(text, 0, 2).map(|tag| tag as u16)
}

fn unsupported_format(text: &[u8]) -> String {
    let (tag, bits) = (tag(text).unwrap_or(0), number(text, 14, 2).unwrap_or(0));
    format!(
        "has samples of format {tag} and {bits} bits; integers of 8, 16, 24 and 32 bits and floats of 32 and 64 bits are supported: convert it with `ffmpeg -i FILE -ac 1 -ar 16000 OUT.wav`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A single-channel file.
    pub fn written(tag: u16, bits: u16, data: &[u8]) -> Vec<u8> {
        let mut text = b"RIFF\0\0\0\0WAVELIST\x03\0\0\0abc\0fmt ".to_vec();
        text.extend(16u32.to_le_bytes());
        text.extend([tag, 1].map(u16::to_le_bytes).as_flattened());
        text.extend([8000u32, 8000 * u32::from(bits) / 8].map(u32::to_le_bytes).as_flattened());
        text.extend([bits / 8, bits].map(u16::to_le_bytes).as_flattened());
        text.extend(b"data");
        text.extend((data.len() as u32).to_le_bytes());
        text.extend(data);
        text
    }

    fn read(bytes: &[u8]) -> Result<Vec<f32>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.wav");
        std::fs::write(&path, bytes).unwrap();
        let wav = Wav::open(&path)?;
        assert_eq!((wav.rate, wav.channels), (8000, 1));
        wav.read()
    }

    #[test]
    fn samples_of_every_width_are_read() {
        assert_eq!(read(&written(1, 8, &[0, 128, 192])).unwrap(), [-1.0, 0.0, 0.5]);
        assert_eq!(read(&written(1, 16, &[0, 0x80, 0, 0x40, 0xff, 0xff])).unwrap(), [-1.0, 0.5, -1.0 / 32768.0]);
        assert_eq!(read(&written(1, 24, &[0, 0, 0x80, 0, 0, 0x40, 1, 0, 0])).unwrap(), [-1.0, 0.5, 1.0 / 8_388_608.0]);
        assert_eq!(read(&written(1, 32, &[0, 0, 0, 0x80, 0, 0, 0, 0x20])).unwrap(), [-1.0, 0.25]);
        assert_eq!(read(&written(3, 32, [0.25f32, -3.5].map(f32::to_le_bytes).as_flattened())).unwrap(), [0.25, -3.5]);
        assert_eq!(read(&written(3, 64, &0.125f64.to_le_bytes())).unwrap(), [0.125]);
        let mut open = written(1, 16, &[0, 0x40]);
        let at = open.len() - 6;
        open[at..at + 4].copy_from_slice(&UNKNOWN_SIZE.to_le_bytes());
        assert_eq!(read(&open).unwrap(), [0.5]);
        open[at..at + 4].fill(0);
        assert_eq!(read(&open).unwrap(), [0.5]);
        assert!(read(&written(1, 16, &[])).unwrap_err().to_string().contains("has no samples"));
    }

    #[test]
    fn unsupported_files_are_rejected() {
        let refused = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert!(refused(b"").contains("is not a WAV file") && refused(b"fLaC0000000000000000").contains("is not a WAV file"));
        assert!(refused(&written(6, 8, &[0])).contains("format 6 and 8 bits"));
        assert!(refused(&written(1, 12, &[0])).contains("format 1 and 12 bits"));
        let whole = written(1, 16, &[0; 8]);
        for end in 12..whole.len() {
            assert!(refused(&whole[..end]).contains("is truncated"), "{end}");
        }
        assert!(refused(&written(3, 32, &f32::NAN.to_le_bytes())).contains("sample 0 is not a finite number"));
    }
}
