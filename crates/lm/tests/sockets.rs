//! Every socket with a trivial plug, alone and all at once.

mod common;

use common::{difference, ids, model, tiny};
use lm::attention::{AttentionInput, AttentionKernel, PlainAttention};
use lm::cache::{Cache, CacheId, GrowingKv, KvStore};
use lm::generate::{Decoding, GenerateConfig, LogitsProcessor, Plugs, StepInfo, generate, generate_with, left_pad};
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::linear::{LinearLayer, Projection};
use lm::model::{Model, Pass};
use lm::moe::{Demand, ExpertStore, ExpertWeights, ResidentExperts, RouteContext, Router, Routing};
use lm::tensor::tch::{Kind, Tensor};
use lm::{Error, Result};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const CLOSE: f64 = 1e-9;

fn logits(model: &Model, text: &[u32]) -> Tensor {
    model.logits(&ids(text), &mut Pass::default()).unwrap()
}

/// Counts calls of another kernel.
#[derive(Debug)]
struct CountedAttention(Arc<AtomicUsize>);

impl AttentionKernel for CountedAttention {
    fn attend(&self, input: &AttentionInput<'_>) -> Result<Tensor> {
        self.0.fetch_add(1, Ordering::Relaxed);
        PlainAttention.attend(input)
    }
}

/// Keys and values by concatenation, as a store of one's own would do it.
#[derive(Debug, Default)]
struct Concatenated(Vec<Option<(Tensor, Tensor)>>);

impl KvStore for Concatenated {
    fn append(&mut self, layer: usize, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
        let whole = match self.0[layer].take() {
            None => (key.shallow_clone(), value.shallow_clone()),
            Some((k, v)) => (Tensor::f_cat(&[&k, key], 2)?, Tensor::f_cat(&[&v, value], 2)?),
        };
        self.0[layer] = Some((whole.0.shallow_clone(), whole.1.shallow_clone()));
        Ok(whole)
    }

    fn len(&self, layer: usize) -> i64 {
        self.0[layer].as_ref().map_or(0, |(k, _)| k.size()[2])
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        for (k, v) in self.0.iter_mut().flatten() {
            (*k, *v) = (k.f_narrow(2, 0, len)?, v.f_narrow(2, 0, len)?);
        }
        Ok(())
    }

    fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        for (k, v) in self.0.iter_mut().flatten() {
            (*k, *v) = (k.f_index_select(0, rows)?, v.f_index_select(0, rows)?);
        }
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvStore>> {
        let copy =
            |layer: &Option<(Tensor, Tensor)>| layer.as_ref().map(|(k, v)| (k.shallow_clone(), v.shallow_clone()));
        Ok(Box::new(Self(self.0.iter().map(copy).collect())))
    }

    fn bytes(&self) -> u64 {
        0
    }
}

/// Twice another map.
#[derive(Debug)]
struct Doubled(Box<dyn LinearLayer>);

impl LinearLayer for Doubled {
    fn in_features(&self) -> i64 {
        self.0.in_features()
    }

    fn out_features(&self) -> i64 {
        self.0.out_features()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.0.forward(x)? * 2.0)
    }

    fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(self.0.rows(ids)? * 2.0)
    }

    fn weight(&self) -> Result<Tensor> {
        Ok(self.0.weight()? * 2.0)
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

/// Sends every token to the experts 0 and 2, half and half.
#[derive(Debug)]
struct Fixed;

impl Router for Fixed {
    fn experts(&self) -> usize {
        4
    }

    fn route(&self, x: &Tensor, _: &RouteContext<'_>) -> Result<Routing> {
        let n = x.size()[0];
        let experts = Tensor::from_slice(&[2i64, 0]).f_expand([n, 2], false)?;
        Routing::top_k(&experts, &Tensor::f_full([n, 2], 0.5, (x.kind(), x.device()))?)
    }
}

/// A router that looks at other tokens.
#[derive(Debug)]
struct Peeking;

impl Router for Peeking {
    fn experts(&self) -> usize {
        4
    }

    fn route(&self, x: &Tensor, context: &RouteContext<'_>) -> Result<Routing> {
        Fixed.route(x, context)
    }

    fn causal(&self) -> bool {
        false
    }
}

/// Visits the experts in reverse, as a store would that gets them late; or leaves one out, or fails.
#[derive(Debug)]
struct Reversed {
    inner: ResidentExperts,
    skip: bool,
    fail: bool,
}

impl ExpertStore for Reversed {
    fn experts(&self) -> usize {
        self.inner.experts()
    }

    fn visit(
        &self,
        layer: usize,
        demand: &[Demand],
        run: &mut dyn FnMut(usize, &ExpertWeights) -> Result<()>,
    ) -> Result<()> {
        if self.fail {
            return Err(Error::plug("ExpertStore", layer, "the disk is gone"));
        }
        for one in demand.iter().rev().skip(usize::from(self.skip)) {
            self.inner.visit(layer, std::slice::from_ref(one), run)?;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
}

fn experts_of(model: &Model, layer: usize) -> ResidentExperts {
    let parameters: std::collections::BTreeMap<String, Tensor> = model.parameters().into_iter().collect();
    let weight = |e: usize, w: &str| {
        parameters[&format!("model.layers.{layer}.block_sparse_moe.experts.{e}.{w}.weight")].shallow_clone()
    };
    let expert = |e| ExpertWeights { gate: weight(e, "w1"), up: weight(e, "w3"), down: weight(e, "w2") };
    ResidentExperts::new((0..4).map(expert).collect()).unwrap()
}

#[test]
fn the_fused_and_the_plain_attention_agree_with_padding_and_cache() {
    let mut model = model(&tiny());
    let (batch, real) = left_pad(&[vec![3, 4, 5, 6], vec![8, 9]], model.device()).unwrap();
    let run = |model: &Model| {
        let mut cache = model.new_cache();
        let mut pass = Pass { cache: Some(&mut cache), real: real.as_ref(), ..Pass::default() };
        let first = model.logits(&batch, &mut pass).unwrap();
        let more = Tensor::from_slice(&[3i64, 4, 5, 6]).view([2, 2]);
        let second = model.logits(&more, &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
        let mask = real.as_ref().unwrap().unsqueeze(-1);
        (first * mask, second)
    };
    let fused = run(&model);
    let kernel = model.set_attention(Box::new(PlainAttention));
    assert!(format!("{kernel:?}").contains("FusedAttention"));
    let plain = run(&model);
    assert!(difference(&fused.0, &plain.0) < CLOSE && difference(&fused.1, &plain.1) < CLOSE);
    assert!(bool::try_from(plain.0.isfinite().all()).unwrap());
}

#[test]
fn an_attention_kernel_is_called_once_a_layer_and_its_shape_is_checked() {
    #[derive(Debug)]
    struct Wrong;
    impl AttentionKernel for Wrong {
        fn attend(&self, input: &AttentionInput<'_>) -> Result<Tensor> {
            Ok(input.query.narrow(1, 0, 1))
        }
    }
    let mut model = model(&tiny());
    let calls = Arc::new(AtomicUsize::new(0));
    model.set_attention(Box::new(CountedAttention(calls.clone())));
    let _ = logits(&model, &[3, 4]);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    model.set_attention(Box::new(Wrong));
    let error = model.logits(&ids(&[3]), &mut Pass::default()).unwrap_err();
    assert!(error.to_string().contains("attention kernel"), "{error}");
}

/// What a kernel is told: positions, training, cache.
type Note = (Vec<i64>, bool, Option<CacheId>);

/// Writes down what kernels are told.
#[derive(Debug, Default, Clone)]
struct Notes(Arc<Mutex<Vec<Note>>>);

impl AttentionKernel for Notes {
    fn attend(&self, input: &AttentionInput<'_>) -> Result<Tensor> {
        assert_eq!(input.positions.size()[0], input.query.size()[0]);
        let positions = Vec::<i64>::try_from(input.positions.f_reshape([-1])?)?;
        if input.layer == 0 {
            self.0.lock().unwrap().push((positions, input.training, input.cache));
        }
        PlainAttention.attend(input)
    }
}

#[test]
fn an_attention_kernel_learns_positions_training_and_when_the_past_was_changed() {
    let mut model = model(&tiny());
    let notes = Notes::default();
    model.set_attention(Box::new(notes.clone()));
    let last = || notes.0.lock().unwrap().last().unwrap().clone();
    let _ = model.hidden(&ids(&[3]), &mut Pass { training: true, ..Pass::default() }).unwrap();
    assert_eq!(last(), (vec![0], true, None));

    let mut cache = model.new_cache();
    let (batch, real) = left_pad(&[vec![3, 4, 5], vec![6]], model.device()).unwrap();
    let mut pass = Pass { cache: Some(&mut cache), real: real.as_ref(), ..Pass::default() };
    let _ = model.hidden(&batch, &mut pass).unwrap();
    let (positions, training, first) = last();
    assert_eq!((positions, training), (vec![0, 1, 2, 0, 0, 0], false));
    assert_eq!(first, Some(cache.id()));
    let step = |cache: &mut Cache| {
        let next = Tensor::from_slice(&[7i64, 8]).view([2, 1]);
        let _ = model.hidden(&next, &mut Pass { cache: Some(cache), ..Pass::default() }).unwrap();
        let (positions, _, id) = last();
        (positions, id.unwrap())
    };
    // Appending changes nothing of the past.
    assert_eq!(step(&mut cache), (vec![3, 1], first.unwrap()));
    let mut seen = vec![first.unwrap()];
    let mut fork = cache.fork().unwrap();
    seen.push(step(&mut fork).1);
    cache.truncate(3).unwrap();
    seen.push(step(&mut cache).1);
    cache.select_rows(&[1, 0]).unwrap();
    seen.push(step(&mut cache).1);
    let mut failing = |_: Site, _: &Tensor, _: &TokenInfo<'_>| Err(Error::invalid("strength", "finite", "NaN"));
    let mut hooks = Hooks::new().on(&[Site::ResidPost(1)], &mut failing);
    let next = Tensor::from_slice(&[7i64, 8]).view([2, 1]);
    let mut pass = Pass { cache: Some(&mut cache), hooks: Some(&mut hooks), ..Pass::default() };
    assert!(model.hidden(&next, &mut pass).is_err());
    seen.push(step(&mut cache).1);
    cache.truncate(0).unwrap();
    seen.push(step(&mut cache).1);
    let different: std::collections::HashSet<CacheId> = seen.iter().copied().collect();
    assert_eq!(different.len(), seen.len(), "{seen:?}");
    assert!([0, 2, 3, 4, 5].windows(2).all(|w| seen[w[0]].id == seen[w[1]].id), "{seen:?}");
}

#[test]
fn the_plain_attention_has_second_derivatives() {
    let mut model = model(&tiny());
    model.set_attention(Box::new(PlainAttention));
    model.set_trainable(true);
    let logits = model.logits(&ids(&[3, 4, 5]), &mut Pass::default()).unwrap();
    let loss = (&logits * &logits).mean(Kind::Double);
    let weight = model.linear(0, Projection::Q).unwrap().unwrap().weight().unwrap();
    let gradient = Tensor::run_backward(&[&loss], &[&weight], true, true).remove(0);
    let again = Tensor::run_backward(&[gradient.square().sum(Kind::Double)], &[&weight], false, false).remove(0);
    assert!(again.abs().max().double_value(&[]) > 0.0);
}

#[test]
fn another_store_decodes_the_same_tokens() {
    let model = model(&tiny());
    let config = GenerateConfig { max_new_tokens: 12, ..GenerateConfig::default() };
    let prompts = [vec![3, 4, 5], vec![6]];
    let plain = generate(&model, &prompts, &config).unwrap();
    let store: Box<dyn KvStore> = Box::new(Concatenated(vec![None, None]));
    let plugs = Plugs { store: Some(store), ..Plugs::default() };
    let other = generate_with(&model, &prompts, &config, plugs, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(plain, other);
}

#[test]
fn the_growing_store_keeps_what_it_was_given_over_many_growths() {
    let mut store = GrowingKv::new(1);
    let all = Tensor::randn([2, 1, 300, 4], (Kind::Float, lm::tensor::tch::Device::Cpu));
    let mut at = 0;
    for time in [1, 63, 1, 1, 100, 1, 133] {
        let part = all.narrow(2, at, time);
        at += time;
        let (key, value) = store.append(0, &part, &(&part * 2.0)).unwrap();
        assert_eq!(key, all.narrow(2, 0, at));
        assert_eq!(value, all.narrow(2, 0, at) * 2.0);
    }
    assert_eq!(store.len(0), 300);
    assert!(store.append(1, &all, &all).is_err());
    assert!(store.append(0, &all.narrow(0, 0, 1), &all.narrow(0, 0, 1)).is_err());
}

#[test]
fn a_linear_plug_takes_the_place_of_a_projection_and_its_size_is_checked() {
    let mut model = model(&tiny());
    let before = logits(&model, &[3, 4]);
    let q = Box::new(
        lm::linear::Dense::new(model.linear(0, Projection::Q).unwrap().unwrap().weight().unwrap(), None).unwrap(),
    );
    let old = model
        .set_linear(
            0,
            Projection::V,
            Box::new(Doubled(Box::new(
                lm::linear::Dense::new(model.linear(0, Projection::V).unwrap().unwrap().weight().unwrap(), None)
                    .unwrap(),
            ))),
        )
        .unwrap();
    assert!(difference(&before, &logits(&model, &[3, 4])) > 1e-3);
    model.set_linear(0, Projection::V, old).unwrap();
    assert_eq!(before, logits(&model, &[3, 4]));
    let error = model.set_linear(0, Projection::V, q).unwrap_err().to_string();
    assert!(error.contains("16 to 8") && error.contains("16 to 16"), "{error}");
    assert!(matches!(
        model.set_linear(2, Projection::Q, Box::new(Doubled(model_linear()))),
        Err(Error::LayerOutOfRange { .. })
    ));
}

fn model_linear() -> Box<dyn LinearLayer> {
    Box::new(lm::linear::Dense::new(Tensor::zeros([1, 1], (Kind::Double, lm::tensor::tch::Device::Cpu)), None).unwrap())
}

#[test]
fn a_fixed_router_gives_the_mean_of_its_experts() {
    let mut model = model(&tiny().mixtral(4, 2));
    model.set_router(1, Box::new(Fixed)).unwrap();
    let mut routings = Vec::new();
    let _ = model.hidden(&ids(&[3, 4, 5]), &mut Pass { routings: Some(&mut routings), ..Pass::default() }).unwrap();
    assert_eq!(routings[1].counts, [3, 0, 3, 0]);
    let x = Tensor::randn([1, 3, 16], (Kind::Double, model.device()));
    let layer = model.moe(1).unwrap().unwrap();
    let context = RouteContext { layer: 1, batch: 1, real: None, training: false, decoding: false };
    let y = layer.forward(&x, &context, None).unwrap();
    let experts = experts_of(&model, 1);
    let by_hand = (experts.get(0).unwrap().forward(&x).unwrap() + experts.get(2).unwrap().forward(&x).unwrap()) * 0.5;
    assert!(difference(&y, &by_hand) < CLOSE);
}

#[test]
fn the_order_in_which_experts_arrive_changes_no_bit() {
    let mut model = model(&tiny().mixtral(4, 2));
    let before = logits(&model, &[3, 4, 5, 6]);
    let plug = |skip, fail| Box::new(Reversed { inner: experts_of(&model, 0), skip, fail });
    let (right, skipping, failing) = (plug(false, false), plug(true, false), plug(false, true));
    model.set_experts(0, right).unwrap();
    assert_eq!(before, logits(&model, &[3, 4, 5, 6]));
    model.set_experts(0, skipping).unwrap();
    let error = model.logits(&ids(&[3, 4, 5, 6]), &mut Pass::default()).unwrap_err();
    assert!(error.to_string().contains("visit"), "{error}");
    model.set_experts(0, failing).unwrap();
    let error = model.logits(&ids(&[3]), &mut Pass::default()).unwrap_err();
    assert!(error.to_string().contains("the disk is gone"), "{error}");
}

#[test]
fn a_router_that_peeks_is_refused_with_a_cache_only() {
    let mut model = model(&tiny().mixtral(4, 2));
    model.set_router(0, Box::new(Peeking)).unwrap();
    let _ = logits(&model, &[3, 4]);
    let mut cache = model.new_cache();
    let error = model.hidden(&ids(&[3]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap_err();
    assert!(error.to_string().contains("router of layer 0"), "{error}");
    assert!(matches!(model.set_router(0, Box::new(Fixed)).map(|_| ()), Ok(())));
    assert!(model.moe(5).is_err());
    assert!(common::model(&tiny()).set_router(0, Box::new(Fixed)).is_err());
}

/// Forbids even tokens.
#[derive(Debug)]
struct Odd;
impl LogitsProcessor for Odd {
    fn process(&mut self, logits: &mut [f32], _: &StepInfo<'_>) -> Result<()> {
        logits.iter_mut().step_by(2).for_each(|z| *z = f32::NEG_INFINITY);
        Ok(())
    }
}

#[test]
fn all_sockets_hold_plugs_at_once_and_decoding_agrees_with_one_pass() {
    let mut model = model(&tiny().mixtral(4, 2));
    let calls = Arc::new(AtomicUsize::new(0));
    model.set_attention(Box::new(CountedAttention(calls.clone())));
    let weight = model.linear(1, Projection::V).unwrap().unwrap().weight().unwrap();
    let doubled = Doubled(Box::new(lm::linear::Dense::new(weight, None).unwrap()));
    model.set_linear(1, Projection::V, Box::new(doubled)).unwrap();
    model.set_router(0, Box::new(Fixed)).unwrap();
    let experts = experts_of(&model, 1);
    model.set_experts(1, Box::new(Reversed { inner: experts, skip: false, fail: false })).unwrap();

    let edits = Rc::new(Cell::new(0));
    let counted = edits.clone();
    let mut hook = move |_: Site, x: &Tensor, tokens: &TokenInfo<'_>| {
        counted.set(counted.get() + 1);
        Ok(Some(x + tokens.positions.gt(0).unsqueeze(-1).to_kind(x.kind()) * 0.3))
    };
    let mut odd = Odd;
    let mut hooks = Hooks::new().on(&[Site::ResidPost(0)], &mut hook);
    let store: Box<dyn KvStore> = Box::new(Concatenated(vec![None, None]));
    let config = GenerateConfig { max_new_tokens: 6, ..GenerateConfig::default() };
    let plugs = Plugs { hooks: Some(&mut hooks), processors: vec![&mut odd], adapter: None, store: Some(store) };
    let text = generate_with(&model, &[vec![3, 4, 5]], &config, plugs, |_| ControlFlow::Continue(())).unwrap();
    let tokens = &text[0].tokens;
    assert!(tokens.len() == 6 && tokens.iter().all(|id| id % 2 == 1), "{tokens:?}");
    assert_eq!(edits.get(), 6);
    assert_eq!(calls.load(Ordering::Relaxed), 12);

    // One pass over prompt and text finds the same odd token at the top each time.
    let whole: Vec<u32> = [3, 4, 5].iter().chain(tokens).copied().collect();
    let prompt = [3i64];
    let mut pass = Pass { hooks: Some(&mut hooks), prompt_lengths: Some(&prompt), ..Pass::default() };
    let full = model.logits(&ids(&whole), &mut pass).unwrap().get(0);
    for (step, &id) in tokens.iter().enumerate() {
        let row = full.get(2 + step as i64);
        let odd = Tensor::from_slice(&(0..20).map(|i| 2 * i + 1).collect::<Vec<i64>>());
        let best = odd.get(row.index_select(0, &odd).argmax(0, false).int64_value(&[])).int64_value(&[]);
        assert_eq!(best, i64::from(id), "step {step}");
        let log_prob = row.log_softmax(0, Kind::Double).double_value(&[id.into()]);
        assert!((log_prob - text[0].log_probs[step]).abs() < 1e-4);
    }
}

#[test]
fn a_store_with_tokens_of_another_generation_is_refused() {
    let model = model(&tiny());
    let mut used = Concatenated(vec![None, None]);
    let one = Tensor::zeros([1, 2, 1, 4], (Kind::Double, model.device()));
    let _ = used.append(0, &one, &one).unwrap();
    let mut cache = Cache::with_store(Box::new(used));
    for _ in 0..2 {
        let error = model.hidden(&ids(&[3]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap_err();
        assert!(error.to_string().contains("cache"), "{error}");
        assert_eq!((cache.store().len(0), cache.store().len(1)), (1, 0), "it was touched");
    }
}

#[test]
fn a_generation_on_a_store_with_tokens_leaves_it_alone() {
    let model = model(&tiny());
    // Tokens in the last layer only: the passes below it must not have written either.
    let mut used = Concatenated(vec![None, None]);
    let one = Tensor::zeros([1, 2, 1, 4], (Kind::Double, model.device()));
    let _ = used.append(1, &one, &one).unwrap();
    let plugs = Plugs { store: Some(Box::new(used)), ..Plugs::default() };
    let mut decoding = Decoding::new(&model, &[vec![3, 4]], &GenerateConfig::default(), plugs).unwrap();
    assert!(decoding.step().is_err());
    assert_eq!((decoding.cache().store().len(0), decoding.cache().store().len(1)), (0, 1));
}
