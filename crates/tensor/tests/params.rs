//! Parameter sets, guards and fused loops against libtorch's own operations.
#![cfg(feature = "torch")]
#![allow(missing_docs)]

use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tensor::params::is_perturbed;
use tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use tensor::{Error, ParamSet, ParamVec, Seed, fused};

fn random(shape: &[i64], kind: Kind, seed: u64) -> Tensor {
    let n: i64 = shape.iter().product();
    Tensor::from_slice(&Seed::new(seed).normal(n as usize)).reshape(shape).to_kind(kind)
}

fn set(kind: Kind, seed: u64) -> ParamSet {
    let shapes: [&[i64]; 4] = [&[30, 20], &[17], &[], &[2, 3, 5]];
    let named = shapes.iter().enumerate().map(|(i, shape)| (format!("p{i}"), random(shape, kind, seed + i as u64)));
    ParamSet::new(named).unwrap()
}

fn flat(tensors: &[Tensor]) -> Vec<f64> {
    tensors.iter().flat_map(|t| Vec::<f64>::try_from(t.to_kind(Kind::Double).reshape([-1])).unwrap()).collect()
}

fn direction(set: &ParamSet, seed: u64) -> ParamVec {
    let part = |(i, t): (usize, &Tensor)| Some(random(&t.size(), t.kind(), seed + i as u64));
    ParamVec::new(set.tensors().iter().enumerate().map(part).collect())
}

#[test]
fn norm_dot_and_axpy_agree_with_the_flat_vector_in_both_kinds() {
    for kind in [Kind::Float, Kind::Double] {
        let set = set(kind, 1);
        let d = direction(&set, 50);
        let (w, v) = (flat(set.tensors()), d.flatten(&set).unwrap());
        let v = Vec::<f64>::try_from(v.to_kind(Kind::Double)).unwrap();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        assert!((set.norm() - dot(&w, &w).sqrt()).abs() < 1e-9);
        assert!((d.norm() - dot(&v, &v).sqrt()).abs() < 1e-9);
        assert!((d.dot(&set.snapshot()).unwrap() - dot(&v, &w)).abs() < 1e-9);
        set.axpy(-0.5, &d).unwrap();
        for ((after, w), v) in flat(set.tensors()).iter().zip(&w).zip(&v) {
            assert!((after - (w - 0.5 * v)).abs() < 1e-6);
        }
    }
}

#[test]
fn a_missing_part_counts_as_zeros_and_leaves_its_parameter_alone() {
    let set = set(Kind::Float, 1);
    let mut parts: Vec<Option<Tensor>> = (0..4).map(|_| None).collect();
    parts[1] = Some(Tensor::ones([17], (Kind::Float, Device::Cpu)));
    let d = ParamVec::new(parts);
    assert_eq!(d.norm(), 17f64.sqrt());
    assert_eq!(d.flatten(&set).unwrap().sum(Kind::Float).double_value(&[]), 17.0);
    let before = set.snapshot();
    {
        let _guard = set.perturb(&[2.0; 4], &d, None).unwrap();
        let moved = ParamVec::new(set.tensors().iter().map(|t| Some(t.copy())).collect());
        moved.axpy(-1.0, &before).unwrap();
        assert!((moved.norm() - 2.0 * 17f64.sqrt()).abs() < 1e-5);
    }
    let mut sum = ParamVec::new(vec![None, Some(Tensor::ones([17], (Kind::Float, Device::Cpu))), None, None]);
    sum.accumulate(direction(&set, 9)).unwrap();
    assert!(sum.parts().iter().all(Option::is_some), "a part that only the other has is taken over");
}

#[test]
fn a_guard_restores_bit_for_bit_on_drop_on_close_and_on_panic() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let set = set(kind, 3);
        let before = flat(set.tensors());
        let d = direction(&set, 7);
        {
            let _guard = set.perturb(&[0.3; 4], &d, None).unwrap();
            assert_ne!(flat(set.tensors()), before);
        }
        assert_eq!(flat(set.tensors()), before);
        let scratch = set.perturb(&[1e20; 4], &d, None).unwrap().close();
        assert_eq!(flat(set.tensors()), before);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = set.perturb(&[f64::NAN; 4], &d, Some(scratch)).unwrap();
            panic!("inside");
        }));
        assert!(panicked.is_err());
        assert_eq!(flat(set.tensors()), before);
        drop(set.guard().unwrap().keep());
        assert!(!is_perturbed(&set.tensors()[0]));
    }
}

#[test]
fn the_originals_stay_readable_while_the_guard_is_open() {
    let set = set(Kind::Float, 3);
    let before = flat(set.tensors());
    let guard = set.perturb(&[1.0; 4], &direction(&set, 7), None).unwrap();
    assert_eq!(flat(guard.originals()), before);
}

#[test]
fn overlapping_guards_are_refused_also_through_another_set() {
    let first = set(Kind::Float, 3);
    let other = ParamSet::new([("alias".to_owned(), first.tensors()[2].shallow_clone())]).unwrap();
    let guard = first.guard().unwrap();
    assert!(matches!(other.guard(), Err(Error::NestedPerturbation { name }) if name == "alias"));
    drop(guard);
    assert!(other.guard().is_ok());
}

#[test]
fn sets_refuse_nothing_duplicates_and_views() {
    let t = Tensor::zeros([4], (Kind::Float, Device::Cpu));
    let named = |name: &str, t: &Tensor| (name.to_owned(), t.shallow_clone());
    assert!(matches!(ParamSet::new([]), Err(Error::EmptyParamSet)));
    assert!(matches!(ParamSet::new([named("a", &t), named("b", &t)]), Err(Error::DuplicateParam { .. })));
    let other = Tensor::zeros([4], (Kind::Float, Device::Cpu));
    assert!(matches!(ParamSet::new([named("a", &t), named("a", &other)]), Err(Error::DuplicateParam { .. })));
    let tail = t.narrow(0, 2, 2);
    assert!(matches!(ParamSet::new([named("a", &t), named("tail", &tail)]), Err(Error::OverlappingParams { .. })));
    let store = VarStore::new(Device::Cpu);
    assert!(matches!(ParamSet::from_var_store(&store), Err(Error::EmptyParamSet)));
}

#[test]
fn directions_of_another_shape_are_refused_by_name() {
    let set = set(Kind::Float, 1);
    let mut parts: Vec<Option<Tensor>> = (0..4).map(|_| None).collect();
    parts[1] = Some(Tensor::zeros([16], (Kind::Float, Device::Cpu)));
    let short = ParamVec::new(parts);
    let message = set.axpy(1.0, &short).unwrap_err().to_string();
    assert!(message.contains("\"p1\"") && message.contains("[17]") && message.contains("[16]"), "{message}");
    assert!(matches!(set.axpy(1.0, &ParamVec::new(vec![])), Err(Error::InvalidArgument { .. })));
    assert!(matches!(set.snapshot().dot(&short), Err(Error::Shape { .. })));
    assert!(matches!(short.dot(&ParamVec::new(vec![])), Err(Error::InvalidArgument { .. })));
    let message = set.assign(&ParamVec::new(vec![])).unwrap_err().to_string();
    assert!(message.contains('4') && message.contains('0'), "{message}");
    assert!(set.unflatten(&Tensor::zeros([5], (Kind::Float, Device::Cpu))).is_err());
}

#[test]
fn flatten_and_unflatten_are_inverse() {
    let set = set(Kind::Double, 1);
    let flat_tensor = set.snapshot().flatten(&set).unwrap();
    let back = set.unflatten(&flat_tensor).unwrap();
    back.axpy(-1.0, &set.snapshot()).unwrap();
    assert_eq!(back.norm(), 0.0);
}

#[test]
fn large_sums_do_not_depend_on_the_number_of_threads() {
    let n = (1 << 17) + 12345;
    // The tensor is made inside the pool, since tensors can't be shared between threads.
    let sum = move || {
        let x = Tensor::from_slice(&Seed::new(4).normal(n));
        fused::reduce([&[&x]], |_, [x]| [f64::from(x) * f64::from(x), f64::from(x)]).unwrap()
    };
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let one = pool(1).install(sum);
    assert_eq!(one.map(f64::to_bits), pool(2).install(sum).map(f64::to_bits));
    assert_eq!(one.map(f64::to_bits), pool(5).install(sum).map(f64::to_bits));
    let x = Tensor::from_slice(&Seed::new(4).normal(n));
    let expected = x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
    assert!((one[0] - expected).abs() < 1e-9 * expected);
}

#[test]
fn fused_loops_decline_what_they_cannot_do_and_change_nothing() {
    let f = Tensor::ones([6], (Kind::Float, Device::Cpu));
    let d = Tensor::ones([6], (Kind::Double, Device::Cpu));
    let strided = Tensor::ones([6, 2], (Kind::Float, Device::Cpu)).select(1, 0);
    let shorter = Tensor::ones([5], (Kind::Float, Device::Cpu));
    let add = |y: &Tensor, x: &Tensor| fused::update([&[y]], [&[x]], |_, [y], [x]| *y += x);
    for (y, x) in [(&d, &f), (&f, &d), (&strided, &f), (&f, &strided), (&f, &shorter), (&f, &f)] {
        assert!(!add(y, x));
    }
    // Written memory that is also read at a shifted place.
    assert!(!add(&f.narrow(0, 0, 4), &f.narrow(0, 1, 4)));
    assert_eq!(f.sum(Kind::Float).double_value(&[]), 6.0);
    assert!(add(&f.narrow(0, 0, 3), &f.narrow(0, 3, 3)));
    let negated = f.internal_neg_view();
    assert!(fused::reduce([&[&negated]], |_, [x]| [f64::from(x)]).is_none(), "its memory has the other sign");
    assert!(fused::reduce([&[&d]], |_, [x]| [f64::from(x)]).is_none());
    assert_eq!(fused::reduce([&[]], |_, [x]| [f64::from(x)]), Some([0.0]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_fused_update_equals_libtorchs_over_any_sizes(
        sizes in proptest::collection::vec(0usize..40_000, 1..5), alpha in -2.0f64..2.0, seed in any::<u64>(),
    ) {
        let make = |stream: u64| -> Vec<Tensor> {
            sizes.iter().enumerate().map(|(i, &n)| {
                let mut values = vec![0.0; n];
                Seed::new(seed).index(i as u64).fill_normal(&mut values, stream);
                Tensor::from_slice(&values)
            }).collect()
        };
        let (y, x) = (make(0), make(1));
        let expected: Vec<Tensor> = y.iter().zip(&x).map(|(y, x)| y + x * alpha).collect();
        let (ys, xs): (Vec<&Tensor>, Vec<&Tensor>) = (y.iter().collect(), x.iter().collect());
        let alpha = alpha as f32;
        prop_assert!(fused::update([&ys], [&xs], |_, [y], [x]| *y += alpha * x));
        for (got, expected) in y.iter().zip(&expected) {
            if got.numel() > 0 {
                prop_assert!((got - expected).abs().max().double_value(&[]) < 1e-6);
            }
        }
    }
}

#[test]
fn noise_under_a_guard_and_shifts_are_the_same_in_every_layout_and_kind() {
    let start = Tensor::arange(12, (Kind::Float, Device::Cpu)).sin().reshape([3, 4]);
    let run = |w: Tensor| {
        let set = ParamSet::new([("w".to_owned(), w.shallow_clone()), ("b".to_owned(), w.get(0).copy())]).unwrap();
        let before = set.snapshot();
        let guard = set.perturb_normal(0.5, Seed::new(3), None).unwrap();
        let mut seen = Vec::<f64>::try_from(w.to_kind(Kind::Double).contiguous().reshape([-1])).unwrap();
        let noise = set.normal(Seed::new(3)).unwrap();
        // From wherever the parameters are; without a part back to the original.
        guard
            .shift(&[-2.0, 1.0], &ParamVec::new(vec![noise.parts()[0].as_ref().map(Tensor::shallow_clone), None]))
            .unwrap();
        seen.extend(Vec::<f64>::try_from(w.to_kind(Kind::Double).contiguous().reshape([-1])).unwrap());
        assert_eq!(set.tensors()[1], *before.parts()[1].as_ref().unwrap());
        assert!(guard.shift(&[1.0], &noise).is_err());
        drop(guard);
        assert_eq!(set.tensors()[0], *before.parts()[0].as_ref().unwrap());
        seen
    };
    let dense = run(start.copy());
    for other in [run(start.tr().contiguous().tr()), run(start.to_kind(Kind::Double))] {
        assert!(dense.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-6), "{dense:?} {other:?}");
    }
    assert!((dense[0] - f64::from(Seed::new(3).normal(1)[0]) * 0.5).abs() < 1e-6, "sin 0 plus half the noise");
}
