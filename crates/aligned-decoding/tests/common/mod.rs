//! Tiny random models for tests.
#![allow(dead_code)] // each test file uses some

use aligned_decoding::tensor::Seed;
use aligned_decoding::tensor::tch::{Device, Kind, Tensor, no_grad_guard};
use lm::config::ModelConfig;
use lm::lora::{Adapter, Layers, LoraConfig};
use lm::model::Model;

/// Three layers, two heads, 24 tokens, 48 positions; weights large enough that distributions are peaked now and then.
pub(crate) fn tiny() -> ModelConfig {
    ModelConfig { context: 48, initializer_range: 0.5, ..ModelConfig::llama(24, 8, 3, 2, 1, 12) }
}

/// In f64, so that ties and rounding don't decide.
pub(crate) fn model(config: &ModelConfig, seed: u64) -> Model {
    // Tests run side by side, and threads of libtorch wait by spinning.
    aligned_decoding::tensor::tch::set_num_threads(1);
    Model::random(config, Seed::new(seed), Kind::Double, Device::Cpu).unwrap()
}

/// An adapter of the top layers that changes the model.
pub(crate) fn adapter(config: &ModelConfig, layers: Layers, seed: u64) -> Adapter {
    let lora = LoraConfig { rank: 2, alpha: 4.0, layers, seed, ..LoraConfig::default() };
    let adapter = Adapter::new(config, &lora, Kind::Double, Device::Cpu).unwrap();
    let _guard = no_grad_guard();
    for (i, (name, mut tensor)) in adapter.parameters().into_iter().enumerate() {
        if name.contains("lora_B") {
            let values = Seed::new(seed).child("b").index(i as u64).normal(tensor.numel());
            let values = Tensor::from_slice(&values).view(&tensor.size()[..]).to_kind(Kind::Double) * 0.3;
            tensor.copy_(&values);
        }
    }
    adapter
}

/// Prompts of different lengths.
pub(crate) fn prompts(seed: u64, rows: usize, vocab: u64) -> Vec<Vec<u32>> {
    let number = |i: u64| Seed::new(seed).child("prompts").index(i).value();
    (0..rows as u64)
        .map(|row| (0..=number(row) % 6).map(|i| (number(100 * (row + 1) + i) % vocab) as u32).collect())
        .collect()
}
