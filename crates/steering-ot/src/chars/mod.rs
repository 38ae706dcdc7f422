//! The steering map of CHaRS: clusters, their coupling, and the input-dependent shift.

mod fit;
mod parts;
mod pct;
mod reference;
mod report;

pub use crate::kernel::Width as GateWidth;
pub(crate) use fit::{Clusters, couple, fit_clustered, report as fit_report};
pub use pct::{Principal, principal};
pub use report::{FitReport, SideReport, Warning};

use crate::config::{CharsConfig, Kernel};
use crate::data::{check, narrow, standard};
use crate::kernel::{Mixture, Width};
use crate::transport;
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView2, Axis};

/// What a map has besides clusters and plan: what was seen at the fit.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Extra {
    /// The report of the fit.
    pub report: FitReport,
    /// Per coordinate the lowest and highest value that is moved (`[D]` each), with [`CharsConfig::quantile_gate`].
    pub bounds: Option<(Array1<f64>, Array1<f64>)>,
    /// Rows in each source cluster.
    pub source_counts: Option<Vec<usize>>,
    /// Rows in each target cluster.
    pub target_counts: Option<Vec<usize>>,
}

/// Moves activations of a source concept toward a target concept \[paper, Definition 3.1\]:
///
/// `v̂(x) = Σ_ij P_ij k(x,a_i) (b_j − a_i) / Σ_pq P_pq k(x,a_p)`, `T_α(x) = x + α v̂(x)`,
///
/// computed as `v̂(x) = Σ_i g_i(x) m_i` with the gates `g_i = r_i k_i / Σ_p r_p k_p`, the row sums `r_i` of the plan, and one
/// shift `m_i = (Σ_j P_ij b_j)/r_i − a_i` a source cluster: the same function, without the sum over pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct CharsMap {
    config: CharsConfig,
    source_centroids: Array2<f64>,
    target_centroids: Array2<f64>,
    plan: Array2<f64>,
    p: Array1<f64>,
    q: Array1<f64>,
    shifts: Array2<f64>,
    mean_shift: Array1<f64>,
    /// Directions that PCT keeps (`[L, D]`); `None` where it changes nothing.
    kept: Option<Array2<f64>>,
    extra: Extra,
    source_labels: Option<Vec<usize>>,
    target_labels: Option<Vec<usize>>,
    mixture: Mixture,
    /// Place of each cluster of the mixture among all source clusters.
    active: Vec<usize>,
}

impl CharsMap {
    /// Fits the map to activations `source` (`[N_A, D]`, steer away from) and `target` (`[N_B, D]`, steer toward), which need
    /// not be paired.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::BadEpsilon`] for the configuration; [`Error::EmptySet`],
    /// [`Error::NonFinite`], [`Error::DimMismatch`], [`Error::TooFewSamples`] for the sets; [`Error::NotConverged`] only
    /// when `strict` is set.
    pub fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>, config: &CharsConfig) -> Result<Self> {
        fit::fit(source, target, config)
    }

    /// The map with these centroids (`[K_A, D]`, `[K_B, D]`) and this plan (`[K_A, K_B]`, sum 1); everything else is computed
    /// again, bit for bit as at the fit.
    ///
    /// # Errors
    /// As [`fit`](Self::fit); [`Error::InvalidArgument`] for a plan that isn't one.
    pub fn from_parts(
        config: CharsConfig,
        source_centroids: Array2<f64>,
        target_centroids: Array2<f64>,
        plan: Array2<f64>,
        extra: Extra,
    ) -> Result<Self> {
        config.validate()?;
        let (k_a, d) = source_centroids.dim();
        let k_b = target_centroids.nrows();
        for (side, centroids) in [("source centroid", &source_centroids), ("target centroid", &target_centroids)] {
            if centroids.is_empty() {
                return Err(Error::EmptySet { side });
            }
            if centroids.ncols() != d {
                return Err(Error::dim(format!("Each {side}"), d, centroids.ncols()));
            }
            if let Some(row) = centroids.rows().into_iter().position(|r| !r.iter().all(|v| v.is_finite())) {
                return Err(Error::NonFinite { side, row });
            }
        }
        if plan.dim() != (k_a, k_b) {
            return Err(Error::invalid("plan", format!("of shape [{k_a}, {k_b}]"), format!("{:?}", plan.shape())));
        }
        if let Some(bad) = plan.iter().find(|v| !(v.is_finite() && **v >= 0.0)) {
            return Err(Error::invalid("plan", "finite and not negative", bad));
        }
        if (plan.sum() - 1.0).abs() > 1e-6 {
            return Err(Error::invalid("plan", "a matrix whose entries sum to 1", plan.sum()));
        }
        if let Some((low, high)) = &extra.bounds {
            for (what, bound) in [("The lower bounds", low), ("The upper bounds", high)] {
                if bound.len() != d {
                    return Err(Error::dim(what, d, bound.len()));
                }
                if bound.iter().any(|v| v.is_nan()) {
                    return Err(Error::invalid("bounds", "numbers", "NaN"));
                }
            }
        }
        if config.quantile_gate.is_some() != extra.bounds.is_some() {
            let got = if extra.bounds.is_some() { "bounds" } else { "none" };
            return Err(Error::invalid("bounds", "given with a quantile gate and only then", got));
        }
        for (what, k, counts) in
            [("source_counts", k_a, &extra.source_counts), ("target_counts", k_b, &extra.target_counts)]
        {
            if let Some(counts) = counts
                && counts.len() != k
            {
                return Err(Error::dim(what, k, counts.len()));
            }
        }
        let (p, q) = (plan.sum_axis(Axis(1)), plan.sum_axis(Axis(0)));
        let active: Vec<usize> = (0..k_a).filter(|&i| p[i] > 0.0).collect();
        // v̄ = Σ_ij P_ij (b_j − a_i).
        let mean_shift = q.dot(&target_centroids) - p.dot(&source_centroids);
        // m_i as a mean of differences: where a_i = b_j there is nothing that rounding could leave.
        let mut shifts = Array2::zeros(source_centroids.raw_dim());
        for &i in &active {
            for (j, b) in target_centroids.rows().into_iter().enumerate() {
                let (share, a) = (plan[(i, j)] / p[i], source_centroids.row(i));
                if share > 0.0 {
                    ndarray::Zip::from(shifts.row_mut(i)).and(b).and(a).for_each(|m, b, a| *m += share * (b - a));
                }
            }
        }
        let mut kept = None;
        if let Some(l) = config.pct {
            let principal = principal(source_centroids.view(), target_centroids.view(), plan.view());
            if l < principal.rank() {
                let basis = principal.vectors.slice_move(ndarray::s![..l, ..]);
                for &i in &active {
                    let rest = &shifts.row(i) - &mean_shift;
                    let projected = &mean_shift + &basis.t().dot(&basis.dot(&rest));
                    shifts.row_mut(i).assign(&projected);
                }
                kept = Some(basis);
            }
        }
        let width = match config.kernel {
            Kernel::AdaptiveGaussian => Width::Median(config.bandwidth),
            Kernel::Gaussian => Width::Fixed(config.bandwidth * (d as f64).sqrt()),
            Kernel::FixedSigma(sigma) => Width::Fixed(2.0 * config.bandwidth * sigma * sigma),
            Kernel::GlobalMedian => {
                Width::Fixed(2.0 * config.bandwidth * global_median(&source_centroids)?.max(f64::MIN_POSITIVE))
            }
        };
        let rows = |x: &Array2<f64>| x.select(Axis(0), &active);
        let mixture = Mixture {
            k: active.len(),
            d,
            centroids: narrow(&rows(&source_centroids), "source centroids")?.into_raw_vec_and_offset().0,
            shifts: narrow(&rows(&shifts), "the shifts between centroids")?.into_raw_vec_and_offset().0,
            log_mass: active.iter().map(|&i| p[i].ln()).collect(),
            width,
            bounds: extra
                .bounds
                .as_ref()
                .map(|(low, high)| (low.iter().map(|v| *v as f32).collect(), high.iter().map(|v| *v as f32).collect())),
        };
        Ok(Self {
            config,
            source_centroids,
            target_centroids,
            plan,
            p,
            q,
            shifts,
            mean_shift,
            kept,
            extra,
            source_labels: None,
            target_labels: None,
            mixture,
            active,
        })
    }

    /// The configuration of the fit, with what [`Epsilon::Auto`](crate::Epsilon::Auto) chose in its place.
    pub fn config(&self) -> &CharsConfig {
        &self.config
    }

    /// Width D of the activations.
    pub fn width(&self) -> usize {
        self.source_centroids.ncols()
    }

    /// `a_i` (`[K_A, D]`).
    pub fn source_centroids(&self) -> &Array2<f64> {
        &self.source_centroids
    }

    /// `b_j` (`[K_B, D]`).
    pub fn target_centroids(&self) -> &Array2<f64> {
        &self.target_centroids
    }

    /// `P` (`[K_A, K_B]`).
    pub fn plan(&self) -> &Array2<f64> {
        &self.plan
    }

    /// Row sums of the plan: the masses of the source clusters.
    pub fn p(&self) -> &Array1<f64> {
        &self.p
    }

    /// Column sums of the plan: the masses of the target clusters (to the plan's marginal error).
    pub fn q(&self) -> &Array1<f64> {
        &self.q
    }

    /// `m_i` (`[K_A, D]`), after principal component thresholding if there is any. Rows without mass are 0.
    pub fn shifts(&self) -> &Array2<f64> {
        &self.shifts
    }

    /// `v̄ = Σ_i r_i m_i` in f64: the difference in means, when the plan has the sets' masses as marginals.
    pub fn mean_shift_exact(&self) -> &Array1<f64> {
        &self.mean_shift
    }

    /// `v̄` (`[D]`).
    pub fn mean_shift(&self) -> Array1<f32> {
        self.mean_shift.mapv(|v| v as f32)
    }

    /// The directions that principal component thresholding kept (`[L, D]`, orthonormal); `None` where it changes nothing.
    pub fn kept_directions(&self) -> Option<&Array2<f64>> {
        self.kept.as_ref()
    }

    /// In which directions the shifts between clusters differ, and how much: eigenvectors of `Σ_tot` (before thresholding).
    pub fn principal(&self) -> Principal {
        principal(self.source_centroids.view(), self.target_centroids.view(), self.plan.view())
    }

    /// How wide the gates are; with [`source_centroids`](Self::source_centroids), [`p`](Self::p) and
    /// [`shifts`](Self::shifts) all that the map needs.
    pub fn gate_width(&self) -> GateWidth {
        self.mixture.width
    }

    /// What was seen at the fit.
    pub fn diagnostics(&self) -> &FitReport {
        &self.extra.report
    }

    /// What [`from_parts`](Self::from_parts) takes besides clusters and plan.
    pub fn extra(&self) -> &Extra {
        &self.extra
    }

    /// The source cluster of each row of the fit; only known right after [`fit`](Self::fit).
    pub fn source_labels(&self) -> Option<&[usize]> {
        self.source_labels.as_deref()
    }

    /// The target cluster of each row of the fit; only known right after [`fit`](Self::fit).
    pub fn target_labels(&self) -> Option<&[usize]> {
        self.target_labels.as_deref()
    }

    /// Rows of each source cluster, where known.
    pub fn source_counts(&self) -> Option<&[usize]> {
        self.extra.source_counts.as_deref()
    }

    /// Rows of each target cluster, where known.
    pub fn target_counts(&self) -> Option<&[usize]> {
        self.extra.target_counts.as_deref()
    }

    /// `v̂(x)` for each row (`[M, D]`).
    ///
    /// # Errors
    /// [`Error::DimMismatch`]; [`Error::NonFinite`] for a row with NaN or infinity.
    pub fn shift(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        self.on_rows(x, 0.0, 1.0)
    }

    /// `T_α(x) = x + α v̂(x)` for each row (`[M, D]`).
    ///
    /// # Errors
    /// As [`shift`](Self::shift); [`Error::InvalidArgument`] for an `alpha` that isn't finite.
    pub fn transport(&self, x: ArrayView2<'_, f32>, alpha: f32) -> Result<Array2<f32>> {
        self.on_rows(x, 1.0, alpha)
    }

    /// [`shift`](Self::shift) on memory: `x` and `out` are `[M, D]`, row after row. Allocates `M·K` values and nothing else.
    ///
    /// # Errors
    /// As [`shift`](Self::shift); `out` then holds nothing of use.
    pub fn shift_into(&self, x: &[f32], out: &mut [f32]) -> Result<()> {
        self.on_memory(x, 0.0, 1.0, out)
    }

    /// [`transport`](Self::transport) on memory, as [`shift_into`](Self::shift_into).
    ///
    /// # Errors
    /// As [`transport`](Self::transport); `out` then holds nothing of use.
    pub fn transport_into(&self, x: &[f32], alpha: f32, out: &mut [f32]) -> Result<()> {
        self.on_memory(x, 1.0, alpha, out)
    }

    /// The gates `g_i(x)` (`[M, K_A]`, rows sum to 1).
    ///
    /// # Errors
    /// As [`shift`](Self::shift).
    pub fn gates(&self, x: ArrayView2<'_, f32>) -> Result<Array2<f32>> {
        self.check_width(x.ncols())?;
        let x = standard(x);
        let mut packed = vec![0.0; x.nrows() * self.mixture.k];
        self.mixture.gates(x.as_slice().unwrap_or_default(), &mut packed).map_err(not_finite)?;
        let mut gates = Array2::zeros((x.nrows(), self.p.len()));
        for (mut row, packed) in gates.rows_mut().into_iter().zip(packed.chunks(self.mixture.k)) {
            self.active.iter().zip(packed).for_each(|(&i, g)| row[i] = *g);
        }
        Ok(gates)
    }

    fn check_width(&self, got: usize) -> Result<()> {
        if got == self.width() { Ok(()) } else { Err(Error::dim("Each row of x", self.width(), got)) }
    }

    fn on_rows(&self, x: ArrayView2<'_, f32>, keep: f32, alpha: f32) -> Result<Array2<f32>> {
        self.check_width(x.ncols())?;
        let x = standard(x);
        let mut out = Array2::zeros(x.raw_dim());
        self.on_memory(x.as_slice().unwrap_or_default(), keep, alpha, out.as_slice_mut().unwrap_or_default())?;
        Ok(out)
    }

    fn on_memory(&self, x: &[f32], keep: f32, alpha: f32, out: &mut [f32]) -> Result<()> {
        let d = self.width();
        if !x.len().is_multiple_of(d) {
            return Err(Error::invalid("x", format!("rows of {d} values"), format!("{} values", x.len())));
        }
        if out.len() != x.len() {
            return Err(Error::dim("out", x.len(), out.len()));
        }
        if !alpha.is_finite() {
            return Err(Error::invalid("alpha", "finite", alpha));
        }
        let mut gates = vec![0.0; x.len() / d * self.mixture.k];
        self.mixture.apply(x, keep, alpha, &mut gates, out).map_err(not_finite)
    }
}

fn not_finite(row: usize) -> Error {
    Error::NonFinite { side: "x", row }
}

/// Squared median distance between source centroids; 1 for a single one, whose gate is 1 whatever the width.
fn global_median(centroids: &Array2<f64>) -> Result<f64> {
    let k = centroids.nrows();
    if k == 1 {
        return Ok(1.0);
    }
    let c = transport::cost(centroids.view(), centroids.view())?;
    let distances = (0..k).flat_map(|i| (i + 1..k).map(move |j| (i, j))).map(|at| c[at].sqrt());
    Ok(transport::median(distances).powi(2))
}

/// That an input fits, for checks before anything is written.
pub(crate) fn check_input(x: ArrayView2<'_, f32>, width: usize) -> Result<()> {
    if x.ncols() != width {
        return Err(Error::dim("Each row of x", width, x.ncols()));
    }
    if x.is_empty() { Ok(()) } else { check(x, "x") }
}
