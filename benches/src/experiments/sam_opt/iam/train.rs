//! Training with few labels, and what is measured afterwards.

use super::super::search::Score;
use super::arms::{DECAY, Form, Method};
use crate::experiment::{Context, Outcome};
use anyhow::{Context as _, Result};
use datasets::{Labeled, image, mnist10k, optdigits, split};
use rand::seq::SliceRandom;
use sam_opt::baselines::{VatConfig, entropy, smoothed_cross_entropy, vat_penalty};
use sam_opt::{Iam, InconsistencyOpts, ParamGroup, Sam, SamConfig, Sgd, SgdConfig, local_inconsistency};
use std::sync::OnceLock;
use tensor::nn::{Mlp, MlpConfig};
use tensor::tch::{Device, Kind, Tensor, nn::VarStore, no_grad};
use tensor::{ParamSet, Seed, interop};

/// Learning rate of the protocols, at the start of its cosine.
const LR: f64 = 0.05;
const MOMENTUM: f64 = 0.9;
/// Radius of the reported inconsistency.
const RADIUS: f64 = 0.1;
/// Inputs and draws for it.
const MEASURED: i64 = 500;
const DRAWS: usize = 10;
/// Bins of the expected calibration error.
const BINS: usize = 15;

/// A collection of digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// 10,000 of MNIST, pooled to 14×14.
    Mnist,
    /// 1,797 of optdigits, 8×8.
    Opt,
}

impl Digits {
    pub(super) fn fold(self) -> &'static str {
        match self {
            Digits::Mnist => "mnist",
            Digits::Opt => "optdigits",
        }
    }

    pub(super) fn widths(self) -> [i64; 4] {
        match self {
            Digits::Mnist => [196, 128, 128, 10],
            Digits::Opt => [64, 128, 128, 10],
        }
    }

    /// Height and width of a digit.
    pub(super) fn side(self) -> usize {
        match self {
            Digits::Mnist => 14,
            Digits::Opt => 8,
        }
    }

    /// Labels, and digits that are tested on.
    fn sizes(self) -> (usize, usize) {
        match self {
            Digits::Mnist => (100, 3000),
            Digits::Opt => (50, 600),
        }
    }

    /// All digits, standardized by the global mean and deviation. Loaded once.
    pub(super) fn load(self) -> Result<&'static Labeled> {
        static MNIST: OnceLock<Labeled> = OnceLock::new();
        static OPT: OnceLock<Labeled> = OnceLock::new();
        let cell = match self {
            Digits::Mnist => &MNIST,
            Digits::Opt => &OPT,
        };
        if let Some(set) = cell.get() {
            return Ok(set);
        }
        let mut set = match self {
            Digits::Mnist => {
                let images = mnist10k::load()?;
                let pooled = image::average_pool(&images.normalized(), 2, 2)?;
                let n = images.len();
                let x = pooled.into_shape_with_order((n, 196)).context("196 pixels a digit")?;
                Labeled::new(x, images.y, 10)?
            }
            Digits::Opt => optdigits::load().labeled(),
        };
        let n = set.x.len() as f64;
        let mean = set.x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let deviation = (set.x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n).sqrt();
        set.x.mapv_inplace(|v| ((f64::from(v) - mean) / deviation) as f32);
        Ok(cell.get_or_init(|| set))
    }
}

/// Inputs `[n, features]` with classes `[n]`.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) x: Tensor,
    pub(super) y: Tensor,
}

impl Samples {
    pub(super) fn of(set: &Labeled, rows: &[usize], device: Device) -> Result<Self> {
        let part = set.select(rows);
        let y: Vec<i64> = part.y.iter().map(|&class| i64::from(class)).collect();
        Ok(Self {
            x: interop::to_tensor(&part.x.view())?.to_device(device),
            y: Tensor::from_slice(&y).to_device(device),
        })
    }

    pub(super) fn len(&self) -> i64 {
        self.y.size()[0]
    }
}

/// One seed's parts.
#[derive(Debug)]
pub(super) struct Split {
    pub(super) labeled: Samples,
    /// `None`: supervised training.
    pub(super) unlabeled: Option<Tensor>,
    pub(super) test: Samples,
}

/// Training labels and held-out digits: `test` ones, then `per_class` of each class labeled, the rest without labels. For
/// a search, the test digits are left out, and 30 % of the labels are held out instead.
pub(super) fn few_labels(digits: Digits, seed: u64, search: bool, device: Device) -> Result<Split> {
    let set = digits.load()?;
    let (labels, tested) = digits.sizes();
    let order = split::stratified_order(&set.y, seed);
    let (test, rest) = order.split_at(tested);
    let mut taken = [0; 10];
    let (mut labeled, mut unlabeled) = (Vec::new(), Vec::new());
    for &row in rest {
        let count = &mut taken[usize::from(set.y[row])];
        let target = if *count < labels / 10 { &mut labeled } else { &mut unlabeled };
        *count += 1;
        target.push(row);
    }
    let (train, test) = hold_out(&labeled, test, &set.y, search);
    let all: Vec<usize> = unlabeled;
    Ok(Split {
        labeled: Samples::of(set, &train, device)?,
        unlabeled: Some(Samples::of(set, &all, device)?.x),
        test: Samples::of(set, &test, device)?,
    })
}

/// What a search trains on and scores on: 70 % and 30 % of the labels of each class; otherwise all labels and the test.
pub(super) fn hold_out(labeled: &[usize], test: &[usize], y: &[u8], search: bool) -> (Vec<usize>, Vec<usize>) {
    if !search {
        return (labeled.to_vec(), test.to_vec());
    }
    let mut of_class = [0usize; 10];
    for &row in labeled {
        of_class[usize::from(y[row])] += 1;
    }
    let mut seen = [0usize; 10];
    labeled.iter().partition(|&&row| {
        let class = usize::from(y[row]);
        seen[class] += 1;
        // Rounding up and down in turn, so that 5 labels a class become 35 and 15 of 10 classes.
        let keep = (7 * of_class[class] + 5 * (class % 2) + 2) / 10;
        seen[class] <= keep.max(1)
    })
}

/// Rows of a part in random order, epoch after epoch.
pub(super) struct Epochs {
    order: Vec<i64>,
    at: usize,
    rng: Box<dyn rand::RngCore>,
    device: Device,
}

impl Epochs {
    pub(super) fn new(n: i64, seed: Seed, device: Device) -> Self {
        Self { order: (0..n).collect(), at: n as usize, rng: Box::new(seed.rng()), device }
    }

    /// The next `n` rows, at most all.
    pub(super) fn next(&mut self, n: i64) -> Tensor {
        let n = self.order.len().min(n as usize);
        if self.at + n > self.order.len() {
            self.order.shuffle(&mut self.rng);
            self.at = 0;
        }
        self.at += n;
        Tensor::from_slice(&self.order[self.at - n..self.at]).to_device(self.device)
    }
}

/// A ReLU network with He's initial weights, uniform, and biases of 0.
pub(super) fn he_network(store: &VarStore, widths: &[i64], seed: Seed) -> Result<Mlp> {
    let net = Mlp::new(&store.root(), &MlpConfig::relu(widths), seed)?;
    no_grad(|| {
        for (_, mut tensor) in store.variables() {
            // From ±1/√(fan in) to ±√(6/fan in), of variance 2/(fan in).
            let _ = if tensor.dim() > 1 { tensor.g_mul_scalar_(6f64.sqrt()) } else { tensor.zero_() };
        }
    });
    Ok(net)
}

/// SGD with the protocols' momentum.
pub(super) fn sgd(weight_decay: f64) -> Sgd {
    Sgd::from_config(SgdConfig { lr: LR, momentum: MOMENTUM, weight_decay, ..SgdConfig::default() })
}

/// The cosine from [`LR`] to 0.
pub(super) fn rate(step: u64, steps: u64) -> f64 {
    0.5 * LR * (1.0 + (std::f64::consts::PI * step as f64 / steps as f64).cos())
}

/// How long and with which batches a network is trained.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) steps: u64,
    pub(super) labeled: i64,
    pub(super) unlabeled: i64,
}

/// A trained network.
pub(super) struct Trained {
    pub(super) store: VarStore,
    pub(super) net: Mlp,
    /// Inputs forwarded a step, in labeled batches; a backward pass counts two.
    pub(super) passes: f64,
}

/// One of the optimizers.
enum Optimizer {
    Sam(Box<Sam<Sgd>>),
    Iam(Box<Iam<Sgd>>),
}

/// Trains one network. Start and batches depend on the seed, not on the method.
pub(super) fn train(
    context: &Context,
    widths: &[i64],
    split: &Split,
    method: &Method,
    plan: Plan,
    seed: u64,
) -> Result<Trained> {
    let seed = Seed::new(seed);
    let store = VarStore::new(context.device);
    let net = he_network(&store, widths, seed.child("init"))?;
    let groups = || vec![ParamGroup::from_var_store(&store)];
    let sam = |config: SamConfig, decay| {
        Ok::<_, anyhow::Error>(Optimizer::Sam(Box::new(Sam::new(groups(), sgd(decay), config)?)))
    };
    let mut optimizer = match method {
        Method::Sgd { weight_decay } => sam(SamConfig::sam(0.0), *weight_decay)?,
        Method::Sam { rho } => sam(SamConfig::sam(*rho), DECAY)?,
        Method::Asam { rho } => sam(SamConfig::asam(*rho), DECAY)?,
        Method::Smoothing { .. } | Method::Entropy { .. } | Method::Vat { .. } => sam(SamConfig::sam(0.0), DECAY)?,
        Method::Iam(iam) => {
            Optimizer::Iam(Box::new(Iam::new(groups(), sgd(DECAY), iam.config(seed.child("iam").value()))?))
        }
    };
    let mut labeled = Epochs::new(split.labeled.len(), seed.child("labeled"), context.device);
    let rows = split.unlabeled.as_ref().map_or(0, |x| x.size()[0]);
    let mut unlabeled = Epochs::new(rows, seed.child("unlabeled"), context.device);
    let mut passes = 0.0;
    for step in 0..plan.steps {
        context.check()?;
        let rows = labeled.next(plan.labeled);
        let (x, y) = (split.labeled.x.index_select(0, &rows), split.labeled.y.index_select(0, &rows));
        // Drawn for every method, so that all see the same.
        let without = split.unlabeled.as_ref().map(|all| all.index_select(0, &unlabeled.next(plan.unlabeled)));
        let both = || match &without {
            Some(without) => Tensor::cat(&[&x, without], 0),
            None => x.shallow_clone(),
        };
        let forward = |x: &Tensor| net.forward_with(x, true, true);
        // All inputs of the step, in labeled batches.
        let all = 1.0 + without.as_ref().map_or(0, |x| x.size()[0]) as f64 / y.size()[0] as f64;
        passes += match &mut optimizer {
            Optimizer::Sam(sam) => {
                sam.set_lr(rate(step, plan.steps))?;
                let vat = |epsilon| {
                    let config = VatConfig { epsilon, seed: seed.child("vat").value(), ..VatConfig::default() };
                    vat_penalty(&both(), |x| Ok(forward(x)), &config, step)
                };
                let stats = sam.step(|_| {
                    Ok(match method {
                        Method::Smoothing { smoothing } => smoothed_cross_entropy(&forward(&x), &y, *smoothing)?,
                        Method::Entropy { beta } => {
                            let z = forward(&both());
                            let of_labeled = z.narrow(0, 0, y.size()[0]).cross_entropy_for_logits(&y);
                            let rest = z.narrow(0, y.size()[0], z.size()[0] - y.size()[0]);
                            of_labeled + entropy(&rest)? * *beta
                        }
                        Method::Vat { epsilon } => forward(&x).cross_entropy_for_logits(&y) + vat(*epsilon)?,
                        _ => forward(&x).cross_entropy_for_logits(&y),
                    })
                })?;
                let main = 3.0 * stats.passes as f64;
                match method {
                    // The clean output, the power step forward and back, and the penalty forward and back.
                    Method::Vat { .. } => main + 7.0 * all,
                    Method::Entropy { .. } => main * all,
                    _ => main,
                }
            }
            Optimizer::Iam(iam) => {
                iam.set_lr(rate(step, plan.steps))?;
                let alone = matches!(method, Method::Iam(iam) if iam.form == Form::Labeled);
                let inputs = if alone { x.shallow_clone() } else { both() };
                let stats =
                    iam.step_semi(y.size()[0], |_| Ok(forward(&inputs)), |z| Ok(z.cross_entropy_for_logits(&y)))?;
                (f64::from(stats.forwards) + 2.0 * f64::from(stats.backwards)) * if alone { 1.0 } else { all }
            }
        };
    }
    Ok(Trained { store, net, passes: passes / plan.steps as f64 })
}

impl Trained {
    pub(super) fn params(&self) -> Result<ParamSet> {
        Ok(ParamSet::from_var_store(&self.store)?)
    }

    pub(super) fn logits(&self, x: &Tensor) -> Tensor {
        self.net.forward_with(x, false, false)
    }

    /// Accuracy in percent and mean loss in nats.
    pub(super) fn score(&self, on: &Samples) -> Score {
        let log_p = no_grad(|| self.logits(&on.x)).log_softmax(-1, Kind::Double); // [n, classes]
        let right = log_p.argmax(1, false).eq_tensor(&on.y).to_kind(Kind::Double);
        let loss = -log_p.gather(1, &on.y.unsqueeze(1), false).mean(Kind::Double).double_value(&[]);
        Score { accuracy: 100.0 * right.mean(Kind::Double).double_value(&[]), loss }
    }

    /// Expected calibration error in percent: how far confidence is from accuracy, over bins of equal width.
    pub(super) fn calibration_error(&self, on: &Samples) -> Result<f64> {
        let p = no_grad(|| self.logits(&on.x)).softmax(-1, Kind::Double);
        let (confidence, class) = p.max_dim(1, false);
        let right = class.eq_tensor(&on.y).to_kind(Kind::Double);
        let (confidence, right) = (Vec::<f64>::try_from(&confidence)?, Vec::<f64>::try_from(&right)?);
        let mut gaps = [0.0; BINS];
        for (c, r) in confidence.iter().zip(&right) {
            gaps[((c * BINS as f64) as usize).min(BINS - 1)] += c - r;
        }
        Ok(100.0 * gaps.iter().map(|gap| gap.abs()).sum::<f64>() / confidence.len() as f64)
    }

    /// S_0.1 on some inputs, in nats.
    pub(super) fn inconsistency(&self, inputs: &Tensor) -> Result<f64> {
        let few = inputs.narrow(0, 0, inputs.size()[0].min(MEASURED));
        let opts = InconsistencyOpts { rho: RADIUS, draws: DRAWS, ..InconsistencyOpts::default() };
        Ok(local_inconsistency(self.params()?.tensors(), || Ok(self.logits(&few)), &opts)?.mean)
    }

    /// The metrics of an experiment with a test set; `inputs` are those of the inconsistency.
    pub(super) fn outcome(&self, test: &Samples, inputs: &Tensor) -> Result<Outcome> {
        let score = self.score(test);
        let mut outcome = Outcome::default();
        outcome.set("accuracy", score.accuracy);
        outcome.set("nll", score.loss);
        outcome.set("ece", self.calibration_error(test)?);
        outcome.set("inconsistency", self.inconsistency(inputs)?);
        outcome.set("passes", self.passes);
        Ok(outcome)
    }
}

/// What the tests run in.
#[cfg(test)]
pub(super) fn tests_context() -> Context {
    static NEVER: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    let mode = crate::spec::Mode::Quick;
    Context { mode, device: Device::Cpu, threads: 1, peer_python: None, interrupted: &NEVER }
}

#[cfg(test)]
mod tests {
    use super::super::arms::Iam;
    use super::tests_context as context;
    use super::*;

    #[test]
    fn a_search_never_sees_the_test_digits_and_holds_out_three_tenths_of_the_labels() {
        let full = few_labels(Digits::Opt, 3, false, Device::Cpu).unwrap();
        let search = few_labels(Digits::Opt, 3, true, Device::Cpu).unwrap();
        assert_eq!((full.labeled.len(), full.test.len()), (50, 600));
        assert_eq!((search.labeled.len(), search.test.len()), (35, 15));
        let rows = |x: &Tensor| -> Vec<Vec<u32>> {
            let flat = Vec::<f32>::try_from(x.reshape([-1])).unwrap();
            flat.chunks(64).map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
        };
        let labeled = rows(&full.labeled.x);
        assert!(rows(&search.labeled.x).iter().chain(&rows(&search.test.x)).all(|row| labeled.contains(row)));
        assert_eq!(full.unlabeled.unwrap().size(), [1147, 64]);
    }

    #[test]
    fn every_method_trains_from_the_same_start_on_the_same_batches() {
        let split = few_labels(Digits::Opt, 0, false, Device::Cpu).unwrap();
        let plan = Plan { steps: 3, labeled: 50, unlabeled: 20 };
        let run = |method: &Method| {
            let trained = train(&context(), &[64, 8, 10], &split, method, plan, 0).unwrap();
            (trained.params().unwrap().norm(), trained.passes)
        };
        let (sgd, passes) = run(&Method::Sgd { weight_decay: DECAY });
        assert_eq!(passes, 3.0);
        // At strength 0 each method is SGD on the same batches.
        assert_eq!(run(&Method::Sam { rho: 0.0 }).0, sgd);
        assert_eq!(run(&Method::Iam(Iam::new(Form::S, 0.0, 0.0))).0.to_bits() >> 20, sgd.to_bits() >> 20);
        for arm in super::super::few::SEARCHED {
            let method = &Method::grid(arm).unwrap()[4];
            assert!(run(method).0.is_finite(), "{arm}");
        }
        // 50 labeled inputs, and 20 more where a method uses them.
        for (method, expected) in [
            (Method::Vat { epsilon: 1.0 }, 3.0 + 7.0 * 1.4),
            (Method::Entropy { beta: 0.1 }, 3.0 * 1.4),
            (Method::Iam(Iam::new(Form::D, 0.1, 1.0)), 10.0 * 1.4),
            (Method::Iam(Iam::new(Form::S, 0.1, 0.0)), 7.0 * 1.4),
            (Method::Iam(Iam::new(Form::Labeled, 0.1, 1.0)), 10.0),
        ] {
            let passes = run(&method).1;
            assert!((passes - expected).abs() < 1e-9, "{method:?}: {passes}");
        }
    }

    #[test]
    fn calibration_of_a_sure_and_wrong_network_is_all_its_confidence() {
        let split = few_labels(Digits::Opt, 0, false, Device::Cpu).unwrap();
        let store = VarStore::new(Device::Cpu);
        let net = he_network(&store, &[64, 8, 10], Seed::new(0)).unwrap();
        let mut trained = Trained { store, net, passes: 0.0 };
        no_grad(|| {
            for (name, mut tensor) in trained.store.variables() {
                let _ = if name == "1.bias" { tensor.get(0).fill_(1e3) } else { tensor.zero_() };
            }
        });
        let on = &split.test;
        let wrong = on.y.ne(0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        assert!((trained.calibration_error(on).unwrap() - 100.0 * wrong).abs() < 1e-6);
        assert!((trained.score(on).accuracy - 100.0 * (1.0 - wrong)).abs() < 1e-9);
        trained.passes = 1.0;
        let outcome = trained.outcome(on, &on.x).unwrap();
        assert_eq!((outcome.metrics["inconsistency"], outcome.metrics["passes"]), (0.0, 1.0));
    }
}
