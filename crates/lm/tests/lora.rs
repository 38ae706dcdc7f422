//! Low-rank adapters: what they add, what they leave alone, and their files.

mod common;

use common::{difference, ids, model, tiny};
use lm::config::{Architecture, ModelConfig};
use lm::linear::Projection;
use lm::lora::{Adapter, AdapterView, Init, Layers, LoraConfig};
use lm::model::{Model, Pass};
use lm::tensor::tch::{Device, Kind, Tensor, no_grad};
use lm::tensor::{ParamSet, Seed, StateDict, autograd};
use lm::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

const CPU: Device = Device::Cpu;

fn lora() -> LoraConfig {
    LoraConfig { rank: 3, alpha: 6.0, seed: 4, ..LoraConfig::default() }
}

fn adapter(config: &ModelConfig, lora: &LoraConfig) -> Adapter {
    Adapter::new(config, lora, Kind::Double, CPU).unwrap()
}

/// As after some training: B isn't zero any more.
fn trained(config: &ModelConfig, lora: &LoraConfig) -> Adapter {
    let adapter = adapter(config, lora);
    for (i, (name, mut tensor)) in adapter.parameters().into_iter().enumerate() {
        if name.ends_with("lora_B.weight") {
            let noise = Tensor::from_slice(&Seed::new(i as u64).normal(tensor.numel())).view(&tensor.size()[..]);
            no_grad(|| tensor.copy_(&(noise * 0.2)));
        }
    }
    adapter
}

fn logits(model: &Model, ids: &Tensor, adapter: Option<AdapterView<'_>>) -> Tensor {
    no_grad(|| model.logits(ids, &mut Pass { adapter, ..Pass::default() })).unwrap()
}

fn gpt2() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Gpt2,
        rope: None,
        qkv_bias: true,
        output_bias: true,
        ffn_bias: true,
        kv_heads: 4,
        ..tiny()
    }
}

#[test]
fn a_new_adapter_changes_no_bit() {
    let model = model(&tiny());
    let text = ids(&[5, 3, 8, 1]);
    for init in [Init::Normal, Init::Kaiming] {
        let adapter = adapter(&tiny(), &LoraConfig { init, ..lora() });
        let (bare, with) = (logits(&model, &text, None), logits(&model, &text, Some(adapter.view())));
        let bits = |t: &Tensor| -> Vec<u64> {
            Vec::<f64>::try_from(t.reshape([-1])).unwrap().into_iter().map(f64::to_bits).collect()
        };
        assert_eq!(bits(&bare), bits(&with));
    }
}

#[test]
fn what_is_added_is_scale_times_b_times_a() {
    let adapter = trained(&tiny(), &lora());
    assert_eq!(adapter.scale(), 2.0);
    let x = Tensor::from_slice(&Seed::new(9).normal(2 * 5 * 24)).view([2, 5, 24]).to_kind(Kind::Double);
    let delta = adapter.delta(1, Projection::Down, &x).unwrap().unwrap();
    let by_name: std::collections::BTreeMap<_, _> = adapter.parameters().into_iter().collect();
    let half = |h: &str| &by_name[&format!("model.layers.1.mlp.down_proj.lora_{h}.weight")];
    assert!(difference(&delta, &(x.matmul(&half("A").tr()).matmul(&half("B").tr()) * 2.0)) < 1e-12);
    let weight = adapter.weight_delta(1, Projection::Down).unwrap().unwrap();
    assert!(difference(&delta, &x.matmul(&weight.tr())) < 1e-12);
    // A half-precision input gets a half-precision answer.
    assert_eq!(adapter.delta(1, Projection::Down, &x.to_kind(Kind::BFloat16)).unwrap().unwrap().kind(), Kind::BFloat16);
}

#[test]
fn a_starts_with_variance_one_over_in_and_depends_only_on_its_place() {
    let config = ModelConfig::llama(10, 256, 3, 4, 2, 512);
    for init in [Init::Normal, Init::Kaiming] {
        let all = Adapter::new(&config, &LoraConfig { rank: 64, init, ..lora() }, Kind::Float, CPU).unwrap();
        let a = &all.parameters()[0].1;
        // Uniform in ±1/√in has a third of the variance.
        let expected = if init == Init::Normal { 1.0 } else { 1.0 / 3.0 };
        assert!((a.var(true).double_value(&[]) * 256.0 - expected).abs() < 0.05);
        assert!(a.mean(Kind::Float).double_value(&[]).abs() < 0.002);
        let few = LoraConfig { rank: 64, init, targets: vec![Projection::Q], layers: Layers::Top(1), ..lora() };
        let few = Adapter::new(&config, &few, Kind::Float, CPU).unwrap();
        let same = all.parameters().into_iter().find(|(name, _)| *name == few.parameters()[0].0).unwrap();
        assert_eq!(same.1, few.parameters()[0].1);
    }
}

#[test]
fn rows_that_are_switched_off_are_the_bare_model() {
    let model = model(&tiny());
    let adapter = trained(&tiny(), &lora());
    let text = ids(&[5, 3, 8, 1]);
    let both = Tensor::cat(&[&text, &text], 0);
    let rows = Tensor::from_slice(&[true, false]);
    let mixed = logits(&model, &both, Some(adapter.view().with_rows(&rows).unwrap()));
    let on = logits(&model, &both, Some(adapter.view()));
    let off = logits(&model, &both, None);
    assert!(difference(&on, &off) > 0.01);
    assert_eq!(mixed.select(0, 0), on.select(0, 0));
    assert_eq!(mixed.select(0, 1), off.select(0, 1));
    // Infinities in the row that is off stay there.
    let x = Tensor::from_slice(&[1.0, f64::INFINITY]).view([2, 1, 1]) * Tensor::ones([2, 1, 16], (Kind::Double, CPU));
    let delta = adapter.view().with_rows(&rows).unwrap().delta(0, Projection::Q, &x).unwrap().unwrap();
    assert_eq!(delta.isfinite().all(), Tensor::from(true));
}

#[test]
fn merged_weights_are_the_adapted_model() {
    for config in [tiny(), gpt2()] {
        let mut lora = lora();
        lora.targets.retain(|p| config.architecture != Architecture::Gpt2 || *p != Projection::Gate);
        let adapter = trained(&config, &lora);
        let mut model = model(&config);
        let text = ids(&[5, 3, 8, 1]);
        let (before, with) = (logits(&model, &text, None), logits(&model, &text, Some(adapter.view())));
        adapter.merge_into(&mut model).unwrap();
        assert!(difference(&logits(&model, &text, None), &with) < 1e-12);
        assert!(difference(&before, &with) > 0.01);
    }
}

#[test]
fn a_new_adapter_of_half_precision_merges_into_f32_weights_without_touching_a_bit() {
    let mut model = Model::random(&tiny(), Seed::new(1), Kind::Float, CPU).unwrap();
    let text = ids(&[5, 3, 8]);
    let before = logits(&model, &text, None);
    let adapter = Adapter::new(&tiny(), &lora(), Kind::BFloat16, CPU).unwrap();
    adapter.merge_into(&mut model).unwrap();
    assert_eq!(logits(&model, &text, None), before);
}

#[test]
fn a_model_that_does_not_fit_is_left_alone_by_merging() {
    let adapter = trained(&tiny(), &lora());
    let other = ModelConfig { ffn: 32, ..tiny() };
    let mut model = model(&other);
    let text = ids(&[5, 3]);
    let before = logits(&model, &text, None);
    assert!(matches!(adapter.merge_into(&mut model), Err(Error::Shape { .. })));
    assert_eq!(logits(&model, &text, None), before);
    let deeper = trained(&ModelConfig { layers: 3, ..tiny() }, &lora());
    assert!(matches!(deeper.merge_into(&mut model), Err(Error::LayerOutOfRange { layer: 2, layers: 2 })));
    let pass = &mut Pass { adapter: Some(deeper.view()), ..Pass::default() };
    assert!(matches!(model.logits(&text, pass), Err(Error::LayerOutOfRange { layer: 2, layers: 2 })));
}

#[test]
fn gradients_through_the_model_are_those_of_finite_differences() {
    let config = ModelConfig { vocab: 12, ..ModelConfig::llama(12, 8, 1, 2, 1, 6) };
    let model =
        Model::random(&ModelConfig { initializer_range: 0.4, ..config.clone() }, Seed::new(3), Kind::Double, CPU);
    let model = model.unwrap();
    let adapter = trained(&config, &LoraConfig { rank: 1, ..lora() });
    let params = ParamSet::new(adapter.parameters()).unwrap();
    let text = ids(&[5, 3, 8, 1]);
    let loss = || {
        let pass = &mut Pass { adapter: Some(adapter.view()), ..Pass::default() };
        Ok(model.logits(&text, pass).unwrap().log_softmax(-1, Kind::Double).select(2, 4).sum(Kind::Double))
    };
    assert!(autograd::gradient_check(&params, 1e-5, loss).unwrap() < 1e-7);
}

#[test]
fn a_copy_has_memory_of_its_own_and_a_frozen_one_no_gradient() {
    let adapter = trained(&tiny(), &lora());
    let (copy, frozen) = (adapter.copy().unwrap(), adapter.frozen_copy().unwrap());
    let before = adapter.parameters()[1].1.detach_copy();
    let _ = no_grad(|| adapter.parameters()[1].1.shallow_clone().fill_(7.0));
    assert_eq!(copy.parameters()[1].1, before);
    assert_eq!(frozen.parameters()[1].1, before);
    assert!(copy.parameters().iter().all(|(_, t)| t.requires_grad() && t.is_leaf()));
    assert!(frozen.parameters().iter().all(|(_, t)| !t.requires_grad()));
    adapter.assign(&copy).unwrap();
    assert_eq!(adapter.parameters()[1].1, before);
    let other = trained(&tiny(), &LoraConfig { rank: 2, ..lora() });
    assert!(adapter.assign(&other).is_err());
}

#[test]
fn a_saved_adapter_comes_back_bit_for_bit_under_the_names_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    let config = LoraConfig { layers: Layers::Top(1), targets: vec![Projection::Q, Projection::Down], ..lora() };
    let adapter = trained(&tiny(), &config);
    adapter.save(folder.path()).unwrap();
    let state = StateDict::load(&folder.path().join("adapter_model.safetensors")).unwrap();
    let a = &state.tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"];
    assert_eq!(a.size(), [3, 16]);
    let json: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(json["target_modules"], json!(["q_proj", "down_proj"]));
    assert_eq!((&json["r"], &json["lora_alpha"]), (&json!(3), &json!(6.0)));
    assert_eq!(json["layers_to_transform"], json!([1]));
    let back = Adapter::load(folder.path(), &tiny(), Kind::Double, CPU).unwrap();
    assert_eq!(back.parameters(), adapter.parameters());
    assert_eq!(back.scale(), adapter.scale());
    assert_eq!(back.first_layer(), 1);
    assert!(back.parameters().iter().all(|(_, t)| t.requires_grad()));
}

/// Writes a folder as `peft` does, with changes.
fn peft(folder: &Path, config: &[(&str, Value)], tensors: &[(&str, &[i64])]) {
    let mut json = json!({
        "peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none",
        "layers_to_transform": null, "rank_pattern": {}, "base_model_name_or_path": "x", "revision": null,
    });
    for (field, value) in config {
        json[field] = value.clone();
    }
    std::fs::write(folder.join("adapter_config.json"), json.to_string()).unwrap();
    let mut state = StateDict::default();
    for (name, shape) in tensors {
        let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, CPU)).view(*shape);
        state.tensors.insert(format!("base_model.model.{name}.weight"), numbers);
    }
    state.save(&folder.join("adapter_model.safetensors")).unwrap();
}

const Q: [(&str, &[i64]); 4] = [
    ("model.layers.0.self_attn.q_proj.lora_A", &[3, 16]),
    ("model.layers.0.self_attn.q_proj.lora_B", &[16, 3]),
    ("model.layers.1.self_attn.q_proj.lora_A", &[3, 16]),
    ("model.layers.1.self_attn.q_proj.lora_B", &[16, 3]),
];

#[test]
fn files_of_peft_are_read_and_bad_ones_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let load = || Adapter::load(folder.path(), &tiny(), Kind::Float, CPU);
    let refused = |expected: &str| {
        let message = load().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    refused("adapter_config.json");
    peft(folder.path(), &[], &Q);
    assert_eq!(load().unwrap().parameters().len(), 4);
    peft(folder.path(), &[("target_modules", json!(".*q_proj"))], &Q[..2]);
    assert_eq!(load().unwrap().parameters().len(), 2);
    peft(folder.path(), &[("layers_to_transform", json!(1))], &Q[2..]);
    assert_eq!(load().unwrap().first_layer(), 1);
    peft(folder.path(), &[("use_rslora", json!(true))], &Q);
    assert!((load().unwrap().scale() - 6.0 / 3.0f64.sqrt()).abs() < 1e-12);

    peft(folder.path(), &[], &Q[..3]);
    refused("Missing: base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight");
    peft(folder.path(), &[], &[Q[0], Q[1], Q[2], Q[3], ("model.layers.0.self_attn.v_proj.lora_A", &[3, 16])]);
    refused("Unexpected: base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight");
    peft(folder.path(), &[], &[Q[0], Q[1], Q[2], Q[3], ("model.layers.7.self_attn.q_proj.lora_A", &[3, 16])]);
    refused("layers.7");
    peft(folder.path(), &[], &[Q[0], ("model.layers.0.self_attn.q_proj.lora_B", &[3, 16]), Q[2], Q[3]]);
    refused("lora_B.weight` has the shape [3, 16], but the configuration wants [16, 3]");
    peft(folder.path(), &[("layers_to_transform", json!([0, 9]))], &Q);
    refused("no layer 9");
    for (field, value, expected) in [
        ("peft_type", json!("IA3"), "peft_type"),
        ("use_dora", json!(true), "use_dora"),
        ("bias", json!("all"), "bias"),
        ("modules_to_save", json!(["lm_head"]), "lm_head"),
        ("rank_pattern", json!({"q_proj": 8}), "rank_pattern"),
        ("target_modules", json!(["query_key_value"]), "query_key_value"),
        ("layers_to_transform", json!("all"), "layers_to_transform"),
        ("r", json!(-1), "[-1, 16]"),
    ] {
        peft(folder.path(), &[(field, value)], &Q);
        refused(expected);
    }
    std::fs::write(folder.path().join("adapter_config.json"), "{").unwrap();
    refused("isn't what it should be");
}

#[test]
fn gpt2s_fused_matrix_is_split() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: [(&str, &[i64]); 4] = [
        ("transformer.h.0.attn.c_attn.lora_A", &[3, 16]),
        ("transformer.h.0.attn.c_attn.lora_B", &[48, 3]),
        ("transformer.h.0.mlp.c_proj.lora_A", &[3, 24]),
        ("transformer.h.0.mlp.c_proj.lora_B", &[16, 3]),
    ];
    let config = [("target_modules", json!(["c_attn", "mlp.c_proj"])), ("layers_to_transform", json!([0]))];
    peft(folder.path(), &config, &tensors);
    let adapter = Adapter::load(folder.path(), &gpt2(), Kind::Float, CPU).unwrap();
    assert_eq!(adapter.parameters().len(), 8);
    let delta = |p| adapter.weight_delta(0, p).unwrap().unwrap();
    let fused = Tensor::arange(144, (Kind::Float, CPU))
        .view([48, 3])
        .matmul(&Tensor::arange(48, (Kind::Float, CPU)).view([3, 16]));
    let parts = [delta(Projection::Q), delta(Projection::K), delta(Projection::V)];
    assert_eq!(Tensor::cat(&parts, 0), fused * 2.0);
    assert!(adapter.weight_delta(0, Projection::O).unwrap().is_none());
    // Saved under our names, it comes back.
    let ours = tempfile::tempdir().unwrap();
    let q_and_k = LoraConfig { targets: vec![Projection::Q, Projection::K], ..lora() };
    let adapter = trained(&gpt2(), &q_and_k);
    adapter.save(ours.path()).unwrap();
    let back = Adapter::load(ours.path(), &gpt2(), Kind::Double, CPU).unwrap();
    assert_eq!(back.parameters(), adapter.parameters());
}

#[test]
fn configurations_are_checked_and_survive_json() {
    let refused = |model: &ModelConfig, lora: &LoraConfig, expected: &str| {
        let message = Adapter::new(model, lora, Kind::Float, CPU).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    refused(&tiny(), &LoraConfig { rank: 0, ..lora() }, "rank");
    refused(&tiny(), &LoraConfig { alpha: f64::NAN, ..lora() }, "alpha");
    refused(&tiny(), &LoraConfig { targets: vec![], ..lora() }, "targets");
    refused(&tiny(), &LoraConfig { targets: vec![Projection::Q, Projection::Q], ..lora() }, "Q twice");
    refused(&tiny(), &LoraConfig { layers: Layers::Top(3), ..lora() }, "no layer 2");
    refused(&tiny(), &LoraConfig { layers: Layers::Range(0..usize::MAX), ..lora() }, "no layer");
    refused(&tiny(), &LoraConfig { layers: Layers::List(vec![1, 1]), ..lora() }, "1 twice");
    refused(&tiny(), &LoraConfig { layers: Layers::List(vec![]), ..lora() }, "at least one layer");
    refused(&gpt2(), &lora(), "GPT-2's feed-forward has none");
    refused(&tiny().mixtral(4, 2), &lora(), "mixture of experts");
    let attention = LoraConfig { targets: vec![Projection::Q, Projection::O], ..lora() };
    assert!(Adapter::new(&tiny().mixtral(4, 2), &attention, Kind::Float, CPU).is_ok());
    for layers in [Layers::All, Layers::Top(2), Layers::Range(1..2), Layers::List(vec![0])] {
        let config = LoraConfig { layers, ..lora() };
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<LoraConfig>(&text).unwrap(), config);
    }
    assert!(serde_json::from_str::<LoraConfig>(r#"{"rnak": 4}"#).is_err());
    assert_eq!(serde_json::from_str::<LoraConfig>("{}").unwrap(), LoraConfig::default());
}

#[test]
fn views_and_inputs_of_other_shapes_are_named() {
    let adapter = adapter(&tiny(), &lora());
    let x = |b: i64, n: i64| Tensor::zeros([b, 2, n], (Kind::Double, CPU));
    let message = |r: Result<Option<Tensor>>| r.unwrap_err().to_string();
    assert!(message(adapter.delta(0, Projection::Q, &x(1, 24))).contains("[…, 16]"));
    assert!(adapter.delta(5, Projection::Q, &x(1, 16)).unwrap().is_none());
    let rows = Tensor::from_slice(&[true, false]);
    let view = adapter.view().with_rows(&rows).unwrap();
    assert!(message(view.delta(0, Projection::Q, &x(3, 16))).contains("[3]"));
    assert!(adapter.view().with_rows(&Tensor::from_slice(&[1i64])).is_err());
    assert!(adapter.view().with_rows(&rows.view([1, 2])).is_err());
}
