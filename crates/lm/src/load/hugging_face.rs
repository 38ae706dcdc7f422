//! Hugging Face checkpoints: `config.json` with one or several safetensors files, read and written.
//!
//! Tensors are read one after the other into memory of their own, so a file that shrinks meanwhile gives an error.

use crate::config::{Architecture, ModelConfig};
use crate::model::Model;
use crate::model::names::wanted;
use crate::model::source::Source;
use crate::{Error, Result};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use tensor::checkpoint::index::{Entry, Limits, SafeDtype, read_safetensors};
use tensor::tch::{Device, Kind, Tensor};

const SINGLE: &str = "model.safetensors";
const SHARDS: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Far above any configuration or table of shards.
const MOST_JSON_BYTES: u64 = 64 << 20;

/// The element types that are read.
const KNOWN_TYPES: &str = "F32, F16, BF16, F64";

/// A JSON file of a checkpoint.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(MOST_JSON_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MOST_JSON_BYTES {
        let reason = format!("it is longer than {MOST_JSON_BYTES} bytes, which no such file is");
        return Err(Error::Checkpoint { path: path.to_owned(), reason });
    }
    serde_json::from_slice(&bytes).map_err(|source| Error::Json { path: path.to_owned(), source })
}

impl Model {
    /// Reads a folder with `config.json` and `model.safetensors` (or `model.safetensors.index.json` and its shards), with all
    /// weights as `kind` on `device`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], [`Error::Index`] for files that aren't what they should be; [`Error::Config`],
    /// [`Error::RopeScaling`] for a model that isn't built; [`Error::Tensors`] listing every missing and unexpected tensor;
    /// [`Error::TensorShape`], [`Error::TensorType`].
    pub fn from_hugging_face(folder: &Path, kind: Kind, device: Device) -> Result<Self> {
        let mut config = ModelConfig::from_hugging_face(&read_json(&folder.join(CONFIG))?)?;
        let mut source = HuggingFace::open(folder, &mut config, kind, device)?;
        Self::build(&config, &mut source, kind, device)
    }

    /// Writes `config.json` and `model.safetensors` into a folder, which is made; what other programs read. Packed weights are
    /// written unpacked. What plugs add beyond the model's own tensors isn't written.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Checkpoint`] for a kind that safetensors lacks, and for biases that the family's `config.json`
    /// has no words for.
    pub fn save_hugging_face(&self, folder: &Path) -> Result<()> {
        let path = folder.join(SINGLE);
        let config = self.config();
        let family = config.architecture;
        let expressible = match family {
            Architecture::Llama => config.qkv_bias == config.output_bias,
            Architecture::Mistral | Architecture::Mixtral => !config.qkv_bias && !config.output_bias,
            Architecture::Qwen2 | Architecture::Gpt2 => true,
        };
        if !expressible {
            let reason = format!(
                "biases of {} (q, k, v: {}; output: {}) can't be said in its config.json",
                family.model_type(),
                config.qkv_bias,
                config.output_bias
            );
            return Err(Error::Checkpoint { path, reason });
        }
        std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.to_owned(), source })?;
        let names = Names::new(self.config().architecture);
        let mut own = self.tensors()?;
        let mut stored = BTreeMap::<String, Tensor>::new();
        for (name, _) in wanted(self.config()) {
            let tensor = own.remove(&name).ok_or_else(|| Error::Checkpoint {
                path: path.clone(),
                reason: format!("the model has no tensor `{name}`: a plug took its place"),
            })?;
            let (file, take) = names.of(&name);
            match take {
                Take::Whole => stored.insert(file, tensor),
                Take::Transposed => stored.insert(file, tensor.f_transpose(0, 1)?),
                Take::Third(part) => {
                    let tensor = if tensor.dim() == 2 { tensor.f_transpose(0, 1)? } else { tensor };
                    let whole = match stored.remove(&file) {
                        // Queries come first, then keys, then values.
                        Some(before) if part > 0 => Tensor::f_cat(&[before, tensor], -1)?,
                        _ => tensor,
                    };
                    stored.insert(file, whole)
                }
            };
        }
        write_safetensors(&path, &stored)?;
        let json = serde_json::to_string_pretty(&self.config().to_hugging_face())
            .map_err(|source| Error::Json { path: folder.join(CONFIG), source })?;
        let path = folder.join(CONFIG);
        std::fs::write(&path, json).map_err(|source| Error::Io { path, source })
    }
}

/// Writes tensors with the metadata that Hugging Face's readers want; beside the target first, then renamed over it.
pub(crate) fn write_safetensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let bad = |reason: String| Error::Checkpoint { path: path.to_owned(), reason };
    let mut bytes = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let dtype = match tensor.kind() {
            Kind::Float => Dtype::F32,
            Kind::Double => Dtype::F64,
            Kind::Half => Dtype::F16,
            Kind::BFloat16 => Dtype::BF16,
            other => return Err(bad(format!("the tensor `{name}` has the kind {other:?}, which isn't written"))),
        };
        let local = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        let mut raw = vec![0u8; local.numel() * local.kind().elt_size_in_bytes()];
        local.f_copy_data_u8(&mut raw, local.numel())?;
        let shape: Vec<usize> = local.size().iter().map(|&n| n as usize).collect();
        bytes.push((name, dtype, shape, raw));
    }
    let views = bytes.iter().map(|(name, dtype, shape, raw)| {
        TensorView::new(*dtype, shape.clone(), raw).map(|view| (name.as_str(), view)).map_err(|e| bad(e.to_string()))
    });
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let partial = path.with_extension(format!("partial-{}", std::process::id()));
    let views = views.collect::<Result<Vec<_>>>()?;
    safetensors::serialize_to_file(views, Some(metadata), &partial).map_err(|e| bad(e.to_string()))?;
    std::fs::rename(&partial, path).map_err(|source| {
        // What matters is the first error; a leftover partial file has its own name.
        let _ = std::fs::remove_file(&partial);
        Error::Io { path: path.to_owned(), source }
    })
}

/// How a tensor of the model is cut out of one of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Take {
    Whole,
    /// GPT-2 stores its maps as `[in, out]`.
    Transposed,
    /// One of three that lie side by side in the last dimension; transposed if it is a matrix.
    Third(i64),
}

impl Take {
    /// The shape in the file of a tensor with this shape in the model.
    fn stored_shape(self, shape: &[i64]) -> Vec<i64> {
        match (self, shape) {
            (Self::Transposed, &[out, inner]) => vec![inner, out],
            (Self::Third(_), &[out, inner]) => vec![inner, 3 * out],
            (Self::Third(_), &[out]) => vec![3 * out],
            _ => shape.to_vec(),
        }
    }

    fn cut(self, stored: &Tensor, shape: &[i64]) -> Result<Tensor> {
        Ok(match self {
            Self::Whole => stored.shallow_clone(),
            Self::Transposed => fresh(&stored.f_transpose(0, 1)?)?,
            Self::Third(part) => {
                let cut = stored.f_narrow(-1, part * shape[0], shape[0])?;
                // A narrow view would keep all three in memory.
                let cut = if cut.dim() == 2 { cut.f_transpose(0, 1)? } else { cut };
                fresh(&cut)?
            }
        })
    }
}

/// A copy in memory of its own: a view would keep the whole tensor of the file.
fn fresh(view: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(view.size(), (view.kind(), view.device()))?;
    copy.f_copy_(view)?;
    Ok(copy)
}

/// GPT-2's names of a layer's parts, and which third of the stored tensor a part is.
const GPT2_PARTS: [(&str, &str, Option<i64>); 8] = [
    ("input_layernorm", "ln_1", None),
    ("post_attention_layernorm", "ln_2", None),
    ("self_attn.q_proj", "attn.c_attn", Some(0)),
    ("self_attn.k_proj", "attn.c_attn", Some(1)),
    ("self_attn.v_proj", "attn.c_attn", Some(2)),
    ("self_attn.o_proj", "attn.c_proj", None),
    ("mlp.up_proj", "mlp.c_fc", None),
    ("mlp.down_proj", "mlp.c_proj", None),
];

/// A family's names in files.
#[derive(Debug)]
struct Names {
    gpt2: bool,
}

impl Names {
    fn new(architecture: Architecture) -> Self {
        Self { gpt2: architecture == Architecture::Gpt2 }
    }

    /// The tensor's name in the file, and how it is cut out. GPT-2's are without the prefix `transformer.`
    fn of(&self, name: &str) -> (String, Take) {
        if !self.gpt2 {
            return (name.to_owned(), Take::Whole);
        }
        let whole = |name: &str| (name.to_owned(), Take::Whole);
        match name {
            "model.embed_tokens.weight" => return whole("wte.weight"),
            "model.embed_positions.weight" => return whole("wpe.weight"),
            "lm_head.weight" => return whole("lm_head.weight"),
            _ => {}
        }
        if let Some(rest) = name.strip_prefix("model.norm.") {
            return whole(&format!("ln_f.{rest}"));
        }
        let rest = name.strip_prefix("model.layers.").unwrap_or(name);
        for (ours, theirs, third) in GPT2_PARTS {
            if !rest.contains(ours) {
                continue;
            }
            let take = match third {
                Some(part) => Take::Third(part),
                None if ours.ends_with("_proj") && name.ends_with(".weight") => Take::Transposed,
                None => Take::Whole,
            };
            return (format!("h.{}", rest.replace(ours, theirs)), take);
        }
        whole(name)
    }

    /// Whether a tensor that the model doesn't need may be in a file: buffers that are computed, a head that repeats the
    /// embeddings.
    fn may_be_ignored(&self, name: &str, tied: bool) -> bool {
        let buffer = if self.gpt2 {
            name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
        } else {
            name.ends_with(".rotary_emb.inv_freq")
        };
        buffer || (tied && name == "lm_head.weight")
    }
}

/// The tensors of a folder.
struct HuggingFace {
    names: Names,
    /// By name, GPT-2's without its prefix: the file and where it lies there.
    entries: BTreeMap<String, (PathBuf, Entry<SafeDtype>)>,
    files: BTreeMap<PathBuf, File>,
    kind: Kind,
    device: Device,
}

impl HuggingFace {
    fn open(folder: &Path, config: &mut ModelConfig, kind: Kind, device: Device) -> Result<Self> {
        let names = Names::new(config.architecture);
        let mut source = Self { names, entries: BTreeMap::new(), files: BTreeMap::new(), kind, device };
        for path in shards(folder)? {
            source.add(path)?;
        }
        // Without a head of its own a model's head is the table of embeddings, whatever the configuration says.
        config.tied |= !source.entries.contains_key("lm_head.weight");
        source.compare(folder, config)?;
        Ok(source)
    }

    fn add(&mut self, path: PathBuf) -> Result<()> {
        let mut file = File::open(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let header = read_safetensors(&mut file, &Limits::default())?;
        for entry in header.entries {
            let name = if self.names.gpt2 { entry.name.trim_start_matches("transformer.") } else { &entry.name };
            if let Some((other, _)) = self.entries.get(name) {
                let reason = format!("the tensor `{}` is in {} too", entry.name, other.display());
                return Err(Error::Checkpoint { path, reason });
            }
            self.entries.insert(name.to_owned(), (path.clone(), entry));
        }
        self.files.insert(path, file);
        Ok(())
    }

    /// Every tensor that is missing or that nobody needs, in one error.
    fn compare(&self, folder: &Path, config: &ModelConfig) -> Result<()> {
        let needed: BTreeSet<String> = wanted(config).iter().map(|(name, _)| self.names.of(name).0).collect();
        let missing: Vec<String> = needed.iter().filter(|n| !self.entries.contains_key(*n)).cloned().collect();
        let spare = |name: &&String| !needed.contains(*name) && !self.names.may_be_ignored(name, config.tied);
        let unexpected: Vec<String> = self.entries.keys().filter(spare).cloned().collect();
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(Error::Tensors { path: folder.to_owned(), missing, unexpected })
    }

    fn read(&mut self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let missing = || Error::Checkpoint { path: PathBuf::from(name), reason: "there is no such tensor".to_owned() };
        let (path, entry) = self.entries.get(name).ok_or_else(missing)?;
        let got: Vec<i64> = entry.shape.iter().map(|&n| n as i64).collect();
        if got != shape {
            return Err(Error::TensorShape { name: entry.name.clone(), expected: shape.to_vec(), got });
        }
        let kind = match entry.dtype {
            SafeDtype::F32 => Kind::Float,
            SafeDtype::F64 => Kind::Double,
            SafeDtype::F16 => Kind::Half,
            SafeDtype::BF16 => Kind::BFloat16,
            other => {
                let (name, dtype) = (entry.name.clone(), format!("{other:?}"));
                return Err(Error::TensorType { name, dtype, known: KNOWN_TYPES.to_owned() });
            }
        };
        let io = |source| Error::Io { path: path.clone(), source };
        let file = self.files.get_mut(path).ok_or_else(missing)?;
        // The index has checked the range against the file's length.
        let mut bytes = vec![0u8; (entry.range.end - entry.range.start) as usize];
        file.seek(SeekFrom::Start(entry.range.start)).map_err(io)?;
        file.read_exact(&mut bytes).map_err(io)?;
        let tensor = Tensor::f_from_data_size(&bytes, shape, kind)?;
        Ok(tensor.f_to_device(self.device)?.f_to_kind(self.kind)?)
    }
}

impl Source for HuggingFace {
    fn tensor(&mut self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let (file, take) = self.names.of(name);
        let stored = self.read(&file, &take.stored_shape(shape))?;
        take.cut(&stored, shape)
    }
}

/// The safetensors files of a folder: the single one, or those that the table of shards names.
fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    let single = folder.join(SINGLE);
    if single.exists() {
        return Ok(vec![single]);
    }
    let table = folder.join(SHARDS);
    if !table.exists() {
        let reason = format!("there is neither `{SINGLE}` nor `{SHARDS}` in it");
        return Err(Error::Checkpoint { path: folder.to_owned(), reason });
    }
    let json = read_json(&table)?;
    let bad = |reason: String| Error::Checkpoint { path: table.clone(), reason };
    let map = json.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| bad("it has no object `weight_map`".to_owned()))?;
    let mut files = BTreeSet::new();
    for (name, file) in map {
        let file =
            file.as_str().ok_or_else(|| bad(format!("the file of the tensor `{name}` isn't a string: {file}")))?;
        // A name, not a path: a table can't lead out of its folder.
        if file.contains(['/', '\\']) || file == ".." || file.is_empty() {
            return Err(bad(format!("the tensor `{name}` lies in `{file}`, which isn't a file name")));
        }
        files.insert(folder.join(file));
    }
    Ok(files.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_names_are_translated_with_their_cuts() {
        let names = Names::new(Architecture::Gpt2);
        for (ours, file, take) in [
            ("model.embed_tokens.weight", "wte.weight", Take::Whole),
            ("model.embed_positions.weight", "wpe.weight", Take::Whole),
            ("model.layers.3.input_layernorm.bias", "h.3.ln_1.bias", Take::Whole),
            ("model.layers.3.post_attention_layernorm.weight", "h.3.ln_2.weight", Take::Whole),
            ("model.layers.11.self_attn.k_proj.weight", "h.11.attn.c_attn.weight", Take::Third(1)),
            ("model.layers.11.self_attn.v_proj.bias", "h.11.attn.c_attn.bias", Take::Third(2)),
            ("model.layers.0.self_attn.o_proj.weight", "h.0.attn.c_proj.weight", Take::Transposed),
            ("model.layers.0.self_attn.o_proj.bias", "h.0.attn.c_proj.bias", Take::Whole),
            ("model.layers.0.mlp.up_proj.weight", "h.0.mlp.c_fc.weight", Take::Transposed),
            ("model.layers.0.mlp.down_proj.bias", "h.0.mlp.c_proj.bias", Take::Whole),
            ("model.norm.bias", "ln_f.bias", Take::Whole),
        ] {
            assert_eq!(names.of(ours), (file.to_owned(), take), "{ours}");
        }
    }
}
