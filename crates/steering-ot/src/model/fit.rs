//! From texts to activations, and from activations to plans.

use super::plan::{Mode, SiteMap, SteeringPlan};
use crate::steer::Steer;
use crate::{Error, Result};
use lm::Lm;
use lm::activations::{ActivationStore, CollectConfig, collect, collect_cached, collect_with};
use lm::hooks::Site;
use lm::model::Model;
use ndarray::{Array2, ArrayView2};
use std::path::Path;
use std::sync::Arc;

/// Activations of texts, one vector a text and site, `[texts, width]`; kept in a file of `cache` where it is given, under a
/// digest of model, texts and settings.
///
/// # Errors
/// As [`lm::activations::collect`].
pub fn collect_activations(
    lm: &Lm,
    texts: &[String],
    config: &CollectConfig,
    cache: Option<&Path>,
) -> Result<ActivationStore> {
    let ids = texts.iter().map(|text| lm.encode(text)).collect::<lm::Result<Vec<_>>>()?;
    Ok(match cache {
        None => collect(&lm.model, &ids, config)?,
        Some(folder) => collect_cached(&lm.model, &ids, config, folder)?,
    })
}

/// The activations of a site as an array `[texts, width]`.
///
/// # Errors
/// [`Error::InvalidArgument`] for a site that wasn't collected.
pub fn activations_at(store: &ActivationStore, site: Site) -> Result<Array2<f32>> {
    let Some(x) = store.sites.get(&site) else {
        let there: Vec<String> = store.sites.keys().map(ToString::to_string).collect();
        return Err(Error::invalid("site", format!("one that was collected ({})", there.join(", ")), site));
    };
    crate::tensors::matrix(x)
}

/// Fits a map at each site of both stores, each by itself: `fit(site, source, target)`.
///
/// ```no_run
/// use steering_ot::chars::CharsMap;
/// use steering_ot::config::CharsConfig;
/// use steering_ot::model::fit_plan;
/// # fn example(negative: &lm::activations::ActivationStore, positive: &lm::activations::ActivationStore) -> steering_ot::Result<()> {
/// let config = CharsConfig::default();
/// let plan = fit_plan(negative, positive, |_, source, target| Ok(Box::new(CharsMap::fit(source, target, &config)?)))?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::ModelMismatch`] if the stores come from two models, [`Error::InvalidArgument`] for a site of which the other knows
/// nothing or another pooling; what `fit` reports.
pub fn fit_plan(
    source: &ActivationStore,
    target: &ActivationStore,
    mut fit: impl FnMut(Site, ArrayView2<'_, f32>, ArrayView2<'_, f32>) -> Result<Box<dyn Steer>>,
) -> Result<SteeringPlan> {
    if source.model != target.model {
        return Err(Error::ModelMismatch { fitted: source.model.clone(), given: target.model.clone() });
    }
    if source.pooling != target.pooling {
        let expected = format!("{:?}, as that of the source", source.pooling);
        return Err(Error::invalid("the target's pooling", expected, format!("{:?}", target.pooling)));
    }
    let mut sites = Vec::new();
    for &site in source.sites.keys() {
        let (a, b) = (activations_at(source, site)?, activations_at(target, site)?);
        sites.push(SiteMap { site, map: Arc::from(fit(site, a.view(), b.view())?) });
    }
    Ok(SteeringPlan { model: Some(source.model.clone()), ..SteeringPlan::new(sites) })
}

/// Fits maps at several sites one after the other: the map of a site is fitted on source activations that the maps of all
/// earlier sites have moved with strength `alpha` (official code; that the target's activations stay as they are follows
/// ml-act, which the mode comes from).
///
/// Sites are taken in the order of a pass. Each costs one pass of the source texts up to it; the target texts are read once.
///
/// # Errors
/// [`Error::InvalidArgument`] for an α that isn't finite; as [`fit_plan`], and as [`lm::activations::collect`].
pub fn fit_sequential(
    model: &Model,
    source: &[Vec<u32>],
    target: &[Vec<u32>],
    config: &CollectConfig,
    alpha: f64,
    mut fit: impl FnMut(Site, ArrayView2<'_, f32>, ArrayView2<'_, f32>) -> Result<Box<dyn Steer>>,
) -> Result<SteeringPlan> {
    if !alpha.is_finite() {
        return Err(Error::invalid("alpha", "finite", alpha));
    }
    let targets = collect(model, target, config)?;
    let mut plan =
        SteeringPlan { mode: Mode::Sequential, alpha, model: Some(targets.model.clone()), ..SteeringPlan::default() };
    for &site in targets.sites.keys() {
        let moved = collect_steered(model, source, &mut plan, site, config)?;
        let map = fit(site, moved.view(), activations_at(&targets, site)?.view())?;
        plan.sites.push(SiteMap { site, map: Arc::from(map) });
    }
    plan.edited = 0;
    Ok(plan)
}

/// Pooled activations `[texts, width]` of a site in a model that a plan steers, before the plan's own edit there.
///
/// # Errors
/// As [`lm::activations::collect`], and what the plan reports.
pub fn collect_steered(
    model: &Model,
    texts: &[Vec<u32>],
    plan: &mut SteeringPlan,
    site: Site,
    config: &CollectConfig,
) -> Result<Array2<f32>> {
    let steered: Vec<Site> = plan.sites.iter().map(|one| one.site).filter(|&earlier| earlier < site).collect();
    let config = CollectConfig { sites: vec![site], ..config.clone() };
    activations_at(&collect_with(model, texts, &config, &steered, plan)?, site)
}
