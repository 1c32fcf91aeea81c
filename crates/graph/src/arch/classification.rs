//! Classification heads: the class in transformers that adds one to an encoder, and the modules of the head.

use super::Settings;

/// The classification head of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassificationHead {
    /// The class of a model with this head in `architectures`; empty if the family has no classes.
    pub class: &'static str,
    /// Prefix of the other tensors in this class.
    pub prefix: &'static str,
    /// Modules of the head; the last one computes the logits.
    pub modules: &'static [&'static str],
}

/// `model_type`, class, prefix and modules.
const HEADS: [(&str, ClassificationHead); 13] = [
    ("bert", head("BertForSequenceClassification", "bert.", &["bert.pooler.dense", "classifier"])),
    ("roberta", head("RobertaForSequenceClassification", "roberta.", &["classifier.dense", "classifier.out_proj"])),
    ("xlm-roberta", head("XLMRobertaForSequenceClassification", "roberta.", &["classifier.dense", "classifier.out_proj"])),
    ("distilbert", head("DistilBertForSequenceClassification", "distilbert.", &["pre_classifier", "classifier"])),
    ("mpnet", head("MPNetForSequenceClassification", "mpnet.", &["classifier.dense", "classifier.out_proj"])),
    ("modernbert", head("ModernBertForSequenceClassification", "model.", &["head.dense", "head.norm", "classifier"])),
    ("deberta-v2", head("DebertaV2ForSequenceClassification", "deberta.", &["pooler.dense", "classifier"])),
    ("vit", head("ViTForImageClassification", "vit.", &["classifier"])),
    ("dinov2", head("Dinov2ForImageClassification", "dinov2.", &["classifier"])),
    ("swin", head("SwinForImageClassification", "swin.", &["classifier"])),
    ("convnext", head("ConvNextForImageClassification", "convnext.", &["classifier"])),
    ("efficientnet", head("EfficientNetForImageClassification", "efficientnet.", &["classifier"])),
    ("resnet", head("ResNetForImageClassification", "resnet.", &["classifier.1"])),
];

const fn head(class: &'static str, prefix: &'static str, modules: &'static [&'static str]) -> ClassificationHead {
    ClassificationHead { class, prefix, modules }
}

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
            "torchvision" => Some(head("", "", modules)),
            family => HEADS.iter().find(|(name, _)| *name == family).map(|(_, head)| *head),
        }
    }

    /// The families that have a classification head.
    pub fn families() -> String {
        HEADS.iter().map(|(name, _)| *name).chain(["torchvision"]).collect::<Vec<_>>().join(", ")
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
