//! Crosses seeds with arms, writes results at once, continues where it was stopped.

use crate::experiment::{Body, Context, Experiment, Interrupted, Outcomes, select};
use crate::record::{Meta, Provenance, Record, Results, Skipped, measure, now};
use crate::spec::Mode;
use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::{BTreeSet, HashSet};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Name of the results file in a run's folder.
pub const RESULTS: &str = "results.jsonl";
/// Name of the file that says what was asked.
pub const META: &str = "meta.json";

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What to run.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Crates or experiments; empty for all.
    pub names: Vec<String>,
    /// How much.
    pub mode: Mode,
    /// Seeds in place of the experiments' own number.
    pub seeds: Option<u64>,
    /// Device string.
    pub device: String,
    /// Threads; 0 for all cores.
    pub threads: usize,
    /// Include the peers' experiments.
    pub peers: bool,
    /// Python of the peers.
    pub peer_python: Option<PathBuf>,
    /// `(i, n)`: only the seeds of shard `i` of `n`, from 1.
    pub shard: Option<(u64, u64)>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Everything ran.
    Done,
    /// Everything ran, but this many runs failed.
    Failed(usize),
    /// Ctrl-C; `--resume` continues.
    Interrupted,
}

/// Starts a new run in a new folder below `root`; returns the folder and how it ended.
///
/// # Errors
/// Unknown names or devices, a folder that can't be written, a full disk.
pub fn start(root: &Path, request: &Request) -> Result<(PathBuf, Ending)> {
    // What can be refused is refused before a folder is left behind.
    select(&request.names, request.mode, request.peers)?;
    tensor::device::parse(&request.device)?;
    let time = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(now()));
    let mut name = format!("{}-{}", time.to_string().trim_end_matches('Z').replace(':', "-"), request.mode.name());
    if let Some((i, n)) = request.shard {
        name = format!("{name}-shard{i}of{n}");
    }
    let folder = (0..100)
        .map(|i| root.join(if i == 0 { name.clone() } else { format!("{name}.{i}") }))
        .find(|folder| !folder.exists())
        .context("there are a hundred runs of this second already")?;
    std::fs::create_dir_all(&folder).with_context(|| format!("{} can't be made", folder.display()))?;
    let meta = Meta {
        mode: request.mode,
        names: request.names.clone(),
        seeds: request.seeds,
        peers: request.peers,
        device: request.device.clone(),
        shard: request.shard,
        threads: if request.threads == 0 { tensor::threads::available() } else { request.threads },
        started: now(),
        skipped: Vec::new(),
    };
    write_meta(&folder, &meta)?;
    let ending = go(&folder, meta, request.peer_python.clone())?;
    Ok((folder, ending))
}

/// Continues the run in `folder`: what it asked for and what is missing.
///
/// # Errors
/// As [`start`]; when the folder holds no run.
pub fn resume(folder: &Path, peer_python: Option<PathBuf>) -> Result<Ending> {
    let meta = read_meta(folder)?;
    go(folder, meta, peer_python)
}

/// The newest run below `root`.
///
/// # Errors
/// When there is none.
pub fn latest(root: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    entries.map(|e| e.path()).filter(|p| p.join(META).exists()).max().with_context(|| {
        format!("There is no benchmark run in {}: start one with `cargo xtask bench`.", root.display())
    })
}

/// Reads what a run was asked to do.
///
/// # Errors
/// When the folder holds no run.
pub fn read_meta(folder: &Path) -> Result<Meta> {
    let path = folder.join(META);
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{} holds no benchmark run ({META} is missing)", folder.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
}

fn write_meta(folder: &Path, meta: &Meta) -> Result<()> {
    let path = folder.join(META);
    let partial = folder.join("meta.partial");
    std::fs::write(&partial, serde_json::to_string_pretty(meta)?)
        .and_then(|()| std::fs::rename(&partial, &path))
        .with_context(|| format!("{} can't be written", path.display()))
}

/// One thing to run: an arm, or all arms together.
struct Unit<'a> {
    experiment: &'a Experiment,
    arm: Option<&'a str>,
    seed: u64,
}

impl<'a> Unit<'a> {
    /// The arms whose records it writes.
    fn arms(&self) -> impl Iterator<Item = &'a str> {
        let all = self.experiment.spec.arms.iter().map(|arm| arm.name.as_str());
        let only = self.arm;
        all.filter(move |arm| only.is_none_or(|one| one == *arm))
    }
}

fn go(folder: &Path, mut meta: Meta, peer_python: Option<PathBuf>) -> Result<Ending> {
    let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed));
    let device = tensor::device::parse(&meta.device)?;
    // The pool of rayon takes its size here; libtorch's number is set again for each experiment.
    tensor::threads::set(meta.threads)?;
    let here = Provenance::here(meta.threads, &format!("{device:?}"));
    let (mut results, found) = Results::open(&folder.join(RESULTS))?;
    let done: HashSet<(String, String, u64)> = found.iter().filter(|r| r.error.is_none()).map(Record::key).collect();

    announce(folder)?;
    let experiments = select(&meta.names, meta.mode, meta.peers)?;
    let (ready, skipped) = split_by_data(experiments)?;
    for skip in &skipped {
        println!("Skipped {}: {}", skip.experiment, skip.reason);
    }
    if meta.skipped != skipped {
        meta.skipped = skipped;
        write_meta(folder, &meta)?;
    }
    let units = plan(&ready, &meta, &done);
    let seconds: f64 = units
        .iter()
        .map(|u| match u.arm {
            Some(_) => u.experiment.spec.seconds(meta.mode) / u.experiment.spec.arms.len() as f64,
            None => u.experiment.spec.seconds(meta.mode),
        })
        .sum();
    println!(
        "{} runs to do{}, about {} on two cores. Results go to {}.",
        units.len(),
        if done.is_empty() { String::new() } else { format!(" ({} are done)", done.len()) },
        humantime::format_duration(Duration::from_secs(seconds.ceil() as u64)),
        folder.display()
    );
    let mut context =
        Context { mode: meta.mode, device, threads: meta.threads, peer_python, interrupted: &INTERRUPTED };
    let bar = ProgressBar::new(units.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (left {eta}) {msg}")?);
    let mut failures = 0;
    let mut spoken = Instant::now();
    for unit in units {
        bar.set_message(format!("{} {} seed {}", unit.experiment.spec.name, unit.arm.unwrap_or(""), unit.seed));
        context.threads = match unit.experiment.spec.threads {
            0 => meta.threads,
            own => own,
        };
        tensor::threads::set(context.threads)?;
        let provenance = Provenance { threads: context.threads, ..here.clone() };
        let Some(records) = perform(&context, &unit, &provenance) else {
            bar.abandon();
            return Ok(Ending::Interrupted);
        };
        if let Some(message) = records.iter().find_map(|r| r.error.as_deref()) {
            say(&bar, &format!("{} failed: {message}", unit.experiment.spec.name));
            failures += 1;
        }
        results.append(&records)?;
        bar.inc(1);
        if bar.is_hidden() && spoken.elapsed() > Duration::from_secs(10) {
            spoken = Instant::now();
            eprintln!("{} of {} runs done", bar.position(), bar.length().unwrap_or(0));
        }
        if INTERRUPTED.load(Ordering::Relaxed) {
            bar.abandon();
            return Ok(Ending::Interrupted);
        }
    }
    bar.finish_and_clear();
    Ok(if failures == 0 { Ending::Done } else { Ending::Failed(failures) })
}

/// Prints a line above the bar, also where there is no terminal and so no bar.
fn say(bar: &ProgressBar, line: &str) {
    if bar.is_hidden() { eprintln!("{line}") } else { bar.println(line) }
}

/// Tells who started this process where the results are: the file that `TESSERA_RUN_FILE` names.
fn announce(folder: &Path) -> Result<()> {
    let Some(file) = std::env::var_os("TESSERA_RUN_FILE") else { return Ok(()) };
    let path = std::path::absolute(folder)?;
    std::fs::write(&file, path.as_os_str().as_encoded_bytes())
        .with_context(|| format!("{} (TESSERA_RUN_FILE) can't be written", Path::new(&file).display()))
}

/// Runs a unit and makes its records, also of what went wrong. None after Ctrl-C.
fn perform(context: &Context, unit: &Unit<'_>, provenance: &Provenance) -> Option<Vec<Record>> {
    let (outcomes, cost) = measure(|| caught(|| execute(context, unit)));
    let outcomes = match outcomes {
        Ok(outcomes) => outcomes.into_iter().map(|(arm, outcome)| (arm, Ok(outcome))).collect::<Vec<_>>(),
        Err(error) if error.is::<Interrupted>() => return None,
        Err(error) => {
            // Together they ran, together they failed.
            let message = format!("{error:#}");
            unit.arms().map(|arm| (arm.to_owned(), Err(anyhow::anyhow!(message.clone())))).collect()
        }
    };
    // An interleaved run can't tell what each arm cost: every arm gets its share.
    let share = cost.shared_by(outcomes.len());
    let name = unit.experiment.spec.name.as_str();
    let record = |(arm, outcome): (String, Result<_>)| {
        Record::new((name, &arm, unit.seed), context.mode, outcome, share, provenance)
    };
    Some(outcomes.into_iter().map(record).collect())
}

fn execute(context: &Context, unit: &Unit<'_>) -> Result<Outcomes> {
    match (unit.experiment.body, unit.arm) {
        (Body::PerArm(run), Some(arm)) => Ok(vec![(arm.to_owned(), run(context, arm, unit.seed)?)]),
        (Body::Together(run), _) => {
            let outcomes = run(context, unit.seed)?;
            let came: BTreeSet<&str> = outcomes.iter().map(|(arm, _)| arm.as_str()).collect();
            let expected: BTreeSet<&str> = unit.arms().collect();
            if came != expected || outcomes.len() != expected.len() {
                let came: Vec<&str> = outcomes.iter().map(|(arm, _)| arm.as_str()).collect();
                bail!(
                    "The experiment \"{}\" reported the arms {came:?}, but its description has {expected:?}: its body \
                     must return each of them once.",
                    unit.experiment.spec.name
                );
            }
            Ok(outcomes)
        }
        (Body::PerArm(_), None) => bail!("an experiment by arms was planned without an arm"),
    }
}

/// Makes an error of a panic, so that one broken run doesn't take the others along. Libtorch's objects and the
/// guards of parameters are put in order by their drops; nothing else outlives a run.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        Err(anyhow::anyhow!("It panicked: {}", text.unwrap_or("without a message")))
    })
}

/// Seeds outside, arms inside: a run that is stopped has whole seeds for the paired comparison.
fn plan<'a>(experiments: &'a [Experiment], meta: &Meta, done: &HashSet<(String, String, u64)>) -> Vec<Unit<'a>> {
    let mut units = Vec::new();
    for experiment in experiments {
        let spec = &experiment.spec;
        let mine = |seed: u64| meta.shard.is_none_or(|(i, n)| seed % n == i - 1);
        for seed in (0..meta.seeds.unwrap_or(spec.default_seeds(meta.mode))).filter(|&s| mine(s)) {
            let finished = |arm: &str| done.contains(&(spec.name.clone(), arm.to_owned(), seed));
            match experiment.body {
                Body::PerArm(_) => {
                    let open = spec.arms.iter().filter(|arm| !finished(&arm.name));
                    units.extend(open.map(|arm| Unit { experiment, arm: Some(&arm.name), seed }));
                }
                Body::Together(_) => {
                    // A group that a kill left incomplete is run again as a whole: its arms are interleaved.
                    if !spec.arms.iter().all(|arm| finished(&arm.name)) {
                        units.push(Unit { experiment, arm: None, seed });
                    }
                }
            }
        }
    }
    units
}

/// Experiments whose data sets are in the cache, and the others with the reason.
fn split_by_data(experiments: Vec<Experiment>) -> Result<(Vec<Experiment>, Vec<Skipped>)> {
    let (mut ready, mut skipped) = (Vec::new(), Vec::new());
    for experiment in experiments {
        let mut missing = Vec::new();
        for set in &experiment.spec.data {
            if !datasets::cache::is_present(set)? {
                missing.push(set.as_str());
            }
        }
        if missing.is_empty() {
            ready.push(experiment);
        } else {
            let sets = missing.join(" ");
            let reason =
                format!("the data set {sets} isn't in the cache; fetch it with `cargo xtask data fetch {sets}`.");
            skipped.push(Skipped { experiment: experiment.spec.name, reason });
        }
    }
    Ok((ready, skipped))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::all;

    fn meta(shard: Option<(u64, u64)>) -> Meta {
        Meta {
            mode: Mode::Full,
            names: vec![],
            seeds: Some(6),
            peers: false,
            device: "cpu".into(),
            shard,
            threads: 1,
            started: 0,
            skipped: vec![],
        }
    }

    fn keys(units: &[Unit<'_>]) -> Vec<(String, String, u64)> {
        units.iter().map(|u| (u.experiment.spec.name.clone(), u.arm.unwrap_or("").to_owned(), u.seed)).collect()
    }

    #[test]
    fn shards_partition_the_plan() {
        let all = all();
        let whole = keys(&plan(&all, &meta(None), &HashSet::new()));
        let mut parts: Vec<_> = (1..=3).flat_map(|i| keys(&plan(&all, &meta(Some((i, 3))), &HashSet::new()))).collect();
        parts.sort();
        let mut sorted = whole.clone();
        sorted.sort();
        assert_eq!(parts, sorted);
        assert!(!whole.is_empty());
    }

    #[test]
    fn what_is_done_is_not_planned_again() {
        let all = all();
        let whole = keys(&plan(&all, &meta(None), &HashSet::new()));
        let first = whole[0].clone();
        let rest = keys(&plan(&all, &meta(None), &HashSet::from([first.clone()])));
        assert_eq!(rest.len(), whole.len() - 1);
        assert!(!rest.contains(&first));
    }

    fn together(body: fn(&Context, u64) -> Result<Outcomes>) -> Experiment {
        let mut experiment = all().into_iter().find(|e| matches!(e.body, Body::Together(_))).unwrap();
        experiment.body = Body::Together(body);
        experiment
    }

    #[test]
    fn a_group_is_done_only_when_all_its_arms_are() {
        let experiments = [together(|_, _| Ok(vec![]))];
        let spec = &experiments[0].spec;
        let mut done: HashSet<_> = spec.arms.iter().map(|arm| (spec.name.clone(), arm.name.clone(), 0)).collect();
        let seeds = |done: &HashSet<_>| -> Vec<u64> {
            plan(&experiments, &meta(None), done).iter().map(|unit| unit.seed).collect()
        };
        assert_eq!(seeds(&done), [1, 2, 3, 4, 5]);
        done.remove(&(spec.name.clone(), spec.arms[1].name.clone(), 0));
        assert_eq!(seeds(&done), [0, 1, 2, 3, 4, 5]);
    }

    fn context() -> Context {
        static NEVER: AtomicBool = AtomicBool::new(false);
        let device = tensor::tch::Device::Cpu;
        Context { mode: Mode::Quick, device, threads: 1, peer_python: None, interrupted: &NEVER }
    }

    #[test]
    fn a_group_that_leaves_an_arm_out_is_a_failure() {
        let experiment = together(|_, _| Ok(vec![("sgd small".into(), crate::experiment::Outcome::default())]));
        let unit = Unit { experiment: &experiment, arm: None, seed: 0 };
        let message = execute(&context(), &unit).unwrap_err().to_string();
        assert!(message.contains("[\"sgd small\"]") && message.contains("sam-cost"), "{message}");
    }

    #[test]
    fn a_panic_is_recorded_as_a_failure_of_every_arm_with_its_message() {
        for (experiment, expected) in [
            (together(|_, seed| panic!("no batch {seed}")), "It panicked: no batch 7"),
            (together(|_, _| panic!("plain words")), "It panicked: plain words"),
        ] {
            let unit = Unit { experiment: &experiment, arm: None, seed: 7 };
            let records = perform(&context(), &unit, &Provenance::default()).unwrap();
            assert_eq!(records.len(), experiment.spec.arms.len());
            assert!(records.iter().all(|r| r.error.as_deref() == Some(expected)), "{records:?}");
        }
    }

    #[test]
    fn what_is_interrupted_leaves_no_record() {
        let experiment = together(|_, _| Err(Interrupted.into()));
        let unit = Unit { experiment: &experiment, arm: None, seed: 0 };
        assert_eq!(perform(&context(), &unit, &Provenance::default()), None);
    }

    #[test]
    fn a_refused_request_leaves_no_folder_behind() {
        let root = tempfile::tempdir().unwrap();
        for request in [
            Request { device: "gpu7".into(), ..Request::default() },
            Request { device: "cpu".into(), names: vec!["nothing".into()], ..Request::default() },
        ] {
            assert!(start(root.path(), &request).is_err(), "{request:?}");
            assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "{request:?}");
        }
    }
}
