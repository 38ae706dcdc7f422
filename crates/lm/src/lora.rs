//! Stand-in until the adapter is merged.
use crate::Result;
use crate::linear::Projection;
use tensor::tch::Tensor;
/// x
#[derive(Debug, Clone, Copy)]
pub struct AdapterView<'a>(&'a ());
impl AdapterView<'_> {
    pub(crate) fn delta(&self, _: usize, _: Projection, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }
}
