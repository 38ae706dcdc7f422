//! Direct preference optimization.

use super::batch::{Layout, PreferencePair};
use super::loss::{DpoLoss, DpoOutput, PairScores, dpo_loss};
use super::monitor::{CollapseMonitor, MonitorConfig};
use super::optimizer::{AdamW, OptimizerConfig, Update};
use super::order::Order;
use super::policy::{Policy, sums};
use super::sft::with_extra;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::Path;
use tensor::StateDict;
use tensor::tch::{Device, Kind, Tensor};

/// Settings of [`DpoTrainer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DpoConfig {
    /// The optimizer and its schedule.
    pub optimizer: OptimizerConfig,
    /// The loss.
    pub loss: DpoLoss,
    /// Pairs a step.
    pub batch: usize,
    /// Pairs that are computed together; gradients of the parts of a step add up.
    pub part: usize,
    /// How texts become tensors.
    pub layout: Layout,
    /// Training ends once a step's mean margin reaches this: beyond it, text degenerates.
    pub stop_margin: Option<f64>,
    /// When to warn.
    pub monitor: MonitorConfig,
    /// Seed of the order of pairs.
    pub seed: u64,
}

impl Default for DpoConfig {
    /// 40 steps of 8 pairs at 3·10⁻⁴, β = 0.1.
    fn default() -> Self {
        Self {
            optimizer: OptimizerConfig { steps: 40, ..OptimizerConfig::default() },
            loss: DpoLoss::default(),
            batch: 8,
            part: 8,
            layout: Layout::default(),
            stop_margin: None,
            monitor: MonitorConfig::default(),
            seed: 0,
        }
    }
}

impl DpoConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        self.optimizer.validate()?;
        self.loss.validate()?;
        self.monitor.validate()?;
        for (name, value) in [("batch", self.batch), ("part", self.part)] {
            if value == 0 {
                return Err(Error::invalid(name, "at least 1", value));
            }
        }
        match self.stop_margin {
            Some(margin) if !(margin.is_finite() && margin > 0.0) => {
                Err(Error::invalid("stop_margin", "positive and finite", margin))
            }
            _ => Ok(()),
        }
    }
}

/// What a step of preference optimization did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DpoLog {
    /// The step.
    pub update: Update,
    /// Mean margin `β [log-ratio of the chosen − log-ratio of the rejected]` before it.
    pub margin: f64,
    /// Share of its pairs with a positive margin.
    pub accuracy: f64,
    /// Mean of `log π(y_w)/π_ref(y_w)`, a token.
    pub chosen_ratio: f64,
    /// Mean of `log π(y_l)/π_ref(y_l)`, a token.
    pub rejected_ratio: f64,
    /// The warning of the [`CollapseMonitor`]: mean of `chosen_ratio` over its window, where that is below the limit.
    pub collapse: Option<f64>,
}

/// Sums over the pairs of a step.
#[derive(Default)]
struct Tally {
    margin: f64,
    right: f64,
    chosen: f64,
    rejected: f64,
}

impl Tally {
    fn add(&mut self, out: &DpoOutput, chosen_tokens: &Tensor, rejected_tokens: &Tensor) -> Result<()> {
        let sum = |t: &Tensor| t.f_sum(Kind::Double)?.f_double_value(&[]);
        self.margin += sum(&out.margins)?;
        self.right += out.accuracy * out.margins.numel() as f64;
        self.chosen += sum(&out.chosen_ratios.f_div(chosen_tokens)?)?;
        self.rejected += sum(&out.rejected_ratios.f_div(rejected_tokens)?)?;
        Ok(())
    }
}

/// Trains a policy to prefer what was preferred, relative to a reference.
///
/// The reference is explicit: its log-probabilities of all pairs, from [`score_pairs`](super::score_pairs). If the policy
/// starts from a trained adapter, that adapter is the reference, not the bare model.
#[derive(Debug)]
pub struct DpoTrainer {
    config: DpoConfig,
    pairs: Vec<PreferencePair>,
    /// `[pairs, 2]`, f64.
    reference: Tensor,
    optimizer: AdamW,
    order: Order,
    monitor: CollapseMonitor,
    margin: Option<f64>,
}

impl DpoTrainer {
    /// Before its first step. `reference` has the log-probabilities of the chosen and the rejected answer of each pair;
    /// `parameters` are those of the policy that are to be trained, sharing its memory.
    ///
    /// # Errors
    /// As [`DpoConfig::validate`] and [`AdamW::new`]; [`Error::InvalidArgument`] for a reference of another length or that
    /// isn't finite, for equal answers, or for a text that [`Layout::batch`] refuses ([`Error::EmptyPrompt`] too).
    pub fn new(
        config: DpoConfig,
        pairs: Vec<PreferencePair>,
        reference: &[[f64; 2]],
        parameters: Vec<(String, Tensor)>,
    ) -> Result<Self> {
        config.validate()?;
        for (i, pair) in pairs.iter().enumerate() {
            let chosen = config.layout.cut(i, 2 * i, &pair.prompt, &pair.chosen)?;
            let rejected = config.layout.cut(i, 2 * i + 1, &pair.prompt, &pair.rejected)?;
            if chosen == rejected {
                return Err(Error::invalid(format!("pair {i}"), "two answers that differ", "twice the same"));
            }
        }
        if reference.len() != pairs.len() {
            return Err(Error::invalid(
                "reference",
                format!("one entry for each of {} pairs", pairs.len()),
                reference.len(),
            ));
        }
        if let Some(i) = reference.iter().position(|r| r.iter().any(|p| !p.is_finite())) {
            let [chosen, rejected] = reference[i];
            return Err(Error::invalid(format!("reference of pair {i}"), "finite", format!("{chosen} and {rejected}")));
        }
        let data = pairs.iter().flat_map(|p| [&p.prompt[..], &p.chosen[..], &p.rejected[..]]);
        let order = Order::new(pairs.len(), config.batch, config.seed, data)?;
        let reference = Tensor::f_from_slice(reference.as_flattened())?.f_view([pairs.len() as i64, 2])?;
        let optimizer = AdamW::new(config.optimizer.clone(), parameters)?;
        let monitor = CollapseMonitor::new(config.monitor.clone())?;
        Ok(Self { config, pairs, reference, optimizer, order, monitor, margin: None })
    }

    /// Steps that are done.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Whether the schedule is at its end or the margin has reached [`DpoConfig::stop_margin`].
    pub fn finished(&self) -> bool {
        let reached = self.config.stop_margin.zip(self.margin).is_some_and(|(stop, margin)| margin >= stop);
        reached || self.steps() >= self.config.optimizer.steps
    }

    /// One step.
    ///
    /// # Errors
    /// As [`AdamW::step`]; nothing has changed then.
    pub fn step(&mut self, policy: &mut dyn Policy) -> Result<DpoLog> {
        let Self { config, pairs, reference, optimizer, order, .. } = self;
        let chosen = order.of(optimizer.steps());
        let parts: Vec<&[usize]> = chosen.chunks(config.part).collect();
        let mut batches = Vec::with_capacity(parts.len());
        for part in &parts {
            let numbered: Vec<_> = part.iter().map(|&i| (i, &pairs[i])).collect();
            let rows: Vec<i64> = part.iter().map(|&i| i as i64).collect();
            let expected = reference.f_index_select(0, &Tensor::f_from_slice(&rows)?)?; // (n, 2)
            batches.push((config.layout.pairs(&numbered)?, expected));
        }
        let mut tally = Tally::default();
        let update = optimizer.step(batches.len(), |i| {
            let (batch, expected) = &batches[i];
            let n = parts[i].len() as i64;
            let scores = sums(&policy.log_probs(batch)?, 2 * n)?;
            let ours = PairScores { chosen: scores.f_narrow(0, 0, n)?, rejected: scores.f_narrow(0, n, n)? };
            let (kind, device) = (scores.kind(), scores.device());
            let place = |t: Tensor| t.f_to_device(device)?.f_to_kind(kind);
            let theirs =
                PairScores { chosen: place(expected.f_select(1, 0)?)?, rejected: place(expected.f_select(1, 1)?)? };
            let (chosen_tokens, rejected_tokens) = batch.tokens.split_at(parts[i].len());
            let chosen_tokens = place(Tensor::f_from_slice(chosen_tokens)?)?;
            let out = dpo_loss(&ours, &theirs, &chosen_tokens, &config.loss)?;
            tally.add(&out, &chosen_tokens, &place(Tensor::f_from_slice(rejected_tokens)?)?)?;
            let share = n as f64 / chosen.len() as f64;
            with_extra(out.loss.f_mul_scalar(share)?, policy, share)
        })?;
        let n = chosen.len() as f64;
        let (margin, chosen_ratio) = (tally.margin / n, tally.chosen / n);
        self.margin = Some(margin);
        let collapse = self.monitor.observe(chosen_ratio);
        let (accuracy, rejected_ratio) = (tally.right / n, tally.rejected / n);
        Ok(DpoLog { update, margin, accuracy, chosen_ratio, rejected_ratio, collapse })
    }

    /// Steps until [`finished`](Self::finished), or until `on_step` breaks.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn run(
        &mut self,
        policy: &mut dyn Policy,
        mut on_step: impl FnMut(&DpoLog) -> ControlFlow<()>,
    ) -> Result<Vec<DpoLog>> {
        let mut logs = Vec::new();
        while !self.finished() {
            let log = self.step(policy)?;
            logs.push(log);
            if on_step(&log).is_break() {
                break;
            }
        }
        Ok(logs)
    }

    /// Writes parameters, the optimizer's state, the reference's log-probabilities and the number of steps.
    ///
    /// # Errors
    /// [`Error::Tensor`] when writing fails.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut state = self.optimizer.state();
        self.order.save(&mut state);
        state.tensors.insert(REFERENCE.into(), self.reference.shallow_clone());
        state.meta.insert(WINDOW.into(), self.monitor.window().into());
        state.meta.insert(MARGIN.into(), self.margin.into());
        Ok(state.save(path)?)
    }

    /// Goes on where [`save`](Self::save) was: the parameters get the saved numbers in place, and the next steps are those
    /// that would have followed.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a file that can't be read, [`Error::Checkpoint`] for one of other pairs or another kind of
    /// training, and as [`AdamW::restore`]. Nothing has changed then.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let mut state = StateDict::load(path)?;
        self.order.check(&state, path)?;
        let reference = state.tensors.remove(REFERENCE);
        let reference = reference.filter(|r| r.size() == self.reference.size() && r.kind() == Kind::Double);
        let window: Option<Vec<f64>> =
            state.meta.get(WINDOW).and_then(Value::as_array).map(|v| v.iter().filter_map(Value::as_f64).collect());
        let (Some(reference), Some(window)) = (reference, window) else {
            let reason = "it has no log-probabilities of a reference: it isn't of preference training".into();
            return Err(Error::Checkpoint { path: path.to_owned(), reason });
        };
        self.optimizer.restore(&state, path)?;
        self.reference = reference.f_to_device(Device::Cpu)?;
        self.monitor.set_window(window);
        self.margin = state.meta.get(MARGIN).and_then(Value::as_f64);
        Ok(())
    }
}

const REFERENCE: &str = "reference";
const WINDOW: &str = "chosen_ratios";
const MARGIN: &str = "margin";
