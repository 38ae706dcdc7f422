//! CHaRS whose clusters have diagonal covariances \[paper, ablation: it loses to equal covariances on small sets\].

use crate::chars::{CharsMap, Clusters, Extra, check_input, couple, fit_report};
use crate::config::CharsConfig;
use crate::data::{check_pair, mean, narrow, variance};
use crate::kmeans::KMeans;
use crate::steer::{Parts, Steer};
use crate::{Error, Result, transport};
use ndarray::{Array1, Array2, ArrayView2, Axis, Ix2};

/// A deviation below this share of the whole set's is one of a cluster that is too small to tell.
const TOO_SMALL: f64 = 1e-6;

/// `T_ij(x) = b_j + (σ_B,j/σ_A,i) ⊙ (x − a_i)`, mixed by the plan and the gates of CHaRS; the cost of a pair is
/// `‖a_i − b_j‖² + ‖σ_A,i − σ_B,j‖²`, the squared distance W2 of the two Gaussians. The gates are those of the equal-covariance
/// map \[reconstruction\]. A coordinate in which the source cluster has no spread is translated.
#[derive(Debug, Clone, PartialEq)]
pub struct DiagonalChars {
    /// Clusters, plan, gates.
    inner: CharsMap,
    source_sigma: Array2<f64>,
    target_sigma: Array2<f64>,
    /// `S_i = Σ_j (P_ij/r_i) σ_B,j/σ_A,i` (`[K_A, D]`).
    scales: Array2<f64>,
    /// `Σ_j (P_ij/r_i) b_j − S_i ⊙ a_i` (`[K_A, D]`).
    offsets: Array2<f64>,
}

impl DiagonalChars {
    /// Fits to `source` (`[N_A, D]`) and `target` (`[N_B, D]`).
    ///
    /// # Errors
    /// As [`CharsMap::fit`]; [`Error::InvalidArgument`] for `pct`, `quantile_gate` or [`crate::Epsilon::Auto`], which this map
    /// doesn't have.
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>, config: &CharsConfig) -> Result<Self> {
        config.validate()?;
        shifts_alone(config)?;
        check_pair(source, target)?;
        let clusters = Clusters::fit(source, target, config)?;
        let (a, b) = (&clusters.source, &clusters.target);
        let source_sigma = deviations(source, a);
        let target_sigma = deviations(target, b);
        let cost = transport::cost(a.centroids.view(), b.centroids.view())?
            + transport::cost(source_sigma.view(), target_sigma.view())?;
        let (p, q) = (Array1::from(a.masses()), Array1::from(b.masses()));
        let coupled = couple(&cost, &p, &q, source.ncols(), config, None)?;
        let report = fit_report(source, target, &clusters, &cost, &coupled)?;
        let extra = Extra {
            report,
            source_counts: Some(a.counts.clone()),
            target_counts: Some(b.counts.clone()),
            bounds: None,
        };
        let mut inner =
            CharsMap::from_parts(config.clone(), a.centroids.clone(), b.centroids.clone(), coupled.plan, extra)?;
        inner.see_gates(source)?;
        Self::new(inner, source_sigma, target_sigma)
    }

    fn new(inner: CharsMap, source_sigma: Array2<f64>, target_sigma: Array2<f64>) -> Result<Self> {
        shifts_alone(inner.config())?;
        let (a, b) = (inner.source_centroids(), inner.target_centroids());
        for (what, sigma, centroids) in [("source_sigma", &source_sigma, a), ("target_sigma", &target_sigma, b)] {
            if sigma.dim() != centroids.dim() {
                return Err(Error::dim(what, centroids.len(), sigma.len()));
            }
            if let Some(bad) = sigma.iter().find(|v| **v < 0.0) {
                return Err(Error::invalid(what, "not negative", bad));
            }
        }
        let (mut scales, mut offsets) = (Array2::zeros(a.raw_dim()), Array2::zeros(a.raw_dim()));
        for i in (0..a.nrows()).filter(|&i| inner.p()[i] > 0.0) {
            for d in 0..a.ncols() {
                for j in 0..b.nrows() {
                    let share = inner.plan()[(i, j)] / inner.p()[i];
                    let own = source_sigma[(i, d)];
                    scales[(i, d)] += share * if own > 0.0 { target_sigma[(j, d)] / own } else { 1.0 };
                    offsets[(i, d)] += share * b[(j, d)];
                }
                offsets[(i, d)] -= scales[(i, d)] * a[(i, d)];
            }
        }
        narrow(&scales, "the ratios of the deviations")?;
        narrow(&offsets, "the offsets")?;
        Ok(Self { inner, source_sigma, target_sigma, scales, offsets })
    }

    /// The map with the same clusters and plan, and equal covariances.
    pub fn equal_covariance(&self) -> &CharsMap {
        &self.inner
    }

    pub(crate) fn of_parts(mut parts: Parts) -> Result<Self> {
        let source_sigma = parts.take::<Ix2>("source_sigma")?;
        let target_sigma = parts.take::<Ix2>("target_sigma")?;
        Self::new(CharsMap::of_parts(parts)?, source_sigma, target_sigma)
    }
}

impl Steer for DiagonalChars {
    fn name(&self) -> &'static str {
        "diagonal_chars"
    }

    fn width(&self) -> usize {
        self.inner.width()
    }

    fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        check_input(x, self.width())?;
        let gates = self.inner.gates(x)?.mapv(f64::from);
        // Σ_i g_i (S_i ⊙ x + o_i) − x.
        let (scale, offset) = (gates.dot(&self.scales), gates.dot(&self.offsets));
        let mut out = x.mapv(f64::from);
        ndarray::Zip::from(&mut out).and(&scale).and(&offset).for_each(|x, s, o| *x = (s - 1.0) * *x + o);
        narrow(&out, "the shift")
    }

    fn mean_shift(&self) -> Option<Array1<f32>> {
        Some(self.inner.mean_shift())
    }

    fn parts(&self) -> Parts {
        self.inner
            .to_parts(self.name())
            .with("source_sigma", &self.source_sigma)
            .with("target_sigma", &self.target_sigma)
    }

    fn directions(&self, l: usize) -> Array2<f64> {
        self.inner.directions(l)
    }
}

/// That nothing is asked for that is only defined where maps between clusters are shifts.
fn shifts_alone(config: &CharsConfig) -> Result<()> {
    if config.pct.is_some() || config.quantile_gate.is_some() {
        return Err(Error::invalid("pct and quantile_gate", "none for diagonal covariances", "set"));
    }
    Ok(())
}

/// Standard deviation of each coordinate in each cluster (`[K, D]`); 0 where it is too small to divide by.
fn deviations(x: ArrayView2<'_, f32>, clusters: &KMeans) -> Array2<f64> {
    let whole = variance(x, &mean(x)).mapv(f64::sqrt);
    let mut out = Array2::zeros(clusters.centroids.raw_dim());
    for (c, mut row) in out.rows_mut().into_iter().enumerate() {
        let members: Vec<usize> = (0..x.nrows()).filter(|&i| clusters.labels[i] == c).collect();
        let members = x.select(Axis(0), &members);
        let own = variance(members.view(), &clusters.centroids.row(c).to_owned());
        for (d, v) in row.iter_mut().enumerate() {
            let deviation = own[d].sqrt();
            *v = if deviation > TOO_SMALL * whole[d] { deviation } else { 0.0 };
        }
    }
    out
}
