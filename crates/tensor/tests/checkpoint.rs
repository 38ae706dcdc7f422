//! Saving and loading tensors.
#![cfg(feature = "torch")]
#![allow(missing_docs)]

use tensor::checkpoint::NameMap;
use tensor::nn::{Activation, Mlp, MlpConfig, RmsNorm};
use tensor::tch::{Device, Kind, Tensor, nn::ModuleT, nn::VarStore};
use tensor::{Error, Seed, StateDict};

#[test]
fn every_kind_and_shape_comes_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.safetensors");
    let base = Tensor::from_slice(&[0.0f64, 1.5, -2.25, 100.0, 3e-5, 7.0]).reshape([2, 3]);
    let mut state = StateDict::default();
    for kind in [
        Kind::Float,
        Kind::Double,
        Kind::Half,
        Kind::BFloat16,
        Kind::Int64,
        Kind::Int,
        Kind::Int16,
        Kind::Int8,
        Kind::Uint8,
        Kind::Bool,
    ] {
        state.tensors.insert(format!("{kind:?}"), base.abs().to_kind(kind));
        state.tensors.insert(format!("{kind:?}.t"), base.abs().to_kind(kind).tr());
    }
    state.tensors.insert("scalar".into(), Tensor::from(2.5f64));
    state.tensors.insert("empty".into(), Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)));
    state.meta.insert("note".into(), "ü".into());
    state.save(&file).unwrap();
    let back = StateDict::load(&file).unwrap();
    assert_eq!(back.meta, state.meta);
    assert_eq!(back.tensors.len(), state.tensors.len());
    for (name, tensor) in &state.tensors {
        let other = &back.tensors[name];
        assert_eq!((other.size(), other.kind()), (tensor.size(), tensor.kind()), "{name}");
        assert!(tensor.equal(other), "{name}");
    }
}

#[test]
fn a_failed_save_leaves_the_old_file_and_no_partial_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.safetensors");
    let mut state = StateDict::default();
    state.tensors.insert("w".into(), Tensor::from_slice(&[1.0f32]));
    state.save(&file).unwrap();
    let before = std::fs::read(&file).unwrap();
    state.tensors.insert("c".into(), Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu)));
    let message = state.save(&file).unwrap_err().to_string();
    assert!(message.contains("\"c\"") && message.contains("ComplexFloat"), "{message}");
    assert_eq!(std::fs::read(&file).unwrap(), before);
    let nowhere = folder.path().join("no/such/folder/x.safetensors");
    state.tensors.remove("c");
    assert!(matches!(state.save(&nowhere), Err(Error::Io { .. })));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn truncated_and_hostile_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.safetensors");
    let mut state = StateDict::default();
    state.tensors.insert("w".into(), Tensor::from_slice(&[1.0f32; 100]));
    state.save(&file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    for cut in [0, 4, 20, whole.len() - 1] {
        std::fs::write(&file, &whole[..cut]).unwrap();
        assert!(matches!(StateDict::load(&file), Err(Error::Index(_))), "cut to {cut} bytes");
    }
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&file, &huge).unwrap();
    assert!(matches!(StateDict::load(&file), Err(Error::Index(_))));
    assert!(matches!(StateDict::load(&folder.path().join("missing")), Err(Error::Io { .. })));
}

#[test]
fn loading_into_a_model_translates_names_and_reports_what_did_not_meet() {
    let make = |seed| {
        let store = VarStore::new(Device::Cpu);
        let net = Mlp::new(&(store.root() / "net"), &MlpConfig::relu(&[3, 4, 2]), Seed::new(seed)).unwrap();
        (store, net)
    };
    let ((from, a), (to, b)) = (make(1), make(2));
    let mut state = StateDict::default();
    for (name, tensor) in StateDict::of_var_store(&from).tensors {
        state.tensors.insert(name.replace("net.", "model."), tensor);
    }
    state.tensors.remove("model.1.bias");
    state.tensors.insert("extra".into(), Tensor::from_slice(&[1.0f32]));
    let names = NameMap { prefixes: vec![("model.".into(), "net.".into())] };
    let report = state.copy_into(&to, &names).unwrap();
    assert_eq!(report.missing, ["net.1.bias"]);
    assert_eq!(report.unexpected, ["extra"]);
    assert_eq!(report.loaded.len(), 3);
    state.tensors.insert("model.1.bias".into(), from.variables()["net.1.bias"].shallow_clone());
    state.copy_into(&to, &names).unwrap();
    let x = Tensor::ones([1, 3], (Kind::Float, Device::Cpu));
    assert!(a.forward_t(&x, false).equal(&b.forward_t(&x, false)));

    state.tensors.insert("model.0.bias".into(), Tensor::zeros([5], (Kind::Float, Device::Cpu)));
    state.tensors.insert("model.1.bias".into(), Tensor::from_slice(&[9.0f32, 9.0]));
    let message = state.copy_into(&to, &names).unwrap_err().to_string();
    assert!(message.contains("model.0.bias") && message.contains("[5]") && message.contains("[4]"), "{message}");
    assert!(a.forward_t(&x, false).equal(&b.forward_t(&x, false)), "nothing is written when a shape differs");
}

#[test]
fn networks_start_alike_whatever_the_global_stream_did() {
    let weights = |draws: i64| {
        let _ = Tensor::rand([draws], (Kind::Float, Device::Cpu));
        let store = VarStore::new(Device::Cpu);
        Mlp::new(&store.root(), &MlpConfig::relu(&[64, 128, 10]), Seed::new(3)).unwrap();
        store.variables()["0.weight"].copy()
    };
    assert!(weights(1).equal(&weights(100)));
    // Uniform in ±1/√64: bound and spread.
    let w = weights(1);
    assert!(w.abs().max().double_value(&[]) <= 0.125);
    let std = w.std(false).double_value(&[]);
    assert!((std - 0.125 / 3f64.sqrt()).abs() < 2e-3, "{std}");
}

#[test]
fn networks_refuse_shapes_that_make_none() {
    let store = VarStore::new(Device::Cpu);
    for config in
        [MlpConfig::relu(&[4]), MlpConfig::relu(&[4, 0, 2]), MlpConfig { dropout: 1.0, ..MlpConfig::relu(&[4, 2]) }]
    {
        assert!(matches!(Mlp::new(&store.root(), &config, Seed::new(0)), Err(Error::InvalidArgument { .. })));
    }
    assert!(RmsNorm::new(&store.root(), 4, -1.0).is_err());
}

#[test]
fn rms_norm_and_activations_follow_their_formulas() {
    let store = VarStore::new(Device::Cpu);
    let norm = RmsNorm::new(&store.root(), 3, 1e-6).unwrap();
    let x = Tensor::from_slice(&[1.0f32, -2.0, 2.0]).reshape([1, 3]);
    let y = Vec::<f32>::try_from(norm.forward(&x).reshape([-1])).unwrap();
    for (y, x) in y.iter().zip([1.0, -2.0, 2.0]) {
        assert!((y - x / 3f32.sqrt()).abs() < 1e-5);
    }
    assert_eq!(norm.forward(&x.to_kind(Kind::BFloat16)).kind(), Kind::BFloat16);
    let at = |a: Activation| a.apply(&Tensor::from_slice(&[-1.0f64, 2.0]));
    let value = |t: Tensor, i| t.double_value(&[i]);
    assert_eq!(value(at(Activation::Relu), 0), 0.0);
    assert!((value(at(Activation::Silu), 1) - 2.0 / (1.0 + (-2f64).exp())).abs() < 1e-12);
    assert!((value(at(Activation::Gelu), 1) - 1.9544997361036416).abs() < 1e-9);
    assert!((value(at(Activation::Tanh), 0) - (-1f64).tanh()).abs() < 1e-12);
}
