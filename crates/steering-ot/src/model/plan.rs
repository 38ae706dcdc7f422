//! A steering plan: maps at sites of a language model, as a hook.

use super::mask::TokenMask;
use crate::ablate::ablate;
use crate::steer::Steer;
use crate::tensors;
use crate::{Error, Result};
use lm::hooks::{Hooks, ResidualHook, Site, TokenInfo};
use lm::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tensor::interop;
use tensor::tch::{Tensor, no_grad_guard};

/// How the shifts of a plan are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// x + α v̂(x) \[paper\]. Negative α goes the other way.
    #[default]
    ActAdd,
    /// x − r̂ r̂ᵀ x with r̂ = v̂(x)/‖v̂(x)‖ (official code for the reuse of one site's fit at all sites; the projection per input is
    /// a \[reconstruction\]). α is not used.
    Ablate,
    /// (1 − α) x + α T(x) with α from 0 to 1 (official code's "strength"). For maps that are shifts it is
    /// [`ActAdd`](Self::ActAdd); the bound on α is the difference.
    Interpolate,
    /// As [`ActAdd`](Self::ActAdd), with maps that were [fitted one after the other](super::fit_sequential), each on activations
    /// that the earlier ones had moved (official code).
    Sequential,
}

/// A map at a site.
#[derive(Debug, Clone)]
pub struct SiteMap {
    /// Where.
    pub site: Site,
    /// What is done there.
    pub map: Arc<dyn Steer>,
}

/// Maps at sites of a language model. It is a [`ResidualHook`]: see [`hooks`](Self::hooks).
///
/// An edit at a layer changes the keys and values of the layers above, and those stay in the cache: setting another
/// [`alpha`](Self::alpha) in the middle of a generation means "from now on".
#[derive(Debug, Clone, Default)]
pub struct SteeringPlan {
    /// The maps, at most one a site (several at one site: [`Composition`](crate::compose::Composition)).
    pub sites: Vec<SiteMap>,
    /// How they are applied.
    pub mode: Mode,
    /// Strength.
    pub alpha: f64,
    /// Which tokens are edited.
    pub tokens: TokenMask,
    /// [`Model::fingerprint`] of the model that the maps were fitted on, if known.
    pub model: Option<String>,
    /// How many activations (a token at a site) were edited so far.
    pub edited: u64,
}

impl SteeringPlan {
    /// A plan of strength 1 that adds at all tokens but the first.
    pub fn new(sites: Vec<SiteMap>) -> Self {
        Self { sites, alpha: 1.0, ..Self::default() }
    }

    /// A plan with one map at one site.
    pub fn at(site: Site, map: impl Steer + 'static) -> Self {
        Self::new(vec![SiteMap { site, map: Arc::new(map) }])
    }

    /// Directional ablation at all these sites, with the map of one of them.
    pub fn ablation(sites: &[Site], map: impl Steer + 'static) -> Self {
        let map: Arc<dyn Steer> = Arc::new(map);
        let sites = sites.iter().map(|&site| SiteMap { site, map: Arc::clone(&map) }).collect();
        Self { mode: Mode::Ablate, ..Self::new(sites) }
    }

    /// # Errors
    /// [`Error::InvalidArgument`] for no sites, a site that comes twice, an α that isn't finite or, interpolating, isn't from 0
    /// to 1.
    pub fn validate(&self) -> Result<()> {
        if self.sites.is_empty() {
            return Err(Error::invalid("sites", "at least one", 0));
        }
        for (at, one) in self.sites.iter().enumerate() {
            if self.sites[..at].iter().any(|earlier| earlier.site == one.site) {
                let expected = "different from each other (several maps at one site: `compose::Composition`)";
                return Err(Error::invalid("sites", expected, format!("{} twice", one.site)));
            }
        }
        if !self.alpha.is_finite() {
            return Err(Error::invalid("alpha", "finite", self.alpha));
        }
        if self.mode == Mode::Interpolate && !(0.0..=1.0).contains(&self.alpha) {
            return Err(Error::invalid("alpha", "from 0 to 1 where it interpolates", self.alpha));
        }
        self.tokens.validate()
    }

    /// Whether the plan can steer this model.
    ///
    /// # Errors
    /// As [`validate`](Self::validate); [`Error::LayerOutOfRange`] for a site that the model lacks, [`Error::DimMismatch`] for
    /// maps of another width, [`Error::ModelMismatch`] if the maps were fitted on another model.
    pub fn check(&self, model: &Model) -> Result<()> {
        self.validate()?;
        let (layers, width) = (model.config().layers, model.config().width as usize);
        for one in &self.sites {
            if one.site.layer() >= layers {
                return Err(Error::LayerOutOfRange { layer: one.site.layer(), layers });
            }
            if one.map.width() != width {
                let what = format!("The model, at whose site {} the plan has a map,", one.site);
                return Err(Error::dim(what, one.map.width(), width));
            }
        }
        match &self.model {
            None => Ok(()),
            Some(fitted) => {
                let given = model.fingerprint()?;
                if *fitted == given {
                    return Ok(());
                }
                Err(Error::ModelMismatch { fitted: fitted.clone(), given })
            }
        }
    }

    /// This plan as the hooks of a pass or a generation.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn hooks(&mut self) -> Result<Hooks<'_>> {
        self.validate()?;
        let sites: Vec<Site> = self.sites.iter().map(|one| one.site).collect();
        Ok(Hooks::new().on(&sites, self))
    }

    /// What the plan makes of activations `[rows, width]`, in their kind.
    fn moved(&self, map: &dyn Steer, x: &Tensor) -> Result<Tensor> {
        let kind = x.kind();
        let x = x.f_to_kind(tensors::wide(kind))?;
        let shift = tensors::shift(map, &x)?;
        if self.mode == Mode::Ablate {
            let ablated = ablate(tensors::matrix(&shift)?.view(), tensors::matrix(&x)?.view())?;
            return Ok(interop::to_tensor(&ablated.view())?.f_to_device(x.device())?.f_to_kind(kind)?);
        }
        Ok(x.f_add(&shift.f_mul_scalar(self.alpha)?)?.f_to_kind(kind)?)
    }

    fn edit(&mut self, site: Site, x: &Tensor, tokens: &TokenInfo<'_>) -> Result<Option<Tensor>> {
        let Some(one) = self.sites.iter().find(|one| one.site == site) else {
            return Ok(None);
        };
        let map = Arc::clone(&one.map);
        let width = map.width() as i64;
        let got = x.size().last().copied().unwrap_or(0);
        if got != width {
            return Err(Error::dim(format!("The activation at {site}"), map.width(), got as usize));
        }
        let _guard = no_grad_guard();
        let flat = x.f_reshape([-1, width])?; // (b·t, d)
        let moved = match self.tokens.of(tokens)? {
            None => {
                self.edited += flat.size()[0] as u64;
                self.moved(&*map, &flat)?
            }
            Some(mask) => {
                let rows = TokenMask::rows(&mask, x.device())?;
                if rows.numel() == 0 {
                    return Ok(None);
                }
                self.edited += rows.numel() as u64;
                let chosen = flat.f_index_select(0, &rows)?;
                flat.f_index_copy(0, &rows, &self.moved(&*map, &chosen)?)?
            }
        };
        Ok(Some(moved.f_reshape(x.size())?))
    }
}

impl ResidualHook for SteeringPlan {
    fn apply(&mut self, site: Site, x: &Tensor, tokens: &TokenInfo<'_>) -> lm::Result<Option<Tensor>> {
        self.edit(site, x, tokens).map_err(|source| lm::Error::plug("ResidualHook", site.layer(), source))
    }
}
