//! One layer: attention and feed-forward, each behind its norm, each added to the residual stream.

use super::names;
use super::norm::Norm;
use super::pass::{Exit, Tokens, Walk};
use super::rope::Turns;
use super::source::Source;
use crate::attention::{AttentionInput, AttentionKernel, AttentionMask};
use crate::cache::{CacheId, KvStore};
use crate::config::{Architecture, ModelConfig};
use crate::hooks::Site;
use crate::linear::{LinearLayer, Projection};
use crate::lora::AdapterView;
use crate::moe::{LayerRouting, MoeLayer, RouteContext};
use crate::packed::recorded;
use crate::{Error, Result};
use tensor::tch::Tensor;

/// What all layers of a pass share.
pub(crate) struct Shared<'a> {
    pub config: &'a ModelConfig,
    pub attention: &'a dyn AttentionKernel,
    pub mask: AttentionMask,
    pub turns: Option<Turns>,
    pub tokens: &'a Tokens,
    /// `[batch, time]` of i64.
    pub positions: &'a Tensor,
    pub cache: Option<CacheId>,
    pub adapter: Option<AdapterView<'a>>,
    pub training: bool,
}

#[derive(Debug)]
pub(crate) struct Block {
    number: usize,
    attention_norm: Norm,
    query: Box<dyn LinearLayer>,
    key: Box<dyn LinearLayer>,
    value: Box<dyn LinearLayer>,
    output: Box<dyn LinearLayer>,
    ffn_norm: Norm,
    ffn: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    /// `down(silu(gate x) ⊙ up x)`.
    SwiGlu {
        gate: Box<dyn LinearLayer>,
        up: Box<dyn LinearLayer>,
        down: Box<dyn LinearLayer>,
    },
    /// `down(gelu(up x))` with the tanh approximation.
    Gelu {
        up: Box<dyn LinearLayer>,
        down: Box<dyn LinearLayer>,
    },
    Experts(MoeLayer),
}

impl Block {
    pub(crate) fn build(config: &ModelConfig, number: usize, source: &mut dyn Source) -> Result<Self> {
        let at = names::layer(number);
        let (width, ffn) = (config.width, config.ffn);
        let (query, key) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let gpt2 = config.architecture == Architecture::Gpt2;
        let mut linear = |name: &str, out, inner, bias| source.linear(&format!("{at}.{name}"), out, inner, bias);
        let attention = [
            linear("self_attn.q_proj", query, width, config.qkv_bias)?,
            linear("self_attn.k_proj", key, width, config.qkv_bias)?,
            linear("self_attn.v_proj", key, width, config.qkv_bias)?,
            linear("self_attn.o_proj", width, query, config.output_bias)?,
        ];
        let ffn = if let Some(moe) = &config.moe {
            FeedForward::Experts(MoeLayer::build(config, moe, number, source)?)
        } else {
            let bias = config.ffn_bias;
            if gpt2 {
                let (up, down) = (linear("mlp.up_proj", ffn, width, bias)?, linear("mlp.down_proj", width, ffn, bias)?);
                FeedForward::Gelu { up, down }
            } else {
                FeedForward::SwiGlu {
                    gate: linear("mlp.gate_proj", ffn, width, bias)?,
                    up: linear("mlp.up_proj", ffn, width, bias)?,
                    down: linear("mlp.down_proj", width, ffn, bias)?,
                }
            }
        };
        let mut norm = |name: &str| Norm::build(source, &format!("{at}.{name}"), width, gpt2, config.norm_epsilon);
        let (attention_norm, ffn_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        let [query, key, value, output] = attention;
        Ok(Self { number, attention_norm, query, key, value, output, ffn_norm, ffn })
    }

    /// `x` `[batch, time, width]` → the same.
    pub(crate) fn forward(
        &self,
        x: Tensor,
        shared: &Shared<'_>,
        store: Option<&mut dyn KvStore>,
        walk: &mut Walk<'_, '_>,
        routings: Option<&mut Vec<LayerRouting>>,
    ) -> std::result::Result<Tensor, Exit> {
        let l = self.number;
        let x = walk.at(Site::ResidPre(l), x)?;
        let normed = walk.at(Site::AttnNormOut(l), self.attention_norm.forward(&x)?)?;
        let attended = walk.at(Site::AttnOut(l), self.attend(&normed, shared, store)?)?;
        let x = walk.at(Site::ResidMid(l), x.f_add(&attended)?)?;
        let normed = walk.at(Site::MlpNormOut(l), self.ffn_norm.forward(&x)?)?;
        let fed = walk.at(Site::MlpOut(l), self.feed(&normed, shared, routings)?)?;
        walk.at(Site::ResidPost(l), x.f_add(&fed)?)
    }

    fn attend(&self, x: &Tensor, shared: &Shared<'_>, store: Option<&mut dyn KvStore>) -> Result<Tensor> {
        let config = shared.config;
        let (batch, time) = (shared.tokens.batch, shared.tokens.time);
        let heads = |x: &Tensor, n: i64| x.f_view([batch, time, n, config.head_dim])?.f_transpose(1, 2);
        let query = heads(&self.project(Projection::Q, x, shared)?, config.heads)?; // (b, h, t, d)
        let key = heads(&self.project(Projection::K, x, shared)?, config.kv_heads)?; // (b, kv, t, d)
        let value = heads(&self.project(Projection::V, x, shared)?, config.kv_heads)?;
        let (query, key) = match &shared.turns {
            Some(turns) => (turns.apply(&query)?, turns.apply(&key)?),
            None => (query, key),
        };
        let (key, value) = match store {
            Some(store) => {
                if store.len(self.number) != shared.tokens.past {
                    let expected = format!("{} tokens in layer {}", shared.tokens.past, self.number);
                    let got = format!("{}; an earlier pass stopped before this layer", store.len(self.number));
                    return Err(Error::invalid("cache", expected, got));
                }
                // Stores hold values: later tokens' losses would lose their share of the gradient without a word.
                if recorded(&key)? || recorded(&value)? {
                    let expected = "none while gradients are recorded: pass the whole text without it, or use no_grad";
                    return Err(Error::invalid("cache", expected, "a cache of values without gradients"));
                }
                store.append(self.number, &key, &value)?
            }
            None => (key, value),
        };
        let attended = shared.attention.attend(&AttentionInput {
            layer: self.number,
            query: &query,
            key: &key,
            value: &value,
            mask: &shared.mask,
            scale: (config.head_dim as f64).sqrt().recip(),
            hidden: x,
            positions: shared.positions,
            training: shared.training,
            cache: shared.cache,
        })?;
        if attended.size() != query.size() {
            let expected = format!("{:?}, as the queries", query.size());
            return Err(Error::shape("What the attention kernel returned", expected, &attended));
        }
        let merged = attended.f_transpose(1, 2)?.f_reshape([batch, time, config.heads * config.head_dim])?;
        self.project(Projection::O, &merged, shared)
    }

    fn feed(&self, x: &Tensor, shared: &Shared<'_>, routings: Option<&mut Vec<LayerRouting>>) -> Result<Tensor> {
        match &self.ffn {
            FeedForward::SwiGlu { .. } => {
                let gate = self.project(Projection::Gate, x, shared)?.f_silu()?;
                let hidden = gate.f_mul(&self.project(Projection::Up, x, shared)?)?;
                self.project(Projection::Down, &hidden, shared)
            }
            FeedForward::Gelu { .. } => {
                let hidden = self.project(Projection::Up, x, shared)?.f_gelu("tanh")?;
                self.project(Projection::Down, &hidden, shared)
            }
            FeedForward::Experts(layer) => {
                let real = shared.tokens.real.as_ref().map(|r| r.f_reshape([-1])).transpose()?;
                let context = RouteContext {
                    layer: self.number,
                    batch: shared.tokens.batch,
                    real: real.as_ref(),
                    training: shared.training,
                    decoding: shared.tokens.past > 0,
                };
                layer.forward(x, &context, routings)
            }
        }
    }

    /// The projection of `x`, with the adapter's share.
    fn project(&self, which: Projection, x: &Tensor, shared: &Shared<'_>) -> Result<Tensor> {
        let layer = self.linear(which).ok_or_else(|| no_projection(which, self.number))?;
        let y = layer.forward(x)?;
        match &shared.adapter {
            None => Ok(y),
            Some(adapter) => match adapter.delta(self.number, which, x)? {
                Some(delta) => Ok(y.f_add(&delta)?),
                None => Ok(y),
            },
        }
    }

    pub(crate) fn linear(&self, which: Projection) -> Option<&dyn LinearLayer> {
        Some(match (which, &self.ffn) {
            (Projection::Q, _) => &*self.query,
            (Projection::K, _) => &*self.key,
            (Projection::V, _) => &*self.value,
            (Projection::O, _) => &*self.output,
            (Projection::Gate, FeedForward::SwiGlu { gate, .. }) => &**gate,
            (Projection::Up, FeedForward::SwiGlu { up, .. } | FeedForward::Gelu { up, .. }) => &**up,
            (Projection::Down, FeedForward::SwiGlu { down, .. } | FeedForward::Gelu { down, .. }) => &**down,
            _ => return None,
        })
    }

    fn slot(&mut self, which: Projection) -> Option<&mut Box<dyn LinearLayer>> {
        Some(match (which, &mut self.ffn) {
            (Projection::Q, _) => &mut self.query,
            (Projection::K, _) => &mut self.key,
            (Projection::V, _) => &mut self.value,
            (Projection::O, _) => &mut self.output,
            (Projection::Gate, FeedForward::SwiGlu { gate, .. }) => gate,
            (Projection::Up, FeedForward::SwiGlu { up, .. } | FeedForward::Gelu { up, .. }) => up,
            (Projection::Down, FeedForward::SwiGlu { down, .. } | FeedForward::Gelu { down, .. }) => down,
            _ => return None,
        })
    }

    /// Puts another linear map into a projection's socket and returns the one that was there.
    pub(crate) fn replace(&mut self, which: Projection, new: Box<dyn LinearLayer>) -> Result<Box<dyn LinearLayer>> {
        let number = self.number;
        let slot = self.slot(which).ok_or_else(|| no_projection(which, number))?;
        let (wanted, got) = ((slot.out_features(), slot.in_features()), (new.out_features(), new.in_features()));
        if wanted != got {
            let expected = format!("a map of {} to {} features", wanted.1, wanted.0);
            return Err(Error::invalid(
                format!("{which:?} of layer {number}"),
                expected,
                format!("{} to {}", got.1, got.0),
            ));
        }
        Ok(std::mem::replace(slot, new))
    }

    /// The mixture of experts, if the layer has one.
    pub(crate) fn experts(&self) -> Option<&MoeLayer> {
        if let FeedForward::Experts(layer) = &self.ffn { Some(layer) } else { None }
    }

    pub(crate) fn experts_mut(&mut self) -> Option<&mut MoeLayer> {
        if let FeedForward::Experts(layer) = &mut self.ffn { Some(layer) } else { None }
    }

    /// What can be trained, by the names of [`names`].
    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        let at = names::layer(self.number);
        let mut out = Vec::new();
        let mut add = |name: &str, parameters: Vec<(String, Tensor)>| {
            out.extend(parameters.into_iter().map(|(p, tensor)| (format!("{at}.{name}.{p}"), tensor)));
        };
        add("input_layernorm", self.attention_norm.parameters());
        for which in Projection::ALL {
            if let Some(linear) = self.linear(which) {
                add(which.name(), linear.parameters());
            }
        }
        add("post_attention_layernorm", self.ffn_norm.parameters());
        if let Some(layer) = self.experts() {
            add("block_sparse_moe", layer.parameters());
        }
        out
    }

    /// Bytes of its weights.
    pub(crate) fn bytes(&self) -> u64 {
        let linear: u64 = Projection::ALL.iter().filter_map(|&p| self.linear(p)).map(LinearLayer::bytes).sum();
        linear + self.experts().map_or(0, MoeLayer::bytes)
    }
}

fn no_projection(which: Projection, layer: usize) -> Error {
    Error::invalid("projection", format!("one that layer {layer} of this model has"), format!("{which:?}"))
}
