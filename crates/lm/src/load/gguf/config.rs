//! A model's configuration from a GGUF file's metadata.

use super::{Gguf, Metadata};
use crate::config::{Architecture, ModelConfig, MoeConfig, Rope, RopeScaling};
use crate::{Error, Result};
use tensor::checkpoint::index::GgmlType;

/// A table with the divisors of RoPE's frequencies.
pub(super) const ROPE_DIVISORS: &str = "rope_freqs.weight";
const KNOWN_SCALINGS: &str = "none, linear (and llama3, as the tensor rope_freqs.weight)";
/// Far above any model; keeps the list of the tensors that are needed short.
const MOST_EXPERTS: i64 = 4096;

pub(super) fn read(file: &mut Gguf) -> Result<ModelConfig> {
    let keys = Keys::new(file.metadata())?;
    let embedding = file.entry("token_embd.weight");
    let vocab = match embedding.map(|e| &e.shape[..]) {
        Some(&[vocab, _]) => vocab as i64,
        Some(other) => {
            return Err(Error::config("the shape of token_embd.weight", "[vocabulary, width]", format!("{other:?}")));
        }
        None => return Err(Error::config("token_embd.weight", "a tensor", "missing")),
    };
    let has = |name: &str| file.entry(name).is_some();
    // Each layer has tensors of its own, so this keeps hostile numbers from becoming long lists.
    let layers = keys.int("block_count")?;
    if layers > file.index.entries.len() as i64 {
        let expected = format!("at most the number of tensors, {}", file.index.entries.len());
        return Err(Error::config(keys.name("block_count"), expected, layers));
    }
    let mut config = if keys.gpt2 { keys.gpt2(vocab)? } else { keys.llama(vocab)? };
    config.layers = layers as usize;
    config.tied = !has("output.weight");
    if !keys.gpt2 {
        config.qkv_bias = ["q", "k", "v"].iter().any(|part| has(&format!("blk.0.attn_{part}.bias")));
        config.output_bias = has("blk.0.attn_output.bias");
        config.ffn_bias = ["gate", "up", "down"].iter().any(|part| has(&format!("blk.0.ffn_{part}.bias")));
    }
    if let Some(rope) = config.rope.as_mut().filter(|_| has(ROPE_DIVISORS)) {
        if rope.scaling.is_some() {
            let got = "both linear scaling and divisors";
            return Err(Error::config(ROPE_DIVISORS, "the only scaling of RoPE", got));
        }
        rope.scaling = Some(RopeScaling::Divisors(divisors(file)?));
    }
    config.validate()?;
    Ok(config)
}

fn divisors(file: &mut Gguf) -> Result<Vec<f64>> {
    // A divisor for each frequency of a head: few, whatever the file says.
    const MOST: u64 = 1 << 16;
    if let Some(entry) =
        file.entry(ROPE_DIVISORS).filter(|e| e.dtype != GgmlType::F32 || e.shape.iter().product::<u64>() > MOST)
    {
        let got = format!("{:?} of {}", entry.shape, entry.dtype);
        return Err(Error::config(ROPE_DIVISORS, format!("at most {MOST} numbers of F32"), got));
    }
    Ok(file.floats(ROPE_DIVISORS)?.into_iter().map(f64::from).collect())
}

/// Keys of models that compute something else; ignoring one would give fluent nonsense.
const NOT_BUILT: [&str; 10] = [
    "attention.scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "expert_shared_count",
    "use_parallel_residual",
];

/// The keys of one architecture.
struct Keys<'a> {
    metadata: Metadata<'a>,
    architecture: &'a str,
    gpt2: bool,
}

impl<'a> Keys<'a> {
    fn new(metadata: Metadata<'a>) -> Result<Self> {
        let architecture = metadata.text("general.architecture")?;
        if !["llama", "qwen2", "gpt2"].contains(&architecture) {
            return Err(Error::config("general.architecture", "llama, qwen2 or gpt2", format!("`{architecture}`")));
        }
        let keys = Self { metadata, architecture, gpt2: architecture == "gpt2" };
        if let Some(key) = NOT_BUILT.into_iter().find(|key| keys.has(key)) {
            return Err(Error::config(keys.name(key), "absent, because it isn't built", "present"));
        }
        if !metadata.bool_or(&keys.name("attention.causal"), true)? {
            return Err(Error::config(keys.name("attention.causal"), "true", false));
        }
        Ok(keys)
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn has(&self, key: &str) -> bool {
        self.metadata.has(&self.name(key))
    }

    fn int(&self, key: &str) -> Result<i64> {
        self.metadata.int(&self.name(key))
    }

    fn int_or(&self, key: &str, default: i64) -> Result<i64> {
        self.metadata.int_or(&self.name(key), default)
    }

    /// What both families have, as for a Llama.
    fn common(&self, vocab: i64) -> Result<ModelConfig> {
        let (width, heads) = (self.int("embedding_length")?, self.int("attention.head_count")?);
        if heads < 1 {
            return Err(Error::config(self.name("attention.head_count"), "at least 1", heads));
        }
        let mut config = ModelConfig::llama(vocab, width, 1, heads, heads, self.int("feed_forward_length")?);
        config.context = self.int("context_length")?;
        let token = |key| self.metadata.token(key, usize::try_from(vocab).unwrap_or(0));
        config.bos = token("tokenizer.ggml.bos_token_id")?;
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            if let Some(id) = token(key)?.filter(|id| !config.eos.contains(id)) {
                config.eos.push(id);
            }
        }
        Ok(config)
    }

    fn llama(&self, vocab: i64) -> Result<ModelConfig> {
        let mut config = self.common(vocab)?;
        config.architecture = if self.architecture == "qwen2" { Architecture::Qwen2 } else { Architecture::Llama };
        config.kv_heads = self.int_or("attention.head_count_kv", config.heads)?;
        config.head_dim = self.int_or("attention.key_length", config.head_dim)?;
        for key in ["attention.value_length", "rope.dimension_count"] {
            let got = self.int_or(key, config.head_dim)?;
            if got != config.head_dim {
                return Err(Error::config(self.name(key), format!("the width of a head, {}", config.head_dim), got));
            }
        }
        // Within a window nothing slides, so it bounds the context. 0 stands for none.
        let window = self.int_or("attention.sliding_window", 0)?;
        if window > 0 {
            config.context = config.context.min(window);
        }
        config.norm_epsilon = self.metadata.float(&self.name("attention.layer_norm_rms_epsilon"))?;
        let theta = self.metadata.float_or(&self.name("rope.freq_base"), 1e4)?;
        config.rope = Some(Rope { theta, scaling: self.scaling()? });
        if self.int_or("expert_count", 0)? > 0 {
            config.architecture = Architecture::Mixtral;
            config.moe = Some(self.moe()?);
        }
        Ok(config)
    }

    fn moe(&self) -> Result<MoeConfig> {
        if self.architecture != "llama" {
            return Err(Error::config(self.name("expert_count"), "0 for this architecture", self.int("expert_count")?));
        }
        let (experts, top_k) = (self.int("expert_count")?, self.int("expert_used_count")?);
        if experts > MOST_EXPERTS {
            return Err(Error::config(self.name("expert_count"), format!("at most {MOST_EXPERTS}"), experts));
        }
        // Mixtral's training has a factor of 0.001; a GGUF file says nothing of it.
        Ok(MoeConfig {
            experts: experts as usize,
            top_k: top_k as usize,
            renormalize: true,
            balance: 0.001,
            z_loss: 0.0,
        })
    }

    fn scaling(&self) -> Result<Option<RopeScaling>> {
        // Older files have the factor of linear scaling only.
        const OLD: &str = "rope.scale_linear";
        if !self.has("rope.scaling.type") {
            let factor = self.metadata.float_or(&self.name(OLD), 1.0)?;
            return Ok((factor != 1.0).then_some(RopeScaling::Linear { factor }));
        }
        match self.metadata.text(&self.name("rope.scaling.type"))? {
            "none" => Ok(None),
            "linear" => {
                let factor = self.metadata.float(&self.name("rope.scaling.factor"))?;
                Ok(Some(RopeScaling::Linear { factor }))
            }
            kind => Err(Error::RopeScaling { kind: kind.to_owned(), known: KNOWN_SCALINGS.to_owned() }),
        }
    }

    fn gpt2(&self, vocab: i64) -> Result<ModelConfig> {
        let mut config = self.common(vocab)?;
        config.architecture = Architecture::Gpt2;
        config.rope = None;
        config.norm_epsilon = self.metadata.float(&self.name("attention.layer_norm_epsilon"))?;
        (config.qkv_bias, config.output_bias, config.ffn_bias) = (true, true, true);
        Ok(config)
    }
}
