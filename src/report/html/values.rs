//! Histograms of the values of the most changed weights, before and after.

use std::fmt::Write;

use maud::{Markup, html};

use super::breakable;
use super::chart::{Frame, SIZE, short};
use crate::report::format::{decibels, percent};
use crate::report::{Report, WeightHistogram};

fn title(report: &Report) -> String {
    match report.histograms.len() {
        1 => "Values of the weight that changed most".into(),
        count => format!("Values of the {count} weights that changed most"),
    }
}

pub(super) fn section(report: &Report) -> Markup {
    if report.histograms.is_empty() {
        return html! {};
    }
    let content = html! {
        div.pictures { @for histogram in &report.histograms { (picture(report, histogram)) } }
    };
    let lead = "The grey area is before, the line is after: a sample of the values, within four standard deviations of the mean.";
    super::section("values", &title(report), lead, &content)
}

fn picture(report: &Report, histogram: &WeightHistogram) -> Markup {
    let total = |counts: &[u32]| counts.iter().map(|c| u64::from(*c)).sum::<u64>().max(1);
    let parts = |counts: &[u32]| {
        let all = total(counts) as f64;
        counts.iter().map(|c| f64::from(*c) / all).collect::<Vec<_>>()
    };
    let (before, after) = (parts(&histogram.before), parts(&histogram.after));
    let most = |parts: &[f64]| parts.iter().copied().fold(0.0, f64::max);
    // If many values are zero, the bin of zeros is cut off, so that the other bins remain visible.
    let top = (1.25 * most(&before)).max(1e-9).min(1.05 * most(&before).max(most(&after)).max(1e-9));
    let steps = |parts: &[f64], close: bool| {
        let mut path = String::new();
        let width = SIZE / parts.len().max(1) as f64;
        for (index, part) in parts.iter().enumerate() {
            // Writing into a string cannot fail.
            let _ = write!(
                path,
                "{}{:.1} {:.1}H{:.1}",
                if index == 0 { "M" } else { "L" },
                index as f64 * width,
                SIZE * (1.0 - part / top).max(0.0),
                (index + 1) as f64 * width
            );
        }
        if close && !path.is_empty() {
            path += "V1000H0Z";
        }
        path
    };
    let marks = html! {
        path.fill.before d=(steps(&before, true)) {}
        path.outline.after d=(steps(&after, false)) {}
    };
    let layer = report.layers.iter().find(|layer| layer.name == histogram.name);
    let cut = after.iter().position(|part| *part > top).map(|bin| histogram.after[bin]);
    html! {
        figure.picture {
            figcaption { code { (breakable(&histogram.name)) } }
            p.lead {
                @if let Some(layer) = layer { (decibels(layer.sqnr_db)) }
                @if let Some(count) = cut { ", " (percent(count.into(), total(&histogram.after))) " in one bin" }
            }
            (Frame { height: 110, title: "values before and after", x: None, y: None, nearest: false }.draw(&marks))
            div.ends { span { (short(histogram.low.into())) } span { (short(histogram.high.into())) } }
        }
    }
}
