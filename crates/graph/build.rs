//! Compiles the kernels for GPUs to PTX.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in ["kernels.cu", "solver.cuh"] {
        println!("cargo::rerun-if-changed=src/gpu/{file}");
    }
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    let kernels = cudaforge::KernelBuilder::new().source_files(["src/gpu/kernels.cu"]).args(["-std=c++17", "-O3"]).build_ptx()?;
    Ok(kernels.write(out.join("kernels.rs"))?)
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
