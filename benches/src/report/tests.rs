//! What the three forms of the report promise.

use super::fixture::{HOSTILE, empty, example, hostile, many, not_finite};
use super::{html, markdown, terminal};
use crate::analysis::{Analysis, Verdict};
use crate::spec::Mode;

/// Names of the elements that are open at the end, or what is wrong on the way.
fn unbalanced(page: &str) -> Result<(), String> {
    const VOID: [&str; 6] = ["meta", "br", "line", "rect", "circle", "!DOCTYPE"];
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page;
    while let Some(start) = rest.find('<') {
        rest = &rest[start + 1..];
        let end = rest.find('>').ok_or("a tag that doesn't end")?;
        let tag = &rest[..end];
        if tag.contains('<') {
            return Err(format!("a tag inside a tag: {tag}"));
        }
        if tag.matches('"').count() % 2 == 1 {
            return Err(format!("an attribute that doesn't end: {tag}"));
        }
        rest = &rest[end + 1..];
        let name = tag.trim_start_matches('/').split([' ', '/', '\n']).next().unwrap_or_default();
        if let Some(closed) = tag.strip_prefix('/') {
            let last = open.pop();
            if last != Some(closed) {
                return Err(format!("</{closed}> closes {last:?}"));
            }
        } else if name == "script" || name == "style" {
            let close = format!("</{name}>");
            rest = &rest[rest.find(&close).ok_or("raw text that doesn't end")? + close.len()..];
        } else if !VOID.contains(&name) {
            open.push(name);
        }
    }
    if open.is_empty() { Ok(()) } else { Err(format!("open at the end: {open:?}")) }
}

/// The page without its style and script.
fn content(page: &str) -> String {
    let (head, rest) = page.split_once("<style>").unwrap();
    let (_, rest) = rest.split_once("</style>").unwrap();
    let (body, rest) = rest.split_once("<script>").unwrap();
    format!("{head}{body}{}", rest.split_once("</script>").unwrap().1)
}

fn all_analyses() -> [Analysis; 6] {
    [example(Mode::Quick), example(Mode::Full), hostile(), not_finite(), many(3), empty()]
}

#[test]
fn every_claim_appears_once_with_its_verdict() {
    let analysis = example(Mode::Full);
    let page = html(&analysis, None);
    let document = markdown(&analysis);
    let verdicts: Vec<Verdict> = analysis.experiments.iter().flat_map(|e| &e.claims).map(|c| c.verdict).collect();
    for expected in [Verdict::Holds, Verdict::NotShown, Verdict::Contradicted, Verdict::Descriptive, Verdict::NoData] {
        assert!(verdicts.contains(&expected), "the fixture has no claim that is {expected:?}: {verdicts:?}");
    }
    assert_eq!(page.matches("<tr class=\"claim\"").count(), verdicts.len());
    for experiment in &analysis.experiments {
        let heading = format!("\">{}</a></th></tr>\n", experiment.spec.title);
        let (_, rest) = page.split_once(&heading).unwrap();
        let group = rest.split("</tbody>").next().unwrap();
        for result in &experiment.claims {
            let rows: Vec<&str> =
                group.split("<tr class=\"claim\"").filter(|row| row.contains(&result.claim.statement)).collect();
            assert_eq!(rows.len(), 1, "{}", result.claim.statement);
            assert!(rows[0].contains(result.verdict.text()), "{}", rows[0]);
        }
    }
    let section = document.split("## What was shown").nth(1).unwrap().split("\n## ").next().unwrap();
    let lines: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert_eq!(lines.len(), verdicts.len());
    for (line, verdict) in lines.iter().zip(verdicts) {
        assert!(line.split('|').nth(1).unwrap().contains(verdict.text()), "{line}");
    }
}

#[test]
fn a_quick_run_shows_the_committed_result_beside_what_it_cannot_decide() {
    let (quick, full) = (example(Mode::Quick), example(Mode::Full));
    let first = &full.experiments[0].claims[0];
    assert_eq!((quick.experiments[0].claims[0].verdict, first.verdict), (Verdict::TooFewSeeds, Verdict::Holds));
    let page = html(&quick, Some(&full));
    let row = page.split("<tr class=\"claim\"").nth(1).unwrap();
    assert!(row.contains("too few seeds (use --full)"), "{row}");
    assert!(row.contains("Full run: <span class=\"verdict holds\">✓ holds</span> +"), "{row}");
    assert!(row.contains("n\u{a0}=\u{a0}20"), "{row}");
    let table = terminal(&quick, Some(&full)).replace(['\n', ' '], "");
    assert!(table.contains("full:✓holds"), "{table}");
    assert!(!html(&quick, None).contains("Full run: <"));
    // What has a verdict of its own needs no other.
    let timing = page.split("at most 2.05 base steps").nth(1).unwrap().split("</tr>").next().unwrap();
    assert!(!timing.contains("Full run"), "{timing}");
}

#[test]
fn skipped_failed_and_partial_are_said_in_all_forms() {
    let analysis = example(Mode::Full);
    let flat = |text: String| text.replace("\\_", "_").split_whitespace().collect::<Vec<_>>().join(" ");
    for text in [html(&analysis, None), markdown(&analysis), terminal(&analysis, None)].map(flat) {
        let plain = text.replace("<strong>", "").replace("</strong>", "").replace("&#39;", "'").replace("\\`", "`");
        for expected in [
            "Skipped: the data set mnist-10k isn't in the cache; fetch it with `cargo xtask data fetch mnist-10k`.",
            "Failed: 1 run of ASAM (element-wise): The loss became infinite in the second pass at step 31. Lower rho.",
            "Partial: 19 of 20 planned seeds ran.",
        ] {
            assert!(plain.contains(expected), "{expected}: {plain}");
        }
    }
}

#[test]
fn failed_runs_are_counted_beside_the_verdict_in_all_forms() {
    let analysis = example(Mode::Full);
    // The fixture's ASAM failed on one seed: two claims are about it.
    let claims = &analysis.experiments[0].claims;
    let about: Vec<&str> = claims.iter().filter(|c| c.failed == 1).map(|c| c.claim.name.as_str()).collect();
    assert_eq!(about, ["scale", "no-harm"]);
    assert!(claims.iter().filter(|c| c.failed > 0).all(|c| c.verdict == Verdict::NotShown));
    assert_eq!(html(&analysis, None).matches("<p class=\"compared\">1 run failed</p>").count(), 2);
    assert_eq!(markdown(&analysis).matches("| ○ not shown (1 run failed) |").count(), 2);
    assert_eq!(terminal(&analysis, None).matches("(1 run failed)").count(), 2);
    // Also of the full run that a quick run is shown beside.
    let mut quick = example(Mode::Quick);
    quick.experiments[0].claims[1].failed = 0;
    assert!(html(&quick, Some(&analysis)).contains(", 1 run failed</p>"));
    assert!(terminal(&quick, Some(&analysis)).contains("(1 run failed)"));
}

#[test]
fn an_arm_with_fewer_seeds_or_none_is_named() {
    let mut analysis = example(Mode::Full);
    let arms = &mut analysis.experiments[0].arms;
    arms[1].seeds -= 1;
    arms.pop();
    let page = html(&analysis, None);
    assert!(page.contains("<strong>Partial:</strong> SAM has 19 of 20 seeds."));
    assert!(page.contains("<strong>No runs of:</strong> ERM with target data."));
    assert_eq!(unbalanced(&page), Ok(()));
}

#[test]
fn hostile_text_stays_text() {
    let analysis = hostile();
    let page = content(&html(&analysis, None));
    assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("onerror=y>"), "{page}");
    assert!(page.contains("&lt;img src=x onerror=y&gt;"));
    assert!(!page.contains(['\u{1b}', '\u{0}']));
    let document = markdown(&analysis);
    assert!(!document.contains("<img") && !document.contains("*line*\n"), "{document}");
    assert!(!document.contains(['\u{1b}', '\u{0}']));
    assert!(!terminal(&analysis, Some(&analysis)).contains("\u{1b}[31m <img"));
    assert!(HOSTILE.contains("<img src=x onerror=y>"));
}

#[test]
fn the_page_is_well_formed_and_needs_nothing_else() {
    for analysis in all_analyses() {
        let page = html(&analysis, Some(&example(Mode::Full)));
        assert_eq!(unbalanced(&page), Ok(()));
        for outside in ["http:", "https:", "src=", "@import", "url(", "<link"] {
            assert!(!page.replace("src=x", "").contains(outside), "{outside}");
        }
        let mut ids: Vec<&str> = page.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all, "an id is there twice: {ids:?}");
        for target in page.split("href=\"#").skip(1).map(|rest| rest.split('"').next().unwrap()) {
            assert!(ids.contains(&target), "#{target} leads nowhere");
        }
    }
}

#[test]
fn no_nan_and_no_infinity_reaches_a_reader() {
    let analysis = not_finite();
    let page = content(&html(&analysis, Some(&analysis)));
    for text in [page, markdown(&analysis), terminal(&analysis, Some(&analysis))] {
        for word in text.split(|c: char| !c.is_alphanumeric()) {
            assert!(!matches!(word, "NaN" | "inf" | "Infinity" | "infinity"), "{text}");
        }
    }
}

#[test]
fn forty_experiments_stay_below_two_megabytes() {
    let page = html(&many(40), Some(&many(40)));
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    assert_eq!(page.matches("<article").count(), 40);
}

#[test]
fn tables_in_markdown_have_the_same_number_of_columns_in_every_row() {
    for analysis in all_analyses() {
        let mut columns = None;
        for line in markdown(&analysis).lines() {
            if !line.starts_with('|') {
                columns = None;
                continue;
            }
            let bars = line.replace("\\\\", "").replace("\\|", "").matches('|').count();
            assert_eq!(*columns.get_or_insert(bars), bars, "{line}");
        }
    }
}

#[test]
fn the_terminal_has_no_line_over_a_hundred_columns() {
    for mode in [Mode::Quick, Mode::Full] {
        for line in terminal(&example(mode), Some(&example(Mode::Full))).lines().filter(|l| !l.contains('\u{1b}')) {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}

#[test]
fn the_same_analysis_gives_the_same_report() {
    let (one, other) = (example(Mode::Quick), example(Mode::Quick));
    assert_eq!(html(&one, Some(&one)), html(&other, Some(&other)));
    assert_eq!(markdown(&one), markdown(&other));
    assert_eq!(terminal(&one, None), terminal(&other, None));
}

#[test]
fn an_empty_run_says_so() {
    let analysis = empty();
    for text in [html(&analysis, None), markdown(&analysis), terminal(&analysis, None)] {
        assert!(text.contains("This run is empty: it has no results."), "{text}");
    }
}

#[test]
fn a_timing_shows_its_ratio_and_its_bound() {
    let page = html(&example(Mode::Full), None);
    let article = page.split("<article id=\"e-sam-peers\"").nth(1).unwrap().split("</article>").next().unwrap();
    assert_eq!(article.matches("class=\"bound\"").count(), 3);
    assert!(article.contains("×") && article.contains("(≤ 2.05)") && article.contains("(≥ 1.5)"), "{article}");
    assert!(!article.contains("Advantage over"), "a timing has ratios, not differences");
}

#[test]
fn differences_stand_beside_the_main_metric() {
    let page = html(&example(Mode::Full), None);
    let heads: Vec<&str> =
        page.split("<th scope=\"col\" class=\"number\">").map(|h| h.split('<').next().unwrap()).collect();
    let main = heads.iter().position(|h| h.starts_with("Target accuracy (%)")).unwrap();
    assert_eq!(heads[main + 1], "Advantage over ERM (pp)");
    let document = markdown(&example(Mode::Full));
    assert!(document.contains("| Target accuracy (%)\u{a0}↑ | Advantage over ERM (pp) | Target loss (nats)\u{a0}↓ |"));
}

#[test]
fn every_plot_has_words_for_those_who_do_not_see_it() {
    let page = html(&example(Mode::Full), None);
    let plots: Vec<&str> = page.split("<svg").skip(1).map(|rest| rest.split("</svg>").next().unwrap()).collect();
    assert!(plots.len() >= 5);
    for plot in plots {
        assert!(plot.contains("role=\"img\"") && plot.contains("<title") && plot.contains("<desc"), "{plot}");
        assert!(!plot.contains('#'), "colours are the page's: {plot}");
    }
}

#[test]
fn the_command_that_makes_the_run_again_is_in_the_documents() {
    assert!(markdown(&example(Mode::Full)).contains("`cargo xtask bench --full --peers`"));
    assert!(html(&example(Mode::Quick), None).contains("<code>cargo xtask bench --peers</code>"));
}

#[test]
#[ignore = "writes example pages into the system's folder for temporary files, to be looked at in a browser"]
fn example_pages_to_look_at() {
    let folder = std::env::temp_dir().join("tessera-report");
    std::fs::create_dir_all(&folder).unwrap();
    let (quick, full) = (example(Mode::Quick), example(Mode::Full));
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
    write("quick.html", html(&quick, Some(&full)));
    write("full.html", html(&full, None));
    write("many.html", html(&many(40), None));
    write("hostile.html", html(&hostile(), None));
    write("not-finite.html", html(&not_finite(), None));
    write("empty.html", html(&empty(), None));
    write("full.md", markdown(&full));
    write("quick.txt", terminal(&quick, Some(&full)));
    write("full.txt", terminal(&full, None));
    println!("{}", folder.display());
}
