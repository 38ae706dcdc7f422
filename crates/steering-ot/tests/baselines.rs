//! The baselines' closed forms, energy distance, choices by data, cards, streams and compositions.

#![allow(clippy::needless_pass_by_value)] // array views

mod common;

use common::{around, largest_difference, mean, noise, norm, sets};
use ndarray::{Array1, Array2, Axis, array};
use steering_ot::auto::{Criterion, auto_k, choose_epsilon};
use steering_ot::baselines::{
    DiM, DiagonalChars, GaussianAct, GaussianOt, GaussianOtConfig, LinearAct, MeanAct, PcaConfig, PcaDirection, PcaRows,
};
use steering_ot::cards::cluster_cards;
use steering_ot::compose::{ComposeConfig, Composition, Orthogonalise};
use steering_ot::energy::{conditional_energy_distance, energy_distance};
use steering_ot::streaming::{StreamConfig, StreamingChars};
use steering_ot::{CharsConfig, CharsMap, Epsilon, Error, Steer, ndarray};

fn exact(x: &Array2<f32>) -> Array2<f64> {
    x.mapv(f64::from)
}

#[test]
fn the_difference_in_means_moves_the_mean_onto_the_mean() {
    let (source, target) = sets(40, 6, 1);
    for map in [
        &DiM::fit(source.view(), target.view()).unwrap() as &dyn Steer,
        &MeanAct::fit(source.view(), target.view()).unwrap(),
    ] {
        let moved = map.transport(source.view(), 1.0).unwrap();
        assert!(largest_difference(&mean(moved.view()), &mean(target.view())) < 1e-6);
    }
    assert!(DiM::from_vector(Array1::zeros(0)).is_err());
    assert!(DiM::from_vector(array![1.0, f64::NAN]).is_err());
}

#[test]
fn gaussian_act_matches_mean_and_deviation_of_each_coordinate() {
    let (mut source, target) = sets(50, 5, 2);
    source.column_mut(4).fill(1.0);
    let moved = GaussianAct::fit(source.view(), target.view()).unwrap().transport(source.view(), 1.0).unwrap();
    let deviation = |x: &Array2<f32>| exact(x).std_axis(Axis(0), 0.0);
    assert!(largest_difference(&mean(moved.view()), &mean(target.view())) < 1e-5);
    let (got, want) = (deviation(&moved), deviation(&target));
    assert!((0..4).all(|d| (got[d] - want[d]).abs() < 1e-5));
    assert!(got[4] < 1e-6, "a constant coordinate is translated");
}

#[test]
fn linear_act_finds_the_line_that_made_the_target_and_cuts_the_longer_set() {
    let source = noise(30, 3, 3);
    let target = &source * &array![2.0f32, 0.5, 1.0] + &array![1.0f32, -1.0, 0.0];
    // Rows in another order and more rows behind them: only values count, and only the first 30.
    let reversed = target.select(Axis(0), &(0..30).rev().collect::<Vec<_>>());
    let longer = ndarray::concatenate(Axis(0), &[reversed.view(), (noise(5, 3, 4) * 100.0).view()]).unwrap();
    let map = LinearAct::fit(source.view(), longer.view()).unwrap();
    assert!(largest_difference(map.weight(), &array![2.0, 0.5, 1.0]) < 1e-5);
    assert!(largest_difference(map.offset(), &array![1.0, -1.0, 0.0]) < 1e-5);
    let constant = Array2::from_elem((30, 3), 4.0f32);
    let map = LinearAct::fit(constant.view(), longer.view()).unwrap();
    assert_eq!(map.weight(), &Array1::<f64>::ones(3));
}

#[test]
fn the_principal_direction_is_that_of_a_full_eigendecomposition_and_points_to_the_target() {
    let (source, target) = sets(40, 9, 5);
    let n = source.nrows();
    let target = target.slice(ndarray::s![..n, ..]).to_owned();
    for rows in [PcaRows::Pooled, PcaRows::Paired] {
        for seed in [0, 1] {
            let map = PcaDirection::fit(source.view(), target.view(), &PcaConfig { rows, seed }).unwrap();
            let (a, b) = (exact(&source), exact(&target));
            let data = match rows {
                PcaRows::Paired => (&b - &a) * 0.5,
                PcaRows::Pooled => {
                    let middle = (mean(source.view()) + mean(target.view())) * 0.5;
                    ndarray::concatenate(Axis(0), &[(&a - &middle).view(), (&b - &middle).view()]).unwrap()
                }
            };
            let second = data.t().dot(&data);
            let eigen = nalgebra::SymmetricEigen::new(nalgebra::DMatrix::from_fn(9, 9, |i, j| second[(i, j)]));
            let column = eigen.eigenvectors.column(eigen.eigenvalues.imax());
            let v = Array1::from_iter(column.iter().copied());
            assert!((v.dot(map.direction()).abs() - 1.0).abs() < 1e-9);
            let difference = mean(target.view()) - mean(source.view());
            assert!(map.scale() >= 0.0);
            assert!((map.scale() - difference.dot(map.direction())).abs() < 1e-9);
        }
    }
    assert!(
        PcaDirection::fit(source.view(), noise(3, 9, 1).view(), &PcaConfig { rows: PcaRows::Paired, seed: 0 }).is_err()
    );
    let same = Array2::from_elem((4, 3), 1.0f32);
    assert!(PcaDirection::fit(same.view(), same.view(), &PcaConfig::default()).is_err());
}

#[test]
fn the_gaussian_map_carries_mean_and_covariance_over_and_is_the_identity_on_equal_sets() {
    let d = 4;
    let mix = noise(d, d, 6);
    let source = noise(200, d, 7);
    let target = noise(300, d, 8).dot(&mix) + &array![1.0f32, 2.0, 3.0, 4.0];
    let none = GaussianOtConfig { shrinkage: Some(0.0) };
    let map = GaussianOt::fit(source.view(), target.view(), &none).unwrap();
    let moved = map.transport(source.view(), 1.0).unwrap();
    let covariance = |x: &Array2<f32>| {
        let centred = exact(x) - mean(x.view());
        centred.t().dot(&centred) / x.nrows() as f64
    };
    assert!(largest_difference(&mean(moved.view()), &mean(target.view())) < 1e-5);
    assert!(largest_difference(&covariance(&moved), &covariance(&target)) < 1e-4);
    assert!(largest_difference(map.matrix(), &map.matrix().t().as_standard_layout().into_owned()) == 0.0);
    let same = GaussianOt::fit(source.view(), source.view(), &GaussianOtConfig::default()).unwrap();
    assert!(largest_difference(same.matrix(), &Array2::eye(d)) < 1e-9);
    // Fewer rows than coordinates: the estimated shrinkage keeps the map finite.
    let few = GaussianOt::fit(noise(5, 12, 1).view(), noise(6, 12, 2).view(), &GaussianOtConfig::default()).unwrap();
    assert!(few.matrix().iter().all(|v| v.is_finite()));
    let wide = noise(2, GaussianOt::MAX_WIDTH + 1, 1);
    assert!(GaussianOt::fit(wide.view(), wide.view(), &none).unwrap_err().to_string().contains("1024"));
    let bad = GaussianOtConfig { shrinkage: Some(1.5) };
    assert!(GaussianOt::fit(source.view(), target.view(), &bad).is_err());
}

#[test]
fn diagonal_covariances_match_the_deviations_of_each_cluster() {
    let centres = array![[0.0f32, 0.0, 0.0], [40.0, 0.0, 0.0]];
    let source = around(&centres, 400, 1.0, 9);
    let mut target = around(&centres, 400, 1.0, 10);
    for (i, mut row) in target.rows_mut().into_iter().enumerate() {
        // The first cluster widens threefold along the third axis, the second narrows.
        row[2] *= if i % 2 == 0 { 3.0 } else { 0.5 };
    }
    let config = CharsConfig { epsilon: Epsilon::Exact, bandwidth: 0.1, ..CharsConfig::default().with_clusters(2) };
    let map = DiagonalChars::fit(source.view(), target.view(), &config).unwrap();
    let moved = map.transport(source.view(), 1.0).unwrap();
    for (first, want) in [(0, 3.0), (1, 0.5)] {
        let rows: Vec<usize> = (first..400).step_by(2).collect();
        let deviation = exact(&moved.select(Axis(0), &rows)).std_axis(Axis(0), 0.0)[2];
        assert!((deviation - want).abs() < 0.1 * want, "{deviation}");
    }
    // With the deviations of the source on both sides it is CHaRS.
    let same = DiagonalChars::fit(source.view(), (&source + 1.0f32).view(), &config).unwrap();
    let (got, want) = (same.shift(source.view()).unwrap(), same.equal_covariance().shift(source.view()).unwrap());
    assert!(largest_difference(&exact(&got), &exact(&want)) < 1e-4);
    for bad in [CharsConfig { pct: Some(1), ..config.clone() }, CharsConfig { epsilon: Epsilon::Auto, ..config }] {
        assert!(matches!(DiagonalChars::fit(source.view(), target.view(), &bad), Err(Error::InvalidArgument { .. })));
    }
}

#[test]
fn energy_distance_is_that_of_its_definition_and_finds_what_moved() {
    let (x, y) = (array![[0.0f32], [1.0], [3.0]], array![[2.0f32], [6.0]]);
    // E|X−Y| = (2+6+1+5+1+3)/6 = 3, E|X−X′| = (1+3+2)/3 = 2, E|Y−Y′| = 4.
    assert!(energy_distance(x.view(), y.view()).unwrap().abs() < 1e-12);
    let (a, b) = (noise(150, 8, 11), noise(150, 8, 12));
    let same = energy_distance(a.view(), b.view()).unwrap();
    let moved = energy_distance(a.view(), (&b + 1.0f32).view()).unwrap();
    assert!(same.abs() < 0.05 && moved > 1.0);
    // Swapping groups is invisible to the whole, not to each group.
    let groups: Vec<usize> = (0..150).map(|i| i % 2).collect();
    let apart = |flip: usize| {
        let mut x = noise(150, 8, 13 + flip as u64);
        for (i, mut row) in x.rows_mut().into_iter().enumerate() {
            row += if (i + flip).is_multiple_of(2) { 5.0 } else { -5.0 };
        }
        x
    };
    let (a, b) = (apart(0), apart(1));
    assert!(energy_distance(a.view(), b.view()).unwrap() < 0.5);
    assert!(conditional_energy_distance(a.view(), &groups, b.view(), &groups).unwrap() > 10.0);
    assert!(conditional_energy_distance(a.view(), &groups[1..], b.view(), &groups).is_err());
    assert!(conditional_energy_distance(a.view(), &groups, b.view(), &[7; 150]).is_err());
    assert!(matches!(energy_distance(x.slice(ndarray::s![..1, ..]), y.view()), Err(Error::TooFewSamples { .. })));
}

#[test]
fn the_number_of_clusters_is_found_by_each_criterion() {
    let centres = Array2::from_shape_fn((4, 6), |(i, d)| if i == d { 12.0f32 } else { 0.0 });
    let moved = Array2::from_shape_fn((4, 6), |(i, d)| {
        if i == d {
            12.0f32
        } else if d == 5 {
            4.0 * i as f32
        } else {
            0.0
        }
    });
    let (x, target) = (around(&centres, 160, 0.6, 14), around(&moved, 160, 0.6, 15));
    for criterion in [Criterion::Elbow, Criterion::Silhouette] {
        let choice = auto_k(x.view(), 1..=8, &criterion, 3).unwrap();
        assert_eq!(choice.k, 4, "{criterion:?}: {:?}", choice.scores);
        assert_eq!(choice.scores.len(), 8);
    }
    let config = CharsConfig::default();
    let held_out = Criterion::HeldOutEd { target: target.view(), config: &config };
    let choice = auto_k(x.view(), 1..=6, &held_out, 3).unwrap();
    assert!(choice.k >= 4, "{:?}", choice.scores);
    assert!(choice.scores[0].1 > 2.0 * choice.scores[3].1, "{:?}", choice.scores);
    assert!(auto_k(x.view(), 0..=3, &Criterion::Elbow, 0).is_err());
    #[allow(clippy::reversed_empty_ranges)] // that is what is tested
    let empty = 3..=2;
    assert!(auto_k(x.view(), empty, &Criterion::Elbow, 0).is_err());
    assert!(matches!(auto_k(x.view(), 1..=161, &Criterion::Elbow, 0), Err(Error::TooFewSamples { .. })));
}

#[test]
fn the_regularisation_that_is_chosen_is_sharp_where_clusters_move_differently() {
    let (source, target) = sets(120, 10, 16);
    let config = CharsConfig { epsilon: Epsilon::Auto, ..CharsConfig::default().with_clusters(4) };
    let choice = choose_epsilon(source.view(), target.view(), &config).unwrap();
    assert_ne!(choice.epsilon, Epsilon::ScaledMedian(1.0));
    let map = CharsMap::fit(source.view(), target.view(), &config).unwrap();
    assert_eq!(map.config().epsilon, choice.epsilon);
    assert_eq!(map.diagnostics().epsilon_scores, choice.scores);
}

#[test]
fn cards_show_the_nearest_texts_and_where_they_go() {
    let centres = array![[0.0f32, 0.0], [20.0, 0.0]];
    let (source, target) = (around(&centres, 20, 0.5, 17), around(&(&centres + 3.0), 22, 0.5, 18));
    let texts = |n: usize, of: &str| -> Vec<String> { (0..n).map(|i| format!("{of} of topic {}", i % 2)).collect() };
    let (a, b) = (texts(20, "bad"), texts(22, "good"));
    let map = CharsMap::fit(source.view(), target.view(), &CharsConfig::default().with_clusters(2)).unwrap();
    let cards = cluster_cards(&map, source.view(), target.view(), &a, &b, 3).unwrap();
    assert_eq!(cards.len(), 2);
    for card in &cards {
        let topic = card.texts[0].text.chars().last();
        assert_eq!(card.texts.len(), 3);
        assert!(card.texts.iter().all(|t| t.text.starts_with("bad") && t.text.chars().last() == topic));
        assert!(card.texts.windows(2).all(|t| t[0].distance <= t[1].distance));
        let best = &card.matches[0];
        assert!(
            best.weight > 0.9
                && best.texts.iter().all(|t| t.text.starts_with("good") && t.text.chars().last() == topic)
        );
        assert!(card.cosine_to_mean > 0.9);
    }
    assert!(cluster_cards(&map, source.view(), target.view(), &a[1..], &b, 3).is_err());
}

#[test]
fn a_stream_has_the_means_of_all_that_it_took_in_and_follows_the_clusters() {
    let (source, target) = sets(400, 6, 19);
    let chars = CharsConfig::default().with_clusters(4);
    let config = StreamConfig { chars: chars.clone(), start_rows: 40, keep: 1.0 };
    let mut stream = StreamingChars::new(6, config.clone()).unwrap();
    assert!(matches!(stream.refit(), Err(Error::TooFewSamples { side: "source", n: 0, .. })));
    for rows in (0..400).step_by(25) {
        stream.absorb_source(source.slice(ndarray::s![rows..rows + 25, ..])).unwrap();
        stream.absorb_target(target.slice(ndarray::s![rows..rows + 25, ..])).unwrap();
    }
    assert_eq!(stream.rows(), (400, 400));
    let map = stream.refit().unwrap();
    let want = mean(target.slice(ndarray::s![..400, ..])) - mean(source.view());
    assert!(largest_difference(map.mean_shift_exact(), &want) < 1e-8);
    let again = stream.refit().unwrap();
    assert!(again.diagnostics().iterations <= map.diagnostics().iterations);
    assert!(largest_difference(again.plan(), map.plan()) < 1e-6);
    // Its shifts are near those of a fit to all rows at once.
    let whole = CharsMap::fit(source.view(), target.slice(ndarray::s![..400, ..]), &chars).unwrap();
    let (a, b) = (map.shift(source.view()).unwrap(), whole.shift(source.view()).unwrap());
    let apart = norm(&(exact(&a) - exact(&b))) / norm(&exact(&b));
    assert!(apart < 0.3, "{apart}");
    // From a fitted map on; a stream that forgets follows a drift.
    let mut drifting = StreamingChars::from_map(&whole, 40, 0.5).unwrap();
    for _ in 0..20 {
        drifting.absorb_target((&target + 10.0f32).view()).unwrap();
    }
    let drift = drifting.refit().unwrap().mean_shift() - whole.mean_shift();
    assert!(drift.iter().all(|v| (v - 10.0).abs() < 1.0), "{drift}");
    // Bad batches are refused and change nothing.
    let mut bad = source.clone();
    bad[(3, 0)] = f32::NAN;
    assert!(matches!(stream.absorb_source(bad.view()), Err(Error::NonFinite { side: "source", row: 3 })));
    assert!(matches!(stream.absorb_source(noise(2, 5, 1).view()), Err(Error::DimMismatch { .. })));
    assert_eq!(stream.rows(), (400, 400));
    for bad in [
        StreamConfig { keep: 0.0, ..config.clone() },
        StreamConfig { start_rows: 3, ..config.clone() },
        StreamConfig { chars: CharsConfig { epsilon: Epsilon::Auto, ..chars }, ..config },
    ] {
        assert!(StreamingChars::new(6, bad).is_err());
    }
}

#[test]
fn a_composed_map_stays_out_of_the_others_subspaces() {
    let (source, target) = sets(80, 10, 20);
    let (other, goal) = sets(80, 10, 21);
    let config = CharsConfig::default().with_clusters(4);
    let fit = |a: &Array2<f32>, b: &Array2<f32>| CharsMap::fit(a.view(), b.view(), &config).unwrap();
    let (first, second) = (fit(&source, &target), fit(&other, &goal));
    let compose = |orthogonalise| {
        let maps: Vec<Box<dyn Steer>> = vec![Box::new(first.clone()), Box::new(second.clone())];
        Composition::new(maps, ComposeConfig { orthogonalise, directions: 2, ..ComposeConfig::default() }).unwrap()
    };
    let x = noise(12, 10, 22);
    let (a, b) = (exact(&first.shift(x.view()).unwrap()), exact(&second.shift(x.view()).unwrap()));
    let off = |v: &Array2<f64>, basis: &Array2<f64>| v - &v.dot(&basis.t()).dot(basis);
    let (of_first, of_second) = (first.directions(2), second.directions(2));
    let wants = [
        (Orthogonalise::None, &a + &b),
        (Orthogonalise::Earlier, &a + &off(&b, &of_first)),
        (Orthogonalise::Mutual, off(&a, &of_second) + off(&b, &of_first)),
    ];
    for (orthogonalise, want) in wants {
        let map = compose(orthogonalise);
        assert!(largest_difference(&exact(&map.shift(x.view()).unwrap()), &want) < 1e-5);
        assert_eq!(map.maps().len(), 2);
    }
    assert!(Composition::new(Vec::new(), ComposeConfig::default()).is_err());
    let wide: Vec<Box<dyn Steer>> = vec![Box::new(first.clone()), Box::new(DiM::from_vector(Array1::ones(3)).unwrap())];
    assert!(matches!(Composition::new(wide, ComposeConfig::default()), Err(Error::DimMismatch { .. })));
    let strengths = ComposeConfig { strengths: vec![1.0, 2.0], ..ComposeConfig::default() };
    assert!(Composition::new(vec![Box::new(first.clone())], strengths).is_err());
}
