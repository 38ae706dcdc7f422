//! The map's parts beside the libraries that people use for them: the published double sum in PyTorch, POT, scikit-learn, repeng.

use crate::experiment::{Body, Context, Experiment, Outcomes};
use crate::peer::{Peer, same_work};
use crate::spec::{Arm, Claim, Direction, Kind, Metric, Mode, Role, Spec, Test};
use crate::timing::{Candidate, interleave, merge};
use anyhow::Result;
use ndarray::{Array1, Array2};
use std::cell::RefCell;
use std::time::Instant;
use steering_ot::chars::{CharsMap, Extra, principal};
use steering_ot::config::{CharsConfig, KMeansConfig};
use steering_ot::transport::{self, SinkhornConfig};
use steering_ot::{kmeans, tensors};
use tensor::tch::{Kind as Element, Tensor};

const SCRIPT: &str = include_str!("../../../peers/steering_ot.py");
const OURS: &str = "ours";
const PEER: &str = "peer";

/// A timed piece of work: its metric, words, the peer's task and shape, and how many calls of ours and of the peer's a round has.
struct Work {
    metric: &'static str,
    label: &'static str,
    task: &'static str,
    shape: &'static [usize],
    calls: (usize, usize),
    /// What must be shown against the peer.
    target: Option<(&'static str, Test)>,
}

const WORK: [Work; 11] = [
    Work {
        metric: "shift",
        label: "512 activations, K = 8, D = 576; peer: the published double sum in PyTorch",
        task: "shift",
        shape: &[512, 8, 576],
        calls: (20, 1),
        target: Some((
            "The factored map is at least 20 times as fast as the double sum at K = 8.",
            Test::SpeedupAtLeast(20.0),
        )),
    },
    Work {
        metric: "shift-15",
        label: "512 activations, K = 15, D = 576; peer: double sum",
        task: "shift",
        shape: &[512, 15, 576],
        calls: (20, 1),
        target: Some((
            "The factored map is at least 40 times as fast as the double sum at K = 15.",
            Test::SpeedupAtLeast(40.0),
        )),
    },
    Work {
        metric: "shift-wide",
        label: "128 activations, K = 8, D = 3584; peer: double sum",
        task: "shift",
        shape: &[128, 8, 3584],
        calls: (20, 1),
        target: None,
    },
    Work {
        metric: "shift-one",
        label: "one activation, K = 8, D = 576; peer: double sum",
        task: "shift",
        shape: &[1, 8, 576],
        calls: (400, 100),
        target: None,
    },
    Work {
        metric: "token",
        label: "one activation, K = 8, D = 576; peer: repeng's addition of one vector",
        task: "add",
        shape: &[1, 576],
        calls: (400, 400),
        target: Some((
            "Moving the activation of a generated token takes at most 1.5 times as long as repeng's addition of a vector.",
            Test::RatioAtMost(1.5),
        )),
    },
    Work {
        metric: "prompt",
        label: "512 activations, K = 8, D = 576; peer: repeng's addition of one vector",
        task: "add",
        shape: &[512, 576],
        calls: (20, 50),
        target: None,
    },
    Work {
        metric: "kmeans",
        label: "k-means, 560 rows, K = 8, D = 576; peer: scikit-learn from the same start",
        task: "kmeans",
        shape: &[560, 8, 576],
        calls: (4, 4),
        target: Some(("k-means is at least as fast as scikit-learn's.", Test::SpeedupAtLeast(1.0))),
    },
    Work {
        metric: "sinkhorn-8",
        label: "Sinkhorn, K = 8; peer: POT",
        task: "sinkhorn",
        shape: &[8, 576],
        calls: (100, 50),
        target: None,
    },
    Work {
        metric: "sinkhorn-16",
        label: "Sinkhorn, K = 16; peer: POT",
        task: "sinkhorn",
        shape: &[16, 576],
        calls: (50, 50),
        target: Some(("Sinkhorn is at least 10 times as fast as POT's at K = 16.", Test::SpeedupAtLeast(10.0))),
    },
    Work {
        metric: "exact-16",
        label: "Exact transport, K = 16; peer: POT",
        task: "emd",
        shape: &[16, 576],
        calls: (50, 50),
        target: None,
    },
    Work {
        metric: "principal",
        label: "Principal components, K = 15, D = 2048; peer: eigenvectors of the D × D covariance in PyTorch",
        task: "eigh",
        shape: &[2048],
        calls: (4, 1),
        target: Some((
            "Principal components take at most a hundredth of the time of a D × D eigendecomposition.",
            Test::SpeedupAtLeast(100.0),
        )),
    },
];

pub(super) fn experiment() -> Experiment {
    let claim = |work: &Work| {
        let (statement, test) = work.target?;
        Some(Claim::new(work.metric, statement, "ours", work.metric, (OURS, PEER), test))
    };
    Experiment {
        spec: Spec {
            name: "steer-peers".into(),
            krate: "steering-ot".into(),
            title: "The map's parts beside PyTorch, POT, scikit-learn and repeng".into(),
            protocol: "Each part of the map beside the library that people use for it, on the same numbers and threads, rounds in \
                       turn, one process a side. PyTorch 2.11.0, POT 0.9.7.post1, scikit-learn 1.9.1, repeng 0.4.0. Before timing, \
                       the norm of the shifts, the inertia and the costs of the plans must agree to a thousandth, or the experiment \
                       fails. Sinkhorn has ε = 0.1 median(C) and stops at 1e-9 on both sides."
                .into(),
            data: vec![],
            kind: Kind::Peers,
            metrics: WORK.iter().map(|work| Metric::new(work.metric, work.label, "ms", Direction::Lower, 3)).collect(),
            arms: vec![
                Arm::new(PEER, "The peer named in the column", Role::Peer, ""),
                Arm::new(OURS, "steering-ot", Role::Method, ""),
            ],
            claims: WORK.iter().filter_map(claim).collect(),
            curves: vec![],
            seeds: (1, 1),
            seeds_for_verdict: 1,
            threads: 0,
            seconds_per_seed: (40.0, 120.0),
        },
        body: Body::Together(run),
    }
}

/// The numbers that both sides compute with.
fn values(first: usize, rows: usize, columns: usize) -> Array2<f64> {
    Array2::from_shape_fn((rows, columns), |(i, j)| {
        let i = i + first;
        ((i * 7919 + j * 104_729 + i * j * 31) % 10_007) as f64 / 10_007.0 - 0.5
    })
}

/// The map with the peer's centroids, independent coupling and published gate.
fn map(k: usize, d: usize) -> Result<CharsMap> {
    let plan = Array2::from_elem((k, k), 1.0 / (k * k) as f64);
    let config = CharsConfig::paper().with_clusters(k);
    let rounded = |x: Array2<f64>| x.mapv(|v| f64::from(v as f32));
    Ok(CharsMap::from_parts(config, rounded(values(5000, k, d)), rounded(values(7000, k, d)), plan, Extra::default())?)
}

fn rows(m: usize, d: usize) -> Tensor {
    let x = values(0, m, d).mapv(|v| v as f32);
    Tensor::from_slice(x.as_slice().unwrap_or(&[])).view([m as i64, d as i64])
}

fn clusters(m: usize, k: usize, d: usize) -> Array2<f32> {
    let (centers, noise) = (values(9000, k, d), values(0, m, d));
    Array2::from_shape_fn((m, d), |(i, j)| (0.6 * centers[[i % k, j]] + noise[[i, j]]) as f32)
}

fn coupling(k: usize, d: usize) -> Result<(Array1<f64>, Array2<f64>)> {
    let cost = transport::cost(values(5000, k, d).view(), values(7000, k, d).view())?;
    Ok((Array1::from_elem(k, 1.0 / k as f64), cost))
}

/// One call of ours, which returns the number by which both sides are compared.
fn ours(work: &Work) -> Result<Box<dyn FnMut() -> Result<f64>>> {
    let shape = work.shape;
    Ok(match work.task {
        "shift" => {
            let (map, x) = (map(shape[1], shape[2])?, rows(shape[0], shape[2]));
            Box::new(move || Ok(tensors::shift(&map, &x)?.numel() as f64))
        }
        "add" => {
            let (map, x) = (map(8, shape[1])?, rows(shape[0], shape[1]));
            Box::new(move || Ok(tensors::transport(&map, &x, 1.0)?.numel() as f64))
        }
        "kmeans" => {
            let x = clusters(shape[0], shape[1], shape[2]);
            let start = x.slice(ndarray::s![..shape[1], ..]).mapv(f64::from);
            let config = KMeansConfig::default();
            Box::new(move || Ok(kmeans::from_start(x.view(), start.view(), &config)?.inertia))
        }
        "sinkhorn" => {
            let (p, cost) = coupling(shape[0], shape[1])?;
            let epsilon = 0.1 * transport::median(cost.iter().copied());
            let config = SinkhornConfig::default();
            Box::new(move || {
                let found = transport::sinkhorn(cost.view(), p.view(), p.view(), epsilon, &config)?;
                Ok(transport::transport_cost(found.plan.view(), cost.view())?)
            })
        }
        "emd" => {
            let (p, cost) = coupling(shape[0], shape[1])?;
            Box::new(move || Ok(transport::exact(cost.view(), p.view(), p.view())?.cost))
        }
        _ => {
            let (a, b) = (values(5000, 15, shape[0]), values(7000, 15, shape[0]));
            let plan = Array2::from_elem((15, 15), 1.0 / 225.0);
            Box::new(move || Ok(principal(a.view(), b.view(), plan.view()).rank() as f64))
        }
    })
}

fn run(context: &Context, _seed: u64) -> Result<Outcomes> {
    let rounds = match context.mode {
        Mode::Quick => 6,
        Mode::Full => 20,
    };
    let peer = RefCell::new(Peer::start(context, SCRIPT)?);
    let ask = |task: &str, shape: &[usize], n: usize| {
        let words: Vec<String> = shape.iter().map(ToString::to_string).collect();
        peer.borrow_mut().number(task, &words.join(","), n)
    };
    let mut outcomes = Outcomes::new();
    for work in &WORK {
        let mut call = ours(work)?;
        let agreed = match work.task {
            "shift" => {
                let x = rows(work.shape[0], work.shape[2]);
                let shift = map(work.shape[1], work.shape[2])?.shift_tensor(&x)?;
                Some((shift.norm().to_kind(Element::Double).double_value(&[]), "shift-norm"))
            }
            "kmeans" => Some((call()?, "inertia")),
            "sinkhorn" => Some((call()?, "sinkhorn-cost")),
            "emd" => Some((call()?, "emd-cost")),
            _ => None,
        };
        if let Some((mine, task)) = agreed {
            same_work(work.label, 0, mine, ask(task, work.shape, 0)?)?;
        }
        let (mine, theirs) = work.calls;
        let round = move || {
            let start = Instant::now();
            for _ in 0..mine {
                call()?;
            }
            Ok(start.elapsed().as_secs_f64() / mine as f64)
        };
        let mut candidates = vec![
            Candidate { arm: PEER.into(), round: Box::new(|| ask(work.task, work.shape, theirs)) },
            Candidate { arm: OURS.into(), round: Box::new(round) },
        ];
        // A large eigendecomposition takes a second.
        let rounds = if work.task == "eigh" { rounds.min(8) } else { rounds };
        merge(&mut outcomes, interleave(context, work.metric, rounds, &mut candidates)?);
    }
    Ok(outcomes)
}
