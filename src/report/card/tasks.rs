//! Tasks of model classes.

use super::Card;
use super::source::architecture;
use crate::arch;

/// The task of the model classes with a suffix.
pub(super) struct Task {
    /// End of the class in `architectures` of `config.json`.
    suffix: &'static str,
    /// Its name on the Hub.
    pub pipeline_tag: &'static str,
    /// The class of transformers that loads such models.
    pub auto_class: &'static str,
}

const fn task(suffix: &'static str, pipeline_tag: &'static str, auto_class: &'static str) -> Task {
    Task { suffix, pipeline_tag, auto_class }
}

const TASKS: [Task; 11] = [
    task("ForCausalLM", "text-generation", "AutoModelForCausalLM"),
    task("LMHeadModel", "text-generation", "AutoModelForCausalLM"),
    task("ForSequenceClassification", "text-classification", "AutoModelForSequenceClassification"),
    task("ForTokenClassification", "token-classification", "AutoModelForTokenClassification"),
    task("ForQuestionAnswering", "question-answering", "AutoModelForQuestionAnswering"),
    task("ForMaskedLM", "fill-mask", "AutoModelForMaskedLM"),
    task("ForImageClassification", "image-classification", "AutoModelForImageClassification"),
    task("ForAudioClassification", "audio-classification", "AutoModelForAudioClassification"),
    task("ForObjectDetection", "object-detection", "AutoModelForObjectDetection"),
    task("ForCTC", "automatic-speech-recognition", "AutoModelForCTC"),
    task("WhisperForConditionalGeneration", "automatic-speech-recognition", "AutoModelForSpeechSeq2Seq"),
];

const WITH_IMAGES: Task = task("", "image-text-to-text", "AutoModelForImageTextToText");

impl Task {
    /// The task of a model class; that of models with this `model_type`, if they have a vision tower.
    pub fn of_model(model_type: &str, class: &str) -> Option<&'static Task> {
        if arch::has_tower(model_type) {
            return Some(&WITH_IMAGES);
        }
        TASKS.iter().find(|task| class.ends_with(task.suffix))
    }
}

/// File that describes the modules of a sentence-transformers model.
const SENTENCE_MODULES: &str = "modules.json";

impl Card<'_> {
    /// The model class of the output.
    pub(super) fn architecture(&self) -> Option<String> {
        architecture(self.config)
    }

    /// The task of the output.
    pub(super) fn task(&self) -> Option<&'static Task> {
        let model_type = self.config.get("model_type").and_then(serde_json::Value::as_str).unwrap_or_default();
        Task::of_model(model_type, self.architecture().as_deref().unwrap_or_default())
    }

    /// Whether sentence-transformers loads the folder.
    pub(super) fn is_sentence_encoder(&self) -> bool {
        self.files.contains(SENTENCE_MODULES)
    }

    /// Whether the output contains a format.
    pub(super) fn has_format(&self, name: &str) -> bool {
        self.report.outputs.iter().any(|file| file.format == name)
    }

    /// First file of the output in a format, except for its descriptions.
    pub(super) fn file(&self, format: &str) -> Option<&str> {
        let mut files = self.report.outputs.iter().filter(|file| file.format == format && file.path.ends_with(format));
        files.next().map(|file| file.path.as_str())
    }
}
