//! From two sets of activations to a map.

use super::{CharsMap, Extra, FitReport, SideReport, Warning};
use crate::config::{CharsConfig, Coupling, Epsilon};
use crate::data::{check_pair, mean, variance};
use crate::kmeans::{self, KMeans};
use crate::{Error, Result, auto, transport};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2};

/// Standard deviation below which a coordinate counts as constant under the quantile gate \[official code\].
const CONSTANT: f64 = 1e-4;
/// Share of the largest possible mutual information below which a plan is called nearly independent.
const NEAR_INDEPENDENT: f64 = 0.05;
/// Share of the variance above which a coordinate is called dominant.
const DOMINANT: f64 = 0.5;

pub(super) fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>, config: &CharsConfig) -> Result<CharsMap> {
    config.validate()?;
    check_pair(source, target)?;
    let (config, scores) = auto::resolve(source, target, config)?;
    let clusters = Clusters::fit(source, target, &config)?;
    let mut map = fit_clustered(source, target, &clusters, &config)?;
    map.extra.report.epsilon_scores = scores;
    Ok(map)
}

/// Both sides' clusters: what several plans can share.
pub(crate) struct Clusters {
    pub(crate) source: KMeans,
    pub(crate) target: KMeans,
}

impl Clusters {
    /// Both sides from the same stream, so that equal sets get equal clusters.
    pub(crate) fn fit(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>, config: &CharsConfig) -> Result<Self> {
        let side = |x, k, side| kmeans::fit_side(x, k, &config.kmeans, config.seed, side);
        Ok(Self { source: side(source, config.k_source, "source")?, target: side(target, config.k_target, "target")? })
    }
}

/// A plan and how it came about.
pub(crate) struct Coupled {
    pub(crate) plan: Array2<f64>,
    pub(crate) epsilon: Option<f64>,
    pub(crate) converged: bool,
    pub(crate) iterations: usize,
    pub(crate) marginal_error: f64,
    pub(crate) potential: Option<Array1<f64>>,
    pub(crate) zero_median: bool,
}

impl Coupled {
    fn plain(plan: Array2<f64>) -> Self {
        Self {
            plan,
            epsilon: None,
            converged: true,
            iterations: 0,
            marginal_error: 0.0,
            potential: None,
            zero_median: false,
        }
    }
}

/// The plan that the configuration asks for; `width` is D, `start` a column potential to start from.
pub(crate) fn couple(
    cost: &Array2<f64>,
    p: &Array1<f64>,
    q: &Array1<f64>,
    width: usize,
    config: &CharsConfig,
    start: Option<ArrayView1<'_, f64>>,
) -> Result<Coupled> {
    match config.coupling {
        Coupling::Uniform => return Ok(Coupled::plain(transport::independent(p.view(), q.view()))),
        Coupling::NearestNeighbour => {
            return Ok(Coupled::plain(transport::nearest_neighbour(cost.view(), p.view())?));
        }
        Coupling::Ot => {}
    }
    if cost.len() == 1 {
        return Ok(Coupled::plain(Array2::from_elem((1, 1), 1.0)));
    }
    let exact = || Ok(Coupled::plain(transport::exact(cost.view(), p.view(), q.view())?.plan));
    let epsilon = match config.epsilon {
        Epsilon::Exact => return exact(),
        Epsilon::Fixed(value) => value,
        Epsilon::SqrtDim => (width as f64).sqrt(),
        Epsilon::ScaledMedian(c) => {
            let epsilon = c * transport::median(cost.iter().copied());
            if epsilon < f64::MIN_POSITIVE {
                return Ok(Coupled { zero_median: true, ..exact()? });
            }
            epsilon
        }
        Epsilon::Auto => {
            return Err(Error::invalid("epsilon", "resolved before the plan is computed", "auto"));
        }
    };
    let s = transport::sinkhorn_warm(cost.view(), p.view(), q.view(), epsilon, &config.sinkhorn, start)?;
    if config.strict && !s.converged {
        return Err(Error::NotConverged { error: s.marginal_error, iterations: s.iterations });
    }
    Ok(Coupled {
        plan: s.plan,
        epsilon: Some(epsilon),
        converged: s.converged,
        iterations: s.iterations,
        marginal_error: s.marginal_error,
        potential: Some(s.g),
        zero_median: false,
    })
}

/// The map on given clusters; the sets are only read for the report and the quantile gate.
pub(crate) fn fit_clustered(
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    clusters: &Clusters,
    config: &CharsConfig,
) -> Result<CharsMap> {
    let (a, b) = (&clusters.source, &clusters.target);
    let (p, q) = (Array1::from(a.masses()), Array1::from(b.masses()));
    let cost = transport::cost(a.centroids.view(), b.centroids.view())?;
    let coupled = couple(&cost, &p, &q, source.ncols(), config, None)?;
    let report = report(source, target, clusters, &cost, &coupled)?;
    let bounds = config.quantile_gate.map(|quantiles| bounds(source, target, quantiles));
    let extra = Extra { report, bounds, source_counts: Some(a.counts.clone()), target_counts: Some(b.counts.clone()) };
    let mut map = CharsMap::from_parts(config.clone(), a.centroids.clone(), b.centroids.clone(), coupled.plan, extra)?;
    map.source_labels = Some(a.labels.clone());
    map.target_labels = Some(b.labels.clone());
    map.see_gates(source)?;
    Ok(map)
}

impl CharsMap {
    /// `exp` of the mean entropy of the gates over rows `x` (`[M, D]`): 1 = each input follows one cluster, K = none does.
    ///
    /// # Errors
    /// As [`gates`](Self::gates); [`Error::EmptySet`] without rows.
    pub fn effective_clusters(&self, x: ArrayView2<'_, f32>) -> Result<f64> {
        if x.nrows() == 0 {
            return Err(Error::EmptySet { side: "x" });
        }
        let entropy = |row: ArrayView1<'_, f32>| -> f64 {
            -row.iter().filter(|g| **g > 0.0).map(|&g| f64::from(g) * f64::from(g).ln()).sum::<f64>()
        };
        let total: f64 = self.gates(x)?.rows().into_iter().map(entropy).sum();
        Ok((total / x.nrows() as f64).exp())
    }

    /// Puts what the gates do on the source set into the report.
    pub(crate) fn see_gates(&mut self, source: ArrayView2<'_, f32>) -> Result<()> {
        self.extra.report.effective_clusters = self.effective_clusters(source)?;
        Ok(())
    }
}

pub(crate) fn report(
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    clusters: &Clusters,
    cost: &Array2<f64>,
    coupled: &Coupled,
) -> Result<FitReport> {
    let side =
        |k: &KMeans| SideReport { rows: k.labels.len(), clusters: k.k(), inertia: k.inertia, iterations: k.iterations };
    let mut report = FitReport {
        source: side(&clusters.source),
        target: side(&clusters.target),
        epsilon: coupled.epsilon,
        plan_mutual_information: transport::mutual_information(coupled.plan.view()),
        transport_cost: transport::transport_cost(coupled.plan.view(), cost.view())?,
        effective_clusters: 0.0,
        converged: coupled.converged,
        iterations: coupled.iterations,
        marginal_error: coupled.marginal_error,
        dominant_coordinate: dominant(source, target),
        epsilon_scores: Vec::new(),
        warnings: Vec::new(),
    };
    for (side, k) in [("source", &clusters.source), ("target", &clusters.target)] {
        let side = side.to_owned();
        if k.k() < k.requested {
            report.warnings.push(Warning::ReducedClusters { side: side.clone(), requested: k.requested, used: k.k() });
        }
        if k.inertia == 0.0 && k.k() == 1 && k.labels.len() > 1 {
            report.warnings.push(Warning::IdenticalRows { side });
        }
    }
    let (coordinate, share) = report.dominant_coordinate;
    // In a few dimensions one of them always holds much.
    if share > DOMINANT.max(4.0 / source.ncols() as f64) {
        report.warnings.push(Warning::DominantCoordinate { coordinate, share });
    }
    let masses = |k: &KMeans| transport::entropy(Array1::from(k.masses()).view());
    let largest = masses(&clusters.source).min(masses(&clusters.target));
    if report.plan_mutual_information < NEAR_INDEPENDENT * largest {
        let mutual_information = report.plan_mutual_information;
        report.warnings.push(Warning::NearIndependentPlan { mutual_information, largest });
    }
    if !coupled.converged {
        report.warnings.push(Warning::NotConverged { error: coupled.marginal_error, iterations: coupled.iterations });
    }
    if coupled.zero_median {
        report.warnings.push(Warning::ZeroMedianCost);
    }
    Ok(report)
}

/// The coordinate with the largest share of the variance within the sides.
fn dominant(source: ArrayView2<'_, f32>, target: ArrayView2<'_, f32>) -> (usize, f64) {
    let spread = |x: ArrayView2<'_, f32>| variance(x, &mean(x)) * x.nrows() as f64;
    let total = spread(source) + spread(target);
    let sum = total.sum();
    let largest = (0..total.len()).fold(0, |best, d| if total[d] > total[best] { d } else { best });
    (largest, if sum > 0.0 { total[largest] / sum } else { 0.0 })
}

/// Quantiles of each source coordinate (linear interpolation); an empty range for a constant one.
fn bounds(
    source: ArrayView2<'_, f32>,
    target: ArrayView2<'_, f32>,
    (low, high): (f64, f64),
) -> (Array1<f64>, Array1<f64>) {
    let deviation = |x: ArrayView2<'_, f32>| variance(x, &mean(x)).mapv(f64::sqrt);
    let (of_source, of_target) = (deviation(source), deviation(target));
    let mut bounds = (Array1::zeros(source.ncols()), Array1::zeros(source.ncols()));
    for (d, column) in source.columns().into_iter().enumerate() {
        if of_source[d] < CONSTANT || of_target[d] < CONSTANT {
            (bounds.0[d], bounds.1[d]) = (f64::from(f32::MAX), f64::from(f32::MIN));
            continue;
        }
        let mut sorted = column.to_vec();
        sorted.sort_by(f32::total_cmp);
        bounds.0[d] = quantile(&sorted, low);
        bounds.1[d] = quantile(&sorted, high);
    }
    bounds
}

/// The quantile of sorted values, interpolated between neighbours.
fn quantile(sorted: &[f32], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (below, share) = (at.floor() as usize, at.fract());
    let low = f64::from(sorted[below]);
    low + share * (f64::from(sorted[(below + 1).min(sorted.len() - 1)]) - low)
}
