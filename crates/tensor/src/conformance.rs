//! Checks that any method can be put through in a few lines, in the spirit of scikit-learn's
//! `check_estimator`.
//!
//! A method's test implements [`Subject`] over a tiny problem and calls [`assert_conforms`]:
//!
//! | check | claim |
//! | --- | --- |
//! | `config_round_trip` | the configuration survives JSON |
//! | `unknown_field` | a misspelt field is refused, not ignored |
//! | `invalid_values` | every invalid value is refused with the field's name, before anything runs |
//! | `non_finite_input` | NaN in the input is an error, and nothing observable has changed |
//! | `determinism` | the same seed gives the same bits |
//! | `save_load_continue` | saved, loaded and continued equals uninterrupted, bit for bit |
//!
//! The module needs no libtorch.

use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// A method over a tiny fixed problem.
pub trait Subject: Sized {
    /// The method's configuration.
    type Config: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// A valid configuration.
    fn config() -> Self::Config;

    /// Configurations with one invalid field each, and that field's name.
    fn invalid() -> Vec<(&'static str, Self::Config)>;

    /// The method at its start, on the problem.
    ///
    /// # Errors
    /// The message for an invalid configuration.
    fn build(config: &Self::Config) -> Result<Self, String>;

    /// The `i`-th unit of work (a step, a fit, a decision), the same for the same `i`.
    ///
    /// # Errors
    /// The method's message.
    fn advance(&mut self, i: u64) -> Result<(), String>;

    /// A unit of work whose input has a NaN.
    ///
    /// # Errors
    /// The method's message: this must fail.
    fn advance_on_nan(&mut self) -> Result<(), String>;

    /// Everything that a user could observe, as bytes.
    fn observe(&self) -> Vec<u8>;

    /// The state to continue from.
    ///
    /// # Errors
    /// The method's message.
    fn save(&self) -> Result<Vec<u8>, String>;

    /// A new method that continues from a saved state.
    ///
    /// # Errors
    /// The method's message.
    fn load(config: &Self::Config, saved: &[u8]) -> Result<Self, String>;
}

/// A check that a subject failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The check.
    pub check: &'static str,
    /// What was seen.
    pub seen: String,
}

/// A check: the message says what was seen.
type Check = fn() -> Result<(), String>;

/// Runs every check and returns those that failed.
pub fn findings<S: Subject>() -> Vec<Finding> {
    let checks: [(&'static str, Check); 6] = [
        ("config_round_trip", config_round_trip::<S>),
        ("unknown_field", unknown_field::<S>),
        ("invalid_values", invalid_values::<S>),
        ("non_finite_input", non_finite_input::<S>),
        ("determinism", determinism::<S>),
        ("save_load_continue", save_load_continue::<S>),
    ];
    checks.iter().filter_map(|(check, run)| run().err().map(|seen| Finding { check, seen })).collect()
}

/// Runs every check.
///
/// # Panics
/// With all failed checks and what was seen.
pub fn assert_conforms<S: Subject>() {
    let findings = findings::<S>();
    assert!(findings.is_empty(), "The method doesn't conform: {findings:#?}");
}

/// Units of work before and after the point where a check interferes.
const HALF: u64 = 4;

fn text<T: Serialize>(value: &T) -> Result<String, String> {
    serde_json::to_string(value).map_err(|e| e.to_string())
}

fn config_round_trip<S: Subject>() -> Result<(), String> {
    let config = S::config();
    let written = text(&config)?;
    let read: S::Config = serde_json::from_str(&written).map_err(|e| format!("{written} isn't read back: {e}"))?;
    if read == config { Ok(()) } else { Err(format!("{config:?} came back as {read:?}")) }
}

fn unknown_field<S: Subject>() -> Result<(), String> {
    let mut value = serde_json::to_value(S::config()).map_err(|e| e.to_string())?;
    let fields = value.as_object_mut().ok_or("the configuration isn't a JSON object")?;
    fields.insert("no_such_field".into(), 1.into());
    match serde_json::from_value::<S::Config>(value) {
        Err(error) if error.to_string().contains("no_such_field") => Ok(()),
        Err(error) => Err(format!("the message doesn't name the field: {error}")),
        Ok(_) => Err("the unknown field \"no_such_field\" was ignored".into()),
    }
}

fn invalid_values<S: Subject>() -> Result<(), String> {
    let cases = S::invalid();
    if cases.is_empty() {
        return Err("no invalid configuration is listed, so nothing was checked".into());
    }
    for (field, config) in cases {
        match S::build(&config) {
            Ok(_) => return Err(format!("{config:?} was accepted, though \"{field}\" is invalid")),
            Err(message) if !message.contains(field) => {
                return Err(format!("the message for an invalid \"{field}\" doesn't name it: {message}"));
            }
            Err(_) => {}
        }
    }
    Ok(())
}

fn run<S: Subject>(subject: &mut S, from: u64, to: u64) -> Result<(), String> {
    (from..to).try_for_each(|i| subject.advance(i))
}

fn non_finite_input<S: Subject>() -> Result<(), String> {
    let mut subject = S::build(&S::config())?;
    run(&mut subject, 0, HALF)?;
    let before = subject.observe();
    if subject.advance_on_nan().is_ok() {
        return Err("NaN in the input was accepted".into());
    }
    if subject.observe() != before {
        return Err("the failed unit of work changed something observable".into());
    }
    run(&mut subject, HALF, 2 * HALF)?;
    let mut clean = S::build(&S::config())?;
    run(&mut clean, 0, 2 * HALF)?;
    if subject.observe() == clean.observe() {
        Ok(())
    } else {
        Err("what follows the failed unit of work differs from a run without it".into())
    }
}

fn determinism<S: Subject>() -> Result<(), String> {
    let once = || -> Result<Vec<u8>, String> {
        let mut subject = S::build(&S::config())?;
        let start = subject.observe();
        run(&mut subject, 0, 2 * HALF)?;
        if subject.observe() == start {
            return Err("the work changes nothing observable, so nothing was checked".into());
        }
        Ok(subject.observe())
    };
    if once()? == once()? { Ok(()) } else { Err("two runs with the same seed differ".into()) }
}

fn save_load_continue<S: Subject>() -> Result<(), String> {
    let mut whole = S::build(&S::config())?;
    run(&mut whole, 0, HALF)?;
    let saved = whole.save()?;
    run(&mut whole, HALF, 2 * HALF)?;
    let mut continued = S::load(&S::config(), &saved)?;
    run(&mut continued, HALF, 2 * HALF)?;
    if whole.observe() == continued.observe() {
        Ok(())
    } else {
        Err("saved, loaded and continued differs from uninterrupted".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Subjects built so far.
    static RUNS: AtomicU32 = AtomicU32::new(0);

    /// A running sum whose flaws can be switched on.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Config<const FLAW: u8> {
        weight: f64,
        #[serde(skip)]
        forgotten: u8,
    }

    fn config<const FLAW: u8>(weight: f64) -> Config<FLAW> {
        Config { weight, forgotten: u8::from(FLAW == 7) }
    }

    struct Sum<const FLAW: u8> {
        weight: f64,
        total: f64,
        ticks: u64,
    }

    impl<const FLAW: u8> Subject for Sum<FLAW> {
        type Config = Config<FLAW>;

        fn config() -> Config<FLAW> {
            config(0.5)
        }

        fn invalid() -> Vec<(&'static str, Config<FLAW>)> {
            if FLAW == 4 { vec![] } else { vec![("weight", config(-1.0))] }
        }

        fn build(config: &Config<FLAW>) -> Result<Self, String> {
            if config.weight < 0.0 && FLAW != 1 {
                return Err("weight must be at least 0".into());
            }
            // A start that differs from run to run.
            let run = RUNS.fetch_add(1, Ordering::Relaxed);
            let total = if FLAW == 6 { f64::from(run) } else { 0.0 };
            Ok(Self { weight: config.weight, total, ticks: 0 })
        }

        fn advance(&mut self, i: u64) -> Result<(), String> {
            self.ticks += 1;
            self.total += self.weight * i as f64 + if FLAW == 5 { self.ticks as f64 } else { 0.0 };
            Ok(())
        }

        fn advance_on_nan(&mut self) -> Result<(), String> {
            if FLAW == 2 {
                self.total += 1.0;
            }
            if FLAW == 3 { Ok(()) } else { Err("the input is NaN".into()) }
        }

        fn observe(&self) -> Vec<u8> {
            self.total.to_le_bytes().to_vec()
        }

        fn save(&self) -> Result<Vec<u8>, String> {
            Ok(self.observe())
        }

        fn load(config: &Config<FLAW>, saved: &[u8]) -> Result<Self, String> {
            let total = f64::from_le_bytes(saved.try_into().map_err(|_| "eight bytes")?);
            Ok(Self { weight: config.weight, total, ticks: 0 })
        }
    }

    fn failed<const FLAW: u8>() -> Vec<&'static str> {
        findings::<Sum<FLAW>>().into_iter().map(|f| f.check).collect()
    }

    #[test]
    fn each_flaw_is_found_by_its_check() {
        // The configuration above doesn't deny unknown fields, which is a flaw of its own.
        assert_eq!(failed::<0>(), ["unknown_field"]);
        assert_eq!(failed::<1>(), ["unknown_field", "invalid_values"]);
        assert_eq!(failed::<2>(), ["unknown_field", "non_finite_input"]);
        assert_eq!(failed::<3>(), ["unknown_field", "non_finite_input"]);
        assert_eq!(failed::<4>(), ["unknown_field", "invalid_values"]);
        assert_eq!(failed::<5>(), ["unknown_field", "save_load_continue"]);
        assert!(failed::<6>().contains(&"determinism"));
        assert_eq!(failed::<7>(), ["config_round_trip", "unknown_field"]);
    }
}
