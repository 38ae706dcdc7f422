//! Protocol D of the specification `sam-opt-s-adam`: non-smooth functions with a known minimum and known kinks.

use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Role, Spec, Test};
use anyhow::{Context as _, Result};
use datasets::diabetes;
use rand::Rng as _;
use sam_opt::s_adam::{LgiKind, ProbeOpts, probe_lgi_of};
use sam_opt::{ParamGroup, ProxSgd, ProxSgdConfig, SAdam, SAdamConfig, Sam, SamConfig};
use std::sync::OnceLock;
use tensor::ndarray::{Array1, Array2, Axis, array};
use tensor::tch::{Kind as Element, Tensor};
use tensor::{Seed, interop, stats};

/// Learning rate and steps [official code].
const LR: f64 = 0.05;
const STEPS: usize = 600;
/// Momentum of proximal SGD [official code].
const MOMENTUM: f64 = 0.9;
/// Width of the uniform jitter of the starts, so that seeds differ [our choice].
const JITTER: f64 = 0.1;
/// λ of the Lasso, as a share of the smallest λ at which every weight is 0 [specification].
const LASSO: f64 = 0.1;
/// Steps between the points at which statistics are compared with the distance to the kink.
const EVERY: usize = 5;

/// `½‖Xw − y‖²/n + λ‖w‖₁` on the standardized diabetes data, and its minimum.
struct Lasso {
    x: Array2<f64>,
    y: Array1<f64>,
    lambda: f64,
    minimum: f64,
}

impl Lasso {
    fn get() -> &'static Self {
        static LASSO_PROBLEM: OnceLock<Lasso> = OnceLock::new();
        LASSO_PROBLEM.get_or_init(Self::new)
    }

    fn new() -> Self {
        let set = diabetes::load();
        let (mut x, mut y) = (set.x, set.y);
        for mut column in x.columns_mut() {
            let (mean, sd) = (column.mean().unwrap_or(0.0), column.std(0.0));
            column.mapv_inplace(|v| (v - mean) / sd);
        }
        let (mean, sd) = (y.mean().unwrap_or(0.0), y.std(0.0));
        y.mapv_inplace(|v| (v - mean) / sd);
        let largest = x.t().dot(&y).iter().fold(0.0f64, |a, b| a.max(b.abs())) / y.len() as f64;
        let mut lasso = Self { x, y, lambda: LASSO * largest, minimum: 0.0 };
        let w = lasso.coordinate_descent();
        lasso.minimum = lasso.value(&w);
        lasso
    }

    fn value(&self, w: &Array1<f64>) -> f64 {
        let residual = self.x.dot(w) - &self.y;
        0.5 * residual.dot(&residual) / self.y.len() as f64 + self.lambda * w.iter().map(|v| v.abs()).sum::<f64>()
    }

    /// Minimizes each weight in turn until none moves by more than 1e-12. The columns have mean square 1.
    fn coordinate_descent(&self) -> Array1<f64> {
        let n = self.y.len() as f64;
        let mut w = Array1::zeros(self.x.ncols());
        let mut residual = self.y.clone();
        for _ in 0..100_000 {
            let mut moved = 0.0f64;
            for (j, column) in self.x.axis_iter(Axis(1)).enumerate() {
                let old: f64 = w[j];
                let target = old + column.dot(&residual) / n;
                let new = target.signum() * (target.abs() - self.lambda).max(0.0);
                residual.scaled_add(old - new, &column);
                moved = moved.max((new - old).abs());
                w[j] = new;
            }
            if moved < 1e-12 {
                break;
            }
        }
        w
    }
}

/// `20|y − x²| + (1 − x)²` of `(x, y)` [official code]; its minimum is 0 at (1, 1).
fn valley(w: &Tensor) -> Tensor {
    let (x, y) = (w.get(0), w.get(1));
    (&y - x.square()).abs() * 20.0 + (x - 1.0).square()
}

fn valley_of(w: &Array1<f64>) -> f64 {
    20.0 * (w[1] - w[0] * w[0]).abs() + (1.0 - w[0]).powi(2)
}

fn valley_gradient(w: &Array1<f64>) -> Array1<f64> {
    let side = 20.0 * (w[1] - w[0] * w[0]).signum();
    array![-2.0 * side * w[0] - 2.0 * (1.0 - w[0]), side]
}

/// Distance of a point to the kink `y = x²`, to first order.
fn distance(w: &Array1<f64>) -> f64 {
    (w[1] - w[0] * w[0]).abs() / (1.0 + 4.0 * w[0] * w[0]).sqrt()
}

/// S-Adam's forms; AdamW is constant damping 1.
fn form(arm: &str) -> Option<SAdamConfig> {
    let base = || SAdamConfig { lr: LR, weight_decay: 0.0, sync_rng: false, ..SAdamConfig::default() };
    Some(match arm {
        "adamw" => SAdamConfig { lgi: LgiKind::Constant(1.0), ..base() },
        "s-adam" => base(),
        "residual" => SAdamConfig { lgi: LgiKind::Residual, lambda: 1.0, ..base() },
        "kink" => SAdamConfig { lgi: LgiKind::Kink, lambda: 1.0, ..base() },
        _ => return None,
    })
}

/// One run: the values after each step, the points, and the mean damping.
struct Path {
    last: f64,
    damping: f64,
    points: Vec<Array1<f64>>,
}

fn s_adam(config: SAdamConfig, start: &[f64], loss: &dyn Fn(&Tensor) -> Tensor) -> Result<Path> {
    let w = Tensor::from_slice(start).set_requires_grad(true);
    let mut optimizer = SAdam::new(vec![ParamGroup::new([("w".to_owned(), w.shallow_clone())])], config)?;
    let (mut damping, mut points) = (0.0, Vec::new());
    for _ in 0..STEPS {
        points.push(Array1::from_vec(Vec::try_from(w.detach())?));
        damping += optimizer.step(|_| Ok(loss(&w)))?.damping / STEPS as f64;
    }
    Ok(Path { last: loss(&w).double_value(&[]), damping, points })
}

/// Where a seed starts.
fn jittered(start: &[f64], seed: Seed) -> Vec<f64> {
    let mut rng = seed.rng();
    start.iter().map(|v| v + rng.random_range(-JITTER..JITTER)).collect()
}

/// A problem with its start.
struct Problem {
    start: Vec<f64>,
    loss: Box<dyn Fn(&Tensor) -> Tensor>,
    minimum: f64,
}

fn problems(seed: u64) -> Result<[Problem; 2]> {
    let seeds = Seed::new(seed).child("s-adam.non-smooth");
    let lasso = Lasso::get();
    let x = interop::to_tensor(&lasso.x.view())?;
    let y = interop::to_tensor(&lasso.y.view())?;
    let n = lasso.y.len() as f64;
    let loss = move |w: &Tensor| {
        let fit = (x.mv(w) - &y).square().sum(Element::Double) * (0.5 / n);
        fit + w.abs().sum(Element::Double) * lasso.lambda
    };
    Ok([
        Problem { start: jittered(&[-1.2, 1.0], seeds.child("valley")), loss: Box::new(valley), minimum: 0.0 },
        Problem {
            start: jittered(&vec![0.0; lasso.x.ncols()], seeds.child("lasso")),
            loss: Box::new(loss),
            minimum: lasso.minimum,
        },
    ])
}

fn run(_context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let [valley, lasso] = problems(seed)?;
    let mut outcome = Outcome::default();
    let config = |config: SAdamConfig| SAdamConfig { seed: Seed::new(seed).child("probes").value(), ..config };
    let mut dampings = Vec::new();
    for (metric, problem) in [("lasso", &lasso), ("valley", &valley)] {
        let last = match arm {
            "prox-sgd" if metric == "valley" => continue,
            "prox-sgd" => prox(problem)?,
            "constant" => {
                let paired =
                    s_adam(config(form("s-adam").context("S-Adam has a form")?), &problem.start, &problem.loss)?;
                let constant = SAdamConfig {
                    lgi: LgiKind::Constant(paired.damping),
                    ..form("adamw").context("AdamW has a form")?
                };
                dampings.push(paired.damping);
                s_adam(constant, &problem.start, &problem.loss)?.last
            }
            arm => {
                let form = form(arm).with_context(|| format!("no arm \"{arm}\""))?;
                let path = s_adam(config(form), &problem.start, &problem.loss)?;
                dampings.push(path.damping);
                path.last
            }
        };
        outcome.set(metric, last - problem.minimum);
    }
    if !dampings.is_empty() {
        outcome.set("damping", stats::mean_std(&[dampings[0], dampings[1]])?.0);
    }
    if let Some(tau) = nearness(arm, &valley, seed)? {
        outcome.set("tau", tau);
    }
    Ok(outcome)
}

/// Proximal SGD, whose loss has no L1 term.
fn prox(problem: &Problem) -> Result<f64> {
    let lasso = Lasso::get();
    let w = Tensor::from_slice(&problem.start).set_requires_grad(true);
    // With momentum the threshold counts (1 − μ)-fold.
    let base = ProxSgd::from_config(ProxSgdConfig { lr: LR, momentum: MOMENTUM, l1: lasso.lambda / (1.0 - MOMENTUM) });
    let group = ParamGroup::new([("w".to_owned(), w.shallow_clone())]);
    let mut optimizer = Sam::new(vec![group], base, SamConfig { sync_rng: false, ..SamConfig::sam(0.0) })?;
    for _ in 0..STEPS {
        optimizer.step(|_| Ok((problem.loss)(&w) - w.abs().sum(Element::Double) * lasso.lambda))?;
    }
    Ok((problem.loss)(&w).double_value(&[]))
}

/// Kendall's τ between an arm's statistic and the nearness to the kink, at the points of AdamW's path.
fn nearness(arm: &str, problem: &Problem, seed: u64) -> Result<Option<f64>> {
    if !["s-adam", "residual", "kink"].contains(&arm) {
        return Ok(None);
    }
    let path = s_adam(form("adamw").context("AdamW has a form")?, &problem.start, &problem.loss)?;
    let (mut statistics, mut near) = (Vec::new(), Vec::new());
    for (i, point) in path.points.iter().enumerate().step_by(EVERY) {
        let opts = ProbeOpts { seed: Seed::new(seed).child("near").index(i as u64).value(), ..ProbeOpts::default() };
        let report = probe_lgi_of(valley_of, point, Some(&valley_gradient(point)), &opts)?;
        statistics.push(match arm {
            "s-adam" => report.lgi,
            "residual" => report.residual.unwrap_or(0.0),
            _ => report.kink.unwrap_or(0.0),
        });
        near.push(-distance(point));
    }
    Ok(Some(stats::kendall_tau(&statistics, &near)?.tau))
}

pub(super) fn experiment() -> Experiment {
    use Direction::{Higher, Lower, Neither};
    let claim = |name: &str, statement: &str, source: &str, metric: &str, arms: (&str, &str)| Claim {
        name: format!("non-smooth-{name}"),
        statement: statement.into(),
        source: source.into(),
        metric: metric.into(),
        arm: arms.0.into(),
        reference: arms.1.into(),
        test: Test::Superior(0.0),
    };
    Experiment {
        spec: Spec {
            name: "non-smooth".into(),
            krate: "sam-opt".into(),
            title: "S-Adam on non-smooth functions with a known minimum".into(),
            protocol: "20|y − x²| + (1 − x)² from (−1.2, 1), and the Lasso ½‖Xw − y‖²/n + λ‖w‖₁ from 0 on the diabetes data \
                (442×10, columns and target standardized, λ a tenth of the smallest λ at which all weights are 0), both \
                starts jittered uniformly by 0.1; 600 full-gradient steps at the learning rate 0.05, no weight decay; the \
                metric is the distance of the last value to the minimum, 0 and that of coordinate descent. The last column \
                is Kendall's τ between each form's statistic (32 directions, σ 0.01) and the nearness to the kink y = x², at \
                every fifth point of AdamW's path. Protocol D of the specification."
                .into(),
            data: vec!["diabetes".into()],
            kind: Kind::FullOnly,
            metrics: vec![
                Metric::new("valley", "distance to the minimum, valley", "", Lower, 4),
                Metric::new("lasso", "distance to the minimum, Lasso", "", Lower, 6),
                Metric::new("damping", "mean damping", "", Neither, 3),
                Metric::new("tau", "τ of statistic and nearness to the kink", "", Higher, 3),
            ],
            arms: vec![
                Arm::new("adamw", "AdamW", Role::Baseline, "learning rate 0.05, no decay"),
                Arm::new("s-adam", "S-Adam", Role::Method, "published form, k 2, λ 2, σ 0.01"),
                Arm::new("residual", "S-Adam, residual", Role::Ablation, "k 2, λ 1, σ 0.01"),
                Arm::new("kink", "S-Adam, kink", Role::Ablation, "k 2, λ 1, σ 0.01"),
                Arm::new("constant", "Constant damping", Role::Baseline, "mean damping of the paired S-Adam run"),
                Arm::new("prox-sgd", "Prox-SGD", Role::Baseline, "learning rate 0.05, momentum 0.9, threshold for the same minimum; Lasso only"),
            ],
            claims: vec![
                claim("valley", "S-Adam ends nearer to the valley's minimum than AdamW.", "paper", "valley", ("s-adam", "adamw")),
                claim("lasso", "S-Adam ends nearer to the Lasso's minimum than AdamW.", "paper", "lasso", ("s-adam", "adamw")),
                claim(
                    "valley-constant",
                    "S-Adam ends nearer to the valley's minimum than a constant damping of the same mean.",
                    "ours",
                    "valley",
                    ("s-adam", "constant"),
                ),
                claim(
                    "lasso-constant",
                    "S-Adam ends nearer to the Lasso's minimum than a constant damping of the same mean.",
                    "ours",
                    "lasso",
                    ("s-adam", "constant"),
                ),
                claim(
                    "residual-near",
                    "The residual form rises towards the kink more clearly than the published statistic.",
                    "ours",
                    "tau",
                    ("residual", "s-adam"),
                ),
                claim(
                    "kink-near",
                    "The kink form rises towards the kink more clearly than the published statistic.",
                    "ours",
                    "tau",
                    ("kink", "s-adam"),
                ),
            ],
            curves: vec![],
            seeds: (2, 10),
            seeds_for_verdict: 5,
            threads: 1,
            seconds_per_seed: (1.5, 1.5),
        },
        body: Body::PerArm(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinate_descent_meets_the_optimality_conditions() {
        let lasso = Lasso::get();
        let w = lasso.coordinate_descent();
        let n = lasso.y.len() as f64;
        let correlation = lasso.x.t().dot(&(&lasso.y - &lasso.x.dot(&w))) / n;
        let zeros = w.iter().filter(|v| **v == 0.0).count();
        assert!(zeros > 0 && zeros < w.len(), "{w}");
        for (w, c) in w.iter().zip(&correlation) {
            let violated =
                if *w == 0.0 { (c.abs() - lasso.lambda).max(0.0) } else { (c - lasso.lambda * w.signum()).abs() };
            assert!(violated < 1e-10, "{violated}");
        }
    }

    #[test]
    fn tensor_and_plain_forms_of_the_valley_agree() {
        let at = array![-1.2, 1.0];
        let w = Tensor::from_slice(&[-1.2, 1.0]).set_requires_grad(true);
        let loss = valley(&w);
        assert!((loss.double_value(&[]) - valley_of(&at)).abs() < 1e-12);
        let set = tensor::ParamSet::new([("w".to_owned(), w)]).unwrap();
        let gradient: Vec<f64> = set.gradient(&loss).unwrap().present()[0].try_into().unwrap();
        let plain = valley_gradient(&at);
        assert!(gradient.iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-12), "{gradient:?} {plain}");
        assert_eq!(distance(&array![2.0, 4.0]), 0.0);
        assert!((distance(&array![0.0, 0.3]) - 0.3).abs() < 1e-12);
    }
}
