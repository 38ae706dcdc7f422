//! What the three forms of the report say in common: rows of claims, criteria, effects, notices.

use super::format::{DASH, count, date, exact, fixed, interval, signed};
use crate::analysis::{Analysis, ArmResult, ClaimResult, Estimate, ExperimentResult, Verdict};
use crate::record::Provenance;
use crate::spec::{Arm, Claim, Direction, Metric, Mode, Role, Test};

/// A claim with the experiment that it belongs to and, for a quick run, what the full run said.
pub(super) struct ClaimRow<'a> {
    pub(super) experiment: &'a ExperimentResult,
    pub(super) result: &'a ClaimResult,
    pub(super) committed: Option<&'a ClaimResult>,
}

/// All claims, in the order of the experiments.
pub(super) fn claim_rows<'a>(analysis: &'a Analysis, committed: Option<&'a Analysis>) -> Vec<ClaimRow<'a>> {
    let rows = |experiment: &'a ExperimentResult| {
        experiment.claims.iter().map(move |result| {
            let open = matches!(result.verdict, Verdict::TooFewSeeds | Verdict::NoData);
            let full = committed.filter(|_| open).and_then(|full| full_result(full, &experiment.spec.name, result));
            ClaimRow { experiment, result, committed: full }
        })
    };
    analysis.experiments.iter().flat_map(rows).collect()
}

fn full_result<'a>(full: &'a Analysis, experiment: &str, result: &ClaimResult) -> Option<&'a ClaimResult> {
    let same = full.experiments.iter().find(|e| e.spec.name == experiment)?;
    same.claims.iter().find(|c| c.claim.name == result.claim.name && c.estimate.is_some())
}

/// The experiments by crate, crates in the order in which they first appear.
pub(super) fn by_crate(analysis: &Analysis) -> Vec<(&str, Vec<&ExperimentResult>)> {
    let mut groups: Vec<(&str, Vec<&ExperimentResult>)> = Vec::new();
    for experiment in &analysis.experiments {
        let krate = experiment.spec.krate.as_str();
        match groups.iter_mut().find(|(name, _)| *name == krate) {
            Some((_, members)) => members.push(experiment),
            None => groups.push((krate, vec![experiment])),
        }
    }
    groups
}

/// A sign for a verdict that can be told from the others without colour.
pub(super) fn symbol(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Holds => "✓",
        Verdict::NotShown => "○",
        Verdict::Contradicted => "✗",
        Verdict::TooFewSeeds => "…",
        Verdict::Descriptive => "·",
        Verdict::NoData => DASH,
    }
}

/// How many claims have each verdict, in the order of [`VERDICTS`]; those that don't occur are left out.
pub(super) fn tally(rows: &[ClaimRow<'_>]) -> Vec<(Verdict, usize)> {
    let number = |verdict| rows.iter().filter(|row| row.result.verdict == verdict).count();
    VERDICTS.into_iter().map(|verdict| (verdict, number(verdict))).filter(|(_, n)| *n > 0).collect()
}

/// All verdicts, the most telling first.
const VERDICTS: [Verdict; 6] = [
    Verdict::Holds,
    Verdict::NotShown,
    Verdict::Contradicted,
    Verdict::TooFewSeeds,
    Verdict::Descriptive,
    Verdict::NoData,
];

/// `12 claims. ✓ holds: 7, ○ not shown: 5.`
pub(super) fn tally_text(rows: &[ClaimRow<'_>]) -> String {
    let parts: Vec<String> =
        tally(rows).into_iter().map(|(verdict, n)| format!("{} {}: {n}", symbol(verdict), verdict.text())).collect();
    let total = count(rows.len() as u64, "claim", "claims");
    if parts.is_empty() { format!("{total}.") } else { format!("{total}. {}.", parts.join(", ")) }
}

/// Whether a claim is about a ratio of times.
pub(super) fn is_ratio(test: Test) -> bool {
    matches!(test, Test::RatioAtMost(_) | Test::SpeedupAtLeast(_))
}

/// Whether all claims of an experiment are about ratios of times.
pub(super) fn is_timing(experiment: &ExperimentResult) -> bool {
    let claims = &experiment.spec.claims;
    !claims.is_empty() && claims.iter().all(|claim| is_ratio(claim.test))
}

/// The words of an arm, or its key if the description doesn't have it.
pub(super) fn arm_label<'a>(experiment: &'a ExperimentResult, name: &'a str) -> &'a str {
    experiment.spec.arm(name).map_or(name, |arm| &arm.label)
}

/// The result of an arm, if it has records.
pub(super) fn arm_result<'a>(experiment: &'a ExperimentResult, arm: &Arm) -> Option<&'a ArmResult> {
    experiment.arms.iter().find(|result| result.name == arm.name)
}

/// Words for what an arm is for.
pub(super) fn role(role: Role) -> &'static str {
    match role {
        Role::Method => "method",
        Role::Baseline => "baseline",
        Role::Ablation => "ablation",
        Role::Reference => "for orientation",
        Role::Peer => "peer",
    }
}

/// What is compared: `Target accuracy: SAM vs ERM`.
pub(super) fn comparison(experiment: &ExperimentResult, claim: &Claim) -> String {
    let metric = experiment.spec.metric(&claim.metric).map_or(claim.metric.as_str(), |m| &m.label);
    format!("{}: {}", capitalized(metric), sides(experiment, claim))
}

/// The arms of a comparison: `SAM vs ERM`.
pub(super) fn sides(experiment: &ExperimentResult, claim: &Claim) -> String {
    format!("{} vs {}", arm_label(experiment, &claim.arm), arm_label(experiment, &claim.reference))
}

/// Unit of a difference: that of a percentage is the percentage point.
pub(super) fn difference_unit(metric: &Metric) -> &str {
    if metric.unit == "%" { "pp" } else { &metric.unit }
}

/// Text as the start of a heading or sentence.
pub(super) fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}

/// `label (unit)`.
pub(super) fn with_unit(label: &str, unit: &str) -> String {
    if unit.is_empty() { label.to_owned() } else { format!("{label} ({unit})") }
}

/// An arrow for the better direction.
pub(super) fn arrow(direction: Direction) -> &'static str {
    match direction {
        Direction::Higher => "\u{a0}↑",
        Direction::Lower => "\u{a0}↓",
        Direction::Neither => "",
    }
}

/// Heading of a metric's column: label, unit, and an arrow for the better direction.
pub(super) fn metric_heading(metric: &Metric) -> String {
    format!("{}{}", with_unit(&capitalized(&metric.label), &metric.unit), arrow(metric.direction))
}

/// Heading of the column of paired differences in the main metric, where there is one: not for timings, whose
/// ratios are among the claims.
pub(super) fn difference_heading(experiment: &ExperimentResult) -> Option<String> {
    let (metric, first) = (experiment.spec.metrics.first()?, experiment.spec.arms.first()?);
    let has_differences = experiment.arms.iter().any(|arm| arm.differences.contains_key(&metric.name));
    if is_timing(experiment) || !has_differences {
        return None;
    }
    let words = if metric.direction == Direction::Neither { "difference to" } else { "advantage over" };
    Some(with_unit(&format!("{} {}", capitalized(words), first.label), difference_unit(metric)))
}

/// A paired difference, turned so that positive is better.
pub(super) fn advantage(metric: &Metric, difference: &Estimate) -> Estimate {
    if metric.direction != Direction::Lower {
        return *difference;
    }
    let interval = difference.interval.map(|(low, high)| (-high, -low));
    Estimate { value: -difference.value, interval, n: difference.n }
}

/// `+0.42 [0.10, 0.74]`, without the unit.
pub(super) fn difference(estimate: &Estimate, decimals: usize) -> String {
    let value = signed(estimate.value, decimals);
    interval(estimate, decimals).map_or_else(|| value.clone(), |ends| format!("{value} {ends}"))
}

/// The estimate of a claim with its unit, and its interval.
pub(super) fn effect_parts(experiment: &ExperimentResult, result: &ClaimResult) -> (String, Option<String>) {
    let Some(estimate) = result.estimate.filter(|e| e.value.is_finite()) else { return (DASH.to_owned(), None) };
    if is_ratio(result.claim.test) {
        let decimals = if estimate.value < 1.0 { 3 } else { 2 };
        return (format!("{}×", fixed(estimate.value, decimals)), interval(&estimate, decimals));
    }
    let metric = experiment.spec.metric(&result.claim.metric);
    let decimals = metric.map_or(2, |m| m.decimals);
    let unit = metric.map_or("", |m| difference_unit(m));
    let value = signed(estimate.value, decimals);
    let value = if unit.is_empty() { value } else { format!("{value} {unit}") };
    (value, interval(&estimate, decimals))
}

/// The estimate of a claim with its unit and interval: `+0.42 pp [0.10, 0.74]`.
pub(super) fn effect(experiment: &ExperimentResult, result: &ClaimResult) -> String {
    match effect_parts(experiment, result) {
        (value, Some(ends)) => format!("{value} {ends}"),
        (value, None) => value,
    }
}

/// Number of pairs behind a claim.
pub(super) fn pairs(result: &ClaimResult) -> String {
    result.estimate.map_or_else(|| DASH.to_owned(), |estimate| estimate.n.to_string())
}

/// Where the whole interval must be for the claim to hold.
pub(super) fn criterion(experiment: &ExperimentResult, claim: &Claim) -> String {
    let unit = experiment.spec.metric(&claim.metric).map_or("", |m| difference_unit(m));
    let amount = |value: f64| {
        let number = if value == 0.0 { "0".to_owned() } else { exact(value) };
        if unit.is_empty() || value == 0.0 { number } else { format!("{number} {unit}") }
    };
    match claim.test {
        Test::Superior(margin) => format!("> {}", amount(margin)),
        Test::NonInferior(margin) => format!("> {}", amount(-margin)),
        Test::Equivalent(margin) => format!("within ±{}", amount(margin)),
        Test::RatioAtMost(bound) => format!("≤ {}×", exact(bound)),
        Test::SpeedupAtLeast(bound) => format!("≥ {}×", exact(bound)),
        Test::Descriptive => DASH.to_owned(),
    }
}

/// What a reader must know about an experiment before its numbers: skipped, partial, failed.
pub(super) fn notices(experiment: &ExperimentResult) -> Vec<String> {
    let mut notices = Vec::new();
    if let Some(reason) = &experiment.skipped {
        notices.push(format!("Skipped: {reason}"));
    }
    if experiment.skipped.is_none() && (experiment.seeds as u64) < experiment.planned {
        let planned = count(experiment.planned, "planned seed", "planned seeds");
        notices.push(format!("Partial: {} of {planned} ran.", experiment.seeds));
    }
    let absent: Vec<&str> = experiment
        .spec
        .arms
        .iter()
        .filter(|arm| arm_result(experiment, arm).is_none())
        .map(|arm| arm.label.as_str())
        .collect();
    if !experiment.arms.is_empty() && !absent.is_empty() {
        notices.push(format!("No runs of: {}.", absent.join(", ")));
    }
    for arm in &experiment.arms {
        let ran = arm.seeds + arm.errors.len();
        if ran < experiment.seeds {
            let label = arm_label(experiment, &arm.name);
            notices.push(format!("Partial: {label} has {ran} of {} seeds.", experiment.seeds));
        }
        for (message, n) in repeated(&arm.errors) {
            let runs = count(n, "run", "runs");
            notices.push(format!("Failed: {runs} of {}: {message}", arm_label(experiment, &arm.name)));
        }
    }
    notices
}

/// Equal messages once, with their number.
fn repeated(messages: &[String]) -> Vec<(&str, u64)> {
    let mut counted: Vec<(&str, u64)> = Vec::new();
    for message in messages {
        match counted.iter_mut().find(|(text, _)| text == message) {
            Some((_, n)) => *n += 1,
            None => counted.push((message, 1)),
        }
    }
    counted
}

/// Data sets, seeds and threads of an experiment, in one line.
pub(super) fn facts(experiment: &ExperimentResult) -> String {
    let data = if experiment.spec.data.is_empty() { "none".to_owned() } else { experiment.spec.data.join(", ") };
    let planned = experiment.planned.max(experiment.seeds as u64);
    let threads = match experiment.spec.threads {
        0 => String::new(),
        n => format!(" Threads: {n}."),
    };
    format!("Data: {data}. Seeds: {} of {planned}.{threads}", experiment.seeds)
}

/// Facts of each machine and checkout of a run, as (name, value). Experiments may set their own threads, which
/// doesn't make another machine of it.
pub(super) fn machines(analysis: &Analysis) -> Vec<Vec<(&'static str, String)>> {
    let mut machines: Vec<(Provenance, Vec<usize>)> = Vec::new();
    for provenance in &analysis.provenance {
        let machine = Provenance { threads: 0, ..provenance.clone() };
        match machines.iter_mut().find(|(known, _)| *known == machine) {
            Some((_, threads)) => threads.push(provenance.threads),
            None => machines.push((machine, vec![provenance.threads])),
        }
    }
    machines
        .into_iter()
        .map(|(machine, mut threads)| {
            threads.sort_unstable();
            facts_of(&machine, &threads)
        })
        .collect()
}

fn facts_of(p: &Provenance, threads: &[usize]) -> Vec<(&'static str, String)> {
    let or_unknown = |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
    let dirty = if p.dirty { " (dirty: with uncommitted changes)" } else { "" };
    let threads: Vec<String> = threads.iter().map(ToString::to_string).collect();
    vec![
        ("Commit", format!("{}{dirty}", or_unknown(&p.commit))),
        ("Version", or_unknown(&p.version)),
        ("CPU", or_unknown(&p.cpu)),
        ("Threads", format!("{} ({})", threads.join(" or "), count(p.cores as u64, "core", "cores"))),
        ("Device", or_unknown(&p.device)),
        ("libtorch", or_unknown(&p.libtorch)),
    ]
}

/// What a mode means, as a sentence.
pub(super) fn mode_text(analysis: &Analysis, committed: Option<&Analysis>) -> String {
    match (analysis.mode, committed) {
        (Mode::Full, _) => {
            "Full run: the protocols as the specifications describe them, with the seeds that a verdict needs."
                .to_owned()
        }
        (Mode::Quick, None) => {
            "Quick run: real data with the fewest seeds. It shows effects and intervals; most verdicts need --full."
                .to_owned()
        }
        (Mode::Quick, Some(full)) => {
            let commit = full.provenance.first().map_or("unknown", |p| p.commit.as_str());
            format!(
                "Quick run: real data with the fewest seeds. It shows effects and intervals; most verdicts need --full. \
                 Beside them stands the committed full run of {} (commit {commit}).",
                date(full.finished)
            )
        }
    }
}
