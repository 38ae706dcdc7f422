use ndarray::{Array2, Array3, Axis};

use crate::{Error, Result};

/// Rows of features with a class each.
#[derive(Debug, Clone, PartialEq)]
pub struct Labeled {
    /// Features, `[n, features]`.
    pub x: Array2<f32>,
    /// Classes, `n` numbers below `classes`.
    pub y: Vec<u8>,
    /// Number of classes.
    pub classes: usize,
}

/// Grey images with a class each, as they were stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Images {
    /// Grey values, `[n, height, width]`, from 0 to `max`.
    pub pixels: Array3<u8>,
    /// Classes, `n` numbers below `classes`.
    pub y: Vec<u8>,
    /// The largest grey value of the format (255 for bytes, 16 for optdigits), which becomes 1.
    pub max: u8,
    /// Number of classes.
    pub classes: usize,
}

impl Labeled {
    /// Puts features and classes together.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the lengths differ or a class is not below `classes`.
    pub fn new(x: Array2<f32>, y: Vec<u8>, classes: usize) -> Result<Self> {
        check(x.nrows(), &y, classes)?;
        Ok(Self { x, y, classes })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.y.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.y.is_empty()
    }

    /// The rows at `indices`, in that order; an index may come more than once.
    ///
    /// # Panics
    /// If an index isn't below [`len`](Self::len), as with an array.
    #[must_use]
    pub fn select(&self, indices: &[usize]) -> Self {
        Self {
            x: self.x.select(Axis(0), indices),
            y: indices.iter().map(|&i| self.y[i]).collect(),
            classes: self.classes,
        }
    }

    /// How many rows each class has.
    pub fn class_counts(&self) -> Vec<usize> {
        class_counts(&self.y, self.classes)
    }
}

impl Images {
    /// Puts grey values and classes together.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the lengths differ, a class is not below `classes` or a grey value is above `max`.
    pub fn new(pixels: Array3<u8>, y: Vec<u8>, max: u8, classes: usize) -> Result<Self> {
        check(pixels.len_of(Axis(0)), &y, classes)?;
        if max == 0 {
            return Err(Error::argument("max", "the largest grey value must not be 0"));
        }
        if let Some(value) = pixels.iter().find(|&&p| p > max) {
            let problem = format!("the grey value {value} is above the largest, {max}");
            return Err(Error::argument("pixels", problem));
        }
        Ok(Self { pixels, y, max, classes })
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.y.len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.y.is_empty()
    }

    /// The images as `[n, height, width]` with values in `[0, 1]`.
    pub fn normalized(&self) -> Array3<f32> {
        let max = f32::from(self.max);
        self.pixels.mapv(|p| f32::from(p) / max)
    }

    /// The images as rows, `[n, height · width]`, with values in `[0, 1]`.
    pub fn labeled(&self) -> Labeled {
        Labeled { x: rows(self.normalized()), y: self.y.clone(), classes: self.classes }
    }

    /// The images at `indices`, in that order; an index may come more than once.
    ///
    /// # Panics
    /// If an index isn't below [`len`](Self::len), as with an array.
    #[must_use]
    pub fn select(&self, indices: &[usize]) -> Self {
        Self {
            pixels: self.pixels.select(Axis(0), indices),
            y: indices.iter().map(|&i| self.y[i]).collect(),
            max: self.max,
            classes: self.classes,
        }
    }

    /// How many images each class has.
    pub fn class_counts(&self) -> Vec<usize> {
        class_counts(&self.y, self.classes)
    }
}

/// `[n, h, w]` as `[n, h · w]`.
pub(crate) fn rows(images: Array3<f32>) -> Array2<f32> {
    let (n, h, w) = images.dim();
    // Invariant: the number of elements is the same, and a standard layout never fails.
    images.into_shape_clone((n, h * w)).expect("h · w values an image")
}

fn check(n: usize, y: &[u8], classes: usize) -> Result<()> {
    if n != y.len() {
        let problem = format!("{} classes came with {n} rows", y.len());
        return Err(Error::argument("y", problem));
    }
    match y.iter().find(|&&c| usize::from(c) >= classes) {
        Some(class) => {
            Err(Error::argument("y", format!("the class {class} is not below the number of classes, {classes}")))
        }
        None => Ok(()),
    }
}

fn class_counts(y: &[u8], classes: usize) -> Vec<usize> {
    let mut counts = vec![0; classes];
    for &class in y {
        counts[usize::from(class)] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{arr2, arr3};

    #[test]
    fn a_class_out_of_range_is_refused_by_its_number() {
        let message = Labeled::new(arr2(&[[0.0], [1.0]]), vec![0, 3], 3).unwrap_err().to_string();
        assert_eq!(message, "`y`: the class 3 is not below the number of classes, 3.");
    }

    #[test]
    fn rows_and_classes_must_be_equally_many() {
        assert!(Labeled::new(arr2(&[[0.0], [1.0]]), vec![0], 1).is_err());
        assert!(Images::new(Array3::zeros((2, 1, 1)), vec![0; 3], 255, 1).is_err());
    }

    #[test]
    fn a_grey_value_above_the_largest_is_refused() {
        assert!(Images::new(arr3(&[[[17]]]), vec![0], 16, 1).is_err());
    }

    #[test]
    fn selection_keeps_rows_and_classes_together() {
        let images = Images::new(arr3(&[[[0, 8]], [[16, 4]]]), vec![1, 0], 16, 2).unwrap();
        let chosen = images.select(&[1, 1, 0]).labeled();
        assert_eq!(chosen.x, arr2(&[[1.0, 0.25], [1.0, 0.25], [0.0, 0.5]]));
        assert_eq!(chosen.y, [0, 0, 1]);
        assert_eq!(chosen.class_counts(), [2, 1]);
        assert_eq!(images.labeled().select(&[1, 1, 0]), chosen);
    }
}
