//! Models compute the same bits block by block as when run as a whole.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::common::{Desk, pipeline, work};
use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress::pass::{Amount, Amounts, PruneStructured, Quantize, QuantizeDynamic, QuantizeStatic, Repair, Step, UnitImportance};
use compress_core::work::{Cancel, MemoryLimit, Silent, Work};
use compress_engine::calibration::{Axis, Request, calibrate, calibrate_blockwise};
use compress_engine::data::{Batch, Data, DataSet, synthetic_with_sizes};
use compress_engine::evaluation::{self, Runs, Subject, evaluate};
use compress_engine::exec::{
    Blockwise, BlockwiseOptions, Executor, Forward, MemoryCategory, MemoryNeed, MemoryTracker, Parameters, Residence, Schedule, Tape, sizes_of,
};
use compress_graph::analysis::{blocks, shared_head, single_block_reason, usual_sizes};
use compress_graph::ir::{Graph, Kind, Op};

/// Three batches of a text model have padding.
fn batches(graph: &Graph) -> Vec<Batch> {
    let sizes = graph.bind(|name| match name {
        "sequence" => 6,
        "decoder_sequence" => 5,
        "batch" => 2,
        _ => 32,
    });
    let mut batches: Vec<Batch> = (0..3).map(|seed| synthetic_with_sizes(graph, seed, &sizes).unwrap()).collect();
    for batch in &mut batches {
        if let Some(mask) = batch.inputs.get_mut("attention_mask") {
            *mask = Tensor::new(&[[1i64, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], &Device::Cpu).unwrap();
        }
    }
    batches
}

fn golden(name: &str) -> Model {
    Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap()
}

fn parameters(model: &Model, graph: &Graph) -> Parameters {
    work(|work| Parameters::load(graph, &model.weights, &Device::Cpu, DType::F32, Residence::Stored, work)).unwrap()
}

/// Bit patterns of outputs, by name.
fn bits(outputs: &BTreeMap<String, Tensor>) -> BTreeMap<String, Vec<u32>> {
    let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    outputs.iter().map(|(name, tensor)| (name.clone(), numbers(tensor).into_iter().map(f32::to_bits).collect())).collect()
}

/// Gradients within a block, from that of its output, equal those of the whole graph.
#[test]
fn gradients_of_a_block_are_those_of_the_whole_graph() {
    for name in ["llama", "bert", "mixtral", "t5"] {
        let model = golden(name);
        let graph = model.graph().unwrap();
        let (batch, all) = (batches(&graph).remove(0), parameters(&model, &graph));
        let tracker = MemoryTracker::default();
        let cancel = Cancel::default();
        let work = Work { threads: 2, progress: &Silent, cancel: &cancel };
        let mut run = Blockwise::new(&graph, &model.weights, |_| false, BlockwiseOptions::on(&Device::Cpu), &work);
        run.push(batch.clone()).unwrap();
        let mut before: BTreeSet<String> = BTreeSet::new();
        for block in 0..run.blocks().len() {
            run.enter(block).unwrap();
            let own: BTreeSet<String> = run.blocks()[block].parameters.difference(&before).cloned().collect();
            let trained = |name: &str| own.contains(name);
            let (tape, output) = run.tape(&trained).unwrap();
            assert_eq!(graph.value(output).name, run.blocks()[block].value, "{name}");
            let gradients = |tape: &Tape, forward: Forward, parameters: &Parameters| {
                let mut found: BTreeMap<String, Tensor> = BTreeMap::new();
                let dims = forward.taps()[&output].dims().to_vec();
                let from = (0..dims.iter().product()).map(|at| (1.7 * at as f32).sin()).collect::<Vec<_>>();
                let from = [(output, Tensor::from_vec(from, dims, &Device::Cpu).unwrap())];
                let mut add = |name: &str, gradient: Tensor| {
                    let sum = found.get(name).map_or_else(|| gradient.clone(), |other| (other + &gradient).unwrap());
                    found.insert(name.to_owned(), sum);
                    Ok(())
                };
                tape.backward(forward, from.into(), parameters, &tracker, &mut add).unwrap();
                found
            };
            let parameters = run.parameters();
            let within = gradients(&tape, run.forward(&tape, 0, &parameters, &tracker).unwrap(), &parameters);
            let tape = Tape::new(&graph, Device::Cpu, [output].into(), &trained, &[]);
            let whole = gradients(&tape, tape.forward(&all, &batch.inputs, &tracker, None).unwrap(), &all);
            assert_eq!(within.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>(), "{name}: block {block}");
            for (parameter, expected) in &whole {
                let largest = |tensor: Tensor| tensor.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                let far = largest((expected - &within[parameter]).unwrap());
                assert!(far <= 1e-4 * largest(expected.clone()) + 1e-6, "{name}: block {block}, {parameter}: {far}");
            }
            before.extend(own);
            run.leave().unwrap();
        }
        assert_eq!((tracker.now(MemoryCategory::Activations), tracker.now(MemoryCategory::Data)), (0, 0), "{name}");
    }
}

/// Names of the values that linear layers and convolutions read.
fn sites(graph: &Graph) -> Vec<String> {
    sites_of(graph, 0..graph.nodes().len())
}

/// Names of the inputs of selected nodes, in their order.
fn sites_of(graph: &Graph, nodes: Range<usize>) -> Vec<String> {
    let mut sites: Vec<String> = Vec::new();
    for node in graph.nodes()[nodes].iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_))) {
        let name = &graph.value(node.inputs[0]).name;
        if !sites.contains(name) && matches!(graph.value(node.inputs[0]).kind, Kind::Node(_)) {
            sites.push(name.clone());
        }
    }
    sites
}

#[test]
fn outputs_of_some_tokens_are_those_of_all_tokens() {
    let mut heads = 0;
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models")).unwrap() {
        let model = Model::open(entry.unwrap().path()).unwrap();
        let graph = model.graph().unwrap();
        let Some(head) = shared_head(&graph).map(|node| graph.value(node.inputs[0]).name.clone()) else { continue };
        heads += 1;
        work(|work| {
            let mut run = Blockwise::new(&graph, &model.weights, |value| value == head, BlockwiseOptions::on(&Device::Cpu), work);
            batches(&graph).into_iter().for_each(|batch| run.push(batch).unwrap());
            (0..run.blocks().len()).for_each(|block| Blockwise::run_block(&mut [&mut run], block, &BTreeSet::new()).unwrap());
            for index in 0..run.batches() {
                let length = run.value(index, &head).unwrap().dim(1).unwrap();
                let parts = [0..2, 2..length].map(|tokens| run.outputs_of_tokens(index, &head, tokens).unwrap());
                for (name, whole) in run.outputs_of(index).unwrap() {
                    let difference = (Tensor::cat(&[&parts[0][&name], &parts[1][&name]], 1).unwrap() - whole).unwrap();
                    let difference = difference.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                    assert!(difference < 1e-5, "{}: {difference}", model.path.display());
                }
            }
        });
    }
    assert!(heads > 20, "{heads}");
}

#[test]
fn every_family_has_the_same_outputs_block_by_block() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cut, mut whole) = (0, Vec::new());
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models")).unwrap() {
        let model = Model::open(entry.unwrap().path()).unwrap();
        let graph = model.graph().unwrap();
        let found = blocks(&graph);
        assert_eq!(found.len() == 1, single_block_reason(&graph).is_some());
        if found.len() > 1 {
            cut += 1
        } else {
            whole.push(model.path.clone())
        }
        let batches = batches(&graph);
        let executor = Executor::new(&graph, parameters(&model, &graph), Device::Cpu);
        let expected: Vec<_> = batches.iter().map(|batch| bits(&executor.run(&batch.inputs).unwrap())).collect();
        let sites = sites(&graph);
        let observation = executor.observation(|name| sites.iter().any(|site| site == name));
        let mut seen: Vec<BTreeMap<String, Tensor>> = vec![BTreeMap::new(); batches.len()];
        for (batch, seen) in batches.iter().zip(&mut seen) {
            let mut observe = |name: &str, value: &Tensor| {
                seen.insert(name.to_owned(), value.clone());
                Ok(())
            };
            executor.run_observed(&observation, &batch.inputs, &mut observe).unwrap();
        }
        let seen: Vec<_> = seen.iter().map(bits).collect();
        for (limit, spill, observed) in [(u64::MAX, None, true), (0, Some(folder.path()), true), (0, None, false), (2000, Some(folder.path()), false)] {
            let options = BlockwiseOptions { limit, spill: spill.map(Path::to_owned), ..BlockwiseOptions::on(&Device::Cpu) };
            work(|work| {
                let mut run = Blockwise::new(&graph, &model.weights, |name| observed && sites.iter().any(|site| site == name), options, work);
                batches.iter().for_each(|batch| run.push(batch.clone()).unwrap());
                for block in 0..run.blocks().len() {
                    run.enter(block).unwrap();
                    let nodes = run.blocks()[block].nodes.clone();
                    for site in sites_of(&graph, nodes).iter().filter(|_| observed) {
                        let mut index = 0;
                        run.each(site, |_, tensor| {
                            assert_eq!(bits(&[(site.clone(), tensor.clone())].into())[site], seen[index][site], "{site} of {}", model.path.display());
                            index += 1;
                            Ok(())
                        })
                        .unwrap();
                        assert_eq!(index, batches.len());
                    }
                    run.leave().unwrap();
                }
                let mut found = Vec::new();
                run.outputs(|_, outputs| {
                    found.push(bits(&outputs));
                    Ok(())
                })
                .unwrap();
                assert_eq!(found, expected, "{} with a limit of {limit}", model.path.display());
            });
        }
    }
    assert!(cut > 30 && whole.len() < 4, "{cut} are cut, not {whole:?}");
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "a file is left");
}

/// Weights are replaced layer by layer, and later layers are run with the changed inputs.
#[test]
fn replaced_parameters_are_those_that_later_nodes_use() {
    let model = golden("llama");
    let graph = model.graph().unwrap();
    let batches = batches(&graph);
    let sites = sites(&graph);
    for limit in [u64::MAX, 0] {
        work(|work| {
            let mut all = parameters(&model, &graph);
            let (original, mut held) = (all.clone(), Vec::new());
            let options = BlockwiseOptions { limit, ..BlockwiseOptions::on(&Device::Cpu) };
            let mut run = Blockwise::new(&graph, &model.weights, |name| sites.iter().any(|site| site == name), options, work);
            batches.iter().for_each(|batch| run.push(batch.clone()).unwrap());
            for block in 0..run.blocks().len() {
                run.enter(block).unwrap();
                for site in sites_of(&graph, run.blocks()[block].nodes.clone()) {
                    let mut sum = 0.0;
                    run.each(&site, |_, value| {
                        sum += value.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
                        Ok(())
                    })
                    .unwrap();
                    for (_, node) in graph
                        .nodes()
                        .iter()
                        .enumerate()
                        .filter(|(index, _)| run.block_of(*index) == block)
                        .filter(|(_, node)| matches!(node.op, Op::Linear(_)) && graph.value(node.inputs[0]).name == site)
                        .collect::<Vec<_>>()
                    {
                        let name = &graph.value(node.inputs[1]).name;
                        held.push((name.clone(), run.parameter(name).unwrap()));
                        let tensor = (run.parameter(name).unwrap() * f64::from(1.0 + sum / 100.0)).unwrap();
                        all = all.with(name, tensor.clone());
                        run.replace(name, tensor);
                    }
                }
                run.leave().unwrap();
            }
            let executor = Executor::new(&graph, all, Device::Cpu);
            let mut index = 0;
            run.outputs(|batch, outputs| {
                assert_eq!(bits(&outputs), bits(&executor.run(&batch.inputs).unwrap()));
                index += 1;
                Ok(())
            })
            .unwrap();
            assert_eq!(index, batches.len());
            // Blocks reuse the memory of previous blocks, except for values that were returned to the caller.
            for (name, tensor) in held {
                assert_eq!(bits(&[(name.clone(), tensor)].into()), bits(&[(name.clone(), original.get(&name).unwrap())].into()));
            }
        });
    }
}

#[test]
fn invalid_requests_to_a_blockwise_run_are_rejected() {
    let model = golden("gpt2");
    let graph = model.graph().unwrap();
    let sites = sites(&graph);
    work(|work| {
        let mut run = Blockwise::new(&graph, &model.weights, |name| sites.iter().any(|site| site == name), BlockwiseOptions::on(&Device::Cpu), work);
        batches(&graph).into_iter().for_each(|batch| run.push(batch).unwrap());
        let refused = |run: &mut Blockwise, value: &str| run.each(value, |_, _| Ok(())).unwrap_err().to_string();
        assert!(refused(&mut run, &sites[0]).contains("no block was entered"));
        assert!(run.enter(1).is_err() && run.enter(0).is_ok());
        assert!(refused(&mut run, &sites[1]).contains("later block"));
        assert!(refused(&mut run, "nothing").contains("does not exist"));
        assert!(run.outputs(|_, _| Ok(())).is_err());
        run.leave().unwrap();
        run.enter(1).unwrap();
        run.each(&sites[1], |_, _| Ok(())).unwrap();
        // Requests a value that interrupted runs have already passed.
        run.each(&sites[0], |_, _| Ok(())).unwrap();
        assert!(run.push(batches(&graph).remove(0)).is_err());
        run.leave().unwrap();
        run.enter(2).unwrap();
        assert!(refused(&mut run, &sites[0]).contains("earlier block"));
    });
}

/// At most two blocks and the values that cross between them are in memory.
#[test]
fn memory_is_that_of_blocks_and_states() {
    let model = golden("llama-grouped-tied");
    let graph = model.graph().unwrap();
    let batches = batches(&graph);
    let size = |block: &compress_graph::analysis::Block| block.parameters.iter().map(|name| 4 * model.weights.by_name[name].elements() as u64).sum::<u64>();
    let sizes: Vec<u64> = blocks(&graph).iter().map(size).collect();
    let tracker = Arc::new(MemoryTracker::default());
    let options = BlockwiseOptions { limit: 0, tracker: Some(tracker.clone()), ..BlockwiseOptions::on(&Device::Cpu) };
    work(|work| {
        let mut run = Blockwise::new(&graph, &model.weights, |_| false, options, work);
        batches.iter().for_each(|batch| run.push(batch.clone()).unwrap());
        for block in 0..run.blocks().len() {
            run.enter(block).unwrap();
            run.leave().unwrap();
        }
        run.outputs(|_, _| Ok(())).unwrap();
        let pairs = sizes.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap();
        let hidden = model.config.get("hidden_size").unwrap().as_u64().unwrap();
        // Hidden state, id and mask of each token. While a sample is advanced, both of its states are in
        // memory.
        let states = batches.len() as u64 * 2 * 6 * (4 * hidden + 2 * 8);
        assert!(run.peak_bytes() <= pairs + states, "{} of {pairs} + {states}", run.peak_bytes());
        assert!(run.peak_bytes() < sizes.iter().sum(), "the blocks together are not larger than the peak");
        let (peaks, _) = tracker.peaks();
        let weights = peaks.iter().find(|(category, _)| *category == MemoryCategory::Weights).unwrap().1;
        assert_eq!(weights, *sizes.iter().max().unwrap());
    });
    assert_eq!(tracker.now(MemoryCategory::Activations), 0);
}

/// Nine samples for a language model, in batches of two, some of them padded.
fn tokens(folder: &Path) -> Data {
    let rows = |number: fn(i64, i64) -> i64| Tensor::from_vec((0..9 * 6).map(|i| number(i / 6, i % 6)).collect(), (9, 6), &Device::Cpu).unwrap();
    let arrays = [("input_ids".to_owned(), rows(|row, at| (7 * row + 5 * at) % 31)), ("attention_mask".to_owned(), rows(|row, at| i64::from(at <= 2 + row)))];
    let path = folder.join("samples.safetensors");
    candle_core::safetensors::save(&arrays.into_iter().collect(), &path).unwrap();
    Data { arrays: Some(path), batch_size: Some(2), ..Data::default() }
}

fn need(model: &Model, batch: &Batch) -> MemoryNeed {
    let graph = model.graph().unwrap();
    MemoryNeed::estimate(&graph, &model.weights, DType::F32, Residence::most_compact(&Device::Cpu, DType::F32), &sizes_of(&graph, &batch.inputs))
}

#[test]
fn evaluation_does_not_depend_on_the_memory_limit() {
    let desk = Desk::new();
    let before = golden("qwen2").path;
    let after = desk.run(&before, pipeline().pass(QuantizeDynamic::default())).unwrap().path;
    let paths = [before, after];
    work(|work| {
        let open = || paths.each_ref().map(|path| Subject::open(path, 1).unwrap());
        let data = DataSet::open(&tokens(desk.path()), open()[0].target()).unwrap();
        let batch = data.first().unwrap();
        let needs = paths.each_ref().map(|path| need(&Model::open(path).unwrap(), &batch));
        let least = needs.iter().map(|need| need.blocks + need.state).sum::<u64>() + needs[0].activations;
        let outcomes = |memory: MemoryLimit, blocks: bool| {
            let mut subjects = open();
            let mut runners = evaluation::load(&mut subjects, (&batch.inputs, &Device::Cpu), memory, Runs::Repeated, work).unwrap();
            assert_eq!(runners[0].group_size(&batch.inputs).is_some(), blocks);
            let mut outcomes = evaluate(&data, &mut runners, &[(0, 1)], work).unwrap();
            outcomes.models.iter_mut().for_each(|outcome| outcome.time = std::time::Duration::ZERO);
            // A single batch, including one that was not announced.
            let answers: Vec<_> = runners.iter_mut().map(|runner| bits(&runner.run(&batch.inputs).unwrap())).collect();
            (outcomes, answers)
        };
        let whole = outcomes(MemoryLimit::default(), false);
        assert_eq!(whole.0.samples, 9);
        for bytes in [least, least + 3 * needs[0].state, needs.iter().map(|need| need.parameters).sum::<u64>() + needs[0].activations - 1] {
            assert_eq!(outcomes(MemoryLimit { bytes: Some(bytes), explicit: true }, true), whole, "{bytes} bytes");
        }
        let mut subjects = open();
        let memory = MemoryLimit { bytes: Some(least - 1), explicit: true };
        let refused = evaluation::load(&mut subjects, (&batch.inputs, &Device::Cpu), memory, Runs::Repeated, work).err().unwrap().to_string();
        assert!(refused.contains("`qwen2`") && refused.contains(&least.to_string()), "{refused}");
    });
}

#[test]
fn calibration_does_not_depend_on_the_memory_limit() {
    let desk = Desk::new();
    let model = golden("llama");
    let graph = model.graph().unwrap();
    let subject = Subject::from_model(model.clone()).unwrap();
    let data = DataSet::open(&tokens(desk.path()), subject.target()).unwrap();
    let requests: BTreeMap<String, Request> =
        sites(&graph).into_iter().map(|name| (name, Request { axis: Axis::Last, histograms: true, joint: true, weights: None })).collect();
    work(|work| {
        let executor = Executor::new(&graph, parameters(&model, &graph), Device::Cpu);
        let text = |seen: &BTreeMap<String, compress_engine::calibration::ValueStatistics>| format!("{seen:?}");
        let whole = calibrate(&executor, &data, &requests, work).unwrap();
        assert_eq!(whole.len(), requests.len());
        let need = need(&model, &data.first().unwrap());
        for states in [0, 2 * need.state, u64::MAX] {
            let options = BlockwiseOptions { limit: states, ..BlockwiseOptions::on(&Device::Cpu) };
            let seen = calibrate_blockwise((&graph, &model.weights), &options, states, &data, &requests, work).unwrap();
            assert_eq!(text(&seen), text(&whole), "{states} bytes of states");
        }
        let memory = MemoryLimit { bytes: Some(need.total() - 1), explicit: true };
        assert!(matches!(Schedule::choose(memory, &[("llama", need)]).unwrap(), Schedule::Blockwise { .. }));
    });
}

/// Models that do not fit into memory are evaluated block by block, with the same results.
#[test]
fn fidelity_is_measured_in_less_memory() {
    let (desk, model) = (Desk::new(), golden("llama"));
    let graph = model.graph().unwrap();
    let need = MemoryNeed::estimate(&graph, &model.weights, DType::F32, Residence::Stored, &usual_sizes(&graph));
    let fidelity = |memory: Option<u64>| {
        let pass: Quantize = serde_json::from_value(serde_json::json!({ "scheme": "W8A16", "group_size": -1 })).unwrap();
        let report = desk.run(&model.path, pipeline().memory(memory).pass(pass)).unwrap().report;
        serde_json::to_value(report.fidelity.unwrap_or_else(|| panic!("{:?}", report.notes))).unwrap()
    };
    assert_eq!(fidelity(Some(need.total() - 1)), fidelity(None));
}

/// The output of passes does not depend on the memory limit.
#[test]
fn passes_do_not_depend_on_the_memory_limit() {
    let desk = Desk::new();
    let model = golden("llama");
    let data = tokens(desk.path());
    let subject = Subject::from_model(model.clone()).unwrap();
    let need = need(&model, &DataSet::open(&data, subject.target()).unwrap().first().unwrap());
    assert!(need.blockwise() < need.total(), "{need:?}");
    let amount = Some(Amounts::All(Amount::fraction(0.5)));
    let prune = PruneStructured { amount, importance: UnitImportance::Activation, repair: Repair::LeastSquares, ..PruneStructured::default() };
    let by_gradient = PruneStructured { importance: UnitImportance::Taylor, repair: Repair::None, ..prune.clone() };
    for pass in [Step::from(prune), Step::from(by_gradient), Step::from(QuantizeStatic::default())] {
        let written = |memory: Option<u64>| {
            let builder = pipeline().calibration(data.clone()).memory(memory).pass(pass.clone());
            desk.run(&model.path, builder).map(|output| crate::common::contents(&output.path))
        };
        assert_eq!(written(Some(need.total() - 1)).unwrap(), written(None).unwrap(), "{}", pass.pass().name());
        assert!(written(Some(1)).unwrap_err().to_string().contains("family `llama`"), "{}", pass.pass().name());
    }
}
