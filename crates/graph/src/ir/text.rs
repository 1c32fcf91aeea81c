//! Text form of a graph, for people to read; it parses back to the same graph.
//!
//! ```text
//! input x: float[batch, 4]
//! param fc.weight: float[2, 4]
//! fc = Linear{"input_major":false}(x, fc.weight) -> float[batch, 2]
//! output logits = fc
//! ```

use std::fmt;
use std::str::FromStr;

use super::graph::{Graph, Kind};
use super::tensor_type::{Element, TensorType};
use super::{Builder, Op};
use crate::error::{Error, ParseError, Result};

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for value in self.values() {
            match value.kind {
                Kind::Input => writeln!(f, "input {}: {}", value.name, value.ty)?,
                Kind::Param => writeln!(f, "param {}: {}", value.name, value.ty)?,
                Kind::Node(_) => {}
            }
        }
        for node in self.nodes() {
            let output = self.value(node.output);
            let inputs = node.inputs.iter().map(|id| self.value(*id).name.as_str()).collect::<Vec<_>>().join(", ");
            writeln!(f, "{} = {}({inputs}) -> {}", output.name, node.op, output.ty)?;
        }
        for (name, id) in self.outputs() {
            writeln!(f, "output {name} = {}", self.value(*id).name)?;
        }
        Ok(())
    }
}

impl FromStr for Graph {
    type Err = Error;

    fn from_str(text: &str) -> Result<Graph> {
        let mut builder = Builder::unchecked();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if !line.is_empty() && !line.starts_with('#') {
                read(line, &mut builder).map_err(|reason| Error::graph(format!("graph text, line {}", index + 1), reason))?;
            }
        }
        builder.finish()
    }
}

fn read(line: &str, builder: &mut Builder) -> Result<(), ParseError> {
    let text = |e: Error| e.to_string();
    if let Some(rest) = line.strip_prefix("input ") {
        let (name, ty) = typed(rest)?;
        builder.input(name, ty).map_err(text)?;
    } else if let Some(rest) = line.strip_prefix("param ") {
        let (name, ty) = typed(rest)?;
        let shape: Option<Vec<usize>> = ty.shape.iter().map(super::Dim::fixed).collect();
        builder.param(name, &shape.ok_or("a parameter of unknown size")?).map_err(text)?;
    } else if let Some(rest) = line.strip_prefix("output ") {
        let (name, value) = rest.split_once(" = ").ok_or("expected `output NAME = VALUE`")?;
        let id = builder.find(value).ok_or_else(|| format!("no value `{value}`"))?;
        builder.output(name, id);
    } else {
        let (name, rest) = line.split_once(" = ").ok_or("expected `NAME = OP(INPUTS) -> TYPE`")?;
        let (call, ty) = rest.rsplit_once(" -> ").ok_or("expected ` -> TYPE`")?;
        let open = call.rfind('(').ok_or("expected `OP(INPUTS)`")?;
        let op: Op = call[..open].parse()?;
        let inputs = call[open + 1..].strip_suffix(')').ok_or("expected `)`")?;
        let find = |name: &str| builder.find(name.trim()).ok_or_else(|| format!("no value `{}`", name.trim()));
        let inputs = inputs.split(',').filter(|n| !n.trim().is_empty()).map(find).collect::<Result<Vec<_>, String>>()?;
        let id = builder.node(name, op, &inputs).map_err(text)?;
        let stated = parse_type(ty)?;
        if *builder.ty(id) != stated {
            return Err(format!("`{name}` is {}, not {stated}", builder.ty(id)).into());
        }
    }
    Ok(())
}

fn typed(text: &str) -> Result<(&str, TensorType), ParseError> {
    let (name, ty) = text.split_once(": ").ok_or("expected `NAME: TYPE`")?;
    Ok((name, parse_type(ty)?))
}

fn parse_type(text: &str) -> Result<TensorType, ParseError> {
    let (element, shape) = text.trim().split_once('[').ok_or_else(|| format!("`{text}` is not a type"))?;
    let element = match element {
        "float" => Element::Float,
        "int" => Element::Int,
        other => return Err(format!("`{other}` is neither float nor int").into()),
    };
    let shape = shape.strip_suffix(']').ok_or_else(|| format!("`{text}` is not a type"))?;
    let shape = shape.split(',').map(str::trim).filter(|d| !d.is_empty()).map(str::parse).collect::<Result<_, _>>()?;
    Ok(TensorType { element, shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let text = "input x: float[batch, 4]\nparam fc.weight: float[2, 4]\nfc = Linear{\"input_major\":false}(x, fc.weight) -> float[batch, 2]\nr = Relu(fc) -> float[batch, 2]\noutput logits = r\n";
        let graph: Graph = text.parse().unwrap();
        assert_eq!(graph.to_string(), text);
        super::super::check(&graph).unwrap();
    }

    #[test]
    fn a_wrong_graph_cannot_be_built() {
        let refused = |text: &str| text.parse::<Graph>().unwrap_err().to_string();
        assert!(refused("input x: float[batch, 4]\nparam w: float[2, 5]\nfc = Linear(x, w) -> float[batch, 2]\noutput y = fc\n").contains("line 3"));
        assert!(refused("input x: float[4]\ny = Foo(x) -> float[4]\noutput y = y\n").contains("Foo"));
        assert!(refused("input x: float[4]\n").contains("no outputs"));
        assert!(refused("input x: float[4]\ny = Relu(z) -> float[4]\n").contains("no value `z`"));
        assert!(refused("input x: float[4]\ny = Relu(x) -> float[5]\n").contains("not float[5]"));
    }
}
