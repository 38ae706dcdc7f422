//! Supervised fine-tuning.

use super::batch::{Example, Layout};
use super::optimizer::{AdamW, OptimizerConfig, Update};
use super::order::Order;
use super::policy::{Policy, sums};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::path::Path;
use tensor::StateDict;
use tensor::tch::{Kind, Tensor, no_grad_guard};

/// Settings of [`SftTrainer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SftConfig {
    /// The optimizer and its schedule.
    pub optimizer: OptimizerConfig,
    /// Texts a step.
    pub batch: usize,
    /// Texts that are computed together; gradients of the parts of a step add up.
    pub part: usize,
    /// How texts become tensors.
    pub layout: Layout,
    /// Seed of their order.
    pub seed: u64,
}

impl Default for SftConfig {
    /// 100 steps of 16 texts at 10⁻³.
    fn default() -> Self {
        let optimizer = OptimizerConfig { lr: 1e-3, ..OptimizerConfig::default() };
        Self { optimizer, batch: 16, part: 16, layout: Layout::default(), seed: 0 }
    }
}

impl SftConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        self.optimizer.validate()?;
        for (name, value) in [("batch", self.batch), ("part", self.part)] {
            if value == 0 {
                return Err(Error::invalid(name, "at least 1", value));
            }
        }
        Ok(())
    }
}

/// What a step of supervised fine-tuning did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SftLog {
    /// The step. Its loss is the mean over tokens, with what the policy adds.
    pub update: Update,
    /// Tokens that were learned from.
    pub tokens: i64,
}

/// Fits completions: minimizes the mean negative log-likelihood of their tokens.
///
/// ```
/// use lm::train::{Batch, Example, SftConfig, SftTrainer};
/// use lm::tensor::tch::{Device, Kind, Tensor};
/// // The smallest model: logits that don't depend on the text.
/// let bias = Tensor::zeros([5], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let mut policy = |batch: &Batch| {
///     let shape = [batch.ids.size()[0], batch.ids.size()[1], 5];
///     Ok(bias.f_expand(shape, false)?)
/// };
/// let texts = vec![Example { prompt: vec![0], completion: vec![3, 3] }];
/// let mut trainer = SftTrainer::new(SftConfig::default(), texts, vec![("bias".into(), bias.shallow_clone())])?;
/// let first = trainer.step(&mut policy)?.update.loss;
/// assert!(trainer.step(&mut policy)?.update.loss < first);
/// # Ok::<(), lm::Error>(())
/// ```
#[derive(Debug)]
pub struct SftTrainer {
    config: SftConfig,
    examples: Vec<Example>,
    optimizer: AdamW,
    order: Order,
}

impl SftTrainer {
    /// Before its first step. `parameters` are those of the policy that are to be trained, sharing its memory.
    ///
    /// # Errors
    /// As [`SftConfig::validate`] and [`AdamW::new`]; [`Error::EmptyPrompt`] or [`Error::InvalidArgument`] for a text that
    /// [`Layout::batch`] refuses.
    pub fn new(config: SftConfig, examples: Vec<Example>, parameters: Vec<(String, Tensor)>) -> Result<Self> {
        config.validate()?;
        for (i, example) in examples.iter().enumerate() {
            config.layout.cut(i, i, &example.prompt, &example.completion)?;
        }
        let data = examples.iter().flat_map(|e| [&e.prompt[..], &e.completion[..]]);
        let order = Order::new(examples.len(), config.batch, config.seed, data)?;
        Ok(Self { optimizer: AdamW::new(config.optimizer.clone(), parameters)?, config, examples, order })
    }

    /// Steps that are done.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// One step.
    ///
    /// # Errors
    /// As [`AdamW::step`]; nothing has changed then.
    pub fn step(&mut self, policy: &mut dyn Policy) -> Result<SftLog> {
        let chosen = self.order.of(self.steps());
        let parts: Vec<&[usize]> = chosen.chunks(self.config.part).collect();
        let mut batches = Vec::with_capacity(parts.len());
        for part in &parts {
            let texts: Vec<_> = part.iter().map(|&i| (i, &self.examples[i])).collect();
            let texts: Vec<_> = texts.iter().map(|(i, e)| (*i, &e.prompt[..], &e.completion[..])).collect();
            batches.push(self.config.layout.batch(&texts)?);
        }
        let tokens: i64 = batches.iter().flat_map(|b| &b.tokens).sum();
        let update = self.optimizer.step(batches.len(), |i| {
            let log_probs = policy.log_probs(&batches[i])?;
            let nll = log_probs.f_sum(log_probs.kind())?.f_neg()?.f_div_scalar(tokens)?;
            let share = parts[i].len() as f64 / chosen.len() as f64;
            with_extra(nll, policy, share)
        })?;
        Ok(SftLog { update, tokens })
    }

    /// Steps until the schedule's end, or until `on_step` breaks.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn run(
        &mut self,
        policy: &mut dyn Policy,
        mut on_step: impl FnMut(&SftLog) -> ControlFlow<()>,
    ) -> Result<Vec<SftLog>> {
        let mut logs = Vec::new();
        while self.steps() < self.config.optimizer.steps {
            let log = self.step(policy)?;
            logs.push(log);
            if on_step(&log).is_break() {
                break;
            }
        }
        Ok(logs)
    }

    /// Writes parameters, the optimizer's state and the number of steps.
    ///
    /// # Errors
    /// [`Error::Tensor`] when writing fails.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut state = self.optimizer.state();
        self.order.save(&mut state);
        Ok(state.save(path)?)
    }

    /// Goes on where [`save`](Self::save) was: the parameters get the saved numbers in place, and the next steps are those
    /// that would have followed.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a file that can't be read, [`Error::Checkpoint`] for one of other texts, and as
    /// [`AdamW::restore`]. Nothing has changed then.
    pub fn load(&mut self, path: &Path) -> Result<()> {
        let state = StateDict::load(path)?;
        self.order.check(&state, path)?;
        self.optimizer.restore(&state, path)
    }
}

/// The loss with the policy's own, in the part's share.
pub(super) fn with_extra(loss: Tensor, policy: &mut dyn Policy, share: f64) -> Result<Tensor> {
    match policy.extra_loss()? {
        Some(extra) => Ok(loss.f_add(&extra.f_mul_scalar(share)?.f_to_kind(loss.kind())?)?),
        None => Ok(loss),
    }
}

/// Mean negative log-likelihood a token of completions, without gradient, `part` texts at a time.
///
/// # Errors
/// As [`Layout::batch`]; [`Error::InvalidArgument`] for no texts, or none at a time; what the model reports.
pub fn mean_nll(policy: &mut dyn Policy, examples: &[Example], layout: &Layout, part: usize) -> Result<f64> {
    let _guard = no_grad_guard();
    if examples.is_empty() {
        return Err(Error::invalid("examples", "at least one", "none"));
    }
    if part == 0 {
        return Err(Error::invalid("part", "at least 1", 0));
    }
    let numbered: Vec<_> = examples.iter().enumerate().map(|(i, e)| (i, &e.prompt[..], &e.completion[..])).collect();
    let (mut sum, mut tokens) = (0.0, 0);
    for part in numbered.chunks(part) {
        let batch = layout.batch(part)?;
        let log_probs = sums(&policy.log_probs(&batch)?, part.len() as i64)?;
        sum -= log_probs.f_sum(Kind::Double)?.f_double_value(&[])?;
        tokens += batch.tokens.iter().sum::<i64>();
    }
    Ok(sum / tokens as f64)
}
