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

use crate::{Result, Seed, kernel};
use tch::{Tensor, no_grad};

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

/// Fills a tensor with standard normal numbers, those of [`Seed::fill_normal`] with this stream: noise that can be made
/// again instead of being kept. Tensors that aren't dense f32 CPU memory get the same numbers through a copy.
///
/// # Errors
/// What libtorch reports.
pub fn fill_normal(tensor: &Tensor, seed: Seed, stream: u64) -> Result<()> {
    if kernel::fill_normal(tensor, seed, stream) {
        return Ok(());
    }
    let mut values = vec![0.0f32; tensor.numel()];
    seed.fill_normal(&mut values, stream);
    no_grad(|| {
        let values = Tensor::from_slice(&values).f_reshape(tensor.size())?;
        tensor.shallow_clone().f_copy_(&values)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn noise_is_the_same_in_every_layout_and_kind() {
        let mut expected = vec![0.0f32; 6];
        Seed::new(4).fill_normal(&mut expected, 9);
        let dense = Tensor::from_slice(&[0.0f32; 6]).reshape([2, 3]);
        let turned = Tensor::from_slice(&[0.0f32; 6]).reshape([3, 2]).tr();
        let double = Tensor::from_slice(&[0.0f64; 6]).reshape([2, 3]);
        for target in [dense, turned, double] {
            fill_normal(&target, Seed::new(4), 9).unwrap();
            let got = Vec::<f32>::try_from(target.to_kind(Kind::Float).contiguous().reshape([-1])).unwrap();
            assert_eq!(got, expected);
        }
        fill_normal(&Tensor::from_slice(&[0.0f32; 0]), Seed::new(4), 9).unwrap();
    }

    #[test]
    fn a_trainable_tensor_can_be_filled() {
        let leaf = Tensor::from_slice(&[0.0f64; 3]).set_requires_grad(true);
        fill_normal(&leaf, Seed::new(1), 0).unwrap();
        assert!(leaf.requires_grad() && leaf.abs().min().double_value(&[]) > 0.0);
    }
}
