//! Alignment-aware decoding in the loop of `lm`: a [`LogitsProcessor`] that asks a reference with a cache of its own.
//!
//! It composes with everything else that `lm` decodes with: hooks, other caches, other processors. The pair's own
//! [`generate`](crate::generate::generate) batches the reference and shares the trunk; this doesn't.

use crate::config::AadConfig;
use crate::engine::{Heads, values};
use crate::rules::{Chooser, RefLogits};
use crate::{Error, Result};
use lm::cache::Cache;
use lm::generate::{LogitsProcessor, StepInfo};
use lm::model::CausalLm;
use std::collections::HashMap;
use tensor::tch::{Device, Tensor, no_grad_guard};

/// What the reference has read of a row.
#[derive(Debug)]
struct Reader {
    cache: Cache,
    read: Vec<u32>,
    /// Final activations `[width]` after it.
    last: Option<Tensor>,
}

/// Leaves only the token that the rule chooses possible, whatever sampler follows. The reference reads lazily: only at steps with more than
/// one candidate, and then all tokens that came since.
///
/// ```
/// use aligned_decoding::{AadConfig, processor::AadProcessor};
/// use aligned_decoding::tensor::{Seed, tch::{Device, Kind}};
/// use lm::{config::ModelConfig, generate::{GenerateConfig, Plugs, generate_with}, model::Model};
/// use std::ops::ControlFlow;
///
/// let config = ModelConfig::llama(40, 16, 2, 2, 1, 24);
/// let model = |seed| Model::random(&config, Seed::new(seed), Kind::Float, Device::Cpu);
/// let (policy, reference) = (model(0)?, model(1)?);
/// let mut aad = AadProcessor::new(&reference, Device::Cpu, &AadConfig::default())?;
/// let plugs = Plugs { processors: vec![&mut aad], ..Plugs::default() };
/// let settings = GenerateConfig { max_new_tokens: 5, ..GenerateConfig::default() };
/// let texts = generate_with(&policy, &[vec![1, 2], vec![3]], &settings, plugs, |_| ControlFlow::Continue(()))?;
/// assert_eq!(texts[0].tokens.len(), 5);
/// # Ok::<(), aligned_decoding::Error>(())
/// ```
#[derive(Debug)]
pub struct AadProcessor<'r, R: CausalLm> {
    reference: &'r R,
    device: Device,
    chooser: Chooser,
    alpha: f64,
    rows: HashMap<usize, Reader>,
}

impl<'r, R: CausalLm> AadProcessor<'r, R> {
    /// With α, rule and clip of the settings; lengths, stops and bans are `lm`'s.
    ///
    /// # Errors
    /// As [`AadConfig::validate`]; [`Error::InvalidArgument`] for a rule that draws (`lm`'s sampler draws) or a list of allowed tokens.
    pub fn new(reference: &'r R, device: Device, config: &AadConfig) -> Result<Self> {
        config.validate()?;
        if config.rule.is_random() {
            return Err(Error::invalid("rule", "one that doesn't draw", format!("{:?}", config.rule)));
        }
        if config.allowed.is_some() {
            return Err(Error::invalid("allowed", "none: forbid tokens by another processor", "a list"));
        }
        let chooser = Chooser::new(config.rule, config.ratio_clip)?;
        Ok(Self { reference, device, chooser, alpha: config.alpha, rows: HashMap::new() })
    }

    fn choose(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> Result<()> {
        let tokens = logits.len() as i64;
        if self.reference.vocab() < tokens {
            return Err(Error::VocabMismatch { policy: tokens, reference: self.reference.vocab() });
        }
        let heads = Heads::new(None, tokens)?;
        let located = |e: Error| e.at(info.step, info.row);
        self.chooser.candidates(logits, self.alpha).map_err(located)?;
        let choice = if self.chooser.needs_reference() {
            let hidden = self.hidden(info)?;
            let z = match self.chooser.last_candidates() {
                few if self.chooser.needs_candidates_only() => {
                    let places: Vec<u32> = few.iter().map(|c| c.id).collect();
                    values(&heads.some(self.reference, &hidden, &places)?)?
                }
                _ => values(&heads.all(self.reference, &hidden)?)?,
            };
            let z = if self.chooser.needs_candidates_only() { RefLogits::Candidates(&z) } else { RefLogits::All(&z) };
            self.chooser.decide(logits, z, 0.0)
        } else {
            self.chooser.decide(logits, RefLogits::None, 0.0)
        };
        let token = choice.map_err(located)?.token;
        for (id, z) in logits.iter_mut().enumerate() {
            if id as u32 != token {
                *z = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// The reference's activations `[width]` after the text so far.
    fn hidden(&mut self, info: &StepInfo<'_>) -> Result<Tensor> {
        let _guard = no_grad_guard();
        let text = [info.prompt, info.generated].concat();
        let reader = self.rows.entry(info.row).or_insert_with(|| Reader {
            cache: self.reference.new_cache(),
            read: Vec::new(),
            last: None,
        });
        // Another generation, or a step that is tried again: what no longer fits is forgotten.
        if !text.starts_with(&reader.read) {
            *reader = Reader { cache: self.reference.new_cache(), read: Vec::new(), last: None };
        }
        if let Some(last) = reader.last.as_ref().filter(|_| reader.read.len() == text.len()) {
            return Ok(last.shallow_clone());
        }
        let ids: Vec<i64> = text[reader.read.len()..].iter().map(|&id| id.into()).collect();
        let ids = Tensor::f_from_slice(&ids)?.f_view([1, -1])?.f_to_device(self.device)?;
        let hidden = self.reference.forward_hidden(&ids, None, &mut reader.cache)?.f_select(0, 0)?.f_select(0, -1)?;
        reader.read = text;
        reader.last = Some(hidden.shallow_clone());
        Ok(hidden)
    }
}

impl<R: CausalLm> LogitsProcessor for AadProcessor<'_, R> {
    fn process(&mut self, logits: &mut [f32], info: &StepInfo<'_>) -> lm::Result<()> {
        self.choose(logits, info).map_err(|error| match error {
            Error::Lm(error) => error,
            other => lm::Error::plug("The processor of logits", 0, other),
        })
    }
}
