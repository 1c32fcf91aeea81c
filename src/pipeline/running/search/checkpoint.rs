//! Scores and measurements of a search in a file, from which an interrupted search continues.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::Point;
use crate::data::DataSets;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::output::check_file_writable;
use crate::pass::Scores;
use crate::report::Tool;
use crate::store::ContentKey;
use crate::work::{Work, lock};

/// Option of the file, for errors.
const OPTION: &str = "--checkpoint";

/// A measured mixture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mixture {
    /// Index of the format of each unit.
    options: Vec<usize>,
    bytes: u64,
    measured: Option<f64>,
    score: Option<f64>,
    drop: Option<f64>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    /// Hash of everything that determines the measurements.
    key: String,
    scores: Option<Scores>,
    /// Losses of single units, by the indices of the formats of all units.
    losses: Vec<(Vec<usize>, Option<f64>)>,
    mixtures: Vec<Mixture>,
}

/// The file, which is written after each measurement.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    contents: Mutex<Contents>,
}

impl Checkpoint {
    /// Checks that the file can be replaced.
    ///
    /// # Errors
    /// If its folder is not writable.
    pub fn check_writable(path: &Path) -> Result<()> {
        check_file_writable(&unfinished(path))
    }

    /// Opens the file, or creates it with the first measurement. `options`: other options that determine the
    /// measurements, such as the runtime, the formats and the device.
    ///
    /// # Errors
    /// If the file is that of another search.
    pub fn open(path: &Path, model: &Model, data: &DataSets, options: &str, work: &Work) -> Result<Checkpoint> {
        let mut key = ContentKey::new(work);
        let tool = Tool::default();
        key.line(&format!("{} {:?} {options}", tool.version, tool.commit));
        key.files(model.inputs(), &model.path)?;
        for set in [&data.calibration, &data.evaluation] {
            let content = set.as_ref().map(|set| set.content(work)).transpose()?;
            key.line(&content.unwrap_or_default());
        }
        Checkpoint::with_key(path, key.name())
    }

    fn with_key(path: &Path, key: String) -> Result<Checkpoint> {
        let contents = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
                if let Some(folder) = folder {
                    return Err(Error::option(OPTION, format!("the folder {} does not exist: create it, or name another file", folder.display())));
                }
                Contents { key, ..Contents::default() }
            }
            text => {
                let text = text.map_err(Error::io("read", path))?;
                let wrong = |reason: String| Error::option(OPTION, format!("{} {reason}: name another file, or remove this one", path.display()));
                let contents: Contents = serde_json::from_str(&text).map_err(|e| wrong(format!("does not contain the measurements of a search: {e}")))?;
                if contents.key != key {
                    return Err(wrong("has the measurements of another model, other data, formats, or another version of compress".to_owned()));
                }
                contents
            }
        };
        Ok(Checkpoint { path: path.to_owned(), contents: Mutex::new(contents) })
    }

    /// Replaces the file.
    fn write(&self, contents: &Contents) -> Result<()> {
        let part = unfinished(&self.path);
        let text = serde_json::to_string(contents).map_err(|e| Error::option(OPTION, e))?;
        std::fs::write(&part, text + "\n").map_err(Error::io("write", &part))?;
        std::fs::rename(&part, &self.path).map_err(Error::io("write", &self.path))
    }

    /// The scores of the weights, which are computed if they are not known.
    pub(super) fn scores(&self, compute: impl FnOnce() -> Result<Scores>) -> Result<Scores> {
        if let Some(known) = &lock(&self.contents).scores {
            return Ok(known.clone());
        }
        let scores = compute()?;
        let mut contents = lock(&self.contents);
        contents.scores = Some(scores.clone());
        self.write(&contents)?;
        Ok(scores)
    }

    /// The loss of a single unit in a format.
    pub(super) fn loss(&self, options: &[usize], compute: impl FnOnce() -> Result<Option<f64>>) -> Result<Option<f64>> {
        if let Some((_, known)) = lock(&self.contents).losses.iter().find(|(known, _)| known == options) {
            return Ok(*known);
        }
        let loss = compute()?;
        let mut contents = lock(&self.contents);
        contents.losses.push((options.to_vec(), loss));
        self.write(&contents)?;
        Ok(loss)
    }

    /// The stored measurement of a point. `needs_score`: whether one without a score does not count.
    fn stored(&self, point: &Point, needs_score: bool) -> Option<Mixture> {
        let is_known = |mixture: &&Mixture| mixture.options == point.options && (mixture.score.is_some() || !needs_score);
        lock(&self.contents).mixtures.iter().find(is_known).cloned()
    }

    /// Whether the measurement of a point is known.
    pub(super) fn has(&self, point: &Point, needs_score: bool) -> bool {
        self.stored(point, needs_score).is_some()
    }

    /// Measures a point. `needs_score`: whether a known measurement without a score is repeated.
    pub(super) fn measure(&self, point: &mut Point, needs_score: bool, compute: impl FnOnce(&mut Point) -> Result<()>) -> Result<()> {
        if let Some(known) = self.stored(point, needs_score) {
            let Mixture { bytes, measured, score, drop, .. } = known;
            (point.bytes, point.measured, point.score, point.drop) = (bytes, measured, score, drop);
            return Ok(());
        }
        compute(point)?;
        let mut contents = lock(&self.contents);
        contents.mixtures.retain(|mixture| mixture.options != point.options);
        let Point { bytes, measured, score, drop, .. } = *point;
        contents.mixtures.push(Mixture { options: point.options.clone(), bytes, measured, score, drop });
        self.write(&contents)
    }
}

/// The file that replaces the checkpoint when it is complete.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::Score;

    fn scores() -> Scores {
        let mut scores = Scores::default();
        scores.by_weight.insert("a.weight".to_owned(), vec![None, Some(Score { loss: 0.1 + 0.2, bytes: 5 })]);
        scores.importance.insert("a.weight".to_owned(), vec![0.1f32, 3.0].into());
        scores
    }

    /// A second search computes nothing, and has the same values bit for bit.
    #[test]
    fn known_values_are_not_computed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let point = || Point { options: vec![0, 1], predicted: 7.0, ..Point::default() };
        let checkpoint = Checkpoint::with_key(&path, "key".to_owned()).unwrap();
        assert!(!path.exists());
        checkpoint.scores(|| Ok(scores())).unwrap();
        assert_eq!(checkpoint.loss(&[1, 1], || Ok(Some(0.3))).unwrap(), Some(0.3));
        let mut first = point();
        let compute = |point: &mut Point| {
            (point.bytes, point.measured) = (9, Some(1.0 / 3.0));
            Ok(())
        };
        checkpoint.measure(&mut first, false, compute).unwrap();
        let again = Checkpoint::with_key(&path, "key".to_owned()).unwrap();
        let known = again.scores(|| panic!("computed")).unwrap();
        assert_eq!((&known.by_weight, &known.importance), (&scores().by_weight, &scores().importance));
        assert_eq!(again.loss(&[1, 1], || panic!("computed")).unwrap(), Some(0.3));
        let mut second = point();
        again.measure(&mut second, false, |_| panic!("computed")).unwrap();
        assert_eq!((second.bytes, second.measured, second.predicted), (9, Some(1.0 / 3.0), 7.0));
        // The score is measured if it is needed.
        let scored = |point: &mut Point| {
            point.score = Some(0.5);
            Ok(())
        };
        again.measure(&mut second, true, scored).unwrap();
        let mut third = point();
        again.measure(&mut third, true, |_| panic!("computed")).unwrap();
        assert_eq!((third.score, lock(&again.contents).mixtures.len()), (Some(0.5), 1));
        let error = Checkpoint::with_key(&path, "other".to_owned()).unwrap_err().to_string();
        assert!(error.contains("state.json has the measurements of another model"), "{error}");
        std::fs::write(&path, "{}").unwrap();
        let error = Checkpoint::with_key(&path, "key".to_owned()).unwrap_err().to_string();
        assert!(error.contains("does not contain the measurements of a search"), "{error}");
    }
}
