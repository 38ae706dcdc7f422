//! One JSON line a run, written at once.

use crate::experiment::Outcome;
use crate::spec::Mode;
use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Where and with what a run was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Provenance {
    /// Commit that the benchmark was built from, or empty.
    pub commit: String,
    /// Whether the checkout had uncommitted changes then.
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
            commit: env!("TESSERA_COMMIT").to_owned(),
            dirty: env!("TESSERA_DIRTY") == "true",
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
    /// Points (x, y) of curves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub curves: BTreeMap<String, Vec<(f64, f64)>>,
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
    /// A line from an outcome. An outcome with a number that isn't finite is a failure that names it: JSON has no
    /// such numbers, and no mean does anything with them.
    pub fn new(
        key: (&str, &str, u64),
        mode: Mode,
        outcome: Result<Outcome>,
        cost: Cost,
        provenance: &Provenance,
    ) -> Self {
        let (experiment, arm, seed) = key;
        let (outcome, error) = match outcome.and_then(finite) {
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
            curves: outcome.curves,
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

fn finite(outcome: Outcome) -> Result<Outcome> {
    let metrics = outcome.metrics.iter().map(|(name, value)| (name, *value));
    let samples = outcome.samples.iter().flat_map(|(name, values)| values.iter().map(move |value| (name, *value)));
    let points = outcome.curves.iter().flat_map(|(name, at)| at.iter().flat_map(move |&(x, y)| [(name, x), (name, y)]));
    let bad = metrics.chain(samples).chain(points).find(|(_, value)| !value.is_finite());
    match bad.map(|(name, value)| (name.clone(), value)) {
        Some((name, value)) => bail!("The metric \"{name}\" became {value}, and a finite number was expected."),
        None => Ok(outcome),
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
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error).with_context(|| format!("{} can't be read", path.display())),
        };
        let (records, whole) = parse(&bytes).with_context(|| format!("{} is damaged", path.display()))?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("{} can't be written", path.display()))?;
        if whole < bytes.len() {
            file.set_len(whole as u64).with_context(|| format!("{} can't be repaired", path.display()))?;
        }
        Ok((Self { file, path: path.to_owned() }, records))
    }

    /// Appends lines in one write and waits until they are on the disk: what belongs together isn't torn apart by
    /// a kill between two of them.
    ///
    /// # Errors
    /// When the lines can't be written (a full disk); what was written before stays.
    pub fn append(&mut self, records: &[Record]) -> Result<()> {
        let mut lines = String::new();
        for record in records {
            lines.push_str(&serde_json::to_string(record)?);
            lines.push('\n');
        }
        let say = || format!("{} can't be written: free some space, then continue with --resume", self.path.display());
        self.file.write_all(lines.as_bytes()).with_context(say)?;
        self.file.sync_data().with_context(say)
    }
}

/// The whole lines of a results file, and how many bytes they are. What follows the last line break was cut off
/// while it was written, maybe inside a character, and doesn't count.
///
/// # Errors
/// For a damaged line, with its number.
pub fn parse(bytes: &[u8]) -> Result<(Vec<Record>, usize)> {
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
    let lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n').enumerate();
    let records = lines.map(|(i, line)| serde_json::from_slice(line).with_context(|| format!("line {}", i + 1)));
    Ok((records.collect::<Result<_>>()?, whole))
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

    fn lines(records: &[Record]) -> Vec<u8> {
        records.iter().flat_map(|r| serde_json::to_string(r).unwrap().into_bytes().into_iter().chain([b'\n'])).collect()
    }

    #[test]
    fn a_line_cut_off_at_any_byte_is_dropped_and_the_rest_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let (mut results, found) = Results::open(&path).unwrap();
        assert!(found.is_empty());
        let mut second = record(1);
        // Characters of two and three bytes: a cut may fall inside them.
        second.metrics.insert("accuracy 0°".into(), 0.25);
        second.arm = "ρ ≤ 1".into();
        results.append(&[record(0)]).unwrap();
        let first = std::fs::metadata(&path).unwrap().len() as usize;
        results.append(std::slice::from_ref(&second)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for cut in first..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (_, found) = Results::open(&path).unwrap();
            assert_eq!(found.len(), 1, "cut at byte {cut}");
            assert_eq!(std::fs::read(&path).unwrap(), whole[..first], "cut at byte {cut}");
        }
        let (mut results, _) = Results::open(&path).unwrap();
        results.append(std::slice::from_ref(&second)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(Results::open(&path).unwrap().1[1], second);
    }

    #[test]
    fn a_damaged_line_is_an_error_that_names_it() {
        let line = String::from_utf8(lines(&[record(0)])).unwrap();
        for damage in [&b"{broken"[..], b"{\"experiment\": \"\xc2\"}"] {
            let text = [line.as_bytes(), damage, b"\n", line.as_bytes()].concat();
            let message = format!("{:#}", parse(&text).unwrap_err());
            assert!(message.contains("line 2"), "{message}");
        }
    }

    #[test]
    fn a_number_that_is_not_finite_is_a_failure_and_the_file_stays_readable() {
        for bad in [f64::NAN, f64::INFINITY] {
            let mut outcome = Outcome::default();
            outcome.set("loss", bad);
            let record = Record::new(("e", "a", 0), Mode::Quick, Ok(outcome), Cost::default(), &Provenance::default());
            let message = record.error.clone().unwrap();
            assert!(message.contains("\"loss\"") && message.contains(&bad.to_string()), "{message}");
            assert_eq!(parse(&lines(std::slice::from_ref(&record))).unwrap().0, [record]);
        }
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
