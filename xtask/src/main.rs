//! Tessera's commands: `cargo xtask setup`, `doctor`, `data`, `env`, `test`, `lint`, `bench`, `report`, `dist`.
//!
//! This package knows no crate of the workspace and needs no libtorch; it talks to them through cargo, through
//! `crates/datasets/data.toml` and through the command line of `tessera-bench`.

mod bench;
mod cargo;
mod compiler;
mod data;
mod dist;
mod doctor;
mod env;
mod fetch;
mod files;
mod libtorch;
mod lint;
mod peers;
mod places;
mod process;
mod setup;
mod test;
mod ui;
mod unpack;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use places::Places;

/// Tessera's commands.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Line {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Find or make libtorch, and install OpenBLAS where that needs no question.
    Setup {
        /// A libtorch that can use a GPU: 2.6 GB to fetch, 3.9 GB on the disk.
        #[arg(long)]
        cuda: bool,
        /// Use what is in the cache; fetch nothing.
        #[arg(long)]
        offline: bool,
    },
    /// Show what is there, whether it is right, and the command that mends it.
    Doctor {
        /// One JSON document instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// The data sets: list, verify or fetch them.
    Data {
        #[command(subcommand)]
        what: Option<Data>,
    },
    /// Print the exports for a project of your own: `eval "$(cargo xtask env)"`.
    Env {
        /// The shell that reads them.
        #[arg(long, value_enum, default_value = "sh")]
        shell: env::Dialect,
    },
    /// Run the tests of some crates, or of all.
    Test {
        /// Crates.
        crates: Vec<String>,
        /// Leave the documentation's examples out.
        #[arg(long)]
        no_doc: bool,
    },
    /// Check formatting, clippy, rustdoc, licences, and this workspace's own rules.
    Lint {
        /// Only this workspace's own rules (seconds).
        #[arg(long)]
        rules: bool,
    },
    /// Run the experiments and show their report.
    Bench(bench::BenchArgs),
    /// Show the report of the last run, or of those named.
    Report(bench::ReportArgs),
    /// Make a folder that runs on a GPU host which has only PyTorch.
    Dist {
        /// Only the data of this crate's experiments; at most 60 MB.
        #[arg(long, value_name = "CRATE")]
        only: Option<String>,
        /// The folder to make; `dist` in the checkout unless you name one.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
enum Data {
    /// What there is, from where, under which licence.
    List,
    /// Check every file that is there against its hash.
    Verify,
    /// Fetch sets by name, or all.
    Fetch {
        /// Names of data sets.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        names: Vec<String>,
        /// Every set whose client is here.
        #[arg(long)]
        all: bool,
        /// Use archives in the cache; fetch nothing.
        #[arg(long)]
        offline: bool,
    },
}

fn main() -> ExitCode {
    match run(Line::parse().command) {
        Ok(code) => code,
        Err(error) if error.is::<process::Interrupted>() => {
            eprintln!("{error}");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    process::catch_signals()?;
    let places = Places::from_environment()?;
    match task {
        Task::Setup { cuda, offline } => setup::run(&places, setup::Options { cuda, offline })?,
        Task::Doctor { json } => return doctor::run(&places, json),
        Task::Data { what } => match what.unwrap_or(Data::List) {
            Data::List => data::list(&places)?,
            Data::Verify => data::verify(&places)?,
            Data::Fetch { all: true, offline, .. } => data::fetch_all(&places, offline)?,
            Data::Fetch { names, offline, .. } => data::fetch_named(&places, &names, offline)?,
        },
        Task::Env { shell } => env::run(&places, shell)?,
        Task::Test { crates, no_doc } => test::run(&places, &crates, !no_doc)?,
        Task::Lint { rules } => lint::lint(&places, rules)?,
        Task::Bench(args) => return bench::bench(&places, &args),
        Task::Report(args) => bench::report(&places, &args)?,
        Task::Dist { only, out } => dist::run(&places, only.as_deref(), out.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}
