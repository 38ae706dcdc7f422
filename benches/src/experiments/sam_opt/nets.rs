//! The networks on which steps are timed.

use anyhow::Result;
use sam_opt::{DomainId, DomainLosses, ParamGroup, Pass};
use tensor::ParamSet;
use tensor::tch::{Device, Kind, Reduction, Tensor, nn::VarStore};

/// A network, a batch size and how many steps make a round of timing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Net {
    pub(super) name: &'static str,
    pub(super) widths: &'static [i64],
    pub(super) batch: i64,
    pub(super) steps: usize,
}

pub(super) const SMALL: Net = Net { name: "small", widths: &[64, 128, 128, 10], batch: 64, steps: 100 };
pub(super) const LARGE: Net = Net { name: "large", widths: &[784, 2048, 2048, 2048, 10], batch: 256, steps: 1 };
pub(super) const MILLION: Net = Net { name: "million", widths: &[512, 768, 768, 10], batch: 128, steps: 10 };

/// The numbers that both sides of a comparison start from.
pub(super) fn wave(count: i64, scale: f64, phase: f64) -> Tensor {
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu));
    ((index * 0.7 + phase).sin() * scale).to_kind(Kind::Float)
}

/// A ReLU network with its batch.
#[derive(Debug)]
pub(super) struct Model {
    store: VarStore,
    layers: Vec<(Tensor, Tensor)>,
    x: Tensor,
    y: Tensor,
}

impl Model {
    pub(super) fn new(net: &Net, device: Device) -> Result<Self> {
        let store = VarStore::new(device);
        let mut layers = Vec::new();
        for (i, pair) in net.widths.windows(2).enumerate() {
            let (fan_in, fan_out) = (pair[0], pair[1]);
            let path = store.root() / i.to_string();
            let start = wave(fan_in * fan_out, (fan_in as f64).powf(-0.5), i as f64).reshape([fan_out, fan_in]);
            layers.push((path.f_var_copy("weight", &start)?, path.f_zeros("bias", &[fan_out])?));
        }
        let x = wave(net.batch * net.widths[0], 1.0, 9.0).reshape([net.batch, net.widths[0]]).to_device(device);
        let y = Tensor::arange(net.batch, (Kind::Int64, device)).remainder(10);
        Ok(Self { store, layers, x, y })
    }

    pub(super) fn store(&self) -> &VarStore {
        &self.store
    }

    pub(super) fn group(&self) -> ParamGroup {
        ParamGroup::from_var_store(&self.store)
    }

    pub(super) fn params(&self) -> Result<ParamSet> {
        Ok(ParamSet::from_var_store(&self.store)?)
    }

    /// The losses of two domains, every other sample each.
    pub(super) fn domain_losses(&self) -> DomainLosses {
        let log_p = self.logits(None).log_softmax(-1, Kind::Float);
        let losses = log_p.nll_loss_nd(&self.y, None::<Tensor>, Reduction::None, -100);
        let domains = (0..self.y.size()[0] as u32).map(|i| DomainId(i % 2)).collect();
        DomainLosses::PerSample { losses, domains }
    }

    /// The logits, with the weights that a pass gives where it gives any.
    pub(super) fn logits(&self, pass: Option<&Pass<'_>>) -> Tensor {
        let last = self.layers.len() - 1;
        let mut hidden = self.x.shallow_clone();
        for (i, (weight, bias)) in self.layers.iter().enumerate() {
            let given = |what: &str| pass.and_then(|pass| pass.param(&format!("{i}.{what}")));
            let (other_weight, other_bias) = (given("weight"), given("bias"));
            hidden = hidden.linear(other_weight.as_ref().unwrap_or(weight), Some(other_bias.as_ref().unwrap_or(bias)));
            if i < last {
                hidden = hidden.relu();
            }
        }
        hidden
    }

    /// The main loss of logits.
    pub(super) fn loss_of(&self, logits: &Tensor) -> Tensor {
        logits.cross_entropy_for_logits(&self.y)
    }

    pub(super) fn loss(&self) -> Tensor {
        self.loss_of(&self.logits(None))
    }

    pub(super) fn closure(&self) -> impl FnMut(&Pass<'_>) -> sam_opt::Result<Tensor> + '_ {
        |_| Ok(self.loss())
    }
}
