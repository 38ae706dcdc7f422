//! Makes a policy and its reference from SmolLM2 and human ratings of sentiment, and decodes with both: supervised fine-tuning on short
//! texts, preference training toward the friendly ones, then the same prompts by four rules. Under two minutes on two cores.
//!
//!     cargo xtask data fetch smollm2 vader-sentiment
//!     cargo run --release -p aligned-decoding --features lm --example aligned
//!
//! What it shows is small on purpose: a few texts, a few steps. The experiment is in `benches`.

use aligned_decoding::dpo::{
    Decoder, DpoConfig, DpoTrainer, Example, OptimizerConfig, PreferencePair, SftConfig, SftTrainer, score_pairs,
};
use aligned_decoding::lora::{Adapter, Layers, LoraConfig};
use aligned_decoding::{AadConfig, Generation, ModelPair, Rule, generate};
use anyhow::{Context as _, Result};
use clap::Parser;
use datasets::vader_sentiment::{self, Domain, Rated};
use lm::{Lm, LoadOptions};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Instant;

#[derive(Debug, Parser)]
#[command(about = "Trains a small pair on ratings of sentiment and decodes with it")]
struct Arguments {
    /// Texts for fine-tuning, half of them friendly.
    #[arg(long, default_value_t = 96)]
    texts: usize,
    /// Pairs for preference training.
    #[arg(long, default_value_t = 24)]
    pairs: usize,
    /// Steps of fine-tuning.
    #[arg(long, default_value_t = 30)]
    sft_steps: u64,
    /// Steps of preference training.
    #[arg(long, default_value_t = 14)]
    dpo_steps: u64,
    /// A token is plausible if the policy finds it at least this many times as probable as its favourite.
    #[arg(long, default_value_t = 0.1)]
    alpha: f64,
    /// Threads; by default all cores.
    #[arg(long)]
    threads: Option<usize>,
}

/// Tokens of a text; the token between texts is the prompt of all.
const LENGTH: usize = 20;
const START: u32 = 0;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    lm::tensor::threads::set(arguments.threads.unwrap_or_else(lm::tensor::threads::available))?;
    let path = datasets::smollm2::path().context("the model isn't in the cache")?;
    let lm = Lm::load(&path, &LoadOptions::default())?;
    let (model, start) = (&lm.model, Instant::now());
    let progress = |what: &str| eprintln!("{:>4.0} s  {what}", start.elapsed().as_secs_f64());

    // Sentences of film reviews, by their ratings.
    let rated = vader_sentiment::load().context("the ratings aren't in the cache")?;
    let wanted = |r: &&Rated| r.domain == Domain::Movies && r.text.len() > 30;
    let tokens = |r: &Rated| -> Result<Vec<u32>> {
        let mut tokens = lm.tokenizer.encode(&r.text, false)?;
        tokens.truncate(LENGTH);
        Ok(tokens)
    };
    let pick = |good: bool, skip: usize, n: usize| -> Result<Vec<Vec<u32>>> {
        let fits = |r: &&Rated| if good { r.rating >= 1.5 } else { r.rating <= -1.2 };
        rated.iter().filter(wanted).filter(fits).step_by(5).skip(skip).take(n).map(tokens).collect()
    };
    let half = arguments.texts / 2;
    let prompt = vec![START];
    let mut learned = pick(true, 0, half)?;
    learned.extend(pick(false, 0, half)?);
    let examples = learned.into_iter().map(|completion| Example { prompt: prompt.clone(), completion });
    let examples: Vec<Example> = examples.collect();
    // Sorted by length and zipped: preference training must not learn length.
    let sorted = |good| -> Result<Vec<Vec<u32>>> {
        let mut texts = pick(good, half, arguments.pairs)?;
        texts.sort_by_key(Vec::len);
        Ok(texts)
    };
    let pairs = sorted(true)?.into_iter().zip(sorted(false)?);
    let pairs = pairs.map(|(chosen, rejected)| PreferencePair { prompt: prompt.clone(), chosen, rejected });
    let pairs: Vec<PreferencePair> = pairs.collect();

    // Only tokens that the corpus has: rare ones have ratios that nobody trained, and would win by chance.
    let mut counts = HashMap::<u32, usize>::new();
    for r in &rated {
        for id in lm.tokenizer.encode(&r.text, false)? {
            *counts.entry(id).or_default() += 1;
        }
    }
    let mut frequent: Vec<u32> = counts.keys().copied().collect();
    frequent.sort_by_key(|id| (std::cmp::Reverse(counts[id]), *id));
    frequent.truncate(8000);

    // Supervised fine-tuning of an adapter on the top four layers; what enters them is computed once.
    let top = LoraConfig { layers: Layers::Top(4), ..LoraConfig::default() };
    let sft = Adapter::new(model.config(), &top, model.kind(), model.device())?;
    let mut decoder = Decoder::new(model, Some(&sft)).frozen_below(sft.first_layer())?;
    let optimizer = OptimizerConfig { lr: 1e-3, steps: arguments.sft_steps, ..OptimizerConfig::default() };
    let config = SftConfig { optimizer, batch: 8, part: 8, ..SftConfig::default() };
    let logs = SftTrainer::new(config, examples, sft.parameters())?.run(&mut decoder, |_| ControlFlow::Continue(()))?;
    let (first, last) = (logs.first().context("no steps")?, logs.last().context("no steps")?);
    progress(&format!("fine-tuned: {:.2} to {:.2} nats a token", first.update.loss, last.update.loss));

    // Preference training from a copy of it. The reference is the adapter, not the bare model.
    let policy = sft.copy()?;
    let mut decoder = Decoder::new(model, Some(&sft)).frozen_below(sft.first_layer())?;
    let config = DpoConfig {
        optimizer: OptimizerConfig { lr: 3e-4, steps: arguments.dpo_steps, ..OptimizerConfig::default() },
        batch: 4,
        part: 4,
        ..DpoConfig::default()
    };
    let reference = score_pairs(&mut decoder, &pairs, &config.layout, config.part)?;
    let mut decoder = decoder.with_adapter(Some(&policy))?;
    let mut trainer = DpoTrainer::new(config, pairs, &reference, policy.parameters())?;
    let logs = trainer.run(&mut decoder, |_| ControlFlow::Continue(()))?;
    let (first, last) = (logs.first().context("no steps")?, logs.last().context("no steps")?);
    progress(&format!(
        "preferences: loss {:.3} to {:.3}, margin {:.2}, {:.0} % right",
        first.update.loss,
        last.update.loss,
        last.margin,
        100.0 * last.accuracy
    ));

    // The layers below the adapters run once for both models.
    let pair = ModelPair::lora(model, policy.view(), Some(sft.view()))?;
    let starts = ["The film is", "I think that this", "The main actor", "After an hour of"];
    let prompts = starts.map(|text| lm.tokenizer.encode(text, false).map(|ids| [&prompt[..], &ids].concat()));
    let prompts = prompts.into_iter().collect::<lm::Result<Vec<_>>>()?;
    let config =
        AadConfig { max_new_tokens: 16, no_repeat_ngram: Some(3), allowed: Some(frequent), ..AadConfig::default() };
    let alpha = arguments.alpha;
    let rules = [
        ("reference".to_owned(), Rule::GreedyRef, alpha),
        ("policy".to_owned(), Rule::GreedyDpo, alpha),
        (format!("aligned {alpha}"), Rule::Aad, alpha),
        (format!("aligned {:.1}", (3.0 * alpha).min(1.0)), Rule::Aad, (3.0 * alpha).min(1.0)),
    ];
    let mut decoded: Vec<(String, Vec<Generation>)> = Vec::new();
    for (name, rule, alpha) in rules {
        decoded.push((name, generate(&pair, &prompts, &config.with_rule(rule).with_alpha(alpha))?));
    }
    progress("decoded");
    for (row, text) in starts.into_iter().enumerate() {
        println!("\n{text} …");
        for (name, generations) in &decoded {
            let g = &generations[row];
            println!(
                "  {name:<11} A {:>5.1}, {:.1} nats a token:{}",
                g.sum_advantage.unwrap_or(f64::NAN),
                g.ref_nll().unwrap_or(f64::NAN),
                lm.decode(&g.tokens)?.replace('\n', " ")
            );
        }
    }
    Ok(())
}
