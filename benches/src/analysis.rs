//! From records to means, paired differences, intervals and verdicts.

use crate::experiment::Experiment;
use crate::record::{Meta, Provenance, Record, Skipped};
use crate::spec::{Claim, Curve, Direction, Metric, Mode, Spec, Test};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use tensor::stats::{self, Bootstrap};

/// Fewest rounds of an interleaved timing for which a verdict is given.
const ROUNDS_FOR_VERDICT: usize = 8;

/// Level of all intervals.
const LEVEL: f64 = 0.95;

/// A mean with its interval (no interval for a single value).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Mean, mean difference, or ratio of medians.
    pub value: f64,
    /// Lower and upper end at 95 %.
    pub interval: Option<(f64, f64)>,
    /// Number of seeds, or of pairs, or of timings a side.
    pub n: usize,
}

/// What an interval says about a claim. Computed by [`verdict`], never written by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The whole interval is where the claim says.
    Holds,
    /// The interval reaches over the margin: the effect doesn't show at this number of seeds. Or an arm failed on a
    /// seed where the other ran, and the seeds that are left may be the easy ones.
    NotShown,
    /// The whole interval is on the other side.
    Contradicted,
    /// Fewer seeds than a verdict needs.
    TooFewSeeds,
    /// A descriptive comparison.
    Descriptive,
    /// No data: not run, skipped or failed.
    NoData,
}

impl Verdict {
    /// Words for tables.
    pub fn text(self) -> &'static str {
        match self {
            Verdict::Holds => "holds",
            Verdict::NotShown => "not shown",
            Verdict::Contradicted => "contradicted",
            Verdict::TooFewSeeds => "too few seeds (use --full)",
            Verdict::Descriptive => "descriptive",
            Verdict::NoData => "no data",
        }
    }
}

/// The verdict of an estimate about a claim.
pub fn verdict(test: Test, estimate: &Estimate, enough: bool) -> Verdict {
    if test == Test::Descriptive {
        return Verdict::Descriptive;
    }
    let Some((low, high)) = estimate.interval else { return Verdict::TooFewSeeds };
    if !enough {
        return Verdict::TooFewSeeds;
    }
    let (holds, contradicted) = match test {
        Test::Superior(margin) => (low > margin, high <= margin),
        Test::NonInferior(margin) => (low > -margin, high < -margin),
        Test::Equivalent(margin) => (low > -margin && high < margin, low >= margin || high <= -margin),
        Test::RatioAtMost(bound) => (high <= bound, low > bound),
        Test::SpeedupAtLeast(bound) => (low >= bound, high < bound),
        Test::Descriptive => return Verdict::Descriptive,
    };
    match (holds, contradicted) {
        (true, _) => Verdict::Holds,
        (false, true) => Verdict::Contradicted,
        (false, false) => Verdict::NotShown,
    }
}

/// A claim with what the data say.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClaimResult {
    /// The claim.
    pub claim: Claim,
    /// The paired difference (positive is better) or the ratio.
    pub estimate: Option<Estimate>,
    /// The verdict.
    pub verdict: Verdict,
    /// Failed runs of its two arms.
    pub failed: usize,
}

impl ClaimResult {
    /// The verdict in words, with the number of failed runs: `not shown (2 runs failed)`.
    pub fn words(&self) -> String {
        let verdict = self.verdict.text();
        self.failures().map_or_else(|| verdict.to_owned(), |failures| format!("{verdict} ({failures})"))
    }

    /// `2 runs failed`, if any did.
    pub fn failures(&self) -> Option<String> {
        match self.failed {
            0 => None,
            1 => Some("1 run failed".to_owned()),
            n => Some(format!("{n} runs failed")),
        }
    }
}

/// One arm of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArmResult {
    /// Key of the arm.
    pub name: String,
    /// Seeds that ran well.
    pub seeds: usize,
    /// Mean of every metric.
    pub metrics: BTreeMap<String, Estimate>,
    /// Paired difference to the first arm (as it is, not turned) of every metric with one number a run. Metrics that
    /// are measured by samples have ratios instead, between the arms of a claim only: others needn't be comparable.
    pub differences: BTreeMap<String, Estimate>,
    /// Points of every curve: x, and the mean of y over seeds.
    pub curves: BTreeMap<String, Vec<(f64, Estimate)>>,
    /// Mean wall time of a run, seconds.
    pub wall_s: f64,
    /// Mean processor time of a run, seconds.
    pub cpu_s: f64,
    /// Largest peak memory of a run, MiB.
    pub peak_mib: f64,
    /// Messages of failed runs.
    pub errors: Vec<String>,
}

/// One experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExperimentResult {
    /// Its description.
    pub spec: Spec,
    /// The mode of its records.
    pub mode: Mode,
    /// Seeds with a record.
    pub seeds: usize,
    /// Seeds that were asked for.
    pub planned: u64,
    /// Why it didn't run, if it didn't.
    pub skipped: Option<String>,
    /// Its arms, in the spec's order; those without records are left out.
    pub arms: Vec<ArmResult>,
    /// Its claims.
    pub claims: Vec<ClaimResult>,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Analysis {
    /// The mode.
    pub mode: Mode,
    /// Where and with what; more than one entry after a merge of different machines or a resume.
    pub provenance: Vec<Provenance>,
    /// When the last run finished, seconds since 1970.
    pub finished: u64,
    /// The command that makes such a run.
    pub command: String,
    /// The experiments.
    pub experiments: Vec<ExperimentResult>,
}

/// Analyses merged records. The last record of a key counts.
pub fn analyse(experiments: &[Experiment], metas: &[Meta], records: &[Record]) -> Analysis {
    let mut last: BTreeMap<(String, String, u64), &Record> = BTreeMap::new();
    for record in records {
        last.insert(record.key(), record);
    }
    let mut provenance: Vec<Provenance> = Vec::new();
    for record in last.values() {
        if !provenance.contains(&record.provenance) {
            provenance.push(record.provenance.clone());
        }
    }
    let mode = metas.first().map_or(Mode::Quick, |m| m.mode);
    let skips: Vec<&Skipped> = metas.iter().flat_map(|m| &m.skipped).collect();
    let seeds = metas.iter().find_map(|m| m.seeds);
    let results = experiments
        .iter()
        .filter_map(|e| {
            let mine: Vec<&Record> = last.values().filter(|r| r.experiment == e.spec.name).copied().collect();
            let skip = skips.iter().find(|s| s.experiment == e.spec.name).map(|s| s.reason.clone());
            let planned = seeds.unwrap_or(e.spec.default_seeds(mode));
            (!mine.is_empty() || skip.is_some()).then(|| examine(&e.spec, mode, planned, &mine, skip))
        })
        .collect();
    let finished = records.iter().map(|r| r.finished).max().unwrap_or(0);
    Analysis { mode, provenance, finished, command: command(metas), experiments: results }
}

/// The command that makes runs like these.
fn command(metas: &[Meta]) -> String {
    let mut words = vec!["cargo xtask bench".to_owned()];
    let Some(meta) = metas.first() else { return words.remove(0) };
    words.extend(meta.names.clone());
    if meta.mode == Mode::Full {
        words.push("--full".into());
    }
    if metas.iter().any(|m| m.peers) {
        words.push("--peers".into());
    }
    if let Some(seeds) = meta.seeds {
        words.push(format!("--seeds {seeds}"));
    }
    if meta.device != "cpu" {
        words.push(format!("--device {}", meta.device));
    }
    if let (Some((_, n)), true) = (meta.shard, metas.len() > 1) {
        words.push(format!("--shard i/{n}"));
    }
    words.join(" ")
}

fn examine(spec: &Spec, mode: Mode, planned: u64, records: &[&Record], skipped: Option<String>) -> ExperimentResult {
    let of = |arm: &str| -> Vec<&Record> { records.iter().filter(|r| r.arm == arm).copied().collect() };
    let arms = spec
        .arms
        .iter()
        .map(|arm| (arm, of(&arm.name)))
        .filter(|(_, records)| !records.is_empty())
        .map(|(arm, records)| arm_result(spec, &arm.name, &records, &of(&spec.arms[0].name)))
        .collect();
    let seeds: BTreeSet<u64> = records.iter().map(|r| r.seed).collect();
    let claims =
        spec.claims.iter().map(|claim| claim_result(spec, claim, &of(&claim.arm), &of(&claim.reference))).collect();
    ExperimentResult { spec: spec.clone(), mode, seeds: seeds.len(), planned, skipped, arms, claims }
}

fn arm_result(spec: &Spec, name: &str, records: &[&Record], first: &[&Record]) -> ArmResult {
    let good: Vec<&&Record> = records.iter().filter(|r| ran(r)).collect();
    let mean = |of: &dyn Fn(&Record) -> f64| good.iter().map(|r| of(r)).sum::<f64>() / good.len().max(1) as f64;
    let mut metrics = BTreeMap::new();
    let mut differences = BTreeMap::new();
    for metric in &spec.metrics {
        let values: Vec<f64> = good.iter().filter_map(|r| r.metrics.get(&metric.name)).copied().collect();
        if let Some(estimate) = estimate_mean(&values) {
            metrics.insert(metric.name.clone(), estimate);
        }
        let sampled = records.iter().chain(first).any(|r| r.samples.contains_key(&metric.name));
        if name != spec.arms[0].name
            && !sampled
            && let Some(estimate) = paired(&metric.name, records, first)
        {
            differences.insert(metric.name.clone(), estimate);
        }
    }
    let curves = spec.curves.iter().map(|curve| (curve.name.clone(), curve_points(curve, &good)));
    ArmResult {
        curves: curves.filter(|(_, points)| !points.is_empty()).collect(),
        name: name.to_owned(),
        seeds: good.len(),
        metrics,
        differences,
        wall_s: mean(&|r| r.cost.wall_s),
        cpu_s: mean(&|r| r.cost.cpu_s),
        peak_mib: good.iter().map(|r| r.cost.peak_mib).fold(0.0, f64::max),
        errors: records.iter().filter_map(|r| r.error.clone()).collect(),
    }
}

/// Means of the points that share their x, in the order of x; of a frontier in the order of its setting, each at its mean x.
fn curve_points(curve: &Curve, records: &[&&Record]) -> Vec<(f64, Estimate)> {
    let points = series(&curve.name, records);
    let Some(horizontal) = &curve.horizontal else {
        return points;
    };
    let across = series(horizontal, records);
    let at = |setting: f64| across.iter().find(|(x, _)| *x == setting).map(|(_, x)| x.value);
    points.into_iter().filter_map(|(setting, y)| Some((at(setting)?, y))).collect()
}

fn series(name: &str, records: &[&&Record]) -> Vec<(f64, Estimate)> {
    let mut points: Vec<(f64, f64)> = records.iter().filter_map(|r| r.curves.get(name)).flatten().copied().collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let groups = points.chunk_by(|a, b| a.0 == b.0);
    let mean = |group: &[(f64, f64)]| {
        let values: Vec<f64> = group.iter().map(|p| p.1).collect();
        Some((group.first()?.0, estimate_mean(&values)?))
    };
    groups.filter_map(mean).collect()
}

fn estimate_mean(values: &[f64]) -> Option<Estimate> {
    match stats::t_interval(values, LEVEL) {
        Ok(t) => Some(Estimate { value: t.mean, interval: Some((t.low, t.high)), n: t.n }),
        // One value has a mean and no interval; values that aren't finite have neither.
        Err(_) => match values {
            [value] if value.is_finite() => Some(Estimate { value: *value, interval: None, n: 1 }),
            _ => None,
        },
    }
}

fn ran(record: &Record) -> bool {
    record.error.is_none()
}

/// Values of a metric on the seeds on which both sides ran.
fn pairs(metric: &str, arm: &[&Record], reference: &[&Record]) -> (Vec<f64>, Vec<f64>) {
    arm.iter()
        .filter(|a| ran(a))
        .filter_map(|a| {
            let b = reference.iter().find(|r| r.seed == a.seed && ran(r))?;
            Some((*a.metrics.get(metric)?, *b.metrics.get(metric)?))
        })
        .unzip()
}

fn paired(metric: &str, arm: &[&Record], reference: &[&Record]) -> Option<Estimate> {
    let (a, b) = pairs(metric, arm, reference);
    let differences: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
    estimate_mean(&differences)
}

fn claim_result(spec: &Spec, claim: &Claim, arm: &[&Record], reference: &[&Record]) -> ClaimResult {
    let estimate = match claim.test {
        Test::RatioAtMost(_) => ratio(&claim.metric, arm, reference),
        Test::SpeedupAtLeast(_) => ratio(&claim.metric, reference, arm),
        _ => paired(&claim.metric, arm, reference).map(|e| turned(e, spec.metric(&claim.metric))),
    };
    let enough = match claim.test {
        Test::RatioAtMost(_) | Test::SpeedupAtLeast(_) => estimate.is_some_and(|e| e.n >= ROUNDS_FOR_VERDICT),
        _ => estimate.is_some_and(|e| e.n as u64 >= spec.seeds_for_verdict),
    };
    let verdict = match estimate.as_ref().map_or(Verdict::NoData, |e| verdict(claim.test, e, enough)) {
        Verdict::Holds | Verdict::Contradicted if one_sided(arm, reference) => Verdict::NotShown,
        other => other,
    };
    let failed = arm.iter().chain(reference).filter(|r| !ran(r)).count();
    ClaimResult { claim: claim.clone(), estimate, verdict, failed }
}

/// Whether one side failed on a seed where the other ran: what is left is a selection that favours the side that
/// fails.
fn one_sided(arm: &[&Record], reference: &[&Record]) -> bool {
    arm.iter().any(|a| reference.iter().any(|b| a.seed == b.seed && ran(a) != ran(b)))
}

/// Turns a difference so that positive is better.
fn turned(estimate: Estimate, metric: Option<&Metric>) -> Estimate {
    if metric.is_some_and(|m| m.direction == Direction::Lower) {
        let interval = estimate.interval.map(|(low, high)| (-high, -low));
        Estimate { value: -estimate.value, interval, n: estimate.n }
    } else {
        estimate
    }
}

/// Ratio of medians of pooled timings, with its bootstrap interval.
fn ratio(metric: &str, over: &[&Record], under: &[&Record]) -> Option<Estimate> {
    let pool = |records: &[&Record]| -> Vec<f64> {
        records.iter().filter(|r| ran(r)).filter_map(|r| r.samples.get(metric)).flatten().copied().collect()
    };
    let (a, b) = (pool(over), pool(under));
    let n = a.len().min(b.len());
    let ratio = stats::ratio_of_medians(&a[..n], &b[..n], &Bootstrap::default()).ok()?;
    Some(Estimate { value: ratio.estimate, interval: Some((ratio.low, ratio.high)), n })
}

#[cfg(test)]
mod tests;
