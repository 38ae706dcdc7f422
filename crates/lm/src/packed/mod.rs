//! Weights that stay as a GGUF file holds them: a linear map on packed blocks.
//!
//! A packed matrix takes an eighth of the memory of f32 at four bits, and generating text one token at a time is bound by
//! reading the weights, so it is faster too. Activations and sums are f32 and each weight has exactly the value that the
//! format gives it: results differ from those of the unpacked matrix only by the order of the sums.
//!
//! - Few rows of `x` (up to 16) are multiplied straight from the blocks of `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1` and `Q8_0`, by
//!   AVX2 where the processor has it.
//! - Many rows, and the other types that candle-core unpacks (k-quants, halves): some rows of weights at a time are
//!   unpacked into a scratch and multiplied by libtorch.
//! - Under autograd, and for f64, the whole matrix is unpacked, as a constant; a graph keeps it until its backward pass.

mod blocks;
mod kernel;
#[cfg(test)]
mod tests;

pub use blocks::can_unpack;

use crate::linear::{LinearLayer, bytes_of};
use crate::{Error, Result};
use blocks::Blocks;
use kernel::Path;
use std::cell::RefCell;
use tensor::checkpoint::index::GgmlType;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// Rows of `x` up to which products come straight from the blocks: two passes of the kernel. Beyond, unpacking once for
/// all rows costs less than unpacking for every eight.
pub(crate) const DIRECT: i64 = 16;
/// Numbers of the scratch: a matrix of 1024 × 1024. It stays in the third-level cache between unpacking and product.
const SCRATCH: usize = 1 << 20;

thread_local! {
    /// Unpacked rows, made once a thread.
    static UNPACKED: RefCell<Option<Tensor>> = const { RefCell::new(None) };
}

/// `y = x Wᵀ + b` with `W` in the blocks of a GGUF file, on the CPU. `x` may be f32, f64, f16 or bf16; sums are f32 (f64
/// for f64), and the result has the kind of `x`.
///
/// The weight is constant: its gradient isn't computed, those of `x` and of the bias are.
///
/// ```
/// use lm::linear::LinearLayer;
/// use lm::packed::PackedLinear;
/// use lm::tensor::{checkpoint::index::GgmlType, tch::Tensor};
/// // One row of 32 weights: the scale 1 as f16, then the signed bytes 0…31.
/// let blocks: Vec<u8> = [0x00, 0x3c].into_iter().chain(0..32).collect();
/// let layer = PackedLinear::new(GgmlType::Q8_0, 1, 32, blocks, None)?;
/// let y = layer.forward(&Tensor::from_slice(&[1.0f32; 32]))?;
/// assert_eq!(f64::try_from(&y)?, 496.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PackedLinear {
    weight: Blocks,
    bias: Option<Tensor>,
}

impl PackedLinear {
    /// A weight `[out, inner]` of `blocks`, row after row as the file has them, and a bias `[out]`.
    ///
    /// # Errors
    /// [`Error::TensorType`] for a type that isn't [read](can_unpack); [`Error::InvalidArgument`] for sizes below 1, an
    /// `inner` of partial blocks, too few or too many bytes, or a bias that isn't on the CPU; [`Error::Shape`] for a bias
    /// that doesn't fit.
    pub fn new(dtype: GgmlType, out: i64, inner: i64, blocks: Vec<u8>, bias: Option<Tensor>) -> Result<Self> {
        let weight = Blocks::new(dtype, out, inner, blocks)?;
        if let Some(bias) = &bias {
            if bias.size() != [out] {
                return Err(Error::shape("The bias of a packed linear layer", format!("[{out}]"), bias));
            }
            on_cpu("bias", bias)?;
        }
        Ok(Self { weight, bias })
    }

    /// How the weights are stored.
    pub fn dtype(&self) -> GgmlType {
        self.weight.dtype
    }

    /// `[m, inner] → [m, out]` in f32, without bias or autograd.
    fn product(&self, x: &Tensor) -> Result<Tensor> {
        let _guard = no_grad_guard();
        let (m, out) = (x.size()[0], self.out_features());
        if m > DIRECT || m == 0 {
            return self.product_by_parts(x);
        }
        let x = x.f_contiguous()?;
        let mut y = Tensor::f_zeros([m, out], (Kind::Float, Device::Cpu))?;
        match (self.weight.matrix(), kernel::floats(&x), kernel::floats_mut(&mut y)) {
            (Some(matrix), Some(x), Some(y)) => kernel::product(matrix, x, y, Path::best()),
            _ => return self.product_by_parts(&x),
        }
        Ok(y)
    }

    /// [`product`](Self::product) by libtorch, with as many rows of weights at a time as the scratch holds.
    fn product_by_parts(&self, x: &Tensor) -> Result<Tensor> {
        let (out, inner) = (self.weight.out, self.weight.inner);
        let step = (SCRATCH / inner).clamp(1, out);
        // Taken out while it is used: rayon may hand this thread another product meanwhile.
        let kept = UNPACKED.take().filter(|s| s.numel() >= step * inner);
        let mut unpacked = match kept {
            Some(scratch) => scratch,
            None => Tensor::f_zeros([(step * inner).max(SCRATCH) as i64], (Kind::Float, Device::Cpu))?,
        };
        let mut parts = Vec::with_capacity(out.div_ceil(step));
        for first in (0..out).step_by(step) {
            let rows = step.min(out - first);
            if let Some(numbers) = kernel::floats_mut(&mut unpacked) {
                self.weight.unpack(first, &mut numbers[..rows * inner])?;
            }
            let part = unpacked.f_narrow(0, 0, (rows * inner) as i64)?.f_view([rows as i64, inner as i64])?;
            parts.push(x.f_matmul(&part.f_tr()?)?);
        }
        UNPACKED.set(Some(unpacked));
        if parts.len() == 1 { Ok(parts.swap_remove(0)) } else { Ok(Tensor::f_cat(&parts, 1)?) }
    }
}

fn on_cpu(what: &str, tensor: &Tensor) -> Result<()> {
    let device = tensor.device();
    if device == Device::Cpu {
        return Ok(());
    }
    let expected = "on the CPU, where packed weights are; for another device, load the model unpacked";
    Err(Error::invalid(what, expected, format!("on {device:?}")))
}

/// Whether operations on `x` are recorded now: it requires a gradient, and autograd is on.
pub(crate) fn recorded(x: &Tensor) -> Result<bool> {
    Ok(x.requires_grad() && x.f_alias()?.requires_grad())
}

impl LinearLayer for PackedLinear {
    fn has_own_threads(&self) -> bool {
        true
    }

    fn in_features(&self) -> i64 {
        self.weight.inner as i64
    }

    fn out_features(&self) -> i64 {
        self.weight.out as i64
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        on_cpu("x", x)?;
        let kind = x.f_kind()?;
        if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
            return Err(Error::invalid("x", "of floating point", format!("{kind:?}")));
        }
        let mut shape = x.size();
        if shape.last() != Some(&self.in_features()) {
            return Err(Error::shape("The input of a packed linear layer", format!("[…, {}]", self.in_features()), x));
        }
        if kind == Kind::Double || recorded(x)? {
            let kind_of_sums = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            let weight = self.weight()?.f_to_kind(kind_of_sums)?;
            let bias = self.bias.as_ref().map(|b| b.f_to_kind(kind_of_sums)).transpose()?;
            return Ok(x.f_to_kind(kind_of_sums)?.f_linear(&weight, bias)?.f_to_kind(kind)?);
        }
        let y = self.product(&x.f_to_kind(Kind::Float)?.f_reshape([-1, self.in_features()])?)?;
        let y = match &self.bias {
            Some(bias) => y.f_add(&bias.f_to_kind(Kind::Float)?)?,
            None => y,
        };
        if let Some(last) = shape.last_mut() {
            *last = self.out_features();
        }
        Ok(y.f_view(&shape[..])?.f_to_kind(kind)?)
    }

    fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        on_cpu("ids", ids)?;
        if ids.f_kind()? != Kind::Int64 {
            return Err(Error::invalid("ids", "of i64", format!("{:?}", ids.f_kind()?)));
        }
        let numbers = Vec::<i64>::try_from(ids.f_reshape([-1])?)?;
        if let Some(wrong) = numbers.iter().find(|id| !(0..self.out_features()).contains(*id)) {
            return Err(Error::invalid("ids", format!("from 0 to below {} rows", self.out_features()), wrong));
        }
        let shape: Vec<i64> = ids.size().into_iter().chain([self.in_features()]).collect();
        let mut rows = Tensor::f_zeros(&shape[..], (Kind::Float, Device::Cpu))?;
        if let Some(out) = kernel::floats_mut(&mut rows) {
            for (out, id) in out.chunks_exact_mut(self.weight.inner).zip(numbers) {
                self.weight.unpack(id as usize, out)?;
            }
        }
        Ok(rows)
    }

    fn weight(&self) -> Result<Tensor> {
        let mut dense = Tensor::f_zeros([self.out_features(), self.in_features()], (Kind::Float, Device::Cpu))?;
        if let Some(out) = kernel::floats_mut(&mut dense) {
            self.weight.unpack(0, out)?;
        }
        Ok(dense)
    }

    fn bias(&self) -> Option<Tensor> {
        self.bias.as_ref().map(Tensor::shallow_clone)
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        self.bias().map(|bias| ("bias".to_owned(), bias)).into_iter().collect()
    }

    fn bytes(&self) -> u64 {
        self.weight.bytes.len() as u64 + self.bias.as_ref().map_or(0, bytes_of)
    }
}
