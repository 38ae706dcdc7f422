//! What people see while they wait: notes, byte meters, spinners, tables. All of it on stderr, so that stdout holds results only.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Says one thing that was done or is about to be done.
pub(crate) fn note(text: impl AsRef<str>) {
    eprintln!("{}", text.as_ref());
}

/// How often progress is said where there is no terminal to draw on.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// A byte bar on a terminal; elsewhere a line now and then.
pub(crate) struct Meter {
    bar: ProgressBar,
    what: String,
    total: u64,
    at: u64,
    said: Instant,
}

impl Meter {
    /// Starts a meter for `total` bytes.
    pub(crate) fn start(what: impl Into<String>, total: u64) -> Self {
        let what = what.into();
        let bar = ProgressBar::with_draw_target(Some(total), target());
        bar.set_style(style("{msg} [{bar:20}] {decimal_bytes} of {decimal_total_bytes}, {eta} left"));
        bar.set_message(what.clone());
        bar.enable_steady_tick(Duration::from_millis(200));
        if !terminal() {
            note(format!("{what} ({})", bytes(total)));
        }
        Self { bar, what, total, at: 0, said: Instant::now() }
    }

    /// Moves to `at` bytes.
    pub(crate) fn set(&mut self, at: u64) {
        self.at = at.min(self.total);
        self.bar.set_position(self.at);
        if self.said.elapsed() > LINE_EVERY && !terminal() {
            match (self.at * 100).checked_div(self.total) {
                // npm writes elsewhere first.
                None | Some(0) => note(format!("{}: no bytes yet", self.what)),
                Some(percent) => note(format!("{}: {percent} %", self.what)),
            }
            self.said = Instant::now();
        }
    }

    /// Moves on by `more` bytes.
    pub(crate) fn add(&mut self, more: u64) {
        self.set(self.at + more);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A line that turns and counts seconds on a terminal; elsewhere one line at the start and one a minute.
pub(crate) struct Spinner {
    bar: ProgressBar,
    started: Instant,
    minutes: u64,
    text: String,
}

impl Spinner {
    /// Starts it.
    pub(crate) fn start(text: impl Into<String>) -> Self {
        let text = text.into();
        let bar = ProgressBar::with_draw_target(None, target());
        bar.set_style(style("{spinner} {msg} ({elapsed})"));
        bar.set_message(text.clone());
        bar.enable_steady_tick(Duration::from_millis(120));
        if !terminal() {
            note(&text);
        }
        Self { bar, started: Instant::now(), minutes: 0, text }
    }

    /// Changes the text.
    pub(crate) fn say(&mut self, text: impl Into<String>) {
        self.text = text.into();
        self.bar.set_message(self.text.clone());
        let minutes = self.started.elapsed().as_secs() / 60;
        if minutes > self.minutes && !terminal() {
            self.minutes = minutes;
            note(format!("{} ({})", self.text, duration(self.started.elapsed())));
        }
    }

    /// Prints a line above it.
    pub(crate) fn line(&self, text: &str) {
        if terminal() {
            self.bar.println(text);
        } else {
            note(text);
        }
    }

    /// The time since its start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn terminal() -> bool {
    stderr().is_terminal()
}

fn target() -> ProgressDrawTarget {
    if terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A table with a head, fitted to the terminal's width.
pub(crate) fn table<const N: usize>(head: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(head);
    table
}

/// `530604548` as `531 MB`.
pub(crate) fn bytes(count: u64) -> String {
    let value = count as f64;
    match count {
        0..1_000 => format!("{count} bytes"),
        1_000..1_000_000 => format!("{:.0} kB", value / 1e3),
        1_000_000..10_000_000 => format!("{:.1} MB", value / 1e6),
        10_000_000..1_000_000_000 => format!("{:.0} MB", value / 1e6),
        _ => format!("{:.1} GB", value / 1e9),
    }
}

/// A duration as `4.2 s` or `3 min 20 s`.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {} s", seconds / 60, seconds % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_like_people_write_them() {
        for (count, text) in [
            (999, "999 bytes"),
            (29_491, "29 kB"),
            (4_901_319, "4.9 MB"),
            (530_604_548, "531 MB"),
            (2_600_000_000, "2.6 GB"),
        ] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(duration(Duration::from_millis(4210)), "4.2 s");
        assert_eq!(duration(Duration::from_secs(200)), "3 min 20 s");
    }
}
