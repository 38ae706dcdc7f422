//! The benchmark: see `tessera-bench --help`.

fn main() -> std::process::ExitCode {
    benches::cli::main()
}
