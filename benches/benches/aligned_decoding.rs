//! Hot paths of aligned-decoding: choosing a token from two arrays of logits, and the exact trees.

use aligned_decoding::Rule;
use aligned_decoding::select::{Candidate, RATIO_CLIP, Selector, plausible, plausible_two_pass, select_by_log_softmax};
use aligned_decoding::tree::{Tree, TreeConfig};
use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use tensor::Seed;

const VOCAB: usize = 49_152;

fn logits(name: &str) -> Vec<f32> {
    Seed::new(0).child(name).normal(VOCAB).into_iter().map(|z| 3.0 * z).collect()
}

fn select(c: &mut Criterion) {
    let (policy, reference) = (logits("policy"), logits("reference"));
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut group = c.benchmark_group("select, 49152 tokens");
    group.bench_function("one scan", |b| b.iter(|| plausible(black_box(&policy), 0.1, &mut candidates)));
    group.bench_function("two passes", |b| b.iter(|| plausible_two_pass(black_box(&policy), 0.1, &mut candidates)));
    let mut selector = Selector::default();
    group.bench_function("AAD", |b| {
        b.iter(|| selector.select(black_box(&policy), |id| reference[id as usize], 0.1, RATIO_CLIP));
    });
    group.bench_function("AAD by log-softmax", |b| {
        b.iter(|| select_by_log_softmax(black_box(&policy), black_box(&reference), 0.1));
    });
    group.finish();
}

fn trees(c: &mut Criterion) {
    let tree = Tree::random(&TreeConfig::default(), Seed::new(0)).expect("the default tree");
    c.bench_function("tree: optimum and AAD, 625 texts", |b| {
        b.iter(|| {
            let policy = tree.optimum(black_box(tree.reward()), 1.0)?;
            tree.decode(&policy, Rule::Aad, 0.1)
        });
    });
}

criterion_group!(benches, select, trees);
criterion_main!(benches);
