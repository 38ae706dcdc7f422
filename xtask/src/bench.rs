//! `cargo xtask bench` and `report`: builds the benchmark, fetches its data, runs it, and shows the report.

mod runs;

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;

use crate::cargo;
use crate::data;
use crate::files::Temporary;
use crate::libtorch::Libtorch;
use crate::peers;
use crate::places::Places;
use crate::process::{Interrupted, Stream, capture, interrupted, on_path, run_forwarding, watch};
use crate::setup;
use crate::ui::note;
use runs::{Run, chosen_runs};

/// The status of a benchmark that the user stopped.
const INTERRUPTED: u8 = 130;
/// The status of a benchmark some of whose runs failed; the others are kept.
const SOME_FAILED: i32 = 1;
/// Names a file into which the benchmark writes the folder of its run.
const RUN_FILE: &str = "TESSERA_RUN_FILE";

/// Options of `bench`.
// One field for each option of the command line.
#[allow(clippy::struct_excessive_bools, clippy::option_option)]
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Crates or experiments; all when none is named.
    names: Vec<String>,
    /// Real data, fewest seeds, seconds a method (the default).
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// The seeds and arms that the specifications describe.
    #[arg(long)]
    full: bool,
    /// Another number of seeds.
    #[arg(long, value_name = "N")]
    seeds: Option<u32>,
    /// Where to compute: `cpu`, `cuda:0`, `auto`.
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// Threads for libtorch.
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Also run the Python and C++ peers, in a virtual environment of their own (some GB, made once).
    #[arg(long)]
    peers: bool,
    /// The part of the work that this machine does, for example `1/4`.
    #[arg(long, value_name = "I/N")]
    shard: Option<String>,
    /// Go on with a run: the one named, or the last one.
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    resume: Option<Option<String>>,
    /// Open the report in a browser.
    #[arg(long)]
    open: bool,
    /// List the experiments, and run none.
    #[arg(long)]
    list: bool,
}

impl BenchArgs {
    /// The run to go on with, if there is such a one.
    fn resumed(&self, places: &Places) -> Option<Run> {
        match self.resume.as_ref()? {
            Some(name) => Run::find(places, name),
            None => Run::latest(places),
        }
    }

    /// The same options for `tessera-bench run`.
    fn forward(&self, resumed: Option<&Run>) -> Vec<String> {
        let mut options = self.names.clone();
        let flags = [("--quick", self.quick), ("--full", self.full)];
        options.extend(flags.iter().filter(|(_, on)| *on).map(|(name, _)| (*name).to_owned()));
        let mut with = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                options.extend([name.to_owned(), value]);
            }
        };
        with("--seeds", self.seeds.map(|n| n.to_string()));
        with("--device", self.device.clone());
        with("--threads", self.threads.map(|n| n.to_string()));
        with("--shard", self.shard.clone());
        if let Some(run) = &self.resume {
            options.push("--resume".to_owned());
            // What can't be found is left to the benchmark, which says so.
            let folder = resumed.map(|run| run.folder.display().to_string());
            options.extend(folder.or_else(|| run.clone()));
        }
        options
    }
}

/// Options of `report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Names or folders of runs; the last run when none is named. Several are merged.
    runs: Vec<String>,
    /// Open the report in a browser.
    #[arg(long)]
    open: bool,
    /// Take these full runs into the committed results (docs/results) and into the table of the README.
    #[arg(long)]
    snapshot: bool,
}

/// The built benchmark with what it needs to be loaded.
pub(crate) struct Benchmark<'a> {
    places: &'a Places,
    libtorch: Libtorch,
    /// The program `tessera-bench`.
    pub program: PathBuf,
    /// The program `probe`.
    pub probe: PathBuf,
}

impl<'a> Benchmark<'a> {
    /// Sets libtorch up and builds the programs; with the Rust peers, if those are to be measured.
    pub(crate) fn build(places: &'a Places, peers: bool) -> Result<Self> {
        let libtorch = setup::ensure(places)?;
        let what = "the benchmark (release; the first time takes minutes)";
        let mut options = vec!["--release", "--package=benches", "--bins"];
        if peers {
            options.push("--features=benches/candle");
        }
        let programs = cargo::build(places, what, &options)?;
        let program = |name: &str| {
            programs.get(name).cloned().with_context(|| format!("the package benches has no program named {name}"))
        };
        Ok(Self { places, libtorch, program: program("tessera-bench")?, probe: program("probe")? })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.places.command(&self.program);
        load_path(&mut command, self.places, &self.libtorch);
        command.args(arguments);
        command
    }

    /// Its experiments.
    pub(crate) fn experiments(&self) -> Result<Vec<Experiment>> {
        let mut json = String::new();
        let finished = watch(&mut self.command(&["list", "--json"]), |lines| {
            for (stream, line) in lines {
                match stream {
                    Stream::Out => json.extend([line, "\n"]),
                    Stream::Err => note(line),
                }
            }
        })?;
        if !finished.status.success() {
            bail!("`tessera-bench list --json` failed ({})", finished.status);
        }
        serde_json::from_str(&json).context("`tessera-bench list --json` printed what can't be read")
    }

    /// Prints them.
    fn list(&self) -> Result<()> {
        let status = run_forwarding(&mut self.command(&["list"]))?;
        if !status.success() {
            bail!("`tessera-bench list` failed ({status})");
        }
        Ok(())
    }

    fn report(&self, runs: &[PathBuf], snapshot: bool) -> Result<()> {
        let mut command = self.command(&["report"]);
        command.args(runs);
        if snapshot {
            command.arg("--snapshot");
        }
        let status = run_forwarding(&mut command)?;
        if !status.success() {
            bail!("`tessera-bench report` failed ({status})");
        }
        Ok(())
    }
}

/// Puts libtorch on the loader's path of a program.
pub(crate) fn load_path(command: &mut Command, places: &Places, libtorch: &Libtorch) {
    let mut path = libtorch.lib().into_os_string();
    if let Some(rest) = places.loader_path() {
        path.push(":");
        path.push(rest);
    }
    command.env("LD_LIBRARY_PATH", path);
}

/// One line of `tessera-bench list --json`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Experiment {
    /// Its name.
    pub name: String,
    /// The crate whose claim it tests.
    #[serde(rename = "crate", alias = "krate")]
    pub package: String,
    /// The data sets that it needs.
    #[serde(default, alias = "data_sets", alias = "datasets", alias = "sets")]
    pub data: Vec<String>,
    /// `peers` for one that needs the peers' Python.
    #[serde(default)]
    pub kind: String,
}

impl Experiment {
    fn is_of_peers(&self) -> bool {
        self.kind == "peers"
    }

    fn is_meant_by(&self, name: &str) -> bool {
        self.name == name || self.package == name
    }
}

/// The data sets of the chosen experiments, each once.
pub(crate) fn data_needed(experiments: &[Experiment], names: &[String]) -> Vec<String> {
    let chosen = experiments.iter().filter(|one| names.is_empty() || names.iter().any(|name| one.is_meant_by(name)));
    let sets: BTreeSet<&String> = chosen.flat_map(|one| &one.data).collect();
    sets.into_iter().cloned().collect()
}

/// `cargo xtask bench`.
pub(crate) fn bench(places: &Places, args: &BenchArgs) -> Result<ExitCode> {
    let benchmark = Benchmark::build(places, args.peers)?;
    if args.list {
        benchmark.list()?;
        return Ok(ExitCode::SUCCESS);
    }
    let experiments = benchmark.experiments()?;
    let resumed = args.resumed(places);
    let asked = resumed.as_ref().map(Run::asked).unwrap_or_default();
    let names = if resumed.is_some() { &asked.names } else { &args.names };
    let by_name = experiments.iter().any(|one| one.is_of_peers() && names.contains(&one.name));
    let peers = args.peers || asked.peers || by_name;

    let mut options = args.forward(resumed.as_ref());
    let known = |name: &String| experiments.iter().any(|one| one.is_meant_by(name));
    // An unknown name or run is left to the benchmark, which suggests the nearest one; nothing is fetched for it.
    let startable = args.resume.is_none() || resumed.is_some();
    if startable && names.iter().all(known) {
        data::fetch_if_possible(places, Some(&data_needed(&experiments, names)))?;
        if peers {
            options.extend(peers_options(places, by_name)?);
        }
    }

    let began = SystemTime::now();
    let room = Temporary::beside(&places.runs())?;
    let run_file = room.path().join("run");
    let mut command = benchmark.command(&["run"]);
    command.args(&options).env(RUN_FILE, &run_file);
    let status = run_forwarding(&mut command)?;
    // A benchmark that names no run may not have begun one.
    let run = Run::named_in(places, &run_file)
        .or_else(|| Run::latest(places).filter(|run| status.success() || run.changed >= began));

    match ending(status, interrupted()) {
        Ending::Exit(code @ (0 | SOME_FAILED)) => {
            let Some(run) = run else {
                anyhow::ensure!(code == SOME_FAILED, "there is no run in {}", places.runs().display());
                return Ok(ExitCode::FAILURE);
            };
            show_report(places, &benchmark, std::slice::from_ref(&run.folder), false, args.open)?;
            Ok(if code == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Ending::Exit(code) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
        Ending::Interrupted => {
            say_how_to_go_on(places, run.as_ref(), peers);
            Ok(ExitCode::from(INTERRUPTED))
        }
        Ending::Killed(signal) => {
            let cause = if signal == 9 { ". A system that runs out of memory ends programs so" } else { "" };
            note(format!("error: the benchmark was ended from outside ({status}){cause}"));
            say_how_to_go_on(places, run.as_ref(), peers);
            Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)))
        }
    }
}

/// How a benchmark ended.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    /// By itself, with that status.
    Exit(i32),
    /// Because the user asked for it.
    Interrupted,
    /// By a signal that did not come through us.
    Killed(i32),
}

fn ending(status: ExitStatus, asked: bool) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) if code == i32::from(INTERRUPTED) => Ending::Interrupted,
        (Some(code), _) => Ending::Exit(code),
        (None, Some(signal @ (2 | 9 | 15))) if !asked => Ending::Killed(signal),
        // The signals that we pass on.
        (None, Some(2 | 9 | 15)) => Ending::Interrupted,
        (None, signal) => Ending::Killed(signal.unwrap_or_default()),
    }
}

fn say_how_to_go_on(places: &Places, run: Option<&Run>, peers: bool) {
    if let Some(run) = run {
        note(format!(
            "stopped; every finished result is kept in {}\ngo on with: cargo xtask bench --resume {}{}",
            run.folder.display(),
            run.name(places),
            if peers { " --peers" } else { "" }
        ));
    }
}

/// The option that brings the peers' Python. Without it the other experiments still run, so a failure stops nothing
/// unless an experiment of the peers was asked for by its name.
fn peers_options(places: &Places, by_name: bool) -> Result<Vec<String>> {
    match peers::python(places) {
        Ok(python) => Ok(vec!["--peer-python".to_owned(), python.display().to_string()]),
        Err(error) if by_name || error.is::<Interrupted>() => Err(error),
        Err(error) => {
            note(format!("the peers are left out: {error:#}"));
            Ok(Vec::new())
        }
    }
}

/// Makes the report of the runs; where several are merged, it lies in the first.
fn show_report(
    places: &Places,
    benchmark: &Benchmark,
    runs: &[PathBuf],
    snapshot: bool,
    in_browser: bool,
) -> Result<()> {
    benchmark.report(runs, snapshot)?;
    let page = runs[0].join("report.html");
    println!("report: {}", page.display());
    if in_browser {
        open(places, &page);
    }
    Ok(())
}

/// `cargo xtask report`.
pub(crate) fn report(places: &Places, args: &ReportArgs) -> Result<()> {
    let runs = chosen_runs(places, &args.runs)?;
    let benchmark = Benchmark::build(places, false)?;
    show_report(places, &benchmark, &runs, args.snapshot, args.open)
}

fn open(places: &Places, page: &Path) {
    let program = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    if !on_path(program) || capture(places.command(program).arg(page)).is_none() {
        note(format!("no browser could be started; open {} in one", page.display()));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn forwarded(words: &[&str]) -> Vec<String> {
        let words = std::iter::once(&"bench").chain(words);
        Line::try_parse_from(words).unwrap().bench.forward(None)
    }

    #[test]
    fn options_reach_the_benchmark_as_they_were_given() {
        assert_eq!(
            forwarded(&["sam-opt", "--full", "--seeds", "3", "--shard", "1/4", "--device", "cpu"]),
            ["sam-opt", "--full", "--seeds", "3", "--device", "cpu", "--shard", "1/4"]
        );
        assert_eq!(forwarded(&["--resume"]), ["--resume"]);
        assert_eq!(forwarded(&["--resume", "r1"]), ["--resume", "r1"]);
        assert!(forwarded(&["--peers", "--open"]).is_empty());
    }

    #[test]
    fn only_what_we_passed_on_counts_as_an_interrupt() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        let signal = ExitStatus::from_raw;
        for asked in [false, true] {
            assert_eq!(ending(exit(0), asked), Ending::Exit(0));
            assert_eq!(ending(exit(130), asked), Ending::Interrupted);
            assert_eq!(ending(signal(11), asked), Ending::Killed(11));
        }
        for ours in [2, 9, 15] {
            assert_eq!(ending(signal(ours), false), Ending::Killed(ours));
            assert_eq!(ending(signal(ours), true), Ending::Interrupted);
        }
    }

    #[test]
    fn only_the_data_of_the_chosen_experiments_is_needed() {
        let list = r#"[
            {"name": "rotated-mnist", "crate": "sam-opt", "data": ["mnist-10k"], "title": "x"},
            {"name": "handwriting-3", "crate": "sam-opt", "data": ["mfeat", "mnist-10k"]},
            {"name": "other", "crate": "qat", "data": ["fashion-mnist"]}
        ]"#;
        let list: Vec<Experiment> = serde_json::from_str(list).unwrap();
        let needed = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            data_needed(&list, &names)
        };
        assert_eq!(needed(&["sam-opt"]), ["mfeat", "mnist-10k"]);
        assert_eq!(needed(&["other"]), ["fashion-mnist"]);
        assert_eq!(needed(&[]).len(), 3);
    }
}
