//! A second concept: from formal prose to fiction, with the Brown corpus's genres as heterogeneity.

use super::super::sentiment::shuffled;
use super::maps::{self, CHARS, DIM, PAPER};
use super::pool::{kept, smollm2, stack};
use super::transport::by;
use crate::experiment::{Body, Context, Experiment, Outcome, Outcomes};
use crate::spec::{Claim, Direction, Kind, Metric, Mode, Spec, Test};
use anyhow::{Result, ensure};
use datasets::brown::{self, Genre};
use lm::activations::{CollectConfig, Pooling, collect_cached};
use lm::hooks::Site;
use ndarray::{Array2, Axis};
use std::sync::{Mutex, PoisonError};
use steering_ot::energy::energy_distance;
use tensor::Seed;

const OVERALL: &str = "overall";
const WITHIN: &str = "within";
const LAYERS: [usize; 2] = [7, 15];
const FORMAL: [Genre; 2] = [Genre::Government, Genre::Learned];
const FICTION: [Genre; 6] =
    [Genre::Fiction, Genre::Mystery, Genre::ScienceFiction, Genre::Adventure, Genre::Romance, Genre::Humor];

/// Activations by genre, formal ones first: `[sentences, width]`, a list a layer.
type Genres = Vec<Vec<Array2<f32>>>;

pub(super) fn experiment() -> Experiment {
    let better = |name: &str, statement: &str, source: &str, arm: &str| {
        Claim::new(name, statement, source, OVERALL, (arm, DIM), Test::Superior(0.0))
    };
    Experiment {
        spec: Spec {
            name: "steer-register".into(),
            krate: "steering-ot".into(),
            title: "From formal prose to fiction".into(),
            protocol: "Sentences of 30 to 140 characters of the Brown corpus: maps are fitted from two formal genres (government, \
                       learned) to six of fiction, 140 sentences a genre, and move 80 other formal sentences a genre (quick: 30 and \
                       20). SmolLM2-135M, last token after layers 7 and 15 (quick: 15), α = 1. Energy distance to the fiction of \
                       the test part, of all formal sentences together and as the mean over the two formal genres, both relative to \
                       the difference in means, averaged over layers. Each seed cuts the sentences and starts k-means anew."
                .into(),
            data: vec!["smollm2".into(), brown::NAME.into()],
            kind: Kind::FullOnly,
            metrics: vec![
                Metric::new(OVERALL, "distance over all, relative", "× DiM", Direction::Lower, 3),
                Metric::new(WITHIN, "distance by formal genre, relative", "× DiM", Direction::Lower, 3),
            ],
            arms: maps::arms(),
            claims: vec![
                better("ours", "CHaRS with our default ends closer to fiction than the difference in means.", "ours", CHARS),
                better(
                    "paper",
                    "CHaRS in its published setting ends closer to fiction than the difference in means.",
                    "paper",
                    PAPER,
                ),
            ],
            curves: vec![],
            seeds: (1, 10),
            seeds_for_verdict: 5,
            threads: 0,
            seconds_per_seed: (15.0, 10.0),
        },
        body: Body::Together(run),
    }
}

fn run(context: &Context, seed: u64) -> Result<Outcomes> {
    let (fit, test, layers): (usize, usize, &[usize]) = match context.mode {
        Mode::Quick => (30, 20, &LAYERS[1..]),
        Mode::Full => (140, 80, &LAYERS),
    };
    let all = genres(context, fit + test, layers)?;
    let arms = experiment().spec.arms;
    let mut sums = vec![[0.0; 2]; arms.len()];
    for genres in &all {
        let orders: Vec<Vec<usize>> = (0..genres.len())
            .map(|genre| shuffled(fit + test, Seed::new(seed).child("register").index(genre as u64)))
            .collect();
        let cut = |testing: bool| -> Vec<Array2<f32>> {
            let chosen = |genre: usize| if testing { &orders[genre][fit..] } else { &orders[genre][..fit] };
            genres.iter().enumerate().map(|(genre, x)| x.select(Axis(0), chosen(genre))).collect()
        };
        let (to_fit, to_test) = (cut(false), cut(true));
        let (a, b) = (stack(&to_fit[..FORMAL.len()])?, stack(&to_fit[FORMAL.len()..])?);
        let target = stack(&to_test[FORMAL.len()..])?;
        let mut distances = Vec::with_capacity(arms.len());
        for arm in &arms {
            context.check()?;
            let map = maps::fit(&arm.name, &a, &b, seed)?;
            let moved: Vec<Array2<f32>> =
                to_test[..FORMAL.len()].iter().map(|x| by(map.as_deref(), x)).collect::<Result<_>>()?;
            let overall = energy_distance(stack(&moved)?.view(), target.view())?;
            let mut within = 0.0;
            for moved in &moved {
                within += energy_distance(moved.view(), target.view())?;
            }
            distances.push([overall, within / FORMAL.len() as f64]);
        }
        for (sums, distance) in sums.iter_mut().zip(&distances) {
            for i in 0..2 {
                sums[i] += distance[i] / distances[0][i] / all.len() as f64;
            }
        }
    }
    let outcome = |sums: &[f64; 2]| {
        let mut outcome = Outcome::default();
        outcome.set(OVERALL, sums[0]);
        outcome.set(WITHIN, sums[1]);
        outcome
    };
    Ok(arms.into_iter().zip(&sums).map(|(arm, sums)| (arm.name, outcome(sums))).collect())
}

/// `of_genre` sentences of each genre, collected once a process.
fn genres(context: &Context, of_genre: usize, layers: &[usize]) -> Result<Genres> {
    static KNOWN: Mutex<Vec<(usize, Vec<usize>, Genres)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, _, genres)) = known.iter().find(|(n, l, _)| *n == of_genre && l == layers) {
        return Ok(genres.clone());
    }
    let lm = smollm2(context)?;
    let corpus = brown::load()?;
    let mut texts = Vec::new();
    let order: Vec<Genre> = FORMAL.iter().chain(&FICTION).copied().collect();
    for (number, &genre) in order.iter().enumerate() {
        let sentences: Vec<&String> = corpus
            .iter()
            .filter(|text| text.genre == genre)
            .flat_map(|text| &text.sentences)
            .filter(|s| (30..=140).contains(&s.chars().count()))
            .collect();
        ensure!(sentences.len() >= of_genre, "{genre:?} has {} sentences, fewer than {of_genre}", sentences.len());
        for &i in &shuffled(sentences.len(), Seed::new(0).child("sentences").index(number as u64))[..of_genre] {
            texts.push(lm.encode(sentences[i])?);
        }
    }
    let config = CollectConfig {
        sites: layers.iter().map(|&layer| Site::ResidPost(layer)).collect(),
        pooling: Pooling::Last,
        ..CollectConfig::default()
    };
    let store = collect_cached(&lm.model, &texts, &config, &kept()?)?;
    let mut all = Vec::new();
    for &layer in layers {
        let x = steering_ot::model::activations_at(&store, Site::ResidPost(layer))?;
        let genre = |i: usize| x.slice(ndarray::s![i * of_genre..(i + 1) * of_genre, ..]).to_owned();
        all.push((0..order.len()).map(genre).collect());
    }
    known.push((of_genre, layers.to_vec(), all.clone()));
    Ok(all)
}
