//! The socket for weights: a linear map, stored however a plug likes.

use crate::{Error, Result};
use std::fmt;
use tensor::tch::{Kind, Tensor};

/// The socket: a linear map `[…, in] → […, out]`, `y = x Wᵀ + b` with `W` of the shape `[out, in]`.
///
/// The model uses it for every projection and for the table of token embeddings (whose rows are also the tied head).
pub trait LinearLayer: fmt::Debug + Send {
    /// Width of the input.
    fn in_features(&self) -> i64;

    /// Width of the output.
    fn out_features(&self) -> i64;

    /// `[…, in] → […, out]`, in the kind of `x`.
    ///
    /// # Errors
    /// Whatever the plug reports, for instance that it can't be differentiated.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// The rows `ids` (i64, any shape `s`) of the weight: `[s…, in]`. For embeddings, and for logits of a few tokens only.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn rows(&self, ids: &Tensor) -> Result<Tensor>;

    /// The weight as a dense tensor `[out, in]`; stored ones are shared, packed ones are unpacked.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn weight(&self) -> Result<Tensor>;

    /// The bias `[out]`, if there is one.
    fn bias(&self) -> Option<Tensor> {
        None
    }

    /// What can be trained, by name (`weight`, `bias`, …), sharing memory.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Bytes that the weights take in memory.
    fn bytes(&self) -> u64;

    /// Whether it multiplies a few rows of `x` on threads of its own, so that libtorch's should keep out of the way.
    fn has_own_threads(&self) -> bool {
        false
    }
}

/// The plain default: a dense weight.
#[derive(Debug)]
pub struct Dense {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Dense {
    /// A weight `[out, in]` and a bias `[out]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if they don't fit.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        if weight.dim() != 2 {
            return Err(Error::shape("The weight of a linear layer", "[out, in]", &weight));
        }
        if let Some(bias) = bias.as_ref().filter(|b| b.size() != [weight.size()[0]]) {
            return Err(Error::shape("The bias of a linear layer", format!("[{}]", weight.size()[0]), bias));
        }
        Ok(Self { weight, bias })
    }
}

impl LinearLayer for Dense {
    fn in_features(&self) -> i64 {
        self.weight.size()[1]
    }

    fn out_features(&self) -> i64 {
        self.weight.size()[0]
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_linear(&self.weight, self.bias.as_ref())?)
    }

    fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(Tensor::f_embedding(&self.weight, ids, -1, false, false)?)
    }

    fn weight(&self) -> Result<Tensor> {
        Ok(self.weight.shallow_clone())
    }

    fn bias(&self) -> Option<Tensor> {
        self.bias.as_ref().map(Tensor::shallow_clone)
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        let weight = ("weight".to_owned(), self.weight.shallow_clone());
        std::iter::once(weight).chain(self.bias().map(|b| ("bias".to_owned(), b))).collect()
    }

    fn bytes(&self) -> u64 {
        self.parameters().iter().map(|(_, t)| bytes_of(t)).sum()
    }
}

/// Bytes of a tensor's elements.
pub(crate) fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * element_bytes(tensor.kind())) as u64
}

fn element_bytes(kind: Kind) -> usize {
    kind.elt_size_in_bytes()
}

/// The linear maps of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Projection {
    /// Queries, `[heads · head_dim, width]`.
    Q,
    /// Keys, `[kv_heads · head_dim, width]`.
    K,
    /// Values, `[kv_heads · head_dim, width]`.
    V,
    /// Output of attention, `[width, heads · head_dim]`.
    O,
    /// Gate of the feed-forward, `[ffn, width]`; GPT-2 has none.
    Gate,
    /// First map of the feed-forward, `[ffn, width]`.
    Up,
    /// Second map of the feed-forward, `[width, ffn]`.
    Down,
}

impl Projection {
    /// All, in the order in which a layer uses them.
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// Its name within a layer, as Hugging Face has it for the Llama family.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }
}
