//! The report as one HTML page that needs nothing else: styles, script and plots are inside.

use super::figures::{self, class};
use super::format::{DASH, date, mean, mebibytes, seconds};
use super::line;
use super::plot;
use super::view::{self, ClaimRow};
use crate::analysis::{Analysis, ClaimResult, ExperimentResult, Verdict};
use std::fmt::Write as _;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The whole page.
pub(super) fn page(analysis: &Analysis, committed: Option<&Analysis>) -> String {
    let mut out = String::new();
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>Tessera benchmark report ({mode})</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#shown\">To the results</a>\n",
        mode = analysis.mode.name()
    );
    header(&mut out, analysis, committed);
    if analysis.experiments.is_empty() {
        out.push_str("<main id=\"shown\"><p class=\"lead\">This run is empty: it has no results.</p></main>\n");
    } else {
        out.push_str("<div class=\"columns\">\n");
        contents(&mut out, analysis);
        out.push_str("<main>\n");
        shown(&mut out, &view::claim_rows(analysis, committed), analysis);
        for (krate, experiments) in view::by_crate(analysis) {
            let (name, anchor) = (escape(krate), slug("crate", krate));
            let _ = write!(
                out,
                "<section class=\"crate\" data-crate=\"{name}\">\n<h2 id=\"{anchor}\"><code>{name}</code></h2>\n"
            );
            for experiment in experiments {
                section(&mut out, experiment);
            }
            out.push_str("</section>\n");
        }
        out.push_str("</main>\n</div>\n");
    }
    let _ = write!(
        out,
        "<footer><p>Made with <code>{}</code>. Verdicts are computed from the intervals, never written by hand.</p>\
         </footer>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        escape(&analysis.command)
    );
    out
}

fn header(out: &mut String, analysis: &Analysis, committed: Option<&Analysis>) {
    let _ = write!(
        out,
        "<header>\n<button type=\"button\" id=\"theme\" hidden>Theme: auto</button>\n\
         <p class=\"kicker\">Tessera · {} run · {}</p>\n<h1>Benchmark report</h1>\n\
         <p class=\"lead\">Methods against their baselines on real data. {}</p>\n",
        analysis.mode.name(),
        date(analysis.finished),
        escape(&view::mode_text(analysis, committed))
    );
    let machines = view::machines(analysis);
    if let Some(first) = machines.first() {
        out.push_str(
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Where and with what\">\
             <table class=\"facts\">\n<tbody>\n",
        );
        for (i, (name, _)) in first.iter().enumerate() {
            let _ = write!(out, "<tr><th scope=\"row\">{name}</th>");
            for machine in &machines {
                let _ = write!(out, "<td>{}</td>", escape(&machine[i].1));
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody>\n</table></div>\n");
    }
    out.push_str("</header>\n");
}

fn contents(out: &mut String, analysis: &Analysis) {
    out.push_str(
        "<nav aria-label=\"Contents\"><details id=\"contents\" open><summary>Contents</summary>\n<ul>\n\
         <li><a href=\"#shown\">What was shown</a></li>\n",
    );
    for (krate, experiments) in view::by_crate(analysis) {
        let (name, anchor) = (escape(krate), slug("crate", krate));
        let _ = write!(out, "<li data-crate=\"{name}\"><a href=\"#{anchor}\"><code>{name}</code></a>\n<ul>\n");
        for experiment in experiments {
            let anchor = slug("e", &experiment.spec.name);
            let _ = writeln!(out, "<li><a href=\"#{anchor}\">{}</a></li>", escape(&experiment.spec.title));
        }
        out.push_str("</ul></li>\n");
    }
    out.push_str("</ul>\n</details></nav>\n");
}

fn shown(out: &mut String, rows: &[ClaimRow<'_>], analysis: &Analysis) {
    out.push_str("<section>\n<h2 id=\"shown\">What was shown</h2>\n<p class=\"tally\">");
    for (verdict, n) in view::tally(rows) {
        let _ = write!(
            out,
            "<span class=\"count\"><span class=\"verdict {}\">{} {}</span> {n}</span> ",
            class(verdict),
            view::symbol(verdict),
            words(verdict)
        );
    }
    if rows.is_empty() {
        out.push_str("These experiments make no claims.");
    }
    out.push_str("</p>\n");
    filters(out, rows, analysis);
    out.push_str(
        "<p class=\"note\">Effects are mean paired differences over seeds with 95 % intervals, turned so that positive \
         is better; effects with × are ratios of medians; pp are percentage points. A claim holds when its whole interval is where “needs” \
         says.</p>\n",
    );
    if rows.is_empty() {
        out.push_str("</section>\n");
        return;
    }
    out.push_str(
        "<table class=\"claims\" role=\"table\">\n<caption class=\"hidden\">All claims with their verdicts</caption>\n<thead><tr>\
         <th scope=\"col\">Verdict</th><th scope=\"col\">Claim</th><th scope=\"col\">Effect [95 % interval]</th>\
         <th scope=\"col\">Needs</th><th scope=\"col\" class=\"number\">n</th></tr></thead>\n",
    );
    for experiment in analysis.experiments.iter().filter(|e| !e.claims.is_empty()) {
        let (krate, anchor) = (escape(&experiment.spec.krate), slug("e", &experiment.spec.name));
        let _ = write!(
            out,
            "<tbody data-crate=\"{krate}\" role=\"rowgroup\">\n<tr class=\"group\" role=\"row\"><th scope=\"rowgroup\" role=\"rowheader\" colspan=\"5\">\
             <code>{krate}</code> <a href=\"#{anchor}\">{}</a></th></tr>\n",
            escape(&experiment.spec.title)
        );
        for row in rows.iter().filter(|row| std::ptr::eq(row.experiment, experiment)) {
            claim(out, row);
        }
        out.push_str("</tbody>\n");
    }
    out.push_str(
        "</table>\n<p class=\"note\" id=\"none\" role=\"status\" hidden>No claim passes the filter.</p>\n</section>\n",
    );
}

fn claim(out: &mut String, row: &ClaimRow<'_>) {
    let (experiment, result) = (row.experiment, row.result);
    let _ = write!(
        out,
        "<tr class=\"claim\" role=\"row\" data-verdict=\"{0}\"><td role=\"cell\"><span class=\"verdict {0}\">{1} {2}</span>{6}</td>\
         <td role=\"cell\"><p class=\"statement\">{3} <span class=\"source\">{4}</span></p><p class=\"compared\">{5}</p>",
        class(result.verdict),
        view::symbol(result.verdict),
        words(result.verdict),
        escape(&result.claim.statement),
        escape(&result.claim.source),
        escape(&view::comparison(experiment, &result.claim)),
        result.failures().map_or_else(String::new, |failures| format!("<p class=\"compared\">{failures}</p>")),
    );
    let _ = write!(out, "</td><td role=\"cell\" data-label=\"Effect\">{}", effect(experiment, result));
    if let Some(full) = row.committed {
        let _ = write!(
            out,
            "<p class=\"committed\">Full run: <span class=\"verdict {}\">{} {}</span> {}, n\u{a0}=\u{a0}{}{}</p>",
            class(full.verdict),
            view::symbol(full.verdict),
            words(full.verdict),
            effect(experiment, full),
            view::pairs(full),
            full.failures().map_or_else(String::new, |failures| format!(", {failures}"))
        );
    }
    let _ = writeln!(
        out,
        "</td><td role=\"cell\" data-label=\"Needs\">{}</td><td role=\"cell\" data-label=\"n\" class=\"number\">{}</td></tr>",
        escape(&view::criterion(experiment, &result.claim)),
        view::pairs(result)
    );
}

/// The estimate of a claim, its interval kept on one line.
fn effect(experiment: &ExperimentResult, result: &ClaimResult) -> String {
    match view::effect_parts(experiment, result) {
        (value, Some(ends)) => format!("{} <span class=\"ends\">{}</span>", escape(&value), escape(&ends)),
        (value, None) => escape(&value),
    }
}

/// The words of a verdict, escaped.
fn words(verdict: Verdict) -> String {
    escape(verdict.text())
}

/// Controls that the script shows: without it they would do nothing.
fn filters(out: &mut String, rows: &[ClaimRow<'_>], analysis: &Analysis) {
    out.push_str("<form class=\"filters\" id=\"filters\" hidden>\n<label>Crate <select id=\"by-crate\"><option value=\"\">all</option>");
    for (krate, _) in view::by_crate(analysis) {
        let _ = write!(out, "<option>{}</option>", escape(krate));
    }
    out.push_str("</select></label>\n<label>Verdict <select id=\"by-verdict\"><option value=\"\">all</option>");
    for (verdict, _) in view::tally(rows) {
        let _ = write!(out, "<option value=\"{}\">{}</option>", class(verdict), words(verdict));
    }
    out.push_str("</select></label>\n</form>\n");
}

fn section(out: &mut String, experiment: &ExperimentResult) {
    let spec = &experiment.spec;
    let anchor = slug("e", &spec.name);
    let _ = write!(
        out,
        "<article id=\"{anchor}\">\n<h3>{}</h3>\n<p class=\"meta\"><code>{}</code> · {}</p>\n\
         <p class=\"protocol\">{}</p>\n",
        escape(&spec.title),
        escape(&spec.name),
        escape(&view::facts(experiment)),
        escape(&spec.protocol)
    );
    let notices = view::notices(experiment);
    if !notices.is_empty() {
        out.push_str("<ul class=\"notices\">\n");
        for notice in notices {
            let (kind, text) = notice.split_once(": ").unwrap_or(("Note", &notice));
            let _ = writeln!(out, "<li><strong>{}:</strong> {}</li>", escape(kind), escape(text));
        }
        out.push_str("</ul>\n");
    }
    if !experiment.arms.is_empty() {
        arms(out, experiment);
        figures(out, experiment, &anchor);
    }
    out.push_str("</article>\n");
}

fn figures(out: &mut String, experiment: &ExperimentResult, anchor: &str) {
    out.push_str("<div class=\"figures\">\n");
    for figure in figures::of(experiment, anchor) {
        let svg = plot::svg(&figure.plot);
        if !svg.is_empty() {
            let caption = escape(&figure.caption);
            let _ = writeln!(out, "<figure>{svg}<figcaption>{caption}</figcaption></figure>");
        }
    }
    for (i, curve) in experiment.spec.curves.iter().enumerate() {
        let svg = line::svg(&line::of(experiment, curve, &format!("{anchor}-curve{i}")));
        if !svg.is_empty() {
            let caption = escape(&line::caption(curve));
            let _ = writeln!(out, "<figure>{svg}<figcaption>{caption}</figcaption></figure>");
        }
    }
    out.push_str("</div>\n");
}

fn arms(out: &mut String, experiment: &ExperimentResult) {
    let spec = &experiment.spec;
    let difference = view::difference_heading(experiment);
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Arms of {0}\"><table class=\"arms\">\n\
         <caption class=\"hidden\">Arms of {0}</caption>\n<thead><tr><th scope=\"col\">Arm</th>\
         <th scope=\"col\" class=\"number\">Seeds</th>",
        escape(&spec.title)
    );
    let mut headings: Vec<String> = spec.metrics.iter().map(view::metric_heading).collect();
    if let Some(heading) = &difference {
        headings.insert(1, heading.clone());
    }
    for heading in headings.into_iter().chain(["Wall (s)", "CPU (s)", "Peak (MiB)"].map(str::to_owned)) {
        let _ = write!(out, "<th scope=\"col\" class=\"number\">{}</th>", escape(&heading));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for arm in &spec.arms {
        let result = view::arm_result(experiment, arm);
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{} <span class=\"source\">{}</span><p class=\"compared\">{}</p></th>",
            escape(&arm.label),
            view::role(arm.role),
            escape(&arm.note)
        );
        let mut cells = vec![result.map_or_else(|| DASH.to_owned(), |r| r.seeds.to_string())];
        cells.extend(spec.metrics.iter().map(|m| mean(result.and_then(|r| r.metrics.get(&m.name)), m.decimals)));
        if difference.is_some() {
            let metric = &spec.metrics[0];
            let found = result.and_then(|r| r.differences.get(&metric.name));
            let words = |d| view::difference(&view::advantage(metric, d), metric.decimals);
            cells.insert(2, found.map_or_else(|| DASH.to_owned(), words));
        }
        let cost = result.filter(|r| r.seeds > 0).map(|r| [seconds(r.wall_s), seconds(r.cpu_s), mebibytes(r.peak_mib)]);
        cells.extend(cost.unwrap_or([DASH; 3].map(str::to_owned)));
        for cell in cells {
            let _ = write!(out, "<td class=\"number\">{}</td>", escape(&cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
}

/// Text that HTML shows as it is, also inside attributes. Control characters, which HTML doesn't allow, are left out.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

/// An identifier from a name.
fn slug(kind: &str, name: &str) -> String {
    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    format!("{kind}-{name}")
}
