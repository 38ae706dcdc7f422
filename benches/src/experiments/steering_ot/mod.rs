//! steering-ot: where maps bring activations, what steered text is like, and what it costs.

mod behaviour;
mod cost;
mod linear;
mod maps;
mod peers;
mod pool;
mod register;
mod sweep;
mod transport;

use crate::experiment::Experiment;

/// The experiments of the crate.
pub fn experiments() -> Vec<Experiment> {
    vec![
        transport::experiment(),
        behaviour::experiment(),
        cost::experiment(),
        register::experiment(),
        sweep::experiment(),
        peers::experiment(),
    ]
}
