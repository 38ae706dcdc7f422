//! The fuzzers' corpus, replayed, with mutations of it.

#[path = "../fuzz/checks.rs"]
mod checks;
#[path = "common/gguf.rs"]
mod gguf;

use gguf::{File, with_tokenizer};
use lm::tensor::checkpoint::index::GgmlType;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Whether a file is right.
type Check = fn(&[u8]) -> bool;

const TARGETS: [(&str, Check); 4] = [
    ("gguf", checks::gguf),
    ("config_json", checks::config_json),
    ("tokenizer_json", checks::tokenizer_json),
    ("template", checks::template),
];

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let mut paths: Vec<PathBuf> = folder(target).read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// A repeatable stream of numbers (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// One to four changes: a bit, a byte, a number's edge, a cut, a piece of another file.
fn mutate(numbers: &mut Numbers, files: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = files[numbers.below(files.len())].clone();
    for _ in 0..=numbers.below(4) {
        let at = numbers.below(bytes.len());
        match numbers.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << numbers.below(8),
            1 if !bytes.is_empty() => bytes[at] = numbers.next() as u8,
            2 => {
                let edge = [0, 1, u64::MAX, 1 << 31, 1 << 32, 1 << 63][numbers.below(6)];
                let width = [1, 4, 8][numbers.below(3)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&edge.to_le_bytes()[..width]);
            }
            3 => bytes.truncate(at),
            4 => {
                let other = &files[numbers.below(files.len())];
                let from = numbers.below(other.len());
                let piece = &other[from..other.len().min(from + 1 + numbers.below(40))];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ => {
                let end = bytes.len().min(at + 1 + numbers.below(40));
                bytes.drain(at..end);
            }
        }
    }
    bytes
}

#[test]
fn every_corpus_file_is_read_or_refused_without_a_panic() {
    for (target, check) in TARGETS {
        let files = corpus(target);
        let good = files.iter().filter(|file| check(file)).count();
        assert!(files.len() > 3 && good > 0 && good < files.len(), "{target}: {good} of {} are right", files.len());
    }
}

#[test]
fn mutated_files_are_read_or_refused_without_a_panic() {
    for (target, check) in TARGETS {
        let (files, mut numbers) = (corpus(target), Numbers(7));
        let start = Instant::now();
        let mut runs = 0;
        while runs < 3000 && start.elapsed() < Duration::from_secs(3) {
            check(&mutate(&mut numbers, &files));
            runs += 1;
        }
        assert!(runs > 20, "{target}: {runs}");
    }
}

/// Writes the seeds of the fuzzers.
#[test]
#[ignore = "writes files into the source tree"]
fn seeds() {
    let write = |target: &str, name: &str, bytes: &[u8]| std::fs::write(folder(target).join(name), bytes).unwrap();
    let mut file = File::default();
    for (key, value) in [
        ("block_count", 1u32),
        ("context_length", 16),
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ] {
        file.set(&format!("llama.{key}"), value);
    }
    file.set("general.architecture", "llama").set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    file.set("tokenizer.chat_template", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
    file.floats("token_embd.weight", &[262, 4], &[0.5; 1048]).floats("rope_freqs.weight", &[1], &[2.0]);
    for (l, dtype) in [GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q4_K, GgmlType::F16].into_iter().enumerate() {
        let bytes = 256 / dtype.block() * dtype.block_bytes();
        file.tensor(&format!("blk.{l}.ffn_up.weight"), &[256], dtype, vec![0x21; bytes as usize]);
    }
    write("gguf", "without-tokenizer", &file.bytes());
    for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2"] {
        with_tokenizer(&mut file, pre);
        write("gguf", pre, &file.bytes());
    }
    let long = file.bytes();
    write("gguf", "cut", &long[..long.len() / 2]);
    let mut mixtral = file.clone();
    mixtral.set("llama.expert_count", 4).set("llama.expert_used_count", 2).set("llama.rope.scaling.type", "linear");
    write("gguf", "experts", &mixtral.set("llama.rope.scaling.factor", 2.0f32).remove("rope_freqs.weight").bytes());
    file.set("llama.rope.scaling.type", "yarn");
    write("gguf", "yarn", &file.bytes());

    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for entry in data.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if let Ok(json) = std::fs::read(path.join("config.json")) {
            write("config_json", path.file_name().unwrap().to_str().unwrap(), &json);
        }
    }
    write("config_json", "other", br#"{"model_type": "mamba"}"#);
    write("config_json", "empty", b"{}");
    write("config_json", "cut", br#"{"model_type": "llama", "hidden"#);

    let bpe = |rest: &str| {
        format!(
            r#"{{"version":"1.0","added_tokens":[{{"id":6,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],{rest},"model":{{"type":"BPE","vocab":{{"H":0,"e":1,"l":2,"o":3,"He":4,"ll":5,"<s>":6}},"merges":["H e","l l"],"continuing_subword_prefix":null}}}}"#
        )
    };
    let none = r#""normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null"#;
    let bytes = r#""normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#;
    let pieces = r#""normalizer":{"type":"Prepend","prepend":"_"},"pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<s>":{"id":"<s>","ids":[6],"tokens":["<s>"]}}},"decoder":{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#;
    for (name, rest) in [("plain", none), ("bytes", bytes), ("pieces", pieces)] {
        write("tokenizer_json", name, bpe(rest).as_bytes());
    }
    write(
        "tokenizer_json",
        "prefix",
        bpe(none).replace(r#""continuing_subword_prefix":null"#, r#""continuing_subword_prefix":"abc""#).as_bytes(),
    );
    write("tokenizer_json", "empty", b"{}");

    for (name, source) in [
        (
            "chatml",
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}",
        ),
        ("refusal", "{{ raise_exception('no ' ~ messages[0].role) }}"),
        (
            "namespace",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        ),
        (
            "macro",
            "{% macro f(x, y=1) %}{{ x.split(' ')[0].upper() }}{{ y }}{% endmacro %}{{ f(messages[-1].content) }}{{ messages[1:] | tojson(indent=2) }}",
        ),
        (
            "generation",
            "{% generation %}{{ bos_token }}{% endgeneration %}{%- if add_generation_prompt -%}a{%- endif -%}",
        ),
        ("open", "{% for m in messages %}"),
    ] {
        write("template", name, source.as_bytes());
    }
}
