//! The decoder on tiny random models: caches, batches, hooks, trunks, and input that can't be.

mod common;

use common::{difference, ids, model, tiny};
use lm::Error;
use lm::activations::{CollectConfig, Pooling, collect, collect_cached};
use lm::cache::Cache;
use lm::config::ModelConfig;
use lm::generate::left_pad;
use lm::hooks::{Hooks, Site, TokenInfo};
use lm::model::{CausalLm as _, Model, Pass};
use lm::tensor::tch::{Kind, Tensor};

/// f64 models: what remains is rounding of sums in another order.
const CLOSE: f64 = 1e-9;

fn logits(model: &Model, ids: &Tensor) -> Tensor {
    model.logits(ids, &mut Pass::default()).unwrap()
}

/// Adds a vector at every token but those at position 0.
fn shift(by: f64) -> impl FnMut(Site, &Tensor, &TokenInfo<'_>) -> lm::Result<Option<Tensor>> {
    move |_, x, tokens| {
        let moved = tokens.positions.gt(0).unsqueeze(-1).to_kind(x.kind());
        Ok(Some(x + moved * by))
    }
}

#[test]
fn a_rows_logits_in_a_padded_batch_are_its_own() {
    let model = model(&tiny());
    let texts = [vec![3, 4, 5, 6, 7], vec![8, 9], vec![10]];
    let (batch, real) = left_pad(&texts, model.device()).unwrap();
    let mut pass = Pass { real: real.as_ref(), ..Pass::default() };
    let together = model.logits(&batch, &mut pass).unwrap();
    for (row, text) in texts.iter().enumerate() {
        let alone = logits(&model, &ids(text)).squeeze_dim(0);
        let n = text.len() as i64;
        let of_row = together.get(row as i64).narrow(0, 5 - n, n);
        assert!(difference(&of_row, &alone) < CLOSE, "row {row}");
    }
}

#[test]
fn a_padded_batch_decodes_as_its_rows_do() {
    let model = model(&tiny());
    let texts = [vec![3, 4, 5, 6], vec![8, 9]];
    let (batch, real) = left_pad(&texts, model.device()).unwrap();
    let mut cache = model.new_cache();
    let _ =
        model.hidden(&batch, &mut Pass { cache: Some(&mut cache), real: real.as_ref(), ..Pass::default() }).unwrap();
    let next = Tensor::from_slice(&[11i64, 12]).view([2, 1]);
    let step = model.logits(&next, &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
    for (row, last) in [(0, 11), (1, 12)] {
        let mut text = texts[row].clone();
        text.push(last);
        let alone = logits(&model, &ids(&text)).squeeze_dim(0);
        assert!(difference(&step.get(row as i64).get(0), &alone.get(-1)) < CLOSE, "row {row}");
    }
}

#[test]
fn decoding_step_by_step_with_hooks_is_one_pass_with_the_same_hooks() {
    let model = model(&tiny());
    let text = ids(&[3, 4, 5, 6, 7, 8]);
    for site in [
        Site::ResidPre(1),
        Site::AttnNormOut(0),
        Site::AttnOut(1),
        Site::ResidMid(0),
        Site::MlpNormOut(1),
        Site::MlpOut(0),
        Site::ResidPost(0),
    ] {
        let mut hook = shift(0.7);
        let mut hooks = Hooks::new().on(&[site], &mut hook);
        let full = model.logits(&text, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
        assert!(difference(&full, &logits(&model, &text)) > 1e-3, "{site} does nothing");
        let mut cache = model.new_cache();
        for (at, time) in [(0, 2), (2, 1), (3, 1), (4, 2)] {
            let mut pass = Pass { cache: Some(&mut cache), hooks: Some(&mut hooks), ..Pass::default() };
            let part = model.logits(&text.narrow(1, at, time), &mut pass).unwrap();
            assert!(difference(&part, &full.narrow(1, at, time)) < CLOSE, "{site} at {at}");
        }
    }
}

#[test]
fn a_hook_that_only_reads_and_no_hook_give_the_same_bits() {
    let model = model(&tiny());
    let text = ids(&[3, 4, 5]);
    let mut seen = 0;
    let mut reader = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
        assert_eq!(x.size(), [1, 3, 16]);
        seen += 1;
        Ok(None)
    };
    let sites = [Site::ResidPost(0), Site::ResidPost(1), Site::MlpOut(1)];
    let mut hooks = Hooks::new().on(&sites, &mut reader);
    let read = model.logits(&text, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
    assert_eq!(read, logits(&model, &text));
    assert_eq!(seen, 3);
}

#[test]
fn hooks_learn_positions_padding_and_the_length_of_the_prompt() {
    let model = model(&tiny());
    let (batch, real) = left_pad(&[vec![3, 4, 5], vec![6]], model.device()).unwrap();
    let mut seen = Vec::new();
    let mut reader = |_: Site, _: &Tensor, tokens: &TokenInfo<'_>| {
        let positions = Vec::<i64>::try_from(tokens.positions.reshape([-1])).unwrap();
        seen.push((positions, tokens.real.is_some(), tokens.prompt_lengths.to_vec(), tokens.step));
        Ok(None)
    };
    let mut hooks = Hooks::new().on(&[Site::ResidPost(0)], &mut reader);
    let mut cache = model.new_cache();
    let mut pass = Pass { cache: Some(&mut cache), real: real.as_ref(), hooks: Some(&mut hooks), ..Pass::default() };
    let _ = model.hidden(&batch, &mut pass).unwrap();
    let next = Tensor::from_slice(&[7i64, 8]).view([2, 1]);
    let _ =
        model.hidden(&next, &mut Pass { cache: Some(&mut cache), hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
    assert_eq!(seen[0], (vec![0, 1, 2, 0, 0, 0], true, vec![3, 1], 0));
    assert_eq!(seen[1], (vec![3, 1], false, vec![3, 1], 1));
}

#[test]
fn a_pass_that_stops_early_returns_the_site_and_computes_nothing_above() {
    let model = model(&tiny());
    let text = ids(&[3, 4]);
    let mut above = 0;
    let mut reader = |_: Site, _: &Tensor, _: &TokenInfo<'_>| {
        above += 1;
        Ok(None)
    };
    let mut hooks = Hooks::new().on(&[Site::ResidPre(1)], &mut reader).stop_after(Site::ResidPost(0));
    let there = model.hidden(&text, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
    let rest = model.hidden_from(1, &there, &mut Pass::default()).unwrap();
    assert_eq!(rest, model.hidden(&text, &mut Pass::default()).unwrap());
    let mut hooks = Hooks::new().stop_after(Site::ResidPost(0));
    let refused = model.logits(&text, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() });
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
    assert_eq!(above, 0);
}

#[test]
fn a_trunk_and_a_top_with_caches_of_their_own_decode_as_the_whole_model() {
    let model = model(&tiny());
    let text = ids(&[3, 4, 5, 6]);
    let full = logits(&model, &text);
    let (mut trunk, mut top) = (model.new_cache(), model.new_cache());
    for (at, time) in [(0, 2), (2, 1), (3, 1)] {
        let mut hooks = Hooks::new().stop_after(Site::ResidPost(0));
        let mut pass = Pass { cache: Some(&mut trunk), hooks: Some(&mut hooks), ..Pass::default() };
        let there = model.hidden(&text.narrow(1, at, time), &mut pass).unwrap();
        let mut pass = Pass { cache: Some(&mut top), ..Pass::default() };
        let hidden = model.hidden_from(1, &there, &mut pass).unwrap();
        let part = Model::head(&model, &hidden).unwrap();
        assert!(difference(&part, &full.narrow(1, at, time)) < CLOSE);
    }
}

#[test]
fn rows_of_the_head_are_rows_of_the_logits() {
    let model = model(&tiny());
    let hidden = model.hidden(&ids(&[3, 4]), &mut Pass::default()).unwrap();
    let some = Tensor::from_slice(&[7i64, 0, 30]);
    let all = Model::head(&model, &hidden).unwrap();
    assert!(difference(&model.head_rows(&hidden, &some).unwrap(), &all.index_select(-1, &some)) < CLOSE);
}

#[test]
fn a_cache_is_cut_forked_and_reordered_with_its_bookkeeping() {
    let model = model(&tiny());
    let (batch, real) = left_pad(&[vec![3, 4, 5, 6], vec![8, 9]], model.device()).unwrap();
    let mut cache = model.new_cache();
    let run = |cache: &mut Cache, ids: &Tensor, real: Option<&Tensor>| {
        model.logits(ids, &mut Pass { cache: Some(cache), real, ..Pass::default() }).unwrap()
    };
    let _ = run(&mut cache, &batch, real.as_ref());
    let step = |a: i64, b: i64| Tensor::from_slice(&[a, b]).view([2, 1]);
    let expected = run(&mut cache.fork().unwrap(), &step(11, 12), None);
    // A detour that is cut off leaves nothing behind.
    let _ = run(&mut cache, &step(20, 21), None);
    let _ = run(&mut cache, &step(22, 23), None);
    cache.truncate(4).unwrap();
    assert_eq!(run(&mut cache.fork().unwrap(), &step(11, 12), None), expected);
    // Rows change places with their padding.
    cache.select_rows(&[1, 0]).unwrap();
    let swapped = run(&mut cache, &step(12, 11), None);
    assert!(difference(&swapped.get(0), &expected.get(1)) < CLOSE);
    assert!(difference(&swapped.get(1), &expected.get(0)) < CLOSE);
    assert!(matches!(cache.select_rows(&[2]), Err(Error::InvalidArgument { .. })));
    cache.truncate(0).unwrap();
    assert!(cache.is_empty());
    let _ = run(&mut cache, &ids(&[3]), None);
}

#[test]
fn an_error_in_a_hook_leaves_the_cache_as_it_was() {
    let model = model(&tiny());
    let mut cache = model.new_cache();
    let _ = model.hidden(&ids(&[3, 4]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
    let mut failing = |_: Site, _: &Tensor, _: &TokenInfo<'_>| Err(Error::invalid("strength", "finite", "NaN"));
    let mut hooks = Hooks::new().on(&[Site::ResidPost(1)], &mut failing);
    let mut pass = Pass { cache: Some(&mut cache), hooks: Some(&mut hooks), ..Pass::default() };
    assert!(model.hidden(&ids(&[5]), &mut pass).is_err());
    assert_eq!((cache.len(), cache.store().len(0), cache.store().len(1)), (2, 2, 2));
    let after = model.logits(&ids(&[5]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
    assert!(difference(&after.get(0), &logits(&model, &ids(&[3, 4, 5])).get(0).narrow(0, 2, 1)) < CLOSE);
}

#[test]
fn a_hook_that_returns_another_shape_is_named() {
    let model = model(&tiny());
    let mut wrong = |_: Site, x: &Tensor, _: &TokenInfo<'_>| Ok(Some(x.narrow(2, 0, 3)));
    let mut hooks = Hooks::new().on(&[Site::MlpOut(1)], &mut wrong);
    let error = model.hidden(&ids(&[5]), &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap_err();
    assert!(error.to_string().contains("mlp_out.1"), "{error}");
}

#[test]
fn input_that_cant_be_gives_the_named_error() {
    let model = model(&tiny());
    let run = |ids: &Tensor| model.hidden(ids, &mut Pass::default()).unwrap_err();
    assert!(matches!(run(&ids(&[])), Error::EmptyPrompt { row: 0 }));
    assert!(matches!(run(&ids(&[3, 99])), Error::TokenOutOfRange { id: 99, row: 0, vocab: 40 }));
    assert!(matches!(run(&Tensor::from_slice(&[-1i64]).view([1, 1])), Error::TokenOutOfRange { id: -1, .. }));
    assert!(matches!(run(&Tensor::from_slice(&[1i64])), Error::Shape { .. }));
    assert!(matches!(run(&Tensor::from_slice(&[1i32]).view([1, 1])), Error::InvalidArgument { .. }));
    let long = Tensor::zeros([1, 65], (Kind::Int64, model.device()));
    assert!(matches!(run(&long), Error::ContextOverflow { len: 65, max: 64 }));
    let mut hooks = Hooks::new().stop_after(Site::ResidPost(2));
    let pass = &mut Pass { hooks: Some(&mut hooks), ..Pass::default() };
    assert!(matches!(model.hidden(&ids(&[1]), pass), Err(Error::LayerOutOfRange { layer: 2, layers: 2 })));
    // The cache counts too.
    let mut cache = model.new_cache();
    let _ = model.hidden(&long.narrow(1, 0, 64), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
    let over = model.hidden(&ids(&[1]), &mut Pass { cache: Some(&mut cache), ..Pass::default() });
    assert!(matches!(over, Err(Error::ContextOverflow { len: 65, max: 64 })));
}

#[test]
fn masks_other_than_left_padding_are_refused() {
    let model = model(&tiny());
    let two = Tensor::from_slice(&[3i64, 4, 5, 6, 7, 8]).view([2, 3]);
    let run = |mask: [bool; 6]| {
        let real = Tensor::from_slice(&mask).view([2, 3]);
        model.hidden(&two, &mut Pass { real: Some(&real), ..Pass::default() }).unwrap_err()
    };
    assert!(matches!(run([true, true, false, true, true, true]), Error::InvalidArgument { .. }));
    assert!(matches!(run([true, false, true, true, true, true]), Error::InvalidArgument { .. }));
    assert!(matches!(run([true, true, true, false, false, false]), Error::EmptyPrompt { row: 1 }));
    // A float mask could be meant to be added to scores.
    let floats = Tensor::ones([2, 3], (Kind::Float, model.device()));
    let error = model.hidden(&two, &mut Pass { real: Some(&floats), ..Pass::default() }).unwrap_err();
    assert!(error.to_string().contains("Bool") && error.to_string().contains("Float"), "{error}");
    let wrong = Tensor::from_slice(&[true, true]).view([1, 2]);
    assert!(matches!(
        model.hidden(&two, &mut Pass { real: Some(&wrong), ..Pass::default() }),
        Err(Error::Shape { .. })
    ));
}

#[test]
fn configurations_that_cant_be_name_their_field() {
    let field = |config: ModelConfig| match config.validate() {
        Err(Error::Config { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(ModelConfig { width: 0, ..tiny() }), "width");
    assert_eq!(field(ModelConfig { kv_heads: 3, ..tiny() }), "kv_heads");
    assert_eq!(field(ModelConfig { head_dim: 3, ..tiny() }), "head_dim");
    assert_eq!(field(ModelConfig { eos: vec![40], ..tiny() }), "bos or eos");
    assert_eq!(field(ModelConfig { norm_epsilon: f64::NAN, ..tiny() }), "norm_epsilon");
    assert_eq!(field(tiny().mixtral(2, 3)), "moe.top_k");
}

#[test]
fn activations_are_those_of_each_text_alone_and_are_kept_on_disk() {
    let model = model(&tiny());
    let texts = [vec![3, 4, 5, 6, 7], vec![8, 9], vec![10, 11, 12]];
    let sites = vec![Site::MlpOut(0), Site::ResidPost(1)];
    for pooling in [Pooling::Last, Pooling::Mean { from: 1 }] {
        let config = CollectConfig { sites: sites.clone(), pooling, batch: 2 };
        let store = collect(&model, &texts, &config).unwrap();
        for (row, text) in texts.iter().enumerate() {
            let mut alone = Vec::new();
            let mut reader = |_: Site, x: &Tensor, _: &TokenInfo<'_>| {
                let tokens = x.get(0); // (t, width)
                alone.push(match pooling {
                    Pooling::Last => tokens.get(-1),
                    Pooling::Mean { .. } => tokens.narrow(0, 1, text.len() as i64 - 1).mean_dim(0, false, Kind::Double),
                });
                Ok(None)
            };
            let mut hooks = Hooks::new().on(&sites, &mut reader);
            let _ = model.hidden(&ids(text), &mut Pass { hooks: Some(&mut hooks), ..Pass::default() }).unwrap();
            for (site, alone) in sites.iter().zip(&alone) {
                // The store is f32.
                assert!(difference(&store.sites[site].get(row as i64), alone) < 1e-5, "{site} {pooling:?}");
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let first = collect_cached(&model, &texts, &config, folder.path()).unwrap();
        let file = folder.path().read_dir().unwrap().next().unwrap().unwrap().path();
        let made = file.metadata().unwrap().modified().unwrap();
        let second = collect_cached(&model, &texts, &config, folder.path()).unwrap();
        assert_eq!(file.metadata().unwrap().modified().unwrap(), made);
        assert_eq!(first.sites, second.sites);
        std::fs::write(&file, b"broken").unwrap();
        assert_eq!(collect_cached(&model, &texts, &config, folder.path()).unwrap().sites, first.sites);
    }
}

#[test]
fn a_text_too_short_for_the_mean_is_named() {
    let model = model(&tiny());
    let config = CollectConfig { sites: vec![Site::ResidPost(0)], ..CollectConfig::default() };
    let error = collect(&model, &[vec![3, 4], vec![5]], &config).unwrap_err();
    assert!(error.to_string().starts_with("text 1 must be longer than 1 tokens"), "{error}");
    assert!(matches!(collect(&model, &[vec![]], &config), Err(Error::EmptyPrompt { row: 0 })));
    assert!(collect(&model, &[vec![3]], &CollectConfig::default()).is_err());
}

#[test]
fn sites_are_ordered_as_a_pass_goes_and_read_what_they_write() {
    let order = [
        Site::ResidPre(0),
        Site::AttnNormOut(0),
        Site::AttnOut(0),
        Site::ResidMid(0),
        Site::MlpNormOut(0),
        Site::MlpOut(0),
        Site::ResidPost(0),
        Site::ResidPre(1),
    ];
    assert!(order.is_sorted());
    for site in order {
        assert_eq!(site.to_string().parse::<Site>().unwrap(), site);
    }
    assert!("resid_post".parse::<Site>().is_err() && "resid.1".parse::<Site>().is_err());
}

#[test]
fn the_trait_sees_the_model() {
    let model = model(&tiny());
    assert_eq!((model.vocab(), model.context()), (40, 64));
    let mut cache = model.new_cache();
    let hidden = model.forward_hidden(&ids(&[3, 4]), None, &mut cache).unwrap();
    assert_eq!(hidden, model.hidden(&ids(&[3, 4]), &mut Pass::default()).unwrap());
}

#[test]
fn gradients_through_a_cache_are_refused_and_values_are_not() {
    let mut model = model(&tiny());
    model.set_trainable(true);
    let mut cache = model.new_cache();
    let error = model.hidden(&ids(&[3, 4]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cache") && text.contains("no_grad"), "{text}");
    assert_eq!((cache.len(), cache.store().len(0)), (0, 0));
    let guard = lm::tensor::tch::no_grad_guard();
    let _ = model.hidden(&ids(&[3, 4]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
    drop(guard);
    assert_eq!(cache.len(), 2);
    // Without a cache every weight gets its gradient.
    logits(&model, &ids(&[3, 4])).sum(Kind::Double).backward();
    assert!(model.parameters().iter().all(|(_, t)| t.grad().defined()));
}

#[test]
fn a_pass_that_fails_leaves_no_routings_and_a_cut_cache_counts_the_passes_that_are_left() {
    let model = model(&tiny().mixtral(4, 2));
    let mut routings = Vec::new();
    let mut cache = model.new_cache();
    let mut pass = Pass { cache: Some(&mut cache), routings: Some(&mut routings), ..Pass::default() };
    let _ = model.hidden(&ids(&[3, 4, 5]), &mut pass).unwrap();
    let _ = model.hidden(&ids(&[6]), &mut pass).unwrap();
    let mut failing = |_: Site, _: &Tensor, _: &TokenInfo<'_>| Err(Error::invalid("strength", "finite", "NaN"));
    let mut hooks = Hooks::new().on(&[Site::ResidPost(1)], &mut failing);
    pass.hooks = Some(&mut hooks);
    assert!(model.hidden(&ids(&[7]), &mut pass).is_err());
    assert_eq!(routings.len(), 4);
    let _ = model.hidden(&ids(&[7, 8]), &mut Pass { cache: Some(&mut cache), ..Pass::default() }).unwrap();
    let steps: Vec<usize> = [6, 5, 4, 3, 2, 0]
        .into_iter()
        .map(|len| {
            cache.truncate(len).unwrap();
            cache.steps()
        })
        .collect();
    assert_eq!(steps, [3, 3, 2, 1, 1, 0]);
}

#[test]
fn hooks_below_the_layer_where_a_pass_starts_are_refused() {
    let model = model(&tiny());
    let x = Tensor::zeros([1, 2, 16], (Kind::Double, model.device()));
    let mut reader = |_: Site, _: &Tensor, _: &TokenInfo<'_>| Ok(None);
    let run = |mut hooks: Hooks<'_>| model.hidden_from(1, &x, &mut Pass { hooks: Some(&mut hooks), ..Pass::default() });
    let error = run(Hooks::new().on(&[Site::ResidPost(1), Site::MlpOut(0)], &mut reader)).unwrap_err();
    assert!(error.to_string().contains("mlp_out.0") && error.to_string().contains("layer 1"), "{error}");
    assert!(matches!(run(Hooks::new().stop_after(Site::ResidPost(0))), Err(Error::InvalidArgument { .. })));
    assert!(run(Hooks::new().stop_after(Site::ResidPre(1))).is_ok());
}
