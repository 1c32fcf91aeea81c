//! Tensors: element types and storage.

use super::StringStringEntryProto;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataType {
    /// Unknown.
    Undefined = 0,
    /// 32-bit floats.
    Float = 1,
    /// Unsigned bytes.
    Uint8 = 2,
    /// Signed bytes.
    Int8 = 3,
    /// Unsigned integers of 16 bits.
    Uint16 = 4,
    /// Signed integers of 16 bits.
    Int16 = 5,
    /// 32-bit integers.
    Int32 = 6,
    /// 64-bit integers.
    Int64 = 7,
    /// Strings.
    Text = 8,
    /// Booleans.
    Bool = 9,
    /// 16-bit floats.
    Float16 = 10,
    /// 64-bit floats.
    Double = 11,
    /// Unsigned integers of 32 bits.
    Uint32 = 12,
    /// Unsigned integers of 64 bits.
    Uint64 = 13,
    /// Complex numbers of two 32-bit floats.
    Complex64 = 14,
    /// Complex numbers of two 64-bit floats.
    Complex128 = 15,
    /// bfloat16.
    Bfloat16 = 16,
    /// FP8 E4M3 without infinities.
    Float8E4m3 = 17,
    /// FP8 E4M3 without infinities and negative zero.
    Float8E4m3Fnuz = 18,
    /// FP8 E5M2.
    Float8E5m2 = 19,
    /// FP8 E5M2 without infinities and negative zero.
    Float8E5m2Fnuz = 20,
    /// Unsigned integers of four bits, two in a byte, the first in the low half.
    Uint4 = 21,
    /// Signed integers of four bits, two in a byte, the first in the low half.
    Int4 = 22,
    /// FP4 E2M1, two in a byte.
    Float4E2m1 = 23,
    /// E8M0: powers of two.
    Float8E8m0 = 24,
    /// Unsigned integers of two bits, four in a byte.
    Uint2 = 25,
    /// Signed integers of two bits, four in a byte.
    Int2 = 26,
}

impl DataType {
    /// Size of an element in `raw_data` in bits; 0 for strings and unknown types.
    pub fn bits(self) -> u64 {
        match self {
            DataType::Undefined | DataType::Text => 0,
            DataType::Uint2 | DataType::Int2 => 2,
            DataType::Int4 | DataType::Uint4 | DataType::Float4E2m1 => 4,
            DataType::Uint8 | DataType::Int8 | DataType::Bool => 8,
            DataType::Float8E4m3 | DataType::Float8E4m3Fnuz | DataType::Float8E5m2 | DataType::Float8E5m2Fnuz | DataType::Float8E8m0 => 8,
            DataType::Uint16 | DataType::Int16 | DataType::Float16 | DataType::Bfloat16 => 16,
            DataType::Float | DataType::Int32 | DataType::Uint32 => 32,
            DataType::Int64 | DataType::Uint64 | DataType::Double | DataType::Complex64 => 64,
            DataType::Complex128 => 128,
        }
    }
}

/// Storage location of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataLocation {
    /// In the message.
    Default = 0,
    /// In an external data file.
    External = 1,
}

/// A weight or a constant.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorProto {
    /// Shape, outermost axis first.
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    /// Element type.
    #[prost(enumeration = "DataType", optional, tag = "2")]
    pub data_type: Option<i32>,
    /// Segment of a tensor that is stored in parts: a message of two integers, not decoded.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub segment: Option<Vec<u8>>,
    /// 32-bit float elements; pairs of them for complex numbers.
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    /// Elements of at most 32 bits of other types, by bit pattern.
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    /// Strings.
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub string_data: Vec<Vec<u8>>,
    /// 64-bit integer elements.
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    /// Name.
    #[prost(string, optional, tag = "8")]
    pub name: Option<String>,
    /// Little-endian elements of any type.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub raw_data: Option<Vec<u8>>,
    /// 64-bit float elements; pairs of them for complex numbers.
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    /// Unsigned 32-bit or 64-bit integer elements.
    #[prost(uint64, repeated, tag = "11")]
    pub uint64_data: Vec<u64>,
    /// Documentation.
    #[prost(string, optional, tag = "12")]
    pub doc_string: Option<String>,
    /// External data: `location`, `offset`, `length`.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// Storage location of the elements.
    #[prost(enumeration = "DataLocation", optional, tag = "14")]
    pub data_location: Option<i32>,
    /// Metadata.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// The number of the tensor in the file that was read. Never present in files.
    #[prost(uint32, optional, tag = "50000")]
    pub mark: Option<u32>,
}

/// A sparse tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseTensorProto {
    /// The non-zero elements. Their name is that of the tensor.
    #[prost(message, optional, tag = "1")]
    pub values: Option<TensorProto>,
    /// Their indices.
    #[prost(message, optional, tag = "2")]
    pub indices: Option<TensorProto>,
    /// Shape, outermost axis first.
    #[prost(int64, repeated, packed = "false", tag = "3")]
    pub dims: Vec<i64>,
}
