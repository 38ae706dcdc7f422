//! Named random streams.
//!
//! A [`Seed`] is a number from which other seeds are derived by name, so that each use of randomness has a stream of its own and two
//! runs that are compared share exactly the streams that they should:
//!
//! ```
//! use tensor::Seed;
//!
//! let run = Seed::new(7);
//! let (init, batches) = (run.child("init"), run.child("batches"));
//! assert_ne!(init, batches);                       // independent of each other,
//! assert_eq!(init, Seed::new(7).child("init"));    // and the same in every run
//! let noise = run.child("noise").normal(3);
//! assert_eq!(noise, run.child("noise").normal(3));
//! ```
//!
//! Derivation is a cryptographic hash: no choice of names or numbers makes two streams related by accident, which multiplying and
//! adding can't promise. All numbers are the same on every machine and in every version; tests pin them.

use std::fmt;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;
use rand_distr::{Distribution as _, StandardNormal};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The root of a tree of random streams.
///
/// Serialized as its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seed(u64);

/// Values per block of [`Seed::fill_normal`]: each block has its own place in the stream.
const BLOCK: usize = 4096;
/// Up to here waking the thread pool costs more than it saves, the more so while libtorch's threads still spin.
const SERIAL_BELOW: usize = 1 << 16;
/// 32-bit words of ChaCha set aside for a block. The ziggurat takes two a value and seldom a few more: a thousandth of this.
const WORDS_PER_BLOCK: u128 = 1 << 23;

impl Seed {
    /// The seed with this number.
    pub fn new(value: u64) -> Self {
        Self(value)
    }

    /// The seed called `name` below this one: the first eight bytes, little-endian, of SHA-256 over
    /// `"tessera/seed/child/1"`, the eight bytes of this seed and the name.
    #[must_use]
    pub fn child(self, name: &str) -> Self {
        Self(first_word(self.hash("child", name.as_bytes())))
    }

    /// The seed number `i` below this one, for members of a series; as [`child`](Self::child) with `"index"` and the eight bytes of `i`.
    #[must_use]
    pub fn index(self, i: u64) -> Self {
        Self(first_word(self.hash("index", &i.to_le_bytes())))
    }

    /// The seed's number.
    pub fn value(self) -> u64 {
        self.0
    }

    /// A generator at the start of the seed's stream: ChaCha8, whose key is the hash of the seed.
    pub fn rng(self) -> ChaCha8Rng {
        ChaCha8Rng::from_seed(self.hash("rng", &[]))
    }

    /// A seed for libtorch's global generator, not negative.
    ///
    /// It is a hash of the number, because libtorch's CPU generator looks only at the lower 32 bits.
    pub fn torch_seed(self) -> i64 {
        (first_word(self.hash("torch", &[])) >> 1) as i64
    }

    /// `n` standard normal numbers, those of [`fill_normal`](Self::fill_normal) with stream 0.
    pub fn normal(self, n: usize) -> Vec<f32> {
        let mut values = vec![0.0; n];
        self.fill_normal(&mut values, 0);
        values
    }

    /// Fills `out` with standard normal numbers of the stream number `stream`.
    ///
    /// Runs on rayon's threads; the numbers don't depend on how many there are.
    pub fn fill_normal(self, out: &mut [f32], stream: u64) {
        self.fill_normal_from(out, stream, 0);
    }

    /// Fills `out` with the numbers from position `start` of the stream number `stream`.
    ///
    /// Position `i` of a stream holds the same number however it is asked for, so noise can be made again, piece by piece and in any
    /// order, instead of being kept. A start that is a multiple of 4096 wastes nothing.
    pub fn fill_normal_from(self, out: &mut [f32], stream: u64, start: u64) {
        let mut rng = ChaCha8Rng::from_seed(self.hash("normal", &[]));
        rng.set_stream(stream);
        let (first, skip) = (start / BLOCK as u64, (start % BLOCK as u64) as usize);
        let (head, rest) = out.split_at_mut(out.len().min((BLOCK - skip) % BLOCK));
        if !head.is_empty() {
            fill_block(&rng, first, skip, head);
        }
        let first = first + u64::from(skip > 0);
        if rest.len() <= SERIAL_BELOW {
            rest.chunks_mut(BLOCK).enumerate().for_each(|(i, chunk)| fill_block(&rng, first + i as u64, 0, chunk));
        } else {
            rest.par_chunks_mut(BLOCK).enumerate().for_each(|(i, chunk)| fill_block(&rng, first + i as u64, 0, chunk));
        }
    }

    fn hash(self, use_of_it: &str, more: &[u8]) -> [u8; 32] {
        Sha256::new()
            .chain_update("tessera/seed/")
            .chain_update(use_of_it)
            .chain_update("/1")
            .chain_update(self.0.to_le_bytes())
            .chain_update(more)
            .finalize()
            .into()
    }
}

/// Values `skip..` of the block number `block`.
fn fill_block(rng: &ChaCha8Rng, block: u64, skip: usize, out: &mut [f32]) {
    let mut rng = rng.clone();
    // ChaCha's position has 68 bits: blocks repeat after 2^45, which is 2^57 values.
    rng.set_word_pos(u128::from(block) * WORDS_PER_BLOCK);
    for _ in 0..skip {
        let _: f32 = StandardNormal.sample(&mut rng);
    }
    for value in out {
        *value = StandardNormal.sample(&mut rng);
    }
}

fn first_word(hash: [u8; 32]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = hash;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

impl From<u64> for Seed {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand_chacha::rand_core::RngCore as _;

    #[test]
    fn the_streams_never_change() {
        // From an independent implementation of SHA-256 and ChaCha8 in Python.
        let seed = Seed::new(7);
        assert_eq!(seed.child("init").value(), 6739783861078834457);
        assert_eq!(seed.child("").value(), 9401455030120669333);
        assert_eq!(seed.index(3).value(), 15713583760241799055);
        assert_eq!(seed.torch_seed(), 7229884677302150989);
        assert_eq!(seed.rng().next_u64(), 17250781168908007862);
        // Recorded: the ziggurat of rand_distr on those words.
        let normal = seed.normal(5000);
        assert_eq!(normal[..4], [-0.6398911, -1.2227231, 0.5029363, -1.6115685]);
        assert_eq!(normal[4096..4100], [-0.23417345, -1.1565512, 0.25942594, -1.7275517]);
    }

    #[test]
    fn names_numbers_and_uses_give_different_streams() {
        let seed = Seed::new(1);
        let mut all = vec![
            seed.value(),
            seed.child("a").value(),
            seed.child("b").value(),
            seed.child("a").child("b").value(),
            seed.child("ab").value(),
            seed.index(0).value(),
            seed.index(1).value(),
            Seed::new(2).child("a").value(),
            Seed::new(2).index(0).value(),
            seed.torch_seed() as u64,
            seed.rng().next_u64(),
        ];
        let n = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), n);
    }

    #[test]
    fn the_numbers_are_standard_normal() {
        let n = 1 << 20;
        let values = Seed::new(3).normal(n);
        let moment = |k: i32| values.iter().map(|&v| f64::from(v).powi(k)).sum::<f64>() / n as f64;
        // Five standard errors of each moment: sqrt(1, 2, 15, 96 / n).
        for (k, expected, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let error = (moment(k) - expected).abs();
            assert!(error < 5.0 * (variance / n as f64).sqrt(), "moment {k} is off by {error}");
        }
        let far = values.iter().filter(|v| v.abs() > 1.959964).count() as f64 / n as f64;
        assert!((far - 0.05).abs() < 0.0011, "{far}");
    }

    #[test]
    fn streams_of_one_seed_are_not_correlated() {
        let n = 1 << 18;
        let (mut a, mut b) = (vec![0.0; n], vec![0.0; n]);
        Seed::new(3).fill_normal(&mut a, 0);
        Seed::new(3).fill_normal(&mut b, 1);
        let correlation =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>() / a.len() as f64;
        // Five standard errors, 1/sqrt(n); the second: one block against the next.
        assert!(correlation(&a, &b).abs() < 0.01);
        assert!(correlation(&a[..n - BLOCK], &a[BLOCK..]).abs() < 0.01);
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| Seed::new(9).normal(100_000))
        };
        assert_eq!(with(1), with(3));
    }

    #[test]
    fn a_seed_is_written_as_its_number() {
        let seed = Seed::new(u64::MAX);
        assert_eq!(seed.to_string(), "18446744073709551615");
        let json = serde_json::to_string(&seed).unwrap();
        assert_eq!(json, "18446744073709551615");
        assert_eq!(serde_json::from_str::<Seed>(&json).unwrap(), seed);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_piece_is_the_same_however_it_is_asked_for(start in 0usize..10_000, len in 0usize..10_000, stream: u64) {
            let seed = Seed::new(5);
            let mut whole = vec![0.0; start + len];
            seed.fill_normal(&mut whole, stream);
            let mut piece = vec![0.0; len];
            seed.fill_normal_from(&mut piece, stream, start as u64);
            prop_assert_eq!(&whole[start..], &piece[..]);
        }
    }
}
