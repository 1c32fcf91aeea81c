//! Blocks that are done, each in a folder of its own, so that an interrupted run goes on behind the last one, and so that no more than one
//! of them is in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::Model;
use crate::output::{Replace, Staging};
use crate::store::header;
use crate::store::writer::{FileLayout, Item, write};
use crate::store::{Affine, Checkpoint, Encoding, Origin, StatedEncoding, StorageFormat, Weight, Weights};
use crate::work::Work;

/// What the blocks were made from.
const IDENTITY: &str = "identity";
/// What the files of weights do not say of them.
const ABOUT: &str = "about.json";

/// What the report tells of a block.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Facts {
    /// Chains of layers that were rescaled.
    pub rescaled: usize,
    /// Plain words.
    pub notes: Vec<String>,
    /// A figure for each weight, where the method tells one.
    #[serde(default)]
    pub figures: BTreeMap<String, f64>,
}

/// What the files of weights do not say of a block.
#[derive(Serialize, Deserialize)]
struct AboutBlock {
    weights: BTreeMap<String, About>,
    facts: Facts,
}

/// What a file does not say of a weight.
#[derive(Serialize, Deserialize)]
struct About {
    origin: Origin,
    /// How it is quantized, if it is.
    affine: Option<Affine>,
}

/// A folder of blocks.
pub(super) struct Finished {
    folder: PathBuf,
}

impl Finished {
    /// Opens the folder: with the blocks of an interrupted run of the same work, if they are asked for, else empty.
    ///
    /// # Errors
    /// The folder cannot be written to, or is of other work.
    pub fn open(folder: &Path, identity: &str, resume: bool) -> Result<Finished> {
        let path = folder.join(IDENTITY);
        let found = fs::read_to_string(&path).ok().filter(|_| resume);
        if found.as_ref().is_some_and(|found| found != identity) {
            return Err(Error::run(folder.display(), "is of a run with other options, data or weights", "start again with --force and without --resume"));
        }
        if found.is_none() {
            if folder.exists() {
                fs::remove_dir_all(folder).map_err(Error::io("remove", folder))?;
            }
            fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
            fs::write(&path, identity).map_err(Error::io("write", &path))?;
        }
        Ok(Finished { folder: folder.to_owned() })
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, block: usize) -> PathBuf {
        self.folder.join(format!("block-{block:04}"))
    }

    /// The weights of a block that is done, and what is told of it.
    ///
    /// # Errors
    /// Its files cannot be read.
    pub fn take(&self, block: usize, model: &Model) -> Result<Option<(BTreeMap<String, Weight>, Facts)>> {
        let path = self.path(block);
        if !path.is_dir() {
            return Ok(None);
        }
        let about = path.join(ABOUT);
        let text = fs::read(&about).map_err(Error::io("read", &about))?;
        let AboutBlock { weights: mut known, facts } = serde_json::from_slice(&text).map_err(|e| Error::malformed(&about, e.to_string()))?;
        let stated = |name: &str| match known.get(name).and_then(|about| about.affine.as_ref()) {
            Some(affine) => StatedEncoding { bits: Some(affine.codes.bits()), granularity: Some(affine.granularity) },
            None => StatedEncoding::default(),
        };
        let stored = Weights::from_checkpoint_with(Checkpoint::open(&path)?, &stated)?;
        let found = stored.by_name.into_iter().map(|(name, mut now)| {
            let said = known.remove(&name);
            let (origin, affine) = said.map_or((Origin::default(), None), |about| (about.origin, about.affine));
            now.encoding = affine.map_or(now.encoding, Encoding::Affine);
            let mut weight = match model.weights.by_name.get(&name) {
                Some(before) => before.reread(&name, now),
                None => now,
            };
            weight.origin = origin;
            (name, weight)
        });
        Ok(Some((found.collect(), facts)))
    }

    /// Stores a block, and gives its weights as they are read back.
    ///
    /// # Errors
    /// Writing or reading fails.
    pub fn put(&self, block: usize, model: &Model, changed: BTreeMap<String, Weight>, facts: Facts, work: &Work) -> Result<BTreeMap<String, Weight>> {
        let staging = Staging::new(&self.path(block), Replace::Work(ABOUT), &*model.path)?;
        let weights: BTreeMap<String, About> = changed
            .iter()
            .map(|(name, weight)| {
                let affine = if let Encoding::Affine(affine) = &weight.encoding { Some(affine.clone()) } else { None };
                (name.clone(), About { origin: weight.origin, affine })
            })
            .collect();
        let text = serde_json::to_vec(&AboutBlock { weights, facts }).unwrap_or_default();
        let items: Vec<Item> = changed.into_iter().map(|(name, weight)| Item { name, storage_format: storage_format(&weight), weight }).collect();
        let layout = FileLayout::new(&items, &BTreeMap::new(), &[], u64::MAX)?;
        write(staging.destination(), &items, &layout, None, &work.quiet())?;
        let path = staging.path().join(ABOUT);
        fs::write(&path, text).map_err(Error::io("write", &path))?;
        staging.commit()?;
        let missing = || Error::malformed(&self.path(block), "is no longer there");
        self.take(block, model)?.map(|(weights, _)| weights).ok_or_else(missing)
    }
}

fn storage_format(weight: &Weight) -> StorageFormat {
    if weight.encoding == Encoding::Dense { StorageFormat::Plain } else { StorageFormat::Packed }
}

/// Bytes that weights of these names take there.
pub(in crate::pass) fn kept_bytes(names: &BTreeSet<String>, weights: &Weights) -> u64 {
    let kept = names.iter().filter_map(|name| Some((name, weights.by_name.get(name)?)));
    let parts = kept.flat_map(|(name, weight)| storage_format(weight).parts(name, weight));
    parts.filter_map(|part| header::byte_count(part.dtype, &part.shape)).sum()
}
