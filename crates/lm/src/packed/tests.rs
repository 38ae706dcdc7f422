use super::kernel::{self, BLOCK, Format, Matrix, Path};
use super::*;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use proptest::prelude::*;
use rand::SeedableRng as _;
use std::borrow::Cow;
use tensor::Seed;

const FORMATS: [(Format, GgmlType, GgmlDType); 5] = [
    (Format::Q4_0, GgmlType::Q4_0, GgmlDType::Q4_0),
    (Format::Q4_1, GgmlType::Q4_1, GgmlDType::Q4_1),
    (Format::Q5_0, GgmlType::Q5_0, GgmlDType::Q5_0),
    (Format::Q5_1, GgmlType::Q5_1, GgmlDType::Q5_1),
    (Format::Q8_0, GgmlType::Q8_0, GgmlDType::Q8_0),
];

/// Random weights of about unit size, quantized by candle-core.
fn packed(dtype: GgmlDType, out: usize, inner: usize, seed: u64) -> Vec<u8> {
    let weights = Seed::new(seed).normal(out * inner);
    let weights = candle_core::Tensor::from_vec(weights, (out, inner), &candle_core::Device::Cpu).unwrap();
    QTensor::quantize(&weights, dtype).unwrap().data().unwrap().into_owned()
}

fn by_candle(dtype: GgmlDType, out: usize, inner: usize, blocks: &[u8]) -> Vec<f32> {
    let device = candle_core::Device::Cpu;
    // candle-core wants even addresses; vectors of bytes have them in practice.
    let storage = QStorage::from_data(Cow::Borrowed(blocks), &device, dtype).unwrap();
    let tensor = QTensor::new(storage, (out, inner)).unwrap().dequantize(&device).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn normal(shape: &[i64], seed: u64) -> Tensor {
    let n = shape.iter().product::<i64>() as usize;
    Tensor::from_slice(&Seed::new(seed).normal(n)).view(shape)
}

/// `max |a − b| / max |b|`.
fn apart(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    ((a - &b).abs().max() / b.abs().max()).double_value(&[])
}

/// A layer and the same in f64.
fn layer_and_dense(dtype: GgmlDType, ours: GgmlType, out: usize, inner: usize, bias: bool) -> (PackedLinear, Tensor) {
    let blocks = packed(dtype, out, inner, 5);
    let dense = Tensor::from_slice(&by_candle(dtype, out, inner, &blocks)).view([out as i64, inner as i64]);
    let bias = bias.then(|| normal(&[out as i64], 6));
    (PackedLinear::new(ours, out as i64, inner as i64, blocks, bias).unwrap(), dense.to_kind(Kind::Double))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any bytes at all, so scales of both signs, zero, subnormal, infinite and NaN too.
    #[test]
    fn unpacking_is_candles_bit_for_bit_in_both_versions(
        which in 0..FORMATS.len(), blocks in 1usize..9, seed: u64,
    ) {
        let (format, _, dtype) = FORMATS[which];
        let mut bytes = vec![0; blocks * format.bytes()];
        rand::RngCore::fill_bytes(&mut rand::rngs::StdRng::seed_from_u64(seed), &mut bytes);
        let expected = by_candle(dtype, 1, blocks * BLOCK, &bytes);
        for path in [Path::Plain, Path::best()] {
            let mut out = vec![0.0; blocks * BLOCK];
            kernel::unpack(format, &bytes, &mut out, path);
            for (got, expected) in out.iter().zip(&expected) {
                prop_assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{got} {expected}");
            }
        }
    }

    #[test]
    fn the_wide_product_is_the_plain_one(
        which in 0..FORMATS.len(), rows in 1usize..40, blocks in 1usize..7, m in 1usize..20, seed: u64,
    ) {
        let (format, _, dtype) = FORMATS[which];
        let inner = blocks * BLOCK;
        let bytes = packed(dtype, rows, inner, seed);
        let matrix = Matrix { format, inner, blocks: &bytes };
        let x = Seed::new(seed).child("x").normal(m * inner);
        let (mut wide, mut plain) = (vec![f32::NAN; m * rows], vec![f32::NAN; m * rows]);
        kernel::product(matrix, &x, &mut wide, Path::best());
        kernel::product(matrix, &x, &mut plain, Path::Plain);
        // Sums of up to 192 products of size 1 in another order.
        for (wide, plain) in wide.iter().zip(&plain) {
            prop_assert!((wide - plain).abs() < 1e-4, "{wide} {plain}");
        }
    }
}

#[test]
fn the_wide_loops_run_where_the_processor_has_them() {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        assert_ne!(Path::best(), Path::Plain);
        return;
    }
    assert_eq!(Path::best(), Path::Plain);
}

#[test]
fn forward_is_the_dense_layer_for_few_and_many_rows_and_every_format() {
    for (_, ours, dtype) in FORMATS {
        // 400 rows of 512 are more than the serial limit, and 2100 × 512 more than the scratch.
        for (out, inner) in [(48, 64), (400, 512), (2100, 512)] {
            let (layer, dense) = layer_and_dense(dtype, ours, out, inner, true);
            for m in [1, 3, 8, 11, 16, 17, 40] {
                let x = normal(&[m, inner as i64], 7);
                let expected = x.to_kind(Kind::Double).linear(&dense, layer.bias().map(|b| b.to_kind(Kind::Double)));
                let got = layer.forward(&x).unwrap();
                assert_eq!(got.size(), [m, out as i64]);
                assert!(apart(&got, &expected) < 1e-6, "{ours} {out} {m}: {}", apart(&got, &expected));
            }
        }
    }
}

#[test]
fn other_types_go_through_candle() {
    let cases = [
        (GgmlType::Q2_K, GgmlDType::Q2K),
        (GgmlType::Q3_K, GgmlDType::Q3K),
        (GgmlType::Q4_K, GgmlDType::Q4K),
        (GgmlType::Q5_K, GgmlDType::Q5K),
        (GgmlType::Q6_K, GgmlDType::Q6K),
        (GgmlType::Q8_K, GgmlDType::Q8K),
        (GgmlType::Q8_1, GgmlDType::Q8_1),
        (GgmlType::F16, GgmlDType::F16),
        (GgmlType::BF16, GgmlDType::BF16),
        (GgmlType::F32, GgmlDType::F32),
    ];
    for (ours, dtype) in cases {
        let (layer, dense) = layer_and_dense(dtype, ours, 6, 512, false);
        assert_eq!(layer.weight().unwrap().to_kind(Kind::Double), dense, "{ours}");
        for m in [1, 20] {
            let x = normal(&[m, 512], 8);
            assert!(
                apart(&layer.forward(&x).unwrap(), &x.to_kind(Kind::Double).linear(&dense, None::<&Tensor>)) < 1e-6
            );
        }
        let rows = layer.rows(&Tensor::from_slice(&[5i64, 0])).unwrap();
        assert_eq!(rows.to_kind(Kind::Double), dense.index_select(0, &Tensor::from_slice(&[5i64, 0])));
    }
}

#[test]
fn a_row_in_a_batch_is_that_row_alone_up_to_the_order_of_the_sum() {
    let (layer, _) = layer_and_dense(GgmlDType::Q4_1, GgmlType::Q4_1, 300, 576, false);
    let x = normal(&[8, 576], 9);
    let all = layer.forward(&x).unwrap();
    assert_eq!(layer.forward(&x).unwrap(), all, "the same twice, whatever the threads do");
    for r in 0..8 {
        assert!(apart(&layer.forward(&x.narrow(0, r, 1)).unwrap(), &all.narrow(0, r, 1)) < 1e-6);
    }
}

#[test]
fn shapes_and_kinds_of_the_input_are_kept() {
    let (layer, dense) = layer_and_dense(GgmlDType::Q8_0, GgmlType::Q8_0, 5, 64, true);
    for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::Double, 1e-12), (Kind::Half, 1e-3), (Kind::BFloat16, 1e-2)] {
        let x = normal(&[2, 3, 64], 10).to_kind(kind);
        let y = layer.forward(&x).unwrap();
        assert_eq!((y.size(), y.kind()), (vec![2, 3, 5], kind));
        let expected = x.to_kind(Kind::Double).linear(&dense, layer.bias().map(|b| b.to_kind(Kind::Double)));
        assert!(apart(&y, &expected) < tolerance, "{kind:?}");
    }
    assert_eq!(layer.forward(&normal(&[64], 1)).unwrap().size(), [5]);
    assert_eq!(layer.forward(&Tensor::zeros([0, 64], (Kind::Float, Device::Cpu))).unwrap().size(), [0, 5]);
    // A view with other strides: every second row, and a transposed one.
    let x = normal(&[6, 64], 11);
    let strided = x.slice(0, 0, 6, 2);
    assert_eq!(layer.forward(&strided).unwrap(), layer.forward(&strided.contiguous()).unwrap());
    let turned = normal(&[64, 3], 12).tr();
    assert_eq!(layer.forward(&turned).unwrap(), layer.forward(&turned.contiguous()).unwrap());
}

#[test]
fn rows_are_those_of_the_weight_in_any_shape() {
    let (layer, _) = layer_and_dense(GgmlDType::Q8_0, GgmlType::Q8_0, 9, 96, false);
    let ids = Tensor::from_slice(&[8i64, 0, 3, 3, 1, 2]).view([2, 3]);
    let rows = layer.rows(&ids).unwrap();
    assert_eq!(rows, Tensor::embedding(&layer.weight().unwrap(), &ids, -1, false, false));
    assert_eq!(layer.rows(&Tensor::from_slice::<i64>(&[])).unwrap().size(), [0, 96]);
}

#[test]
fn gradients_reach_the_input_and_the_bias() {
    let (layer, dense) = layer_and_dense(GgmlDType::Q4_0, GgmlType::Q4_0, 7, 64, true);
    let bias = layer.bias().unwrap().set_requires_grad(true);
    let layer = PackedLinear { bias: Some(bias.shallow_clone()), ..layer };
    for m in [2, 30] {
        let x = normal(&[m, 64], 13).set_requires_grad(true);
        let g = normal(&[m, 7], 14);
        let y = layer.forward(&x).unwrap();
        let grads = Tensor::run_backward(&[(y * &g).sum(Kind::Float)], &[&x, &bias], false, false);
        assert!(apart(&grads[0], &g.to_kind(Kind::Double).matmul(&dense)) < 1e-6);
        assert!(apart(&grads[1], &g.to_kind(Kind::Double).sum_dim_intlist(0, false, Kind::Double)) < 1e-6);
        // An input that needs no gradient takes the fast path, and the bias still learns.
        let y = layer.forward(&x.detach()).unwrap();
        let grads = Tensor::run_backward(&[(y * &g).sum(Kind::Float)], &[&bias], false, false);
        assert!(apart(&grads[0], &g.to_kind(Kind::Double).sum_dim_intlist(0, false, Kind::Double)) < 1e-6);
        // Without autograd nothing is recorded.
        let _guard = no_grad_guard();
        assert!(!layer.forward(&x).unwrap().requires_grad());
    }
}

#[test]
fn lengths_and_types_that_do_not_fit_are_named() {
    let refuse = |dtype, out, inner, bytes: usize, bias: Option<Tensor>, expected: &str| {
        let message = PackedLinear::new(dtype, out, inner, vec![0; bytes], bias).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    refuse(GgmlType::Q4_1, 2, 64, 79, None, "80 bytes for 2 rows of 64 weights of Q4_1, but it is 79 bytes");
    refuse(GgmlType::Q4_1, 2, 48, 60, None, "a multiple of 32");
    refuse(GgmlType::Q4_1, 0, 64, 0, None, "out must be at least 1");
    refuse(GgmlType::Q4_1, 2, -64, 0, None, "inner must be at least 1");
    refuse(GgmlType::Q4_1, i64::MAX, 1 << 40, 0, None, "more than fit in memory");
    refuse(GgmlType::IQ2_XS, 2, 256, 148, None, "IQ2_XS, which isn't read here");
    refuse(GgmlType::Q8_0, 2, 32, 68, Some(Tensor::zeros([3], (Kind::Float, Device::Cpu))), "[2]");
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let (layer, _) = layer_and_dense(GgmlDType::Q8_0, GgmlType::Q8_0, 5, 64, false);
    let message = |x: &Tensor| layer.forward(x).unwrap_err().to_string();
    assert!(message(&normal(&[2, 32], 1)).contains("[…, 64]"));
    assert!(message(&Tensor::from(1.0f32)).contains("[…, 64]"));
    assert!(message(&Tensor::zeros([64], (Kind::Int64, Device::Cpu))).contains("floating point"));
    let rows = |ids: &Tensor| layer.rows(ids).unwrap_err().to_string();
    assert!(rows(&Tensor::from_slice(&[0i64, 5])).contains("below 5 rows"));
    assert!(rows(&Tensor::from_slice(&[-1i64])).contains("-1"));
    assert!(rows(&Tensor::from_slice(&[0.0f32])).contains("i64"));
}

#[test]
fn the_bytes_are_those_of_the_blocks() {
    let (layer, _) = layer_and_dense(GgmlDType::Q4_1, GgmlType::Q4_1, 8, 64, true);
    assert_eq!(layer.bytes(), 8 * 2 * 20 + 8 * 4);
    assert_eq!(layer.parameters().len(), 1);
}

#[test]
fn the_plain_loop_knows_the_worked_block() {
    // d = 0.5, m = −1: byte i is i + 16·(15 − i).
    let mut block = vec![0x00, 0x38, 0x00, 0xbc];
    block.extend((0u8..16).map(|i| i | (15 - i) << 4));
    let mut out = vec![0.0; BLOCK];
    kernel::unpack(Format::Q4_1, &block, &mut out, Path::Plain);
    let expected: Vec<f32> = (0u8..16).chain((0..16).rev()).map(|q| 0.5 * f32::from(q) - 1.0).collect();
    assert_eq!(bits(&out), bits(&expected));
}
