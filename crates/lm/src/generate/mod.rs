//! Text generation: batches of prompts, a cache, processors of logits, a sampler, stopping.
//!
//! ```
//! use lm::config::ModelConfig;
//! use lm::generate::{GenerateConfig, generate};
//! use lm::model::Model;
//! use lm::tensor::{Seed, tch::{Device, Kind}};
//!
//! let config = ModelConfig::llama(50, 16, 2, 2, 1, 32);
//! let model = Model::random(&config, Seed::new(0), Kind::Float, Device::Cpu)?;
//! let settings = GenerateConfig { max_new_tokens: 5, ..GenerateConfig::default() };
//! let texts = generate(&model, &[vec![3, 4, 5], vec![6]], &settings)?;
//! assert_eq!(texts[1].tokens.len(), 5);
//! # Ok::<(), lm::Error>(())
//! ```

mod config;
mod decoding;
mod processors;
mod sampler;

pub use config::GenerateConfig;
pub use decoding::{Decoding, Generation, Plugs, StopReason, Token, generate, generate_with, left_pad};
pub use processors::{
    BannedTokens, LogitsProcessor, MinP, NoRepeatNgram, RepetitionPenalty, StepInfo, Temperature, TopK, TopP,
};
pub use sampler::Sampler;
