//! Optical digits: 1,797 digits of 8×8 with grey values 0 to 16, compiled into the crate.
//!
//! The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998),
//! CC BY 4.0; see `data/LICENSE-optdigits.md`. The same rows in the same order as scikit-learn's `load_digits`.

use ndarray::Array3;

use crate::Images;

/// Number of digits.
pub const LEN: usize = 1797;
/// Height and width of a digit.
pub const SIDE: usize = 8;
/// The largest grey value.
pub const MAX: u8 = 16;

static CSV: &str = include_str!("../data/optdigits.csv");

/// All digits, `[1797, 8, 8]`.
#[expect(clippy::missing_panics_doc, reason = "the file is compiled in and its hash is tested")]
pub fn load() -> Images {
    let mut pixels = Vec::with_capacity(LEN * SIDE * SIDE);
    let mut y = Vec::with_capacity(LEN);
    for line in CSV.lines().skip(1) {
        let (image, class) = line.rsplit_once(',').expect(INVARIANT);
        pixels.extend(image.split(',').map(number));
        y.push(number(class));
    }
    let pixels = Array3::from_shape_vec((LEN, SIDE, SIDE), pixels).expect(INVARIANT);
    Images::new(pixels, y, MAX, 10).expect(INVARIANT)
}

fn number(text: &str) -> u8 {
    text.parse().expect(INVARIANT)
}

/// The file is compiled in, and the tests pin its hash and its content.
const INVARIANT: &str = "optdigits.csv has 1,797 lines of 64 grey values up to 16 and a class";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::sha256_hex;

    #[test]
    fn the_file_is_the_one_that_was_checked() {
        assert_eq!(sha256_hex(CSV.as_bytes()), "d7ff1341011182b7af3733b201a919cea2ffe00f25ff23ba48c5e791daffb498");
    }
}
