//! What an experiment says about itself before it runs.

use serde::{Deserialize, Serialize};

/// How much is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The protocol with the fewest seeds. Effects over seeds are shown without a verdict; timings, which are many
    /// samples in every run, get theirs.
    #[default]
    Quick,
    /// The protocol as its specification describes it.
    Full,
}

impl Mode {
    /// `"quick"` or `"full"`.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Quick => "quick",
            Mode::Full => "full",
        }
    }
}

/// Which way a metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Larger is better.
    Higher,
    /// Smaller is better.
    Lower,
    /// Shown for information.
    Neither,
}

/// A number that every run of an experiment reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metric {
    /// Key in the results.
    pub name: String,
    /// Words for tables.
    pub label: String,
    /// Unit, or empty.
    pub unit: String,
    /// Which way it is better.
    pub direction: Direction,
    /// Decimals in tables.
    pub decimals: usize,
}

impl Metric {
    /// A metric from its parts.
    pub fn new(name: &str, label: &str, unit: &str, direction: Direction, decimals: usize) -> Self {
        Self { name: name.into(), label: label.into(), unit: unit.into(), direction, decimals }
    }
}

/// What an arm is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The method under test.
    Method,
    /// What it is compared with.
    Baseline,
    /// The method with a part taken out.
    Ablation,
    /// Shown for orientation: it used information that no user has, or another budget.
    Reference,
    /// Another project's implementation.
    Peer,
}

/// One configuration that is run with every seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// Key in the results.
    pub name: String,
    /// Words for tables.
    pub label: String,
    /// What it is for.
    pub role: Role,
    /// Settings, and where they come from.
    pub note: String,
}

impl Arm {
    /// An arm from its parts.
    pub fn new(name: &str, label: &str, role: Role, note: impl Into<String>) -> Self {
        Self { name: name.into(), label: label.into(), role, note: note.into() }
    }
}

/// What the interval of a paired difference must show. Differences are turned so that positive is better.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Test {
    /// Better by more than the margin.
    Superior(f64),
    /// Not worse by more than the margin.
    NonInferior(f64),
    /// Within the margin either way.
    Equivalent(f64),
    /// The ratio of medians, arm over reference, is at most this.
    RatioAtMost(f64),
    /// The ratio of medians, reference over arm (how many times faster), is at least this.
    SpeedupAtLeast(f64),
    /// Shown without a verdict.
    Descriptive,
}

/// A statement that an experiment tests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// Key in the results.
    pub name: String,
    /// The statement, as a sentence.
    pub statement: String,
    /// Who says so: "paper", "prior work", "ours".
    pub source: String,
    /// The metric that it is about.
    pub metric: String,
    /// The arm that it praises.
    pub arm: String,
    /// The arm that it is compared with.
    pub reference: String,
    /// What must be shown.
    pub test: Test,
}

impl Claim {
    /// A claim from its parts; `arms` are the one that it praises and the one that it is compared with.
    pub fn new(name: &str, statement: &str, source: &str, metric: &str, arms: (&str, &str), test: Test) -> Self {
        Self {
            name: name.into(),
            statement: statement.into(),
            source: source.into(),
            metric: metric.into(),
            arm: arms.0.into(),
            reference: arms.1.into(),
            test,
        }
    }
}

/// A curve that an experiment draws, one line an arm: a loss over steps, a scaling, a frontier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Key in the results.
    pub name: String,
    /// What it shows, in a few words.
    pub title: String,
    /// Words and unit of the horizontal axis.
    pub x: String,
    /// Words and unit of the vertical axis.
    pub y: String,
    /// Whether the axes are logarithmic.
    pub logarithmic: (bool, bool),
    /// Decimals of y in tables.
    pub decimals: usize,
    /// For a frontier (this against that over the values of a setting): the series whose points (setting, x) give the
    /// horizontal position of the points (setting, y) of this curve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub horizontal: Option<String>,
    /// The arms that are drawn; empty for all that have points. A plot of fifteen lines shows nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arms: Vec<String>,
    /// Words for x = 0, 1, 2, …, where x counts things that have names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub categories: Vec<String>,
}

impl Curve {
    /// A curve over plain axes.
    pub fn new(name: &str, title: &str, x: &str, y: &str, decimals: usize) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            x: x.into(),
            y: y.into(),
            logarithmic: (false, false),
            decimals,
            horizontal: None,
            arms: Vec::new(),
            categories: Vec::new(),
        }
    }

    /// A frontier: its points are (setting, y), and the series `name` has the points (setting, x).
    #[must_use]
    pub fn over(mut self, name: &str) -> Self {
        self.horizontal = Some(name.into());
        self
    }

    /// Drawn for these arms only.
    #[must_use]
    pub fn only(mut self, arms: &[&str]) -> Self {
        self.arms = arms.iter().map(|&name| name.into()).collect();
        self
    }

    /// Over logarithmic axes: x, y.
    #[must_use]
    pub fn logarithmic(self, x: bool, y: bool) -> Self {
        Self { logarithmic: (x, y), ..self }
    }

    /// A curve whose x are the numbers of these things.
    #[must_use]
    pub fn of(mut self, categories: &[&str]) -> Self {
        self.categories = categories.iter().map(|&name| name.into()).collect();
        self
    }
}

/// Whether an experiment belongs to what `bench` runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Run by `bench` and `bench CRATE`.
    Core,
    /// Run with `--full` and by name.
    FullOnly,
    /// Run with `--peers` and by name.
    Peers,
    /// Run by name only: ablations and sweeps.
    ByName,
}

/// An experiment's description.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Key in the results and on the command line.
    pub name: String,
    /// The crate it is about.
    pub krate: String,
    /// Heading.
    pub title: String,
    /// What is done, in a few sentences: data, protocol, selection of hyper-parameters.
    pub protocol: String,
    /// Data sets that must be in the cache.
    pub data: Vec<String>,
    /// When it runs.
    pub kind: Kind,
    /// The metrics, the main one first.
    pub metrics: Vec<Metric>,
    /// The arms, the reference of the tables first.
    pub arms: Vec<Arm>,
    /// The claims.
    pub claims: Vec<Claim>,
    /// Its curves, for which runs report points.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<Curve>,
    /// Seeds for `--quick` and `--full`.
    pub seeds: (u64, u64),
    /// Fewest seeds for which a verdict is given.
    pub seeds_for_verdict: u64,
    /// Threads, or 0 for all that the user gives. Small networks are fastest on one, and one thread makes a run
    /// repeat bit for bit.
    pub threads: usize,
    /// Seconds of one run of all arms with one seed in a quick and in a full run, for the estimate (two cores).
    pub seconds_per_seed: (f64, f64),
}

impl Spec {
    /// The metric with this name.
    pub fn metric(&self, name: &str) -> Option<&Metric> {
        self.metrics.iter().find(|m| m.name == name)
    }

    /// The arm with this name.
    pub fn arm(&self, name: &str) -> Option<&Arm> {
        self.arms.iter().find(|a| a.name == name)
    }

    /// Seconds of one run of all arms with one seed in a mode.
    pub fn seconds(&self, mode: Mode) -> f64 {
        match mode {
            Mode::Quick => self.seconds_per_seed.0,
            Mode::Full => self.seconds_per_seed.1,
        }
    }

    /// Number of seeds in a mode, unless the user says otherwise.
    pub fn default_seeds(&self, mode: Mode) -> u64 {
        match mode {
            Mode::Quick => self.seeds.0,
            Mode::Full => self.seeds.1,
        }
    }
}
