//! Which plots an experiment has, and what is on them.

use super::format::finite;
use super::plot::{Plot, Row};
use super::view;
use crate::analysis::{ClaimResult, Estimate, ExperimentResult, Verdict};
use crate::spec::{Direction, Metric, Role, Test};

/// A plot with its caption.
pub(super) struct Figure {
    pub(super) plot: Plot,
    pub(super) caption: String,
}

/// The plots of an experiment: the main metric by arm, then paired differences and ratios.
pub(super) fn of(experiment: &ExperimentResult, anchor: &str) -> Vec<Figure> {
    let means = means(experiment);
    let means = if view::is_timing(experiment) { means.map(logarithmic) } else { means };
    let mut figures: Vec<Figure> = means.into_iter().collect();
    for (i, metric) in experiment.spec.metrics.iter().enumerate() {
        figures.extend(differences(experiment, metric, i == 0));
    }
    figures.extend(ratios(experiment).map(logarithmic));
    for (i, figure) in figures.iter_mut().enumerate() {
        figure.plot.id = format!("{anchor}-plot{i}");
    }
    figures
}

/// CSS class of a verdict.
pub(super) fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Holds => "holds",
        Verdict::NotShown => "not-shown",
        Verdict::Contradicted => "contradicted",
        Verdict::TooFewSeeds => "too-few",
        Verdict::Descriptive => "descriptive",
        Verdict::NoData => "no-data",
    }
}

/// A logarithmic axis for times and ratios that span more than a decade.
fn logarithmic(mut figure: Figure) -> Figure {
    figure.plot.logarithmic = true;
    figure
}

fn means(experiment: &ExperimentResult) -> Option<Figure> {
    let metric = experiment.spec.metrics.first()?;
    let row = |arm: &crate::spec::Arm| {
        let estimate = view::arm_result(experiment, arm)?.metrics.get(&metric.name)?;
        Some(Row {
            label: arm.label.clone(),
            numbers: super::format::mean(Some(estimate), metric.decimals),
            value: estimate.value,
            interval: finite(estimate),
            class: "",
            filled: arm.role == Role::Method,
            ..Row::default()
        })
    };
    let rows: Vec<Row> = experiment.spec.arms.iter().filter_map(row).collect();
    let heading = view::metric_heading(metric);
    figure(rows, None, heading, format!("{} by arm", view::capitalized(&metric.label)), || {
        let what =
            if view::is_timing(experiment) { "median of the rounds" } else { "mean over seeds with its 95 % interval" };
        format!(
            "{} by arm: {what}. Methods are filled dots, what they are compared with open ones.",
            view::capitalized(&metric.label)
        )
    })
}

/// Differences to the first arm in the main metric, and the claims about the metric that compare others.
fn differences(experiment: &ExperimentResult, metric: &Metric, main: bool) -> Option<Figure> {
    let first = experiment.spec.arms.first()?;
    // An arm with information that no user has may be so far away that the margins can't be seen: it is shown
    // only for a claim that is to be decided.
    let orientation = |arm: &str| experiment.spec.arm(arm).is_some_and(|arm| arm.role == Role::Reference);
    let claims: Vec<&ClaimResult> = experiment
        .claims
        .iter()
        .filter(|c| c.claim.metric == metric.name && !view::is_ratio(c.claim.test))
        .filter(|c| c.claim.test != Test::Descriptive || !orientation(&c.claim.arm))
        .collect();
    let mut rows = Vec::new();
    if main && !view::is_timing(experiment) {
        for arm in experiment.spec.arms.iter().filter(|arm| !orientation(&arm.name)) {
            let about = claims.iter().any(|c| c.claim.arm == arm.name && c.claim.reference == first.name);
            let found = view::arm_result(experiment, arm).and_then(|result| result.differences.get(&metric.name));
            if let Some(difference) = found.filter(|_| !about) {
                let label = format!("{} over {}", arm.label, first.label);
                rows.push(difference_row(label, &view::advantage(metric, difference), metric, arm.role));
            }
        }
    }
    for result in &claims {
        let Some(estimate) = &result.estimate else { continue };
        let claim = &result.claim;
        let (arm, reference) = (view::arm_label(experiment, &claim.arm), view::arm_label(experiment, &claim.reference));
        let role = experiment.spec.arm(&claim.arm).map_or(Role::Method, |arm| arm.role);
        let mut row = difference_row(format!("{arm} over {reference}"), estimate, metric, role);
        row.class = class(result.verdict);
        row.numbers = format!("{} {}", view::symbol(result.verdict), row.numbers);
        row.band = match claim.test {
            Test::Superior(margin) if margin != 0.0 => Some((0.0, margin)),
            Test::NonInferior(margin) if margin != 0.0 => Some((-margin, 0.0)),
            Test::Equivalent(margin) => Some((-margin, margin)),
            _ => None,
        };
        rows.push(row);
    }
    let banded = rows.iter().any(|row| row.band.is_some());
    let unit = view::difference_unit(metric);
    let axis = if metric.direction == Direction::Neither {
        view::with_unit("Paired difference", unit)
    } else {
        format!("{}, right is better", view::with_unit("Paired difference", unit))
    };
    figure(rows, Some(0.0), axis, format!("Paired differences in {}", metric.label), || {
        let margin = if banded { " The shaded range is the margin of the claim." } else { "" };
        let metric = view::capitalized(&metric.label);
        format!("{metric}: paired differences over seeds with 95 % intervals; the signs are verdicts.{margin}")
    })
}

fn difference_row(label: String, estimate: &Estimate, metric: &Metric, role: Role) -> Row {
    Row {
        label,
        numbers: view::difference(estimate, metric.decimals),
        value: estimate.value,
        interval: finite(estimate),
        filled: role == Role::Method,
        ..Row::default()
    }
}

fn ratios(experiment: &ExperimentResult) -> Option<Figure> {
    let row = |result: &ClaimResult| {
        let claim = &result.claim;
        let (kind, bound) = match claim.test {
            Test::RatioAtMost(bound) => ("≤", bound),
            Test::SpeedupAtLeast(bound) => ("≥", bound),
            _ => return None,
        };
        let estimate = result.estimate.as_ref()?;
        let role = experiment.spec.arm(&claim.arm).map_or(Role::Method, |arm| arm.role);
        Some(Row {
            // With one metric its name in every row says nothing.
            label: if experiment.spec.metrics.len() > 1 {
                view::comparison(experiment, claim)
            } else {
                view::sides(experiment, claim)
            },
            numbers: format!(
                "{} {} ({kind} {})",
                view::symbol(result.verdict),
                view::effect(experiment, result),
                super::format::exact(bound)
            ),
            value: estimate.value,
            interval: finite(estimate),
            class: class(result.verdict),
            filled: role == Role::Method,
            bound: Some(bound),
            ..Row::default()
        })
    };
    let rows: Vec<Row> = experiment.claims.iter().filter_map(row).collect();
    figure(rows, Some(1.0), "Ratio of medians (1 = the same time)".to_owned(), "Ratios of times".to_owned(), || {
        "Ratios of median times with 95 % bootstrap intervals; the upright dash is the bound of the claim: at most \
         (≤, cost) or at least (≥, how many times faster)."
            .to_owned()
    })
}

fn figure(
    rows: Vec<Row>,
    anchor: Option<f64>,
    axis: String,
    title: String,
    caption: impl Fn() -> String,
) -> Option<Figure> {
    if rows.is_empty() {
        return None;
    }
    let numbers: Vec<String> = rows.iter().map(|row| format!("{}: {}", row.label, row.numbers)).collect();
    let description = format!("{axis}. {}.", numbers.join("; "));
    let plot = Plot { id: String::new(), title, description, axis, rows, anchor, logarithmic: false };
    Some(Figure { plot, caption: caption() })
}
