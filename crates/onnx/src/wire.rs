//! Protobuf wire format: encoding of fields, and which fields of ONNX messages are messages.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

/// Kinds of messages that can contain tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Sparse,
    Function,
    Training,
}

impl Kind {
    /// Name of a field for which repeated occurrences are rejected. Those of the main graph are merged
    /// by `splice`.
    pub fn single(self, field: u64) -> Option<&'static str> {
        Some(match (self, field) {
            (Kind::Training, 1) => "initialization",
            (Kind::Training, 2) => "algorithm",
            (Kind::Attribute, 5) => "t",
            (Kind::Attribute, 6) => "g",
            (Kind::Attribute, 22) => "sparse_tensor",
            (Kind::Sparse, 1) => "values",
            (Kind::Sparse, 2) => "indices",
            _ => return None,
        })
    }

    /// The kind of the messages in a field; `None` if they cannot contain tensors.
    pub fn child(self, field: u64) -> Option<Kind> {
        Some(match (self, field) {
            (Kind::Model, 7) | (Kind::Training, 1 | 2) | (Kind::Attribute, 6 | 11) => Kind::Graph,
            (Kind::Model, 20) => Kind::Training,
            (Kind::Model, 25) => Kind::Function,
            (Kind::Graph, 1) | (Kind::Function, 7) => Kind::Node,
            (Kind::Graph, 5) | (Kind::Attribute, 5 | 10) | (Kind::Sparse, 1 | 2) => Kind::Tensor,
            (Kind::Graph, 15) | (Kind::Attribute, 22 | 23) => Kind::Sparse,
            (Kind::Node, 5) | (Kind::Function, 11) => Kind::Attribute,
            _ => return None,
        })
    }
}

/// Fields of a tensor with its elements or their location.
pub(super) mod data {
    pub const FLOATS: u64 = 4;
    pub const INT32: u64 = 5;
    pub const INT64: u64 = 7;
    pub const RAW: u64 = 9;
    pub const DOUBLES: u64 = 10;
    pub const UINT64: u64 = 11;
    pub const EXTERNAL: u64 = 13;
    pub const LOCATION: u64 = 14;
    /// The number of a tensor, which replaces its elements in a skeleton.
    pub const MARK: u64 = 50_000;

    /// Whether a field contains packed elements.
    pub fn is_run(field: u64) -> bool {
        matches!(field, FLOATS | INT32 | INT64 | RAW | DOUBLES | UINT64)
    }

    /// Whether a field stores its elements as varints.
    pub fn is_varints(field: u64) -> bool {
        matches!(field, INT32 | INT64 | UINT64)
    }
}

/// Protobuf wire types.
pub(super) const VARINT: u64 = 0;
pub(super) const FIXED64: u64 = 1;
pub(super) const BYTES: u64 = 2;
pub(super) const FIXED32: u64 = 5;

/// Appends a varint.
pub(super) fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends the tag of a field.
pub(super) fn tag(field: u64, wire_type: u64, out: &mut Vec<u8>) {
    varint(field << 3 | wire_type, out);
}

/// Appends tag and length of a field. Its bytes must follow.
pub(super) fn bytes(field: u64, length: u64, out: &mut Vec<u8>) {
    tag(field, BYTES, out);
    varint(length, out);
}

/// A field of a message in memory.
pub(super) struct Field<'b> {
    pub number: u64,
    pub wire_type: u64,
    /// Value of a varint field.
    pub value: u64,
    /// Content of any other field.
    pub content: &'b [u8],
    /// The encoded field, including its tag.
    pub raw: &'b [u8],
}

/// The fields of a message; iteration stops at the first malformed one.
pub(super) fn fields(mut message: &[u8]) -> impl Iterator<Item = Field<'_>> {
    std::iter::from_fn(move || {
        let begin = message;
        let key = take_varint(&mut message)?;
        let (number, wire_type) = (key >> 3, key & 7);
        let (value, content) = match wire_type {
            VARINT => (take_varint(&mut message)?, &[][..]),
            FIXED64 => (0, take(&mut message, 8)?),
            FIXED32 => (0, take(&mut message, 4)?),
            _ => {
                let length = take_varint(&mut message)?;
                (0, take(&mut message, usize::try_from(length).ok()?)?)
            }
        };
        let raw = begin.get(..begin.len().checked_sub(message.len())?)?;
        Some(Field { number, wire_type, value, content, raw })
    })
}

fn take<'b>(message: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
    let (taken, rest) = message.split_at_checked(count)?;
    *message = rest;
    Some(taken)
}

/// Removes a varint from the front.
pub(super) fn take_varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let (byte, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_fields_decode_to_the_same() {
        for value in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX] {
            let mut written = Vec::new();
            varint(value, &mut written);
            assert_eq!(take_varint(&mut written.as_slice()), Some(value));
        }
        let mut message = Vec::new();
        tag(3, VARINT, &mut message);
        varint(300, &mut message);
        bytes(9, 2, &mut message);
        message.extend([7, 8]);
        tag(4, FIXED32, &mut message);
        message.extend([1, 2, 3, 4]);
        let read: Vec<_> = fields(&message).map(|field| (field.number, field.value, field.content.to_vec())).collect();
        assert_eq!(read, [(3, 300, vec![]), (9, 0, vec![7, 8]), (4, 0, vec![1, 2, 3, 4])]);
        assert_eq!(fields(&message).flat_map(|field| field.raw.to_vec()).collect::<Vec<_>>(), message);
        assert!(take_varint(&mut [0xff; 11].as_slice()).is_none());
    }
}
