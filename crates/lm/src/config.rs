//! What a model is made of: sizes, positions, norms, feed-forward; from a Hugging Face `config.json`, and back.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The families that are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2: RMS norm, RoPE, grouped-query attention, SwiGLU.
    Llama,
    /// As Llama; a sliding window, where the checkpoint has one, bounds the context.
    Mistral,
    /// Llama with biases on q, k and v.
    Qwen2,
    /// Llama with a mixture of experts as feed-forward.
    Mixtral,
    /// Layer norm with bias, learned positions, GELU, everything with bias.
    Gpt2,
}

impl Architecture {
    /// All that are built.
    pub const ALL: [Self; 5] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Mixtral, Self::Gpt2];

    /// Hugging Face's `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Mixtral => "mixtral",
            Self::Gpt2 => "gpt2",
        }
    }

    /// Hugging Face's class, which other programs look for in `config.json`.
    fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Gpt2 => "GPT2LMHeadModel",
        }
    }
}

/// How rotary positions are stretched beyond the context that a model was first trained with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Every frequency divided by `factor`.
    Linear {
        /// How many times the context is stretched.
        factor: f64,
    },
    /// The base grows with the length once a text is longer than the original context (NTK). A text that crosses it
    /// while it is generated keeps the keys that it has, as other implementations do. The longest row of a batch decides for
    /// all, as there: beyond the original context a row's numbers depend on the rows beside it.
    Dynamic {
        /// How many times the context may be stretched.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a blend between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context before stretching.
        original_context: i64,
    },
    /// A divisor for each frequency, as a GGUF file holds it in `rope_freqs.weight`.
    Divisors(Vec<f64>),
}

/// Rotary positions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies, θ.
    pub theta: f64,
    /// Stretching, if any.
    pub scaling: Option<RopeScaling>,
}

/// A mixture of experts as feed-forward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Experts a layer.
    pub experts: usize,
    /// Experts that each token uses.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are made to sum to 1 (Mixtral does).
    pub renormalize: bool,
    /// Factor of the balance loss.
    pub balance: f64,
    /// Factor of the router's z-loss.
    pub z_loss: f64,
}

/// Everything that determines the shapes and sums of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools)] // independent facts of a checkpoint
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Size of the vocabulary, that is of the table of embeddings.
    pub vocab: i64,
    /// Width of the residual stream, D.
    pub width: i64,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: i64,
    /// Key and value heads; a divisor of `heads`.
    pub kv_heads: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Hidden width of the feed-forward (of one expert).
    pub ffn: i64,
    /// Number of positions.
    pub context: i64,
    /// ε of the norms.
    pub norm_epsilon: f64,
    /// Rotary positions; none for learned ones.
    pub rope: Option<Rope>,
    /// Whether the head is the table of embeddings.
    pub tied: bool,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub output_bias: bool,
    /// Biases in the feed-forward.
    pub ffn_bias: bool,
    /// Mixture of experts, if any.
    pub moe: Option<MoeConfig>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Begin-of-text token.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

impl ModelConfig {
    /// A small Llama for tests and experiments: tied head, RoPE with θ 10 000, context 1024.
    pub fn llama(vocab: i64, width: i64, layers: usize, heads: i64, kv_heads: i64, ffn: i64) -> Self {
        Self {
            architecture: Architecture::Llama,
            vocab,
            width,
            layers,
            heads,
            kv_heads,
            head_dim: if heads > 0 { width / heads } else { 0 },
            ffn,
            context: 1024,
            norm_epsilon: 1e-5,
            rope: Some(Rope { theta: 1e4, scaling: None }),
            tied: true,
            qkv_bias: false,
            output_bias: false,
            ffn_bias: false,
            moe: None,
            initializer_range: 0.02,
            bos: None,
            eos: Vec::new(),
        }
    }

    /// As [`llama`](Self::llama), with a mixture of `experts` of hidden width `ffn` in each layer, of which a token uses
    /// `top_k`; balance loss with factor 0.01. The weights of the chosen experts are made to sum to 1, unless it is one: its
    /// weight would always be 1 and teach the router nothing.
    #[must_use]
    pub fn mixtral(mut self, experts: usize, top_k: usize) -> Self {
        self.architecture = Architecture::Mixtral;
        self.moe = Some(MoeConfig { experts, top_k, renormalize: top_k > 1, balance: 0.01, z_loss: 0.0 });
        self
    }

    /// # Errors
    /// [`Error::Config`] for the first field that can't be.
    pub fn validate(&self) -> Result<()> {
        let positive = [
            ("vocab", self.vocab),
            ("width", self.width),
            ("layers", self.layers as i64),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("context", self.context),
        ];
        for (field, value) in positive {
            // Far above every model; keeps products of two in 64 bits.
            if !(1..=1 << 28).contains(&value) {
                return Err(Error::config(field, "from 1 to 2^28", value));
            }
        }
        // As many tensors as the index of a checkpoint may hold; their names are listed before a file is read.
        let maps = self.moe.as_ref().map_or(0, |moe| moe.experts).saturating_mul(3).saturating_add(9);
        if self.layers.saturating_mul(maps) > MOST_TENSORS {
            let expected = format!("so few, with the experts, that there are at most {MOST_TENSORS} tensors");
            return Err(Error::config("layers", expected, self.layers));
        }
        if self.heads % self.kv_heads != 0 {
            let expected = format!("a divisor of the number of heads, {}", self.heads);
            return Err(Error::config("kv_heads", expected, self.kv_heads));
        }
        if !(self.norm_epsilon.is_finite() && self.norm_epsilon >= 0.0) {
            return Err(Error::config("norm_epsilon", "at least 0 and finite", self.norm_epsilon));
        }
        if let Some(rope) = &self.rope {
            rope.validate(self.head_dim)?;
        }
        if let Some(moe) = &self.moe {
            if moe.experts == 0 || moe.top_k == 0 || moe.top_k > moe.experts {
                let expected = format!("from 1 to the number of experts, {}", moe.experts);
                return Err(Error::config("moe.top_k", expected, moe.top_k));
            }
            if moe.top_k == 1 && moe.renormalize && moe.experts > 1 {
                let expected =
                    "false for one expert a token: its weight would always be 1 and teach the router nothing";
                return Err(Error::config("moe.renormalize", expected, true));
            }
            for (field, value) in [("moe.balance", moe.balance), ("moe.z_loss", moe.z_loss)] {
                if !(value.is_finite() && value >= 0.0) {
                    return Err(Error::config(field, "at least 0 and finite", value));
                }
            }
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            return Err(Error::config("initializer_range", "at least 0 and finite", self.initializer_range));
        }
        if self.rope.is_none() != (self.architecture == Architecture::Gpt2) {
            let expected = "there for every family but GPT-2, which has learned positions";
            return Err(Error::config("rope", expected, if self.rope.is_none() { "missing" } else { "there" }));
        }
        if let Some(id) = self.bos.iter().chain(&self.eos).find(|id| i64::from(**id) >= self.vocab) {
            return Err(Error::config("bos or eos", format!("a token below {}", self.vocab), id));
        }
        Ok(())
    }

    /// Positions that the model can be used with: the context, times the factor for dynamically stretched RoPE.
    pub fn positions(&self) -> i64 {
        match self.rope.as_ref().and_then(|r| r.scaling.as_ref()) {
            Some(RopeScaling::Dynamic { factor }) => (self.context as f64 * factor) as i64,
            _ => self.context,
        }
    }

    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] for a missing or malformed field, an unknown `model_type` or activation;
    /// [`Error::RopeScaling`] for a scaling that isn't built.
    pub fn from_hugging_face(json: &Value) -> Result<Self> {
        let fields =
            Fields(json.as_object().ok_or_else(|| Error::config("config.json", "a JSON object", json.to_string()))?);
        let model_type = fields.text("model_type")?;
        let architecture = Architecture::ALL.into_iter().find(|a| a.model_type() == model_type).ok_or_else(|| {
            let known: Vec<&str> = Architecture::ALL.iter().map(|a| a.model_type()).collect();
            Error::config("model_type", format!("one of {}", known.join(", ")), model_type)
        })?;
        let config = if architecture == Architecture::Gpt2 { fields.gpt2()? } else { fields.llama(architecture)? };
        config.validate()?;
        Ok(config)
    }

    /// The tokens that end a text, from `eos_token_id` of a `generation_config.json`.
    pub(crate) fn eos_tokens(json: &Value) -> Result<Vec<u32>> {
        match json.as_object() {
            Some(fields) => Fields(fields).tokens("eos_token_id"),
            None => Err(Error::config("generation_config.json", "a JSON object", json)),
        }
    }

    /// The Hugging Face `config.json` of this model.
    pub fn to_hugging_face(&self) -> Value {
        let mut json = if self.architecture == Architecture::Gpt2 { self.gpt2_json() } else { self.llama_json() };
        // Invariant: both make an object.
        if let Some(fields) = json.as_object_mut() {
            fields.insert("model_type".into(), self.architecture.model_type().into());
            fields.insert("architectures".into(), json!([self.architecture.class()]));
            fields.insert("vocab_size".into(), self.vocab.into());
            fields.insert("tie_word_embeddings".into(), self.tied.into());
            fields.insert("initializer_range".into(), self.initializer_range.into());
            fields.insert("bos_token_id".into(), json!(self.bos));
            let eos = if self.eos.len() == 1 { json!(self.eos[0]) } else { json!(self.eos) };
            fields.insert("eos_token_id".into(), if self.eos.is_empty() { Value::Null } else { eos });
        }
        json
    }

    fn llama_json(&self) -> Value {
        let mut json = json!({
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
        });
        let fields = &mut json;
        if let Some(rope) = &self.rope {
            fields["rope_theta"] = rope.theta.into();
            fields["rope_scaling"] = match &rope.scaling {
                None => Value::Null,
                Some(RopeScaling::Linear { factor }) => json!({ "rope_type": "linear", "factor": factor }),
                Some(RopeScaling::Dynamic { factor }) => json!({ "rope_type": "dynamic", "factor": factor }),
                Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_context,
                }),
                Some(RopeScaling::Divisors(divisors)) => json!({ "rope_type": DIVISORS, "divisors": divisors }),
            };
        }
        if matches!(self.architecture, Architecture::Llama) {
            fields["attention_bias"] = self.output_bias.into();
            fields["mlp_bias"] = self.ffn_bias.into();
        }
        if matches!(self.architecture, Architecture::Mistral | Architecture::Mixtral) {
            // Absent, it would mean 4096 to other readers.
            fields["sliding_window"] = Value::Null;
        }
        if let Some(moe) = &self.moe {
            fields["num_local_experts"] = moe.experts.into();
            fields["num_experts_per_tok"] = moe.top_k.into();
            fields["router_aux_loss_coef"] = moe.balance.into();
            // Ours; Mixtral always makes the weights sum to 1.
            fields["norm_topk_prob"] = moe.renormalize.into();
            fields["router_z_loss_coef"] = moe.z_loss.into();
        }
        json
    }

    fn gpt2_json(&self) -> Value {
        json!({
            "n_embd": self.width,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.ffn,
            "n_positions": self.context,
            "layer_norm_epsilon": self.norm_epsilon,
            "activation_function": "gelu_new",
        })
    }
}

/// Far above every model.
const MOST_TENSORS: usize = 1 << 20;

/// Our own `rope_type`, for divisors that came from a GGUF file.
const DIVISORS: &str = "divisors";

impl Rope {
    fn validate(&self, head_dim: i64) -> Result<()> {
        if head_dim % 2 != 0 {
            return Err(Error::config("head_dim", "even, because RoPE turns pairs", head_dim));
        }
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(Error::config("rope_theta", "positive and finite", self.theta));
        }
        let factor_at_least_1 = |factor: f64| {
            let good = factor.is_finite() && factor >= 1.0;
            if good { Ok(()) } else { Err(Error::config("rope_scaling.factor", "at least 1 and finite", factor)) }
        };
        match &self.scaling {
            None => Ok(()),
            Some(RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor }) => factor_at_least_1(*factor),
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
                factor_at_least_1(*factor)?;
                if !(*low_freq_factor > 0.0 && high_freq_factor > low_freq_factor && high_freq_factor.is_finite()) {
                    let got = format!("{low_freq_factor} and {high_freq_factor}");
                    let expected = "0 < low < high";
                    return Err(Error::config("rope_scaling.low_freq_factor and high_freq_factor", expected, got));
                }
                if *original_context < 1 {
                    let field = "rope_scaling.original_max_position_embeddings";
                    return Err(Error::config(field, "at least 1", original_context));
                }
                Ok(())
            }
            Some(RopeScaling::Divisors(divisors)) => {
                if divisors.len() as i64 != head_dim / 2 {
                    let expected = format!("{} divisors, half the width of a head", head_dim / 2);
                    return Err(Error::config("rope_freqs.weight", expected, divisors.len()));
                }
                match divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
                    Some(bad) => Err(Error::config("rope_freqs.weight", "positive and finite", bad)),
                    None => Ok(()),
                }
            }
        }
    }
}

/// The fields of a `config.json`.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// The value, unless it is absent or null.
    fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn need(&self, field: &str, expected: &str) -> Result<&Value> {
        self.get(field).ok_or_else(|| Error::config(field, expected, "missing"))
    }

    fn text(&self, field: &str) -> Result<&str> {
        let value = self.need(field, "a string")?;
        value.as_str().ok_or_else(|| Error::config(field, "a string", value))
    }

    fn int(&self, field: &str) -> Result<i64> {
        self.int_or(field, None)
    }

    fn int_or(&self, field: &str, default: Option<i64>) -> Result<i64> {
        match (self.get(field), default) {
            (Some(value), _) => value.as_i64().ok_or_else(|| Error::config(field, "a whole number", value)),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(Error::config(field, "a whole number", "missing")),
        }
    }

    fn float_or(&self, field: &str, default: Option<f64>) -> Result<f64> {
        match (self.get(field), default) {
            (Some(value), _) => value.as_f64().ok_or_else(|| Error::config(field, "a number", value)),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(Error::config(field, "a number", "missing")),
        }
    }

    fn bool_or(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            Some(value) => value.as_bool().ok_or_else(|| Error::config(field, "true or false", value)),
            None => Ok(default),
        }
    }

    /// A number of at least 0 that counts things.
    fn count(&self, field: &str) -> Result<usize> {
        let value = self.int(field)?;
        usize::try_from(value).map_err(|_| Error::config(field, "at least 0", value))
    }

    /// One token or a list of tokens.
    fn tokens(&self, field: &str) -> Result<Vec<u32>> {
        let one = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| Error::config(field, "a token or a list of tokens", value))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    /// The only activation that the family is built with.
    fn activation(&self, field: &str, known: &[&str]) -> Result<()> {
        match self.get(field) {
            Some(value) if !value.as_str().is_some_and(|name| known.contains(&name)) => {
                Err(Error::config(field, format!("one of {}", known.join(", ")), value))
            }
            _ => Ok(()),
        }
    }

    fn llama(&self, architecture: Architecture) -> Result<ModelConfig> {
        self.activation("hidden_act", &["silu", "swish"])?;
        let (width, heads) = (self.int("hidden_size")?, self.int("num_attention_heads")?);
        if heads < 1 {
            return Err(Error::config("num_attention_heads", "at least 1", heads));
        }
        let context = self.int("max_position_embeddings")?;
        let mixtral = architecture == Architecture::Mixtral;
        let attention_bias = self.bool_or("attention_bias", false)?;
        Ok(ModelConfig {
            architecture,
            vocab: self.int("vocab_size")?,
            width,
            layers: self.count("num_hidden_layers")?,
            heads,
            kv_heads: self.int_or("num_key_value_heads", Some(heads))?,
            head_dim: self.int_or("head_dim", Some(width / heads))?,
            ffn: self.int("intermediate_size")?,
            context: self.window()?.map_or(context, |window| window.min(context)),
            norm_epsilon: self.float_or("rms_norm_eps", Some(if mixtral { 1e-5 } else { 1e-6 }))?,
            rope: Some(self.rope(context, if mixtral { 1e6 } else { 1e4 })?),
            tied: self.bool_or("tie_word_embeddings", false)?,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            output_bias: attention_bias && architecture == Architecture::Llama,
            ffn_bias: self.bool_or("mlp_bias", false)?,
            moe: if architecture == Architecture::Mixtral { Some(self.moe()?) } else { None },
            initializer_range: self.float_or("initializer_range", Some(0.02))?,
            bos: self.tokens("bos_token_id")?.first().copied(),
            eos: self.tokens("eos_token_id")?,
        })
    }

    fn gpt2(&self) -> Result<ModelConfig> {
        self.activation("activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
        if !self.bool_or("scale_attn_weights", true)? {
            return Err(Error::config("scale_attn_weights", "true", false));
        }
        if self.bool_or("scale_attn_by_inverse_layer_idx", false)? {
            return Err(Error::config("scale_attn_by_inverse_layer_idx", "false", true));
        }
        let (width, heads) = (self.int("n_embd")?, self.int("n_head")?);
        if heads < 1 {
            return Err(Error::config("n_head", "at least 1", heads));
        }
        Ok(ModelConfig {
            architecture: Architecture::Gpt2,
            vocab: self.int("vocab_size")?,
            width,
            layers: self.count("n_layer")?,
            heads,
            kv_heads: heads,
            head_dim: width / heads,
            ffn: self.int_or("n_inner", Some(width.saturating_mul(4)))?,
            context: self.int("n_positions")?,
            norm_epsilon: self.float_or("layer_norm_epsilon", Some(1e-5))?,
            rope: None,
            tied: self.bool_or("tie_word_embeddings", true)?,
            qkv_bias: true,
            output_bias: true,
            ffn_bias: true,
            moe: None,
            initializer_range: self.float_or("initializer_range", Some(0.02))?,
            bos: self.tokens("bos_token_id")?.first().copied(),
            eos: self.tokens("eos_token_id")?,
        })
    }

    /// The sliding window of a model that uses one. Within it nothing slides, so it bounds the context.
    fn window(&self) -> Result<Option<i64>> {
        if !self.bool_or("use_sliding_window", true)? || self.get("sliding_window").is_none() {
            return Ok(None);
        }
        self.int("sliding_window").map(Some)
    }

    fn moe(&self) -> Result<MoeConfig> {
        let several = self.count("num_experts_per_tok")? > 1;
        Ok(MoeConfig {
            experts: self.count("num_local_experts")?,
            top_k: self.count("num_experts_per_tok")?,
            renormalize: self.bool_or("norm_topk_prob", several)?,
            balance: self.float_or("router_aux_loss_coef", Some(0.001))?,
            z_loss: self.float_or("router_z_loss_coef", Some(0.0))?,
        })
    }

    /// RoPE as older (`rope_theta`, `rope_scaling`) and newer (`rope_parameters`) files write it.
    fn rope(&self, context: i64, theta: f64) -> Result<Rope> {
        let (field, inner) = match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(inner), _) => ("rope_parameters", Some(inner)),
            (None, inner) => ("rope_scaling", inner),
        };
        let empty = Map::new();
        let inner = match inner {
            Some(value) => value.as_object().ok_or_else(|| Error::config(field, "an object", value))?,
            None => &empty,
        };
        let inner = Fields(inner);
        let theta = match inner.get("rope_theta") {
            Some(_) => inner.float_or("rope_theta", None)?,
            None => self.float_or("rope_theta", Some(theta))?,
        };
        let kind = match (inner.get("rope_type"), inner.get("type")) {
            (Some(kind), _) | (None, Some(kind)) => {
                kind.as_str().ok_or_else(|| Error::config(format!("{field}.rope_type"), "a string", kind))?
            }
            (None, None) if inner.get("factor").is_some() => {
                return Err(Error::config(format!("{field}.rope_type"), "a string", "missing"));
            }
            (None, None) => "default",
        };
        if self.float_or("partial_rotary_factor", Some(1.0))? != 1.0
            || inner.float_or("partial_rotary_factor", Some(1.0))? != 1.0
        {
            return Err(Error::config("partial_rotary_factor", "1", "another number"));
        }
        let factor = || inner.float_or("factor", None);
        let scaling = match kind {
            "default" => None,
            "linear" => Some(RopeScaling::Linear { factor: factor()? }),
            "dynamic" => Some(RopeScaling::Dynamic { factor: factor()? }),
            "llama3" => Some(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: inner.float_or("low_freq_factor", None)?,
                high_freq_factor: inner.float_or("high_freq_factor", None)?,
                original_context: inner.int_or("original_max_position_embeddings", Some(context))?,
            }),
            DIVISORS => {
                let values = inner.need("divisors", "a list of numbers")?;
                let list: Option<Vec<f64>> = values.as_array().and_then(|v| v.iter().map(Value::as_f64).collect());
                Some(RopeScaling::Divisors(list.ok_or_else(|| Error::config("divisors", "a list of numbers", values))?))
            }
            other => {
                let known = "default, linear, dynamic, llama3".to_owned();
                return Err(Error::RopeScaling { kind: other.to_owned(), known });
            }
        };
        Ok(Rope { theta, scaling })
    }
}
