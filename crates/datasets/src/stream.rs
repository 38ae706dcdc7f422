//! Named random streams, so that two uses of one seed never share numbers.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng as _};
use sha2::{Digest as _, Sha256};

/// The stream called `name` of `seed`: ChaCha8 whose key is SHA-256 of `"tessera/datasets/stream/1"`, the eight bytes of the seed
/// (little-endian) and the name.
///
/// The same seed and name give the same numbers on every machine and in every version; a test pins them.
pub fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let key = Sha256::new()
        .chain_update(b"tessera/datasets/stream/1")
        .chain_update(seed.to_le_bytes())
        .chain_update(name)
        .finalize();
    ChaCha8Rng::from_seed(key.into())
}

/// A uniform number in `0..n`, by rejection, so that no number is more likely than another.
///
/// Written here and not taken from `rand`, whose algorithms may change between versions and with them every split.
///
/// # Panics
/// If `n` is 0: there is no such number.
pub(crate) fn below(rng: &mut impl RngCore, n: u64) -> u64 {
    assert!(n > 0, "`below` needs at least one number to choose from");
    let biased = n.wrapping_neg() % n; // 2^64 mod n
    loop {
        let wide = u128::from(rng.next_u64()) * u128::from(n);
        if wide as u64 >= biased {
            return (wide >> 64) as u64;
        }
    }
}

/// Fisher-Yates.
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut impl RngCore) {
    for i in (1..items.len()).rev() {
        items.swap(i, below(rng, i as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_streams_never_change() {
        // Computed by an independent implementation of SHA-256 and ChaCha8 in Python.
        assert_eq!(stream(0, "").next_u64(), 3560941442363420758);
        assert_eq!(stream(7, "split").next_u64(), 8621998324932249191);
        let mut order: Vec<u8> = (0..10).collect();
        shuffle(&mut order, &mut stream(7, "shuffle"));
        assert_eq!(order, [7, 9, 1, 3, 5, 2, 6, 4, 0, 8]);
    }

    #[test]
    fn names_and_seeds_give_different_streams() {
        let first = |seed, name| stream(seed, name).next_u64();
        assert_ne!(first(1, "a"), first(1, "b"));
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_eq!(first(1, "a"), first(1, "a"));
    }

    #[test]
    fn every_order_of_three_is_equally_likely() {
        let mut rng = stream(3, "orders");
        let mut counts = std::collections::BTreeMap::new();
        for _ in 0..6000 {
            let mut order = [0, 1, 2];
            shuffle(&mut order, &mut rng);
            *counts.entry(order).or_insert(0u32) += 1;
        }
        // 1000 expected, standard deviation 29: five of them on each side.
        assert!(counts.len() == 6 && counts.values().all(|c| (855..=1145).contains(c)), "{counts:?}");
    }
}
