//! The local inconsistency as a measure, and exact products with the Fisher matrix. No optimizer, no labels.

use super::config::{check_noise, check_rho};
use super::delta::per_scalar;
use super::outputs::Outputs;
use crate::divergence::cross_entropy;
use crate::pass::PassKind;
use crate::scope::without_grad;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::autograd::GaussNewton;
use tensor::params::Scratch;
use tensor::tch::{Kind, Tensor, no_grad, with_grad};
use tensor::{ParamSet, ParamVec, RestoreGuard, Seed, spectrum, stats};

/// Settings of [`local_inconsistency`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InconsistencyOpts {
    /// Radius ρ, in parameter units.
    pub rho: f64,
    /// Length σ of the noise that each draw starts from.
    pub noise_scale: f64,
    /// Power steps K: at least 3 for a reported value \[paper, appendix of an earlier version\].
    pub inner_steps: usize,
    /// Draws of the noise: at least 10 for a reported value \[same\].
    pub draws: usize,
    /// Seed of the noise.
    pub seed: u64,
}

impl Default for InconsistencyOpts {
    fn default() -> Self {
        Self { rho: 0.1, noise_scale: 1.0, inner_steps: 3, draws: 10, seed: 0 }
    }
}

impl InconsistencyOpts {
    /// # Errors
    /// [`Error::InvalidRho`], [`Error::InvalidInnerSteps`], or [`Error::InvalidConfig`] naming the field.
    pub fn validate(&self) -> Result<()> {
        check_rho(self.rho)?;
        check_noise(self.noise_scale)?;
        if self.inner_steps == 0 {
            return Err(Error::InvalidInnerSteps);
        }
        if self.draws == 0 {
            return Err(Error::invalid("draws", "at least 1", 0));
        }
        Ok(())
    }
}

/// What [`local_inconsistency`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct InconsistencyReport {
    /// Mean of Ŝ over the draws, in nats.
    pub mean: f64,
    /// Standard deviation over the draws (0 for one draw).
    pub std: f64,
    /// 95 % t-interval of the mean over the draws; `None` for one draw. It covers the noise of the search, not that of
    /// the inputs.
    pub interval: Option<(f64, f64)>,
    /// Ŝ of each draw.
    pub per_draw: Vec<f64>,
    /// Mean of `‖δ_K‖`: ρ, or less where draws found no direction.
    pub delta_norm: f64,
    /// Draws that found no direction.
    pub degenerate: usize,
}

/// Local inconsistency `S_ρ = max_{‖δ‖≤ρ} (1/b) Σ KL(f(x;θ) ‖ f(x;θ+δ))` of a model on some inputs, by power iteration
/// from `draws` starts (Algorithm 1 \[paper\]). `S_ρ ≈ ½ρ²λ_max(F)`.
///
/// `logits` returns the logits `[batch, classes]` of the same inputs each time it is called, with the model in evaluation
/// mode: in training mode dropout would be measured as inconsistency, and batch normalization would move its running
/// statistics in every pass, of which this function knows nothing. Parameters that don't require grad stay where they
/// are; afterwards all are what they were, bit for bit. Costs `draws · (3K+1) + 1` forward passes (a backward pass
/// counting two).
///
/// S ranks generalization *gaps* of models with a similar training loss; an untrained model has a small S and a large
/// error.
///
/// # Errors
/// Invalid settings, [`Error::NoParams`], bad or detached logits, an open guard over a parameter.
pub fn local_inconsistency(
    params: &[Tensor],
    mut logits: impl FnMut() -> Result<Tensor>,
    opts: &InconsistencyOpts,
) -> Result<InconsistencyReport> {
    opts.validate()?;
    let set = trainable(params)?;
    let reference = without_grad(|| Outputs::new(logits()?, PassKind::Probe(0), false))?.detached();
    let (mut per_draw, mut lengths, mut degenerate) = (Vec::new(), 0.0, 0);
    let mut scratch = None;
    for draw in 0..opts.draws {
        let found = descend(&set, &reference, &mut logits, opts, draw, scratch.take())?;
        let shifted = without_grad(|| Outputs::new(logits()?, PassKind::Probe(draw), false))?;
        shifted.comparable(&reference, PassKind::Probe(draw))?;
        per_draw.push(reference.divergence(&shifted)?);
        lengths += found.alpha * found.norm / opts.draws as f64;
        degenerate += usize::from(found.norm == 0.0);
        scratch = Some(found.guard.close());
    }
    let (mean, std, interval) = if let [single] = per_draw[..] {
        (single, 0.0, None)
    } else {
        let (_, std) = stats::mean_std(&per_draw).map_err(tensor::Error::from)?;
        let t = stats::t_interval(&per_draw, 0.95).map_err(tensor::Error::from)?;
        (t.mean, std, Some((t.low, t.high)))
    };
    Ok(InconsistencyReport { mean, std, interval, per_draw, delta_norm: lengths, degenerate })
}

/// δ_K of one draw: `alpha · direction`, with the parameters at `θ + δ_K` under the guard.
pub(super) struct Found {
    pub(super) guard: RestoreGuard,
    pub(super) alpha: f64,
    pub(super) direction: ParamVec,
    /// Of the direction.
    pub(super) norm: f64,
}

/// K power steps from the noise of a draw.
pub(super) fn descend(
    set: &ParamSet,
    reference: &Outputs,
    logits: &mut impl FnMut() -> Result<Tensor>,
    opts: &InconsistencyOpts,
    draw: usize,
    scratch: Option<Scratch>,
) -> Result<Found> {
    let seed = Seed::new(opts.seed).child("sam-opt.inconsistency").index(draw as u64);
    let p = reference.log_p.f_exp()?;
    let guard = set.perturb_normal(per_scalar(set, opts.noise_scale), seed, scratch)?;
    let mut found = None;
    for k in 0..opts.inner_steps {
        let pass = PassKind::Inner(k);
        let outputs = with_grad(|| Outputs::new(logits()?, pass, true))?;
        outputs.comparable(reference, pass)?;
        let gradient = with_grad(|| Ok::<_, Error>(set.gradient(&cross_entropy(&p, &outputs.log_p)?)?))?;
        let norm = gradient.norm();
        if !norm.is_finite() {
            return Err(Error::NonFinite { what: "gradient norm", pass, value: norm });
        }
        let alpha = if norm == 0.0 { 0.0 } else { opts.rho / (norm + 1e-12) };
        guard.shift(&vec![alpha; set.len()], &gradient)?;
        found = Some((alpha, gradient, norm));
        if norm == 0.0 {
            break;
        }
    }
    let (alpha, direction, norm) = found.ok_or(Error::InvalidInnerSteps)?;
    Ok(Found { guard, alpha, direction, norm })
}

/// The trainable ones of some tensors.
pub(super) fn trainable(params: &[Tensor]) -> Result<ParamSet> {
    let named = params.iter().enumerate().filter(|(_, t)| t.requires_grad());
    let named: Vec<(String, Tensor)> = named.map(|(i, t)| (i.to_string(), t.shallow_clone())).collect();
    if named.is_empty() {
        return Err(Error::NoParams);
    }
    Ok(ParamSet::new(named)?)
}

/// The Fisher (Gauss-Newton) matrix `F = (1/b) Σ J_iᵀ (diag(f_i) − f_i f_iᵀ) J_i` of a model on some inputs, as an
/// operator.
pub(super) fn fisher(set: &ParamSet, logits: impl FnOnce() -> Result<Tensor>) -> Result<GaussNewton<'_>> {
    with_grad(|| {
        let outputs = Outputs::new(logits()?, PassKind::Probe(0), true)?;
        // The Hessian of log Σ exp is diag(f) − f fᵀ.
        let convex = |z: &Tensor| z.logsumexp([-1i64].as_slice(), false).mean(None::<Kind>);
        Ok(GaussNewton::new(&outputs.logits, convex, set)?)
    })
}

/// `F v` for a `v` of the parameters' shapes, exactly (double backward), without noise or radius. Parameters that don't
/// require grad don't count: their part of the result is zeros.
///
/// # Errors
/// [`Error::NoParams`], bad or detached logits, a `v` that doesn't fit the parameters.
pub fn fisher_vector_product(
    params: &[Tensor],
    logits: impl FnOnce() -> Result<Tensor>,
    v: &[Tensor],
) -> Result<Vec<Tensor>> {
    if v.len() != params.len() {
        return Err(Error::invalid("v", format!("{} tensors, one a parameter", params.len()), v.len()));
    }
    let set = trainable(params)?;
    let parts = params.iter().zip(v).filter(|(p, _)| p.requires_grad()).map(|(_, v)| Some(v.shallow_clone()));
    let flat = ParamVec::new(parts.collect()).flatten(&set)?;
    let product = fisher(&set, logits)?.apply(&flat)?;
    spread(params, &set.unflatten(&product)?)
}

/// Largest eigenvalue of F and its unit eigenvector in the parameters' shapes, by power iteration with exact products:
/// at most `iters` of them, until the residual is below `tol · λ`.
///
/// # Errors
/// As [`fisher_vector_product`]; `iters = 0`.
pub fn fisher_top_eig(
    params: &[Tensor],
    logits: impl FnOnce() -> Result<Tensor>,
    iters: usize,
    tol: f64,
) -> Result<(f64, Vec<Tensor>)> {
    let set = trainable(params)?;
    let (value, vector) = top_eig(&set, logits, iters, tol)?;
    Ok((value, spread(params, &set.unflatten(&vector)?)?))
}

/// The `k` largest eigenvalues of F, descending, by `steps` steps of Lanczos with exact products and full
/// re-orthogonalization; a few times `k` steps for converged values. Each value comes once, however many eigenvectors it
/// has, and fewer than `k` come where F has fewer different ones. Memory: `steps` vectors of the parameters' size.
///
/// # Errors
/// As [`fisher_vector_product`]; `k = 0`, or fewer steps than `k`.
pub fn fisher_top_eigs(
    params: &[Tensor],
    logits: impl FnOnce() -> Result<Tensor>,
    k: usize,
    steps: usize,
) -> Result<Vec<f64>> {
    if k == 0 || steps < k {
        return Err(Error::invalid("k", format!("from 1 to the {steps} steps"), k));
    }
    let set = trainable(params)?;
    let operator = fisher(&set, logits)?;
    let start = set.normal(Seed::new(0).child("sam-opt.fisher"))?.flatten(&set)?;
    let (mut values, _) = spectrum::lanczos(|v| operator.apply(v), &start, steps)?.quadrature()?;
    values.reverse();
    values.truncate(k);
    Ok(values)
}

/// As [`fisher_top_eig`], flat.
pub(super) fn top_eig(
    set: &ParamSet,
    logits: impl FnOnce() -> Result<Tensor>,
    iters: usize,
    tol: f64,
) -> Result<(f64, Tensor)> {
    let operator = fisher(set, logits)?;
    let first = &set.tensors()[0];
    let seed = Seed::new(0).child("sam-opt.fisher");
    let apply = |v: &Tensor| operator.apply(v);
    let pair = spectrum::power_iteration(apply, set.numel(), first.kind(), first.device(), seed, iters, tol)?;
    Ok((pair.value, pair.vector))
}

/// One tensor a parameter, zeros for those that aren't trainable.
fn spread(params: &[Tensor], vector: &ParamVec) -> Result<Vec<Tensor>> {
    let mut parts = vector.parts().iter().flatten();
    let zeros = |p: &Tensor| no_grad(|| p.detach().zeros_like());
    let pick = |p: &Tensor| if p.requires_grad() { parts.next().map(Tensor::copy) } else { Some(zeros(p)) };
    params.iter().map(pick).collect::<Option<Vec<_>>>().ok_or(Error::NoParams)
}
