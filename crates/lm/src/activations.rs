//! Collects activations of many texts: one vector a text and site, with the pass ended at the deepest site.

use crate::generate::left_pad;
use crate::hex;
use crate::hooks::{Hooks, ResidualHook, Site, TokenInfo};
use crate::model::{Model, Pass};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tensor::StateDict;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// How the tokens of a text become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The last token.
    Last,
    /// The mean over positions from `from` on. Position 0 of many models is an attention sink, whose activations are a
    /// hundred times as large as all others: start at 1.
    Mean {
        /// The first position that counts.
        from: i64,
    },
}

/// Settings of [`collect`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CollectConfig {
    /// Where activations are read.
    pub sites: Vec<Site>,
    /// How tokens become a vector.
    pub pooling: Pooling,
    /// Texts a pass; texts of similar length share one.
    pub batch: usize,
}

impl Default for CollectConfig {
    fn default() -> Self {
        Self { sites: Vec::new(), pooling: Pooling::Mean { from: 1 }, batch: 32 }
    }
}

/// Activations of texts, by site: `[texts, width]` of f32 on the CPU, in the order of the texts.
#[derive(Debug)]
pub struct ActivationStore {
    /// By site.
    pub sites: BTreeMap<Site, Tensor>,
    /// [`Model::fingerprint`] of the model that they come from.
    pub model: String,
    /// How tokens became vectors.
    pub pooling: Pooling,
}

/// Reads the activations of tokenized texts.
///
/// # Errors
/// [`Error::InvalidArgument`] for no sites, a batch of 0 or a text too short for the pooling; [`Error::EmptyPrompt`],
/// [`Error::LayerOutOfRange`], and as [`Model::hidden`].
pub fn collect(model: &Model, texts: &[Vec<u32>], config: &CollectConfig) -> Result<ActivationStore> {
    collect_of(model, model.fingerprint()?, texts, config, None)
}

/// As [`collect`], with activations that `hook` changes at `hooked` sites: at a site of both, what the hook returned is read.
///
/// # Errors
/// As [`collect`], and what the hook reports.
pub fn collect_with(
    model: &Model,
    texts: &[Vec<u32>],
    config: &CollectConfig,
    hooked: &[Site],
    hook: &mut dyn ResidualHook,
) -> Result<ActivationStore> {
    collect_of(model, model.fingerprint()?, texts, config, Some((hooked, hook)))
}

/// [`collect`] with the model's fingerprint, which reads all its layers, at hand, and the hook of [`collect_with`].
fn collect_of(
    model: &Model,
    fingerprint: String,
    texts: &[Vec<u32>],
    config: &CollectConfig,
    mut changing: Option<(&[Site], &mut dyn ResidualHook)>,
) -> Result<ActivationStore> {
    let Some(&deepest) = config.sites.iter().max() else {
        return Err(Error::invalid("sites", "at least one", 0));
    };
    if config.batch == 0 {
        return Err(Error::invalid("batch", "at least 1", 0));
    }
    if let Pooling::Mean { from } = config.pooling {
        if from < 0 {
            return Err(Error::invalid("from", "at least 0", from));
        }
        if let Some(row) = texts.iter().position(|t| !t.is_empty() && t.len() as i64 <= from) {
            let expected = format!("longer than {from} tokens, because the mean starts at position {from}");
            return Err(Error::invalid(format!("text {row}"), expected, format!("{} long", texts[row].len())));
        }
    }
    if let Some(row) = texts.iter().position(Vec::is_empty) {
        return Err(Error::EmptyPrompt { row });
    }
    let mut order: Vec<usize> = (0..texts.len()).collect();
    order.sort_by_key(|&i| texts[i].len());
    let width = model.config().width;
    let _guard = no_grad_guard();
    let mut sites = BTreeMap::new();
    for &site in &config.sites {
        sites.insert(site, Tensor::f_zeros([texts.len() as i64, width], (Kind::Float, Device::Cpu))?);
    }
    for chunk in order.chunks(config.batch) {
        let batch: Vec<Vec<u32>> = chunk.iter().map(|&i| texts[i].clone()).collect();
        let (ids, real) = left_pad(&batch, model.device())?;
        let rows = Tensor::from_slice(&chunk.iter().map(|&i| i as i64).collect::<Vec<_>>());
        let mut reader = |site: Site, x: &Tensor, tokens: &TokenInfo<'_>| {
            let pooled = pool(x, tokens, config.pooling)?.f_to_device(Device::Cpu)?;
            if let Some(all) = sites.get_mut(&site) {
                let _ = all.f_index_copy_(0, &rows, &pooled)?;
            }
            Ok(None)
        };
        let mut hooks = match &mut changing {
            None => Hooks::new(),
            Some((sites, hook)) => Hooks::new().on(sites, &mut **hook),
        };
        hooks = hooks.on(&config.sites, &mut reader).stop_after(deepest);
        let _ = model.hidden(&ids, &mut Pass { real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() })?;
    }
    Ok(ActivationStore { sites, model: fingerprint, pooling: config.pooling })
}

/// As [`collect`], kept in a file of `folder` whose name is a digest of model, texts and settings: the second time nothing is
/// computed. A file that can't be used is made again.
///
/// # Errors
/// As [`collect`]; [`Error::Io`] if the folder can't be written.
pub fn collect_cached(
    model: &Model,
    texts: &[Vec<u32>],
    config: &CollectConfig,
    folder: &Path,
) -> Result<ActivationStore> {
    let fingerprint = model.fingerprint()?;
    let mut digest = Sha256::new();
    digest.update(&fingerprint);
    // The batch changes nothing but the last bits.
    digest.update(format!("{:?} {:?} {:?}", config.sites, config.pooling, model.kind()));
    for text in texts {
        digest.update((text.len() as u64).to_le_bytes());
        for id in text {
            digest.update(id.to_le_bytes());
        }
    }
    let name = hex(&digest.finalize()[..16]);
    let path: PathBuf = folder.join(format!("activations-{name}.safetensors"));
    if let Ok(store) = ActivationStore::load(&path) {
        let whole = |t: &Tensor| t.size() == [texts.len() as i64, model.config().width];
        let complete = config.sites.iter().all(|site| store.sites.get(site).is_some_and(whole));
        if complete && store.model == fingerprint {
            return Ok(store);
        }
    }
    let store = collect_of(model, fingerprint, texts, config, None)?;
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
    store.save(&path)?;
    Ok(store)
}

/// `[batch, time, width] → [batch, width]` in f32.
fn pool(x: &Tensor, tokens: &TokenInfo<'_>, pooling: Pooling) -> Result<Tensor> {
    match pooling {
        // Padding is on the left.
        Pooling::Last => Ok(x.f_select(1, -1)?.f_to_kind(Kind::Float)?),
        Pooling::Mean { from } => {
            let mut counts = tokens.positions.f_ge(from)?; // (b, t)
            if let Some(real) = tokens.real {
                counts = counts.f_logical_and(real)?;
            }
            let counts = counts.f_to_kind(Kind::Float)?.f_unsqueeze(-1)?; // (b, t, 1)
            let sum =
                x.f_to_kind(Kind::Float)?.f_mul(&counts)?.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Float)?;
            Ok(sum.f_div(&counts.f_sum_dim_intlist([1i64].as_slice(), false, Kind::Float)?)?)
        }
    }
}

impl ActivationStore {
    /// Writes a safetensors file with a tensor a site, named as in `resid_post.7`.
    ///
    /// # Errors
    /// What writing reports.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut state = StateDict::default();
        for (site, tensor) in &self.sites {
            state.tensors.insert(site.to_string(), tensor.shallow_clone());
        }
        state.meta.insert("model".into(), self.model.clone().into());
        let pooling = serde_json::to_value(self.pooling).map_err(|source| Error::Json { path: path.into(), source })?;
        state.meta.insert("pooling".into(), pooling);
        Ok(state.save(path)?)
    }

    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// What reading reports; [`Error::Checkpoint`] for a file of something else.
    pub fn load(path: &Path) -> Result<Self> {
        let state = StateDict::load(path)?;
        let bad = |reason: &str| Error::Checkpoint { path: path.to_owned(), reason: reason.to_owned() };
        let model = state.meta.get("model").and_then(|m| m.as_str());
        let model = model.ok_or_else(|| bad("it has no `model` in its metadata: it holds no activations"))?.to_owned();
        let pooling = state.meta.get("pooling").cloned().unwrap_or_default();
        let pooling =
            serde_json::from_value(pooling).map_err(|source| Error::Json { path: path.to_owned(), source })?;
        let mut sites = BTreeMap::new();
        for (name, tensor) in state.tensors {
            sites.insert(name.parse()?, tensor);
        }
        Ok(Self { sites, model, pooling })
    }
}
