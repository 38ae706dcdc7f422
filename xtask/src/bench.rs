//! `cargo xtask bench` and `report`: builds the benchmark, fetches its data, runs it, and shows the report.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;

use crate::cargo;
use crate::data;
use crate::libtorch::Libtorch;
use crate::peers;
use crate::places::Places;
use crate::process::{capture, on_path, run_forwarding};
use crate::setup;
use crate::ui::note;

/// The status of a program that a signal or the user stopped.
const INTERRUPTED: i32 = 130;

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
}

impl BenchArgs {
    /// The same options for `tessera-bench run`.
    fn forward(&self, runs: &Path) -> Vec<String> {
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
            // A run's name means its folder; a path is left as it is.
            options.extend(run.as_ref().map(|run| match runs.join(run) {
                folder if folder.exists() => folder.display().to_string(),
                _ => run.clone(),
            }));
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
    /// Sets libtorch up and builds the programs.
    pub(crate) fn build(places: &'a Places) -> Result<Self> {
        let libtorch = setup::ensure(places)?;
        let what = "the benchmark (release; the first time takes minutes)";
        let programs = cargo::build(places, what, &["--release", "--package=benches", "--bins"])?;
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
        let output = self
            .command(&["list", "--json"])
            .stderr(Stdio::inherit())
            .output()
            .context("tessera-bench can't be started")?;
        if !output.status.success() {
            bail!("`tessera-bench list --json` failed ({})", output.status);
        }
        serde_json::from_slice(&output.stdout).context("`tessera-bench list --json` printed what can't be read")
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
}

impl Experiment {
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
    let benchmark = Benchmark::build(places)?;
    let experiments = benchmark.experiments()?;
    let known = |name: &String| experiments.iter().any(|one| one.is_meant_by(name));
    let mut options = args.forward(&places.runs());
    // An unknown name is left to the benchmark, which suggests the nearest one; nothing is fetched for it.
    if args.names.iter().all(known) {
        data::fetch_if_possible(places, Some(&data_needed(&experiments, &args.names)))?;
        if args.peers {
            let python = peers::python(places)?;
            options.extend(["--peer-python".to_owned(), python.display().to_string()]);
        }
    }
    let began = SystemTime::now();
    let mut command = benchmark.command(&["run"]);
    command.args(&options);
    let status = run_forwarding(&mut command)?;
    let run = latest_run(places);
    match status.code() {
        Some(0) => {}
        Some(INTERRUPTED) | None => {
            if let Some(run) = run.filter(|run| run.changed >= began) {
                note(format!(
                    "stopped; every finished result is kept in {}\ngo on with: cargo xtask bench --resume {}",
                    run.folder.display(),
                    run.name()
                ));
            }
            return Ok(ExitCode::from(INTERRUPTED as u8));
        }
        Some(code) => return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
    }
    let run = run.with_context(|| format!("there is no run in {}", places.runs().display()))?;
    benchmark.report(std::slice::from_ref(&run.folder), false)?;
    let page = run.folder.join("report.html");
    println!("report: {}", page.display());
    if args.open {
        open(places, &page);
    }
    Ok(ExitCode::SUCCESS)
}

/// `cargo xtask report`.
pub(crate) fn report(places: &Places, args: &ReportArgs) -> Result<()> {
    let runs = chosen_runs(places, &args.runs)?;
    let benchmark = Benchmark::build(places)?;
    benchmark.report(&runs, args.snapshot)?;
    // Where several runs are merged, the report lies in the first.
    let page = runs[0].join("report.html");
    println!("report: {}", page.display());
    if args.open {
        open(places, &page);
    }
    Ok(())
}

fn chosen_runs(places: &Places, names: &[String]) -> Result<Vec<PathBuf>> {
    if names.is_empty() {
        let run = latest_run(places).with_context(|| {
            format!("there is no run in {}; `cargo xtask bench` makes one", places.runs().display())
        })?;
        return Ok(vec![run.folder]);
    }
    let found = names.iter().map(|name| {
        let below = places.runs().join(name);
        let folder = if below.exists() { below } else { PathBuf::from(name) };
        if !folder.join("results.jsonl").exists() {
            bail!(
                "{name} is no run: neither {} nor the path itself holds a results.jsonl",
                places.runs().join(name).display()
            );
        }
        Ok(std::path::absolute(folder)?)
    });
    found.collect()
}

/// A run on the disk.
struct Run {
    folder: PathBuf,
    changed: SystemTime,
}

impl Run {
    fn name(&self) -> String {
        let name = self.folder.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// The run whose results changed last.
fn latest_run(places: &Places) -> Option<Run> {
    let runs = fs::read_dir(places.runs()).ok()?.flatten().filter_map(|entry| {
        let folder = entry.path();
        let results = ["results.jsonl", "meta.json"].map(|name| folder.join(name));
        let changed = results.iter().filter_map(|file| fs::metadata(file).ok()?.modified().ok()).max()?;
        Some(Run { folder, changed })
    });
    runs.max_by_key(|run| run.changed)
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
        Line::try_parse_from(words).unwrap().bench.forward(Path::new("/no-runs"))
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

    #[test]
    fn the_latest_run_is_the_one_whose_results_changed_last() {
        let root = tempfile::tempdir().unwrap();
        let places = Places { root: root.path().to_path_buf(), cache: root.path().join("cache") };
        assert!(latest_run(&places).is_none());
        for (name, age) in [("a", 10), ("b", 5), ("c", 20)] {
            let folder = places.runs().join(name);
            fs::create_dir_all(&folder).unwrap();
            let file = fs::File::create(folder.join("results.jsonl")).unwrap();
            let then = SystemTime::now() - std::time::Duration::from_secs(age);
            file.set_modified(then).unwrap();
        }
        assert_eq!(latest_run(&places).unwrap().name(), "b");
        assert_eq!(chosen_runs(&places, &["c".into()]).unwrap()[0], places.runs().join("c"));
        let error = chosen_runs(&places, &["d".into()]).unwrap_err().to_string();
        assert!(error.contains("d is no run"), "{error}");
    }
}
