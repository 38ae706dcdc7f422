//! What a checkpoint may leave out, and what one that we write must say.

mod common;

use common::{difference, ids, model, tiny};
use lm::config::{Architecture, ModelConfig};
use lm::linear::Dense;
use lm::model::{Model, Pass};
use lm::moe::{Demand, ExpertStore, ExpertWeights, MoeLayer, ResidentExperts, RouteContext, Router, Routing};
use lm::tensor::Seed;
use lm::tensor::tch::{Device, Kind, Tensor};
use lm::{Error, attention::PlainAttention};
use std::sync::{Arc, Mutex};

#[test]
fn a_model_without_a_head_of_its_own_is_tied_whatever_its_configuration_says() {
    let tied = Model::random(&tiny(), Seed::new(1), Kind::Float, Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    tied.save_hugging_face(folder.path()).unwrap();
    let path = folder.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json["tie_word_embeddings"] = false.into();
    std::fs::write(&path, json.to_string()).unwrap();
    let back = Model::from_hugging_face(folder.path(), Kind::Float, Device::Cpu).unwrap();
    assert!(back.config().tied);
    let logits = |model: &Model| model.logits(&ids(&[3, 4]), &mut Pass::default()).unwrap();
    assert_eq!(logits(&tied), logits(&back));
}

#[test]
fn what_a_family_has_no_words_for_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let odd = model(&ModelConfig { qkv_bias: true, ..tiny() });
    let error = odd.save_hugging_face(folder.path()).unwrap_err();
    assert!(error.to_string().contains("biases of llama"), "{error}");
    let mistral = ModelConfig { architecture: Architecture::Mistral, ..tiny() };
    assert_eq!(mistral.to_hugging_face().get("sliding_window"), Some(&serde_json::Value::Null));
}

#[test]
fn one_expert_a_token_keeps_its_probability_as_weight() {
    let config = tiny().mixtral(4, 1);
    assert!(!config.moe.as_ref().unwrap().renormalize);
    let mut wrong = config;
    wrong.moe.as_mut().unwrap().renormalize = true;
    assert!(matches!(wrong.validate(), Err(Error::Config { field, .. }) if field == "moe.renormalize"));
}

#[test]
fn padding_goes_to_no_expert_and_changes_no_real_row() {
    let model = model(&tiny().mixtral(4, 2));
    let layer = model.moe(0).unwrap().unwrap();
    let x = Tensor::randn([2, 3, 16], (Kind::Double, Device::Cpu));
    let real = Tensor::from_slice(&[false, true, true, true, true, true]);
    let run = |real: Option<&Tensor>| {
        let context = RouteContext { layer: 0, batch: 2, real, training: false, decoding: false };
        let mut routings = Vec::new();
        let y = layer.forward(&x, &context, Some(&mut routings)).unwrap().view([6, 16]);
        (y, routings.remove(0).counts)
    };
    let ((all, all_counts), (some, some_counts)) = (run(None), run(Some(&real)));
    assert_eq!((all_counts.iter().sum::<usize>(), some_counts.iter().sum::<usize>()), (12, 10));
    assert!(difference(&some.narrow(0, 1, 5), &all.narrow(0, 1, 5)) < 1e-12);
    assert_eq!(some.get(0).abs().max().double_value(&[]), 0.0);
}

#[test]
fn router_and_experts_learn_and_an_expert_without_tokens_does_not() {
    let mut model = model(&tiny().mixtral(4, 1));
    model.set_trainable(true);
    let mut routings = Vec::new();
    let mut pass = Pass { routings: Some(&mut routings), training: true, ..Pass::default() };
    let logits = model.logits(&ids(&[3, 4]), &mut pass).unwrap();
    let losses: Vec<&str> = routings[0].routing.losses.iter().map(|(name, _)| *name).collect();
    assert_eq!(losses, ["balance"]);
    logits.square().mean(Kind::Double).backward();
    let parameters: std::collections::BTreeMap<String, Tensor> = model.parameters().into_iter().collect();
    let learns = |name: &str| {
        let gradient = parameters[&format!("model.layers.0.block_sparse_moe.{name}.weight")].grad();
        gradient.defined() && gradient.abs().max().double_value(&[]) > 0.0
    };
    assert!(learns("gate"));
    for (expert, &tokens) in routings[0].counts.iter().enumerate() {
        for weight in ["w1", "w2", "w3"] {
            assert_eq!(learns(&format!("experts.{expert}.{weight}")), tokens > 0, "{expert} {weight}");
        }
    }
    assert!(routings[0].counts.contains(&0), "the test needs an expert without tokens");
}

#[test]
fn a_mixtures_gradient_is_that_of_finite_differences() {
    let small = ModelConfig { initializer_range: 0.3, ..ModelConfig::llama(12, 8, 1, 2, 1, 6) };
    let mut model = model(&small.mixtral(3, 2));
    model.set_trainable(true);
    let chosen = |name: &str| name.contains("block_sparse_moe");
    let parameters = model.parameters().into_iter().filter(|(name, _)| chosen(name));
    let params = lm::tensor::ParamSet::new(parameters).unwrap();
    let loss = || {
        let mut routings = Vec::new();
        let mut pass = Pass { routings: Some(&mut routings), training: true, ..Pass::default() };
        let logits =
            model.logits(&ids(&[3, 4, 5]), &mut pass).map_err(|e| lm::tensor::Error::invalid("loss", "a number", e))?;
        // The balance loss is f32; its share must not hide the rest.
        Ok(logits.log_softmax(-1, Kind::Double).select(-1, 7).mean(Kind::Double))
    };
    let worst = lm::tensor::autograd::gradient_check(&params, 1e-5, loss).unwrap();
    // Probabilities are computed in f32, also in a model of f64.
    assert!(worst < 1e-2, "{worst:e}");
}

#[test]
fn the_fingerprint_sees_norms_experts_and_plugs() {
    let build = || model(&tiny().mixtral(4, 2));
    let plain = build().fingerprint().unwrap();
    assert_eq!(build().fingerprint().unwrap(), plain);
    for part in ["model.norm.weight", "input_layernorm.weight", "gate.weight", "experts.2.w3.weight"] {
        let changed = build();
        let (_, tensor) = changed.parameters().into_iter().find(|(name, _)| name.ends_with(part)).unwrap();
        let _ = tensor.view([-1]).get(0).fill_(9.0);
        assert_ne!(changed.fingerprint().unwrap(), plain, "{part}");
    }
    let mut other = build();
    other.set_attention(Box::new(PlainAttention));
    assert_ne!(other.fingerprint().unwrap(), plain);
}

#[test]
fn embeddings_and_head_have_sockets_of_their_own() {
    let mut model = model(&tiny());
    let table = |rows: i64| Box::new(Dense::new(Tensor::ones([rows, 16], (Kind::Double, Device::Cpu)), None).unwrap());
    let before = model.logits(&ids(&[3]), &mut Pass::default()).unwrap();
    assert!(model.set_head(table(39)).is_err() && model.set_embedding(table(41)).is_err());
    assert!(model.set_head(table(40)).unwrap().is_none());
    let after = model.logits(&ids(&[3]), &mut Pass::default()).unwrap();
    assert!(difference(&before, &after) > 1e-3 && !model.config().tied);
    let old = model.set_embedding(table(40)).unwrap();
    assert_eq!(old.out_features(), 40);
}

/// Writes down what a layer demands.
#[derive(Debug)]
struct Noting(ResidentExperts, Arc<Mutex<Vec<Demand>>>);

impl ExpertStore for Noting {
    fn experts(&self) -> usize {
        self.0.experts()
    }

    fn visit(
        &self,
        layer: usize,
        demand: &[Demand],
        run: &mut dyn FnMut(usize, &ExpertWeights) -> lm::Result<()>,
    ) -> lm::Result<()> {
        self.1.lock().unwrap().extend(demand);
        self.0.visit(layer, demand, run)
    }

    fn bytes(&self) -> u64 {
        0
    }
}

/// Three tokens: 0 to experts 1 (first) and 0, 1 to experts 0 and 1 with more weight on 0, 2 to expert 3 alone.
#[derive(Debug)]
struct Written;

impl Router for Written {
    fn experts(&self) -> usize {
        4
    }

    fn route(&self, _: &Tensor, _: &RouteContext<'_>) -> lm::Result<Routing> {
        Ok(Routing {
            token: Tensor::from_slice(&[0i64, 0, 1, 1, 2]),
            expert: Tensor::from_slice(&[0i64, 1, 1, 0, 3]),
            weight: Tensor::from_slice(&[0.2f64, 0.8, 0.3, 0.25, 1.0]),
            logits: None,
            losses: Vec::new(),
        })
    }
}

#[test]
fn a_demand_has_tokens_largest_weight_and_best_rank() {
    let expert = || ExpertWeights {
        gate: Tensor::ones([2, 16], (Kind::Double, Device::Cpu)),
        up: Tensor::ones([2, 16], (Kind::Double, Device::Cpu)),
        down: Tensor::ones([16, 2], (Kind::Double, Device::Cpu)),
    };
    let noted = Arc::new(Mutex::new(Vec::new()));
    let experts = ResidentExperts::new((0..4).map(|_| expert()).collect()).unwrap();
    let layer = MoeLayer::new(Box::new(Written), Box::new(Noting(experts, noted.clone()))).unwrap();
    let context = RouteContext { layer: 0, batch: 1, real: None, training: false, decoding: false };
    let _ = layer.forward(&Tensor::ones([1, 3, 16], (Kind::Double, Device::Cpu)), &context, None).unwrap();
    let demand: Vec<_> = noted.lock().unwrap().iter().map(|d| (d.expert, d.tokens, d.weight, d.rank)).collect();
    assert_eq!(demand, [(0, 2, 0.25, 1), (1, 2, 0.8, 0), (3, 1, 1.0, 0)]);
    let scalar = Tensor::from(1.0f64);
    assert!(matches!(layer.forward(&scalar, &context, None), Err(Error::Shape { .. })));
}

#[test]
fn a_step_without_any_gradient_and_an_epsilon_of_0_are_refused() {
    use lm::train::{AdamW, OptimizerConfig};
    let parameter = || Tensor::ones([2], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let (trained, other) = (parameter(), parameter());
    let mut optimizer =
        AdamW::new(OptimizerConfig::default(), vec![("w".to_owned(), trained.shallow_clone())]).unwrap();
    let error = optimizer.step(1, |_| Ok(other.square().sum(Kind::Double))).unwrap_err();
    assert!(error.to_string().contains("got a gradient"), "{error}");
    assert_eq!(trained, parameter());
    assert!(optimizer.step(1, |_| Ok(trained.square().sum(Kind::Double))).is_ok());
    let zero = OptimizerConfig { eps: 0.0, ..OptimizerConfig::default() };
    assert!(zero.validate().is_err());
}
