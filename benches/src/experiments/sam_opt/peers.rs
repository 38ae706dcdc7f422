//! The Python peer: `pytorch_optimizer`'s SAM on PyTorch, in a process of its own, interleaved with ours.

use super::nets::{LARGE, Model, Net, SMALL};
use super::peer::{Peer, same_work};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::{Sam, SamConfig, Sgd};
use std::cell::RefCell;

const METRIC: &str = "step";
const LOSS: &str = "loss";
/// Steps after which both sides' losses are compared.
const STEPS: usize = 20;
const SCRIPT: &str = include_str!("../../../peers/sam_opt.py");

pub(super) fn experiment() -> Experiment {
    let arm =
        |side: &str, net: &str, label: &str, role, note: &str| Arm::new(&format!("{side} {net}"), label, role, note);
    let claim = |name: &str, statement: &str, net: &str, test| Claim {
        name: name.into(),
        statement: statement.into(),
        source: "ours".into(),
        metric: METRIC.into(),
        arm: format!("ours {net}"),
        reference: format!("peer {net}"),
        test,
    };
    let (small, large) = ("64-128-128-10, batch 64", "784-2048-2048-2048-10, batch 256");
    Experiment {
        spec: Spec {
            name: "sam-peers".into(),
            krate: "sam-opt".into(),
            title: "SAM against pytorch_optimizer".into(),
            protocol: "Our SAM over our SGD (momentum 0.9) against SAM of the Python package pytorch_optimizer 4.1.0 \
                over torch.optim.SGD on PyTorch 2.11.0, same networks, batches, starting weights and threads, one \
                process each, rounds in turn. On two cores both sides' small-network steps double in time while the scheduler keeps a process's two threads on \
                one core, which lasts for seconds; the samples show it. Both do the same work: if their losses after 20 steps differed by more than \
                a thousandth, the experiment would fail."
                .into(),
            data: vec![],
            kind: Kind::Peers,
            metrics: vec![
                Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3),
                Metric::new(LOSS, "loss after 20 steps", "nats", Direction::Neither, 5),
            ],
            arms: vec![
                arm("peer", "small", "pytorch_optimizer, small", Role::Peer, small),
                arm("ours", "small", "sam-opt, small", Role::Method, small),
                arm("peer", "large", "pytorch_optimizer, large", Role::Peer, large),
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
            ],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: 40.0,
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let peer = RefCell::new(Peer::start(context, SCRIPT)?);
    let mut outcomes = Vec::new();
    for net in [&SMALL, &LARGE] {
        outcomes.extend(compare(context, net, &peer)?);
    }
    Ok(outcomes)
}

fn compare(context: &Context, net: &Net, peer: &RefCell<Peer>) -> Result<Outcomes> {
    let rounds = match context.mode {
        Mode::Quick => 8,
        Mode::Full => 30,
    };
    let model = Model::new(net, context.device)?;
    let new_sam = |model: &Model| Sam::new(vec![model.group()], Sgd::with_momentum(0.01, 0.9), SamConfig::sam(0.05));
    let mut sam = new_sam(&model)?;
    let (ours, theirs) = (format!("ours {}", net.name), format!("peer {}", net.name));
    let mut candidates = vec![
        Candidate { arm: theirs.clone(), round: Box::new(|| peer.borrow_mut().number("time", net.name, net.steps)) },
        Candidate::new(&ours, net.steps, || {
            sam.step(model.closure())?;
            Ok(())
        }),
    ];
    let mut outcomes = interleave(context, METRIC, rounds, &mut candidates)?;
    drop(candidates);
    let fresh = Model::new(net, context.device)?;
    let mut sam = new_sam(&fresh)?;
    for _ in 0..STEPS {
        sam.step(fresh.closure())?;
    }
    let losses = [(theirs, peer.borrow_mut().number("loss", net.name, STEPS)?), (ours, fresh.loss().double_value(&[]))];
    same_work(net.name, STEPS, losses[1].1, losses[0].1)?;
    for (arm, loss) in losses {
        if let Some((_, outcome)) = outcomes.iter_mut().find(|(name, _)| *name == arm) {
            outcome.set(LOSS, loss);
        }
    }
    Ok(outcomes)
}
