//! A mixture of experts as feed-forward: the sockets for routing and for the experts' weights, and the layer between them.

mod experts;
mod layer;
mod router;

pub use experts::{Demand, ExpertStore, ExpertWeights, ResidentExperts};
pub use layer::{LayerRouting, MoeLayer};
pub use router::{LoadStats, RouteContext, Router, Routing, SoftmaxRouter};
