//! Attributes with a value for each spatial axis or for each side of an image.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value as Json;

/// A number for height and width; serialized as one number if both are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerAxis(pub [usize; 2]);

/// Padding around an image: top, left, bottom, right. Serialized as one number if all are equal, as two
/// (start, end) if both axes are equal, else as four.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Padding(pub [usize; 4]);

impl PerAxis {
    /// Whether both numbers are 1.
    pub(super) fn is_one(&self) -> bool {
        *self == 1
    }
}

impl Padding {
    /// Top and left.
    pub(super) fn before(&self) -> [usize; 2] {
        [self.0[0], self.0[1]]
    }

    /// Start and end padding of an axis in total.
    pub(super) fn around(&self, axis: usize) -> Option<usize> {
        self.0[axis].checked_add(self.0[axis + 2])
    }
}

impl From<usize> for PerAxis {
    fn from(both: usize) -> Self {
        PerAxis([both; 2])
    }
}

impl From<usize> for Padding {
    fn from(all: usize) -> Self {
        Padding([all; 4])
    }
}

impl PartialEq<usize> for PerAxis {
    fn eq(&self, both: &usize) -> bool {
        self.0 == [*both; 2]
    }
}

impl PartialEq<usize> for Padding {
    fn eq(&self, all: &usize) -> bool {
        self.0 == [*all; 4]
    }
}

impl Serialize for PerAxis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == self.0[0] { self.0[0].serialize(serializer) } else { self.0.serialize(serializer) }
    }
}

impl Serialize for Padding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            [all, ..] if *self == all => all.serialize(serializer),
            [before, left, behind, right] if before == left && behind == right => [before, behind].serialize(serializer),
            sides => sides.serialize(serializer),
        }
    }
}

/// Deserializes a number or a list of numbers.
fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    let json = Json::deserialize(deserializer)?;
    let number = |json: &Json| json.as_u64().and_then(|n| usize::try_from(n).ok());
    let found = match &json {
        Json::Array(values) => values.iter().map(number).collect(),
        one => number(one).map(|n| vec![n]),
    };
    found.ok_or_else(|| serde::de::Error::custom(format!("{json} is neither a non-negative integer nor a list of them")))
}

impl<'de> Deserialize<'de> for PerAxis {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match numbers(deserializer)?.as_slice() {
            [both] => Ok(PerAxis([*both; 2])),
            [height, width] => Ok(PerAxis([*height, *width])),
            other => Err(serde::de::Error::custom(format!("expected one number, or one for height and one for width, got {other:?}"))),
        }
    }
}

impl<'de> Deserialize<'de> for Padding {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match numbers(deserializer)?.as_slice() {
            [all] => Ok(Padding([*all; 4])),
            [before, behind] => Ok(Padding([*before, *before, *behind, *behind])),
            [above, left, below, right] => Ok(Padding([*above, *left, *below, *right])),
            other => Err(serde::de::Error::custom(format!("expected one, two or four numbers of padding, got {other:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_serialized_in_their_shortest_form() {
        for (text, sides) in [("1", [1; 4]), ("[0,2]", [0, 0, 2, 2]), ("[1,0,1,0]", [1, 0, 1, 0])] {
            assert_eq!(serde_json::from_str::<Padding>(text).unwrap(), Padding(sides));
            assert_eq!(serde_json::to_string(&Padding(sides)).unwrap(), text);
        }
        assert_eq!(serde_json::from_str::<PerAxis>("[2,1]").unwrap(), PerAxis([2, 1]));
        assert_eq!(serde_json::to_string(&PerAxis([3, 3])).unwrap(), "3");
        for text in ["-1", "[1,2,3]", "[]", "\"a\"", "[1.5]"] {
            assert!(serde_json::from_str::<Padding>(text).is_err() && serde_json::from_str::<PerAxis>(text).is_err(), "{text}");
        }
    }
}
