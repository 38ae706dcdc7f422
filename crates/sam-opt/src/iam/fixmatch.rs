//! FixMatch \[prior work: Sohn et al. 2020\], which IAM-D is combined with, and its average of weights.

use super::outputs::Outputs;
use crate::base::{check, state_kind};
use crate::pass::PassKind;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use tensor::tch::{Kind, Tensor, nn::VarStore, no_grad};
use tensor::{ParamSet, ParamVec, RestoreGuard, StateDict, fused};

/// What the loss of the kept inputs is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskReduction {
    /// The number of inputs: the loss grows as more are kept \[prior work: FixMatch\].
    #[default]
    Batch,
    /// The number of kept inputs, at least 1 \[official code of IAM\].
    Kept,
}

/// How many pseudo-labels were kept. An unlabeled loss of 0 at the start is normal: nothing is certain yet.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MaskStats {
    /// Inputs whose largest probability reached the threshold.
    pub kept: i64,
    /// All inputs.
    pub total: i64,
    /// Mean of the largest probability over all inputs.
    pub mean_conf: f64,
}

/// FixMatch's loss on unlabeled inputs: the class that the weakly changed view suggests, where its probability reaches
/// `threshold` (0.95 \[prior work\]), is the label of the strongly changed view. `weak` and `strong` are logits
/// `[batch, classes]` of the same inputs, from one forward pass over both views (separate passes bias batch
/// normalization); no gradient flows through `weak`.
///
/// ```
/// use sam_opt::{MaskReduction, fixmatch_loss, tensor::tch::Tensor};
/// // Certain of class 0; undecided.
/// let weak = Tensor::from_slice(&[9.0f64, 0.0, 0.1, 0.0]).reshape([2, 2]);
/// let strong = Tensor::from_slice(&[0.0f64, 0.0, 5.0, 0.0]).reshape([2, 2]);
/// let (loss, mask) = fixmatch_loss(&weak, &strong, 0.95, MaskReduction::Batch)?;
/// assert_eq!((mask.kept, mask.total), (1, 2));
/// assert!((loss.double_value(&[]) - 0.5 * 2f64.ln()).abs() < 1e-12);
/// # Ok::<(), sam_opt::Error>(())
/// ```
///
/// # Errors
/// Logits that aren't `[batch, classes]`, of an empty batch, not finite or of different shapes;
/// [`Error::InvalidConfig`] for a threshold outside `[0, 1]`.
pub fn fixmatch_loss(
    weak: &Tensor,
    strong: &Tensor,
    threshold: f64,
    reduction: MaskReduction,
) -> Result<(Tensor, MaskStats)> {
    if !(0.0..=1.0).contains(&threshold) {
        return Err(Error::invalid("threshold", "a probability from 0 to 1", threshold));
    }
    let pass = PassKind::Main;
    let weak = Outputs::new(weak.detach(), pass, false)?;
    let strong = Outputs::new(strong.shallow_clone(), pass, false)?;
    if weak.rows() != strong.rows() {
        return Err(Error::BatchSizeChanged { pass, first: weak.rows(), got: strong.rows() });
    }
    if weak.logits.size() != strong.logits.size() {
        return Err(Error::BadLogitsShape { pass, got: strong.logits.size() });
    }
    let (confidence, label) = weak.log_p.f_exp()?.f_max_dim(-1, false)?; // [batch] each
    let mask = confidence.f_ge(threshold)?.to_kind(strong.log_p.kind());
    let losses = strong.log_p.f_gather(-1, &label.f_unsqueeze(-1)?, false)?.f_squeeze_dim(-1)?.f_neg()?; // [batch]
    let kept = mask.f_sum(Kind::Double)?.f_double_value(&[])?;
    let divisor = match reduction {
        MaskReduction::Batch => weak.rows() as f64,
        MaskReduction::Kept => kept.max(1.0),
    };
    let loss = losses.f_mul(&mask)?.f_sum(strong.log_p.kind())?.f_div_scalar(divisor)?;
    let mean_conf = confidence.f_mean(Kind::Double)?.f_double_value(&[])?;
    Ok((loss, MaskStats { kept: kept as i64, total: weak.rows(), mean_conf }))
}

/// Exponential moving average of weights, evaluated in place of them: `w̄ ← d w̄ + (1−d) w` after each step.
///
/// The average of half-precision weights is kept in f32: in bf16 a step of `1 − d = 0.001` would be below its rounding.
/// Running statistics of normalization layers are the model's own, not averaged.
#[derive(Debug)]
pub struct WeightEma {
    params: ParamSet,
    average: ParamVec,
    decay: f64,
}

impl WeightEma {
    /// Starts the average at the weights of a store as they are now. FixMatch's decay is 0.999.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a decay outside `[0, 1)`; a store in which nothing is trainable.
    pub fn new(store: &VarStore, decay: f64) -> Result<Self> {
        check("decay", decay, 0.0, 1.0)?;
        let params = ParamSet::from_var_store(store)?;
        let wide = |(_, t): (&str, &Tensor)| Some(no_grad(|| t.detach().to_kind(state_kind(t)).copy()));
        let average = ParamVec::new(params.iter().map(wide).collect());
        Ok(Self { params, average, decay })
    }

    /// Moves the average towards the weights; call it after each step.
    ///
    /// # Errors
    /// [`Error::NestedPerturbation`] while the weights are perturbed, or replaced by the average.
    pub fn update(&mut self) -> Result<()> {
        if let Some((name, _)) = self.params.iter().find(|(_, t)| tensor::params::is_perturbed(t)) {
            return Err(Error::NestedPerturbation { name: name.into() });
        }
        let average = self.average.present();
        let weights: Vec<&Tensor> = self.params.tensors().iter().collect();
        let (d, new) = (self.decay as f32, (1.0 - self.decay) as f32);
        if !fused::update([&average], [&weights], |_, [a], [w]| *a = d * *a + new * w) {
            no_grad(|| -> Result<()> {
                for (a, w) in average.iter().zip(weights) {
                    let moved =
                        a.f_mul_scalar(self.decay)?.f_add(&w.to_kind(a.kind()).f_mul_scalar(1.0 - self.decay)?)?;
                    a.shallow_clone().f_copy_(&moved)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Puts the average in place of the weights until the returned guard is dropped.
    ///
    /// # Errors
    /// [`Error::NestedPerturbation`] while the weights are perturbed.
    pub fn evaluate(&self) -> Result<EmaGuard> {
        let guard = self.params.guard()?;
        self.params.assign(&self.average)?;
        Ok(EmaGuard { _guard: guard })
    }

    /// The average as `"ema/{name}"`.
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::default();
        for (name, part) in self.params.names().iter().zip(self.average.present()) {
            state.tensors.insert(format!("ema/{name}"), part.copy());
        }
        state
    }

    /// Continues from a saved average.
    ///
    /// # Errors
    /// [`Error::State`] for a missing tensor or one of another shape; nothing has changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let mut parts = Vec::with_capacity(self.params.len());
        for (name, param) in self.params.iter() {
            let found = state.tensors.get(&format!("ema/{name}")).filter(|saved| saved.size() == param.size());
            let saved = found.ok_or_else(|| Error::State {
                reason: format!("the tensor \"ema/{name}\" of shape {:?} is missing.", param.size()),
            })?;
            parts.push(Some(saved.to_device(param.device()).to_kind(state_kind(param)).copy()));
        }
        self.average = ParamVec::new(parts);
        Ok(())
    }
}

/// While it is open, the model's weights are the average.
#[derive(Debug)]
pub struct EmaGuard {
    _guard: RestoreGuard,
}
