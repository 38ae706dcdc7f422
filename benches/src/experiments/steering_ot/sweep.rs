//! How the map depends on the number of clusters, on ε, on the width of the gate and on the principal components kept.

use super::super::sentiment::DATA;
use super::maps::{DIM, chars};
use super::pool::{LAYERS, Pool, Sizes, stacked};
use super::transport::Judge;
use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Arm, Curve, Direction, Kind, Metric, Mode, Role, Spec};
use anyhow::Result;
use steering_ot::chars::CharsMap;
use steering_ot::config::{CharsConfig, Coupling, Epsilon};

const WITHIN: &str = "within";
const OVERALL: &str = "overall";
const INFORMATION: &str = "information";
const CLUSTERS: &str = "clusters";
const BY_K: &str = "by-k";
const BY_L: &str = "by-l";
const KS: [usize; 5] = [1, 2, 4, 8, 16];
const LS: [usize; 4] = [1, 2, 4, 8];
const EPSILONS: [(&str, &str, Option<f64>); 5] = [
    ("exact", "exact OT", None),
    ("c0.05", "ε = 0.05 median(C)", Some(0.05)),
    ("c0.1", "ε = 0.1 median(C)", Some(0.1)),
    ("c0.3", "ε = 0.3 median(C)", Some(0.3)),
    ("c1", "ε = median(C)", Some(1.0)),
];
const WIDTHS: [f64; 2] = [0.25, 1.0];

fn name(epsilon: &str, h: f64) -> String {
    format!("{epsilon}-h{h}")
}

pub(super) fn experiment() -> Experiment {
    let mut arms = vec![Arm::new(DIM, "Difference in means", Role::Baseline, "one vector for all")];
    for h in WIDTHS {
        for (key, words, _) in EPSILONS {
            arms.push(Arm::new(&name(key, h), &format!("{words}, h = {h}"), Role::Ablation, "K = 8 in the table"));
        }
    }
    Experiment {
        spec: Spec {
            name: "steer-sweep".into(),
            krate: "steering-ot".into(),
            title: "Clusters, ε, gate and components".into(),
            protocol: "As `steer-transport`, for every ε and width of the gate: over K = 1, 2, 4, 8, 16, and with K = 8 over the \
                       number L of principal components that PCT keeps. Distances are relative to the difference in means and \
                       averaged over layers 7, 11, 15 and 19 (quick: layer 15). The mutual information of the plan, in nats, and the \
                       effective number of source clusters (exponential of the mean entropy of the gates) say when all inputs get \
                       one shift."
                .into(),
            data: vec!["smollm2".into(), DATA.into()],
            kind: Kind::ByName,
            metrics: vec![
                Metric::new(WITHIN, "distance within domains, relative", "× DiM", Direction::Lower, 3),
                Metric::new(OVERALL, "distance over all, relative", "× DiM", Direction::Lower, 3),
                Metric::new(INFORMATION, "mutual information of the plan", "nats", Direction::Neither, 3),
                Metric::new(CLUSTERS, "effective clusters", "", Direction::Neither, 2),
            ],
            arms,
            claims: vec![],
            curves: vec![
                Curve::new(BY_K, "Distance within domains over clusters", "clusters", "× DiM", 3).logarithmic(true, false),
                Curve::new(BY_L, "Distance within domains over components kept", "components", "× DiM", 3).logarithmic(true, false),
            ],
            seeds: (1, 5),
            seeds_for_verdict: 3,
            threads: 0,
            seconds_per_seed: (20.0, 60.0),
        },
        body: Body::Together(run),
    }
}

/// Relative distances, information and clusters of a map, added over layers.
#[derive(Default)]
struct Sums {
    within: f64,
    overall: f64,
    information: f64,
    clusters: f64,
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let (sizes, layers): (_, &[usize]) = match context.mode {
        Mode::Quick => (Sizes { fit: 30, test: 20 }, &LAYERS[2..3]),
        Mode::Full => (Sizes { fit: 140, test: 80 }, &LAYERS),
    };
    let pool = Pool::get(context, sizes, layers)?;
    let mut bases = Vec::new();
    for &layer in layers {
        let split = pool.split(layer, seed)?;
        let judge = Judge::new(&split)?;
        let (a, b) = (stacked(&split.fit, 0)?, stacked(&split.fit, 1)?);
        let dim = judge.moved(&split, DIM, seed)?;
        bases.push((split, judge, a, b, (dim.within(), dim.overall)));
    }
    let measure = |config: &CharsConfig| -> Result<Sums> {
        let mut sums = Sums::default();
        for (split, judge, a, b, base) in &bases {
            context.check()?;
            let map = CharsMap::fit(a.view(), b.view(), config)?;
            let moved =
                split.test.iter().map(|test| Ok(map.transport(test[0].view(), 1.0)?)).collect::<Result<Vec<_>>>()?;
            let result = judge.result(split, &moved)?;
            let share = 1.0 / bases.len() as f64;
            sums.within += share * result.within() / base.0;
            sums.overall += share * result.overall / base.1;
            sums.information += share * map.diagnostics().plan_mutual_information;
            sums.clusters += share * map.diagnostics().effective_clusters;
        }
        Ok(sums)
    };
    let mut outcomes = Outcomes::new();
    let mut one = Outcome::default();
    for (metric, value) in [(WITHIN, 1.0), (OVERALL, 1.0), (INFORMATION, 0.0), (CLUSTERS, 1.0)] {
        one.set(metric, value);
    }
    outcomes.push((DIM.into(), one));
    for h in WIDTHS {
        for (key, _, c) in EPSILONS {
            let epsilon = c.map_or(Epsilon::Exact, Epsilon::ScaledMedian);
            let config = chars(Coupling::Ot, epsilon, h, seed);
            let mut outcome = Outcome::default();
            for k in KS {
                let sums = measure(&config.clone().with_clusters(k))?;
                outcome.point(BY_K, k as f64, sums.within);
                if k == 8 {
                    outcome.set(WITHIN, sums.within);
                    outcome.set(OVERALL, sums.overall);
                    outcome.set(INFORMATION, sums.information);
                    outcome.set(CLUSTERS, sums.clusters);
                }
            }
            for l in LS {
                outcome.point(BY_L, l as f64, measure(&CharsConfig { pct: Some(l), ..config.clone() })?.within);
            }
            outcomes.push((name(key, h), outcome));
        }
    }
    Ok(outcomes)
}
