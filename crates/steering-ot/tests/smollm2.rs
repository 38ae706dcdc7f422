//! The reference model, steered by maps fitted on real texts. Skipped where the model or the texts aren't in the cache.
#![cfg(feature = "lm")]

use datasets::vader_sentiment::{self, Domain};
use lm::activations::{CollectConfig, Pooling};
use lm::generate::left_pad;
use lm::hooks::Site;
use lm::model::Pass;
use lm::{Lm, LoadOptions};
use ndarray::{Array2, Axis};
use std::sync::{Mutex, OnceLock};
use steering_ot::model::{SteeringPlan, activations_at, collect_activations};
use steering_ot::{CharsConfig, CharsMap, Warning};
use tensor::tch::{Tensor, no_grad_guard};

const SITE: Site = Site::ResidPost(15);

/// Model, and snippets: negative ones, then as many positive ones.
struct Loaded {
    lm: Lm,
    snippets: Vec<String>,
}

impl Loaded {
    /// Activations of the negative and of the positive snippets, and the model's fingerprint.
    fn read(&self, pooling: Pooling) -> ([Array2<f32>; 2], String) {
        let config = CollectConfig { sites: vec![SITE], pooling, ..CollectConfig::default() };
        let store = collect_activations(&self.lm, &self.snippets, &config, None).unwrap();
        let all = activations_at(&store, SITE).unwrap();
        let (negative, positive) = all.view().split_at(Axis(0), self.snippets.len() / 2);
        ([negative.to_owned(), positive.to_owned()], store.model)
    }
}

/// The model and the texts, if they are there; says so if not. `TESSERA_REQUIRE_DATA` (names with commas between, set by
/// `cargo xtask test` for the sets that it has fetched) makes a missing set a failure.
fn load() -> Option<Loaded> {
    let path = datasets::smollm2::path_if_present().expect("the file is whole");
    let rated = vader_sentiment::load();
    let required = std::env::var("TESSERA_REQUIRE_DATA").unwrap_or_default();
    for (name, there) in [(datasets::smollm2::NAME, path.is_some()), (vader_sentiment::NAME, rated.is_ok())] {
        assert!(
            there || !required.split(',').any(|r| r == name),
            "the data set `{name}` is required, but it isn't in the cache"
        );
        if !there {
            eprintln!("skipped: the data set `{name}` isn't in the cache (cargo xtask data fetch {name})");
        }
    }
    let (path, rated) = (path?, rated.ok()?);
    let side = |sign: f64| {
        let fits = |r: &&vader_sentiment::Rated| sign * r.rating >= 1.0 && (30..=60).contains(&r.text.chars().count());
        let of = |domain: Domain| rated.iter().filter(move |r| r.domain == domain).filter(fits).take(4);
        Domain::ALL.into_iter().flat_map(of).map(|r| r.text.clone()).collect::<Vec<_>>()
    };
    let snippets = [side(-1.0), side(1.0)].concat();
    Some(Loaded { lm: Lm::load(&path, &LoadOptions::default()).unwrap(), snippets })
}

/// Calls the test with the model, which is loaded once for all tests of this file.
fn with_model(test: impl FnOnce(&Loaded)) {
    // A model can be handed from thread to thread, not shared.
    static LOADED: OnceLock<Option<Mutex<Loaded>>> = OnceLock::new();
    if let Some(loaded) = LOADED.get_or_init(|| load().map(Mutex::new)) {
        test(&loaded.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

fn four() -> CharsConfig {
    CharsConfig::default().with_clusters(4)
}

fn largest(difference: &Tensor) -> f64 {
    difference.abs().max().double_value(&[])
}

#[test]
fn a_plan_changes_the_logits_alike_with_and_without_a_cache_and_in_a_batch() {
    with_model(|loaded| {
        let _guard = no_grad_guard();
        let lm = &loaded.lm;
        let ([negative, positive], model) = loaded.read(Pooling::Last);
        let mut plan = SteeringPlan::at(SITE, CharsMap::fit(negative.view(), positive.view(), &four()).unwrap());
        plan.model = Some(model);
        plan.alpha = 3.0;
        plan.check(&lm.model).unwrap();

        let texts = ["The film was so", "I bought this camera last week and"].map(|text| lm.encode(text).unwrap());
        let (ids, real) = left_pad(&texts, lm.model.device()).unwrap();
        let bare = lm.model.last_logits(&ids, &mut Pass { real: real.as_ref(), ..Pass::default() }).unwrap();
        let mut cache = lm.model.new_cache();
        let mut hooks = plan.hooks().unwrap();
        let mut pass =
            Pass { cache: Some(&mut cache), real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() };
        let mut steps = vec![lm.model.last_logits(&ids, &mut pass).unwrap()];
        let mut generated = Vec::new();
        for _ in 0..3 {
            let next = steps[steps.len() - 1].argmax(-1, true); // (b, 1)
            let mut pass = Pass { cache: Some(&mut cache), hooks: Some(&mut hooks), ..Pass::default() };
            steps.push(lm.model.last_logits(&next, &mut pass).unwrap());
            generated.push(next);
        }
        assert!(largest(&(&steps[0] - &bare)) > 0.5, "steering must be seen: {}", largest(&(&steps[0] - &bare)));
        for (row, text) in texts.iter().enumerate() {
            let mut whole: Vec<i64> = text.iter().map(|&id| id.into()).collect();
            whole.extend(generated.iter().map(|next| next.int64_value(&[row as i64, 0])));
            let mut pass = Pass { hooks: Some(&mut hooks), ..Pass::default() };
            let full = lm.model.logits(&Tensor::from_slice(&whole).view([1, -1]), &mut pass).unwrap().get(0);
            for (step, logits) in steps.iter().enumerate() {
                let at = (text.len() + step - 1) as i64;
                let difference = largest(&(logits.get(row as i64) - full.get(at)));
                assert!(difference < 2e-3, "row {row}, step {step}: {difference}");
            }
        }
        drop(hooks);
        // Strength 0 under the same hooks is the model as it is.
        plan.alpha = 0.0;
        let mut hooks = plan.hooks().unwrap();
        let mut pass = Pass { real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() };
        assert_eq!(largest(&(lm.model.last_logits(&ids, &mut pass).unwrap() - bare)), 0.0);
    });
}

#[test]
fn activations_of_position_0_in_the_mean_are_warned_about() {
    with_model(|loaded| {
        let fitted = |from: i64| {
            let ([negative, positive], _) = loaded.read(Pooling::Mean { from });
            CharsMap::fit(negative.view(), positive.view(), &four()).unwrap()
        };
        let warned =
            |map: &CharsMap| map.diagnostics().warnings.iter().any(|w| matches!(w, Warning::DominantCoordinate { .. }));
        let (with, without) = (fitted(0), fitted(1));
        assert!(warned(&with), "{:?}", with.diagnostics());
        assert!(!warned(&without), "{:?}", without.diagnostics());
    });
}
