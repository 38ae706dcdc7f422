//! Spectra of large symmetric operators known only through products: power iteration, Lanczos with full
//! re-orthogonalization, stochastic Lanczos quadrature.
//!
//! An operator is any `Fn(&Tensor) -> Result<Tensor>` on flat vectors `[n]`, for example
//! [`Hessian::apply`](crate::autograd::Hessian::apply). Without re-orthogonalization Lanczos finds "ghost"
//! copies of converged eigenvalues, which distort a density; both passes of Gram-Schmidt are always on here.

use crate::{Error, Result, Seed, stats};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor, no_grad};

/// The dominant eigenpair found by [`power_iteration`].
#[derive(Debug)]
pub struct Eigenpair {
    /// Rayleigh quotient of `vector`: the eigenvalue of largest magnitude, with its sign.
    pub value: f64,
    /// Unit vector `[n]`.
    pub vector: Tensor,
    /// `‖A v − λ v‖`, the error bound of `value`.
    pub residual: f64,
    /// Products used.
    pub iterations: usize,
    /// Whether `residual ≤ tolerance · |λ|`.
    pub converged: bool,
}

/// A unit-norm start vector `[n]` of the given kind on the given device, from the seed's stream.
fn start_vector(n: usize, kind: Kind, device: Device, seed: Seed, probe: Probe) -> Tensor {
    let mut values = vec![0.0f32; n];
    seed.fill_normal(&mut values, 0);
    if probe == Probe::Rademacher {
        for value in &mut values {
            *value = if *value < 0.0 { -1.0 } else { 1.0 };
        }
    }
    let v = Tensor::from_slice(&values).to_kind(kind).to_device(device);
    let norm = v.to_kind(Kind::Double).norm().double_value(&[]);
    v / norm
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    a.to_kind(Kind::Double).dot(&b.to_kind(Kind::Double)).double_value(&[])
}

fn checked(product: Tensor, n: usize) -> Result<Tensor> {
    let expected = vec![n as i64];
    if product.size() != expected {
        return Err(Error::Shape { what: "The operator's product".into(), expected, got: product.size() });
    }
    let sum = product.sum(Kind::Double).double_value(&[]);
    if sum.is_finite() {
        Ok(product)
    } else {
        Err(Error::NonFinite { what: "The sum of the operator's product".into(), value: sum })
    }
}

/// Eigenvalue of largest magnitude of the symmetric operator `apply` on vectors `[n]`.
///
/// Stops when the residual falls below `tolerance · |λ|` or after `max_iterations` products.
///
/// # Errors
/// [`Error::InvalidArgument`] for `n = 0` or no iterations; what the operator reports; a non-finite product.
pub fn power_iteration(
    apply: impl Fn(&Tensor) -> Result<Tensor>,
    n: usize,
    kind: Kind,
    device: Device,
    seed: Seed,
    max_iterations: usize,
    tolerance: f64,
) -> Result<Eigenpair> {
    if n == 0 || max_iterations == 0 {
        return Err(Error::invalid("n and max_iterations", "at least 1", format!("{n} and {max_iterations}")));
    }
    let mut vector = start_vector(n, kind, device, seed, Probe::Gaussian);
    let mut pair = None;
    for iterations in 1..=max_iterations {
        let product = checked(apply(&vector)?, n)?;
        let value = dot(&vector, &product);
        let residual = (&product - &vector * value).to_kind(Kind::Double).norm().double_value(&[]);
        let norm = product.to_kind(Kind::Double).norm().double_value(&[]);
        let converged = residual <= tolerance * value.abs();
        // A zero product means that the start lies in the null space: the eigenvalue found is 0.
        let next = if norm > 0.0 { product / norm } else { vector.shallow_clone() };
        let done = converged || norm == 0.0;
        pair = Some(Eigenpair { value, vector, residual, iterations, converged: done });
        if done {
            break;
        }
        vector = next;
    }
    pair.ok_or_else(|| Error::invalid("max_iterations", "at least 1", max_iterations))
}

/// The tridiagonal matrix that Lanczos found.
#[derive(Debug, Clone, PartialEq)]
pub struct Tridiagonal {
    /// Diagonal, `[m]`.
    pub alpha: Vec<f64>,
    /// Off-diagonal, `[m − 1]`.
    pub beta: Vec<f64>,
}

impl Tridiagonal {
    /// Quadrature nodes (eigenvalues, ascending) and weights (squared first components of the eigenvectors).
    ///
    /// # Errors
    /// What libtorch's symmetric eigensolver reports.
    pub fn quadrature(&self) -> Result<(Vec<f64>, Vec<f64>)> {
        let m = self.alpha.len();
        let mut dense = vec![0.0f64; m * m];
        for (i, &alpha) in self.alpha.iter().enumerate() {
            dense[i * m + i] = alpha;
        }
        for (i, &beta) in self.beta.iter().enumerate() {
            dense[i * m + i + 1] = beta;
            dense[(i + 1) * m + i] = beta;
        }
        let matrix = Tensor::from_slice(&dense).f_reshape([m as i64, m as i64])?;
        let (values, vectors) = matrix.f_linalg_eigh("L")?;
        let weights = vectors.f_select(0, 0)?.square();
        Ok((Vec::try_from(&values)?, Vec::try_from(&weights.contiguous())?))
    }
}

/// `m` steps of Lanczos from the start vector `v` (`[n]`, any norm but zero).
///
/// Two passes of Gram-Schmidt against all earlier vectors (f64 inner products). Stops early on an invariant
/// subspace, `β_j < 1e-6 · max(|α|, β)`, and then every eigenvalue of the reached subspace is exact.
/// Memory: `m · n` scalars of the vector's kind, and a block of 2¹⁸ columns in f64.
///
/// # Errors
/// [`Error::InvalidArgument`] for `m = 0` or a zero or non-finite start; what the operator reports.
pub fn lanczos(apply: impl Fn(&Tensor) -> Result<Tensor>, v: &Tensor, m: usize) -> Result<Tridiagonal> {
    let n = v.numel();
    let norm = v.to_kind(Kind::Double).norm().double_value(&[]);
    if m == 0 {
        return Err(Error::invalid("m", "at least 1 Lanczos step", m));
    }
    if norm.is_nan() || norm <= 0.0 || norm.is_infinite() {
        return Err(Error::invalid("the start vector's norm", "positive and finite", norm));
    }
    let steps = m.min(n);
    no_grad(|| {
        // One row a step, in the vector's own kind.
        let basis = Tensor::f_empty([steps as i64, n as i64], (v.kind(), v.device()))?;
        let row = |j: usize| basis.get(j as i64);
        row(0).f_copy_(&(v / norm))?;
        let mut alpha: Vec<f64> = Vec::new();
        let mut beta: Vec<f64> = Vec::new();
        for j in 0..steps {
            let z = checked(tch::with_grad(|| apply(&row(j)))?.detach(), n)?;
            alpha.push(dot(&row(j), &z));
            // α q_j + β q_{j−1} is what the first pass of Gram-Schmidt takes out.
            let z = z.to_kind(Kind::Double).copy();
            for _ in 0..2 {
                orthogonalize(&z, &basis.narrow(0, 0, j as i64 + 1))?;
            }
            let b = z.norm().double_value(&[]);
            let scale = alpha.iter().map(|a| a.abs()).chain(beta.iter().copied()).fold(0.0, f64::max);
            if j + 1 == steps || b <= 1e-6 * scale || b == 0.0 {
                break;
            }
            beta.push(b);
            row(j + 1).f_copy_(&(z / b))?;
        }
        Ok(Tridiagonal { alpha, beta })
    })
}

/// Columns of the basis that are converted to f64 at a time.
const BLOCK: i64 = 1 << 18;

/// `z ← z − Qᵀ(Q z)` in place, in f64, for the rows `q` `[j, n]` of a basis.
fn orthogonalize(z: &Tensor, q: &Tensor) -> Result<()> {
    let (rows, n) = q.size2()?;
    let blocks = || (0..n).step_by(BLOCK as usize).map(|start| (start, BLOCK.min(n - start)));
    let mut coefficients = Tensor::zeros([rows], (Kind::Double, z.device()));
    for (start, length) in blocks() {
        let wide = q.narrow(1, start, length).to_kind(Kind::Double);
        coefficients += wide.f_mv(&z.narrow(0, start, length))?;
    }
    for (start, length) in blocks() {
        let wide = q.narrow(1, start, length).to_kind(Kind::Double);
        let part = wide.tr().f_mv(&coefficients)?;
        let _ = z.narrow(0, start, length).f_sub_(&part)?;
    }
    Ok(())
}

/// Distribution of the probe vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// ±1 with equal probability: lower variance, exact traces of diagonal operators.
    Rademacher,
    /// Standard normal.
    Gaussian,
}

/// Settings of [`slq`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlqConfig {
    /// Probe vectors.
    pub probes: usize,
    /// Lanczos steps a probe.
    pub steps: usize,
    /// Distribution of the probes.
    pub probe: Probe,
    /// Seed of the probes.
    pub seed: u64,
}

impl Default for SlqConfig {
    fn default() -> Self {
        Self { probes: 4, steps: 40, probe: Probe::Rademacher, seed: 0 }
    }
}

impl SlqConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] naming a count that is 0.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [("probes", self.probes), ("steps", self.steps)] {
            if value == 0 {
                return Err(Error::invalid(name, "at least 1", value));
            }
        }
        Ok(())
    }
}

/// A spectral density as weighted nodes, pooled over probes; the weights sum to 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spectrum {
    /// Dimension of the operator.
    pub n: usize,
    /// Ritz values of all probes.
    pub nodes: Vec<f64>,
    /// Their weights, summing to 1.
    pub weights: Vec<f64>,
    /// Median over probes of the smallest node.
    pub lambda_min: f64,
    /// Median over probes of the largest node.
    pub lambda_max: f64,
    /// Hutchinson's estimate `mean vᵀAv · n/‖v‖²`, an independent check of [`trace`](Self::trace).
    pub hutchinson_trace: f64,
    /// `sqrt(E‖Av‖²/‖v‖²)`: the root mean square eigenvalue, from the first product of each probe.
    pub rms: f64,
}

impl Spectrum {
    fn mass(&self, keep: impl Fn(f64) -> bool) -> f64 {
        self.nodes.iter().zip(&self.weights).filter(|(x, _)| keep(**x)).map(|(_, w)| w).sum()
    }

    /// `n · Σ w θ`.
    pub fn trace(&self) -> f64 {
        self.n as f64 * self.nodes.iter().zip(&self.weights).map(|(x, w)| x * w).sum::<f64>()
    }

    /// Mass of eigenvalues with `|θ| < threshold`.
    pub fn zero_mass(&self, threshold: f64) -> f64 {
        self.mass(|x| x.abs() < threshold)
    }

    /// Mass of eigenvalues `≥ threshold`.
    pub fn positive_mass(&self, threshold: f64) -> f64 {
        self.mass(|x| x >= threshold)
    }

    /// Mass of eigenvalues `≤ −threshold`.
    pub fn negative_mass(&self, threshold: f64) -> f64 {
        self.mass(|x| x <= -threshold)
    }

    /// The density at `x`, each node widened to a Gaussian of standard deviation `kappa`.
    pub fn density(&self, x: f64, kappa: f64) -> f64 {
        let norm = 1.0 / (kappa * (2.0 * std::f64::consts::PI).sqrt());
        self.nodes.iter().zip(&self.weights).map(|(t, w)| w * norm * (-0.5 * ((x - t) / kappa).powi(2)).exp()).sum()
    }
}

/// Stochastic Lanczos quadrature: the spectral density of the symmetric operator `apply` on vectors `[n]`.
///
/// # Errors
/// [`Error::InvalidArgument`] for counts of 0; what the operator reports; a non-finite product.
pub fn slq(
    apply: impl Fn(&Tensor) -> Result<Tensor>,
    n: usize,
    kind: Kind,
    device: Device,
    config: &SlqConfig,
) -> Result<Spectrum> {
    config.validate()?;
    if n == 0 {
        return Err(Error::invalid("n", "at least 1", n));
    }
    let seed = Seed::new(config.seed).child("slq");
    let mut nodes = Vec::new();
    let mut weights = Vec::new();
    let (mut smallest, mut largest) = (Vec::new(), Vec::new());
    let (mut rayleigh, mut squares) = (0.0, 0.0);
    for probe in 0..config.probes {
        let v = start_vector(n, kind, device, seed.index(probe as u64), config.probe);
        let t = lanczos(&apply, &v, config.steps)?;
        let (theta, w) = t.quadrature()?;
        // For a unit start vector, e₁ᵀT e₁ = vᵀAv and e₁ᵀT²e₁ = ‖Av‖².
        rayleigh += t.alpha[0];
        squares += t.alpha[0].powi(2) + t.beta.first().map_or(0.0, |b| b * b);
        smallest.push(theta[0]);
        largest.push(theta[theta.len() - 1]);
        nodes.extend(theta);
        weights.extend(w.iter().map(|w| w / config.probes as f64));
    }
    Ok(Spectrum {
        n,
        nodes,
        weights,
        lambda_min: stats::median(&smallest)?,
        lambda_max: stats::median(&largest)?,
        hutchinson_trace: n as f64 * rayleigh / config.probes as f64,
        rms: (squares / config.probes as f64).sqrt(),
    })
}
