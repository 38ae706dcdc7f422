//! Low-rank adapters (LoRA): `y = W x + (α/r) B A x` with `A` of `[r, in]` and `B` of `[out, r]`, W untouched.
//!
//! The bare model is the same object without the adapter, so a policy and its reference share their weights. B starts at
//! zero: a new adapter changes nothing until it is trained. ("LoRA: Low-Rank Adaptation of Large Language Models", Hu et
//! al., 2021.)
//!
//! ```
//! use lm::config::ModelConfig;
//! use lm::lora::{Adapter, Layers, LoraConfig};
//! use lm::model::{Model, Pass};
//! use lm::tensor::{Seed, tch::{Device, Kind, Tensor}};
//!
//! let config = ModelConfig::llama(64, 16, 4, 2, 1, 32);
//! let model = Model::random(&config, Seed::new(1), Kind::Float, Device::Cpu)?;
//! let lora = LoraConfig { rank: 4, alpha: 8.0, layers: Layers::Top(2), ..LoraConfig::default() };
//! let adapter = Adapter::new(&config, &lora, Kind::Float, Device::Cpu)?;
//! let ids = Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]);
//! let with = model.logits(&ids, &mut Pass { adapter: Some(adapter.view()), ..Pass::default() })?;
//! assert_eq!(with, model.logits(&ids, &mut Pass::default())?);
//! # Ok::<(), lm::Error>(())
//! ```

mod config;
mod peft;

pub use config::{Init, Layers, LoraConfig};

use crate::config::ModelConfig;
use crate::linear::{Dense, Projection};
use crate::model::{Model, names};
use crate::{Error, Result};
use std::collections::BTreeMap;
use tensor::Seed;
use tensor::tch::{Device, Kind, Tensor, no_grad_guard};

/// What is added to one weight.
#[derive(Debug)]
struct Pair {
    /// `[r, in]`
    a: Tensor,
    /// `[out, r]`
    b: Tensor,
}

/// Low-rank additions to the projections of a model.
#[derive(Debug)]
pub struct Adapter {
    config: LoraConfig,
    pairs: BTreeMap<(usize, Projection), Pair>,
}

/// An adapter as a pass uses it: switched on for all rows of a batch, or for some.
#[derive(Debug, Clone, Copy)]
pub struct AdapterView<'a> {
    adapter: &'a Adapter,
    rows: Option<&'a Tensor>,
}

impl Adapter {
    /// An adapter that changes nothing yet: A random, B zero; both can be trained.
    ///
    /// A tensor's numbers depend on the seed, its layer and its projection only, not on what else is adapted.
    ///
    /// # Errors
    /// As [`LoraConfig::validate`] and [`ModelConfig::validate`]; [`Error::LayerOutOfRange`];
    /// [`Error::InvalidArgument`] for a projection that the model lacks or that is a mixture of experts.
    pub fn new(model: &ModelConfig, config: &LoraConfig, kind: Kind, device: Device) -> Result<Self> {
        config.validate()?;
        model.validate()?;
        let (seed, rank) = (Seed::new(config.seed).child("lora"), config.rank);
        let mut pairs = BTreeMap::new();
        for layer in config.layers_of(model.layers)? {
            for &which in &config.targets {
                let [out, inner] = config::size(model, which)?;
                let seed = seed.child(&module(layer, which));
                let options = (Kind::Float, Device::Cpu);
                let mut a = Tensor::f_zeros([rank, inner], options)?;
                match config.init {
                    Init::Normal => {
                        tensor::fused::fill_normal(&a, seed, 0)?;
                        a = a.f_mul_scalar((inner as f64).sqrt().recip())?;
                    }
                    Init::Kaiming => a = uniform(seed, &a.size(), (inner as f64).sqrt().recip())?,
                }
                let b = Tensor::f_zeros([out, rank], options)?;
                let place = |t: Tensor| t.f_to_device(device)?.f_to_kind(kind)?.f_set_requires_grad(true);
                pairs.insert((layer, which), Pair { a: place(a)?, b: place(b)? });
            }
        }
        Ok(Self { config: config.clone(), pairs })
    }

    /// How it was made.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// α/r.
    pub fn scale(&self) -> f64 {
        self.config.alpha / self.config.rank as f64
    }

    /// The lowest layer that it changes: everything below is the bare model's.
    pub fn first_layer(&self) -> usize {
        self.pairs.keys().next().map_or(0, |(layer, _)| *layer)
    }

    /// For a pass, with every row adapted.
    pub fn view(&self) -> AdapterView<'_> {
        AdapterView { adapter: self, rows: None }
    }

    /// What a projection adds for its input `x` `[…, in]`: `(α/r) B A x` `[…, out]`, in the kind of `x`; none where nothing
    /// is adapted.
    ///
    /// # Errors
    /// [`Error::Shape`] for an input of another width than the adapter was made for.
    pub fn delta(&self, layer: usize, which: Projection, x: &Tensor) -> Result<Option<Tensor>> {
        let Some(Pair { a, b }) = self.pairs.get(&(layer, which)) else { return Ok(None) };
        if x.size().last() != a.size().last() {
            let what = format!("The input of {which:?} of layer {layer} for the adapter");
            return Err(Error::shape(what, format!("[…, {}]", a.size()[1]), x));
        }
        let inner = x.f_to_kind(a.kind())?.f_linear(a, None::<&Tensor>)?.f_mul_scalar(self.scale())?; // […, r]
        Ok(Some(inner.f_linear(b, None::<&Tensor>)?.f_to_kind(x.kind())?))
    }

    /// What is added to a weight: `(α/r) B A` `[out, in]`; none where nothing is adapted.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn weight_delta(&self, layer: usize, which: Projection) -> Result<Option<Tensor>> {
        self.pairs
            .get(&(layer, which))
            .map(|pair| Ok(pair.b.f_matmul(&pair.a)?.f_mul_scalar(self.scale())?))
            .transpose()
    }

    /// A and B of every adapted projection, by name, sharing memory.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let pairs = self.pairs.iter();
        pairs
            .flat_map(|(&(layer, which), pair)| {
                let at = module(layer, which);
                [(format!("{at}.lora_A.weight"), &pair.a), (format!("{at}.lora_B.weight"), &pair.b)]
            })
            .map(|(name, tensor)| (name, tensor.shallow_clone()))
            .collect()
    }

    /// A copy with memory of its own, to be trained on.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn copy(&self) -> Result<Self> {
        self.copy_with(true)
    }

    /// A copy with memory of its own that can't be trained: the reference of a policy that starts from this adapter.
    ///
    /// # Errors
    /// What libtorch reports.
    pub fn frozen_copy(&self) -> Result<Self> {
        self.copy_with(false)
    }

    fn copy_with(&self, trainable: bool) -> Result<Self> {
        let copy = |t: &Tensor| t.f_detach()?.f_detach_copy()?.f_set_requires_grad(trainable);
        let pairs = self.pairs.iter();
        let pairs = pairs.map(|(&at, pair)| Ok((at, Pair { a: copy(&pair.a)?, b: copy(&pair.b)? })));
        Ok(Self { config: self.config.clone(), pairs: pairs.collect::<Result<_>>()? })
    }

    /// Takes over the numbers of another adapter of the same shape, in place: handles from
    /// [`parameters`](Self::parameters) see them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an adapter of other projections, ranks or scale; nothing is changed then.
    pub fn assign(&self, other: &Self) -> Result<()> {
        let shape =
            |adapter: &Self| -> Vec<_> { adapter.parameters().iter().map(|(n, t)| (n.clone(), t.size())).collect() };
        if shape(self) != shape(other) || self.scale() != other.scale() {
            let expected = "an adapter of the same projections, ranks and scale";
            return Err(Error::invalid("other", expected, format!("{:?}", other.config)));
        }
        let _guard = no_grad_guard();
        for ((_, mut into), (_, from)) in self.parameters().into_iter().zip(other.parameters()) {
            into.f_copy_(&from)?;
        }
        Ok(())
    }

    /// Adds it to the model's weights for good. Packed weights become dense ones of f32.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`], [`Error::InvalidArgument`] or [`Error::Shape`] for a model that it wasn't made for;
    /// what the model's layers report. The model is unchanged then.
    pub fn merge_into(&self, model: &mut Model) -> Result<()> {
        let _guard = no_grad_guard();
        self.view().check(model.config().layers)?;
        let mut merged = Vec::with_capacity(self.pairs.len());
        for &(layer, which) in self.pairs.keys() {
            let (Some(linear), Some(delta)) = (model.linear(layer, which)?, self.weight_delta(layer, which)?) else {
                let expected = format!("one with {which:?} in layer {layer}");
                return Err(Error::invalid("model", expected, "one without"));
            };
            let weight = linear.weight()?;
            if weight.size() != delta.size() {
                let what = format!("The weight of {which:?} of layer {layer}");
                return Err(Error::shape(what, format!("{:?}, as the adapter has it,", delta.size()), &weight));
            }
            // In the wider of the two kinds: the adapter's may be half as exact as the weights, and the sum must not be.
            let narrow = |kind: Kind| matches!(kind, Kind::Half | Kind::BFloat16);
            let kind = match (weight.kind(), delta.kind()) {
                (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
                (a, b) if narrow(a) && a == b => a,
                _ => Kind::Float,
            };
            let delta = delta.f_to_kind(kind)?;
            let sum = weight.f_to_kind(kind)?.f_add(&delta)?.f_to_kind(weight.kind())?;
            merged.push((layer, which, Dense::new(sum, linear.bias())?));
        }
        for (layer, which, dense) in merged {
            model.set_linear(layer, which, Box::new(dense))?;
        }
        Ok(())
    }
}

impl<'a> AdapterView<'a> {
    /// Switched on only for the rows of the batch where `rows` `[batch]` (bool) is true. One pass then runs a model with
    /// and without its adapter, reading the weights once. The other rows have a zero added: every number stays equal (a
    /// −0 becomes +0).
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::InvalidArgument`] for another shape or kind.
    pub fn with_rows(self, rows: &'a Tensor) -> Result<Self> {
        if rows.dim() != 1 {
            return Err(Error::shape("The adapter's mask of rows", "[batch]", rows));
        }
        if rows.kind() != Kind::Bool {
            return Err(Error::invalid("rows", "of the kind Bool", format!("{:?}", rows.kind())));
        }
        Ok(Self { rows: Some(rows), ..self })
    }

    /// The adapter itself.
    pub fn adapter(self) -> &'a Adapter {
        self.adapter
    }

    /// The mask of rows, if there is one.
    pub(crate) fn rows(self) -> Option<&'a Tensor> {
        self.rows
    }

    /// As [`Adapter::delta`], for `x` `[batch, …, in]`; zero for the rows that are switched off.
    ///
    /// # Errors
    /// As [`Adapter::delta`]; [`Error::Shape`] for a batch of another size than the mask.
    pub fn delta(&self, layer: usize, which: Projection, x: &Tensor) -> Result<Option<Tensor>> {
        let Some(delta) = self.adapter.delta(layer, which, x)? else { return Ok(None) };
        let Some(rows) = self.rows else { return Ok(Some(delta)) };
        if x.size().first() != rows.size().first() {
            return Err(Error::shape("The adapter's mask of rows", format!("[{}]", x.size()[0]), rows));
        }
        let mut shape = vec![1; x.dim()];
        shape[0] = -1;
        // Chosen, not multiplied: an overflow in a row that is switched off must not reach it.
        let zero = Tensor::f_zeros([1], (delta.kind(), delta.device()))?;
        Ok(Some(delta.f_where_self(&rows.f_view(&shape[..])?, &zero)?))
    }

    /// # Errors
    /// [`Error::LayerOutOfRange`] if a model of so many layers doesn't have all that it changes.
    pub(crate) fn check(&self, layers: usize) -> Result<()> {
        match self.adapter.pairs.keys().next_back() {
            Some(&(layer, _)) if layer >= layers => Err(Error::LayerOutOfRange { layer, layers }),
            _ => Ok(()),
        }
    }
}

/// The name of a projection.
fn module(layer: usize, which: Projection) -> String {
    format!("{}.{}", names::layer(layer), which.name())
}

/// Uniform in `±bound`.
fn uniform(seed: Seed, shape: &[i64], bound: f64) -> Result<Tensor> {
    use rand::Rng as _;
    let mut rng = seed.rng();
    let n = shape.iter().product::<i64>() as usize;
    let values: Vec<f32> = (0..n).map(|_| rng.random_range(-1.0f32..1.0) * bound as f32).collect();
    Ok(Tensor::f_from_slice(&values)?.f_view(shape)?)
}
