//! Label smoothing \[prior work: Szegedy et al. 2016\].

use crate::base::check;
use crate::{Error, PassKind, Result};
use tensor::tch::{Reduction, Tensor};

/// Mean cross-entropy with targets `(1−s)·one-hot + s/C`; `logits` `[batch, classes]`, `targets` `[batch]` of class
/// numbers, smoothing `s` usually 0.1.
///
/// ```
/// use sam_opt::{baselines::smoothed_cross_entropy, tensor::tch::Tensor};
/// let (logits, targets) = (Tensor::from_slice(&[2.0f64, 0.0]).reshape([1, 2]), Tensor::from_slice(&[0i64]));
/// let by_hand = 2.0 * 0.05 + (1.0 + (-2f64).exp()).ln();
/// assert!((smoothed_cross_entropy(&logits, &targets, 0.1)?.double_value(&[]) - by_hand).abs() < 1e-12);
/// # Ok::<(), sam_opt::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidConfig`] for a smoothing outside `[0, 1)`; [`Error::EmptyBatch`]; what libtorch reports about shapes.
pub fn smoothed_cross_entropy(logits: &Tensor, targets: &Tensor, smoothing: f64) -> Result<Tensor> {
    check("smoothing", smoothing, 0.0, 1.0)?;
    if logits.size().first() == Some(&0) {
        return Err(Error::EmptyBatch { pass: PassKind::Main });
    }
    Ok::<_, Error>(logits.f_cross_entropy_loss::<&Tensor>(targets, None, Reduction::Mean, -100, smoothing)?)
}
