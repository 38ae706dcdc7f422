//! The socket for reading and editing activations: named places in the decoder, and what a hook learns about the tokens.
//!
//! A hook is called with the activations of a place; what it returns replaces them. An edit at layer `l` changes the keys
//! and values of the layers above, and those stay in the cache: changing a hook's strength in the middle of a generation
//! means "from now on". Hooks never see or change what a place without a hook computes, and without hooks nothing is paid.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use tensor::tch::Tensor;

/// A place in the decoder, with the number of its layer from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Site {
    /// The residual stream that enters the layer.
    ResidPre(usize),
    /// What attention reads: the output of the norm before it.
    AttnNormOut(usize),
    /// What attention adds to the stream.
    AttnOut(usize),
    /// The residual stream between attention and feed-forward.
    ResidMid(usize),
    /// What the feed-forward reads: the output of the norm before it.
    MlpNormOut(usize),
    /// What the feed-forward adds to the stream.
    MlpOut(usize),
    /// The residual stream that leaves the layer.
    ResidPost(usize),
}

impl Site {
    /// The number of its layer.
    pub fn layer(self) -> usize {
        match self {
            Self::ResidPre(l)
            | Self::AttnNormOut(l)
            | Self::AttnOut(l)
            | Self::ResidMid(l)
            | Self::MlpNormOut(l)
            | Self::MlpOut(l)
            | Self::ResidPost(l) => l,
        }
    }

    /// Its place in the order of a pass.
    fn depth(self) -> (usize, u8) {
        let within = match self {
            Self::ResidPre(_) => 0,
            Self::AttnNormOut(_) => 1,
            Self::AttnOut(_) => 2,
            Self::ResidMid(_) => 3,
            Self::MlpNormOut(_) => 4,
            Self::MlpOut(_) => 5,
            Self::ResidPost(_) => 6,
        };
        (self.layer(), within)
    }

    /// # Errors
    /// [`Error::LayerOutOfRange`] if a model of so many layers doesn't have it.
    pub fn check(self, layers: usize) -> Result<()> {
        if self.layer() < layers { Ok(()) } else { Err(Error::LayerOutOfRange { layer: self.layer(), layers }) }
    }
}

impl Ord for Site {
    /// In the order of a pass.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.depth().cmp(&other.depth())
    }
}

impl PartialOrd for Site {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// `resid_post.7`, as the names in files have it.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::ResidPre(_) => "resid_pre",
            Self::AttnNormOut(_) => "attn_norm_out",
            Self::AttnOut(_) => "attn_out",
            Self::ResidMid(_) => "resid_mid",
            Self::MlpNormOut(_) => "mlp_norm_out",
            Self::MlpOut(_) => "mlp_out",
            Self::ResidPost(_) => "resid_post",
        };
        write!(f, "{name}.{}", self.layer())
    }
}

impl std::str::FromStr for Site {
    type Err = Error;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::invalid("site", "a name and a layer, as in `resid_post.7`", format!("`{text}`"));
        let (name, layer) = text.rsplit_once('.').ok_or_else(bad)?;
        let layer = layer.parse().map_err(|_| bad())?;
        Ok(match name {
            "resid_pre" => Self::ResidPre(layer),
            "attn_norm_out" => Self::AttnNormOut(layer),
            "attn_out" => Self::AttnOut(layer),
            "resid_mid" => Self::ResidMid(layer),
            "mlp_norm_out" => Self::MlpNormOut(layer),
            "mlp_out" => Self::MlpOut(layer),
            "resid_post" => Self::ResidPost(layer),
            _ => return Err(bad()),
        })
    }
}

/// What a hook learns about the tokens of a pass.
#[derive(Debug)]
pub struct TokenInfo<'a> {
    /// Position of each token in its own text, from 0, `[batch, time]` of i64. Padding has 0.
    pub positions: &'a Tensor,
    /// Which tokens are real, `[batch, time]` of bool; none if all are.
    pub real: Option<&'a Tensor>,
    /// Number of real prompt tokens of each row: a token at this position or later was generated.
    pub prompt_lengths: &'a [i64],
    /// Number of each row among the prompts as they were given: in a generation finished rows leave the batch, and the
    /// others keep their numbers. Outside of one it counts from 0.
    pub rows: &'a [usize],
    /// Number of passes that this cache has seen before (0 for the prompt): [`Cache::steps`](crate::cache::Cache::steps).
    pub step: usize,
}

/// The socket: reads the activations of a place, and may replace them.
pub trait ResidualHook {
    /// `x` is `[batch, time, width]`. `None` leaves it as it is; a tensor of the same shape and kind replaces it.
    /// Padding rows are given too and must not be relied on; use [`TokenInfo::real`].
    ///
    /// # Errors
    /// Whatever the plug reports; the pass ends and the cache is put back.
    fn apply(&mut self, site: Site, x: &Tensor, tokens: &TokenInfo<'_>) -> Result<Option<Tensor>>;
}

impl<F: FnMut(Site, &Tensor, &TokenInfo<'_>) -> Result<Option<Tensor>>> ResidualHook for F {
    fn apply(&mut self, site: Site, x: &Tensor, tokens: &TokenInfo<'_>) -> Result<Option<Tensor>> {
        self(site, x, tokens)
    }
}

/// The hooks of a pass, in the order in which they were added.
#[derive(Default)]
pub struct Hooks<'a> {
    entries: Vec<(Vec<Site>, &'a mut dyn ResidualHook)>,
    stop_after: Option<Site>,
}

impl fmt::Debug for Hooks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sites: Vec<_> = self.entries.iter().map(|(sites, _)| sites).collect();
        f.debug_struct("Hooks").field("sites", &sites).field("stop_after", &self.stop_after).finish()
    }
}

impl<'a> Hooks<'a> {
    /// No hooks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls `hook` at these sites. Several hooks at one site are called in the order in which they were added, each
    /// with what the one before it returned.
    #[must_use]
    pub fn on(mut self, sites: &[Site], hook: &'a mut dyn ResidualHook) -> Self {
        self.entries.push((sites.to_vec(), hook));
        self
    }

    /// Ends a pass after this site: for reading activations, when nothing above is needed. The pass then returns the
    /// activations of the site.
    #[must_use]
    pub fn stop_after(mut self, site: Site) -> Self {
        self.stop_after = Some(site);
        self
    }

    /// The site after which the pass ends.
    pub fn stops_after(&self) -> Option<Site> {
        self.stop_after
    }

    /// # Errors
    /// [`Error::LayerOutOfRange`] for a site that a model of so many layers doesn't have; [`Error::InvalidArgument`] for one
    /// below layer `first`, where the pass starts.
    pub(crate) fn check(&self, layers: usize, first: usize) -> Result<()> {
        let mut sites = self.entries.iter().flat_map(|(sites, _)| sites).chain(&self.stop_after);
        sites.try_for_each(|site| {
            site.check(layers)?;
            if site.layer() < first {
                let expected = format!("at layer {first} or above, where this pass starts");
                return Err(Error::invalid("a site of the hooks", expected, site));
            }
            Ok(())
        })
    }

    /// The activations after all hooks of the site.
    pub(crate) fn run(&mut self, site: Site, x: Tensor, tokens: &TokenInfo<'_>) -> Result<Tensor> {
        let mut x = x;
        for (sites, hook) in &mut self.entries {
            if !sites.contains(&site) {
                continue;
            }
            if let Some(edited) = hook.apply(site, &x, tokens)? {
                if edited.size() != x.size() || edited.kind() != x.kind() {
                    let expected = format!("{:?} of {:?}", x.size(), x.kind());
                    return Err(Error::shape(format!("What a hook returned at {site}"), expected, &edited));
                }
                x = edited;
            }
        }
        Ok(x)
    }
}
