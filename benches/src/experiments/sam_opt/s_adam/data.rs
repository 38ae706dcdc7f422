//! Digits for S-Adam's experiments: MNIST-10k, pooled to 14×14.

use anyhow::Result;
use datasets::{image, mnist10k, split};
use rand::Rng as _;
use rand::seq::SliceRandom as _;
use std::sync::OnceLock;
use tensor::ndarray::{Array2, Axis};
use tensor::tch::{Device, Kind, Tensor};
use tensor::{Seed, interop};

/// Digits to test on: the same for every seed, so that none of them is trained on in another seed or in the search.
const TEST: usize = 3000;
/// Share of the training digits that a search keeps for validation [specification].
const VALIDATION: f64 = 0.2;
/// Seed of the one division into test digits and the others.
const PARTITION: u64 = 0;

/// Width of a digit's row.
pub(super) const FEATURES: i64 = 196;

struct Pool {
    x: Array2<f32>,
    y: Vec<u8>,
}

impl Pool {
    fn select(&self, rows: &[usize]) -> Self {
        Self { x: self.x.select(Axis(0), rows), y: rows.iter().map(|&i| self.y[i]).collect() }
    }
}

/// The test digits and the others.
fn pools() -> Result<&'static (Pool, Pool)> {
    static POOLS: OnceLock<(Pool, Pool)> = OnceLock::new();
    if let Some(pools) = POOLS.get() {
        return Ok(pools);
    }
    let images = mnist10k::load()?;
    let pooled = image::average_pool(&images.normalized(), 2, 2)?;
    let (n, height, width) = pooled.dim();
    let all = Pool { x: pooled.into_shape_with_order((n, height * width))?, y: images.y };
    let order = split::stratified_order(&all.y, PARTITION);
    let (test, rest) = order.split_at(TEST);
    let pools = (all.select(test), all.select(rest));
    Ok(POOLS.get_or_init(|| pools))
}

/// Rows `[n, 196]` with their classes `[n]`.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) x: Tensor,
    pub(super) y: Tensor,
}

impl Samples {
    pub(super) fn rows(&self, rows: &[i64]) -> Self {
        let rows = Tensor::from_slice(rows).to_device(self.x.device());
        Self { x: self.x.index_select(0, &rows), y: self.y.index_select(0, &rows) }
    }

    pub(super) fn len(&self) -> usize {
        self.y.numel()
    }
}

/// What a run learns from and is scored on.
#[derive(Debug)]
pub(super) struct Data {
    pub(super) train: Samples,
    pub(super) score: Samples,
}

/// Which digits a run gets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draw {
    /// Number of training digits.
    pub(super) train: usize,
    /// Share of them whose label is redrawn uniformly.
    pub(super) label_noise: f64,
}

impl Data {
    /// All training digits, and the test digits with their true labels.
    pub(super) fn evaluated(draw: Draw, seed: u64, device: Device) -> Result<Self> {
        let (part, scale) = training(draw, seed)?;
        let test = &pools()?.0;
        Ok(Self { train: samples(&part.x, &part.y, scale, device)?, score: samples(&test.x, &test.y, scale, device)? })
    }

    /// Four fifths of the training digits, and the last fifth, with labels as noisy as those learned from: what a search
    /// may see.
    pub(super) fn searched(draw: Draw, seed: u64, device: Device) -> Result<Self> {
        let (all, scale) = training(draw, seed)?;
        let kept = all.y.len() - (VALIDATION * all.y.len() as f64).round() as usize;
        let part = |from: usize, to: usize| {
            let rows: Vec<usize> = (from..to).collect();
            let part = all.select(&rows);
            samples(&part.x, &part.y, scale, device)
        };
        Ok(Self { train: part(0, kept)?, score: part(kept, all.y.len())? })
    }
}

/// The training digits of a seed, and the mean and standard deviation of their pixels.
fn training(draw: Draw, seed: u64) -> Result<(Pool, (f32, f32))> {
    let rest = &pools()?.1;
    let seeds = Seed::new(seed).child("s-adam.data");
    let mut rows = split::subsample(&rest.y, draw.train, seeds.child("digits").value());
    rows.shuffle(&mut seeds.child("order").rng());
    let mut part = rest.select(&rows);
    let mut rng = seeds.child("labels").rng();
    for class in &mut part.y {
        if rng.random_bool(draw.label_noise) {
            *class = rng.random_range(0..10);
        }
    }
    let mean = part.x.mean().unwrap_or(0.0);
    let sd = part.x.std(0.0);
    Ok((part, (mean, sd)))
}

fn samples(x: &Array2<f32>, y: &[u8], (mean, sd): (f32, f32), device: Device) -> Result<Samples> {
    let x = x.mapv(|value| (value - mean) / sd);
    let y: Vec<i64> = y.iter().map(|&class| i64::from(class)).collect();
    Ok(Samples { x: interop::to_tensor(&x.view())?.to_device(device), y: Tensor::from_slice(&y).to_device(device) })
}

/// Accuracy in percent of logits `[n, 10]`.
pub(super) fn accuracy(logits: &Tensor, y: &Tensor) -> f64 {
    100.0 * logits.argmax(1, false).eq_tensor(y).to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(samples: &Samples) -> Vec<Vec<u32>> {
        let flat: Vec<f32> = samples.x.reshape([-1]).try_into().unwrap();
        flat.chunks(FEATURES as usize).map(|row| row.iter().map(|v| (v * 1e3).round().to_bits()).collect()).collect()
    }

    #[test]
    fn what_is_tested_is_never_trained_on_and_noise_stays_out_of_the_test() {
        if !datasets::cache::is_present(mnist10k::NAME).unwrap() {
            println!("skipped: the data set `mnist-10k` isn't in the cache");
            return;
        }
        let draw = Draw { train: 500, label_noise: 0.4 };
        let clean = Draw { label_noise: 0.0, ..draw };
        let data = Data::evaluated(draw, 7, Device::Cpu).unwrap();
        assert_eq!((data.train.len(), data.score.len()), (500, TEST));
        let same = Data::evaluated(clean, 7, Device::Cpu).unwrap();
        let changed = data.train.y.ne_tensor(&same.train.y).sum(Kind::Int64).int64_value(&[]);
        // 0.4·0.9 of 500 is 180; five standard deviations.
        assert!((125..235).contains(&changed), "{changed}");
        assert_eq!(data.score.y, same.score.y);
        let searched = Data::searched(draw, 7, Device::Cpu).unwrap();
        assert_eq!((searched.train.len(), searched.score.len()), (400, 100));
        let test: std::collections::HashSet<_> = rows(&data.score).into_iter().collect();
        let own: Vec<_> = rows(&data.train);
        assert!(own.iter().all(|row| !test.contains(row)));
        let validation: std::collections::HashSet<_> = rows(&searched.score).into_iter().collect();
        assert!(rows(&searched.train).iter().all(|row| !validation.contains(row)));
    }
}
