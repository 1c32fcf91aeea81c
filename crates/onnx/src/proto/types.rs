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
    /// Documentation.
    #[prost(string, optional, tag = "3")]
    pub doc_string: Option<String>,
    /// Metadata.
    #[prost(message, repeated, tag = "4")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// The type of a value. Only tensor types are decoded.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TypeProto {
    /// A tensor type.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
    /// A sequence type.
    #[prost(bytes = "vec", optional, tag = "4")]
    pub sequence_type: Option<Vec<u8>>,
    /// A map type.
    #[prost(bytes = "vec", optional, tag = "5")]
    pub map_type: Option<Vec<u8>>,
    /// Denotation: the meaning of the value, for users.
    #[prost(string, optional, tag = "6")]
    pub denotation: Option<String>,
    /// An opaque type of a domain.
    #[prost(bytes = "vec", optional, tag = "7")]
    pub opaque_type: Option<Vec<u8>>,
    /// A sparse tensor type.
    #[prost(bytes = "vec", optional, tag = "8")]
    pub sparse_tensor_type: Option<Vec<u8>>,
    /// An optional type.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub optional_type: Option<Vec<u8>>,
}

/// The type of a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorTypeProto {
    /// Element type.
    #[prost(enumeration = "DataType", optional, tag = "1")]
    pub elem_type: Option<i32>,
    /// Shape; if missing, the rank is unknown.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// The shape of a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorShapeProto {
    /// Dimensions, outermost first.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// A dimension.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct DimensionProto {
    /// A number or a name.
    #[prost(oneof = "Dimension", tags = "1, 2")]
    pub value: Option<Dimension>,
    /// Denotation: the meaning of the axis, for users.
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
