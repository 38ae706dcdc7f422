//! Gradients, Hessian-vector products and Gauss-Newton products over a [`ParamSet`].
//!
//! Gradients come from `run_backward` on the set's tensors, so the `.grad` fields of the model and the
//! gradients of other tensors are never touched.

use crate::{Error, ParamSet, ParamVec, Result};
use std::collections::HashSet;
use tch::{Kind, Tensor, no_grad};

/// Gradient of the scalar `loss` with respect to every parameter; `None` for those it doesn't depend on and
/// for frozen ones.
///
/// # Errors
/// [`Error::Shape`] when `loss` isn't a scalar, [`Error::Detached`] when it has no graph.
pub fn gradient(loss: &Tensor, params: &ParamSet) -> Result<ParamVec> {
    gradient_of("The loss", loss, params, false, false)
}

/// As [`gradient`], keeping the graph for another backward pass.
///
/// # Errors
/// As [`gradient`].
pub fn gradient_keeping_graph(loss: &Tensor, params: &ParamSet) -> Result<ParamVec> {
    gradient_of("The loss", loss, params, true, false)
}

fn gradient_of(what: &str, loss: &Tensor, params: &ParamSet, keep: bool, create: bool) -> Result<ParamVec> {
    if loss.numel() != 1 {
        return Err(Error::Shape { what: what.into(), expected: vec![], got: loss.size() });
    }
    if !loss.requires_grad() {
        return Err(Error::Detached { what: what.into() });
    }
    Ok(ParamVec { parts: backward(loss, params.tensors(), keep, create)? })
}

/// `run_backward` that leaves frozen inputs out and gives `None` where the output doesn't depend on one.
fn backward(output: &Tensor, inputs: &[Tensor], keep: bool, create: bool) -> Result<Vec<Option<Tensor>>> {
    let active: Vec<&Tensor> = inputs.iter().filter(|t| t.requires_grad()).collect();
    if active.is_empty() {
        // Without inputs libtorch would accumulate into the `.grad` of every leaf.
        return Ok(inputs.iter().map(|_| None).collect());
    }
    let mut seen = HashSet::new();
    let mut grads = Tensor::f_run_backward(&[output], &active, keep, create)?.into_iter();
    Ok(inputs
        .iter()
        .map(|input| if input.requires_grad() { grads.next() } else { None })
        .map(|grad| grad.filter(Tensor::defined))
        .map(|grad| grad.map(|g| if create { g } else { owned(g, &mut seen) }))
        .collect())
}

/// A gradient that may be changed in place: contiguous, and alone in its memory. Libtorch hands out one tensor
/// for two inputs that enter a sum alike (`a + b`).
fn owned(gradient: Tensor, seen: &mut HashSet<usize>) -> Tensor {
    let first = seen.insert(gradient.data_ptr() as usize) || gradient.numel() == 0;
    match (first, gradient.is_contiguous()) {
        (true, true) => gradient,
        (true, false) => gradient.contiguous(),
        (false, _) => no_grad(|| gradient.contiguous().copy()),
    }
}

/// The Hessian of a scalar at a point, as an operator on flat vectors `[numel]`.
///
/// The graph of the gradient is built once and kept: each product costs about two gradients. Attention must
/// be the explicit softmax form (libtorch's fused kernels have no second derivative). The parameters must not
/// change while it lives: the loops of [`fused`](crate::fused) don't make libtorch refuse the old graph.
///
/// ```
/// use tensor::{ParamSet, autograd::Hessian, tch::{Kind, Tensor}};
/// let w = Tensor::from_slice(&[1.0f64, 1.0]).set_requires_grad(true);
/// let params = ParamSet::new([("w".to_owned(), w.shallow_clone())])?;
/// // ½(w₁² + 10 w₂²)
/// let loss = (w.square() * Tensor::from_slice(&[0.5f64, 5.0])).sum(Kind::Double);
/// let hessian = Hessian::new(&loss, &params)?;
/// let product = hessian.apply(&Tensor::from_slice(&[1.0f64, 1.0]))?;
/// assert_eq!(Vec::<f64>::try_from(product)?, [1.0, 10.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Hessian<'a> {
    params: &'a ParamSet,
    gradient: Tensor,
}

impl<'a> Hessian<'a> {
    /// Builds the graph of the gradient of the scalar `loss`.
    ///
    /// # Errors
    /// As [`gradient`].
    pub fn new(loss: &Tensor, params: &'a ParamSet) -> Result<Self> {
        let gradient = gradient_of("The loss", loss, params, true, true)?.flatten(params)?;
        Ok(Self { params, gradient })
    }

    /// The gradient at the point, `[numel]`, detached.
    pub fn gradient(&self) -> Tensor {
        self.gradient.detach()
    }

    /// `H v` for a flat `v` `[numel]`; same kind and device as the parameters.
    ///
    /// # Errors
    /// [`Error::Shape`] when `v` doesn't fit.
    pub fn apply(&self, v: &Tensor) -> Result<Tensor> {
        let expected = self.gradient.size();
        if v.size() != expected {
            return Err(Error::Shape { what: "The vector".into(), expected, got: v.size() });
        }
        if !self.gradient.requires_grad() {
            // The loss is affine in the parameters.
            return Ok(no_grad(|| v.zeros_like()));
        }
        let slope = self.gradient.f_dot(&v.detach())?;
        ParamVec { parts: backward(&slope, self.params.tensors(), true, false)? }.flatten(self.params)
    }
}

/// The generalized Gauss-Newton matrix `Jᵀ H_L J` of `loss(outputs(θ))`, as an operator on flat vectors.
///
/// It is positive semi-definite when the loss is convex in the outputs. `Jv` comes from the derivative of the
/// linear map `u ↦ Jᵀu` (two backward passes), so no forward-mode rules are needed.
#[derive(Debug)]
pub struct GaussNewton<'a> {
    params: &'a ParamSet,
    outputs: Tensor,
    /// Stand-in for the outputs, the variable of the loss.
    leaf: Tensor,
    loss_gradient: Tensor,
    cotangent: Tensor,
    pullback: Tensor,
}

impl<'a> GaussNewton<'a> {
    /// Prepares the products: `outputs` is the network's output with its graph (any shape), `loss` maps
    /// outputs to a scalar.
    ///
    /// # Errors
    /// [`Error::Detached`] when the outputs have no graph, [`Error::Shape`] when the loss isn't a scalar.
    pub fn new(outputs: &Tensor, loss: impl FnOnce(&Tensor) -> Tensor, params: &'a ParamSet) -> Result<Self> {
        if !outputs.requires_grad() {
            return Err(Error::Detached { what: "The network's output".into() });
        }
        let leaf = outputs.detach().set_requires_grad(true);
        let value = loss(&leaf);
        if value.numel() != 1 {
            return Err(Error::Shape { what: "The loss".into(), expected: vec![], got: value.size() });
        }
        if !value.requires_grad() {
            return Err(Error::Detached { what: "The loss".into() });
        }
        let loss_gradient = Tensor::f_run_backward(&[&value], &[&leaf], true, true)?.remove(0);
        let cotangent = outputs.zeros_like().set_requires_grad(true);
        let paired = outputs.f_mul(&cotangent)?.f_sum(outputs.kind())?;
        let pullback = ParamVec { parts: backward(&paired, params.tensors(), true, true)? }.flatten(params)?;
        Ok(Self { params, outputs: outputs.shallow_clone(), leaf, loss_gradient, cotangent, pullback })
    }

    /// `Jᵀ H_L J v` for a flat `v` `[numel]`.
    ///
    /// # Errors
    /// [`Error::Shape`] when `v` doesn't fit.
    pub fn apply(&self, v: &Tensor) -> Result<Tensor> {
        let expected = self.pullback.size();
        if v.size() != expected {
            return Err(Error::Shape { what: "The vector".into(), expected, got: v.size() });
        }
        let slope = self.pullback.f_dot(&v.detach())?;
        let jv = Tensor::f_run_backward(&[&slope], &[&self.cotangent], true, false)?.remove(0).detach();
        let hjv = if self.loss_gradient.requires_grad() {
            let curvature = self.loss_gradient.f_mul(&jv)?.f_sum(jv.kind())?;
            Tensor::f_run_backward(&[&curvature], &[&self.leaf], true, false)?.remove(0)
        } else {
            jv.zeros_like()
        };
        if !hjv.defined() {
            return Ok(v.zeros_like());
        }
        let paired = self.outputs.f_mul(&hjv.detach())?.f_sum(self.outputs.kind())?;
        ParamVec { parts: backward(&paired, self.params.tensors(), true, false)? }.flatten(self.params)
    }
}

/// The largest relative deviation between the gradient of `loss` and central differences with step `h`,
/// over every scalar of the parameters: `max |g − g̃| / max(1, |g|)`. Use f64 parameters and `h ≈ 1e-5`.
///
/// # Errors
/// As [`gradient`], and what the closure reports.
pub fn gradient_check(params: &ParamSet, h: f64, mut loss: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    let analytic = gradient(&loss()?, params)?.flatten(params)?.to_kind(Kind::Double);
    let analytic = Vec::<f64>::try_from(&analytic)?;
    // Whatever the closure does, every value comes back.
    let _guard = params.guard()?;
    let mut worst: f64 = 0.0;
    let mut index = 0;
    for tensor in params.tensors() {
        let flat = no_grad(|| tensor.detach().f_view([-1]))?;
        for i in 0..tensor.numel() as i64 {
            let set = |value: f64| no_grad(|| flat.get(i).f_fill_(value).map(|_| ()));
            let original = flat.double_value(&[i]);
            set(original + h)?;
            let above = loss()?.double_value(&[]);
            set(original - h)?;
            let below = loss()?.double_value(&[]);
            set(original)?;
            let difference = (above - below) / (2.0 * h);
            worst = worst.max((difference - analytic[index]).abs() / analytic[index].abs().max(1.0));
            index += 1;
        }
    }
    Ok(worst)
}
