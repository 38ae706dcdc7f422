//! One JSON line a run, written at once.

use crate::experiment::Outcome;
use crate::spec::Mode;
use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Where and with what a run was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Provenance {
    /// Commit of the checkout, or empty.
    pub commit: String,
    /// Whether the checkout had uncommitted changes.
    pub dirty: bool,
    /// Processor.
    pub cpu: String,
    /// Cores of the machine.
    pub cores: usize,
    /// Threads used.
    pub threads: usize,
    /// Device of the tensors.
    pub device: String,
    /// Version of libtorch, as its folder says.
    pub libtorch: String,
    /// Version of this package.
    pub version: String,
}

impl Provenance {
    /// Looks around.
    pub fn here(threads: usize, device: &str) -> Self {
        let git = |args: &[&str]| -> Option<String> {
            let output = Command::new("git").args(args).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let libtorch = tensor::device::libtorch_folder()
            .and_then(|lib| {
                let candidates = [lib.join("../build-version"), lib.join("../version.py")];
                candidates.iter().find_map(|file| std::fs::read_to_string(file).ok())
            })
            .and_then(|text| text.lines().find(|line| line.contains('.')).map(str::to_owned))
            .unwrap_or_default();
        Self {
            commit: git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default(),
            dirty: git(&["status", "--porcelain"]).is_some_and(|changes| !changes.is_empty()),
            cpu: cpu.trim_start_matches([' ', '\t', ':']).to_owned(),
            cores: tensor::threads::available(),
            threads,
            device: device.to_owned(),
            libtorch: libtorch.trim_matches(|c: char| !c.is_ascii_digit() && c != '.').to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// What one run of one arm cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Cost {
    /// Wall time, seconds.
    pub wall_s: f64,
    /// Processor time of all threads, seconds.
    pub cpu_s: f64,
    /// Peak resident memory during the run, MiB (0 where the system doesn't tell).
    pub peak_mib: f64,
}

impl Cost {
    /// The cost of one of `n` arms that ran together.
    #[must_use]
    pub fn shared_by(self, n: usize) -> Self {
        let n = n.max(1) as f64;
        Self { wall_s: self.wall_s / n, cpu_s: self.cpu_s / n, ..self }
    }
}

/// One line of the results file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Experiment.
    pub experiment: String,
    /// Arm.
    pub arm: String,
    /// Seed.
    pub seed: u64,
    /// Mode.
    pub mode: Mode,
    /// One number a metric.
    pub metrics: BTreeMap<String, f64>,
    /// Repeated measurements.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub samples: BTreeMap<String, Vec<f64>>,
    /// Cost of the run.
    pub cost: Cost,
    /// The message, if the run failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Seconds since 1970.
    pub finished: u64,
    /// Where and with what.
    pub provenance: Provenance,
}

impl Record {
    /// A line from an outcome.
    pub fn new(
        key: (&str, &str, u64),
        mode: Mode,
        outcome: Result<Outcome>,
        cost: Cost,
        provenance: &Provenance,
    ) -> Self {
        let (experiment, arm, seed) = key;
        let (outcome, error) = match outcome {
            Ok(outcome) => (outcome, None),
            Err(error) => (Outcome::default(), Some(format!("{error:#}"))),
        };
        Self {
            experiment: experiment.into(),
            arm: arm.into(),
            seed,
            mode,
            metrics: outcome.metrics,
            samples: outcome.samples,
            cost,
            error,
            finished: now(),
            provenance: provenance.clone(),
        }
    }

    /// Experiment, arm and seed.
    pub fn key(&self) -> (String, String, u64) {
        (self.experiment.clone(), self.arm.clone(), self.seed)
    }
}

/// An experiment that couldn't run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Experiment.
    pub experiment: String,
    /// Why, and what to do.
    pub reason: String,
}

/// What a run was asked to do; `meta.json` beside the results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Mode.
    pub mode: Mode,
    /// Names given on the command line.
    pub names: Vec<String>,
    /// Seeds, if given.
    pub seeds: Option<u64>,
    /// Whether peers were asked for.
    pub peers: bool,
    /// Device string.
    pub device: String,
    /// Shard `(i, n)`.
    pub shard: Option<(u64, u64)>,
    /// Threads.
    pub threads: usize,
    /// Seconds since 1970.
    pub started: u64,
    /// Experiments that couldn't run.
    pub skipped: Vec<Skipped>,
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The results file of a run, open for appending.
#[derive(Debug)]
pub struct Results {
    file: File,
    path: PathBuf,
}

impl Results {
    /// Opens the file and returns what it holds. A last line that was cut off (the process was killed while
    /// writing, or the disk was full) is dropped from the file, and its run is done again.
    ///
    /// # Errors
    /// When the file can't be read or written, or a line that isn't the last one is damaged.
    pub fn open(path: &Path) -> Result<(Self, Vec<Record>)> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("{} can't be read", path.display())),
        };
        let (records, whole) = parse(&text).with_context(|| format!("{} is damaged", path.display()))?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("{} can't be written", path.display()))?;
        if whole < text.len() {
            file.set_len(whole as u64).with_context(|| format!("{} can't be repaired", path.display()))?;
        }
        Ok((Self { file, path: path.to_owned() }, records))
    }

    /// Appends a line and waits until it is on the disk.
    ///
    /// # Errors
    /// When the line can't be written (a full disk); what was written before stays.
    pub fn append(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        let say = || format!("{} can't be written: free some space, then continue with --resume", self.path.display());
        self.file.write_all(line.as_bytes()).with_context(say)?;
        self.file.sync_data().with_context(say)
    }
}

/// The whole lines of a results file, and how many bytes they are.
///
/// # Errors
/// For a damaged line before the last one, with its number.
pub fn parse(text: &str) -> Result<(Vec<Record>, usize)> {
    let mut records = Vec::new();
    let mut whole = 0;
    let mut lines = text.split_inclusive('\n').enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        match serde_json::from_str(line) {
            Ok(record) if line.ends_with('\n') => records.push(record),
            _ if lines.peek().is_none() => break,
            Ok(_) => break,
            Err(error) => return Err(error).with_context(|| format!("line {}", number + 1)),
        }
        whole += line.len();
    }
    Ok((records, whole))
}

/// Measures wall time, processor time and peak memory of a piece of work.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Cost) {
    // "5" resets the peak of resident memory (Linux 4.0); elsewhere the file isn't there.
    let resets = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    let (wall, cpu) = (Instant::now(), processor_time());
    let value = work();
    let cost = Cost {
        wall_s: wall.elapsed().as_secs_f64(),
        cpu_s: processor_time().saturating_sub(cpu).as_secs_f64(),
        peak_mib: if resets { peak_mib().unwrap_or(0.0) } else { 0.0 },
    };
    (value, cost)
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn peak_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok().map(|kib| kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seed: u64) -> Record {
        let mut outcome = Outcome::default();
        outcome.set("accuracy", 0.5);
        Record::new(("e", "a", seed), Mode::Quick, Ok(outcome), Cost::default(), &Provenance::default())
    }

    #[test]
    fn a_line_cut_off_by_a_kill_is_dropped_and_the_rest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let (mut results, found) = Results::open(&path).unwrap();
        assert!(found.is_empty());
        results.append(&record(0)).unwrap();
        results.append(&record(1)).unwrap();
        let whole = std::fs::read_to_string(&path).unwrap();
        for cut in [1, 10, whole.len() / 2 - 1] {
            std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            let (mut results, found) = Results::open(&path).unwrap();
            assert_eq!(found, [record_like(&found[0], 0)]);
            results.append(&record(1)).unwrap();
            assert_eq!(Results::open(&path).unwrap().1.len(), 2);
        }
    }

    fn record_like(other: &Record, seed: u64) -> Record {
        Record { finished: other.finished, ..record(seed) }
    }

    #[test]
    fn a_damaged_line_in_the_middle_is_an_error_that_names_it() {
        let line = serde_json::to_string(&record(0)).unwrap();
        let message = format!("{:#}", parse(&format!("{line}\n{{broken\n{line}\n")).unwrap_err());
        assert!(message.contains("line 2"), "{message}");
    }

    #[test]
    fn a_failed_run_is_recorded_with_its_message() {
        let failed = Record::new(
            ("e", "a", 0),
            Mode::Full,
            Err(anyhow::anyhow!("it broke")),
            Cost::default(),
            &Provenance::default(),
        );
        assert_eq!(failed.error.as_deref(), Some("it broke"));
        assert!(failed.metrics.is_empty());
    }

    #[test]
    fn work_has_a_cost() {
        let (sum, cost) = measure(|| {
            let big = vec![1u8; 64 << 20];
            big.iter().map(|&b| u64::from(b)).sum::<u64>()
        });
        assert_eq!(sum, 64 << 20);
        assert!(cost.wall_s > 0.0 && cost.cpu_s > 0.0);
        assert!(cost.peak_mib == 0.0 || cost.peak_mib > 60.0, "{cost:?}");
    }
}
