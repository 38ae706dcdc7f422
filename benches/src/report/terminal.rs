//! The report as tables for the terminal. The claims come last, where the eye is when a run ends.

use super::format::{DASH, date, mean, seconds};
use super::view;
use crate::analysis::{Analysis, ArmResult, Estimate, ExperimentResult, Verdict};
use comfy_table::{
    Attribute, Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table, TableComponent, Width, presets,
};
use std::fmt::Write as _;

/// Most columns of a line.
const WIDTH: u16 = 100;

/// All tables.
pub(super) fn text(analysis: &Analysis, committed: Option<&Analysis>) -> String {
    let mut out = String::new();
    if analysis.experiments.is_empty() {
        out.push_str("This run is empty: it has no results.\n");
        return out;
    }
    let facts = view::machines(analysis).into_iter().next().unwrap_or_default();
    let parts: Vec<String> = facts.into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    prose(&mut out, &view::mode_text(analysis, committed));
    prose(&mut out, &format!("{}. {}.", date(analysis.finished), parts.join(", ")));
    for experiment in &analysis.experiments {
        section(&mut out, experiment);
    }
    claims(&mut out, analysis, committed);
    out
}

fn section(out: &mut String, experiment: &ExperimentResult) {
    let spec = &experiment.spec;
    out.push('\n');
    prose(out, &format!("{} / {}: {}", spec.krate, spec.name, spec.title));
    for notice in view::notices(experiment) {
        prose(out, &format!("! {notice}"));
    }
    if experiment.arms.is_empty() {
        return;
    }
    // Metrics that don't fit are in the page and in the Markdown.
    for metrics in (1..=spec.metrics.len().max(1)).rev() {
        let columns = columns(experiment, metrics);
        let widths: Vec<u16> = columns.iter().skip(1).map(|column| column_width(column)).collect();
        let room = WIDTH.saturating_sub(widths.iter().map(|w| w + GAP).sum::<u16>());
        if room < LABEL && metrics > 1 {
            continue;
        }
        let mut table = table(columns.iter().map(|column| column[0].as_str()));
        for row in 1..columns[0].len() {
            table.add_row(columns.iter().map(|column| Cell::new(&column[row])));
        }
        let labels = width(columns[0].iter()).min(room.max(LABEL) - GAP);
        for (i, (column, width)) in table.column_iter_mut().zip(std::iter::once(labels).chain(widths)).enumerate() {
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width + GAP)));
            if i > 0 {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        print(out, &table);
        return;
    }
}

/// Columns of the table of arms with the first so many metrics: a heading, then one cell an arm.
fn columns(experiment: &ExperimentResult, metrics: usize) -> Vec<Vec<String>> {
    let spec = &experiment.spec;
    let results: Vec<_> = spec.arms.iter().map(|arm| view::arm_result(experiment, arm)).collect();
    let dash = || DASH.to_owned();
    let column = |heading: &str, cell: &dyn Fn(&ArmResult) -> String| -> Vec<String> {
        let cells = results.iter().map(|result| result.map_or_else(dash, cell));
        std::iter::once(heading.to_owned()).chain(cells).map(|text| one_line(&text)).collect()
    };
    let mut columns = vec![
        std::iter::once("Arm").chain(spec.arms.iter().map(|arm| arm.label.as_str())).map(one_line).collect(),
        column("Seeds", &|result| result.seeds.to_string()),
    ];
    for metric in spec.metrics.iter().take(metrics) {
        let cell = |result: &ArmResult| mean(result.metrics.get(&metric.name), metric.decimals);
        columns.push(column(&view::metric_heading(metric), &cell));
    }
    if let (Some(_), Some(metric)) = (view::difference_heading(experiment), spec.metrics.first()) {
        let words = |d: &Estimate| view::difference(&view::advantage(metric, d), metric.decimals);
        let first = spec.arms.first().map_or("", |arm| &arm.label);
        let heading = view::with_unit(&format!("over {first}"), view::difference_unit(metric));
        columns.insert(3, column(&heading, &|result| result.differences.get(&metric.name).map_or_else(dash, words)));
    }
    let wall = |result: &ArmResult| if result.seeds > 0 { seconds(result.wall_s) } else { dash() };
    columns.push(column("Wall (s)", &wall));
    columns
}

fn claims(out: &mut String, analysis: &Analysis, committed: Option<&Analysis>) {
    let rows = view::claim_rows(analysis, committed);
    if rows.is_empty() {
        return;
    }
    let mut table = table(["Verdict", "Claim", "Effect [95 % interval]", "Needs", "n"].into_iter());
    let mut effects = Vec::new();
    let mut before = "";
    for row in &rows {
        let (experiment, result) = (row.experiment, row.result);
        if before != experiment.spec.name {
            before = &experiment.spec.name;
            table.add_row(vec![Cell::new(one_line(before)).add_attribute(Attribute::Bold)]);
        }
        let mut verdict = format!("{} {}", view::symbol(result.verdict), result.words()).replace(" (", "\n  (");
        let mut effect = one_line(&view::effect(experiment, result));
        let mut pairs = view::pairs(result);
        if let Some(full) = row.committed {
            let lines = "\n".repeat(verdict.lines().count());
            let words = full.words().replace(" (", "\n  (");
            let _ = write!(verdict, "\nfull: {} {words}", view::symbol(full.verdict));
            let _ = write!(effect, "{lines}{}", one_line(&view::effect(experiment, full)));
            let _ = write!(pairs, "{lines}{}", view::pairs(full));
        }
        effects.extend(effect.lines().map(str::to_owned));
        let mut cell = Cell::new(verdict);
        if let Some(color) = color(row.committed.map_or(result.verdict, |full| full.verdict)) {
            cell = cell.fg(color);
        }
        table.add_row(vec![
            cell,
            Cell::new(one_line(&format!("{} ({})", result.claim.statement, result.claim.source))),
            Cell::new(effect),
            Cell::new(one_line(&view::criterion(experiment, &result.claim))),
            Cell::new(pairs).set_alignment(CellAlignment::Right),
        ]);
    }
    for (index, width) in [(0, 21), (2, width(effects.iter()).min(34))] {
        if let Some(column) = table.column_mut(index) {
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(width + GAP)));
        }
    }
    out.push('\n');
    prose(out, &view::tally_text(&rows));
    print(out, &table);
    prose(out, "Effects are paired differences, turned so that positive is better, or ratios of medians (×).");
}

/// Columns between two columns of a table.
const GAP: u16 = 2;
/// Fewest columns for the label of an arm.
const LABEL: u16 = 16;

/// Columns that the widest text takes. All that the report writes is one column a character.
fn width<'a>(texts: impl Iterator<Item = &'a String>) -> u16 {
    texts.map(|text| text.chars().count()).max().unwrap_or(0).min(usize::from(WIDTH)) as u16
}

/// Width of a column of numbers: cells stay on one line, the heading is broken between words.
fn column_width(column: &[String]) -> u16 {
    let words: Vec<String> = column[0].split(' ').map(str::to_owned).collect();
    width(words.iter().chain(&column[1..]))
}

/// A table with a line below its head and no others.
fn table<'a>(header: impl Iterator<Item = &'a str>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_style(TableComponent::HeaderLines, '─');
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    table.set_header(header.map(|text| Cell::new(text).add_attribute(Attribute::Bold)));
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP));
    }
    table
}

fn print(out: &mut String, table: &Table) {
    let _ = writeln!(out, "{}", table.trim_fmt());
}

fn color(verdict: Verdict) -> Option<Color> {
    match verdict {
        Verdict::Holds => Some(Color::Green),
        Verdict::Contradicted => Some(Color::Red),
        Verdict::NotShown => Some(Color::Yellow),
        Verdict::TooFewSeeds | Verdict::Descriptive | Verdict::NoData => None,
    }
}

/// Text without line breaks and without control characters, which could drive the terminal.
fn one_line(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    clean.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Writes a line of prose, broken between words.
fn prose(out: &mut String, text: &str) {
    let mut length = 0;
    for word in one_line(text).split(' ') {
        let size = word.chars().count();
        if length > 0 && length + 1 + size > usize::from(WIDTH) {
            out.push_str("\n  ");
            length = 2;
        } else if length > 0 {
            out.push(' ');
            length += 1;
        }
        out.push_str(word);
        length += size;
    }
    out.push('\n');
}
