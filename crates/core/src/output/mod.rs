//! Atomic output: folders that appear complete or not at all, and folders for unfinished work, with
//! their ownership and the cleanup after killed processes.
//!
//! Ownership is determined by file locks, not by process ids, which have no meaning in other containers
//! or on other machines.

mod listing;
mod lock;
mod names;
mod repository;
mod resume_folder;
mod staging;
mod target;
mod writable;

pub use listing::unlisted_files;
pub use names::{CONTINUATIONS, DRAFT_VOCABULARY, REPORT_FILES, SBOM, SIGNATURE, file_format, file_name, report_folder, reported_output, require_folder_name};
pub use resume_folder::{IDENTITY, ResumeFolder};
pub use staging::{ScratchFolder, Staging, check_output};
pub use target::{Inputs, Replace, require_local};
pub use writable::{check_file_writable, check_writable, free_space};
