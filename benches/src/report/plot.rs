//! Dot-and-interval plots as inline SVG.
//!
//! Horizontal positions are percentages and there is no `viewBox`: the plot takes the width of the page while
//! text keeps its size, on a phone as on a wide screen. Each row has its label and numbers on one line and its
//! interval on the next. Colours are CSS classes and `currentColor`.

use super::html::escape;
use std::fmt::Write as _;

/// One line of a plot.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    /// Words at the left.
    pub(super) label: String,
    /// Numbers at the right.
    pub(super) numbers: String,
    /// The dot.
    pub(super) value: f64,
    /// The line through it.
    pub(super) interval: Option<(f64, f64)>,
    /// CSS class that colours the mark.
    pub(super) class: &'static str,
    /// Whether the dot is filled.
    pub(super) filled: bool,
    /// A shaded range: the margin of a claim.
    pub(super) band: Option<(f64, f64)>,
    /// A bound that the claim names.
    pub(super) bound: Option<f64>,
}

/// A plot: rows over one axis.
#[derive(Debug, Clone, Default)]
pub(super) struct Plot {
    /// Unique in the page.
    pub(super) id: String,
    /// Short name, for readers that don't see it.
    pub(super) title: String,
    /// What it shows, in a sentence.
    pub(super) description: String,
    /// Words below the axis.
    pub(super) axis: String,
    /// The rows, from the top.
    pub(super) rows: Vec<Row>,
    /// A reference line: 0 for differences, 1 for ratios.
    pub(super) anchor: Option<f64>,
    /// Whether the axis may be logarithmic, which it is when the values are positive and span a decade.
    pub(super) logarithmic: bool,
}

const TOP: f64 = 4.0;
const LINE: f64 = 15.0;
const AXIS: f64 = 42.0;
/// Free space at both sides, percent.
const SIDE: f64 = 2.0;

/// The plot, or nothing when no row has a number.
pub(super) fn svg(plot: &Plot) -> String {
    let rows: Vec<&Row> = plot.rows.iter().filter(|row| row.value.is_finite()).collect();
    let Some(axis) = Axis::over(&rows, plot) else { return String::new() };
    let x = |value: f64| axis.position(value);
    // Where label and numbers don't fit beside each other on a phone, each has a line of its own.
    let lines = if rows.iter().any(|row| length(&row.label) + length(&row.numbers) > MOST) { 2.0 } else { 1.0 };
    let height = LINE * lines + 27.0;
    let bottom = TOP + height * rows.len() as f64;
    let mut out = String::new();
    let _ = write!(
        out,
        "<svg class=\"plot\" width=\"100%\" height=\"{:.0}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
         <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>",
        bottom + AXIS,
        escape(&plot.title),
        escape(&plot.description),
        id = escape(&plot.id),
    );
    let ticks = axis.ticks();
    for (tick, _) in &ticks {
        let at = x(*tick);
        let _ =
            write!(out, "<line class=\"grid\" x1=\"{at:.2}%\" x2=\"{at:.2}%\" y1=\"{TOP:.0}\" y2=\"{bottom:.0}\"/>");
    }
    for (i, row) in rows.iter().enumerate() {
        if let Some((from, to)) = row.band.filter(|(a, b)| a.is_finite() && b.is_finite()) {
            let (from, to) = (x(from.min(to)), x(from.max(to)));
            let _ = write!(
                out,
                "<rect class=\"band\" x=\"{from:.2}%\" width=\"{:.2}%\" y=\"{:.1}\" height=\"16\"/>",
                to - from,
                TOP + height * i as f64 + LINE * lines + 7.0
            );
        }
    }
    if let Some(anchor) = plot.anchor {
        let at = x(anchor);
        let _ =
            write!(out, "<line class=\"anchor\" x1=\"{at:.2}%\" x2=\"{at:.2}%\" y1=\"{TOP:.0}\" y2=\"{bottom:.0}\"/>");
    }
    for (i, row) in rows.iter().enumerate() {
        draw_row(&mut out, row, TOP + height * i as f64, lines, &x);
    }
    let _ = write!(out, "<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"{bottom:.0}\" y2=\"{bottom:.0}\"/>");
    for (tick, words) in &ticks {
        let at = x(*tick);
        let anchor = if at < 4.0 {
            "start"
        } else if at > 96.0 {
            "end"
        } else {
            "middle"
        };
        let y = bottom + 15.0;
        let _ = write!(out, "<text class=\"tick\" x=\"{at:.2}%\" y=\"{y:.0}\" text-anchor=\"{anchor}\">{words}</text>");
    }
    let (y, words) = (bottom + 34.0, escape(&shortened(&plot.axis, MOST)));
    let _ = write!(out, "<text class=\"tick\" x=\"50%\" y=\"{y:.0}\" text-anchor=\"middle\">{words}</text></svg>");
    out
}

fn draw_row(out: &mut String, row: &Row, top: f64, lines: f64, x: &impl Fn(f64) -> f64) {
    let (words, numbers, line) = (top + LINE, top + LINE * lines, top + LINE * (lines + 1.0));
    let (label, at, anchor) =
        if lines > 1.0 { (shortened(&row.label, MOST), "0", "start") } else { (row.label.clone(), "100%", "end") };
    let _ = write!(
        out,
        "<text class=\"label\" x=\"0\" y=\"{words:.1}\">{}</text>\
         <text class=\"numbers\" x=\"{at}\" y=\"{numbers:.1}\" text-anchor=\"{anchor}\">{}</text><g class=\"{}\">",
        escape(&label),
        escape(&row.numbers),
        row.class
    );
    if let Some(bound) = row.bound.filter(|b| b.is_finite()) {
        let at = x(bound);
        let (from, to) = (line - 10.0, line + 10.0);
        let _ = write!(out, "<line class=\"bound\" x1=\"{at:.2}%\" x2=\"{at:.2}%\" y1=\"{from:.1}\" y2=\"{to:.1}\"/>");
    }
    if let Some((low, high)) = row.interval.filter(|(a, b)| a.is_finite() && b.is_finite()) {
        let (from, to) = (x(low), x(high));
        let _ =
            write!(out, "<line class=\"span\" x1=\"{from:.2}%\" x2=\"{to:.2}%\" y1=\"{line:.1}\" y2=\"{line:.1}\"/>");
        for end in [from, to] {
            let (y1, y2) = (line - 4.0, line + 4.0);
            let _ =
                write!(out, "<line class=\"span\" x1=\"{end:.2}%\" x2=\"{end:.2}%\" y1=\"{y1:.1}\" y2=\"{y2:.1}\"/>");
        }
    }
    let shape = if row.filled { "dot" } else { "dot open" };
    let _ = write!(out, "<circle class=\"{shape}\" cx=\"{:.2}%\" cy=\"{line:.1}\" r=\"4.5\"/></g>", x(row.value));
}

/// Characters that fit on a line on a phone.
const MOST: usize = 52;

fn length(text: &str) -> usize {
    text.chars().count()
}

fn shortened(label: &str, most: usize) -> String {
    if length(label) <= most {
        return label.to_owned();
    }
    let kept: String = label.chars().take(most - 1).collect();
    format!("{}…", kept.trim_end())
}

/// From values to positions.
pub(super) struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Axis {
    /// What the rows need, with some room; nothing when there is no number or the range overflows.
    fn over(rows: &[&Row], plot: &Plot) -> Option<Self> {
        let pair = |pair: Option<(f64, f64)>| pair.map(|(a, b)| [a, b]).into_iter().flatten();
        let values = rows.iter().flat_map(|row| {
            std::iter::once(row.value).chain(pair(row.interval)).chain(pair(row.band)).chain(row.bound)
        });
        let values: Vec<f64> = values.chain(plot.anchor).filter(|v| v.is_finite()).collect();
        if rows.is_empty() {
            return None;
        }
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self::spanning(&values, plot.logarithmic && low > 1e-9 && high / low >= 10.0)
    }

    /// From the smallest to the largest value, with some room; nothing when there is no value, the range overflows, or a
    /// logarithmic axis would need the logarithm of what isn't positive.
    pub(super) fn spanning(values: &[f64], logarithmic: bool) -> Option<Self> {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if values.is_empty() || (logarithmic && low <= 0.0) {
            return None;
        }
        if logarithmic {
            let room = (high / low).powf(0.06).max(1.05);
            let (low, high) = (low / room, high * room);
            return (low > 0.0 && high.is_finite()).then_some(Self { low, high, logarithmic: true });
        }
        let room = if high > low { (high - low) * 0.06 } else { (high.abs() * 0.05).max(1e-3) };
        let (low, high) = (low - room, high + room);
        (low < high && (high - low).is_finite()).then_some(Self { low, high, logarithmic: false })
    }

    /// Percent from the left.
    pub(super) fn position(&self, value: f64) -> f64 {
        let part = if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        (SIDE + (100.0 - 2.0 * SIDE) * part).clamp(0.0, 100.0)
    }

    /// Round values between the ends, with their words.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        if !self.logarithmic {
            let (ticks, decimals) = ticks(self.low, self.high);
            return ticks.into_iter().map(|tick| (tick, tick_text(tick, decimals))).collect();
        }
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let steps: &[f64] = if self.high / self.low > 200.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = decades.flat_map(|decade| steps.iter().map(move |step| (step * 10f64.powi(decade), decade)));
        all.filter(|(tick, _)| (self.low..=self.high).contains(tick))
            .map(|(tick, decade)| (tick, tick_text(tick, usize::try_from(-decade).unwrap_or(0))))
            .collect()
    }
}

/// Round numbers between the ends, and the decimals that they need.
fn ticks(low: f64, high: f64) -> (Vec<f64>, usize) {
    let raw = (high - low) / 5.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|&step| step >= raw).unwrap_or(raw);
    let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    let first = (low / step).ceil();
    let all = (0..8).map(|i| (first + f64::from(i)) * step).take_while(|&tick| tick <= high).collect();
    (all, decimals)
}

fn tick_text(tick: f64, decimals: usize) -> String {
    if tick.abs() >= 1e6 { format!("{tick:.1e}").replace('-', "−") } else { super::format::fixed(tick, decimals) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(value: f64) -> Row {
        Row { label: "a".into(), value, interval: Some((value - 1.0, value + 1.0)), ..Row::default() }
    }

    fn plot(rows: Vec<Row>) -> String {
        svg(&Plot { id: "p".into(), title: "t".into(), description: "d".into(), rows, ..Plot::default() })
    }

    #[test]
    fn no_numbers_no_plot() {
        assert_eq!(plot(vec![]), "");
        assert_eq!(plot(vec![row(f64::NAN), row(f64::INFINITY)]), "");
    }

    #[test]
    fn rows_without_a_number_are_left_out_and_bad_ends_are_not_drawn() {
        let mut odd = row(1.0);
        odd.interval = Some((f64::NEG_INFINITY, 2.0));
        odd.band = Some((f64::NAN, 0.0));
        odd.bound = Some(f64::NAN);
        let out = plot(vec![odd, row(f64::NAN)]);
        assert_eq!(out.matches("<circle").count(), 1);
        assert!(!out.contains("NaN") && !out.contains("inf"), "{out}");
    }

    #[test]
    fn extreme_ranges_do_not_panic_or_leak() {
        for values in [vec![1e308, -1e308], vec![1e-300, 2e-300], vec![1e15, 1e15 + 1.0], vec![0.0], vec![5e-324]] {
            let out = plot(values.into_iter().map(|value| Row { value, ..Row::default() }).collect());
            assert!(!out.contains("NaN") && !out.contains("inf"), "{out}");
        }
    }

    #[test]
    fn numbers_go_below_a_label_that_leaves_no_room() {
        let labelled = |label: &str| plot(vec![Row { label: label.into(), numbers: "1.0".into(), ..row(1.0) }]);
        assert!(labelled("SAM").contains("x=\"100%\" y=\"19.0\" text-anchor=\"end\">1.0"));
        let long = "the quick brown fox ".repeat(5);
        assert!(labelled(&long).contains("x=\"0\" y=\"34.0\" text-anchor=\"start\">1.0"));
        assert!(labelled(&long).contains("…") && !labelled(&long).contains(&long));
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let (found, decimals) = ticks(91.3, 97.9);
        assert_eq!((found, decimals), (vec![92.0, 94.0, 96.0], 0));
        let (found, decimals) = ticks(-0.12, 0.31);
        assert!(found.iter().all(|t| (-0.12..=0.31).contains(t)) && decimals == 1, "{found:?} {decimals}");
    }

    #[test]
    fn times_over_decades_get_a_logarithmic_axis_and_others_do_not() {
        let of = |values: &[f64], logarithmic| {
            let rows = values.iter().map(|&value| Row { value, ..Row::default() }).collect();
            svg(&Plot { id: "p".into(), rows, logarithmic, ..Plot::default() })
        };
        let ticks = |out: &str| out.matches("class=\"grid\"").count();
        let wide = of(&[0.05, 0.5, 5.0], true);
        assert!(wide.contains("cx=\"50.00%\"") && wide.contains(">0.05<") && wide.contains(">2<"), "{wide}");
        assert!(ticks(&wide) >= 6, "{wide}");
        assert_eq!(of(&[1.0, 2.0], true), of(&[1.0, 2.0], false));
        assert_eq!(of(&[0.0, 20.0], true), of(&[0.0, 20.0], false));
    }

    #[test]
    fn every_position_is_inside_the_page() {
        let mut wide = row(3.0);
        wide.band = Some((-50.0, 50.0));
        wide.bound = Some(80.0);
        let out = plot(vec![wide, row(-20.0)]);
        for part in out.split("%\"").filter_map(|part| part.rsplit('"').next()) {
            if let Ok(at) = part.parse::<f64>() {
                assert!((0.0..=100.0).contains(&at), "{at}");
            }
        }
    }
}
