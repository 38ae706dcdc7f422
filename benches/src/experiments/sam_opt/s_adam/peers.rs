//! The Python peer of S-Adam: PyTorch's AdamW with the published probe loop, in a process of its own.

use super::super::nets::{LARGE, Model, Net};
use super::cost::{DIGITS, MILLION};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::peer::{Peer, same_work};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::{SAdam, SAdamConfig};
use std::cell::RefCell;

const METRIC: &str = "step";
const LOSS: &str = "loss";
const DAMPING: &str = "damping";
const SCRIPT: &str = include_str!("../../../../peers/s_adam.py");
/// Steps after which both sides' losses are compared. AdamW divides by the root of the mean square, so rounding in tiny
/// gradients becomes full steps: on the large network PyTorch with one thread and with two is 1e-3 apart after 20 steps,
/// and not at all after 5, while the loss has moved by some percent.
const STEPS: usize = 5;
/// Steps for the mean damping.
const DAMPED: usize = 200;
const NETS: [&Net; 3] = [&DIGITS, &MILLION, &LARGE];

pub(super) fn experiment() -> Experiment {
    let mut arms = Vec::new();
    let mut claims = Vec::new();
    for (net, bound) in [(&DIGITS, 1.5), (&MILLION, 1.0), (&LARGE, 1.0)] {
        let widths: Vec<String> = net.widths.iter().map(ToString::to_string).collect();
        let note = format!("{}, batch {}", widths.join("-"), net.batch);
        for (side, label, role) in [
            ("peer", "PyTorch", Role::Peer),
            ("peer-foreach", "PyTorch, foreach", Role::Peer),
            ("ours", "sam-opt", Role::Method),
        ] {
            arms.push(Arm::new(&format!("{side} {}", net.name), &format!("{label}, {}", net.name), role, note.clone()));
        }
        for side in ["peer", "peer-foreach"] {
            let fast = if bound > 1.0 { format!("{bound} times as fast") } else { "as fast".to_owned() };
            let words = if side == "peer" { "PyTorch's AdamW" } else { "PyTorch's multi-tensor AdamW" };
            claims.push(Claim {
                name: format!("s-adam-{side}-{}", net.name),
                statement: format!("Our S-Adam step is at least {fast} as one over {words} ({}).", net.name),
                source: "ours".into(),
                metric: METRIC.into(),
                arm: format!("ours {}", net.name),
                reference: format!("{side} {}", net.name),
                test: Test::SpeedupAtLeast(bound),
            });
        }
    }
    Experiment {
        spec: Spec {
            name: "s-adam-peers".into(),
            krate: "sam-opt".into(),
            title: "S-Adam against PyTorch".into(),
            protocol: "Our S-Adam (published form, k 2) against PyTorch 2.11.0's AdamW, one tensor at a time and \
                multi-tensor, with the published probe loop written in Python from the formulas; same networks, batches, \
                starting weights and threads, one process each, rounds in turn. Both do the same work: if their losses \
                after 5 steps without damping differed by more than a thousandth, the experiment would fail. Probes are \
                random on both sides; the mean damping of 200 steps is shown for both."
                .into(),
            data: vec![],
            kind: Kind::Peers,
            metrics: vec![
                Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3),
                Metric::new(LOSS, "loss after 5 undamped steps", "nats", Direction::Neither, 5),
                Metric::new(DAMPING, "mean damping of 200 steps", "", Direction::Neither, 3),
            ],
            arms,
            claims,
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (36.0, 36.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let peer = RefCell::new(Peer::start(context, SCRIPT)?);
    let mut outcomes = Vec::new();
    for net in NETS {
        outcomes.extend(compare(context, net, &peer)?);
    }
    Ok(outcomes)
}

fn new_s_adam(model: &Model, lambda: f64) -> Result<SAdam> {
    Ok(SAdam::new(vec![model.group()], SAdamConfig { lr: 1e-4, lambda, ..SAdamConfig::default() })?)
}

fn compare(context: &Context, net: &Net, peer: &RefCell<Peer>) -> Result<Outcomes> {
    let rounds = match context.mode {
        Mode::Quick => 8,
        Mode::Full => 20,
    };
    let model = Model::new(net, context.device)?;
    let mut s_adam = new_s_adam(&model, SAdamConfig::default().lambda)?;
    let arm = |side: &str| format!("{side} {}", net.name);
    let foreach = format!("{}-foreach", net.name);
    let ask = |name: String| move || peer.borrow_mut().number("time", &name, net.steps);
    let mut candidates = vec![
        Candidate { arm: arm("peer"), round: Box::new(ask(net.name.to_owned())) },
        Candidate { arm: arm("peer-foreach"), round: Box::new(ask(foreach)) },
        Candidate::new(&arm("ours"), net.steps, || {
            s_adam.step(model.closure())?;
            Ok(())
        }),
    ];
    let mut outcomes = interleave(context, METRIC, rounds, &mut candidates)?;
    drop(candidates);

    let fresh = Model::new(net, context.device)?;
    let mut undamped = new_s_adam(&fresh, 0.0)?;
    for _ in 0..STEPS {
        undamped.step(fresh.closure())?;
    }
    let (ours, theirs) = (fresh.loss().double_value(&[]), peer.borrow_mut().number("loss", net.name, STEPS)?);
    same_work(net.name, STEPS, ours, theirs)?;

    // On the larger networks 200 steps take long and say nothing more.
    let mut dampings = None;
    if net.name == DIGITS.name {
        let fresh = Model::new(net, context.device)?;
        let mut damped = new_s_adam(&fresh, SAdamConfig::default().lambda)?;
        let mut mean = 0.0;
        for _ in 0..DAMPED {
            context.check()?;
            mean += damped.step(fresh.closure())?.damping / DAMPED as f64;
        }
        dampings = Some((mean, peer.borrow_mut().number("damping", net.name, DAMPED)?));
    }
    for (name, outcome) in &mut outcomes {
        let own = *name == arm("ours");
        outcome.set(LOSS, if own { ours } else { theirs });
        if let Some((ours, theirs)) = dampings {
            outcome.set(DAMPING, if own { ours } else { theirs });
        }
    }
    Ok(outcomes)
}
