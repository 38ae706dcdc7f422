//! Tiny random models for tests.
#![allow(dead_code)] // each test file uses some

use lm::config::ModelConfig;
use lm::model::Model;
use lm::tensor::Seed;
use lm::tensor::tch::{Device, Kind, Tensor};
use std::path::PathBuf;

/// Two layers, four heads on two key heads, 40 tokens, 64 positions; weights large enough that attention isn't flat.
pub(crate) fn tiny() -> ModelConfig {
    ModelConfig { context: 64, initializer_range: 0.3, ..ModelConfig::llama(40, 16, 2, 4, 2, 24) }
}

/// In f64, so that ties and rounding don't decide.
pub(crate) fn model(config: &ModelConfig) -> Model {
    Model::random(config, Seed::new(1), Kind::Double, Device::Cpu).unwrap()
}

/// A batch of one text.
pub(crate) fn ids(text: &[u32]) -> Tensor {
    let text: Vec<i64> = text.iter().map(|&id| id.into()).collect();
    Tensor::from_slice(&text).view([1, -1])
}

/// Largest absolute difference.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 {
        return 0.0;
    }
    (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
}

/// SmolLM2's file, if it is in the cache; says so if not. `TESSERA_REQUIRE_DATA` (names with commas between, set by
/// `cargo xtask test` for the sets that it has fetched) makes a missing set a failure.
pub(crate) fn smollm2() -> Option<PathBuf> {
    let name = datasets::smollm2::NAME;
    let path = datasets::smollm2::path_if_present().expect("the file is whole");
    let required = std::env::var("TESSERA_REQUIRE_DATA").unwrap_or_default();
    assert!(
        path.is_some() || !required.split(',').any(|r| r == name),
        "the data set `{name}` is required, but it isn't in the cache"
    );
    if path.is_none() {
        eprintln!("skipped: the data set `{name}` isn't in the cache (cargo xtask data fetch {name})");
    }
    path
}
