//! The decoder.

mod block;
mod causal;
pub(crate) mod names;
mod norm;
mod pass;
mod random;
mod rope;
pub(crate) mod source;

pub use causal::{Adapted, CausalLm};
pub use pass::Pass;

use crate::attention::{AttentionKernel, AttentionMask, FusedAttention};
use crate::cache::Cache;
use crate::config::ModelConfig;
use crate::linear::{LinearLayer, Projection};
use crate::moe::{ExpertStore, LayerRouting, LoadStats, MoeLayer, Router};
use crate::{Error, Result};
use block::{Block, Shared};
use norm::Norm;
use pass::{Exit, Tokens, Walk};
use rope::Turns;
use source::Source;
use tensor::tch::{Device, Kind, Tensor};
use tensor::threads::OneLibtorchThread;

/// A decoder: embeddings, layers, final norm and head, with a socket at each place where research plugs in.
///
/// It has no state of its own: what a text has left behind is in a [`Cache`]. Built by
/// [`Model::random`](Self::random) or by a loader (`load`).
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    kind: Kind,
    device: Device,
    embedding: Box<dyn LinearLayer>,
    /// Learned positions `[context, width]`.
    positions: Option<Tensor>,
    blocks: Vec<Block>,
    norm: Norm,
    /// None if the head is the table of embeddings.
    head: Option<Box<dyn LinearLayer>>,
    attention: Box<dyn AttentionKernel>,
}

impl Model {
    /// Builds the model from a source of tensors.
    pub(crate) fn build(config: &ModelConfig, source: &mut dyn Source, kind: Kind, device: Device) -> Result<Self> {
        config.validate()?;
        let (vocab, width) = (config.vocab, config.width);
        let embedding = source.linear("model.embed_tokens", vocab, width, false)?;
        let positions = match config.rope {
            None => Some(source.tensor("model.embed_positions.weight", &[config.context, width])?),
            Some(_) => None,
        };
        let blocks = (0..config.layers).map(|l| Block::build(config, l, source)).collect::<Result<_>>()?;
        let layer_norm = config.architecture == crate::config::Architecture::Gpt2;
        let norm = Norm::build(source, "model.norm", width, layer_norm, config.norm_epsilon)?;
        let head = if config.tied { None } else { Some(source.linear("lm_head", vocab, width, false)?) };
        let (config, attention) = (config.clone(), Box::new(FusedAttention));
        Ok(Self { config, kind, device, embedding, positions, blocks, norm, head, attention })
    }

    /// What it is made of.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Kind of the activations.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it computes.
    pub fn device(&self) -> Device {
        self.device
    }

    /// An empty cache on the default store.
    pub fn new_cache(&self) -> Cache {
        Cache::new(self.config.layers)
    }

    /// The final normalized activations `[batch, time, width]` of tokens `ids` `[batch, time]` (i64), or those of the site
    /// after which the hooks stop. With a cache, the tokens continue what it holds.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TokenOutOfRange`], [`Error::ContextOverflow`], [`Error::InvalidArgument`] for a
    /// mask that isn't of bool or not left-padded; what hooks and plugs report. The cache is then what it was before.
    pub fn hidden(&self, ids: &Tensor, pass: &mut Pass<'_, '_>) -> Result<Tensor> {
        let [batch, time] = self.check_ids(ids)?;
        let tokens = Tokens::new(pass, [batch, time], ids.device(), &self.config)?;
        // A packed table gives f32, whatever the model computes in.
        let mut x = self.embedding.rows(ids)?.f_to_kind(self.kind)?; // (b, t, width)
        if let Some(positions) = &self.positions {
            x = x.f_add(&positions.f_index_select(0, &tokens.positions.f_reshape([-1])?)?.f_view([
                tokens.positions.size()[0],
                time,
                self.config.width,
            ])?)?;
        }
        self.walk(x, 0, &tokens, pass)
    }

    /// As [`hidden`](Self::hidden), from the activations `x` `[batch, time, width]` that enter layer `layer`: for a trunk that
    /// several tops share. The layers below are neither run nor written to the cache.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`], [`Error::Shape`], and as [`hidden`](Self::hidden); [`Error::InvalidArgument`] for hooks at
    /// the layers below.
    pub fn hidden_from(&self, layer: usize, x: &Tensor, pass: &mut Pass<'_, '_>) -> Result<Tensor> {
        if layer >= self.config.layers {
            return Err(Error::LayerOutOfRange { layer, layers: self.config.layers });
        }
        match x.size()[..] {
            [batch, time, width] if width == self.config.width => {
                let tokens = Tokens::new(pass, [batch, time], x.device(), &self.config)?;
                self.walk(x.shallow_clone(), layer, &tokens, pass)
            }
            _ => Err(Error::shape("The activations", format!("[batch, time, {}]", self.config.width), x)),
        }
    }

    /// Logits `[batch, time, vocab]` of all tokens.
    ///
    /// # Errors
    /// As [`hidden`](Self::hidden); [`Error::InvalidArgument`] for hooks that stop early.
    pub fn logits(&self, ids: &Tensor, pass: &mut Pass<'_, '_>) -> Result<Tensor> {
        refuse_stop(pass)?;
        self.head(&self.hidden(ids, pass)?)
    }

    /// Logits `[batch, vocab]` of the last token of each row: what a prompt needs before generation.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub fn last_logits(&self, ids: &Tensor, pass: &mut Pass<'_, '_>) -> Result<Tensor> {
        refuse_stop(pass)?;
        let _one = self.one_thread(ids.numel() as i64);
        self.head(&self.hidden(ids, pass)?.f_select(1, -1)?)
    }

    /// Keeps libtorch to one thread while a few tokens go through packed weights: the operators between their products are
    /// small, and libtorch's threads, which wait by spinning, would take the cores from the products'.
    pub(crate) fn one_thread(&self, tokens: i64) -> Option<OneLibtorchThread> {
        let packed = self.head_layer().has_own_threads();
        (packed && tokens <= crate::packed::DIRECT).then(OneLibtorchThread::new)
    }

    /// Logits `[…, vocab]` of final activations `[…, width]`.
    ///
    /// # Errors
    /// What the head's layer reports.
    pub fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        self.head_layer().forward(hidden)
    }

    /// Logits of the tokens `ids` `[n]` only: `[…, n]`, reading `n` rows of the head instead of all.
    ///
    /// # Errors
    /// What the head's layer reports.
    pub fn head_rows(&self, hidden: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let (head, kind) = (self.head_layer(), hidden.kind());
        let logits = hidden.f_matmul(&head.rows(ids)?.f_to_kind(kind)?.f_transpose(0, 1)?)?;
        match head.bias() {
            None => Ok(logits),
            Some(bias) => {
                let bias = bias.f_index_select(0, &ids.f_to_device(bias.device())?)?;
                Ok(logits.f_add(&bias.f_to_device(logits.device())?.f_to_kind(kind)?)?)
            }
        }
    }

    /// The head's linear map, which is the table of embeddings in tied models.
    pub fn head_layer(&self) -> &dyn LinearLayer {
        self.head.as_deref().unwrap_or(&*self.embedding)
    }

    /// The table of embeddings, `[vocab, width]`.
    pub fn embedding(&self) -> &dyn LinearLayer {
        &*self.embedding
    }

    fn check_ids(&self, ids: &Tensor) -> Result<[i64; 2]> {
        let Ok([batch, time]) = <[i64; 2]>::try_from(ids.size()) else {
            return Err(Error::shape("The tokens", "[batch, time]", ids));
        };
        if ids.kind() != Kind::Int64 {
            return Err(Error::invalid("ids", "of the kind Int64", format!("{:?}", ids.kind())));
        }
        if batch == 0 || time == 0 {
            return Err(Error::EmptyPrompt { row: 0 });
        }
        let vocab = self.config.vocab;
        let (low, high) = (ids.f_min()?.f_int64_value(&[])?, ids.f_max()?.f_int64_value(&[])?);
        if low < 0 || high >= vocab {
            let id = if low < 0 { low } else { high };
            let row = ids.f_eq(id)?.f_any_dim(1, false)?.f_to_kind(Kind::Int64)?.f_argmax(0, false)?;
            return Err(Error::TokenOutOfRange { id, row: row.f_int64_value(&[])? as usize, vocab });
        }
        Ok([batch, time])
    }

    fn walk(&self, x: Tensor, first: usize, tokens: &Tokens, pass: &mut Pass<'_, '_>) -> Result<Tensor> {
        if let Some(hooks) = &pass.hooks {
            hooks.check(self.config.layers, first)?;
        }
        if let Some(adapter) = &pass.adapter {
            adapter.check(self.config.layers)?;
        }
        if let Some(cache) = pass.cache.as_deref() {
            self.check_causal()?;
            let found = (0..self.config.layers).find(|&l| cache.is_empty() && !cache.store().is_empty(l));
            if let Some(layer) = found {
                // Before anything is written: after an error the store would be cut to the cache's length.
                let expected = "on an empty store when nothing was read yet: make another, or empty this one";
                let got = format!("on one with {} tokens in layer {layer}", cache.store().len(layer));
                return Err(Error::invalid("cache", expected, got));
            }
        }
        let known = pass.routings.as_ref().map_or(0, |r| r.len());
        let _one = self.one_thread(tokens.batch * tokens.time);
        let result = self.layers(x, first, tokens, pass);
        if let (Err(_), Some(routings)) = (&result, pass.routings.as_deref_mut()) {
            routings.truncate(known);
        }
        let Some(cache) = pass.cache.as_deref_mut() else {
            return result;
        };
        match result {
            Ok(x) => {
                tokens.commit(cache)?;
                Ok(x)
            }
            Err(error) => {
                // Some layers have the new tokens already.
                cache.put_back();
                Err(error)
            }
        }
    }

    fn layers(&self, x: Tensor, first: usize, tokens: &Tokens, pass: &mut Pass<'_, '_>) -> Result<Tensor> {
        let config = &self.config;
        let turns = match &config.rope {
            None => None,
            Some(rope) => {
                let length = tokens.next.iter().copied().max().unwrap_or(0);
                let frequencies = rope::frequencies(rope, config.head_dim, config.context, length);
                Some(Turns::new(&frequencies, &tokens.positions, x.kind(), x.device())?)
            }
        };
        let positions = tokens.positions_by_row()?;
        let all_real = tokens.all_real.as_ref().map(Tensor::shallow_clone);
        let shared = Shared {
            config,
            attention: &*self.attention,
            mask: AttentionMask::new(tokens.past, tokens.time, all_real, &x)?,
            turns,
            tokens,
            adapter: pass.adapter,
            training: pass.training,
            positions: &positions,
            cache: pass.cache.as_deref().map(Cache::id),
        };
        let mut walk = Walk::new(pass.hooks.as_deref_mut(), &positions, tokens);
        let mut x = x;
        for block in &self.blocks[first..] {
            let store = pass.cache.as_deref_mut().map(Cache::store_mut);
            match block.forward(x, &shared, store, &mut walk, pass.routings.as_deref_mut()) {
                Ok(next) => x = next,
                Err(Exit::Done(there)) => return Ok(there),
                Err(Exit::Failed(error)) => return Err(error),
            }
        }
        self.norm.forward(&x)
    }

    fn check_causal(&self) -> Result<()> {
        let peeks = |block: &Block| block.experts().is_some_and(|layer| !layer.router().causal());
        match self.blocks.iter().position(peeks) {
            None => Ok(()),
            Some(layer) => Err(Error::invalid(
                "cache",
                format!(
                    "none, because the router of layer {layer} looks at later tokens and can't decode step by step"
                ),
                "a cache",
            )),
        }
    }

    /// Puts another kernel into the attention socket of all layers and returns the one that was there.
    pub fn set_attention(&mut self, kernel: Box<dyn AttentionKernel>) -> Box<dyn AttentionKernel> {
        std::mem::replace(&mut self.attention, kernel)
    }

    /// A projection of a layer; none where the model has none (the feed-forward of experts, GPT-2's gate).
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn linear(&self, layer: usize, which: Projection) -> Result<Option<&dyn LinearLayer>> {
        let layers = self.config.layers;
        Ok(self.blocks.get(layer).ok_or(Error::LayerOutOfRange { layer, layers })?.linear(which))
    }

    /// Puts another linear map into a projection's socket and returns the one that was there.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`]; [`Error::InvalidArgument`] for a projection that the model lacks or other sizes.
    pub fn set_linear(
        &mut self,
        layer: usize,
        which: Projection,
        new: Box<dyn LinearLayer>,
    ) -> Result<Box<dyn LinearLayer>> {
        self.block_mut(layer)?.replace(which, new)
    }

    /// Puts another linear map into the socket of the embeddings, `[vocab, width]`, and returns the one that was there. In a tied
    /// model it is the head too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other sizes.
    pub fn set_embedding(&mut self, new: Box<dyn LinearLayer>) -> Result<Box<dyn LinearLayer>> {
        self.check_table("embedding", &*new)?;
        Ok(std::mem::replace(&mut self.embedding, new))
    }

    /// Puts another linear map into the socket of the head, `[vocab, width]`, and returns the one that was there; none if the head
    /// was the table of embeddings. The model isn't tied any more.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other sizes.
    pub fn set_head(&mut self, new: Box<dyn LinearLayer>) -> Result<Option<Box<dyn LinearLayer>>> {
        self.check_table("head", &*new)?;
        self.config.tied = false;
        Ok(self.head.replace(new))
    }

    fn check_table(&self, name: &str, table: &dyn LinearLayer) -> Result<()> {
        let (wanted, got) = ((self.config.vocab, self.config.width), (table.out_features(), table.in_features()));
        let expected = format!("[{}, {}] by its features", wanted.0, wanted.1);
        if wanted == got { Ok(()) } else { Err(Error::invalid(name, expected, format!("[{}, {}]", got.0, got.1))) }
    }

    /// The mixture of experts of a layer, if it has one.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn moe(&self, layer: usize) -> Result<Option<&MoeLayer>> {
        let layers = self.config.layers;
        Ok(self.blocks.get(layer).ok_or(Error::LayerOutOfRange { layer, layers })?.experts())
    }

    /// Puts another router into a layer's socket and returns the one that was there.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`]; [`Error::InvalidArgument`] for a layer without experts or another number of them.
    pub fn set_router(&mut self, layer: usize, router: Box<dyn Router>) -> Result<Box<dyn Router>> {
        self.moe_mut(layer)?.set_router(router)
    }

    /// Puts another store into the socket for a layer's experts and returns the one that was there.
    ///
    /// # Errors
    /// As [`set_router`](Self::set_router).
    pub fn set_experts(&mut self, layer: usize, store: Box<dyn ExpertStore>) -> Result<Box<dyn ExpertStore>> {
        self.moe_mut(layer)?.set_experts(store)
    }

    /// Tells every router the load of its layer, after a step of the optimizer.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`] for a layer number that the model lacks.
    pub fn post_step(&mut self, routings: &[LayerRouting]) -> Result<()> {
        let mut by_layer = std::collections::BTreeMap::<usize, Vec<u64>>::new();
        for routing in routings {
            let sums = by_layer.entry(routing.layer).or_insert_with(|| vec![0; routing.counts.len()]);
            sums.iter_mut().zip(&routing.counts).for_each(|(sum, count)| *sum += *count as u64);
        }
        for (layer, counts) in by_layer {
            self.moe_mut(layer)?.router_mut().post_step(&LoadStats { counts });
        }
        Ok(())
    }

    fn block_mut(&mut self, layer: usize) -> Result<&mut Block> {
        let layers = self.config.layers;
        self.blocks.get_mut(layer).ok_or(Error::LayerOutOfRange { layer, layers })
    }

    fn moe_mut(&mut self, layer: usize) -> Result<&mut MoeLayer> {
        self.block_mut(layer)?.experts_mut().ok_or_else(|| {
            Error::invalid("layer", "one with a mixture of experts", format!("{layer}, which has a dense feed-forward"))
        })
    }

    /// What can be trained, by name (Hugging Face's of the Llama family), sharing memory. Packed weights have no parameters.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let mut out = Vec::new();
        let mut add = |name: &str, parameters: Vec<(String, Tensor)>| {
            out.extend(parameters.into_iter().map(|(p, tensor)| (format!("{name}.{p}"), tensor)));
        };
        add("model.embed_tokens", self.embedding.parameters());
        if let Some(positions) = &self.positions {
            add("model.embed_positions", vec![("weight".to_owned(), positions.shallow_clone())]);
        }
        add("model.norm", self.norm.parameters());
        if let Some(head) = &self.head {
            add("lm_head", head.parameters());
        }
        add("attention", self.attention.parameters());
        out.extend(self.blocks.iter().flat_map(Block::parameters));
        out
    }

    /// The tensors of a checkpoint of this model by name, dense: packed weights are unpacked.
    pub(crate) fn tensors(&self) -> Result<std::collections::BTreeMap<String, Tensor>> {
        let mut out: std::collections::BTreeMap<_, _> = self.parameters().into_iter().collect();
        let ends =
            [("model.embed_tokens".to_owned(), Some(&*self.embedding)), ("lm_head".to_owned(), self.head.as_deref())];
        let projections = self.blocks.iter().enumerate().flat_map(|(l, block)| {
            let name = move |p: Projection| format!("{}.{}", names::layer(l), p.name());
            Projection::ALL.into_iter().map(move |p| (name(p), block.linear(p)))
        });
        for (name, linear) in ends.into_iter().chain(projections) {
            if let Some(linear) = linear {
                out.insert(format!("{name}.weight"), linear.weight()?);
                out.extend(linear.bias().map(|bias| (format!("{name}.bias"), bias)));
            }
        }
        Ok(out)
    }

    /// What routers save and don't train, by name, sharing memory.
    pub fn buffers(&self) -> Vec<(String, Tensor)> {
        let of = |(l, block): (usize, &Block)| {
            let buffers = block.experts().map(|layer| layer.router().buffers()).unwrap_or_default();
            buffers.into_iter().map(move |(name, t)| (format!("{}.block_sparse_moe.{name}", names::layer(l)), t))
        };
        self.blocks.iter().enumerate().flat_map(of).collect()
    }

    /// Makes all parameters ask for gradients, or none.
    pub fn set_trainable(&mut self, trainable: bool) {
        for (_, tensor) in self.parameters() {
            // The handle is shared, so the model's own tensor changes.
            let _ = tensor.set_requires_grad(trainable);
        }
    }

    /// Bytes of linear maps, embeddings, routers and experts in memory (not of the norms, which are small).
    pub fn bytes(&self) -> u64 {
        let ends = self.embedding.bytes() + self.head.as_ref().map_or(0, |h| h.bytes());
        let positions = self.positions.as_ref().map_or(0, crate::linear::bytes_of);
        ends + positions + self.blocks.iter().map(Block::bytes).sum::<u64>()
    }

    /// A digest by which what was made for a model (a steering plan, kept activations) can tell whether it meets it again.
    ///
    /// It covers the sizes, the first row and the bias of every linear map and of the embeddings, the norms, the first row of learned
    /// positions and of everything that routers and resident experts have, and the names of plugs that aren't the defaults. For f32
    /// it is the same whether the checkpoint was a GGUF file or a folder, and whether it is dense or packed. It can't see a change
    /// in other rows only.
    ///
    /// # Errors
    /// What a plug reports.
    pub fn fingerprint(&self) -> Result<String> {
        use sha2::{Digest as _, Sha256};
        let mut digest = Sha256::new();
        let c = &self.config;
        let sizes = (c.vocab, c.width, c.layers, c.heads, c.kv_heads, c.head_dim, c.ffn, c.context);
        // Files differ in how exactly they write the base.
        let theta = c.rope.as_ref().map(|r| r.theta as f32);
        digest.update(format!("{sizes:?} {theta:?} {:?}", c.moe.as_ref().map(|m| (m.experts, m.top_k))));
        let mut add = |name: &str, values: &Tensor| -> Result<()> {
            digest.update(name);
            let values = values.f_detach()?.f_reshape([-1])?.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?;
            for value in Vec::<f32>::try_from(&values)? {
                digest.update(value.to_le_bytes());
            }
            Ok(())
        };
        let first = Tensor::from_slice(&[0i64]).f_to_device(self.device)?;
        let blocks = self.blocks.iter();
        let linears = blocks.flat_map(|b| Projection::ALL.iter().filter_map(|&p| b.linear(p)));
        for linear in [&*self.embedding, self.head_layer()].into_iter().chain(linears) {
            add("linear", &linear.rows(&first)?)?;
            if let Some(bias) = linear.bias() {
                add("bias", &bias)?;
            }
        }
        for (name, tensor) in self.parameters() {
            if name.contains("norm") {
                add(&name, &tensor)?;
            } else if name.contains("block_sparse_moe") || name.contains("embed_positions") {
                add(&name, &if tensor.dim() > 1 { tensor.f_select(0, 0)? } else { tensor })?;
            }
        }
        let name = |plug: String| plug.split([' ', '(']).next().unwrap_or_default().to_owned();
        digest.update(name(format!("{:?}", self.attention)));
        for layer in self.blocks.iter().filter_map(Block::experts) {
            digest.update(name(format!("{:?}", layer.router())));
            digest.update(name(format!("{:?}", layer.experts())));
        }
        Ok(crate::hex(&digest.finalize()))
    }
}

/// Logits need all layers.
fn refuse_stop(pass: &Pass<'_, '_>) -> Result<()> {
    match pass.hooks.as_ref().and_then(|h| h.stops_after()) {
        None => Ok(()),
        Some(site) => Err(Error::invalid("hooks", "without `stop_after`, because logits need all layers", site)),
    }
}
