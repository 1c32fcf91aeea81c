//! The messages of ONNX that a model file consists of, as far as this crate writes and reads them.
//!
//! Field numbers are those of `onnx.proto`, which is proto2: what is absent and what is zero differ.

mod tensor;
mod types;

use prost::Message;

pub use tensor::{DataLocation, DataType, SparseTensorProto, TensorProto};
pub use types::{Dimension, DimensionProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto};

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
    /// Whose model it is.
    #[prost(string, optional, tag = "4")]
    pub domain: Option<String>,
    /// Which of several.
    #[prost(int64, optional, tag = "5")]
    pub model_version: Option<i64>,
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
    /// How it is trained.
    #[prost(message, repeated, tag = "20")]
    pub training_info: Vec<TrainingInfoProto>,
    /// Operators that are made of others.
    #[prost(message, repeated, tag = "25")]
    pub functions: Vec<FunctionProto>,
    /// How it is spread over devices, as it stands in the file.
    #[prost(bytes = "vec", repeated, tag = "26")]
    pub configuration: Vec<Vec<u8>>,
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
    /// What it is, for people.
    #[prost(string, optional, tag = "10")]
    pub doc_string: Option<String>,
    /// Given for each run.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Results.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Types of values in between.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
    /// Which tensors quantize which values.
    #[prost(message, repeated, tag = "14")]
    pub quantization_annotation: Vec<TensorAnnotation>,
    /// Weights and constants that are mostly zero.
    #[prost(message, repeated, tag = "15")]
    pub sparse_initializer: Vec<SparseTensorProto>,
    /// Anything.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// How a model is trained.
#[derive(Clone, PartialEq, Message)]
pub struct TrainingInfoProto {
    /// What is computed first.
    #[prost(message, optional, tag = "1")]
    pub initialization: Option<GraphProto>,
    /// A step.
    #[prost(message, optional, tag = "2")]
    pub algorithm: Option<GraphProto>,
    /// Initializers by the value of the first graph that they become.
    #[prost(message, repeated, tag = "3")]
    pub initialization_binding: Vec<StringStringEntryProto>,
    /// Initializers by the value of a step that they become.
    #[prost(message, repeated, tag = "4")]
    pub update_binding: Vec<StringStringEntryProto>,
}

/// Which tensors quantize a value.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct TensorAnnotation {
    /// Name of the value.
    #[prost(string, optional, tag = "1")]
    pub tensor_name: Option<String>,
    /// Names of tensors by what they are.
    #[prost(message, repeated, tag = "2")]
    pub quant_parameter_tensor_names: Vec<StringStringEntryProto>,
}

/// An operator that is made of others.
#[derive(Clone, PartialEq, Message)]
pub struct FunctionProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Names of what it reads.
    #[prost(string, repeated, tag = "4")]
    pub input: Vec<String>,
    /// Names of what it computes.
    #[prost(string, repeated, tag = "5")]
    pub output: Vec<String>,
    /// Names of its attributes.
    #[prost(string, repeated, tag = "6")]
    pub attribute: Vec<String>,
    /// In an order in which they can run.
    #[prost(message, repeated, tag = "7")]
    pub node: Vec<NodeProto>,
    /// What it is, for people.
    #[prost(string, optional, tag = "8")]
    pub doc_string: Option<String>,
    /// The sets of operators that it uses.
    #[prost(message, repeated, tag = "9")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// The set that it belongs to.
    #[prost(string, optional, tag = "10")]
    pub domain: Option<String>,
    /// Attributes that have a value where none is given.
    #[prost(message, repeated, tag = "11")]
    pub attribute_proto: Vec<AttributeProto>,
    /// Types of values.
    #[prost(message, repeated, tag = "12")]
    pub value_info: Vec<ValueInfoProto>,
    /// Which of several of one name.
    #[prost(string, optional, tag = "13")]
    pub overload: Option<String>,
    /// Anything.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
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
    /// What it is, for people.
    #[prost(string, optional, tag = "6")]
    pub doc_string: Option<String>,
    /// The set that the operator is from; empty for ONNX's own.
    #[prost(string, optional, tag = "7")]
    pub domain: Option<String>,
    /// Which function of several of one name.
    #[prost(string, optional, tag = "8")]
    pub overload: Option<String>,
    /// Anything.
    #[prost(message, repeated, tag = "9")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// How it is spread over devices, as it stands in the file.
    #[prost(bytes = "vec", repeated, tag = "10")]
    pub device_configurations: Vec<Vec<u8>>,
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
    /// A tensor.
    Tensor = 4,
    /// A body.
    Graph = 5,
    /// Numbers.
    Floats = 6,
    /// Whole numbers.
    Ints = 7,
    /// Several times bytes.
    Strings = 8,
    /// Tensors.
    Tensors = 9,
    /// Bodies.
    Graphs = 10,
    /// A tensor that is mostly zero.
    SparseTensor = 11,
    /// Such tensors.
    SparseTensors = 12,
    /// A type.
    TypeProto = 13,
    /// Types.
    TypeProtos = 14,
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
    /// A tensor.
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    /// A body, which reads values of the graphs around it by name.
    #[prost(message, optional, tag = "6")]
    pub g: Option<GraphProto>,
    /// Numbers.
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    /// Whole numbers.
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    /// Several times bytes.
    #[prost(bytes = "vec", repeated, tag = "9")]
    pub strings: Vec<Vec<u8>>,
    /// Tensors.
    #[prost(message, repeated, tag = "10")]
    pub tensors: Vec<TensorProto>,
    /// Bodies.
    #[prost(message, repeated, tag = "11")]
    pub graphs: Vec<GraphProto>,
    /// What it is, for people.
    #[prost(string, optional, tag = "13")]
    pub doc_string: Option<String>,
    /// A type.
    #[prost(message, optional, tag = "14")]
    pub tp: Option<TypeProto>,
    /// Types.
    #[prost(message, repeated, tag = "15")]
    pub type_protos: Vec<TypeProto>,
    /// Which of the others it is; runtimes refuse attributes that do not say.
    #[prost(enumeration = "AttributeType", optional, tag = "20")]
    pub r#type: Option<i32>,
    /// The attribute of the function around it that it stands for.
    #[prost(string, optional, tag = "21")]
    pub ref_attr_name: Option<String>,
    /// A tensor that is mostly zero.
    #[prost(message, optional, tag = "22")]
    pub sparse_tensor: Option<SparseTensorProto>,
    /// Such tensors.
    #[prost(message, repeated, tag = "23")]
    pub sparse_tensors: Vec<SparseTensorProto>,
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

    /// A tensor.
    pub fn tensor(name: &str, value: TensorProto) -> Self {
        Self { t: Some(value), ..Self::of(name, AttributeType::Tensor) }
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
        let dim = DimensionProto { value: Some(Dimension::DimParam("batch".into())), denotation: None };
        assert_eq!(dim.encode_to_vec(), [0x12, 5, b'b', b'a', b't', b'c', b'h']);
    }
}
