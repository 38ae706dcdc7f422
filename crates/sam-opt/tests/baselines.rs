//! The base optimizers that S-Adam is compared with: RMSprop and proximal SGD.
#![allow(missing_docs)]

mod common;
use common::{bits, close, group, leaf, quadratic, values};
use sam_opt::base::step_on;
use sam_opt::tensor::tch::{Kind, Tensor};
use sam_opt::tensor::{ParamSet, ParamVec};
use sam_opt::{BaseOptimizer, Error, ProxSgd, ProxSgdConfig, RmsProp, RmsPropConfig, Sam, SamConfig, Sgd, SgdConfig};

/// The parameter after each gradient.
fn path(base: &mut impl BaseOptimizer, start: f64, gradients: &[f64], kind: Kind) -> Vec<f64> {
    let w = leaf(&[start], kind);
    let set = ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    gradients
        .iter()
        .map(|g| {
            let gradient = ParamVec::new(vec![Some(Tensor::from_slice(&[*g]).to_kind(kind))]);
            step_on(base, &set, &gradient).unwrap();
            values(&w)[0]
        })
        .collect()
}

#[test]
fn rmsprop_by_hand() {
    // ε shows in the eighth digit.
    for (kind, tolerance) in [(Kind::Double, 1e-7), (Kind::Float, 1e-6)] {
        let mut base = RmsProp::from_config(RmsPropConfig { lr: 0.01, weight_decay: 0.1, ..RmsPropConfig::default() });
        // d₁ = 2 + 0.1·1, v₁ = 0.01·d₁², so the first step is lr·10 whatever the gradient.
        let first = 1.0 - 0.1;
        let d: f64 = -1.0 + 0.1 * first;
        let v: f64 = 0.99 * 0.01 * 2.1 * 2.1 + 0.01 * d * d;
        close(&path(&mut base, 1.0, &[2.0, -1.0], kind), &[first, first - 0.01 * d / v.sqrt()], tolerance);
    }
}

#[test]
fn proximal_sgd_by_hand() {
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-6)] {
        let mut base = ProxSgd::from_config(ProxSgdConfig { lr: 0.1, momentum: 0.5, l1: 1.0 });
        // b = 1, w = 0.9 → 0.8; b = 2.5, w = 0.55 → 0.45.
        close(&path(&mut base, 1.0, &[1.0, 2.0], kind), &[0.8, 0.45], tolerance);
        let mut base = ProxSgd::from_config(ProxSgdConfig { lr: 0.1, momentum: 0.0, l1: 1.0 });
        close(&path(&mut base, -1.0, &[-1.0], kind), &[-0.8], tolerance);
        // Below the threshold: exactly 0, and it stays there.
        assert_eq!(path(&mut base, 0.05, &[0.0, 0.0, 0.5], kind), [0.0, 0.0, 0.0]);
        assert_eq!(path(&mut base, -0.05, &[0.0], kind), [0.0]);
    }
}

#[test]
fn with_momentum_proximal_sgd_minimizes_a_smaller_l1_term() {
    // ½(w − 1)² + λ|w| has its minimum at 1 − λ; λ = (1 − 0.9)·2.
    let w = leaf(&[0.5], Kind::Double);
    let base = ProxSgd::from_config(ProxSgdConfig { lr: 0.05, momentum: 0.9, l1: 2.0 });
    let mut sam = Sam::new(vec![group(&[("w", &w)])], base, SamConfig::sam(0.0)).unwrap();
    for _ in 0..1000 {
        sam.step(|_| Ok((&w - 1.0).square().sum(Kind::Double) * 0.5)).unwrap();
    }
    close(&values(&w), &[0.8], 1e-9);
}

#[test]
fn proximal_sgd_without_l1_is_sgd_with_momentum() {
    let run = |base: &mut dyn FnMut(&Tensor)| {
        let w = leaf(&[1.0, -0.7], Kind::Float);
        for _ in 0..20 {
            base(&w);
        }
        bits(&[w])
    };
    let prox = |w: &Tensor, sam: &mut Option<Sam<ProxSgd>>| {
        let new = || {
            let base = ProxSgd::from_config(ProxSgdConfig { lr: 0.03, momentum: 0.9, l1: 0.0 });
            Sam::new(vec![group(&[("w", w)])], base, SamConfig::sam(0.0)).unwrap()
        };
        sam.get_or_insert_with(new).step(|_| Ok(quadratic(w))).unwrap();
    };
    let sgd = |w: &Tensor, sam: &mut Option<Sam<Sgd>>| {
        let new = || {
            let base = Sgd::from_config(SgdConfig { lr: 0.03, momentum: 0.9, ..SgdConfig::default() });
            Sam::new(vec![group(&[("w", w)])], base, SamConfig::sam(0.0)).unwrap()
        };
        sam.get_or_insert_with(new).step(|_| Ok(quadratic(w))).unwrap();
    };
    let (mut a, mut b) = (None, None);
    assert_eq!(run(&mut |w| prox(w, &mut a)), run(&mut |w| sgd(w, &mut b)));
}

/// Six steps, with a save after three and a new optimizer that goes on.
fn saved_equals_uninterrupted<B: BaseOptimizer>(make: impl Fn() -> B) {
    let run = |interrupt: bool| {
        let w = leaf(&[1.0, -0.7], Kind::Float);
        let new = || Sam::new(vec![group(&[("w", &w)])], make(), SamConfig::sam(0.0)).unwrap();
        let mut sam = new();
        for i in 0..6 {
            if interrupt && i == 3 {
                let state = sam.state_dict().unwrap();
                sam = new();
                sam.load_state_dict(&state).unwrap();
            }
            sam.step(|_| Ok(quadratic(&w))).unwrap();
        }
        bits(&[w])
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn both_save_their_state() {
    saved_equals_uninterrupted(|| RmsProp::new(0.01));
    saved_equals_uninterrupted(|| ProxSgd::from_config(ProxSgdConfig::default()));
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let new = |alpha| {
        let base = RmsProp::from_config(RmsPropConfig { alpha, ..RmsPropConfig::default() });
        Sam::new(vec![group(&[("w", &w)])], base, SamConfig::sam(0.0)).unwrap()
    };
    let state = new(0.99).state_dict().unwrap();
    assert!(matches!(new(0.9).load_state_dict(&state), Err(Error::State { .. })));
}

#[test]
fn invalid_settings_are_named() {
    let w = leaf(&[1.0], Kind::Float);
    let message = |error: Error| error.to_string();
    let rms =
        |config| Sam::new(vec![group(&[("w", &w)])], RmsProp::from_config(config), SamConfig::sam(0.0)).unwrap_err();
    let prox =
        |config| Sam::new(vec![group(&[("w", &w)])], ProxSgd::from_config(config), SamConfig::sam(0.0)).unwrap_err();
    assert!(message(rms(RmsPropConfig { alpha: 1.0, ..RmsPropConfig::default() })).contains("alpha"));
    assert!(message(rms(RmsPropConfig { eps: f64::NAN, ..RmsPropConfig::default() })).contains("eps"));
    assert!(message(prox(ProxSgdConfig { l1: -1.0, ..ProxSgdConfig::default() })).contains("l1"));
    assert!(message(prox(ProxSgdConfig { momentum: 1.0, ..ProxSgdConfig::default() })).contains("momentum"));
}
