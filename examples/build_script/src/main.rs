//! Prints the tensors of the model that the build script has embedded.

use safetensors::{SafeTensorError, SafeTensors};

const MODEL: &[u8] = include_bytes!(env!("EMBEDDED_MODEL"));

fn main() -> Result<(), SafeTensorError> {
    let mut tensors = SafeTensors::deserialize(MODEL)?.tensors();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (name, tensor) in &tensors {
        println!("{name:20} {:4} {:12} {:>8} bytes", tensor.dtype().to_string(), format!("{:?}", tensor.shape()), tensor.data().len());
    }
    println!("{} bytes in the program", MODEL.len());
    Ok(())
}
