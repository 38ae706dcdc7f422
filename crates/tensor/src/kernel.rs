//! Loops over the memory of dense f32 CPU tensors, several lists of tensors at a time.
//!
//! Soundness rests on one rule that can't be checked here and holds everywhere in tch, whose handles share
//! memory and may be sent to other threads: while a loop runs, nobody else writes to the tensors it reads, or
//! touches those it writes. Who calls libtorch from one thread at a time, as Tessera does, keeps it.
//!
//! One pass over memory replaces one libtorch dispatch per tensor per operation. The safe face of this
//! module is [`crate::fused`]; the plain versions beside each caller are what the tests compare with.
#![allow(unsafe_code)]

use crate::Seed;
use rayon::prelude::*;
use tch::{Device, Kind, Tensor};

/// Elements per unit of work. Partial sums are kept per unit and added in order, so a sum doesn't depend
/// on the number of threads.
const CHUNK: usize = 1 << 14;
/// Below this many elements in all, waking the thread pool costs more than it saves.
const SERIAL_BELOW: usize = 1 << 17;
/// Independent accumulators in a reduction, so that additions don't wait for each other.
const LANES: usize = 8;

/// The memory of one tensor: `len` f32 values from `start`.
#[derive(Clone, Copy)]
struct Memory {
    start: *mut f32,
    len: usize,
}

// SAFETY: a `Memory` is only an address; who dereferences it (below) holds borrows of the tensors for the
// whole parallel region and hands every element to exactly one task.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

fn memory(tensor: &Tensor) -> Option<Memory> {
    let dense = tensor.defined()
        && tensor.device() == Device::Cpu
        && tensor.f_kind().is_ok_and(|kind| kind == Kind::Float)
        && !tensor.is_sparse()
        && !tensor.is_mkldnn()
        // A lazily negated view has the wrong signs in its memory.
        && !tensor.is_neg()
        && tensor.is_contiguous();
    dense.then(|| Memory { start: tensor.data_ptr().cast(), len: tensor.numel() })
}

fn memories(list: &[&Tensor]) -> Option<Vec<Memory>> {
    list.iter().map(|tensor| memory(tensor)).collect()
}

/// True when no written range meets another written range or a read range.
fn disjoint(written: &[Vec<Memory>], read: &[Vec<Memory>]) -> bool {
    let range = |m: &Memory, writes: bool| (m.start as usize, m.start as usize + 4 * m.len, writes);
    let mut ranges: Vec<_> = written
        .iter()
        .flatten()
        .map(|m| range(m, true))
        .chain(read.iter().flatten().map(|m| range(m, false)))
        .filter(|(start, end, _)| start < end)
        .collect();
    ranges.sort_unstable();
    let mut last_write_end = 0;
    let mut last_end = 0;
    for (start, end, writes) in ranges {
        if start < last_write_end || (writes && start < last_end) {
            return false;
        }
        last_end = last_end.max(end);
        if writes {
            last_write_end = last_write_end.max(end);
        }
    }
    true
}

/// Units of work `(tensor, start, length)`.
fn units(lengths: impl Iterator<Item = usize>) -> Vec<(usize, usize, usize)> {
    let mut units = Vec::new();
    for (tensor, length) in lengths.enumerate() {
        for start in (0..length).step_by(CHUNK) {
            units.push((tensor, start, CHUNK.min(length - start)));
        }
    }
    units
}

fn same_lengths(lists: &[&[Memory]]) -> bool {
    lists
        .windows(2)
        .all(|pair| pair[0].len() == pair[1].len() && pair[0].iter().zip(pair[1]).all(|(a, b)| a.len == b.len))
}

/// Whether the wide versions of the loops may run. They do the same operations in the same order (no fused
/// multiply-add), so the results don't depend on it.
#[cfg(target_arch = "x86_64")]
fn wide() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// Partial sums of one unit of `N` lists, in `LANES` independent accumulators.
#[allow(clippy::inline_always)] // so that it is compiled anew, with wider instructions, in `reduce_unit_wide`
#[inline(always)]
fn reduce_unit<const N: usize, const K: usize>(
    tensor: usize,
    slices: [&[f32]; N],
    f: &impl Fn(usize, [f32; N]) -> [f64; K],
) -> [f64; K] {
    let length = slices[0].len();
    let mut lanes = [[0.0f64; LANES]; K];
    let whole = length / LANES * LANES;
    for base in (0..whole).step_by(LANES) {
        let block: [&[f32; LANES]; N] =
            std::array::from_fn(|n| slices[n][base..base + LANES].try_into().expect("the block has LANES elements"));
        for lane in 0..LANES {
            let terms = f(tensor, std::array::from_fn(|n| block[n][lane]));
            for k in 0..K {
                lanes[k][lane] += terms[k];
            }
        }
    }
    // Indexed because the N slices run in step.
    #[allow(clippy::needless_range_loop)]
    for i in whole..length {
        let terms = f(tensor, std::array::from_fn(|n| slices[n][i]));
        for k in 0..K {
            lanes[k][0] += terms[k];
        }
    }
    std::array::from_fn(|k| lanes[k].iter().sum())
}

/// [`reduce_unit`] compiled for AVX2.
///
/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn reduce_unit_wide<const N: usize, const K: usize>(
    tensor: usize,
    slices: [&[f32]; N],
    f: &impl Fn(usize, [f32; N]) -> [f64; K],
) -> [f64; K] {
    reduce_unit(tensor, slices, f)
}

/// Changes one unit of `M` lists, reading `N` others.
///
/// # Safety
/// All slices must have the length of the first one.
#[allow(clippy::inline_always)] // as `reduce_unit`
#[inline(always)]
unsafe fn update_unit<const M: usize, const N: usize>(
    tensor: usize,
    out: &mut [&mut [f32]; M],
    input: [&[f32]; N],
    f: &impl Fn(usize, &mut [f32; M], [f32; N]),
) {
    for i in 0..out[0].len() {
        // SAFETY: every slice has the length of the first one, says the caller; checked indexing keeps the
        // loop from being vectorized.
        unsafe {
            let mut values: [f32; M] = std::array::from_fn(|m| *out[m].get_unchecked(i));
            f(tensor, &mut values, std::array::from_fn(|n| *input[n].get_unchecked(i)));
            for m in 0..M {
                *out[m].get_unchecked_mut(i) = values[m];
            }
        }
    }
}

/// [`update_unit`] compiled for AVX2.
///
/// # Safety
/// As [`update_unit`], and the processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn update_unit_wide<const M: usize, const N: usize>(
    tensor: usize,
    out: &mut [&mut [f32]; M],
    input: [&[f32]; N],
    f: &impl Fn(usize, &mut [f32; M], [f32; N]),
) {
    // SAFETY: the caller's promise.
    unsafe { update_unit(tensor, out, input, f) }
}

/// Sums `f(tensor index, values)` over all elements of `N` lists of tensors read in step, in f64.
///
/// `None` when a tensor isn't dense f32 CPU memory, or the lists don't match element by element.
pub(crate) fn reduce<const N: usize, const K: usize>(
    lists: [&[&Tensor]; N],
    f: impl Fn(usize, [f32; N]) -> [f64; K] + Sync,
) -> Option<[f64; K]> {
    if N == 0 {
        return Some([0.0; K]);
    }
    let mut memory = Vec::with_capacity(N);
    for list in lists {
        memory.push(memories(list)?);
    }
    if !same_lengths(&memory.iter().map(Vec::as_slice).collect::<Vec<_>>()) {
        return None;
    }
    #[cfg(target_arch = "x86_64")]
    let wide = wide();
    let units = units(memory[0].iter().map(|m| m.len));
    let total: usize = memory[0].iter().map(|m| m.len).sum();
    let one = |&(tensor, start, length): &(usize, usize, usize)| -> [f64; K] {
        let slices: [&[f32]; N] = std::array::from_fn(|n| {
            // SAFETY: the range lies inside tensor `n`, which the caller's borrow keeps alive; nobody writes to
            // it meanwhile, by the module's rule.
            unsafe { std::slice::from_raw_parts(memory[n][tensor].start.add(start), length) }
        });
        #[cfg(target_arch = "x86_64")]
        if wide {
            // SAFETY: `wide` says that the processor has AVX2.
            return unsafe { reduce_unit_wide(tensor, slices, &f) };
        }
        reduce_unit(tensor, slices, &f)
    };
    let partial: Vec<[f64; K]> =
        if total < SERIAL_BELOW { units.iter().map(one).collect() } else { units.par_iter().map(one).collect() };
    Some(std::array::from_fn(|k| partial.iter().map(|p| p[k]).sum()))
}

/// Applies `f(tensor index, written values, read values)` to all elements of `M` written and `N` read lists.
///
/// False, with nothing written, when a tensor isn't dense f32 CPU memory, the lists don't match element by
/// element, or a written tensor shares memory with another one.
pub(crate) fn update<const M: usize, const N: usize>(
    written: [&[&Tensor]; M],
    read: [&[&Tensor]; N],
    f: impl Fn(usize, &mut [f32; M], [f32; N]) + Sync,
) -> bool {
    if M == 0 {
        return true;
    }
    let collect =
        |lists: &[&[&Tensor]]| -> Option<Vec<Vec<Memory>>> { lists.iter().map(|list| memories(list)).collect() };
    let (Some(written), Some(read)) = (collect(&written), collect(&read)) else { return false };
    let all: Vec<&[Memory]> = written.iter().chain(&read).map(Vec::as_slice).collect();
    if !same_lengths(&all) || !disjoint(&written, &read) {
        return false;
    }
    #[cfg(target_arch = "x86_64")]
    let wide = wide();
    let units = units(written[0].iter().map(|m| m.len));
    let total: usize = written[0].iter().map(|m| m.len).sum();
    let one = |&(tensor, start, length): &(usize, usize, usize)| {
        // SAFETY: the range lies inside each tensor; `disjoint` has shown that written ranges meet nothing
        // else, and the units partition every tensor, so this task alone touches these elements; code outside
        // this call keeps away by the module's rule.
        let mut out: [&mut [f32]; M] = std::array::from_fn(|m| unsafe {
            std::slice::from_raw_parts_mut(written[m][tensor].start.add(start), length)
        });
        // SAFETY: as above; read ranges are written by nobody during the call.
        let input: [&[f32]; N] =
            std::array::from_fn(|n| unsafe { std::slice::from_raw_parts(read[n][tensor].start.add(start), length) });
        #[cfg(target_arch = "x86_64")]
        if wide {
            // SAFETY: all slices have `length` elements, and `wide` says that the processor has AVX2.
            unsafe { update_unit_wide(tensor, &mut out, input, &f) };
            return;
        }
        // SAFETY: all slices have `length` elements.
        unsafe { update_unit(tensor, &mut out, input, &f) };
    };
    if total < SERIAL_BELOW {
        units.iter().for_each(one);
    } else {
        units.par_iter().for_each(one);
    }
    true
}

/// Fills a tensor with the standard normal numbers of a stream.
///
/// False, with nothing written, when it isn't dense f32 CPU memory.
pub(crate) fn fill_normal(tensor: &Tensor, seed: Seed, stream: u64) -> bool {
    let Some(memory) = memory(tensor) else { return false };
    if memory.len > 0 {
        // SAFETY: the memory is the tensor's own, `len` initialized f32 values, and the borrow keeps it alive; nobody
        // else touches it meanwhile, by the module's rule.
        let out = unsafe { std::slice::from_raw_parts_mut(memory.start, memory.len) };
        seed.fill_normal(out, stream);
    }
    true
}
