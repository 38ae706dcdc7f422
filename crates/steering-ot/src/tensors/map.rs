//! A CHaRS map as tensors.

use crate::chars::CharsMap;
use crate::chars::GateWidth;
use crate::kernel::LEAST_WIDTH;
use crate::{Error, Result};
use ndarray::Axis;
use tensor::interop;
use tensor::tch::{Device, Kind, Tensor};

/// A CHaRS map as tensors: for activations on another device, and where gradients must flow through the map.
///
/// It computes v̂(x) = Σ_i g_i(x) m_i in the factored form with libtorch's operators. The gate of the per-input median is
/// differentiated with the median's own slope, as the function is: it has kinks where another centroid becomes the median.
#[derive(Debug)]
pub struct TorchMap {
    /// Grand mean of the source centroids, `[width]`: subtracted first, so that large common parts don't cancel.
    center: Tensor,
    /// Source centroids less their grand mean, `[k, width]`.
    centroids: Tensor,
    /// ln r_i, `[k]`.
    log_masses: Tensor,
    /// m_i, `[k, width]`.
    shifts: Tensor,
    width: GateWidth,
}

impl TorchMap {
    /// The map's tensors of this kind (f32 or f64) on this device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another kind, or a map with a quantile gate, which has no gradient; what libtorch reports.
    pub fn new(map: &CharsMap, kind: Kind, device: Device) -> Result<Self> {
        if !matches!(kind, Kind::Float | Kind::Double) {
            return Err(Error::invalid("kind", "Float or Double", format!("{kind:?}")));
        }
        if map.config().quantile_gate.is_some() {
            return Err(Error::invalid("quantile_gate", "none for a map of tensors", "set"));
        }
        // Clusters without mass have gate 0; without them ln r_i is finite.
        let active: Vec<usize> = (0..map.p().len()).filter(|&i| map.p()[i] > 0.0).collect();
        let centroids = map.source_centroids().select(Axis(0), &active);
        let center = centroids.mean_axis(Axis(0)).ok_or(Error::EmptySet { side: "source centroid" })?;
        let tensor = |array: ndarray::ArrayViewD<'_, f64>| -> Result<Tensor> {
            Ok(interop::to_tensor(&array)?.f_to_kind(kind)?.f_to_device(device)?)
        };
        let centered = centroids - &center;
        let log_masses = map.p().select(Axis(0), &active).mapv(f64::ln);
        Ok(Self {
            center: tensor(center.view().into_dyn())?,
            centroids: tensor(centered.view().into_dyn())?,
            log_masses: tensor(log_masses.view().into_dyn())?,
            shifts: tensor(map.shifts().select(Axis(0), &active).view().into_dyn())?,
            width: map.gate_width(),
        })
    }

    /// Weights of the source clusters `[…, k]` for `x` `[…, width]`, with gradient.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a kind other than the map's; what libtorch reports.
    pub fn gates(&self, x: &Tensor) -> Result<Tensor> {
        if x.kind() != self.center.kind() {
            let expected = format!("of {:?}, as the map is", self.center.kind());
            return Err(Error::invalid("x", expected, format!("{:?}", x.kind())));
        }
        let expected = self.center.size()[0] as usize;
        if x.size().last().copied() != Some(expected as i64) {
            let got = x.size().last().map_or(0, |&width| width as usize);
            return Err(Error::dim("The last dimension of the activations", expected, got));
        }
        let x = x.f_sub(&self.center)?;
        // d² = ‖x‖² − 2⟨x, a⟩ + ‖a‖², after the common part is gone.
        let squares = |t: &Tensor, kind| t.f_mul(t)?.f_sum_dim_intlist([-1i64].as_slice(), true, kind);
        let products = x.f_matmul(&self.centroids.f_transpose(0, 1)?)?; // (…, k)
        let norms = squares(&self.centroids, x.kind())?.f_squeeze_dim(-1)?; // (k)
        let distances = squares(&x, x.kind())?.f_sub(&products.f_mul_scalar(2.0)?)?.f_add(&norms)?.f_clamp_min(0.0)?; // (…, k)
        let scale = match self.width {
            GateWidth::Median(bandwidth) => {
                // Lower median, guarded as in the kernel on slices.
                let k = distances.size().last().copied().unwrap_or(1);
                let median = distances.f_kthvalue((k + 1) / 2, -1, true)?.0;
                let least = distances.f_amax([-1i64].as_slice(), true)?.f_mul_scalar(LEAST_WIDTH)?;
                median.f_maximum(&least)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?.f_mul_scalar(bandwidth)?
            }
            GateWidth::Fixed(width) => Tensor::f_full([1], width, (x.kind(), x.device()))?,
        };
        let scores = self.log_masses.f_sub(&distances.f_div(&scale)?)?;
        Ok(scores.f_softmax(-1, x.kind())?)
    }

    /// v̂(x) `[…, width]` of `x` `[…, width]`, with gradient.
    ///
    /// # Errors
    /// As [`gates`](Self::gates).
    pub fn shift(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.gates(x)?.f_matmul(&self.shifts)?)
    }
}
