//! Entropic transport: minimises `Σ P C + ε Σ P (ln P − 1)` under both marginals.
//!
//! The iteration runs on scalings of a kernel into which the potentials have been absorbed, and falls back to the log domain
//! whenever a scaling grows large; so it is as fast as the plain iteration and never underflows. Where clusters are far apart
//! against `ε`, masses that must pass between them creep, and scalings alone would take millions of rounds; Newton steps on the
//! dual take over then. [`sinkhorn_plain`] is the plain iteration in the log domain throughout.

use super::check;
use super::exact::column_potentials;
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2};
use serde::{Deserialize, Serialize};

/// When Sinkhorn's iteration stops.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SinkhornConfig {
    /// Most iterations, Newton steps among them (1000 \[official code\]).
    pub max_iterations: usize,
    /// Stop when the L1 error of the row marginal is below this. (The authors stop when the change of a scaling is below
    /// 1e-6, which says less about the plan \[official code\].)
    pub tolerance: f64,
}

impl Default for SinkhornConfig {
    fn default() -> Self {
        Self { max_iterations: 1000, tolerance: 1e-9 }
    }
}

impl SinkhornConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the field.
    pub fn validate(&self) -> Result<()> {
        if self.max_iterations == 0 {
            return Err(Error::invalid("sinkhorn.max_iterations", "at least 1", 0));
        }
        if !(self.tolerance.is_finite() && self.tolerance > 0.0) {
            return Err(Error::invalid("sinkhorn.tolerance", "finite and above 0", self.tolerance));
        }
        Ok(())
    }
}

/// An entropic plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Sinkhorn {
    /// `P` (`[K_A, K_B]`), whose rows sum to `p` (rescaled after the last iteration).
    pub plan: Array2<f64>,
    /// Potential of each row, in units of the cost; −∞ where there is no mass.
    pub f: Array1<f64>,
    /// Potential of each column.
    pub g: Array1<f64>,
    /// Whether the tolerance was reached.
    pub converged: bool,
    /// Iterations done.
    pub iterations: usize,
    /// L1 error of the row marginal before the last rescaling.
    pub marginal_error: f64,
}

/// The entropic plan between `p` and `q` with `P = exp((f_i + g_j − C_ij)/ε)`. Rows and columns without mass get none.
///
/// # Errors
/// [`Error::BadEpsilon`]; [`Error::DimMismatch`] and [`Error::InvalidArgument`] for masses and costs that don't fit. An
/// iteration that stops at its cap isn't an error here: see [`Sinkhorn::converged`].
pub fn sinkhorn(
    cost: ArrayView2<'_, f64>,
    p: ArrayView1<'_, f64>,
    q: ArrayView1<'_, f64>,
    eps: f64,
    config: &SinkhornConfig,
) -> Result<Sinkhorn> {
    sinkhorn_warm(cost, p, q, eps, config, None)
}

/// As [`sinkhorn`], from the column potential `g` of a similar problem.
///
/// # Errors
/// As [`sinkhorn`], and [`Error::DimMismatch`] for a start of another length.
pub fn sinkhorn_warm(
    cost: ArrayView2<'_, f64>,
    p: ArrayView1<'_, f64>,
    q: ArrayView1<'_, f64>,
    eps: f64,
    config: &SinkhornConfig,
    start: Option<ArrayView1<'_, f64>>,
) -> Result<Sinkhorn> {
    let mut problem = Problem::new(cost, p, q, eps, config, start)?;
    problem.log_rows();
    problem.log_columns();
    let mut scaled = Scaled::absorb(&problem);
    let (mut iterations, mut newton_at) = (1, PATIENCE);
    let (error, converged) = loop {
        scaled.row_sums();
        let error = scaled.error(&problem.p);
        if error < config.tolerance || iterations >= config.max_iterations {
            break (error, error < config.tolerance);
        }
        iterations += 1;
        if iterations > newton_at && problem.p.len() <= NEWTON_ROWS {
            scaled.release(&mut problem);
            if problem.newton() {
                newton_at = iterations;
            } else {
                newton_at = iterations + PATIENCE;
                problem.log_rows();
                problem.log_columns();
            }
            scaled = Scaled::absorb(&problem);
        } else if !scaled.step(&problem.p, &problem.q) {
            scaled.release(&mut problem);
            problem.log_rows();
            problem.log_columns();
            scaled = Scaled::absorb(&problem);
        }
    };
    scaled.release(&mut problem);
    Ok(problem.finish(cost, converged, iterations, error))
}

/// The plain version: every update in the log domain. Slower; the tests compare with it.
///
/// # Errors
/// As [`sinkhorn`].
pub fn sinkhorn_plain(
    cost: ArrayView2<'_, f64>,
    p: ArrayView1<'_, f64>,
    q: ArrayView1<'_, f64>,
    eps: f64,
    config: &SinkhornConfig,
) -> Result<Sinkhorn> {
    let mut problem = Problem::new(cost, p, q, eps, config, Some(Array1::zeros(q.len()).view()))?;
    let (mut converged, mut error, mut iterations) = (false, f64::INFINITY, 0);
    while iterations < config.max_iterations && !converged {
        problem.log_rows();
        problem.log_columns();
        iterations += 1;
        error = problem.row_error();
        converged = error < config.tolerance;
    }
    Ok(problem.finish(cost, converged, iterations, error))
}

/// The problem over rows and columns that have mass, in units of `ε`.
struct Problem {
    rows: Vec<usize>,
    columns: Vec<usize>,
    p: Vec<f64>,
    q: Vec<f64>,
    /// `C/ε`, row after row.
    cost: Vec<f64>,
    /// `f/ε` and `g/ε`.
    f: Vec<f64>,
    g: Vec<f64>,
    eps: f64,
}

impl Problem {
    fn new(
        cost: ArrayView2<'_, f64>,
        p: ArrayView1<'_, f64>,
        q: ArrayView1<'_, f64>,
        eps: f64,
        config: &SinkhornConfig,
        start: Option<ArrayView1<'_, f64>>,
    ) -> Result<Self> {
        if !(eps.is_finite() && eps > 0.0) {
            return Err(Error::BadEpsilon { value: eps });
        }
        config.validate()?;
        let (rows, columns) = check(cost, p, q)?;
        if let Some(start) = &start
            && start.len() != q.len()
        {
            return Err(Error::dim("The start of g", q.len(), start.len()));
        }
        let scaled: Vec<f64> =
            rows.iter().flat_map(|&i| columns.iter().map(move |&j| (i, j))).map(|at| cost[at] / eps).collect();
        if let Some(bad) = scaled.iter().find(|v| !v.is_finite()) {
            return Err(Error::invalid("cost / epsilon", "finite", bad));
        }
        let (low, high) = scaled.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
        let start: Option<Vec<f64>> = match start {
            Some(start) => Some(columns.iter().map(|&j| start[j]).collect()),
            // A sharp plan is near the exact one, and far from where scalings start.
            None if high - low > SHARP => Some(column_potentials(cost, p, q, &rows, &columns)?),
            None => None,
        };
        let finite = |v: f64| if (v / eps).is_finite() { v / eps } else { 0.0 };
        let g = start.map_or_else(|| vec![0.0; columns.len()], |start| start.into_iter().map(finite).collect());
        Ok(Self {
            p: rows.iter().map(|&i| p[i]).collect(),
            q: columns.iter().map(|&j| q[j]).collect(),
            f: vec![0.0; rows.len()],
            g,
            cost: scaled,
            rows,
            columns,
            eps,
        })
    }

    /// `f_i ← ln p_i − LSE_j(g_j − C_ij)`.
    fn log_rows(&mut self) {
        for (i, row) in self.cost.chunks_exact(self.q.len()).enumerate() {
            self.f[i] = self.p[i].ln() - log_sum_exp(row.iter().zip(&self.g).map(|(c, g)| g - c));
        }
    }

    /// `g_j ← ln q_j − LSE_i(f_i − C_ij)`.
    fn log_columns(&mut self) {
        let n = self.q.len();
        for j in 0..n {
            self.g[j] = self.q[j].ln() - log_sum_exp(self.f.iter().enumerate().map(|(i, f)| f - self.cost[i * n + j]));
        }
    }

    fn kernel(&self) -> Vec<f64> {
        self.cost
            .chunks_exact(self.q.len())
            .zip(&self.f)
            .flat_map(|(row, f)| row.iter().zip(&self.g).map(move |(c, g)| (f + g - c).exp()))
            .collect()
    }

    fn row_error(&self) -> f64 {
        let kernel = self.kernel();
        kernel.chunks_exact(self.q.len()).zip(&self.p).map(|(row, p)| (row.iter().sum::<f64>() - p).abs()).sum()
    }

    /// One damped Newton step on the dual as a function of `f` alone (`g` follows), from columns that are exact. False, and
    /// nothing changed, if no step along it lowers the error of the rows.
    fn newton(&mut self) -> bool {
        let (n, m) = (self.p.len(), self.q.len());
        self.log_columns();
        let plan = self.kernel();
        let residual: Vec<f64> =
            plan.chunks_exact(m).zip(&self.p).map(|(row, p)| p - row.iter().sum::<f64>()).collect();
        let error: f64 = residual.iter().map(|r| r.abs()).sum();
        // The Hessian diag(r) − P diag(1/q) Pᵀ is the Laplacian of a graph with these weights.
        let mut weights = vec![0.0; n * n];
        for i in 0..n {
            for k in 0..i {
                let w = (0..m).map(|j| plan[i * m + j] * plan[k * m + j] / self.q[j]).sum();
                weights[i * n + k] = w;
                weights[k * n + i] = w;
            }
        }
        let direction = solve_laplacian(weights, residual);
        let (low, high) = direction.iter().fold((0.0f64, 0.0f64), |(l, h), v| (l.min(*v), h.max(*v)));
        if !((high - low).is_finite() && high > low) {
            return false;
        }
        let (f, g) = (self.f.clone(), self.g.clone());
        // Plans are exponential in f: beyond a few units the quadratic says nothing.
        let mut t = (LONGEST_STEP / (high - low)).min(1.0);
        for _ in 0..HALVINGS {
            self.f.iter_mut().zip(&f).zip(&direction).for_each(|((new, old), d)| *new = old + t * d);
            self.log_columns();
            if self.row_error() < error {
                return true;
            }
            t *= 0.5;
        }
        (self.f, self.g) = (f, g);
        false
    }

    fn finish(self, cost: ArrayView2<'_, f64>, converged: bool, iterations: usize, marginal_error: f64) -> Sinkhorn {
        let mut plan = Array2::zeros(cost.raw_dim());
        let kernel = self.kernel();
        let n = self.columns.len();
        for (a, &i) in self.rows.iter().enumerate() {
            let row = &kernel[a * n..(a + 1) * n];
            // Σ_j P_ij = p_i to the last bit that a division leaves.
            let scale = self.p[a] / row.iter().sum::<f64>();
            for (b, &j) in self.columns.iter().enumerate() {
                plan[(i, j)] = row[b] * scale;
            }
        }
        let mut f = Array1::from_elem(cost.nrows(), f64::NEG_INFINITY);
        let mut g = Array1::from_elem(cost.ncols(), f64::NEG_INFINITY);
        self.rows.iter().zip(&self.f).for_each(|(&i, v)| f[i] = v * self.eps);
        self.columns.iter().zip(&self.g).for_each(|(&j, v)| g[j] = v * self.eps);
        Sinkhorn { plan, f, g, converged, iterations, marginal_error }
    }
}

/// `P = diag(u) G diag(v)` with `G = exp(f + g − C)`.
struct Scaled {
    kernel: Vec<f64>,
    u: Vec<f64>,
    v: Vec<f64>,
    /// `G v`.
    row_sums: Vec<f64>,
    columns: Vec<f64>,
}

/// Scalings stay within this factor of 1; beyond it an entry of the kernel that has underflowed could matter.
const LARGEST_SCALING: f64 = 1e60;

impl Scaled {
    fn absorb(problem: &Problem) -> Self {
        let (n, m) = (problem.p.len(), problem.q.len());
        Self {
            kernel: problem.kernel(),
            u: vec![1.0; n],
            v: vec![1.0; m],
            row_sums: vec![0.0; n],
            columns: vec![0.0; m],
        }
    }

    fn row_sums(&mut self) {
        for (sum, row) in self.row_sums.iter_mut().zip(self.kernel.chunks_exact(self.v.len())) {
            *sum = row.iter().zip(&self.v).map(|(k, v)| k * v).sum();
        }
    }

    fn error(&self, p: &[f64]) -> f64 {
        self.u.iter().zip(&self.row_sums).zip(p).map(|((u, s), p)| (u * s - p).abs()).sum()
    }

    /// One iteration from the row sums; false, and nothing changed, if a scaling would leave its range.
    fn step(&mut self, p: &[f64], q: &[f64]) -> bool {
        let inside = |v: f64| (1.0 / LARGEST_SCALING..LARGEST_SCALING).contains(&v);
        let u: Vec<f64> = p.iter().zip(&self.row_sums).map(|(p, s)| p / s).collect();
        self.columns.fill(0.0);
        for (row, u) in self.kernel.chunks_exact(self.v.len()).zip(&u) {
            self.columns.iter_mut().zip(row).for_each(|(c, k)| *c += k * u);
        }
        if !(u.iter().all(|v| inside(*v)) && q.iter().zip(&self.columns).all(|(q, c)| inside(q / c))) {
            return false;
        }
        self.u = u;
        self.v.iter_mut().zip(q.iter().zip(&self.columns)).for_each(|(v, (q, c))| *v = q / c);
        true
    }

    /// Puts the scalings back into the potentials.
    fn release(&self, problem: &mut Problem) {
        problem.f.iter_mut().zip(&self.u).for_each(|(f, u)| *f += u.ln());
        problem.g.iter_mut().zip(&self.v).for_each(|(g, v)| *g += v.ln());
    }
}

/// Range of `C/ε` from which the iteration starts at the exact problem's potentials.
const SHARP: f64 = 100.0;
/// Iterations before Newton steps are tried, and after one that failed.
const PATIENCE: usize = 40;
/// Rows up to which a Newton step, which takes their third power, is worth it.
const NEWTON_ROWS: usize = 512;
/// Longest Newton step, in units of `ε`.
const LONGEST_STEP: f64 = 4.0;
/// How often a step is halved.
const HALVINGS: usize = 12;

/// `x` with `L x = b` and `x = 0` at the last node, for the Laplacian `L` of a graph with these symmetric weights (`[n, n]`; the
/// diagonal isn't read) and a `b` of sum 0. Elimination without a subtraction in `L`: even weights of 1e-30 keep their digits.
fn solve_laplacian(mut weights: Vec<f64>, mut b: Vec<f64>) -> Vec<f64> {
    let n = b.len();
    let mut degrees = vec![0.0; n];
    for k in 0..n.saturating_sub(1) {
        let degree: f64 = weights[k * n + k + 1..(k + 1) * n].iter().sum();
        degrees[k] = degree;
        if degree <= 0.0 {
            continue;
        }
        for i in k + 1..n {
            let share = weights[k * n + i] / degree;
            b[i] += b[k] * share;
            for j in k + 1..n {
                weights[i * n + j] += share * weights[k * n + j];
            }
        }
    }
    let mut x = vec![0.0; n];
    for k in (0..n.saturating_sub(1)).rev() {
        if degrees[k] > 0.0 {
            let flow: f64 = (k + 1..n).map(|j| weights[k * n + j] * x[j]).sum();
            x[k] = (b[k] + flow) / degrees[k];
        }
    }
    x
}

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    max + values.map(|v| (v - max).exp()).sum::<f64>().ln()
}
