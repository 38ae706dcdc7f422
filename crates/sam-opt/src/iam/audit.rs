//! How good the search's direction is on the user's own network.

use super::inconsistency::{InconsistencyOpts, descend, top_eig, trainable};
use super::outputs::Outputs;
use crate::Result;
use crate::pass::PassKind;
use crate::scope::without_grad;
use tensor::tch::{Kind, Tensor};

/// What [`audit_direction`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct DirectionAudit {
    /// `|cos(δ_K, v_max)|` of each draw: 1 when the search has found the top eigenvector of F.
    pub cosines: Vec<f64>,
    /// `Ŝ / (½ρ²λ_max)` of each draw: the share of the largest possible inconsistency that the search has found. Above
    /// 1 only where ρ is too large for the quadratic expansion.
    pub shares: Vec<f64>,
    /// Largest eigenvalue of F.
    pub lambda_max: f64,
}

/// Compares the direction that `opts.inner_steps` power steps find (training uses 1) with the top eigenvector of the
/// Fisher matrix, found by exact products (at most `iters`, until the residual is below `tol · λ`).
///
/// `logits` as in [`local_inconsistency`](crate::local_inconsistency).
///
/// # Errors
/// As [`local_inconsistency`](crate::local_inconsistency) and [`fisher_top_eig`](crate::fisher_top_eig).
pub fn audit_direction(
    params: &[Tensor],
    mut logits: impl FnMut() -> Result<Tensor>,
    opts: &InconsistencyOpts,
    iters: usize,
    tol: f64,
) -> Result<DirectionAudit> {
    opts.validate()?;
    let set = trainable(params)?;
    let (lambda_max, top) = top_eig(&set, &mut logits, iters, tol)?;
    let top = top.to_kind(Kind::Double);
    let quadratic = 0.5 * opts.rho * opts.rho * lambda_max;
    let reference = without_grad(|| Outputs::new(logits()?, PassKind::Probe(0), false))?.detached();
    let (mut cosines, mut shares) = (Vec::new(), Vec::new());
    for draw in 0..opts.draws {
        let found = descend(&set, &reference, &mut logits, opts, draw, None)?;
        let shifted = without_grad(|| Outputs::new(logits()?, PassKind::Probe(draw), false))?;
        drop(found.guard);
        let cosine = if found.norm == 0.0 {
            0.0
        } else {
            let flat = found.direction.flatten(&set)?.to_kind(Kind::Double);
            flat.f_dot(&top)?.f_double_value(&[])?.abs() / found.norm
        };
        cosines.push(cosine.min(1.0));
        shares.push(if quadratic > 0.0 { reference.divergence(&shifted)? / quadratic } else { 0.0 });
    }
    Ok(DirectionAudit { cosines, shares, lambda_max })
}
