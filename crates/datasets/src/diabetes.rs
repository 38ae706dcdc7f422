//! Diabetes: 442 patients with ten measurements and the progression of the disease after a year, compiled into the crate.
//!
//! B. Efron, T. Hastie, I. Johnstone, R. Tibshirani, "Least Angle Regression", 2004. The authors stated no licence; scikit-learn
//! distributes the data in its BSD-licensed package, see `data/LICENSE-diabetes.md`. The same rows in the same order as scikit-learn's
//! `load_diabetes(scaled=False)`.

use ndarray::{Array1, Array2};

/// Number of patients.
pub const LEN: usize = 442;
/// Names of the measurements, in the order of the columns.
pub const FEATURES: [&str; 10] = ["age", "sex", "bmi", "bp", "tc", "ldl", "hdl", "tch", "ltg", "glu"];

static CSV: &str = include_str!("../data/diabetes.csv");

/// Rows of measurements with a number each.
#[derive(Debug, Clone, PartialEq)]
pub struct Diabetes {
    /// Measurements in their own units, `[442, 10]`.
    pub x: Array2<f64>,
    /// Progression one year later, 25 to 346, `[442]`.
    pub y: Array1<f64>,
}

/// All patients.
#[expect(clippy::missing_panics_doc, reason = "the file is compiled in and its hash is tested")]
pub fn load() -> Diabetes {
    let mut x = Vec::with_capacity(LEN * FEATURES.len());
    let mut y = Vec::with_capacity(LEN);
    for line in CSV.lines().skip(1) {
        let (row, progression) = line.rsplit_once(',').expect(INVARIANT);
        x.extend(row.split(',').map(number));
        y.push(number(progression));
    }
    let x = Array2::from_shape_vec((LEN, FEATURES.len()), x).expect(INVARIANT);
    Diabetes { x, y: Array1::from_vec(y) }
}

fn number(text: &str) -> f64 {
    text.parse().expect(INVARIANT)
}

/// The file is compiled in, and the tests pin its hash and its content.
const INVARIANT: &str = "diabetes.csv has 442 lines of eleven numbers";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::sha256_hex;

    #[test]
    fn the_file_is_the_one_that_was_checked() {
        assert_eq!(sha256_hex(CSV.as_bytes()), "bce8d5e171f5965c62edb929e2d5d7fd8332d0e647b1c3aad9192cfda29134b1");
    }

    #[test]
    fn the_columns_are_named_in_the_file() {
        assert_eq!(CSV.lines().next(), Some(format!("{},progression", FEATURES.join(",")).as_str()));
    }
}
