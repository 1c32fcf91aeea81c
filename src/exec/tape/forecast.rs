//! What the walks over a tape will take of memory, without the work.

use std::collections::BTreeMap;

use super::{Segment, Tape};
use crate::ir::{Kind, TensorType, ValueId};

/// Parameters that are in memory while a segment uses them: what one of a type takes then, and bytes of those that losses read and of
/// their gradients.
pub type Pages<'s> = (&'s dyn Fn(&TensorType) -> u64, (u64, u64));

/// The most that the walks over a tape take.
#[derive(Debug, Clone, Copy, Default)]
pub struct TapeForecast {
    /// Values and their gradients.
    pub activations: u64,
    /// Parameters of a segment, where they come and go.
    pub parameters: u64,
    /// All at one time, with gradients of parameters.
    pub together: u64,
}

/// What is held at a place of the walks.
#[derive(Default)]
struct Walk {
    now: u64,
    entered: u64,
    gradients: u64,
    /// Whether parameters come and go, and their gradients with them.
    paged: bool,
    most: TapeForecast,
}

impl Walk {
    fn look(&mut self) {
        self.most.activations = self.most.activations.max(self.now);
        self.most.parameters = self.most.parameters.max(self.entered);
        self.most.together = self.most.together.max(self.now + self.entered + self.gradients);
    }

    fn enter(&mut self, bytes: u64) {
        self.entered = bytes;
        self.look();
    }

    fn gradient(&mut self, bytes: u64) {
        self.gradients += bytes;
        self.look();
        if self.paged {
            self.gradients = 0;
        }
    }

    fn add(&mut self, there: &mut [bool], id: ValueId, of: impl Fn(ValueId) -> u64) {
        if !std::mem::replace(&mut there[id.index()], true) {
            self.now += of(id);
            self.look();
        }
    }

    fn drop(&mut self, there: &mut [bool], id: ValueId, of: impl Fn(ValueId) -> u64) {
        if std::mem::replace(&mut there[id.index()], false) {
            self.now -= of(id);
        }
    }
}

impl Tape<'_> {
    /// What the walks will take at most, without the work, given what values and parameters of types take. `paged` is for parameters that
    /// are in memory while a segment uses them: what one takes then, and bytes of those that losses read.
    pub fn forecast(&self, size: &dyn Fn(&TensorType) -> u64, of_gradient: &dyn Fn(&TensorType) -> u64, paged: Option<Pages>) -> TapeForecast {
        let of = |id: ValueId| size(&self.graph.value(id).ty);
        let kept = |id: &ValueId| self.graph.value(*id).kind != Kind::Input;
        let types: BTreeMap<&str, &TensorType> = self.graph.params().map(|(_, value)| (value.name.as_str(), &value.ty)).collect();
        let pages = |segment: &Segment| {
            let read = || segment.parameters.iter().filter_map(|name| types.get(name.as_str()));
            paged.as_ref().map_or(0, |(of_parameter, _)| read().map(|ty| of_parameter(ty)).sum())
        };
        let mut walk = Walk { paged: paged.is_some(), ..Walk::default() };
        let mut there = vec![false; self.graph.values().len()];
        let nodes = self.graph.nodes();
        for segment in &self.segments {
            walk.enter(pages(segment));
            for index in segment.nodes.clone() {
                walk.add(&mut there, nodes[index].output, of);
                self.dead[index].iter().filter(|id| kept(id)).for_each(|id| walk.drop(&mut there, *id, of));
            }
        }
        // What losses read, and its gradient.
        if let Some((_, (parameters, gradient))) = &paged {
            walk.enter(*parameters);
            walk.gradient(*gradient);
        }
        // Gradients have places behind those of the values.
        let mut gradients = vec![false; there.len()];
        for id in &self.taps {
            walk.add(&mut gradients, *id, of);
        }
        for segment in self.segments.iter().rev() {
            walk.enter(pages(segment));
            if segment.again {
                for index in segment.nodes.clone() {
                    walk.add(&mut there, nodes[index].output, of);
                    self.dead[index].iter().filter(|id| kept(id) && !self.read_back(**id, segment)).for_each(|id| walk.drop(&mut there, *id, of));
                }
            }
            for index in segment.nodes.clone().rev() {
                let node = &nodes[index];
                if gradients[node.output.index()] {
                    for id in node.inputs.iter().filter(|id| self.reached[id.index()]) {
                        let value = self.graph.value(*id);
                        if value.kind != Kind::Param {
                            walk.add(&mut gradients, *id, of);
                        } else if !std::mem::replace(&mut gradients[id.index()], !walk.paged) {
                            walk.gradient(of_gradient(&value.ty));
                        }
                    }
                    walk.drop(&mut gradients, node.output, of);
                }
                self.done[index].iter().filter(|id| kept(id)).for_each(|id| walk.drop(&mut there, *id, of));
            }
            segment.nodes.clone().for_each(|index| walk.drop(&mut there, nodes[index].output, of));
        }
        walk.most
    }
}
