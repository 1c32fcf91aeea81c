//! Writes the header of a GGUF file.

use super::MARK;
use super::header::{ALIGNMENT, Kind, Value, layout};

/// The header of a file, including its padding, and the number of padding bytes after each tensor.
///
/// Unsigned integers are written as u32 if they fit, floats as f32. `None` if a tensor's type has no id,
/// or its size overflows.
pub fn header(values: &[(String, Value)], tensors: &[(String, Kind, Vec<usize>)]) -> Option<(Vec<u8>, Vec<u64>)> {
    let mut bytes = [&MARK[..], &3u32.to_le_bytes(), &(tensors.len() as u64).to_le_bytes(), &(values.len() as u64).to_le_bytes()].concat();
    for (key, value) in values {
        text(&mut bytes, key);
        put(&mut bytes, value);
    }
    let layout = layout(tensors)?;
    for ((name, _, shape), (type_id, begin, _)) in tensors.iter().zip(&layout) {
        text(&mut bytes, name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| bytes.extend((*size as u64).to_le_bytes()));
        bytes.extend(type_id.to_le_bytes());
        bytes.extend(begin.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    Some((bytes, layout.into_iter().map(|(.., padding)| padding).collect()))
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put(bytes: &mut Vec<u8>, value: &Value) {
    let mut kind = |kind: u32| bytes.extend(kind.to_le_bytes());
    match value {
        Value::Unsigned(number) => match u32::try_from(*number) {
            Ok(number) => {
                kind(4);
                bytes.extend(number.to_le_bytes());
            }
            Err(_) => {
                kind(10);
                bytes.extend(number.to_le_bytes());
            }
        },
        Value::Signed(number) => {
            kind(11);
            bytes.extend(number.to_le_bytes());
        }
        Value::Float(number) => {
            kind(6);
            bytes.extend((*number as f32).to_le_bytes());
        }
        Value::Bool(value) => {
            kind(7);
            bytes.push(u8::from(*value));
        }
        Value::Text(value) => {
            kind(8);
            text(bytes, value);
        }
        Value::Integers(list) => {
            begin(bytes, 5, list.len());
            list.iter().for_each(|number| bytes.extend((*number as i32).to_le_bytes()));
        }
        Value::Floats(list) => {
            begin(bytes, 6, list.len());
            list.iter().for_each(|number| bytes.extend((*number as f32).to_le_bytes()));
        }
        Value::Bools(list) => {
            begin(bytes, 7, list.len());
            bytes.extend(list.iter().map(|value| u8::from(*value)));
        }
        Value::Texts(list) => {
            begin(bytes, 8, list.len());
            list.iter().for_each(|value| text(bytes, value));
        }
    }
}

/// Writes the type and length of a list.
fn begin(bytes: &mut Vec<u8>, kind: u32, count: usize) {
    bytes.extend(9u32.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend((count as u64).to_le_bytes());
}
