//! What a step of S-Adam reports.

/// The LGI of one parameter group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupLgi {
    /// Index of the group.
    pub group: usize,
    /// Its LGI; `None` where nothing was measured.
    pub lgi: Option<f64>,
    /// Its damping.
    pub damping: f64,
}

/// Statistics of one step of [`SAdam`](crate::SAdam).
#[derive(Debug, Clone, PartialEq)]
pub struct SAdamStats {
    /// Number of the step, from 0.
    pub step: u64,
    /// Loss at the parameters; of losses a sample, their mean.
    pub loss: f64,
    /// LGI that set the damping, measured in this step or kept since the last probing one; `None` where none is needed
    /// (λ = 0, cap = 0, the published form with k = 1, constant damping). With an LGI a group, their mean.
    pub lgi: Option<f64>,
    /// Factor on the update. With an LGI a group, the mean over the groups that have one.
    pub damping: f64,
    /// LGI and damping of each group, with [`per_group_lgi`](super::SAdamConfig::per_group_lgi); empty otherwise.
    pub groups: Vec<GroupLgi>,
    /// What the probes saw, in loss per parameter unit: `D_i` of the published form, `r_i` of the residual form,
    /// `K_i` of the kink form; empty in steps without probes.
    pub probe_values: Vec<f64>,
    /// Root mean square of the loss differences of the probes, over the rounding of the loss as it was returned. Below
    /// about 10 the LGI measures rounding: return losses a sample, or raise σ. Rounding inside the forward pass isn't
    /// known and comes on top. NaN in steps without probes.
    pub probe_snr: f64,
    /// Norm of the gradient.
    pub grad_norm: f64,
    /// Forward passes, the main one and the probes.
    pub forwards: usize,
    /// Directions dropped because a loss wasn't finite.
    pub probes_dropped: usize,
    /// Whether the probes move most of the scalars by less than 1e-7 of their tensor's root mean square, which f32
    /// parameters round away.
    pub probe_below_precision: bool,
    /// Learning rate of the step.
    pub lr: f64,
}
