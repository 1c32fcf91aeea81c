//! Reports of training: predicted and measured memory of sharded parameters.
#![cfg(all(feature = "run", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;

use serde_json::Value;

use crate::train_processes::{Workspace, ranks, weights};

/// Bytes of a kind by category, and their total.
fn memory(report: &Value, kind: &str, total: &str) -> HashMap<String, f64> {
    let memory = &report["passes"][0]["details"]["memory"];
    let phases = memory["phases"].as_array().unwrap().iter();
    let bytes = phases.map(|phase| (phase["name"].as_str().unwrap().to_owned(), phase[kind].as_f64().unwrap()));
    bytes.chain([("total".to_owned(), memory[total].as_f64().unwrap())]).collect()
}

/// With sharded parameters, each of two processes holds half of the weights, gradients and optimizer states.
#[test]
fn the_memory_of_sharded_parameters_is_predicted() {
    let place = Workspace::new(64);
    let sizes: Vec<usize> = weights(&place.model).values().map(Vec::len).collect();
    let (elements, largest) = (sizes.iter().sum::<usize>() as f64, *sizes.iter().max().unwrap() as f64);
    // Bytes of the optimizer states per element.
    for (case, options, processes, states) in [
        ("one process", ", shard: parameters", 1, 8.0),
        ("replicated", "", 2, 8.0),
        ("sharded", ", shard: parameters", 2, 8.0),
        ("with an average", ", shard: parameters, average: 0.9", 2, 12.0),
        ("with one state", ", shard: parameters, optimizer: sgd", 2, 4.0),
    ] {
        let recipe = place.recipe(&format!("max_steps: 3, batch_size: 8, learning_rate: 1e-3{options}"));
        let children: Vec<_> = match processes {
            1 => vec![place.start(&recipe, case, &[], &[])],
            _ => ranks::<2>().iter().map(|rank| place.start(&recipe, case, &[], rank)).collect(),
        };
        children.into_iter().for_each(|child| place.finish(child));
        let report = place.report(case);
        let (predicted, measured) = (memory(&report, "predicted_bytes", "predicted_bytes"), memory(&report, "measured_bytes", "peak_bytes"));
        for (category, bytes) in &measured {
            let predicted = predicted[category];
            // The shards of the two processes are not equally large.
            assert!((predicted - bytes).abs() <= 0.1 * bytes, "{case}, {category}: {predicted} and {bytes}");
        }
        let is_sharded = options.contains("shard") && processes == 2;
        // A process also has the complete gradient of the parameter that is updated.
        let (shards, gradient) = if is_sharded { (2.0, 4.0 * largest) } else { (1.0, 0.0) };
        assert_eq!(predicted["gradients"], (4.0 * elements / shards).floor() + gradient, "{case}");
        assert_eq!(predicted["optimizer"], (states * elements / shards).floor(), "{case}");
    }
}
