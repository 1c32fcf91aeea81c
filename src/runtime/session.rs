//! A model in ONNX Runtime.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use ort::session::SessionInputValue;
use ort::value::{DynValue, Outlet, Tensor as OrtTensor, TensorElementType, ValueType};

use super::find::environment;
use crate::error::{Error, Result};
use crate::ir::{self, Element, Port};

/// How a model is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Threads of one operator.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 1 }
    }
}

/// A loaded model.
#[derive(Debug)]
pub struct Session {
    path: PathBuf,
    inner: ort::session::Session,
}

impl Session {
    /// Loads a model file.
    ///
    /// # Errors
    /// There is no ONNX Runtime, or it refuses the model.
    pub fn open(path: &Path, options: Options) -> Result<Session> {
        if !path.is_file() {
            let hint = "ONNX Runtime runs exported models: write one with `--export onnx`, or leave out `--runtime onnxruntime`";
            return Err(Error::run(path.display(), "no such file", hint));
        }
        let refused = |e: ort::Error| Error::malformed(path, format!("ONNX Runtime refuses the model: {e}"));
        let builder = ort::session::Session::builder(environment()?).map_err(refused)?;
        let mut builder = builder.with_intra_threads(options.threads).map_err(|e| refused(e.into()))?;
        let inner = builder.commit_from_file(path).map_err(refused)?;
        Ok(Session { path: path.to_owned(), inner })
    }

    /// What the model takes, and what it gives; ports that are no tensors of numbers are left out.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        let ports = |outlets: &[Outlet]| outlets.iter().filter_map(port).collect();
        (ports(self.inner.inputs()), ports(self.inner.outputs()))
    }

    /// Names of the inputs.
    pub fn inputs(&self) -> Vec<String> {
        self.inner.inputs().iter().map(|input| input.name().to_owned()).collect()
    }

    /// Runs the model; integer inputs as 64-bit integers, all others as 32-bit floats.
    ///
    /// # Errors
    /// An input is missing or does not fit; the runtime fails.
    pub fn run(&mut self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        let path = self.path.clone();
        let failed = |e: &dyn std::fmt::Display| Error::malformed(&path, format!("ONNX Runtime: {e}"));
        let mut given: Vec<(String, SessionInputValue)> = Vec::new();
        for name in self.inputs() {
            let missing = || Error::option("input", format!("`{name}` is missing, {} takes it", path.display()));
            let tensor = ir::given(inputs, &name).ok_or_else(missing)?.map_err(|e| failed(&e))?;
            given.push((name, value(&tensor).map_err(|e| failed(&e))?.into()));
        }
        let outputs = self.inner.run(given).map_err(|e| failed(&e))?;
        let mut results = BTreeMap::new();
        for (name, value) in outputs.iter() {
            let tensor = if let Ok((shape, values)) = value.try_extract_tensor::<f32>() {
                Tensor::from_slice(values, sizes(shape), &Device::Cpu)
            } else if let Ok((shape, values)) = value.try_extract_tensor::<i64>() {
                Tensor::from_slice(values, sizes(shape), &Device::Cpu)
            } else {
                // Answers are floats; what else a model of other origin tells is passed over.
                continue;
            };
            results.insert(name.to_owned(), tensor.map_err(|e| failed(&e))?);
        }
        Ok(results)
    }
}

fn sizes(shape: &[i64]) -> Vec<usize> {
    shape.iter().map(|size| *size as usize).collect()
}

fn port(outlet: &Outlet) -> Option<Port> {
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else { return None };
    let element = match ty {
        TensorElementType::Float32 | TensorElementType::Float16 | TensorElementType::Float64 | TensorElementType::Bfloat16 => Element::Float,
        TensorElementType::Int64 | TensorElementType::Int32 => Element::Int,
        _ => return None,
    };
    Some(Port { name: outlet.name().to_owned(), element, shape: shape.iter().map(|size| usize::try_from(*size).ok()).collect() })
}

fn value(tensor: &Tensor) -> std::result::Result<DynValue, Box<dyn std::error::Error>> {
    let shape: Vec<i64> = tensor.dims().iter().map(|d| *d as i64).collect();
    let flat = tensor.flatten_all()?;
    Ok(if tensor.dtype().is_float() {
        OrtTensor::from_array((shape, flat.to_dtype(DType::F32)?.to_vec1::<f32>()?))?.into_dyn()
    } else {
        OrtTensor::from_array((shape, flat.to_dtype(DType::I64)?.to_vec1::<i64>()?))?.into_dyn()
    })
}
