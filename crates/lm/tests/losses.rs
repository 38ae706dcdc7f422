//! Losses, batches and the optimizer, by themselves.

use lm::tensor::tch::{Device, Kind, Tensor, nn, nn::OptimizerConfig as _, no_grad};
use lm::tensor::{ParamSet, Seed, autograd};
use lm::train::{
    AdamW, CollapseMonitor, Counted, DpoKind, DpoLoss, Layout, MonitorConfig, OptimizerConfig, Padding, PairScores,
    PreferencePair, Schedule, bradley_terry, dpo_loss, lengths, next_token_nll, repetition, token_log_probs,
};
use proptest::prelude::*;

const CPU: Device = Device::Cpu;

fn normal(shape: &[i64], seed: u64) -> Tensor {
    let n = shape.iter().product::<i64>() as usize;
    Tensor::from_slice(&Seed::new(seed).normal(n)).to_kind(Kind::Double).view(shape)
}

fn value(t: &Tensor) -> f64 {
    t.double_value(&[])
}

fn apart(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    value(&(a - b).abs().max())
}

fn numbers(values: &[f64]) -> Tensor {
    Tensor::from_slice(values)
}

fn scores(chosen: &[f64], rejected: &[f64]) -> PairScores {
    PairScores { chosen: numbers(chosen), rejected: numbers(rejected) }
}

fn loss(policy: &PairScores, reference: &PairScores, config: &DpoLoss) -> f64 {
    value(&dpo_loss(policy, reference, &Tensor::ones_like(&policy.chosen), config).unwrap().loss)
}

#[test]
fn log_probabilities_are_those_of_the_softmax_and_zero_where_nothing_counts() {
    let logits = normal(&[2, 4, 5], 1).set_requires_grad(true);
    let ids = Tensor::from_slice(&[1i64, 4, 0, 2, 3, 3, 1, 0]).view([2, 4]);
    let mask = Tensor::from_slice(&[true, false, true, true, false, true, false, true]).view([2, 4]);
    let got = token_log_probs(&logits, &ids, &mask).unwrap();
    let all = logits.log_softmax(-1, Kind::Double).narrow(1, 0, 3);
    let expected = all.gather(2, &ids.narrow(1, 1, 3).unsqueeze(2), false).squeeze_dim(2);
    assert!(apart(&got, &(expected * mask.narrow(1, 1, 3).to_kind(Kind::Double))) < 1e-12);
    assert_eq!(value(&got.get(0).get(0)), 0.0);
    got.sum(Kind::Double).backward();
    let touched = logits.grad().abs().sum_dim_intlist(2, false, Kind::Double).gt(0.0);
    // The logits in front of each counted token; the first token's mark means nothing.
    let expected = Tensor::from_slice(&[false, true, true, false, true, false, true, false]).view([2, 4]);
    assert_eq!(touched, expected);
}

#[test]
fn nothing_that_is_not_counted_can_spoil_the_loss() {
    let logits = normal(&[1, 3, 4], 2);
    let _ = logits.get(0).get(0).fill_(f64::NAN);
    let ids = Tensor::from_slice(&[0i64, 99, 2]).view([1, 3]);
    let mask = Tensor::from_slice(&[false, false, true]).view([1, 3]);
    let logits = logits.set_requires_grad(true);
    let loss = next_token_nll(&logits, &ids, &mask).unwrap();
    loss.backward();
    assert!(value(&loss).is_finite() && value(&logits.grad().abs().sum(Kind::Double)).is_finite());
}

#[test]
fn flat_logits_have_the_logarithm_of_the_vocabulary() {
    let logits = Tensor::zeros([2, 5, 7], (Kind::Float, CPU));
    let layout = Layout::default();
    let batch = layout.batch(&[(0, &[1, 2], &[3, 4, 5]), (1, &[6], &[0])]).unwrap();
    let nll = next_token_nll(&logits, &batch.ids, &batch.counted).unwrap();
    assert!((value(&nll) - 7f64.ln()).abs() < 1e-6);
}

#[test]
fn shapes_and_tokens_that_do_not_fit_are_named() {
    let ids = Tensor::from_slice(&[0i64, 9, 2, 1]).view([2, 2]);
    let mask = Tensor::ones([2, 2], (Kind::Bool, CPU));
    let message = |l: &Tensor, m: &Tensor| token_log_probs(l, &ids, m).unwrap_err().to_string();
    assert!(message(&normal(&[2, 2, 4], 1), &mask).contains("token 9 of row 0"));
    assert!(message(&normal(&[2, 3, 4], 1), &mask).contains("[2, 2, vocab]"));
    assert!(message(&normal(&[2, 2, 4], 1), &mask.narrow(1, 0, 1)).contains("[2, 2]"));
    assert!(next_token_nll(&normal(&[2, 2, 10], 1), &ids, &mask.logical_not()).is_err());
    let counted = Counted::new(&ids, &mask).unwrap();
    assert!(counted.log_probs(&normal(&[3, 10], 1)).is_err());
    let two = scores(&[0.0, 0.0], &[0.0, 0.0]);
    let one = scores(&[0.0], &[0.0]);
    assert!(dpo_loss(&two, &one, &numbers(&[1.0, 1.0]), &DpoLoss::default()).is_err());
    assert!(dpo_loss(&scores(&[], &[]), &scores(&[], &[]), &numbers(&[]), &DpoLoss::default()).is_err());
    assert!(bradley_terry(&numbers(&[1.0]), &numbers(&[1.0, 2.0])).is_err());
}

#[test]
fn a_policy_that_is_its_reference_has_the_loss_ln_2() {
    let same = || scores(&[-10.5, -3.25], &[-8.0, -40.0]);
    let out = dpo_loss(&same(), &same(), &numbers(&[1.0, 1.0]), &DpoLoss::default()).unwrap();
    assert_eq!(value(&out.loss), std::f64::consts::LN_2);
    assert_eq!(out.margins, numbers(&[0.0, 0.0]));
    assert_eq!(out.accuracy, 0.0);
}

#[test]
fn the_closed_forms_hold() {
    // Log-ratios 3 and −1: a margin of 0.4 at β = 0.1.
    let (policy, reference) = (scores(&[-7.0], &[-9.0]), scores(&[-10.0], &[-8.0]));
    let sigmoid = |m: f64| 1.0 / (1.0 + (-m).exp());
    let plain = DpoLoss::default();
    assert!((loss(&policy, &reference, &plain) + sigmoid(0.4).ln()).abs() < 1e-12);
    let smooth = DpoLoss { label_smoothing: 0.2, ..plain.clone() };
    let expected = -0.8 * sigmoid(0.4).ln() - 0.2 * sigmoid(-0.4).ln();
    assert!((loss(&policy, &reference, &smooth) - expected).abs() < 1e-12);
    let ipo = DpoLoss { kind: DpoKind::Ipo, ..plain.clone() };
    assert!((loss(&policy, &reference, &ipo) - (4.0f64 - 5.0).powi(2)).abs() < 1e-12);
    let held = DpoLoss { sft_weight: 0.5, ..plain.clone() };
    let out = dpo_loss(&policy, &reference, &numbers(&[14.0]), &held).unwrap();
    assert!((value(&out.loss) - (loss(&policy, &reference, &plain) + 0.5 * 0.5)).abs() < 1e-12);
    assert_eq!((value(&out.chosen_ratios), value(&out.rejected_ratios)), (3.0, -1.0));
    let rewards = bradley_terry(&numbers(&[2.0, 0.0]), &numbers(&[1.0, 3.0])).unwrap();
    assert!((value(&rewards) + f64::midpoint(sigmoid(1.0).ln(), sigmoid(-3.0).ln())).abs() < 1e-12);
}

#[test]
fn a_margin_far_from_zero_overflows_nothing() {
    for m in [1e5, -1e5] {
        let policy = PairScores { chosen: numbers(&[m]).set_requires_grad(true), rejected: numbers(&[0.0]) };
        let out = dpo_loss(&policy, &scores(&[0.0], &[0.0]), &numbers(&[1.0]), &DpoLoss::default()).unwrap();
        out.loss.backward();
        assert!(value(&out.loss).is_finite() && value(&policy.chosen.grad()).is_finite());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn swapping_flips_the_margin_and_shifting_both_ratios_leaves_it(
        p in -50.0..0.0f64, q in -50.0..0.0f64, r in -50.0..0.0f64, s in -50.0..0.0f64, shift in -20.0..20.0f64,
    ) {
        let config = DpoLoss::default();
        let margin = |a: &PairScores, b: &PairScores| value(&dpo_loss(a, b, &numbers(&[1.0]), &config).unwrap().margins);
        let there = margin(&scores(&[p], &[q]), &scores(&[r], &[s]));
        let back = margin(&scores(&[q], &[p]), &scores(&[s], &[r]));
        prop_assert!((there + back).abs() < 1e-12);
        let shifted = margin(&scores(&[p + shift], &[q + shift]), &scores(&[r], &[s]));
        prop_assert!((there - shifted).abs() < 1e-10);
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    // Embeddings and a linear map: a two-layer toy.
    let (embedding, head) = (normal(&[6, 3], 3), normal(&[6, 3], 4));
    let params =
        ParamSet::new([("e", &embedding), ("h", &head)].map(|(n, t)| (n.to_owned(), t.set_requires_grad(true))))
            .unwrap();
    let pair = PreferencePair { prompt: vec![1, 2], chosen: vec![3, 0], rejected: vec![4, 5, 0] };
    let batch = Layout::default().pairs(&[(0, &pair)]).unwrap();
    let configs = [
        DpoLoss { sft_weight: 0.3, ..DpoLoss::default() },
        DpoLoss { label_smoothing: 0.1, beta: 0.7, ..DpoLoss::default() },
        DpoLoss { kind: DpoKind::Ipo, beta: 0.5, ..DpoLoss::default() },
    ];
    for config in configs {
        let worst = autograd::gradient_check(&params, 1e-5, || {
            let hidden = Tensor::embedding(&params.tensors()[0], &batch.ids, -1, false, false).tanh();
            let log_probs = token_log_probs(&hidden.matmul(&params.tensors()[1].tr()), &batch.ids, &batch.counted);
            let sums = log_probs.unwrap().sum_dim_intlist(1, false, Kind::Double);
            let ours = PairScores { chosen: sums.narrow(0, 0, 1), rejected: sums.narrow(0, 1, 1) };
            Ok(dpo_loss(&ours, &scores(&[-3.0], &[-5.0]), &numbers(&[2.0]), &config).unwrap().loss)
        });
        assert!(worst.unwrap() < 1e-7);
    }
}

#[test]
fn batches_are_laid_out_as_told() {
    let texts: [(usize, &[u32], &[u32]); 2] = [(7, &[1, 2], &[3, 4]), (8, &[5], &[6])];
    let left = Layout { pad: 9, ..Layout::default() }.batch(&texts).unwrap();
    let lists = |t: &Tensor| Vec::<i64>::try_from(t.to_kind(Kind::Int64).reshape([-1])).unwrap();
    assert_eq!(left.ids.size(), [2, 4]);
    assert_eq!(lists(&left.ids), [1, 2, 3, 4, 9, 9, 5, 6]);
    assert_eq!(lists(&left.real), [1, 1, 1, 1, 0, 0, 1, 1]);
    assert_eq!(lists(&left.counted), [0, 0, 1, 1, 0, 0, 0, 1]);
    assert_eq!((left.tokens, left.texts), (vec![2, 1], vec![7, 8]));
    let right = Layout { padding: Padding::Right, max_tokens: Some(3), ..Layout::default() }.batch(&texts).unwrap();
    assert_eq!(lists(&right.ids), [1, 2, 3, 5, 6, 0]);
    assert_eq!(lists(&right.counted), [0, 0, 1, 0, 1, 0]);
    let pair = PreferencePair { prompt: vec![1], chosen: vec![2, 3], rejected: vec![4] };
    let pairs = Layout::default().pairs(&[(3, &pair), (5, &pair)]).unwrap();
    assert_eq!(pairs.texts, [6, 10, 7, 11]);
    assert_eq!(lists(&pairs.ids), [1, 2, 3, 1, 2, 3, 0, 1, 4, 0, 1, 4]);

    let refused = |texts: &[(usize, &[u32], &[u32])], max| {
        Layout { max_tokens: max, ..Layout::default() }.batch(texts).unwrap_err().to_string()
    };
    assert!(refused(&[], None).contains("texts"));
    assert!(refused(&[(0, &[1], &[1]), (1, &[], &[1])], None).contains("row 1 is empty"));
    assert!(refused(&[(4, &[1], &[])], None).contains("completion of text 4"));
    assert!(refused(&[(4, &[1, 2], &[3])], Some(2)).contains("fits into 2"));
}

#[test]
fn lengths_and_repetition_are_counted() {
    let pair = |chosen: usize, rejected: usize| PreferencePair {
        prompt: vec![0],
        chosen: vec![1; chosen],
        rejected: vec![1; rejected],
    };
    let found = lengths(&[pair(4, 2), pair(2, 2), pair(3, 5)]).unwrap();
    assert_eq!((found.chosen, found.rejected, found.chosen_longer), (3.0, 3.0, 0.5));
    assert!(lengths(&[]).is_none());
    assert_eq!(repetition(&[1, 2, 3, 1, 2, 3, 1, 2, 3], 3), 4.0 / 7.0);
    assert_eq!(repetition(&[1, 2, 3, 4], 3), 0.0);
    assert_eq!(repetition(&[1, 2], 3), 0.0);
    assert_eq!(repetition(&[1, 2], 0), 0.0);
}

#[test]
fn the_monitor_warns_when_the_window_is_full_and_low() {
    let mut monitor = CollapseMonitor::new(MonitorConfig { window: 2, limit: 0.5 }).unwrap();
    assert_eq!(monitor.observe(-9.0), None);
    assert_eq!(monitor.observe(8.5), None);
    assert_eq!(monitor.observe(-9.5), None);
    assert_eq!(monitor.observe(0.0), Some(-4.75));
    assert!(CollapseMonitor::new(MonitorConfig { window: 0, ..MonitorConfig::default() }).is_err());
    assert!(CollapseMonitor::new(MonitorConfig { limit: f64::NAN, ..MonitorConfig::default() }).is_err());
}

#[test]
fn adamw_is_libtorchs() {
    for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::Double, 1e-13)] {
        let mut store = nn::VarStore::new(CPU);
        store.set_kind(kind);
        let start = normal(&[4, 3], 5);
        let theirs = store.root().var_copy("w", &start.to_kind(kind));
        let ours = start.to_kind(kind).copy().set_requires_grad(true);
        let mut reference = nn::adamw(0.9, 0.95, 0.1).build(&store, 1.0).unwrap();
        let config = OptimizerConfig {
            lr: 0.03,
            beta2: 0.95,
            weight_decay: 0.1,
            warmup: 5,
            schedule: Schedule::Cosine,
            steps: 30,
            clip: None,
            ..OptimizerConfig::default()
        };
        let mut optimizer = AdamW::new(config.clone(), vec![("w".into(), ours.shallow_clone())]).unwrap();
        let target = normal(&[4, 3], 6).to_kind(kind);
        let f = |w: &Tensor, i: u64| ((w - &target * (i as f64 / 10.0)).square().sum(kind)) * 0.7;
        for i in 0..30 {
            reference.set_lr(config.rate(i));
            let expected = f(&theirs, i);
            reference.backward_step(&expected);
            let done = optimizer.step(1, |_| Ok(f(&ours, i))).unwrap();
            assert!((done.loss - value(&expected)).abs() < 1e-4);
        }
        assert!(apart(&theirs, &ours) < tolerance, "{kind:?} {}", apart(&theirs, &ours));
    }
}

#[test]
fn learning_rates_rise_and_fall_as_scheduled() {
    let config = |schedule| OptimizerConfig { lr: 1.0, warmup: 4, steps: 12, schedule, ..OptimizerConfig::default() };
    let rates = |schedule| [0, 3, 4, 8, 11, 12, 99].map(|step| config(schedule).rate(step));
    assert_eq!(rates(Schedule::Constant), [0.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(rates(Schedule::Linear), [0.25, 1.0, 1.0, 0.5, 0.125, 0.0, 0.0]);
    let cosine = rates(Schedule::Cosine);
    assert_eq!((cosine[0], cosine[2], cosine[5]), (0.25, 1.0, 0.0));
    assert!((cosine[3] - 0.5).abs() < 1e-12);
}

#[test]
fn parts_add_up_and_a_long_gradient_is_cut() {
    let run = |parts: usize| {
        let w = normal(&[3], 7).set_requires_grad(true);
        let config = OptimizerConfig { warmup: 0, clip: Some(0.1), ..OptimizerConfig::default() };
        let mut optimizer = AdamW::new(config, vec![("w".into(), w.shallow_clone())]).unwrap();
        let data = normal(&[6, 3], 8);
        let rows = 6 / parts as i64;
        let loss = |i: usize| Ok((data.narrow(0, i as i64 * rows, rows) * &w).square().sum(Kind::Double));
        (optimizer.step(parts, loss).unwrap(), w)
    };
    let ((one, w1), (three, w3)) = (run(1), run(3));
    assert!((one.loss - three.loss).abs() < 1e-12 && (one.grad_norm - three.grad_norm).abs() < 1e-12);
    assert!(apart(&w1, &w3) < 1e-12);
    assert!(one.grad_norm > 0.1);
}

#[test]
fn what_is_not_finite_is_an_error_and_changes_nothing() {
    let w = normal(&[3], 9).set_requires_grad(true);
    let mut optimizer = AdamW::new(OptimizerConfig::default(), vec![("w".into(), w.shallow_clone())]).unwrap();
    optimizer.step(1, |_| Ok(w.square().sum(Kind::Double))).unwrap();
    let before = optimizer.state().tensors.into_iter().map(|(n, t)| (n, t.copy())).collect::<Vec<_>>();
    let nan = optimizer.step(2, |i| Ok(w.sum(Kind::Double) * if i == 1 { f64::NAN } else { 1.0 }));
    assert!(matches!(nan, Err(lm::Error::NonFiniteLoss { step: 1, .. })));
    // The root of zero has a finite value and no finite slope.
    let slope = optimizer.step(1, |_| Ok((&w * 0.0).sqrt().sum(Kind::Double)));
    assert!(matches!(slope, Err(lm::Error::NonFiniteGradient { step: 1, .. })), "{slope:?}");
    assert!(optimizer.step(0, |_| Ok(w.sum(Kind::Double))).is_err());
    assert_eq!(optimizer.state().tensors.into_iter().collect::<Vec<_>>(), before);
    assert_eq!(optimizer.steps(), 1);
}

#[test]
fn parameters_without_a_gradient_stay() {
    let (w, idle) = (normal(&[3], 1).set_requires_grad(true), normal(&[2], 2).set_requires_grad(true));
    let config = OptimizerConfig { weight_decay: 0.5, ..OptimizerConfig::default() };
    let parameters = vec![("w".into(), w.shallow_clone()), ("idle".into(), idle.shallow_clone())];
    let mut optimizer = AdamW::new(config, parameters).unwrap();
    optimizer.step(1, |_| Ok(w.square().sum(Kind::Double))).unwrap();
    assert_eq!(idle, normal(&[2], 2));
    let frozen = normal(&[2], 2);
    let refused = AdamW::new(OptimizerConfig::default(), vec![("frozen".into(), frozen)]).unwrap_err().to_string();
    assert!(refused.contains("`frozen`"), "{refused}");
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let make = |name: &str, n: i64| {
        let w = no_grad(|| normal(&[n], 3)).set_requires_grad(true);
        AdamW::new(OptimizerConfig::default(), vec![(name.into(), w)]).unwrap()
    };
    let mut mine = make("w", 3);
    let path = std::path::Path::new("x.safetensors");
    let refused = |mine: &mut AdamW, state| mine.restore(&state, path).unwrap_err().to_string();
    assert!(refused(&mut mine, make("v", 3).state()).contains("Missing: mean.w"));
    assert!(refused(&mut mine, make("w", 4).state()).contains("[4]"));
    let mut state = make("w", 3).state();
    state.tensors.insert("mean.w".into(), Tensor::zeros([3], (Kind::Float, CPU)));
    assert!(refused(&mut mine, state).contains("Float"));
    let mut state = make("w", 3).state();
    state.meta.clear();
    assert!(refused(&mut mine, state).contains("number of steps"));
    assert_eq!(mine.parameters().tensors()[0], normal(&[3], 3));
}
