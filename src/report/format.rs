//! Human-readable numbers.

use std::cmp::Ordering;

/// Bytes in decimal units with three digits: `91.0 MB`.
pub fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, &["B", "kB", "MB", "GB", "TB"])
}

/// A count with three digits: `22.7 M`.
pub fn count(count: u64) -> String {
    scaled(count as f64, &["", "k", "M", "B"]).trim_end().to_owned()
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit])
}

/// A ratio in percent with one digit; a dash if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".into() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// A share between 0 and 1 in whole percent: `62 %`.
pub fn rate(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// A ratio of the size before to the size after: `1.42 x smaller`, `1.30 x larger`.
pub fn size_change(ratio: f64, sign: char) -> String {
    // A ratio that is displayed as 1.00 has no direction.
    if ratio < 0.995 { format!("{:.2} {sign} larger", 1.0 / ratio) } else { format!("{ratio:.2} {sign} smaller") }
}

/// Seconds with three digits: `0.24 s`, `3 min 10 s`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.0995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.995 => format!("{s:.2} s"),
        s if s < 99.95 => format!("{s:.1} s"),
        s => format!("{:.0} min {:.0} s", (s / 60.0).floor(), s % 60.0),
    }
}

/// A shape: `384 x 1536`, `scalar`.
pub fn shape(shape: &[usize]) -> String {
    if shape.is_empty() { "scalar".into() } else { shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ") }
}

/// Milliseconds with at least three digits: `0.91 ms`, `35.2 ms`.
pub fn milliseconds(value: f64) -> String {
    if value < 10.0 { format!("{value:.2} ms") } else { format!("{value:.1} ms") }
}

/// Display name of a runtime, from the short name in reports and options.
pub fn runtime_name(name: &str) -> &str {
    match name {
        "candle" => "built-in executor",
        "onnxruntime" => "ONNX Runtime",
        "sglang" => "SGLang",
        "vllm" => "vLLM",
        other => other,
    }
}

/// A number with four decimals, or without decimals if it is integral.
pub fn figure(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.4}") }
}

/// Decibels, or a dash.
pub fn decibels(value: Option<f64>) -> String {
    value.map_or("-".into(), |db| format!("{db:.1} dB"))
}

/// Natural order of names: `layer.2` before `layer.10`.
pub fn natural(a: &str, b: &str) -> Ordering {
    let key = |text: &str| text.split('.').map(|part| (part.parse::<u64>().ok(), part.to_owned())).collect::<Vec<_>>();
    key(a).cmp(&key(b))
}

/// Text of a value in a table cell.
pub(super) fn cell_text(value: Option<&serde_json::Value>) -> String {
    match value {
        None => "-".into(),
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn natural_order() {
        let mut names = ["l.10.w", "l.9.w", "l.9.b", "embed", "l.x"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, ["embed", "l.x", "l.9.b", "l.9.w", "l.10.w"]);
    }

    #[test]
    fn a_larger_output_is_not_called_smaller() {
        let texts = [1.4159, 0.999, 0.5, 0.1].map(|ratio| size_change(ratio, 'x'));
        assert_eq!(texts, ["1.42 x smaller", "1.00 x smaller", "2.00 x larger", "10.00 x larger"]);
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!([bytes(0), bytes(999), bytes(1000), bytes(90_868_376), bytes(2_200_000_000)], ["0 B", "999 B", "1.00 kB", "90.9 MB", "2.20 GB"]);
        assert_eq!([count(7), count(22_713_216), count(999_999)], ["7", "22.7 M", "1.00 M"]);
        assert_eq!([seconds(0.0123), seconds(0.5), seconds(12.34), seconds(190.0)], ["12 ms", "0.50 s", "12.3 s", "3 min 10 s"]);
        assert_eq!([percent(1, 3), percent(0, 0)], ["33.3 %", "-"]);
        assert_eq!([figure(1613.0), figure(0.81239)], ["1613", "0.8124"]);
    }
}
