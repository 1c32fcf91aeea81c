//! Values of 32 bits in files with 16-bit floats. Integer layers compute with 32-bit floats, and runtimes do
//! not fuse layers with quantizers across casts, so that nodes between quantizers read the values before the
//! casts.

use std::collections::BTreeSet;

use super::check::reads;
use super::lowering::Lowering;
use super::proto::{AttributeProto, DataType};

/// Operators between integer layers that runtimes fuse with them or compute with integers, and the numbers of
/// their float inputs. They compute in 32 bits if all of these inputs do, because runtimes do not fuse across
/// casts.
const BETWEEN_INTEGERS: [(&str, usize); 9] =
    [("Add", 2), ("Clip", 1), ("Flatten", 1), ("GlobalAveragePool", 1), ("MaxPool", 1), ("Relu", 1), ("Reshape", 1), ("Sum", 2), ("Transpose", 1)];

impl Lowering<'_> {
    /// The 32-bit inputs of an operator between integer layers.
    pub fn wide_operands(&self, op: &str, inputs: &[&str]) -> Option<Vec<String>> {
        let (_, floats) = BETWEEN_INTEGERS.iter().find(|(name, _)| *name == op)?;
        let operand = |(at, name): (usize, &&str)| if at < *floats { self.wide_values.get(*name).cloned() } else { Some((*name).to_owned()) };
        inputs.iter().enumerate().map(operand).collect()
    }

    /// Whether a 16-bit value was cast from a 32-bit value that later nodes can read.
    pub fn is_wide(&self, x: &str) -> bool {
        self.wide_values.contains_key(x)
    }

    /// The name of a value in 32 bits, if it has one.
    pub fn wide_name<'n>(&'n self, x: &'n str) -> &'n str {
        self.wide_values.get(x).map_or(x, String::as_str)
    }

    /// Adds a cast of a 32-bit value to 16 bits.
    pub fn add_narrow(&mut self, name: String, wide: String, output: String) {
        self.add_node("Cast", name, &[&wide], vec![output.clone()], vec![AttributeProto::int("to", DataType::Float16 as i64)]);
        if self.keeps_wide {
            self.wide_values.insert(output, wide);
        }
    }

    /// Removes casts to 16 bits whose results no node reads.
    pub fn remove_unread_casts(&mut self, outputs: &BTreeSet<&str>) {
        let read: BTreeSet<String> = self.nodes.iter().flat_map(reads).map(str::to_owned).collect();
        let wide_values = &self.wide_values;
        let is_unread = |name: &String| wide_values.contains_key(name) && !read.contains(name) && !outputs.contains(name.as_str());
        self.nodes.retain(|node| node.op_type() != "Cast" || !node.output.iter().all(is_unread));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::file::{LARGEST, MODEL, decode, layout};
    use super::super::proto::NodeProto;
    use super::super::{Precision, Style, draft};
    use crate::ir::Graph;
    use crate::runtime::{Options, Session};
    use crate::store::{ActivationScheme, Codes, DType, Granularity, QuantizationSpec};

    /// Between quantizers, a file of 16-bit floats has the operators of one of 32 bits.
    #[test]
    fn no_casts_are_between_quantizers() {
        let (round, image) = ("FakeQuantize{\"scale\":0.1,\"zero_point\":0}", "float[batch, 4, 6, 6]");
        let conv = "Conv{\"stride\":1,\"padding\":1,\"dilation\":1,\"groups\":1}";
        let text = format!(
            "input x: {image}\nparam v: float[4, 4, 3, 3]\nparam w: float[4, 4, 3, 3]\nq = {round}(x) -> {image}\na = {conv}(q, v) -> {image}\n\
            b = Clip{{\"min\":0.0,\"max\":6.0}}(a) -> {image}\nr = {round}(b) -> {image}\nc = {conv}(r, w) -> {image}\ns = Add(c, r) -> {image}\n\
            t = {round}(s) -> {image}\nu = Tanh(t) -> {image}\noutput y = u\n"
        );
        let graph: Graph = text.parse().unwrap();
        let spec = QuantizationSpec {
            codes: Codes::INT8,
            granularity: Granularity::Channel,
            symmetric: true,
            scale_dtype: DType::F32,
            activations: ActivationScheme::None,
        };
        let written = [Precision::Float32, Precision::Float16].map(|precision| {
            let style = Style { precision, integers: ["v", "w"].map(|name| (name.to_owned(), spec.clone())).into(), ..Style::default() };
            decode(&layout(&draft(&graph, &style, &BTreeMap::new()).unwrap(), LARGEST).unwrap()[0].1).unwrap()
        });
        let [single, half] = written.each_ref().map(|model| model.graph.as_ref().unwrap().node.iter().map(NodeProto::op_type).collect::<Vec<_>>());
        let casts = half.iter().filter(|op| **op == "Cast").count();
        assert_eq!(half.iter().filter(|op| **op != "Cast").collect::<Vec<_>>(), single.iter().collect::<Vec<_>>());
        // Before the hyperbolic tangent, and at the output.
        assert_eq!((casts, half.iter().rev().take(3).copied().collect::<Vec<_>>()), (2, vec!["Cast", "Tanh", "Cast"]));
        if compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            Session::from_model(&written[1], std::path::Path::new(MODEL), Options::default()).unwrap();
        }
    }
}
