//! GGUF files made of the tiny reference checkpoints give the same logits; wrong files give errors that name what is wrong.

#[path = "common/gguf.rs"]
mod gguf;

use gguf::{File, Value, with_tokenizer};
use lm::Error;
use lm::config::{Architecture, ModelConfig, RopeScaling};
use lm::gguf::{Gguf, Weights};
use lm::model::{Model, Pass};
use lm::tensor::checkpoint::index::GgmlType;
use lm::tensor::tch::{Device, Kind, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

fn reference(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    Model::from_hugging_face(&folder, Kind::Float, Device::Cpu).unwrap()
}

/// What the converter does for RoPE on neighbouring pairs: within each head, the first and the second half take turns.
fn interleaved(rows: &Tensor, heads: i64) -> Tensor {
    let shape = rows.size();
    let mut split = vec![heads, 2, shape[0] / heads / 2];
    split.extend(&shape[1..]);
    rows.view(&split[..]).transpose(1, 2).reshape(shape)
}

/// The file that a converter would write of a model, with all numbers in F32.
fn file_of(model: &Model, architecture: &str, stacked: bool) -> File {
    let config = model.config();
    let mut file = metadata_of(config, architecture);
    let mut tensors: BTreeMap<String, Tensor> = model.parameters().into_iter().collect();
    let mut put = |name: &str, tensor: &Tensor| {
        let numbers = Vec::<f32>::try_from(tensor.detach().contiguous().view([-1])).unwrap();
        file.floats(name, &tensor.size(), &numbers);
    };
    for l in 0..config.layers {
        let ours = format!("model.layers.{l}");
        for kind in ["weight", "bias"] {
            let mut take = |name: &str| tensors.remove(&format!("{ours}.{name}.{kind}"));
            let [q, k, v] = ["q", "k", "v"].map(|part| take(&format!("self_attn.{part}_proj")));
            if let (Some(q), Some(k), Some(v)) = (q, k, v) {
                if architecture == "gpt2" {
                    put(&format!("blk.{l}.attn_qkv.{kind}"), &Tensor::cat(&[q, k, v], 0));
                } else {
                    let turn =
                        |t: &Tensor, heads| if architecture == "llama" { interleaved(t, heads) } else { t.copy() };
                    put(&format!("blk.{l}.attn_q.{kind}"), &turn(&q, config.heads));
                    put(&format!("blk.{l}.attn_k.{kind}"), &turn(&k, config.kv_heads));
                    put(&format!("blk.{l}.attn_v.{kind}"), &v);
                }
            }
            for (ours, theirs) in [
                ("input_layernorm", "attn_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("self_attn.o_proj", "attn_output"),
                ("mlp.gate_proj", "ffn_gate"),
                ("mlp.up_proj", "ffn_up"),
                ("mlp.down_proj", "ffn_down"),
                ("block_sparse_moe.gate", "ffn_gate_inp"),
            ] {
                if let Some(tensor) = take(ours) {
                    put(&format!("blk.{l}.{theirs}.{kind}"), &tensor);
                }
            }
            for (ours, theirs) in [("w1", "ffn_gate"), ("w2", "ffn_down"), ("w3", "ffn_up")] {
                let experts = 0..config.moe.as_ref().map_or(0, |moe| moe.experts);
                let experts: Vec<Tensor> =
                    experts.filter_map(|e| take(&format!("block_sparse_moe.experts.{e}.{ours}"))).collect();
                if stacked && !experts.is_empty() {
                    put(&format!("blk.{l}.{theirs}_exps.{kind}"), &Tensor::stack(&experts, 0));
                } else {
                    for (e, expert) in experts.iter().enumerate() {
                        put(&format!("blk.{l}.{theirs}.{e}.{kind}"), expert);
                    }
                }
            }
        }
    }
    for (ours, theirs) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.embed_positions.weight", "position_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.norm.bias", "output_norm.bias"),
        ("lm_head.weight", "output.weight"),
    ] {
        if let Some(tensor) = tensors.remove(ours) {
            put(theirs, &tensor);
        }
    }
    assert!(tensors.is_empty(), "{:?}", tensors.keys());
    file
}

fn metadata_of(config: &ModelConfig, architecture: &str) -> File {
    let mut file = File::default();
    file.set("general.architecture", architecture);
    let mut int = |key: &str, value: i64| file.set(&format!("{architecture}.{key}"), value as u32).metadata.len();
    int("block_count", config.layers as i64);
    int("context_length", config.context);
    int("embedding_length", config.width);
    int("feed_forward_length", config.ffn);
    int("attention.head_count", config.heads);
    if architecture != "gpt2" {
        int("attention.head_count_kv", config.kv_heads);
        int("attention.key_length", config.head_dim);
        int("attention.value_length", config.head_dim);
        int("rope.dimension_count", config.head_dim);
    }
    if let Some(moe) = &config.moe {
        int("expert_count", moe.experts as i64);
        int("expert_used_count", moe.top_k as i64);
    }
    let epsilon = if architecture == "gpt2" { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
    file.set(&format!("{architecture}.attention.{epsilon}"), config.norm_epsilon as f32);
    if let Some(rope) = &config.rope {
        file.set(&format!("{architecture}.rope.freq_base"), rope.theta as f32);
        match &rope.scaling {
            None => {}
            Some(RopeScaling::Linear { factor }) => {
                file.set(&format!("{architecture}.rope.scaling.type"), "linear");
                file.set(&format!("{architecture}.rope.scaling.factor"), *factor as f32);
            }
            Some(RopeScaling::Llama3 { .. }) => {
                file.floats("rope_freqs.weight", &[config.head_dim / 2], &llama3_divisors(config));
            }
            other => panic!("{other:?}"),
        }
    }
    file
}

/// By the definition of Llama 3.1: wavelengths beyond the old context are stretched, short ones kept, a blend between.
fn llama3_divisors(config: &ModelConfig) -> Vec<f32> {
    let rope = config.rope.as_ref().unwrap();
    let Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) = &rope.scaling
    else {
        panic!("no llama3")
    };
    let divisor = |i: i64| {
        let wavelength = std::f64::consts::TAU * rope.theta.powf(2.0 * i as f64 / config.head_dim as f64);
        let turns = *original_context as f64 / wavelength;
        if turns < *low_freq_factor {
            *factor
        } else if turns > *high_freq_factor {
            1.0
        } else {
            let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..config.head_dim / 2).map(|i| divisor(i) as f32).collect()
}

fn open(file: &File) -> lm::Result<Gguf> {
    Gguf::from_bytes(file.bytes())
}

fn model_of(file: &File, weights: Weights) -> lm::Result<Model> {
    Model::from_gguf(&mut open(file)?, weights, Kind::Float, Device::Cpu)
}

fn error_of(file: &File) -> Error {
    model_of(file, Weights::Dense).unwrap_err()
}

#[test]
fn a_converted_checkpoint_of_every_family_gives_the_same_logits() {
    let ids = Tensor::from_slice(&[3i64, 14, 15, 9, 26, 53, 58, 0]).view([1, -1]);
    let mut orders = 0.0f64;
    for (name, architecture, stacked) in [
        ("llama", "llama", false),
        ("llama-untied-bias", "llama", false),
        ("llama-linear", "llama", false),
        ("llama3", "llama", false),
        ("mistral", "llama", false),
        ("qwen2", "qwen2", false),
        ("mixtral", "llama", true),
        ("mixtral", "llama", false),
        ("gpt2", "gpt2", false),
    ] {
        let original = reference(name);
        let file = file_of(&original, architecture, stacked);
        let copy = model_of(&file, Weights::Dense).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (a, b) = (original.config(), copy.config());
        assert_eq!((a.tied, a.qkv_bias, a.output_bias, a.ffn_bias), (b.tied, b.qkv_bias, b.output_bias, b.ffn_bias));
        let logits = |model: &Model| model.logits(&ids, &mut Pass::default()).unwrap();
        let difference = (logits(&original) - logits(&copy)).abs().max().double_value(&[]);
        // The same weights; divisors, ε and θ have been rounded to f32.
        assert!(difference < 1e-5, "{name}: {difference:e}");
        if name == "llama" {
            // The order of rows matters: read as another architecture, the same file is another model.
            let mut other = file.clone();
            for (key, _) in &mut other.metadata {
                *key = key.replace("llama.", "qwen2.");
            }
            other.set("general.architecture", "qwen2");
            let other = model_of(&other, Weights::Dense).unwrap();
            orders = (logits(&other) - logits(&copy)).abs().max().double_value(&[]);
        }
    }
    assert!(orders > 1e-2, "{orders}");
}

/// A small Llama whose rows are whole blocks of 256.
fn small() -> File {
    let config = ModelConfig { context: 64, ..ModelConfig::llama(262, 256, 1, 4, 2, 256) };
    let model = Model::random(&config, lm::tensor::Seed::new(3), Kind::Float, Device::Cpu).unwrap();
    file_of(&model, "llama", false)
}

/// Bytes in which every half-precision scale is finite: 0x3C is the high half of numbers near 1.
fn packed_bytes(dtype: GgmlType, elements: u64) -> Vec<u8> {
    let bytes = elements / dtype.block() * dtype.block_bytes();
    (0..bytes).map(|i| if i % 3 == 0 { 0x2C } else { (i * 7 % 0x30) as u8 }).collect()
}

#[test]
fn every_type_is_read_dense_and_packed() {
    let ids = Tensor::from_slice(&[3i64, 14, 15]).view([1, -1]);
    for dtype in [
        GgmlType::F16,
        GgmlType::BF16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q2_K,
        GgmlType::Q3_K,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
        GgmlType::Q8_K,
    ] {
        let mut file = small();
        for (name, rows) in [("blk.0.attn_q.weight", 256), ("blk.0.attn_k.weight", 128), ("blk.0.ffn_up.weight", 256)] {
            file.tensor(name, &[rows, 256], dtype, packed_bytes(dtype, rows as u64 * 256));
        }
        let [dense, packed] = [Weights::Dense, Weights::Packed].map(|weights| model_of(&file, weights).unwrap());
        let logits = |model: &Model| model.logits(&ids, &mut Pass::default()).unwrap();
        let (a, b) = (logits(&dense), logits(&packed));
        assert!(bool::try_from(a.isfinite().all()).unwrap(), "{dtype}");
        // Only the order of sums differs.
        let scale = a.abs().max().double_value(&[]);
        assert!((a - b).abs().max().double_value(&[]) < 1e-4 * scale.max(1.0), "{dtype}");
    }
}

#[test]
fn other_types_are_named() {
    for dtype in [GgmlType::Q8_1, GgmlType::IQ4_NL, GgmlType::I32, GgmlType::MXFP4] {
        let mut file = small();
        file.tensor("blk.0.ffn_up.weight", &[256, 256], dtype, packed_bytes(dtype, 256 * 256));
        let error = error_of(&file);
        let Error::TensorType { name, dtype: got, known } = &error else { panic!("{error}") };
        assert_eq!((name.as_str(), got.as_str()), ("blk.0.ffn_up.weight", dtype.name()));
        assert!(known.contains("Q4_K"));
    }
}

#[test]
fn all_missing_and_unexpected_tensors_are_listed_at_once() {
    let mut file = small();
    file.remove("blk.0.ffn_up.weight").remove("output_norm.weight").floats("blk.0.extra.weight", &[1], &[0.0]);
    file.floats("v.patch", &[1], &[0.0]).floats("blk.0.attn_rot_embd", &[1], &[0.0]);
    let error = error_of(&file);
    let Error::Tensors { missing, unexpected, .. } = &error else { panic!("{error}") };
    assert_eq!(missing, &["blk.0.ffn_up.weight", "output_norm.weight"]);
    assert_eq!(unexpected, &["blk.0.extra.weight", "v.patch"]);
}

#[test]
fn wrong_shapes_are_named() {
    let mut file = small();
    file.floats("blk.0.attn_v.weight", &[64, 256], &vec![0.0; 64 * 256]);
    let error = error_of(&file);
    let Error::TensorShape { name, expected, got } = &error else { panic!("{error}") };
    assert_eq!((name.as_str(), &expected[..], &got[..]), ("blk.0.attn_v.weight", &[128, 256][..], &[64, 256][..]));
    let mut file = small();
    file.floats("token_embd.weight", &[256], &[0.0; 256]);
    assert!(error_of(&file).to_string().contains("token_embd.weight"));
}

#[test]
fn wrong_metadata_is_named() {
    let absent = None::<Value>;
    for (key, value, part) in [
        ("general.architecture", absent.clone(), "missing"),
        ("general.architecture", Some("mamba".into()), "llama, qwen2 or gpt2"),
        ("llama.block_count", absent.clone(), "missing"),
        ("llama.block_count", Some(Value::I32(-1)), "from 0"),
        ("llama.block_count", Some(Value::U32(u32::MAX)), "at most the number of tensors"),
        ("llama.block_count", Some("two".into()), "whole number"),
        ("llama.embedding_length", Some(0.into()), "2^28"),
        ("llama.embedding_length", Some(u32::MAX.into()), "2^28"),
        ("llama.attention.head_count", Some(0.into()), "at least 1"),
        ("llama.attention.head_count", Some(Value::Ints(vec![4, 4])), "a list of 2"),
        ("llama.attention.head_count_kv", Some(3.into()), "divisor"),
        ("llama.attention.key_length", Some(63.into()), "width of a head"),
        ("llama.rope.dimension_count", Some(32.into()), "width of a head"),
        ("llama.attention.layer_norm_rms_epsilon", Some(f32::NAN.into()), "norm_epsilon"),
        ("llama.rope.freq_base", Some((-1.0).into()), "rope_theta"),
        ("llama.rope.scaling.type", Some("linear".into()), "rope.scaling.factor"),
        ("llama.logit_scale", Some(2.0.into()), "isn't built"),
        ("llama.attention.causal", Some(false.into()), "causal"),
        ("llama.expert_count", Some(8.into()), "expert_used_count"),
        ("llama.expert_count", Some(1_000_000.into()), "expert_used_count"),
        ("tokenizer.ggml.eos_token_id", Some(262.into()), "vocabulary of 262"),
    ] {
        let mut file = small();
        file.unset(key);
        if let Some(value) = value.clone() {
            file.metadata.push((key.to_owned(), value));
        }
        let error = error_of(&file);
        let message = error.to_string();
        assert!(matches!(error, Error::Config { .. }) && message.contains(part), "{key} {value:?}: {message}");
    }
    for kind in ["yarn", "longrope", ""] {
        let mut file = small();
        file.set("llama.rope.scaling.type", kind);
        assert!(matches!(error_of(&file), Error::RopeScaling { .. }), "{kind}");
    }
    let mut file = small();
    file.floats("rope_freqs.weight", &[3], &[1.0; 3]);
    assert!(error_of(&file).to_string().contains("rope_freqs.weight"));
    file.tensor("rope_freqs.weight", &[32], GgmlType::F16, vec![0; 64]);
    assert!(error_of(&file).to_string().contains("F32"));
}

#[test]
fn the_window_bounds_the_context_and_end_tokens_are_collected() {
    let mut file = small();
    file.set("llama.attention.sliding_window", 16);
    file.set("tokenizer.ggml.bos_token_id", 1)
        .set("tokenizer.ggml.eos_token_id", 2)
        .set("tokenizer.ggml.eot_token_id", 7);
    let config = open(&file).unwrap().config().unwrap();
    assert_eq!(
        (config.architecture, config.context, config.bos, config.eos),
        (Architecture::Llama, 16, Some(1), vec![2, 7])
    );
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = small().bytes();
    std::fs::write(&path, &bytes).unwrap();
    let mut file = Gguf::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 / 2).unwrap();
    let error = Model::from_gguf(&mut file, Weights::Dense, Kind::Float, Device::Cpu).unwrap_err();
    assert!(matches!(&error, Error::Io { path: at, .. } if *at == path), "{error}");
    assert!(matches!(Gguf::open(&folder.path().join("none.gguf")), Err(Error::Io { .. })));
    assert!(matches!(Gguf::from_bytes(b"GGUF".to_vec()), Err(Error::Index(_))));
}

#[test]
fn tensors_are_read_by_name() {
    let mut file = small();
    with_tokenizer(&mut file, "gpt-2");
    let mut file = open(&file).unwrap();
    assert_eq!(file.floats("output_norm.weight").unwrap(), [1.0; 256]);
    assert!(file.floats("nothing").is_err());
    assert_eq!(file.tokenizer().unwrap().vocab(), 262);
}

#[test]
fn hostile_numbers_of_layers_and_experts_are_refused_before_they_are_listed() {
    let mut config = ModelConfig::llama(10, 8, 1, 2, 1, 8).mixtral(4, 2);
    assert!(config.validate().is_ok());
    for (layers, experts) in [(1 << 28, 4), (2, usize::MAX), (1000, 1000)] {
        config.layers = layers;
        config.moe.as_mut().unwrap().experts = experts;
        assert!(matches!(config.validate(), Err(Error::Config { .. })), "{layers} {experts}");
    }
}
