//! Digits from several sources, for work on generalization to a source that wasn't trained on.
//!
//! - [`handwriting3`]: three real collections that differ in country, writers and scanner, all made 8×8
//! - [`rotated_mnist`]: six parts of MNIST, each turned by another angle, 14×14
//! - [`leave_one_out`]: one domain to test on, parts of the others to train and to choose on

use std::path::Path;

use ndarray::{Array2, Array3, Axis};

use crate::labeled::rows;
use crate::stream::stream;
use crate::{Error, Images, Result, cache, image, mfeat, mnist10k, optdigits, split};

/// One source of data.
#[derive(Debug, Clone, PartialEq)]
pub struct Domain {
    /// What it is called.
    pub name: String,
    /// Features in `[0, 1]`, `[n, features]`.
    pub x: Array2<f32>,
    /// Classes, `n` numbers below 10.
    pub y: Vec<u8>,
}

/// Which rows of which domain are for what.
#[derive(Debug, Clone, PartialEq)]
pub struct LeaveOneOut {
    /// Rows to train on, one entry a source domain.
    pub train: Vec<Domain>,
    /// Rows to choose hyper-parameters on, one entry a source domain, in the same order.
    pub validation: Vec<Domain>,
    /// All rows of the domain that was held out.
    pub test: Domain,
}

impl Domain {
    /// The rows at `indices`, in that order.
    ///
    /// # Panics
    /// If an index is out of range, as with an array.
    #[must_use]
    pub fn select(&self, indices: &[usize]) -> Self {
        Self {
            name: self.name.clone(),
            x: self.x.select(Axis(0), indices),
            y: indices.iter().map(|&i| self.y[i]).collect(),
        }
    }
}

/// Handwriting-3: the domains `mnist` (10,000), `optdigits` (1,797) and `mfeat` (2,000), each `[n, 64]` in `[0, 1]`.
///
/// MNIST: the central 20×20, area-resampled to 16×16, pooled to 8×8. Optdigits: as it is. Mfeat: the pixel view of 16×15, one column
/// padded on the right, pooled to 8×8. Logistic regression gets 0.88 to 0.97 within a domain and 0.25 to 0.52 across: the shift is real.
///
/// # Errors
/// As [`mnist10k::load`] and [`mfeat::load`].
pub fn handwriting3() -> Result<Vec<Domain>> {
    handwriting3_from(&cache::data_dir()?)
}

/// As [`handwriting3`], with the sets in the folders `mnist-10k` and `mfeat` of `data`.
///
/// # Errors
/// As [`handwriting3`].
pub fn handwriting3_from(data: &Path) -> Result<Vec<Domain>> {
    let mnist = mnist10k::load_from(&data.join(mnist10k::NAME))?;
    let mfeat = mfeat::pixels_from(&data.join(mfeat::NAME))?;
    let optdigits = optdigits::load();

    let small = image::central_crop(&mnist.normalized(), 20, 20)?;
    let small = image::average_pool(&image::area_resample(&small, 16, 16)?, 2, 2)?;
    let wide = image::pad_column(&mfeat.normalized()); // [2000, 16, 16]
    Ok(vec![
        domain("mnist", small, mnist.y),
        domain("optdigits", optdigits.normalized(), optdigits.y),
        domain("mfeat", image::average_pool(&wide, 2, 2)?, mfeat.y),
    ])
}

/// The angles of [`rotated_mnist`] in degrees, counter-clockwise.
pub const ANGLES: [u32; 6] = [0, 15, 30, 45, 60, 75];
/// Number of digits in each domain of [`rotated_mnist`].
pub const ROTATED_LEN: usize = 1000;

/// Rotated MNIST: the domains `0°`, `15°`, ... `75°`, each 1,000 digits `[1000, 196]` in `[0, 1]`; no digit is in two domains.
///
/// The seed chooses the digits; the classes have the proportions of the whole set. Turned at 28×28 with bilinear interpolation, then
/// pooled to 14×14.
///
/// # Errors
/// As [`mnist10k::load`].
pub fn rotated_mnist(seed: u64) -> Result<Vec<Domain>> {
    rotated_mnist_from(&cache::data_dir()?, seed)
}

/// As [`rotated_mnist`], with the set in the folder `mnist-10k` of `data`.
///
/// # Errors
/// As [`rotated_mnist`].
pub fn rotated_mnist_from(data: &Path, seed: u64) -> Result<Vec<Domain>> {
    let mnist = mnist10k::load_from(&data.join(mnist10k::NAME))?;
    rotate_parts(&mnist, ROTATED_LEN, seed)
}

fn rotate_parts(images: &Images, len: usize, seed: u64) -> Result<Vec<Domain>> {
    let order = split::stratified_order(&images.y, seed);
    let parts = order.chunks_exact(len).zip(ANGLES);
    parts
        .map(|(part, angle)| {
            let part = images.select(part);
            let turned = image::rotate(&part.normalized(), f64::from(angle))?;
            let pooled = image::average_pool(&turned, 2, 2)?;
            Ok(domain(&format!("{angle}°"), pooled, part.y))
        })
        .collect()
}

fn domain(name: &str, images: Array3<f32>, y: Vec<u8>) -> Domain {
    Domain { name: name.to_owned(), x: rows(images), y }
}

/// Holds out one domain: all its rows are the test, and at most `cap` rows of each other domain are cut into train and validation.
///
/// The protocols of Tessera take `cap` = 1,200 and `validation` = 0.2. Parts are stratified. A source's part depends only on its own
/// name and the seed, so that it is the same whichever domain is held out.
///
/// # Errors
/// [`Error::BadArgument`] if there is no domain number `held_out`, if it is the only one, or if `validation` isn't from 0 to 1.
pub fn leave_one_out(
    domains: &[Domain],
    held_out: usize,
    cap: usize,
    validation: f64,
    seed: u64,
) -> Result<LeaveOneOut> {
    let Some(test) = domains.get(held_out) else {
        let problem = format!("there is no domain {held_out} among {}", domains.len());
        return Err(Error::argument("held_out", problem));
    };
    if domains.len() < 2 {
        let problem = format!("`{}` is the only domain, none is left to train on", test.name);
        return Err(Error::argument("domains", problem));
    }
    if !(0.0..=1.0).contains(&validation) {
        let problem = format!("a fraction from 0 to 1 was expected, but {validation} came");
        return Err(Error::argument("validation", problem));
    }
    let (mut train, mut held) = (Vec::new(), Vec::new());
    for (i, domain) in domains.iter().enumerate() {
        if i == held_out {
            continue;
        }
        let own_seed = rand_chacha::rand_core::RngCore::next_u64(&mut stream(seed, &domain.name));
        let rows = split::subsample(&domain.y, cap, own_seed);
        let first = rows.len() - (rows.len() as f64 * validation).round() as usize;
        train.push(domain.select(&rows[..first]));
        held.push(domain.select(&rows[first..]));
    }
    Ok(LeaveOneOut { train, validation: held, test: test.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toy(name: &str, n: usize) -> Domain {
        Domain {
            name: name.to_owned(),
            x: Array2::from_shape_fn((n, 1), |(i, _)| i as f32),
            y: (0..n).map(|i| (i % 10) as u8).collect(),
        }
    }

    #[test]
    fn the_held_out_domain_is_the_test_and_nothing_else() {
        let domains = [toy("a", 100), toy("b", 50), toy("c", 30)];
        let parts = leave_one_out(&domains, 1, 40, 0.2, 7).unwrap();
        assert_eq!(parts.test, domains[1]);
        let sizes = |part: &[Domain]| part.iter().map(|d| (d.name.clone(), d.y.len())).collect::<Vec<_>>();
        assert_eq!(sizes(&parts.train), [("a".to_owned(), 32), ("c".to_owned(), 24)]);
        assert_eq!(sizes(&parts.validation), [("a".to_owned(), 8), ("c".to_owned(), 6)]);
        for (train, validation) in parts.train.iter().zip(&parts.validation) {
            for row in &validation.x {
                assert!(!train.x.iter().any(|r| r == row), "a row is in both parts");
            }
        }
    }

    #[test]
    fn a_source_has_the_same_parts_whichever_domain_is_held_out() {
        let domains = [toy("a", 100), toy("b", 100), toy("c", 100)];
        let one = leave_one_out(&domains, 1, 40, 0.2, 7).unwrap();
        let other = leave_one_out(&domains, 2, 40, 0.2, 7).unwrap();
        assert_eq!(one.train[0], other.train[0]);
        assert_ne!(one.train[0].x, one.train[1].x, "two domains must not share their choice");
        let reseeded = leave_one_out(&domains, 1, 40, 0.2, 8).unwrap();
        assert_ne!(one.train[0], reseeded.train[0]);
    }

    #[test]
    fn bad_arguments_are_named() {
        let domains = [toy("a", 10), toy("b", 10)];
        for (result, name) in [
            (leave_one_out(&domains, 2, 5, 0.2, 0), "`held_out`"),
            (leave_one_out(&domains[..1], 0, 5, 0.2, 0), "`domains`"),
            (leave_one_out(&domains, 0, 5, f64::NAN, 0), "`validation`"),
        ] {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with(name), "{message}");
        }
    }

    #[test]
    fn the_domains_of_rotated_digits_share_no_digit() {
        // Image i is filled with the value i + 1, which no turn changes in the middle.
        let pixels = Array3::from_shape_fn((66, 8, 8), |(i, _, _)| i as u8 + 1);
        let images = Images::new(pixels, vec![0; 66], 255, 10).unwrap();
        let domains = rotate_parts(&images, 10, 3).unwrap();
        assert_eq!(domains.len(), 6);
        let largest = |row: ndarray::ArrayView1<f32>| row.fold(0.0f32, |a, &b| a.max(b));
        let mut digits: Vec<u32> =
            domains.iter().flat_map(|d| d.x.rows().into_iter().map(|r| (largest(r) * 255.0).round() as u32)).collect();
        digits.sort_unstable();
        digits.dedup();
        assert_eq!(digits.len(), 60);
    }
}
