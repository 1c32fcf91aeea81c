//! A new classification head for an encoder or a CNN, with initial weights from the seed.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::arch::{self, ClassificationHead, SentenceModule, Settings};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::{Builder, GraphFile, is_in_modules};
use crate::model::Model;
use crate::pass::fresh_weights::fresh_weights;

/// A model with a new head.
pub(super) struct WithHead {
    /// The model.
    pub model: Model,
    /// The previous names of the tensors that were renamed, by their new names.
    pub renamed: BTreeMap<String, String>,
}

/// Adds a head for `classes`. A head for as many classes is kept. `what` names the option in errors. Adds
/// notes on the head.
///
/// # Errors
/// The family has no classification head, `config.json` does not describe the model, or it has a head for
/// another number of classes.
pub(super) fn add_head(what: &str, mut model: Model, notes: &mut Vec<String>, classes: &[String], seed: u64) -> Result<WithHead> {
    let wrong = |reason: String| Error::option(what, reason);
    if model.onnx.is_some() || files::is_file(&model.path.join(GraphFile::NAME)) {
        return Err(wrong("adds a head only to models that are described by config.json; this one is described by an ONNX file or graph.json".into()));
    }
    if model.graph_file()?.is_some() {
        return Err(wrong("config.json does not describe the model after the previous passes: add the head before them".into()));
    }
    let settings = Settings::new(model.config.values());
    let head = ClassificationHead::for_model(&settings).ok_or_else(|| Error::Unsupported {
        what: format!("a classification head for model_type `{}`", model.config.model_type()),
        hint: format!("families with a head: {}", ClassificationHead::families()),
    })?;
    let stored = model.weights.by_name.get(&format!("{}.weight", head.logits())).and_then(|weight| weight.shape.first().copied());
    let kept = stored.filter(|_| head.is_in(&settings));
    if let Some(count) = kept.filter(|count| *count != classes.len()) {
        let how = if head.class.is_empty() {
            format!("remove `{}.weight` and its bias from the weights", head.logits())
        } else {
            format!("set `\"architectures\": [\"{}\"]` in config.json", head.base_class())
        };
        return Err(wrong(format!("the model has a head for {count} classes, not for {}; to replace it, {how}", classes.len())));
    }
    // Torchvision's graph cannot be built without a head.
    let before: BTreeSet<String> = model.graph().map_or_else(|_| BTreeSet::new(), |graph| graph.params().map(|(_, value)| value.name.clone()).collect());
    let renamed = rename(&mut model, &head);
    let name_now = |name: String| renamed.iter().find(|(_, old)| **old == name).map_or(name.clone(), |(new, _)| new.clone());
    if kept.is_none() {
        model.weights.by_name.retain(|name, _| !is_in_modules(name, &[head.logits()]));
    }
    set_labels(&mut model, &head, classes);
    let modules = SentenceModule::open(&model.path)?;
    let graph = arch::build(&Settings::new(model.config.values()), &modules, Builder::with_new_modules(&model.weights, head.modules))?;
    let weights = fresh_weights(&graph, &model.config, seed, what, |name| !model.weights.by_name.contains_key(name))?;
    let created: Vec<String> = weights.iter().map(|(name, _)| name.clone()).collect();
    model.weights.by_name.extend(weights);
    let after: BTreeSet<&str> = graph.params().map(|(_, value)| value.name.as_str()).collect();
    let unused: Vec<String> = before.into_iter().map(name_now).filter(|name| !after.contains(name.as_str())).collect();
    model.weights.by_name.retain(|name, _| !unused.contains(name));
    model.changed_graph = None;
    // Also checks that the tensors fit the configuration.
    model.graph()?;
    let list = classes.join(", ");
    notes.push(if created.is_empty() {
        format!("the head for {} classes is kept; config.json names them {list}", classes.len())
    } else {
        format!("a new head for the classes {list}; initialized from the seed: {}", created.join(", "))
    });
    if !unused.is_empty() {
        notes.push(format!("not used with the new head and left out: {}", unused.join(", ")));
    }
    if !renamed.is_empty() {
        notes.push(format!("the names of the tensors of the encoder begin with `{}`, as in {}", head.prefix, head.class));
    }
    Ok(WithHead { model, renamed })
}

/// Adds the prefix of the class with the head to the tensors of an encoder; other libraries ignore the
/// head otherwise.
fn rename(model: &mut Model, head: &ClassificationHead) -> BTreeMap<String, String> {
    let mut renamed = BTreeMap::new();
    if head.prefix.is_empty() || model.weights.by_name.keys().any(|name| name.starts_with(head.prefix)) {
        return renamed;
    }
    for (name, weight) in std::mem::take(&mut model.weights.by_name) {
        // The weights of sentence modules have the names of their folders.
        let new = if name.contains('/') || is_in_modules(&name, head.modules) { name.clone() } else { format!("{}{name}", head.prefix) };
        if new != name {
            renamed.insert(new.clone(), name);
        }
        model.weights.by_name.insert(new, weight);
    }
    renamed
}

/// Writes the class and the labels into the configuration.
fn set_labels(model: &mut Model, head: &ClassificationHead, classes: &[String]) {
    let config = &mut model.config;
    if head.class.is_empty() {
        config.set("num_classes", json!(classes.len()));
    } else {
        config.set("architectures", json!([head.class]));
    }
    if config.get("num_labels").is_some() {
        config.set("num_labels", json!(classes.len()));
    }
    if config.get("problem_type").is_some() {
        config.set("problem_type", json!("single_label_classification"));
    }
    let numbered = || classes.iter().enumerate();
    config.set("id2label", Value::Object(numbered().map(|(id, name)| (id.to_string(), json!(name))).collect::<Map<_, _>>()));
    config.set("label2id", Value::Object(numbered().map(|(id, name)| (name.clone(), json!(id))).collect::<Map<_, _>>()));
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn golden(name: &str) -> Model {
        Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)).unwrap()
    }

    fn classes(count: usize) -> Vec<String> {
        (0..count).map(|id| format!("class {id}")).collect()
    }

    /// The tensors and outputs are those of the golden model of the class with a head.
    #[test]
    fn every_family_gets_the_head_of_its_class() {
        let pairs = [
            ("bert", "bert-sequence-classification"),
            ("bert-no-pooler", "bert-sequence-classification"),
            ("bert-masked-lm", "bert-sequence-classification"),
            ("roberta", "roberta-sequence-classification"),
            ("distilbert", "distilbert-sequence-classification"),
            ("distilbert-masked-lm", "distilbert-sequence-classification"),
            ("mpnet", "mpnet-sequence-classification"),
            ("modernbert", "modernbert-sequence-classification"),
            ("modernbert-masked-lm", "modernbert-sequence-classification"),
            ("deberta", "deberta-sequence-classification"),
            ("deberta-masked-lm", "deberta-sequence-classification"),
            ("vit", "vit-image-classification"),
            ("vit-no-pooler", "vit-image-classification"),
            ("dinov2", "dinov2-image-classification"),
            ("swin", "swin-image-classification"),
            ("convnext", "convnext-image-classification"),
            ("efficientnet", "efficientnet-image-classification"),
        ];
        for (name, with_head) in pairs {
            let expected = golden(with_head);
            let is_head = |name: &String| !["encoder", "embeddings", "layers", "transformer", "blocks"].iter().any(|part| name.contains(part));
            let heads = |model: &Model| model.weights.by_name.keys().filter(|name| is_head(name)).cloned().collect::<Vec<_>>();
            let count = expected.config.get("id2label").unwrap().as_object().unwrap().len();
            let WithHead { model, .. } =
                add_head("finetune: labels", golden(name), &mut Vec::new(), &classes(count), 0).unwrap_or_else(|e| panic!("{name}: {e}"));
            // Configurations differ in poolers and biases.
            let common = |names: Vec<String>| names.into_iter().filter(|name| !name.contains("pooler") && !name.ends_with("bias")).collect::<Vec<_>>();
            assert_eq!(common(heads(&model)), common(heads(&expected)), "{name}");
            let graph = model.graph().unwrap();
            let logits = graph.outputs().iter().find(|(output, _)| output == "logits").unwrap_or_else(|| panic!("{name} has no logits"));
            assert_eq!(graph.value(logits.1).ty.shape.last().unwrap().fixed(), Some(count), "{name}");
            assert_eq!(model.config.get("architectures"), expected.config.get("architectures"), "{name}");
            assert_eq!(model.config.get("id2label").unwrap()["1"], "class 1");
            assert!(model.is_described(), "{name}");
            // The input has no scores, even if its configuration names the same classes.
            let mut input = golden(name);
            input.config.set("id2label", model.config.get("id2label").unwrap().clone());
            assert!(model.has_new_classes(&input), "{name}");
        }
    }

    #[test]
    fn torchvision_models_without_a_head_get_one() {
        for (name, logits) in [
            ("torchvision-resnet18", "fc"),
            ("torchvision-mobilenet-v2", "classifier.1"),
            ("torchvision-mobilenet-v3", "classifier.3"),
            ("torchvision-efficientnet", "classifier.1"),
            ("resnet-basic", "classifier.1"),
        ] {
            let mut model = golden(name);
            let error = add_head("finetune: labels", model.clone(), &mut Vec::new(), &classes(3), 0).map(drop).unwrap_err().to_string();
            assert!(error.contains("a head for 5 classes, not for 3"), "{name}: {error}");
            model.weights.by_name.retain(|weight, _| !is_in_modules(weight, &[logits]));
            let WithHead { model, .. } = add_head("finetune: labels", model, &mut Vec::new(), &classes(3), 0).unwrap();
            let mut input = model.clone();
            assert!(!model.has_new_classes(&input), "{name}");
            input.weights.by_name.retain(|weight, _| !is_in_modules(weight, &[logits]));
            assert!(model.has_new_classes(&input), "{name}");
            let weight = |part: &str| model.weights.by_name[&format!("{logits}.{part}")].clone();
            assert_eq!(weight("weight").shape[0], 3, "{name}");
            assert!(weight("bias").floats("bias").unwrap().iter().all(|value| *value == 0.0), "{name}");
        }
    }

    #[test]
    fn heads_are_kept_or_refused_by_name() {
        let head_of = |model: Model, count: usize| add_head("finetune: labels", model, &mut Vec::new(), &classes(count), 0);
        let add = |name: &str, count: usize| head_of(golden(name), count);
        let before = golden("bert-sequence-classification");
        let kept = head_of(before.clone(), 3).unwrap();
        assert!(std::sync::Arc::ptr_eq(&kept.model.weights.by_name["classifier.weight"].source(), &before.weights.by_name["classifier.weight"].source()));
        assert_eq!(kept.model.config.get("id2label").unwrap()["2"], "class 2");
        let error = add("bert-sequence-classification", 2).map(drop).unwrap_err().to_string();
        assert!(error.contains("a head for 3 classes, not for 2") && error.contains("[\"BertModel\"]"), "{error}");
        let error = add("llama", 2).map(drop).unwrap_err().to_string();
        assert!(error.contains("a classification head for model_type `llama`"), "{error}");
    }
}
