//! A GGUF file's tensors as those of the model.

use super::names::{Names, Place, may_be_ignored};
use super::{Gguf, dequantize};
use crate::config::ModelConfig;
use crate::linear::{Dense, LinearLayer};
use crate::model::names::wanted;
use crate::model::source::Source;
use crate::packed::PackedLinear;
use crate::{Error, Result};
use std::collections::BTreeSet;
use tensor::checkpoint::index::{Entry, GgmlType};
use tensor::tch::{Device, Kind, Tensor};

/// What becomes of a file's packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weights {
    /// They are unpacked.
    #[default]
    Dense,
    /// Those of linear maps and of the embeddings stay packed, in [`PackedLinear`]; on the CPU only. The experts of a mixture are
    /// unpacked all the same: put an [`ExpertStore`](crate::moe::ExpertStore) into their socket where that is too much.
    Packed,
}

/// A stored tensor, cut for the model: rows of bytes.
struct Rows {
    entry: Entry<GgmlType>,
    /// Where the first row begins in the file.
    start: u64,
    count: usize,
    row_bytes: usize,
    columns: usize,
    /// Rows of a head, if they must be brought into the order for half-split RoPE.
    head: Option<usize>,
}

/// The source for [`Model::build`](crate::model::Model).
pub(super) struct GgufSource<'a> {
    file: &'a mut Gguf,
    names: Names,
    head_dim: usize,
    weights: Weights,
    kind: Kind,
    device: Device,
}

impl<'a> GgufSource<'a> {
    /// Checks that the file's tensors are the model's, with types that are read and the right shapes.
    pub(super) fn new(
        file: &'a mut Gguf,
        config: &ModelConfig,
        weights: Weights,
        kind: Kind,
        device: Device,
    ) -> Result<Self> {
        let names =
            Names::new(file.metadata().text("general.architecture")?, config, |name| file.entry(name).is_some());
        let source = Self { file, names, head_dim: config.head_dim as usize, weights, kind, device };
        source.compare(config)?;
        for (name, shape) in wanted(config) {
            source.rows(&name, &shape)?;
        }
        Ok(source)
    }

    /// Every tensor that is missing or that nobody needs, in one error.
    fn compare(&self, config: &ModelConfig) -> Result<()> {
        let places =
            wanted(config).into_iter().map(|(name, _)| self.names.place(&name).map_or(name, |place| place.name));
        let needed: BTreeSet<String> = places.collect();
        let there: BTreeSet<&str> = self.file.index.entries.iter().map(|e| e.name.as_str()).collect();
        let missing: Vec<String> = needed.iter().filter(|n| !there.contains(n.as_str())).cloned().collect();
        let spare = |name: &&&str| !needed.contains(**name) && !may_be_ignored(name);
        let unexpected: Vec<String> = there.iter().filter(spare).map(|n| (*n).to_owned()).collect();
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(Error::Tensors { path: self.file.path.clone(), missing, unexpected })
    }

    /// Where the rows of the tensor `name` lie, if it has the shape and a type that is read.
    fn rows(&self, name: &str, shape: &[i64]) -> Result<Rows> {
        let place = self.names.place(name);
        let entry = place.as_ref().and_then(|place| self.file.entry(&place.name));
        let (Some(Place { part: (part, parts), permuted, .. }), Some(entry)) = (place, entry) else {
            let (path, missing) = (self.file.path.clone(), vec![name.to_owned()]);
            return Err(Error::Tensors { path, missing, unexpected: Vec::new() });
        };
        let stored: Vec<i64> = entry.shape.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
        // Stacked experts have a dimension of their own, GPT-2's thirds follow one another.
        let expected = match (shape, stored.len() == shape.len() + 1) {
            (_, true) if parts > 1 => [&[parts as i64], shape].concat(),
            ([first, rest @ ..], _) => [&[first.saturating_mul(parts as i64)], rest].concat(),
            ([], _) => Vec::new(),
        };
        if stored != expected {
            return Err(Error::TensorShape { name: entry.name.clone(), expected, got: stored });
        }
        dequantize::known(entry)?;
        // The index has checked the range and its length, so these products are within the file. A vector whose elements are
        // blocks of their own is a column: its elements can be taken apart as rows can.
        let (rows, columns) = match *shape {
            [n] if entry.dtype.block() == 1 => (n as usize, 1),
            [n] => (1, n as usize),
            [ref first @ .., last] => (first.iter().product::<i64>() as usize, last as usize),
            [] => (1, 1),
        };
        let row_bytes = columns / entry.dtype.block() as usize * entry.dtype.block_bytes() as usize;
        if parts > 1 && (rows * parts * row_bytes) as u64 != entry.range.end - entry.range.start {
            let expected = format!("stored so that it can be cut into {parts}");
            return Err(Error::config(&entry.name, expected, entry.dtype.name()));
        }
        let start = entry.range.start + (part * rows * row_bytes) as u64;
        // The configuration has been validated: rows of q and k are whole heads of an even width.
        let head = permuted.then_some(self.head_dim);
        if head.is_some_and(|head| head == 0 || !rows.is_multiple_of(head)) {
            let expected = "stored so that the rows of its heads can be brought into another order";
            return Err(Error::config(&entry.name, expected, entry.dtype.name()));
        }
        Ok(Rows { entry: entry.clone(), start, count: rows, row_bytes, columns, head })
    }

    /// The bytes of some rows, in the order of the model. With heads, both numbers are of whole ones.
    fn read(&mut self, of: &Rows, first: usize, count: usize) -> Result<Vec<u8>> {
        let bytes = self.file.read_range(of.start + (first * of.row_bytes) as u64, (count * of.row_bytes) as u64)?;
        Ok(match of.head {
            Some(head) => half_split(&bytes, of.row_bytes, head),
            None => bytes,
        })
    }
}

impl Source for GgufSource<'_> {
    fn tensor(&mut self, name: &str, shape: &[i64]) -> Result<Tensor> {
        // So many bytes of the file are unpacked at once; a whole number of heads at least.
        const PIECE: usize = 4 << 20;
        let rows = self.rows(name, shape)?;
        let kind = dequantize::known(&rows.entry)?;
        let unit = rows.head.unwrap_or(1);
        let step = (PIECE / (rows.row_bytes * unit).max(1)).max(1) * unit;
        let (count, columns) = (rows.count as i64, rows.columns as i64);
        let tensor = Tensor::f_empty([count, columns], (self.kind, self.device))?;
        for first in (0..rows.count).step_by(step) {
            let some = step.min(rows.count - first);
            let numbers = dequantize::floats(kind, &self.read(&rows, first, some)?)?;
            let piece = Tensor::f_from_slice(&numbers)?.f_view([some as i64, columns])?;
            tensor.f_narrow(0, first as i64, some as i64)?.f_copy_(&piece)?;
        }
        Ok(tensor.f_view(shape)?)
    }

    fn linear(&mut self, name: &str, out: i64, inner: i64, bias: bool) -> Result<Box<dyn LinearLayer>> {
        let rows = self.rows(&format!("{name}.weight"), &[out, inner])?;
        let bias = if bias { Some(self.tensor(&format!("{name}.bias"), &[out])?) } else { None };
        // Floats aren't packed.
        if self.weights == Weights::Packed && rows.entry.dtype.block() > 1 {
            let bytes = self.read(&rows, 0, rows.count)?;
            return Ok(Box::new(PackedLinear::new(rows.entry.dtype, out, inner, bytes, bias)?));
        }
        Ok(Box::new(Dense::new(self.tensor(&format!("{name}.weight"), &[out, inner])?, bias)?))
    }
}

/// Rows of heads in the order for RoPE on neighbouring pairs (2i, 2i+1), brought into that for pairs (i, i + d/2): within a head
/// of d rows, the row 2i + j becomes the row j·d/2 + i.
fn half_split(bytes: &[u8], row_bytes: usize, head: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    for (from, to) in bytes.chunks(row_bytes * head).zip(out.chunks_mut(row_bytes * head)) {
        for (number, row) in from.chunks(row_bytes).enumerate() {
            let at = number % 2 * (head / 2) + number / 2;
            to[at * row_bytes..(at + 1) * row_bytes].copy_from_slice(row);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_rows_become_halves_of_a_head() {
        // Two heads of four rows of two bytes.
        let rows: Vec<u8> = (0..8).flat_map(|row| [row, 10 + row]).collect();
        let split = half_split(&rows, 2, 4);
        let order: Vec<u8> = split.chunks(2).map(|row| row[0]).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert!(split.chunks(2).all(|row| row[1] == row[0] + 10));
    }
}
