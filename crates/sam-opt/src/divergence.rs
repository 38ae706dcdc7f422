//! Distributions over classes, from logits: logarithms, Kullback-Leibler divergence, entropy.

use crate::Result;
use tensor::tch::{Kind, Tensor};

/// Log-probabilities `[batch, classes]` of logits, in f32 (f64 for f64 logits). Never the logarithm of a clamped
/// softmax: that isn't a distribution.
pub(crate) fn log_probabilities(logits: &Tensor) -> Result<Tensor> {
    let wide = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    Ok(logits.f_log_softmax(-1, wide)?)
}

/// `(1/b) Σ_i Σ_c p_ic a_ic`, a scalar.
pub(crate) fn mean_over_rows(p: &Tensor, a: &Tensor) -> Result<Tensor> {
    let rows = p.size()[0] as f64;
    Ok(p.f_mul(a)?.f_sum(a.kind())?.f_div_scalar(rows)?)
}

/// `(1/b) Σ_i KL(p_i ‖ q_i)` in nats, from log-probabilities. `p log p` with `p = exp(log p)` is 0 where p is.
pub(crate) fn kl(log_p: &Tensor, log_q: &Tensor) -> Result<Tensor> {
    mean_over_rows(&log_p.f_exp()?, &log_p.f_sub(log_q)?)
}

/// The value of [`kl`], summed in f64 and clamped at 0, below which only rounding leads.
pub(crate) fn kl_value(log_p: &Tensor, log_q: &Tensor) -> Result<f64> {
    let (log_p, log_q) = (log_p.detach(), log_q.detach());
    let sum = log_p.f_exp()?.f_mul(&log_p.f_sub(&log_q)?)?.f_sum(Kind::Double)?.f_double_value(&[])?;
    Ok((sum / log_p.size()[0] as f64).max(0.0))
}

/// `−(1/b) Σ_i Σ_c p_ic log q_ic`: as a function of q it is the divergence up to a constant.
pub(crate) fn cross_entropy(p: &Tensor, log_q: &Tensor) -> Result<Tensor> {
    Ok(mean_over_rows(p, log_q)?.f_neg()?)
}
