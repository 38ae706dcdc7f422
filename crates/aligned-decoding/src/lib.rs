#![doc = include_str!("../README.md")]
//!
//! # Map
//!
//! Without libtorch (no feature):
//! - [`mod@select`]: the kernel on raw logits; [`rules`]: all rules; [`config`]: settings, [`Rule`], [`AadConfig`]
//! - [`tree`]: texts so short that the optimal policy is known exactly
//! - [`guard`]: guards against over-optimization, α for a budget
//! - [`jsonl`]: files with a value a line
//!
//! With the feature `lm`:
//! - `pair`: a policy with its reference; `generate`: decoding, streaming, traces; `plain`: the slow loop that it is tested against
//! - `reward`: the implicit reward; `bestofn`, `args`, `beam`: search with a picker, with a reward, over advantages
//! - `synth`: synthetic preference data and a second round; `doctor`: are two models a pair; `trace`: where the models part
//! - `processor`: the plug for `lm`'s own loop; `dpo`, `lora`: `lm`'s preference training and adapters

#[cfg(feature = "lm")]
pub mod args;
#[cfg(feature = "lm")]
pub mod beam;
#[cfg(feature = "lm")]
pub mod bestofn;
pub mod config;
#[cfg(feature = "lm")]
pub mod doctor;
#[cfg(feature = "lm")]
mod engine;
mod error;
#[cfg(feature = "lm")]
pub mod generate;
pub mod guard;
pub mod jsonl;
#[cfg(feature = "lm")]
pub mod pair;
#[cfg(feature = "lm")]
pub mod plain;
#[cfg(feature = "lm")]
pub mod processor;
#[cfg(feature = "lm")]
pub mod reward;
pub mod rules;
pub mod select;
#[cfg(feature = "lm")]
pub mod synth;
#[cfg(feature = "lm")]
pub mod trace;
pub mod tree;

pub use config::{AadConfig, ReferenceMode, Rule, StopReason, StopRule};
pub use error::{Error, Result, Side};
#[cfg(feature = "lm")]
pub use generate::{Generation, Stats, generate, stream};
#[cfg(feature = "lm")]
pub use pair::{ModelPair, View};
pub use select::{Choice, select};
pub use tensor;

/// Preference training and supervised fine-tuning, as `lm` has them: what makes a pair.
#[cfg(feature = "lm")]
pub mod dpo {
    pub use lm::train::{
        Decoder, DpoConfig, DpoKind, DpoLog, DpoLoss, DpoTrainer, Example, Layout, OptimizerConfig, PreferencePair,
        Schedule, SftConfig, SftLog, SftTrainer, bradley_terry, dpo_loss, lengths, score_pairs,
    };
}

/// Low-rank adapters, as `lm` has them.
#[cfg(feature = "lm")]
pub mod lora {
    pub use lm::lora::{Adapter, AdapterView, Init, Layers, LoraConfig};
}

#[cfg(feature = "lm")]
pub use lm;
