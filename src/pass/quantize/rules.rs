//! Schemes with their group sizes, and rules that assign them to weights.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{NAME, Scheme};
use crate::error::{Error, ParseError, Result};
use crate::pass::targets;
use crate::store::{Granularity, Pattern};

/// Group sizes that runtimes have kernels for, in descending order.
pub(super) const USUAL_GROUPS: [usize; 3] = [128, 64, 32];

/// Another scheme for some of the weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SchemeRule {
    /// Weights that the rule applies to
    pub targets: Vec<Pattern>,
    /// Quantization scheme of these weights
    pub scheme: Scheme,
    /// Inputs that share a scale, like `group_size` of the pass [default: depends on the scheme]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<i64>,
}

impl FromStr for SchemeRule {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let (pattern, layout) = targets::parse_rule::<SchemeLayout>(text, "SCHEME")?;
        Ok(SchemeRule { targets: vec![pattern], scheme: layout.scheme, group_size: layout.group_size })
    }
}

impl SchemeRule {
    pub(super) fn layout(&self) -> SchemeLayout {
        SchemeLayout { scheme: self.scheme, group_size: self.group_size }
    }
}

/// A scheme with its group size, written `W4A16` or `W4A16:64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SchemeLayout {
    pub scheme: Scheme,
    pub group_size: Option<i64>,
}

impl FromStr for SchemeLayout {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let (scheme, size) = text.split_once(':').map_or((text, None), |(scheme, size)| (scheme, Some(size)));
        let number = |size: &str| size.parse().map_err(|_| ParseError::from(format!("`{size}` is not a group size")));
        Ok(SchemeLayout { scheme: scheme.parse()?, group_size: size.map(number).transpose()? })
    }
}

impl SchemeLayout {
    /// Requested group size; `None` for one scale per row, or if the scheme has a fixed granularity.
    pub fn group(self) -> Option<usize> {
        match self.group_size {
            None => self.scheme.group(),
            Some(size) => usize::try_from(size).ok(),
        }
    }

    /// Granularity for rows of these lengths: the requested group size if it divides all of them, else
    /// the largest usual size that does, else one scale per row. Returns `None` if the scheme cannot
    /// encode them.
    pub fn granularity(self, rows: &[usize]) -> Option<Granularity> {
        let Some(size) = self.group() else { return self.scheme.granularity(rows) };
        let smaller = USUAL_GROUPS.into_iter().filter(|usual| *usual < size);
        let divides = |size: &usize| rows.iter().all(|row| row.is_multiple_of(*size));
        Some(std::iter::once(size).chain(smaller).find(divides).map_or(Granularity::Channel, Granularity::Group))
    }

    pub fn check(self) -> Result<()> {
        match (self.group_size, self.scheme.group()) {
            (Some(size), _) if size == 0 || size < -1 => Err(Error::option(NAME, "`group_size` must be at least 1, or -1 for one scale per row")),
            (Some(size), None) if size != -1 || !self.scheme.codes().is_integer() => {
                Err(Error::option(NAME, format!("`group_size` is not supported for {}, whose granularity is fixed", self.scheme.name())))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_have_a_scheme_and_an_optional_group_size() {
        let rule: SchemeRule = "*down_proj*=w8a16:32".parse().unwrap();
        assert_eq!((rule.scheme, rule.group_size), (Scheme::W8A16, Some(32)));
        assert!(rule.targets[0].matches("model.layers.0.mlp.down_proj.weight") && !rule.targets[0].matches("a.up_proj.weight"));
        assert_eq!("a=FP8-DYNAMIC".parse::<SchemeRule>().unwrap().group_size, None);
        for (text, part) in [("a", "PATTERN=SCHEME"), ("a=W3A3", "W3A3"), ("a=W4A16:x", "`x` is not a group size")] {
            assert!(text.parse::<SchemeRule>().unwrap_err().to_string().contains(part), "{text}");
        }
    }
}
