//! The arms that the experiments share: a name, its words, and how its map is fitted.

use crate::spec::{Arm, Role};
use anyhow::Result;
use ndarray::Array2;
use steering_ot::Steer;
use steering_ot::baselines::{DiM, DiagonalChars, GaussianAct, LinearAct, MeanAct, PcaConfig, PcaDirection};
use steering_ot::chars::CharsMap;
use steering_ot::config::{CharsConfig, Coupling, Epsilon};

/// A map that moves rows of the first set towards the second.
pub(super) type Map = Box<dyn Steer>;

/// No map.
pub(super) const NONE: &str = "none";
/// The reference of the tables.
pub(super) const DIM: &str = "dim";
/// Ours.
pub(super) const CHARS: &str = "chars";
/// The published setting.
pub(super) const PAPER: &str = "chars-paper";

/// Our default with a coupling, ε and bandwidth.
pub(super) fn chars(coupling: Coupling, epsilon: Epsilon, bandwidth: f64, seed: u64) -> CharsConfig {
    CharsConfig { coupling, epsilon, bandwidth, seed, ..CharsConfig::default() }
}

/// Fits the map of an arm; none for [`NONE`].
pub(super) fn fit(arm: &str, a: &Array2<f32>, b: &Array2<f32>, seed: u64) -> Result<Option<Map>> {
    let (a, b) = (a.view(), b.view());
    let ours = CharsConfig { seed, ..CharsConfig::default() };
    let of = |config: CharsConfig| -> Result<Option<Map>> { Ok(Some(Box::new(CharsMap::fit(a, b, &config)?))) };
    Ok(match arm {
        NONE => None,
        DIM => Some(Box::new(DiM::fit(a, b)?)),
        "pca" => Some(Box::new(PcaDirection::fit(a, b, &PcaConfig::default())?)),
        "mean-act" => Some(Box::new(MeanAct::fit(a, b)?)),
        "gaussian-act" => Some(Box::new(GaussianAct::fit(a, b)?)),
        "linear-act" => Some(Box::new(LinearAct::fit(a, b)?)),
        "diagonal" => Some(Box::new(DiagonalChars::fit(a, b, &ours)?)),
        CHARS => of(ours)?,
        // The official setting with our number of clusters, so that only ε and the gate differ.
        PAPER => of(CharsConfig { seed, ..CharsConfig::paper().with_clusters(ours.k_source) })?,
        "exact" => of(chars(Coupling::Ot, Epsilon::Exact, 0.25, seed))?,
        "exact-wide" => of(chars(Coupling::Ot, Epsilon::Exact, 1.0, seed))?,
        "nearest" => of(chars(Coupling::NearestNeighbour, Epsilon::Exact, 0.25, seed))?,
        "uniform" => of(chars(Coupling::Uniform, Epsilon::Exact, 0.25, seed))?,
        "pct" => of(CharsConfig { pct: Some(3), ..ours })?,
        other => anyhow::bail!("there is no map {other}"),
    })
}

/// The arms in the order of the tables.
pub(super) fn arms() -> Vec<Arm> {
    vec![
        Arm::new(DIM, "Difference in means", Role::Baseline, "one vector for all (ActAdd, CAA)"),
        Arm::new(NONE, "Not steered", Role::Reference, ""),
        Arm::new("pca", "PCA direction", Role::Baseline, "as repeng, scaled to the means' distance along it"),
        Arm::new("mean-act", "Mean-AcT", Role::Baseline, "a shift a coordinate: the difference in means again"),
        Arm::new("gaussian-act", "Gaussian-AcT", Role::Baseline, "a line a coordinate, by mean and spread"),
        Arm::new("linear-act", "Linear-AcT", Role::Baseline, "a line a coordinate, fitted to sorted samples"),
        Arm::new(PAPER, "CHaRS, published setting", Role::Baseline, "ε = median(C), h = 1, K = 8"),
        Arm::new(CHARS, "CHaRS, our default", Role::Method, "ε = 0.05 median(C), h = 0.25, K = 8"),
        Arm::new("exact", "CHaRS, exact OT", Role::Method, "h = 0.25, K = 8"),
        Arm::new("exact-wide", "CHaRS, exact OT, wide gate", Role::Ablation, "h = 1, K = 8"),
        Arm::new("nearest", "CHaRS, nearest cluster", Role::Ablation, "coupling by nearest target cluster, h = 0.25"),
        Arm::new("uniform", "CHaRS, independent coupling", Role::Ablation, "P = p qᵀ, h = 0.25"),
        Arm::new("pct", "CHaRS-PCT", Role::Method, "our default, L = 3"),
        Arm::new(
            "diagonal",
            "CHaRS, diagonal covariances",
            Role::Ablation,
            "our default, an affine map a pair of clusters",
        ),
    ]
}
