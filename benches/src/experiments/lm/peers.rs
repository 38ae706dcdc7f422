//! The peers: transformers on PyTorch and llama.cpp, each in a process of its own, interleaved with ours.

use super::{prompt, smollm2};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::peer::{Peer, same_work};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave, merge};
use anyhow::{Context as _, Result, bail};
use lm::Weights;
use lm::model::{Model, Pass};
use std::cell::RefCell;
use tensor::tch::{Tensor, no_grad_guard};

const PREFILL: &str = "prefill";
const DECODE: &str = "decode";
const MEMORY: &str = "memory";
const TRANSFORMERS: &str = include_str!("../../../peers/lm_transformers.py");
const LLAMA: &str = include_str!("../../../peers/lm_llama.py");
const TORCH_VERSION: &str = "2.11.0";
const LLAMA_VERSION: &str = "0.3.36";
/// Tokens of a timed prompt.
const PROMPT: i64 = 256;
/// Tokens before the timed steps.
const BEFORE: i64 = 64;

pub(super) fn experiment() -> Experiment {
    let against = |name: &str, statement: &str, metric: &str, arms: (&str, &str), ratio| {
        Claim::new(name, statement, "ours", metric, arms, Test::SpeedupAtLeast(ratio))
    };
    Experiment {
        spec: Spec {
            name: "lm-peers".into(),
            krate: "lm".into(),
            title: "SmolLM2-135M beside transformers and llama.cpp".into(),
            protocol: format!(
                "SmolLM2-135M-Instruct at batch 1, one process a side, rounds in turn on the same threads. Prefill: a prompt of \
                 {PROMPT} tokens with a cache, logits of the last token only. Decode: greedy steps after {BEFORE} tokens. \
                 transformers 5.24.0 on PyTorch 2.11.0 runs the weights that our loader unpacked, in f32, in its own greedy loop \
                 without `generate`; llama.cpp (llama-cpp-python {LLAMA_VERSION}, compiled on this machine) runs the GGUF file \
                 itself (Q4_1, activations rounded to 8 bits). Ours runs dense f32, and the GGUF blocks as they are with f32 \
                 activations. Before timing, the largest logit after a prompt must be the same as transformers' to a thousandth, \
                 and as llama.cpp's to two hundredths, or the experiment fails. Memory is each process's resident memory after \
                 the timing (ours for the packed model alone is in `lm-cost`: here both live in one process)."
            ),
            data: vec!["smollm2".into()],
            kind: Kind::Peers,
            metrics: vec![
                Metric::new(DECODE, "decoding a token", "ms", Direction::Lower, 2),
                Metric::new(PREFILL, "a token of a prompt", "ms", Direction::Lower, 3),
                Metric::new(MEMORY, "resident memory", "MiB", Direction::Neither, 0),
            ],
            arms: vec![
                Arm::new("transformers", "transformers, f32", Role::Peer, "PyTorch, SDPA attention"),
                Arm::new("llama", "llama.cpp, Q4_1", Role::Peer, "through llama-cpp-python"),
                Arm::new("dense", "lm, dense f32", Role::Method, "libtorch"),
                Arm::new("packed", "lm, packed Q4_1", Role::Method, "own kernels on the GGUF blocks, f32 activations"),
            ],
            claims: vec![
                against(
                    "decode-dense",
                    "Decoding in dense f32 is at least as fast as transformers'.",
                    DECODE,
                    ("dense", "transformers"),
                    1.0,
                ),
                against(
                    "prefill-dense",
                    "Reading a prompt in dense f32 is at least as fast as transformers'.",
                    PREFILL,
                    ("dense", "transformers"),
                    1.0,
                ),
                against(
                    "decode-packed",
                    "Decoding on packed weights is at least half as fast as llama.cpp's.",
                    DECODE,
                    ("packed", "llama"),
                    0.5,
                ),
                against(
                    "decode-packed-transformers",
                    "Decoding on packed weights is at least as fast as transformers' in f32.",
                    DECODE,
                    ("packed", "transformers"),
                    1.0,
                ),
                Claim::new(
                    "prefill-llama",
                    "Reading a prompt on packed weights is at least half as fast as llama.cpp's.",
                    "ours",
                    PREFILL,
                    ("packed", "llama"),
                    Test::SpeedupAtLeast(0.5),
                ),
            ],
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (60.0, 150.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let (rounds, steps) = match context.mode {
        Mode::Quick => (8, 8),
        Mode::Full => (16, 16),
    };
    let _guard = no_grad_guard();
    let dense = smollm2(Weights::Dense, context.device)?.model;
    let packed = smollm2(Weights::Packed, context.device)?.model;
    let folder = std::env::temp_dir().join(format!("tessera-lm-{}", std::process::id()));
    let saved = Saved(folder);
    dense.save_hugging_face(&saved.0)?;

    let transformers = RefCell::new(Peer::start_version(context, TRANSFORMERS, TORCH_VERSION)?);
    let llama = RefCell::new(Peer::start_version(context, LLAMA, LLAMA_VERSION)?);
    let ask = |peer: &RefCell<Peer>, task: &str, what: &str, n: usize| peer.borrow_mut().number(task, what, n);
    ask(&transformers, "load", path(&saved.0)?, 0)?;
    ask(&llama, "load", path(&datasets::smollm2::path()?)?, 0)?;

    let top = |model: &Model| -> Result<f64> {
        let ids = Tensor::from_slice(&prompt(BEFORE)).view([1, -1]);
        Ok(model.last_logits(&ids, &mut Pass::default())?.max().double_value(&[]))
    };
    let before = BEFORE.to_string();
    same_work("SmolLM2", 0, top(&dense)?, ask(&transformers, "top", &before, 0)?)?;
    same_work("SmolLM2", 0, top(&packed)?, top(&dense)?)?;
    let theirs = ask(&llama, "top", &before, 0)?;
    if (top(&dense)? / theirs - 1.0).abs() > 0.02 {
        bail!("the largest logit is {} here and {theirs} in llama.cpp: the two don't run the same model", top(&dense)?);
    }

    let mut outcomes = Outcomes::new();
    for (metric, task, tokens, n) in [(DECODE, "decode", BEFORE, steps), (PREFILL, "prefill", PROMPT, 1)] {
        let tokens_text = tokens.to_string();
        let peer = |arm: &str, peer| {
            let tokens = tokens_text.clone();
            Candidate { arm: arm.into(), round: Box::new(move || ask(peer, task, &tokens, n)) }
        };
        let ours = |arm: &str, model| Candidate {
            arm: arm.into(),
            round: Box::new(move || if task == "decode" { decode(model, tokens, n) } else { prefill(model, tokens) }),
        };
        let mut candidates = vec![
            peer("transformers", &transformers),
            peer("llama", &llama),
            ours("dense", &dense),
            ours("packed", &packed),
        ];
        merge(&mut outcomes, interleave(context, metric, rounds, &mut candidates)?);
    }
    for (arm, outcome) in &mut outcomes {
        let memory = match arm.as_str() {
            "transformers" => ask(&transformers, MEMORY, "x", 0)?,
            "llama" => ask(&llama, MEMORY, "x", 0)?,
            _ => super::cost::resident_mib()?,
        };
        outcome.set(MEMORY, memory);
    }
    Ok(outcomes)
}

/// A folder that is removed at the end.
struct Saved(std::path::PathBuf);

impl Drop for Saved {
    fn drop(&mut self) {
        // What can't be removed is in the system's folder for such things.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn path(path: &std::path::Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} isn't UTF-8, which the peer's protocol needs", path.display()))
}

/// Seconds per token of a prompt.
pub(super) fn prefill(model: &Model, tokens: i64) -> Result<f64> {
    let ids = Tensor::from_slice(&prompt(tokens)).view([1, -1]);
    let start = std::time::Instant::now();
    let mut cache = model.new_cache();
    let _ = model.last_logits(&ids, &mut Pass { cache: Some(&mut cache), ..Pass::default() })?;
    Ok(start.elapsed().as_secs_f64() / tokens as f64)
}

/// Seconds per greedy step after a prompt.
pub(super) fn decode(model: &Model, before: i64, steps: usize) -> Result<f64> {
    let ids = Tensor::from_slice(&prompt(before)).view([1, -1]);
    let mut cache = model.new_cache();
    let mut logits = model.last_logits(&ids, &mut Pass { cache: Some(&mut cache), ..Pass::default() })?;
    let start = std::time::Instant::now();
    for _ in 0..steps {
        let next = logits.argmax(-1, true);
        logits = model.last_logits(&next, &mut Pass { cache: Some(&mut cache), ..Pass::default() })?;
    }
    Ok(start.elapsed().as_secs_f64() / steps as f64)
}
