//! Losses for several domains that need no optimizer of their own: use them in the closure of any.

use crate::domain::{ByDomain, DomainId, DomainLosses};
use crate::pass::{Pass, PassKind};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tensor::tch::Tensor;

/// The mean of the domains' mean losses, a scalar: empirical risk minimization with balanced domains.
///
/// # Errors
/// Losses without a domain or of a wrong shape.
pub fn erm_loss(losses: DomainLosses, pass: &Pass<'_>) -> Result<Tensor> {
    let losses = ByDomain::new(losses, pass.kind, false)?;
    losses.weighted(&vec![1.0; losses.len()])
}

/// `L̄ + β Var_k(L_k)` with the population variance over domains, a scalar \[prior work: V-REx\]. β is usually 1 to 10.
///
/// # Errors
/// [`Error::InvalidConfig`] for a β that is negative or not finite; losses without a domain or of a wrong shape.
pub fn vrex_loss(losses: DomainLosses, beta: f64, pass: &Pass<'_>) -> Result<Tensor> {
    if !(beta.is_finite() && beta >= 0.0) {
        return Err(Error::invalid("beta", "finite and at least 0", beta));
    }
    let losses = ByDomain::new(losses, pass.kind, false)?;
    let losses = losses.tensor(); // [D]
    let mean = losses.f_mean(losses.kind())?;
    let variance = losses.f_sub(&mean)?.f_square()?.f_mean(losses.kind())?;
    Ok(mean.f_add(&variance.f_mul_scalar(beta)?)?)
}

/// Group distributionally robust optimization \[prior work: GroupDRO\]: `q_k ← q_k e^{η L_k}/Z`, the loss is
/// `Σ_k q_k L_k`.
///
/// The weights move once a step, in its main pass, and stand still in later passes; a step that is repeated after an error
/// starts from the weights that it started from before. It goes with a step of one batch, not with
/// [`step_accumulate`](crate::TwoPass::step_accumulate).
///
/// A domain that isn't in a batch adds nothing to the logarithm of its weight while the others add `η L_k` to theirs, so its
/// share falls; the loss is weighted by the shares among the domains of the batch, which sum to 1.
///
/// Serde saves and restores it between steps, with the weights.
///
/// ```
/// use sam_opt::{DomainId, DomainLosses, ParamGroup, Sam, SamConfig, Sgd, baselines::GroupDro};
/// use sam_opt::tensor::tch::{Kind, Tensor};
/// let w = Tensor::from_slice(&[0.0f32]).set_requires_grad(true);
/// let mut dro = GroupDro::new(0.01)?;
/// let group = ParamGroup::new([("w".to_owned(), w.shallow_clone())]);
/// let mut erm = Sam::new(vec![group], Sgd::new(0.1), SamConfig::sam(0.0))?;
/// erm.step(|pass| {
///     let domain = |k: u32, center: f64| (DomainId(k), (&w - center).square().sum(Kind::Float));
///     dro.loss(DomainLosses::PerDomain(vec![domain(0, 1.0), domain(1, -3.0)]), pass)
/// })?;
/// assert!(dro.weights()[&DomainId(1)] > 0.5);
/// # Ok::<(), sam_opt::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved", into = "Saved")]
pub struct GroupDro {
    eta: f64,
    /// Logarithms of the weights before the step that `step` names, up to a constant.
    before: BTreeMap<DomainId, f64>,
    now: BTreeMap<DomainId, f64>,
    step: Option<u64>,
}

/// [`GroupDro`] as it is saved.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    eta: f64,
    before: BTreeMap<DomainId, f64>,
    now: BTreeMap<DomainId, f64>,
    step: Option<u64>,
}

impl From<GroupDro> for Saved {
    fn from(GroupDro { eta, before, now, step }: GroupDro) -> Self {
        Self { eta, before, now, step }
    }
}

impl TryFrom<Saved> for GroupDro {
    type Error = Error;

    fn try_from(Saved { eta, before, now, step }: Saved) -> Result<Self> {
        let valid = GroupDro::new(eta)?;
        if let Some((id, log)) = before.iter().chain(&now).find(|(_, log)| !log.is_finite()) {
            return Err(Error::State { reason: format!("the logarithm of the weight of the domain {id} is {log}.") });
        }
        match before.keys().find(|id| !now.contains_key(id)) {
            Some(id) => {
                Err(Error::State { reason: format!("the domain {id} had a weight before the last step only.") })
            }
            None => Ok(Self { before, now, step, ..valid }),
        }
    }
}

impl GroupDro {
    /// With step size η of the weights; 0.01 is usual.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when it is negative or not finite.
    pub fn new(eta: f64) -> Result<Self> {
        if !(eta.is_finite() && eta >= 0.0) {
            return Err(Error::invalid("eta", "finite and at least 0", eta));
        }
        Ok(Self { eta, before: BTreeMap::new(), now: BTreeMap::new(), step: None })
    }

    /// The weight of every domain seen so far; they sum to 1.
    pub fn weights(&self) -> BTreeMap<DomainId, f64> {
        softmax(&self.now)
    }

    /// The weighted loss of a pass, a scalar with its graph. A domain that comes for the first time starts with the
    /// (geometric) mean weight of the others.
    ///
    /// # Errors
    /// Losses without a domain, of a wrong shape, or not finite in the main pass; [`Error::InvalidConfig`] in the second
    /// of several micro-batches, where the weights would have to move in the middle of a step.
    pub fn loss(&mut self, losses: DomainLosses, pass: &Pass<'_>) -> Result<Tensor> {
        if pass.micro > 0 {
            let expected = "0: GroupDro moves its weights once a step, from one batch, so use `step` in place of \
                            `step_accumulate`";
            return Err(Error::invalid("micro of the pass", expected, pass.micro));
        }
        let losses = ByDomain::new(losses, pass.kind, false)?;
        if pass.kind == PassKind::Main {
            if let Some(&value) = losses.values.iter().find(|l| !l.is_finite()) {
                return Err(Error::NonFinite { what: "loss", pass: pass.kind, value });
            }
            if self.step != Some(pass.step) {
                self.before.clone_from(&self.now);
                self.step = Some(pass.step);
            }
            self.now.clone_from(&self.before);
            let start = mean(&self.now);
            for (id, loss) in losses.ids.iter().zip(&losses.values) {
                *self.now.entry(*id).or_insert(start) += self.eta * loss;
            }
            // Only differences matter; without this the numbers would grow for ever.
            let largest = self.now.values().copied().fold(f64::MIN, f64::max);
            self.now.values_mut().for_each(|log| *log -= largest);
        }
        let present = self.now.iter().filter(|(id, _)| losses.ids.contains(id)).map(|(id, log)| (*id, *log)).collect();
        let weights = softmax(&present);
        let d = losses.len() as f64;
        losses.weighted(&losses.ids.iter().map(|id| d * weights.get(id).unwrap_or(&0.0)).collect::<Vec<_>>())
    }
}

fn mean(logs: &BTreeMap<DomainId, f64>) -> f64 {
    if logs.is_empty() { 0.0 } else { logs.values().sum::<f64>() / logs.len() as f64 }
}

fn softmax(logs: &BTreeMap<DomainId, f64>) -> BTreeMap<DomainId, f64> {
    let largest = logs.values().copied().fold(f64::MIN, f64::max);
    let total: f64 = logs.values().map(|log| (log - largest).exp()).sum();
    logs.iter().map(|(id, log)| (*id, (log - largest).exp() / total)).collect()
}
