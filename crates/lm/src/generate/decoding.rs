//! The loop: prompt, then a token at a time for all rows that aren't finished.

use super::config::GenerateConfig;
use super::processors::{LogitsProcessor, StepInfo};
use super::sampler::Sampler;
use crate::cache::{Cache, KvStore};
use crate::hooks::Hooks;
use crate::lora::AdapterView;
use crate::model::{Model, Pass};
use crate::{Error, Result};
use std::ops::ControlFlow;
use tensor::Seed;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// What takes part in a generation besides model and settings.
#[derive(Debug, Default)]
pub struct Plugs<'a, 'h> {
    /// Hooks on the residual stream.
    pub hooks: Option<&'a mut Hooks<'h>>,
    /// Processors of the logits, applied before those of the settings.
    pub processors: Vec<&'a mut dyn LogitsProcessor>,
    /// A LoRA adapter. Its mask of rows, if it has one, is of the prompts as they are given.
    pub adapter: Option<AdapterView<'a>>,
    /// An empty store for keys and values; the default one otherwise.
    pub store: Option<Box<dyn KvStore>>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token came; it is the last of the tokens.
    StopToken,
    /// The most tokens were generated.
    Length,
    /// The model has no more positions.
    Context,
    /// The caller ended it.
    Caller,
}

/// A token as it comes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token {
    /// Row of the batch, as the prompts were given.
    pub row: usize,
    /// The token.
    pub id: u32,
    /// Its log-probability under the model, before any processor, in nats.
    pub log_prob: f64,
}

/// A finished text.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The tokens after the prompt.
    pub tokens: Vec<u32>,
    /// Their log-probabilities under the model, before any processor, in nats.
    pub log_probs: Vec<f64>,
    /// Why it ended.
    pub stop: StopReason,
}

/// Generates a text for each prompt (token by token as [`Decoding`] does).
///
/// # Errors
/// As [`Decoding::new`] and [`Decoding::step`].
pub fn generate(model: &Model, prompts: &[Vec<u32>], config: &GenerateConfig) -> Result<Vec<Generation>> {
    generate_with(model, prompts, config, Plugs::default(), |_| ControlFlow::Continue(()))
}

/// As [`generate`], with plugs, and a callback for each token as it comes, which may end its row.
///
/// # Errors
/// As [`generate`].
pub fn generate_with<'a>(
    model: &'a Model,
    prompts: &[Vec<u32>],
    config: &GenerateConfig,
    plugs: Plugs<'a, '_>,
    mut on_token: impl FnMut(Token) -> ControlFlow<()>,
) -> Result<Vec<Generation>> {
    let mut decoding = Decoding::new(model, prompts, config, plugs)?;
    while let Some(tokens) = decoding.step()? {
        for token in tokens {
            if on_token(token).is_break() {
                decoding.end(token.row);
            }
        }
    }
    Ok(decoding.finish())
}

/// Prompts as a left-padded batch: tokens `[batch, longest]` (i64, padding 0), and which are real (bool); none if all have one
/// length.
///
/// # Errors
/// [`Error::EmptyPrompt`] for a prompt without tokens, or no prompt.
pub fn left_pad(prompts: &[Vec<u32>], device: Device) -> Result<(Tensor, Option<Tensor>)> {
    if let Some(row) = prompts.iter().position(Vec::is_empty) {
        return Err(Error::EmptyPrompt { row });
    }
    let Some(longest) = prompts.iter().map(Vec::len).max() else {
        return Err(Error::EmptyPrompt { row: 0 });
    };
    let (mut ids, mut real) = (Vec::with_capacity(prompts.len() * longest), Vec::new());
    for prompt in prompts {
        let padding = longest - prompt.len();
        ids.extend(std::iter::repeat_n(0i64, padding).chain(prompt.iter().map(|&id| i64::from(id))));
        real.extend((0..longest).map(|at| at >= padding));
    }
    let shape = [prompts.len() as i64, longest as i64];
    let ids = Tensor::from_slice(&ids).f_view(shape)?.f_to_device(device)?;
    let padded = real.iter().any(|real| !real);
    let real = Tensor::from_slice(&real).f_view(shape)?.f_to_device(device)?;
    Ok((ids, padded.then_some(real)))
}

/// A generation under way.
#[derive(Debug)]
pub struct Decoding<'a, 'h> {
    model: &'a Model,
    plugs: Plugs<'a, 'h>,
    max_new_tokens: usize,
    stop: Vec<u32>,
    processors: Vec<Box<dyn LogitsProcessor>>,
    cache: Cache,
    rows: Vec<Row>,
    /// Rows that aren't finished, in the order of the cache's rows.
    alive: Vec<usize>,
    /// The adapter's mask of rows, `[alive]` of bool.
    adapted: Option<Tensor>,
    /// The cache couldn't be put back after an error.
    broken: bool,
}

#[derive(Debug)]
struct Row {
    prompt: Vec<u32>,
    sampler: Sampler,
    tokens: Vec<u32>,
    log_probs: Vec<f64>,
    stop: Option<StopReason>,
}

impl<'a, 'h> Decoding<'a, 'h> {
    /// Checks prompts and settings; nothing is computed yet.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`]; [`Error::ContextOverflow`] for a prompt longer than the context; [`Error::TokenOutOfRange`];
    /// [`Error::InvalidArgument`] for settings outside their domain; [`Error::Shape`] for an adapter's mask of other rows.
    pub fn new(
        model: &'a Model,
        prompts: &[Vec<u32>],
        config: &GenerateConfig,
        mut plugs: Plugs<'a, 'h>,
    ) -> Result<Self> {
        config.validate()?;
        if prompts.is_empty() {
            return Err(Error::EmptyPrompt { row: 0 });
        }
        let (max, vocab) = (model.config().positions(), model.config().vocab);
        for (row, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() {
                return Err(Error::EmptyPrompt { row });
            }
            if prompt.len() as i64 > max {
                return Err(Error::ContextOverflow { len: prompt.len() as i64, max });
            }
            if let Some(&id) = prompt.iter().find(|id| i64::from(**id) >= vocab) {
                return Err(Error::TokenOutOfRange { id: id.into(), row, vocab });
            }
        }
        let sampler = |row| match config.temperature {
            0.0 => Sampler::greedy(),
            _ => Sampler::random(Seed::new(config.seed), row),
        };
        let row = |(number, prompt): (usize, &Vec<u32>)| Row {
            prompt: prompt.clone(),
            sampler: sampler(number),
            tokens: Vec::new(),
            log_probs: Vec::new(),
            stop: (config.max_new_tokens == 0).then_some(StopReason::Length),
        };
        let rows: Vec<Row> = prompts.iter().enumerate().map(row).collect();
        let adapted = plugs.adapter.and_then(AdapterView::rows).map(Tensor::shallow_clone);
        if let Some(mask) = adapted.as_ref().filter(|mask| mask.size() != [rows.len() as i64]) {
            return Err(Error::shape("The adapter's mask of rows", format!("[{}]", rows.len()), mask));
        }
        let cache = plugs.store.take().map_or_else(|| model.new_cache(), Cache::with_store);
        Ok(Self {
            model,
            plugs,
            max_new_tokens: config.max_new_tokens,
            stop: config.stop.clone(),
            processors: config.processors(),
            cache,
            alive: (0..rows.len()).filter(|&r| rows[r].stop.is_none()).collect(),
            rows,
            adapted,
            broken: false,
        })
    }

    /// The next token of every row that isn't finished; none when all are.
    ///
    /// # Errors
    /// What model and plugs report; [`Error::NonFiniteLogits`]. Texts, samplers and cache are then what they were, and the
    /// step can be tried again; hooks and processors with a state of their own are called again. If the store of keys and
    /// values can't be put back, further steps are refused ([`Error::InvalidArgument`]).
    pub fn step(&mut self) -> Result<Option<Vec<Token>>> {
        if self.broken {
            let got =
                "one whose store couldn't be put back after an error: start another with the prompts and texts so far";
            return Err(Error::invalid("decoding", "one that can go on", got));
        }
        self.drop_finished()?;
        if self.alive.is_empty() {
            return Ok(None);
        }
        let before = self.cache.len();
        let drawn = match self.draw() {
            Ok(drawn) => drawn,
            Err(error) => {
                // A pass that fails puts the cache back itself; what came after it doesn't.
                self.broken = self.cache.len() > before && self.cache.truncate(before).is_err();
                return Err(error);
            }
        };
        let max = self.model.config().positions();
        let mut tokens = Vec::with_capacity(drawn.len());
        for (token, sampler) in drawn {
            let row = &mut self.rows[token.row];
            row.sampler = sampler;
            row.tokens.push(token.id);
            row.log_probs.push(token.log_prob);
            row.stop = if self.stop.contains(&token.id) {
                Some(StopReason::StopToken)
            } else if row.tokens.len() >= self.max_new_tokens {
                Some(StopReason::Length)
            } else if (row.prompt.len() + row.tokens.len()) as i64 > max {
                Some(StopReason::Context)
            } else {
                None
            };
            tokens.push(token);
        }
        Ok(Some(tokens))
    }

    /// A pass, and a token for every row with the sampler that drew it. Nothing but the cache is changed.
    fn draw(&mut self) -> Result<Vec<(Token, Sampler)>> {
        let _guard = no_grad_guard();
        let _one = if self.cache.is_empty() { None } else { self.model.one_thread(self.alive.len() as i64) };
        let logits = self.logits()?.f_to_kind(Kind::Float)?; // (alive, vocab)
        let normalizers =
            Vec::<f64>::try_from(&logits.f_logsumexp([1i64].as_slice(), false)?.f_to_kind(Kind::Double)?)?;
        let mut values = vec![0f32; logits.numel()];
        let len = values.len();
        logits.f_to_device(Device::Cpu)?.f_contiguous()?.f_copy_data(&mut values, len)?;
        let mut drawn = Vec::with_capacity(self.alive.len());
        let vocab = len / self.alive.len();
        for ((values, normalizer), &number) in values.chunks_exact_mut(vocab).zip(normalizers).zip(&self.alive) {
            let processors = self.plugs.processors.iter_mut().map(|p| &mut **p as &mut dyn LogitsProcessor);
            let processors = processors.chain(self.processors.iter_mut().map(|p| &mut **p as &mut dyn LogitsProcessor));
            drawn.push(self.rows[number].choose(number, values, normalizer, &mut processors.collect::<Vec<_>>())?);
        }
        Ok(drawn)
    }

    /// Logits `[alive, vocab]` after the prompts, or after the last tokens.
    fn logits(&mut self) -> Result<Tensor> {
        let device = self.model.device();
        let (ids, real) = if self.cache.is_empty() {
            let prompts: Vec<Vec<u32>> = self.alive.iter().map(|&r| self.rows[r].prompt.clone()).collect();
            left_pad(&prompts, device)?
        } else {
            let last = self.alive.iter().map(|&r| self.rows[r].tokens.last().copied().map_or(0, i64::from));
            let last: Vec<i64> = last.collect();
            (Tensor::from_slice(&last).f_view([-1, 1])?.f_to_device(device)?, None)
        };
        let adapter = match (self.plugs.adapter, &self.adapted) {
            (Some(adapter), Some(rows)) => Some(adapter.with_rows(rows)?),
            (adapter, _) => adapter,
        };
        let mut pass = Pass {
            cache: Some(&mut self.cache),
            rows: Some(&self.alive),
            real: real.as_ref(),
            hooks: self.plugs.hooks.as_deref_mut(),
            adapter,
            ..Pass::default()
        };
        self.model.last_logits(&ids, &mut pass)
    }

    /// Takes finished rows out of the batch.
    fn drop_finished(&mut self) -> Result<()> {
        let kept: Vec<i64> =
            (0..self.alive.len() as i64).filter(|&i| self.rows[self.alive[i as usize]].stop.is_none()).collect();
        if kept.len() == self.alive.len() {
            return Ok(());
        }
        if !kept.is_empty() {
            let select = |mask: &Tensor| mask.f_index_select(0, &Tensor::from_slice(&kept).f_to_device(mask.device())?);
            let adapted = self.adapted.as_ref().map(select).transpose()?;
            if !self.cache.is_empty() {
                self.cache.select_rows(&kept)?;
            }
            self.adapted = adapted;
        }
        self.alive = kept.iter().map(|&i| self.alive[i as usize]).collect();
        Ok(())
    }

    /// Ends a row before its time.
    pub fn end(&mut self, row: usize) {
        if let Some(row) = self.rows.get_mut(row) {
            row.stop.get_or_insert(StopReason::Caller);
        }
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What was generated, in the order of the prompts.
    pub fn finish(self) -> Vec<Generation> {
        let text = |row: Row| Generation {
            tokens: row.tokens,
            log_probs: row.log_probs,
            stop: row.stop.unwrap_or(StopReason::Caller),
        };
        self.rows.into_iter().map(text).collect()
    }
}

impl Row {
    /// The next token, and the sampler that has drawn it.
    fn choose(
        &self,
        number: usize,
        logits: &mut [f32],
        normalizer: f64,
        processors: &mut [&mut dyn LogitsProcessor],
    ) -> Result<(Token, Sampler)> {
        let step = self.tokens.len();
        let bad = |logits: &[f32]| {
            let value = logits.iter().find(|z| z.is_nan() || **z == f32::INFINITY).copied();
            Error::NonFiniteLogits { step, row: number, value: value.map_or(f64::NEG_INFINITY, f64::from) }
        };
        // A plug may forbid tokens with −∞; what can't be is NaN, +∞ or nothing at all.
        if logits.iter().any(|z| z.is_nan() || *z == f32::INFINITY) {
            return Err(bad(logits));
        }
        let raw = if processors.is_empty() { Vec::new() } else { logits.to_vec() };
        let info = StepInfo { step, row: number, prompt: &self.prompt, generated: &self.tokens };
        for processor in processors {
            processor.process(logits, &info)?;
        }
        let mut sampler = self.sampler.clone();
        let id = sampler.draw(logits).ok_or_else(|| bad(logits))?;
        let raw = raw.get(id as usize).unwrap_or(&logits[id as usize]);
        let log_prob = f64::from(*raw) - normalizer;
        Ok((Token { row: number, id, log_prob }, sampler))
    }
}
