//! One training run of S-Adam's experiments.

use super::super::search::Score;
use super::data::{Data, accuracy};
use super::nets::{Network, Shape};
use crate::experiment::Context;
use anyhow::Result;
use rand::seq::SliceRandom as _;
use sam_opt::s_adam::LgiKind;
use sam_opt::{
    Adam, AdamConfig, AdamW, GradientCosine, OscillationTracker, ParamGroup, Pass, ProxSgd, ProxSgdConfig, RmsProp,
    SAdam, SAdamConfig, Sam, SamConfig, Sgd, SignFlips,
};
use tensor::tch::{Tensor, no_grad};
use tensor::{ParamSet, Seed};

/// Weight decay of the AdamW family [specification].
const DECAY: f64 = 1e-2;
/// Radius of SAM: its reference implementation's default.
const SAM_RHO: f64 = 0.05;
/// Passes of a step, with a forward pass as unit: a main pass costs 3, S-Adam's two probes 2 more.
const S_ADAM_COST: f64 = 5.0;
const SAM_COST: f64 = 6.0;

/// How an arm steps; the learning rate comes separately.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Rule {
    AdamW,
    /// AdamW whose rate falls to 0 along half a cosine.
    Cosine,
    SAdam(SAdamConfig),
    /// SAM over AdamW, with as many forward passes in all as S-Adam with two probes.
    Sam,
    Adam,
    /// SGD with momentum 0.9.
    Sgd,
    RmsProp,
    ProxSgd,
}

impl Rule {
    pub(super) fn s_adam() -> Self {
        Rule::SAdam(SAdamConfig::default())
    }

    /// The residual form, with the λ that its specification recommends.
    pub(super) fn residual() -> Self {
        Rule::SAdam(SAdamConfig { lgi: LgiKind::Residual, lambda: 1.0, ..SAdamConfig::default() })
    }

    pub(super) fn constant(damping: f64) -> Self {
        Rule::SAdam(SAdamConfig { lgi: LgiKind::Constant(damping), ..SAdamConfig::default() })
    }

    /// Share of the protocol's steps.
    fn steps(&self) -> f64 {
        if *self == Rule::Sam { S_ADAM_COST / SAM_COST } else { 1.0 }
    }
}

enum Optimizer {
    SAdam(SAdam),
    AdamW(Sam<AdamW>),
    Adam(Sam<Adam>),
    Sgd(Sam<Sgd>),
    RmsProp(Sam<RmsProp>),
    ProxSgd(Sam<ProxSgd>),
}

/// What a step tells.
struct Step {
    damping: f64,
    lgi: Option<f64>,
}

impl Optimizer {
    fn new(rule: &Rule, lr: f64, net: &Network, seed: u64) -> Result<Self> {
        let groups = vec![ParamGroup::from_var_store(&net.store)];
        let adamw = || AdamW::from_config(AdamConfig { lr, weight_decay: DECAY, ..AdamConfig::default() });
        let plain = || SamConfig { seed, ..SamConfig::sam(0.0) };
        Ok(match rule {
            Rule::SAdam(config) => {
                let groups = if config.per_group_lgi { layers(net) } else { groups };
                Self::SAdam(SAdam::new(groups, SAdamConfig { lr, weight_decay: DECAY, seed, ..config.clone() })?)
            }
            Rule::AdamW | Rule::Cosine => Self::AdamW(Sam::new(groups, adamw(), plain())?),
            Rule::Sam => Self::AdamW(Sam::new(groups, adamw(), SamConfig { rho: SAM_RHO, ..plain() })?),
            Rule::Adam => Self::Adam(Sam::new(groups, Adam::new(lr), plain())?),
            Rule::Sgd => Self::Sgd(Sam::new(groups, Sgd::with_momentum(lr, 0.9), plain())?),
            Rule::RmsProp => Self::RmsProp(Sam::new(groups, RmsProp::new(lr), plain())?),
            Rule::ProxSgd => {
                let prox = ProxSgd::from_config(ProxSgdConfig { lr, ..ProxSgdConfig::default() });
                Self::ProxSgd(Sam::new(groups, prox, plain())?)
            }
        })
    }

    fn step(&mut self, closure: impl FnMut(&Pass<'_>) -> sam_opt::Result<Tensor>) -> Result<Step> {
        Ok(match self {
            Self::SAdam(optimizer) => {
                let stats = optimizer.step(closure)?;
                return Ok(Step { damping: stats.damping, lgi: stats.lgi });
            }
            Self::AdamW(optimizer) => optimizer.step(closure).map(|_| ()),
            Self::Adam(optimizer) => optimizer.step(closure).map(|_| ()),
            Self::Sgd(optimizer) => optimizer.step(closure).map(|_| ()),
            Self::RmsProp(optimizer) => optimizer.step(closure).map(|_| ()),
            Self::ProxSgd(optimizer) => optimizer.step(closure).map(|_| ()),
        }
        .map(|()| Step { damping: 1.0, lgi: None })?)
    }

    fn set_lr(&mut self, lr: f64) -> Result<()> {
        Ok(match self {
            Self::SAdam(optimizer) => optimizer.set_lr(lr),
            Self::AdamW(optimizer) => optimizer.set_lr(lr),
            Self::Adam(optimizer) => optimizer.set_lr(lr),
            Self::Sgd(optimizer) => optimizer.set_lr(lr),
            Self::RmsProp(optimizer) => optimizer.set_lr(lr),
            Self::ProxSgd(optimizer) => optimizer.set_lr(lr),
        }?)
    }
}

/// One group a layer.
fn layers(net: &Network) -> Vec<ParamGroup> {
    (0..3).map(|i| ParamGroup::matching(&net.store, |name| name.starts_with(&format!("{i}.")))).collect()
}

/// What is trained on what, and how long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) shape: Shape,
    pub(super) batch: usize,
    pub(super) epochs: usize,
}

/// How a run chattered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Chatter {
    /// Percent of scalars whose update flips its sign.
    pub(super) flips: f64,
    /// Percent of quantized weights that oscillate; none without quantization.
    pub(super) oscillation: Option<f64>,
    /// Cosine of successive batch gradients.
    pub(super) cosine: f64,
}

/// What a run ended with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trained {
    pub(super) score: Score,
    pub(super) damping: f64,
    pub(super) lgi: Option<f64>,
    pub(super) chatter: Option<Chatter>,
}

/// Row numbers of every batch of a run.
fn batches(rows: usize, plan: &Plan, seed: Seed) -> Vec<Vec<i64>> {
    let mut rng = seed.rng();
    let mut all = Vec::new();
    for _ in 0..plan.epochs {
        let mut order: Vec<i64> = (0..rows as i64).collect();
        order.shuffle(&mut rng);
        all.extend(order.chunks(plan.batch).map(<[i64]>::to_vec));
    }
    all
}

/// Trains one network from the seed's start on the seed's batches; with `watch`, looks at the chatter too.
pub(super) fn train(
    context: &Context,
    plan: &Plan,
    data: &Data,
    rule: &Rule,
    lr: f64,
    seed: u64,
    watch: bool,
) -> Result<Trained> {
    let seeds = Seed::new(seed).child("s-adam.train");
    let net = Network::new(plan.shape, context.device, seeds.child("init"))?;
    let mut optimizer = Optimizer::new(rule, lr, &net, seeds.child("noise").value())?;
    let params = ParamSet::from_var_store(&net.store)?;
    let batches = batches(data.train.len(), plan, seeds.child("batches"));
    let steps = (batches.len() as f64 * rule.steps()).floor() as usize;
    let (mut flips, mut oscillation, mut cosine) =
        (SignFlips::new(), OscillationTracker::default(), GradientCosine::new());
    let (mut damping, mut lgis) = (0.0, Vec::new());
    for (i, rows) in batches[..steps].iter().enumerate() {
        context.check()?;
        let batch = data.train.rows(rows);
        let loss = || Ok(net.forward(&batch.x, true)?.cross_entropy_for_logits(&batch.y));
        if *rule == Rule::Cosine {
            optimizer.set_lr(0.5 * lr * (1.0 + (std::f64::consts::PI * i as f64 / steps as f64).cos()))?;
        }
        if watch {
            cosine.observe(&params.gradient(&loss()?)?)?;
        }
        let step = optimizer.step(|_| loss())?;
        damping += step.damping / steps as f64;
        lgis.extend(step.lgi);
        if watch {
            flips.observe(&params)?;
            oscillation.observe(&net.codes()?)?;
        }
    }
    let score = no_grad(|| -> Result<Score> {
        let logits = net.forward(&data.score.x, false)?;
        let loss = logits.cross_entropy_for_logits(&data.score.y).double_value(&[]);
        Ok(Score { accuracy: accuracy(&logits, &data.score.y), loss })
    })?;
    let quantized = !net.codes()?.is_empty();
    let chatter = watch
        .then(|| -> Result<Chatter> {
            let share = oscillation.share(OscillationTracker::THRESHOLD)?;
            Ok(Chatter {
                flips: 100.0 * flips.mean().unwrap_or(0.0),
                oscillation: quantized.then_some(100.0 * share),
                cosine: cosine.mean().unwrap_or(0.0),
            })
        })
        .transpose()?;
    let lgi = (!lgis.is_empty()).then(|| lgis.iter().sum::<f64>() / lgis.len() as f64);
    Ok(Trained { score, damping, lgi, chatter })
}
