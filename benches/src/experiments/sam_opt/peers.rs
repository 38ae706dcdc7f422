//! The Python peers: `pytorch_optimizer`'s SAM on PyTorch and optax's on JAX, each in a process of its own, interleaved
//! with ours.

use super::nets::{LARGE, Model, Net, SMALL};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::peer::{Peer, same_work};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::{Sam, SamConfig, Sgd};
use std::cell::RefCell;

const METRIC: &str = "step";
const LOSS: &str = "loss";
const COMPILE: &str = "compile";
/// Steps after which both sides' losses are compared.
const STEPS: usize = 20;
const SCRIPT: &str = include_str!("../../../peers/sam_opt.py");
const OPTAX: &str = include_str!("../../../peers/optax_sam.py");
/// JAX's version.
const JAX: &str = "0.7.2";

pub(super) fn experiment() -> Experiment {
    let arm =
        |side: &str, net: &str, label: &str, role, note: &str| Arm::new(&format!("{side} {net}"), label, role, note);
    let against = |peer: &str, name: &str, statement: &str, net: &str, test| Claim {
        name: name.into(),
        statement: statement.into(),
        source: "ours".into(),
        metric: METRIC.into(),
        arm: format!("ours {net}"),
        reference: format!("{peer} {net}"),
        test,
    };
    let claim = |name: &str, statement: &str, net: &str, test| against("peer", name, statement, net, test);
    let (small, large) = ("64-128-128-10, batch 64", "784-2048-2048-2048-10, batch 256");
    Experiment {
        spec: Spec {
            name: "sam-peers".into(),
            krate: "sam-opt".into(),
            title: "SAM against pytorch_optimizer and optax".into(),
            protocol: "Our SAM over our SGD (momentum 0.9) against SAM of the Python package pytorch_optimizer 4.1.0 \
                over torch.optim.SGD on PyTorch 2.11.0, and against optax.contrib.sam 0.2.6 over optax.sgd, compiled as one \
                step by JAX 0.7.2 (compilation is reported apart), same networks, batches, starting weights and threads, one \
                process each, rounds in turn. On two cores both sides' small-network steps double in time while the scheduler keeps a process's two threads on \
                one core, which lasts for seconds; the samples show it. Both do the same work: if the losses after 20 steps differed by more than \
                a thousandth, the experiment would fail."
                .into(),
            data: vec![],
            kind: Kind::Peers,
            metrics: vec![
                Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3),
                Metric::new(LOSS, "loss after 20 steps", "nats", Direction::Neither, 5),
                Metric::new(COMPILE, "compilation and first step", "s", Direction::Lower, 2),
            ],
            arms: vec![
                arm("peer", "small", "pytorch_optimizer, small", Role::Peer, small),
                arm("optax", "small", "optax on JAX, small", Role::Peer, small),
                arm("ours", "small", "sam-opt, small", Role::Method, small),
                arm("peer", "large", "pytorch_optimizer, large", Role::Peer, large),
                arm("optax", "large", "optax on JAX, large", Role::Peer, large),
                arm("ours", "large", "sam-opt, large", Role::Method, large),
            ],
            claims: vec![
                claim(
                    "small",
                    "Our step is at least 1.5 times as fast on the small network.",
                    "small",
                    Test::SpeedupAtLeast(1.5),
                ),
                claim(
                    "large",
                    "Our step is at least as fast on the large network.",
                    "large",
                    Test::SpeedupAtLeast(1.0),
                ),
                against(
                    "optax",
                    "optax-small",
                    "Our step is at least as fast as optax's compiled one on the small network.",
                    "small",
                    Test::SpeedupAtLeast(1.0),
                ),
                against(
                    "optax",
                    "optax-large",
                    "Our step is at least as fast as optax's compiled one on the large network.",
                    "large",
                    Test::SpeedupAtLeast(1.0),
                ),
            ],
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (20.0, 54.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let peers = [
        ("peer", RefCell::new(Peer::start(context, SCRIPT)?)),
        ("optax", RefCell::new(Peer::start_version(context, OPTAX, JAX)?)),
    ];
    let mut outcomes = Vec::new();
    for net in [&SMALL, &LARGE] {
        outcomes.extend(compare(context, net, &peers)?);
    }
    Ok(outcomes)
}

fn compare(context: &Context, net: &Net, peers: &[(&str, RefCell<Peer>)]) -> Result<Outcomes> {
    let rounds = match context.mode {
        Mode::Quick => 8,
        Mode::Full => 30,
    };
    let model = Model::new(net, context.device)?;
    let new_sam = |model: &Model| Sam::new(vec![model.group()], Sgd::with_momentum(0.01, 0.9), SamConfig::sam(0.05));
    let mut sam = new_sam(&model)?;
    let ours = format!("ours {}", net.name);
    let mut candidates: Vec<Candidate<'_>> = Vec::new();
    for (side, peer) in peers {
        let round = || peer.borrow_mut().number("time", net.name, net.steps);
        candidates.push(Candidate { arm: format!("{side} {}", net.name), round: Box::new(round) });
    }
    candidates.push(Candidate::new(&ours, net.steps, || {
        sam.step(model.closure())?;
        Ok(())
    }));
    let mut outcomes = interleave(context, METRIC, rounds, &mut candidates)?;
    drop(candidates);
    let fresh = Model::new(net, context.device)?;
    let mut sam = new_sam(&fresh)?;
    for _ in 0..STEPS {
        sam.step(fresh.closure())?;
    }
    let loss = fresh.loss().double_value(&[]);
    let mut set = |arm: &str, metric: &str, value: f64| {
        if let Some((_, outcome)) = outcomes.iter_mut().find(|(name, _)| name == arm) {
            outcome.set(metric, value);
        }
    };
    set(&ours, LOSS, loss);
    for (side, peer) in peers {
        let theirs = peer.borrow_mut().number("loss", net.name, STEPS)?;
        same_work(net.name, STEPS, loss, theirs)?;
        set(&format!("{side} {}", net.name), LOSS, theirs);
        if *side == "optax" {
            let seconds = peer.borrow_mut().number("compile", net.name, 1)?;
            set(&format!("{side} {}", net.name), COMPILE, seconds);
        }
    }
    Ok(outcomes)
}
