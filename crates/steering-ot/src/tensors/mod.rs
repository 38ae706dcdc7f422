//! Maps on libtorch tensors of any kind, on any device.
//!
//! On the CPU the kernel of the ndarray maps reads the tensor's memory. [`TorchMap`] holds a CHaRS map as tensors, for other
//! devices and for gradients with respect to the activations.

mod backend;
mod map;

pub use map::TorchMap;

use crate::chars::CharsMap;
use crate::config::CharsConfig;
use crate::steer::Steer;
use crate::{Error, Result};
use ndarray::{Array2, Ix2};
use tensor::interop;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// The shift T(x) − x of activations `[…, width]` of any kind and device: computed in f32 on the CPU, returned in the kind and
/// on the device of `x`, without a gradient.
///
/// # Errors
/// [`Error::DimMismatch`] for another width; what libtorch reports.
pub fn shift(map: &dyn Steer, x: &Tensor) -> Result<Tensor> {
    let _guard = no_grad_guard();
    check_width(map, x)?;
    let values = x.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
    let mut out = vec![0f32; values.numel()];
    backend::shift_into(map, &values, &mut out)?;
    Ok(Tensor::f_from_slice(&out)?.f_reshape(x.size())?.f_to_kind(x.kind())?.f_to_device(x.device())?)
}

/// T_α(x) = x + α (T(x) − x) of activations `[…, width]` of any kind and device. The shift is computed in f32; the sum is taken in
/// f32 (in f64 for an `x` of f64) and then rounded to the kind of `x`.
///
/// # Errors
/// As [`shift`]; [`Error::InvalidArgument`] for an α that isn't finite.
pub fn transport(map: &dyn Steer, x: &Tensor, alpha: f64) -> Result<Tensor> {
    if !alpha.is_finite() {
        return Err(Error::invalid("alpha", "finite", alpha));
    }
    let _guard = no_grad_guard();
    let x = x.f_detach()?;
    let wide = x.f_to_kind(wide(x.kind()))?;
    Ok(wide.f_add(&shift(map, &wide)?.f_mul_scalar(alpha)?)?.f_to_kind(x.kind())?)
}

/// The kind in which shifts are added to activations of a kind.
pub(crate) fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// [`Error::DimMismatch`] unless the last dimension of `x` is the map's width.
fn check_width(map: &dyn Steer, x: &Tensor) -> Result<()> {
    let got = x.size().last().map_or(0, |&width| width as usize);
    if got == map.width() {
        return Ok(());
    }
    Err(Error::dim("The last dimension of the activations", map.width(), got))
}

/// A matrix `[rows, width]` of f32 from a tensor of any kind.
///
/// # Errors
/// [`Error::InvalidArgument`] for a tensor that isn't a matrix; what libtorch reports.
pub fn matrix(x: &Tensor) -> Result<Array2<f32>> {
    let array = interop::to_array::<f32>(&x.f_detach()?.f_to_kind(Kind::Float)?)?;
    let shape = format!("{:?}", x.size());
    array.into_dimensionality::<Ix2>().map_err(|_| Error::invalid("the activations", "a matrix [rows, width]", shape))
}

impl CharsMap {
    /// As [`fit`](Self::fit), from tensors `[rows, width]` of any kind and device.
    ///
    /// # Errors
    /// As [`fit`](Self::fit).
    pub fn fit_tensors(source: &Tensor, target: &Tensor, config: &CharsConfig) -> Result<Self> {
        Self::fit(matrix(source)?.view(), matrix(target)?.view(), config)
    }

    /// Weights of the source clusters `[…, k]` in f32 for activations `[…, width]`.
    ///
    /// # Errors
    /// As [`shift`].
    pub fn gates_tensor(&self, x: &Tensor) -> Result<Tensor> {
        check_width(self, x)?;
        let mut shape = x.size();
        let rows = matrix(&x.f_reshape([-1, self.width() as i64])?)?;
        let gates = self.gates(rows.view())?;
        if let Some(last) = shape.last_mut() {
            *last = gates.ncols() as i64;
        }
        Ok(interop::to_tensor(&gates.view())?.f_reshape(shape)?.f_to_device(x.device())?)
    }

    /// [`shift`] of this map.
    ///
    /// # Errors
    /// As [`shift`].
    pub fn shift_tensor(&self, x: &Tensor) -> Result<Tensor> {
        shift(self, x)
    }

    /// [`transport`] of this map.
    ///
    /// # Errors
    /// As [`transport`].
    pub fn transport_tensor(&self, x: &Tensor, alpha: f64) -> Result<Tensor> {
        transport(self, x, alpha)
    }
}
