//! Activations of SmolLM2 on rated snippets, by domain and class, collected once and cut in two anew for each seed.

use super::super::sentiment::{clear_snippets, domain_index, shuffled};
use crate::experiment::Context;
use anyhow::{Result, ensure};
use lm::activations::{CollectConfig, Pooling, collect_cached};
use lm::hooks::Site;
use lm::{Lm, LoadOptions};
use ndarray::{Array2, ArrayView2, Axis, concatenate};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tensor::Seed;

/// The layers of the protocol, counted from 0: after them the residual stream is read.
pub(super) const LAYERS: [usize; 4] = [7, 11, 15, 19];

/// How many snippets of each domain and class are used to fit and to test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sizes {
    pub(super) fit: usize,
    pub(super) test: usize,
}

/// Activations of all snippets.
#[derive(Debug)]
pub(super) struct Pool {
    /// By layer, then by domain and class (negative, positive): `[fit + test, width]`.
    layers: BTreeMap<usize, Vec<[Array2<f32>; 2]>>,
    /// The negative snippets' tokens by domain.
    negative: Vec<Vec<Vec<u32>>>,
    sizes: Sizes,
}

/// One layer's activations, cut.
#[derive(Debug)]
pub(super) struct Split {
    /// By domain and class, to fit on.
    pub(super) fit: Vec<[Array2<f32>; 2]>,
    /// By domain and class, to test on.
    pub(super) test: Vec<[Array2<f32>; 2]>,
    /// Tokens of the negative snippets to test on, by domain.
    pub(super) prompts: Vec<Vec<Vec<u32>>>,
}

/// The model that all experiments of the crate steer.
pub(super) fn smollm2(context: &Context) -> Result<Lm> {
    let options = LoadOptions { device: context.device, ..LoadOptions::default() };
    Ok(Lm::load(&datasets::smollm2::path()?, &options)?)
}

/// Where activations are kept between runs.
pub(super) fn kept() -> Result<std::path::PathBuf> {
    Ok(datasets::cache::cache_dir()?.join("activations"))
}

/// A pool that was collected, with its sizes and layers.
type Known = (Sizes, Vec<usize>, Arc<Pool>);

impl Pool {
    /// The pool of these sizes and layers: collected once a process, and kept in the cache.
    pub(super) fn get(context: &Context, sizes: Sizes, layers: &[usize]) -> Result<Arc<Self>> {
        static POOLS: Mutex<Vec<Known>> = Mutex::new(Vec::new());
        let mut pools = POOLS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, _, pool)) = pools.iter().find(|(s, l, _)| *s == sizes && l == layers) {
            return Ok(Arc::clone(pool));
        }
        let pool = Arc::new(Self::collect(context, sizes, layers)?);
        pools.push((sizes, layers.to_vec(), Arc::clone(&pool)));
        Ok(pool)
    }

    fn collect(context: &Context, sizes: Sizes, layers: &[usize]) -> Result<Self> {
        let lm = smollm2(context)?;
        let snippets = clear_snippets()?;
        let wanted = sizes.fit + sizes.test;
        let mut texts = Vec::new();
        for domain in 0..4 {
            for positive in [false, true] {
                let of_cell: Vec<_> = snippets
                    .iter()
                    .filter(|r| domain_index(r.domain) == domain && (r.rating > 0.0) == positive)
                    .collect();
                ensure!(
                    of_cell.len() >= wanted,
                    "a domain has {} texts of a class, fewer than {wanted}",
                    of_cell.len()
                );
                let seed = Seed::new(0).child("snippets").index(2 * domain as u64 + u64::from(positive));
                for &i in &shuffled(of_cell.len(), seed)[..wanted] {
                    texts.push(lm.encode(&of_cell[i].text)?);
                }
            }
        }
        let config = CollectConfig {
            sites: layers.iter().map(|&layer| Site::ResidPost(layer)).collect(),
            pooling: Pooling::Last,
            ..CollectConfig::default()
        };
        let store = collect_cached(&lm.model, &texts, &config, &kept()?)?;
        let mut by_layer = BTreeMap::new();
        for &layer in layers {
            let all = steering_ot::model::activations_at(&store, Site::ResidPost(layer))?;
            let cell = |i: usize| all.slice(ndarray::s![i * wanted..(i + 1) * wanted, ..]).to_owned();
            by_layer.insert(layer, (0..4).map(|domain| [cell(2 * domain), cell(2 * domain + 1)]).collect());
        }
        let negative = (0..4).map(|domain| texts[2 * domain * wanted..(2 * domain + 1) * wanted].to_vec()).collect();
        Ok(Self { layers: by_layer, negative, sizes })
    }

    /// A layer, cut by the seed.
    pub(super) fn split(&self, layer: usize, seed: u64) -> Result<Split> {
        let Some(cells) = self.layers.get(&layer) else {
            anyhow::bail!("layer {layer} was not collected");
        };
        let (mut fit, mut test, mut prompts) = (Vec::new(), Vec::new(), Vec::new());
        for (domain, cell) in cells.iter().enumerate() {
            let orders = [0, 1].map(|class| {
                shuffled(cell[class].nrows(), Seed::new(seed).child("split").index((2 * domain + class) as u64))
            });
            let part = |class: usize, chosen: &[usize]| cell[class].select(Axis(0), chosen);
            fit.push([0, 1].map(|class| part(class, &orders[class][..self.sizes.fit])));
            test.push([0, 1].map(|class| part(class, &orders[class][self.sizes.fit..])));
            prompts.push(orders[0][self.sizes.fit..].iter().map(|&i| self.negative[domain][i].clone()).collect());
        }
        Ok(Split { fit, test, prompts })
    }
}

/// All domains of a class under one another.
pub(super) fn stacked(cells: &[[Array2<f32>; 2]], class: usize) -> Result<Array2<f32>> {
    stack(cells.iter().map(|cell| &cell[class]))
}

/// Rows under one another.
pub(super) fn stack<'a>(parts: impl IntoIterator<Item = &'a Array2<f32>>) -> Result<Array2<f32>> {
    let views: Vec<ArrayView2<'_, f32>> = parts.into_iter().map(|part| part.view()).collect();
    Ok(concatenate(Axis(0), &views)?)
}
