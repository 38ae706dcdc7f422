//! What a step of IAM reports.

/// `inner_signal` below this is mostly rounding.
pub(super) const WEAK: f64 = 100.0;

/// Statistics of one step of [`Iam`](crate::Iam).
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // independent facts about the step
pub struct IamStats {
    /// Number of the step, from 0.
    pub step: u64,
    /// Main loss at the parameters, without the penalty.
    pub loss: f64,
    /// Main loss at the perturbed point (S only).
    pub perturbed_loss: Option<f64>,
    /// `(1/b) Σ KL(f(θ) ‖ f(θ+δ))` in nats on the step's inputs; `None` when the step was a plain one (ρ or β is 0).
    pub inconsistency: Option<f64>,
    /// `‖δ‖₂`, really applied.
    pub delta_norm: f64,
    /// `‖f(θ+δ₀) − f(θ)‖ / (√b · ε)` with the rounding error ε of the probabilities' kind: how much of the first inner
    /// gradient is signal. `None` when there was no search.
    pub inner_signal: Option<f64>,
    /// Whether `inner_signal` is below 100: raise `noise_scale`.
    pub weak_signal: bool,
    /// Whether the search found no direction (outputs that don't move): δ = 0, or for DE new noise.
    pub degenerate: bool,
    /// Whether δ was searched in this step, not reused.
    pub refreshed: bool,
    /// Inputs without a label, where [`step_semi`](crate::Iam::step_semi) was told how many have one. `Some(0)`: the
    /// unlabeled part was empty, and the penalty was computed on the labeled inputs alone.
    pub unlabeled: Option<i64>,
    /// Norm of the gradient that the base optimizer got, before clipping.
    pub final_grad_norm: f64,
    /// Whether it was clipped.
    pub clipped: bool,
    /// Forward passes.
    pub forwards: u32,
    /// Backward passes (of the functional form, through both outputs: one).
    pub backwards: u32,
    /// Learning rate of the step.
    pub lr: f64,
}
