//! Invariants of the image operations.

use datasets::image::{area_resample, average_pool, central_crop, pad_column, rotate};
use ndarray::{Array3, Axis, s};
use proptest::prelude::*;

fn images(sides: std::ops::Range<usize>) -> impl Strategy<Value = Array3<f32>> {
    (1..4usize, sides.clone(), sides).prop_flat_map(|(n, h, w)| {
        prop::collection::vec(0.0f32..1.0, n * h * w).prop_map(move |v| Array3::from_shape_vec((n, h, w), v).unwrap())
    })
}

/// The mean of each image in f64.
fn means(images: &Array3<f32>) -> Vec<f64> {
    images.axis_iter(Axis(0)).map(|i| i.iter().map(|&v| f64::from(v)).sum::<f64>() / i.len() as f64).collect()
}

fn close(a: &[f64], b: &[f64]) -> bool {
    // A value in [0, 1] is rounded a few times in f32 (6e-8 each).
    a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6)
}

proptest! {
    // Found cases become tests of their own; no files are left beside the sources.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resampling_keeps_the_mean(images in images(1..12), h in 1usize..20, w in 1usize..20) {
        let other = area_resample(&images, h, w).unwrap();
        prop_assert_eq!(other.dim(), (images.dim().0, h, w));
        prop_assert!(close(&means(&images), &means(&other)));
    }

    #[test]
    fn pooling_agrees_with_plain_sums(images in images(1..5), rows in 1usize..4, columns in 1usize..4) {
        let (n, h, w) = images.dim();
        let big = area_resample(&images, h * rows, w * columns).unwrap();
        let pooled = average_pool(&big, rows, columns).unwrap();
        let plain = Array3::from_shape_fn((n, h, w), |(i, r, c)| {
            let mut sum = 0.0;
            for y in 0..rows {
                for x in 0..columns {
                    sum += big[[i, r * rows + y, c * columns + x]];
                }
            }
            sum / (rows * columns) as f32
        });
        prop_assert!(pooled.iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn a_turn_by_nothing_changes_nothing(images in images(1..12), turns in -2i32..3) {
        prop_assert_eq!(rotate(&images, f64::from(360 * turns)).unwrap(), images);
    }

    #[test]
    fn four_quarter_turns_of_a_square_change_nothing(images in images(1..12)) {
        let side = images.dim().1.min(images.dim().2);
        let square = central_crop(&images, side, side).unwrap();
        let quarter = rotate(&square, 90.0).unwrap();
        prop_assert!(close(&means(&quarter), &means(&square)));
        let mut turned = square.clone();
        for _ in 0..4 {
            turned = rotate(&turned, 90.0).unwrap();
        }
        prop_assert_eq!(turned, square);
    }

    #[test]
    fn a_turn_stays_between_zero_and_the_largest_value(images in images(1..12), degrees in -400.0..400.0f64) {
        let most = images.iter().fold(0.0f32, |a, &b| a.max(b));
        let turned = rotate(&images, degrees).unwrap();
        prop_assert!(turned.iter().all(|&v| v >= 0.0 && v <= most * (1.0 + 1e-6)));
    }

    #[test]
    fn a_padded_column_holds_nothing(images in images(1..8)) {
        let (n, h, w) = images.dim();
        let padded = pad_column(&images);
        prop_assert_eq!(padded.dim(), (n, h, w + 1));
        prop_assert!(padded.index_axis(Axis(2), w).iter().all(|&v| v == 0.0));
        prop_assert_eq!(padded.slice(s![.., .., ..w]), images);
    }
}
