//! Steers SmolLM2 from negative towards positive sentiment: fits a map on rated snippets, finds the strength for a budget of fluency,
//! and shows texts before and after with what they cost.
//!
//!     cargo xtask data fetch smollm2 vader-sentiment
//!     cargo run --release -p steering-ot --features lm --example steer
//!     cargo run --release -p steering-ot --features lm --example steer -- --budget 0.4 "The room was" "My phone"

use anyhow::{Context as _, Result};
use clap::Parser;
use datasets::vader_sentiment::{self, Domain};
use lm::generate::{GenerateConfig, Generation, Plugs};
use lm::{Lm, LoadOptions};
use std::ops::ControlFlow;
use steering_ot::baselines::DiM;
use steering_ot::calibrate::{Measured, calibrate};
use steering_ot::cards::cluster_cards;
use steering_ot::model::{
    CollectConfig, Pooling, Site, SteeringPlan, activations_at, collect_activations, continuation_nll,
};
use steering_ot::{CharsConfig, CharsMap, Steer};

#[derive(Debug, Parser)]
#[command(about = "Steers SmolLM2 towards positive sentiment")]
struct Arguments {
    /// Beginnings of texts.
    prompts: Vec<String>,
    /// How much less likely the steered text may be under the model that isn't steered, nats a token.
    #[arg(long, default_value_t = 0.3)]
    budget: f64,
    /// The layer after which the residual stream is moved.
    #[arg(long, default_value_t = 15)]
    layer: usize,
    /// Snippets of each domain and side for the fit.
    #[arg(long, default_value_t = 60)]
    snippets: usize,
    /// Adds one vector, the difference in means, instead of the map.
    #[arg(long)]
    vector: bool,
    /// Where the plan is written, to be used again with `SteeringPlan::load`.
    #[arg(long)]
    save: Option<std::path::PathBuf>,
    /// Seed of clusters and draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Tokens that are generated.
const NEW: usize = 24;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let path = datasets::smollm2::path().context("the example steers SmolLM2")?;
    let lm = Lm::load(&path, &LoadOptions::default())?;

    // 1. Two sets of activations: snippets that people rated as negative, and as positive.
    let rated = vader_sentiment::load()?;
    let side = |sign: f64| -> Vec<String> {
        let fits = |r: &&vader_sentiment::Rated| sign * r.rating >= 1.0 && (30..=140).contains(&r.text.chars().count());
        Domain::ALL
            .iter()
            .flat_map(|domain| {
                let of = rated.iter().filter(|r| r.domain == *domain).filter(fits);
                of.step_by(5).take(arguments.snippets).map(|r| r.text.clone()).collect::<Vec<_>>()
            })
            .collect()
    };
    let (negative, positive) = (side(-1.0), side(1.0));
    let site = Site::ResidPost(arguments.layer);
    let config = CollectConfig { sites: vec![site], pooling: Pooling::Last, ..CollectConfig::default() };
    let cache = datasets::cache::cache_dir()?.join("activations");
    println!("Reading {} negative and {} positive snippets …", negative.len(), positive.len());
    let source = activations_at(&collect_activations(&lm, &negative, &config, Some(&cache))?, site)?;
    let target = activations_at(&collect_activations(&lm, &positive, &config, Some(&cache))?, site)?;

    // 2. The map, and what it says of itself.
    let settings = CharsConfig { seed: arguments.seed, ..CharsConfig::default() };
    let map = CharsMap::fit(source.view(), target.view(), &settings)?;
    let report = map.diagnostics();
    println!(
        "{} clusters a side; the plan tells {:.2} nats of where a cluster goes; an input follows {:.1} clusters.",
        report.source.clusters, report.plan_mutual_information, report.effective_clusters
    );
    for warning in &report.warnings {
        println!("Warning: {warning}");
    }
    println!("\nThe two largest clusters and where they go:");
    let mut cards = cluster_cards(&map, source.view(), target.view(), &negative, &positive, 2)?;
    cards.sort_by(|a, b| b.mass.total_cmp(&a.mass));
    for card in cards.iter().take(2) {
        for text in &card.texts {
            println!("  − {}", text.text);
        }
        for text in card.matches.iter().take(1).flat_map(|to| &to.texts) {
            println!("    → {}", text.text);
        }
    }

    // 3. The strength for the budget: on prompts of its own, with the same draws for every strength.
    let chosen: Box<dyn Steer> =
        if arguments.vector { Box::new(DiM::fit(source.view(), target.view())?) } else { Box::new(map) };
    let mut plan = SteeringPlan::new(vec![steering_ot::model::SiteMap { site, map: chosen.into() }]);
    plan.model = Some(lm.model.fingerprint()?);
    plan.check(&lm.model)?;
    let held_out: Vec<Vec<u32>> = rated
        .iter()
        .filter(|r| r.rating <= -1.0 && (30..=140).contains(&r.text.chars().count()))
        .skip(3)
        .step_by(400)
        .take(12)
        .map(|r| Ok(lm.encode(&r.text)?.into_iter().take(6).collect()))
        .collect::<Result<_>>()?;
    println!("\nLooking for the strength that costs {} nats a token …", arguments.budget);
    let calibration = calibrate(&[1.0, 2.0, 3.0, 4.0], arguments.budget, arguments.seed, |alpha| {
        plan.alpha = alpha;
        let texts = continued(&lm, &held_out, &mut plan, arguments.seed)
            .map_err(|error| steering_ot::Error::invalid("the generation", "one that works", error))?;
        let nll = likelihoods(&lm, &held_out, &texts)?;
        // There is no judge of sentiment here, and only the price is asked for: it stands in the effect's place too.
        Ok(Measured { effect: nll.clone(), nll })
    })?;
    for point in &calibration.points {
        println!(
            "  α = {}: {:+.2} nats a token [{:+.2}, {:+.2}]",
            point.alpha, point.nll.estimate, point.nll.low, point.nll.high
        );
    }
    plan.alpha = calibration.alpha;
    println!("α = {:.2}{}", plan.alpha, if calibration.at_end { ", the largest that was tried" } else { "" });
    if let Some(path) = &arguments.save {
        plan.save(path)?;
        println!("The plan is in {}.", path.display());
    }

    // 4. Before and after.
    let prompts = match arguments.prompts.as_slice() {
        [] => ["The film was", "I bought this camera and", "My day at work", "The government's new plan"]
            .map(String::from)
            .to_vec(),
        given => given.to_vec(),
    };
    let ids = prompts.iter().map(|prompt| Ok(lm.encode(prompt)?)).collect::<Result<Vec<_>>>()?;
    plan.edited = 0;
    let after = continued(&lm, &ids, &mut plan, arguments.seed)?;
    let edited = plan.edited;
    plan.alpha = 0.0;
    let before = continued(&lm, &ids, &mut plan, arguments.seed)?;
    let (nll_before, nll_after) = (likelihoods(&lm, &ids, &before)?, likelihoods(&lm, &ids, &after)?);
    for (i, prompt) in prompts.iter().enumerate() {
        let shown = |text: &Generation| -> Result<String> { Ok(lm.decode(&text.tokens)?.replace('\n', " ")) };
        println!("\n{prompt}");
        println!("  before ({:.2} nats a token): …{}", nll_before[i], shown(&before[i])?);
        println!("  after  ({:.2} nats a token): …{}", nll_after[i], shown(&after[i])?);
    }
    println!("\n{edited} activations were edited.");
    Ok(())
}

/// Continues prompts under the plan, with the same draws each time.
fn continued(lm: &Lm, prompts: &[Vec<u32>], plan: &mut SteeringPlan, seed: u64) -> Result<Vec<Generation>> {
    let config = GenerateConfig {
        max_new_tokens: NEW,
        temperature: 0.7,
        ignore_checkpoint_stop: true,
        seed,
        ..GenerateConfig::default()
    };
    let mut hooks = plan.hooks()?;
    let plugs = Plugs { hooks: Some(&mut hooks), ..Plugs::default() };
    Ok(lm.generate_tokens(prompts, &config, plugs, |_| ControlFlow::Continue(()))?)
}

/// Negative log-likelihood of each continuation under the model that isn't steered, nats a token.
fn likelihoods(lm: &Lm, prompts: &[Vec<u32>], texts: &[Generation]) -> steering_ot::Result<Vec<f64>> {
    let pairs: Vec<(&[u32], &[u32])> =
        prompts.iter().zip(texts).map(|(prompt, text)| (&prompt[..], &text.tokens[..])).collect();
    continuation_nll(&lm.model, &pairs)
}
