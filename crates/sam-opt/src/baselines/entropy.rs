//! Entropy minimization \[prior work: Grandvalet and Bengio 2004\].

use crate::divergence::{cross_entropy, log_probabilities};
use crate::{Error, Result};
use tensor::tch::Tensor;

/// Mean entropy `−(1/b) Σ_i Σ_c f_ic log f_ic` of the outputs, in nats, from logits `[batch, classes]`: a cheap use of
/// unlabeled inputs. Added to the loss with a weight of 0.01 to 0.1, it makes the network certain.
///
/// ```
/// use sam_opt::{baselines::entropy, tensor::tch::Tensor};
/// let undecided = Tensor::from_slice(&[0.0f64, 0.0, 3.0, 3.0]).reshape([2, 2]);
/// assert!((entropy(&undecided)?.double_value(&[]) - 2f64.ln()).abs() < 1e-12);
/// # Ok::<(), sam_opt::Error>(())
/// ```
///
/// # Errors
/// [`Error::BadLogitsShape`] for logits that aren't `[batch, classes]`, [`Error::EmptyBatch`].
pub fn entropy(logits: &Tensor) -> Result<Tensor> {
    let pass = crate::PassKind::Main;
    match logits.size()[..] {
        [0, _] => return Err(Error::EmptyBatch { pass }),
        [_, classes] if classes >= 2 => {}
        _ => return Err(Error::BadLogitsShape { pass, got: logits.size() }),
    }
    let log_p = log_probabilities(logits)?;
    cross_entropy(&log_p.f_exp()?, &log_p)
}
