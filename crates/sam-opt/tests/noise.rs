//! Rows of the table of known pitfalls that concern libtorch's one global random stream: one test, alone in its
//! process, because every step of any optimizer in another thread would reseed that stream.
#![allow(missing_docs)]

mod common;
use common::{group, leaf, quadratic, values};
use sam_opt::tensor::tch::{self, Device, Kind, Tensor};
use sam_opt::{DaSam, DaSamConfig, DomainId, DomainLosses, PassKind, Sam, SamConfig, Sgd};

#[test]
fn noise_is_shared_within_a_step_and_fresh_between_steps() {
    dropout_is_the_same_in_all_passes_of_a_step();
    the_stream_after_a_step_does_not_depend_on_its_probe_passes();
    da_sams_directions_leave_the_stream_alone();
    noise_differs_from_step_to_step_and_from_micro_batch_to_micro_batch();
}

fn dropout_step(sync_rng: bool, scope_probes: bool) -> (Vec<Vec<f64>>, f64) {
    let w = leaf(&[1.0; 64], Kind::Float);
    let config = SamConfig { sync_rng, check_batch: scope_probes, ..SamConfig::sam(0.05) };
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
    let mut masks = Vec::new();
    tch::manual_seed(1);
    sam.step(|_| {
        let mask = Tensor::ones([64], (Kind::Float, Device::Cpu)).dropout(0.5, true);
        masks.push(values(&mask));
        Ok((w.square() * mask).sum(Kind::Float))
    })
    .unwrap();
    (masks, Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]))
}

fn dropout_is_the_same_in_all_passes_of_a_step() {
    let (masks, _) = dropout_step(true, false);
    assert_eq!(masks[0], masks[1]);
    let (masks, _) = dropout_step(false, false);
    assert_ne!(masks[0], masks[1], "without sync_rng the stream runs on");
}

fn the_stream_after_a_step_does_not_depend_on_its_probe_passes() {
    let ((two, after_two), (three, after_three)) = (dropout_step(true, false), dropout_step(true, true));
    assert_eq!((two.len(), three.len()), (2, 3));
    assert_eq!(after_two, after_three);
}

fn da_sams_directions_leave_the_stream_alone() {
    let step = |config: DaSamConfig| {
        let w = leaf(&[1.0; 64], Kind::Float);
        let mut optimizer = DaSam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
        let mut masks = Vec::new();
        tch::manual_seed(1);
        optimizer
            .step(|_| {
                let mask = Tensor::ones([64], (Kind::Float, Device::Cpu)).dropout(0.5, true);
                masks.push(values(&mask));
                Ok(DomainLosses::PerDomain(vec![(DomainId(0), (w.square() * mask).sum(Kind::Float))]))
            })
            .unwrap();
        (masks, Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]))
    };
    let ((plain, after_plain), (probed, after_probed)) =
        (step(DaSamConfig::das_only(0.1)), step(DaSamConfig::da_sam(0.1)));
    assert_eq!((plain.len(), probed.len(), after_plain), (2, 6, after_probed));
    assert!(probed.iter().all(|mask| *mask == plain[0]), "every pass of a step has the same noise");
    // Without `sync_rng` the stream runs on with the closure's own draws alone.
    let (masks, after) = step(DaSamConfig { sync_rng: false, ..DaSamConfig::da_sam(0.1) });
    tch::manual_seed(1);
    for mask in masks {
        assert_eq!(mask, values(&Tensor::ones([64], (Kind::Float, Device::Cpu)).dropout(0.5, true)));
    }
    assert_eq!(after, Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]));
}

fn noise_differs_from_step_to_step_and_from_micro_batch_to_micro_batch() {
    let w = leaf(&[1.0, 1.0], Kind::Float);
    let mut sam = Sam::new(vec![group(&[("w", &w)])], Sgd::new(0.1), SamConfig::sam(0.05)).unwrap();
    let mut seeds = Vec::new();
    for _ in 0..3 {
        sam.step_accumulate(2, |pass| {
            let drawn = Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]);
            seeds.push((pass.seed, pass.kind == PassKind::Main, drawn.to_bits()));
            Ok(quadratic(&w))
        })
        .unwrap();
    }
    let main: Vec<_> = seeds.iter().filter(|s| s.1).map(|s| (s.0, s.2)).collect();
    let perturbed: Vec<_> = seeds.iter().filter(|s| !s.1).map(|s| (s.0, s.2)).collect();
    assert_eq!(main, perturbed);
    let distinct: std::collections::HashSet<_> = main.iter().collect();
    assert_eq!(distinct.len(), 6);
}
