//! Fake quantization, trackers, the diagnosis and the equivalence report.
#![allow(missing_docs)]

mod common;
use common::{bits, close, group, leaf, values};
use proptest::prelude::*;
use sam_opt::s_adam::{DampingLog, LgiKind, ProbeOpts, probe_lgi, probe_lgi_keeping, probe_lgi_of};
use sam_opt::tensor::ndarray::Array1;
use sam_opt::tensor::tch::{Device, Kind, Tensor, no_grad};
use sam_opt::tensor::{ParamSet, ParamVec, Seed};
use sam_opt::{Error, FakeQuant, GradientCosine, OscillationTracker, SAdam, SAdamConfig, SignFlips};

// Fake quantization.

#[test]
fn four_and_two_bit_codes_are_the_published_ones() {
    let x = Tensor::from_slice(&[2.0f32, 1.0, 0.1, 0.0, -0.3, -2.0]);
    let four = FakeQuant::new(4, false).unwrap();
    assert_eq!(four.range(), (-8, 7));
    close(&values(&four.scale(&x).unwrap()), &[3.5], 1e-6);
    // 3.5·(2, 1, 0.1, 0, −0.3, −2) = 7, 3.5, 0.35, 0, −1.05, −7; ties go to the even code.
    assert_eq!(values(&four.codes(&x).unwrap()), [7.0, 4.0, 0.0, 0.0, -1.0, -7.0]);
    let two = FakeQuant::new(2, false).unwrap();
    assert_eq!(two.range(), (-2, 1));
    close(&values(&two.scale(&x).unwrap()), &[0.75], 1e-6);
    assert_eq!(values(&two.codes(&x).unwrap()), [1.0, 1.0, 0.0, 0.0, 0.0, -2.0]);
    close(&values(&two.forward(&x).unwrap()), &[4.0 / 3.0, 4.0 / 3.0, 0.0, 0.0, 0.0, -8.0 / 3.0], 1e-6);
}

#[test]
fn the_gradient_goes_straight_through() {
    let x = leaf(&[2.0, 1.0, 0.1, -0.3, -2.0], Kind::Float);
    let weights = Tensor::from_slice(&[1.0f32, -2.0, 3.0, 0.5, 7.0]);
    let loss = (FakeQuant::new(2, false).unwrap().forward(&x).unwrap() * &weights).sum(Kind::Float);
    let set = ParamSet::new([("x".to_owned(), x)]).unwrap();
    assert_eq!(values(set.gradient(&loss).unwrap().present()[0]), values(&weights));
}

#[test]
fn each_channel_can_have_its_scale_and_zeros_stay_zeros() {
    let x = Tensor::from_slice(&[1.0f32, -0.5, 100.0, 50.0]).reshape([2, 2]);
    let quant = FakeQuant::new(4, true).unwrap();
    assert_eq!(quant.scale(&x).unwrap().size(), [2, 1]);
    assert_eq!(values(&quant.codes(&x).unwrap()), [7.0, -4.0, 7.0, 4.0]);
    assert_eq!(values(&quant.codes(&Tensor::from_slice(&[3.0f32, -1.0])).unwrap()), [7.0, -7.0]);
    for per_channel in [false, true] {
        let zeros = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu));
        assert_eq!(values(&FakeQuant::new(2, per_channel).unwrap().forward(&zeros).unwrap()), [0.0; 6]);
    }
    assert!(matches!(FakeQuant::new(1, false), Err(Error::InvalidConfig { .. })));
    assert!(FakeQuant::new(17, false).unwrap_err().to_string().contains("bits"));
}

#[test]
fn the_largest_negative_weight_always_has_the_outermost_two_bit_code() {
    // 1.5/max puts it on a tie, which the rounding of the scale would decide.
    let quant = FakeQuant::new(2, false).unwrap();
    for m in Seed::new(1).normal(500) {
        let x = Tensor::from_slice(&[-m.abs(), 0.3 * m.abs()]);
        assert_eq!(values(&quant.codes(&x).unwrap()), [-2.0, 0.0], "{m}");
    }
}

#[test]
fn half_precision_is_quantized_in_single() {
    let half = |x: &[f32]| Tensor::from_slice(x).to_kind(Kind::Half);
    let zeros = FakeQuant::new(4, false).unwrap().forward(&half(&[0.0, 0.0])).unwrap();
    assert_eq!((values(&zeros), zeros.kind()), (vec![0.0, 0.0], Kind::Half));
    assert_eq!(values(&FakeQuant::new(4, false).unwrap().codes(&half(&[5e-5, -2e-5])).unwrap()), [7.0, -3.0]);
    close(&values(&FakeQuant::new(16, false).unwrap().forward(&half(&[0.3, -0.1])).unwrap()), &[0.3, -0.1], 1e-3);
}

#[test]
fn bits_that_came_by_another_way_are_refused_too() {
    for bits in [0, 1, 17, 70] {
        let quant: FakeQuant = serde_json::from_str(&format!(r#"{{"bits": {bits}, "per_channel": false}}"#)).unwrap();
        let error = quant.forward(&Tensor::from_slice(&[1.0f32])).unwrap_err().to_string();
        assert!(error.contains("bits") && error.contains(&bits.to_string()), "{error}");
        let (low, high) = quant.range();
        assert!(low < high);
    }
}

#[test]
fn tiny_half_precision_updates_flip_too() {
    let w = Tensor::from_slice(&[0.0f32]).to_kind(Kind::Half);
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let mut flips = SignFlips::new();
    for value in [0.0, 1e-4, 0.0, 1e-4] {
        let _ = w.shallow_clone().fill_(value);
        flips.observe(&set).unwrap();
    }
    assert_eq!(flips.mean(), Some(1.0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn quantizing_twice_changes_nothing(
        x in proptest::collection::vec(-3.0f32..3.0, 1..30), bits in 2u32..9,
    ) {
        let x = Tensor::from_slice(&x);
        let quant = FakeQuant::new(bits, false).unwrap();
        let scale = quant.scale(&x).unwrap();
        let once = quant.forward_at(&x, &scale).unwrap();
        prop_assert_eq!(values(&quant.forward_at(&once, &scale).unwrap()), values(&once));
        // With the scale taken anew, from three bits on.
        if bits > 2 {
            let codes = values(&quant.codes(&x).unwrap());
            prop_assert_eq!(values(&quant.codes(&once).unwrap()), codes.clone());
            let (low, high) = quant.range();
            prop_assert!(codes.iter().all(|c| *c >= low as f64 && *c <= high as f64 && c.fract() == 0.0));
            let half = 0.5 / values(&scale)[0] + 1e-6;
            prop_assert!(values(&once).iter().zip(values(&x)).all(|(q, x)| (q - x).abs() <= half));
        }
    }
}

// Trackers.

#[test]
fn sign_flips_are_counted_from_the_third_look() {
    let w = leaf(&[0.0, 0.0], Kind::Float);
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let mut flips = SignFlips::new();
    let mut seen = Vec::new();
    for point in [[0.0f32, 0.0], [1.0, 1.0], [0.5, 2.0], [1.0, 1.5], [2.0, 1.5]] {
        no_grad(|| w.shallow_clone().copy_(&Tensor::from_slice(&point)));
        seen.push(flips.observe(&set).unwrap());
    }
    // Updates (1, 1), (−0.5, 1), (0.5, −0.5), (1, 0).
    assert_eq!(seen, [None, None, Some(0.5), Some(1.0), Some(0.0)]);
    assert_eq!(flips.mean(), Some(0.5));
    let other = ParamSet::new([("w".to_owned(), leaf(&[1.0], Kind::Float))]).unwrap();
    assert!(matches!(flips.observe(&other), Err(Error::InvalidConfig { .. })));
}

#[test]
fn gradient_cosines_compare_successive_gradients() {
    let mut cosine = GradientCosine::new();
    let vector = |x: f64, y: f64| ParamVec::new(vec![Some(Tensor::from_slice(&[x, y]))]);
    assert_eq!(cosine.observe(&vector(1.0, 0.0)).unwrap(), None);
    close(&[cosine.observe(&vector(3.0, 3.0)).unwrap().unwrap()], &[0.5f64.sqrt()], 1e-12);
    close(&[cosine.observe(&vector(-1.0, -1.0)).unwrap().unwrap()], &[-1.0], 1e-12);
    assert_eq!(cosine.observe(&vector(0.0, 0.0)).unwrap(), None);
    close(&[cosine.mean().unwrap()], &[(0.5f64.sqrt() - 1.0) / 2.0], 1e-12);
}

#[test]
fn oscillation_needs_a_change_against_the_last_change() {
    let mut tracker = OscillationTracker::default();
    // The first code goes up and down, the second climbs, the third rests between its changes.
    for codes in [[0.0f32, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 2.0, 1.0], [1.0, 3.0, 0.0]] {
        tracker.observe(&[Tensor::from_slice(&codes)]).unwrap();
    }
    close(&[tracker.share(OscillationTracker::THRESHOLD).unwrap()], &[2.0 / 3.0], 1e-12);
    // F = 0.01·0.99 + 0.01 = 0.0199 for the first, 0.01 for the third.
    close(&[tracker.share(0.015).unwrap(), tracker.share(0.02).unwrap()], &[1.0 / 3.0, 0.0], 1e-12);
    assert!(matches!(tracker.observe(&[]), Err(Error::InvalidConfig { .. })));
    assert!(OscillationTracker::new(0.0).is_err());
    assert_eq!(OscillationTracker::default().share(0.0).unwrap(), 0.0);
}

// Diagnosis.

#[test]
fn the_diagnosis_tells_a_kink_from_a_smooth_loss_and_changes_nothing() {
    let n = 500;
    let a = Tensor::from_slice(&Seed::new(2).normal(n));
    let w = leaf(&vec![0.0; n], Kind::Float);
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let buffer = leaf(&[7.0], Kind::Float).detach();
    let before = bits(&[w.shallow_clone(), buffer.shallow_clone()]);
    let opts = ProbeOpts { sync_rng: false, seed: 1, ..ProbeOpts::default() };
    let smooth = probe_lgi_keeping(
        &set,
        &[buffer.shallow_clone()],
        |_| {
            let _ = no_grad(|| buffer.shallow_clone().g_add_scalar_(1.0));
            Ok(w.dot(&a))
        },
        &opts,
    )
    .unwrap();
    let kink = probe_lgi(&set, |_| Ok(w.dot(&a).abs()), &opts).unwrap();
    assert_eq!(bits(&[w.shallow_clone(), buffer.shallow_clone()]), before);
    assert_eq!((smooth.forwards, smooth.probe_values.len()), (1 + 4 * 32, 32));
    assert!(smooth.p_value.unwrap() > 0.01 && kink.p_value.unwrap() < 1e-6);
    let (low, high) = smooth.lgi_interval.unwrap();
    assert!(high == 1.0 && low > 0.7 && low <= smooth.lgi, "{low} {high}");
    let (low, high) = kink.lgi_interval.unwrap();
    assert!(low < 1.0 - 2.0 / std::f64::consts::PI && 1.0 - 2.0 / std::f64::consts::PI < high && high < 0.7);
    assert!(smooth.residual.unwrap() < 1e-6 && smooth.kink.unwrap() < 1e-6);
    assert!(kink.residual.unwrap() > 0.999 && kink.kink.unwrap() > 0.999);
    for (field, bad) in [
        ("k_directions", ProbeOpts { k_directions: 0, ..opts.clone() }),
        ("sigma", ProbeOpts { sigma: -1.0, ..opts.clone() }),
        ("confidence", ProbeOpts { confidence: 1.0, ..opts.clone() }),
    ] {
        assert!(probe_lgi(&set, |_| Ok(w.dot(&a)), &bad).unwrap_err().to_string().contains(field));
    }
    assert!(matches!(probe_lgi(&set, |_| Ok(w.dot(&a) * f64::NAN), &opts), Err(Error::NonFinite { .. })));
    assert!(matches!(probe_lgi(&set, |_| Ok(w.outer(&a)), &opts), Err(Error::NonScalarLoss { .. })));
}

#[test]
fn a_smooth_loss_with_small_slopes_is_no_kink() {
    let n = 2000;
    let a = Tensor::from_slice(&Seed::new(2).normal(n)) * 5e-4;
    let w = leaf(&vec![0.0; n], Kind::Double);
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let opts = ProbeOpts { sync_rng: false, ..ProbeOpts::default() };
    let report = probe_lgi(&set, |_| Ok(w.dot(&a.to_kind(Kind::Double))), &opts).unwrap();
    // ζ drowns the slopes, so the statistic falls; the p-value doesn't take that for a kink.
    assert!(report.lgi < 0.5 && report.p_value.unwrap() > 0.01, "{report:?}");
}

#[test]
fn plain_functions_have_the_same_diagnosis() {
    let n = 400;
    let a = Array1::from_iter(Seed::new(3).normal(n).into_iter().map(f64::from));
    let origin = Array1::zeros(n);
    let opts = ProbeOpts::default();
    let linear = probe_lgi_of(|x| a.dot(x), &origin, Some(&a), &opts).unwrap();
    assert!(linear.residual.unwrap() < 1e-12 && linear.kink.unwrap() < 1e-12 && linear.p_value.unwrap() > 0.01);
    let hinge = probe_lgi_of(|x| a.dot(x).max(0.0), &origin, None, &opts).unwrap();
    assert!(hinge.residual.is_none() && hinge.kink.unwrap() > 0.5);
    let mut calls = 0;
    let cheap = ProbeOpts { kink: false, k_directions: 5, ..opts.clone() };
    let mut half_nan = |x: &Array1<f64>| {
        calls += 1;
        if x[0] > 0.0 { f64::NAN } else { a.dot(x) }
    };
    let report = probe_lgi_of(&mut half_nan, &origin, None, &cheap).unwrap();
    assert!(report.probes_dropped > 0 && report.probe_values.len() == 5 - report.probes_dropped);
    assert_eq!((calls, report.forwards), (6, 6));
    assert!(probe_lgi_of(|_| 0.0, &Array1::zeros(0), None, &opts).is_err());
    assert!(probe_lgi_of(|_| 0.0, &origin, Some(&Array1::zeros(3)), &opts).is_err());
    // A constant function: no slope, no variance, no NaN.
    let flat = probe_lgi_of(|_| 1.0, &origin, Some(&origin), &opts).unwrap();
    assert_eq!((flat.lgi, flat.residual, flat.kink), (0.0, Some(0.0), Some(0.0)));
}

// The equivalence report.

fn log(config: SAdamConfig, loss: impl Fn(&Tensor, u64) -> Tensor) -> DampingLog {
    let w = leaf(&vec![0.5; 300], Kind::Double);
    let mut log = DampingLog::new(&config);
    assert!(log.report().is_none());
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    for i in 0..300 {
        log.push(&optimizer.step(|pass| Ok(loss(&w, pass.step.max(i)))).unwrap());
    }
    log
}

#[test]
fn the_report_names_the_equivalent_learning_rate_and_warns() {
    let config = SAdamConfig { lr: 1e-3, sync_rng: false, ..SAdamConfig::default() };
    let c = Tensor::from_slice(&Seed::new(4).normal(300).into_iter().map(f64::from).collect::<Vec<_>>());
    let report = log(config.clone(), |w, _| w.dot(&c)).report().unwrap();
    close(&[report.null_mean_damping.unwrap(), report.mean_lgi.unwrap()], &[0.3085, 1.0], 0.13);
    close(&[report.equivalent_lr], &[report.mean_damping * 1e-3], 1e-12);
    close(&[report.equivalent_lr * report.equivalent_weight_decay], &[1e-3 * 1e-2], 1e-12);
    assert!(report.constant_explains, "{report:?}");
    assert!(report.to_string().contains("equals AdamW at the learning rate") && report.to_string().contains("Warning"));

    // A damping that is kept for some steps is no memory of the loss.
    let kept = log(SAdamConfig { probe_every: 4, ..config.clone() }, |w, _| w.dot(&c)).report().unwrap();
    assert!(kept.constant_explains && kept.steps == 300, "{kept:?}");
    let constant =
        log(SAdamConfig { lgi: LgiKind::Constant(0.3), ..config.clone() }, |w, _| w.dot(&c)).report().unwrap();
    assert!(constant.to_string().contains("The damping is constant") && !constant.to_string().contains("noise"));

    // A loss that is rough for half of the run: the damping has memory.
    let residual = SAdamConfig { lgi: LgiKind::Residual, ..config };
    let rough = |w: &Tensor, i: u64| if i < 150 { w.dot(&c) } else { w.dot(&c) + (w * 1000.0).sin().sum(Kind::Double) };
    let report = log(residual, rough).report().unwrap();
    assert!(!report.constant_explains && !report.to_string().contains("Warning"), "{report:?}");
    assert!(report.null_mean_damping.is_none());
}
