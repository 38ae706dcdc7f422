//! ndarray ↔ libtorch.
//!
//! tch keeps an older ndarray inside; these functions go through slices, so the `ndarray` that this crate
//! re-exports is the one that counts. [`to_tensor`] and [`to_array`] copy once; [`view`] doesn't copy.

mod ffi;

pub use ffi::view;

use crate::{Error, Result};
use ndarray::{Array, ArrayD, ArrayView, Dimension, IxDyn};
use tch::{Device, Kind, Tensor, kind::Element};

/// An element type that exists on both sides.
pub trait Scalar: Element + Copy + Default + 'static {}
impl Scalar for f32 {}
impl Scalar for f64 {}
impl Scalar for i64 {}
impl Scalar for i32 {}
impl Scalar for u8 {}

/// Copies an array of any layout into a CPU tensor of the same shape and element type.
///
/// ```
/// use tensor::{interop, ndarray::arr2};
/// let t = interop::to_tensor(&arr2(&[[1.0f32, 2.0], [3.0, 4.0]]).t())?;
/// assert_eq!(interop::to_array::<f32>(&t)?, arr2(&[[1.0, 3.0], [2.0, 4.0]]).into_dyn());
/// # Ok::<(), tensor::Error>(())
/// ```
///
/// # Errors
/// What libtorch reports (out of memory).
pub fn to_tensor<T: Scalar, D: Dimension>(array: &ArrayView<'_, T, D>) -> Result<Tensor> {
    let shape: Vec<i64> = array.shape().iter().map(|&n| n as i64).collect();
    let flat = match array.as_slice() {
        Some(slice) => Tensor::f_from_slice(slice)?,
        None => Tensor::f_from_slice(&array.iter().copied().collect::<Vec<T>>())?,
    };
    Ok(flat.f_reshape(shape)?)
}

/// Copies a tensor of any device and layout into an array of the same shape.
///
/// # Errors
/// [`Error::Kind`] when the element type isn't `T`: convert with `to_kind` first, so that nothing is rounded
/// silently.
pub fn to_array<T: Scalar>(tensor: &Tensor) -> Result<ArrayD<T>> {
    check_kind::<T>(tensor)?;
    let local = tensor.detach().to_device(Device::Cpu).contiguous();
    let mut values = vec![T::default(); local.numel()];
    local.f_copy_data(&mut values, local.numel())?;
    Array::from_shape_vec(IxDyn(&shape_of(tensor)), values)
        .map_err(|e| Error::invalid("the tensor's shape", "a shape of its number of elements", e))
}

fn shape_of(tensor: &Tensor) -> Vec<usize> {
    tensor.size().iter().map(|&n| n as usize).collect()
}

fn check_kind<T: Scalar>(tensor: &Tensor) -> Result<()> {
    let kind: Kind = tensor.f_kind()?;
    if kind == T::KIND {
        Ok(())
    } else {
        Err(Error::Kind { what: "The tensor".into(), expected: format!("{:?}", T::KIND), got: format!("{kind:?}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array3, s};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arrays_of_any_layout_come_back_unchanged(
            (a, b, c) in (0usize..5, 0usize..5, 0usize..5), step in 1isize..3, swap in any::<bool>(),
        ) {
            let base = Array3::from_shape_fn((a, b, c), |(i, j, k)| (100 * i + 10 * j + k) as f64);
            let mut part = base.slice(s![..;step, ..;-step, ..]);
            if swap {
                part.swap_axes(0, 2);
            }
            let there = to_tensor(&part).unwrap();
            prop_assert_eq!(to_array::<f64>(&there).unwrap(), part.to_owned().into_dyn());
        }
    }

    #[test]
    fn a_transposed_tensor_is_copied_right() {
        let t = Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6]).reshape([2, 3]).tr();
        assert_eq!(to_array::<i64>(&t).unwrap().as_slice().unwrap(), [1, 4, 2, 5, 3, 6]);
    }

    #[test]
    fn element_types_are_never_converted_silently() {
        let message = to_array::<f32>(&Tensor::from_slice(&[1.0f64])).unwrap_err().to_string();
        assert!(message.contains("Double") && message.contains("Float"), "{message}");
    }
}
