//! Statistics against numbers from SciPy 1.17.1.

use tensor::stats::{
    Bootstrap, BootstrapMethod, Wilcoxon, bootstrap_interval, kendall_tau, paired_t, t_interval, wilcoxon_signed_rank,
};

fn close(got: f64, expected: f64, what: &str) {
    let error = (got - expected).abs();
    assert!(error <= 1e-9 * expected.abs(), "{what}: {got} instead of {expected}");
}

#[test]
fn paired_t_is_ttest_rel() {
    let a = [0.71, 0.69, 0.74, 0.70, 0.72, 0.735, 0.66];
    let b = [0.69, 0.68, 0.70, 0.69, 0.705, 0.74, 0.65];
    for (level, low, high) in [
        (0.95, 0.0016418598433299968, 0.02692956872809857),
        (0.9, 0.004244776925976404, 0.024326651645452155),
        (0.999, -0.016505098378278564, 0.045076526949707776),
    ] {
        let interval = paired_t(&a, &b, level).unwrap();
        close(interval.mean, 0.014285714285714282, "mean");
        close(interval.low, low, "low");
        close(interval.high, high, "high");
        close(interval.t, 2.7646540655045437, "t");
        close(interval.p, 0.032652414873932084, "p");
    }
}

#[test]
fn t_interval_is_ttest_1samp() {
    let two = t_interval(&[1.0, 3.0], 0.95).unwrap();
    close(two.low, -10.706204736174694, "low");
    close(two.high, 14.706204736174694, "high");
    close(two.p, 0.2951672353008665, "p");

    let many: Vec<f64> = (0..200).map(f64::from).map(|i| i / 7.0 + 5.0 * i.sin()).collect();
    let interval = t_interval(&many, 0.99).unwrap();
    close(interval.mean, 14.236935638806422, "mean");
    close(interval.low, 12.589690569040329, "low");
    close(interval.high, 15.884180708572515, "high");
    close(interval.t, 22.478049251803903, "t");
    close(interval.p, 1.619979679186261e-56, "p");
}

fn wilcoxon(differences: &[f64], statistic: f64, p: f64, exact: bool) -> Wilcoxon {
    let test = wilcoxon_signed_rank(differences).unwrap();
    assert_eq!((test.statistic, test.exact), (statistic, exact));
    close(test.p, p, "p");
    test
}

#[test]
fn wilcoxon_is_scipys() {
    wilcoxon(&[0.13, -0.04, 0.22, 0.31, -0.07, 0.18, 0.02, 0.41, -0.11, 0.26], 9.0, 0.064453125, true);
    let twenty_five: Vec<f64> =
        (0..25i32).map(|i| f64::from((7 * i) % 25 + 1) * if (i * i) % 5 == 1 { -1.0 } else { 1.0 }).collect();
    wilcoxon(&twenty_five, 135.0, 0.4741646647453308, true);
    // Ties and zeros: normal approximation, zero_method="wilcox", correction=True.
    let tied = [1.0, 1.0, -1.0, 2.0, 2.0, 3.0, -3.0, 3.0, 0.0, 0.0, 4.0, 5.0, -2.0, 6.0, 6.0];
    assert_eq!(wilcoxon(&tied, 15.0, 0.035296596841407915, false).n, 13);
    let forty: Vec<f64> = (0..40).map(|i| f64::from(3 * i + 1).sin() + 0.3).collect();
    wilcoxon(&forty, 227.0, 0.014165586218412452, false);
}

fn kendall(a: &[f64], b: &[f64], tau: f64, p: f64, exact: bool) {
    let test = kendall_tau(a, b).unwrap();
    assert_eq!(test.exact, exact);
    close(test.tau, tau, "tau");
    close(test.p, p, "p");
}

#[test]
fn kendall_is_scipys() {
    let ten: Vec<f64> = (1..=10).map(f64::from).collect();
    let other = [3.0, 1.0, 4.0, 2.0, 6.0, 5.0, 9.0, 7.0, 8.0, 10.0];
    kendall(&ten, &other, 0.7333333333333333, 0.002212852733686067, true);

    let a = [1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.0, 8.0];
    let b = [2.0, 1.0, 3.0, 3.0, 5.0, 5.0, 5.0, 4.0, 6.0, 8.0, 8.0, 9.0];
    kendall(&a, &b, 0.8196721311475411, 0.00043078145479191006, false);

    let a: Vec<f64> = (0..60).map(|i| f64::from(3 * i).sin()).collect();
    let b: Vec<f64> = (0..60).map(|i| f64::from(3 * i).sin() + 1.5 * f64::from(5 * i + 1).cos()).collect();
    kendall(&a, &b, 0.39548022598870053, 8.023734922119554e-06, false);
    kendall(&a[..33], &b[..33], 0.35227272727272724, 0.0036056095284297627, true);
}

#[test]
fn bootstrap_ends_are_scipys_within_the_noise_of_resampling() {
    let values = [0.2, 1.7, 3.1, 0.4, 0.9, 2.2, 0.3, 5.8, 0.6, 1.1, 0.8, 2.9];
    // 100,000 resamples with five seeds each in SciPy; the ends scatter by less than 0.01.
    for (method, low, high) in [(BootstrapMethod::Percentile, 0.8833, 2.638), (BootstrapMethod::Bca, 0.9983, 2.907)] {
        let config = Bootstrap { resamples: 100_000, method, ..Bootstrap::default() };
        let mean = |values: &mut [f64]| values.iter().sum::<f64>() / values.len() as f64;
        let interval = bootstrap_interval(&values, mean, &config).unwrap();
        assert!((interval.estimate - 20.0 / 12.0).abs() < 1e-12);
        assert!((interval.low - low).abs() < 0.02, "{method:?}: {interval:?}");
        assert!((interval.high - high).abs() < 0.02, "{method:?}: {interval:?}");
    }
}
