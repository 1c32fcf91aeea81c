//! Charts: marks are SVG that is stretched to any width; text is HTML on top of it, so that it stays
//! legible on phones and in print.

use maud::{Markup, html};

/// Width and height of the coordinate system of a chart.
pub(super) const SIZE: f64 = 1000.0;

/// A linear or logarithmic axis with round ticks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    logarithmic: bool,
}

impl Axis {
    /// A linear axis that covers all values, with about `ticks` ticks.
    pub fn over(values: impl IntoIterator<Item = f64>, ticks: usize) -> Axis {
        let (mut low, mut high) = values.into_iter().filter(|v| v.abs() < 1e300).fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        if high - low <= 1e-9 * high.abs().max(low.abs()) {
            let half = if high == 0.0 { 0.5 } else { high.abs() * 0.05 };
            (low, high) = (low - half, high + half);
        }
        let rough = (high - low) / ticks.max(1) as f64;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough * 0.999).unwrap_or(10.0 * power);
        let (first, last) = ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
        let ticks: Vec<f64> = (0..=(last - first) as usize).map(|i| (first + i as f64) * step).collect();
        Axis { low: first * step, high: last * step, ticks, logarithmic: false }
    }

    /// A logarithmic axis that covers all positive values, with ticks at powers of ten.
    pub fn logarithmic(values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = values.into_iter().filter(|v| *v > 0.0 && v.is_finite()).fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = if low > high { (1.0, 10.0) } else { (low, high) };
        let (first, last) = (low.log10().floor(), high.log10().ceil().max(low.log10().floor() + 1.0));
        let ticks = (0..=(last - first) as i32).map(|i| 10f64.powf(first + f64::from(i))).collect();
        Axis { low: first, high: last, ticks, logarithmic: true }
    }

    /// Relative position of a value, from 0 to 1.
    pub fn at(&self, value: f64) -> f64 {
        let value = if self.logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value };
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// Distance of a value from the left.
    pub fn x(&self, value: f64) -> f64 {
        SIZE * self.at(value)
    }

    /// Distance of a value from the top.
    pub fn y(&self, value: f64) -> f64 {
        SIZE * (1.0 - self.at(value))
    }

    /// Number of decimals that distinguish adjacent ticks.
    fn digits(&self) -> usize {
        let step = (self.high - self.low) / (self.ticks.len().max(2) - 1) as f64;
        let digits = (0..9).find(|digits| (step * 10f64.powi(*digits)).fract().min(1.0 - (step * 10f64.powi(*digits)).fract()) < 1e-6);
        digits.unwrap_or(9) as usize
    }

    /// Text of a tick.
    pub fn plain(&self, value: f64) -> String {
        if value == 0.0 {
            return "0".into();
        }
        if (1e-4..1e6).contains(&value.abs()) { minus(&format!("{value:.*}", self.digits())) } else { short(value) }
    }
}

/// A number with three significant digits.
pub(super) fn short(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => return "0".into(),
        v if !(1e-4..1e6).contains(&v) => return minus(&format!("{value:.1e}")),
        v => (2.0 - v.log10().floor()).max(0.0) as usize,
    };
    minus(&format!("{value:.digits$}"))
}

/// Replaces hyphens by minus signs, which are as wide as digits.
fn minus(text: &str) -> String {
    text.replace('-', "\u{2212}")
}

/// Frame of a chart.
pub(super) struct Frame<'a> {
    /// Height in pixels.
    pub height: u32,
    /// Description for screen readers.
    pub title: &'a str,
    /// The horizontal axis and the text of its ticks.
    pub x: Option<(&'a Axis, &'a dyn Fn(f64) -> String)>,
    /// The vertical axis and the text of its ticks.
    pub y: Option<(&'a Axis, &'a dyn Fn(f64) -> String)>,
    /// Whether hovering displays the tooltip of the horizontally nearest mark.
    pub nearest: bool,
}

impl Frame<'_> {
    /// Draws a chart with these marks.
    pub fn draw(&self, marks: &Markup) -> Markup {
        self.draw_with(marks, &html! {})
    }

    /// Draws a chart with these marks and labels.
    pub fn draw_with(&self, marks: &Markup, labels: &Markup) -> Markup {
        let percent = |axis: &Axis, value: f64| format!("{:.2}%", 100.0 * axis.at(value));
        html! {
            div.plot.with-x[self.x.is_some()].with-y[self.y.is_some()].nearest[self.nearest] style={ "--height:" (self.height) "px" } {
                div.area {
                    svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label=(self.title) {
                        @if let Some((axis, _)) = self.y {
                            path.grid d=(axis.ticks.iter().map(|t| format!("M0 {:.1}H1000", axis.y(*t))).collect::<String>()) {}
                        }
                        (marks)
                    }
                    (labels)
                    @if let Some((axis, words)) = self.y {
                        @for tick in &axis.ticks { span.tick.y style={ "bottom:" (percent(axis, *tick)) } { (words(*tick)) } }
                    }
                    @if let Some((axis, words)) = self.x {
                        @for tick in &axis.ticks { span.tick.x style={ "left:" (percent(axis, *tick)) } { (words(*tick)) } }
                    }
                }
            }
        }
    }
}

/// A dot as a line of length zero with round caps, which stays round if the chart is stretched.
pub(super) fn dot(x: f64, y: f64) -> String {
    format!("M{x:.1} {y:.1}h0")
}

/// A line through points.
pub(super) fn line(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let point = |(i, (x, y)): (usize, (f64, f64))| format!("{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" });
    points.into_iter().enumerate().map(point).collect()
}

/// A row of a chart: label, marks and value.
pub(super) struct Track {
    /// Label of the row.
    pub label: Markup,
    /// Marks of the row.
    pub marks: Markup,
    /// Text of the value.
    pub value: String,
}

/// A chart of rows that share an axis.
pub(super) fn tracks(title: &str, axis: &Axis, words: &dyn Fn(f64) -> String, tracks: &[Track]) -> Markup {
    html! {
        div.tracks {
            @for track in tracks {
                div.track-row {
                    div.track-label { (track.label) }
                    div.track {
                        svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label={ (title) ": " (track.value) } {
                            path.grid d=(axis.ticks.iter().map(|t| format!("M{:.1} 0V1000", axis.x(*t))).collect::<String>()) {}
                            (track.marks)
                        }
                    }
                    div.track-value { (track.value) }
                }
            }
            div.track-axis {
                @for tick in &axis.ticks { span.tick.x style={ "left:" (format!("{:.2}%", 100.0 * axis.at(*tick))) } { (words(*tick)) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_cover_all_values_and_have_round_ticks() {
        let axis = Axis::over([0.7906, 0.8251], 4);
        assert_eq!(axis.ticks.iter().map(|t| axis.plain(*t)).collect::<Vec<_>>(), ["0.79", "0.80", "0.81", "0.82", "0.83"]);
        assert!(axis.at(0.79) < 1e-9 && axis.at(0.83) > 1.0 - 1e-9);
        let axis = Axis::over([-45.6, 43.0], 5);
        assert_eq!(axis.ticks.iter().map(|t| axis.plain(*t)).collect::<Vec<_>>(), ["\u{2212}60", "\u{2212}40", "\u{2212}20", "0", "20", "40", "60"]);
        for values in [vec![], vec![3.0], vec![0.0, 0.0], vec![f64::NAN, 1.0], vec![1e299, -1e299], vec![1e-30]] {
            let axis = Axis::over(values.clone(), 4);
            assert!(axis.ticks.len() >= 2 && axis.ticks.len() < 12, "{values:?} {axis:?}");
            assert!(values.iter().filter(|v| v.is_finite()).all(|v| axis.low <= *v && *v <= axis.high), "{values:?} {axis:?}");
        }
    }

    #[test]
    fn logarithmic_axes_have_ticks_at_powers_of_ten() {
        let axis = Axis::logarithmic([250.0, 47_000_000.0, 0.0]);
        assert_eq!((axis.ticks.first(), axis.ticks.last()), (Some(&100.0), Some(&100_000_000.0)));
        assert_eq!(axis.at(100_000.0), 0.5);
        assert_eq!(Axis::logarithmic([]).ticks.len(), 2);
    }
}
