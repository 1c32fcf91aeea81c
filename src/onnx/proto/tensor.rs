//! Tensors: what elements are, and where their bytes lie.

use super::StringStringEntryProto;

/// What elements of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataType {
    /// Not said.
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
    /// Texts.
    Text = 8,
    /// Truth values.
    Bool = 9,
    /// 16-bit floats.
    Float16 = 10,
    /// 64-bit floats.
    Double = 11,
    /// Unsigned integers of 32 bits.
    Uint32 = 12,
    /// Unsigned integers of 64 bits.
    Uint64 = 13,
    /// Pairs of 32-bit floats.
    Complex64 = 14,
    /// Pairs of 64-bit floats.
    Complex128 = 15,
    /// Brain floats.
    Bfloat16 = 16,
    /// E4M3, floats of eight bits without infinities.
    Float8E4m3 = 17,
    /// E4M3 without infinities and without a negative zero.
    Float8E4m3Fnuz = 18,
    /// E5M2.
    Float8E5m2 = 19,
    /// E5M2 without infinities and without a negative zero.
    Float8E5m2Fnuz = 20,
    /// Unsigned integers of four bits, two in a byte, the first in the low half.
    Uint4 = 21,
    /// Signed integers of four bits, two in a byte, the first in the low half.
    Int4 = 22,
    /// E2M1, two in a byte.
    Float4E2m1 = 23,
    /// E8M0, powers of two.
    Float8E8m0 = 24,
    /// Unsigned integers of two bits, four in a byte.
    Uint2 = 25,
    /// Signed integers of two bits, four in a byte.
    Int2 = 26,
}

impl DataType {
    /// Bits of an element in `raw_data`; 0 where it is not said what it is, and for texts.
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

/// Where the bytes of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum DataLocation {
    /// In the message.
    Default = 0,
    /// In another file.
    External = 1,
}

/// A weight or a constant.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorProto {
    /// Sizes, outermost first.
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    /// What elements are.
    #[prost(enumeration = "DataType", optional, tag = "2")]
    pub data_type: Option<i32>,
    /// Which part of a tensor it is, where one is stored in parts: a message of two numbers.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub segment: Option<Vec<u8>>,
    /// Elements that are 32-bit floats; pairs of them for complex ones.
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    /// Elements of at most 32 bits that are no 32-bit floats, by their bits.
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    /// Texts.
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub string_data: Vec<Vec<u8>>,
    /// Elements that are 64-bit integers.
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    /// Name.
    #[prost(string, optional, tag = "8")]
    pub name: Option<String>,
    /// Elements, little-endian.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub raw_data: Option<Vec<u8>>,
    /// Elements that are 64-bit floats; pairs of them for complex ones.
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    /// Elements that are unsigned integers of 32 or 64 bits.
    #[prost(uint64, repeated, tag = "11")]
    pub uint64_data: Vec<u64>,
    /// What it is, for people.
    #[prost(string, optional, tag = "12")]
    pub doc_string: Option<String>,
    /// Where in which other file the elements are: `location`, `offset`, `length`.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// Whether they are in another file.
    #[prost(enumeration = "DataLocation", optional, tag = "14")]
    pub data_location: Option<i32>,
    /// Anything.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// The number of the tensor in the file that it was read from, while its bytes are there; never in a file.
    #[prost(uint32, optional, tag = "50000")]
    pub mark: Option<u32>,
}

/// A tensor that is mostly zero.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseTensorProto {
    /// What is not zero; its name is that of the tensor.
    #[prost(message, optional, tag = "1")]
    pub values: Option<TensorProto>,
    /// Where that stands.
    #[prost(message, optional, tag = "2")]
    pub indices: Option<TensorProto>,
    /// Sizes, outermost first.
    #[prost(int64, repeated, packed = "false", tag = "3")]
    pub dims: Vec<i64>,
}
