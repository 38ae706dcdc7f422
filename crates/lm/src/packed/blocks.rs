//! A matrix in blocks: checked lengths, and unpacking by our kernels or by candle-core.

use super::kernel::{self, BLOCK, Format, Matrix, Path};
use crate::load::gguf::dequantize::piece_of;
use crate::{Error, Result};
use candle_core::quantized::GgmlDType;
use rayon::prelude::*;
use tensor::checkpoint::index::GgmlType;

/// Types that can be unpacked, for messages.
const READ: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K";

/// How the numbers come out of the blocks.
#[derive(Debug, Clone, Copy)]
enum Unpacking {
    Ours(Format),
    Candle(GgmlDType),
}

/// A matrix `[out, inner]` in blocks, row after row.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) dtype: GgmlType,
    pub(super) out: usize,
    pub(super) inner: usize,
    pub(super) bytes: Vec<u8>,
    unpacking: Unpacking,
}

fn unpacking(dtype: GgmlType) -> Option<Unpacking> {
    Some(match dtype {
        GgmlType::Q4_0 => Unpacking::Ours(Format::Q4_0),
        GgmlType::Q4_1 => Unpacking::Ours(Format::Q4_1),
        GgmlType::Q5_0 => Unpacking::Ours(Format::Q5_0),
        GgmlType::Q5_1 => Unpacking::Ours(Format::Q5_1),
        GgmlType::Q8_0 => Unpacking::Ours(Format::Q8_0),
        GgmlType::F32 => Unpacking::Candle(GgmlDType::F32),
        GgmlType::F16 => Unpacking::Candle(GgmlDType::F16),
        GgmlType::BF16 => Unpacking::Candle(GgmlDType::BF16),
        GgmlType::Q8_1 => Unpacking::Candle(GgmlDType::Q8_1),
        GgmlType::Q2_K => Unpacking::Candle(GgmlDType::Q2K),
        GgmlType::Q3_K => Unpacking::Candle(GgmlDType::Q3K),
        GgmlType::Q4_K => Unpacking::Candle(GgmlDType::Q4K),
        GgmlType::Q5_K => Unpacking::Candle(GgmlDType::Q5K),
        GgmlType::Q6_K => Unpacking::Candle(GgmlDType::Q6K),
        GgmlType::Q8_K => Unpacking::Candle(GgmlDType::Q8K),
        _ => return None,
    })
}

/// Whether [`PackedLinear`](super::PackedLinear) can hold weights of this type.
pub fn can_unpack(dtype: GgmlType) -> bool {
    unpacking(dtype).is_some()
}

impl Blocks {
    pub(super) fn new(dtype: GgmlType, out: i64, inner: i64, bytes: Vec<u8>) -> Result<Self> {
        let unpacking = unpacking(dtype).ok_or_else(|| Error::TensorType {
            name: "a packed weight".into(),
            dtype: dtype.to_string(),
            known: READ.into(),
        })?;
        let size = |name: &str, value: i64| {
            usize::try_from(value).ok().filter(|v| *v > 0).ok_or_else(|| Error::invalid(name, "at least 1", value))
        };
        let (out, inner) = (size("out", out)?, size("inner", inner)?);
        // A GGUF block has at most 256 elements and 292 bytes.
        let (block, block_bytes) = (dtype.block() as usize, dtype.block_bytes() as usize);
        if !inner.is_multiple_of(block) {
            return Err(Error::invalid("inner", format!("a multiple of {block}, the block of {dtype}"), inner));
        }
        let expected = (inner / block).checked_mul(block_bytes).and_then(|row| row.checked_mul(out));
        if expected != Some(bytes.len()) {
            let expected = expected.map_or("more than fit in memory".to_owned(), |n| n.to_string());
            let expected = format!("{expected} bytes for {out} rows of {inner} weights of {dtype}");
            return Err(Error::invalid("blocks", expected, format!("{} bytes", bytes.len())));
        }
        Ok(Self { dtype, out, inner, bytes, unpacking })
    }

    /// For products straight from the blocks, where the type has a kernel.
    pub(super) fn matrix(&self) -> Option<Matrix<'_>> {
        match self.unpacking {
            Unpacking::Ours(format) => Some(Matrix { format, inner: self.inner, blocks: &self.bytes }),
            Unpacking::Candle(_) => None,
        }
    }

    fn row_bytes(&self) -> usize {
        self.bytes.len() / self.out
    }

    /// Unpacks the rows from `first` on, as many as `out` holds.
    pub(super) fn unpack(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let rows = out.len() / self.inner;
        let bytes = &self.bytes[first * self.row_bytes()..(first + rows) * self.row_bytes()];
        match self.unpacking {
            Unpacking::Ours(format) => {
                kernel::unpack(format, bytes, out, Path::best());
                Ok(())
            }
            Unpacking::Candle(dtype) => {
                out.par_chunks_mut(self.inner).zip(bytes.par_chunks(self.row_bytes())).try_for_each(|(out, row)| {
                    out.copy_from_slice(&piece_of(dtype, row)?);
                    Ok(())
                })
            }
        }
    }
}

// Invariant of the kernels: all formats with one have blocks of 32.
const _: () = assert!(BLOCK == 32);
