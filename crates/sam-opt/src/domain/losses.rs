//! Losses by domain.

use crate::pass::PassKind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use tensor::tch::{Kind, Tensor, no_grad};

/// A domain's number: a site, a device, a year.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DomainId(pub u32);

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a closure returns for a batch of several domains, from one forward pass on the concatenated batch.
#[derive(Debug)]
pub enum DomainLosses {
    /// The mean loss of each domain, a scalar tensor each. A domain that isn't in the batch is left out.
    PerDomain(Vec<(DomainId, Tensor)>),
    /// The loss of each sample, `[batch]`, and each sample's domain. They are averaged within each domain first, so
    /// that unequal counts don't reweight domains.
    PerSample {
        /// `[batch]`, in nats.
        losses: Tensor,
        /// `batch` domains.
        domains: Vec<DomainId>,
    },
}

/// Losses of the domains that a batch has, in the order of their numbers.
#[derive(Debug)]
pub(crate) struct ByDomain {
    pub(crate) ids: Vec<DomainId>,
    /// `[D]`, with its graph.
    losses: Tensor,
    /// Their values.
    pub(crate) values: Vec<f64>,
    /// What the closure returned: where it lies tells a fresh loss from one that is handed out again. (Held, so that
    /// its memory isn't given to another tensor; detached, so that its graph isn't held.)
    returned: Vec<Tensor>,
}

/// Whether losses whose differences are taken over these radii are reduced in f64: over a small one a finite difference of
/// f32 means would be rounding. A radius of 0 moves nothing.
pub(crate) fn f64_reduction(radii: impl Iterator<Item = f64>) -> bool {
    radii.filter(|&rho| rho > 0.0).any(|rho| rho < 1e-2)
}

/// Means of half-precision losses are formed in f32: sums in their own kind would lose the smaller ones.
fn reduction_kind(losses: Kind, wide: bool) -> Kind {
    match losses {
        _ if wide => Kind::Double,
        Kind::Half | Kind::BFloat16 => Kind::Float,
        own => own,
    }
}

impl ByDomain {
    /// Checks what a closure returned and averages it by domain; in f64 if `wide`, and in f32 at least. Values may be
    /// non-finite.
    pub(crate) fn new(losses: DomainLosses, pass: PassKind, wide: bool) -> Result<Self> {
        // Only a tensor with a graph can be stale; constants may be handed out again.
        let held = |loss: &Tensor| loss.requires_grad().then(|| loss.detach());
        let (ids, losses, returned) = match losses {
            DomainLosses::PerDomain(list) => {
                let returned = list.iter().filter_map(|(_, loss)| held(loss)).collect();
                let (ids, losses) = per_domain(list, pass, wide)?;
                (ids, losses, returned)
            }
            DomainLosses::PerSample { losses, domains } => {
                let returned = held(&losses).into_iter().collect();
                let (ids, losses) = per_sample(&losses, &domains, pass, wide)?;
                (ids, losses, returned)
            }
        };
        let values = Vec::<f64>::try_from(no_grad(|| losses.detach().to_kind(Kind::Double)))?;
        Ok(Self { ids, losses, values, returned })
    }

    /// As [`new`](Self::new), where every value must be finite and, unless the pass is a probe, have a graph.
    pub(crate) fn finite(losses: DomainLosses, pass: PassKind, wide: bool) -> Result<Self> {
        let losses = Self::new(losses, pass, wide)?;
        if let Some(&value) = losses.values.iter().find(|v| !v.is_finite()) {
            return Err(Error::NonFinite { what: "loss", pass, value });
        }
        if !losses.losses.requires_grad() && !matches!(pass, PassKind::Probe(_)) {
            return Err(Error::Detached { pass });
        }
        Ok(losses)
    }

    /// Number of domains.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// `(1/D) Σ_k weight_k L_k`, with its graph.
    pub(crate) fn weighted(&self, weights: &[f64]) -> Result<Tensor> {
        let d = self.len() as f64;
        let weights: Vec<f64> = weights.iter().map(|w| w / d).collect();
        let weights = Tensor::from_slice(&weights).to_kind(self.losses.kind()).to_device(self.losses.device());
        Ok(self.losses.f_dot(&weights)?)
    }

    /// `(1/D) Σ_k weight_k L_k` of the values.
    pub(crate) fn weighted_value(&self, weights: &[f64]) -> f64 {
        self.values.iter().zip(weights).map(|(l, w)| l * w).sum::<f64>() / self.len() as f64
    }

    /// The mean of the domains' means.
    pub(crate) fn mean(&self) -> f64 {
        self.values.iter().sum::<f64>() / self.len() as f64
    }

    /// The losses, `[D]`, with their graph.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.losses
    }

    /// Refuses a later pass of a step that hands out losses of the main pass again, or that has other domains.
    pub(crate) fn check_later(&self, later: &ByDomain, pass: PassKind) -> Result<()> {
        let main: Vec<_> = self.returned.iter().map(Tensor::data_ptr).collect();
        if later.returned.iter().any(|loss| main.contains(&loss.data_ptr())) {
            return Err(Error::StaleLoss { pass });
        }
        if self.ids == later.ids {
            return Ok(());
        }
        let list = |ids: &[DomainId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(Error::DomainsChanged { pass, first: list(&self.ids), second: list(&later.ids) })
    }
}

fn per_domain(mut list: Vec<(DomainId, Tensor)>, pass: PassKind, wide: bool) -> Result<(Vec<DomainId>, Tensor)> {
    if list.is_empty() {
        return Err(Error::NoDomain { pass });
    }
    list.sort_by_key(|(id, _)| *id);
    for pair in list.windows(2) {
        if pair[0].0 == pair[1].0 {
            return Err(Error::DuplicateDomain { id: pair[0].0 });
        }
    }
    let mut scalars = Vec::with_capacity(list.len());
    for (id, loss) in &list {
        match loss.numel() {
            1 => scalars.push(loss.f_reshape([1i64])?.f_to_kind(reduction_kind(loss.kind(), wide))?),
            0 => return Err(Error::EmptyDomain { id: *id }),
            _ => return Err(Error::DomainLossShape { id: *id, pass, got: loss.size() }),
        }
    }
    let ids = list.iter().map(|(id, _)| *id).collect();
    Ok((ids, Tensor::f_cat(&scalars, 0)?))
}

fn per_sample(losses: &Tensor, domains: &[DomainId], pass: PassKind, wide: bool) -> Result<(Vec<DomainId>, Tensor)> {
    if losses.size() != [domains.len() as i64] {
        return Err(Error::PerSampleShape { pass, got: losses.size(), domains: domains.len() });
    }
    let mut counts: BTreeMap<DomainId, f64> = BTreeMap::new();
    for id in domains {
        *counts.entry(*id).or_default() += 1.0;
    }
    if counts.is_empty() {
        return Err(Error::NoDomain { pass });
    }
    // A sum a domain. (A product with a matrix of 1/n_k and zeros would carry an infinite loss into the other domains.)
    let row: BTreeMap<DomainId, i64> = counts.keys().zip(0..).map(|(id, row)| (*id, row)).collect();
    let rows: Vec<i64> = domains.iter().map(|id| row[id]).collect();
    let losses = losses.f_to_kind(reduction_kind(losses.kind(), wide))?;
    let rows = Tensor::from_slice(&rows).f_to_device(losses.device())?; // [batch]
    let divisors: Vec<f64> = counts.values().copied().collect();
    let divisors = Tensor::from_slice(&divisors).f_to_kind(losses.kind())?.f_to_device(losses.device())?; // [D]
    let means = divisors.f_zeros_like()?.f_index_add(0, &rows, &losses)?.f_div(&divisors)?; // [D]
    Ok((counts.into_keys().collect(), means))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domains(ids: &[u32]) -> Vec<DomainId> {
        ids.iter().map(|&i| DomainId(i)).collect()
    }

    #[test]
    fn unequal_counts_do_not_reweight_domains() {
        let losses = Tensor::from_slice(&[1.0f64, 2.0, 3.0, 10.0]);
        let per_sample = DomainLosses::PerSample { losses, domains: domains(&[7, 7, 7, 2]) };
        let got = ByDomain::new(per_sample, PassKind::Main, false).unwrap();
        assert_eq!((got.ids.clone(), got.values.clone()), (domains(&[2, 7]), vec![10.0, 2.0]));
        assert_eq!((got.mean(), got.weighted_value(&[1.0, 1.0])), (6.0, 6.0));
        assert_eq!(got.weighted(&[0.5, 1.5]).unwrap().double_value(&[]), 4.0);
    }

    #[test]
    fn a_loss_that_is_not_finite_stays_in_its_domain() {
        for bad in [f64::INFINITY, f64::NAN] {
            let losses = Tensor::from_slice(&[1.0f64, bad, 3.0]);
            let per_sample = DomainLosses::PerSample { losses, domains: domains(&[7, 2, 7]) };
            let got = ByDomain::new(per_sample, PassKind::Main, false).unwrap().values;
            assert!(!got[0].is_finite() && got[1] == 2.0, "{got:?}");
        }
    }

    #[test]
    fn half_precision_losses_are_averaged_in_f32() {
        // In f16 the sum of 4,096 ones is lost beyond 2,048, and 65,505 is no number.
        for kind in [Kind::Half, Kind::BFloat16] {
            let losses = Tensor::from_slice(&vec![1.0f32; 4096]).to_kind(kind);
            let per_sample = DomainLosses::PerSample { losses, domains: domains(&[3; 4096]) };
            let got = ByDomain::new(per_sample, PassKind::Main, false).unwrap();
            assert_eq!((got.values.clone(), got.tensor().kind()), (vec![1.0], Kind::Float));
            let scalar = |v: f32| Tensor::from_slice(&[v]).to_kind(kind);
            let list = vec![(DomainId(0), scalar(1.0)), (DomainId(1), scalar(512.0))];
            let weighted = ByDomain::new(DomainLosses::PerDomain(list), PassKind::Main, false).unwrap();
            let value = weighted.weighted(&[2.0 / 3.0, 4.0 / 3.0]).unwrap().double_value(&[]);
            assert!((value - 1025.0 / 3.0).abs() < 1e-4, "{value}");
        }
    }

    #[test]
    fn only_small_radii_that_move_something_ask_for_f64() {
        for (radii, wide) in [(&[0.0][..], false), (&[0.0, 0.5], false), (&[0.01], false), (&[0.5, 0.005], true)] {
            assert_eq!(f64_reduction(radii.iter().copied()), wide, "{radii:?}");
        }
    }

    #[test]
    fn both_forms_agree_and_the_order_of_domains_does_not_matter() {
        let scalar = |v: f64| Tensor::from_slice(&[v]).reshape([] as [i64; 0]);
        let list = vec![(DomainId(7), scalar(2.0)), (DomainId(2), scalar(10.0))];
        let got = ByDomain::new(DomainLosses::PerDomain(list), PassKind::Main, false).unwrap();
        assert_eq!((got.ids, got.values), (domains(&[2, 7]), vec![10.0, 2.0]));
    }
}
