//! Hot paths of steering-ot: the map on activations, k-means, Sinkhorn, exact transport, principal components.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ndarray::{Array1, Array2};
use std::hint::black_box;
use steering_ot::chars::principal;
use steering_ot::config::{CharsConfig, KMeansConfig};
use steering_ot::transport::{self, SinkhornConfig};
use steering_ot::{CharsMap, kmeans};
use tensor::Seed;

const WIDTH: usize = 576;

fn normal(rows: usize, columns: usize, name: &str) -> Array2<f32> {
    let values = Seed::new(0).child(name).normal(rows * columns);
    Array2::from_shape_vec((rows, columns), values).expect("as many numbers as the shape has")
}

fn map(c: &mut Criterion) {
    let fit = |k: usize| {
        let (a, b) = (normal(16 * k, WIDTH, "a"), normal(16 * k, WIDTH, "b") + 1.0);
        CharsMap::fit(a.view(), b.view(), &CharsConfig::default().with_clusters(k))
            .expect("normal numbers can be fitted")
    };
    let mut group = c.benchmark_group("map");
    for (rows, k) in [(1, 8), (64, 8), (512, 8), (512, 15)] {
        let (map, x) = (fit(k), normal(rows, WIDTH, "x"));
        let x = x.as_slice().expect("a new array is contiguous");
        let mut out = vec![0.0; x.len()];
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::new("shift", format!("{rows} rows, K {k}")), |b| {
            b.iter(|| map.shift_into(black_box(x), &mut out));
        });
    }
    let (map, x) = (fit(8), normal(64, WIDTH, "x").mapv(f64::from));
    group.bench_function("double sum, 64 rows, K 8 (the published form, f64)", |b| {
        b.iter(|| map.double_sum(black_box(x.view())));
    });
    group.finish();
}

fn fit(c: &mut Criterion) {
    let x = normal(560, WIDTH, "x");
    c.bench_function("k-means, 560 rows, K 8", |b| {
        b.iter(|| kmeans::fit(black_box(x.view()), 8, &KMeansConfig::default(), 0));
    });
    for k in [8, 16] {
        let cost =
            transport::cost(normal(k, WIDTH, "a").mapv(f64::from).view(), normal(k, WIDTH, "b").mapv(f64::from).view())
                .expect("two sets of one width");
        let p = Array1::from_elem(k, 1.0 / k as f64);
        let epsilon = 0.05 * transport::median(cost.iter().copied());
        c.bench_function(&format!("Sinkhorn, K {k}"), |b| {
            b.iter(|| {
                transport::sinkhorn(black_box(cost.view()), p.view(), p.view(), epsilon, &SinkhornConfig::default())
            });
        });
        c.bench_function(&format!("exact transport, K {k}"), |b| {
            b.iter(|| transport::exact(black_box(cost.view()), p.view(), p.view()));
        });
    }
    let (a, b) = (normal(15, 4096, "a").mapv(f64::from), normal(15, 4096, "b").mapv(f64::from));
    let plan = Array2::from_elem((15, 15), 1.0 / 225.0);
    c.bench_function("principal components, K 15, D 4096", |bench| {
        bench.iter(|| principal(black_box(a.view()), b.view(), plan.view()));
    });
}

criterion_group!(benches, map, fit);
criterion_main!(benches);
