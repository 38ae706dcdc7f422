//! Operations on grey images `[n, height, width]`.
//!
//! All give a new array in standard layout, and none needs a random number.

use ndarray::{Array3, Axis, Slice, s};

use crate::{Error, Result};

/// The central `height × width`. Where the border can't be halved, the smaller half is on top and on the left.
///
/// # Errors
/// [`Error::BadArgument`] if the images are smaller than that.
pub fn central_crop(images: &Array3<f32>, height: usize, width: usize) -> Result<Array3<f32>> {
    let (_, h, w) = images.dim();
    if height > h || width > w {
        return Err(Error::argument(
            "height, width",
            format!("{height}×{width} can't be cut out of images of {h}×{w}"),
        ));
    }
    let (top, left) = ((h - height) / 2, (w - width) / 2);
    let part = images.slice(s![.., top..top + height, left..left + width]);
    Ok(part.as_standard_layout().into_owned())
}

/// One empty (0) column on the right, for images whose width is one short.
pub fn pad_column(images: &Array3<f32>) -> Array3<f32> {
    let (n, h, w) = images.dim();
    let mut padded = Array3::zeros((n, h, w + 1));
    padded.slice_mut(s![.., .., ..w]).assign(images);
    padded
}

/// Means over windows of `rows × columns` that don't overlap: `[n, h, w]` becomes `[n, h / rows, w / columns]`.
///
/// # Errors
/// [`Error::BadArgument`] if the windows don't cover the images exactly.
pub fn average_pool(images: &Array3<f32>, rows: usize, columns: usize) -> Result<Array3<f32>> {
    let (_, h, w) = images.dim();
    let covers = |size: usize, window: usize| window > 0 && size.is_multiple_of(window);
    if !covers(h, rows) || !covers(w, columns) {
        return Err(Error::argument(
            "rows, columns",
            format!("windows of {rows}×{columns} don't cover images of {h}×{w} exactly"),
        ));
    }
    area_resample(images, h / rows, w / columns)
}

/// Each new pixel is the mean of the area that it covers in the old image, parts of old pixels counted by their area.
///
/// The mean of each image stays what it was. For whole ratios this is [`average_pool`]; enlarging repeats pixels.
///
/// # Errors
/// [`Error::BadArgument`] if a side, old or new, is 0.
pub fn area_resample(images: &Array3<f32>, height: usize, width: usize) -> Result<Array3<f32>> {
    let (_, h, w) = images.dim();
    if h == 0 || w == 0 || height == 0 || width == 0 {
        return Err(Error::argument(
            "height, width",
            format!("images of {h}×{w} can't become {height}×{width}: a side is 0"),
        ));
    }
    let narrow = resample_axis(images, Axis(2), width); // [n, h, width]
    Ok(resample_axis(&narrow, Axis(1), height)) // [n, height, width]
}

/// In units of 1/new, old pixel i spans `i·new..(i+1)·new` and new pixel o spans `o·old..(o+1)·old`: the overlaps are whole numbers.
fn resample_axis(images: &Array3<f32>, axis: Axis, new: usize) -> Array3<f32> {
    let old = images.len_of(axis);
    let mut shape = images.raw_dim();
    shape[axis.index()] = new;
    let mut result = Array3::zeros(shape);
    for o in 0..new {
        let (low, high) = (o * old, (o + 1) * old);
        let mut target = result.slice_axis_mut(axis, Slice::from(o..=o));
        for i in low / new..high.div_ceil(new) {
            let overlap = high.min((i + 1) * new) - low.max(i * new);
            target.scaled_add(overlap as f32, &images.slice_axis(axis, Slice::from(i..=i)));
        }
        target /= old as f32;
    }
    result
}

/// Turns each image about its centre by `degrees`, counter-clockwise as it is looked at (row 0 on top), with bilinear interpolation.
/// What comes from outside is 0.
///
/// A turn by 0 changes nothing, and a turn of square images by a multiple of 90 only moves pixels.
///
/// # Errors
/// [`Error::BadArgument`] if `degrees` isn't finite.
pub fn rotate(images: &Array3<f32>, degrees: f64) -> Result<Array3<f32>> {
    if !degrees.is_finite() {
        let problem = format!("a finite angle in degrees was expected, but {degrees} came");
        return Err(Error::argument("degrees", problem));
    }
    let (_, h, w) = images.dim();
    let mut result = Array3::zeros(images.raw_dim());
    turn(h, w, degrees, |(row, column), (r, c), weight| {
        let source = images.slice(s![.., r, c]);
        result.slice_mut(s![.., row, column]).scaled_add(weight, &source);
    });
    Ok(result)
}

/// As [`rotate`], each image by its own angle.
///
/// # Errors
/// [`Error::BadArgument`] if there isn't one finite angle for every image.
pub fn rotate_each(images: &Array3<f32>, degrees: &[f64]) -> Result<Array3<f32>> {
    let (n, h, w) = images.dim();
    one_each("degrees", n, degrees.len())?;
    if let Some(angle) = degrees.iter().find(|angle| !angle.is_finite()) {
        return Err(Error::argument("degrees", format!("finite angles in degrees were expected, but {angle} came")));
    }
    let mut result = Array3::zeros(images.raw_dim());
    for ((source, mut target), &angle) in images.outer_iter().zip(result.outer_iter_mut()).zip(degrees) {
        turn(h, w, angle, |to, from, weight| target[to] += weight * source[from]);
    }
    Ok(result)
}

/// Moves each image by its own whole numbers of rows (down) and columns (right). What comes from outside is 0, what leaves
/// is lost.
///
/// # Errors
/// [`Error::BadArgument`] if there isn't one pair for every image.
pub fn shift_each(images: &Array3<f32>, by: &[(i32, i32)]) -> Result<Array3<f32>> {
    let (n, h, w) = images.dim();
    one_each("by", n, by.len())?;
    let mut result = Array3::zeros(images.raw_dim());
    // Where `size` pixels moved by `by` land, and where those come from.
    let overlap = |size: usize, by: i32| {
        let far = (by.unsigned_abs() as usize).min(size);
        if by >= 0 { (far..size, 0..size - far) } else { (0..size - far, far..size) }
    };
    for ((source, mut target), &(down, right)) in images.outer_iter().zip(result.outer_iter_mut()).zip(by) {
        let ((rows, from_rows), (columns, from_columns)) = (overlap(h, down), overlap(w, right));
        target.slice_mut(s![rows, columns]).assign(&source.slice(s![from_rows, from_columns]));
    }
    Ok(result)
}

/// Sets a square of `size × size` pixels to `value` in each image, with its upper left corner at its own row and column;
/// the part of a square that lies outside is ignored.
///
/// # Errors
/// [`Error::BadArgument`] if there isn't one corner for every image.
pub fn cut_out_each(images: &Array3<f32>, corners: &[(i32, i32)], size: usize, value: f32) -> Result<Array3<f32>> {
    let (n, h, w) = images.dim();
    one_each("corners", n, corners.len())?;
    let mut result = images.as_standard_layout().into_owned();
    let inside = |start: i64, limit: usize| {
        let clip = |at: i64| at.clamp(0, limit as i64) as usize;
        clip(start)..clip(start + size as i64)
    };
    for (mut image, &(row, column)) in result.outer_iter_mut().zip(corners) {
        image.slice_mut(s![inside(row.into(), h), inside(column.into(), w)]).fill(value);
    }
    Ok(result)
}

fn one_each(argument: &'static str, images: usize, came: usize) -> Result<()> {
    if images == came {
        return Ok(());
    }
    Err(Error::argument(argument, format!("one for each of the {images} images was expected, but {came} came")))
}

/// Calls `add(to, from, weight)` for every pixel of a turned image and the old pixels that it is made of.
fn turn(h: usize, w: usize, degrees: f64, mut add: impl FnMut((usize, usize), (usize, usize), f32)) {
    let (sin, cos) = sin_cos(degrees);
    let (middle_row, middle_column) = ((h as f64 - 1.0) / 2.0, (w as f64 - 1.0) / 2.0);
    for row in 0..h {
        for column in 0..w {
            let (y, x) = (row as f64 - middle_row, column as f64 - middle_column);
            // Where the pixel comes from: the inverse turn, with y pointing down.
            let source_row = x * sin + y * cos + middle_row;
            let source_column = x * cos - y * sin + middle_column;
            for (r, weight_r) in neighbours(source_row, h) {
                for (c, weight_c) in neighbours(source_column, w) {
                    let weight = (weight_r * weight_c) as f32;
                    if weight != 0.0 {
                        add((row, column), (r, c), weight);
                    }
                }
            }
        }
    }
}

/// The two whole positions beside `at` with their weights, as far as they lie in `0..size`.
fn neighbours(at: f64, size: usize) -> impl Iterator<Item = (usize, f64)> {
    let low = at.floor();
    let part = at - low;
    [(low, 1.0 - part), (low + 1.0, part)]
        .into_iter()
        .filter(move |&(position, _)| position >= 0.0 && position < size as f64)
        .map(|(position, weight)| (position as usize, weight))
}

/// Sine and cosine of an angle in degrees, exact at multiples of 90.
fn sin_cos(degrees: f64) -> (f64, f64) {
    let turned = degrees.rem_euclid(360.0);
    match turned {
        0.0 => (0.0, 1.0),
        90.0 => (1.0, 0.0),
        180.0 => (0.0, -1.0),
        270.0 => (-1.0, 0.0),
        _ => turned.to_radians().sin_cos(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::arr3;

    #[test]
    fn crop_takes_the_middle() {
        let image = Array3::from_shape_fn((1, 4, 5), |(_, r, c)| (10 * r + c) as f32);
        let middle = central_crop(&image, 2, 2).unwrap();
        assert_eq!(middle, arr3(&[[[11.0, 12.0], [21.0, 22.0]]]));
        assert!(central_crop(&image, 5, 2).is_err());
    }

    #[test]
    fn a_column_of_zeros_is_added_on_the_right() {
        let padded = pad_column(&arr3(&[[[1.0, 2.0], [3.0, 4.0]]]));
        assert_eq!(padded, arr3(&[[[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]]]));
        assert!(padded.is_standard_layout());
    }

    #[test]
    fn pooling_takes_means() {
        let image = arr3(&[[[1.0, 3.0, 0.0, 0.0], [5.0, 7.0, 2.0, 2.0]]]);
        assert_eq!(average_pool(&image, 2, 2).unwrap(), arr3(&[[[4.0, 1.0]]]));
        for (rows, columns) in [(3, 2), (2, 3), (0, 1), (1, 0)] {
            assert!(average_pool(&image, rows, columns).is_err());
        }
    }

    #[test]
    fn resampling_counts_parts_of_pixels_by_area() {
        // 3 to 2: the middle pixel goes half to each side.
        let image = arr3(&[[[1.0, 4.0, 7.0]]]);
        assert_eq!(area_resample(&image, 1, 2).unwrap(), arr3(&[[[2.0, 6.0]]]));
        assert_eq!(area_resample(&image, 2, 3).unwrap(), arr3(&[[[1.0, 4.0, 7.0], [1.0, 4.0, 7.0]]]));
        assert!(area_resample(&image, 0, 2).is_err());
    }

    #[test]
    fn a_quarter_turn_is_counter_clockwise_and_exact() {
        let image = arr3(&[[[1.0, 2.0], [3.0, 4.0]]]);
        assert_eq!(rotate(&image, 90.0).unwrap(), arr3(&[[[2.0, 4.0], [1.0, 3.0]]]));
        assert_eq!(rotate(&image, 180.0).unwrap(), arr3(&[[[4.0, 3.0], [2.0, 1.0]]]));
        assert_eq!(rotate(&image, -90.0).unwrap(), rotate(&image, 270.0).unwrap());
        assert!(rotate(&image, f64::NAN).is_err());
    }

    #[test]
    fn each_image_is_turned_as_all_are_by_its_angle() {
        let images = Array3::from_shape_fn((3, 4, 4), |(i, r, c)| (i * 16 + r * 4 + c) as f32);
        let angles = [0.0, 90.0, 17.5];
        let turned = rotate_each(&images, &angles).unwrap();
        for (i, angle) in angles.into_iter().enumerate() {
            assert_eq!(turned.slice(s![i, .., ..]), rotate(&images, angle).unwrap().slice(s![i, .., ..]));
        }
        assert!(rotate_each(&images, &angles[..2]).is_err());
        assert!(rotate_each(&images, &[0.0, 0.0, f64::INFINITY]).is_err());
    }

    #[test]
    fn a_shift_moves_down_and_right_and_loses_what_leaves() {
        let image = arr3(&[[[1.0, 2.0], [3.0, 4.0]]]);
        let by = |down, right| shift_each(&image, &[(down, right)]).unwrap();
        assert_eq!(by(0, 0), image);
        assert_eq!(by(1, 0), arr3(&[[[0.0, 0.0], [1.0, 2.0]]]));
        assert_eq!(by(0, -1), arr3(&[[[2.0, 0.0], [4.0, 0.0]]]));
        assert_eq!(by(-1, 1), arr3(&[[[0.0, 3.0], [0.0, 0.0]]]));
        assert_eq!(by(5, i32::MIN), Array3::<f32>::zeros((1, 2, 2)));
        let two = ndarray::concatenate![Axis(0), image, image];
        let each = shift_each(&two, &[(1, 0), (0, 0)]).unwrap();
        assert_eq!(each, ndarray::concatenate![Axis(0), by(1, 0), image]);
        assert!(shift_each(&two, &[(1, 0)]).is_err());
    }

    #[test]
    fn a_cut_out_covers_its_square_as_far_as_it_lies_inside() {
        let image = Array3::from_elem((2, 3, 3), 1.0);
        let cut = cut_out_each(&image, &[(1, 1), (-1, 2)], 2, 0.5).unwrap();
        assert_eq!(
            cut,
            arr3(&[
                [[1.0, 1.0, 1.0], [1.0, 0.5, 0.5], [1.0, 0.5, 0.5]],
                [[1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
            ])
        );
        assert_eq!(cut_out_each(&image, &[(9, 9), (i32::MIN, 0)], 2, 0.5).unwrap(), image);
        assert!(cut_out_each(&image, &[(0, 0)], 2, 0.5).is_err());
    }
}
