//! Validation of data options.

use super::options::{Data, Task};
use super::records::{TextFormat, layout};
use crate::error::{Error, Result, redact_path};

impl Data {
    /// Validates the options.
    ///
    /// # Errors
    /// A value is out of range, or an option does not apply to this kind of data.
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        let kinds = [self.text.is_some(), self.images.is_some(), self.arrays.is_some(), self.source.is_some(), !self.mix.is_empty()];
        if kinds.iter().filter(|kind| **kind).count() != 1 {
            return Err(Error::option("data", "requires exactly one of `text`, `images`, `arrays`, `source` and `mix`"));
        }
        if self.weight.is_some() {
            return Err(Error::option("data", "`weight` applies only to the texts of `mix`: remove it"));
        }
        for (name, value) in [("samples", self.samples), ("batch_size", self.batch_size), ("max_length", self.max_length), ("stride", self.stride)] {
            if value == Some(0) {
                return Err(Error::option("data", format!("`{name}` must be at least 1")));
            }
        }
        if !self.mix.is_empty() {
            return self.check_mix();
        }
        for (name, sides) in [("resize", &self.resize), ("crop", &self.crop)] {
            if sides.as_ref().is_some_and(|sides| !(1..=2).contains(&sides.len()) || sides.contains(&0)) {
                return Err(Error::option("data", format!("`{name}` must be a height and a width, or one number, each at least 1")));
            }
        }
        if self.is_spread() && self.samples.is_none() {
            return Err(Error::option("data", "`sampling: spread` requires `samples`, the number of windows"));
        }
        if self.is_spread() && self.stride.is_some() {
            return Err(Error::option("data", "`stride` does not apply to `sampling: spread`, which takes one window per line: remove it"));
        }
        if self.task == Some(Task::Contrastive) && (self.text.is_none() || self.pair_column.is_none()) {
            return Err(Error::option(
                "data",
                "`task: contrastive` requires pairs of texts: specify `text`, and the column of the matching texts as `pair_column`",
            ));
        }
        if self.task == Some(Task::Contrastive) && self.label_column.is_some() {
            return Err(Error::option("data", "`label_column` does not apply to `task: contrastive`, whose pairs have no labels: remove it"));
        }
        if self.task != Some(Task::Contrastive) && self.negative_column.is_some() {
            return Err(Error::option("data", "`negative_column` applies only to `task: contrastive`: set it, or remove the column"));
        }
        self.reject_unread_options(true)?;
        if self.loss_on.is_some() && !self.text.as_ref().is_some_and(|path| matches!(layout(self, path), Ok(TextFormat::Json))) {
            return Err(self.requires_chats());
        }
        if self.std.iter().chain(&self.rescale).any(|v| !v.is_normal()) || self.mean.iter().any(|v| !v.is_finite()) {
            return Err(Error::option("data", "`rescale`, `mean` and `std` must be finite numbers, and `rescale` and `std` not 0"));
        }
        Ok(())
    }

    /// Validates the texts of `mix`.
    fn check_mix(&self) -> Result<()> {
        for part in &self.mix {
            let Some(path) = &part.text else { return Err(Error::option("data", "`mix`: requires `text` in each entry")) };
            let wrong = |reason: String| Err(Error::option("data", format!("`mix`: {}: {reason}", redact_path(path).display())));
            let common =
                [("mix", !part.mix.is_empty()), ("task", part.task.is_some()), ("metric", part.metric.is_some()), ("batch_size", part.batch_size.is_some())];
            if let Some((name, _)) = common.iter().find(|(_, is_given)| *is_given) {
                return wrong(format!("`{name}` applies to all texts: specify it next to `mix`"));
            }
            if part.weight.is_some_and(|weight| !(weight.is_normal() && weight > 0.0)) {
                return wrong("`weight` must be a positive number".into());
            }
        }
        self.parts()?.into_iter().try_for_each(|(part, _)| part.check().and_then(|()| part.reject_unread_options(false)))
    }

    /// An error because `loss_on` is set for data without chats.
    pub(super) fn requires_chats(&self) -> Error {
        let data = self.paths().next().map(|path| redact_path(path).display().to_string()).or_else(|| self.source.clone()).unwrap_or_default();
        Error::option("data", format!("{data}: `loss_on` applies only to chats (.jsonl with `messages`): remove it"))
    }

    /// Rejects options of windows for data that is not split into windows.
    pub(super) fn reject_window_options(&self, hint: &str) -> Result<()> {
        let options = [
            ("stride", self.stride.is_some()),
            ("loss_on", self.loss_on.is_some()),
            ("append_eos", self.append_eos.is_some()),
            ("packing", self.packing.is_some()),
        ];
        match options.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(Error::option("data", format!("`{name}` {hint}: remove it"))),
            None => Ok(()),
        }
    }

    /// Rejects options that do not apply to this kind of data; `texts_may_have_images` for a language model
    /// with a vision tower, or if the model is not known.
    pub(super) fn reject_unread_options(&self, texts_may_have_images: bool) -> Result<()> {
        let layout = self.text.as_ref().map(|path| layout(self, path).ok());
        let (columns, records) = (matches!(layout, Some(None | Some(TextFormat::Columns { .. }))), !matches!(layout, None | Some(Some(TextFormat::Lines))));
        let (text, images, arrays) = (self.text.is_some(), self.images.is_some(), self.arrays.is_some());
        let images = images || texts_may_have_images && matches!(layout, Some(Some(TextFormat::Json | TextFormat::Columns { .. })));
        let is_idx = self.images.as_ref().is_some_and(|path| !path.is_dir());
        let options = [
            (records, self.text_column.is_some(), "text_column", "texts in columns (.csv, .tsv or .jsonl)"),
            (records, self.pair_column.is_some(), "pair_column", "texts in columns (.csv, .tsv or .jsonl)"),
            (records || arrays, self.label_column.is_some(), "label_column", "texts in columns (.csv, .tsv or .jsonl) and arrays"),
            (is_idx, self.labels.is_some(), "labels", "an IDX file of images"),
            (columns, self.header.is_some(), "header", ".csv and .tsv"),
            (columns, self.delimiter.is_some(), "delimiter", ".csv and .tsv"),
            (columns, self.quoting.is_some(), "quoting", ".csv and .tsv"),
            (arrays, !self.inputs.is_empty(), "inputs", "arrays"),
            (text, self.max_length.is_some(), "max_length", "text"),
            (text, self.stride.is_some(), "stride", "text"),
            (text, self.append_eos.is_some(), "append_eos", "text"),
            (text, self.packing.is_some(), "packing", "text"),
            (text && !records, self.is_spread(), "sampling: spread", "plain text (.txt and .raw)"),
            (images, self.resize.is_some(), "resize", "images"),
            (images, self.crop.is_some(), "crop", "images"),
            (images, self.layout.is_some(), "layout", "images"),
            (images, self.channels.is_some(), "channels", "images"),
            (images || arrays, self.rescale.is_some(), "rescale", "images and arrays"),
            (images || arrays, !self.mean.is_empty(), "mean", "images and arrays"),
            (images || arrays, !self.std.is_empty(), "std", "images and arrays"),
        ];
        match options.into_iter().find(|(is_read, is_given, ..)| *is_given && !is_read) {
            Some((_, _, name, of)) => Err(Error::option("data", format!("`{name}` applies only to {of}: remove it"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_rejected() {
        let check = |text: &str| serde_saphyr::from_str::<Data>(text).map_err(|e| e.to_string()).and_then(|d| d.check().map_err(|e| e.to_string()));
        assert!(check("text: a.txt").is_ok());
        assert!(check("{}").unwrap_err().contains("exactly one of"));
        assert!(check("{ text: a, images: b }").unwrap_err().contains("exactly one of"));
        assert!(check("{ text: a, samples: 0 }").unwrap_err().contains("`samples`"));
        assert!(check("{ images: a, resize: [3, 4], crop: 3, layout: nhwc, channels: bgr, scale: 1 }").is_ok());
        assert!(check("{ images: a, resize: [3, 4, 5] }").unwrap_err().contains("`resize`"));
        assert!(check("{ images: a, crop: 0 }").unwrap_err().contains("`crop`"));
        assert!(check("{ images: a, crop: wide }").unwrap_err().contains("a number, or a height and a width"));
        assert!(check("{ arrays: a.npz, layout: nhwc }").unwrap_err().contains("`layout` applies only to images"));
        let unread = [
            ("{ text: a, mean: [0.5] }", "`mean` applies only to images and arrays"),
            ("{ text: a.txt, text_column: x }", "`text_column`"),
            ("{ text: a.jsonl, header: false }", "`header`"),
            ("{ text: a.jsonl, labels: nosuchfile }", "`labels`"),
            ("{ text: a.csv, inputs: { a: b } }", "`inputs`"),
            ("{ arrays: a.npz, max_length: 8 }", "`max_length`"),
            ("{ arrays: a.npz, pair_column: x }", "`pair_column`"),
            ("{ images: a, label_column: x }", "`label_column`"),
            ("{ images: ., labels: x }", "`labels` applies only to an IDX file"),
            ("{ text: a.jsonl, samples: 2, sampling: spread }", "`sampling: spread` applies only to plain text"),
            ("{ images: ., samples: 2, sampling: spread }", "`sampling: spread` applies only to plain text"),
            ("{ text: a.txt, sampling: spread }", "requires `samples`"),
            ("{ text: a.csv, task: contrastive }", "specify `text`, and the column of the matching texts as `pair_column`"),
            ("{ text: a.csv, pair_column: b, label_column: c, task: contrastive }", "`label_column` does not apply to `task: contrastive`"),
            ("{ text: a.csv, pair_column: 1, negative_column: 2 }", "`negative_column` applies only to `task: contrastive`"),
            ("{ text: a.txt, pair_column: b, task: contrastive }", "`pair_column` applies only to texts in columns"),
            ("{ text: a.txt, weight: 2 }", "`weight` applies only to the texts of `mix`"),
            ("{ text: a.txt, mix: [{ text: b.txt }] }", "exactly one of"),
            ("{ mix: [{ images: a }] }", "`mix`: requires `text` in each entry"),
            ("{ mix: [{ text: b.txt, weight: 0 }] }", "`mix`: b.txt: `weight` must be a positive number"),
            ("{ mix: [{ text: b.txt, weight: -.inf }] }", "`mix`: b.txt: `weight` must be a positive number"),
            ("{ mix: [{ text: b.txt, task: fidelity }] }", "`mix`: b.txt: `task` applies to all texts"),
            ("{ mix: [{ text: a.jsonl }, { text: b.txt }], loss_on: assistant }", "b.txt: `loss_on` applies only to chats"),
            ("{ mix: [{ text: b.txt, crop: 3 }] }", "`crop` applies only to images"),
            ("{ mix: [{ text: b.txt, samples: 0 }] }", "`samples` must be at least 1"),
            ("{ text: a.txt, loss_on: assistant }", "a.txt: `loss_on` applies only to chats"),
            ("{ text: a.csv, loss_on: all }", "a.csv: `loss_on` applies only to chats"),
            ("{ arrays: a.npz, loss_on: assistant }", "a.npz: `loss_on` applies only to chats"),
            ("{ arrays: a.npz, append_eos: true }", "`append_eos` applies only to text"),
            ("{ arrays: a.npz, packing: true }", "`packing` applies only to text"),
            ("{ text: a.txt, samples: 2, sampling: spread, stride: 8 }", "`stride` does not apply to `sampling: spread`"),
        ];
        for (text, reason) in unread {
            assert!(check(text).is_err_and(|e| e.contains(reason)), "{text}");
        }
        for valid in [
            "{ mix: [{ text: a.txt, weight: 0.5, append_eos: true }, { text: b.jsonl, loss_on: assistant }], max_length: 8 }",
            "{ text: a.csv, header: false, quoting: false, text_column: 0, max_length: 8 }",
            "{ text: a.log, delimiter: \";\", header: false }",
            "{ text: a.csv, pair_column: b, negative_column: c, task: contrastive }",
        ] {
            assert_eq!(check(valid), Ok(()), "{valid}");
        }
        assert!(["mean: 0.286, std: 1", "mean: -1", "mean: [1, 0.5]"].iter().all(|scalar| check(&format!("{{ images: a, {scalar} }}")).is_ok()));
        assert!(check("{ images: a, mean: x }").is_err());
        assert!(check("{ images: a, std: [0.0] }").unwrap_err().contains("`std`"));
        assert!(check("{ text: a, colour: b }").unwrap_err().contains("colour"));
    }
}
