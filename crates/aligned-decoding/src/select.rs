//! The kernel: which tokens are plausible, and which of them preference training raised the most.
//!
//! Everything works on raw logits. Normalizers are the same for all tokens, so they change neither
//! V_α = { v : z_d(v) ≥ max z_d + ln α } nor the arg-max of z_d − z_r (\[derived\]); [`select_by_log_softmax`] is the rule as
//! the paper writes it, and a test says that both agree.
//!
//! Numbers: logits come as f32 (convert bf16 and f16 first), differences are taken in f64, where they are exact or nearly so.
//! −∞ in z_d forbids a token. Of equal advantages (up to [`TIE`]) the higher z_d wins, then the lower id (the paper is silent).
//! −∞ in z_r under a finite z_d would be an infinite advantage: it counts as `ratio_clip` nats above the policy's own
//! favourite, as does every larger one, and is counted. NaN and +∞ are errors.

use crate::{Error, Result, error::Side};
use tensor::ndarray::ArrayView1;

/// A token that may be chosen, with its logit under the policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token: its place in the logits.
    pub id: u32,
    /// z_d.
    pub z: f32,
}

/// What was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The token: its place in the logits.
    pub token: u32,
    /// The policy's own favourite, what greedy decoding would take.
    pub top: u32,
    /// Number of candidates, |V_α|.
    pub candidates: usize,
    /// Advantage of the token above that of `top`, in nats, at most the clip; 0 where the rule had no need of the reference.
    pub gain: f64,
    /// Candidates whose advantage was clipped.
    pub clipped: usize,
}

/// Nats above the favourite's advantage at which advantages are cut off, by default.
pub const RATIO_CLIP: f64 = 30.0;

/// # Errors
/// [`Error::BadAlpha`] unless α is in \[0, 1\].
pub fn check_alpha(alpha: f64) -> Result<()> {
    if (0.0..=1.0).contains(&alpha) { Ok(()) } else { Err(Error::BadAlpha(alpha)) }
}

/// Values that are looked at together before any of them is compared with the floor.
const BLOCK: usize = 64;
const LANES: usize = 16;

/// The largest of a block, and whether it has a NaN. Written by lanes, so that the compiler can use wide registers.
fn block_max(values: &[f32]) -> (f32, bool) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            let value = chunk[lane];
            largest[lane] = if value > largest[lane] { value } else { largest[lane] };
            nan[lane] |= value.is_nan();
        }
    }
    for (lane, &value) in chunks.remainder().iter().enumerate() {
        largest[lane] = if value > largest[lane] { value } else { largest[lane] };
        nan[lane] |= value.is_nan();
    }
    (largest.into_iter().fold(f32::NEG_INFINITY, f32::max), nan.contains(&true))
}

/// V_α of the logits `z`, by rising id, into `out` (which is cleared), and the favourite: one scan with a running maximum.
/// Candidates that a later maximum rules out are swept when the buffer has doubled, so that it stays small; once the buffer
/// has grown, nothing is allocated.
///
/// # Errors
/// [`Error::BadAlpha`]; [`Error::NonFiniteLogits`] for NaN or +∞; [`Error::NothingAllowed`] if all are −∞.
pub fn plausible(z: &[f32], alpha: f64, out: &mut Vec<Candidate>) -> Result<Candidate> {
    check_alpha(alpha)?;
    out.clear();
    let room = alpha.ln(); // −∞ for α = 0
    let mut top = Candidate { id: 0, z: f32::NEG_INFINITY };
    let mut floor = f64::NEG_INFINITY;
    let mut sweep_at = BLOCK;
    for (number, block) in z.chunks(BLOCK).enumerate() {
        let (largest, nan) = block_max(block);
        if nan || largest == f32::INFINITY {
            return Err(first_bad(z, Side::Policy));
        }
        if f64::from(largest) < floor {
            continue;
        }
        for (i, &z) in block.iter().enumerate() {
            if f64::from(z) >= floor && z > f32::NEG_INFINITY {
                let candidate = Candidate { id: (number * BLOCK + i) as u32, z };
                out.push(candidate);
                if z > top.z {
                    top = candidate;
                    floor = f64::from(z) + room;
                }
            }
        }
        if out.len() >= sweep_at {
            out.retain(|c| f64::from(c.z) >= floor);
            sweep_at = (2 * out.len()).max(BLOCK);
        }
    }
    out.retain(|c| f64::from(c.z) >= floor);
    if out.is_empty() { Err(Error::NothingAllowed { step: 0, row: 0 }) } else { Ok(top) }
}

/// As [`plausible`], plainly: the maximum first, then a second pass. The scan is tested against it.
///
/// # Errors
/// As [`plausible`].
pub fn plausible_two_pass(z: &[f32], alpha: f64, out: &mut Vec<Candidate>) -> Result<Candidate> {
    check_alpha(alpha)?;
    out.clear();
    if z.iter().any(|z| z.is_nan() || *z == f32::INFINITY) {
        return Err(first_bad(z, Side::Policy));
    }
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let floor = f64::from(max) + alpha.ln();
    let kept = z.iter().enumerate().filter(|(_, z)| **z > f32::NEG_INFINITY && f64::from(**z) >= floor);
    out.extend(kept.map(|(id, &z)| Candidate { id: id as u32, z }));
    out.iter().find(|c| c.z == max).copied().ok_or(Error::NothingAllowed { step: 0, row: 0 })
}

fn first_bad(z: &[f32], model: Side) -> Error {
    let at = z.iter().position(|z| z.is_nan() || *z == f32::INFINITY).unwrap_or(0);
    Error::non_finite(model, at as u32, z[at])
}

/// Advantages z_d − z_r of candidates, less that of the favourite (the candidate with the highest z_d whose z_r is finite),
/// at most `clip`, into `out`. Returns how many were clipped. Constants added to either model's logits cancel.
///
/// # Errors
/// [`Error::NonFiniteLogits`] for NaN or +∞ in z_r.
pub(crate) fn advantages(
    candidates: &[Candidate],
    z_ref: impl Fn(usize) -> f32,
    clip: f64,
    out: &mut Vec<f64>,
) -> Result<usize> {
    out.clear();
    // (z_d, raw advantage) of the favourite with a finite z_r.
    let mut base: Option<(f32, f64)> = None;
    for (i, candidate) in candidates.iter().enumerate() {
        let z = z_ref(i);
        if z.is_nan() || z == f32::INFINITY {
            return Err(Error::non_finite(Side::Reference, candidate.id, z));
        }
        let raw = f64::from(candidate.z) - f64::from(z); // +∞ where z_r is −∞
        if raw.is_finite() && base.is_none_or(|(best, _)| candidate.z > best) {
            base = Some((candidate.z, raw));
        }
        out.push(raw);
    }
    let base = base.map_or(0.0, |(_, raw)| raw);
    let mut clipped = 0;
    for advantage in out.iter_mut() {
        *advantage -= base;
        if *advantage > clip || advantage.is_infinite() {
            *advantage = clip;
            clipped += 1;
        }
    }
    Ok(clipped)
}

/// Advantages that differ by less than this, in nats, are equal: it is above the rounding of f32 logits that come from passes of other
/// shapes, so that two equal models decode greedily however they are run \[ours\].
pub const TIE: f64 = 1e-4;

/// The place with the highest advantage, up to [`TIE`]; of equal ones the higher z_d, then the lower id.
pub(crate) fn best_advantage(candidates: &[Candidate], gains: &[f64]) -> usize {
    let floor = gains.iter().copied().fold(f64::NEG_INFINITY, f64::max) - TIE;
    let mut best: Option<usize> = None;
    for (i, candidate) in candidates.iter().enumerate() {
        if gains[i] >= floor && best.is_none_or(|b| candidate.z > candidates[b].z) {
            best = Some(i);
        }
    }
    best.unwrap_or(0)
}

/// The place with the highest score; of equal ones the higher z_d, then the lower id. Candidates come by rising id.
pub(crate) fn best(candidates: &[Candidate], scores: impl Fn(usize) -> f64) -> usize {
    let mut best = 0;
    for i in 1..candidates.len() {
        let (new, old) = (scores(i), scores(best));
        if new > old || (new == old && candidates[i].z > candidates[best].z) {
            best = i;
        }
    }
    best
}

/// The kernel with the memory that it uses again from step to step.
///
/// ```
/// use aligned_decoding::select::{RATIO_CLIP, Selector};
///
/// let (policy, reference) = ([2.0f32, 1.9, 0.5, -9.0], [2.5f32, 1.0, 0.5, -20.0]);
/// let choice = Selector::default().select(&policy, |v| reference[v as usize], 0.1, RATIO_CLIP)?;
/// // Token 3 has the largest ratio, but isn't plausible; of 0, 1 and 2 training raised 1 the most.
/// assert_eq!((choice.token, choice.top, choice.candidates), (1, 0, 3));
/// # Ok::<(), aligned_decoding::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Selector {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) advantages: Vec<f64>,
}

impl Selector {
    /// The step of alignment-aware decoding \[paper\]: arg-max of z_d − z_r over V_α. `z_ref` is asked for the candidates only, once
    /// each.
    ///
    /// # Errors
    /// As [`plausible`]; [`Error::NonFiniteLogits`] for NaN or +∞ in z_r.
    pub fn select(
        &mut self,
        z_policy: &[f32],
        z_ref: impl Fn(u32) -> f32,
        alpha: f64,
        ratio_clip: f64,
    ) -> Result<Choice> {
        let top = plausible(z_policy, alpha, &mut self.candidates)?;
        let Self { candidates, advantages: gains } = self;
        let clipped = advantages(candidates, |i| z_ref(candidates[i].id), ratio_clip, gains)?;
        let chosen = best_advantage(candidates, gains);
        let favourite = candidates.iter().position(|c| c.id == top.id).map_or(0.0, |i| gains[i]);
        Ok(Choice {
            token: candidates[chosen].id,
            top: top.id,
            candidates: candidates.len(),
            gain: gains[chosen] - favourite,
            clipped,
        })
    }

    /// The candidates of the last step, by rising id.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }
}

/// [`Selector::select`] once, with the default clip.
///
/// # Errors
/// As [`Selector::select`].
pub fn select(z_policy: &[f32], z_ref: impl Fn(u32) -> f32, alpha: f64) -> Result<Choice> {
    Selector::default().select(z_policy, z_ref, alpha, RATIO_CLIP)
}

/// As [`select`], on arrays.
///
/// # Errors
/// As [`select`]; [`Error::InvalidArgument`] for arrays of different lengths.
#[allow(clippy::needless_pass_by_value)] // views are passed so
pub fn select_array(z_policy: ArrayView1<'_, f32>, z_ref: ArrayView1<'_, f32>, alpha: f64) -> Result<Choice> {
    same_length(z_policy.len(), z_ref.len())?;
    match z_policy.as_slice() {
        Some(z) => select(z, |v| z_ref[v as usize], alpha),
        None => select(&z_policy.to_vec(), |v| z_ref[v as usize], alpha),
    }
}

pub(crate) fn same_length(policy: usize, reference: usize) -> Result<()> {
    if policy == reference {
        return Ok(());
    }
    Err(Error::invalid("z_ref", format!("as long as z_policy, {policy}"), reference))
}

/// The rule as the paper writes it, on probabilities: { v : π_d(v) ≥ α max π_d }, then the arg-max of log π_d − log π_r. Slow and
/// plain, for tests.
///
/// # Errors
/// As [`select`]; [`Error::InvalidArgument`] for slices of different lengths.
pub fn select_by_log_softmax(z_policy: &[f32], z_ref: &[f32], alpha: f64) -> Result<Choice> {
    check_alpha(alpha)?;
    same_length(z_policy.len(), z_ref.len())?;
    for (z, model) in [(z_policy, Side::Policy), (z_ref, Side::Reference)] {
        if z.iter().any(|z| z.is_nan() || *z == f32::INFINITY) {
            return Err(first_bad(z, model));
        }
    }
    let (policy, reference) = (log_softmax(z_policy), log_softmax(z_ref));
    let max = policy.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY || max.is_nan() {
        return Err(Error::NothingAllowed { step: 0, row: 0 });
    }
    let top = policy.iter().position(|&l| l == max).unwrap_or(0);
    let allowed: Vec<usize> =
        (0..policy.len()).filter(|&v| policy[v] > f64::NEG_INFINITY && policy[v] >= max + alpha.ln()).collect();
    let advantage = |v: usize| (policy[v] - reference[v]).min(policy[top] - reference[top] + RATIO_CLIP);
    let floor = allowed.iter().map(|&v| advantage(v)).fold(f64::NEG_INFINITY, f64::max) - TIE;
    let mut chosen = None::<usize>;
    for &v in allowed.iter().filter(|v| advantage(**v) >= floor) {
        if chosen.is_none_or(|old| policy[v] > policy[old]) {
            chosen = Some(v);
        }
    }
    let chosen = chosen.unwrap_or(top);
    let clipped = allowed.iter().filter(|v| reference[**v] == f64::NEG_INFINITY).count();
    let gain = advantage(chosen) - advantage(top);
    Ok(Choice { token: chosen as u32, top: top as u32, candidates: allowed.len(), gain, clipped })
}

/// Log-probabilities of logits, in nats; −∞ stays −∞.
pub fn log_softmax(z: &[f32]) -> Vec<f64> {
    let normalizer = log_sum_exp(z);
    z.iter().map(|&z| f64::from(z) - normalizer).collect()
}

/// ln Σ exp z; −∞ for nothing.
pub fn log_sum_exp(z: &[f32]) -> f64 {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    f64::from(max) + z.iter().map(|&z| (f64::from(z) - f64::from(max)).exp()).sum::<f64>().ln()
}
