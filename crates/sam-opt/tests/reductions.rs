//! "Reduces to X when ...": bit-exact where the specification says so.
#![allow(missing_docs)]

mod common;
use common::{batch, bits, close, values};
use sam_opt::tensor::nn::{Mlp, MlpConfig};
use sam_opt::tensor::tch::{self, Device, Tensor, nn::ModuleT, nn::VarStore};
use sam_opt::tensor::{ParamSet, Seed};
use sam_opt::{
    Adam, AsamConfig, AsamScope, Gsam, GsamConfig, ParamGroup, Pass, PerturbScope, Result, Sagm, SagmConfig, Sam,
    SamConfig, SamStats, Sgd,
};

struct Model {
    store: VarStore,
    net: Mlp,
}

impl Model {
    fn new() -> Self {
        let store = VarStore::new(Device::Cpu);
        let net = Mlp::new(&store.root(), &MlpConfig::relu(&[4, 16, 3]), Seed::new(5)).unwrap();
        Self { store, net }
    }

    fn groups(&self) -> Vec<ParamGroup> {
        vec![ParamGroup::from_var_store(&self.store)]
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Tensor {
        self.net.forward_t(x, true).cross_entropy_for_logits(y)
    }

    fn closure(&self) -> impl FnMut(&Pass<'_>) -> Result<Tensor> + '_ {
        |pass| {
            let (x, y) = batch(32, pass.step);
            Ok(self.loss(&x, &y))
        }
    }

    fn bits(&self) -> Vec<Vec<u64>> {
        bits(ParamSet::from_var_store(&self.store).unwrap().tensors())
    }
}

/// Five steps; the parameters' bits and the last statistics.
fn five(step: impl Fn(&Model) -> Box<dyn FnMut() -> SamStats + '_>) -> Vec<Vec<u64>> {
    tch::set_num_threads(1);
    let model = Model::new();
    {
        let mut one = step(&model);
        for _ in 0..5 {
            one();
        }
    }
    model.bits()
}

fn sam(config: &SamConfig) -> Vec<Vec<u64>> {
    five(|m| {
        let mut sam = Sam::new(m.groups(), Adam::new(1e-2), config.clone()).unwrap();
        Box::new(move || sam.step(m.closure()).unwrap())
    })
}

fn base_only() -> Vec<Vec<u64>> {
    tch::set_num_threads(1);
    let model = Model::new();
    let params = ParamSet::from_var_store(&model.store).unwrap();
    let mut adam = Adam::new(1e-2);
    for step in 0..5 {
        let (x, y) = batch(32, step);
        let gradient = params.gradient(&model.loss(&x, &y)).unwrap();
        sam_opt::base::step_on(&mut adam, &params, &gradient).unwrap();
    }
    model.bits()
}

#[test]
fn rho_zero_is_the_base_optimizer_bit_for_bit() {
    assert_eq!(sam(&SamConfig::sam(0.0)), base_only());
}

#[test]
fn a_positive_rho_is_not_the_base_optimizer() {
    assert_ne!(sam(&SamConfig::sam(0.05)), base_only());
}

#[test]
fn gsam_with_alpha_zero_is_sam_bit_for_bit() {
    let gsam = five(|m| {
        let config = GsamConfig { alpha: 0.0, sam: SamConfig::sam(0.1) };
        let mut gsam = Gsam::new(m.groups(), Adam::new(1e-2), config).unwrap();
        Box::new(move || gsam.step(m.closure()).unwrap())
    });
    assert_eq!(gsam, sam(&SamConfig::sam(0.1)));
}

#[test]
fn asam_with_unit_scaling_is_sam_bit_for_bit() {
    // Weights of ±1 and η = 0: T = 1 everywhere, through all of ASAM's arithmetic.
    let step = |adaptive| {
        let w = common::leaf(&[1.0, -1.0, 1.0, -1.0], tch::Kind::Float);
        let config = SamConfig { adaptive, ..SamConfig::sam(0.1) };
        let mut sam = Sam::new(vec![common::group(&[("w", &w)])], Sgd::new(0.1), config).unwrap();
        sam.step(|_| Ok((w.exp() * Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0])).sum(tch::Kind::Float))).unwrap();
        bits(&[w])
    };
    assert_eq!(step(Some(AsamConfig { eta: 0.0, scope: AsamScope::All })), step(None));
    assert_ne!(step(Some(AsamConfig { eta: 0.5, scope: AsamScope::All })), step(None));
}

#[test]
fn a_group_can_opt_out_of_asam() {
    let config = SamConfig { adaptive: Some(AsamConfig::default()), ..SamConfig::sam(0.1) };
    let off = five(|m| {
        let mut groups = m.groups();
        groups[0].adaptive = Some(false);
        let mut sam = Sam::new(groups, Adam::new(1e-2), config.clone()).unwrap();
        Box::new(move || sam.step(m.closure()).unwrap())
    });
    assert_eq!(off, sam(&SamConfig::sam(0.1)));
    assert_ne!(sam(&config), sam(&SamConfig::sam(0.1)));
}

#[test]
fn sagm_with_alpha_zero_steps_with_the_mean_of_g_and_g_p() {
    let model = Model::new();
    let (x, y) = batch(32, 0);
    let params = ParamSet::from_var_store(&model.store).unwrap();
    let g = params.gradient(&model.loss(&x, &y)).unwrap();
    let factor = 0.1 / (g.norm() + 1e-12);
    let perturbed = {
        let _guard = params.perturb(&vec![factor; params.len()], &g, None).unwrap();
        params.gradient(&model.loss(&x, &y)).unwrap()
    };
    let expected: Vec<f64> =
        g.present().iter().zip(perturbed.present()).flat_map(|(a, b)| values(&((*a + b) * 0.5))).collect();
    let before: Vec<f64> = params.tensors().iter().flat_map(values).collect();
    let config = SagmConfig { alpha: 0.0, sam: SamConfig::sam(0.1) };
    let mut sagm = Sagm::new(model.groups(), Sgd::new(1.0), config).unwrap();
    sagm.step(model.closure()).unwrap();
    let update: Vec<f64> =
        params.tensors().iter().flat_map(values).zip(&before).map(|(after, before)| before - after).collect();
    close(&update, &expected, 1e-6);
}

#[test]
fn interval_one_perturbs_every_step_and_interval_three_every_third() {
    let flags = |interval| {
        let model = Model::new();
        let config = SamConfig { interval, ..SamConfig::sam(0.1) };
        let mut sam = Sam::new(model.groups(), Sgd::new(0.1), config).unwrap();
        (0..6).map(|_| sam.step(model.closure()).unwrap()).map(|s| (s.perturbed, s.passes)).collect::<Vec<_>>()
    };
    assert_eq!(flags(1), vec![(true, 2); 6]);
    assert_eq!(flags(3), [(true, 2), (false, 1), (false, 1), (true, 2), (false, 1), (false, 1)]);
}

/// One step over `n` micro-batches that together are one batch of 32.
fn accumulated(n: usize, scope: PerturbScope) -> Vec<f64> {
    tch::set_num_threads(1);
    let model = Model::new();
    let config = SamConfig { scope, ..SamConfig::sam(0.5) };
    let mut sam = Sam::new(model.groups(), Sgd::new(0.5), config).unwrap();
    let (x, y) = batch(32, 0);
    let size = 32 / n as i64;
    sam.step_accumulate(n, |pass| {
        let from = pass.micro as i64 * size;
        Ok(model.loss(&x.narrow(0, from, size), &y.narrow(0, from, size)))
    })
    .unwrap();
    ParamSet::from_var_store(&model.store).unwrap().tensors().iter().flat_map(values).collect()
}

#[test]
fn global_micro_batches_equal_one_big_batch() {
    close(&accumulated(4, PerturbScope::Global), &accumulated(1, PerturbScope::Global), 1e-6);
}

#[test]
fn one_micro_batch_of_its_own_equals_the_global_scope_bit_for_bit() {
    assert_eq!(accumulated(1, PerturbScope::PerMicroBatch), accumulated(1, PerturbScope::Global));
}

#[test]
fn m_sharpness_is_the_mean_of_the_micro_batches_own_sam_gradients() {
    tch::set_num_threads(1);
    let start: Vec<f64> =
        ParamSet::from_var_store(&Model::new().store).unwrap().tensors().iter().flat_map(values).collect();
    let single = |i: i64| {
        let model = Model::new();
        let mut sam = Sam::new(model.groups(), Sgd::new(0.5), SamConfig::sam(0.5)).unwrap();
        let (x, y) = batch(32, 0);
        sam.step(|_| Ok(model.loss(&x.narrow(0, 8 * i, 8), &y.narrow(0, 8 * i, 8)))).unwrap();
        ParamSet::from_var_store(&model.store).unwrap().tensors().iter().flat_map(values).collect::<Vec<f64>>()
    };
    let runs: Vec<Vec<f64>> = (0..4).map(single).collect();
    let mean: Vec<f64> = (0..start.len()).map(|k| runs.iter().map(|r| r[k]).sum::<f64>() / 4.0).collect();
    close(&accumulated(4, PerturbScope::PerMicroBatch), &mean, 1e-6);
    let global = accumulated(4, PerturbScope::Global);
    assert!(global.iter().zip(&mean).any(|(a, b)| (a - b).abs() > 1e-4), "the two scopes should differ here");
}

#[test]
fn asam_scope_all_differs_from_weights_by_the_biases() {
    let with = |scope| sam(&SamConfig { adaptive: Some(AsamConfig { eta: 0.01, scope }), ..SamConfig::sam(0.5) });
    assert_ne!(with(AsamScope::All), with(AsamScope::Weights));
}
