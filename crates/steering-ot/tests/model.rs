//! Plans in a language model: what is edited, what isn't, and what files keep.
#![cfg(feature = "lm")]

use lm::activations::{CollectConfig, Pooling, collect};
use lm::config::ModelConfig;
use lm::generate::{GenerateConfig, Plugs, generate_with, left_pad};
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::model::{Model, Pass};
use ndarray::{Array1, Array2};
use std::ops::ControlFlow;
use steering_ot::baselines::{DiM, LinearAct};
use steering_ot::model::{
    Mode, SiteMap, SteeringPlan, TokenMask, activations_at, collect_steered, fit_plan, fit_sequential,
};
use steering_ot::{CharsConfig, CharsMap, Error, Steer};
use tensor::Seed;
use tensor::tch::{Device, Kind, Tensor};

const WIDTH: usize = 16;
const SITE: Site = Site::ResidPost(1);

fn model(seed: u64) -> Model {
    Model::random(&ModelConfig::llama(50, WIDTH as i64, 4, 2, 1, 32), Seed::new(seed), Kind::Float, Device::Cpu)
        .unwrap()
}

fn texts(n: usize, first: u32) -> Vec<Vec<u32>> {
    (0..n as u32).map(|i| (0..3 + i % 4).map(|j| (first + 7 * i + 3 * j) % 50).collect()).collect()
}

/// A map of three clusters, far from the identity.
fn chars() -> CharsMap {
    let rows = |name: &str, by: f32| {
        let x = Array2::from_shape_vec((30, WIDTH), Seed::new(5).child(name).normal(30 * WIDTH)).unwrap();
        x.mapv(|v| v + by)
    };
    CharsMap::fit(rows("a", 0.0).view(), rows("b", 2.0).view(), &CharsConfig::default().with_clusters(3)).unwrap()
}

fn logits(model: &Model, ids: &[u32], plan: &mut SteeringPlan) -> Tensor {
    let ids: Vec<i64> = ids.iter().map(|&id| id.into()).collect();
    let mut hooks = plan.hooks().unwrap();
    let mut pass = Pass { hooks: Some(&mut hooks), ..Pass::default() };
    model.logits(&Tensor::from_slice(&ids).view([1, -1]), &mut pass).unwrap()
}

fn largest(difference: &Tensor) -> f64 {
    difference.abs().max().double_value(&[])
}

/// What a plan makes of a batch at its site, beside what came in.
fn edited(model: &Model, batch: &[Vec<u32>], plan: &mut SteeringPlan) -> (Tensor, Tensor) {
    let (ids, real) = left_pad(batch, Device::Cpu).unwrap();
    let (mut before, mut after) = (None, None);
    let mut first = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
        before = Some(x.copy());
        Ok(None)
    };
    let mut second = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
        after = Some(x.copy());
        Ok(None)
    };
    let mut hooks = Hooks::new().on(&[SITE], &mut first).on(&[SITE], plan).on(&[SITE], &mut second).stop_after(SITE);
    let _ = model.hidden(&ids, &mut Pass { real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
    drop(hooks);
    (before.unwrap(), after.unwrap())
}

#[test]
fn a_strength_of_zero_changes_nothing_and_a_constant_map_adds_its_vector() {
    let model = model(0);
    let mut plan = SteeringPlan::at(SITE, chars());
    plan.alpha = 0.0;
    let ids = [3, 9, 27, 4];
    let bare = model.logits(&Tensor::from_slice(&[3i64, 9, 27, 4]).view([1, -1]), &mut Pass::default()).unwrap();
    assert_eq!(logits(&model, &ids, &mut plan), bare);

    let vector = Array1::linspace(-1.0, 1.0, WIDTH);
    let mut plan = SteeringPlan::at(SITE, DiM::from_vector(vector.clone()).unwrap());
    plan.alpha = -2.0;
    let (before, after) = edited(&model, &[ids.to_vec()], &mut plan);
    let expected = Tensor::from_slice(vector.as_slice().unwrap()).to_kind(Kind::Float) * -2.0;
    let change = after - before;
    assert!(largest(&(change.get(0).narrow(0, 1, 3) - expected)) < 1e-5);
    assert_eq!(largest(&change.get(0).get(0)), 0.0, "position 0 is left alone by default");
    assert_eq!(plan.edited, 3);
}

#[test]
fn decoding_with_a_cache_gives_what_one_pass_over_the_whole_text_gives() {
    let model = model(1);
    for tokens in [TokenMask::AllExceptFirst, TokenMask::GeneratedOnly, TokenMask::LastPromptToken] {
        let mut plan = SteeringPlan::new(vec![
            SiteMap { site: SITE, map: std::sync::Arc::new(chars()) },
            SiteMap { site: Site::MlpNormOut(2), map: std::sync::Arc::new(chars()) },
        ]);
        plan.tokens = tokens.clone();
        let prompts = [vec![4, 8, 15], vec![16, 23, 42, 7, 1]];
        let config = GenerateConfig { max_new_tokens: 6, ..GenerateConfig::default() };
        let mut hooks = plan.hooks().unwrap();
        let plugs = Plugs { hooks: Some(&mut hooks), ..Plugs::default() };
        let texts = generate_with(&model, &prompts, &config, plugs, |_| ControlFlow::Continue(())).unwrap();
        drop(hooks);
        for (prompt, text) in prompts.iter().zip(&texts) {
            let whole: Vec<i64> = prompt.iter().chain(&text.tokens).map(|&id| id.into()).collect();
            let lengths = [prompt.len() as i64];
            let mut hooks = plan.hooks().unwrap();
            let mut pass = Pass { hooks: Some(&mut hooks), prompt_lengths: Some(&lengths), ..Pass::default() };
            let all = model.logits(&Tensor::from_slice(&whole).view([1, -1]), &mut pass).unwrap().get(0);
            let log_probs = all.log_softmax(-1, Kind::Double);
            for (i, (&id, &log_prob)) in text.tokens.iter().zip(&text.log_probs).enumerate() {
                let at = (prompt.len() + i - 1) as i64;
                let found = log_probs.double_value(&[at, id.into()]);
                assert!((found - log_prob).abs() < 2e-3, "{tokens:?}, token {i}: {found} and {log_prob}");
            }
        }
    }
}

#[test]
fn a_row_is_steered_alike_alone_and_beside_longer_ones_and_padding_is_never_edited() {
    let model = model(2);
    let mut plan = SteeringPlan::at(SITE, chars());
    plan.tokens = TokenMask::All;
    let batch = [vec![5, 6], vec![1, 2, 3, 4, 5]];
    let (before, after) = edited(&model, &batch, &mut plan);
    assert_eq!(plan.edited, 7, "two real tokens and five");
    assert_eq!(largest(&(after.get(0) - before.get(0)).narrow(0, 0, 3)), 0.0, "padding");
    let (_, alone) = edited(&model, &batch[..1], &mut plan);
    assert!(largest(&(after.get(0).narrow(0, 3, 2) - alone.get(0))) < 1e-4);
}

#[test]
fn ablation_leaves_nothing_along_the_direction_at_any_of_its_sites() {
    let model = model(3);
    let direction: Array1<f64> = (0..WIDTH).map(|i| (i as f64).sin()).collect();
    let unit = Tensor::from_slice(direction.as_slice().unwrap()).to_kind(Kind::Float);
    let unit = &unit / unit.norm();
    let sites = [Site::ResidPre(1), SITE];
    let mut plan = SteeringPlan::ablation(&sites, DiM::from_vector(direction).unwrap());
    let (before, after) = edited(&model, &[vec![9, 8, 7]], &mut plan);
    let along = |x: &Tensor| x.get(0).narrow(0, 1, 2).matmul(&unit).abs().max().double_value(&[]);
    assert!(along(&before) > 1e-2 && along(&after) < 1e-5, "{} {}", along(&before), along(&after));
}

#[test]
fn interpolation_reaches_the_map_at_one_and_refuses_more() {
    let model = model(4);
    let (a, b) = (activations(&model, 0), activations(&model, 20));
    let map = LinearAct::fit(a.view(), b.view()).unwrap();
    let mut plan = SteeringPlan { mode: Mode::Interpolate, ..SteeringPlan::at(SITE, map.clone()) };
    let (before, after) = edited(&model, &[vec![9, 8, 7]], &mut plan);
    let row = |x: &Tensor| {
        tensor::interop::to_array::<f32>(&x.get(0).get(2)).unwrap().into_shape_with_order((1, WIDTH)).unwrap()
    };
    let wanted = map.transport(row(&before).view(), 1.0).unwrap();
    assert!(row(&after).iter().zip(&wanted).all(|(x, y)| (x - y).abs() < 1e-4));
    plan.alpha = 1.5;
    assert!(plan.validate().unwrap_err().to_string().contains("from 0 to 1"));
}

fn activations(model: &Model, first: u32) -> Array2<f32> {
    let config = CollectConfig { sites: vec![SITE], ..CollectConfig::default() };
    activations_at(&collect(model, &texts(24, first), &config).unwrap(), SITE).unwrap()
}

#[test]
fn a_plan_for_another_model_width_or_depth_is_refused_with_both_sides() {
    let (model, other) = (model(0), model(9));
    let config = CollectConfig { sites: vec![SITE], ..CollectConfig::default() };
    let (a, b) = (collect(&model, &texts(24, 0), &config).unwrap(), collect(&model, &texts(24, 20), &config).unwrap());
    let plan = fit_plan(&a, &b, |_, a, b| Ok(Box::new(DiM::fit(a, b)?))).unwrap();
    plan.check(&model).unwrap();
    assert!(matches!(plan.check(&other), Err(Error::ModelMismatch { .. })));
    let strange = collect(&other, &texts(24, 20), &config).unwrap();
    assert!(matches!(
        fit_plan(&a, &strange, |_, a, b| Ok(Box::new(DiM::fit(a, b)?))),
        Err(Error::ModelMismatch { .. })
    ));

    let deep = SteeringPlan::at(Site::ResidPost(4), DiM::from_vector(Array1::ones(WIDTH)).unwrap());
    assert!(matches!(deep.check(&model), Err(Error::LayerOutOfRange { layer: 4, layers: 4 })));
    let wide = SteeringPlan::at(SITE, DiM::from_vector(Array1::ones(WIDTH + 1)).unwrap());
    assert!(matches!(wide.check(&model), Err(Error::DimMismatch { expected: 17, got: 16, .. })));
    let mut wide = wide;
    let message = {
        let mut hooks = wide.hooks().unwrap();
        let mut pass = Pass { hooks: Some(&mut hooks), ..Pass::default() };
        model.logits(&Tensor::from_slice(&[1i64, 2]).view([1, -1]), &mut pass).unwrap_err().to_string()
    };
    assert!(message.contains("ResidualHook of layer 1") && message.contains("16, but 17"), "{message}");
}

#[test]
fn bad_plans_are_named() {
    let map = || DiM::from_vector(Array1::ones(WIDTH)).unwrap();
    assert!(SteeringPlan::default().validate().unwrap_err().to_string().contains("sites"));
    let twice = SteeringPlan::ablation(&[SITE, SITE], map());
    assert!(twice.validate().unwrap_err().to_string().contains("resid_post.1 twice"));
    let endless = SteeringPlan { alpha: f64::INFINITY, ..SteeringPlan::at(SITE, map()) };
    assert!(endless.validate().unwrap_err().to_string().contains("alpha"));
    let early = SteeringPlan { tokens: TokenMask::FromPosition(-1), ..SteeringPlan::at(SITE, map()) };
    assert!(early.validate().unwrap_err().to_string().contains("from_position"));
}

#[test]
fn a_saved_plan_steers_bit_for_bit_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.safetensors");
    let model = model(0);
    let mut plan = SteeringPlan::ablation(&[SITE, Site::MlpOut(3)], chars());
    plan.mode = Mode::ActAdd;
    plan.alpha = 0.3;
    plan.tokens = TokenMask::Explicit(vec![vec![false, true, true]]);
    plan.model = Some(model.fingerprint().unwrap());
    plan.save(&path).unwrap();
    let mut back = SteeringPlan::load(&path).unwrap();
    assert_eq!(logits(&model, &[3, 9, 27], &mut plan), logits(&model, &[3, 9, 27], &mut back));
    assert_eq!((back.alpha, back.mode, &back.tokens, &back.model), (0.3, Mode::ActAdd, &plan.tokens, &plan.model));
    assert!(std::sync::Arc::ptr_eq(&back.sites[0].map, &back.sites[1].map), "a shared map is stored once");
}

#[test]
fn files_of_something_else_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let mut state = tensor::StateDict::default();
    state.save(&path).unwrap();
    assert!(SteeringPlan::load(&path).unwrap_err().to_string().contains("no steering plan"));
    state.meta.insert("plan".into(), serde_json::json!({"format": "tessera steering plan", "version": 7}));
    state.save(&path).unwrap();
    assert!(SteeringPlan::load(&path).unwrap_err().to_string().contains("version 7"));
    SteeringPlan::at(SITE, chars()).save(&path).unwrap();
    let mut state = tensor::StateDict::load(&path).unwrap();
    let first = state.tensors.keys().next().unwrap().clone();
    state.tensors.remove(&first);
    state.save(&path).unwrap();
    let message = SteeringPlan::load(&path).unwrap_err().to_string();
    assert!(message.contains("is missing") && message.contains("x.safetensors"), "{message}");
    std::fs::write(&path, b"nothing").unwrap();
    assert!(SteeringPlan::load(&path).is_err() && SteeringPlan::import_gguf_control_vector(&path).is_err());
}

#[test]
fn a_control_vector_is_the_mean_shift_times_the_strength() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.gguf");
    let map = chars();
    let mean = map.mean_shift();
    let mut plan = SteeringPlan::at(SITE, map);
    plan.alpha = 1.5;
    plan.export_gguf_control_vector(&path, "llama").unwrap();
    let (back, hint) = SteeringPlan::import_gguf_control_vector(&path).unwrap();
    assert_eq!(hint.as_deref(), Some("llama"));
    assert_eq!((back.sites.len(), back.sites[0].site, back.alpha), (1, SITE, 1.0));
    let vector = back.sites[0].map.mean_shift().unwrap();
    assert!(vector.iter().zip(&mean).all(|(v, m)| (v - 1.5 * m).abs() <= 1e-6 * m.abs()), "{vector} {mean}");

    let refused = |plan: SteeringPlan| plan.export_gguf_control_vector(&path, "llama").unwrap_err().to_string();
    assert!(refused(SteeringPlan::at(Site::ResidPost(0), chars())).contains("resid_post.0"));
    assert!(refused(SteeringPlan::at(Site::MlpOut(1), chars())).contains("mlp_out.1"));
    assert!(refused(SteeringPlan::ablation(&[SITE], chars())).contains("ablate"));
}

#[test]
fn sequential_maps_are_fitted_on_what_the_earlier_ones_have_moved() {
    let model = model(6);
    let (source, target) = (texts(24, 0), texts(24, 20));
    let config = CollectConfig { sites: vec![SITE, Site::ResidPost(3)], pooling: Pooling::Last, batch: 5 };
    let mut seen = Vec::new();
    let mut plan = fit_sequential(&model, &source, &target, &config, 1.0, |site, a, b| {
        seen.push((site, a.to_owned()));
        Ok(Box::new(DiM::fit(a, b)?))
    })
    .unwrap();
    assert_eq!(plan.mode, Mode::Sequential);
    let plain = collect(&model, &source, &config).unwrap();
    let plain_at = |site| activations_at(&plain, site).unwrap();
    assert_eq!((seen[0].0, &seen[0].1), (SITE, &plain_at(SITE)));
    let difference = (&seen[1].1 - &plain_at(Site::ResidPost(3))).mapv(f32::abs).sum();
    assert!(difference > 1e-2, "the second map must see the first one's work");
    // With the whole plan at work, the mean at the last site is the target's: that is what a difference in means does.
    let again = collect_steered(&model, &source, &mut plan, Site::ResidPost(3), &config).unwrap();
    assert_eq!(again, seen[1].1);
}

#[test]
fn stores_of_two_poolings_or_of_other_sites_do_not_fit_together() {
    let model = model(0);
    let at = |pooling| CollectConfig { sites: vec![SITE], pooling, batch: 8 };
    let a = collect(&model, &texts(8, 0), &at(Pooling::Last)).unwrap();
    let b = collect(&model, &texts(8, 9), &at(Pooling::Mean { from: 1 })).unwrap();
    let fit = |a: &_, b: &_| fit_plan(a, b, |_, a, b| Ok(Box::new(DiM::fit(a, b)?)));
    assert!(fit(&a, &b).unwrap_err().to_string().contains("pooling"));
    let elsewhere = CollectConfig { sites: vec![Site::ResidPost(0)], ..at(Pooling::Last) };
    let c = collect(&model, &texts(8, 9), &elsewhere).unwrap();
    assert!(fit(&a, &c).unwrap_err().to_string().contains("resid_post.1"));
}
