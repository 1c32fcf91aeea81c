//! Checkpoints of finished blocks, each in its own folder. An interrupted run is resumed after the last
//! one, and only one block is in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::MethodReport;
use crate::error::{Error, Result};
use crate::exec;
use crate::kernel::ggml::BlockType;
use crate::model::Model;
use crate::output::IDENTITY;
use crate::pass::Checkpoints;
use crate::store::gguf::BlockScales;
use crate::store::header;
use crate::store::writer::{FileLayout, Item, write};
use crate::store::{
    ArtifactStore, Checkpoint, DType, Encoding, ExactBlocks, Origin, Packing, QuantizationSpec, StatedEncoding, StorageFormat, Weight, Weights,
};
use crate::work::Work;

/// Information on a block for the report.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct BlockReport {
    /// Number of chains that were rescaled.
    pub rescaled: usize,
    /// Report of the method.
    pub method: MethodReport,
    /// Inputs of layers with fewer tokens than features: both numbers, and the name of the value.
    pub few_tokens: Vec<(usize, usize, String)>,
}

/// Metadata of a block that is not part of its weight files.
#[derive(Serialize, Deserialize)]
struct BlockMetadata {
    weights: BTreeMap<String, WeightMetadata>,
    #[serde(rename = "facts")]
    report: BlockReport,
}

/// Metadata of a weight that is not part of its file.
#[derive(Serialize, Deserialize)]
struct WeightMetadata {
    origin: Origin,
    /// Encoding of a quantized weight.
    affine: Option<QuantizationSpec>,
    /// Dtype of its values.
    dtype: DType,
    /// For a weight that is stored as blocks of a GGUF file, ids of their type and of the file type that
    /// determined it.
    #[serde(default)]
    blocks: Option<(u32, Option<u64>)>,
}

/// The changed weights of a block, and its report.
pub(super) type StoredBlock = (BTreeMap<String, Weight>, BlockReport);

/// A folder of block checkpoints.
pub(super) struct BlockCheckpoints {
    blocks: ArtifactStore,
}

impl BlockCheckpoints {
    /// Opens the folder. When resuming, existing checkpoints are kept, and a different [`identity`] is an
    /// error. Otherwise the folder is emptied.
    pub fn open(Checkpoints { folder, resume, .. }: &Checkpoints, identity: &str) -> Result<BlockCheckpoints> {
        let path = folder.join(IDENTITY);
        let found = fs::read_to_string(&path).ok().filter(|_| *resume);
        if found.as_ref().is_some_and(|found| *found != identity) {
            return Err(Error::run(
                folder.display(),
                "has checkpoints of a run with other options, data or weights, on another device or instruction set, or of another number of processes",
                "start again with `force` and without `resume`",
            ));
        }
        if found.is_none() {
            if folder.exists() {
                fs::remove_dir_all(folder).map_err(Error::io("remove", folder))?;
            }
            fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
            fs::write(&path, identity).map_err(Error::io("write", &path))?;
        }
        Ok(BlockCheckpoints { blocks: ArtifactStore::new(folder) })
    }

    /// The checkpoints in a folder that another process has opened with this identity.
    pub fn attach(folder: &Path, identity: &str) -> Result<BlockCheckpoints> {
        if fs::read_to_string(folder.join(IDENTITY)).ok().as_deref() != Some(identity) {
            return Err(Error::run(folder.display(), "is not the folder of rank 0", "use an output folder that all processes can access"));
        }
        Ok(BlockCheckpoints { blocks: ArtifactStore::new(folder) })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.blocks.folder()
    }

    /// Loads the weights and the report of a block; `None` if it has no checkpoint, or a damaged one.
    pub fn load(&self, block: usize, model: &Model, work: &Work) -> Result<Option<StoredBlock>> {
        self.get(&name(block), model, Some(work))
    }

    /// Reads a checkpoint that a process of this run has stored.
    pub fn read(&self, key: &str, model: &Model) -> Result<StoredBlock> {
        let missing = || Error::malformed(&self.folder().join(key), "was removed by another process");
        self.get(key, model, None)?.ok_or_else(missing)
    }

    /// Removes all checkpoints whose keys start with `prefix`.
    pub fn clear(&self, prefix: &str) -> Result<()> {
        self.blocks.clear(prefix).map(drop)
    }

    fn get(&self, key: &str, model: &Model, work: Option<&Work>) -> Result<Option<StoredBlock>> {
        let Some((path, BlockMetadata { weights: mut metadata, report })) = self.blocks.get(key, work)? else { return Ok(None) };
        let stated = |name: &str| {
            let weight = metadata.get(name);
            let affine = weight.and_then(|weight| weight.affine.as_ref());
            let (bits, granularity) = (affine.map(|affine| affine.codes.bits()), affine.map(|affine| affine.granularity));
            StatedEncoding { bits, granularity, floats: weight.map(|weight| weight.dtype) }
        };
        let stored = Weights::from_checkpoint_with(Checkpoint::open(&path)?, &stated)?;
        let weights = stored.by_name.into_iter().map(|(name, mut now)| {
            let stored = metadata.remove(&name);
            let blocks =
                stored.as_ref().and_then(|weight| weight.blocks).and_then(|(kind, file_type)| Some(ExactBlocks { kind: BlockType::from_id(kind)?, file_type }));
            let (origin, affine) = stored.map_or((Origin::default(), None), |weight| (weight.origin, weight.affine));
            now.encoding = affine.map_or(now.encoding, Encoding::Quantized);
            let mut weight = match (model.weights.by_name.get(&name), blocks) {
                (Some(before), Some(blocks)) => before.in_blocks(blocks, &name, BlockScales::Blocks(Box::new(now))),
                (Some(before), None) => before.restored(&name, now),
                (None, _) => now,
            };
            weight.origin = origin;
            (name, weight)
        });
        Ok(Some((weights.collect(), report)))
    }

    /// Stores a checkpoint of a block. Returns it as read back from the files.
    pub fn store(&self, block: usize, model: &Model, changed: BTreeMap<String, Weight>, report: BlockReport, work: &Work) -> Result<StoredBlock> {
        self.put(&name(block), model, changed, report, work)
    }

    /// As [`store`](BlockCheckpoints::store), with another key.
    pub fn put(&self, key: &str, model: &Model, changed: BTreeMap<String, Weight>, report: BlockReport, work: &Work) -> Result<StoredBlock> {
        let draft = self.blocks.begin(key, &*model.path)?;
        let weights: BTreeMap<String, WeightMetadata> = changed
            .iter()
            .map(|(name, weight)| {
                let affine = if let Encoding::Quantized(affine) = &weight.encoding { Some(affine.clone()) } else { None };
                let blocks = weight.exact_blocks().map(|exact| (exact.kind.id(), exact.file_type));
                (name.clone(), WeightMetadata { origin: weight.origin, affine, dtype: weight.dtype, blocks })
            })
            .collect();
        let items: Vec<Item> = changed.into_iter().map(|(name, weight)| Item { name, storage_format: storage_format(&weight), weight }).collect();
        let layout = FileLayout::new(&items, &BTreeMap::new(), &[], u64::MAX)?;
        let (written, _) = write(draft.staging().destination(), &items, &layout, None, &work.quiet())?;
        draft.publish(BlockMetadata { weights, report }, &written, work)?;
        self.read(key, model)
    }
}

/// Everything that determines the checkpoints of a run. The order of sums depends on the number of ranks.
pub(super) fn identity(Checkpoints { key, .. }: &Checkpoints, device: &Device, ranks: usize) -> String {
    let hardware = exec::hardware(device);
    if ranks > 1 { format!("{key} {hardware} {ranks} ranks") } else { format!("{key} {hardware}") }
}

/// Key of a block; the folder is already that of a run.
pub(super) fn name(block: usize) -> String {
    format!("block-{block:04}")
}

fn storage_format(weight: &Weight) -> StorageFormat {
    if let Some(ExactBlocks { kind, .. }) = weight.exact_blocks() {
        return StorageFormat::Gguf(kind);
    }
    match &weight.encoding {
        Encoding::Quantized(affine) if affine.codes.packing() != Packing::Bytes => StorageFormat::Packed,
        Encoding::Dense | Encoding::Quantized(_) => StorageFormat::Plain,
    }
}

/// Size in bytes of the checkpoints of these weights.
pub(in crate::pass) fn checkpoint_bytes(names: &BTreeSet<String>, weights: &Weights) -> u64 {
    let stored = names.iter().filter_map(|name| Some((name, weights.by_name.get(name)?)));
    let parts = stored.flat_map(|(name, weight)| storage_format(weight).parts(name, weight));
    parts.filter_map(|part| header::byte_count(part.dtype, &part.shape)).sum()
}
