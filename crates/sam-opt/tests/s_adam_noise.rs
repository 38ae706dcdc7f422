//! S-Adam and libtorch's one global random stream: one test, alone in its process.
#![allow(missing_docs)]

mod common;
use common::{group, leaf, values};
use sam_opt::s_adam::LgiKind;
use sam_opt::tensor::tch::{self, Device, Kind, Tensor};
use sam_opt::{SAdam, SAdamConfig};

#[test]
fn probes_share_the_noise_of_their_step_and_leave_the_stream_alone() {
    the_mask_of_dropout_is_the_same_in_all_passes();
    what_follows_a_step_does_not_depend_on_its_probes();
    the_same_seed_gives_the_same_lgi();
    a_diagnosis_doesnt_put_the_stream_to_one_place();
}

fn dropped_out(x: &Tensor) -> Tensor {
    x.dropout(0.5, true)
}

fn the_mask_of_dropout_is_the_same_in_all_passes() {
    for (sync_rng, same) in [(true, true), (false, false)] {
        let w = leaf(&[1.0; 64], Kind::Float);
        let config = SAdamConfig { sync_rng, ..SAdamConfig::default() };
        let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
        let ones = Tensor::ones([64], (Kind::Float, Device::Cpu));
        // The loss doesn't depend on where the probes are, only on the mask.
        let stats = optimizer.step(|_| Ok(dropped_out(&ones).sum(Kind::Float) + w.sum(Kind::Float) * 0.0)).unwrap();
        assert_eq!(stats.probe_values == [0.0, 0.0], same, "{:?}", stats.probe_values);
    }
}

fn what_follows_a_step_does_not_depend_on_its_probes() {
    let after = |lgi, lambda| {
        let w = leaf(&[1.0; 64], Kind::Float);
        let config = SAdamConfig { lgi, lambda, ..SAdamConfig::default() };
        let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
        tch::manual_seed(3);
        optimizer.step(|_| Ok(dropped_out(&w.square()).sum(Kind::Float))).unwrap();
        Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0])
    };
    let plain = after(LgiKind::Published, 0.0);
    for lgi in [LgiKind::Published, LgiKind::Kink, LgiKind::RandomNull] {
        assert_eq!(after(lgi, 2.0), plain);
    }
    // And the probes' own noise takes nothing from the stream.
    let w = leaf(&[1.0; 64], Kind::Float);
    let config = SAdamConfig { sync_rng: false, ..SAdamConfig::default() };
    let mut optimizer = SAdam::new(vec![group(&[("w", &w)])], config).unwrap();
    let draw = || Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]);
    tch::manual_seed(3);
    let untouched = draw();
    tch::manual_seed(3);
    optimizer.step(|_| Ok(w.square().sum(Kind::Float))).unwrap();
    assert_eq!(draw(), untouched);
}

fn the_same_seed_gives_the_same_lgi() {
    let run = |seed| {
        let w = leaf(&[1.0; 64], Kind::Float);
        let mut optimizer =
            SAdam::new(vec![group(&[("w", &w)])], SAdamConfig { seed, ..SAdamConfig::default() }).unwrap();
        let lgi: Vec<_> = (0..3)
            .map(|_| optimizer.step(|_| Ok(dropped_out(&w.sin()).sum(Kind::Float))).unwrap().lgi.unwrap())
            .collect();
        (lgi, values(&w))
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
    let lgi = run(1).0;
    assert_ne!(lgi[0], lgi[1], "each step draws its own directions");
}

fn a_diagnosis_doesnt_put_the_stream_to_one_place() {
    let w = leaf(&[1.0; 8], Kind::Float);
    let set = sam_opt::tensor::ParamSet::new([("w".to_owned(), w.shallow_clone())]).unwrap();
    let after = |seed: i64| {
        tch::manual_seed(seed);
        let opts = sam_opt::s_adam::ProbeOpts::default();
        sam_opt::s_adam::probe_lgi(&set, |_| Ok(w.square().sum(Kind::Float)), &opts).unwrap();
        Tensor::rand([1], (Kind::Double, tch::Device::Cpu)).double_value(&[0])
    };
    assert_eq!(after(1), after(1));
    assert_ne!(after(1), after(2));
}
