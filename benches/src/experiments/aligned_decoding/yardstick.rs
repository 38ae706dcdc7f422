//! How fast a single model decodes in candle, the other Rust library for language models: what a pair's cost is to be seen against.

use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use anyhow::Result;

const TOKEN: &str = "token";
const CANDLE: &str = "candle";
const PACKED: &str = "packed";
/// Tokens before the timed steps.
#[cfg(feature = "candle")]
const BEFORE: usize = 64;

pub(super) fn experiment() -> Experiment {
    Experiment {
        spec: Spec {
            name: "aad-yardstick".into(),
            krate: "aligned-decoding".into(),
            title: "A single model beside candle".into(),
            protocol: "SmolLM2-135M from its GGUF file at batch 1, greedy steps after 64 tokens, rounds in turn: candle-transformers \
                       0.11's quantized_llama and lm's packed weights, on which every rule of aligned-decoding runs too. Before timing, \
                       the largest logit after the prompt must agree to two hundredths, or the experiment fails. Candle sizes its own \
                       threads, by the number of cores."
                .into(),
            data: vec!["smollm2".into()],
            kind: Kind::Peers,
            metrics: vec![Metric::new(TOKEN, "a token", "ms", Direction::Lower, 2)],
            arms: vec![
                Arm::new(CANDLE, "candle, Q4_1", Role::Peer, "quantized_llama, activations rounded to 8 bits"),
                Arm::new(PACKED, "lm, packed Q4_1", Role::Method, "f32 activations"),
            ],
            claims: vec![Claim::new(
                "candle",
                "Greedy decoding on packed weights is at least as fast as candle's.",
                "ours",
                TOKEN,
                (PACKED, CANDLE),
                Test::SpeedupAtLeast(1.0),
            )],
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (10.0, 30.0),
        },
        body: Body::Together(run),
    }
}

#[cfg(not(feature = "candle"))]
fn run(_: &Context, _seed: u64) -> Result<Outcomes> {
    anyhow::bail!(
        "this program was built without candle: use `cargo xtask bench --peers`, which builds it with the feature `candle`"
    )
}

#[cfg(feature = "candle")]
fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    use crate::spec::Mode;
    use crate::timing::{Candidate, interleave};
    use candle_core::{Device, IndexOp as _, Tensor, quantized::gguf_file};
    use candle_transformers::models::quantized_llama::ModelWeights;
    use lm::model::Pass;
    use lm::{Lm, LoadOptions, Weights};
    use std::time::Instant;
    use tensor::tch::no_grad_guard;

    let (rounds, steps) = match context.mode {
        Mode::Quick => (8, 8),
        Mode::Full => (24, 16),
    };
    let _guard = no_grad_guard();
    let path = datasets::smollm2::path()?;
    let ours = Lm::load(&path, &LoadOptions { weights: Weights::Packed, ..LoadOptions::default() })?.model;
    let mut file = std::fs::File::open(&path)?;
    let content = gguf_file::Content::read(&mut file)?;
    let mut theirs = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
    let prompt: Vec<i64> = (0..BEFORE as i64).map(|i| i * 7919 % 49_000 + 100).collect();
    let words: Vec<u32> = prompt.iter().map(|&id| id as u32).collect();

    let best = |logits: &Tensor| -> Result<(u32, f64)> {
        let row = logits.i(0)?;
        let top = row.argmax(0)?.to_scalar::<u32>()?;
        Ok((top, f64::from(row.i(top as usize)?.to_scalar::<f32>()?)))
    };
    let ids = tensor::tch::Tensor::from_slice(&prompt).view([1, -1]);
    let mine = ours.last_logits(&ids, &mut Pass::default())?.max().double_value(&[]);
    let (_, other) = best(&theirs.forward(&Tensor::new(words.as_slice(), &Device::Cpu)?.unsqueeze(0)?, 0)?)?;
    if (mine / other - 1.0).abs() > 0.02 {
        anyhow::bail!("the largest logit is {mine} here and {other} in candle: the two don't run the same model");
    }
    let candle = move || {
        let (mut top, _) = best(&theirs.forward(&Tensor::new(words.as_slice(), &Device::Cpu)?.unsqueeze(0)?, 0)?)?;
        let start = Instant::now();
        for step in 0..steps {
            let logits = theirs.forward(&Tensor::new(&[top], &Device::Cpu)?.unsqueeze(0)?, BEFORE + step)?;
            top = best(&logits)?.0;
        }
        Ok(start.elapsed().as_secs_f64() / steps as f64)
    };
    let packed = || {
        let mut cache = ours.new_cache();
        let mut next =
            |ids: &tensor::tch::Tensor| ours.last_logits(ids, &mut Pass { cache: Some(&mut cache), ..Pass::default() });
        let mut logits = next(&ids)?;
        let start = Instant::now();
        for _ in 0..steps {
            logits = next(&logits.argmax(-1, true))?;
        }
        Ok(start.elapsed().as_secs_f64() / steps as f64)
    };
    let mut candidates = vec![
        Candidate { arm: CANDLE.into(), round: Box::new(candle) },
        Candidate { arm: PACKED.into(), round: Box::new(packed) },
    ];
    interleave(context, TOKEN, rounds, &mut candidates)
}
