//! The report from an analysis: one HTML page, Markdown for `docs/results/`, and tables for the terminal.
//!
//! The three forms say the same: every claim with its estimate, interval and verdict; then every experiment
//! with its protocol, arms and cost. What failed, was skipped or is incomplete is named where a reader looks
//! for its numbers.

mod figures;
mod format;
mod html;
mod line;
mod markdown;
mod plot;
mod terminal;
mod view;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod tests;

use crate::analysis::Analysis;

/// One self-contained page. `committed` is the full run of `docs/results/`, shown beside claims for which a
/// quick run has too few seeds.
pub fn html(analysis: &Analysis, committed: Option<&Analysis>) -> String {
    html::page(analysis, committed)
}

/// GitHub Markdown: the same content without plots.
pub fn markdown(analysis: &Analysis) -> String {
    markdown::document(analysis)
}

/// Tables for the terminal, at most 100 columns wide. `committed` as for [`html`].
pub fn terminal(analysis: &Analysis, committed: Option<&Analysis>) -> String {
    terminal::text(analysis, committed)
}
