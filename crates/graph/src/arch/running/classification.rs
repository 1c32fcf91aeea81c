//! Classification heads: the class in transformers that adds one to an encoder, and the modules of the head.

use super::{ClassificationHead, Settings, families, family};

impl ClassificationHead {
    /// The head of the family of a configuration; `None` if the family has none.
    pub fn for_model(settings: &Settings) -> Option<ClassificationHead> {
        let text = |key: &str| settings.text_or(key, "").unwrap_or("");
        let modules: &[&str] = match text("variant") {
            variant if variant.starts_with("resnet") => &["fc"],
            variant if variant.starts_with("mobilenet_v3") => &["classifier.3"],
            _ => &["classifier.1"],
        };
        match text("model_type") {
            model_type @ "torchvision" => Some(ClassificationHead { modules, ..family(model_type)?.classifier? }),
            model_type => family(model_type)?.classifier,
        }
    }

    /// The families that have a classification head.
    pub fn families() -> String {
        families().filter(|family| family.classifier.is_some()).map(|family| family.model_type).collect::<Vec<_>>().join(", ")
    }

    /// Whether a model of this class has the head.
    pub fn is_in(&self, settings: &Settings) -> bool {
        self.class.is_empty() || settings.class() == self.class
    }

    /// The class of the encoder without the head.
    pub fn base_class(&self) -> String {
        self.class.split("For").next().map(|base| format!("{base}Model")).unwrap_or_default()
    }

    /// The module that computes the logits.
    pub fn logits(&self) -> &'static str {
        self.modules.last().copied().unwrap_or_default()
    }
}
