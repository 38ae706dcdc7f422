//! The block formats with kernels of their own: 32 weights, a scale, and for some an offset.
#![allow(clippy::inline_always)] // these become part of the loops that are compiled for AVX2

use half::f16;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256i, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_loadu_si64, _mm_shuffle_ps, _mm256_and_si256,
    _mm256_broadcastss_ps, _mm256_cmpeq_epi32, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32,
    _mm256_fmadd_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_srli_epi32,
    _mm256_sub_epi32,
};

/// Weights of a block.
pub(crate) const BLOCK: usize = 32;

/// A format: how the bytes of a block become 32 weights.
///
/// All of them are `d·q` or `d·q + m` with q of at most 8 bits and d of 11, so `d·q` has no rounding error in f32: a fused
/// multiply-add gives the same bits as a product and a sum.
pub(crate) trait Block {
    /// Bytes of a block.
    const BYTES: usize;

    /// The weights, one at a time. `block` has [`BYTES`](Self::BYTES) bytes.
    fn plain(block: &[u8], out: &mut [f32; BLOCK]);

    /// The same weights, eight at a time.
    ///
    /// # Safety
    /// `block` must point to [`BYTES`](Self::BYTES) readable bytes, and the processor must have AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn wide(block: *const u8) -> [__m256; 4];
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Bit `i` of the four bytes at `at`.
fn bit(bytes: &[u8], at: usize, i: usize) -> u8 {
    bytes[at + i / 8] >> (i % 8) & 1
}

/// The number `(low or high nibble of byte i, fifth bit of i)` of weights `i` and `i + 16`.
fn nibbles(nibbles: &[u8], high: impl Fn(usize) -> u8, mut to: impl FnMut(usize, u8)) {
    for (i, byte) in nibbles.iter().enumerate() {
        to(i, byte & 15 | high(i) << 4);
        to(i + BLOCK / 2, byte >> 4 | high(i + BLOCK / 2) << 4);
    }
}

/// `w = d (q − 8)`: f16 d, 16 bytes whose low nibbles are weights 0–15 and whose high ones 16–31.
pub(crate) struct Q4_0;
/// `w = d q + m`: f16 d, f16 m, 16 bytes as in `Q4_0`.
pub(crate) struct Q4_1;
/// `w = d (q − 16)`: f16 d, 4 bytes of fifth bits, 16 bytes as in `Q4_0`.
pub(crate) struct Q5_0;
/// `w = d q + m`: f16 d, f16 m, 4 bytes of fifth bits, 16 bytes as in `Q4_0`.
pub(crate) struct Q5_1;
/// `w = d q`: f16 d, 32 signed bytes.
pub(crate) struct Q8_0;

/// `d·q` of every number, and an offset where there is one.
#[cfg(target_arch = "x86_64")]
mod lanes {
    #[allow(clippy::wildcard_imports)] // a private part of this file
    use super::*;

    /// The f16 at `block`, in all lanes.
    ///
    /// # Safety
    /// Two readable bytes; F16C and AVX2.
    #[inline(always)]
    pub(super) unsafe fn scale(block: *const u8) -> __m256 {
        // SAFETY: the caller's promise; the read is unaligned.
        unsafe {
            let bits = block.cast::<u16>().read_unaligned();
            _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
        }
    }

    /// The two f16 at `block`, each in all lanes of its own.
    ///
    /// # Safety
    /// Four readable bytes; F16C and AVX2.
    #[inline(always)]
    pub(super) unsafe fn scale_and_offset(block: *const u8) -> (__m256, __m256) {
        // SAFETY: the caller's promise; the read is unaligned.
        unsafe {
            let both = _mm_cvtph_ps(_mm_cvtsi32_si128(block.cast::<i32>().read_unaligned()));
            (_mm256_broadcastss_ps(both), _mm256_broadcastss_ps(_mm_shuffle_ps::<1>(both, both)))
        }
    }

    /// Eight bytes at `from` as eight integers, without sign.
    ///
    /// # Safety
    /// Eight readable bytes; AVX2.
    #[inline(always)]
    pub(super) unsafe fn bytes(from: *const u8) -> __m256i {
        // SAFETY: the caller's promise; the load takes any alignment.
        unsafe { _mm256_cvtepu8_epi32(_mm_loadu_si64(from)) }
    }

    /// The 32 numbers of 16 bytes of nibbles.
    ///
    /// # Safety
    /// Sixteen readable bytes; AVX2.
    #[inline(always)]
    pub(super) unsafe fn nibbles(from: *const u8) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let (first, second) = (bytes(from), bytes(from.add(8)));
            let low = _mm256_set1_epi32(15);
            [
                _mm256_and_si256(first, low),
                _mm256_and_si256(second, low),
                _mm256_srli_epi32::<4>(first),
                _mm256_srli_epi32::<4>(second),
            ]
        }
    }

    /// The 32 fifth bits at `from`, each in its place as 16.
    ///
    /// # Safety
    /// Four readable bytes; AVX2.
    #[inline(always)]
    pub(super) unsafe fn fifths(from: *const u8) -> [__m256i; 4] {
        // SAFETY: the caller's promise; the read is unaligned.
        unsafe {
            let all = from.cast::<u32>().read_unaligned();
            let masks = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            std::array::from_fn(|j| {
                let byte = _mm256_set1_epi32((all >> (8 * j)) as i32 & 255);
                let set = _mm256_cmpeq_epi32(_mm256_and_si256(byte, masks), masks);
                _mm256_and_si256(set, _mm256_set1_epi32(16))
            })
        }
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;

    fn plain(block: &[u8], out: &mut [f32; BLOCK]) {
        let d = half(block, 0);
        nibbles(&block[2..], |_| 0, |i, q| out[i] = (f32::from(q) - 8.0) * d);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn wide(block: *const u8) -> [__m256; 4] {
        // SAFETY: 18 bytes are readable; the processor has what is used.
        unsafe {
            let (d, q) = (lanes::scale(block), lanes::nibbles(block.add(2)));
            let eight = _mm256_set1_epi32(8);
            q.map(|q| _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(q, eight)), d))
        }
    }
}

impl Block for Q4_1 {
    const BYTES: usize = 20;

    fn plain(block: &[u8], out: &mut [f32; BLOCK]) {
        let (d, m) = (half(block, 0), half(block, 2));
        nibbles(&block[4..], |_| 0, |i, q| out[i] = f32::from(q) * d + m);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn wide(block: *const u8) -> [__m256; 4] {
        // SAFETY: 20 bytes are readable; the processor has what is used.
        unsafe {
            let ((d, m), q) = (lanes::scale_and_offset(block), lanes::nibbles(block.add(4)));
            q.map(|q| _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), d, m))
        }
    }
}

impl Block for Q5_0 {
    const BYTES: usize = 22;

    fn plain(block: &[u8], out: &mut [f32; BLOCK]) {
        let d = half(block, 0);
        nibbles(&block[6..], |i| bit(block, 2, i), |i, q| out[i] = (f32::from(q) - 16.0) * d);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn wide(block: *const u8) -> [__m256; 4] {
        // SAFETY: 22 bytes are readable; the processor has what is used.
        unsafe {
            let (d, q, high) = (lanes::scale(block), lanes::nibbles(block.add(6)), lanes::fifths(block.add(2)));
            let sixteen = _mm256_set1_epi32(16);
            std::array::from_fn(|j| {
                let q = _mm256_sub_epi32(_mm256_or_si256(q[j], high[j]), sixteen);
                _mm256_mul_ps(_mm256_cvtepi32_ps(q), d)
            })
        }
    }
}

impl Block for Q5_1 {
    const BYTES: usize = 24;

    fn plain(block: &[u8], out: &mut [f32; BLOCK]) {
        let (d, m) = (half(block, 0), half(block, 2));
        nibbles(&block[8..], |i| bit(block, 4, i), |i, q| out[i] = f32::from(q) * d + m);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn wide(block: *const u8) -> [__m256; 4] {
        // SAFETY: 24 bytes are readable; the processor has what is used.
        unsafe {
            let ((d, m), q) = (lanes::scale_and_offset(block), lanes::nibbles(block.add(8)));
            let high = lanes::fifths(block.add(4));
            std::array::from_fn(|j| _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_or_si256(q[j], high[j])), d, m))
        }
    }
}

impl Block for Q8_0 {
    const BYTES: usize = 34;

    fn plain(block: &[u8], out: &mut [f32; BLOCK]) {
        let d = half(block, 0);
        for (w, byte) in out.iter_mut().zip(&block[2..]) {
            *w = f32::from(byte.cast_signed()) * d;
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn wide(block: *const u8) -> [__m256; 4] {
        // SAFETY: 34 bytes are readable; the processor has what is used; the load takes any alignment.
        unsafe {
            let d = lanes::scale(block);
            std::array::from_fn(|j| {
                let q = _mm256_cvtepi8_epi32(_mm_loadu_si64(block.add(2 + 8 * j)));
                _mm256_mul_ps(_mm256_cvtepi32_ps(q), d)
            })
        }
    }
}
