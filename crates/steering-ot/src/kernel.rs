//! The map on rows of f32 values: distances by direct difference, gates in log space, mix of shifts.
//!
//! AVX2 and FMA where the processor has them, and the plain loops beside them. A row whose squared distances leave f32's
//! comfortable range is done in f64, so every finite row has finite gates.
#![allow(unsafe_code)]

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehdup_ps, _mm_movehl_ps, _mm256_add_ps,
    _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_storeu_ps, _mm256_sub_ps,
};

/// Products `M·K·D` below which waking the thread pool costs more than it saves.
const SERIAL_BELOW: usize = 1 << 20;
/// Rows that a thread takes at a time.
const ROWS: usize = 16;
/// Squared distances outside this range are computed again in f64.
const COMFORTABLE: std::ops::Range<f32> = 1e-30..1e37;
/// Clusters up to which the median needs no allocation.
const ON_STACK: usize = 64;
/// The gate's width is at least this times the largest squared distance: at a centroid the lower median can be 0.
pub(crate) const LEAST_WIDTH: f64 = 1e-12;

/// The width `w` of the gates `k_i = exp(−d_i²/w)`, with the bandwidth in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Width {
    /// This times the lower median of an input's squared distances, and at least 1e-12 times the largest of them.
    Median(f64),
    /// This.
    Fixed(f64),
}

/// A mixture of shifts, ready to be applied. Only clusters with mass are here.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mixture {
    pub(crate) k: usize,
    pub(crate) d: usize,
    /// `[K, D]`.
    pub(crate) centroids: Vec<f32>,
    /// `[K, D]`.
    pub(crate) shifts: Vec<f32>,
    /// `ln r_i`.
    pub(crate) log_mass: Vec<f64>,
    pub(crate) width: Width,
    /// Per coordinate, the values between which it is moved.
    pub(crate) bounds: Option<(Vec<f32>, Vec<f32>)>,
}

/// Which loops run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Plain,
    /// Only made by [`Path::best`], which has seen that the processor has AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Wide,
}

impl Path {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return Self::Wide;
        }
        Self::Plain
    }
}

impl Mixture {
    /// `out = keep·x + alpha·v̂(x)`, row after row (`[M, D]` both). The gates stay in `gates` (`[M, K]`). Gives the first row that
    /// isn't finite as the error; `out` is then undefined.
    pub(crate) fn apply(
        &self,
        x: &[f32],
        keep: f32,
        alpha: f32,
        gates: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), usize> {
        self.apply_on(Path::best(), x, keep, alpha, gates, out)
    }

    fn apply_on(
        &self,
        path: Path,
        x: &[f32],
        keep: f32,
        alpha: f32,
        gates: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), usize> {
        let (k, d) = (self.k, self.d);
        let block = |first: usize, x: &[f32], gates: &mut [f32], out: &mut [f32]| {
            for (i, ((x, g), out)) in x.chunks(d).zip(gates.chunks_mut(k)).zip(out.chunks_mut(d)).enumerate() {
                if !self.gate_row(path, x, g) {
                    return Err(first + i);
                }
                self.mix_row(path, x, g, keep, alpha, out);
            }
            Ok(())
        };
        if x.len().saturating_mul(k) < SERIAL_BELOW {
            return block(0, x, gates, out);
        }
        let worst = x
            .par_chunks(ROWS * d)
            .zip(gates.par_chunks_mut(ROWS * k))
            .zip(out.par_chunks_mut(ROWS * d))
            .enumerate()
            .filter_map(|(i, ((x, gates), out))| block(i * ROWS, x, gates, out).err())
            .min();
        worst.map_or(Ok(()), Err)
    }

    /// Only the gates.
    pub(crate) fn gates(&self, x: &[f32], gates: &mut [f32]) -> Result<(), usize> {
        let path = Path::best();
        for (i, (x, g)) in x.chunks(self.d).zip(gates.chunks_mut(self.k)).enumerate() {
            if !self.gate_row(path, x, g) {
                return Err(i);
            }
        }
        Ok(())
    }

    /// The gates of one row; false if the row isn't finite.
    fn gate_row(&self, path: Path, x: &[f32], g: &mut [f32]) -> bool {
        for (g, a) in g.iter_mut().zip(self.centroids.chunks_exact(self.d)) {
            *g = match path {
                Path::Plain => squared_distance(x, a),
                // SAFETY: `Wide` is only made where AVX2 and FMA were detected.
                #[cfg(target_arch = "x86_64")]
                Path::Wide => unsafe { squared_distance_wide(x, a) },
            };
        }
        let max = g.iter().fold(0.0f32, |m, v| if *v > m || v.is_nan() { *v } else { m });
        if COMFORTABLE.contains(&max) { self.soft(g) } else { self.gate_row_in_f64(x, g) }
    }

    /// Squared distances to gates, in place.
    fn soft(&self, g: &mut [f32]) -> bool {
        let (min, max) = extremes(g.iter().copied());
        let width = match self.width {
            Width::Median(h) => h as f32 * lower_median(g).max(LEAST_WIDTH as f32 * max).max(f32::MIN_POSITIVE),
            Width::Fixed(width) => width as f32,
        };
        // A width that underflows still orders the clusters; 0·∞ must not occur.
        let inverse = width.recip().min(f32::MAX);
        let mut top = f32::NEG_INFINITY;
        for (v, log_mass) in g.iter_mut().zip(&self.log_mass) {
            *v = *log_mass as f32 - (*v - min) * inverse;
            top = top.max(*v);
        }
        let mut sum = 0.0;
        for v in g.iter_mut() {
            *v = (*v - top).exp();
            sum += *v;
        }
        for v in g.iter_mut() {
            *v /= sum;
        }
        true
    }

    fn gate_row_in_f64(&self, x: &[f32], g: &mut [f32]) -> bool {
        let mut exact: Vec<f64> =
            self.centroids.chunks_exact(self.d).map(|a| crate::data::squared_distance(x, a)).collect();
        if !exact.iter().all(|v| v.is_finite()) {
            return false;
        }
        soft_f64(&mut exact, &self.log_mass, self.width);
        g.iter_mut().zip(&exact).for_each(|(g, v)| *g = *v as f32);
        true
    }

    fn mix_row(&self, path: Path, x: &[f32], g: &[f32], keep: f32, alpha: f32, out: &mut [f32]) {
        match path {
            Path::Plain => mix(&self.shifts, x, g, keep, alpha, out),
            // SAFETY: as in `gate_row`; lengths are checked inside.
            #[cfg(target_arch = "x86_64")]
            Path::Wide => unsafe { mix_wide(&self.shifts, x, g, keep, alpha, out) },
        }
        if let Some((low, high)) = &self.bounds {
            for (((out, x), low), high) in out.iter_mut().zip(x).zip(low).zip(high) {
                if !(low..=high).contains(&x) {
                    *out = keep * x;
                }
            }
        }
    }
}

/// Squared distances to gates in f64, in place.
pub(crate) fn soft_f64(g: &mut [f64], log_mass: &[f64], width: Width) {
    let (min, max) = extremes(g.iter().copied());
    let width = match width {
        Width::Median(h) => {
            let mut sorted = g.to_vec();
            sorted.sort_by(f64::total_cmp);
            h * sorted[(g.len() - 1) / 2].max(LEAST_WIDTH * max).max(f64::MIN_POSITIVE)
        }
        Width::Fixed(width) => width,
    };
    let inverse = width.recip().min(f64::MAX);
    let mut top = f64::NEG_INFINITY;
    for (v, log_mass) in g.iter_mut().zip(log_mass) {
        *v = log_mass - (*v - min) * inverse;
        top = top.max(*v);
    }
    let sum: f64 = g.iter().map(|v| (v - top).exp()).sum();
    for v in g.iter_mut() {
        *v = (*v - top).exp() / sum;
    }
}

/// `‖x − y‖²` of two rows of the same length: in f32 by direct difference, in f64 where that leaves the comfortable range.
pub(crate) fn row_distance(x: &[f32], y: &[f32]) -> f64 {
    let fast = match Path::best() {
        Path::Plain => squared_distance(x, y),
        // SAFETY: `Wide` is only made where AVX2 and FMA were detected.
        #[cfg(target_arch = "x86_64")]
        Path::Wide => unsafe { squared_distance_wide(x, y) },
    };
    if COMFORTABLE.contains(&fast) { f64::from(fast) } else { crate::data::squared_distance(x, y) }
}

fn extremes<F: PartialOrd + Copy>(values: impl Iterator<Item = F>) -> (F, F) {
    let mut all = values.peekable();
    // Every mixture has at least one cluster: checked when it is built.
    let first = *all.peek().expect("a mixture has a cluster");
    all.fold((first, first), |(min, max), v| (if v < min { v } else { min }, if v > max { v } else { max }))
}

/// The lower of the two middle values for an even count.
fn lower_median(values: &[f32]) -> f32 {
    let at = (values.len() - 1) / 2;
    let mut stack = [0.0f32; ON_STACK];
    let mut heap;
    let copy = if values.len() <= ON_STACK {
        stack[..values.len()].copy_from_slice(values);
        &mut stack[..values.len()]
    } else {
        heap = values.to_vec();
        &mut heap[..]
    };
    *copy.select_nth_unstable_by(at, f32::total_cmp).1
}

/// `‖x − a‖²`, plain: the reference.
fn squared_distance(x: &[f32], a: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (x16, a16) = (x.chunks_exact(16), a.chunks_exact(16));
    let tail: f32 = x16.remainder().iter().zip(a16.remainder()).map(|(x, a)| (x - a) * (x - a)).sum();
    for (x, a) in x16.zip(a16) {
        for l in 0..16 {
            let d = x[l] - a[l];
            lanes[l] += d * d;
        }
    }
    lanes.iter().sum::<f32>() + tail
}

/// `out = keep·x + alpha·Σ_k g_k m_k`, plain: the reference.
fn mix(shifts: &[f32], x: &[f32], g: &[f32], keep: f32, alpha: f32, out: &mut [f32]) {
    out.fill(0.0);
    for (g, shift) in g.iter().zip(shifts.chunks_exact(x.len())) {
        out.iter_mut().zip(shift).for_each(|(out, m)| *out += g * m);
    }
    out.iter_mut().zip(x).for_each(|(out, x)| *out = alpha * *out + keep * x);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn sum_of_lanes(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// As [`squared_distance`], 32 values at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn squared_distance_wide(x: &[f32], a: &[f32]) -> f32 {
    let n = x.len().min(a.len());
    let mut sums = [_mm256_setzero_ps(); 4];
    let mut j = 0;
    while j + 32 <= n {
        for (l, sum) in sums.iter_mut().enumerate() {
            // SAFETY: j + 8l + 8 ≤ j + 32 ≤ n, the length of both.
            let (x, a) =
                unsafe { (_mm256_loadu_ps(x.as_ptr().add(j + 8 * l)), _mm256_loadu_ps(a.as_ptr().add(j + 8 * l))) };
            let d = _mm256_sub_ps(x, a);
            *sum = _mm256_fmadd_ps(d, d, *sum);
        }
        j += 32;
    }
    let sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    sum_of_lanes(sum) + x[j..n].iter().zip(&a[j..n]).map(|(x, a)| (x - a) * (x - a)).sum::<f32>()
}

/// As [`mix`], 32 values at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn mix_wide(shifts: &[f32], x: &[f32], g: &[f32], keep: f32, alpha: f32, out: &mut [f32]) {
    let d = x.len();
    assert!(out.len() == d && shifts.len() == g.len() * d, "buffers of one mixture");
    let (keep_all, alpha_all) = (_mm256_set1_ps(keep), _mm256_set1_ps(alpha));
    let mut j = 0;
    while j + 32 <= d {
        let mut sums = [_mm256_setzero_ps(); 4];
        for (k, g) in g.iter().enumerate() {
            let g = _mm256_set1_ps(*g);
            for (l, sum) in sums.iter_mut().enumerate() {
                // SAFETY: k·d + j + 8l + 8 ≤ (k + 1)·d ≤ the length of `shifts`, asserted above.
                let m = unsafe { _mm256_loadu_ps(shifts.as_ptr().add(k * d + j + 8 * l)) };
                *sum = _mm256_fmadd_ps(g, m, *sum);
            }
        }
        for (l, sum) in sums.iter().enumerate() {
            // SAFETY: j + 8l + 8 ≤ j + 32 ≤ d, the length of `x` and, as asserted above, of `out`.
            unsafe {
                let kept = _mm256_loadu_ps(x.as_ptr().add(j + 8 * l));
                let kept = if keep == 0.0 {
                    _mm256_setzero_ps()
                } else {
                    _mm256_fmadd_ps(keep_all, kept, _mm256_setzero_ps())
                };
                _mm256_storeu_ps(out.as_mut_ptr().add(j + 8 * l), _mm256_fmadd_ps(alpha_all, *sum, kept));
            }
        }
        j += 32;
    }
    for j in j..d {
        let sum: f32 = g.iter().enumerate().map(|(k, g)| g * shifts[k * d + j]).sum();
        out[j] = alpha * sum + keep * x[j];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::Seed;

    fn mixture(k: usize, d: usize, width: Width, seed: u64) -> Mixture {
        let normal = |name: &str, n: usize| Seed::new(seed).child(name).normal(n);
        Mixture {
            k,
            d,
            centroids: normal("centroids", k * d),
            shifts: normal("shifts", k * d),
            log_mass: vec![-(k as f64).ln(); k],
            width,
            bounds: None,
        }
    }

    fn apply(mixture: &Mixture, path: Path, x: &[f32], keep: f32, alpha: f32) -> (Vec<f32>, Vec<f32>) {
        let (mut gates, mut out) = (vec![0.0; x.len() / mixture.d * mixture.k], vec![f32::NAN; x.len()]);
        mixture.apply_on(path, x, keep, alpha, &mut gates, &mut out).unwrap();
        (gates, out)
    }

    #[test]
    fn the_wide_loops_agree_with_the_plain_ones() {
        for (k, d) in [(1, 1), (2, 31), (3, 32), (8, 33), (5, 100), (70, 64), (8, 576)] {
            for width in [Width::Median(0.25), Width::Fixed(2.0 * d as f64)] {
                let mixture = mixture(k, d, width, 3);
                let x = Seed::new(4).normal(9 * d);
                for (keep, alpha) in [(0.0, 1.0), (1.0, -2.0)] {
                    let (plain_gates, plain) = apply(&mixture, Path::Plain, &x, keep, alpha);
                    let (gates, out) = apply(&mixture, Path::best(), &x, keep, alpha);
                    for (a, b) in out.iter().zip(&plain).chain(gates.iter().zip(&plain_gates)) {
                        assert!((a - b).abs() <= 2e-5 * (1.0 + b.abs()), "{a} against {b} at K = {k}, D = {d}");
                    }
                }
            }
        }
    }

    #[test]
    fn many_rows_on_many_threads_give_what_each_row_gives_alone() {
        let mixture = mixture(8, 200, Width::Median(0.5), 5);
        let x = Seed::new(6).normal(1000 * 200);
        assert!(x.len() * mixture.k >= SERIAL_BELOW);
        let (_, all) = apply(&mixture, Path::best(), &x, 0.0, 1.0);
        for (row, want) in x.chunks(200).zip(all.chunks(200)) {
            assert_eq!(apply(&mixture, Path::best(), row, 0.0, 1.0).1, want);
        }
        // The first bad row is named, whichever thread meets it.
        let mut bad = x;
        bad[611 * 200 + 3] = f32::NAN;
        bad[900 * 200] = f32::INFINITY;
        let (mut gates, mut out) = (vec![0.0; 8000], vec![0.0; bad.len()]);
        assert_eq!(mixture.apply(&bad, 0.0, 1.0, &mut gates, &mut out), Err(611));
    }

    #[test]
    fn distances_of_rows_are_those_in_f64() {
        for (d, scale) in [(1, 1.0), (100, 1.0), (100, 1e30), (100, 1e-30), (5, 0.0)] {
            let draw = |seed| -> Vec<f32> { Seed::new(seed).normal(d).into_iter().map(|v| v * scale).collect() };
            let (x, y) = (draw(8), draw(9));
            let want = crate::data::squared_distance(&x, &y);
            assert!((row_distance(&x, &y) - want).abs() <= 1e-6 * want);
        }
    }

    #[test]
    fn the_median_is_the_lower_one() {
        assert_eq!(lower_median(&[3.0, 1.0]), 1.0);
        assert_eq!(lower_median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(lower_median(&[4.0, 3.0, 1.0, 2.0]), 2.0);
        let many: Vec<f32> = (0..101).rev().map(|v| v as f32).collect();
        assert_eq!(lower_median(&many), 50.0);
    }
}
