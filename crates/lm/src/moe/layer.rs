//! The feed-forward of experts: route, gather, run each expert on its tokens, weigh, scatter. No token is dropped.

use super::{Demand, ExpertStore, ExpertWeights, ResidentExperts, RouteContext, Router, Routing, SoftmaxRouter};
use crate::config::{ModelConfig, MoeConfig};
use crate::model::source::Source;
use crate::{Error, Result};
use tensor::tch::{Kind, Tensor};

/// What a layer's router did in a pass, for observers, losses and loads.
#[derive(Debug)]
pub struct LayerRouting {
    /// Number of the layer.
    pub layer: usize,
    /// The assignments.
    pub routing: Routing,
    /// Assignments of real tokens by expert.
    pub counts: Vec<usize>,
}

/// A feed-forward of experts.
#[derive(Debug)]
pub struct MoeLayer {
    router: Box<dyn Router>,
    experts: Box<dyn ExpertStore>,
}

impl MoeLayer {
    /// A layer from its two plugs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they differ in the number of experts.
    pub fn new(router: Box<dyn Router>, experts: Box<dyn ExpertStore>) -> Result<Self> {
        same_number(router.experts(), experts.experts())?;
        Ok(Self { router, experts })
    }

    pub(crate) fn build(config: &ModelConfig, moe: &MoeConfig, layer: usize, source: &mut dyn Source) -> Result<Self> {
        let at = format!("model.layers.{layer}.block_sparse_moe");
        let gate = source.tensor(&format!("{at}.gate.weight"), &[moe.experts as i64, config.width])?;
        let (ffn, width) = (config.ffn, config.width);
        let mut experts = Vec::with_capacity(moe.experts);
        for number in 0..moe.experts {
            let mut tensor = |name: &str, shape| source.tensor(&format!("{at}.experts.{number}.{name}.weight"), shape);
            experts.push(ExpertWeights {
                gate: tensor("w1", &[ffn, width])?,
                up: tensor("w3", &[ffn, width])?,
                down: tensor("w2", &[width, ffn])?,
            });
        }
        Self::new(Box::new(SoftmaxRouter::new(gate, moe)?), Box::new(ResidentExperts::new(experts)?))
    }

    /// The router.
    pub fn router(&self) -> &dyn Router {
        &*self.router
    }

    /// The store of the experts' weights.
    pub fn experts(&self) -> &dyn ExpertStore {
        &*self.experts
    }

    pub(crate) fn router_mut(&mut self) -> &mut dyn Router {
        &mut *self.router
    }

    pub(crate) fn set_router(&mut self, router: Box<dyn Router>) -> Result<Box<dyn Router>> {
        same_number(router.experts(), self.experts.experts())?;
        Ok(std::mem::replace(&mut self.router, router))
    }

    pub(crate) fn set_experts(&mut self, experts: Box<dyn ExpertStore>) -> Result<Box<dyn ExpertStore>> {
        same_number(self.router.experts(), experts.experts())?;
        Ok(std::mem::replace(&mut self.experts, experts))
    }

    /// `[batch, time, width] → [batch, time, width]`; what the router did is added to `routings`.
    ///
    /// # Errors
    /// What the plugs report; [`Error::InvalidArgument`] for an assignment outside tokens or experts, and for a store that
    /// doesn't visit each demanded expert once.
    pub fn forward(
        &self,
        x: &Tensor,
        context: &RouteContext<'_>,
        routings: Option<&mut Vec<LayerRouting>>,
    ) -> Result<Tensor> {
        let size = x.size();
        if size.is_empty() {
            return Err(Error::shape("The activations", "[…, width]", x));
        }
        let flat = x.f_reshape([-1, size[size.len() - 1]])?; // (n, width)
        let routing = self.router.route(&flat, context)?;
        let plan = Plan::new(&routing, flat.size()[0], self.router.experts(), context.real)?;
        let out = plan.run(&flat, &routing, context.layer, &*self.experts)?;
        if let Some(routings) = routings {
            routings.push(LayerRouting { layer: context.layer, routing, counts: plan.counts });
        }
        Ok(out.f_view(size.as_slice())?)
    }

    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        self.router.parameters().into_iter().chain(self.experts.parameters()).collect()
    }

    pub(crate) fn bytes(&self) -> u64 {
        let router: u64 = self.router.parameters().iter().map(|(_, t)| crate::linear::bytes_of(t)).sum();
        router + self.experts.bytes()
    }
}

fn same_number(router: usize, experts: usize) -> Result<()> {
    let expected = format!("as many experts as the router chooses from, {router}");
    if router == experts { Ok(()) } else { Err(Error::invalid("experts", expected, experts)) }
}

/// Assignments sorted by expert (and by token within one).
struct Plan {
    counts: Vec<usize>,
    /// Assignments in the order of their experts, `[A]` of i64.
    order: Vec<i64>,
    /// Tokens in that order.
    tokens: Vec<i64>,
    /// Largest weight by expert.
    largest: Vec<f64>,
    /// Best place among a token's experts, by expert.
    rank: Vec<usize>,
}

impl Plan {
    fn new(routing: &Routing, tokens: i64, experts: usize, real: Option<&Tensor>) -> Result<Self> {
        let token = Vec::<i64>::try_from(&routing.token)?;
        let expert = Vec::<i64>::try_from(&routing.expert)?;
        let weight = Vec::<f64>::try_from(&routing.weight.f_detach()?.f_to_kind(Kind::Double)?)?;
        if token.len() != expert.len() || token.len() != weight.len() {
            let got = format!("{} tokens, {} experts, {} weights", token.len(), expert.len(), weight.len());
            return Err(Error::invalid("routing", "as many tokens as experts and weights", got));
        }
        if let Some(bad) = token.iter().find(|t| !(0..tokens).contains(t)) {
            return Err(Error::invalid("routing.token", format!("from 0 and below {tokens}"), bad));
        }
        if let Some(bad) = expert.iter().find(|e| !(0..experts as i64).contains(e)) {
            return Err(Error::invalid("routing.expert", format!("from 0 and below {experts}"), bad));
        }
        // Padding is never attended to, so no expert needs to be read for it, and it doesn't count as load.
        let real = real.map(Vec::<bool>::try_from).transpose()?;
        let counts_for = |a: i64| real.as_ref().is_none_or(|real| real[token[a as usize] as usize]);
        let mut order: Vec<i64> = (0..token.len() as i64).filter(|&a| counts_for(a)).collect();
        let (mut counts, mut largest) = (vec![0; experts], vec![f64::NEG_INFINITY; experts]);
        for &a in &order {
            let (e, w) = (expert[a as usize], weight[a as usize]);
            counts[e as usize] += 1;
            largest[e as usize] = largest[e as usize].max(w);
        }
        // By descending weight within a token; equal weights in the order in which the router gave them.
        let mut by_token = order.clone();
        by_token.sort_by(|&a, &b| {
            let (a, b) = (a as usize, b as usize);
            token[a].cmp(&token[b]).then(weight[b].total_cmp(&weight[a]))
        });
        let mut rank = vec![usize::MAX; experts];
        for one in by_token.chunk_by(|&a, &b| token[a as usize] == token[b as usize]) {
            for (place, &a) in one.iter().enumerate() {
                let best = &mut rank[expert[a as usize] as usize];
                *best = place.min(*best);
            }
        }
        order.sort_by_key(|&a| (expert[a as usize], token[a as usize]));
        let tokens = order.iter().map(|&a| token[a as usize]).collect();
        Ok(Self { counts, order, tokens, largest, rank })
    }

    fn run(&self, x: &Tensor, routing: &Routing, layer: usize, store: &dyn ExpertStore) -> Result<Tensor> {
        let zeros = x.f_zeros_like()?;
        if self.order.is_empty() {
            return Ok(zeros);
        }
        let device = x.device();
        let tokens = Tensor::from_slice(&self.tokens).f_to_device(device)?;
        let gathered = x.f_index_select(0, &tokens)?; // (a, width), by expert
        let starts: Vec<i64> = self
            .counts
            .iter()
            .scan(0, |at, &n| {
                let start = *at;
                *at += n as i64;
                Some(start)
            })
            .collect();
        let demand: Vec<Demand> = (0..self.counts.len())
            .filter(|&e| self.counts[e] > 0)
            .map(|expert| Demand {
                expert,
                tokens: self.counts[expert],
                weight: self.largest[expert],
                rank: self.rank[expert],
            })
            .collect();
        let mut outputs: Vec<Option<Tensor>> = self.counts.iter().map(|_| None).collect();
        store.visit(layer, &demand, &mut |expert, weights| {
            let slot = outputs.get_mut(expert).filter(|slot| slot.is_none() && self.counts[expert] > 0);
            let slot = slot.ok_or_else(|| Error::invalid("visited expert", "one that is demanded, once", expert))?;
            let mine = gathered.f_narrow(0, starts[expert], self.counts[expert] as i64)?;
            *slot = Some(weights.forward(&mine)?);
            Ok(())
        })?;
        if let Some(missed) = demand.iter().find(|d| outputs[d.expert].is_none()) {
            return Err(Error::invalid(
                "ExpertStore::visit",
                "a visit of every demanded expert",
                format!("none of expert {}", missed.expert),
            ));
        }
        let outputs: Vec<Tensor> = outputs.into_iter().flatten().collect();
        let order = Tensor::from_slice(&self.order).f_to_device(device)?;
        let weight = routing.weight.f_index_select(0, &order)?.f_to_kind(x.kind())?.f_unsqueeze(1)?; // (a, 1)
        let weighted = Tensor::f_cat(&outputs, 0)?.f_mul(&weight)?; // (a, width)
        Ok(zeros.f_index_add(0, &tokens, &weighted)?)
    }
}
