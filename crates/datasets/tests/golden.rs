//! Facts about the real data, counted beforehand with NumPy.
//!
//! The tests of cached sets do nothing but say so where a set isn't in the cache.

use std::time::Instant;

use datasets::mfeat::View;
use datasets::{
    Images, brown, cache, diabetes, domains, fashion, mfeat, mnist10k, moby_dick, optdigits, smollm2, vader_sentiment,
};
use ndarray::s;

/// Whether the set is in the cache; says so if not. `TESSERA_REQUIRE_DATA` (names with commas between, set by `cargo xtask test` for the
/// sets that it has fetched) makes a missing set a failure.
fn present(name: &str) -> bool {
    let present = cache::is_present(name).expect("the cache's folder is known");
    let required = std::env::var("TESSERA_REQUIRE_DATA").unwrap_or_default();
    assert!(
        present || !required.split(',').any(|r| r == name),
        "the data set `{name}` is required, but it isn't in the cache"
    );
    if !present {
        println!("skipped: the data set `{name}` isn't in the cache (cargo xtask data fetch {name})");
    }
    present
}

fn sum(images: &Images) -> u64 {
    images.pixels.iter().map(|&p| u64::from(p)).sum()
}

#[test]
fn optdigits_are_scikit_learns_digits() {
    let digits = optdigits::load();
    assert_eq!(digits.pixels.dim(), (1797, 8, 8));
    assert_eq!(digits.class_counts(), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    assert_eq!(sum(&digits), 561_718);
    assert_eq!(digits.pixels.iter().max(), Some(&16));
    assert_eq!(digits.pixels.slice(s![0, 0, ..]).to_vec(), [0, 0, 5, 13, 9, 1, 0, 0]);
    assert_eq!(digits.y[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let x = digits.labeled().x;
    assert_eq!(x.dim(), (1797, 64));
    assert_eq!(x[[0, 3]], 13.0 / 16.0);
}

#[test]
fn diabetes_is_scikit_learns_unscaled_set() {
    let set = diabetes::load();
    assert_eq!((set.x.dim(), set.y.len()), ((442, 10), 442));
    assert_eq!(set.x.row(0).to_vec(), [59.0, 2.0, 32.1, 101.0, 157.0, 93.2, 38.0, 4.0, 4.8598, 87.0]);
    assert_eq!((set.y[0], set.y[441]), (151.0, 57.0));
    assert_eq!((set.y.sum(), set.x.column(1).sum(), set.x.column(4).sum()), (67_243.0, 649.0, 83_600.0));
    assert!((set.x.column(2).dot(&set.y) - 1_861_676.5).abs() < 1e-6);
}

#[test]
fn mnist_has_its_ten_thousand_digits() {
    if !present(mnist10k::NAME) {
        return;
    }
    let start = Instant::now();
    let digits = mnist10k::load().unwrap();
    println!("MNIST-10k was loaded in {:?}.", start.elapsed());
    assert_eq!(digits.pixels.dim(), (10_000, 28, 28));
    assert_eq!(digits.class_counts(), [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]);
    let sums: Vec<u64> = (0..10u8)
        .map(|class| {
            let of_class = |i: &usize| digits.y[*i] == class;
            let rows: Vec<usize> = (0..digits.len()).filter(of_class).collect();
            sum(&digits.select(&rows))
        })
        .collect();
    assert_eq!(
        sums,
        [
            35_384_557, 17_658_546, 29_302_421, 29_451_611, 23_872_061, 21_470_939, 27_693_032, 24_828_004, 28_106_735,
            24_378_694
        ]
    );
    // The first values of the file that aren't 0: 0.2, 0.624, 0.992, 0.624, 0.196.
    let first: Vec<u8> = digits.pixels.iter().copied().filter(|&p| p > 0).take(5).collect();
    assert_eq!(first, [51, 159, 253, 159, 50]);
}

#[test]
fn mfeat_has_six_views_of_the_same_digits() {
    if !present(mfeat::NAME) {
        return;
    }
    let all = mfeat::load().unwrap();
    assert_eq!(all.y, (0..2000).map(|i| (i / 200) as u8).collect::<Vec<_>>());
    for (view, first, sum) in [
        (View::Fou, [0.065882, 0.19731, 0.10383], 20068.87644672),
        (View::Fac, [98.0, 236.0, 531.0], 137492808.0),
        (View::Kar, [-10.297, -11.667, 11.561], 6794.852859760003),
        (View::Pix, [0.0, 3.0, 4.0], 1452834.0),
        (View::Zer, [0.011033, 0.83147, 15.352], 8331825.0751588),
        (View::Mor, [1.0, 0.0, 0.0], 12632390.6348),
    ] {
        let x = all.view(view);
        assert_eq!(x.dim(), (2000, view.features()), "{view:?}");
        assert_eq!(x.slice(s![0, ..3]).to_vec(), first, "{view:?}");
        let total: f64 = x.iter().map(|&v| f64::from(v)).sum();
        // f32 keeps each value to 6e-8 of itself.
        let scale: f64 = x.iter().map(|&v| f64::from(v.abs())).sum();
        assert!((total - sum).abs() < 6e-8 * scale, "{view:?}: {total}");
    }
    let images = mfeat::pixels().unwrap();
    assert_eq!(images.pixels.dim(), (2000, 16, 15));
    assert_eq!(sum(&images), 1_452_834);
    assert_eq!(images.pixels.slice(s![0, 0, ..]).to_vec(), [0, 3, 4, 4, 6, 6, 6, 6, 6, 5, 3, 1, 0, 0, 0]);
}

#[test]
fn fashion_has_both_its_parts() {
    if !present(fashion::NAME) {
        return;
    }
    let start = Instant::now();
    let set = fashion::load().unwrap();
    println!("Fashion-MNIST was loaded in {:?}.", start.elapsed());
    assert_eq!(set.train.class_counts(), [6000; 10]);
    assert_eq!(set.test.class_counts(), [1000; 10]);
    assert_eq!((sum(&set.train), sum(&set.test)), (3_431_114_169, 573_469_082));
    assert_eq!(set.train.y[..5], [9, 0, 0, 3, 0]);
    assert_eq!(set.test.y[..5], [9, 2, 1, 1, 6]);
}

#[test]
fn handwriting3_is_three_domains_of_eight_by_eight() {
    if !present(mnist10k::NAME) || !present(mfeat::NAME) {
        return;
    }
    let domains = domains::handwriting3().unwrap();
    let shapes: Vec<_> = domains.iter().map(|d| (d.name.as_str(), d.x.dim())).collect();
    assert_eq!(shapes, [("mnist", (10_000, 64)), ("optdigits", (1797, 64)), ("mfeat", (2000, 64))]);
    for (domain, mean) in domains.iter().zip(HANDWRITING3_MEANS) {
        let total: f64 = domain.x.iter().map(|&v| f64::from(v)).sum();
        assert!((total / domain.x.len() as f64 - mean).abs() < 1e-6, "{}", domain.name);
        assert!(domain.x.iter().all(|v| (0.0..=1.0).contains(v)));
    }
}

/// From NumPy, by the recipe of the protocol.
const HANDWRITING3_MEANS: [f64; 3] = [0.2485637294117647, 0.30526028624095713, 0.472927734375];

#[test]
fn rotated_mnist_is_six_domains_of_different_digits() {
    if !present(mnist10k::NAME) {
        return;
    }
    let domains = domains::rotated_mnist(7).unwrap();
    let names: Vec<_> = domains.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["0°", "15°", "30°", "45°", "60°", "75°"]);
    for domain in &domains {
        assert_eq!(domain.x.dim(), (1000, 196));
        // 1,127 of 10,000 are ones.
        let ones: usize = domain.y.iter().map(|&y| usize::from(y == 1)).sum();
        assert!((111..=115).contains(&ones), "{}: {ones}", domain.name);
    }
    assert_eq!(domains, domains::rotated_mnist(7).unwrap());
    assert_ne!(domains[0], domains::rotated_mnist(8).unwrap()[0]);
}

#[test]
fn moby_dick_is_its_chapters_with_a_paragraph_a_line() {
    if !present(moby_dick::NAME) {
        return;
    }
    let text = moby_dick::load().unwrap();
    assert!(text.starts_with(
        "CHAPTER 1. Loomings.\n\nCall me Ishmael. Some years ago—never mind how long precisely—having little"
    ));
    assert!(text.ends_with("rolled on as it rolled five thousand years ago.\n"));
    assert_eq!(text.lines().filter(|l| l.starts_with("CHAPTER ")).count(), moby_dick::CHAPTERS);
    let (train, held_out) = moby_dick::train_held_out(&text);
    assert_eq!((train.chars().count(), held_out.chars().count()), MOBY_DICK_PARTS);
}

/// Counted in Python, by the rules that the loader states.
const MOBY_DICK_PARTS: (usize, usize) = (1_070_581, 118_954);

#[test]
fn vaders_texts_are_as_many_as_the_specification_counts() {
    use vader_sentiment::Domain;
    if !present(vader_sentiment::NAME) {
        return;
    }
    let all = vader_sentiment::load().unwrap();
    // Of 30 to 140 characters with a rating beyond 1 either way: negative, positive.
    let expected = [
        (Domain::Tweets, 4_200, 737, 1_637),
        (Domain::Movies, 10_605, 3_139, 3_131),
        (Domain::Products, 3_708, 686, 1_104),
        (Domain::Editorials, 5_190, 693, 386),
    ];
    for (domain, texts, negative, positive) in expected {
        let of_domain: Vec<_> = all.iter().filter(|r| r.domain == domain).collect();
        let clear: Vec<_> = of_domain.iter().filter(|r| (30..=140).contains(&r.text.chars().count())).collect();
        let count = |sign: f64| clear.iter().filter(|r| sign * r.rating >= 1.0).count();
        assert_eq!((of_domain.len(), count(-1.0), count(1.0)), (texts, negative, positive), "{}", domain.name());
    }
    assert!(all.windows(2).all(|w| w[0].domain <= w[1].domain));
    assert!(all.iter().all(|r| !r.text.contains("&amp;") && r.text.trim() == r.text));
    assert_eq!((all[3].text.as_str(), all[3].rating), ("LMAO, AMAZING!", 2.857142857));
}

#[test]
fn the_brown_corpus_has_500_texts_in_15_genres() {
    if !present(brown::NAME) {
        return;
    }
    let all = brown::load().unwrap();
    let genres: std::collections::BTreeMap<_, usize> =
        all.iter().fold(std::collections::BTreeMap::new(), |mut counts, text| {
            *counts.entry(text.genre).or_default() += 1;
            counts
        });
    // The corpus's own list, A to R.
    assert_eq!(genres.into_values().collect::<Vec<_>>(), [44, 27, 17, 17, 36, 48, 75, 30, 80, 29, 24, 6, 29, 29, 9]);
    assert!(all[0].sentences[0].starts_with(
        "The Fulton County Grand Jury said Friday an investigation of Atlanta's recent primary election produced \"no evidence\""
    ));
    assert!(all.iter().all(|text| text.sentences.len() > 30 && text.sentences.iter().all(|s| !s.contains("/nn"))));
}

#[test]
fn smollm2_is_checked_once_and_found_again() {
    if !present(smollm2::NAME) {
        return;
    }
    let start = Instant::now();
    let path = smollm2::path().unwrap();
    println!("SmolLM2's file was checked in {:?}.", start.elapsed());
    assert_eq!(path.metadata().unwrap().len(), 98_362_432);
    let start = Instant::now();
    assert_eq!(smollm2::path_if_present().unwrap(), Some(path));
    println!("Again in {:?}.", start.elapsed());
}
