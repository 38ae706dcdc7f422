//! What every optimizer of this crate does alike: groups, passes, gradients, the base step, saved state.

use crate::base::{BaseOptimizer, Slot};
use crate::config::BnMode;
use crate::group::{self, ParamGroup};
use crate::pass::{Pass, PassKind};
use crate::scope::{StepScope, StepSeed};
use crate::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use tensor::params::{Scratch, is_perturbed};
use tensor::tch::{Kind, Tensor};
use tensor::{ParamSet, ParamVec, RestoreGuard, StateDict};

/// The parameters of an optimizer with what moves them.
#[derive(Debug)]
pub(crate) struct Engine<B> {
    pub(crate) groups: Vec<ParamGroup>,
    pub(crate) base: B,
    /// All parameters, flat over the groups.
    pub(crate) all: ParamSet,
    /// Group of each.
    pub(crate) group: Vec<usize>,
    /// Whether some parameter is of half precision.
    pub(crate) half: bool,
    pub(crate) buffers: Vec<Tensor>,
    /// Number of the next step.
    pub(crate) step: u64,
    /// Memory for the next guard's copies.
    pub(crate) scratch: Option<Scratch>,
}

/// What a pass is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) kind: PassKind,
    pub(crate) micro: usize,
    pub(crate) bn: BnMode,
    /// Weights in place of the model's own, by name.
    pub(crate) overrides: Option<&'a HashMap<String, Tensor>>,
}

impl Request<'_> {
    pub(crate) fn new(kind: PassKind, bn: BnMode) -> Self {
        Self { kind, micro: 0, bn, overrides: None }
    }
}

/// How the final gradient becomes a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finish {
    /// The pass that the gradient comes from, for messages.
    pub(crate) pass: PassKind,
    /// Largest norm of the gradient.
    pub(crate) clip_norm: Option<f64>,
    /// Whether weight decay is in the gradient already.
    pub(crate) decay_inside: bool,
}

impl Finish {
    pub(crate) fn plain(pass: PassKind) -> Self {
        Self { pass, clip_norm: None, decay_inside: false }
    }
}

/// What the final gradient was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finished {
    /// Its norm, before clipping.
    pub(crate) norm: f64,
    pub(crate) clipped: bool,
}

impl<B: BaseOptimizer> Engine<B> {
    pub(crate) fn new(groups: Vec<ParamGroup>, base: B) -> Result<Self> {
        base.validate()?;
        group::validate(&groups)?;
        let all = ParamSet::new(
            groups.iter().flat_map(|g| g.names.iter().cloned().zip(g.params.iter().map(Tensor::shallow_clone))),
        )?;
        let group = groups.iter().enumerate().flat_map(|(i, g)| vec![i; g.params.len()]).collect();
        let half = all.tensors().iter().any(is_half);
        Ok(Self { groups, base, all, group, half, buffers: Vec::new(), step: 0, scratch: None })
    }

    pub(crate) fn lr(&self) -> f64 {
        self.base.lr()
    }

    pub(crate) fn set_lr(&mut self, lr: f64) -> Result<()> {
        if !(lr.is_finite() && lr >= 0.0) {
            return Err(Error::invalid("lr", "finite and at least 0", lr));
        }
        self.base.set_lr(lr);
        Ok(())
    }

    fn first_perturbed(&self) -> Option<&str> {
        self.all.iter().find(|(_, tensor)| is_perturbed(tensor)).map(|(name, _)| name)
    }

    pub(crate) fn is_perturbed(&self) -> bool {
        self.first_perturbed().is_some()
    }

    pub(crate) fn refuse_open_guard(&self) -> Result<()> {
        match self.first_perturbed() {
            Some(name) => Err(Error::NestedPerturbation { name: name.into() }),
            None => Ok(()),
        }
    }

    /// Seeds of this step's passes and of its own noise.
    pub(crate) fn step_seed(&self, seed: u64) -> StepSeed {
        StepSeed::new(seed, self.step)
    }

    /// Opens the scope of a step.
    pub(crate) fn open(&self, seed: u64, sync_rng: bool) -> Result<StepScope> {
        self.refuse_open_guard()?;
        StepScope::open(&self.buffers, self.step_seed(seed), sync_rng)
    }

    /// Calls the closure for a pass of the step, with the step's random stream.
    pub(crate) fn call<T>(
        &self,
        request: Request<'_>,
        scope: &StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<T>,
    ) -> Result<T> {
        let seed = scope.seed_pass(request.micro);
        closure(&Pass {
            kind: request.kind,
            step: self.step,
            micro: request.micro,
            seed,
            batch_statistics: request.bn == BnMode::Train,
            overrides: request.overrides,
        })
    }

    /// Gradient of `loss` over all parameters, half-precision parts widened to f32.
    pub(crate) fn gradient(&self, loss: &Tensor, pass: PassKind) -> Result<ParamVec> {
        self.gradient_of(&self.all, loss, pass)
    }

    /// As [`gradient`](Self::gradient), over some of the parameters. A batch may leave those out (an expert that isn't
    /// used); all of them it can't.
    pub(crate) fn gradient_of(&self, set: &ParamSet, loss: &Tensor, pass: PassKind) -> Result<ParamVec> {
        self.widened(set, set.gradient(&loss.f_reshape([] as [i64; 0])?)?, pass)
    }

    /// As [`gradient_of`](Self::gradient_of), where the graph is used again.
    pub(crate) fn gradient_keeping_graph(&self, set: &ParamSet, loss: &Tensor, pass: PassKind) -> Result<ParamVec> {
        self.widened(set, set.gradient_keeping_graph(&loss.f_reshape([] as [i64; 0])?)?, pass)
    }

    fn widened(&self, set: &ParamSet, gradient: ParamVec, pass: PassKind) -> Result<ParamVec> {
        if gradient.is_empty() && set.len() == self.all.len() {
            return Err(Error::NoGradient { pass });
        }
        if !self.half {
            return Ok(gradient);
        }
        let widen = |part: &Tensor| if is_half(part) { part.to_kind(Kind::Float) } else { part.shallow_clone() };
        Ok(ParamVec::new(gradient.parts().iter().map(|part| part.as_ref().map(widen)).collect()))
    }

    /// Checks and clips the final gradient and lets the base optimizer step; on an error the guard restores the
    /// parameters. The guard's set must be a part of all parameters in their order.
    pub(crate) fn finish(
        &mut self,
        gradient: &ParamVec,
        guard: Option<RestoreGuard>,
        finish: Finish,
    ) -> Result<Finished> {
        let norm = gradient.norm();
        if !norm.is_finite() {
            return Err(Error::NonFinite { what: "gradient norm", pass: finish.pass, value: norm });
        }
        let mut clipped = false;
        if let Some(limit) = finish.clip_norm
            && norm > limit
        {
            gradient.scale(limit / norm)?;
            clipped = true;
        }
        // A parameter without a gradient wouldn't be written, and would stay perturbed.
        let all_written = gradient.parts().iter().all(Option::is_some);
        let mut originals = None;
        match guard {
            // The base optimizer reads the originals and writes over the perturbed parameters, which saves a pass over
            // memory.
            Some(guard) if guard.originals().len() == self.all.len() && all_written && self.base.reads_values() => {
                originals = Some(guard);
            }
            Some(guard) => self.scratch = Some(guard.close()),
            None => {}
        }
        let slots: Vec<Slot<'_>> = self
            .all
            .iter()
            .zip(gradient.parts())
            .enumerate()
            .filter_map(|(index, ((name, param), grad))| {
                let group = &self.groups[self.group[index]];
                // Decay inside the loss must not be applied again.
                let weight_decay = if finish.decay_inside { Some(0.0) } else { group.weight_decay };
                let value = originals.as_ref().map_or(param, |guard| &guard.originals()[index]);
                let lr_scale = group.lr_scale;
                grad.as_ref().map(|grad| Slot { index, name, param, value, grad, lr_scale, weight_decay })
            })
            .collect();
        self.base.step(&slots)?;
        if let Some(guard) = originals {
            self.scratch = Some(guard.keep());
        }
        Ok(Finished { norm, clipped })
    }

    /// Step count, settings, learning rate and the base optimizer's state; never the parameters.
    pub(crate) fn state_dict(&self, method: &str, config: &impl Serialize) -> Result<StateDict> {
        let mut state = self.base.state_dict(self.all.names())?;
        state.meta.insert("method".into(), method.into());
        state.meta.insert("step".into(), self.step.into());
        state.meta.insert("config".into(), as_value(config)?);
        Ok(state)
    }

    /// Refuses a state of another method or with other settings; returns its step count.
    pub(crate) fn check_state(&self, method: &str, config: &impl Serialize, state: &StateDict) -> Result<u64> {
        self.refuse_open_guard()?;
        let bad = |reason: String| Error::State { reason };
        let saved_method = state.meta.get("method").and_then(Value::as_str).unwrap_or("nothing");
        if saved_method != method {
            return Err(bad(format!("it was saved by {saved_method}, but this is {method}.")));
        }
        let step = state.meta.get("step").and_then(Value::as_u64);
        let step = step.ok_or_else(|| bad("it has no step count \"step\".".into()))?;
        let (own, saved) = (as_value(config)?, state.meta.get("config").unwrap_or(&Value::Null));
        if *saved != own {
            let reason =
                format!("its settings are {saved}, those here are {own}: build the optimizer with the saved ones.");
            return Err(bad(reason));
        }
        Ok(step)
    }

    /// Takes over the base optimizer's state and the step count; on an error nothing has changed.
    pub(crate) fn load_base(&mut self, state: &StateDict, step: u64) -> Result<()> {
        let params: Vec<(&str, &Tensor)> = self.all.iter().collect();
        self.base.load_state_dict(state, &params)?;
        self.step = step;
        Ok(())
    }
}

/// Adds a gradient to the sum; the first one is the sum.
pub(crate) fn accumulate(sum: &mut Option<ParamVec>, gradient: ParamVec) -> Result<()> {
    match sum {
        None => *sum = Some(gradient),
        Some(sum) => sum.accumulate(gradient)?,
    }
    Ok(())
}

/// Settings as JSON.
fn as_value(config: &impl Serialize) -> Result<Value> {
    serde_json::to_value(config).map_err(|e| Error::State { reason: e.to_string() })
}

pub(crate) fn is_half(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), Kind::Half | Kind::BFloat16)
}

/// A scalar loss with its value.
#[derive(Debug)]
pub(crate) struct Evaluated {
    pub(crate) loss: Tensor,
    pub(crate) value: f64,
}

impl Evaluated {
    /// Checks what a closure returned: one finite number, with a graph unless it is a probe.
    pub(crate) fn new(loss: Tensor, pass: PassKind) -> Result<Self> {
        Self::checked(loss, pass, !matches!(pass, PassKind::Probe(_)))
    }

    /// As [`new`](Self::new), told whether a graph is needed.
    pub(crate) fn checked(loss: Tensor, pass: PassKind, graph: bool) -> Result<Self> {
        if loss.numel() != 1 {
            return Err(Error::LossShape { pass, got: loss.size() });
        }
        let value = loss.f_double_value(&vec![0; loss.dim()])?;
        if !value.is_finite() {
            return Err(Error::NonFinite { what: "loss", pass, value });
        }
        if graph && !loss.requires_grad() {
            return Err(Error::Detached { pass });
        }
        Ok(Self { loss, value })
    }
}

/// The public methods that every optimizer with an `engine` field has. (Inherent methods, so that nobody has to import
/// a trait to read a learning rate.)
macro_rules! engine_methods {
    () => {
        /// Names the non-trainable tensors (running statistics, from [`buffers`](crate::buffers)) that only the
        /// main pass may change: they are put back after the later passes, for any kind of layer.
        #[must_use]
        pub fn with_buffers(mut self, buffers: Vec<tensor::tch::Tensor>) -> Self {
            self.engine.buffers = buffers;
            self
        }

        /// The groups.
        pub fn groups(&self) -> &[crate::ParamGroup] {
            &self.engine.groups
        }

        /// All parameters as one vector.
        pub fn params(&self) -> &tensor::ParamSet {
            &self.engine.all
        }

        /// Number of the next step.
        pub fn step_count(&self) -> u64 {
            self.engine.step
        }

        /// The learning rate: the base optimizer's, the only one there is.
        pub fn lr(&self) -> f64 {
            self.engine.lr()
        }

        /// Sets the learning rate; what a scheduler calls.
        ///
        /// # Errors
        /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) when it is negative or not finite.
        pub fn set_lr(&mut self, lr: f64) -> crate::Result<()> {
            self.engine.set_lr(lr)
        }

        /// True while some parameter is perturbed: assert that it is false before an evaluation. While a guard or a
        /// step borrows the optimizer, ask [`is_perturbed`](crate::is_perturbed) of a tensor.
        pub fn is_perturbed(&self) -> bool {
            self.engine.is_perturbed()
        }
    };
}
pub(crate) use engine_methods;
