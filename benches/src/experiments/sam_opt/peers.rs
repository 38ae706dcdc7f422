//! The Python peer: `pytorch_optimizer`'s SAM on PyTorch, in a process of its own, interleaved with ours.

use super::nets::{LARGE, Model, Net, SMALL};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::{Context as _, Result, bail};
use sam_opt::{Sam, SamConfig, Sgd};
use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const METRIC: &str = "step";
const LOSS: &str = "loss";
/// Steps after which both sides' losses are compared.
pub(super) const STEPS: usize = 20;
/// Largest relative difference of the losses for which both sides count as doing the same work. They do the same sums
/// in f32 in another order, and 20 steps let the differences grow; another radius, momentum or batch shows far above.
const TOLERANCE: f64 = 1e-3;
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

/// The peer's process.
pub(super) struct Peer {
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    pub(super) fn start(python: &Path, script: &str, threads: usize) -> Result<Self> {
        let mut child = Command::new(python)
            .args(["-I", "-u", "-c", script, &threads.to_string()])
            // The loader's path of this process leads to another libtorch than the peer's own.
            .env_remove("LD_LIBRARY_PATH")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} can't be started", python.display()))?;
        let ask = child.stdin.take().context("the peer has a standard input")?;
        let answers = BufReader::new(child.stdout.take().context("the peer has a standard output")?);
        let mut peer = Self { child, ask, answers };
        let ready = peer.line()?;
        if !ready.starts_with("ready 2.11.0") {
            bail!("the peer said \"{ready}\" instead of \"ready 2.11.0\", the version of PyTorch that we compare with");
        }
        Ok(peer)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("the peer ended without an answer; its message is above");
        }
        Ok(line.trim().to_owned())
    }

    pub(super) fn number(&mut self, task: &str, net: &str, steps: usize) -> Result<f64> {
        writeln!(self.ask, "{task} {net} {steps}")?;
        let line = self.line()?;
        line.parse().with_context(|| format!("the peer answered \"{line}\" instead of a number"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already; then there is nobody to tell.
        let _ = writeln!(self.ask, "quit");
        let _ = self.child.wait();
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let python = context.peer_python.as_deref().context(
        "the peers' Python isn't known: use `cargo xtask bench --peers`, which makes its virtual environment",
    )?;
    let peer = RefCell::new(Peer::start(python, SCRIPT, context.threads)?);
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
    same_work(net.name, losses[1].1, losses[0].1)?;
    for (arm, loss) in losses {
        if let Some((_, outcome)) = outcomes.iter_mut().find(|(name, _)| *name == arm) {
            outcome.set(LOSS, loss);
        }
    }
    Ok(outcomes)
}

/// Refuses a comparison of two sides that don't train alike.
pub(super) fn same_work(net: &str, ours: f64, theirs: f64) -> Result<()> {
    let relative = (ours - theirs).abs() / theirs.abs();
    // NaN is no agreement.
    if relative.is_nan() || relative > TOLERANCE {
        bail!(
            "After {STEPS} steps on the {net} network our loss is {ours} and the peer's {theirs}: a relative difference \
             of {relative:.1e}, but at most {TOLERANCE:.0e} was expected. The two sides don't do the same work, so their \
             times can't be compared: make the settings in benches/peers/sam_opt.py and peers.rs equal."
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_with_other_losses_are_not_compared() {
        assert!(same_work("small", 2.0019, 2.0).is_ok() && same_work("small", 1.9981, 2.0).is_ok());
        for (ours, theirs) in [(2.003, 2.0), (1.997, 2.0), (f64::NAN, 2.0), (2.0, f64::INFINITY), (1.0, 0.0)] {
            let message = same_work("small", ours, theirs).unwrap_err().to_string();
            assert!(message.contains(&ours.to_string()) && message.contains(&theirs.to_string()), "{message}");
            assert!(message.contains("the small network") && message.contains("1e-3"), "{message}");
        }
    }
}
