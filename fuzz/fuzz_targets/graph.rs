//! Arbitrary text as `graph.json`. The names of tensors specify their shapes: `w3x4` is `[3, 4]`.
//!
//! A graph that can be built is unchanged after writing and reading it. Its text, pruning groups and cost are
//! computed without a crash.

#![no_main]

use std::collections::BTreeMap;

use compress_graph::analysis::{cost, groups, usual_sizes};
use compress_graph::ir::{Catalog, Graph, GraphFile};
use libfuzzer_sys::fuzz_target;

/// Maximum number of elements of a tensor.
const MAX_ELEMENTS: usize = 4096;

struct Named;

impl Catalog for Named {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let shape: Vec<usize> = name.strip_prefix('w')?.split('x').map(|size| size.parse().ok()).collect::<Option<_>>()?;
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        (shape.contains(&0) || elements.is_some_and(|elements| elements <= MAX_ELEMENTS)).then_some(shape)
    }

    fn nearest(&self, _name: &str) -> Option<String> {
        None
    }
}

fuzz_target!(|text: &str| {
    let Ok(file) = serde_json::from_str::<GraphFile>(text) else { return };
    let Ok(graph) = file.build(&Named) else { return };
    let written = serde_json::to_string(&GraphFile::from(&graph)).expect("a graph can be written");
    let again = serde_json::from_str::<GraphFile>(&written).expect("a written graph can be read").build(&Named).expect("and built");
    assert_eq!(again.to_string(), graph.to_string());
    // Fails for names with spaces or brackets.
    let _ = graph.to_string().parse::<Graph>();
    let _ = groups(&graph);
    let sizes: BTreeMap<String, usize> = usual_sizes(&graph);
    let _ = cost(&graph, &sizes);
});
