//! Writes the records of provenance: the software bill of materials and the signature.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::carry::{self, write_text};
use super::run::Run;
use crate::error::Result;
use crate::output::{SBOM, SIGNATURE, Staging};
use crate::provenance::{Bill, Hashes, hash_files};
use crate::report::{self, Report};

impl Run<'_> {
    /// Writes the bill of materials, if there is one, and adds it to the report, which must list all other
    /// files. Returns the hashes of the listed files, if a record needs them.
    pub(super) fn write_sbom(&self, staging: &Staging, report: &mut Report) -> Result<Hashes> {
        let provenance = &self.pipeline.provenance;
        if !provenance.needs_hashes() {
            return Ok(Hashes::new());
        }
        let mut hashes = self.hash_reported(staging, report, Hashes::new(), None)?;
        if provenance.sbom.is_some() {
            let models: BTreeSet<PathBuf> = self.pipeline.steps.iter().flat_map(|step| step.pass().reads_models()).collect();
            let text = Bill { name: &name(staging), report, models: &models, hashes: &hashes }.render()?;
            report.carried.push(carry::write_listed(staging.path(), SBOM, &text)?);
            hashes = self.hash_reported(staging, report, hashes, None)?;
        }
        Ok(hashes)
    }

    /// Signs all files of the output, of which the hashes of some are known. Does nothing without a key.
    pub(super) fn write_signature(&self, staging: &Staging, report: &Report, hashes: Hashes) -> Result<()> {
        let provenance = &self.pipeline.provenance;
        if provenance.key.is_none() {
            return Ok(());
        }
        let hashes = self.hash_reported(staging, report, hashes, Some(report::FILE))?;
        provenance.check_files(&hashes, &self.pipeline.work())?;
        let signature = provenance.sign(&name(staging), &hashes)?;
        signature.map_or(Ok(()), |text| write_text(&staging.path().join(SIGNATURE), &text))
    }

    /// Adds the hashes of files that a report lists, and of another file.
    fn hash_reported(&self, staging: &Staging, report: &Report, mut hashes: Hashes, other: Option<&str>) -> Result<Hashes> {
        let names = report.files().map(|(name, ..)| name).chain(other);
        let missing = names.filter(|name| !hashes.contains_key(*name));
        let files: Vec<(String, PathBuf)> = missing.map(|name| (name.to_owned(), staging.destination().location(name))).collect();
        hashes.extend(hash_files(&files, &self.pipeline.work())?);
        Ok(hashes)
    }
}

/// Name of the model: the last component of its path.
fn name(staging: &Staging) -> String {
    staging.target().file_name().unwrap_or_default().to_string_lossy().into_owned()
}
