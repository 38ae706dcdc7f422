//! What the closure returned, checked.

use crate::divergence::{kl_value, log_probabilities};
use crate::pass::PassKind;
use crate::{Error, Result};
use tensor::tch::{Kind, Tensor};

/// Logits of a pass with their log-probabilities.
#[derive(Debug)]
pub(crate) struct Outputs {
    /// `[batch, classes]`, as the closure returned them.
    pub(crate) logits: Tensor,
    /// `[batch, classes]`, with the logits' graph if they have one.
    pub(crate) log_p: Tensor,
}

impl Outputs {
    /// Checks shape, values and, where `graph` asks for it, the graph.
    pub(crate) fn new(logits: Tensor, pass: PassKind, graph: bool) -> Result<Self> {
        let got = logits.size();
        match got[..] {
            [_, classes] if classes >= 2 => {}
            _ => return Err(Error::BadLogitsShape { pass, got }),
        }
        if got[0] == 0 {
            return Err(Error::EmptyBatch { pass });
        }
        // One sum instead of a test of every element: in f64 finite logits can't overflow it.
        let sum = logits.f_sum(Kind::Double)?.f_double_value(&[])?;
        if !sum.is_finite() {
            return Err(Error::NonFinite { what: "sum of the logits", pass, value: sum });
        }
        if graph && !logits.requires_grad() {
            return Err(Error::DetachedLogits { pass });
        }
        let log_p = log_probabilities(&logits)?;
        Ok(Self { logits, log_p })
    }

    pub(crate) fn rows(&self) -> i64 {
        self.logits.size()[0]
    }

    /// Checks that another pass of the step was over as many inputs, in a forward pass of its own.
    pub(crate) fn comparable(&self, first: &Outputs, pass: PassKind) -> Result<()> {
        if self.logits.data_ptr() == first.logits.data_ptr() {
            return Err(Error::StaleLogits { pass });
        }
        let (got, expected) = (self.logits.size(), first.logits.size());
        if got[0] != expected[0] {
            return Err(Error::BatchSizeChanged { pass, first: expected[0], got: got[0] });
        }
        if got != expected {
            return Err(Error::BadLogitsShape { pass, got });
        }
        Ok(())
    }

    /// The same values as constants.
    pub(crate) fn detached(&self) -> Self {
        Self { logits: self.logits.detach(), log_p: self.log_p.detach() }
    }

    /// `(1/b) Σ KL(self ‖ other)`, clamped at 0.
    pub(crate) fn divergence(&self, other: &Outputs) -> Result<f64> {
        kl_value(&self.log_p, &other.log_p)
    }

    /// How far apart two tables of probabilities are, in units of the rounding error of one:
    /// `‖f − f'‖ / (√b · ε)`.
    pub(crate) fn signal(&self, other: &Outputs) -> Result<f64> {
        let epsilon = if self.log_p.kind() == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let difference = self.log_p.detach().f_exp()?.f_sub(&other.log_p.detach().f_exp()?)?;
        let squares = difference.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
        Ok((squares / self.rows() as f64).sqrt() / epsilon)
    }
}
