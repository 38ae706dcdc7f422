//! The socket for routing, and the softmax router with its balance loss.

use crate::config::MoeConfig;
use crate::{Error, Result};
use std::fmt;
use tensor::tch::{Kind, Tensor};

/// What a router learns about the tokens.
#[derive(Debug)]
pub struct RouteContext<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Texts in the batch; the N tokens are theirs, row by row.
    pub batch: i64,
    /// Which of the N tokens are real, `[N]` of bool; none if all are. Padding may be routed, but must not count in losses; the
    /// layer gives it to no expert.
    pub real: Option<&'a Tensor>,
    /// Whether the pass trains: losses are wanted.
    pub training: bool,
    /// Whether the pass continues a text from a cache: later tokens can't be seen.
    pub decoding: bool,
}

/// Where tokens go: A assignments of a token to an expert, in any number a token and an expert.
#[derive(Debug)]
pub struct Routing {
    /// Token of each assignment, `[A]` of i64, below N.
    pub token: Tensor,
    /// Expert of each assignment, `[A]` of i64.
    pub expert: Tensor,
    /// Weight of the expert's output, `[A]`.
    pub weight: Tensor,
    /// Scores of all experts, `[N, experts]`, for observers; none if the router has none.
    pub logits: Option<Tensor>,
    /// Losses to be added to the task's, by name, already multiplied by their factors. Empty unless training.
    pub losses: Vec<(&'static str, Tensor)>,
}

/// How many tokens each expert got in a step of training, over all its passes.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadStats {
    /// Tokens by expert.
    pub counts: Vec<u64>,
}

/// The socket: chooses experts for tokens. Routing takes `&self`: a router whose state changes while it routes needs a `Mutex` or
/// `RefCell` inside.
pub trait Router: fmt::Debug + Send {
    /// Number of experts.
    fn experts(&self) -> usize;

    /// Routes N tokens `x` `[N, width]`, the same that the experts see.
    ///
    /// # Errors
    /// Whatever the plug reports.
    fn route(&self, x: &Tensor, context: &RouteContext<'_>) -> Result<Routing>;

    /// Whether a token's experts depend on it and earlier ones only. One that isn't can't decode from a cache.
    fn causal(&self) -> bool {
        true
    }

    /// State that is saved and not trained (running statistics, biases moved by [`post_step`](Self::post_step)), by name,
    /// sharing memory.
    fn buffers(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// What [`Model::post_step`](crate::model::Model::post_step) calls; a training loop calls that after each step of the
    /// optimizer. (The trainers of [`train`](crate::train) hold the model and can't: with a router that needs it, write the loop.)
    fn post_step(&mut self, _stats: &LoadStats) {}

    /// What can be trained, by name, sharing memory.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }
}

impl Routing {
    /// The routing of experts `[N, k]` (i64) with weights `[N, k]`: each token to its k experts.
    ///
    /// # Errors
    /// [`Error::Shape`] if the two differ in shape.
    pub fn top_k(experts: &Tensor, weights: &Tensor) -> Result<Self> {
        let &[tokens, k] = experts.size().as_slice() else {
            return Err(Error::shape("The chosen experts", "[tokens, k]", experts));
        };
        if weights.size() != [tokens, k] {
            return Err(Error::shape("The weights of the chosen experts", format!("[{tokens}, {k}]"), weights));
        }
        let token = Tensor::f_arange(tokens, (Kind::Int64, experts.device()))?;
        Ok(Self {
            token: token.f_repeat_interleave_self_int(k, 0, None)?,
            expert: experts.f_reshape([-1])?,
            weight: weights.f_reshape([-1])?,
            logits: None,
            losses: Vec::new(),
        })
    }
}

/// The default: a linear map, softmax, the k most probable experts; ties go to the lower number.
///
/// Losses (Switch Transformers and GShard; ST-MoE): balance `c E Σ_i f_i P_i`, where `f_i` is the share of assignments that
/// expert `i` gets and `P_i` its mean probability (c if all are equal, at most `c E / k`), and `c_z` times the mean of
/// `logsumexp²`. All in f32.
#[derive(Debug)]
pub struct SoftmaxRouter {
    /// `[experts, width]`.
    weight: Tensor,
    config: MoeConfig,
}

impl SoftmaxRouter {
    /// A router with the weight `[experts, width]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a weight of another number of experts.
    pub fn new(weight: Tensor, config: &MoeConfig) -> Result<Self> {
        if weight.dim() != 2 || weight.size()[0] != config.experts as i64 {
            return Err(Error::shape("The router's weight", format!("[{}, width]", config.experts), &weight));
        }
        Ok(Self { weight, config: config.clone() })
    }

    /// `probabilities` `[N, E]`, `chosen` `[N, k]`.
    fn balance(&self, probabilities: &Tensor, chosen: &Tensor, real: Option<&Tensor>) -> Result<Tensor> {
        let experts = self.config.experts as i64;
        let (probabilities, chosen) = match real {
            None => (probabilities.shallow_clone(), chosen.shallow_clone()),
            Some(real) => {
                let rows = real.f_nonzero()?.f_reshape([-1])?;
                (probabilities.f_index_select(0, &rows)?, chosen.f_index_select(0, &rows)?)
            }
        };
        let counts = chosen.f_reshape([-1])?.f_bincount(None::<Tensor>, experts)?.f_to_kind(Kind::Float)?;
        let share = counts.f_div_scalar(chosen.numel().max(1) as f64)?; // (e)
        let mean = probabilities.f_mean_dim([0i64].as_slice(), false, Kind::Float)?; // (e)
        Ok(share.f_mul(&mean)?.f_sum(Kind::Float)?.f_mul_scalar(self.config.balance * experts as f64)?)
    }
}

impl Router for SoftmaxRouter {
    fn experts(&self) -> usize {
        self.config.experts
    }

    fn route(&self, x: &Tensor, context: &RouteContext<'_>) -> Result<Routing> {
        let logits = x.f_to_kind(Kind::Float)?.f_linear(&self.weight.f_to_kind(Kind::Float)?, None::<Tensor>)?; // (n, e)
        let probabilities = logits.f_softmax(-1, Kind::Float)?;
        let (sorted, order) = probabilities.f_sort_stable(true, -1, true)?;
        let k = self.config.top_k as i64;
        let (weights, chosen) = (sorted.f_narrow(1, 0, k)?, order.f_narrow(1, 0, k)?); // (n, k)
        let weights = if self.config.renormalize {
            let sum = weights.f_sum_dim_intlist([1i64].as_slice(), true, Kind::Float)?;
            weights.f_div(&sum)?
        } else {
            weights
        };
        let mut routing = Routing::top_k(&chosen, &weights)?;
        if context.training {
            routing.losses.push(("balance", self.balance(&probabilities, &chosen, context.real)?));
            if self.config.z_loss > 0.0 {
                let squares = logits.f_logsumexp([1i64].as_slice(), false)?.f_square()?;
                let squares = match context.real {
                    None => squares,
                    Some(real) => squares.f_masked_select(real)?,
                };
                routing.losses.push(("z", squares.f_mean(Kind::Float)?.f_mul_scalar(self.config.z_loss)?));
            }
        }
        routing.logits = Some(logits);
        Ok(routing)
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        vec![("gate.weight".to_owned(), self.weight.shallow_clone())]
    }
}
