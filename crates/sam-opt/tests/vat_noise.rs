//! Virtual adversarial training and dropout: one test, alone in its process, because it looks at libtorch's one global
//! random stream.
#![allow(missing_docs)]

mod common;
use common::leaf;
use sam_opt::baselines::{VatConfig, vat_penalty};
use sam_opt::tensor::tch::{self, Device, Kind, Tensor};

#[test]
fn vats_passes_share_their_dropout() {
    let w = leaf(&[0.5; 64], Kind::Float);
    let x = Tensor::ones([4, 64], (Kind::Float, Device::Cpu));
    let run = |sync_rng: bool, step: u64, epsilon: f64| {
        tch::manual_seed(1);
        let mut masks = Vec::new();
        let logits = |x: &Tensor| {
            let mask = x.ones_like().detach().dropout(0.5, true);
            masks.push(common::values(&mask));
            let z = (x * mask * &w).sum_dim_intlist([1i64].as_slice(), true, Kind::Float) * 0.1;
            Ok(Tensor::cat(&[z.zeros_like(), z], 1))
        };
        let config = VatConfig { epsilon, sync_rng, ..VatConfig::default() };
        let penalty = vat_penalty(&x, logits, &config, step).unwrap().double_value(&[]);
        (penalty, masks, Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]))
    };
    // Without a radius the outputs are the same: what is left is dropout noise.
    let (shared, masks, after) = run(true, 0, 0.0);
    assert!(shared.abs() < 1e-7 && masks[0] == masks[1] && masks[1] == masks[2], "{shared}");
    let (noise, ..) = run(false, 0, 0.0);
    assert!(noise > 1e-4, "{noise}");
    assert!(run(true, 0, 1.0).0 > 1e-3);
    // Another step has other noise, and the stream goes on elsewhere.
    let (_, next, later) = run(true, 1, 0.0);
    assert!(next[0] != masks[0] && later != after);
}
