//! A model with its tokenizer, chat template and stop tokens: what a checkpoint is.

use crate::activations::{ActivationStore, CollectConfig, collect};
use crate::generate::{GenerateConfig, Generation, Plugs, Token, generate_with};
use crate::load::{self, gguf::Weights};
use crate::model::{Model, Pass};
use crate::template::{ChatTemplate, Message};
use crate::tokenizer::{DecodeStream, Tokenizer};
use crate::{Error, Result};
use std::ops::ControlFlow;
use std::path::Path;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// How a checkpoint is loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadOptions {
    /// Kind of dense weights and of the activations.
    pub kind: Kind,
    /// Where the model computes.
    pub device: Device,
    /// Whether quantized weights of a GGUF file stay quantized.
    pub weights: Weights,
}

impl Default for LoadOptions {
    /// Dense f32 on the CPU.
    fn default() -> Self {
        Self { kind: Kind::Float, device: Device::Cpu, weights: Weights::Dense }
    }
}

/// A language model as people use it: text in, text out.
#[derive(Debug)]
pub struct Lm {
    /// The decoder.
    pub model: Model,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// How messages of a conversation become a text, if the checkpoint says so.
    pub template: Option<ChatTemplate>,
    /// Tokens that end a text.
    pub stop: Vec<u32>,
}

impl Lm {
    /// Loads a checkpoint: a `.gguf` file, or a folder with `config.json`, `tokenizer.json` and safetensors, or a folder with
    /// one `.gguf` file.
    ///
    /// # Errors
    /// What reading reports, with the file, field or tensor; [`Error::VocabMismatch`] for a tokenizer with more tokens than the
    /// model.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let lm = load::checkpoint(path, options)?;
        lm.tokenizer.check_model(lm.model.config().vocab)?;
        Ok(lm)
    }

    /// The tokens of a text, with the marks that the checkpoint wants around one.
    ///
    /// # Errors
    /// What the tokenizer reports.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text, true)
    }

    /// The tokens of a conversation that the model is to continue.
    ///
    /// # Errors
    /// [`Error::Template`] if the checkpoint has no chat template, or if it refuses the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or_else(|| Error::Template {
            reason: "this checkpoint has none: give the text itself, as `encode` takes it".to_owned(),
        })?;
        self.tokenizer.encode(&template.render(messages, true)?, false)
    }

    /// The text of tokens, special ones left out.
    ///
    /// # Errors
    /// What the tokenizer reports.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true)
    }

    /// Continues texts. Without stop tokens in the settings, those of the checkpoint are used, unless the settings
    /// [say not to](GenerateConfig::ignore_checkpoint_stop).
    ///
    /// # Errors
    /// As [`Decoding`](crate::generate::Decoding).
    pub fn generate(&self, texts: &[&str], config: &GenerateConfig) -> Result<Vec<String>> {
        let prompts = texts.iter().map(|text| self.encode(text)).collect::<Result<Vec<_>>>()?;
        let generations = self.generate_tokens(&prompts, config, Plugs::default(), |_| ControlFlow::Continue(()))?;
        generations.iter().map(|g| self.decode(&g.tokens)).collect()
    }

    /// Continues one prompt and hands out text as it comes, in whole characters; `on_text` may end it and isn't called again
    /// then.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn stream<'a>(
        &'a self,
        prompt: &[u32],
        config: &GenerateConfig,
        plugs: Plugs<'a, '_>,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let mut stream: DecodeStream<'_> = self.tokenizer.decode_stream(true);
        let (mut failed, mut ended) = (None, false);
        let generations =
            self.generate_tokens(&[prompt.to_vec()], config, plugs, |token| match stream.push(token.id) {
                Ok(text) if text.is_empty() => ControlFlow::Continue(()),
                Ok(text) => {
                    let flow = on_text(&text);
                    ended = flow.is_break();
                    flow
                }
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let rest = stream.finish()?;
        if !ended && !rest.is_empty() {
            let _ = on_text(&rest);
        }
        generations.into_iter().next().ok_or(Error::EmptyPrompt { row: 0 })
    }

    /// As [`generate_with`], with the checkpoint's stop tokens where the settings name none and don't say to ignore them.
    ///
    /// # Errors
    /// As [`generate_with`].
    pub fn generate_tokens<'a>(
        &'a self,
        prompts: &[Vec<u32>],
        config: &GenerateConfig,
        plugs: Plugs<'a, '_>,
        on_token: impl FnMut(Token) -> ControlFlow<()>,
    ) -> Result<Vec<Generation>> {
        let mut config = config.clone();
        if config.stop.is_empty() && !config.ignore_checkpoint_stop {
            config.stop.clone_from(&self.stop);
        }
        generate_with(&self.model, prompts, &config, plugs, on_token)
    }

    /// Mean negative log-likelihood of a text's tokens after the first, in nats, and how many they are.
    ///
    /// # Errors
    /// As [`Model::logits`]; [`Error::InvalidArgument`] for fewer than two tokens.
    pub fn nll(&self, ids: &[u32]) -> Result<(f64, usize)> {
        if ids.len() < 2 {
            return Err(Error::invalid("ids", "at least two tokens, because the first isn't predicted", ids.len()));
        }
        let _guard = no_grad_guard();
        let text: Vec<i64> = ids.iter().map(|&id| id.into()).collect();
        let text = Tensor::from_slice(&text).f_view([1, -1])?.f_to_device(self.model.device())?;
        let count = ids.len() as i64 - 1;
        let logits = self.model.logits(&text, &mut Pass::default())?.f_narrow(1, 0, count)?;
        let log_probs = logits.f_to_kind(Kind::Float)?.f_log_softmax(-1, Kind::Float)?;
        let chosen = log_probs.f_gather(-1, &text.f_narrow(1, 1, count)?.f_unsqueeze(-1)?, false)?;
        Ok((-chosen.f_mean(Kind::Double)?.f_double_value(&[])?, count as usize))
    }

    /// Activations of texts, one vector a text and site.
    ///
    /// # Errors
    /// As [`collect`].
    pub fn activations(&self, texts: &[&str], config: &CollectConfig) -> Result<ActivationStore> {
        let texts = texts.iter().map(|text| self.encode(text)).collect::<Result<Vec<_>>>()?;
        collect(&self.model, &texts, config)
    }
}
