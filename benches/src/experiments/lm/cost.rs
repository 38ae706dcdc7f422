//! What the reference model costs here, and what the sockets cost: dense and packed, with hooks, with an adapter.

use super::peers::prefill;
use super::{prompt, smollm2};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave, merge};
use anyhow::{Context as _, Result};
use lm::Weights;
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::lora::{Adapter, Layers, LoraConfig};
use lm::model::{Model, Pass};
use tensor::tch::{Tensor, no_grad_guard};

const DECODE: &str = "decode";
const PREFILL: &str = "prefill";
const WEIGHTS: &str = "weights";
const LOAD: &str = "load";
const BEFORE: i64 = 64;

pub(super) fn experiment() -> Experiment {
    let at_most = |name: &str, statement: &str, metric: &str, arms: (&str, &str), ratio| {
        Claim::new(name, statement, "ours", metric, arms, Test::RatioAtMost(ratio))
    };
    Experiment {
        spec: Spec {
            name: "lm-cost".into(),
            krate: "lm".into(),
            title: "What SmolLM2-135M and its sockets cost".into(),
            protocol: format!(
                "SmolLM2-135M-Instruct at batch 1: time of a greedy step after {BEFORE} tokens and of a token of a prompt of 128, \
                 interleaved in one process; memory of the weights; time to load. \"Reading hooks\" reads every layer's residual \
                 stream and changes nothing; \"LoRA\" has rank 8 on all projections of the top 4 layers."
            ),
            data: vec!["smollm2".into()],
            kind: Kind::Core,
            metrics: vec![
                Metric::new(DECODE, "decoding a token", "ms", Direction::Lower, 2),
                Metric::new(PREFILL, "a token of a prompt", "ms", Direction::Lower, 3),
                Metric::new(WEIGHTS, "memory of the weights", "MiB", Direction::Lower, 0),
                Metric::new(LOAD, "loading", "s", Direction::Lower, 2),
            ],
            arms: vec![
                Arm::new("dense", "Dense f32", Role::Baseline, "unpacked at loading"),
                Arm::new("packed", "Packed Q4_1", Role::Method, "own kernels on the GGUF blocks, f32 activations"),
                Arm::new("hooks", "Dense, reading hooks", Role::Method, "30 sites"),
                Arm::new("lora", "Dense, LoRA", Role::Method, "rank 8, top 4 of 30 layers"),
            ],
            claims: vec![
                at_most(
                    "packed",
                    "Packed weights decode in at most two thirds of dense f32's time.",
                    DECODE,
                    ("packed", "dense"),
                    0.67,
                ),
                at_most(
                    "hooks",
                    "Hooks that read every layer cost at most 3 % of a step.",
                    DECODE,
                    ("hooks", "dense"),
                    1.03,
                ),
                at_most(
                    "lora",
                    "An adapter on the top 4 layers costs at most 5 % of a step.",
                    DECODE,
                    ("lora", "dense"),
                    1.05,
                ),
            ],
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (14.0, 45.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let (rounds, steps) = match context.mode {
        Mode::Quick => (8, 4u32),
        Mode::Full => (24, 8),
    };
    let _guard = no_grad_guard();
    let timed = |weights| -> Result<(Model, f64)> {
        let start = std::time::Instant::now();
        let model = smollm2(weights, context.device)?.model;
        Ok((model, start.elapsed().as_secs_f64()))
    };
    let (dense, dense_load) = timed(Weights::Dense)?;
    let (packed, packed_load) = timed(Weights::Packed)?;
    let layers = dense.config().layers;
    let config = LoraConfig { rank: 8, layers: Layers::Top(4), ..LoraConfig::default() };
    let adapter = Adapter::new(dense.config(), &config, dense.kind(), dense.device())?;
    let sites: Vec<Site> = (0..layers).map(Site::ResidPost).collect();

    let step = |model: &Model, hooked: bool, adapted: bool| -> Result<f64> {
        let ids = Tensor::from_slice(&prompt(BEFORE)).view([1, -1]);
        let mut read = |_: Site, _: &Tensor, _: &TokenInfo<'_>| Ok(None);
        let mut hooks = Hooks::new().on(&sites, &mut read);
        let mut cache = model.new_cache();
        let adapter = adapted.then(|| adapter.view());
        let mut next = |ids: &Tensor| {
            let hooks = hooked.then_some(&mut hooks);
            model.last_logits(ids, &mut Pass { cache: Some(&mut cache), hooks, adapter, ..Pass::default() })
        };
        let mut logits = next(&ids)?;
        let start = std::time::Instant::now();
        for _ in 0..steps {
            logits = next(&logits.argmax(-1, true))?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(steps))
    };
    let all = [
        ("dense", &dense, false, false),
        ("packed", &packed, false, false),
        ("hooks", &dense, true, false),
        ("lora", &dense, false, true),
    ];
    let mut candidates: Vec<Candidate<'_>> = all
        .iter()
        .map(|&(arm, model, hooked, adapted)| Candidate {
            arm: arm.into(),
            round: Box::new(move || step(model, hooked, adapted)),
        })
        .collect();
    let mut outcomes = interleave(context, DECODE, rounds, &mut candidates)?;
    drop(candidates);
    let mut candidates: Vec<Candidate<'_>> = [("dense", &dense), ("packed", &packed)]
        .into_iter()
        .map(|(arm, model)| Candidate { arm: arm.into(), round: Box::new(move || prefill(model, 128)) })
        .collect();
    merge(&mut outcomes, interleave(context, PREFILL, rounds, &mut candidates)?);
    for (arm, outcome) in &mut outcomes {
        let (model, load) = if arm == "packed" { (&packed, packed_load) } else { (&dense, dense_load) };
        outcome.set(WEIGHTS, model.bytes() as f64 / f64::from(1 << 20));
        outcome.set(LOAD, load);
    }
    Ok(outcomes)
}

/// Resident memory of this process, MiB.
pub(super) fn resident_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("this system doesn't tell resident memory")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kib / 1024.0)
}
