//! Products with weights in blocks, and unpacking: AVX2 where the processor has it, and the plain loops beside it.
//!
//! Every weight is unpacked to the f32 that the format means and used at once, so a product differs from that with a dense
//! matrix only by the order of its sum. Rows of weights are shared out over rayon's threads; nothing here calls libtorch
//! from there.
#![allow(unsafe_code)]

mod block;

pub(super) use block::BLOCK;
use block::Block;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use tensor::tch::{Device, Kind, Tensor};

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehdup_ps, _mm_movehl_ps, _mm256_add_ps,
    _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
    _mm256_storeu_ps,
};

/// Rows of `x` that share one unpacking of a block: as many sums as fit in AVX2's sixteen registers beside the weights.
pub(super) const TILE: usize = 8;
/// Bytes of blocks below which waking the thread pool costs more than it saves: between the operators of a decoding step its
/// threads have gone to sleep, and waking them takes as long as a matrix of half a megabyte.
const SERIAL_BELOW: usize = 1 << 20;
/// The same for unpacking, which is followed by a product with many rows.
const UNPACK_SERIAL_BELOW: usize = 1 << 17;
/// Bytes of blocks that a thread takes at a time.
const CHUNK: usize = 1 << 15;

/// The formats that are computed with as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
}

/// Which loops run. Both give the same unpacked weights bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    Plain,
    /// Only made by [`Path::best`], which has seen that the processor has AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Wide(Proof),
}

/// That the processor has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Proof(());

impl Path {
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Self::Wide(Proof(()));
        }
        Self::Plain
    }
}

/// A matrix of weights: rows of blocks, each row `inner` weights long.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) format: Format,
    /// A multiple of [`BLOCK`].
    pub(super) inner: usize,
    /// Whole rows.
    pub(super) blocks: &'a [u8],
}

impl Format {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => block::Q4_0::BYTES,
            Self::Q4_1 => block::Q4_1::BYTES,
            Self::Q5_0 => block::Q5_0::BYTES,
            Self::Q5_1 => block::Q5_1::BYTES,
            Self::Q8_0 => block::Q8_0::BYTES,
        }
    }
}

impl Matrix<'_> {
    fn row_bytes(self) -> usize {
        self.inner / BLOCK * self.format.bytes()
    }

    fn rows(self) -> usize {
        self.blocks.len().checked_div(self.row_bytes()).unwrap_or(0)
    }
}

/// `y[m, o] = Σ_i x[m, i] w[o, i]`, with `x` of `[m, inner]` and `y` of `[m, rows]`, both row by row.
///
/// # Panics
/// When the lengths don't fit together: an error of the caller, who has checked them.
pub(super) fn product(w: Matrix<'_>, x: &[f32], y: &mut [f32], path: Path) {
    match w.format {
        Format::Q4_0 => product_of::<block::Q4_0>(w, x, y, path),
        Format::Q4_1 => product_of::<block::Q4_1>(w, x, y, path),
        Format::Q5_0 => product_of::<block::Q5_0>(w, x, y, path),
        Format::Q5_1 => product_of::<block::Q5_1>(w, x, y, path),
        Format::Q8_0 => product_of::<block::Q8_0>(w, x, y, path),
    }
}

/// Unpacks whole blocks: `out` gets 32 numbers for each.
///
/// # Panics
/// When the lengths don't fit together.
pub(super) fn unpack(format: Format, blocks: &[u8], out: &mut [f32], path: Path) {
    match format {
        Format::Q4_0 => unpack_of::<block::Q4_0>(blocks, out, path),
        Format::Q4_1 => unpack_of::<block::Q4_1>(blocks, out, path),
        Format::Q5_0 => unpack_of::<block::Q5_0>(blocks, out, path),
        Format::Q5_1 => unpack_of::<block::Q5_1>(blocks, out, path),
        Format::Q8_0 => unpack_of::<block::Q8_0>(blocks, out, path),
    }
}

/// Where the results go. Tasks write different elements.
#[derive(Clone, Copy)]
struct Target(*mut f32);
// SAFETY: only an address; `product_of` hands every element to exactly one task and outlives them all.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    /// # Safety
    /// `at` lies within the results, and no other task writes there.
    unsafe fn write(self, at: usize, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(at).write(value) }
    }
}

fn product_of<B: Block>(w: Matrix<'_>, x: &[f32], y: &mut [f32], path: Path) {
    let rows = w.rows();
    assert!(w.inner > 0 && w.inner.is_multiple_of(BLOCK) && w.blocks.len() == rows * w.row_bytes(), "whole rows");
    assert!(x.len().is_multiple_of(w.inner) && y.len() == x.len() / w.inner * rows, "x fits the rows, y fits both");
    let target = Target(y.as_mut_ptr());
    let work = |range: Range<usize>| {
        for o in range {
            let row = &w.blocks[o * w.row_bytes()..(o + 1) * w.row_bytes()];
            for (tile, x) in x.chunks(TILE * w.inner).enumerate() {
                let sums = dots::<B>(row, x, w.inner, path);
                for (m, sum) in sums.iter().take(x.len() / w.inner).enumerate() {
                    // SAFETY: row `tile·TILE + m` of x exists and o < rows, so the place is below y's checked length;
                    // only the task that has `o` in its range writes to column o.
                    unsafe { target.write((tile * TILE + m) * rows + o, *sum) };
                }
            }
        }
    };
    share(rows, w.row_bytes(), work);
}

/// Calls `work` with ranges that partition `0..rows`, from several threads where that pays.
///
/// The caller takes chunks like everyone else: it neither sleeps until the pool has woken nor waits for a thread that comes
/// late and finds nothing left to do, beyond that thread's waking.
fn share(rows: usize, row_bytes: usize, work: impl Fn(Range<usize>) + Sync) {
    let threads = rayon::current_num_threads();
    if rows * row_bytes < SERIAL_BELOW || threads == 1 {
        return work(0..rows);
    }
    let step = (CHUNK / row_bytes).max(1);
    let next = AtomicUsize::new(0);
    let take_chunks = || {
        loop {
            let first = next.fetch_add(step, Ordering::Relaxed);
            if first >= rows {
                return;
            }
            work(first..rows.min(first + step));
        }
    };
    rayon::in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| take_chunks());
        }
        take_chunks();
    });
}

/// Sums of products of a row of weights with each of up to [`TILE`] rows of `x`.
fn dots<B: Block>(row: &[u8], x: &[f32], inner: usize, path: Path) -> [f32; TILE] {
    #[cfg(target_arch = "x86_64")]
    if let Path::Wide(_) = path {
        let mut sums = [0.0; TILE];
        // SAFETY: `path` proves that the processor has AVX2, FMA and F16C; `row` has `inner` weights and `x` as many rows of
        // `inner` numbers as the first parameter says.
        unsafe {
            match x.len() / inner {
                1 => sums[..1].copy_from_slice(&dots_wide::<B, 1, 4>(row, x, inner)),
                2 => sums[..2].copy_from_slice(&dots_wide::<B, 2, 4>(row, x, inner)),
                3 => sums[..3].copy_from_slice(&dots_wide::<B, 3, 2>(row, x, inner)),
                4 => sums[..4].copy_from_slice(&dots_wide::<B, 4, 2>(row, x, inner)),
                5 => sums[..5].copy_from_slice(&dots_wide::<B, 5, 1>(row, x, inner)),
                6 => sums[..6].copy_from_slice(&dots_wide::<B, 6, 1>(row, x, inner)),
                7 => sums[..7].copy_from_slice(&dots_wide::<B, 7, 1>(row, x, inner)),
                _ => sums = dots_wide::<B, TILE, 1>(row, x, inner),
            }
        }
        return sums;
    }
    dots_plain::<B>(row, x, inner, path)
}

fn dots_plain<B: Block>(row: &[u8], x: &[f32], inner: usize, _: Path) -> [f32; TILE] {
    let mut sums = [0.0; TILE];
    let mut weights = [0.0; BLOCK];
    for (b, block) in row.chunks_exact(B::BYTES).enumerate() {
        B::plain(block, &mut weights);
        for (sum, x) in sums.iter_mut().zip(x.chunks_exact(inner)) {
            *sum += x[b * BLOCK..][..BLOCK].iter().zip(&weights).map(|(x, w)| x * w).sum::<f32>();
        }
    }
    sums
}

/// [`dots_plain`] for `R` rows of `x`, with `A` running sums of eight lanes for each.
///
/// # Safety
/// The processor must have AVX2, FMA and F16C; `row` must be whole blocks of `inner` weights, and `x` at least `R` rows.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots_wide<B: Block, const R: usize, const A: usize>(row: &[u8], x: &[f32], inner: usize) -> [f32; R] {
    debug_assert!(x.len() >= R * inner && row.len() / B::BYTES * BLOCK == inner);
    let mut sums = [[_mm256_setzero_ps(); A]; R];
    let mut block = row.as_ptr();
    for b in 0..inner / BLOCK {
        // SAFETY: block b of the row and numbers 32·b..32·b + 32 of the R rows of x exist, as the caller promises.
        unsafe {
            let weights = B::wide(block);
            block = block.add(B::BYTES);
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = x.as_ptr().add(r * inner + b * BLOCK);
                for (j, w) in weights.iter().enumerate() {
                    sums[j % A] = _mm256_fmadd_ps(*w, _mm256_loadu_ps(x.add(8 * j)), sums[j % A]);
                }
            }
        }
    }
    sums.map(|lanes| {
        let mut all = lanes[0];
        for more in &lanes[1..] {
            all = _mm256_add_ps(all, *more);
        }
        sum(all)
    })
}

/// The sum of the eight lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

fn unpack_of<B: Block>(blocks: &[u8], out: &mut [f32], path: Path) {
    assert!(blocks.len() / B::BYTES * BLOCK == out.len() && blocks.len().is_multiple_of(B::BYTES), "whole blocks");
    let (bytes, numbers) = (CHUNK / B::BYTES * B::BYTES, CHUNK / B::BYTES * BLOCK);
    if blocks.len() < UNPACK_SERIAL_BELOW || rayon::current_num_threads() == 1 {
        unpack_run::<B>(blocks, out, path);
    } else {
        out.par_chunks_mut(numbers)
            .zip(blocks.par_chunks(bytes))
            .for_each(|(out, run)| unpack_run::<B>(run, out, path));
    }
}

fn unpack_run<B: Block>(blocks: &[u8], out: &mut [f32], path: Path) {
    #[cfg(target_arch = "x86_64")]
    if let Path::Wide(_) = path {
        // SAFETY: `path` proves that the processor has AVX2, FMA and F16C; `unpack_of` has checked the lengths.
        return unsafe { unpack_wide::<B>(blocks, out) };
    }
    unpack_plain::<B>(blocks, out, path);
}

fn unpack_plain<B: Block>(blocks: &[u8], out: &mut [f32], _: Path) {
    let (out, _) = out.as_chunks_mut::<BLOCK>();
    for (block, out) in blocks.chunks_exact(B::BYTES).zip(out) {
        B::plain(block, out);
    }
}

/// [`unpack_plain`], eight numbers at a time.
///
/// # Safety
/// The processor must have AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_wide<B: Block>(blocks: &[u8], out: &mut [f32]) {
    let (out, _) = out.as_chunks_mut::<BLOCK>();
    for (block, out) in blocks.chunks_exact(B::BYTES).zip(out) {
        // SAFETY: the block has its bytes, `out` has 32 numbers.
        unsafe {
            for (j, w) in B::wide(block.as_ptr()).into_iter().enumerate() {
                _mm256_storeu_ps(out.as_mut_ptr().add(8 * j), w);
            }
        }
    }
}

/// The memory of a tensor that is dense f32 on the CPU.
///
/// Nobody may write to the tensor (or one that shares its memory) while the numbers are in use; Tessera calls libtorch
/// from one thread at a time, and nothing between the call and the end of a product writes.
pub(super) fn floats(tensor: &Tensor) -> Option<&[f32]> {
    let dense = dense(tensor) && tensor.numel() > 0;
    // SAFETY: dense f32 CPU memory of `numel` initialized numbers, kept alive by the borrow of the handle.
    dense.then(|| unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), tensor.numel()) })
}

/// As [`floats`], to be written. The tensor must be one that the caller has just made, so that no other handle shares it.
pub(super) fn floats_mut(tensor: &mut Tensor) -> Option<&mut [f32]> {
    let dense = dense(tensor) && tensor.numel() > 0;
    // SAFETY: as in `floats`; the caller has the only handle, which is borrowed mutably.
    dense.then(|| unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<f32>(), tensor.numel()) })
}

fn dense(tensor: &Tensor) -> bool {
    tensor.defined()
        && tensor.device() == Device::Cpu
        && tensor.f_kind().is_ok_and(|kind| kind == Kind::Float)
        && !tensor.is_sparse()
        && !tensor.is_mkldnn()
        // A lazily negated view has the wrong signs in its memory.
        && !tensor.is_neg()
        && tensor.is_contiguous()
}
