//! Text form of groups, for people to read.
//!
//! ```text
//! mlp 128 fc1: fc1.weight[0], fc1.bias[0], fc2.weight[1]
//! channels 8 conv: conv.weight[0], fc1.weight[1] 16 a unit
//! held 10 fc2.weight[0]: output `logits`
//! ```

use std::fmt;

use super::{FrozenAxis, Group, Groups, Member, UnitLayout};

impl fmt::Display for UnitLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.offset > 0 {
            write!(f, " from {}", self.offset)?;
        }
        if self.block > 1 {
            write!(f, " {} a unit", self.block)?;
        }
        self.repeats.iter().try_for_each(|(count, stride)| write!(f, " {count} times every {stride}"))
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]{}", self.param, self.axis, self.layout)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}: {}", self.unit, self.size, self.name, self.carriers())
    }
}

impl Group {
    /// All axes that shrink when a unit is removed.
    pub fn carriers(&self) -> String {
        let mut text = self.members.iter().map(Member::to_string).collect::<Vec<_>>().join(", ");
        if let Some(output) = &self.output {
            text += &format!(", output `{output}`");
        }
        if self.normalised {
            text += " (normalised over)";
        }
        text
    }
}

impl fmt::Display for FrozenAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "held {} {}[{}]: {}", self.size, self.param, self.axis, self.reason)
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.groups.iter().try_for_each(|group| writeln!(f, "{group}"))?;
        self.frozen.iter().try_for_each(|axis| writeln!(f, "{axis}"))
    }
}
