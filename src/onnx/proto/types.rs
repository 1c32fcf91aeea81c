//! Types of values.

use super::{DataType, StringStringEntryProto};

/// A value and its type.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ValueInfoProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
    /// What it is, for people.
    #[prost(string, optional, tag = "3")]
    pub doc_string: Option<String>,
    /// Anything.
    #[prost(message, repeated, tag = "4")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// The type of a value. Of all that there are, tensors are looked into; the others are messages as they stand in the file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TypeProto {
    /// Of a tensor.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
    /// Of a sequence.
    #[prost(bytes = "vec", optional, tag = "4")]
    pub sequence_type: Option<Vec<u8>>,
    /// Of a map.
    #[prost(bytes = "vec", optional, tag = "5")]
    pub map_type: Option<Vec<u8>>,
    /// What kind of thing it is, for people.
    #[prost(string, optional, tag = "6")]
    pub denotation: Option<String>,
    /// Of something that only its domain knows.
    #[prost(bytes = "vec", optional, tag = "7")]
    pub opaque_type: Option<Vec<u8>>,
    /// Of a sparse tensor.
    #[prost(bytes = "vec", optional, tag = "8")]
    pub sparse_tensor_type: Option<Vec<u8>>,
    /// Of something that need not be there.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub optional_type: Option<Vec<u8>>,
}

/// The type of a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorTypeProto {
    /// What elements are.
    #[prost(enumeration = "DataType", optional, tag = "1")]
    pub elem_type: Option<i32>,
    /// Sizes; not even their number is known where this is missing.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// Sizes of a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorShapeProto {
    /// Outermost first.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// One size.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct DimensionProto {
    /// A number or a name.
    #[prost(oneof = "Dimension", tags = "1, 2")]
    pub value: Option<Dimension>,
    /// What the axis is, for people.
    #[prost(string, optional, tag = "3")]
    pub denotation: Option<String>,
}

/// A number or a name.
#[derive(Clone, PartialEq, Eq, Hash, prost::Oneof)]
pub enum Dimension {
    /// A number.
    #[prost(int64, tag = "1")]
    DimValue(i64),
    /// A name.
    #[prost(string, tag = "2")]
    DimParam(String),
}
