//! Saving, loading, and what errors leave behind.
#![allow(missing_docs)]

mod common;
use common::{batch, bits, group, leaf, quadratic, values};
use sam_opt::tensor::checkpoint::NameMap;
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{Device, Kind, Tensor, nn::VarStore};
use sam_opt::tensor::{Seed, StateDict};
use sam_opt::{
    Adam, Error, Gsam, GsamConfig, ParamGroup, Pass, PassKind, PerturbScope, Result, Rule, Sagm, SagmConfig, Sam,
    SamConfig, Sgd, TwoPass, buffers,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn model() -> (VarStore, Mlp) {
    let store = VarStore::new(Device::Cpu);
    let config = MlpConfig { batch_norm: true, ..MlpConfig::relu(&[4, 16, 3]) };
    let net = Mlp::new(&store.root(), &config, Seed::new(5)).unwrap();
    (store, net)
}

fn everything(store: &VarStore) -> Vec<Vec<u64>> {
    let ordered: std::collections::BTreeMap<_, _> = store.variables().into_iter().collect();
    bits(&ordered.into_values().collect::<Vec<_>>())
}

/// A training run of one method: its model and its optimizer.
struct Run<R: Rule> {
    store: VarStore,
    net: Mlp,
    optimizer: TwoPass<Adam, R>,
}

impl<R: Rule> Run<R> {
    fn new(config: R::Config) -> Self {
        let (store, net) = model();
        let optimizer = TwoPass::new(vec![ParamGroup::from_var_store(&store)], Adam::new(0.01), config)
            .unwrap()
            .with_buffers(buffers(&store));
        Self { store, net, optimizer }
    }

    fn steps(&mut self, n: usize) {
        for _ in 0..n {
            let net = &self.net;
            self.optimizer
                .step(|pass| {
                    let (x, y) = batch(16, pass.step);
                    Ok(net.forward_with(&x, pass.batch_statistics(), true).cross_entropy_for_logits(&y))
                })
                .unwrap();
        }
    }

    /// Ten more steps after saving to a file and loading into a fresh run equal ten more steps without.
    fn resumes(config: R::Config) {
        sam_opt::tensor::tch::set_num_threads(1);
        let folder = tempfile::tempdir().unwrap();
        let (weights, state) = (folder.path().join("w.safetensors"), folder.path().join("o.safetensors"));
        let mut whole = Self::new(config.clone());
        whole.steps(7);
        StateDict::of_var_store(&whole.store).save(&weights).unwrap();
        whole.optimizer.state_dict().unwrap().save(&state).unwrap();
        whole.steps(10);

        let mut resumed = Self::new(config);
        let report = StateDict::load(&weights).unwrap().copy_into(&resumed.store, &NameMap::default()).unwrap();
        assert!(report.missing.is_empty() && report.unexpected.is_empty());
        resumed.optimizer.load_state_dict(&StateDict::load(&state).unwrap()).unwrap();
        assert_eq!(resumed.optimizer.step_count(), 7);
        resumed.steps(10);
        assert_eq!(everything(&resumed.store), everything(&whole.store));
    }
}

#[test]
fn a_resumed_run_does_the_identical_next_ten_steps() {
    let sam = SamConfig { interval: 2, seed: 3, ..SamConfig::asam(0.5) };
    Run::<sam_opt::SamRule>::resumes(sam.clone());
    Run::<sam_opt::GsamRule>::resumes(GsamConfig { alpha: 0.3, sam: sam.clone() });
    Run::<sam_opt::SagmRule>::resumes(SagmConfig { alpha: 0.01, sam });
}

#[test]
fn saved_states_hold_no_copies_of_parameters() {
    let w = leaf(&[1.0, 2.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    sam.step(|_| Ok(quadratic(&w))).unwrap();
    assert!(sam.state_dict().unwrap().tensors.is_empty(), "plain SGD has no state");
}

#[test]
fn states_that_do_not_fit_are_refused_and_change_nothing() {
    let w = leaf(&[1.0, 2.0], Kind::Float);
    let make = |name: &str, config: SamConfig| {
        Sam::new(vec![group(&[(name, &w)])], Sgd::with_momentum(0.1, 0.9), config).unwrap()
    };
    let mut saved = make("w", SamConfig::sam(0.1));
    saved.step(|_| Ok(quadratic(&w))).unwrap();
    let state = saved.state_dict().unwrap();
    let refused = |result: Result<()>, word: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(word), "{message} doesn't say {word}");
    };
    let mut other = make("w", SamConfig::sam(0.2));
    refused(other.load_state_dict(&state), "\"rho\":0.1");
    assert_eq!(other.step_count(), 0);
    refused(make("v", SamConfig::sam(0.1)).load_state_dict(&state), "\"w\"");
    let mut adam = Sam::new(vec![group(&[("w", &w)])], Adam::new(0.1), SamConfig::sam(0.1)).unwrap();
    refused(adam.load_state_dict(&state), "Adam");
    let settings = Sgd::with_momentum(0.1, 0.5);
    let mut sgd = Sam::new(vec![group(&[("w", &w)])], settings, SamConfig::sam(0.1)).unwrap();
    refused(sgd.load_state_dict(&state), "\"momentum\":0.9");
    let mut gsam = Gsam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), GsamConfig::default()).unwrap();
    refused(gsam.load_state_dict(&state), "Gsam");
    let longer = leaf(&[1.0, 2.0, 3.0], Kind::Float);
    let mut shape =
        Sam::new(vec![group(&[("w", &longer)])], Sgd::with_momentum(0.1, 0.9), SamConfig::sam(0.1)).unwrap();
    refused(shape.load_state_dict(&state), "[3]");
    refused(make("w", SamConfig::sam(0.1)).load_state_dict(&StateDict::default()), "nothing");
}

/// What a closure may do in the pass where it fails.
fn fail(kind: usize, loss: Tensor) -> Result<Tensor> {
    match kind {
        0 => Err(Error::closure("the reader is closed")),
        1 => Ok(loss * f64::NAN),
        2 => Ok(loss * f64::INFINITY),
        3 => Ok(loss.detach()),
        _ => panic!("the closure panics"),
    }
}

#[test]
fn after_a_failure_in_any_pass_everything_is_as_before_the_step() {
    for scope in [PerturbScope::Global, PerturbScope::PerMicroBatch] {
        let mut run = Run::<sam_opt::SamRule>::new(SamConfig { scope, ..SamConfig::sam(0.5) });
        let mut clean = Run::<sam_opt::SamRule>::new(SamConfig { scope, ..SamConfig::sam(0.5) });
        sam_opt::tensor::tch::set_num_threads(1);
        run.steps(2);
        for failing in
            [(PassKind::Main, 0), (PassKind::Main, 1), (PassKind::Perturbed(0), 0), (PassKind::Perturbed(0), 1)]
        {
            for kind in 0..5 {
                let before = everything(&run.store);
                let state = run.optimizer.state_dict().unwrap();
                let net = &run.net;
                let optimizer = &mut run.optimizer;
                let result = catch_unwind(AssertUnwindSafe(|| {
                    optimizer.step_accumulate(2, |pass: &Pass<'_>| {
                        let (x, y) = batch(16, pass.step);
                        let loss = net.forward_with(&x, true, true).cross_entropy_for_logits(&y);
                        if (pass.kind, pass.micro) == failing { fail(kind, loss) } else { Ok(loss) }
                    })
                }));
                assert!(!matches!(result, Ok(Ok(_))), "{failing:?} {kind}: the step should have failed");
                assert_eq!(everything(&run.store), before, "{failing:?} {kind} {scope:?}");
                assert!(!run.optimizer.is_perturbed());
                let after = run.optimizer.state_dict().unwrap();
                assert_eq!(after.meta, state.meta);
                assert_eq!(after.tensors, state.tensors);
            }
        }
        // The failures left no trace in what follows either.
        run.steps(3);
        clean.steps(5);
        assert_eq!(everything(&run.store), everything(&clean.store));
    }
}

#[test]
fn messages_of_failures_name_the_pass_and_the_way_out() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    let message = sam.step(|_| Ok(quadratic(&w) * f64::NAN)).unwrap_err().to_string();
    assert!(message.contains("main") && message.contains("NaN") && message.contains("step_scaled"), "{message}");
    let error = sam
        .step(|pass| if pass.kind == PassKind::Main { Ok(quadratic(&w)) } else { Err(Error::closure("disk full")) })
        .unwrap_err();
    assert_eq!(error.to_string(), "The closure failed: disk full");
    // An infinite gradient of a finite loss.
    let zero = leaf(&[0.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("zero", &zero)])], Sgd::new(0.1), SamConfig::sam(0.1)).unwrap();
    let error = sam.step(|_| Ok(zero.sqrt().sum(Kind::Float))).unwrap_err();
    assert!(matches!(error, Error::NonFinite { what: "gradient norm", .. }), "{error}");
    assert_eq!(values(&zero), [0.0]);
}

#[test]
fn bad_groups_are_refused_by_name() {
    let (a, b) = (leaf(&[1.0], Kind::Float), leaf(&[1.0, 2.0], Kind::Float));
    let new = |groups| Sam::new(groups, Sgd::new(0.1), SamConfig::sam(0.1));
    assert!(matches!(new(vec![]), Err(Error::EmptyGroup { group: 0 })));
    assert!(matches!(new(vec![group(&[("a", &a)]), group(&[])]), Err(Error::EmptyGroup { group: 1 })));
    let error = new(vec![group(&[("a", &a)]), group(&[("again", &a)])]).unwrap_err();
    assert!(matches!(&error, Error::DuplicateParam { name, other } if name == "again" && other == "a"), "{error}");
    let error = new(vec![group(&[("a", &a), ("a", &b)])]).unwrap_err();
    assert!(matches!(&error, Error::DuplicateParam { name, .. } if name == "a"), "{error}");
    let view = b.detach().narrow(0, 1, 1).set_requires_grad(true);
    let error = new(vec![group(&[("b", &b), ("part", &view)])]).unwrap_err();
    assert!(error.to_string().contains("share memory"), "{error}");
    let mut negative = group(&[("a", &a)]);
    negative.rho = Some(-1.0);
    assert!(matches!(new(vec![negative]), Err(Error::InvalidRho { rho: -1.0, .. })));
    let mut decay = group(&[("a", &a)]);
    decay.weight_decay = Some(f64::NAN);
    assert!(new(vec![decay]).unwrap_err().to_string().contains("weight_decay"));
    assert!(matches!(
        Sagm::new(vec![group(&[("a", &a)])], Sgd::new(-0.1), SagmConfig::default()),
        Err(Error::InvalidConfig { .. })
    ));
}
