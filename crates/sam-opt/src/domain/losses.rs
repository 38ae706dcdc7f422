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
}

/// Whether losses are reduced in f64: with a small radius a finite difference of f32 means would be rounding.
pub(crate) fn f64_reduction(rho: f64) -> bool {
    rho < 1e-2
}

impl ByDomain {
    /// Checks what a closure returned and averages it by domain; in f64 if `wide`. Values may be non-finite.
    pub(crate) fn new(losses: DomainLosses, pass: PassKind, wide: bool) -> Result<Self> {
        let (ids, losses) = match losses {
            DomainLosses::PerDomain(list) => per_domain(list, pass)?,
            DomainLosses::PerSample { losses, domains } => per_sample(&losses, &domains, pass, wide)?,
        };
        let losses = if wide { losses.to_kind(Kind::Double) } else { losses };
        let values = Vec::<f64>::try_from(no_grad(|| losses.detach().to_kind(Kind::Double)))?;
        Ok(Self { ids, losses, values })
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

    /// Refuses a later pass of a step that has other domains than the main pass.
    pub(crate) fn same_domains(&self, later: &ByDomain, pass: PassKind) -> Result<()> {
        if self.ids == later.ids {
            return Ok(());
        }
        let list = |ids: &[DomainId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(Error::DomainsChanged { pass, first: list(&self.ids), second: list(&later.ids) })
    }
}

fn per_domain(mut list: Vec<(DomainId, Tensor)>, pass: PassKind) -> Result<(Vec<DomainId>, Tensor)> {
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
            1 => scalars.push(loss.f_reshape([1i64])?),
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
    // One product instead of a gather a domain: row k has 1/n_k where a sample is of domain k.
    let (rows, columns) = (counts.len(), domains.len());
    let row: BTreeMap<DomainId, usize> = counts.keys().enumerate().map(|(i, id)| (*id, i)).collect();
    let mut average = vec![0.0f64; rows * columns];
    for (j, id) in domains.iter().enumerate() {
        average[row[id] * columns + j] = 1.0 / counts[id];
    }
    let losses = if wide { losses.to_kind(Kind::Double) } else { losses.shallow_clone() };
    let average = Tensor::from_slice(&average).to_kind(losses.kind()).to_device(losses.device());
    let means = average.f_reshape([rows as i64, columns as i64])?.f_mv(&losses)?; // [D]
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
    fn both_forms_agree_and_the_order_of_domains_does_not_matter() {
        let scalar = |v: f64| Tensor::from_slice(&[v]).reshape([] as [i64; 0]);
        let list = vec![(DomainId(7), scalar(2.0)), (DomainId(2), scalar(10.0))];
        let got = ByDomain::new(DomainLosses::PerDomain(list), PassKind::Main, false).unwrap();
        assert_eq!((got.ids, got.values), (domains(&[2, 7]), vec![10.0, 2.0]));
    }
}
