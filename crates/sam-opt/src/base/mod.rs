//! Base optimizers: what makes a step out of the final gradient.
//!
//! [`Sgd`], [`Adam`], [`AdamW`] and [`RmsProp`] follow PyTorch's formulas, keep their state in f32 (f64 for f64
//! parameters) and can be saved. [`TchOptimizer`] hands the gradient to a `tch::nn::Optimizer`.

mod adam;
mod adapter;
mod prox_sgd;
mod rmsprop;
mod sgd;

pub use adam::{Adam, AdamConfig, AdamFamily, AdamW};
pub use adapter::TchOptimizer;
pub use prox_sgd::{ProxSgd, ProxSgdConfig};
pub use rmsprop::{RmsProp, RmsPropConfig};
pub use sgd::{Sgd, SgdConfig};

use crate::{Error, Result};
use tensor::tch::{Kind, Tensor};
use tensor::{ParamSet, ParamVec, StateDict, fused};

/// One parameter with its final gradient, as a base optimizer sees it.
#[derive(Debug)]
pub struct Slot<'a> {
    /// Position among all parameters of the optimizer: the key of its state.
    pub index: usize,
    /// Name, for messages and saved states.
    pub name: &'a str,
    /// The parameter, to be written.
    pub param: &'a Tensor,
    /// Where its value is read: the parameter itself, or a copy of it while the parameter is still perturbed.
    pub value: &'a Tensor,
    /// The final gradient, of the parameter's shape.
    pub grad: &'a Tensor,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Weight decay in place of the optimizer's.
    pub weight_decay: Option<f64>,
}

impl<'a> Slot<'a> {
    /// A parameter with its gradient, with the optimizer's own rate and decay.
    pub fn new(index: usize, name: &'a str, param: &'a Tensor, grad: &'a Tensor) -> Self {
        Self { index, name, param, value: param, grad, lr_scale: 1.0, weight_decay: None }
    }
}

/// What makes a step out of gradients.
pub trait BaseOptimizer {
    /// Name for messages and saved states.
    fn name(&self) -> &'static str;

    /// Checks the settings; called when a wrapping optimizer is built.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field.
    fn validate(&self) -> Result<()>;

    /// Applies one step to the parameters that have a gradient.
    ///
    /// # Errors
    /// What libtorch reports; parameters and state are unchanged then.
    fn step(&mut self, slots: &[Slot<'_>]) -> Result<()>;

    /// The learning rate.
    fn lr(&self) -> f64;

    /// Sets the learning rate.
    fn set_lr(&mut self, lr: f64);

    /// Whether it reads [`Slot::value`]. If not, the parameters are restored before it steps, which costs a pass
    /// over memory.
    fn reads_values(&self) -> bool {
        false
    }

    /// Weight decay of parameters whose group has none of its own, if decay is a part of the gradient (`λw`) that
    /// a wrapping optimizer may take over; `None` where it isn't.
    fn coupled_decay(&self) -> Option<f64>;

    /// The settings apart from the learning rate, which a saved state must share.
    fn settings(&self) -> serde_json::Value;

    /// The state of every parameter, with `names` in the order of their indices.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the state can't be read.
    fn state_dict(&self, names: &[String]) -> Result<StateDict>;

    /// Replaces the state; on an error nothing has changed.
    ///
    /// # Errors
    /// [`Error::State`] when it doesn't fit, [`Error::Unsupported`] where a state can't be written.
    fn load_state_dict(&mut self, state: &StateDict, params: &[(&str, &Tensor)]) -> Result<()>;
}

/// One step of a base optimizer by itself, with its own rate and decay, on a gradient of `params`; parameters
/// without a gradient are left alone.
///
/// # Errors
/// A gradient that doesn't fit the parameters, and what the optimizer reports.
pub fn step_on(base: &mut impl BaseOptimizer, params: &ParamSet, gradient: &ParamVec) -> Result<()> {
    params.check(gradient)?;
    let slots: Vec<Slot<'_>> = params
        .iter()
        .zip(gradient.parts())
        .enumerate()
        .filter_map(|(index, ((name, param), grad))| grad.as_ref().map(|grad| Slot::new(index, name, param, grad)))
        .collect();
    base.step(&slots)
}

/// The tensors of the slots as lists for the fused loops.
pub(crate) struct Lists<'a> {
    pub(crate) params: Vec<&'a Tensor>,
    grads: Vec<&'a Tensor>,
    /// The values, where they aren't the parameters themselves.
    values: Option<Vec<&'a Tensor>>,
}

impl<'a> Lists<'a> {
    pub(crate) fn of(slots: &[Slot<'a>]) -> Self {
        let in_place = slots.iter().all(|s| s.value.data_ptr() == s.param.data_ptr());
        Self {
            params: slots.iter().map(|s| s.param).collect(),
            grads: slots.iter().map(|s| s.grad).collect(),
            values: (!in_place).then(|| slots.iter().map(|s| s.value).collect()),
        }
    }

    /// Applies `rule(tensor, value, written, gradient)` to every element; the first written list is the parameters.
    /// False, with nothing changed, where the tensors aren't dense f32 CPU memory.
    pub(crate) fn update<const M: usize>(
        &self,
        written: [&[&Tensor]; M],
        rule: impl Fn(usize, f32, &mut [f32; M], f32) + Sync,
    ) -> bool {
        match &self.values {
            None => fused::update(written, [&self.grads], |i, out, [g]| rule(i, out[0], out, g)),
            Some(values) => fused::update(written, [&self.grads, values], |i, out, [g, w]| rule(i, w, out, g)),
        }
    }
}

/// State of one parameter: its step count and its moments.
#[derive(Debug)]
pub(crate) struct Moments {
    pub(crate) steps: i64,
    pub(crate) moments: Vec<Tensor>,
}

impl Moments {
    fn zeros(count: usize, param: &Tensor) -> Self {
        let kind = state_kind(param);
        Self { steps: 0, moments: (0..count).map(|_| param.detach().zeros_like().to_kind(kind)).collect() }
    }
}

/// Kind of state and arithmetic for a parameter: f64 for f64, f32 for all others.
pub(crate) fn state_kind(param: &Tensor) -> Kind {
    if param.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Makes sure that every slot has its state of `count` moments.
pub(crate) fn prepare(states: &mut Vec<Option<Moments>>, slots: &[Slot<'_>], count: usize) {
    for slot in slots {
        if states.len() <= slot.index {
            states.resize_with(slot.index + 1, || None);
        }
        states[slot.index].get_or_insert_with(|| Moments::zeros(count, slot.param));
    }
}

/// First moment of every slot, and whether it hasn't been used yet; `None` where a slot has no state.
pub(crate) fn momenta<'a>(states: &'a [Option<Moments>], slots: &[Slot<'_>]) -> Option<(Vec<&'a Tensor>, Vec<bool>)> {
    slots
        .iter()
        .map(|s| states[s.index].as_ref().map(|state| (&state.moments[0], state.steps == 0)))
        .collect::<Option<Vec<_>>>()
        .map(|pairs| pairs.into_iter().unzip())
}

/// Counts a step that has been done.
pub(crate) fn count(states: &mut [Option<Moments>], slots: &[Slot<'_>]) {
    for slot in slots {
        if let Some(Some(state)) = states.get_mut(slot.index) {
            state.steps += 1;
        }
    }
}

/// New values for some tensors, written only when all of them are computed.
#[derive(Debug, Default)]
pub(crate) struct Pending(Vec<(Tensor, Tensor)>);

impl Pending {
    pub(crate) fn write(&mut self, target: &Tensor, value: Tensor) {
        self.0.push((target.shallow_clone(), value));
    }

    pub(crate) fn commit(self) -> Result<()> {
        for (mut target, value) in self.0 {
            target.f_copy_(&value)?;
        }
        Ok(())
    }
}

/// Saves the states as `"{moment}/{name}"` and `"steps/{name}"`.
pub(crate) fn save(
    base: &impl BaseOptimizer,
    states: &[Option<Moments>],
    names: &[String],
    moments: &[&str],
) -> StateDict {
    let mut dict = StateDict::default();
    dict.meta.insert("base".into(), base.name().into());
    dict.meta.insert("base_settings".into(), base.settings());
    dict.meta.insert("lr".into(), base.lr().into());
    for (state, name) in states.iter().zip(names) {
        let Some(state) = state else { continue };
        dict.tensors.insert(format!("steps/{name}"), Tensor::from_slice(&[state.steps]));
        for (moment, tensor) in moments.iter().zip(&state.moments) {
            dict.tensors.insert(format!("{moment}/{name}"), tensor.copy());
        }
    }
    dict
}

/// Reads what [`save`] wrote; returns the learning rate and the states.
pub(crate) fn load(
    base: &impl BaseOptimizer,
    dict: &StateDict,
    params: &[(&str, &Tensor)],
    moments: &[&str],
) -> Result<(f64, Vec<Option<Moments>>)> {
    let saved = dict.meta.get("base").and_then(|v| v.as_str()).unwrap_or("nothing");
    if saved != base.name() {
        let reason = format!("it was saved by {saved}, but the base optimizer is {}.", base.name());
        return Err(Error::State { reason });
    }
    let (own, theirs) = (base.settings(), dict.meta.get("base_settings").unwrap_or(&serde_json::Value::Null));
    if *theirs != own {
        let reason = format!("the base optimizer's settings were {theirs}, those here are {own}.");
        return Err(Error::State { reason });
    }
    let lr =
        dict.meta.get("lr").and_then(serde_json::Value::as_f64).filter(|lr| lr.is_finite() && *lr >= 0.0).ok_or_else(
            || Error::State { reason: "it has no learning rate \"lr\" that is finite and at least 0.".into() },
        )?;
    for key in dict.tensors.keys() {
        let name = key.split_once('/').map_or(key.as_str(), |(_, name)| name);
        if !params.iter().any(|(known, _)| *known == name) {
            return Err(Error::State { reason: format!("it has a state for \"{name}\", which is no parameter here.") });
        }
    }
    let mut states = Vec::with_capacity(params.len());
    for (name, param) in params {
        let Some(steps) = dict.tensors.get(&format!("steps/{name}")) else {
            states.push(None);
            continue;
        };
        let mut loaded = Vec::with_capacity(moments.len());
        for moment in moments {
            let key = format!("{moment}/{name}");
            let tensor = dict
                .tensors
                .get(&key)
                .ok_or_else(|| Error::State { reason: format!("the tensor \"{key}\" is missing.") })?;
            if tensor.size() != param.size() {
                return Err(Error::StateMismatch { name: key, expected: param.size(), got: tensor.size() });
            }
            let values = tensor.to_device(param.device()).to_kind(state_kind(param)).copy();
            // A negative or non-finite moment would turn all weights into NaN in the next step, without an error.
            let smallest = if moment.contains("square") { 0.0 } else { f64::NEG_INFINITY };
            if values.numel() > 0 {
                let sum = values.sum(Kind::Double).double_value(&[]);
                if !sum.is_finite() || values.min().double_value(&[]) < smallest {
                    let reason =
                        format!("\"{key}\" has values that no training leaves (not finite, or a negative square).");
                    return Err(Error::State { reason });
                }
            }
            loaded.push(values);
        }
        let valid = steps.size() == [1] && steps.kind() == Kind::Int64 && steps.int64_value(&[0]) >= 0;
        if !valid {
            let reason = format!("\"steps/{name}\" isn't one count, but {:?} of {:?}.", steps.size(), steps.kind());
            return Err(Error::State { reason });
        }
        states.push(Some(Moments { steps: steps.int64_value(&[0]), moments: loaded }));
    }
    Ok((lr, states))
}

/// Refuses a value outside `[low, high)`.
pub(crate) fn check(field: &str, value: f64, low: f64, high: f64) -> Result<()> {
    if value.is_finite() && value >= low && value < high {
        Ok(())
    } else {
        let bound = if high.is_infinite() { String::new() } else { format!(" and below {high}") };
        Err(Error::invalid(field, format!("finite, at least {low}{bound}"), value))
    }
}

#[cfg(test)]
pub(crate) mod test_support {
    use super::*;
    use tensor::Seed;

    /// Ten steps of the fused and of the plain path from the same point on the same gradients.
    pub(crate) fn paths_agree<B>(
        make: impl Fn() -> B,
        fused: impl Fn(&mut B, &[Slot<'_>]),
        plain: impl Fn(&mut B, &[Slot<'_>]),
        prepare: impl Fn(&mut B, &[Slot<'_>]),
        count: impl Fn(&mut B, &[Slot<'_>]),
    ) {
        let shapes: [&[i64]; 4] = [&[40, 30], &[7], &[1], &[3, 5, 2]];
        let random = |seed: Seed| -> Vec<Tensor> {
            let mut list = Vec::new();
            for (i, shape) in shapes.iter().enumerate() {
                let mut values = vec![0.0f32; shape.iter().product::<i64>() as usize];
                seed.fill_normal(&mut values, i as u64);
                list.push(Tensor::from_slice(&values).reshape(*shape));
            }
            list
        };
        let run = |step: &dyn Fn(&mut B, &[Slot<'_>])| {
            let mut base = make();
            let params = random(Seed::new(1));
            for t in 0..10 {
                let grads = random(Seed::new(2).index(t));
                let slots: Vec<Slot<'_>> = params
                    .iter()
                    .zip(&grads)
                    .enumerate()
                    .map(|(index, (param, grad))| Slot {
                        lr_scale: if index == 1 { 0.5 } else { 1.0 },
                        weight_decay: (index == 2).then_some(0.0),
                        ..Slot::new(index, "p", param, grad)
                    })
                    .collect();
                prepare(&mut base, &slots);
                step(&mut base, &slots);
                count(&mut base, &slots);
            }
            params
        };
        for (a, b) in run(&fused).iter().zip(run(&plain)) {
            let largest = (a - &b).abs().max().double_value(&[]);
            // Ten steps of f32 arithmetic in another order.
            assert!(largest < 2e-6, "the paths differ by {largest}");
        }
    }
}
