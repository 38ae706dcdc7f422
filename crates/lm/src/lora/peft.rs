//! Adapters on disk, as the Python package `peft` has them: `adapter_config.json` and `adapter_model.safetensors`.

use super::config::{self, LoraConfig};
use super::{Adapter, Layers, Pair, module};
use crate::config::{Architecture, ModelConfig};
use crate::linear::Projection;
use crate::load::read_json;
use crate::{Error, Result};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tensor::StateDict;
use tensor::tch::{Device, Kind, Tensor};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// What `peft` puts before the names of the model.
const PREFIX: &str = "base_model.model.";

/// The fields of `adapter_config.json` that matter here; the others describe training.
#[derive(Deserialize)]
struct PeftConfig {
    peft_type: String,
    r: i64,
    lora_alpha: f64,
    /// A list of names, or a pattern.
    #[serde(default)]
    target_modules: Value,
    #[serde(default)]
    layers_to_transform: Value,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    rank_pattern: Option<serde_json::Map<String, Value>>,
    #[serde(default)]
    alpha_pattern: Option<serde_json::Map<String, Value>>,
}

impl PeftConfig {
    fn read(path: &Path) -> Result<Self> {
        serde_json::from_value(read_json(path)?).map_err(|source| Error::Json { path: path.to_owned(), source })
    }

    /// Refuses what would change the sums.
    fn check(&self, model: &ModelConfig) -> Result<()> {
        if self.peft_type != "LORA" {
            return Err(Error::config("peft_type", "LORA", &self.peft_type));
        }
        if self.use_dora {
            return Err(Error::config("use_dora", "false, because magnitudes of weights aren't built", true));
        }
        if let Some(bias) = self.bias.as_ref().filter(|b| *b != "none") {
            return Err(Error::config("bias", "none, because adapted biases aren't built", bias));
        }
        if let Some(modules) = self.modules_to_save.as_ref().filter(|m| !m.is_empty()) {
            return Err(Error::config("modules_to_save", "empty: only low-rank matrices are read", modules.join(", ")));
        }
        let patterns = [("rank_pattern", &self.rank_pattern), ("alpha_pattern", &self.alpha_pattern)];
        for (field, pattern) in patterns {
            if pattern.as_ref().is_some_and(|p| !p.is_empty()) {
                return Err(Error::config(field, "empty: all matrices have one rank and one scale", "given"));
            }
        }
        if let Some(layer) = self.layers()?.into_iter().flatten().find(|l| *l >= model.layers) {
            return Err(Error::LayerOutOfRange { layer, layers: model.layers });
        }
        Ok(())
    }

    /// The layers that are named; none if all are meant.
    fn layers(&self) -> Result<Option<Vec<usize>>> {
        let wrong = || {
            let expected = "a number or a list of numbers of layers";
            Error::config("layers_to_transform", expected, &self.layers_to_transform)
        };
        let number = |v: &Value| v.as_u64().map(|n| n as usize).ok_or_else(wrong);
        match &self.layers_to_transform {
            Value::Null => Ok(None),
            Value::Array(list) => list.iter().map(number).collect::<Result<_>>().map(Some),
            one => Ok(Some(vec![number(one)?])),
        }
    }

    /// The projections that are named, by the last part of their names; none for a pattern.
    fn targets(&self, model: &ModelConfig) -> Result<Option<Vec<Projection>>> {
        let Value::Array(list) = &self.target_modules else { return Ok(None) };
        let mut targets = Vec::new();
        for name in list {
            let found = name.as_str().map(|n| targets_of(n, model)).unwrap_or_default();
            if found.is_empty() {
                let known = "names of projections (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)";
                return Err(Error::config("target_modules", known, name));
            }
            targets.extend(found);
        }
        Ok(Some(targets))
    }
}

/// The projections whose name ends as a target does.
fn targets_of(target: &str, model: &ModelConfig) -> Vec<Projection> {
    if model.architecture == Architecture::Gpt2 {
        let names = GPT2.iter().filter(|(name, _)| *name == target || name.ends_with(&format!(".{target}")));
        let found: Vec<Projection> = names.flat_map(|(_, projections)| *projections).copied().collect();
        if !found.is_empty() {
            return found;
        }
    }
    let fits = |p: &Projection| p.name() == target || p.name().ends_with(&format!(".{target}"));
    Projection::ALL.into_iter().filter(fits).collect()
}

/// GPT-2's names within a layer. Its fused `c_attn` has one A for queries, keys and values, and their three B's in a column.
const GPT2: [(&str, &[Projection]); 4] = [
    ("attn.c_attn", &[Projection::Q, Projection::K, Projection::V]),
    ("attn.c_proj", &[Projection::O]),
    ("mlp.c_fc", &[Projection::Up]),
    ("mlp.c_proj", &[Projection::Down]),
];

/// Which half of a pair.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Half {
    A,
    B,
}

/// The layer, the projections and the half that a tensor's name means.
fn parse(name: &str) -> Option<(usize, Vec<Projection>, Half)> {
    let rest = name.strip_prefix(PREFIX).unwrap_or(name);
    let (rest, half) = [("A", Half::A), ("B", Half::B)].into_iter().find_map(|(letter, half)| {
        // `default` is the adapter's own name inside `peft`; its files leave it out.
        let plain = rest.strip_suffix(&format!(".lora_{letter}.weight"));
        plain.or_else(|| rest.strip_suffix(&format!(".lora_{letter}.default.weight"))).map(|rest| (rest, half))
    })?;
    let (rest, gpt2) = match (rest.strip_prefix("model.layers."), rest.strip_prefix("transformer.h.")) {
        (Some(rest), _) => (rest, false),
        (None, Some(rest)) => (rest, true),
        (None, None) => return None,
    };
    let (layer, inner) = rest.split_once('.')?;
    let projections = if gpt2 {
        GPT2.iter().find(|(name, _)| *name == inner)?.1.to_vec()
    } else {
        vec![Projection::ALL.into_iter().find(|p| p.name() == inner)?]
    };
    Some((layer.parse().ok()?, projections, half))
}

impl Adapter {
    /// Writes `adapter_config.json` and `adapter_model.safetensors` into a folder, which is made if need be. `peft` reads
    /// them for models of the Llama family. (For GPT-2 the names are ours: its fused matrix has no room for three A's.)
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Tensor`].
    pub fn save(&self, folder: &Path) -> Result<()> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { path, source }
        };
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        let layers: BTreeSet<usize> = self.pairs.keys().map(|(layer, _)| *layer).collect();
        let targets: BTreeSet<Projection> = self.pairs.keys().map(|(_, which)| *which).collect();
        let short = |p: &Projection| p.name().rsplit('.').next().unwrap_or_default().to_owned();
        let json = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": null,
            "inference_mode": true,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": false,
            "use_rslora": false,
            "target_modules": targets.iter().map(short).collect::<Vec<_>>(),
            "layers_to_transform": layers,
        });
        let tensors = self.parameters().into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor)).collect();
        StateDict { tensors, ..StateDict::default() }.save(&folder.join(TENSORS))?;
        let path = folder.join(CONFIG);
        let text = serde_json::to_string_pretty(&json).map_err(|source| Error::Json { path: path.clone(), source })?;
        std::fs::write(&path, text).map_err(io(&path))
    }

    /// Reads what [`save`](Self::save) or `peft` has written, for a model of this configuration; it can be trained on.
    ///
    /// GPT-2's fused `attn.c_attn` is split: queries, keys and values get a copy of its A each and their part of its B.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::Config`] for settings that aren't built; [`Error::Tensors`] with the names
    /// that are missing or unknown; [`Error::TensorShape`]; [`Error::InvalidArgument`] for a projection that the model
    /// lacks.
    pub fn load(folder: &Path, model: &ModelConfig, kind: Kind, device: Device) -> Result<Self> {
        model.validate()?;
        let peft = PeftConfig::read(&folder.join(CONFIG))?;
        peft.check(model)?;
        let path = folder.join(TENSORS);
        if !path.exists() && folder.join("adapter_model.bin").exists() {
            let reason = "it has adapter_model.bin only: convert it to adapter_model.safetensors".to_owned();
            return Err(Error::Checkpoint { path: folder.to_owned(), reason });
        }
        let (targets, layers) = (peft.targets(model)?, peft.layers()?);
        let place = |t: Tensor| -> Result<Tensor> {
            Ok(t.f_to_device(device)?.f_to_kind(kind)?.f_detach_copy()?.f_set_requires_grad(true)?)
        };
        let mut halves = BTreeMap::<(usize, Projection, Half), Tensor>::new();
        let mut unexpected = Vec::new();
        for (name, tensor) in StateDict::load(&path)?.tensors {
            let parsed = parse(&name).filter(|(layer, projections, _)| {
                *layer < model.layers
                    && layers.as_ref().is_none_or(|l| l.contains(layer))
                    && targets.as_ref().is_none_or(|t| projections.iter().all(|p| t.contains(p)))
            });
            let Some((layer, projections, half)) = parsed else {
                unexpected.push(name);
                continue;
            };
            let parts = split(&name, &tensor, &projections, half, model, peft.r)?;
            for (which, part) in projections.into_iter().zip(parts) {
                if halves.insert((layer, which, half), place(part)?).is_some() {
                    unexpected.push(name.clone());
                }
            }
        }
        // With a list of projections and layers we know what must be there; with a pattern, that halves come in pairs.
        let mut places: BTreeSet<(usize, Projection)> =
            halves.keys().map(|(layer, which, _)| (*layer, *which)).collect();
        if let Some(targets) = targets {
            let layers = layers.unwrap_or_else(|| (0..model.layers).collect());
            places.extend(layers.iter().flat_map(|&layer| targets.iter().map(move |&which| (layer, which))));
        }
        let (mut pairs, mut missing) = (BTreeMap::new(), Vec::new());
        for (layer, which) in places {
            match (halves.remove(&(layer, which, Half::A)), halves.remove(&(layer, which, Half::B))) {
                (Some(a), Some(b)) => {
                    pairs.insert((layer, which), Pair { a, b });
                }
                (a, b) => {
                    let halves = [("A", a.is_none()), ("B", b.is_none())].into_iter().filter(|(_, absent)| *absent);
                    missing.extend(halves.map(|(h, _)| format!("{PREFIX}{}.lora_{h}.weight", module(layer, which))));
                }
            }
        }
        if !missing.is_empty() || !unexpected.is_empty() || pairs.is_empty() {
            return Err(Error::Tensors { path, missing, unexpected });
        }
        // Scale α/√r, written as α√r/r.
        let alpha = if peft.use_rslora { peft.lora_alpha * (peft.r as f64).sqrt() } else { peft.lora_alpha };
        let targets: BTreeSet<Projection> = pairs.keys().map(|(_, which)| *which).collect();
        let layers: BTreeSet<usize> = pairs.keys().map(|(layer, _)| *layer).collect();
        let config = LoraConfig {
            rank: peft.r,
            alpha,
            targets: targets.into_iter().collect(),
            layers: Layers::List(layers.into_iter().collect()),
            ..LoraConfig::default()
        };
        config.validate()?;
        Ok(Self { config, pairs })
    }
}

/// The parts of a tensor that belong to its projections, with their shapes checked.
fn split(
    name: &str,
    tensor: &Tensor,
    projections: &[Projection],
    half: Half,
    model: &ModelConfig,
    rank: i64,
) -> Result<Vec<Tensor>> {
    let sizes = projections.iter().map(|&p| config::size(model, p)).collect::<Result<Vec<_>>>()?;
    let outs: Vec<i64> = sizes.iter().map(|[out, _]| *out).collect();
    let expected = match half {
        Half::A => vec![rank, sizes[0][1]],
        Half::B => vec![outs.iter().sum(), rank],
    };
    if tensor.size() != expected {
        return Err(Error::TensorShape { name: name.to_owned(), expected, got: tensor.size() });
    }
    Ok(match half {
        Half::A => projections.iter().map(|_| tensor.shallow_clone()).collect(),
        Half::B => tensor.f_split_with_sizes(&outs, 0)?,
    })
}
