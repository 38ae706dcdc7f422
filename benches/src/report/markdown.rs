//! The report as GitHub Markdown, for `docs/results/README.md`.

use super::format::{DASH, date, exact, fixed, mean, mebibytes, seconds};
use super::line;
use super::view;
use crate::analysis::{Analysis, Estimate, ExperimentResult};
use crate::spec::Curve;
use std::fmt::Write as _;

/// The whole document.
pub(super) fn document(analysis: &Analysis) -> String {
    let mut out = String::from("# Benchmark results\n\n");
    let rows = view::claim_rows(analysis, None);
    let _ = writeln!(out, "{}\n", view::mode_text(analysis, None));
    if analysis.experiments.is_empty() {
        out.push_str("This run is empty: it has no results.\n");
        return out;
    }
    let _ = writeln!(
        out,
        "Made with `{}` on {}. This file is written by `cargo xtask report`; changes by hand are lost.\n",
        analysis.command.replace('`', "'"),
        date(analysis.finished)
    );
    provenance(&mut out, analysis);
    out.push_str("\n## What was shown\n\n");
    let _ = writeln!(out, "{}\n", view::tally_text(&rows));
    out.push_str(LEGEND);
    claims(&mut out, analysis);
    for (krate, experiments) in view::by_crate(analysis) {
        let _ = writeln!(out, "\n## {}", escape(krate));
        for experiment in experiments {
            section(&mut out, experiment);
        }
    }
    out
}

const LEGEND: &str = "Effects are mean paired differences over seeds with 95 % intervals, turned so that positive \
    is better; effects with × are ratios of medians; pp are percentage points. A claim holds when its whole interval is where the column \
    \"needs\" says. Verdicts are computed, never written by hand.\n\n";

fn provenance(out: &mut String, analysis: &Analysis) {
    let machines = view::machines(analysis);
    let Some(first) = machines.first() else { return };
    let mut header = vec![String::new()];
    header.extend(
        (1..=machines.len()).map(|i| if machines.len() == 1 { "This run".into() } else { format!("Part {i}") }),
    );
    let rows = first.iter().enumerate().map(|(i, (name, _))| {
        let mut row = vec![(*name).to_owned()];
        row.extend(machines.iter().map(|machine| escape(&machine[i].1)));
        row
    });
    table(out, &header, &[], rows);
}

fn claims(out: &mut String, analysis: &Analysis) {
    let header: Vec<String> =
        ["Verdict", "Claim", "Source", "Compared", "Effect [95 % interval]", "Needs", "n"].map(str::to_owned).to_vec();
    let rows = view::claim_rows(analysis, None).into_iter().map(|row| {
        let (experiment, result) = (row.experiment, row.result);
        vec![
            format!("{} {}", view::symbol(result.verdict), result.words()),
            escape(&result.claim.statement),
            escape(&result.claim.source),
            escape(&view::comparison(experiment, &result.claim)),
            escape(&view::effect(experiment, result)),
            escape(&view::criterion(experiment, &result.claim)),
            view::pairs(result),
        ]
    });
    table(out, &header, &[6], rows);
}

fn section(out: &mut String, experiment: &ExperimentResult) {
    let spec = &experiment.spec;
    let _ = writeln!(out, "\n### {}\n", escape(&spec.title));
    let _ = writeln!(out, "`{}`. {}\n", spec.name.replace('`', "'"), escape(&view::facts(experiment)));
    let _ = writeln!(out, "{}\n", escape(&spec.protocol));
    let notices = view::notices(experiment);
    for notice in &notices {
        let _ = writeln!(out, "- **{}**", escape(notice));
    }
    if !notices.is_empty() {
        out.push('\n');
    }
    if !experiment.arms.is_empty() {
        arms(out, experiment);
    }
    for curve in &spec.curves {
        points(out, experiment, curve);
    }
}

/// A table of a curve: some of its points, arms as columns.
fn points(out: &mut String, experiment: &ExperimentResult, curve: &Curve) {
    let lines = line::of(experiment, curve, "");
    if lines.arms.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{}: {} by {}\n", escape(&curve.title), escape(&curve.y), escape(&curve.x));
    if lines.frontier {
        let header = ["Arm".to_owned(), escape(&curve.x), escape(&curve.y)];
        let rows = lines.arms.iter().flat_map(|line| {
            let row = |(x, y): &(f64, Estimate)| {
                vec![escape(&line.label), fixed(*x, curve.decimals), mean(Some(y), curve.decimals)]
            };
            line.points.iter().map(row).collect::<Vec<_>>()
        });
        table(out, &header, &[1, 2], rows);
        return;
    }
    let mut header = vec![escape(&curve.x)];
    header.extend(lines.arms.iter().map(|line| escape(&line.label)));
    let right: Vec<usize> = (0..header.len()).collect();
    let rows = line::some_x(&lines).into_iter().map(|x| {
        let cell = |line: &line::Line| {
            let found = line.points.iter().find(|(at, _)| *at == x);
            found.map_or_else(|| DASH.to_owned(), |(_, y)| mean(Some(y), curve.decimals))
        };
        let named = curve.categories.get(x as usize).filter(|_| x >= 0.0);
        let x = named.map_or_else(|| exact(x), |name| escape(name));
        std::iter::once(x).chain(lines.arms.iter().map(cell)).collect()
    });
    table(out, &header, &right, rows);
}

fn arms(out: &mut String, experiment: &ExperimentResult) {
    let spec = &experiment.spec;
    let difference = view::difference_heading(experiment);
    let mut header: Vec<String> = ["Arm", "For", "Seeds"].map(str::to_owned).to_vec();
    header.extend(spec.metrics.iter().map(|metric| escape(&view::metric_heading(metric))));
    if let Some(heading) = &difference {
        header.insert(4, escape(heading));
    }
    header.extend(["Wall (s)", "CPU (s)", "Peak (MiB)", "Settings"].map(str::to_owned));
    let right: Vec<usize> = (2..header.len() - 1).collect();
    let rows = spec.arms.iter().map(|arm| {
        let result = view::arm_result(experiment, arm);
        let mut row = vec![escape(&arm.label), view::role(arm.role).to_owned()];
        row.push(result.map_or_else(|| DASH.to_owned(), |r| r.seeds.to_string()));
        row.extend(spec.metrics.iter().map(|m| mean(result.and_then(|r| r.metrics.get(&m.name)), m.decimals)));
        if difference.is_some() {
            let metric = &spec.metrics[0];
            let found = result.and_then(|r| r.differences.get(&metric.name));
            let words = found.map_or_else(
                || DASH.to_owned(),
                |d| escape(&view::difference(&view::advantage(metric, d), metric.decimals)),
            );
            row.insert(4, words);
        }
        let cost = result.filter(|r| r.seeds > 0).map(|r| [seconds(r.wall_s), seconds(r.cpu_s), mebibytes(r.peak_mib)]);
        row.extend(cost.unwrap_or([DASH; 3].map(str::to_owned)));
        row.push(escape(&arm.note));
        row
    });
    table(out, &header, &right, rows);
}

/// A table whose columns in `right` are aligned to the right. Cells are escaped already.
fn table(out: &mut String, header: &[String], right: &[usize], rows: impl Iterator<Item = Vec<String>>) {
    let rule = (0..header.len()).map(|i| if right.contains(&i) { "---:" } else { "---" }.to_owned()).collect();
    for row in [header.to_vec(), rule].into_iter().chain(rows) {
        let _ = writeln!(out, "| {} |", row.join(" | "));
    }
}

/// Text that Markdown shows as it is, on one line.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut previous = ' ';
    let mut characters = text.trim().chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '\\' | '`' | '*' | '[' | ']' | '|' | '~' | '$' => out.extend(['\\', c]),
            // Underscores mean emphasis only at the edge of a word.
            '_' if previous.is_alphanumeric() && characters.peek().is_some_and(|c| c.is_alphanumeric()) => out.push(c),
            '_' => out.push_str("\\_"),
            // Headings, lists and quotes start a line.
            '#' | '+' | '-' if out.is_empty() => out.extend(['\\', c]),
            c if c != '\u{a0}' && (c.is_whitespace() || c.is_control()) => {
                if !out.ends_with(' ') {
                    out.push(' ');
                }
            }
            c => out.push(c),
        }
        previous = c;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn text_cannot_break_a_table_or_become_markup() {
        for (text, expected) in [
            ("a|b", "a\\|b"),
            ("one\ntwo\r\n\tthree", "one two three"),
            ("<img src=x>", "&lt;img src=x&gt;"),
            ("*bold* `code`", "\\*bold\\* \\`code\\`"),
            ("step_ms and _this_", "step_ms and \\_this\\_"),
            ("# title", "\\# title"),
            ("ends in \\", "ends in \\\\"),
        ] {
            assert_eq!(escape(text), expected);
        }
    }
}
