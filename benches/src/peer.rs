//! A peer in a process of its own, and the check that both sides do the same work.

use crate::experiment::Context;
use anyhow::{Context as _, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Largest relative difference of the losses for which both sides count as doing the same work. They do the same sums
/// in f32 in another order, and 20 steps let the differences grow; another radius, momentum or batch shows far above.
const TOLERANCE: f64 = 1e-3;

/// The peer's process: each line to it asks, each line from it answers.
pub(crate) struct Peer {
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a script on PyTorch in the peers' Python with the run's number of threads.
    pub(crate) fn start(context: &Context, script: &str) -> Result<Self> {
        Self::start_version(context, script, "2.11.0")
    }

    /// Starts a script in the peers' Python; it must answer with this version of what it runs on.
    pub(crate) fn start_version(context: &Context, script: &str, version: &str) -> Result<Self> {
        let python = context.peer_python.as_deref().context(
            "the peers' Python isn't known: use `cargo xtask bench --peers`, which makes its virtual environment",
        )?;
        let mut child = Command::new(python)
            .args(["-I", "-u", "-c", script, &context.threads.to_string()])
            // The loader's path of this process leads to another libtorch than the peer's own.
            .env_remove("LD_LIBRARY_PATH")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} can't be started", python.display()))?;
        let ask = child.stdin.take().context("the peer has a standard input")?;
        let answers = BufReader::new(child.stdout.take().context("the peer has a standard output")?);
        let mut peer = Self { child, ask, answers };
        let ready = peer.line()?;
        if !ready.starts_with(&format!("ready {version}")) {
            bail!("the peer said \"{ready}\" instead of \"ready {version}\", the version that we compare with");
        }
        Ok(peer)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("the peer ended without an answer; its message is above");
        }
        Ok(line.trim().to_owned())
    }

    /// The number that it answers to `task net steps`.
    pub(crate) fn number(&mut self, task: &str, net: &str, steps: usize) -> Result<f64> {
        writeln!(self.ask, "{task} {net} {steps}")?;
        let line = self.line()?;
        line.parse().with_context(|| format!("the peer answered \"{line}\" instead of a number"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already; then there is nobody to tell.
        let _ = writeln!(self.ask, "quit");
        let _ = self.child.wait();
    }
}

/// Refuses a comparison of two sides that don't train alike.
pub(crate) fn same_work(net: &str, steps: usize, ours: f64, theirs: f64) -> Result<()> {
    let relative = (ours - theirs).abs() / theirs.abs();
    // NaN is no agreement.
    if relative.is_nan() || relative > TOLERANCE {
        bail!(
            "After {steps} steps on the {net} network our loss is {ours} and the peer's {theirs}: a relative difference \
             of {relative:.1e}, but at most {TOLERANCE:.0e} was expected. The two sides don't do the same work, so their \
             times can't be compared: make the settings in the script under benches/peers/ and in its experiment equal."
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_with_other_losses_are_not_compared() {
        assert!(same_work("small", 20, 2.0019, 2.0).is_ok() && same_work("small", 20, 1.9981, 2.0).is_ok());
        for (ours, theirs) in [(2.003, 2.0), (1.997, 2.0), (f64::NAN, 2.0), (2.0, f64::INFINITY), (1.0, 0.0)] {
            let message = same_work("small", 20, ours, theirs).unwrap_err().to_string();
            assert!(message.contains(&ours.to_string()) && message.contains(&theirs.to_string()), "{message}");
            assert!(message.contains("the small network") && message.contains("1e-3"), "{message}");
        }
    }
}
