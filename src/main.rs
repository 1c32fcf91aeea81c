//! The `compress` binary; see [`compress::cli`].

fn main() -> std::process::ExitCode {
    compress::cli::main()
}
