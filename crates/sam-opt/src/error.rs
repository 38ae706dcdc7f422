//! What can go wrong in a step; every message names the value and the way out.

use crate::domain::DomainId;
use crate::pass::PassKind;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A radius that is negative or not finite.
    #[error("{field} is {rho}, but a radius must be finite and at least 0 (0 turns the perturbation off).")]
    InvalidRho {
        /// Which radius: `rho`, `rho_min`, the radius of a group.
        field: String,
        /// The value.
        rho: f64,
    },
    /// Another field of a configuration is outside its domain.
    #[error("{field} must be {expected}, but it is {got}.")]
    InvalidConfig {
        /// The field.
        field: String,
        /// What would be accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A group without tensors, or no group at all.
    #[error("Parameter group {group} is empty: give it at least one tensor, or leave the group out.")]
    EmptyGroup {
        /// Index of the group.
        group: usize,
    },
    /// One tensor in two places.
    #[error("The parameter \"{name}\" appears twice in the groups (also as \"{other}\"): list it once.")]
    DuplicateParam {
        /// The second entry.
        name: String,
        /// The first entry.
        other: String,
    },
    /// The loss isn't a scalar.
    #[error(
        "The closure returned a loss of shape {got:?} in the {pass} pass: reduce it to a scalar, for example with `mean`."
    )]
    LossShape {
        /// The pass.
        pass: PassKind,
        /// The shape that came.
        got: Vec<i64>,
    },
    /// The inverse temperature of the softmax over losses can't be 0.
    #[error(
        "tau is {tau}, but it must be finite and not 0 (negative gives easy domains more weight; for no difference between domains use `DasRule::Uniform`)."
    )]
    InvalidTau {
        /// The value.
        tau: f64,
    },
    /// No direction to probe.
    #[error(
        "directions is {directions}, but at least 1 is needed (1 is the guided direction alone; `amdf: None` probes nothing)."
    )]
    InvalidDirections {
        /// The value.
        directions: usize,
    },
    /// A batch without any domain.
    #[error(
        "The closure returned losses of no domain in the {pass} pass: give the mean loss of at least one domain, or at least one sample."
    )]
    NoDomain {
        /// The pass.
        pass: PassKind,
    },
    /// A domain without a sample.
    #[error("The domain {id} has no samples: leave it out of the batch, or give it at least one row.")]
    EmptyDomain {
        /// The domain.
        id: DomainId,
    },
    /// A domain that nobody announced.
    #[error("The domain {id} isn't one of those that were announced: check the domains of the batch.")]
    UnknownDomain {
        /// The domain.
        id: DomainId,
    },
    /// A domain twice in one batch.
    #[error("The domain {id} appears twice among the losses: give one mean loss a domain, or per-sample losses.")]
    DuplicateDomain {
        /// The domain.
        id: DomainId,
    },
    /// The loss of a domain isn't a scalar.
    #[error(
        "The loss of the domain {id} has the shape {got:?} in the {pass} pass: reduce it to a scalar, or return `DomainLosses::PerSample`."
    )]
    DomainLossShape {
        /// The domain.
        id: DomainId,
        /// The pass.
        pass: PassKind,
        /// The shape that came.
        got: Vec<i64>,
    },
    /// Per-sample losses that don't fit their domains.
    #[error(
        "The per-sample losses of the {pass} pass have the shape {got:?}, but there are {domains} domains of samples: return one loss a sample, `[{domains}]`."
    )]
    PerSampleShape {
        /// The pass.
        pass: PassKind,
        /// The shape that came.
        got: Vec<i64>,
        /// Number of entries in `domains`.
        domains: usize,
    },
    /// A later pass of a step has other domains than the main pass.
    #[error(
        "The batch had the domains {first} in the main pass and {second} in the {pass} pass: use the same batch in all passes of a step."
    )]
    DomainsChanged {
        /// The later pass.
        pass: PassKind,
        /// Domains of the main pass.
        first: String,
        /// Domains of the later pass.
        second: String,
    },
    /// The loss has no graph.
    #[error(
        "The closure returned a detached loss in the {pass} pass: compute it without `no_grad` and `detach`, in a fresh forward pass."
    )]
    Detached {
        /// The pass.
        pass: PassKind,
    },
    /// The closure handed out the loss of an earlier pass.
    #[error(
        "The closure returned the loss tensor of the main pass again in the {pass} pass: run a fresh forward pass each time it is called."
    )]
    StaleLoss {
        /// The pass.
        pass: PassKind,
    },
    /// The loss depends on no parameter of the groups.
    #[error(
        "The loss of the {pass} pass depends on no trainable parameter of the groups: pass the model's own tensors to the optimizer."
    )]
    NoGradient {
        /// The pass.
        pass: PassKind,
    },
    /// A loss or a gradient norm that isn't finite. Parameters, buffers and optimizer state are unchanged.
    #[error(
        "The {what} of the {pass} pass is {value}. Nothing was changed: lower the learning rate or the radius, or look at the batch. (To skip such steps, as mixed precision does, catch this error and go on; optimizers with a `step_scaled` do that themselves.)"
    )]
    NonFinite {
        /// "loss" or "gradient norm".
        what: &'static str,
        /// The pass.
        pass: PassKind,
        /// Its value.
        value: f64,
    },
    /// A weight of the penalty that is negative or not finite.
    #[error("beta is {beta}, but the weight of the penalty must be finite and at least 0 (0 is the base optimizer).")]
    InvalidBeta {
        /// The value.
        beta: f64,
    },
    /// No inner step at all.
    #[error("inner_steps is 0, but the search for the direction needs at least 1 step (the paper trains with 1).")]
    InvalidInnerSteps,
    /// Nothing to train.
    #[error("No parameter of the groups is trainable: pass tensors that require gradients.")]
    NoParams,
    /// Logits that aren't a table of two or more classes.
    #[error(
        "The closure returned logits of shape {got:?} in the {pass} pass, but [batch, classes] was expected, with at least 2 classes and as many in every pass. A head with a single logit z becomes two columns by `Tensor::cat(&[z.zeros_like(), z], 1)` (with z of shape [batch, 1])."
    )]
    BadLogitsShape {
        /// The pass.
        pass: PassKind,
        /// The shape that came.
        got: Vec<i64>,
    },
    /// A batch without inputs.
    #[error("The closure returned logits of an empty batch in the {pass} pass: skip steps that have no inputs.")]
    EmptyBatch {
        /// The pass.
        pass: PassKind,
    },
    /// Logits of another number of inputs than before.
    #[error(
        "The closure returned logits of {got} inputs in the {pass} pass, but of {first} in the first pass of the step: use the same inputs in every pass of a step."
    )]
    BatchSizeChanged {
        /// The pass.
        pass: PassKind,
        /// Inputs of the first pass.
        first: i64,
        /// Inputs of this pass.
        got: i64,
    },
    /// The logits have no graph.
    #[error(
        "The closure returned detached logits in the {pass} pass: compute them without `no_grad` and `detach`, in a fresh forward pass. (From detached logits half of the penalty's gradient would be lost.)"
    )]
    DetachedLogits {
        /// The pass.
        pass: PassKind,
    },
    /// The closure handed out the logits of an earlier pass.
    #[error(
        "The closure returned the logits of an earlier pass again in the {pass} pass: run a fresh forward pass each time it is called."
    )]
    StaleLogits {
        /// The pass.
        pass: PassKind,
    },
    /// The functional form was asked for, but the model doesn't read its weights through the pass.
    #[error(
        "The logits of the {pass} pass don't depend on the weights that `Pass::param` gives: read every weight through it, or use `form: split`."
    )]
    OverridesIgnored {
        /// The pass.
        pass: PassKind,
    },
    /// The parameters are perturbed already.
    #[error("The parameter \"{name}\" is perturbed already: finish or drop the open guard first.")]
    NestedPerturbation {
        /// The first such parameter.
        name: String,
    },
    /// Half-precision parameters that a perturbation of this size can't move.
    #[error(
        "The perturbation is below the spacing of numbers for {percent:.0} % of the half-precision scalars (parameter \"{name}\" has the kind {kind}): keep f32 parameters and cast in the forward pass, or raise rho."
    )]
    LowPrecisionParams {
        /// The first half-precision parameter.
        name: String,
        /// Its kind.
        kind: String,
        /// Share of scalars that wouldn't move.
        percent: f64,
    },
    /// The closure computed its loss on other data in a later pass of the same step.
    #[error(
        "The closure's loss at the same parameters was {first} and then {second} within one step: use the batch that `Pass::step` and `Pass::micro` name in every pass, and take random numbers from libtorch's generator."
    )]
    BatchChanged {
        /// Loss of the main pass.
        first: f64,
        /// Loss of the check.
        second: f64,
    },
    /// A saved state that doesn't fit.
    #[error("The saved state doesn't fit this optimizer: {reason}")]
    State {
        /// What doesn't fit.
        reason: String,
    },
    /// The loss is neither a scalar nor one loss a sample.
    #[error(
        "The closure returned a loss of shape {got:?} in the {pass} pass: return a scalar, or one loss a sample as a tensor of one axis."
    )]
    NonScalarLoss {
        /// The pass.
        pass: PassKind,
        /// The shape that came.
        got: Vec<i64>,
    },
    /// No random direction to probe.
    #[error("k_directions is {k}, but a probe needs at least 1 direction (2 for the published statistic).")]
    InvalidK {
        /// The value.
        k: usize,
    },
    /// A probe radius that isn't positive.
    #[error("sigma is {sigma}, but the radius of a probe must be finite and above 0.")]
    InvalidSigma {
        /// The value.
        sigma: f64,
    },
    /// A strength of the damping that is negative or not finite.
    #[error("lambda is {lambda}, but the strength of the damping must be finite and at least 0 (0 turns it off).")]
    InvalidLambda {
        /// The value.
        lambda: f64,
    },
    /// Half-precision parameters that a probe of this radius can't move.
    #[error(
        "The probe moves {percent:.0} % of the scalars by less than four spacings of numbers of their kind (parameter \"{name}\" has the kind {kind}): keep f32 parameters and cast in the forward pass, or raise sigma."
    )]
    ProbeBelowPrecision {
        /// The first such parameter.
        name: String,
        /// Its kind.
        kind: String,
        /// Share of scalars.
        percent: f64,
    },
    /// A saved tensor of another shape than the parameter that it belongs to.
    #[error(
        "The saved state doesn't fit this optimizer: \"{name}\" has the shape {got:?}, but the parameter has {expected:?}."
    )]
    StateMismatch {
        /// The saved tensor.
        name: String,
        /// Shape of the parameter.
        expected: Vec<i64>,
        /// Shape in the state.
        got: Vec<i64>,
    },
    /// The base optimizer can't do what was asked.
    #[error("{base} can't {what}: {way_out}")]
    Unsupported {
        /// The base optimizer.
        base: &'static str,
        /// What was asked.
        what: &'static str,
        /// What to do.
        way_out: &'static str,
    },
    /// The closure failed; the parameters are what they were before the step.
    #[error("The closure failed: {0}")]
    Closure(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// An error of the tensor layer.
    #[error(transparent)]
    Tensor(tensor::Error),
    /// libtorch reported an error.
    #[error("libtorch reports: {0}")]
    Torch(#[from] tensor::tch::TchError),
}

impl Error {
    /// Wraps an error of the user's closure.
    pub fn closure(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Closure(error.into())
    }

    #[allow(clippy::needless_pass_by_value)] // a literal or a number at every call
    pub(crate) fn invalid(field: &str, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::InvalidConfig { field: field.into(), expected: expected.into(), got: got.to_string() }
    }
}

impl From<tensor::Error> for Error {
    fn from(error: tensor::Error) -> Self {
        match error {
            tensor::Error::NestedPerturbation { name } => Error::NestedPerturbation { name },
            tensor::Error::DuplicateParam { name, other } => Error::DuplicateParam { name, other },
            other => Error::Tensor(other),
        }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
