//! Fused multi-tensor loops: one pass over the memory of whole lists of tensors.
//!
//! Optimizers touch every parameter several times a step. With one libtorch call per tensor and operation a
//! small network spends its time in dispatch and a large one in memory traffic; these loops do a step's
//! arithmetic in one pass, in parallel above 2¹⁷ elements, with sums in f64 that don't depend on the number
//! of threads. They apply to dense f32 CPU tensors; for all others they decline (`None`, `false`) without
//! having done anything, and the caller takes its plain path of libtorch operations.
//!
//! While a loop runs, no other thread may write to the tensors it reads or touch those it writes, and `f` must not
//! reach them in another way (tch's handles share memory, so this can't be checked).
//!
//! Autograd isn't told of what these loops write: a graph recorded before must not be used afterwards. (Libtorch's
//! own in-place operations make it refuse such a graph.)
//!
//! ```
//! use tensor::{fused, tch::Tensor};
//! let w = Tensor::from_slice(&[1.0f32, 2.0]);
//! let g = Tensor::from_slice(&[0.5f32, -1.0]);
//! let [squares] = fused::reduce([&[&g]], |_, [g]| [f64::from(g) * f64::from(g)]).unwrap();
//! assert_eq!(squares, 1.25);
//! assert!(fused::update([&[&w]], [&[&g]], |_, [w], [g]| *w -= 0.1 * g));
//! assert_eq!(Vec::<f32>::try_from(&w).unwrap(), [0.95, 2.1]);
//! ```

use crate::kernel;
use tch::Tensor;

/// Sums `f(index of the tensor, the N values)` over the elements of `N` lists read in step.
///
/// `None` when a tensor isn't dense f32 CPU memory, or when the lists differ in length or in the
/// tensors' numbers of elements.
pub fn reduce<const N: usize, const K: usize>(
    lists: [&[&Tensor]; N],
    f: impl Fn(usize, [f32; N]) -> [f64; K] + Sync,
) -> Option<[f64; K]> {
    kernel::reduce(lists, f)
}

/// Applies `f(index of the tensor, the M values to change, the N values to read)` to every element.
///
/// False, with nothing changed, when a tensor isn't dense f32 CPU memory, when the lists differ in length
/// or in the tensors' numbers of elements, or when a tensor to change shares memory with another one.
pub fn update<const M: usize, const N: usize>(
    written: [&[&Tensor]; M],
    read: [&[&Tensor]; N],
    f: impl Fn(usize, &mut [f32; M], [f32; N]) + Sync,
) -> bool {
    kernel::update(written, read, f)
}
