//! The Python peer of IAM: the same steps with `torch.func.functional_call` on PyTorch, interleaved with ours.

use super::super::nets::{LARGE, Model, Net, SMALL, wave};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::peer::{Peer, same_work};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::{Iam, IamConfig, Sgd};
use std::cell::RefCell;
use tensor::tch::Tensor;
use tensor::{ParamSet, ParamVec};

const METRIC: &str = "step";
const LOSS: &str = "loss";
const INCONSISTENCY: &str = "inconsistency";
/// Steps after which both sides' losses are compared.
const STEPS: usize = 20;
const SCRIPT: &str = include_str!("../../../../peers/iam.py");
const METHODS: [(&str, &str); 2] = [("iam-d", "IAM-D"), ("iam-s", "IAM-S")];
const NETS: [(&Net, &str); 2] = [(&SMALL, "64-128-128-10, batch 64"), (&LARGE, "784-2048-2048-2048-10, batch 256")];
const RHO: f64 = 0.05;
const BETA: f64 = 1.0;

pub(super) fn experiment() -> Experiment {
    let (mut arms, mut claims) = (Vec::new(), Vec::new());
    for (net, note) in NETS {
        let net = net.name;
        for (key, label) in METHODS {
            arms.push(Arm::new(&format!("peer {key} {net}"), &format!("PyTorch, {label}, {net}"), Role::Peer, note));
            arms.push(Arm::new(&format!("ours {key} {net}"), &format!("sam-opt, {label}, {net}"), Role::Method, note));
            let (bound, words) = if net == SMALL.name { (1.5, "1.5 times as fast") } else { (1.0, "as fast") };
            claims.push(Claim {
                name: format!("{key}-{net}"),
                statement: format!("Our step of {label} is at least {words} on the {net} network."),
                source: "ours".into(),
                metric: METRIC.into(),
                arm: format!("ours {key} {net}"),
                reference: format!("peer {key} {net}"),
                test: Test::SpeedupAtLeast(bound),
            });
        }
    }
    Experiment {
        spec: Spec {
            name: "iam-peers".into(),
            krate: "sam-opt".into(),
            title: "IAM against the same step in PyTorch".into(),
            protocol: "Our IAM over our SGD (momentum 0.9) against the same step written with torch.func.functional_call \
                over torch.optim.SGD on PyTorch 2.11.0: same networks, batches, starting weights, radius and threads, one \
                process each, rounds in turn. Each side draws its own normal noise when it is timed. The Python step is \
                the functional form (9 forward passes for IAM-D, a backward pass counting two), ours the split form (10). \
                Both do the same work: from the same noise, a sine wave, their losses after 20 steps must agree to a \
                thousandth, or the experiment fails."
                .into(),
            data: vec![],
            kind: Kind::Peers,
            metrics: vec![
                Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3),
                Metric::new(LOSS, "loss after 20 steps from the same noise", "nats", Direction::Neither, 5),
                Metric::new(INCONSISTENCY, "its inconsistency there", "nats", Direction::Neither, 6),
            ],
            arms,
            claims,
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (40.0, 68.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let peer = RefCell::new(Peer::start(context, SCRIPT)?);
    let mut outcomes = Vec::new();
    for (net, _) in NETS {
        for (key, _) in METHODS {
            outcomes.extend(compare(context, net, key, &peer)?);
        }
    }
    Ok(outcomes)
}

fn optimizer(model: &Model, key: &str) -> Result<Iam<Sgd>> {
    let config = if key == "iam-s" { IamConfig::s(RHO) } else { IamConfig::d(RHO, BETA) };
    Ok(Iam::new(vec![model.group()], Sgd::with_momentum(0.01, 0.9), config)?)
}

fn compare(context: &Context, net: &Net, key: &str, peer: &RefCell<Peer>) -> Result<Outcomes> {
    let rounds = match context.mode {
        Mode::Quick => 8,
        Mode::Full => 20,
    };
    let steps = net.steps.div_ceil(2);
    let model = Model::new(net, context.device)?;
    let mut iam = optimizer(&model, key)?;
    let (ours, theirs) = (format!("ours {key} {}", net.name), format!("peer {key} {}", net.name));
    let task = |what: &str| format!("{what} {key}");
    let mut candidates = vec![
        Candidate { arm: theirs.clone(), round: Box::new(|| peer.borrow_mut().number(&task("time"), net.name, steps)) },
        Candidate::new(&ours, steps, || {
            iam.step(|pass| Ok(model.logits(Some(pass))), |z| Ok(model.loss_of(z)))?;
            Ok(())
        }),
    ];
    let mut outcomes = interleave(context, METRIC, rounds, &mut candidates)?;
    drop(candidates);
    let (loss, inconsistency) = trained(net, key, context)?;
    let their_loss = peer.borrow_mut().number(&task("loss"), net.name, STEPS)?;
    let their_inconsistency = peer.borrow_mut().number(&task("inconsistency"), net.name, STEPS)?;
    same_work(net.name, STEPS, loss, their_loss)?;
    for (arm, loss, inconsistency) in [(theirs, their_loss, their_inconsistency), (ours, loss, inconsistency)] {
        if let Some((_, outcome)) = outcomes.iter_mut().find(|(name, _)| *name == arm) {
            outcome.set(LOSS, loss);
            outcome.set(INCONSISTENCY, inconsistency);
        }
    }
    Ok(outcomes)
}

/// Loss after [`STEPS`] steps from noise that both sides can make, and the inconsistency of the last step.
fn trained(net: &Net, key: &str, context: &Context) -> Result<(f64, f64)> {
    let model = Model::new(net, context.device)?;
    let mut iam = optimizer(&model, key)?;
    iam.set_start_fn(|_, set| Ok(start(set)));
    let mut inconsistency = 0.0;
    for _ in 0..STEPS {
        let stats = iam.step(|pass| Ok(model.logits(Some(pass))), |z| Ok(model.loss_of(z)))?;
        inconsistency = stats.inconsistency.unwrap_or(0.0);
    }
    Ok((model.loss().double_value(&[]), inconsistency))
}

/// A sine wave of about unit length over all parameters, in the order of their names.
fn start(set: &ParamSet) -> ParamVec {
    let scale = (2.0 / set.numel() as f64).sqrt();
    let part = |(i, t): (usize, &Tensor)| {
        Some(wave(t.numel() as i64, scale, i as f64 + 0.5).reshape(t.size()).to_device(t.device()))
    };
    ParamVec::new(set.tensors().iter().enumerate().map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::tch::Device;

    #[test]
    fn the_shared_noise_has_about_unit_length_and_both_methods_train_with_it() {
        let context = super::super::train::tests_context();
        let model = Model::new(&SMALL, Device::Cpu).unwrap();
        assert!((start(&model.params().unwrap()).norm() - 1.0).abs() < 0.01);
        let before = model.loss().double_value(&[]);
        for (key, _) in METHODS {
            let (loss, inconsistency) = trained(&SMALL, key, &context).unwrap();
            assert!(loss.is_finite() && (loss - before).abs() > 1e-3 && inconsistency > 0.0, "{key}: {before} {loss}");
        }
    }
}
