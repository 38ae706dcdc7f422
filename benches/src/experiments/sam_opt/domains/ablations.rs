//! DA-SAM's parts, one changed at a time, on Handwriting-3 at one radius.

use super::describe::{describe, metrics};
use super::training::Trained;
use super::{HANDWRITING3, ORACLE, ORACLE_RHO, Plan, mean_over_folds, schedule};
use crate::experiment::{Body, Context, Experiment, Outcome};
use crate::experiments::sam_opt::arms::Method;
use crate::spec::{Arm, Claim, Kind, Role, Test};
use anyhow::{Context as _, Result};

/// The experiment; run by name.
pub(crate) fn ablations() -> Experiment {
    let note = "ρ 0.5";
    let mut arms = vec![
        Arm::new("sam", "SAM", Role::Baseline, note),
        Arm::new("random", "SAM along noise", Role::Baseline, note),
        Arm::new("dgsam", "DGSAM", Role::Baseline, note),
    ];
    arms.extend(
        Method::ablations(ORACLE_RHO).into_iter().map(|(name, label, _)| Arm::new(name, label, Role::Ablation, note)),
    );
    let claims = Method::ablations(ORACLE_RHO)
        .into_iter()
        .map(|(name, label, _)| Claim {
            name: format!("{name}-against-sam"),
            statement: format!("{label} against SAM."),
            source: "ours".into(),
            metric: "accuracy".into(),
            arm: name.into(),
            reference: "sam".into(),
            test: Test::Descriptive,
        })
        .collect();
    let protocol = "As Handwriting-3, every arm at ρ 0.5 (chosen for SAM by the specification on the held-out domains), nothing \
        searched.";
    let mut experiment = describe(&HANDWRITING3, "DA-SAM, one part changed at a time", protocol, (2, 5), (5.0, 18.0));
    experiment.spec.name = "da-sam-ablations".into();
    experiment.spec.kind = Kind::ByName;
    experiment.spec.metrics = metrics(HANDWRITING3.held_out);
    experiment.spec.arms = arms;
    experiment.spec.claims = claims;
    experiment.body = Body::PerArm(run);
    experiment
}

fn run(context: &Context, arm: &str, seed: u64) -> Result<Outcome> {
    let method = match arm {
        "sam" => ORACLE,
        "random" => Method::Random { rho: ORACLE_RHO },
        "dgsam" => Method::Dgsam { rho: ORACLE_RHO },
        arm => {
            let ablation = Method::ablations(ORACLE_RHO).into_iter().find(|(name, _, _)| *name == arm);
            ablation.with_context(|| format!("no ablation {arm}"))?.2
        }
    };
    let (folds, steps) = schedule(&HANDWRITING3, context.mode);
    let plan = Plan::new(method, steps);
    let domains = (HANDWRITING3.load)()?;
    let outcome =
        |name: &&'static str| Ok((*name, Trained::new(&HANDWRITING3, context, &plan, domains, name, seed)?.test()?));
    Ok(mean_over_folds(&folds.iter().map(outcome).collect::<Result<Vec<_>>>()?))
}
