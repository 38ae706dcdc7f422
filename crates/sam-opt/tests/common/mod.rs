//! Small problems that the tests share.
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod iam;
pub mod training;

use sam_opt::tensor::tch::{Kind, Tensor, no_grad};
use sam_opt::{ParamGroup, Pass};

/// A trainable vector.
pub fn leaf(values: &[f64], kind: Kind) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).copy().set_requires_grad(true)
}

pub fn group(params: &[(&str, &Tensor)]) -> ParamGroup {
    ParamGroup::new(params.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.shallow_clone())))
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

pub fn close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() <= tolerance, "{got:?} is not {expected:?} within {tolerance}");
    }
}

/// `½ (w₁² + 10 w₂²)`.
pub fn quadratic(w: &Tensor) -> Tensor {
    (w.square() * Tensor::from_slice(&[0.5f64, 5.0]).to_kind(w.kind())).sum(w.kind())
}

/// A batch of a classification problem with `n` inputs of width 4 and three classes.
pub fn batch(n: i64, index: u64) -> (Tensor, Tensor) {
    use sam_opt::tensor::Seed;
    let mut x = vec![0.0f32; 4 * n as usize];
    Seed::new(7).child("batch").fill_normal(&mut x, index);
    let x = Tensor::from_slice(&x).reshape([n, 4]);
    let y: Tensor = (x.select(1, 0) + x.select(1, 1) * 2.0).sign() + 1.0;
    (x, y.to_kind(Kind::Int64))
}

/// Records the parameter's value in each pass.
pub struct Trace {
    pub kinds: Vec<sam_opt::PassKind>,
    pub points: Vec<Vec<f64>>,
}

impl Trace {
    pub fn new() -> Self {
        Self { kinds: Vec::new(), points: Vec::new() }
    }

    pub fn record(&mut self, pass: &Pass<'_>, w: &Tensor) {
        self.kinds.push(pass.kind);
        self.points.push(values(w));
    }
}

pub fn bits(tensors: &[Tensor]) -> Vec<Vec<u64>> {
    no_grad(|| tensors.iter().map(|t| values(t).iter().map(|v| v.to_bits()).collect()).collect())
}
