//! The socket for attention: queries, keys and values in, the heads' outputs out.

use crate::cache::CacheId;
use crate::{Error, Result};
use std::fmt;
use tensor::tch::{Kind, Tensor};

/// What attention gets.
#[derive(Debug)]
pub struct AttentionInput<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Queries of the new tokens, turned by their positions: `[batch, heads, time, head_dim]`.
    pub query: &'a Tensor,
    /// Keys of all tokens, cached ones first: `[batch, kv_heads, total, head_dim]`. Head `h` of the queries reads head
    /// `h / (heads / kv_heads)`.
    pub key: &'a Tensor,
    /// Values, as the keys.
    pub value: &'a Tensor,
    /// Which keys a query may see.
    pub mask: &'a AttentionMask,
    /// Factor of the scores, 1/√`head_dim`.
    pub scale: f64,
    /// What the projections read: the output of the norm before attention, `[batch, time, width]`.
    pub hidden: &'a Tensor,
    /// Position of each new token in its own text, from 0, `[batch, time]` of i64. Padding has 0.
    pub positions: &'a Tensor,
    /// Whether the pass is one of training ([`Pass::training`](crate::model::Pass::training)).
    pub training: bool,
    /// The cache that the keys come from, if there is one: what a kernel keeps of past keys is valid while this is the same.
    pub cache: Option<CacheId>,
}

/// The socket: `[batch, heads, time, head_dim]` of weighted values.
pub trait AttentionKernel: fmt::Debug + Send {
    /// # Errors
    /// Whatever the plug reports; the pass ends and the cache is put back.
    fn attend(&self, input: &AttentionInput<'_>) -> Result<Tensor>;

    /// What can be trained, by name, sharing memory.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

/// Which keys the queries of a pass may see: those of real tokens that don't come after.
#[derive(Debug)]
pub struct AttentionMask {
    /// Tokens in the cache before this pass; query `t` sees the keys `0..=past + t`.
    pub past: i64,
    /// Queries.
    pub time: i64,
    /// Which of the `past + time` keys are real, `[batch, total]` of bool; none if all are.
    pub real: Option<Tensor>,
    /// 0 where a query sees a key and −∞ elsewhere, `[batch or 1, 1, time, total]`, in the kind of the model; none
    /// where causality alone decides and the kernel knows it.
    bias: Option<Tensor>,
}

impl AttentionMask {
    /// The mask of a pass. `like` gives kind and device.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn new(past: i64, time: i64, real: Option<Tensor>, like: &Tensor) -> Result<Self> {
        let mut mask = Self { past, time, real, bias: None };
        if !mask.is_plain() {
            mask.bias = Some(mask.make_bias(like.kind(), like.device())?);
        }
        Ok(mask)
    }

    /// Whether it says no more than "nothing after me" for a pass without cache, or "everything" for a single query.
    pub fn is_plain(&self) -> bool {
        self.real.is_none() && (self.past == 0 || self.time == 1)
    }

    /// 0 and −∞, `[batch or 1, 1, time, total]`. A query of a padding token sees itself, so that its row is finite.
    ///
    /// # Errors
    /// [`Error::Torch`].
    pub fn bias(&self, like: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) if bias.kind() == like.kind() => Ok(bias.shallow_clone()),
            _ => self.make_bias(like.kind(), like.device()),
        }
    }

    fn make_bias(&self, kind: Kind, device: tensor::tch::Device) -> Result<Tensor> {
        let total = self.past + self.time;
        let visible = Tensor::f_ones([self.time, total], (Kind::Bool, device))?.f_tril(self.past)?;
        let visible = match &self.real {
            None => visible.f_view([1, 1, self.time, total])?,
            Some(real) => {
                let own = Tensor::f_eye_m(self.time, total, (Kind::Bool, device))?.f_roll([self.past], [1])?;
                let real = real.f_view([-1, 1, 1, total])?;
                visible.f_logical_and(&real)?.f_logical_or(&own)?
            }
        };
        let zero = Tensor::f_zeros([1], (kind, device))?;
        Ok(zero.f_where_self(&visible, &(zero.shallow_clone() + f64::NEG_INFINITY))?)
    }
}

/// The default: libtorch's fused attention for several queries, two products and a softmax for one.
///
/// The fused form has a gradient but no second one: put [`PlainAttention`] into the socket for Hessian-vector products.
#[derive(Debug, Clone, Copy, Default)]
pub struct FusedAttention;

impl AttentionKernel for FusedAttention {
    fn attend(&self, input: &AttentionInput<'_>) -> Result<Tensor> {
        if input.mask.time == 1 {
            return PlainAttention.attend(input);
        }
        let (query, key, value) = (input.query, input.key, input.value);
        let groups = query.size()[1] != key.size()[1];
        let plain = input.mask.is_plain();
        let bias = if plain { None } else { Some(input.mask.bias(query)?) };
        Ok(Tensor::f_scaled_dot_product_attention(query, key, value, bias, 0.0, plain, input.scale, groups)?)
    }
}

/// The formula as it stands: `softmax(σ q kᵀ + bias) v`. The test of the others.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainAttention;

impl AttentionKernel for PlainAttention {
    fn attend(&self, input: &AttentionInput<'_>) -> Result<Tensor> {
        let (query, key, value) = (input.query, input.key, input.value);
        let [batch, heads, time, dim] = four("The queries", query)?;
        let [_, kv_heads, total, _] = four("The keys", key)?;
        // Queries of a group share their key head: they are rows of one product.
        let grouped = query.f_reshape([batch, kv_heads, heads / kv_heads * time, dim])?;
        let scores = grouped.f_matmul(&key.f_transpose(-2, -1)?)?.f_mul_scalar(input.scale)?; // (b, kv, g·t, s)
        let scores = if input.mask.time == 1 && input.mask.real.is_none() {
            scores
        } else {
            let bias = input.mask.bias(query)?; // (b|1, 1, t, s)
            let by_head = scores.f_view([batch, heads, time, total])?;
            by_head.f_add(&bias)?.f_view([batch, kv_heads, heads / kv_heads * time, total])?
        };
        let weights = scores.f_softmax(-1, None::<Kind>)?;
        Ok(weights.f_matmul(value)?.f_view([batch, heads, time, dim])?)
    }
}

fn four(what: &str, tensor: &Tensor) -> Result<[i64; 4]> {
    tensor.size().try_into().map_err(|_| Error::shape(what, "[batch, heads, time, head_dim]", tensor))
}
