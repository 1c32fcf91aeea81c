//! Headers of NumPy's .npy format.

use std::io::{Error, Read, Result};

use crate::store::DType;

/// Maximum header size in bytes, the same as NumPy's.
const MAX_HEADER_BYTES: u32 = 10_000;
const MAGIC: [u8; 6] = *b"\x93NUMPY";

/// The contents of a header, of which `descr` may be an unsupported type.
#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub descr: String,
    pub fortran_order: bool,
    pub shape: Vec<usize>,
}

impl Header {
    pub fn read(from: &mut dyn Read) -> Result<Header> {
        let mut start = [0; 10];
        from.read_exact(&mut start)?;
        let [magic @ .., version, _, a, b] = start;
        if magic != MAGIC {
            return Err(Error::other("it does not begin with NumPy's signature"));
        }
        let bytes = match version {
            1 => u16::from_le_bytes([a, b]).into(),
            2 | 3 => {
                let mut high = [0; 2];
                from.read_exact(&mut high)?;
                let [c, d] = high;
                u32::from_le_bytes([a, b, c, d])
            }
            other => return Err(Error::other(format!("version {other} of the format is not supported"))),
        };
        if bytes > MAX_HEADER_BYTES {
            return Err(Error::other(format!("the header has {bytes} bytes, more than {MAX_HEADER_BYTES}")));
        }
        let mut text = vec![0; bytes as usize];
        from.read_exact(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        Header::parse(&text).ok_or_else(|| Error::other(format!("invalid header {:?}", text.trim())))
    }

    /// Parses a Python dictionary with exactly the keys `descr`, `fortran_order` and `shape`.
    fn parse(text: &str) -> Option<Header> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        let mut rest = text.trim().strip_prefix('{')?.strip_suffix('}')?;
        while !rest.trim().is_empty() {
            let (key, after) = split_at_separator(rest, ':')?;
            let (value, after) = split_at_separator(after, ',')?;
            match unquoted(key)? {
                "descr" => descr = Some(unquoted(value).unwrap_or(value).to_owned()),
                "fortran_order" => {
                    fortran_order = Some(match value {
                        "True" => true,
                        "False" => false,
                        _ => return None,
                    })
                }
                "shape" => {
                    let sizes = value.strip_prefix('(')?.strip_suffix(')')?;
                    let sizes = sizes.split_terminator(',').map(|size| size.trim().trim_end_matches('L').parse().ok());
                    shape = Some(sizes.collect::<Option<_>>()?);
                }
                _ => return None,
            }
            rest = after;
        }
        Some(Header { descr: descr?, fortran_order: fortran_order?, shape: shape? })
    }

    /// The type of little-endian elements, except complex numbers, dates, texts and records.
    pub fn dtype(&self) -> Option<DType> {
        Some(match self.descr.strip_prefix(['<', '|'])? {
            "b1" | "u1" => DType::U8,
            "i1" => DType::I8,
            "i2" => DType::I16,
            "i4" => DType::I32,
            "i8" => DType::I64,
            "u2" => DType::U16,
            "u4" => DType::U32,
            "f2" => DType::F16,
            "f4" => DType::F32,
            "f8" => DType::F64,
            _ => return None,
        })
    }
}

/// The text of a Python value up to a separator or the end, and the rest after the separator.
fn split_at_separator(text: &str, separator: char) -> Option<(&str, &str)> {
    let (mut depth, mut quote) = (0_usize, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '(' | '[' | '{') => depth = depth.saturating_add(1),
            (None, ')' | ']' | '}') => depth = depth.checked_sub(1)?,
            (None, _) if c == separator && depth == 0 => {
                let (value, rest) = text.split_at(at);
                return Some((value.trim(), rest.strip_prefix(separator)?));
            }
            (None, _) => {}
        }
    }
    (separator == ',' && depth == 0 && quote.is_none()).then_some((text.trim(), ""))
}

fn unquoted(text: &str) -> Option<&str> {
    ['\'', '"'].into_iter().find_map(|quote| text.strip_prefix(quote)?.strip_suffix(quote))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of version 1, 2 or 3, without elements.
    fn file(version: u8, header: &str) -> Vec<u8> {
        let length = (header.len() as u32).to_le_bytes();
        let length = if version == 1 { &length[..2] } else { &length };
        [&MAGIC[..], &[version, 0], length, header.as_bytes()].concat()
    }

    fn read(version: u8, header: &str) -> Result<Header> {
        Header::read(&mut file(version, header).as_slice())
    }

    #[test]
    fn headers_of_all_versions_are_read() {
        for (version, header, descr, shape) in [
            (1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }     \n", "<f4", vec![3, 4]),
            (1, "{'descr': '|b1', 'fortran_order': False, 'shape': (7,), }\n", "|b1", vec![7]),
            (2, "{\"shape\": (), \"descr\": \"<i8\", \"fortran_order\": False}", "<i8", vec![]),
            (1, "{'descr': '<i8', 'fortran_order': False, 'shape': (2L, 5L)}", "<i8", vec![2, 5]),
            (
                3,
                "{'descr': [('ä, (', '<f4'), ('b', '<i4', (2, 3))], 'fortran_order': False, 'shape': (0,)}",
                "[('ä, (', '<f4'), ('b', '<i4', (2, 3))]",
                vec![0],
            ),
        ] {
            assert_eq!(read(version, header).unwrap(), Header { descr: descr.into(), fortran_order: false, shape }, "{header}");
        }
        assert!(read(1, "{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}").unwrap().fortran_order);
    }

    #[test]
    fn other_headers_are_rejected() {
        for header in [
            "",
            "{}",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'unit': 'm'}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
            "{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)",
            "{'descr': '<f4'], 'fortran_order': False, 'shape': (1,)}",
            "{descr: '<f4', 'fortran_order': False, 'shape': (1,)}",
        ] {
            assert!(read(1, header).is_err(), "{header}");
        }
        let valid = file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}");
        assert!((0..valid.len()).all(|length| Header::read(&mut &valid[..length]).is_err()));
        assert!(read(4, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}").unwrap_err().to_string().contains("version 4"));
        let long = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}}{}", " ".repeat(10_000));
        assert!(read(2, &long).unwrap_err().to_string().contains("more than 10000"));
        assert!(Header::read(&mut b"PK\x03\x04 and more bytes".as_slice()).unwrap_err().to_string().contains("signature"));
    }

    #[test]
    fn only_little_endian_numbers_have_a_dtype() {
        let dtype = |descr: &str| Header { descr: descr.into(), fortran_order: false, shape: vec![] }.dtype();
        assert_eq!(["<f2", "<f4", "|b1", "|u1", "<i8"].map(dtype), [DType::F16, DType::F32, DType::U8, DType::U8, DType::I64].map(Some));
        assert_eq!(["<c8", ">f4", "<M8[ns]", "<U5", "|V2", "<f16", "<u8", "[('a', '<f4')]"].map(dtype), [None; 8]);
    }
}
