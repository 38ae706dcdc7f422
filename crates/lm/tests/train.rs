//! The trainers: on a toy that is an embedding and a linear map, and on the decoder.

mod common;

use common::{difference, model, tiny};
use lm::lora::{Adapter, Layers, LoraConfig};
use lm::model::Model;
use lm::tensor::conformance::{Subject, assert_conforms};
use lm::tensor::tch::{Device, Kind, Tensor, no_grad};
use lm::tensor::{Seed, StateDict};
use lm::train::{
    Batch, Decoder, DpoConfig, DpoKind, DpoLog, DpoLoss, DpoTrainer, Example, Layout, MonitorConfig, OptimizerConfig,
    Padding, Policy, PreferencePair, SftConfig, SftTrainer, mean_nll, score_pairs,
};
use std::ops::ControlFlow;
use std::path::Path;

const CPU: Device = Device::Cpu;
const VOCAB: i64 = 12;

/// Each token's logits depend on the token before it.
struct Toy {
    embedding: Tensor,
    head: Tensor,
}

impl Toy {
    fn new(seed: u64) -> Self {
        let tensor = |name| {
            let values = Seed::new(seed).child(name).normal(VOCAB as usize * 6);
            (Tensor::from_slice(&values).view([VOCAB, 6]).to_kind(Kind::Double) * 0.5).set_requires_grad(true)
        };
        Self { embedding: tensor("embedding"), head: tensor("head") }
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        vec![("embedding".into(), self.embedding.shallow_clone()), ("head".into(), self.head.shallow_clone())]
    }

    fn spoil(&self) {
        let _ = no_grad(|| self.head.shallow_clone().get(0).get(0).fill_(f64::NAN));
    }
}

impl Policy for Toy {
    fn logits(&mut self, batch: &Batch) -> lm::Result<Tensor> {
        Ok(Tensor::f_embedding(&self.embedding, &batch.ids, -1, false, false)?.f_matmul(&self.head.f_tr()?)?)
    }
}

fn examples() -> Vec<Example> {
    (0..7u32)
        .map(|i| Example { prompt: vec![i % 3, 5], completion: (0..=i % 4).map(|j| (i + j) % 11).collect() })
        .collect()
}

/// The preferred answers have even tokens.
fn pairs() -> Vec<PreferencePair> {
    (0..6u32)
        .map(|i| PreferencePair {
            prompt: vec![11, i],
            chosen: (0..=i % 3).map(|j| (2 * (i + j)) % 10).collect(),
            rejected: (0..=i % 2).map(|j| (2 * (i + j)) % 10 + 1).collect(),
        })
        .collect()
}

fn sft() -> SftConfig {
    let optimizer =
        OptimizerConfig { lr: 0.02, warmup: 2, steps: 40, weight_decay: 0.01, ..OptimizerConfig::default() };
    SftConfig { optimizer, batch: 4, part: 3, seed: 3, ..SftConfig::default() }
}

fn dpo() -> DpoConfig {
    let optimizer = OptimizerConfig { lr: 0.02, warmup: 2, steps: 30, ..OptimizerConfig::default() };
    DpoConfig { optimizer, batch: 4, part: 3, seed: 3, ..DpoConfig::default() }
}

fn reference(config: &DpoConfig) -> Vec<[f64; 2]> {
    score_pairs(&mut Toy::new(1), &pairs(), &config.layout, config.part).unwrap()
}

#[test]
fn fine_tuning_learns_the_completions_and_not_the_prompts() {
    let mut toy = Toy::new(1);
    let layout = Layout::default();
    let before = mean_nll(&mut toy, &examples(), &layout, 2).unwrap();
    let mut trainer = SftTrainer::new(sft(), examples(), toy.parameters()).unwrap();
    let logs = trainer.run(&mut toy, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(logs.len(), 40);
    let after = mean_nll(&mut toy, &examples(), &layout, 7).unwrap();
    assert!(after < before - 0.5, "{before} {after}");
    assert!(trainer.steps() == 40 && logs[0].update.lr < logs[1].update.lr);
}

#[test]
fn the_loss_of_a_step_is_the_mean_over_its_tokens_however_it_is_divided_and_padded() {
    let run = |part, padding| {
        let mut toy = Toy::new(1);
        let config = SftConfig { part, layout: Layout { padding, ..Layout::default() }, ..sft() };
        let mut trainer = SftTrainer::new(config, examples(), toy.parameters()).unwrap();
        let logs: Vec<_> = (0..5).map(|_| trainer.step(&mut toy).unwrap()).collect();
        (logs, toy)
    };
    let (whole, toy) = run(4, Padding::Left);
    for (part, padding) in [(1, Padding::Left), (3, Padding::Right), (100, Padding::Right)] {
        let (logs, other) = run(part, padding);
        for (a, b) in logs.iter().zip(&whole) {
            assert!((a.update.loss - b.update.loss).abs() < 1e-12 && a.tokens == b.tokens);
        }
        assert!(difference(&toy.head, &other.head) < 1e-9);
    }
}

#[test]
fn preference_training_starts_at_ln_2_and_learns_the_preference() {
    let mut toy = Toy::new(1);
    let mut trainer = DpoTrainer::new(dpo(), pairs(), &reference(&dpo()), toy.parameters()).unwrap();
    let logs = trainer.run(&mut toy, |_| ControlFlow::Continue(())).unwrap();
    assert!((logs[0].update.loss - std::f64::consts::LN_2).abs() < 1e-12);
    assert!(logs[0].margin.abs() < 1e-12);
    let last = logs.last().unwrap();
    assert!(last.update.loss < 0.6 && last.margin > 0.2 && last.accuracy == 1.0, "{last:?}");
    assert!(last.chosen_ratio > last.rejected_ratio);
    assert!(trainer.finished());
}

#[test]
fn a_precomputed_reference_is_the_model_asked_in_the_step() {
    let (mut policy, config) = (Toy::new(2), dpo());
    let mut trainer = DpoTrainer::new(config.clone(), pairs(), &reference(&config), policy.parameters()).unwrap();
    // All six pairs in one step, by hand.
    let numbered: Vec<_> = pairs().into_iter().enumerate().collect();
    let numbered: Vec<_> = numbered.iter().map(|(i, p)| (*i, p)).collect();
    let batch = config.layout.pairs(&numbered).unwrap();
    let sums = |toy: &mut Toy| toy.log_probs(&batch).unwrap().sum_dim_intlist(1, false, Kind::Double).view([2, 6]);
    let ratios = no_grad(|| sums(&mut policy) - sums(&mut Toy::new(1)));
    let margins = (ratios.get(0) - ratios.get(1)) * 0.1;
    let all = DpoConfig { batch: 6, ..config };
    let mut whole = DpoTrainer::new(all.clone(), pairs(), &reference(&all), policy.parameters()).unwrap();
    let log = whole.step(&mut policy).unwrap();
    assert!((log.margin - margins.mean(Kind::Double).double_value(&[])).abs() < 1e-12);
    let expected = -margins.log_sigmoid().mean(Kind::Double).double_value(&[]);
    assert!((log.update.loss - expected).abs() < 1e-12);
    assert!(trainer.step(&mut policy).is_ok());
}

#[test]
fn training_ends_at_the_margin_or_where_the_caller_says() {
    let mut toy = Toy::new(1);
    let config = DpoConfig { stop_margin: Some(0.05), ..dpo() };
    let mut trainer = DpoTrainer::new(config.clone(), pairs(), &reference(&config), toy.parameters()).unwrap();
    let logs = trainer.run(&mut toy, |_| ControlFlow::Continue(())).unwrap();
    assert!(logs.len() < 30 && logs.last().unwrap().margin >= 0.05);
    let mut trainer = SftTrainer::new(sft(), examples(), toy.parameters()).unwrap();
    let stop =
        |log: &lm::train::SftLog| if log.update.step == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    assert_eq!(trainer.run(&mut toy, stop).unwrap().len(), 3);
}

#[test]
fn a_policy_that_loses_its_chosen_texts_is_reported() {
    let mut toy = Toy::new(1);
    let config = DpoConfig { monitor: MonitorConfig { window: 2, limit: 0.5 }, ..dpo() };
    // As if the reference liked the chosen texts much more.
    let reference: Vec<[f64; 2]> = reference(&config).iter().map(|[c, r]| [c + 30.0, r + 30.0]).collect();
    let mut trainer = DpoTrainer::new(config, pairs(), &reference, toy.parameters()).unwrap();
    assert_eq!(trainer.step(&mut toy).unwrap().collapse, None);
    assert!(trainer.step(&mut toy).unwrap().collapse.unwrap() < -0.5);
}

#[test]
fn data_that_cannot_be_learned_from_is_named() {
    let toy = Toy::new(1);
    let refuse = |pairs: Vec<PreferencePair>, reference: &[[f64; 2]], expected: &str| {
        let message = DpoTrainer::new(dpo(), pairs, reference, toy.parameters()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    let pair = |chosen: &[u32]| PreferencePair { prompt: vec![1], chosen: chosen.to_vec(), rejected: vec![2] };
    refuse(vec![], &[], "at least one");
    refuse(vec![pair(&[2])], &[[0.0; 2]], "two answers that differ");
    refuse(vec![pair(&[])], &[[0.0; 2]], "completion of text 0");
    refuse(vec![pair(&[3])], &[], "one entry for each of 1 pairs");
    refuse(vec![pair(&[3])], &[[f64::NAN, 0.0]], "reference of pair 0");
    let empty = vec![Example { prompt: vec![], completion: vec![1] }];
    assert!(SftTrainer::new(sft(), empty, toy.parameters()).is_err());
    assert!(SftTrainer::new(sft(), examples(), vec![]).is_err());
    assert!(mean_nll(&mut Toy::new(1), &[], &Layout::default(), 1).is_err());
    assert!(score_pairs(&mut Toy::new(1), &pairs(), &Layout::default(), 0).is_err());
}

#[test]
fn a_saved_training_of_other_data_or_kind_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (sft_file, dpo_file) = (folder.path().join("sft.safetensors"), folder.path().join("dpo.safetensors"));
    let toy = Toy::new(1);
    let mut s = SftTrainer::new(sft(), examples(), toy.parameters()).unwrap();
    let mut d = DpoTrainer::new(dpo(), pairs(), &reference(&dpo()), toy.parameters()).unwrap();
    s.save(&sft_file).unwrap();
    d.save(&dpo_file).unwrap();
    assert!(s.load(&dpo_file).is_err() && d.load(&sft_file).is_err());
    let fewer = examples().into_iter().take(5).collect();
    let mut other = SftTrainer::new(sft(), fewer, toy.parameters()).unwrap();
    assert!(other.load(&sft_file).unwrap_err().to_string().contains("other texts"));
    std::fs::write(&sft_file, b"nothing").unwrap();
    assert!(s.load(&sft_file).is_err());
}

/// What both trainers are put through.
struct SftSubject(Toy, SftTrainer);
struct DpoSubject(Toy, DpoTrainer, Vec<DpoLog>);

fn observe(toy: &Toy, more: &str) -> Vec<u8> {
    let numbers = |t: &Tensor| Vec::<f64>::try_from(t.detach().reshape([-1])).unwrap();
    let all = [numbers(&toy.embedding), numbers(&toy.head)].concat();
    all.iter().flat_map(|v| v.to_bits().to_le_bytes()).chain(more.bytes()).collect()
}

fn through_file(use_it: impl FnOnce(&Path)) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    use_it(&path);
    std::fs::read(path).unwrap()
}

fn from_file(bytes: &[u8], use_it: impl FnOnce(&Path) -> lm::Result<()>) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    std::fs::write(&path, bytes).unwrap();
    use_it(&path).map_err(|e| e.to_string())
}

impl Subject for SftSubject {
    type Config = SftConfig;

    fn config() -> SftConfig {
        sft()
    }

    fn invalid() -> Vec<(&'static str, SftConfig)> {
        let with = |o: OptimizerConfig| SftConfig { optimizer: o, ..sft() };
        let o = sft().optimizer;
        vec![
            ("batch", SftConfig { batch: 0, ..sft() }),
            ("part", SftConfig { part: 0, ..sft() }),
            ("lr", with(OptimizerConfig { lr: -1.0, ..o.clone() })),
            ("beta1", with(OptimizerConfig { beta1: 1.0, ..o.clone() })),
            ("beta2", with(OptimizerConfig { beta2: f64::NAN, ..o.clone() })),
            ("eps", with(OptimizerConfig { eps: -1e-8, ..o.clone() })),
            ("weight_decay", with(OptimizerConfig { weight_decay: f64::INFINITY, ..o.clone() })),
            ("steps", with(OptimizerConfig { steps: 0, ..o.clone() })),
            ("clip", with(OptimizerConfig { clip: Some(0.0), ..o })),
        ]
    }

    fn build(config: &SftConfig) -> Result<Self, String> {
        let toy = Toy::new(1);
        let trainer = SftTrainer::new(config.clone(), examples(), toy.parameters()).map_err(|e| e.to_string())?;
        Ok(Self(toy, trainer))
    }

    fn advance(&mut self, _: u64) -> Result<(), String> {
        self.1.step(&mut self.0).map(|_| ()).map_err(|e| e.to_string())
    }

    fn advance_on_nan(&mut self) -> Result<(), String> {
        let mut nan = Toy::new(1);
        nan.spoil();
        self.1.step(&mut nan).map(|_| ()).map_err(|e| e.to_string())
    }

    fn observe(&self) -> Vec<u8> {
        observe(&self.0, &self.1.steps().to_string())
    }

    fn save(&self) -> Result<Vec<u8>, String> {
        Ok(through_file(|path| self.1.save(path).unwrap()))
    }

    fn load(config: &SftConfig, saved: &[u8]) -> Result<Self, String> {
        let mut new = Self::build(config)?;
        from_file(saved, |path| new.1.load(path))?;
        Ok(new)
    }
}

impl Subject for DpoSubject {
    type Config = DpoConfig;

    fn config() -> DpoConfig {
        dpo()
    }

    fn invalid() -> Vec<(&'static str, DpoConfig)> {
        let with = |loss: DpoLoss| DpoConfig { loss, ..dpo() };
        let plain = DpoLoss::default;
        vec![
            ("batch", DpoConfig { batch: 0, ..dpo() }),
            ("stop_margin", DpoConfig { stop_margin: Some(-1.0), ..dpo() }),
            ("window", DpoConfig { monitor: MonitorConfig { window: 0, limit: 1.0 }, ..dpo() }),
            ("beta", with(DpoLoss { beta: 0.0, ..plain() })),
            ("label_smoothing", with(DpoLoss { label_smoothing: 0.5, ..plain() })),
            ("label_smoothing", with(DpoLoss { label_smoothing: 0.1, kind: DpoKind::Ipo, ..plain() })),
            ("sft_weight", with(DpoLoss { sft_weight: f64::NAN, ..plain() })),
        ]
    }

    fn build(config: &DpoConfig) -> Result<Self, String> {
        let toy = Toy::new(1);
        let layout = &config.layout;
        let reference = score_pairs(&mut Toy::new(1), &pairs(), layout, 2).map_err(|e| e.to_string())?;
        let trainer =
            DpoTrainer::new(config.clone(), pairs(), &reference, toy.parameters()).map_err(|e| e.to_string())?;
        Ok(Self(toy, trainer, Vec::new()))
    }

    fn advance(&mut self, _: u64) -> Result<(), String> {
        let log = self.1.step(&mut self.0).map_err(|e| e.to_string())?;
        self.2 = vec![log];
        Ok(())
    }

    fn advance_on_nan(&mut self) -> Result<(), String> {
        let mut nan = Toy::new(1);
        nan.spoil();
        self.1.step(&mut nan).map(|_| ()).map_err(|e| e.to_string())
    }

    fn observe(&self) -> Vec<u8> {
        observe(&self.0, &format!("{} {}", self.1.steps(), self.1.finished()))
    }

    fn save(&self) -> Result<Vec<u8>, String> {
        Ok(through_file(|path| self.1.save(path).unwrap()))
    }

    fn load(config: &DpoConfig, saved: &[u8]) -> Result<Self, String> {
        let mut new = Self::build(config)?;
        from_file(saved, |path| new.1.load(path))?;
        Ok(new)
    }
}

#[test]
fn the_trainers_conform() {
    assert_conforms::<SftSubject>();
    assert_conforms::<DpoSubject>();
}

// The decoder.

fn lora() -> LoraConfig {
    LoraConfig { rank: 3, alpha: 6.0, layers: Layers::Top(1), ..LoraConfig::default() }
}

fn adapter() -> Adapter {
    Adapter::new(&tiny(), &lora(), Kind::Double, CPU).unwrap()
}

#[test]
fn the_decoder_is_a_policy_whose_logits_are_the_models() {
    let model = model(&tiny());
    let batch = Layout::default().pairs(&pairs().iter().enumerate().collect::<Vec<_>>()).unwrap();
    let mut plain = |batch: &Batch| {
        let mut pass = lm::model::Pass { real: Some(&batch.real), ..Default::default() };
        model.logits(&batch.ids, &mut pass)
    };
    let expected = plain.log_probs(&batch).unwrap();
    let mut decoder = Decoder::new(&model, None);
    assert!(difference(&decoder.log_probs(&batch).unwrap(), &expected) < 1e-12);
    assert!(difference(&decoder.logits(&batch).unwrap(), &plain.logits(&batch).unwrap()) < 1e-12);
    // Twice, so that the second time comes from what was kept; then with a changed text under an old number.
    let mut frozen = Decoder::new(&model, None).frozen_below(1).unwrap();
    for _ in 0..2 {
        assert!(difference(&frozen.log_probs(&batch).unwrap(), &expected) < 1e-10);
    }
    let other = Layout::default().batch(&[(batch.texts[0], &[4, 4], &[9, 8])]).unwrap();
    assert!(difference(&frozen.log_probs(&other).unwrap(), &plain.log_probs(&other).unwrap()) < 1e-10);
}

#[test]
fn an_adapter_learns_a_preference_and_the_model_stays() {
    let model = model(&tiny());
    let adapter = adapter();
    let config = DpoConfig { loss: DpoLoss { beta: 0.5, ..DpoLoss::default() }, ..dpo() };
    let reference = score_pairs(&mut Decoder::new(&model, None), &pairs(), &config.layout, 4).unwrap();
    let before: Vec<_> = model.parameters().into_iter().map(|(n, t)| (n, t.copy())).collect();
    let mut policy = Decoder::new(&model, Some(&adapter)).frozen_below(1).unwrap();
    let mut trainer = DpoTrainer::new(config, pairs(), &reference, adapter.parameters()).unwrap();
    let logs = trainer.run(&mut policy, |_| ControlFlow::Continue(())).unwrap();
    assert!((logs[0].update.loss - std::f64::consts::LN_2).abs() < 1e-9);
    assert!(logs.last().unwrap().update.loss < 0.4, "{:?}", logs.last());
    assert_eq!(model.parameters(), before);
    // A saved state gives the adapter its numbers back.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dpo.safetensors");
    trainer.save(&path).unwrap();
    let name = "param.model.layers.1.self_attn.q_proj.lora_B.weight";
    assert!(StateDict::load(&path).unwrap().tensors[name].abs().max().double_value(&[]) > 0.0);
}

#[test]
fn a_frozen_trunk_below_an_adapter_is_checked() {
    let model = model(&tiny());
    let deep = Adapter::new(&tiny(), &LoraConfig { layers: Layers::All, ..lora() }, Kind::Double, CPU).unwrap();
    let top = adapter();
    assert!(Decoder::new(&model, None).frozen_below(2).unwrap_err().to_string().contains("no layer 2"));
    assert!(Decoder::new(&model, Some(&deep)).frozen_below(1).unwrap_err().to_string().contains("at most 0"));
    let frozen = Decoder::new(&model, None).frozen_below(1).unwrap();
    let frozen = frozen.with_adapter(Some(&top)).unwrap();
    assert!(frozen.with_adapter(Some(&deep)).is_err());
}

#[test]
fn a_whole_mixture_of_experts_trains_with_its_balance_loss() {
    let config = tiny().mixtral(4, 2);
    let model = Model::random(&config, Seed::new(2), Kind::Float, CPU).unwrap();
    let parameters: Vec<_> = model.parameters().into_iter().map(|(n, t)| (n, t.set_requires_grad(true))).collect();
    let mut policy = Decoder::new(&model, None);
    let before = mean_nll(&mut policy, &examples(), &Layout::default(), 7).unwrap();
    let mut trainer = SftTrainer::new(SftConfig { part: 4, ..sft() }, examples(), parameters).unwrap();
    let log = trainer.step(&mut policy).unwrap();
    let extra = policy.extra_loss().unwrap().unwrap();
    assert!(extra.double_value(&[]) > 0.0 && policy.routings().len() == 2);
    assert!(log.update.grad_norm.is_finite());
    trainer.run(&mut policy, |_| ControlFlow::Continue(())).unwrap();
    assert!(mean_nll(&mut policy, &examples(), &Layout::default(), 7).unwrap() < before - 0.5);
}
