//! Atomic output: folders that appear complete or not at all, and folders for unfinished work, with
//! their ownership and the cleanup after killed processes.
//!
//! Ownership is determined by file locks, not by process ids, which have no meaning in other containers
//! or on other machines.

mod lock;
mod resume_folder;
mod staging;
mod target;

pub use resume_folder::ResumeFolder;
pub use staging::Staging;
pub use target::{Inputs, REPORT_FILES, Replace, check_output, file_format, file_name, report_folder, require_local};
