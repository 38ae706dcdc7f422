//! Training: supervised fine-tuning and direct preference optimization, on any model that gives logits.
//!
//! - [`SftTrainer`] and [`DpoTrainer`] run the steps, log them, and can be saved and continued bit for bit.
//! - [`Policy`] is what they ask of a model; [`Decoder`] is the crate's model as one, whole or through a LoRA adapter, and
//!   can keep what frozen layers make of each text.
//! - [`token_log_probs`], [`next_token_nll`], [`dpo_loss`] and [`bradley_terry`] are the losses by themselves.
//! - [`AdamW`] is the optimizer: tch's own can't save its state.
//!
//! A loss or gradient that isn't finite is an error, and the parameters are then those before the step.

mod batch;
mod dpo;
mod loss;
mod monitor;
mod optimizer;
mod order;
mod policy;
mod sft;

pub use batch::{Batch, Example, Layout, Lengths, Padding, PreferencePair, lengths};
pub use dpo::{DpoConfig, DpoLog, DpoTrainer};
pub use loss::{
    Counted, DpoKind, DpoLoss, DpoOutput, PairScores, bradley_terry, dpo_loss, next_token_nll, token_log_probs,
};
pub use monitor::{CollapseMonitor, MonitorConfig, repetition};
pub use optimizer::{AdamW, OptimizerConfig, Schedule, Update};
pub use policy::{Decoder, Policy, score_pairs};
pub use sft::{SftConfig, SftLog, SftTrainer, mean_nll};
