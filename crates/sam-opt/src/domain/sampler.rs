//! Balanced batches and leave-one-out splits, as row numbers: they know nothing of the data.

use super::DomainId;
use crate::{Error, Result};
use rand::seq::SliceRandom;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use tensor::Seed;

/// Rows of each domain, in the order of the domains' numbers.
fn rows_by_domain(domains: &[DomainId]) -> BTreeMap<DomainId, Vec<usize>> {
    let mut rows: BTreeMap<DomainId, Vec<usize>> = BTreeMap::new();
    for (row, id) in domains.iter().enumerate() {
        rows.entry(*id).or_default().push(row);
    }
    rows
}

/// A shuffled copy, by the seed's own stream.
fn shuffled(rows: &[usize], seed: Seed) -> Vec<usize> {
    let mut rows = rows.to_vec();
    rows.shuffle(&mut seed.rng());
    rows
}

/// Batches with the same number of samples of every domain.
///
/// Each domain is walked through in a random order of its own, every row once before any row twice; a domain that is
/// exhausted starts anew, shuffled differently. The batch of a step depends on seed and step only, so methods that are
/// compared see the same batches, and a run that is continued goes on where it was.
///
/// ```
/// use sam_opt::{DomainId, DomainSampler};
/// let domains: Vec<DomainId> = [0, 0, 0, 1, 1].map(DomainId).into();
/// let sampler = DomainSampler::new(&domains, 2, 7)?;
/// let batch = sampler.batch(0);                           // rows: two of domain 0, then two of domain 1
/// assert_eq!(batch.len(), 4);
/// assert!(batch[..2].iter().all(|&row| row < 3) && batch[2..].iter().all(|&row| row >= 3));
/// assert_eq!(sampler.domains(&batch), [0, 0, 1, 1].map(DomainId));
/// # Ok::<(), sam_opt::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DomainSampler {
    rows: BTreeMap<DomainId, Vec<usize>>,
    domains: Vec<DomainId>,
    per_domain: usize,
    seed: Seed,
    orders: Orders,
}

/// The last round's order of each domain, so that a batch doesn't shuffle all rows anew. It can always be made again: a
/// clone starts without.
#[derive(Debug, Default)]
struct Orders(Mutex<BTreeMap<DomainId, (u64, Vec<usize>)>>);

impl Clone for Orders {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl DomainSampler {
    /// A sampler over `domains`, one a row, with `per_domain` samples of each in a batch.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for no rows or `per_domain = 0`.
    pub fn new(domains: &[DomainId], per_domain: usize, seed: u64) -> Result<Self> {
        if domains.is_empty() {
            return Err(Error::invalid("domains", "one domain a row, at least one row", "none"));
        }
        if per_domain == 0 {
            return Err(Error::invalid("per_domain", "at least 1 sample of each domain in a batch", 0));
        }
        let seed = Seed::new(seed).child("sam-opt.domain-sampler");
        Ok(Self {
            rows: rows_by_domain(domains),
            domains: domains.to_vec(),
            per_domain,
            seed,
            orders: Orders::default(),
        })
    }

    /// As [`new`](Self::new), where each of `expected` must have a row: a domain that would appear in no batch is
    /// refused instead of being left out in silence.
    ///
    /// # Errors
    /// [`Error::EmptyDomain`] naming the first one without a row.
    pub fn expecting(expected: &[DomainId], domains: &[DomainId], per_domain: usize, seed: u64) -> Result<Self> {
        let sampler = Self::new(domains, per_domain, seed)?;
        match expected.iter().find(|id| !sampler.rows.contains_key(id)) {
            Some(id) => Err(Error::EmptyDomain { id: *id }),
            None => Ok(sampler),
        }
    }

    /// Row numbers of the batch of a step: `per_domain` rows of each domain, domains in the order of their numbers. Steps
    /// in turn shuffle a domain's rows once a round; a jump to another round shuffles them again.
    pub fn batch(&self, step: u64) -> Vec<usize> {
        let mut batch = Vec::with_capacity(self.rows.len() * self.per_domain);
        // An entry is replaced as a whole, so it is right after a panic too.
        let mut orders = self.orders.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, rows) in &self.rows {
            let shuffle = |round| (round, shuffled(rows, self.seed.index(u64::from(id.0)).index(round)));
            let order = orders.entry(*id).or_insert_with(|| shuffle(step * self.per_domain as u64 / rows.len() as u64));
            for i in 0..self.per_domain as u64 {
                let position = step * self.per_domain as u64 + i;
                let (round, place) = (position / rows.len() as u64, (position % rows.len() as u64) as usize);
                if order.0 != round {
                    *order = shuffle(round);
                }
                batch.push(order.1[place]);
            }
        }
        batch
    }

    /// The domains of these rows.
    ///
    /// # Panics
    /// For a row that the sampler wasn't built over.
    pub fn domains(&self, rows: &[usize]) -> Vec<DomainId> {
        rows.iter().map(|&row| self.domains[row]).collect()
    }

    /// Steps after which every row of the largest domain has been seen.
    pub fn steps_per_epoch(&self) -> u64 {
        let largest = self.rows.values().map(Vec::len).max().unwrap_or(0);
        largest.div_ceil(self.per_domain) as u64
    }
}

/// One fold: a domain held out, the others split into training and validation rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainFold {
    /// The domain that is neither trained nor validated on.
    pub held_out: DomainId,
    /// Rows to train on.
    pub train: Vec<usize>,
    /// Rows of the same domains for the choice of hyper-parameters (validation on the source domains).
    pub validation: Vec<usize>,
    /// All rows of the held-out domain.
    pub test: Vec<usize>,
}

/// Leave one domain out: a fold for every domain.
///
/// Choose hyper-parameters on [`DomainFold::validation`]. A choice made on [`DomainFold::test`] is an oracle's, and must
/// be called so.
#[derive(Debug, Clone)]
pub struct LeaveOneDomainOut {
    rows: BTreeMap<DomainId, Vec<usize>>,
    validation: f64,
    seed: Seed,
}

impl LeaveOneDomainOut {
    /// Folds over `domains`, one a row; `validation` is the share of each source domain that isn't trained on.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for fewer than two domains or a share outside `[0, 1)`; [`Error::EmptyDomain`] for a
    /// domain with so few rows that none is left to train on.
    pub fn new(domains: &[DomainId], validation: f64, seed: u64) -> Result<Self> {
        let rows = rows_by_domain(domains);
        if rows.len() < 2 {
            return Err(Error::invalid("domains", "rows of at least two domains", rows.len()));
        }
        if !(0.0..1.0).contains(&validation) {
            return Err(Error::invalid("validation", "a share of at least 0 and below 1", validation));
        }
        let splits = Self { rows, validation, seed: Seed::new(seed).child("sam-opt.leave-one-out") };
        match splits.rows.iter().find(|(_, rows)| splits.validation_count(rows.len()) >= rows.len()) {
            Some((id, _)) => Err(Error::EmptyDomain { id: *id }),
            None => Ok(splits),
        }
    }

    fn validation_count(&self, rows: usize) -> usize {
        (rows as f64 * self.validation).round() as usize
    }

    /// The fold that holds out one domain. A source domain's split is the same in every fold.
    ///
    /// # Errors
    /// [`Error::UnknownDomain`] for a domain without rows.
    pub fn fold(&self, held_out: DomainId) -> Result<DomainFold> {
        let test = self.rows.get(&held_out).ok_or(Error::UnknownDomain { id: held_out })?.clone();
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for (id, rows) in self.rows.iter().filter(|(id, _)| **id != held_out) {
            let order = shuffled(rows, self.seed.index(u64::from(id.0)));
            let (first, rest) = order.split_at(self.validation_count(rows.len()));
            validation.extend(first);
            train.extend(rest);
        }
        Ok(DomainFold { held_out, train, validation, test })
    }

    /// Every fold, by the number of the held-out domain.
    pub fn folds(&self) -> Vec<DomainFold> {
        self.rows.keys().filter_map(|id| self.fold(*id).ok()).collect()
    }
}
