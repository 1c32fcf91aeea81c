//! The messages of ONNX that a model file consists of, as far as this crate writes and reads them.
//!
//! Field numbers are those of `onnx.proto`, which is proto2: what is absent and what is zero differ.

use prost::Message;

/// A model file.
#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    /// Version of the file format.
    #[prost(int64, optional, tag = "1")]
    pub ir_version: Option<i64>,
    /// The program that wrote it.
    #[prost(string, optional, tag = "2")]
    pub producer_name: Option<String>,
    /// Its version.
    #[prost(string, optional, tag = "3")]
    pub producer_version: Option<String>,
    /// What it is, for people.
    #[prost(string, optional, tag = "6")]
    pub doc_string: Option<String>,
    /// The graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// The sets of operators that it uses.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Where it comes from.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// A set of operators.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct OperatorSetIdProto {
    /// Empty for ONNX's own.
    #[prost(string, optional, tag = "1")]
    pub domain: Option<String>,
    /// Its version.
    #[prost(int64, optional, tag = "2")]
    pub version: Option<i64>,
}

/// A pair of texts.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct StringStringEntryProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub key: Option<String>,
    /// Value.
    #[prost(string, optional, tag = "2")]
    pub value: Option<String>,
}

/// Nodes and the tensors between them.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    /// In an order in which they can run.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// Name.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// Weights and constants.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Given for each run.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Results.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Types of values in between.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
}

/// One operator at work.
#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    /// Names of what it reads; empty for what is left out.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Names of what it computes.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// Name.
    #[prost(string, optional, tag = "3")]
    pub name: Option<String>,
    /// The operator.
    #[prost(string, optional, tag = "4")]
    pub op_type: Option<String>,
    /// How it works.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    /// The set that the operator is from; empty for ONNX's own.
    #[prost(string, optional, tag = "7")]
    pub domain: Option<String>,
}

/// What an attribute is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum AttributeType {
    /// Not said.
    Undefined = 0,
    /// A number.
    Float = 1,
    /// A whole number.
    Int = 2,
    /// Bytes.
    String = 3,
    /// Numbers.
    Floats = 6,
    /// Whole numbers.
    Ints = 7,
}

/// An attribute of a node.
#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// A number.
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    /// A whole number.
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    /// Bytes.
    #[prost(bytes = "vec", optional, tag = "4")]
    pub s: Option<Vec<u8>>,
    /// Numbers.
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    /// Whole numbers.
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    /// Which of the above it is; runtimes refuse attributes that do not say.
    #[prost(enumeration = "AttributeType", optional, tag = "20")]
    pub r#type: Option<i32>,
}

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
    /// 32-bit integers.
    Int32 = 6,
    /// 64-bit integers.
    Int64 = 7,
    /// References values.
    Bool = 9,
    /// 16-bit floats.
    Float16 = 10,
    /// 64-bit floats.
    Double = 11,
    /// E4M3, floats of eight bits without infinities.
    Float8E4m3 = 17,
    /// Unsigned integers of four bits, two in a byte, the first in the low half.
    Uint4 = 21,
    /// Signed integers of four bits, two in a byte, the first in the low half.
    Int4 = 22,
}

impl DataType {
    /// Bits of an element in `raw_data`; 0 where it is not said what it is.
    pub fn bits(self) -> u64 {
        match self {
            DataType::Undefined => 0,
            DataType::Int4 | DataType::Uint4 => 4,
            DataType::Uint8 | DataType::Int8 | DataType::Bool | DataType::Float8E4m3 => 8,
            DataType::Float16 => 16,
            DataType::Float | DataType::Int32 => 32,
            DataType::Int64 | DataType::Double => 64,
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
#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    /// Sizes, outermost first.
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    /// What elements are.
    #[prost(enumeration = "DataType", optional, tag = "2")]
    pub data_type: Option<i32>,
    /// Name.
    #[prost(string, optional, tag = "8")]
    pub name: Option<String>,
    /// Elements, little-endian.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub raw_data: Option<Vec<u8>>,
    /// Where in which other file the elements are: `location`, `offset`, `length`.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// Whether they are in another file.
    #[prost(enumeration = "DataLocation", optional, tag = "14")]
    pub data_location: Option<i32>,
}

/// A value and its type.
#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
}

/// The type of a value; of all that there are, tensors.
#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    /// Of a tensor.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

/// The type of a tensor.
#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    /// What elements are.
    #[prost(enumeration = "DataType", optional, tag = "1")]
    pub elem_type: Option<i32>,
    /// Sizes.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// Sizes of a tensor.
#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    /// Outermost first.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// One size.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct DimensionProto {
    /// A number or a name.
    #[prost(oneof = "Dimension", tags = "1, 2")]
    pub value: Option<Dimension>,
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

impl StringStringEntryProto {
    /// A pair.
    pub fn new(key: &str, value: impl Into<String>) -> Self {
        Self { key: Some(key.to_owned()), value: Some(value.into()) }
    }
}

impl AttributeProto {
    fn of(name: &str, kind: AttributeType) -> Self {
        Self { name: Some(name.to_owned()), r#type: Some(kind as i32), ..Self::default() }
    }

    /// A number.
    pub fn float(name: &str, value: f64) -> Self {
        Self { f: Some(value as f32), ..Self::of(name, AttributeType::Float) }
    }

    /// A whole number.
    pub fn int(name: &str, value: i64) -> Self {
        Self { i: Some(value), ..Self::of(name, AttributeType::Int) }
    }

    /// Text.
    pub fn text(name: &str, value: &str) -> Self {
        Self { s: Some(value.as_bytes().to_vec()), ..Self::of(name, AttributeType::String) }
    }

    /// Whole numbers.
    pub fn ints(name: &str, values: impl IntoIterator<Item = i64>) -> Self {
        Self { ints: values.into_iter().collect(), ..Self::of(name, AttributeType::Ints) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_format() {
        let attribute = AttributeProto::ints("ab", [1, 300]);
        assert_eq!(attribute.encode_to_vec(), [0x0A, 2, b'a', b'b', 0x40, 1, 0x40, 0xAC, 2, 0xA0, 1, 7]);
        let tensor =
            TensorProto { dims: vec![2], data_type: Some(DataType::Int8 as i32), name: Some("w".into()), raw_data: Some(vec![5, 6]), ..TensorProto::default() };
        assert_eq!(tensor.encode_to_vec(), [0x08, 2, 0x10, 3, 0x42, 1, b'w', 0x4A, 2, 5, 6]);
        let packed: &[u8] = &[0x0A, 1, 2, 0x10, 3, 0x42, 1, b'w', 0x4A, 2, 5, 6];
        assert_eq!(TensorProto::decode(packed).unwrap(), tensor);
    }

    #[test]
    fn zero_is_not_absent() {
        let zero = AttributeProto::int("axis", 0).encode_to_vec();
        assert_eq!(AttributeProto::decode(zero.as_slice()).unwrap().i, Some(0));
        let dim = DimensionProto { value: Some(Dimension::DimParam("batch".into())) };
        assert_eq!(dim.encode_to_vec(), [0x12, 5, b'b', b'a', b't', b'c', b'h']);
    }
}
