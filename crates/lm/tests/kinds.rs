//! Models whose activations aren't f32: halves over dense and over packed weights.

#[path = "common/gguf.rs"]
mod gguf;

use gguf::File;
use lm::gguf::{Gguf, Weights};
use lm::model::{Model, Pass};
use lm::tensor::checkpoint::index::GgmlType;
use lm::tensor::tch::{Device, Kind, Tensor};

/// One layer of width 32 with two heads on one key head, 40 tokens, all matrices `Q8_0`.
fn file() -> File {
    let mut file = File::default();
    file.set("general.architecture", "llama");
    for (key, value) in [
        ("block_count", 1u32),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 16),
    ] {
        file.set(&format!("llama.{key}"), value);
    }
    file.set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    file.set("llama.rope.freq_base", 10_000f32);
    for norm in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        file.floats(&format!("{norm}.weight"), &[32], &[1.0; 32]);
    }
    for (salt, (name, rows, columns)) in [
        ("token_embd", 40u64, 32u64),
        ("output", 40, 32),
        ("blk.0.attn_q", 32, 32),
        ("blk.0.attn_k", 16, 32),
        ("blk.0.attn_v", 16, 32),
        ("blk.0.attn_output", 32, 32),
        ("blk.0.ffn_gate", 64, 32),
        ("blk.0.ffn_up", 64, 32),
        ("blk.0.ffn_down", 32, 64),
    ]
    .into_iter()
    .enumerate()
    {
        // A block: the scale 2⁻⁹ as f16, then 32 signed bytes.
        let block = |b: u64| {
            let byte = move |i: u64| (((b * 32 + i + 17 * salt as u64) * 2_654_435_761) >> 11) as u8;
            [0x00, 0x18].into_iter().chain((0..32).map(byte)).collect::<Vec<u8>>()
        };
        let bytes = (0..rows * columns / 32).flat_map(block).collect();
        file.tensor(&format!("{name}.weight"), &[rows as i64, columns as i64], GgmlType::Q8_0, bytes);
    }
    file
}

fn model(weights: Weights, kind: Kind) -> Model {
    Model::from_gguf(&mut Gguf::from_bytes(file().bytes()).unwrap(), weights, kind, Device::Cpu).unwrap()
}

#[test]
fn halves_over_dense_and_packed_weights_give_the_logits_of_f32() {
    let ids = Tensor::from_slice(&[3i64, 14, 15, 9]).view([1, -1]);
    let expected = model(Weights::Dense, Kind::Float).logits(&ids, &mut Pass::default()).unwrap();
    let scale = expected.abs().max().double_value(&[]);
    let some = Tensor::from_slice(&[7i64, 0, 30]);
    for weights in [Weights::Dense, Weights::Packed] {
        for (kind, bits) in [(Kind::BFloat16, 8), (Kind::Half, 11), (Kind::Float, 24), (Kind::Double, 24)] {
            let model = model(weights, kind);
            let mut cache = model.new_cache();
            let hidden = model.hidden(&ids, &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
            assert_eq!(hidden.kind(), kind, "{weights:?}");
            let logits = Model::head(&model, &hidden).unwrap();
            assert_eq!(logits.kind(), kind, "{weights:?}");
            // A few roundings of each of a few dozen operations.
            let close = 16.0 * scale * 0.5f64.powi(bits);
            let off = |a: &Tensor, b: &Tensor| {
                (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
            };
            let difference = off(&logits, &expected);
            assert!(difference < close, "{weights:?} {kind:?}: {difference} of {scale}");
            let rows = model.head_rows(&hidden, &some).unwrap();
            assert_eq!(rows.kind(), kind);
            assert!(off(&rows, &logits.index_select(-1, &some)) < close);
        }
    }
}
