//! Plans as files and as hooks, at the edges: every map through a file, files that someone has changed, padding without numbers,
//! half precision, rows that leave a batch.
#![cfg(feature = "lm")]

use lm::activations::{CollectConfig, Pooling};
use lm::config::ModelConfig;
use lm::generate::{GenerateConfig, Plugs, generate_with, left_pad};
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::model::{Model, Pass};
use ndarray::{Array1, Array2};
use std::ops::ControlFlow;
use std::path::Path;
use steering_ot::baselines::{
    DiM, DiagonalChars, GaussianAct, GaussianOt, GaussianOtConfig, LinearAct, MeanAct, PcaConfig, PcaDirection,
};
use steering_ot::compose::{ComposeConfig, Composition, Orthogonalise};
use steering_ot::model::{SteeringPlan, TokenMask, fit_sequential};
use steering_ot::{CharsConfig, CharsMap, Epsilon, Error, Steer};
use tensor::tch::{Device, Kind, Tensor};
use tensor::{Seed, StateDict};

const WIDTH: usize = 16;
const SITE: Site = Site::ResidPost(1);

fn model(seed: u64, kind: Kind) -> Model {
    Model::random(&ModelConfig::llama(50, WIDTH as i64, 4, 2, 1, 32), Seed::new(seed), kind, Device::Cpu).unwrap()
}

fn rows(n: usize, name: &str, by: f32) -> Array2<f32> {
    Array2::from_shape_vec((n, WIDTH), Seed::new(5).child(name).normal(n * WIDTH)).unwrap().mapv(|v: f32| v + by)
}

fn sets() -> (Array2<f32>, Array2<f32>) {
    (rows(40, "a", 0.0), rows(33, "b", 2.0))
}

fn chars(config: &CharsConfig) -> CharsMap {
    let (a, b) = sets();
    CharsMap::fit(a.view(), b.view(), config).unwrap()
}

fn three() -> CharsConfig {
    CharsConfig::default().with_clusters(3)
}

fn dim() -> DiM {
    let (a, b) = sets();
    DiM::fit(a.view(), b.view()).unwrap()
}

fn composition(maps: Vec<Box<dyn Steer>>, orthogonalise: Orthogonalise) -> Composition {
    Composition::new(maps, ComposeConfig { orthogonalise, ..ComposeConfig::default() }).unwrap()
}

/// One of each kind, and of each form that a file has to tell apart.
fn every_map() -> Vec<Box<dyn Steer>> {
    let (a, b) = sets();
    let (a, b) = (a.view(), b.view());
    let pair = || -> Vec<Box<dyn Steer>> { vec![Box::new(dim()), Box::new(chars(&three()))] };
    vec![
        Box::new(chars(&three())),
        Box::new(chars(&CharsConfig { k_target: 2, pct: Some(1), bandwidth: 0.1 + 0.2, ..three() })),
        Box::new(chars(&CharsConfig { quantile_gate: Some((0.1, 0.9)), ..three() })),
        Box::new(chars(&CharsConfig { epsilon: Epsilon::Auto, ..three() })),
        Box::new(dim()),
        Box::new(MeanAct::fit(a, b).unwrap()),
        Box::new(GaussianAct::fit(a, b).unwrap()),
        Box::new(LinearAct::fit(a, b).unwrap()),
        Box::new(PcaDirection::fit(a, b, &PcaConfig::default()).unwrap()),
        Box::new(GaussianOt::fit(a, b, &GaussianOtConfig::default()).unwrap()),
        Box::new(DiagonalChars::fit(a, b, &three()).unwrap()),
        Box::new(composition(pair(), Orthogonalise::None)),
        Box::new(composition(pair(), Orthogonalise::Mutual)),
        Box::new(composition(
            vec![Box::new(composition(pair(), Orthogonalise::Earlier)), Box::new(chars(&three()))],
            Orthogonalise::Mutual,
        )),
    ]
}

#[test]
fn every_map_comes_back_from_a_file_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.safetensors");
    let x = rows(9, "x", 1.0);
    for map in every_map() {
        let (name, shift, mean, parts) = (map.name(), map.shift(x.view()).unwrap(), map.mean_shift(), map.parts());
        let plan = SteeringPlan::new(vec![steering_ot::model::SiteMap { site: SITE, map: map.into() }]);
        plan.save(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let back = SteeringPlan::load(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let map = &back.sites[0].map;
        assert_eq!((map.name(), map.shift(x.view()).unwrap(), map.mean_shift()), (name, shift, mean));
        assert_eq!(map.parts(), parts, "{name}");
    }
}

#[test]
fn what_auto_chose_is_what_a_plan_keeps() {
    let map = chars(&CharsConfig { epsilon: Epsilon::Auto, ..three() });
    let scores = map.diagnostics().epsilon_scores.clone();
    assert!(map.config().epsilon != Epsilon::Auto && scores.len() > 1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.safetensors");
    let epsilon = serde_json::to_value(map.config().epsilon).unwrap();
    SteeringPlan::at(SITE, map).save(&path).unwrap();
    let state = StateDict::load(&path).unwrap();
    assert_eq!(state.meta["plan"]["maps"][0]["settings"]["config"]["epsilon"], epsilon);
    // A file that still says "auto" holds a plan all the same; there is nothing left to choose.
    change(&path, |state| {
        state.meta["plan"]["maps"][0]["settings"]["config"]["epsilon"] = "auto".into();
    });
    SteeringPlan::load(&path).unwrap();
}

fn change(path: &Path, by: impl FnOnce(&mut StateDict)) {
    let mut state = StateDict::load(path).unwrap();
    by(&mut state);
    state.save(path).unwrap();
}

#[test]
fn files_with_wrong_shapes_values_or_settings_are_errors_that_name_the_file() {
    type Change = Box<dyn Fn(&mut StateDict)>;
    let array = |name: &'static str, tensor: Tensor| -> Change {
        Box::new(move |state: &mut StateDict| {
            assert!(state.tensors.insert(name.to_owned(), tensor.shallow_clone()).is_some(), "{name}");
        })
    };
    let header = |pointer: &'static str, value: serde_json::Value| -> Change {
        Box::new(move |state: &mut StateDict| {
            let mut header = state.meta["plan"].clone();
            *header.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value.clone();
            state.meta.insert("plan".into(), header);
        })
    };
    let double = |shape: &[i64]| Tensor::ones(shape, (Kind::Double, Device::Cpu));
    let d = WIDTH as i64;
    let on_chars: Vec<Change> = vec![
        array("0.source_centroids", double(&[3, 5])),
        array("0.source_centroids", double(&[3 * d])),
        array("0.source_centroids", double(&[0, d])),
        array("0.source_centroids", double(&[3, 0])),
        array("0.source_centroids", double(&[])),
        array("0.source_centroids", double(&[3, d]) * f64::NAN),
        array("0.source_centroids", double(&[3, d]) * 1e300),
        array("0.target_centroids", double(&[3, d]) * f64::INFINITY),
        array("0.target_centroids", double(&[3, d]).to_kind(Kind::Int64)),
        array("0.plan", double(&[3, 3])),
        array("0.plan", double(&[3, 3]) * (-1.0 / 9.0)),
        array("0.plan", double(&[1 << 12, 1 << 8]) / f64::from(1 << 20)),
        header("/alpha", serde_json::json!("much")),
        header("/mode", serde_json::json!("shout")),
        header("/tokens", serde_json::json!({"from_position": -3})),
        header("/sites/0/site", serde_json::json!("resid_post")),
        header("/sites/0/map", serde_json::json!(9)),
        header("/sites", serde_json::json!([])),
        header("/maps/0/kind", serde_json::json!("magic")),
        header("/maps/0/kind", serde_json::json!("gaussian_ot")),
        header("/maps/0/arrays", serde_json::json!(["plan", "plan"])),
        header("/maps/0/settings", serde_json::json!(null)),
        header("/maps/0/settings/config/bandwidth", serde_json::json!(-1.0)),
        header("/maps/0/settings/source_counts", serde_json::json!([1, 2])),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.safetensors");
    let refused = |map: &dyn Fn() -> Box<dyn Steer>, changes: Vec<Change>| {
        for (number, by) in changes.into_iter().enumerate() {
            let plan = SteeringPlan::new(vec![steering_ot::model::SiteMap { site: SITE, map: map().into() }]);
            plan.save(&path).unwrap();
            change(&path, by);
            let Err(error) = SteeringPlan::load(&path) else { panic!("change {number} was accepted") };
            assert!(error.to_string().contains("changed.safetensors"), "change {number}: {error}");
        }
    };
    refused(&|| Box::new(chars(&three())), on_chars);
    let (a, b) = sets();
    refused(
        &|| Box::new(DiagonalChars::fit(a.view(), b.view(), &three()).unwrap()),
        vec![
            array("0.source_sigma", double(&[2, d])),
            array("0.source_sigma", double(&[3, d]) * 1e-300),
            array("0.target_sigma", double(&[3, d]) * -1.0),
            array("0.target_sigma", double(&[3, d]) * 1e300),
        ],
    );
    refused(
        &|| Box::new(chars(&CharsConfig { quantile_gate: Some((0.1, 0.9)), ..three() })),
        vec![
            array("0.lower_bounds", double(&[d + 1])),
            Box::new(|state| {
                state.tensors.remove("0.lower_bounds");
                let mut header = state.meta["plan"].clone();
                let names = header["maps"][0]["arrays"].as_array_mut().unwrap();
                names.retain(|name| name != "lower_bounds");
                state.meta.insert("plan".into(), header);
            }),
            Box::new(|state| {
                // Both gone: the gate that the settings promise isn't there.
                let mut header = state.meta["plan"].clone();
                let names = header["maps"][0]["arrays"].as_array_mut().unwrap();
                names.retain(|name| name != "lower_bounds" && name != "upper_bounds");
                state.meta.insert("plan".into(), header);
            }),
        ],
    );
    refused(&|| Box::new(dim()), vec![array("0.vector", double(&[0])), array("0.vector", double(&[d]) * 1e300)]);
    refused(
        &|| Box::new(composition(vec![Box::new(dim()), Box::new(chars(&three()))], Orthogonalise::Mutual)),
        vec![
            array("0.removed/0", double(&[2, d + 1])),
            array("0.removed/0", double(&[2, d])),
            array("0.1/plan", double(&[2, 2])),
            header("/maps/0/settings/maps", serde_json::json!([])),
            header("/maps/0/settings/config/strengths", serde_json::json!([1.0])),
        ],
    );
}

#[test]
fn padding_that_holds_no_numbers_does_not_reach_the_map() {
    let model = model(1, Kind::Float);
    let batch = [vec![5, 6], vec![1, 2, 3, 4, 5]];
    let (ids, real) = left_pad(&batch, Device::Cpu).unwrap();
    for tokens in [TokenMask::All, TokenMask::AllExceptFirst, TokenMask::GeneratedOnly, TokenMask::FromPosition(1)] {
        let mut plan = SteeringPlan { tokens, ..SteeringPlan::at(SITE, chars(&three())) };
        let mut spoil = |_: Site, x: &Tensor, tokens: &TokenInfo<'_>| {
            Ok(Some(x.masked_fill(&tokens.real.unwrap().logical_not().unsqueeze(-1), f64::NAN)))
        };
        let mut after = None;
        let mut read = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
            after = Some(x.copy());
            Ok(None)
        };
        let mut hooks = Hooks::new().on(&[SITE], &mut spoil).on(&[SITE], &mut plan).on(&[SITE], &mut read);
        let mut pass =
            Pass { real: real.as_ref(), hooks: Some(&mut hooks), prompt_lengths: Some(&[1, 3]), ..Pass::default() };
        let _ = model.hidden(&ids, &mut pass).unwrap();
        drop(hooks);
        let after = after.unwrap();
        assert!(bool::try_from(after.get(0).narrow(0, 0, 3).isnan().all()).unwrap(), "padding stays as it was");
        assert!(bool::try_from(after.get(0).narrow(0, 3, 2).isfinite().all()).unwrap());
    }
}

#[test]
fn half_precision_models_are_steered_as_in_f32_but_for_the_rounding_of_the_result() {
    for kind in [Kind::BFloat16, Kind::Half, Kind::Double] {
        let model = model(2, kind);
        let map = chars(&three());
        let mut plan = SteeringPlan::at(SITE, map.clone());
        let (mut before, mut after) = (None, None);
        let mut first = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
            before = Some(x.copy());
            Ok(None)
        };
        let mut second = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
            after = Some(x.copy());
            Ok(None)
        };
        let ids = Tensor::from_slice(&[3i64, 9, 27]).view([1, -1]);
        let mut hooks = Hooks::new().on(&[SITE], &mut first).on(&[SITE], &mut plan).on(&[SITE], &mut second);
        let _ = model.hidden(&ids, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
        drop(hooks);
        let (before, after) = (before.unwrap().get(0).narrow(0, 1, 2), after.unwrap().get(0).narrow(0, 1, 2));
        assert_eq!(after.kind(), kind);
        let x = steering_ot::tensors::matrix(&before).unwrap();
        let shift = tensor::interop::to_tensor(&map.shift(x.view()).unwrap().view()).unwrap();
        let wanted = match kind {
            // Nothing of an activation in f64 is lost where the map doesn't move it.
            Kind::Double => before + shift.to_kind(kind),
            _ => (before.to_kind(Kind::Float) + shift).to_kind(kind),
        };
        let difference = (after - wanted).abs().max().double_value(&[]);
        assert!(difference == 0.0, "{kind:?}: {difference}");
    }
}

#[test]
fn rows_that_outlive_others_in_a_batch_keep_their_own_masks() {
    let model = model(3, Kind::Float);
    let prompts = [vec![4, 8, 15], vec![16, 23, 42, 7, 1], vec![2, 3]];
    let config = GenerateConfig { max_new_tokens: 6, ..GenerateConfig::default() };
    // Each row has its own mask; the first rows end early.
    let masks: Vec<Vec<bool>> = (0..3).map(|row| (0..12).map(|at| (at + row) % (2 + row) == 0).collect()).collect();
    let run = |prompts: &[Vec<u32>], masks: &[Vec<bool>], lengths: &[usize]| {
        let mut plan = SteeringPlan::at(SITE, chars(&three()));
        plan.tokens = TokenMask::Explicit(masks.to_vec());
        let mut hooks = plan.hooks().unwrap();
        let plugs = Plugs { hooks: Some(&mut hooks), ..Plugs::default() };
        let mut left = lengths.to_vec();
        generate_with(&model, prompts, &config, plugs, |token| {
            left[token.row] -= 1;
            if left[token.row] == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap()
    };
    let lengths = [1, 6, 3];
    let together = run(&prompts, &masks, &lengths);
    for row in 0..3 {
        let alone = run(&prompts[row..=row], &masks[row..=row], &lengths[row..=row]);
        assert_eq!(together[row].tokens, alone[0].tokens, "row {row}");
        assert_eq!(together[row].tokens.len(), lengths[row]);
        for (a, b) in together[row].log_probs.iter().zip(&alone[0].log_probs) {
            assert!((a - b).abs() < 1e-3, "row {row}: {a} and {b}");
        }
    }
}

#[test]
fn a_bad_strength_of_a_sequential_fit_is_named_before_anything_is_computed() {
    let model = model(4, Kind::Float);
    let texts = [vec![1, 2, 3], vec![4, 5]];
    let config =
        CollectConfig { sites: vec![SITE, Site::ResidPost(2)], pooling: Pooling::Last, ..CollectConfig::default() };
    let fitted = fit_sequential(&model, &texts, &texts, &config, f64::NAN, |_, _, _| panic!("nothing is fitted"));
    let message = fitted.unwrap_err().to_string();
    assert!(message.contains("alpha"), "{message}");
}

#[test]
fn a_control_vector_whose_layers_differ_in_width_is_refused_by_the_model() {
    let model = model(5, Kind::Float);
    let map = |n| std::sync::Arc::new(DiM::from_vector(Array1::ones(n)).unwrap());
    let site = |layer, n| steering_ot::model::SiteMap { site: Site::ResidPost(layer), map: map(n) };
    let plan = SteeringPlan::new(vec![site(1, WIDTH), site(2, WIDTH + 3)]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.gguf");
    plan.export_gguf_control_vector(&path, "llama").unwrap();
    let (back, _) = SteeringPlan::import_gguf_control_vector(&path).unwrap();
    assert!(matches!(back.check(&model), Err(Error::DimMismatch { .. })));
}
