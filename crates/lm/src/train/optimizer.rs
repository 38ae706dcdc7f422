//! AdamW with a schedule, clipping, and a state that can be saved (which tch's own optimizers don't offer).

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;
use tensor::tch::{Kind, Tensor, no_grad_guard};
use tensor::{ParamSet, ParamVec, StateDict};

/// The learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays.
    #[default]
    Constant,
    /// Falls in a line that reaches 0 one step after the last.
    Linear,
    /// Falls as half a cosine that reaches 0 one step after the last.
    Cosine,
}

/// Settings of the optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the mean square.
    pub eps: f64,
    /// Decay of the weights by `lr · λ` a step.
    pub weight_decay: f64,
    /// Steps in which the learning rate rises in a line to its value.
    pub warmup: u64,
    /// What it does then.
    pub schedule: Schedule,
    /// Number of steps that the schedule is made for.
    pub steps: u64,
    /// Longest gradient, by the norm over all parameters; longer ones are shortened.
    pub clip: Option<f64>,
}

impl Default for OptimizerConfig {
    /// 100 steps of AdamW at 3·10⁻⁴ without weight decay, 10 of them to warm up, gradients of at most 1.
    fn default() -> Self {
        Self {
            lr: 3e-4,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            warmup: 10,
            schedule: Schedule::Constant,
            steps: 100,
            clip: Some(1.0),
        }
    }
}

impl OptimizerConfig {
    /// # Errors
    /// [`Error::InvalidArgument`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid(name, "at least 0 and finite", value));
            }
        }
        for (name, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(Error::invalid(name, "from 0 to below 1", value));
            }
        }
        if self.steps == 0 {
            return Err(Error::invalid("steps", "at least 1", 0));
        }
        if self.eps == 0.0 {
            // A gradient of exactly 0, as the first one of a LoRA adapter's A, would become 0/0.
            return Err(Error::invalid("eps", "above 0", 0));
        }
        match self.clip {
            Some(clip) if !(clip.is_finite() && clip > 0.0) => Err(Error::invalid("clip", "positive and finite", clip)),
            _ => Ok(()),
        }
    }

    /// The learning rate of a step, counted from 0.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / self.warmup as f64;
        }
        let rest = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / rest).min(1.0);
        match self.schedule {
            Schedule::Constant => self.lr,
            Schedule::Linear => self.lr * (1.0 - done),
            Schedule::Cosine => self.lr * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        }
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Update {
    /// Number of the step, from 0.
    pub step: u64,
    /// The loss before it.
    pub loss: f64,
    /// Its learning rate.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
}

/// AdamW on named parameters ("Decoupled Weight Decay Regularization", Loshchilov and Hutter, 2019; PyTorch's formulas).
#[derive(Debug)]
pub struct AdamW {
    config: OptimizerConfig,
    params: ParamSet,
    /// Mean and mean square of each parameter's gradients.
    moments: Vec<[Tensor; 2]>,
    step: u64,
}

impl AdamW {
    /// At its start, for these parameters, which must require gradients.
    ///
    /// # Errors
    /// As [`OptimizerConfig::validate`]; [`Error::Tensor`] without parameters or for one that comes twice;
    /// [`Error::InvalidArgument`] for one that requires no gradient.
    pub fn new(config: OptimizerConfig, parameters: Vec<(String, Tensor)>) -> Result<Self> {
        config.validate()?;
        if let Some((name, _)) = parameters.iter().find(|(_, t)| !t.requires_grad()) {
            let expected = "tensors that require a gradient (`set_requires_grad`)";
            return Err(Error::invalid("parameters", expected, format!("`{name}`, which doesn't")));
        }
        let params = ParamSet::new(parameters)?;
        let zeros = |t: &Tensor| t.f_detach()?.f_zeros_like()?.f_to_kind(state_kind(t.kind()));
        let moments = params.tensors().iter().map(|t| Ok([zeros(t)?, zeros(t)?])).collect::<Result<_>>()?;
        Ok(Self { config, params, moments, step: 0 })
    }

    /// Its settings.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// Steps that are done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// What it trains.
    pub fn parameters(&self) -> &ParamSet {
        &self.params
    }

    /// One step on the sum of `parts` losses, `loss(0)`, `loss(1)`, …, each differentiated before the next is computed: a
    /// batch that doesn't fit in memory at once is given in parts.
    ///
    /// # Errors
    /// What a loss reports; [`Error::NonFiniteLoss`], [`Error::NonFiniteGradient`]. Parameters and state are then unchanged.
    pub fn step(&mut self, parts: usize, mut loss: impl FnMut(usize) -> Result<Tensor>) -> Result<Update> {
        if parts == 0 {
            return Err(Error::invalid("parts", "at least 1", 0));
        }
        let (mut total, mut gradient) = (0.0, None::<ParamVec>);
        for part in 0..parts {
            let loss = loss(part)?;
            total += loss.f_double_value(&[])?;
            if !total.is_finite() {
                return Err(Error::NonFiniteLoss { step: self.step, value: total });
            }
            let more = self.params.gradient(&loss)?;
            match &mut gradient {
                None => gradient = Some(more),
                Some(sum) => sum.accumulate(more)?,
            }
        }
        // Invariant: there was at least one part.
        let gradient = gradient.unwrap_or_else(|| ParamVec::new(Vec::new()));
        if gradient.is_empty() {
            let expected = "some of those that the loss depends on (a copy of an adapter has parameters of its own)";
            return Err(Error::invalid("parameters", expected, "none that got a gradient"));
        }
        let norm = gradient.norm();
        if !norm.is_finite() {
            return Err(Error::NonFiniteGradient { step: self.step, norm });
        }
        if let Some(clip) = self.config.clip.filter(|clip| norm > *clip) {
            gradient.scale(clip / norm)?;
        }
        let lr = self.config.rate(self.step);
        self.apply(&gradient, lr)?;
        let done = Update { step: self.step, loss: total, lr, grad_norm: norm };
        self.step += 1;
        Ok(done)
    }

    /// Parameters without a gradient stay as they are, their moments too. (The correction of the moments counts steps, not
    /// gradients: a parameter that idles first, as an expert may, starts with larger updates than PyTorch's would.)
    fn apply(&mut self, gradient: &ParamVec, lr: f64) -> Result<()> {
        let _guard = no_grad_guard();
        let OptimizerConfig { beta1, beta2, eps, weight_decay, .. } = self.config;
        let steps = (self.step + 1).min(i32::MAX as u64) as i32;
        let (bias1, bias2) = (1.0 - beta1.powi(steps), (1.0 - beta2.powi(steps)).sqrt());
        for ((param, [m, v]), g) in self.params.tensors().iter().zip(&mut self.moments).zip(gradient.parts()) {
            let Some(g) = g else { continue };
            let g = g.f_to_kind(m.kind())?;
            let _ = m.f_mul_scalar_(beta1)?.f_add_(&g.f_mul_scalar(1.0 - beta1)?)?;
            let _ = v.f_mul_scalar_(beta2)?.f_add_(&g.f_square()?.f_mul_scalar(1.0 - beta2)?)?;
            let root = v.f_sqrt()?.f_div_scalar(bias2)?.f_add_scalar(eps)?;
            let change = m.f_div(&root)?.f_mul_scalar(lr / bias1)?;
            let new = param.f_to_kind(m.kind())?.f_mul_scalar(1.0 - lr * weight_decay)?.f_sub(&change)?;
            param.shallow_clone().f_copy_(&new)?;
        }
        Ok(())
    }

    /// Parameters, moments and the number of steps, to continue from. Tensors share memory.
    pub fn state(&self) -> StateDict {
        let mut state = StateDict::default();
        for (i, (name, param)) in self.params.iter().enumerate() {
            let [m, v] = &self.moments[i];
            for (part, tensor) in [("param", param), ("mean", m), ("square", v)] {
                state.tensors.insert(format!("{part}.{name}"), tensor.shallow_clone());
            }
        }
        state.meta.insert("step".into(), self.step.into());
        state
    }

    /// Takes over what [`state`](Self::state) gave, in place. `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Tensors`] with what is missing or unknown, [`Error::TensorShape`], [`Error::TensorType`],
    /// [`Error::Checkpoint`] without a number of steps. Nothing is changed then.
    pub fn restore(&mut self, state: &StateDict, path: &Path) -> Result<()> {
        let mine = self.state();
        let missing: Vec<_> = mine.tensors.keys().filter(|n| !state.tensors.contains_key(*n)).cloned().collect();
        let unexpected: Vec<_> = state.tensors.keys().filter(|n| !mine.tensors.contains_key(*n)).cloned().collect();
        if !missing.is_empty() || !unexpected.is_empty() {
            return Err(Error::Tensors { path: path.to_owned(), missing, unexpected });
        }
        for (name, tensor) in &mine.tensors {
            let stored = &state.tensors[name];
            if stored.size() != tensor.size() {
                return Err(Error::TensorShape { name: name.clone(), expected: tensor.size(), got: stored.size() });
            }
            if stored.kind() != tensor.kind() {
                let (dtype, known) = (format!("{:?}", stored.kind()), format!("{:?}", tensor.kind()));
                return Err(Error::TensorType { name: name.clone(), dtype, known });
            }
        }
        let step = state.meta.get("step").and_then(serde_json::Value::as_u64).ok_or_else(|| Error::Checkpoint {
            path: path.to_owned(),
            reason: "it has no number of steps: it isn't the state of a training".into(),
        })?;
        let _guard = no_grad_guard();
        for (name, mut tensor) in mine.tensors {
            tensor.f_copy_(&state.tensors[&name])?;
        }
        self.step = step;
        Ok(())
    }
}

/// Moments of half-precision parameters are kept in f32.
fn state_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
