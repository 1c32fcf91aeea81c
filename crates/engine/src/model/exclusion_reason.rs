//! Reasons why files of a model folder are not carried over.

/// Reason why a file or folder is not carried over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExclusionReason {
    /// The original weights in another format or as a copy, which loaders could mistake for the new ones.
    OldWeights,
    /// A LoRA adapter for the original weights, which transformers would apply to the new ones.
    Adapter,
    /// Description of the packing of the original weights, or of inputs that the model no longer reads.
    Described,
    /// Description of an ONNX file that is not part of the output.
    Runtime,
    /// The original vocabulary in a format that a pass cannot rewrite.
    Vocabulary,
    /// Report or training log of an earlier run.
    Replaced,
    /// Description of the original model, which the model card of the output replaces.
    Card,
    /// State of an earlier training, which may contain local paths.
    Training,
    /// A hidden file or folder, such as that of a version control system.
    Hidden,
    /// A file with a typical name of keys or credentials.
    Secret,
    /// A link to a folder.
    Link,
    /// A link to a file or folder that does not exist.
    BrokenLink,
    /// A device, socket or pipe.
    Special,
}

impl ExclusionReason {
    /// The reason as a note states it, for files in the plural.
    pub(super) fn text(self) -> &'static str {
        match self {
            ExclusionReason::OldWeights => "they contain the original weights, which would contradict the new ones",
            ExclusionReason::Adapter => {
                "they are a LoRA adapter of the original weights, which is not applied: if it belongs to the model, merge it first with `merge_and_unload` of PEFT"
            }
            ExclusionReason::Described => "they describe the original model",
            ExclusionReason::Runtime => "they describe the original ONNX file",
            ExclusionReason::Vocabulary => "they contain the original vocabulary; tokenizer.json contains the new one",
            ExclusionReason::Replaced => "they describe an earlier run or the files of the input",
            ExclusionReason::Card => "the output has its own model card; `card: false` or `--no-card` copies the original one instead",
            ExclusionReason::Training => "they are the state of an earlier training",
            ExclusionReason::Hidden => "hidden files and folders are not part of a model",
            ExclusionReason::Secret => "they may contain keys or credentials",
            ExclusionReason::Link => "links to folders are not followed",
            ExclusionReason::BrokenLink => "they are links to files that do not exist",
            ExclusionReason::Special => "they are neither files nor folders",
        }
    }
}
