//! What every map promises, checked by one function.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{noise, sets};
use ndarray::{Array2, ArrayView2};
use steering_ot::baselines::{
    DiM, DiagonalChars, GaussianAct, GaussianOt, GaussianOtConfig, LinearAct, MeanAct, PcaConfig, PcaDirection, PcaRows,
};
use steering_ot::compose::{ComposeConfig, Composition, Orthogonalise};
use steering_ot::steer::{Parts, from_parts};
use steering_ot::{CharsConfig, CharsMap, Coupling, Epsilon, Error, Kernel, Result, Steer, ndarray};

type Fit = dyn Fn(ArrayView2<'_, f32>, ArrayView2<'_, f32>) -> Result<Box<dyn Steer>>;

fn chars(config: CharsConfig) -> Box<Fit> {
    Box::new(move |a, b| Ok(Box::new(CharsMap::fit(a, b, &config)?)))
}

fn conforms(fit: &Fit) {
    let d = 37; // no multiple of the kernel's steps
    let (source, target) = sets(60, d, 5);
    let map = fit(source.view(), target.view()).unwrap();
    assert_eq!(map.width(), d);
    let x = noise(23, d, 6) * 3.0;

    let shift = map.shift(x.view()).unwrap();
    assert_eq!(shift.dim(), x.dim());
    assert!(shift.iter().all(|v| v.is_finite()));
    assert!(shift.iter().any(|v| *v != 0.0), "the sets differ, so something moves");

    // T_0 is the identity, T_α is x + α·shift, memory and arrays agree.
    assert_eq!(map.transport(x.view(), 0.0).unwrap(), x);
    let moved = map.transport(x.view(), -1.5).unwrap();
    for ((moved, x), v) in moved.iter().zip(&x).zip(&shift) {
        assert!((moved - (x - 1.5 * v)).abs() <= 1e-5 * (1.0 + x.abs() + v.abs()));
    }
    let mut out = vec![0.0; x.len()];
    map.shift_into(x.as_slice().unwrap(), &mut out).unwrap();
    assert_eq!(out, shift.as_slice().unwrap());

    // A row's shift doesn't depend on the rows beside it, nor on how they lie in memory.
    let fifth = map.shift(x.slice(ndarray::s![4..5, ..])).unwrap();
    for (a, b) in fifth.iter().zip(shift.row(4)) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()));
    }
    let columns_first = x.t().as_standard_layout().into_owned();
    let again = map.shift(columns_first.t()).unwrap();
    for (a, b) in again.iter().zip(&shift) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()));
    }
    assert_eq!(map.shift(Array2::zeros((0, d)).view()).unwrap().dim(), (0, d));

    // The mean shift has the width and is finite.
    assert!(map.mean_shift().unwrap().iter().all(|v| v.is_finite()));
    assert_eq!(map.mean_shift().unwrap().len(), d);
    let directions = map.directions(2);
    assert!(directions.nrows() <= 2 && directions.ncols() == d);
    let gram = directions.dot(&directions.t());
    for ((i, j), v) in gram.indexed_iter() {
        assert!((v - f64::from(u8::from(i == j))).abs() < 1e-9);
    }

    // The same fit gives the same bits; so do the parts, also through JSON.
    assert_eq!(fit(source.view(), target.view()).unwrap().shift(x.view()).unwrap(), shift);
    let parts = map.parts();
    assert_eq!(parts.kind, map.name());
    let settings = serde_json::from_str(&serde_json::to_string(&parts.settings).unwrap()).unwrap();
    let again = from_parts(Parts { settings, ..parts.clone() }).unwrap();
    assert_eq!(again.name(), map.name());
    assert_eq!(again.shift(x.view()).unwrap(), shift);
    assert_eq!(again.mean_shift(), map.mean_shift());
    assert_eq!(again.parts(), parts);

    // Damaged parts are refused, not used.
    for name in parts.arrays.keys() {
        let mut without = parts.clone();
        without.arrays.remove(name);
        assert!(from_parts(without).is_err(), "{} without {name}", map.name());
        if parts.arrays[name].is_empty() {
            continue;
        }
        let mut broken = parts.clone();
        broken.arrays.get_mut(name).unwrap().fill(f64::NAN);
        assert!(from_parts(broken).is_err(), "{} with NaN in {name}", map.name());
        let mut flat = parts.clone();
        flat.arrays.insert(name.clone(), ndarray::Array::zeros((1, 1, 1)).into_dyn());
        assert!(from_parts(flat).is_err(), "{} with {name} of three axes", map.name());
    }

    // Bad input is named.
    assert!(matches!(
        map.shift(noise(2, d + 1, 1).view()),
        Err(Error::DimMismatch { expected, got, .. }) if expected == d && got == d + 1
    ));
    let mut bad = x.clone();
    bad[(7, 3)] = f32::NAN;
    assert!(matches!(map.shift(bad.view()), Err(Error::NonFinite { row: 7, .. })), "{}", map.name());
    bad[(7, 3)] = f32::INFINITY;
    assert!(matches!(map.transport(bad.view(), 1.0), Err(Error::NonFinite { row: 7, .. })));
    assert!(map.transport(x.view(), f32::NAN).is_err());
    assert!(map.shift_into(&[0.0; 38], &mut [0.0; 38]).is_err());
    assert!(map.shift_into(&vec![0.0; d], &mut vec![0.0; d - 1]).is_err());
    let empty = Array2::zeros((0, d));
    assert!(matches!(fit(empty.view(), target.view()), Err(Error::EmptySet { side: "source" })));
    assert!(matches!(fit(source.view(), empty.view()), Err(Error::EmptySet { side: "target" })));
    assert!(matches!(fit(bad.view(), target.view()), Err(Error::NonFinite { side: "source", row: 7 })));
    assert!(matches!(fit(source.view(), noise(20, d - 1, 1).view()), Err(Error::DimMismatch { .. })));
}

#[test]
fn chars_conforms_with_every_kernel_and_coupling() {
    let base = CharsConfig::default().with_clusters(4);
    for kernel in [Kernel::AdaptiveGaussian, Kernel::Gaussian, Kernel::FixedSigma(4.0), Kernel::GlobalMedian] {
        conforms(&*chars(CharsConfig { kernel, ..base.clone() }));
    }
    for coupling in [Coupling::NearestNeighbour, Coupling::Uniform] {
        conforms(&*chars(CharsConfig { coupling, ..base.clone() }));
    }
    for epsilon in [Epsilon::Exact, Epsilon::SqrtDim, Epsilon::Fixed(30.0), Epsilon::Auto] {
        conforms(&*chars(CharsConfig { epsilon, ..base.clone() }));
    }
    conforms(&*chars(CharsConfig::paper()));
}

#[test]
fn chars_with_thresholding_and_with_a_quantile_gate_conforms() {
    let base = CharsConfig::default().with_clusters(4);
    for pct in [0, 1, 3, 100] {
        conforms(&*chars(CharsConfig { pct: Some(pct), ..base.clone() }));
    }
    conforms(&*chars(CharsConfig { quantile_gate: Some((0.05, 0.9)), ..base }));
}

#[test]
fn the_constant_maps_conform() {
    conforms(&|a, b| Ok(Box::new(DiM::fit(a, b)?)));
    conforms(&|a, b| Ok(Box::new(MeanAct::fit(a, b)?)));
    conforms(&|a, b| Ok(Box::new(PcaDirection::fit(a, b, &PcaConfig::default())?)));
    conforms(&|a, b| {
        let config = PcaConfig { rows: PcaRows::Paired, seed: 3 };
        let cut = |x: ArrayView2<'_, f32>| x.slice(ndarray::s![..x.nrows().min(60), ..]).to_owned();
        Ok(Box::new(PcaDirection::fit(cut(a).view(), cut(b).view(), &config)?))
    });
}

#[test]
fn the_affine_maps_conform() {
    conforms(&|a, b| Ok(Box::new(GaussianAct::fit(a, b)?)));
    conforms(&|a, b| Ok(Box::new(LinearAct::fit(a, b)?)));
    conforms(&|a, b| Ok(Box::new(GaussianOt::fit(a, b, &GaussianOtConfig::default())?)));
    conforms(&|a, b| Ok(Box::new(DiagonalChars::fit(a, b, &CharsConfig::default().with_clusters(3))?)));
}

#[test]
fn compositions_conform() {
    for orthogonalise in [Orthogonalise::None, Orthogonalise::Earlier, Orthogonalise::Mutual] {
        for with_mean in [false, true] {
            conforms(&move |a, b| {
                let first = CharsMap::fit(a, b, &CharsConfig::default().with_clusters(4))?;
                let config = CharsConfig { pct: Some(2), seed: 9, ..CharsConfig::default().with_clusters(3) };
                let second = CharsMap::fit(b, a, &config)?;
                let maps: Vec<Box<dyn Steer>> = vec![Box::new(first), Box::new(second), Box::new(DiM::fit(a, b)?)];
                let strengths = vec![1.0, 0.5, 0.25];
                let config = ComposeConfig { orthogonalise, with_mean, strengths, ..ComposeConfig::default() };
                Ok(Box::new(Composition::new(maps, config)?))
            });
        }
    }
}

#[test]
fn an_unknown_kind_is_refused() {
    let parts = Parts {
        kind: "charz".to_owned(),
        settings: serde_json::Value::Null,
        arrays: std::collections::BTreeMap::default(),
    };
    assert!(from_parts(parts).unwrap_err().to_string().contains("charz"));
}
