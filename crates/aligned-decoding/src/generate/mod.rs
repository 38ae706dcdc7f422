//! Decoding with a pair: batches of prompts, padded on the left, a token at a time for all rows that aren't finished.
//!
//! The reference is run as late as the settings allow ([`ReferenceMode`]), with the same tokens in every mode. A batch has one queue of
//! tokens that the reference has still to read; it is emptied as soon as one row needs the reference, because rows of a cache have one
//! length. So the more rows, the less there is to save.
//!
//! A warning comes with the texts if the mean |A| over the prompts' tokens is above 5 nats: the reference is then probably not the model
//! that this policy was trained from.

mod record;

pub use record::{Generation, Stats, StepTrace, TraceCandidate, Warning};

use crate::config::{AadConfig, Needs, ReferenceMode, StopReason};
use crate::engine::{CaughtUp, Engine, Heads, normalizers, values};
use crate::guard::{Guard, Verdict};
use crate::pair::ModelPair;
use crate::rules::{Chooser, RefLogits, repeating};
use crate::select::Choice;
use crate::{Error, Result};
use lm::generate::left_pad;
use lm::model::CausalLm;
use rand::Rng as _;
use record::{Row, Scored};
use std::collections::VecDeque;
use tensor::Seed;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// A token as it comes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Token {
    /// Row of the batch, as the prompts were given.
    pub row: usize,
    /// The token.
    pub id: u32,
    /// What the policy alone would have taken.
    pub policy_top: u32,
    /// Number of candidates, |V_α|.
    pub candidates: usize,
    /// Advantage above that of the policy's own token, in nats; 0 where both are one or the rule had no need of the reference.
    pub gain: f64,
}

/// Generates a text for each prompt, token by token as [`Decoding`] does.
///
/// # Errors
/// As [`Decoding::new`] and [`Decoding::step`].
pub fn generate<P: CausalLm, R: CausalLm>(
    pair: &ModelPair<P, R>,
    prompts: &[Vec<u32>],
    config: &AadConfig,
) -> Result<Vec<Generation>> {
    let mut decoding = Decoding::new(pair, prompts, config)?;
    while decoding.step()?.is_some() {}
    decoding.finish()
}

/// The tokens of all rows as they come. After an error it ends.
///
/// # Errors
/// As [`Decoding::new`]; the iterator's items as [`Decoding::step`].
pub fn stream<'p, P: CausalLm, R: CausalLm>(
    pair: &'p ModelPair<P, R>,
    prompts: &[Vec<u32>],
    config: &AadConfig,
) -> Result<Stream<'p, P, R>> {
    // Log-probabilities come at the end of a text, and nobody will ask for them here.
    let config = AadConfig { scores: false, trace: false, ..config.clone() };
    Ok(Stream { decoding: Decoding::new(pair, prompts, &config)?, ready: VecDeque::new(), ended: false })
}

/// What [`stream`] gives.
#[derive(Debug)]
pub struct Stream<'p, P: CausalLm, R: CausalLm> {
    decoding: Decoding<'p, P, R>,
    ready: VecDeque<Token>,
    ended: bool,
}

impl<P: CausalLm, R: CausalLm> Stream<'_, P, R> {
    /// Ends a row before its time.
    pub fn end(&mut self, row: usize) {
        self.decoding.end(row);
        self.ready.retain(|token| token.row != row);
    }
}

impl<P: CausalLm, R: CausalLm> Iterator for Stream<'_, P, R> {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ready.is_empty() && !self.ended {
            match self.decoding.step() {
                Ok(Some(tokens)) => self.ready.extend(tokens),
                Ok(None) => self.ended = true,
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        self.ready.pop_front().map(Ok)
    }
}

/// A decoding under way.
#[derive(Debug)]
pub struct Decoding<'p, P: CausalLm, R: CausalLm> {
    pair: &'p ModelPair<P, R>,
    config: AadConfig,
    heads: Heads,
    engine: Engine<'p, P, R>,
    /// Places of the tokens that are never chosen.
    banned: Vec<u32>,
    rows: Vec<Row>,
    /// Rows that aren't finished, in the order of the caches' rows.
    alive: Vec<usize>,
    device: Option<Device>,
    warning: Option<Warning>,
    broken: bool,
}

/// Mean |A| over the prompts, in nats a token, from which on two models are hardly a pair.
pub const NOT_A_PAIR: f64 = 5.0;

/// Most tokens of the prompts that are looked at for it: the heads of both models are run for them.
const CHECKED_TOKENS: usize = 64;

impl<'p, P: CausalLm, R: CausalLm> Decoding<'p, P, R> {
    /// Checks prompts and settings; nothing is computed yet.
    ///
    /// # Errors
    /// As [`AadConfig::validate`]; [`Error::EmptyPrompt`]; [`Error::ContextOverflow`] for a prompt longer than a model's context;
    /// [`Error::TokenOutOfRange`] for a token of a prompt or of the settings that the pair doesn't have.
    pub fn new(pair: &'p ModelPair<P, R>, prompts: &[Vec<u32>], config: &AadConfig) -> Result<Self> {
        config.validate()?;
        if prompts.is_empty() {
            return Err(Error::EmptyPrompt { row: 0 });
        }
        prompts.iter().enumerate().try_for_each(|(row, prompt)| pair.check_text(row, prompt, &[]))?;
        let heads = Heads::new(config.allowed.as_deref(), pair.tokens())?;
        let seed = Seed::new(config.seed).child("aligned-decoding");
        let mut rows = Vec::with_capacity(prompts.len());
        for (number, prompt) in prompts.iter().enumerate() {
            let chooser = Chooser::new(config.rule, config.ratio_clip)?;
            let guard = config.guard.clone().map(Guard::new).transpose()?;
            let mut row = Row::new(prompt.clone(), chooser, config.alpha, guard, seed.index(number as u64));
            row.stop = (config.max_new_tokens == 0).then_some(StopReason::Length);
            rows.push(row);
        }
        // Where nothing asks for the reference, it isn't run at all.
        let follows = config.rule.needs() != Needs::Policy || config.scores || config.guard.is_some();
        Ok(Self {
            pair,
            banned: config.banned.iter().filter_map(|&id| heads.place(id)).collect(),
            heads,
            engine: Engine::new(pair, follows),
            config: config.clone(),
            alive: (0..rows.len()).filter(|&r| rows[r].stop.is_none()).collect(),
            rows,
            device: None,
            warning: None,
            broken: false,
        })
    }

    /// The next token of every row that isn't finished; none when all are.
    ///
    /// # Errors
    /// What the models report; [`Error::NonFiniteLogits`], [`Error::NothingAllowed`] with step and row. No further step is possible then.
    pub fn step(&mut self) -> Result<Option<Vec<Token>>> {
        if self.broken {
            return Err(Error::invalid("decoding", "one that can go on", "one that has failed: start another"));
        }
        let _guard = no_grad_guard();
        self.broken = true;
        let tokens = self.advance()?;
        self.broken = false;
        Ok(tokens)
    }

    fn advance(&mut self) -> Result<Option<Vec<Token>>> {
        self.drop_finished()?;
        if self.alive.is_empty() {
            return Ok(None);
        }
        let first = self.device.is_none();
        let (ids, real) = self.next_input()?;
        let hidden = self.engine.read(&ids, real.as_ref())?; // (alive, time, width)
        let mut caught_up = None;
        if first && self.config.check_pair && (self.config.scores || self.config.rule.needs() != Needs::Policy) {
            caught_up = self.engine.catch_up()?;
            if let Some(ref caught_up) = caught_up {
                self.check_pair(&hidden, &caught_up.hidden)?;
            }
        }
        let z_policy = self.heads.all(self.pair.policy(), &hidden.f_select(1, -1)?)?; // (alive, places)
        let mut z = values(&z_policy)?;
        let places = self.heads.places();
        for (z, &number) in z.chunks_exact_mut(places).zip(&self.alive) {
            let row = &mut self.rows[number];
            forbid(z, &self.banned, &row.text, self.config.no_repeat_ngram, &self.heads);
            row.chooser.candidates(z, row.alpha).map_err(|e| self.heads.located(e, row.tokens.len(), number))?;
        }
        let reference = self.ask_reference(caught_up, &hidden.f_select(1, -1)?, &z_policy)?;
        let choices = self.decide(&z, &reference)?;
        self.record(&z_policy, &reference, &choices).map(Some)
    }

    /// The prompts, or the last token of each row.
    fn next_input(&mut self) -> Result<(Tensor, Option<Tensor>)> {
        if let Some(device) = self.device {
            let last = self.alive.iter().map(|&r| self.rows[r].text.last().copied().map_or(0, i64::from));
            let last: Vec<i64> = last.collect();
            return Ok((Tensor::f_from_slice(&last)?.f_view([-1, 1])?.f_to_device(device)?, None));
        }
        let device = self.pair.device();
        self.device = Some(device);
        let prompts: Vec<Vec<u32>> = self.alive.iter().map(|&r| self.rows[r].text.clone()).collect();
        Ok(left_pad(&prompts, device)?)
    }

    /// Mean |A| over some tokens of the prompts, from all activations of both models over them.
    fn check_pair(&mut self, policy: &Tensor, reference: &Tensor) -> Result<()> {
        let a_row = (CHECKED_TOKENS / self.alive.len()).max(1);
        let time = policy.size()[1];
        let (mut sum, mut count) = (0.0, 0);
        for (i, &number) in self.alive.iter().enumerate() {
            let prompt = &self.rows[number].text;
            let n = (prompt.len() - 1).min(a_row).min(CHECKED_TOKENS - count.min(CHECKED_TOKENS));
            if n == 0 {
                continue;
            }
            let targets: Vec<i64> = prompt[prompt.len() - n..].iter().map(|&id| id.into()).collect();
            let score = |model: &dyn Fn(&Tensor) -> Result<Tensor>, hidden: &Tensor| {
                let before = hidden.f_select(0, i as i64)?.f_narrow(0, time - 1 - n as i64, n as i64)?; // (n, width)
                log_probs_of(&model(&before)?, &targets)
            };
            let every = Heads::new(None, self.pair.tokens())?;
            let ours = score(&|h| every.all(self.pair.policy(), h), policy)?;
            let theirs = score(&|h| every.all(self.pair.reference(), h), reference)?;
            sum += ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).sum::<f64>();
            count += n;
        }
        let mean = if count == 0 { 0.0 } else { sum / count as f64 };
        // A NaN is an error of the logits, which the step itself reports.
        self.warning = (mean > NOT_A_PAIR).then_some(Warning::NotAPair { mean });
        Ok(())
    }

    /// Runs the reference if it must be run now, and the part of its head that is needed.
    fn ask_reference(&mut self, before: Option<CaughtUp>, ours: &Tensor, z_policy: &Tensor) -> Result<RefStep> {
        let eager = self.config.reference == ReferenceMode::Eager || self.config.guard.is_some();
        let needs = if self.config.guard.is_some() { Needs::All } else { self.config.rule.needs() };
        let wanted = needs != Needs::Policy && self.alive.iter().any(|&r| self.rows[r].chooser.needs_reference());
        let now = needs != Needs::Policy
            && match self.config.reference {
                _ if eager => true,
                ReferenceMode::Eager | ReferenceMode::CandidateHead => true,
                ReferenceMode::Lazy { max_lag } => wanted || self.engine.lag() > max_lag,
            };
        let full = needs == Needs::All || (eager && needs != Needs::Policy);
        let caught_up = match before {
            Some(caught_up) => Some(caught_up),
            None if now => self.engine.catch_up()?,
            None => None,
        };
        let Some(caught_up) = caught_up else { return Ok(RefStep::NotNow) };
        let last = caught_up.hidden.f_select(1, -1)?; // (alive, width)
        self.note_reference(&caught_up, full)?;
        if full {
            let logits = self.heads.all(self.pair.reference(), &last)?;
            let normalizers = normalizers(&logits)?;
            return Ok(RefStep::All { z: values(&logits)?, logits, normalizers });
        }
        if !wanted {
            return Ok(RefStep::NotNow);
        }
        let candidates = self.alive.iter().filter(|r| self.rows[**r].chooser.needs_reference());
        let candidates = candidates.flat_map(|&r| self.rows[r].chooser.last_candidates().iter().map(|c| c.id));
        let mut union: Vec<u32> = candidates.collect();
        union.sort_unstable();
        union.dedup();
        // Gathering rows of the head costs more than reading it once there are many.
        if union.len() * 4 >= self.heads.places() {
            let logits = self.heads.all(self.pair.reference(), &last)?;
            let places = (0..self.heads.places() as u32).collect();
            return Ok(RefStep::Some { beyond: values(&logits.f_sub(z_policy)?)?, places });
        }
        // Rows of a head round otherwise than the head (and packed ones much otherwise): take both models' from rows.
        let theirs = self.heads.some(self.pair.reference(), &last, &union)?;
        let beyond = theirs.f_sub(&self.heads.some(self.pair.policy(), ours, &union)?)?;
        Ok(RefStep::Some { beyond: values(&beyond)?, places: union })
    }

    /// Counts a pass of the reference, and keeps its activations where log-probabilities will be asked for.
    fn note_reference(&mut self, caught_up: &CaughtUp, full: bool) -> Result<()> {
        let count = caught_up.ends.len();
        for (i, &number) in self.alive.iter().enumerate() {
            let row = &mut self.rows[number];
            row.note_pass(count);
            if !self.config.scores {
                continue;
            }
            // With all logits at hand the last is scored at once, unless its candidates are wanted too.
            let kept = if full && !self.config.trace { count - 1 } else { count };
            for &end in &caught_up.ends[..kept] {
                row.scored.push(Scored::Hidden(caught_up.hidden.f_select(0, i as i64)?.f_select(0, end)?));
            }
        }
        Ok(())
    }

    fn decide(&mut self, z: &[f32], reference: &RefStep) -> Result<Vec<Choice>> {
        let places = self.heads.places();
        let mut choices = Vec::with_capacity(self.alive.len());
        for (i, &number) in self.alive.iter().enumerate() {
            let row = &mut self.rows[number];
            let z = &z[i * places..(i + 1) * places];
            let uniform = if self.config.rule.is_random() { row.rng.random() } else { 0.0 };
            let at = row.tokens.len();
            let choice = match reference {
                RefStep::All { z: z_ref, .. } => {
                    let mut z_ref = z_ref[i * places..(i + 1) * places].to_vec();
                    forbid(&mut z_ref, &self.banned, &row.text, self.config.no_repeat_ngram, &self.heads);
                    row.chooser.decide(z, RefLogits::All(&z_ref), uniform)
                }
                RefStep::Some { beyond, places: union } if row.chooser.needs_reference() => {
                    let beyond = &beyond[i * union.len()..(i + 1) * union.len()];
                    // Both lists rise, and the union has every candidate.
                    let mut at = 0;
                    let candidates = row.chooser.last_candidates().iter().map(|c| {
                        at += union[at..].iter().position(|&place| place == c.id).unwrap_or(0);
                        c.z + beyond[at]
                    });
                    let candidates: Vec<f32> = candidates.collect();
                    row.chooser.decide(z, RefLogits::Candidates(&candidates), uniform)
                }
                RefStep::NotNow | RefStep::Some { .. } => row.chooser.decide(z, RefLogits::None, uniform),
            };
            choices.push(choice.map_err(|e| self.heads.located(e, at, number))?);
        }
        Ok(choices)
    }

    fn record(&mut self, z_policy: &Tensor, reference: &RefStep, choices: &[Choice]) -> Result<Vec<Token>> {
        let chosen: Vec<i64> = choices.iter().map(|c| c.token.into()).collect();
        let chosen = Tensor::f_from_slice(&chosen)?.f_view([-1, 1])?;
        let score = |logits: &Tensor, normalizers: &[f64]| -> Result<Vec<f64>> {
            let z = logits.f_gather(1, &chosen.f_to_device(logits.device())?, false)?.f_view([-1])?;
            let z = Vec::<f64>::try_from(&z.f_to_kind(Kind::Double)?)?;
            Ok(z.iter().zip(normalizers).map(|(z, n)| z - n).collect())
        };
        let scores = self.config.scores || self.config.guard.is_some();
        let normalizer = if scores { normalizers(z_policy)? } else { Vec::new() };
        let ours = if scores { score(z_policy, &normalizer)? } else { Vec::new() };
        let theirs = match reference {
            RefStep::All { logits, normalizers, .. } if scores => score(logits, normalizers)?,
            _ => Vec::new(),
        };
        let context = self.pair.context();
        let mut tokens = Vec::with_capacity(choices.len());
        for (i, (&number, choice)) in self.alive.iter().zip(choices).enumerate() {
            let row = &mut self.rows[number];
            let (id, top) = (self.heads.id(choice.token), self.heads.id(choice.top));
            if self.config.trace {
                row.keep_step(choice, normalizer[i], ours[i]);
            }
            row.count(choice);
            row.text.push(id);
            row.tokens.push(id);
            if self.config.scores {
                row.policy.push(ours[i]);
                if !self.config.trace && !theirs.is_empty() {
                    row.scored.push(Scored::Done(theirs[i]));
                }
            }
            let prompt = row.text.len() - row.tokens.len();
            row.stop = self.config.stops(prompt, &row.tokens);
            if row.stop.is_none() && row.tokens.len() >= self.config.max_new_tokens {
                row.stop = Some(StopReason::Length);
            } else if row.stop.is_none() && row.text.len() as i64 > context {
                row.stop = Some(StopReason::Context);
            }
            if let (Some(guard), Some(theirs)) = (&mut row.guard, theirs.get(i))
                && guard.observe(id, ours[i] - theirs) != Verdict::Fine
            {
                match guard.react(row.alpha) {
                    Some(alpha) => row.alpha = alpha,
                    None => row.stop = row.stop.or(Some(StopReason::Guard)),
                }
            }
            tokens.push(Token { row: number, id, policy_top: top, candidates: choice.candidates, gain: choice.gain });
        }
        Ok(tokens)
    }

    /// Takes finished rows out of the batch. Those whose log-probabilities are wanted must have been read by the reference first.
    fn drop_finished(&mut self) -> Result<()> {
        let kept: Vec<i64> =
            (0..self.alive.len() as i64).filter(|&i| self.rows[self.alive[i as usize]].stop.is_none()).collect();
        if kept.len() == self.alive.len() {
            return Ok(());
        }
        if self.config.scores
            && let Some(caught_up) = self.engine.catch_up()?
        {
            self.note_reference(&caught_up, false)?;
        }
        if !kept.is_empty() && self.device.is_some() {
            self.engine.select_rows(&kept)?;
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

    /// What was generated, in the order of the prompts; rows that aren't finished end here.
    ///
    /// # Errors
    /// What the reference reports where it has still to read.
    pub fn finish(mut self) -> Result<Vec<Generation>> {
        let _guard = no_grad_guard();
        for row in &mut self.rows {
            row.stop.get_or_insert(StopReason::Caller);
        }
        if !self.broken {
            self.drop_finished()?;
        }
        let Self { pair, heads, rows, config, warning, .. } = self;
        let score = |hidden: &Tensor| heads.all(pair.reference(), hidden);
        rows.into_iter().map(|row| row.finish(&score, &heads, config.scores, warning)).collect()
    }
}

/// What a step knows of the reference.
enum RefStep {
    /// It wasn't run, or nobody asks.
    NotNow,
    /// All logits of the alive rows, with what normalizes them.
    All { z: Vec<f32>, logits: Tensor, normalizers: Vec<f64> },
    /// z_r − z_d `[alive, places]` of some places.
    Some { beyond: Vec<f32>, places: Vec<u32> },
}

/// Sets the logits of tokens to −∞ that are banned or would repeat.
fn forbid(z: &mut [f32], banned: &[u32], text: &[u32], ngram: Option<usize>, heads: &Heads) {
    let repeated = ngram.map(|n| repeating(text, n).filter_map(|id| heads.place(id)));
    for place in banned.iter().copied().chain(repeated.into_iter().flatten()) {
        z[place as usize] = f32::NEG_INFINITY;
    }
}

/// Log-probabilities of `targets` under logits `[n, places]`.
pub(crate) fn log_probs_of(logits: &Tensor, targets: &[i64]) -> Result<Vec<f64>> {
    let targets = Tensor::f_from_slice(targets)?.f_view([-1, 1])?.f_to_device(logits.device())?;
    let z = logits.f_gather(1, &targets, false)?.f_view([-1])?.f_to_kind(Kind::Double)?;
    let z = Vec::<f64>::try_from(&z)?;
    Ok(z.iter().zip(normalizers(logits)?).map(|(z, n)| z - n).collect())
}
