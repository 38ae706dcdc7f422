//! What a map costs, alone and in the model.

use super::maps::{CHARS, DIM, NONE};
use super::pool::smollm2;
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Curve, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave, merge};
use anyhow::Result;
use lm::hooks::Site;
use lm::model::{Model, Pass};
use ndarray::Array2;
use std::time::Instant;
use steering_ot::baselines::DiM;
use steering_ot::chars::CharsMap;
use steering_ot::config::CharsConfig;
use steering_ot::model::SteeringPlan;
use steering_ot::{Steer, tensors};
use tensor::Seed;
use tensor::tch::{Tensor, no_grad_guard};

const PREFILL: &str = "prefill";
const DECODE: &str = "decode";
const APPLY: &str = "apply";
const BY_ROWS: &str = "by-rows";
const BY_CLUSTERS: &str = "by-clusters";
const BY_WIDTH: &str = "by-width";
const LAYER: usize = 15;
/// Tokens of a timed prompt, and of the text before timed steps.
const PROMPT: i64 = 256;
const BEFORE: i64 = 64;
const WIDTH: usize = 576;

pub(super) fn experiment() -> Experiment {
    let at_most = |name: &str, statement: &str, metric: &str, arm: &str, ratio| {
        Claim::new(name, statement, "ours", metric, (arm, NONE), Test::RatioAtMost(ratio))
    };
    let scaling =
        |name: &str, title: &str, x: &str| Curve { logarithmic: (true, true), ..Curve::new(name, title, x, "ms", 4) };
    Experiment {
        spec: Spec {
            name: "steer-cost".into(),
            krate: "steering-ot".into(),
            title: "What steering costs".into(),
            protocol: format!(
                "SmolLM2-135M in f32 at batch 1: a prompt of {PROMPT} tokens, and greedy steps after {BEFORE}, with a map of 8 \
                 clusters at the residual stream after layer {LAYER}, with one vector there, and without; interleaved. \"Map \
                 alone\" is the map on 512 activations of {WIDTH} numbers. The plots show the map alone over the number of \
                 activations (8 clusters, width {WIDTH}), of clusters and the width (512 activations)."
            ),
            data: vec!["smollm2".into()],
            kind: Kind::Core,
            metrics: vec![
                Metric::new(PREFILL, "a prompt", "ms", Direction::Lower, 1),
                Metric::new(DECODE, "a step", "ms", Direction::Lower, 2),
                Metric::new(APPLY, "map alone", "ms", Direction::Lower, 3),
            ],
            arms: vec![
                Arm::new(NONE, "Not steered", Role::Baseline, ""),
                Arm::new(DIM, "Difference in means", Role::Baseline, "one vector"),
                Arm::new(CHARS, "CHaRS", Role::Method, "K = 8"),
            ],
            claims: vec![
                at_most("prefill", "The map costs at most 1 % of a prompt.", PREFILL, CHARS, 1.01),
                at_most("decode", "The map costs at most 3 % of a step.", DECODE, CHARS, 1.03),
            ],
            curves: vec![
                scaling(BY_ROWS, "The map alone over the number of activations", "activations"),
                scaling(BY_CLUSTERS, "The map alone over the number of clusters", "clusters"),
                scaling(BY_WIDTH, "The map alone over the width", "width"),
            ],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (12.0, 60.0),
        },
        body: Body::Together(run),
    }
}

/// `n` rows of normal numbers.
fn normal(n: usize, d: usize, name: &str) -> Result<Array2<f32>> {
    Ok(Array2::from_shape_vec((n, d), Seed::new(1).child(name).normal(n * d))?)
}

/// A map of `k` clusters a side.
fn chars(k: usize, d: usize) -> Result<CharsMap> {
    let config = CharsConfig::default().with_clusters(k);
    Ok(CharsMap::fit(normal(16 * k, d, "a")?.view(), (normal(16 * k, d, "b")? + 1.0).view(), &config)?)
}

/// Seconds of one call of a map on `m` activations.
fn alone(map: &dyn Steer, m: usize, calls: usize) -> Result<f64> {
    let x = Tensor::from_slice(&Seed::new(2).normal(m * map.width())).view([m as i64, map.width() as i64]);
    let _ = tensors::shift(map, &x)?;
    let start = Instant::now();
    for _ in 0..calls {
        let _ = tensors::shift(map, &x)?;
    }
    Ok(start.elapsed().as_secs_f64() / calls as f64)
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let (rounds, steps) = match context.mode {
        Mode::Quick => (6, 4),
        Mode::Full => (24, 8),
    };
    let _guard = no_grad_guard();
    let model = smollm2(context)?.model;
    let ids: Vec<i64> = (0..PROMPT).map(|i| i * 7919 % 49_000 + 100).collect();
    let dim = DiM::fit(normal(8, WIDTH, "a")?.view(), normal(8, WIDTH, "b")?.view())?;
    let map = chars(8, WIDTH)?;
    let plan = |arm: &str| match arm {
        DIM => Some(SteeringPlan::at(Site::ResidPost(LAYER), dim.clone())),
        CHARS => Some(SteeringPlan::at(Site::ResidPost(LAYER), map.clone())),
        _ => None,
    };
    let names = [NONE, DIM, CHARS];
    let mut outcomes = Outcomes::new();
    for (metric, tokens, steps) in [(PREFILL, PROMPT, 0), (DECODE, BEFORE, steps)] {
        let mut candidates: Vec<Candidate<'_>> = names
            .iter()
            .map(|&arm| {
                let (model, prompt, mut plan) = (&model, &ids[..tokens as usize], plan(arm));
                Candidate { arm: arm.into(), round: Box::new(move || pass(model, prompt, &mut plan, steps)) }
            })
            .collect();
        merge(&mut outcomes, interleave(context, metric, rounds, &mut candidates)?);
    }
    let maps: [(&str, &dyn Steer); 2] = [(DIM, &dim), (CHARS, &map)];
    let mut candidates: Vec<Candidate<'_>> = maps
        .iter()
        .map(|&(arm, map)| Candidate { arm: arm.into(), round: Box::new(move || alone(map, 512, 20)) })
        .collect();
    merge(&mut outcomes, interleave(context, APPLY, rounds, &mut candidates)?);
    if let Some((_, outcome)) = outcomes.iter_mut().find(|(arm, _)| arm == CHARS) {
        let calls = 10;
        for m in [1usize, 8, 64, 512, 4096] {
            outcome.point(BY_ROWS, m as f64, 1e3 * alone(&map, m, calls)?);
        }
        for k in [1usize, 2, 4, 8, 16, 32] {
            outcome.point(BY_CLUSTERS, k as f64, 1e3 * alone(&chars(k, WIDTH)?, 512, calls)?);
        }
        for d in [144usize, 288, 576, 1152, 2304] {
            outcome.point(BY_WIDTH, d as f64, 1e3 * alone(&chars(8, d)?, 512, calls)?);
        }
    }
    Ok(outcomes)
}

/// Seconds of a prompt, or of one of `steps` greedy steps after it.
fn pass(model: &Model, prompt: &[i64], plan: &mut Option<SteeringPlan>, steps: u32) -> Result<f64> {
    let ids = Tensor::from_slice(prompt).view([1, -1]);
    let mut cache = model.new_cache();
    let mut hooks = plan.as_mut().map(SteeringPlan::hooks).transpose()?;
    let mut next = |ids: &Tensor| {
        model.last_logits(ids, &mut Pass { cache: Some(&mut cache), hooks: hooks.as_mut(), ..Pass::default() })
    };
    let start = Instant::now();
    let mut logits = next(&ids)?;
    if steps == 0 {
        return Ok(start.elapsed().as_secs_f64());
    }
    let start = Instant::now();
    for _ in 0..steps {
        logits = next(&logits.argmax(-1, true))?;
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(steps))
}
