//! The command line of `tessera-bench`.

use crate::analysis::{Analysis, analyse};
use crate::experiment::{Context, all, select};
use crate::record::{Meta, Record, parse};
use crate::report;
use crate::run::{self, Ending, META, RESULTS, Request};
use crate::spec::{Mode, Spec};
use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

/// Runs Tessera's experiments and reports what they show.
#[derive(Debug, Parser)]
#[command(name = "tessera-bench", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs experiments; each result is written at once.
    Run(RunArgs),
    /// Writes report.html and report.md and prints the tables; several folders are merged.
    Report {
        /// Folders of runs; by default the latest below --root.
        folders: Vec<PathBuf>,
        /// Folder for the report; by default the first run's.
        #[arg(long)]
        out: Option<PathBuf>,
        /// Folder that holds the runs.
        #[arg(long, default_value = "target/bench")]
        root: PathBuf,
        /// The folder of the committed results, which quick runs are shown beside.
        #[arg(long, default_value = "docs/results")]
        committed: PathBuf,
        /// Takes these full runs into the committed results and into the README's table.
        #[arg(long)]
        snapshot: bool,
        /// The README with the table.
        #[arg(long, default_value = "README.md")]
        readme: PathBuf,
    },
    /// Lists the experiments.
    List {
        /// As JSON: name, crate, data sets.
        #[arg(long)]
        json: bool,
    },
    /// Searches hyper-parameters on source validation and writes benches/tuned/EXPERIMENT.json.
    Tune {
        /// The experiment.
        experiment: String,
        /// The file to write.
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Crates or experiments; all by default.
    names: Vec<String>,
    /// The protocols with the fewest seeds (default).
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// The protocols as their specifications describe them.
    #[arg(long)]
    full: bool,
    /// Number of seeds in place of the experiments' own.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// cpu, cuda:0, or auto.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Only seeds of shard I of N (I/N, I from 1).
    #[arg(long, value_parser = shard)]
    shard: Option<(u64, u64)>,
    /// Continues a run as it was asked for: its folder, or "latest" (the default). Only --root and --peer-python,
    /// which belong to the machine, can be given anew.
    #[arg(
        long,
        num_args = 0..=1,
        default_missing_value = "latest",
        value_name = "RUN",
        conflicts_with_all = ["names", "quick", "full", "seeds", "device", "shard", "threads"]
    )]
    resume: Option<PathBuf>,
    /// Folder that holds the runs.
    #[arg(long, alias = "out", default_value = "target/bench")]
    root: PathBuf,
    /// Threads for libtorch and rayon; all cores by default.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Python with the peers installed; runs the peers' experiments too.
    #[arg(long)]
    peer_python: Option<PathBuf>,
}

fn shard(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    match parts {
        Some((i, n)) if (1..=n).contains(&i) => Ok((i, n)),
        _ => Err(format!("\"{text}\" isn't I/N with I from 1 to N, for example 1/3")),
    }
}

/// Runs a command line; the exit code is 0 when it ended well, 1 when runs failed, 2 for bad arguments, 130
/// after Ctrl-C.
pub fn main() -> ExitCode {
    match execute(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn execute(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Run(args) => start_or_resume(args),
        Command::Report { folders, out, root, committed, snapshot, readme } => {
            let folders = if folders.is_empty() { vec![run::latest(&root)?] } else { folders };
            if snapshot {
                let (metas, records) = read(&folders)?;
                let old = (run::read_meta(&committed).ok(), read_records(&committed.join(RESULTS))?);
                crate::snapshot::write(&committed, &readme, &metas, &records, old)?;
            }
            write_report(&folders, out.as_deref(), &committed)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::List { json } => {
            list(json)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Tune { experiment, out } => {
            static NEVER: AtomicBool = AtomicBool::new(false);
            let device = tensor::device::parse("cpu")?;
            let threads = tensor::threads::set(1)?.requested;
            let context = Context { mode: Mode::Full, device, threads, peer_python: None, interrupted: &NEVER };
            let text = crate::experiments::sam_opt::tune::tune(&context, &experiment)?;
            std::fs::write(&out, text).with_context(|| format!("{} can't be written", out.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn start_or_resume(args: RunArgs) -> Result<ExitCode> {
    let (folder, ending) = if let Some(folder) = args.resume {
        let folder = if folder == Path::new("latest") { run::latest(&args.root)? } else { folder };
        let ending = run::resume(&folder, args.peer_python)?;
        (folder, ending)
    } else {
        let request = Request {
            names: args.names,
            mode: if args.full { Mode::Full } else { Mode::Quick },
            seeds: args.seeds,
            device: args.device,
            threads: args.threads,
            peers: args.peer_python.is_some(),
            peer_python: args.peer_python,
            shard: args.shard,
        };
        run::start(&args.root, &request)?
    };
    Ok(match ending {
        Ending::Done => {
            println!("The run is in {}.", folder.display());
            ExitCode::SUCCESS
        }
        Ending::Failed(n) => {
            println!("{n} runs failed; the others are in {}. --resume tries the failed ones again.", folder.display());
            ExitCode::from(1)
        }
        Ending::Interrupted => {
            println!("Interrupted; what is done is kept. Continue with --resume {}", folder.display());
            ExitCode::from(130)
        }
    })
}

/// The records and descriptions of some run folders.
fn read(folders: &[PathBuf]) -> Result<(Vec<Meta>, Vec<Record>)> {
    let mut metas = Vec::new();
    let mut records = Vec::new();
    for folder in folders {
        metas.push(run::read_meta(folder)?);
        records.extend(read_records(&folder.join(RESULTS))?);
    }
    if let Some(other) = metas.iter().find(|m| m.mode != metas[0].mode) {
        bail!("A {} and a {} run can't be merged.", metas[0].mode.name(), other.mode.name());
    }
    Ok((metas, records))
}

fn read_records(path: &Path) -> Result<Vec<Record>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(parse(&bytes).with_context(|| format!("{} is damaged", path.display()))?.0),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("{} can't be read", path.display())),
    }
}

/// The analysis of the committed full run, if there is one.
fn committed_analysis(folder: &Path) -> Result<Option<Analysis>> {
    let records = read_records(&folder.join(RESULTS))?;
    if records.is_empty() || !folder.join(META).exists() {
        return Ok(None);
    }
    Ok(Some(analyse(&all(), &[run::read_meta(folder)?], &records)))
}

fn write_report(folders: &[PathBuf], out: Option<&Path>, committed: &Path) -> Result<()> {
    let (metas, records) = read(folders)?;
    let analysis = analyse(&all(), &metas, &records);
    let beside = committed_analysis(committed)?;
    let out = out.unwrap_or(&folders[0]);
    std::fs::create_dir_all(out).with_context(|| format!("{} can't be made", out.display()))?;
    for (name, text) in
        [("report.html", report::html(&analysis, beside.as_ref())), ("report.md", report::markdown(&analysis))]
    {
        let path = out.join(name);
        std::fs::write(&path, text).with_context(|| format!("{} can't be written", path.display()))?;
    }
    print!("{}", report::terminal(&analysis, beside.as_ref()));
    println!("Report: {}", out.join("report.html").display());
    Ok(())
}

fn list(json: bool) -> Result<()> {
    let specs: Vec<_> = select(&[], Mode::Full, true)?.into_iter().map(|e| e.spec).collect();
    let text = if json {
        let row = |s: &Spec| serde_json::json!({ "name": s.name, "crate": s.krate, "title": s.title, "kind": s.kind, "data": s.data });
        serde_json::to_string_pretty(&specs.iter().map(row).collect::<Vec<_>>())? + "\n"
    } else {
        let data = |s: &Spec| if s.data.is_empty() { "none".to_owned() } else { s.data.join(", ") };
        let row = |s: &Spec| format!("{:<16} {:<10} {} (data: {})\n", s.name, s.krate, s.title, data(s));
        specs.iter().map(row).collect::<Vec<_>>().concat()
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_refuses_what_it_would_ignore_and_takes_what_belongs_to_the_machine() {
        let parses = |options: &[&str]| Cli::try_parse_from(["tessera-bench", "run"].iter().chain(options)).is_ok();
        for options in [
            &["handwriting3", "--resume"][..],
            &["--resume", "latest", "handwriting3"],
            &["--resume", "--full"],
            &["--resume", "--quick"],
            &["--resume", "--threads", "2"],
            &["--resume", "--device", "cpu"],
            &["--resume", "--seeds", "3"],
            &["--resume", "--shard", "1/2"],
        ] {
            assert!(!parses(options), "{options:?}");
        }
        for options in [
            &["--resume"][..],
            &["--resume", "some/run"],
            &["--resume", "--peer-python", "python"],
            &["--resume", "some/run", "--peer-python", "python", "--root", "runs"],
            &["handwriting3", "--full", "--seeds", "3", "--threads", "1", "--device", "cpu", "--shard", "1/2"],
        ] {
            assert!(parses(options), "{options:?}");
        }
    }
}
