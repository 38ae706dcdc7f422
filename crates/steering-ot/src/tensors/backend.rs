//! The kernels over a tensor's own memory.
#![allow(unsafe_code)]

use crate::Result;
use crate::steer::Steer;
use tensor::interop;
use tensor::tch::Tensor;

/// [`Steer::shift_into`] over a contiguous f32 tensor on the CPU, whose memory is read in place.
pub(super) fn shift_into(map: &dyn Steer, x: &Tensor, out: &mut [f32]) -> Result<()> {
    // SAFETY: the view lives for this call only, `map` knows nothing of the tensor, and `out` is other memory: nothing
    // writes to the tensor meanwhile.
    let values = unsafe { interop::view::<f32>(x) }?;
    match values.as_slice() {
        Some(values) => map.shift_into(values, out),
        // A contiguous tensor is one slice; a view that isn't would be copied.
        None => map.shift_into(&values.iter().copied().collect::<Vec<_>>(), out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::DiM;
    use ndarray::{Array2, array};
    use tensor::tch::{Device, Kind};

    #[test]
    fn the_tensors_own_memory_gives_what_a_copy_gives() {
        let map = DiM::fit(array![[0.0f32, 1.0]].view(), array![[2.0f32, 5.0]].view()).unwrap();
        let x = Tensor::arange(6, (Kind::Float, Device::Cpu)).reshape([3, 2]);
        let mut out = [0f32; 6];
        shift_into(&map, &x, &mut out).unwrap();
        let copy: Array2<f32> = crate::tensors::matrix(&x).unwrap();
        assert_eq!(out.as_slice(), map.shift(copy.view()).unwrap().as_slice().unwrap());
    }
}
