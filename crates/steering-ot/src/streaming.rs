//! A map that follows a stream: mini-batch k-means on logged activations, refits with a warm-started plan
//! \[reconstruction: ours; mini-batch k-means by Sculley 2010\].

use crate::chars::{CharsMap, Extra, FitReport, SideReport, Warning, couple};
use crate::config::{CharsConfig, Coupling, Epsilon, KMeansConfig};
use crate::data::{check, squared_distance_to};
use crate::{Error, Result, kmeans, transport};
use ndarray::{Array1, Array2, ArrayView2};
use serde::{Deserialize, Serialize};

/// Settings of [`StreamingChars`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamConfig {
    /// The map. [`Epsilon::Auto`] and the quantile gate need the rows and aren't available.
    pub chars: CharsConfig,
    /// Rows a side that are gathered before its clusters are started by k-means.
    pub start_rows: usize,
    /// What a cluster's count is multiplied with at each batch: 1 weighs all rows alike, less forgets old ones.
    pub keep: f64,
}

impl Default for StreamConfig {
    fn default() -> Self {
        Self { chars: CharsConfig::default(), start_rows: 128, keep: 1.0 }
    }
}

impl StreamConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the field, [`Error::BadEpsilon`].
    pub fn validate(&self) -> Result<()> {
        self.chars.validate()?;
        if self.chars.epsilon == Epsilon::Auto && self.chars.coupling == Coupling::Ot {
            return Err(Error::invalid("chars.epsilon", "one that needs no held-out rows", "auto"));
        }
        if self.chars.quantile_gate.is_some() {
            return Err(Error::invalid("chars.quantile_gate", "none: quantiles need all rows", "set"));
        }
        let most = self.chars.k_source.max(self.chars.k_target);
        if self.start_rows < most {
            return Err(Error::invalid("start_rows", format!("at least the {most} clusters"), self.start_rows));
        }
        if !(self.keep > 0.0 && self.keep <= 1.0) {
            return Err(Error::invalid("keep", "above 0 and at most 1", self.keep));
        }
        Ok(())
    }
}

/// Fits a map to activations that come in batches, without keeping them.
///
/// With `keep` = 1 each centroid is the mean of the rows that were assigned to it, so the mean shift of a refit is the
/// difference in means of everything absorbed.
#[derive(Debug, Clone)]
pub struct StreamingChars {
    config: StreamConfig,
    width: usize,
    source: Side,
    target: Side,
    /// Column potential of the last plan.
    potential: Option<Array1<f64>>,
}

impl StreamingChars {
    /// A stream of rows of this width.
    ///
    /// # Errors
    /// As [`StreamConfig::validate`]; [`Error::InvalidArgument`] for a width of 0.
    pub fn new(width: usize, config: StreamConfig) -> Result<Self> {
        config.validate()?;
        if width == 0 {
            return Err(Error::invalid("width", "at least 1", width));
        }
        let side = |name, k| Side { name, k, waiting: Array2::zeros((0, width)), clusters: None, rows: 0 };
        Ok(Self {
            source: side("source", config.chars.k_source),
            target: side("target", config.chars.k_target),
            config,
            width,
            potential: None,
        })
    }

    /// Goes on from a fitted map: its clusters, weighted by their rows (by 1000 rows a side where these aren't known).
    ///
    /// # Errors
    /// As [`new`](Self::new) for the map's configuration.
    pub fn from_map(map: &CharsMap, start_rows: usize, keep: f64) -> Result<Self> {
        let chars = CharsConfig { quantile_gate: None, ..map.config().clone() };
        let mut stream = Self::new(map.width(), StreamConfig { chars, start_rows, keep })?;
        let counts = |known: Option<&[usize]>, masses: &Array1<f64>| -> Vec<f64> {
            match known {
                Some(counts) => counts.iter().map(|&c| c as f64).collect(),
                None => masses.iter().map(|m| m * 1000.0).collect(),
            }
        };
        stream.source.start(map.source_centroids().clone(), counts(map.source_counts(), map.p()));
        stream.target.start(map.target_centroids().clone(), counts(map.target_counts(), map.q()));
        Ok(stream)
    }

    /// Takes in rows of the source (`[N, D]`).
    ///
    /// # Errors
    /// [`Error::EmptySet`], [`Error::NonFinite`], [`Error::DimMismatch`]; nothing is then taken in.
    pub fn absorb_source(&mut self, batch: ArrayView2<'_, f32>) -> Result<()> {
        self.source.absorb(batch, self.width, &self.config)
    }

    /// Takes in rows of the target (`[N, D]`).
    ///
    /// # Errors
    /// As [`absorb_source`](Self::absorb_source).
    pub fn absorb_target(&mut self, batch: ArrayView2<'_, f32>) -> Result<()> {
        self.target.absorb(batch, self.width, &self.config)
    }

    /// Rows taken in, of the source and of the target.
    pub fn rows(&self) -> (usize, usize) {
        (self.source.rows, self.target.rows)
    }

    /// The map of everything taken in; the plan starts from that of the last refit.
    ///
    /// # Errors
    /// [`Error::TooFewSamples`] for a side with fewer rows than clusters; [`Error::NotConverged`] only when `strict` is set.
    pub fn refit(&mut self) -> Result<CharsMap> {
        let chars = self.config.chars.clone();
        self.source.ready(&chars.kmeans, chars.seed)?;
        self.target.ready(&chars.kmeans, chars.seed)?;
        let (a, p) = self.source.state()?;
        let (b, q) = self.target.state()?;
        let cost = transport::cost(a.view(), b.view())?;
        let start = self.potential.as_ref().filter(|g| g.len() == q.len());
        let coupled = couple(&cost, &p, &q, self.width, &chars, start.map(|g| g.view()))?;
        self.potential.clone_from(&coupled.potential);
        let side = |s: &Side, k: usize| SideReport { rows: s.rows, clusters: k, ..SideReport::default() };
        let mut report = FitReport {
            source: side(&self.source, a.nrows()),
            target: side(&self.target, b.nrows()),
            epsilon: coupled.epsilon,
            plan_mutual_information: transport::mutual_information(coupled.plan.view()),
            transport_cost: transport::transport_cost(coupled.plan.view(), cost.view())?,
            converged: coupled.converged,
            iterations: coupled.iterations,
            marginal_error: coupled.marginal_error,
            ..FitReport::default()
        };
        if !coupled.converged {
            let (error, iterations) = (coupled.marginal_error, coupled.iterations);
            report.warnings.push(Warning::NotConverged { error, iterations });
        }
        CharsMap::from_parts(chars, a, b, coupled.plan, Extra { report, ..Extra::default() })
    }
}

/// One side of the stream.
#[derive(Debug, Clone)]
struct Side {
    name: &'static str,
    k: usize,
    /// Rows that came before there were clusters.
    waiting: Array2<f32>,
    /// Centroids and their weights.
    clusters: Option<(Array2<f64>, Vec<f64>)>,
    rows: usize,
}

impl Side {
    fn start(&mut self, centroids: Array2<f64>, weights: Vec<f64>) {
        self.rows = weights.iter().sum::<f64>().round() as usize;
        self.clusters = Some((centroids, weights));
    }

    fn absorb(&mut self, batch: ArrayView2<'_, f32>, width: usize, config: &StreamConfig) -> Result<()> {
        check(batch, self.name)?;
        if batch.ncols() != width {
            return Err(Error::dim(format!("Each row of the {} batch", self.name), width, batch.ncols()));
        }
        self.rows += batch.nrows();
        let Some((centroids, weights)) = &mut self.clusters else {
            // Widths agree, so a row can always be added.
            for row in batch.rows() {
                let _ = self.waiting.push_row(row);
            }
            return if self.waiting.nrows() >= config.start_rows {
                self.ready(&config.chars.kmeans, config.chars.seed)
            } else {
                Ok(())
            };
        };
        for w in weights.iter_mut() {
            *w *= config.keep;
        }
        // All rows are assigned before a centroid moves, as in mini-batch k-means.
        let labels: Vec<usize> = batch.rows().into_iter().map(|row| nearest(&row.to_vec(), centroids)).collect();
        for (row, &label) in batch.rows().into_iter().zip(&labels) {
            weights[label] += 1.0;
            let rate = 1.0 / weights[label];
            centroids.row_mut(label).zip_mut_with(&row, |c, &v| *c += rate * (f64::from(v) - *c));
        }
        Ok(())
    }

    /// Starts the clusters from the waiting rows, if there are none yet.
    fn ready(&mut self, config: &KMeansConfig, seed: u64) -> Result<()> {
        if self.clusters.is_none() {
            if self.waiting.nrows() < self.k {
                return Err(Error::TooFewSamples { side: self.name, n: self.waiting.nrows(), k: self.k });
            }
            let start = kmeans::fit_side(self.waiting.view(), self.k, config, seed, self.name)?;
            self.clusters = Some((start.centroids, start.counts.iter().map(|&c| c as f64).collect()));
            self.waiting = Array2::zeros((0, self.waiting.ncols()));
        }
        Ok(())
    }

    /// Centroids and masses.
    fn state(&self) -> Result<(Array2<f64>, Array1<f64>)> {
        let Some((centroids, weights)) = &self.clusters else {
            return Err(Error::TooFewSamples { side: self.name, n: self.waiting.nrows(), k: self.k });
        };
        let weights = Array1::from(weights.clone());
        let total = weights.sum();
        Ok((centroids.clone(), weights / total))
    }
}

fn nearest(row: &[f32], centroids: &Array2<f64>) -> usize {
    let distance = |c: usize| squared_distance_to(row, &centroids.row(c).to_vec());
    (1..centroids.nrows())
        .fold((0, distance(0)), |best, c| if distance(c) < best.1 { (c, distance(c)) } else { best })
        .0
}
