//! Maps on tensors: the same numbers as on arrays, in every kind, with gradients.
#![cfg(feature = "torch")]

use ndarray::Array2;
use steering_ot::config::{CharsConfig, Kernel};
use steering_ot::tensors::{TorchMap, shift, transport};
use steering_ot::{CharsMap, Error};
use tensor::Seed;
use tensor::tch::{Device, Kind, Tensor};

const WIDTH: usize = 12;

fn rows(n: usize, name: &str) -> Array2<f32> {
    Array2::from_shape_vec((n, WIDTH), Seed::new(3).child(name).normal(n * WIDTH)).unwrap()
}

fn map(kernel: Kernel, bandwidth: f64) -> CharsMap {
    let config = CharsConfig { kernel, bandwidth, ..CharsConfig::default() }.with_clusters(5);
    CharsMap::fit(rows(60, "a").view(), (rows(50, "b") * 2.0 + 1.0).view(), &config).unwrap()
}

fn kernels() -> [(Kernel, f64); 4] {
    [
        (Kernel::AdaptiveGaussian, 0.25),
        (Kernel::Gaussian, 1.0),
        (Kernel::FixedSigma(2.0), 1.0),
        (Kernel::GlobalMedian, 0.5),
    ]
}

fn tensor(x: &Array2<f32>) -> Tensor {
    tensor::interop::to_tensor(&x.view()).unwrap()
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

#[test]
fn a_tensor_of_any_shape_gets_the_shifts_of_its_rows() {
    let x = rows(6, "x");
    for (kernel, h) in kernels() {
        let map = map(kernel, h);
        let expected = tensor(&map.shift(x.view()).unwrap());
        assert_eq!(shift(&map, &tensor(&x)).unwrap(), expected, "{kernel:?}");
        let cube = tensor(&x).view([2, 3, WIDTH as i64]);
        assert_eq!(map.shift_tensor(&cube).unwrap().view([6, -1]), expected);
        let turned = tensor(&x).tr().contiguous().tr();
        assert!(!turned.is_contiguous());
        assert_eq!(shift(&map, &turned).unwrap(), expected);
        let gates = map.gates_tensor(&cube).unwrap();
        assert_eq!(gates.size(), [2, 3, 5]);
        assert!(largest(&(gates.sum_dim_intlist([-1i64].as_slice(), false, Kind::Float) - 1.0)) < 1e-5);
    }
}

#[test]
fn lower_kinds_are_moved_in_f32_and_rounded_once() {
    let map = map(Kernel::AdaptiveGaussian, 0.25);
    let x = tensor(&rows(6, "x"));
    for kind in [Kind::BFloat16, Kind::Half] {
        let low = x.to_kind(kind);
        let expected = transport(&map, &low.to_kind(Kind::Float), 1.5).unwrap().to_kind(kind);
        let moved = map.transport_tensor(&low, 1.5).unwrap();
        assert_eq!(moved.kind(), kind);
        assert_eq!(moved, expected);
    }
}

#[test]
fn activations_in_f64_keep_what_f32_would_lose() {
    let map = map(Kernel::AdaptiveGaussian, 0.25);
    let x = tensor(&rows(6, "x")).to_kind(Kind::Double) * (1.0 + 1e-12);
    assert_eq!(transport(&map, &x, 0.0).unwrap(), x);
    let moved = transport(&map, &x, 1.5).unwrap();
    assert_eq!(moved, &x + shift(&map, &x.to_kind(Kind::Float)).unwrap().to_kind(Kind::Double) * 1.5);
}

#[test]
fn the_map_of_tensors_agrees_with_the_kernel() {
    let x = rows(40, "x");
    for (kernel, h) in kernels() {
        let map = map(kernel, h);
        let torch = TorchMap::new(&map, Kind::Float, Device::Cpu).unwrap();
        let difference = torch.shift(&tensor(&x)).unwrap() - shift(&map, &tensor(&x)).unwrap();
        assert!(largest(&difference) < 1e-4, "{kernel:?}: {}", largest(&difference));
    }
}

#[test]
fn the_gradient_through_the_map_is_that_of_finite_differences() {
    for (kernel, h) in kernels() {
        let map = TorchMap::new(&map(kernel, h), Kind::Double, Device::Cpu).unwrap();
        let x = tensor(&rows(1, "x")).to_kind(Kind::Double);
        let weights = Tensor::from_slice(&Seed::new(9).normal(WIDTH)).to_kind(Kind::Double);
        let value = |x: &Tensor| (map.shift(x).unwrap() * &weights).sum(Kind::Double);
        let at = x.copy().set_requires_grad(true);
        value(&at).backward();
        for i in 0..WIDTH as i64 {
            let step = 1e-5;
            let bump = Tensor::zeros([1, WIDTH as i64], (Kind::Double, Device::Cpu));
            let _ = bump.narrow(1, i, 1).fill_(step);
            let slope = (value(&(&x + &bump)) - value(&(&x - &bump))).double_value(&[]) / (2.0 * step);
            let found = at.grad().double_value(&[0, i]);
            assert!((slope - found).abs() < 1e-5 * (1.0 + slope.abs()), "{kernel:?}, {i}: {slope} and {found}");
        }
    }
}

#[test]
fn wrong_widths_kinds_and_strengths_are_named() {
    let map = map(Kernel::AdaptiveGaussian, 0.25);
    let narrow = Tensor::zeros([2, 5], (Kind::Float, Device::Cpu));
    assert!(matches!(shift(&map, &narrow), Err(Error::DimMismatch { expected: 12, got: 5, .. })));
    assert!(matches!(map.gates_tensor(&narrow), Err(Error::DimMismatch { .. })));
    let x = tensor(&rows(2, "x"));
    assert!(transport(&map, &x, f64::NAN).unwrap_err().to_string().contains("alpha"));
    assert!(TorchMap::new(&map, Kind::Half, Device::Cpu).unwrap_err().to_string().contains("kind"));
    let torch = TorchMap::new(&map, Kind::Double, Device::Cpu).unwrap();
    assert!(torch.shift(&x).unwrap_err().to_string().contains("Double"));
    assert!(matches!(torch.shift(&narrow.to_kind(Kind::Double)), Err(Error::DimMismatch { .. })));
    let nan = Tensor::from_slice(&[f32::NAN; WIDTH]).view([1, -1]);
    assert!(matches!(shift(&map, &nan), Err(Error::NonFinite { row: 0, .. })));
    let flat = Tensor::zeros([WIDTH as i64], (Kind::Float, Device::Cpu));
    assert!(CharsMap::fit_tensors(&flat, &x, &CharsConfig::default()).unwrap_err().to_string().contains("matrix"));
    assert_eq!(shift(&map, &Tensor::zeros([0, 12], (Kind::Float, Device::Cpu))).unwrap().size(), [0, 12]);
}
