//! Line plots as inline SVG: one line an arm, with a band where several seeds give an interval.
//!
//! As in the dot plots, horizontal positions are percentages, so that the plot takes the width of the page while text
//! keeps its size. Lines are told apart by colour and by dashes.

use super::html::escape;
use super::plot::Axis;
use super::view;
use crate::analysis::{Estimate, ExperimentResult};
use crate::spec::Curve;
use std::fmt::Write as _;

/// One arm's points.
pub(super) struct Line {
    pub(super) label: String,
    pub(super) points: Vec<(f64, Estimate)>,
    /// Number of the arm in the description: its colour and dashes.
    style: usize,
}

/// The lines of a curve.
pub(super) struct Lines {
    id: String,
    title: String,
    axes: (String, String),
    logarithmic: (bool, bool),
    categories: Vec<String>,
    /// Whether x is measured, and points follow a setting.
    pub(super) frontier: bool,
    pub(super) arms: Vec<Line>,
}

/// Styles that the sheet has.
const STYLES: usize = 8;
const TOP: f64 = 22.0;
const HEIGHT: f64 = 220.0;
const AXIS: f64 = 42.0;
const LEGEND: f64 = 18.0;
/// Room for the numbers of the vertical axis, percent.
const LEFT: f64 = 9.0;
/// Most rows of a table.
const ROWS: usize = 6;

/// The lines of the arms that have points.
pub(super) fn of(experiment: &ExperimentResult, curve: &Curve, id: &str) -> Lines {
    let line = |(style, arm): (usize, &crate::spec::Arm)| {
        if !(curve.arms.is_empty() || curve.arms.contains(&arm.name)) {
            return None;
        }
        let points = view::arm_result(experiment, arm)?.curves.get(&curve.name)?;
        let usable = |&&(x, ref y): &&(f64, Estimate)| {
            let positive = (!curve.logarithmic.0 || x > 0.0) && (!curve.logarithmic.1 || y.value > 0.0);
            x.is_finite() && y.value.is_finite() && positive
        };
        let points: Vec<_> = points.iter().filter(usable).copied().collect();
        let place = curve.arms.iter().position(|name| *name == arm.name).unwrap_or(style);
        (!points.is_empty()).then(|| Line { label: arm.label.clone(), points, style: place % STYLES })
    };
    Lines {
        id: id.to_owned(),
        title: curve.title.clone(),
        axes: (curve.x.clone(), curve.y.clone()),
        logarithmic: curve.logarithmic,
        categories: curve.categories.clone(),
        frontier: curve.horizontal.is_some(),
        arms: experiment.spec.arms.iter().enumerate().filter_map(line).collect(),
    }
}

/// What a curve shows, in a sentence.
pub(super) fn caption(curve: &Curve) -> String {
    let along = if curve.horizontal.is_some() { ", one for each value of the setting" } else { "" };
    format!(
        "{}. Points{along} are means over seeds; bands, where there are several, their 95 % intervals.",
        curve.title
    )
}

/// At most [`ROWS`] of the x that occur, evenly spread, with the first and the last.
pub(super) fn some_x(lines: &Lines) -> Vec<f64> {
    let mut all: Vec<f64> = lines.arms.iter().flat_map(|l| l.points.iter().map(|p| p.0)).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    if all.len() <= ROWS {
        return all;
    }
    (0..ROWS).map(|i| all[i * (all.len() - 1) / (ROWS - 1)]).collect()
}

/// The plot, or nothing when no arm has a point.
pub(super) fn svg(lines: &Lines) -> String {
    let values = |of: &dyn Fn(&(f64, Estimate)) -> Vec<f64>| -> Vec<f64> {
        lines.arms.iter().flat_map(|l| l.points.iter().flat_map(of)).filter(|v| v.is_finite()).collect()
    };
    let of_y = |point: &(f64, Estimate)| {
        let ends = point.1.interval.filter(|(low, _)| !lines.logarithmic.1 || *low > 0.0);
        std::iter::once(point.1.value).chain(ends.map(|(a, b)| [a, b]).into_iter().flatten()).collect()
    };
    let across = Axis::spanning(&values(&|p| vec![p.0]), lines.logarithmic.0);
    let (Some(across), Some(up)) = (across, Axis::spanning(&values(&of_y), lines.logarithmic.1)) else {
        return String::new();
    };
    let x = |value: f64| LEFT + (100.0 - LEFT) * across.position(value) / 100.0;
    let y = |value: f64| TOP + HEIGHT * (1.0 - up.position(value) / 100.0);
    let bottom = TOP + HEIGHT;
    let legend = bottom + AXIS;
    let mut out = String::new();
    let _ = write!(
        out,
        "<svg class=\"plot lines\" width=\"100%\" height=\"{:.0}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
         <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>",
        legend + LEGEND * lines.arms.len() as f64 + 4.0,
        escape(&lines.title),
        escape(&format!("{} by {}, a line for each arm.", lines.axes.1, lines.axes.0)),
        id = escape(&lines.id),
    );
    let _ = write!(out, "<text class=\"tick\" x=\"0\" y=\"12\">{}</text>", escape(&lines.axes.1));
    for (tick, words) in up.ticks() {
        let at = y(tick);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}%\" x2=\"100%\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"tick\" x=\"{:.2}%\" y=\"{:.1}\" text-anchor=\"end\">{words}</text>",
            LEFT - 1.0,
            at + 4.0
        );
    }
    let ticks = match lines.categories.len() {
        0 => across.ticks(),
        _ => lines.categories.iter().enumerate().map(|(i, name)| (i as f64, escape(name))).collect(),
    };
    for (tick, words) in ticks {
        let at = x(tick);
        // Words are wider than numbers: the last of them ends at its line.
        let last = if lines.categories.is_empty() { 96.0 } else { 85.0 };
        let anchor = if at > last { "end" } else { "middle" };
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{at:.2}%\" x2=\"{at:.2}%\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text class=\"tick\" x=\"{at:.2}%\" y=\"{:.0}\" text-anchor=\"{anchor}\">{words}</text>",
            bottom + 15.0
        );
    }
    let _ = write!(
        out,
        "<line class=\"axis\" x1=\"{LEFT}%\" x2=\"100%\" y1=\"{bottom}\" y2=\"{bottom}\"/>\
         <text class=\"tick\" x=\"50%\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
        bottom + 32.0,
        escape(&lines.axes.0)
    );
    // Lines need numbers, not percentages: a drawing of 100 units across that is stretched to the width, with strokes that
    // aren't.
    let _ = write!(
        out,
        "<svg x=\"0\" y=\"0\" width=\"100%\" height=\"{bottom}\" viewBox=\"0 0 100 {bottom}\" preserveAspectRatio=\"none\">"
    );
    for line in &lines.arms {
        draw(&mut out, line, &x, &y);
    }
    out.push_str("</svg>");
    // A line of one point, and one over things or settings instead of a quantity, shows where its points are.
    let dotted = |l: &&Line| l.points.len() == 1 || lines.frontier || !lines.categories.is_empty();
    for line in lines.arms.iter().filter(dotted) {
        for (at, value) in line.points.iter().map(|(at, estimate)| (x(*at), y(estimate.value))) {
            let _ = write!(
                out,
                "<g class=\"c{}\"><circle class=\"dot\" cx=\"{at:.2}%\" cy=\"{value:.1}\" r=\"4\"/></g>",
                line.style
            );
        }
    }
    for (i, line) in lines.arms.iter().enumerate() {
        let at = legend + LEGEND * i as f64 + 9.0;
        let _ = write!(
            out,
            "<line class=\"curve c{}\" x1=\"0\" x2=\"30\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"label\" x=\"38\" y=\"{:.1}\">{}</text>",
            line.style,
            at + 4.0,
            escape(&line.label)
        );
    }
    out.push_str("</svg>");
    out
}

fn draw(out: &mut String, line: &Line, x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) {
    let ends: Vec<(f64, f64, f64)> = line
        .points
        .iter()
        .filter_map(|(at, estimate)| {
            let (low, high) = estimate.interval.filter(|(a, b)| a.is_finite() && b.is_finite())?;
            Some((x(*at), y(low), y(high)))
        })
        .collect();
    if ends.len() > 1 {
        let there = ends.iter().map(|(x, low, _)| format!("{x:.2},{low:.1}"));
        let back = ends.iter().rev().map(|(x, _, high)| format!("{x:.2},{high:.1}"));
        let points: Vec<String> = there.chain(back).collect();
        let _ = write!(out, "<polygon class=\"around c{}\" points=\"{}\"/>", line.style, points.join(" "));
    }
    let points: Vec<String> = line.points.iter().map(|(at, e)| format!("{:.2},{:.1}", x(*at), y(e.value))).collect();
    let _ = write!(out, "<polyline class=\"curve c{}\" points=\"{}\"/>", line.style, points.join(" "));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(value: f64, interval: Option<(f64, f64)>) -> Estimate {
        Estimate { value, interval, n: 2 }
    }

    fn lines(points: Vec<Vec<(f64, Estimate)>>) -> Lines {
        let line = |(style, points): (usize, Vec<_>)| Line { label: format!("arm <{style}>"), points, style };
        Lines {
            id: "c".into(),
            title: "t".into(),
            axes: ("steps".into(), "loss".into()),
            logarithmic: (false, false),
            categories: vec![],
            frontier: false,
            arms: points.into_iter().enumerate().map(line).collect(),
        }
    }

    #[test]
    fn no_points_no_plot() {
        assert_eq!(svg(&lines(vec![])), "");
    }

    #[test]
    fn every_arm_has_a_line_a_legend_and_a_band_where_there_are_intervals() {
        let falling = |shift: f64, band: bool| -> Vec<_> {
            let y = |i: f64| 5.0 - i + shift;
            let interval = |i: f64| band.then(|| (y(i) - 0.1, y(i) + 0.1));
            (0..4).map(f64::from).map(|i| (i, estimate(y(i), interval(i)))).collect()
        };
        let out = svg(&lines(vec![falling(0.0, true), falling(0.5, false)]));
        assert_eq!(out.matches("<polyline").count(), 2);
        assert_eq!(out.matches("<polygon").count(), 1);
        assert!(out.contains("arm &lt;0&gt;") && out.contains("arm &lt;1&gt;") && out.contains(">steps<"));
        assert!(!out.contains("NaN") && !out.contains("inf"));
    }

    #[test]
    fn a_single_point_is_a_dot() {
        let out = svg(&lines(vec![vec![(1.0, estimate(2.0, None))]]));
        assert_eq!(out.matches("<circle").count(), 1);
    }

    #[test]
    fn things_have_names_on_the_axis_and_dots() {
        let mut named = lines(vec![(0..2).map(|i| (f64::from(i), estimate(1.0, None))).collect()]);
        named.categories = vec!["tweets & co".into(), "films".into()];
        let out = svg(&named);
        assert!(out.contains(">tweets &amp; co<") && out.contains(">films<") && !out.contains(">0.5<"), "{out}");
        assert_eq!(out.matches("<circle").count(), 2);
    }

    #[test]
    fn a_table_has_the_first_and_the_last_point() {
        let many = lines(vec![(0..100).map(|i| (f64::from(i), estimate(1.0, None))).collect()]);
        let some = some_x(&many);
        assert_eq!((some.len(), some[0], some[5]), (6, 0.0, 99.0));
        let few = lines(vec![vec![(3.0, estimate(1.0, None)), (1.0, estimate(1.0, None))]]);
        assert_eq!(some_x(&few), [1.0, 3.0]);
    }
}
