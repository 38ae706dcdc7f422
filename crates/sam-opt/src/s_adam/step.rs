//! One step: main pass, probes, damped AdamW.

use super::config::LgiKind;
use super::lgi::{lgi_from_probes, lgi_from_residuals};
use super::probe::{Probed, Prober, Reading};
use super::stats::{GroupLgi, SAdamStats};
use super::{Memory, SAdam, SAdamConfig};
use crate::engine::{Finish, Request};
use crate::pass::{Pass, PassKind};
use crate::scope::{StepScope, without_grad};
use crate::{Error, Result};
use std::cell::Cell;
use tensor::tch::Tensor;
use tensor::{ParamSet, ParamVec, RestoreGuard, Seed};

/// Decay of the running squared slope (reconstruction).
const SLOPE_DECAY: f64 = 0.99;
/// Steps between looks at whether f32 can hold the probes.
const PRECISION_EVERY: u64 = 100;

/// The loss at the parameters.
struct Main {
    /// For the backward pass.
    loss: Tensor,
    /// What the closure returned, without its graph: a probe must not return it again.
    returned: Tensor,
    reading: Reading,
}

/// What the probes of a step were and what they leave.
struct Outcome {
    probed: Probed,
    memory: Memory,
    guard: Option<RestoreGuard>,
    below_precision: Option<bool>,
}

impl SAdam {
    /// One step on one batch. The closure is called for the main pass and for every probe, does a fresh forward pass on
    /// the batch of the step and returns the loss: a scalar, or one loss a sample (one axis), whose mean is then taken,
    /// in f64 for the probes. It never calls `backward` and never zeroes gradients; probes run without gradients.
    ///
    /// A probe whose loss isn't finite is dropped and counted; with fewer left than the statistic needs the LGI is 0.
    ///
    /// # Errors
    /// Everything that [`Error`] lists; parameters, buffers and state are then what they were before.
    pub fn step(&mut self, closure: impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<SAdamStats> {
        self.step_observed(closure, |_| {})
    }

    /// As [`step`](Self::step), and shows the gradient to an observer (a tracker, a log) before the update.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_observed(
        &mut self,
        mut closure: impl FnMut(&Pass<'_>) -> Result<Tensor>,
        observe: impl FnOnce(&ParamVec),
    ) -> Result<SAdamStats> {
        let mut scope = self.engine.open(self.config.seed, self.config.sync_rng)?;
        let main = self.main_pass(&scope, &mut closure)?;
        let gradient = self.engine.gradient(&main.loss, PassKind::Main)?;
        observe(&gradient);

        let outcome = if self.config.damps() && self.config.lgi.probes() && self.probing_step(&gradient) {
            scope.keep_buffers()?;
            let outcome = self.probe(&main, &gradient, &scope, &mut closure)?;
            scope.return_to_kept();
            outcome
        } else {
            let lgi = self.lgi_without_probes();
            let memory = Memory { lgi, ..self.memory.clone() };
            Outcome { probed: Probed::default(), memory, guard: None, below_precision: self.below_precision }
        };

        let damping: Vec<f64> = outcome.memory.lgi.iter().map(|lgi| self.damping(*lgi)).collect();
        let factors = self.engine.group.iter().map(|&group| damping[self.scope_of(group)]).collect();
        self.engine.base.damping.factors = factors;
        // Groups that were never probed would count with a damping of 1 that nothing uses.
        let known: Vec<f64> =
            outcome.memory.lgi.iter().zip(&damping).filter(|(lgi, _)| lgi.is_some()).map(|(_, d)| *d).collect();
        let mean_damping = mean(if known.is_empty() { &damping } else { &known });
        let lr = self.engine.lr();
        let finished = self.engine.finish(&gradient, outcome.guard, Finish::plain(PassKind::Main))?;
        scope.commit();

        let groups = if self.config.per_group_lgi {
            let lgis = outcome.memory.lgi.iter().zip(&damping).enumerate();
            lgis.map(|(group, (&lgi, &damping))| GroupLgi { group, lgi, damping }).collect()
        } else {
            Vec::new()
        };
        let known: Vec<f64> = outcome.memory.lgi.iter().copied().flatten().collect();
        let probed = outcome.probed;
        let stats = SAdamStats {
            step: self.engine.step,
            loss: main.reading.value,
            lgi: (!known.is_empty()).then(|| mean(&known)),
            damping: mean_damping,
            groups,
            probe_snr: probed.snr(main.reading.rounding),
            grad_norm: finished.norm,
            forwards: 1 + probed.forwards,
            probes_dropped: probed.dropped,
            probe_below_precision: outcome.below_precision.unwrap_or(false),
            lr,
            probe_values: match self.config.lgi {
                LgiKind::Residual => probed.residuals,
                LgiKind::Kink => probed.kinks,
                LgiKind::Published | LgiKind::Constant(_) | LgiKind::RandomNull => probed.slopes,
            },
        };
        self.memory = outcome.memory;
        self.below_precision = outcome.below_precision;
        self.engine.step += 1;
        Ok(stats)
    }

    /// Whether this step measures: on its turn, or when a scope with a gradient has nothing to keep.
    fn probing_step(&self, gradient: &ParamVec) -> bool {
        let unknown = |i: usize| self.memory.lgi[self.scope_of(self.engine.group[i])].is_none();
        self.engine.step.is_multiple_of(self.config.probe_every as u64)
            || self.probed(gradient).into_iter().any(unknown)
    }

    /// The parameters that are probed: those with a gradient, of groups that may be perturbed.
    fn probed(&self, gradient: &ParamVec) -> Vec<usize> {
        let perturbs = |i: usize| self.engine.groups[self.engine.group[i]].perturb;
        (0..self.engine.all.len()).filter(|&i| gradient.parts()[i].is_some() && perturbs(i)).collect()
    }

    /// Which LGI a group has.
    fn scope_of(&self, group: usize) -> usize {
        if self.config.per_group_lgi { group } else { 0 }
    }

    /// The LGI of a step that doesn't probe, one a scope.
    fn lgi_without_probes(&self) -> Vec<Option<f64>> {
        let scopes = self.memory.lgi.len();
        match self.config.lgi {
            _ if !self.config.damps() => vec![None; scopes],
            LgiKind::Constant(_) => vec![None; scopes],
            // On a smooth loss the slopes are independent normal numbers.
            LgiKind::RandomNull => {
                let seed = self.noise("null");
                let slopes = |scope| seed.index(scope).normal(self.config.k_directions).into_iter().map(f64::from);
                let lgi = |scope| lgi_from_probes(&slopes(scope).collect::<Vec<f64>>(), 0.0);
                (0..scopes as u64).map(|scope| Some(lgi(scope))).collect()
            }
            LgiKind::Published | LgiKind::Residual | LgiKind::Kink => self.memory.lgi.clone(),
        }
    }

    fn damping(&self, lgi: Option<f64>) -> f64 {
        match (self.config.lgi, lgi) {
            (LgiKind::Constant(a), _) => a,
            (_, Some(lgi)) => self.config.damping(lgi),
            (_, None) => 1.0,
        }
    }

    /// Noise of this step, apart from libtorch's stream.
    fn noise(&self, name: &str) -> Seed {
        Seed::new(self.config.seed).child("sam-opt.s-adam").child(name).index(self.engine.step)
    }

    fn main_pass(&self, scope: &StepScope, closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>) -> Result<Main> {
        let pass = PassKind::Main;
        let returned = self.engine.call(Request::new(pass, self.config.bn), scope, closure)?;
        let reading = Reading::of(&returned)?.ok_or_else(|| Error::NonScalarLoss { pass, got: returned.size() })?;
        if !reading.value.is_finite() {
            return Err(Error::NonFinite { what: "loss", pass, value: reading.value });
        }
        if !returned.requires_grad() {
            return Err(Error::Detached { pass });
        }
        let loss = if returned.numel() == 1 { returned.shallow_clone() } else { returned.f_mean(returned.kind())? };
        Ok(Main { loss, returned: returned.detach(), reading })
    }

    /// Probes around the parameters; the open guard restores them.
    fn probe(
        &mut self,
        main: &Main,
        gradient: &ParamVec,
        scope: &StepScope,
        closure: &mut impl FnMut(&Pass<'_>) -> Result<Tensor>,
    ) -> Result<Outcome> {
        let chosen = self.probed(gradient);
        let mut memory = self.memory.clone();
        if chosen.is_empty() {
            let below_precision = self.below_precision;
            return Ok(Outcome { probed: Probed::default(), memory, guard: None, below_precision });
        }
        let scratch = self.engine.scratch.take();
        let whole = chosen.len() == self.engine.all.len();
        let guard = if whole {
            self.engine.all.guard_in(scratch)?
        } else {
            let named = |&i: &usize| (self.engine.all.names()[i].clone(), self.engine.all.tensors()[i].shallow_clone());
            ParamSet::new(chosen.iter().map(named))?.guard_in(scratch)?
        };

        let mut all = Probed::default();
        let mut below_precision = self.below_precision;
        let look = self.engine.half || self.engine.step.is_multiple_of(PRECISION_EVERY) || below_precision.is_none();
        let calls = Cell::new(0);
        for unit in 0..memory.lgi.len() {
            // Positions in `chosen`, which are those of the guard's copies.
            let members: Vec<usize> = (0..chosen.len())
                .filter(|&c| !self.config.per_group_lgi || self.engine.group[chosen[c]] == unit)
                .collect();
            if members.is_empty() {
                continue;
            }
            let tensors = self.engine.all.tensors();
            let prober = Prober {
                params: members.iter().map(|&c| &tensors[chosen[c]]).collect(),
                originals: members.iter().map(|&c| &guard.originals()[c]).collect(),
                grads: members.iter().filter_map(|&c| gradient.parts()[chosen[c]].as_ref()).collect(),
                sigma: self.config.sigma,
                norm: self.config.probe_norm,
                seed: self.noise("probe").index(unit as u64),
            };
            if look {
                let names: Vec<&str> = members.iter().map(|&c| self.engine.all.names()[chosen[c]].as_str()).collect();
                let below = prober.check_precision(&names)?;
                below_precision = Some(below || (unit > 0 && below_precision == Some(true)));
            }
            let kink = self.config.lgi == LgiKind::Kink;
            let probed = prober.run(self.config.k_directions, kink, main.reading.value, || {
                let pass = PassKind::Probe(calls.replace(calls.get() + 1));
                let request = Request::new(pass, self.config.bn);
                let loss = without_grad(|| self.engine.call(request, scope, closure))?;
                if loss.data_ptr() == main.returned.data_ptr() {
                    return Err(Error::StaleLoss { pass });
                }
                let reading = Reading::of(&loss)?.ok_or_else(|| Error::NonScalarLoss { pass, got: loss.size() })?;
                Ok(reading.value)
            })?;
            let slope_square = if self.config.lgi == LgiKind::Published {
                None
            } else {
                let now = prober.slope_square()?;
                let running = memory.slope_square[unit];
                Some(running.map_or(now, |before| SLOPE_DECAY * before + (1.0 - SLOPE_DECAY) * now))
            };
            memory.lgi[unit] = Some(statistic(&self.config, &probed, slope_square.unwrap_or(0.0)));
            memory.slope_square[unit] = slope_square;
            all.add(probed);
            if unit + 1 < memory.lgi.len() {
                prober.restore()?;
            }
        }
        Ok(Outcome { probed: all, memory, guard: Some(guard), below_precision })
    }
}

/// The LGI of what was seen; 0 from fewer directions than it needs.
fn statistic(config: &SAdamConfig, probed: &Probed, slope_square: f64) -> f64 {
    if probed.slopes.len() < config.lgi.least_directions() {
        return 0.0;
    }
    match config.lgi {
        LgiKind::Residual => lgi_from_residuals(&probed.residuals, slope_square),
        LgiKind::Kink => lgi_from_residuals(&probed.kinks, slope_square),
        _ => lgi_from_probes(&probed.slopes, config.zeta),
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
