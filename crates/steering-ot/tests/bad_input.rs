//! Every error is a value that names what came; degenerate but finite input gives finite output; settings and maps survive
//! JSON.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{noise, sets};
use ndarray::{Array1, Array2, array};
use steering_ot::steer::from_parts;
use steering_ot::transport::SinkhornConfig;
use steering_ot::{
    CharsConfig, CharsMap, Coupling, Epsilon, Error, Extra, FitReport, KMeansConfig, Kernel, Steer, Warning, ndarray,
};

fn finite(x: &Array2<f32>) -> bool {
    x.iter().all(|v| v.is_finite())
}

#[test]
fn settings_outside_their_domain_are_named() {
    let base = CharsConfig::default;
    let bad = [
        ("k_source", CharsConfig { k_source: 0, ..base() }),
        ("k_target", CharsConfig { k_target: 0, ..base() }),
        ("epsilon", CharsConfig { epsilon: Epsilon::ScaledMedian(0.0), ..base() }),
        ("epsilon", CharsConfig { epsilon: Epsilon::Fixed(f64::NAN), ..base() }),
        ("sigma", CharsConfig { kernel: Kernel::FixedSigma(-1.0), ..base() }),
        ("bandwidth", CharsConfig { bandwidth: 0.0, ..base() }),
        ("bandwidth", CharsConfig { bandwidth: f64::INFINITY, ..base() }),
        ("quantile_gate", CharsConfig { quantile_gate: Some((0.5, 0.5)), ..base() }),
        ("quantile_gate", CharsConfig { quantile_gate: Some((-0.1, 0.5)), ..base() }),
        (
            "max_iterations",
            CharsConfig { kmeans: KMeansConfig { max_iterations: 0, ..KMeansConfig::default() }, ..base() },
        ),
        (
            "tolerance",
            CharsConfig { sinkhorn: SinkhornConfig { tolerance: 0.0, ..SinkhornConfig::default() }, ..base() },
        ),
    ];
    let (source, target) = sets(40, 5, 1);
    for (name, config) in bad {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        assert_eq!(CharsMap::fit(source.view(), target.view(), &config).unwrap_err().to_string(), error);
    }
    base().validate().unwrap();
    CharsConfig::paper().validate().unwrap();
}

#[test]
fn settings_survive_json_and_misspelt_fields_are_refused() {
    for config in [
        CharsConfig::default(),
        CharsConfig::paper(),
        CharsConfig {
            epsilon: Epsilon::Auto,
            coupling: Coupling::NearestNeighbour,
            kernel: Kernel::FixedSigma(0.1),
            pct: Some(3),
            quantile_gate: Some((0.01, 0.99)),
            ..CharsConfig::default()
        },
    ] {
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<CharsConfig>(&text).unwrap(), config);
    }
    assert_eq!(serde_json::from_str::<CharsConfig>("{}").unwrap(), CharsConfig::default());
    assert!(serde_json::from_str::<CharsConfig>(r#"{"bandwith": 1.0}"#).is_err());
    assert!(serde_json::from_str::<FitReport>(r#"{"mutual": 1.0}"#).is_err());
    let text = r#"{"epsilon": {"scaled_median": 0.1}, "kernel": "global_median", "coupling": "uniform"}"#;
    let config: CharsConfig = serde_json::from_str(text).unwrap();
    assert_eq!((config.epsilon, config.kernel), (Epsilon::ScaledMedian(0.1), Kernel::GlobalMedian));
}

#[test]
fn sets_that_do_not_fit_are_named() {
    let (source, target) = sets(40, 5, 2);
    let config = CharsConfig::default();
    let few = source.slice(ndarray::s![..5, ..]);
    assert!(matches!(
        CharsMap::fit(few, target.view(), &config),
        Err(Error::TooFewSamples { side: "source", n: 5, k: 8 })
    ));
    assert!(matches!(
        CharsMap::fit(target.view(), few, &config),
        Err(Error::TooFewSamples { side: "target", n: 5, k: 8 })
    ));
    let mut bad = target.clone();
    bad[(11, 0)] = f32::NEG_INFINITY;
    assert!(matches!(
        CharsMap::fit(source.view(), bad.view(), &config),
        Err(Error::NonFinite { side: "target", row: 11 })
    ));
    assert!(matches!(
        CharsMap::fit(source.view(), noise(40, 6, 1).view(), &config),
        Err(Error::DimMismatch { expected: 5, got: 6, .. })
    ));
    let tiny = source.slice(ndarray::s![..9, ..]);
    let auto = CharsConfig { epsilon: Epsilon::Auto, ..CharsConfig::default() };
    assert!(matches!(CharsMap::fit(tiny, target.view(), &auto), Err(Error::TooFewSamples { side: "source", .. })));
}

#[test]
fn a_plan_that_did_not_converge_is_an_error_only_when_strict() {
    let (source, target) = sets(60, 5, 3);
    let sinkhorn = SinkhornConfig { max_iterations: 1, tolerance: 1e-14 };
    let loose = CharsConfig { sinkhorn, ..CharsConfig::default() };
    let map = CharsMap::fit(source.view(), target.view(), &loose).unwrap();
    assert!(!map.diagnostics().converged);
    assert!(map.diagnostics().warnings.iter().any(|w| matches!(w, Warning::NotConverged { iterations: 1, .. })));
    let strict = CharsConfig { strict: true, ..loose };
    let error = CharsMap::fit(source.view(), target.view(), &strict).unwrap_err();
    assert!(matches!(error, Error::NotConverged { iterations: 1, .. }));
    assert!(error.to_string().contains("strict"));
}

#[test]
fn identical_rows_reduce_the_clusters_and_say_so() {
    let (_, target) = sets(40, 5, 4);
    let same = Array2::from_elem((20, 5), 1.5f32);
    let map = CharsMap::fit(same.view(), target.view(), &CharsConfig::default()).unwrap();
    assert_eq!(map.source_centroids().nrows(), 1);
    let warnings = &map.diagnostics().warnings;
    assert!(warnings.contains(&Warning::ReducedClusters { side: "source".into(), requested: 8, used: 1 }));
    assert!(warnings.contains(&Warning::IdenticalRows { side: "source".into() }));
    assert!(warnings.iter().all(|w| !w.to_string().is_empty()));
    assert!(finite(&map.shift(same.view()).unwrap()));
    // Both sides the same point: nothing to move, and nothing to divide by.
    for coupling in [Coupling::Ot, Coupling::NearestNeighbour, Coupling::Uniform] {
        let config = CharsConfig { coupling, pct: Some(2), ..CharsConfig::default() };
        let map = CharsMap::fit(same.view(), same.view(), &config).unwrap();
        assert!(map.shift(same.view()).unwrap().iter().all(|v| *v == 0.0));
    }
}

#[test]
fn a_point_exactly_at_one_of_two_centroids_gets_that_clusters_shift() {
    let a = array![[1.0, 2.0], [5.0, -1.0]];
    let b = array![[2.0, 2.0], [5.0, 3.0]];
    let plan = array![[0.4, 0.1], [0.0, 0.5]];
    for bandwidth in [0.25, 1.0] {
        let config = CharsConfig { bandwidth, ..CharsConfig::paper().with_clusters(2) };
        let map = CharsMap::from_parts(config, a.clone(), b.clone(), plan.clone(), Extra::default()).unwrap();
        let shift = map.shift(a.mapv(|v| v as f32).view()).unwrap();
        for (got, want) in shift.iter().zip(map.shifts()) {
            assert!((f64::from(*got) - want).abs() < 1e-6);
        }
        // The same in f64.
        assert!(map.shift_exact(a.view()).unwrap().iter().all(|v| v.is_finite()));
    }
}

#[test]
fn values_near_the_ends_of_f32_give_finite_shifts_or_a_named_error() {
    let (source, target) = sets(40, 6, 5);
    for scale in [1e30f32, 1e36, 1e-30] {
        let (a, b) = (&source * scale, &target * scale);
        let map = CharsMap::fit(a.view(), b.view(), &CharsConfig::default().with_clusters(4)).unwrap();
        let shift = map.shift(a.view()).unwrap();
        assert!(finite(&shift));
        let gates = map.gates(a.view()).unwrap();
        assert!(gates.rows().into_iter().all(|g| (g.sum() - 1.0).abs() < 1e-5));
        // The adaptive gate knows no unit: gates are those of the sets at scale 1.
        let plain = CharsMap::fit(source.view(), target.view(), &CharsConfig::default().with_clusters(4)).unwrap();
        for (g, want) in gates.iter().zip(&plain.gates(source.view()).unwrap()) {
            assert!((g - want).abs() < 1e-3, "{g} against {want} at {scale}");
        }
    }
    let map = CharsMap::fit(source.view(), target.view(), &CharsConfig::default()).unwrap();
    for value in [3e38f32, -3e38, 1e-45, 0.0] {
        assert!(finite(&map.shift(Array2::from_elem((2, 6), value).view()).unwrap()));
    }
    for kernel in [Kernel::Gaussian, Kernel::FixedSigma(1e-300), Kernel::FixedSigma(1e300), Kernel::GlobalMedian] {
        let config = CharsConfig { kernel, ..CharsConfig::default() };
        let map = CharsMap::fit(source.view(), target.view(), &config).unwrap();
        for value in [3e38f32, 1.0, 1e-45] {
            assert!(finite(&map.shift(Array2::from_elem((2, 6), value).view()).unwrap()), "{kernel:?} {value}");
        }
    }
    let huge = Array2::from_elem((10, 2), 3e38f32);
    let error = CharsMap::fit((-&huge).view(), huge.view(), &CharsConfig::default().with_clusters(1)).unwrap_err();
    assert!(error.to_string().contains("range of f32"), "{error}");
}

#[test]
fn parts_that_are_no_map_are_refused() {
    let (a, b) = (array![[0.0, 0.0], [1.0, 1.0]], array![[1.0, 0.0]]);
    let build = |a: &Array2<f64>, b: &Array2<f64>, plan: Array2<f64>, extra: Extra| {
        CharsMap::from_parts(CharsConfig::default(), a.clone(), b.clone(), plan, extra)
    };
    let plan = array![[0.5], [0.5]];
    build(&a, &b, plan.clone(), Extra::default()).unwrap();
    for bad in [array![[0.5, 0.5]], array![[0.5], [0.6]], array![[-0.5], [1.5]], array![[f64::NAN], [1.0]]] {
        assert!(matches!(build(&a, &b, bad, Extra::default()), Err(Error::InvalidArgument { .. })));
    }
    assert!(matches!(build(&a, &array![[1.0]], plan.clone(), Extra::default()), Err(Error::DimMismatch { .. })));
    assert!(matches!(build(&(&a * f64::NAN), &b, plan.clone(), Extra::default()), Err(Error::NonFinite { .. })));
    assert!(matches!(build(&Array2::zeros((0, 2)), &b, plan.clone(), Extra::default()), Err(Error::EmptySet { .. })));
    let bounds = |n| Extra { bounds: Some((Array1::zeros(n), Array1::zeros(2))), ..Extra::default() };
    assert!(matches!(build(&a, &b, plan.clone(), bounds(3)), Err(Error::DimMismatch { .. })));
    let counts = Extra { source_counts: Some(vec![1]), ..Extra::default() };
    assert!(matches!(build(&a, &b, plan, counts), Err(Error::DimMismatch { .. })));
}

#[test]
fn a_coordinate_that_holds_most_of_the_variance_is_reported() {
    let (mut source, target) = sets(60, 16, 6);
    source.column_mut(3).mapv_inplace(|v| v * 1000.0);
    let map = CharsMap::fit(source.view(), target.view(), &CharsConfig::default()).unwrap();
    assert_eq!(map.diagnostics().dominant_coordinate.0, 3);
    let warned = map.diagnostics().warnings.iter().find(|w| matches!(w, Warning::DominantCoordinate { .. })).unwrap();
    assert!(warned.to_string().contains("position 0"));
}

#[test]
fn the_quantile_gate_leaves_outliers_and_constant_coordinates_alone() {
    let (mut source, mut target) = sets(60, 6, 7);
    source.column_mut(5).fill(2.0);
    target.column_mut(5).fill(7.0);
    let config = CharsConfig { quantile_gate: Some((0.1, 0.9)), ..CharsConfig::default().with_clusters(4) };
    let map = CharsMap::fit(source.view(), target.view(), &config).unwrap();
    let open = CharsMap::fit(source.view(), target.view(), &CharsConfig { quantile_gate: None, ..config }).unwrap();
    let shift = map.shift(source.view()).unwrap();
    let all = open.shift(source.view()).unwrap();
    assert!(shift.column(5).iter().all(|v| *v == 0.0));
    let mut sorted = source.column(0).to_vec();
    sorted.sort_by(f32::total_cmp);
    for ((x, v), full) in source.column(0).iter().zip(shift.column(0)).zip(all.column(0)) {
        // 60 rows: the outer tenth is six of them on each side.
        assert_eq!(*v, if *x < sorted[6] || *x > sorted[53] { 0.0 } else { *full });
    }
    assert_eq!(map.transport(source.view(), 1.0).unwrap().column(5), source.column(5));
    assert_eq!(from_parts(map.parts()).unwrap().shift(source.view()).unwrap(), shift);
}

#[test]
fn ablation_leaves_rows_without_a_direction_and_names_bad_shapes() {
    use steering_ot::ablate::ablate;
    let x = noise(3, 4, 8);
    let mut shift = noise(3, 4, 9);
    shift.row_mut(1).fill(1e-12);
    let left = ablate(shift.view(), x.view()).unwrap();
    assert_eq!(left.row(1), x.row(1));
    for i in [0, 2] {
        assert!(left.row(i).dot(&shift.row(i)).abs() < 1e-5);
    }
    let one = ablate(shift.slice(ndarray::s![..1, ..]), x.view()).unwrap();
    assert!(one.dot(&shift.row(0)).iter().all(|v| v.abs() < 1e-5));
    assert!(matches!(ablate(noise(3, 5, 1).view(), x.view()), Err(Error::DimMismatch { .. })));
    assert!(matches!(ablate(noise(2, 4, 1).view(), x.view()), Err(Error::DimMismatch { .. })));
    shift[(2, 0)] = f32::NAN;
    assert!(matches!(ablate(shift.view(), x.view()), Err(Error::NonFinite { side: "shift", row: 2 })));
    let mut bad = x;
    bad[(0, 1)] = f32::INFINITY;
    assert!(matches!(ablate(shift.view(), bad.view()), Err(Error::NonFinite { side: "x", row: 0 })));
}

#[test]
fn shifts_beyond_f32_are_errors_and_not_infinities() {
    use steering_ot::baselines::{DiagonalChars, GaussianAct, GaussianOt, GaussianOtConfig, LinearAct};
    let source = noise(40, 4, 11);
    let target = noise(40, 4, 12) * 1e4;
    let (a, b) = (source.view(), target.view());
    let config = CharsConfig::default().with_clusters(2);
    let maps: [Box<dyn Steer>; 4] = [
        Box::new(GaussianAct::fit(a, b).unwrap()),
        Box::new(LinearAct::fit(a, b).unwrap()),
        Box::new(GaussianOt::fit(a, b, &GaussianOtConfig::default()).unwrap()),
        Box::new(DiagonalChars::fit(a, b, &config).unwrap()),
    ];
    for map in maps {
        let message = map.shift(Array2::from_elem((1, 4), 3e38f32).view()).unwrap_err().to_string();
        assert!(message.contains("range of f32"), "{}: {message}", map.name());
    }
}

#[test]
fn a_quantile_gate_without_bounds_is_no_map() {
    let config = CharsConfig { quantile_gate: Some((0.1, 0.9)), ..CharsConfig::default() };
    let (a, plan) = (array![[0.0, 1.0]], array![[1.0]]);
    let error = CharsMap::from_parts(config, a.clone(), a.clone(), plan.clone(), Extra::default()).unwrap_err();
    assert!(error.to_string().contains("bounds"), "{error}");
    let extra = Extra { bounds: Some((Array1::zeros(2), Array1::ones(2))), ..Extra::default() };
    let error = CharsMap::from_parts(CharsConfig::default(), a.clone(), a, plan, extra).unwrap_err();
    assert!(error.to_string().contains("bounds"), "{error}");
}
