//! One language model with every plug built so far, in one generation.
//!
//!     cargo xtask data fetch smollm2
//!     cargo run --release -p benches --example compose
//!
//! SmolLM2-135M with: packed weights (`LinearLayer`), the plain attention formula (`AttentionKernel`), a map of `steering-ot` and a
//! hook that measures the residual stream (`ResidualHook`), a LoRA adapter, a cache of one's own (`KvStore`, the default one here), a
//! rule that forbids repeated words and AAD of `aligned-decoding`, for which the bare model is the reference
//! (`LogitsProcessor`). Routers and expert stores need a model with experts: the crate's `tests/sockets.rs` has them.

use aligned_decoding::AadConfig;
use aligned_decoding::processor::AadProcessor;
use anyhow::{Context as _, Result};
use lm::activations::{CollectConfig, Pooling};
use lm::attention::PlainAttention;
use lm::cache::GrowingKv;
use lm::generate::{GenerateConfig, NoRepeatNgram, Plugs};
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::lora::{Adapter, Layers, LoraConfig};
use lm::{Lm, LoadOptions, Weights};
use std::io::Write as _;
use std::ops::ControlFlow;
use steering_ot::model::{SteeringPlan, activations_at};
use steering_ot::{CharsConfig, CharsMap};
use tensor::tch::{Kind, Tensor};

const SAD: [&str; 4] = [
    "The film was a complete waste of time.",
    "I hate this phone, it broke on the first day.",
    "What a terrible, boring evening.",
    "The service was slow and the food was cold.",
];
const GLAD: [&str; 4] = [
    "The film was a wonderful surprise.",
    "I love this phone, it works perfectly every day.",
    "What a lovely, exciting evening.",
    "The service was friendly and the food was great.",
];

fn main() -> Result<()> {
    tensor::threads::set(tensor::threads::available())?;
    let path = datasets::smollm2::path().context("the model isn't in the cache")?;
    let mut lm = Lm::load(&path, &LoadOptions { weights: Weights::Packed, ..LoadOptions::default() })?;
    lm.model.set_attention(Box::new(PlainAttention));

    // A new adapter adds exactly nothing: B is 0.
    let config = LoraConfig { rank: 8, layers: Layers::Top(4), ..LoraConfig::default() };
    let adapter = Adapter::new(lm.model.config(), &config, lm.model.kind(), lm.model.device())?;

    // Two clusters a side, from a handful of sentences: enough to see the plug at work.
    let site = Site::ResidPost(15);
    let read = CollectConfig { sites: vec![site], pooling: Pooling::Last, ..CollectConfig::default() };
    let side = |texts: &[&str]| -> Result<_> { Ok(activations_at(&lm.activations(texts, &read)?, site)?) };
    let map = CharsMap::fit(side(&SAD)?.view(), side(&GLAD)?.view(), &CharsConfig::default().with_clusters(2))?;
    let mut plan = SteeringPlan { alpha: 2.0, ..SteeringPlan::at(site, map) };
    plan.check(&lm.model)?;

    let mut largest = 0f64;
    let mut measure = |_: Site, x: &Tensor, tokens: &TokenInfo<'_>| {
        // Position 0 is an attention sink, a hundred times as large as all others.
        let norms = x.f_norm_scalaropt_dim(2.0, [-1i64].as_slice(), false)? * tokens.positions.gt(0);
        largest = largest.max(norms.to_kind(Kind::Double).max().double_value(&[]));
        Ok(None)
    };
    let mut hooks = Hooks::new().on(&[site], &mut plan).on(&[site], &mut measure);
    let mut no_repeats = NoRepeatNgram(3);
    let mut aad = AadProcessor::new(&lm.model, lm.model.device(), &AadConfig { alpha: 0.3, ..AadConfig::default() })?;
    let plugs = Plugs {
        hooks: Some(&mut hooks),
        processors: vec![&mut no_repeats, &mut aad],
        adapter: Some(adapter.view()),
        store: Some(Box::new(GrowingKv::new(lm.model.config().layers))),
    };
    let prompt = "Once upon a time";
    print!("{prompt}");
    let settings = GenerateConfig { max_new_tokens: 40, ..GenerateConfig::default() };
    let text = lm.stream(&lm.encode(prompt)?, &settings, plugs, |text| {
        print!("{text}");
        let _ = std::io::stdout().flush();
        ControlFlow::Continue(())
    })?;
    println!();
    println!(
        "{} tokens; embeddings of {} rows in {:.0} MB; the steered residual stream after layer 15 is at most {largest:.0} long; \
         {} edits",
        text.tokens.len(),
        lm.model.embedding().out_features(),
        lm.model.embedding().bytes() as f64 / 1e6,
        plan.edited
    );
    Ok(())
}
