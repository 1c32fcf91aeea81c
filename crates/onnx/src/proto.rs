//! Protobuf messages of ONNX model files, as far as this crate reads and writes them.
//!
//! Field numbers are those of `onnx.proto`. It is proto2, which distinguishes absent fields from zero.

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
    /// Name of the program that wrote it.
    #[prost(string, optional, tag = "2")]
    pub producer_name: Option<String>,
    /// Its version.
    #[prost(string, optional, tag = "3")]
    pub producer_version: Option<String>,
    /// Namespace of the model.
    #[prost(string, optional, tag = "4")]
    pub domain: Option<String>,
    /// Version of the model.
    #[prost(int64, optional, tag = "5")]
    pub model_version: Option<i64>,
    /// Documentation.
    #[prost(string, optional, tag = "6")]
    pub doc_string: Option<String>,
    /// The graph.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// Imported operator sets.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Metadata.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// Training graphs.
    #[prost(message, repeated, tag = "20")]
    pub training_info: Vec<TrainingInfoProto>,
    /// Functions: operators that are defined by nodes.
    #[prost(message, repeated, tag = "25")]
    pub functions: Vec<FunctionProto>,
    /// Multi-device configuration, not decoded.
    #[prost(bytes = "vec", repeated, tag = "26")]
    pub configuration: Vec<Vec<u8>>,
}

/// An operator set.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct OperatorSetIdProto {
    /// Empty for standard operators.
    #[prost(string, optional, tag = "1")]
    pub domain: Option<String>,
    /// Its version.
    #[prost(int64, optional, tag = "2")]
    pub version: Option<i64>,
}

/// A key-value pair.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct StringStringEntryProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub key: Option<String>,
    /// Value.
    #[prost(string, optional, tag = "2")]
    pub value: Option<String>,
}

/// A graph of nodes.
#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    /// Nodes in topological order.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// Name.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// Weights and constants.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Documentation.
    #[prost(string, optional, tag = "10")]
    pub doc_string: Option<String>,
    /// Inputs.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Outputs.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Types of intermediate values.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
    /// Quantization parameters of values.
    #[prost(message, repeated, tag = "14")]
    pub quantization_annotation: Vec<TensorAnnotation>,
    /// Sparse weights and constants.
    #[prost(message, repeated, tag = "15")]
    pub sparse_initializer: Vec<SparseTensorProto>,
    /// Metadata.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// Training graphs of a model.
#[derive(Clone, PartialEq, Message)]
pub struct TrainingInfoProto {
    /// Initialization of the parameters.
    #[prost(message, optional, tag = "1")]
    pub initialization: Option<GraphProto>,
    /// A training step.
    #[prost(message, optional, tag = "2")]
    pub algorithm: Option<GraphProto>,
    /// Initializers to update, by output of `initialization`.
    #[prost(message, repeated, tag = "3")]
    pub initialization_binding: Vec<StringStringEntryProto>,
    /// Initializers to update, by output of `algorithm`.
    #[prost(message, repeated, tag = "4")]
    pub update_binding: Vec<StringStringEntryProto>,
}

/// Quantization parameters of a value.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct TensorAnnotation {
    /// Name of the value.
    #[prost(string, optional, tag = "1")]
    pub tensor_name: Option<String>,
    /// Tensor names by role, for example `SCALE_TENSOR`.
    #[prost(message, repeated, tag = "2")]
    pub quant_parameter_tensor_names: Vec<StringStringEntryProto>,
}

/// A function: an operator that is defined by nodes.
#[derive(Clone, PartialEq, Message)]
pub struct FunctionProto {
    /// Name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Input names.
    #[prost(string, repeated, tag = "4")]
    pub input: Vec<String>,
    /// Output names.
    #[prost(string, repeated, tag = "5")]
    pub output: Vec<String>,
    /// Attribute names.
    #[prost(string, repeated, tag = "6")]
    pub attribute: Vec<String>,
    /// Nodes in topological order.
    #[prost(message, repeated, tag = "7")]
    pub node: Vec<NodeProto>,
    /// Documentation.
    #[prost(string, optional, tag = "8")]
    pub doc_string: Option<String>,
    /// Imported operator sets.
    #[prost(message, repeated, tag = "9")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Domain.
    #[prost(string, optional, tag = "10")]
    pub domain: Option<String>,
    /// Attributes with default values.
    #[prost(message, repeated, tag = "11")]
    pub attribute_proto: Vec<AttributeProto>,
    /// Types of values.
    #[prost(message, repeated, tag = "12")]
    pub value_info: Vec<ValueInfoProto>,
    /// Overload id for functions with the same name.
    #[prost(string, optional, tag = "13")]
    pub overload: Option<String>,
    /// Metadata.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// A node: the application of an operator.
#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    /// Input names; empty for omitted inputs.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Output names.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// Name.
    #[prost(string, optional, tag = "3")]
    pub name: Option<String>,
    /// The operator.
    #[prost(string, optional, tag = "4")]
    pub op_type: Option<String>,
    /// Attributes.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    /// Documentation.
    #[prost(string, optional, tag = "6")]
    pub doc_string: Option<String>,
    /// Domain of the operator; empty for standard operators.
    #[prost(string, optional, tag = "7")]
    pub domain: Option<String>,
    /// Overload id of the function.
    #[prost(string, optional, tag = "8")]
    pub overload: Option<String>,
    /// Metadata.
    #[prost(message, repeated, tag = "9")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// Multi-device configuration, not decoded.
    #[prost(bytes = "vec", repeated, tag = "10")]
    pub device_configurations: Vec<Vec<u8>>,
}

/// Type of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum AttributeType {
    /// Unknown.
    Undefined = 0,
    /// A float.
    Float = 1,
    /// An integer.
    Int = 2,
    /// A byte string.
    String = 3,
    /// A tensor.
    Tensor = 4,
    /// A subgraph.
    Graph = 5,
    /// Floats.
    Floats = 6,
    /// Integers.
    Ints = 7,
    /// Byte strings.
    Strings = 8,
    /// Tensors.
    Tensors = 9,
    /// Subgraphs.
    Graphs = 10,
    /// A sparse tensor.
    SparseTensor = 11,
    /// Sparse tensors.
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
    /// A float.
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    /// An integer.
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    /// A byte string.
    #[prost(bytes = "vec", optional, tag = "4")]
    pub s: Option<Vec<u8>>,
    /// A tensor.
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    /// A subgraph, which can read values of the enclosing graphs.
    #[prost(message, optional, tag = "6")]
    pub g: Option<GraphProto>,
    /// Floats.
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    /// Integers.
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    /// Byte strings.
    #[prost(bytes = "vec", repeated, tag = "9")]
    pub strings: Vec<Vec<u8>>,
    /// Tensors.
    #[prost(message, repeated, tag = "10")]
    pub tensors: Vec<TensorProto>,
    /// Subgraphs.
    #[prost(message, repeated, tag = "11")]
    pub graphs: Vec<GraphProto>,
    /// Documentation.
    #[prost(string, optional, tag = "13")]
    pub doc_string: Option<String>,
    /// A type.
    #[prost(message, optional, tag = "14")]
    pub tp: Option<TypeProto>,
    /// Types.
    #[prost(message, repeated, tag = "15")]
    pub type_protos: Vec<TypeProto>,
    /// Its type; runtimes reject attributes without one.
    #[prost(enumeration = "AttributeType", optional, tag = "20")]
    pub r#type: Option<i32>,
    /// Name of the attribute of the enclosing function to which it refers.
    #[prost(string, optional, tag = "21")]
    pub ref_attr_name: Option<String>,
    /// A sparse tensor.
    #[prost(message, optional, tag = "22")]
    pub sparse_tensor: Option<SparseTensorProto>,
    /// Sparse tensors.
    #[prost(message, repeated, tag = "23")]
    pub sparse_tensors: Vec<SparseTensorProto>,
}

impl StringStringEntryProto {
    /// Creates a pair.
    pub fn new(key: &str, value: impl Into<String>) -> Self {
        Self { key: Some(key.to_owned()), value: Some(value.into()) }
    }
}

impl AttributeProto {
    fn with_type(name: &str, kind: AttributeType) -> Self {
        Self { name: Some(name.to_owned()), r#type: Some(kind as i32), ..Self::default() }
    }

    /// A float.
    pub fn float(name: &str, value: f64) -> Self {
        Self { f: Some(value as f32), ..Self::with_type(name, AttributeType::Float) }
    }

    /// An integer.
    pub fn int(name: &str, value: i64) -> Self {
        Self { i: Some(value), ..Self::with_type(name, AttributeType::Int) }
    }

    /// A tensor.
    pub fn tensor(name: &str, value: TensorProto) -> Self {
        Self { t: Some(value), ..Self::with_type(name, AttributeType::Tensor) }
    }

    /// Text.
    pub fn text(name: &str, value: &str) -> Self {
        Self { s: Some(value.as_bytes().to_vec()), ..Self::with_type(name, AttributeType::String) }
    }

    /// Integers.
    pub fn ints(name: &str, values: impl IntoIterator<Item = i64>) -> Self {
        Self { ints: values.into_iter().collect(), ..Self::with_type(name, AttributeType::Ints) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_matches_the_specification() {
        let attribute = AttributeProto::ints("ab", [1, 300]);
        assert_eq!(attribute.encode_to_vec(), [0x0A, 2, b'a', b'b', 0x40, 1, 0x40, 0xAC, 2, 0xA0, 1, 7]);
        let tensor =
            TensorProto { dims: vec![2], data_type: Some(DataType::Int8 as i32), name: Some("w".into()), raw_data: Some(vec![5, 6]), ..TensorProto::default() };
        assert_eq!(tensor.encode_to_vec(), [0x08, 2, 0x10, 3, 0x42, 1, b'w', 0x4A, 2, 5, 6]);
        let packed: &[u8] = &[0x0A, 1, 2, 0x10, 3, 0x42, 1, b'w', 0x4A, 2, 5, 6];
        assert_eq!(TensorProto::decode(packed).unwrap(), tensor);
    }

    #[test]
    fn zero_differs_from_absent() {
        let zero = AttributeProto::int("axis", 0).encode_to_vec();
        assert_eq!(AttributeProto::decode(zero.as_slice()).unwrap().i, Some(0));
        let dim = DimensionProto { value: Some(Dimension::DimParam("batch".into())), denotation: None };
        assert_eq!(dim.encode_to_vec(), [0x12, 5, b'b', b'a', b't', b'c', b'h']);
    }
}
