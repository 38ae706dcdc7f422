//! What a step costs over the base optimizer's, and how much of it isn't a pass.

use super::nets::{LARGE, Model, Net, SMALL};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::base::step_on;
use sam_opt::{AmdfConfig, DaSam, DaSamConfig, Gsam, GsamConfig, Sagm, SagmConfig, Sam, SamConfig, Sgd};

const METRIC: &str = "step";

pub(super) fn experiment() -> Experiment {
    let mut arms = Vec::new();
    for net in ["small", "large"] {
        for (key, label, role) in [
            ("sgd", "SGD", Role::Baseline),
            ("sgd wrapped", "SGD through SAM at ρ 0", Role::Reference),
            ("sam", "SAM", Role::Method),
            ("asam", "ASAM", Role::Method),
            ("gsam", "GSAM", Role::Method),
            ("sagm", "SAGM", Role::Method),
            ("das", "DAS alone", Role::Method),
            ("da-sam-2", "DA-SAM (M 2)", Role::Ablation),
            ("da-sam", "DA-SAM (M 4)", Role::Method),
            ("da-sam-8", "DA-SAM (M 8)", Role::Ablation),
            ("passes", "Two passes alone", Role::Reference),
        ] {
            let note = if net == "small" { "64-128-128-10, batch 64" } else { "784-2048-2048-2048-10, batch 256" };
            arms.push(Arm::new(&format!("{key} {net}"), &format!("{label}, {net}"), role, note));
        }
    }
    let claim = |name: &str, statement: &str, arm: &str, reference: &str, test| Claim {
        name: name.into(),
        statement: statement.into(),
        source: "ours".into(),
        metric: METRIC.into(),
        arm: arm.into(),
        reference: reference.into(),
        test,
    };
    Experiment {
        spec: Spec {
            name: "sam-cost".into(),
            krate: "sam-opt".into(),
            title: "Cost of a step".into(),
            protocol:
                "One training step of each optimizer over SGD with momentum, interleaved in one process (a round \
                of each in turn, median of the rounds, bootstrap interval of the ratio). \"SGD\" is one gradient and \
                the base optimizer's own step, without any of our wrapper; what the wrapper adds at radius 0 is shown \
                beside it. The floor for two passes is 2. \"Two passes alone\" takes two gradients and does nothing \
                else: what a SAM step costs beyond it is norm, perturbation, final norm and base step, measured where \
                it happens. At most a tenth of the step is at most 1/0.9 of the two passes."
                    .into(),
            data: vec![],
            kind: Kind::Core,
            metrics: vec![Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3)],
            arms,
            claims: vec![
                claim(
                    "sam-large",
                    "A SAM step costs at most 2.05 SGD steps (large network).",
                    "sam large",
                    "sgd large",
                    Test::RatioAtMost(2.05),
                ),
                claim(
                    "sam-small",
                    "A SAM step costs at most 2.5 SGD steps (small network).",
                    "sam small",
                    "sgd small",
                    Test::RatioAtMost(2.5),
                ),
                claim(
                    "vector-large",
                    "What isn't a pass is at most a tenth of a SAM step (large network).",
                    "sam large",
                    "passes large",
                    Test::RatioAtMost(1.111),
                ),
                claim(
                    "da-sam-large",
                    "A DA-SAM step with four directions costs at most 1.75 SAM steps (large network).",
                    "da-sam large",
                    "sam large",
                    Test::RatioAtMost(1.75),
                ),
                claim(
                    "da-sam-small",
                    "A DA-SAM step with four directions costs at most 1.75 SAM steps (small network).",
                    "da-sam small",
                    "sam small",
                    Test::RatioAtMost(1.75),
                ),
                claim(
                    "das-large",
                    "A step of DAS alone costs at most 1.05 SAM steps (large network).",
                    "das large",
                    "sam large",
                    Test::RatioAtMost(1.05),
                ),
                claim(
                    "gsam-large",
                    "A GSAM step costs at most 2.15 SGD steps (large network).",
                    "gsam large",
                    "sgd large",
                    Test::RatioAtMost(2.15),
                ),
            ],
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (30.0, 216.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let (small, large) = match context.mode {
        Mode::Quick => (8, 3),
        Mode::Full => (60, 30),
    };
    let mut outcomes = time(context, &SMALL, small)?;
    outcomes.extend(time(context, &LARGE, large)?);
    Ok(outcomes)
}

fn time(context: &Context, net: &Net, rounds: usize) -> Result<Outcomes> {
    let models: Vec<Model> = (0..11).map(|_| Model::new(net, context.device)).collect::<Result<_>>()?;
    let base = || Sgd::with_momentum(0.01, 0.9);
    let arm = |key: &str| format!("{key} {}", net.name);
    let mut candidates = vec![base_alone(&arm("sgd"), net, &models[0])?];
    for (key, config, model) in [
        ("sgd wrapped", SamConfig::sam(0.0), &models[1]),
        ("sam", SamConfig::sam(0.05), &models[2]),
        ("asam", SamConfig::asam(0.5), &models[3]),
    ] {
        let mut sam = Sam::new(vec![model.group()], base(), config)?;
        candidates.push(Candidate::new(&arm(key), net.steps, move || {
            sam.step(model.closure())?;
            Ok(())
        }));
    }
    let model = &models[4];
    let mut gsam = Gsam::new(vec![model.group()], base(), GsamConfig { alpha: 0.1, sam: SamConfig::sam(0.05) })?;
    candidates.push(Candidate::new(&arm("gsam"), net.steps, move || {
        gsam.step(model.closure())?;
        Ok(())
    }));
    let model = &models[5];
    let mut sagm = Sagm::new(vec![model.group()], base(), SagmConfig { alpha: 0.001, sam: SamConfig::sam(0.05) })?;
    candidates.push(Candidate::new(&arm("sagm"), net.steps, move || {
        sagm.step(model.closure())?;
        Ok(())
    }));
    let with = |directions| {
        let amdf = AmdfConfig { directions, ..AmdfConfig::default() };
        DaSamConfig { amdf: Some(amdf), ..DaSamConfig::da_sam(0.05) }
    };
    for (key, config, model) in [
        ("das", DaSamConfig::das_only(0.05), &models[6]),
        ("da-sam-2", with(2), &models[9]),
        ("da-sam", with(4), &models[7]),
        ("da-sam-8", with(8), &models[10]),
    ] {
        let mut da_sam = DaSam::new(vec![model.group()], base(), config)?;
        candidates.push(Candidate::new(&arm(key), net.steps, move || {
            da_sam.step(|_| Ok(model.domain_losses()))?;
            Ok(())
        }));
    }
    let (params, model) = (models[8].params()?, &models[8]);
    candidates.push(Candidate::new(&arm("passes"), net.steps, move || {
        for _ in 0..2 {
            std::hint::black_box(params.gradient(&model.loss())?);
        }
        Ok(())
    }));
    interleave(context, METRIC, rounds, &mut candidates)
}

/// The step that every cost is measured against: a gradient, and the base optimizer's step on it.
fn base_alone<'a>(arm: &str, net: &Net, model: &'a Model) -> Result<Candidate<'a>> {
    let params = model.params()?;
    let mut base = Sgd::with_momentum(0.01, 0.9);
    Ok(Candidate::new(arm, net.steps, move || {
        let gradient = params.gradient(&model.loss())?;
        Ok(step_on(&mut base, &params, &gradient)?)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use tensor::tch::Device;

    /// A network that takes no time.
    const TINY: Net = Net { name: "tiny", widths: &[4, 8, 10], batch: 10, steps: 3 };

    #[test]
    fn the_reference_takes_one_pass_and_the_same_steps_as_the_wrapper_at_radius_zero() {
        let (alone, wrapped) = (Model::new(&TINY, Device::Cpu).unwrap(), Model::new(&TINY, Device::Cpu).unwrap());
        (base_alone("sgd", &TINY, &alone).unwrap().round)().unwrap();
        let base = Sgd::with_momentum(0.01, 0.9);
        let mut sam = Sam::new(vec![wrapped.group()], base, SamConfig::sam(0.0)).unwrap();
        for _ in 0..TINY.steps {
            sam.step(wrapped.closure()).unwrap();
        }
        let (a, b) = (alone.params().unwrap(), wrapped.params().unwrap());
        let start = Model::new(&TINY, Device::Cpu).unwrap().params().unwrap();
        for ((a, b), start) in a.tensors().iter().zip(b.tensors()).zip(start.tensors()) {
            assert_eq!(a, b);
            assert_ne!(a, start);
        }
    }

    #[test]
    fn every_arm_is_timed() {
        static NEVER: AtomicBool = AtomicBool::new(false);
        let context =
            Context { mode: Mode::Quick, device: Device::Cpu, threads: 1, peer_python: None, interrupted: &NEVER };
        let timed: Vec<String> = time(&context, &TINY, 1).unwrap().into_iter().map(|(arm, _)| arm).collect();
        let of_small = |arm: &Arm| arm.name.strip_suffix("small").map(|key| format!("{key}tiny"));
        let described: Vec<String> = experiment().spec.arms.iter().filter_map(of_small).collect();
        assert_eq!(timed, described);
        let claims = experiment().spec.claims;
        let references: Vec<&str> = claims.iter().map(|c| c.reference.as_str()).collect();
        assert!(references.iter().all(|r| !r.contains("wrapped")), "a cost is measured against our own wrapper");
    }
}
