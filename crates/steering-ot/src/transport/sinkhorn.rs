//! Entropic transport: minimises `Σ P C + ε Σ P (ln P − 1)` under both marginals.
//!
//! The iteration runs on scalings of a kernel into which the potentials have been absorbed, and falls back to the log domain
//! whenever a scaling grows large; so it is as fast as the plain iteration and never underflows. [`sinkhorn_plain`] is the
//! same in the log domain throughout.

use super::check;
use crate::{Error, Result};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2};
use serde::{Deserialize, Serialize};

/// When Sinkhorn's iteration stops.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SinkhornConfig {
    /// Most iterations. The authors stop at 1000 \[official code\]; sharp plans need more, and an iteration is cheap.
    pub max_iterations: usize,
    /// Stop when the L1 error of the row marginal is below this. (The authors stop when the change of a scaling is below
    /// 1e-6, which says less about the plan \[official code\].)
    pub tolerance: f64,
}

impl Default for SinkhornConfig {
    fn default() -> Self {
        Self { max_iterations: 20_000, tolerance: 1e-9 }
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
    let mut iterations = 1;
    let (error, converged) = loop {
        scaled.row_sums();
        let error = scaled.error(&problem.p);
        if error < config.tolerance || iterations >= config.max_iterations {
            break (error, error < config.tolerance);
        }
        iterations += 1;
        if !scaled.step(&problem.p, &problem.q) {
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
    let mut problem = Problem::new(cost, p, q, eps, config, None)?;
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
        let g = columns
            .iter()
            .map(|&j| start.map_or(0.0, |s| if s[j].is_finite() { s[j] / eps } else { 0.0 }))
            .map(|v| if v.is_finite() { v } else { 0.0 })
            .collect();
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

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    max + values.map(|v| (v - max).exp()).sum::<f64>().ln()
}
