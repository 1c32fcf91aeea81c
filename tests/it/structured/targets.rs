//! Targets of size and latency, and layers without anything to repair.

use super::*;

#[test]
fn a_target_that_no_width_reaches_is_reported() {
    for (round_to, is_missed) in [(4, true), (1, false)] {
        let pass = PruneStructured { target: Some(PruningTarget::Params(0.7)), round_to, ..half(&[PrunedPart::Hidden]) };
        let done = run("llama", Pipeline::builder().pass(PruneStructured { amount: None, ..pass }));
        let found = done.report.notes.iter().any(|note| note.contains("params 0.7: 0.7") && note.contains("remains"));
        assert_eq!(found, is_missed, "{:?}", done.report.notes);
    }
}

/// The smallest widths have more than this fraction of the multiply-accumulates, but the latency is unknown.
#[test]
fn plans_do_not_refuse_a_target_of_latency() {
    let pass = PruneStructured { target: Some(PruningTarget::Latency(0.2)), amount: None, round_to: 4, ..half(&[]) };
    let pipeline = Pipeline::builder().pass(pass).build().unwrap();
    assert!(pipeline.plan(&Model::open(golden("llama")).unwrap()).unwrap().output_estimated);
}

#[test]
fn layers_that_read_only_zeros_are_not_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (folder.path().join("model"), tokens(folder.path()));
    std::fs::create_dir(&model).unwrap();
    std::fs::copy(golden("llama").join("config.json"), model.join("config.json")).unwrap();
    let mut weights = candle_core::safetensors::load(golden("llama").join("model.safetensors"), &Device::Cpu).unwrap();
    let zeroed = weights.get_mut("model.layers.1.mlp.up_proj.weight").unwrap();
    *zeroed = zeroed.zeros_like().unwrap();
    candle_core::safetensors::save(&weights, model.join("model.safetensors")).unwrap();
    let [none, least] = [Repair::None, Repair::LeastSquares].map(|repair| {
        let pass = PruneStructured { importance: UnitImportance::Activation, repair, ..half(&[PrunedPart::Mlp]) };
        let out = folder.path().join(format!("{repair:?}"));
        Pipeline::builder().calibration(data.clone()).pass(pass).build().unwrap().run(Model::open(&model).unwrap(), &out).unwrap();
        candle_core::safetensors::load(out.join("model.safetensors"), &Device::Cpu).unwrap()
    });
    let is_equal = |layer: usize| {
        let [none, least] = [&none, &least].map(|weights| weights[&format!("model.layers.{layer}.mlp.down_proj.weight")].flatten_all().unwrap());
        none.to_vec1::<f32>().unwrap() == least.to_vec1::<f32>().unwrap()
    };
    assert!(is_equal(1) && !is_equal(0));
}
