//! Fashion-MNIST: 70,000 articles of clothing, 28×28, from the Debian package `dataset-fashion-mnist`.
//!
//! H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017. MIT (Zalando SE).

use std::path::Path;

use ndarray::Array3;

use crate::cache::{read_verified, set_dir};
use crate::catalog::catalog;
use crate::idx::Idx;
use crate::{Error, Images, Result};

/// Name of the set.
pub const NAME: &str = "fashion-mnist";
/// Height and width of an image.
pub const SIDE: usize = 28;
/// The classes, in the order of their numbers.
pub const CLASSES: [&str; 10] =
    ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"];

/// The two parts that the authors made.
#[derive(Debug, Clone, PartialEq)]
pub struct Fashion {
    /// 60,000 images.
    pub train: Images,
    /// 10,000 images.
    pub test: Images,
}

/// Both parts from the cache.
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if a file is damaged.
pub fn load() -> Result<Fashion> {
    load_from(&set_dir(NAME)?)
}

/// As [`load`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn load_from(dir: &Path) -> Result<Fashion> {
    Ok(Fashion { train: part("train", 60_000, dir)?, test: part("t10k", 10_000, dir)? })
}

fn part(prefix: &str, n: usize, dir: &Path) -> Result<Images> {
    let pixels = bytes(&format!("{prefix}-images-idx3-ubyte.gz"), &[n, SIDE, SIDE], dir)?;
    let y = bytes(&format!("{prefix}-labels-idx1-ubyte.gz"), &[n], dir)?;
    let pixels =
        Array3::from_shape_vec((n, SIDE, SIDE), pixels).map_err(|e| Error::malformed(prefix, e.to_string()))?;
    Images::new(pixels, y, u8::MAX, CLASSES.len())
}

fn bytes(name: &str, dims: &[usize], dir: &Path) -> Result<Vec<u8>> {
    let packed = read_verified(catalog().set(NAME)?, name, dir)?;
    let most = dims.iter().product::<usize>() as u64;
    Idx::read_gzip(name, packed.as_slice(), most)?.into_u8(name, dims)
}
