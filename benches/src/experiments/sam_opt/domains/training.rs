//! A run on the source domains of a fold, and what is measured of it.

use super::{BATCH, CAP, Plan, Protocol, SWAD_EVERY, VALIDATION};
use crate::experiment::{Context, Outcome};
use crate::experiments::sam_opt::arms::DomainBatch;
use crate::experiments::sam_opt::search::Score;
use anyhow::{Context as _, Result};
use datasets::domains::{self, Domain};
use rand::seq::SliceRandom;
use sam_opt::{DomainId, DomainLosses, ParamGroup, SharpnessOptions, SwadAverager, SwadConfig, sharpness_report};
use tensor::nn::{Mlp, MlpConfig};
use tensor::tch::{Device, Kind as Element, Tensor, nn::VarStore, no_grad};
use tensor::{ParamSet, Seed, interop};

/// A domain on the device: inputs `[n, features]`, classes `[n]`.
struct Samples {
    x: Tensor,
    y: Tensor,
}

impl Samples {
    fn new(domain: &Domain, device: Device) -> Result<Self> {
        let x = interop::to_tensor(&domain.x.view())?.to_device(device);
        let y: Vec<i64> = domain.y.iter().map(|&class| i64::from(class)).collect();
        Ok(Self { x, y: Tensor::from_slice(&y).to_device(device) })
    }

    fn accuracy(&self, net: &Mlp) -> f64 {
        let right = no_grad(|| net.forward_with(&self.x, false, false).argmax(1, false).eq_tensor(&self.y));
        100.0 * right.to_kind(Element::Double).mean(Element::Double).double_value(&[])
    }

    fn loss(&self, net: &Mlp) -> Tensor {
        net.forward_with(&self.x, false, false).cross_entropy_for_logits(&self.y)
    }
}

/// Row numbers of one domain, in the order in which batches use them.
pub(super) fn row_order(rows: usize, needed: usize, seed: Seed) -> Vec<i64> {
    let mut rng = seed.rng();
    let mut order = Vec::with_capacity(needed + rows);
    while order.len() < needed {
        let mut epoch: Vec<i64> = (0..rows as i64).collect();
        epoch.shuffle(&mut rng);
        order.extend(epoch);
    }
    order.truncate(needed);
    order
}

/// A network after its last step, with the data of its fold.
pub(super) struct Trained {
    params: ParamSet,
    net: Mlp,
    train: Vec<Samples>,
    validation: Vec<Samples>,
    test: Samples,
    passes: f64,
    /// Stream of the random directions.
    directions: Seed,
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl Trained {
    pub(super) fn new(
        protocol: &Protocol,
        context: &Context,
        plan: &Plan,
        domains: &[Domain],
        held_out: &str,
        seed: u64,
    ) -> Result<Self> {
        let index = domains.iter().position(|d| d.name == held_out).with_context(|| format!("no domain {held_out}"))?;
        let fold = domains::leave_one_out(domains, index, CAP, VALIDATION, seed)?;
        let streams = Seed::new(seed).child(protocol.name);
        let samples = |parts: &[Domain]| -> Result<Vec<Samples>> {
            parts.iter().map(|domain| Samples::new(domain, context.device)).collect()
        };
        let (train, validation) = (samples(&fold.train)?, samples(&fold.validation)?);
        let test = Samples::new(&fold.test, context.device)?;

        let store = VarStore::new(context.device);
        let net = Mlp::new(&store.root(), &MlpConfig::relu(protocol.widths), streams.child("init"))?;
        let mut optimizer = plan.method.build(ParamGroup::from_var_store(&store), seed)?;
        let orders: Vec<Tensor> = fold
            .train
            .iter()
            .map(|domain| {
                let stream = streams.child("batches").child(&domain.name);
                let order = row_order(domain.y.len(), plan.steps as usize * BATCH, stream);
                Tensor::from_slice(&order).to_device(context.device)
            })
            .collect();
        let ids: Vec<DomainId> = (0..train.len()).flat_map(|k| [DomainId(k as u32); BATCH]).collect();
        let params = ParamSet::from_var_store(&store)?;
        let mut swad = plan.swad.then(|| SwadAverager::new(SwadConfig::default())).transpose()?;
        let mut passes = 0.0;
        for step in 0..plan.steps as i64 {
            context.check()?;
            let rows: Vec<Tensor> = orders.iter().map(|o| o.narrow(0, step * BATCH as i64, BATCH as i64)).collect();
            let parts = train.iter().zip(&rows);
            let x = Tensor::cat(&parts.clone().map(|(d, rows)| d.x.index_select(0, rows)).collect::<Vec<_>>(), 0);
            let y = Tensor::cat(&parts.map(|(d, rows)| d.y.index_select(0, rows)).collect::<Vec<_>>(), 0);
            passes += optimizer.step(&DomainBatch { net: &net, x, y, domains: &ids, per: BATCH as i64 })?;
            if let Some(swad) = &mut swad {
                swad.update(&params)?;
                if (step + 1) % SWAD_EVERY == 0 {
                    let losses: Vec<f64> =
                        validation.iter().map(|d| no_grad(|| d.loss(&net)).double_value(&[])).collect();
                    swad.evaluate(mean(&losses))?;
                }
            }
        }
        if let Some(average) = swad.map(|swad| swad.average()).transpose()?.flatten() {
            params.assign(&average)?;
        }
        let directions = streams.child("directions");
        Ok(Self { params, net, train, validation, test, passes, directions })
    }

    fn validation_accuracies(&self) -> Vec<f64> {
        self.validation.iter().map(|d| d.accuracy(&self.net)).collect()
    }

    pub(super) fn validation(&self) -> Score {
        let loss = |d: &Samples| no_grad(|| d.loss(&self.net)).double_value(&[]);
        let losses: Vec<f64> = self.validation.iter().map(loss).collect();
        Score { accuracy: mean(&self.validation_accuracies()), loss: mean(&losses) }
    }

    /// All metrics of the fold, the held-out domain's among them.
    pub(super) fn test(&self) -> Result<Outcome> {
        let options = SharpnessOptions { seed: self.directions.value(), ..SharpnessOptions::default() };
        let losses = || {
            let each = self.train.iter().enumerate().map(|(k, domain)| (DomainId(k as u32), domain.loss(&self.net)));
            Ok(DomainLosses::PerDomain(each.collect()))
        };
        let sharpness = sharpness_report(&self.params, losses, &options)?;
        let validation = self.validation();
        let mut outcome = Outcome::default();
        outcome.set("accuracy", self.test.accuracy(&self.net));
        outcome.set("validation", validation.accuracy);
        outcome.set("validation loss", validation.loss);
        outcome.set("worst source", self.validation_accuracies().into_iter().fold(f64::INFINITY, f64::min));
        outcome.set("ascent sharpness", sharpness.mean_ascent());
        outcome.set("random sharpness", sharpness.mean_random());
        outcome.set("worst sharpness", sharpness.mean_worst_random());
        outcome.set("passes", self.passes);
        Ok(outcome)
    }
}
