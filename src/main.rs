//! The binary; everything is in [`compress::cli`].

fn main() -> std::process::ExitCode {
    compress::cli::main()
}
