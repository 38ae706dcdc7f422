//! Measures of flatness of a trained model, to compare with [`local_inconsistency`](crate::local_inconsistency): they need
//! labels, except the norm.

use crate::scope::without_grad;
use crate::{Error, Result};
use tensor::autograd::Hessian;
use tensor::tch::Tensor;
use tensor::{ParamSet, Seed, spectrum};

/// Eigenvalue of largest magnitude of the Hessian of `loss` (a scalar with its graph), by power iteration with exact
/// products: at most `iters` of them, until the residual is below `tol · |λ|`. Near a minimum it is λ_max.
///
/// # Errors
/// A loss without a graph or that isn't a scalar; `iters = 0`.
pub fn hessian_top_eig(params: &ParamSet, loss: &Tensor, iters: usize, tol: f64, seed: u64) -> Result<f64> {
    let hessian = Hessian::new(loss, params)?;
    let first = &params.tensors()[0];
    let seed = Seed::new(seed).child("sam-opt.hessian.top");
    let apply = |v: &Tensor| hessian.apply(v);
    Ok(spectrum::power_iteration(apply, params.numel(), first.kind(), first.device(), seed, iters, tol)?.value)
}

/// Trace of the Hessian of `loss` by Hutchinson's estimator `mean vᵀHv` over `probes` vectors of random signs.
///
/// # Errors
/// As [`hessian_top_eig`]; `probes = 0`.
pub fn hessian_trace(params: &ParamSet, loss: &Tensor, probes: usize, seed: u64) -> Result<f64> {
    if probes == 0 {
        return Err(Error::invalid("probes", "at least 1", 0));
    }
    let hessian = Hessian::new(loss, params)?;
    let seed = Seed::new(seed).child("sam-opt.hessian.trace");
    let mut sum = 0.0;
    for probe in 0..probes {
        let v = params.normal(seed.index(probe as u64))?.flatten(params)?.sign();
        let product = hessian.apply(&v)?;
        sum += (v.to_kind(tensor::tch::Kind::Double) * product).sum(tensor::tch::Kind::Double).double_value(&[]);
    }
    Ok(sum / probes as f64)
}

/// SAM's sharpness `L(θ + ρ g/‖g‖) − L(θ)`, in nats; `loss` is a fresh forward pass on the same batch each time it is
/// called. The parameters are put back, bit for bit.
///
/// # Errors
/// [`Error::InvalidRho`], a loss without a graph, an open guard.
pub fn sam_sharpness(params: &ParamSet, mut loss: impl FnMut() -> Result<Tensor>, rho: f64) -> Result<f64> {
    if !(rho.is_finite() && rho >= 0.0) {
        return Err(Error::InvalidRho { field: "rho".into(), rho });
    }
    let here = loss()?;
    let gradient = params.gradient(&here)?;
    let alphas = vec![rho / (gradient.norm() + 1e-12); params.len()];
    let _guard = params.perturb(&alphas, &gradient, None)?;
    let there = without_grad(&mut loss)?;
    Ok(there.f_double_value(&[])? - here.f_double_value(&[])?)
}
