//! Child programs that can be watched, interrupted and asked for a line.
//!
//! Ctrl-C sets a flag; everything that takes long looks at it through [`check`] and returns [`Interrupted`], so temporary
//! folders are removed by the same code that removes them after an error.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How many times the user asked to stop.
static INTERRUPTS: AtomicUsize = AtomicUsize::new(0);

/// The user asked to stop: exit status 130, and no further message than the one that says how to go on.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted; what was finished is kept, and the same command goes on from there")
    }
}

impl std::error::Error for Interrupted {}

/// From here on Ctrl-C, SIGTERM and SIGHUP set the flag instead of ending the program.
pub(crate) fn catch_signals() -> Result<()> {
    ctrlc::set_handler(|| {
        INTERRUPTS.fetch_add(1, Ordering::SeqCst);
    })
    .context("Ctrl-C can't be caught")
}

fn interrupts() -> usize {
    INTERRUPTS.load(Ordering::SeqCst)
}

/// Whether the user asked to stop.
pub(crate) fn interrupted() -> bool {
    interrupts() > 0
}

/// An error when the user asked to stop.
pub(crate) fn check() -> Result<()> {
    if interrupted() {
        return Err(Interrupted.into());
    }
    Ok(())
}

/// What a watched program left behind.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its lines on stdout and stderr, in the order of their arrival.
    pub lines: Vec<String>,
}

/// Where a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// What an interrupt does to a watched program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Its group is told to end, and killed after a few seconds.
    Prompt,
    /// It gets one SIGINT and all the time it wants: apt must not be killed while dpkg works.
    Gentle,
}

/// Runs a program in a process group of its own and calls `tick` several times a second with the lines that came since;
/// an interrupt ends the whole group.
pub(crate) fn watch(command: &mut Command, tick: impl FnMut(&[(Stream, String)])) -> Result<Finished> {
    watch_until(Ending::Prompt, command, tick)
}

/// As [`watch`], with a choice of what an interrupt does.
pub(crate) fn watch_until(
    ending: Ending,
    command: &mut Command,
    mut tick: impl FnMut(&[(Stream, String)]),
) -> Result<Finished> {
    check()?;
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("`{name}` can't be started"))?;
    let (send, lines) = channel();
    if let Some(out) = child.stdout.take() {
        read_lines(out, Stream::Out, send.clone());
    }
    if let Some(err) = child.stderr.take() {
        read_lines(err, Stream::Err, send);
    }
    let mut all = Vec::new();
    let status = loop {
        if interrupted() {
            match ending {
                Ending::Prompt => end_group(&mut child),
                Ending::Gentle => {
                    let _ = kill_process(Pid::from_child(&child), Signal::INT);
                    child.wait()?;
                }
            }
            return Err(Interrupted.into());
        }
        let fresh = collect(&lines, Duration::from_millis(100));
        tick(&fresh);
        all.extend(fresh.into_iter().map(|(_, line)| line));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        // Both streams may be closed while the program still runs.
        std::thread::sleep(Duration::from_millis(5));
    };
    // What is still in the pipes; a grandchild that keeps them open is not waited for.
    let rest = collect(&lines, Duration::from_millis(500));
    tick(&rest);
    all.extend(rest.into_iter().map(|(_, line)| line));
    Ok(Finished { status, lines: all })
}

fn read_lines(from: impl Read + Send + 'static, stream: Stream, to: Sender<(Stream, String)>) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if to.send((stream, text)).is_err() {
                return;
            }
            line.clear();
        }
    });
}

/// The lines that arrive within `wait`; at once when both streams are closed.
fn collect(lines: &Receiver<(Stream, String)>, wait: Duration) -> Vec<(Stream, String)> {
    let until = Instant::now() + wait;
    let mut fresh = Vec::new();
    while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
        fresh.push(line);
    }
    fresh
}

/// SIGTERM to the group, SIGKILL to what is left of it after three seconds.
fn end_group(child: &mut Child) {
    let group = Pid::from_child(child);
    let _ = kill_process_group(group, Signal::TERM);
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
}

/// Who hears of an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hearer {
    /// The program alone, which looks after its own children.
    Program,
    /// The program with all its children, as on a terminal.
    Group,
}

/// Runs a program whose output the user sees. It stays in a group of its own, so that a Ctrl-C on the terminal reaches
/// it exactly once, through us: the program gets time to write what it has, and we wait for it.
pub(crate) fn run_forwarding(command: &mut Command) -> Result<ExitStatus> {
    forward(command, Hearer::Program)
}

fn forward(command: &mut Command, hearer: Hearer) -> Result<ExitStatus> {
    // One that came before is not forwarded to anybody: it must stop us here.
    check()?;
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child =
        command.stdin(Stdio::null()).process_group(0).spawn().with_context(|| format!("`{name}` can't be started"))?;
    let mut forwarded = 0;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // One that came between the check and the start is forwarded here.
        while forwarded < interrupts() {
            forwarded += 1;
            pass_on(&child, hearer, forwarded);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The first two interrupts ask, the third tells, the fourth ends the program and its children.
fn pass_on(child: &Child, hearer: Hearer, count: usize) {
    let program = Pid::from_child(child);
    let _ = match (count, hearer) {
        (1 | 2, Hearer::Program) => kill_process(program, Signal::INT),
        (1 | 2, Hearer::Group) => kill_process_group(program, Signal::INT),
        (3, _) => kill_process_group(program, Signal::TERM),
        _ => kill_process_group(program, Signal::KILL),
    };
}

/// Runs a program whose output the user sees; its failure is an error that names the command line.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    crate::ui::note(format!("$ {line}"));
    let status = forward(command, Hearer::Group)?;
    check()?;
    anyhow::ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

/// The command line as a person would type it.
pub(crate) fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().rsplit('/').next().unwrap_or_default().to_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

/// The output of a short program, when it is there and succeeds.
pub(crate) fn capture(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Whether a program of that name is on PATH.
pub(crate) fn on_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watching_keeps_every_line_of_both_streams() {
        let mut seen = 0;
        let finished =
            watch(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]), |lines| seen += lines.len())
                .unwrap();
        let mut lines = finished.lines.clone();
        lines.sort();
        assert_eq!(lines, ["one", "two"]);
        assert_eq!(seen, 2);
        assert_eq!(finished.status.code(), Some(3));
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = watch(&mut Command::new("no-such-program-here"), |_| {}).unwrap_err();
        assert!(error.to_string().contains("no-such-program-here"));
    }

    #[test]
    fn capture_is_none_when_the_program_fails() {
        assert_eq!(capture(Command::new("sh").args(["-c", "echo hi"])), Some("hi".into()));
        assert_eq!(capture(&mut Command::new("false")), None);
    }
}
