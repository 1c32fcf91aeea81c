//! Searches for tests.
#![cfg(test)]

use super::Found;
use super::formats::Unit;
use crate::pass::Score;

/// Units with two formats of these times in milliseconds, and floats. The original model takes 20.
pub fn found(times: &[[f64; 2]]) -> Found {
    let option = |loss: f64, bytes: u64| Some(Score { loss, bytes });
    let unit = |(at, [first, second]): (usize, &[f64; 2])| Unit {
        weights: vec![format!("{at}.weight")],
        parameters: 100,
        options: vec![option(4.0 + at as f64, 100), option(1.0 + at as f64 / 2.0, 100), option(0.0, 400)],
        milliseconds: vec![*first, *second, 0.0],
        ..Unit::new(format!("{at}"), 3)
    };
    let formats = ["int8-static", "int8-dynamic", "floats"].map(str::to_owned).to_vec();
    Found { formats, units: times.iter().enumerate().map(unit).collect(), original_ms: Some(20.0), ..Found::default() }
}
