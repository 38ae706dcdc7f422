//! Blocks to numbers, through candle-core.

use crate::{Error, Result};
use candle_core::CpuStorage;
use candle_core::quantized::GgmlDType;
use rayon::prelude::*;
use std::borrow::Cow;
use tensor::checkpoint::index::{Entry, GgmlType};

/// The types that are read.
const KNOWN: [(GgmlType, GgmlDType); 14] = [
    (GgmlType::F32, GgmlDType::F32),
    (GgmlType::F16, GgmlDType::F16),
    (GgmlType::BF16, GgmlDType::BF16),
    (GgmlType::Q4_0, GgmlDType::Q4_0),
    (GgmlType::Q4_1, GgmlDType::Q4_1),
    (GgmlType::Q5_0, GgmlDType::Q5_0),
    (GgmlType::Q5_1, GgmlDType::Q5_1),
    (GgmlType::Q8_0, GgmlDType::Q8_0),
    (GgmlType::Q2_K, GgmlDType::Q2K),
    (GgmlType::Q3_K, GgmlDType::Q3K),
    (GgmlType::Q4_K, GgmlDType::Q4K),
    (GgmlType::Q5_K, GgmlDType::Q5K),
    (GgmlType::Q6_K, GgmlDType::Q6K),
    (GgmlType::Q8_K, GgmlDType::Q8K),
];

/// candle-core's name of a tensor's type.
pub(super) fn known(entry: &Entry<GgmlType>) -> Result<GgmlDType> {
    let found = KNOWN.iter().find(|(ours, _)| *ours == entry.dtype);
    found.map(|(_, theirs)| *theirs).ok_or_else(|| Error::TensorType {
        name: entry.name.clone(),
        dtype: entry.dtype.to_string(),
        known: KNOWN.map(|(ours, _)| ours.name()).join(", "),
    })
}

/// The numbers of whole blocks. `bytes` must hold nothing else.
pub(super) fn floats(kind: GgmlDType, bytes: &[u8]) -> Result<Vec<f32>> {
    // Large enough for a thread to be worth while, small enough that the copies that candle-core makes stay in its cache.
    const PIECE: usize = 64 << 10;
    let blocks = (PIECE / kind.type_size()).max(1);
    let mut numbers = vec![0.0; bytes.len() / kind.type_size() * kind.block_size()];
    let pieces = bytes.par_chunks(blocks * kind.type_size()).zip(numbers.par_chunks_mut(blocks * kind.block_size()));
    pieces.try_for_each(|(packed, unpacked)| {
        unpacked.copy_from_slice(&piece_of(kind, packed)?);
        Ok::<(), Error>(())
    })?;
    Ok(numbers)
}

/// The numbers of a few whole blocks, on the caller's thread.
pub(crate) fn piece_of(kind: GgmlDType, bytes: &[u8]) -> Result<Vec<f32>> {
    // candle-core refuses blocks at odd addresses with a panic.
    const ALIGNMENT: usize = 8;
    let blocks = bytes.len() / kind.type_size();
    let offset = bytes.as_ptr().align_offset(ALIGNMENT);
    let mut moved = Vec::new();
    let aligned = if offset == 0 {
        bytes
    } else {
        moved.resize(bytes.len() + ALIGNMENT, 0);
        let start = moved.as_ptr().align_offset(ALIGNMENT);
        moved[start..start + bytes.len()].copy_from_slice(bytes);
        &moved[start..start + bytes.len()]
    };
    match kind.from_data(Cow::Borrowed(aligned)).dequantize(blocks * kind.block_size()) {
        Ok(CpuStorage::F32(numbers)) => Ok(numbers),
        // Neither happens for the types above.
        Ok(_) => Err(Error::invalid("the unpacked blocks", "F32", "of another type")),
        Err(error) => Err(Error::invalid("the packed blocks", "such that candle-core can unpack them", error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The index checks lengths by its own table of types; candle-core casts by its own.
    #[test]
    fn both_tables_of_types_agree() {
        for (ours, theirs) in KNOWN {
            assert_eq!(
                (ours.block_bytes(), ours.block()),
                (theirs.type_size() as u64, theirs.block_size() as u64),
                "{ours}"
            );
        }
    }

    #[test]
    fn blocks_are_unpacked_wherever_they_lie() {
        // d = 2, m = -1, weights 0 to 31 have the low, then the high half-bytes 0x2 and 0xA.
        let mut bytes = vec![0, 0, 0x40, 0x00, 0xBC];
        bytes.extend([0xA2; 16]);
        let numbers = floats(GgmlDType::Q4_1, &bytes[1..]).unwrap();
        assert_eq!(numbers, [[3.0; 16], [19.0; 16]].concat());
        let many = bytes[1..].repeat(10_000);
        assert_eq!(floats(GgmlDType::Q4_1, &many).unwrap(), numbers.repeat(10_000));
        assert_eq!(floats(GgmlDType::Q4_1, &[]).unwrap(), [0.0; 0]);
    }
}
