//! Arrays over a tensor's own memory.
#![allow(unsafe_code)]

use super::{Scalar, check_kind, shape_of};
use crate::{Error, Result};
use ndarray::{ArrayViewD, IxDyn};
use tch::{Device, Tensor};

/// Views the memory of a dense CPU tensor as an array, without a copy.
///
/// # Safety
/// While the view lives, nothing may write to the tensor's memory, through this or any other handle.
///
/// # Errors
/// [`Error::Kind`] when the element type isn't `T`, [`Error::InvalidArgument`] when the tensor isn't
/// contiguous on the CPU: take [`to_array`](crate::interop::to_array) then.
pub unsafe fn view<T: Scalar>(tensor: &Tensor) -> Result<ArrayViewD<'_, T>> {
    check_kind::<T>(tensor)?;
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() {
        return Err(Error::invalid(
            "the tensor to view",
            "contiguous on the CPU (`to_array` copies any other)",
            format!("on {:?} with strides {:?}", tensor.device(), tensor.stride()),
        ));
    }
    let slice: &[T] = if tensor.numel() == 0 {
        &[]
    } else {
        // SAFETY: the tensor is contiguous on the CPU with elements of type T (checked above), the borrow
        // keeps its storage alive, and the caller promises that nothing writes meanwhile.
        unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<T>(), tensor.numel()) }
    };
    ArrayViewD::from_shape(IxDyn(&shape_of(tensor)), slice)
        .map_err(|e| Error::invalid("the tensor's shape", "a shape of its number of elements", e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interop::to_array;
    use proptest::prelude::*;
    use tch::Kind;

    proptest! {
        #[test]
        fn the_view_equals_the_copy(rows in 0i64..6, columns in 1i64..6) {
            let t = Tensor::arange(rows * columns, (Kind::Float, Device::Cpu)).reshape([rows, columns]);
            // SAFETY: nothing writes to `t`.
            let seen = unsafe { view::<f32>(&t) }.unwrap();
            prop_assert_eq!(seen.to_owned(), to_array::<f32>(&t).unwrap());
        }
    }

    #[test]
    fn a_transposed_tensor_is_not_viewed() {
        let t = Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6]).reshape([2, 3]).tr();
        // SAFETY: refused before anything is read.
        let message = unsafe { view::<i64>(&t) }.unwrap_err().to_string();
        assert!(message.contains("to_array"), "{message}");
    }
}
