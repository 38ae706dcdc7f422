//! A pair for the experiments: SmolLM2 with an adapter of supervised fine-tuning, and a second adapter trained from it by DPO on pairs
//! of texts that people rated as positive and negative.

use super::super::sentiment::{domain_index, shuffled};
use super::oracle::{Oracle, correlation};
use crate::experiment::Context;
use anyhow::{Context as _, Result, ensure};
use datasets::vader_sentiment::{self, Rated};
use lm::generate::left_pad;
use lm::hooks::{Hooks, Site};
use lm::lora::{Adapter, Layers, LoraConfig};
use lm::model::{Model, Pass};
use lm::train::{
    Batch, DpoConfig, DpoLoss, DpoTrainer, Example, Layout, OptimizerConfig, Policy, PreferencePair, SftConfig,
    SftTrainer, score_pairs,
};
use lm::{Lm, LoadOptions};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::rc::Rc;
use tensor::Seed;
use tensor::tch::{Kind, Tensor, no_grad_guard};

/// The context of every text: the end-of-text token.
const START: u32 = 0;
/// Tokens of a text that is learned.
const LENGTH: usize = 20;
/// Layers with adapters, of 30.
const TOP: usize = 4;
/// Tokens that exist for the rules: the most frequent of the corpus.
const TOKENS: usize = 8000;
/// Tokens of a prompt after the start.
const PROMPT: usize = 4;
/// Beginnings of texts that a round of synthetic data is made from.
const ASKED: usize = 96;

/// How a pair is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Recipe {
    /// Draws texts, their order and the adapter's start.
    pub(super) seed: u64,
    pub(super) sft_steps: u64,
    pub(super) dpo_steps: u64,
    pub(super) beta: f64,
    /// Most preference pairs of a domain.
    pub(super) pairs: usize,
    /// Prompts of a domain.
    pub(super) prompts: usize,
}

impl Recipe {
    pub(super) fn full(seed: u64) -> Self {
        Self { seed, sft_steps: 80, dpo_steps: 40, beta: 0.1, pairs: 40, prompts: 20 }
    }

    pub(super) fn quick(seed: u64) -> Self {
        Self { seed, sft_steps: 6, dpo_steps: 8, beta: 0.1, pairs: 6, prompts: 2 }
    }
}

/// A trained pair with everything that is needed to decode with it and to judge what comes.
#[derive(Debug)]
pub(super) struct Trained {
    pub(super) lm: Rc<Lm>,
    /// The tokens that exist.
    pub(super) allowed: Vec<u32>,
    pub(super) sft: Adapter,
    pub(super) dpo: Adapter,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) oracle: Oracle,
    /// Beginnings of texts of the fine-tuning, to ask for more texts.
    pub(super) asked: Vec<Vec<u32>>,
    /// Loss of the first and the last step of preference training.
    pub(super) losses: (f64, f64),
}

thread_local! {
    static KNOWN: RefCell<Vec<(Recipe, Rc<Trained>)>> = const { RefCell::new(Vec::new()) };
    /// What enters the lowest adapted layer, by text: `[tokens, width]`. The layers below are never trained.
    static TRUNK: RefCell<HashMap<Vec<u32>, Tensor>> = RefCell::new(HashMap::new());
    static MODEL: RefCell<Option<(tensor::tch::Device, Rc<Lm>)>> = const { RefCell::new(None) };
}

/// The model, loaded once a process.
pub(super) fn smollm2(context: &Context) -> Result<Rc<Lm>> {
    MODEL.with_borrow_mut(|known| match known {
        Some((device, lm)) if *device == context.device => Ok(Rc::clone(lm)),
        _ => {
            let options = LoadOptions { device: context.device, ..LoadOptions::default() };
            let lm = Rc::new(Lm::load(&datasets::smollm2::path()?, &options)?);
            *known = Some((context.device, Rc::clone(&lm)));
            Ok(lm)
        }
    })
}

/// The pair of a recipe, trained once a process.
pub(super) fn trained(context: &Context, recipe: Recipe) -> Result<Rc<Trained>> {
    let known = KNOWN.with_borrow(|all| all.iter().find(|(r, _)| *r == recipe).map(|(_, pair)| Rc::clone(pair)));
    if let Some(pair) = known {
        return Ok(pair);
    }
    let pair = Rc::new(train(context, recipe)?);
    KNOWN.with_borrow_mut(|all| all.push((recipe, Rc::clone(&pair))));
    Ok(pair)
}

/// A text with its tokens.
struct Text {
    rated: Rated,
    ids: Vec<u32>,
}

/// The texts of a recipe.
struct Texts {
    pairs: Vec<PreferencePair>,
    sft: Vec<Example>,
    prompts: Vec<Vec<u32>>,
    oracle: Oracle,
    allowed: Vec<u32>,
}

fn texts(lm: &Lm, recipe: Recipe) -> Result<Texts> {
    let mut all = Vec::new();
    let mut counts: HashMap<u32, u64> = HashMap::new();
    for rated in vader_sentiment::load()? {
        let ids = lm.encode(&rated.text)?;
        for &id in &ids {
            *counts.entry(id).or_default() += 1;
        }
        all.push(Text { rated, ids });
    }
    let mut frequent: Vec<(u32, u64)> = counts.into_iter().collect();
    frequent.sort_by_key(|&(id, count)| (std::cmp::Reverse(count), id));
    let mut allowed: Vec<u32> = frequent.into_iter().take(TOKENS).map(|(id, _)| id).collect();
    allowed.sort_unstable();

    let seed = Seed::new(recipe.seed).child("texts");
    let mut used = vec![false; all.len()];
    let (mut pairs, mut sft, mut prompts) = (Vec::new(), Vec::new(), Vec::new());
    let mut paired = Vec::new();
    for domain in 0..4 {
        let order: Vec<usize> = {
            let of: Vec<usize> = (0..all.len())
                .filter(|&i| domain_index(all[i].rated.domain) == domain)
                .filter(|&i| (30..=140).contains(&all[i].rated.text.chars().count()))
                .collect();
            shuffled(of.len(), seed.index(domain as u64)).into_iter().map(|i| of[i]).collect()
        };
        let mut take = |wanted: usize, fits: &dyn Fn(&Text) -> bool| -> Vec<usize> {
            let chosen: Vec<usize> =
                order.iter().copied().filter(|&i| !used[i] && fits(&all[i])).take(wanted).collect();
            for &i in &chosen {
                used[i] = true;
            }
            chosen
        };
        let mut chosen = take(recipe.pairs, &|t| t.rated.rating >= 1.5);
        let mut rejected = take(chosen.len(), &|t| t.rated.rating <= -1.2);
        chosen.truncate(rejected.len());
        // Neighbours in length, so that length says nothing about which is preferred.
        for side in [&mut chosen, &mut rejected] {
            side.sort_by_key(|&i| all[i].ids.len());
        }
        paired.extend(chosen.iter().copied().zip(rejected.iter().copied()));
        let learned = take(120, &|t| t.rated.rating.abs() >= 1.0);
        let example = |i: usize| Example { prompt: vec![START], completion: cut(&all[i].ids) };
        sft.extend(learned.iter().chain(&chosen).chain(&rejected).map(|&i| example(i)));
        let asked = take(recipe.prompts, &|t| t.ids.len() > PROMPT);
        ensure!(asked.len() == recipe.prompts, "a domain has too few texts left for prompts");
        prompts.extend(asked.iter().map(|&i| [&[START], &all[i].ids[..PROMPT]].concat()));
    }
    for (chosen, rejected) in paired {
        pairs.push(PreferencePair {
            prompt: vec![START],
            chosen: cut(&all[chosen].ids),
            rejected: cut(&all[rejected].ids),
        });
    }
    // The judge learns from texts that nothing else has seen; every tenth of them tests it.
    let (mut known, mut held_out) = (Vec::new(), Vec::new());
    for (i, text) in all.iter().enumerate().filter(|(i, _)| !used[*i]) {
        if i % 10 == 0 { held_out.push(text) } else { known.push(text) }
    }
    let split = |texts: &[&Text]| -> (Vec<String>, Vec<f64>) {
        texts.iter().map(|t| (t.rated.text.clone(), t.rated.rating)).unzip()
    };
    let ((texts, ratings), (test, expected)) = (split(&known), split(&held_out));
    let oracle = Oracle::fit(&texts.iter().map(String::as_str).collect::<Vec<_>>(), &ratings)?;
    let found: Vec<f64> = test.iter().map(|text| oracle.score(text)).collect();
    let r = correlation(&found, &expected);
    ensure!(r > 0.6, "the judge's scores of held-out texts correlate with human ratings by {r:.3} only");
    Ok(Texts { pairs, sft, prompts, oracle, allowed })
}

fn cut(ids: &[u32]) -> Vec<u32> {
    ids[..ids.len().min(LENGTH)].to_vec()
}

fn train(context: &Context, recipe: Recipe) -> Result<Trained> {
    let lm = smollm2(context)?;
    let Texts { pairs, sft: examples, prompts, oracle, allowed } = texts(&lm, recipe)?;
    let model = &lm.model;
    let config = LoraConfig { layers: Layers::Top(TOP), seed: recipe.seed, ..LoraConfig::default() };
    let sft = Adapter::new(model.config(), &config, model.kind(), model.device())?;
    let asked = examples.iter().filter(|e| e.completion.len() > PROMPT).take(ASKED);
    let asked = asked.map(|e| [&[START], &e.completion[..PROMPT]].concat()).collect();
    let mut policy = Restricted::new(model, &sft, &allowed);
    let optimizer = OptimizerConfig { lr: 1e-3, steps: recipe.sft_steps, ..OptimizerConfig::default() };
    let settings = SftConfig { optimizer, seed: recipe.seed, ..SftConfig::default() };
    let mut trainer = SftTrainer::new(settings, examples, sft.parameters())?;
    trainer.run(&mut policy, |_| flow(context))?;
    context.check()?;
    drop(policy);
    let sft = sft.frozen_copy()?;
    let (dpo, losses) = prefer(context, model, &sft, &sft, &pairs, &allowed, recipe)?;
    Ok(Trained { allowed, sft, dpo, prompts, oracle, asked, losses, lm: Rc::clone(&lm) })
}

/// Goes on unless Ctrl-C was pressed.
fn flow(context: &Context) -> ControlFlow<()> {
    if context.check().is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Trains a copy of `start` by DPO with `reference`; the copy, and the first and the last loss.
pub(super) fn prefer(
    context: &Context,
    model: &Model,
    start: &Adapter,
    reference: &Adapter,
    pairs: &[PreferencePair],
    allowed: &[u32],
    recipe: Recipe,
) -> Result<(Adapter, (f64, f64))> {
    let scores = score_pairs(&mut Restricted::new(model, reference, allowed), pairs, &Layout::default(), 8)?;
    let dpo = start.copy()?;
    let settings = DpoConfig {
        optimizer: OptimizerConfig { lr: 3e-4, steps: recipe.dpo_steps, ..OptimizerConfig::default() },
        loss: DpoLoss { beta: recipe.beta, ..DpoLoss::default() },
        seed: recipe.seed,
        ..DpoConfig::default()
    };
    let mut trainer = DpoTrainer::new(settings, pairs.to_vec(), &scores, dpo.parameters())?;
    let logs = trainer.run(&mut Restricted::new(model, &dpo, allowed), |_| flow(context))?;
    context.check()?;
    let (first, last) = (logs.first().context("a step of DPO")?, logs.last().context("a step of DPO")?);
    Ok((dpo.frozen_copy()?, (first.update.loss, last.update.loss)))
}

/// A model with an adapter on its top layers, in training over some of its tokens only. What enters the lowest adapted layer is
/// computed once a text and process; tokens that don't exist count for nothing.
struct Restricted<'a> {
    model: &'a Model,
    adapter: &'a Adapter,
    /// The tokens that exist, `[tokens]` of i64.
    ids: Tensor,
    /// Place of each token of the vocabulary among them, −1 for the others.
    places: Tensor,
}

impl<'a> Restricted<'a> {
    fn new(model: &'a Model, adapter: &'a Adapter, allowed: &[u32]) -> Self {
        let mut places = vec![-1i64; model.config().vocab as usize];
        for (place, &id) in allowed.iter().enumerate() {
            places[id as usize] = place as i64;
        }
        let ids: Vec<i64> = allowed.iter().map(|&id| id.into()).collect();
        let place = |values: &[i64]| Tensor::from_slice(values).to_device(model.device());
        Self { model, adapter, ids: place(&ids), places: place(&places) }
    }

    /// What enters the lowest adapted layer, `[batch, time, width]`, with zeros for padding.
    fn entering(&self, batch: &Batch) -> lm::Result<Tensor> {
        let layer = self.adapter.first_layer();
        let (rows, time) = (batch.ids.size()[0], batch.ids.size()[1]);
        let mut texts = Vec::with_capacity(rows as usize);
        for row in 0..rows {
            let length = batch.real.f_get(row)?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
            let ids = Vec::<i64>::try_from(&batch.ids.f_get(row)?.f_narrow(0, time - length, length)?)?;
            texts.push(ids.into_iter().map(|id| id as u32).collect::<Vec<u32>>());
        }
        TRUNK.with_borrow_mut(|kept| {
            let mut missing: Vec<Vec<u32>> = texts.iter().filter(|text| !kept.contains_key(*text)).cloned().collect();
            missing.sort_unstable();
            missing.dedup();
            if !missing.is_empty() {
                let _guard = no_grad_guard();
                let (ids, real) = left_pad(&missing, self.model.device())?;
                let mut hooks = Hooks::new().stop_after(Site::ResidPre(layer));
                let mut pass = Pass { real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() };
                let x = self.model.hidden(&ids, &mut pass)?;
                for (row, text) in missing.into_iter().enumerate() {
                    let (longest, length) = (x.size()[1], text.len() as i64);
                    // A copy, so that the batch isn't kept for one of its texts.
                    let own = x.f_get(row as i64)?.f_narrow(0, longest - length, length)?.f_detach_copy()?;
                    kept.insert(text, own);
                }
            }
            let width = self.model.config().width;
            let out = Tensor::f_zeros([rows, time, width], (self.model.kind(), self.model.device()))?;
            for (row, text) in texts.iter().enumerate() {
                if let Some(x) = kept.get(text) {
                    let length = text.len() as i64;
                    out.f_get(row as i64)?.f_narrow(0, time - length, length)?.f_copy_(x)?;
                }
            }
            Ok(out)
        })
    }
}

impl Policy for Restricted<'_> {
    fn logits(&mut self, _: &Batch) -> lm::Result<Tensor> {
        Err(lm::Error::invalid("this policy", "asked for log-probabilities only", "asked for logits"))
    }

    fn log_probs(&mut self, batch: &Batch) -> lm::Result<Tensor> {
        let x = self.entering(batch)?;
        let device = self.model.device();
        let (real, counted) = (batch.real.f_to_device(device)?, batch.counted.f_to_device(device)?);
        let adapter = Some(self.adapter.view());
        let layer = self.adapter.first_layer();
        let hidden = self.model.hidden_from(layer, &x, &mut Pass { real: Some(&real), adapter, ..Pass::default() })?;
        let time = batch.ids.size()[1];
        let next = batch.ids.f_to_device(device)?.f_narrow(1, 1, time - 1)?; // (b, t − 1)
        let places = self.places.f_index_select(0, &next.f_reshape([-1])?)?; // (b·(t − 1))
        let counts = counted.f_narrow(1, 1, time - 1)?.f_reshape([-1])?.f_logical_and(&places.f_ge(0)?)?;
        let rows = counts.f_nonzero()?.f_squeeze_dim(-1)?; // (n)
        let before = hidden.f_narrow(1, 0, time - 1)?.f_reshape([-1, self.model.config().width])?;
        let logits = self.model.head_rows(&before.f_index_select(0, &rows)?, &self.ids)?; // (n, tokens)
        let chosen = places.f_index_select(0, &rows)?.f_unsqueeze(-1)?;
        let log_probs = logits.f_log_softmax(-1, Kind::Float)?.f_gather(-1, &chosen, false)?.f_squeeze_dim(-1)?;
        let all = Tensor::f_zeros([counts.numel() as i64], (Kind::Float, device))?;
        Ok(all.f_index_put(&[Some(&rows)], &log_probs, false)?.f_view([-1, time - 1])?)
    }
}
