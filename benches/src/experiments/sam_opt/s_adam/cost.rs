//! What a step of S-Adam costs over AdamW and the probes' forward passes.

use super::super::nets::{LARGE, Model, Net};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::base::step_on;
use sam_opt::{AdamConfig, AdamW, SAdam, SAdamConfig, Sam, SamConfig, TchOptimizer};
use tensor::tch::nn::{AdamW as TchAdamW, OptimizerConfig as _};
use tensor::tch::{Kind as Element, Tensor, no_grad};
use tensor::{Seed, fused};

const METRIC: &str = "step";
/// Probes of the default.
const K: usize = 2;
const LR: f64 = 1e-4;

/// The network of protocols A and B.
pub(super) const DIGITS: Net = Net { name: "digits", widths: &[196, 64, 64, 10], batch: 64, steps: 100 };
/// About a million weights [specification], for the share of the noise.
pub(super) const MILLION: Net = Net { name: "million", widths: &[784, 832, 400, 10], batch: 64, steps: 4 };
const NETS: [&Net; 3] = [&DIGITS, &MILLION, &LARGE];

const ARMS: [(&str, &str, Role); 6] = [
    ("adamw", "AdamW", Role::Baseline),
    ("tch", "AdamW of tch", Role::Baseline),
    ("tch wrapped", "AdamW of tch in TchOptimizer", Role::Reference),
    ("s-adam", "S-Adam", Role::Method),
    ("floor", "AdamW and two forward passes", Role::Reference),
    ("noise", "Noise of two probes alone", Role::Reference),
];

pub(super) fn experiment() -> Experiment {
    let note = |net: &Net| {
        let widths: Vec<String> = net.widths.iter().map(ToString::to_string).collect();
        format!("{}, batch {}", widths.join("-"), net.batch)
    };
    let arms = NETS.iter().flat_map(|net| {
        ARMS.map(|(key, label, role)| {
            Arm::new(&format!("{key} {}", net.name), &format!("{label}, {}", net.name), role, note(net))
        })
    });
    let claim = |name: &str, statement: String, arm: &str, reference: &str, test| Claim {
        name: name.into(),
        statement,
        source: "ours".into(),
        metric: METRIC.into(),
        arm: arm.into(),
        reference: reference.into(),
        test,
    };
    let mut claims = Vec::new();
    for net in NETS {
        let name = net.name;
        claims.push(claim(
            &format!("s-adam-floor-{name}"),
            format!("An S-Adam step costs at most 1.05 AdamW steps with two forward passes ({name})."),
            &format!("s-adam {name}"),
            &format!("floor {name}"),
            Test::RatioAtMost(1.05),
        ));
        claims.push(claim(
            &format!("adamw-tch-{name}"),
            format!("A step of our AdamW costs at most 1.1 steps of tch's ({name})."),
            &format!("adamw {name}"),
            &format!("tch {name}"),
            Test::RatioAtMost(1.1),
        ));
    }
    claims.push(claim(
        "s-adam-noise",
        "With a million weights and batches of 64, noise takes less than 15 % of an S-Adam step.".into(),
        "noise million",
        "s-adam million",
        Test::RatioAtMost(0.15),
    ));
    Experiment {
        spec: Spec {
            name: "s-adam-cost".into(),
            krate: "sam-opt".into(),
            title: "Cost of a step of S-Adam".into(),
            protocol: "One training step each, interleaved in one process (a round of each in turn, median of the rounds, \
                bootstrap interval of the ratio). \"AdamW\" is one gradient and our AdamW's own step, \"AdamW of tch\" is \
                its backward_step, and beside it the same through our adapter. With a forward pass as unit AdamW costs 3 \
                and S-Adam with two probes 5. The noise arm only draws the normal numbers of two probes."
                .into(),
            data: vec![],
            kind: Kind::FullOnly,
            metrics: vec![Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3)],
            arms: arms.collect(),
            claims,
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (30.0, 30.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let mut outcomes = Outcomes::new();
    for net in NETS {
        let rounds = match (context.mode, net.steps) {
            (Mode::Quick, _) => 8,
            (Mode::Full, 1) => 15,
            (Mode::Full, _) => 40,
        };
        outcomes.extend(time(context, net, rounds)?);
    }
    Ok(outcomes)
}

fn adamw() -> AdamW {
    AdamW::from_config(AdamConfig { lr: LR, ..AdamConfig::decoupled() })
}

/// One gradient and our AdamW's step, then some forward passes.
fn base_and_forwards<'a>(arm: &str, net: &Net, model: &'a Model, forwards: usize) -> Result<Candidate<'a>> {
    let params = model.params()?;
    let mut base = adamw();
    Ok(Candidate::new(arm, net.steps, move || {
        let gradient = params.gradient(&model.loss())?;
        for _ in 0..forwards {
            std::hint::black_box(no_grad(|| model.loss()).double_value(&[]));
        }
        Ok(step_on(&mut base, &params, &gradient)?)
    }))
}

fn time(context: &Context, net: &Net, rounds: usize) -> Result<Outcomes> {
    let models: Vec<Model> = (0..5).map(|_| Model::new(net, context.device)).collect::<Result<_>>()?;
    let arm = |key: &str| format!("{key} {}", net.name);
    let mut candidates = vec![base_and_forwards(&arm("adamw"), net, &models[0], 0)?];

    let model = &models[1];
    let mut tch = TchAdamW { wd: 1e-2, ..TchAdamW::default() }.build(model.store(), LR)?;
    candidates.push(Candidate::new(&arm("tch"), net.steps, move || {
        tch.backward_step(&model.loss());
        Ok(())
    }));
    let model = &models[2];
    let inner = TchAdamW { wd: 1e-2, ..TchAdamW::default() }.build(model.store(), LR)?;
    let mut wrapped = Sam::new(vec![model.group()], TchOptimizer::new(inner, LR), SamConfig::sam(0.0))?;
    candidates.push(Candidate::new(&arm("tch wrapped"), net.steps, move || {
        wrapped.step(model.closure())?;
        Ok(())
    }));
    let model = &models[3];
    let mut s_adam =
        SAdam::new(vec![model.group()], SAdamConfig { lr: LR, k_directions: K, ..SAdamConfig::default() })?;
    candidates.push(Candidate::new(&arm("s-adam"), net.steps, move || {
        s_adam.step(model.closure())?;
        Ok(())
    }));
    candidates.push(base_and_forwards(&arm("floor"), net, &models[4], K)?);
    let params = models[0].params()?;
    let memory: Vec<Tensor> =
        params.tensors().iter().map(|t| Tensor::zeros(t.size(), (Element::Float, context.device))).collect();
    let mut draws = 0;
    candidates.push(Candidate::new(&arm("noise"), net.steps, move || {
        for _ in 0..K {
            draws += 1;
            for (i, tensor) in memory.iter().enumerate() {
                fused::fill_normal(tensor, Seed::new(1).index(draws), i as u64)?;
            }
        }
        Ok(())
    }));
    interleave(context, METRIC, rounds, &mut candidates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use tensor::tch::Device;

    #[test]
    fn every_arm_is_timed() {
        static NEVER: AtomicBool = AtomicBool::new(false);
        let context =
            Context { mode: Mode::Quick, device: Device::Cpu, threads: 1, peer_python: None, interrupted: &NEVER };
        let tiny = Net { name: "digits", widths: &[4, 8, 10], batch: 10, steps: 3 };
        let timed: Vec<String> = time(&context, &tiny, 1).unwrap().into_iter().map(|(arm, _)| arm).collect();
        let described: Vec<String> = experiment().spec.arms.into_iter().map(|arm| arm.name).take(ARMS.len()).collect();
        assert_eq!(timed, described);
    }
}
