//! Validation of outputs that are repositories of the Hub.

use std::io::ErrorKind;
use std::path::Path;

use super::listing::Listing;
use super::target::{CHANGED, FOREIGN, Inputs, Replace, UNREPORTED, exists, refuse, require_no_loss, require_remote_folder};
use crate::error::{Error, Result};
use crate::files::{self, GIT_ATTRIBUTES, Kind, Repository};

/// Whether an output is a repository of the Hub.
pub(super) fn is_repository(target: &Path) -> bool {
    files::is_remote(target) && target.to_str().is_some_and(|name| name.starts_with("hf:"))
}

/// Checks whether an output can be committed to a repository: its files may be replaced only if the report
/// of an earlier output lists all of them.
pub(super) fn check_repository(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    require_remote_folder(target)?;
    let repository = Repository::from_path(target);
    for input in inputs.files.iter().chain([&inputs.model]) {
        if files::is_remote(input) && Repository::from_path(input) == repository {
            return Err(refuse(target, &format!("contains {}, which this run reads", input.display()), "choose another repository or branch"));
        }
    }
    if !files::require_repository(target).map_err(Error::io("write", target))? {
        return Ok(());
    }
    let mut names = Vec::new();
    collect(target, target, &mut names)?;
    names.retain(|name| name != GIT_ATTRIBUTES);
    if names.is_empty() {
        return Ok(());
    }
    if replace == Replace::Never {
        return Err(exists(target));
    }
    let Some(listing) = Listing::open(target) else { return require_no_loss(target, &names, UNREPORTED) };
    let foreign: Vec<String> = names.into_iter().filter(|name| !listing.contains(name)).collect();
    require_no_loss(target, &foreign, FOREIGN)?;
    let changed: Vec<String> = listing.changed_remotely(target).into_iter().filter(|name| name != GIT_ATTRIBUTES).collect();
    require_no_loss(target, &changed, CHANGED)
}

/// Names of all files of a repository.
fn collect(root: &Path, folder: &Path, names: &mut Vec<String>) -> Result<()> {
    let entries = match files::list(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Error::io("list", folder))?,
    };
    for entry in entries {
        if entry.kind == Kind::Folder {
            collect(root, &entry.path, names)?;
        } else {
            names.extend(entry.path.strip_prefix(root).ok().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    Ok(())
}
