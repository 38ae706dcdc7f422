//! What a step of IAM costs beside SAM's, and how much of it isn't a pass.

use super::super::nets::{LARGE, MILLION, Model, Net, SMALL, wave};
use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave};
use anyhow::Result;
use sam_opt::base::step_on;
use sam_opt::{Iam, IamConfig, ParamGroup, Pass, PenaltyForm, Sam, SamConfig, Sgd};
use tensor::ParamSet;
use tensor::tch::{Device, Kind as Element, Tensor, nn::VarStore, no_grad};

const METRIC: &str = "step";
const NETS: [(&str, &str); 4] = [
    ("small", "64-128-128-10, batch 64"),
    ("large", "784-2048-2048-2048-10, batch 256"),
    ("million", "512-768-768-10, a million weights, batch 128"),
    ("conv", "14×14, two convolutions of 16 and 32 channels, 1568-10, batch 64"),
];
const ARMS: [(&str, &str, Role); 8] = [
    ("sgd", "SGD", Role::Baseline),
    ("sam", "SAM", Role::Baseline),
    ("iam-s", "IAM-S", Role::Method),
    ("iam-d", "IAM-D", Role::Method),
    ("iam-d functional", "IAM-D, functional", Role::Method),
    ("iam-de", "IAM-DE", Role::Method),
    ("iam-de functional", "IAM-DE, functional", Role::Method),
    ("passes", "the passes of IAM-D alone", Role::Reference),
];

pub(super) fn experiment() -> Experiment {
    let mut arms = Vec::new();
    for (net, note) in NETS {
        for (key, label, role) in ARMS {
            arms.push(Arm::new(&format!("{key} {net}"), &format!("{label}, {net}"), role, note));
        }
    }
    let mut claims = Vec::new();
    for (net, _) in NETS {
        for (key, label, bound) in [("iam-s", "IAM-S", 1.25), ("iam-d", "IAM-D", 1.75)] {
            claims.push(Claim {
                name: format!("{key}-{net}"),
                statement: format!("A step of {label} costs at most {bound} of SAM's ({net} network)."),
                source: "ours".into(),
                metric: METRIC.into(),
                arm: format!("{key} {net}"),
                reference: format!("sam {net}"),
                test: Test::RatioAtMost(bound),
            });
        }
    }
    for net in ["large", "million"] {
        claims.push(Claim {
            name: format!("vector-{net}"),
            statement: format!("What isn't a pass is at most a tenth of a step of IAM-D ({net} network)."),
            source: "ours".into(),
            metric: METRIC.into(),
            arm: format!("iam-d {net}"),
            reference: format!("passes {net}"),
            test: Test::RatioAtMost(1.111),
        });
    }
    Experiment {
        spec: Spec {
            name: "iam-cost".into(),
            krate: "sam-opt".into(),
            title: "Cost of a step of IAM".into(),
            protocol: "One training step of each optimizer over SGD with momentum, interleaved in one process (a round of \
                each in turn, median of the rounds, bootstrap interval of the ratio), all on the same batch. Counted in \
                forward passes, a backward pass being two, SGD takes 3, SAM 6, IAM-S 7, IAM-D 10 (functional 9) and \
                IAM-DE 7 (functional 6). \"The passes of IAM-D alone\" are one forward pass and three gradients: what a \
                step of IAM-D costs beyond them is noise, norms, shifts, divergences and the base step."
                .into(),
            data: vec![],
            kind: Kind::FullOnly,
            metrics: vec![Metric::new(METRIC, "time of a step", "ms", Direction::Lower, 3)],
            arms,
            claims,
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (48.0, 91.0),
        },
        body: Body::Together(run),
    }
}

/// A network with its batch.
trait Problem {
    fn group(&self) -> ParamGroup;
    fn params(&self) -> Result<ParamSet>;
    /// With the weights that a pass gives where it gives any.
    fn logits(&self, pass: Option<&Pass<'_>>) -> Tensor;
    fn loss_of(&self, logits: &Tensor) -> Tensor;
}

impl Problem for Model {
    fn group(&self) -> ParamGroup {
        self.group()
    }

    fn params(&self) -> Result<ParamSet> {
        self.params()
    }

    fn logits(&self, pass: Option<&Pass<'_>>) -> Tensor {
        self.logits(pass)
    }

    fn loss_of(&self, logits: &Tensor) -> Tensor {
        self.loss_of(logits)
    }
}

/// Two convolutions with pooling, and a linear layer.
struct Conv {
    store: VarStore,
    weights: [Tensor; 3],
    x: Tensor,
    y: Tensor,
}

impl Conv {
    fn new(batch: i64, device: Device) -> Result<Self> {
        let store = VarStore::new(device);
        let weight = |name: &str, shape: &[i64], phase: f64| {
            let fan_in: i64 = shape[1..].iter().product();
            let start = wave(shape.iter().product(), (fan_in as f64).powf(-0.5), phase).reshape(shape);
            store.root().f_var_copy(name, &start)
        };
        let weights = [
            weight("first", &[16, 1, 3, 3], 0.0)?,
            weight("second", &[32, 16, 3, 3], 1.0)?,
            weight("last", &[10, 1568], 2.0)?,
        ];
        let x = wave(batch * 196, 1.0, 9.0).reshape([batch, 1, 14, 14]).to_device(device);
        let y = Tensor::arange(batch, (Element::Int64, device)).remainder(10);
        Ok(Self { store, weights, x, y })
    }
}

impl Problem for Conv {
    fn group(&self) -> ParamGroup {
        ParamGroup::from_var_store(&self.store)
    }

    fn params(&self) -> Result<ParamSet> {
        Ok(ParamSet::from_var_store(&self.store)?)
    }

    fn logits(&self, pass: Option<&Pass<'_>>) -> Tensor {
        let read =
            |name: &str, own: &Tensor| pass.and_then(|pass| pass.param(name)).unwrap_or_else(|| own.shallow_clone());
        let [first, second, last] = &self.weights;
        let convolved = |x: &Tensor, w: &Tensor| {
            x.conv2d::<&Tensor>(w, None, [1i64, 1].as_slice(), [1i64, 1].as_slice(), [1i64, 1].as_slice(), 1).relu()
        };
        let hidden = convolved(&self.x, &read("first", first)); // [b, 16, 14, 14]
        let hidden = convolved(&hidden, &read("second", second)).max_pool2d_default(2); // [b, 32, 7, 7]
        hidden.flat_view().linear::<&Tensor>(&read("last", last), None)
    }

    fn loss_of(&self, logits: &Tensor) -> Tensor {
        logits.cross_entropy_for_logits(&self.y)
    }
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let rounds = match context.mode {
        Mode::Quick => [10, 8, 8, 8],
        Mode::Full => [30, 20, 20, 30],
    };
    let device = context.device;
    let mlp = |net: &'static Net| move || Ok(Box::new(Model::new(net, device)?) as Box<dyn Problem>);
    let mut outcomes = time(context, "small", rounds[0], 30, mlp(&SMALL))?;
    outcomes.extend(time(context, "large", rounds[1], 1, mlp(&LARGE))?);
    outcomes.extend(time(context, "million", rounds[2], MILLION.steps, mlp(&MILLION))?);
    let conv = || Ok(Box::new(Conv::new(64, device)?) as Box<dyn Problem>);
    outcomes.extend(time(context, "conv", rounds[3], 5, conv)?);
    Ok(outcomes)
}

fn time(
    context: &Context,
    net: &str,
    rounds: usize,
    steps: usize,
    new: impl Fn() -> Result<Box<dyn Problem>>,
) -> Result<Outcomes> {
    let problems = ARMS.iter().map(|_| new()).collect::<Result<Vec<_>>>()?;
    let base = || Sgd::with_momentum(0.01, 0.9);
    let functional = |config: IamConfig| IamConfig { form: PenaltyForm::Functional, ..config };
    let mut candidates = Vec::new();
    for ((key, ..), problem) in ARMS.iter().zip(&problems) {
        let arm = format!("{key} {net}");
        let groups = vec![problem.group()];
        let config = match *key {
            "iam-s" => IamConfig::s(0.05),
            "iam-d" => IamConfig::d(0.05, 1.0),
            "iam-d functional" => functional(IamConfig::d(0.05, 1.0)),
            "iam-de" => IamConfig::de(0.05, 1.0),
            "iam-de functional" => functional(IamConfig::de(0.05, 1.0)),
            "sam" => {
                let mut sam = Sam::new(groups, base(), SamConfig::sam(0.05))?;
                candidates.push(Candidate::new(&arm, steps, move || {
                    sam.step(|_| Ok(problem.loss_of(&problem.logits(None))))?;
                    Ok(())
                }));
                continue;
            }
            key => {
                let (params, mut base, alone) = (problem.params()?, base(), key == "passes");
                candidates.push(Candidate::new(&arm, steps, move || {
                    if alone {
                        let _ = std::hint::black_box(no_grad(|| problem.logits(None)));
                        for _ in 0..3 {
                            std::hint::black_box(params.gradient(&problem.loss_of(&problem.logits(None)))?);
                        }
                        return Ok(());
                    }
                    let gradient = params.gradient(&problem.loss_of(&problem.logits(None)))?;
                    Ok(step_on(&mut base, &params, &gradient)?)
                }));
                continue;
            }
        };
        let mut iam = Iam::new(groups, base(), config)?;
        candidates.push(Candidate::new(&arm, steps, move || {
            iam.step(|pass| Ok(problem.logits(Some(pass))), |z| Ok(problem.loss_of(z)))?;
            Ok(())
        }));
    }
    interleave(context, METRIC, rounds, &mut candidates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_arm_is_timed_on_every_network() {
        const TINY: Net = Net { name: "tiny", widths: &[4, 8, 10], batch: 10, steps: 1 };
        let context = super::super::train::tests_context();
        let mlp = || Ok(Box::new(Model::new(&TINY, Device::Cpu)?) as Box<dyn Problem>);
        let conv = || Ok(Box::new(Conv::new(4, Device::Cpu)?) as Box<dyn Problem>);
        let mut timed = time(&context, "small", 1, 1, mlp).unwrap();
        timed.extend(time(&context, "large", 1, 1, mlp).unwrap());
        timed.extend(time(&context, "million", 1, 1, mlp).unwrap());
        timed.extend(time(&context, "conv", 1, 1, conv).unwrap());
        let timed: Vec<String> = timed.into_iter().map(|(arm, _)| arm).collect();
        let described: Vec<String> = experiment().spec.arms.into_iter().map(|arm| arm.name).collect();
        assert_eq!(timed, described);
    }
}
