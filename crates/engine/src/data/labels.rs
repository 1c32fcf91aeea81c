//! Class labels by index or by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};

use super::options::{Data, LabelKind};
use super::{References, Target};
use crate::error::{Error, Result};
use crate::model::no_single_label;
use crate::store::select::nearest;

/// The label of samples and tokens that losses and metrics ignore, as in PyTorch.
pub const IGNORED: i64 = -100;
/// Maximum number of names in an error message.
const MAX_LISTED: usize = 12;

/// A label as stored in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Label {
    /// A number in an array or a JSON object.
    Number(String),
    /// Text, which may consist of digits.
    Text(String),
}

impl Label {
    /// The stored text without surrounding whitespace.
    pub fn text(&self) -> &str {
        match self {
            Label::Number(text) | Label::Text(text) => text.trim(),
        }
    }

    /// The stored text, unchanged.
    pub fn into_text(self) -> String {
        match self {
            Label::Number(text) | Label::Text(text) => text,
        }
    }

    /// The kind of label that follows from the stored type.
    fn kind(&self) -> Option<LabelKind> {
        matches!(self, Label::Number(_)).then_some(LabelKind::Index)
    }
}

/// Rejects models that are not single-label classifiers, by `problem_type` or the number of outputs.
pub(super) fn require_single_label(target: &Target) -> Result<()> {
    let Some(reason) = no_single_label(target.config, target.classes()) else { return Ok(()) };
    let what = "the task classification requires a single-label classifier with softmax and cross entropy";
    Err(Error::option("task", format!("{reason}, but {what}: set `task: fidelity` to compare the model's outputs or to learn from a teacher")))
}

/// The names of the classes of a model by index, without placeholders such as `LABEL_0`.
pub fn class_names(config: &Map<String, Value>) -> BTreeMap<usize, String> {
    let names = config.get("id2label").and_then(Value::as_object).into_iter().flatten();
    let named = names.filter_map(|(id, name)| Some((id.parse().ok()?, name.as_str()?.to_owned())));
    named.filter(|(id, name)| *name != format!("LABEL_{id}")).collect()
}

/// Why the outputs of two models for the same class have different indices, if both name their classes.
pub fn class_difference([a, b]: [&BTreeMap<usize, String>; 2]) -> Option<String> {
    let (id, name) = a.iter().find(|(id, name)| b.get(id).is_some_and(|other| other != *name))?;
    Some(format!("class {id} is `{name}` and `{}`", b.get(id).map_or("", String::as_str)))
}

/// Maps labels to classes.
pub(super) struct Classes {
    /// The classes with each name. Several classes may have the same one.
    by_name: BTreeMap<String, BTreeSet<usize>>,
    /// Kind of the labels, if the options specify it.
    kind: Option<LabelKind>,
    /// Number of classes of the model, if it is a constant.
    count: Option<usize>,
}

impl Classes {
    pub fn from_target(options: &Data, target: &Target) -> Classes {
        let object = |key: &str| target.config.get(key).and_then(Value::as_object).into_iter().flatten();
        let names = object("id2label").filter_map(|(id, name)| Some((name.as_str()?, id.parse().ok()?)));
        let ids = object("label2id").filter_map(|(name, id)| Some((name.as_str(), usize::try_from(id.as_u64()?).ok()?)));
        let mut by_name = BTreeMap::<String, BTreeSet<usize>>::new();
        for (name, id) in names.chain(ids) {
            by_name.entry(name.to_owned()).or_default().insert(id);
        }
        Classes { by_name, kind: options.label_kind, count: target.classes() }
    }

    /// The class of a label, `None` for -100. A number is an index; text is a name, or an index if no
    /// class has this name. `location` names the label in error messages.
    pub fn find(&self, label: &Label, path: &Path, location: &str) -> Result<Option<usize>> {
        let is_ignored = label.text().parse() == Ok(IGNORED) && self.named(label.text()).is_empty();
        if is_ignored { Ok(None) } else { self.class(self.kind.or(label.kind()), label.text(), path, location).map(Some) }
    }

    /// The classes with this name, first by exact spelling, then ignoring case.
    fn named(&self, label: &str) -> BTreeSet<usize> {
        let (exact, lower) = (self.by_name.get(label), label.to_lowercase());
        let ignoring_case = || self.by_name.iter().filter(|(name, _)| name.to_lowercase() == lower).flat_map(|(_, ids)| ids).copied().collect();
        exact.cloned().unwrap_or_else(ignoring_case)
    }

    fn class(&self, kind: Option<LabelKind>, label: &str, path: &Path, location: &str) -> Result<usize> {
        let named = if kind == Some(LabelKind::Index) { BTreeSet::new() } else { self.named(label) };
        if let (Some(first), Some(second)) = (named.iter().next(), named.iter().nth(1)) {
            let reason = format!("{location}: `{label}` is the name of both class {first} and class {second} in config.json");
            return Err(Error::option("data", format!("{}: {reason}; use class indices, with `label_kind: index`", path.display())));
        }
        let named = named.first().copied();
        let index = label.parse().ok().filter(|_| kind != Some(LabelKind::Name));
        let class = match (named, index) {
            (Some(named), Some(index)) if named != index && self.count.is_none_or(|count| index < count) => {
                let reason = format!("{location}: `{label}` is both a class index and, in config.json, the name of class {named}");
                return Err(Error::option("data", format!("{}: {reason}; set `label_kind: index` or `label_kind: name`", path.display())));
            }
            (named, index) => {
                named.or(index).ok_or_else(|| Error::malformed(path, format!("{location}: `{label}` is not a class; {}", self.describe_names())))?
            }
        };
        match self.count {
            Some(count) if class >= count => {
                Err(Error::malformed(path, format!("{location}: class {class} is out of range, the model has {count} classes, numbered from 0")))
            }
            _ => Ok(class),
        }
    }

    /// The classes of samples from pairs of the sample's index and its label; `None` for -100. `location`
    /// describes the location of a label in the file by the index of its sample, for errors.
    pub fn references(&self, numbers: impl IntoIterator<Item = (usize, i64)>, path: &Path, location: impl Fn(usize) -> String) -> Result<References> {
        let class = |(index, number): (usize, i64)| self.find(&Label::Number(number.to_string()), path, &location(index));
        numbers.into_iter().map(class).collect::<Result<_>>().map(References::Classes)
    }

    /// Returns the classes of folders by name, or in alphabetical order if the model knows none of the
    /// names. The second value is true for alphabetical order. A partial match is an error: some folders
    /// would get the wrong class.
    pub fn for_folders(&self, names: &[String], path: &Path) -> Result<(Vec<usize>, bool)> {
        let (named, number) = (|name: &String| !self.named(name).is_empty(), |name: &String| name.parse::<usize>().is_ok());
        let all = |matches: &dyn Fn(&String) -> bool, kind| names.iter().all(matches).then_some(kind);
        let kind = self.kind.or_else(|| all(&named, LabelKind::Name)).or_else(|| all(&number, LabelKind::Index));
        let unmatched = names.iter().find(|name| !named(name) && !number(name));
        let Some(unmatched) = unmatched.filter(|_| kind.is_none()) else {
            let classes = names.iter().map(|name| self.class(kind, name, path, &format!("folder `{name}`"))).collect::<Result<_>>();
            return Ok((classes?, false));
        };
        if let Some(matched) = names.iter().find(|name| named(name) || number(name)) {
            let near = nearest(unmatched, self.by_name.keys().map(String::as_str)).map_or(String::new(), |near| format!(" (nearest: `{near}`)"));
            let reason = format!("folder `{unmatched}` matches no class of the model{near}, but folder `{matched}` does; rename or move folder `{unmatched}`");
            return Err(Error::malformed(path, format!("{reason}; {}", self.describe_names())));
        }
        match self.count {
            Some(count) if count != names.len() => Err(Error::malformed(
                path,
                format!("has {} folders, but the model has {count} classes, and the folder names are not labels of config.json", names.len()),
            )),
            _ => Ok(((0..names.len()).collect(), true)),
        }
    }

    /// The supported labels, for error messages.
    fn describe_names(&self) -> String {
        if self.by_name.is_empty() {
            return "labels are class indices from 0, or names in label2id of config.json".into();
        }
        let mut names: Vec<&str> = self.by_name.keys().take(MAX_LISTED).map(String::as_str).collect();
        if self.by_name.len() > MAX_LISTED {
            names.push("...");
        }
        format!("the labels in config.json are {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Port;
    use super::*;

    /// Calls a function with a model that has this number of classes.
    fn with_classes<T>(config: &Map<String, Value>, count: usize, use_target: impl FnOnce(Target) -> T) -> T {
        let outputs = [Port { name: "logits".into(), element: crate::ir::Element::Float, shape: vec![None, Some(count)], number: None }];
        let synthesized = crate::model::SynthesizedFiles::new();
        use_target(Target { outputs: &outputs, ..Target::new(Path::new("."), &synthesized, config) })
    }

    fn classes(id2label: &str, kind: Option<LabelKind>) -> Classes {
        let config = serde_json::from_str(&format!(r#"{{"id2label": {id2label}}}"#)).unwrap();
        with_classes(&config, 3, |target| Classes::from_target(&Data { label_kind: kind, ..Data::default() }, &target))
    }

    /// Ratings from 1 to 3: names that are digits but differ from the class indices.
    const STARS: &str = r#"{"0": "1", "1": "2", "2": "3"}"#;

    fn find(id2label: &str, kind: Option<LabelKind>, label: Label) -> Result<usize, String> {
        classes(id2label, kind).find(&label, Path::new("a"), "line 2").map(Option::unwrap).map_err(|e| e.to_string())
    }

    #[test]
    fn numbers_are_indices_and_text_is_a_name() {
        let (number, text) = (|n: &str| Label::Number(n.into()), |t: &str| Label::Text(t.into()));
        let references = |numbers: [(usize, i64); 3]| classes(STARS, None).references(numbers, Path::new("a"), |index| format!("row {index} of array `y`"));
        assert_eq!(references([(0, 1), (1, -100), (2, 0)]).unwrap(), References::Classes(vec![Some(1), None, Some(0)]));
        let refused = references([(0, 1), (1, 7), (2, 0)]).unwrap_err().to_string();
        assert!(refused.contains("row 1 of array `y`: class 7 is out of range"), "{refused}");
        for ignored in [number("-100"), text(" -100")] {
            assert_eq!(classes(STARS, None).find(&ignored, Path::new("a"), "line 2").unwrap(), None);
        }
        assert_eq!(find(STARS, None, number("1")), Ok(1));
        assert_eq!(find(STARS, None, text("3")), Ok(2));
        assert!(find(STARS, None, text("1")).unwrap_err().contains("`label_kind: index`"));
        for (kind, class) in [(LabelKind::Name, 0), (LabelKind::Index, 1)] {
            assert_eq!(find(STARS, Some(kind), text("1")), Ok(class));
            assert_eq!(find(STARS, Some(kind), number("1")), Ok(class));
        }
        assert!(find(STARS, Some(LabelKind::Name), text("0")).unwrap_err().contains("is not a class"));
        assert!(find(STARS, None, number("3")).unwrap_err().contains("the model has 3"));
        let pets = r#"{"0": "cat", "1": "dog"}"#;
        let twins = r#"{"0": "crane", "1": "Crane", "2": "crane"}"#;
        assert_eq!((find(twins, None, text("Crane")), find(twins, Some(LabelKind::Index), text("2"))), (Ok(1), Ok(2)));
        assert!(find(twins, None, text("crane")).unwrap_err().contains("`crane` is the name of both class 0 and class 2 in config.json; use class indices"));
        assert!(find(twins, None, text("CRANE")).unwrap_err().contains("class 0 and class 1"));
        assert_eq!((find(pets, None, text("Dog")), find(pets, None, text("1")), find(pets, None, number("1"))), (Ok(1), Ok(1), Ok(1)));
    }

    #[test]
    fn folder_names_are_indices_names_or_alphabetical() {
        let folders = |names: [&str; 3]| classes(STARS, None).for_folders(&names.map(str::to_owned), Path::new("a")).map_err(|e| e.to_string());
        assert_eq!(folders(["1", "2", "3"]), Ok((vec![0, 1, 2], false)));
        assert_eq!(folders(["0", "1", "2"]), Ok((vec![0, 1, 2], false)));
        assert_eq!(folders(["a", "b", "c"]), Ok((vec![0, 1, 2], true)));
        assert!(folders(["1", "2", "4"]).unwrap_err().contains("the model has 3"));
    }

    #[test]
    fn folders_that_match_the_labels_in_part_are_rejected() {
        let pets = |names: [&str; 3]| {
            let classes = classes(r#"{"0": "tabby cat", "1": "dog", "2": "bird"}"#, None);
            classes.for_folders(&names.map(str::to_owned), Path::new("a")).map_err(|e| e.to_string())
        };
        assert_eq!(pets(["Bird", "dog", "tabby cat"]), Ok((vec![2, 1, 0], false)));
        let error = pets(["bird", "dog", "tabby_cat"]).unwrap_err();
        assert!(error.contains("folder `tabby_cat` matches no class") && error.contains("nearest: `tabby cat`"), "{error}");
        assert!(pets(["0", "1", "fish"]).unwrap_err().contains("folder `fish`"));
    }

    #[test]
    fn regression_and_multi_label_models_are_rejected() {
        let refused = |config: &str, outputs: usize| {
            let config = serde_json::from_str(config).unwrap();
            with_classes(&config, outputs, |target| require_single_label(&target).map_err(|e| e.to_string()))
        };
        assert_eq!(refused("{}", 2), Ok(()));
        assert_eq!(refused(r#"{"problem_type": "single_label_classification"}"#, 2), Ok(()));
        assert!(refused("{}", 1).unwrap_err().contains("one output"));
        for kind in ["multi_label_classification", "regression"] {
            assert!(refused(&format!(r#"{{"problem_type": "{kind}"}}"#), 3).unwrap_err().contains(kind));
        }
    }
}
