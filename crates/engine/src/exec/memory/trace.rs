//! Allocation trace: every allocation and release in a few steps, and the allocations at the peak.
//!
//! The output format is Chrome's Trace Event Format, which Perfetto also reads.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::category::MemoryCategory;
use crate::analysis;
use crate::ir::Graph;

/// Number of steps that are recorded completely, in addition to that of the peak and to loading before
/// the first step.
const FIRST_STEPS: usize = 3;
/// Maximum number of changes recorded per step; beyond it, only peaks are recorded.
const MAX_CHANGES: usize = 20_000;
/// Number of points in the timeline of a step.
const POINTS: usize = 240;
/// Number of names and kinds listed in the explanation of a peak.
const NAMED: usize = 3;

/// Bytes by category.
type Levels = [u64; MemoryCategory::ALL.len()];

/// One tensor, or a total without a name.
#[derive(Debug, Clone)]
struct Allocation {
    id: u64,
    name: String,
    bytes: u64,
}

#[derive(Debug, Clone)]
enum Change {
    Allocated(MemoryCategory, Allocation),
    Released(MemoryCategory, u64),
    /// Work starts on a node, or on a phase without a node.
    Phase(&'static str, String),
    /// Levels beyond the maximum number of recorded changes.
    Levels(Levels),
}

#[derive(Debug, Clone, Default)]
struct Step {
    number: u64,
    /// Allocations at the start of the step.
    before: Vec<(MemoryCategory, Allocation)>,
    /// Changes with nanoseconds since the start of the trace.
    changes: Vec<(u64, Change)>,
    begin: u64,
    end: u64,
}

/// The allocations at the peak of memory use.
#[derive(Debug, Clone, Default)]
pub struct Peak {
    /// Number of the step from 1; 0 before the first.
    pub step: u64,
    /// The phase: `forward`, `backward`, `recomputation`, `losses`, `gradients`, `optimizer`.
    pub phase: &'static str,
    /// The current node; empty if there is none.
    pub node: String,
    /// Category, name and bytes, largest first.
    pub tensors: Vec<(MemoryCategory, String, u64)>,
}

impl Peak {
    /// Total bytes.
    pub fn total(&self) -> u64 {
        self.tensors.iter().map(|(.., bytes)| bytes).sum()
    }
}

/// A recording of memory accounting over time.
#[derive(Debug, Clone)]
pub struct MemoryTrace {
    start: Instant,
    next: u64,
    live: [Vec<Allocation>; MemoryCategory::ALL.len()],
    phase: (&'static str, String),
    step: Step,
    recorded: Vec<Step>,
    highest: Option<Step>,
    peak: Peak,
    most: u64,
    /// Memory use is at a new maximum that is not recorded as the peak yet.
    rising: bool,
}

impl Default for MemoryTrace {
    fn default() -> Self {
        MemoryTrace {
            start: Instant::now(),
            next: 0,
            live: Default::default(),
            phase: ("loading", String::new()),
            step: Step::default(),
            recorded: Vec::new(),
            highest: None,
            peak: Peak::default(),
            most: 0,
            rising: false,
        }
    }
}

impl MemoryTrace {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn levels(&self) -> Levels {
        MemoryCategory::ALL.map(|category| self.live[category as usize].iter().map(|allocation| allocation.bytes).sum())
    }

    fn push(&mut self, change: Change) {
        if self.step.changes.len() < MAX_CHANGES {
            let now = self.now();
            self.step.changes.push((now, change));
        }
    }

    pub(super) fn allocate(&mut self, category: MemoryCategory, name: &str, bytes: u64, all: u64) {
        if bytes == 0 {
            return;
        }
        let allocation = Allocation { id: self.next, name: name.to_owned(), bytes };
        self.next += 1;
        self.push(Change::Allocated(category, allocation.clone()));
        self.live[category as usize].push(allocation);
        if all > self.most {
            (self.most, self.rising) = (all, true);
        }
    }

    /// Releases bytes of allocations with this name, or of any in the category if none has it.
    pub(super) fn release(&mut self, category: MemoryCategory, name: &str, mut bytes: u64) {
        self.settle();
        while bytes > 0 {
            let list = &mut self.live[category as usize];
            let Some(at) = list.iter().rposition(|allocation| allocation.name == name).or_else(|| list.len().checked_sub(1)) else { return };
            let allocation = list.swap_remove(at);
            self.push(Change::Released(category, allocation.id));
            if allocation.bytes > bytes {
                let rest = Allocation { id: self.next, bytes: allocation.bytes - bytes, name: allocation.name };
                self.next += 1;
                self.push(Change::Allocated(category, rest.clone()));
                self.live[category as usize].push(rest);
                return;
            }
            bytes -= allocation.bytes;
        }
    }

    pub(super) fn enter_phase(&mut self, phase: &'static str, node: &str) {
        self.settle();
        self.phase = (phase, node.to_owned());
        self.push(Change::Phase(phase, node.to_owned()));
    }

    pub(super) fn begin(&mut self, number: Option<u64>) {
        self.settle();
        let now = self.now();
        self.step.end = now;
        let before =
            MemoryCategory::ALL.into_iter().flat_map(|category| self.live[category as usize].iter().map(move |allocation| (category, allocation.clone())));
        let number = number.unwrap_or(self.step.number + 1);
        let next = Step { number, before: before.collect(), changes: Vec::new(), begin: now, end: now };
        self.close(next);
    }

    /// Stores a finished step if it is to be recorded.
    fn close(&mut self, next: Step) {
        let step = std::mem::replace(&mut self.step, next);
        if self.recorded.len() <= FIRST_STEPS {
            self.recorded.push(step);
        } else if step.number == self.peak.step {
            self.highest = Some(step);
        }
    }

    /// Records the current allocations as the peak if they are a new maximum.
    fn settle(&mut self) {
        if !std::mem::take(&mut self.rising) {
            return;
        }
        let all = MemoryCategory::ALL.into_iter().flat_map(|category| self.live[category as usize].iter().map(move |allocation| (category, allocation)));
        let mut tensors: Vec<_> = all.map(|(category, allocation)| (category, allocation.name.clone(), allocation.bytes)).collect();
        tensors.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.1.cmp(&b.1)));
        self.peak = Peak { step: self.step.number, phase: self.phase.0, node: self.phase.1.clone(), tensors };
        if self.step.changes.len() >= MAX_CHANGES {
            let (now, levels) = (self.now(), self.levels());
            self.step.changes.push((now, Change::Levels(levels)));
        }
    }

    /// A snapshot of the trace, as if the current step had ended.
    pub(super) fn finished(&self) -> MemoryTrace {
        let mut trace = self.clone();
        trace.settle();
        trace.step.end = trace.now();
        trace.close(Step::default());
        trace
    }

    /// The allocations at the peak.
    pub fn peak(&self) -> &Peak {
        &self.peak
    }

    /// The recorded steps in order.
    fn steps(&self) -> impl Iterator<Item = &Step> {
        self.recorded.iter().chain(&self.highest)
    }

    /// Events in the Trace Event Format, each pass as a process.
    pub fn events(passes: &[(String, MemoryTrace)]) -> Value {
        let mut events = Vec::new();
        for ((pass, trace), process) in passes.iter().zip(1u64..) {
            let names = [("process_name", 0, pass.as_str()), ("thread_name", 1, "steps"), ("thread_name", 2, "nodes")];
            events.extend(names.map(|(name, thread, of)| json!({ "ph": "M", "name": name, "pid": process, "tid": thread, "args": { "name": of } })));
            trace.steps().for_each(|step| step.events(process, &mut events));
        }
        let peaks: Vec<Value> = passes.iter().map(|(pass, trace)| trace.peak.to_json(pass)).collect();
        json!({ "traceEvents": events, "displayTimeUnit": "ms", "otherData": { "peaks": peaks } })
    }

    /// Points of a stacked chart of the step with the peak: milliseconds since its start, and bytes by
    /// category. Nearby points are reduced to the highest.
    pub fn timeline(&self) -> Vec<Value> {
        let Some(step) = self.steps().filter(|step| step.number == self.peak.step).last() else { return Vec::new() };
        let slice = (step.end - step.begin) / POINTS as u64 + 1;
        let mut highest: BTreeMap<u64, (u64, Levels)> = BTreeMap::new();
        let mut phases: BTreeMap<u64, &'static str> = BTreeMap::new();
        step.replay(&mut |at, levels, change| {
            let slot = (at - step.begin) / slice;
            if let Some(Change::Phase(phase, _)) = change {
                phases.insert(slot, phase);
            }
            let best = highest.entry(slot).or_insert((at, *levels));
            if levels.iter().sum::<u64>() > best.1.iter().sum::<u64>() {
                *best = (at, *levels);
            }
        });
        let phase = |slot: u64| phases.range(..=slot).next_back().map_or("", |(_, phase)| phase);
        let point = |(slot, (at, levels)): (&u64, &(u64, Levels))| {
            let mut point = by_category(levels);
            point.insert("milliseconds".into(), json!((at - step.begin) as f64 / 1e6));
            point.insert("phase".into(), json!(phase(*slot)));
            Value::Object(point)
        };
        highest.iter().map(point).collect()
    }
}

fn by_category(levels: &Levels) -> Map<String, Value> {
    MemoryCategory::ALL.into_iter().map(|category| (category.name().to_owned(), json!(levels[category as usize]))).collect()
}

impl Step {
    /// Calls `each` with the levels at the start and after each change.
    fn replay<'s>(&'s self, each: &mut dyn FnMut(u64, &Levels, Option<&'s Change>)) {
        let mut levels = Levels::default();
        let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
        for (category, allocation) in &self.before {
            levels[*category as usize] += allocation.bytes;
            sizes.insert(allocation.id, allocation.bytes);
        }
        each(self.begin, &levels, None);
        for (at, change) in &self.changes {
            match change {
                Change::Allocated(category, allocation) => {
                    levels[*category as usize] += allocation.bytes;
                    sizes.insert(allocation.id, allocation.bytes);
                }
                Change::Released(category, id) => levels[*category as usize] -= sizes.remove(id).unwrap_or(0),
                Change::Levels(all) => levels = *all,
                Change::Phase(..) => {}
            }
            each(*at, &levels, Some(change));
        }
    }

    fn events(&self, process: u64, events: &mut Vec<Value>) {
        let micros = |nanos: u64| nanos as f64 / 1e3;
        let slice = |thread: u64, name: &str, from: u64, to: u64| json!({ "ph": "X", "name": name, "cat": "work", "pid": process, "tid": thread, "ts": micros(from), "dur": micros(to - from), "args": { "step": self.number } });
        let name = if self.number == 0 { "loading".to_owned() } else { format!("step {}", self.number) };
        events.push(slice(1, &name, self.begin, self.end));
        let lasting = |ph: &str, category: MemoryCategory, allocation: &Allocation, at: u64| json!({ "ph": ph, "cat": category.name(), "name": allocation.name, "id": format!("{:#x}", allocation.id), "pid": process, "tid": 0, "ts": micros(at), "args": { "bytes": allocation.bytes, "step": self.number } });
        let mut open: BTreeMap<u64, (MemoryCategory, &Allocation)> = BTreeMap::new();
        let mut open_phase: Option<(u64, String)> = None;
        let mut last = None;
        for (category, allocation) in &self.before {
            open.insert(allocation.id, (*category, allocation));
            events.push(lasting("b", *category, allocation, self.begin));
        }
        self.replay(&mut |at, levels, change| {
            match change {
                Some(Change::Allocated(category, allocation)) => {
                    open.insert(allocation.id, (*category, allocation));
                    events.push(lasting("b", *category, allocation, at));
                }
                Some(Change::Released(_, id)) => {
                    if let Some((category, allocation)) = open.remove(id) {
                        events.push(lasting("e", category, allocation, at));
                    }
                }
                Some(Change::Phase(phase, node)) => {
                    let name = if node.is_empty() { (*phase).to_owned() } else { format!("{phase}: {node}") };
                    if let Some((from, name)) = open_phase.replace((at, name)) {
                        events.push(slice(2, &name, from, at));
                    }
                }
                Some(Change::Levels(_)) | None => {}
            }
            if last != Some(*levels) {
                events.push(json!({ "ph": "C", "name": "memory", "pid": process, "tid": 0, "ts": micros(at), "args": by_category(levels) }));
                last = Some(*levels);
            }
        });
        if let Some((from, name)) = open_phase {
            events.push(slice(2, &name, from, self.end));
        }
        events.extend(open.into_values().map(|(category, allocation)| lasting("e", category, allocation, self.end)));
    }
}

impl Peak {
    fn to_json(&self, pass: &str) -> Value {
        let tensors: Vec<Value> =
            self.tensors.iter().map(|(category, name, bytes)| json!({ "category": category.name(), "name": name, "bytes": bytes })).collect();
        json!({ "pass": pass, "step": self.step, "phase": self.phase, "node": self.node, "bytes": self.total(), "tensors": tensors })
    }

    /// One sentence about where the peak occurred and what it consisted of.
    pub fn explain(&self, graph: &Graph) -> String {
        let layers = analysis::layers(graph);
        let layer = layers.iter().flat_map(|layers| layers.layers.iter().enumerate()).find(|(_, layer)| layer.nodes.contains(&self.node));
        let phase = match (self.node.as_str(), layer) {
            ("", _) => self.phase.to_owned(),
            (node, Some((number, _))) => format!("{} of layer {number} (`{node}`)", self.phase),
            (node, None) => format!("{} of `{node}`", self.phase),
        };
        let ops: BTreeMap<&str, &str> = graph.nodes().iter().map(|node| (graph.value(node.output).name.as_str(), node.op.name())).collect();
        let sum = |of: &dyn Fn(MemoryCategory, &str) -> bool| -> u64 { self.tensors.iter().filter(|(c, name, _)| of(*c, name)).map(|(.., bytes)| bytes).sum() };
        let mut categories: Vec<_> =
            MemoryCategory::ALL.into_iter().map(|category| (sum(&|c, _| c == category), category)).filter(|(bytes, _)| *bytes > 0).collect();
        categories.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let size = |bytes: u64| if bytes < 1_000_000 { format!("{:.1} kB", bytes as f64 / 1e3) } else { format!("{:.1} MB", bytes as f64 / 1e6) };
        let parts = categories.into_iter().map(|(bytes, category)| {
            let part = format!("{} {}", category.name(), size(bytes));
            if category != MemoryCategory::Activations {
                return part;
            }
            let kind = |name: &str| match name.strip_prefix(GRADIENT) {
                Some(_) => "gradients of values".to_owned(),
                None => ops.get(name).map_or_else(|| name.to_owned(), |op| format!("outputs of `{op}`")),
            };
            let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
            self.tensors.iter().filter(|(c, ..)| *c == category).for_each(|(_, name, bytes)| *kinds.entry(kind(name)).or_default() += bytes);
            let mut kinds: Vec<_> = kinds.into_iter().collect();
            kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            let named: Vec<String> = kinds.iter().take(NAMED).map(|(kind, bytes)| format!("{kind} {}", size(*bytes))).collect();
            format!("{part} (of which {})", named.join(", "))
        });
        let step = if self.step == 0 { String::new() } else { format!(" in step {}", self.step) };
        format!("peak memory of {} in the {phase}{step}: {}", size(self.total()), parts.collect::<Vec<_>>().join(", "))
    }
}

/// Prefix for the gradient of a value.
pub(crate) const GRADIENT: &str = "gradient of ";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::MemoryTracker;
    use super::*;

    /// Validates the events and returns the highest sum of all counters.
    fn highest(trace: &MemoryTrace) -> u64 {
        let events = MemoryTrace::events(&[("pass".to_owned(), trace.clone())]);
        let (mut open, mut highest) = (BTreeSet::new(), 0);
        for event in events["traceEvents"].as_array().unwrap() {
            let phase = event["ph"].as_str().unwrap();
            assert!(event["pid"].is_u64() && event["name"].is_string(), "{event}");
            assert!(phase == "M" || event["ts"].as_f64().unwrap() >= 0.0, "{event}");
            let id = (event["cat"].to_string(), event["id"].to_string(), event["args"]["step"].as_u64());
            match phase {
                "C" => highest = highest.max(event["args"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum()),
                "X" => assert!(event["dur"].as_f64().unwrap() >= 0.0, "{event}"),
                "b" => assert!(open.insert(id), "{event} begins twice"),
                "e" => assert!(open.remove(&id), "{event} ends without a start"),
                _ => assert_eq!(phase, "M"),
            }
        }
        assert!(open.is_empty(), "{open:?} do not end");
        highest
    }

    fn step(tracker: &MemoryTracker, number: u64, bytes: u64) {
        tracker.begin_step(Some(number));
        tracker.work_on("forward", "a");
        tracker.allocate_named(MemoryCategory::Activations, "a", bytes).unwrap();
        tracker.work_on("backward", "a");
        tracker.allocate_named(MemoryCategory::Activations, "gradient of a", 2 * bytes).unwrap();
        tracker.allocate_named(MemoryCategory::Gradients, "w", 8).unwrap();
        tracker.release_named(MemoryCategory::Activations, "a", bytes);
        tracker.release_named(MemoryCategory::Activations, "gradient of a", 2 * bytes);
        tracker.work_on("optimizer", "");
        tracker.set(MemoryCategory::Gradients, 0).unwrap();
        tracker.set(MemoryCategory::Optimizer, 16).unwrap();
    }

    #[test]
    fn the_trace_agrees_with_the_tracker() {
        let tracker = MemoryTracker::default().recorded();
        tracker.allocate_named(MemoryCategory::Weights, "w", 100).unwrap();
        for (number, bytes) in [10, 20, 10, 10, 50, 10, 30].into_iter().enumerate() {
            step(&tracker, number as u64 + 1, bytes);
            let trace = tracker.trace().unwrap();
            assert_eq!(trace.peak().total(), tracker.peaks().1);
            assert_eq!(highest(&trace), tracker.peaks().1);
        }
        let trace = tracker.trace().unwrap();
        let peak = trace.peak();
        assert_eq!((peak.step, peak.phase, peak.node.as_str(), peak.total()), (5, "backward", "a", 274));
        assert_eq!(peak.tensors[0], (MemoryCategory::Activations, "gradient of a".to_owned(), 100));
        assert_eq!(trace.steps().map(|step| step.number).collect::<Vec<_>>(), [0, 1, 2, 3, 5]);
        let sum = |point: &Value| MemoryCategory::ALL.iter().map(|category| point[category.name()].as_u64().unwrap()).sum::<u64>();
        assert_eq!(trace.timeline().iter().map(sum).max(), Some(274));
    }

    #[test]
    fn unnamed_bytes_are_released() {
        let tracker = MemoryTracker::default().recorded();
        tracker.allocate_named(MemoryCategory::Gradients, "a", 10).unwrap();
        tracker.allocate(MemoryCategory::Gradients, 5).unwrap();
        tracker.release(MemoryCategory::Gradients, 8);
        assert_eq!(tracker.all(), 7);
        tracker.set(MemoryCategory::Gradients, 3).unwrap();
        tracker.release(MemoryCategory::Gradients, u64::MAX);
        assert_eq!((tracker.all(), highest(&tracker.trace().unwrap())), (0, 15));
    }

    #[test]
    fn long_steps_are_truncated_with_their_peak() {
        let tracker = MemoryTracker::default().recorded();
        tracker.begin_step(Some(1));
        for bytes in 0..MAX_CHANGES as u64 {
            tracker.allocate_named(MemoryCategory::Data, "a", 10 + bytes).unwrap();
            tracker.release_named(MemoryCategory::Data, "a", 10 + bytes);
        }
        let trace = tracker.trace().unwrap();
        assert_eq!(highest(&trace), tracker.peaks().1);
        assert!(trace.timeline().len() <= POINTS);
    }
}
