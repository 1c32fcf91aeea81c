//! Prediction of the memory that the passes over a tape need.

use std::collections::BTreeMap;

use super::{Segment, Tape};
use crate::ir::{Kind, TensorType, Value, ValueId};

/// Costs of paged parameters: bytes of a resident parameter by type, and bytes of the parameters that
/// losses read and of their gradients.
pub type Pages<'s> = (&'s dyn Fn(&TensorType) -> u64, (u64, u64));

/// Peak memory of the passes over a tape.
#[derive(Debug, Clone, Copy, Default)]
pub struct TapeForecast {
    /// Activations and their gradients.
    pub activations: u64,
    /// Parameters of a segment, if parameters are paged.
    pub parameters: u64,
    /// All at the same time, including gradients of parameters.
    pub total: u64,
}

/// Memory state while the passes are simulated.
#[derive(Default)]
struct Walk {
    now: u64,
    entered: u64,
    gradients: u64,
    /// Whether parameters are paged, so that their gradients are consumed immediately.
    paged: bool,
    most: TapeForecast,
}

impl Walk {
    fn update_peak(&mut self) {
        self.most.activations = self.most.activations.max(self.now);
        self.most.parameters = self.most.parameters.max(self.entered);
        self.most.total = self.most.total.max(self.now + self.entered + self.gradients);
    }

    fn enter(&mut self, bytes: u64) {
        self.entered = bytes;
        self.update_peak();
    }

    /// A gradient of a parameter: its bytes while it is computed, and afterwards.
    fn gradient(&mut self, [transient, retained]: [u64; 2]) {
        self.gradients += transient;
        self.update_peak();
        self.gradients = if self.paged { 0 } else { self.gradients - transient + retained };
    }

    fn add(&mut self, live: &mut [bool], id: ValueId, of: impl Fn(ValueId) -> u64) {
        if !std::mem::replace(&mut live[id.index()], true) {
            self.now += of(id);
            self.update_peak();
        }
    }

    fn drop(&mut self, live: &mut [bool], id: ValueId, of: impl Fn(ValueId) -> u64) {
        if std::mem::replace(&mut live[id.index()], false) {
            self.now -= of(id);
        }
    }
}

impl Tape<'_> {
    /// Predicts peak memory without computing, from the bytes of values by type, and the bytes of the
    /// gradient of a parameter while it is computed and afterwards. `paged` describes paged parameters, if
    /// there are any.
    pub fn forecast(&self, size: &dyn Fn(&TensorType) -> u64, of_gradient: &dyn Fn(&Value) -> [u64; 2], paged: Option<Pages>) -> TapeForecast {
        let of = |id: ValueId| size(&self.graph.value(id).ty);
        let tracked = |id: &ValueId| self.graph.value(*id).kind != Kind::Input;
        let types: BTreeMap<&str, &TensorType> = self.graph.params().map(|(_, value)| (value.name.as_str(), &value.ty)).collect();
        let pages = |segment: &Segment| {
            let read = || segment.parameters.iter().filter_map(|name| types.get(name.as_str()));
            paged.as_ref().map_or(0, |(of_parameter, _)| read().map(|ty| of_parameter(ty)).sum())
        };
        let mut walk = Walk { paged: paged.is_some(), ..Walk::default() };
        let mut live = vec![false; self.graph.values().len()];
        let nodes = self.graph.nodes();
        for segment in &self.segments {
            walk.enter(pages(segment));
            for index in segment.nodes.clone() {
                walk.add(&mut live, nodes[index].output, of);
                self.dead[index].iter().filter(|id| tracked(id)).for_each(|id| walk.drop(&mut live, *id, of));
            }
        }
        // Parameters that losses read, and their gradients.
        if let Some((_, (parameters, gradient))) = &paged {
            walk.enter(*parameters);
            walk.gradient([*gradient, *gradient]);
        }
        // Gradients by value, in addition to the values in `live`.
        let mut gradients = vec![false; live.len()];
        for id in &self.taps {
            walk.add(&mut gradients, *id, of);
        }
        for segment in self.segments.iter().rev() {
            walk.enter(pages(segment));
            if segment.recomputed {
                for index in segment.nodes.clone() {
                    walk.add(&mut live, nodes[index].output, of);
                    self.dead[index].iter().filter(|id| tracked(id) && !self.read_back(**id, segment)).for_each(|id| walk.drop(&mut live, *id, of));
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
                            walk.gradient(of_gradient(value));
                        }
                    }
                    walk.drop(&mut gradients, node.output, of);
                }
                self.done[index].iter().filter(|id| tracked(id)).for_each(|id| walk.drop(&mut live, *id, of));
            }
            segment.nodes.clone().for_each(|index| walk.drop(&mut live, nodes[index].output, of));
        }
        walk.most
    }
}
