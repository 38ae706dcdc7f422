//! What must hold whatever happens inside a step: buffers and the random stream.

use crate::Result;
use tensor::Seed;
use tensor::tch::{self, Tensor, no_grad};

/// Runs `f` without gradients. Unlike tch's `no_grad` it turns them on again when `f`, a user's closure, panics.
pub(crate) fn without_grad<T>(f: impl FnOnce() -> T) -> T {
    let _off = tch::no_grad_guard();
    f()
}

/// Seeds of the passes of one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepSeed(Seed);

impl StepSeed {
    pub(crate) fn new(seed: u64, step: u64) -> Self {
        Self(Seed::new(seed).child("sam-opt.step").index(step))
    }

    /// The same for all passes over a micro-batch.
    pub(crate) fn pass(self, micro: usize) -> i64 {
        self.0.index(micro as u64).torch_seed()
    }

    /// For the optimizer's own noise in this step, apart from libtorch's stream.
    pub(crate) fn noise(self, use_of_it: &str) -> Seed {
        self.0.child(use_of_it)
    }

    /// For the stream that follows the step; it doesn't depend on which passes there were.
    fn after(self) -> i64 {
        self.0.child("after").torch_seed()
    }
}

/// Copies of non-trainable tensors (running statistics).
#[derive(Debug, Default)]
struct Snapshot(Vec<Tensor>);

impl Snapshot {
    fn take(&mut self, buffers: &[Tensor]) -> Result<()> {
        no_grad(|| {
            if self.0.is_empty() {
                self.0 = buffers.iter().map(|b| b.detach().copy()).collect();
            } else {
                for (copy, buffer) in self.0.iter_mut().zip(buffers) {
                    copy.f_copy_(buffer)?;
                }
            }
            Ok(())
        })
    }

    fn restore(&self, buffers: &[Tensor]) {
        no_grad(|| {
            for (copy, buffer) in self.0.iter().zip(buffers) {
                // The copy has the buffer's shape and kind; a drop can't report.
                let _ = buffer.shallow_clone().f_copy_(copy);
            }
        });
    }
}

/// Open for the time of one step. Dropped without [`commit`](Self::commit) (an error, a panic), it puts the
/// buffers back to where they were before the step. The random stream is reseeded in either case.
#[derive(Debug)]
pub(crate) struct StepScope {
    buffers: Vec<Tensor>,
    before: Snapshot,
    kept: Snapshot,
    seed: StepSeed,
    sync_rng: bool,
    committed: bool,
}

impl StepScope {
    pub(crate) fn open(buffers: &[Tensor], seed: StepSeed, sync_rng: bool) -> Result<Self> {
        let mut before = Snapshot::default();
        before.take(buffers)?;
        let buffers = buffers.iter().map(Tensor::shallow_clone).collect();
        Ok(Self { buffers, before, kept: Snapshot::default(), seed, sync_rng, committed: false })
    }

    /// Puts the random stream to the start of a pass, and returns the pass's seed.
    pub(crate) fn seed_pass(&self, micro: usize) -> i64 {
        let seed = self.seed.pass(micro);
        if self.sync_rng {
            tch::manual_seed(seed);
        }
        seed
    }

    /// Remembers the buffers as the main passes left them.
    pub(crate) fn keep_buffers(&mut self) -> Result<()> {
        self.kept.take(&self.buffers)
    }

    /// Undoes what later passes did to the buffers.
    pub(crate) fn return_to_kept(&self) {
        self.kept.restore(&self.buffers);
    }

    /// The step is done: the buffers stay as the main passes left them.
    pub(crate) fn commit(mut self) {
        self.committed = true;
    }
}

impl Drop for StepScope {
    fn drop(&mut self) {
        if !self.committed {
            self.before.restore(&self.buffers);
        }
        if self.sync_rng {
            tch::manual_seed(self.seed.after());
        }
    }
}
