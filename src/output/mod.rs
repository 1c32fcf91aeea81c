//! Folders that appear whole or not at all, and folders for what is not finished: who owns them, and what is left of those whose
//! process was killed.
//!
//! Owners are told by locks, never by process ids, which say nothing about other containers and other machines.

mod lock;
mod place;
mod staging;
mod workplace;

pub use place::{Inputs, REPORT_FILES, Replace, check_place, file_format, file_name, report_folder, require_here};
pub use staging::Staging;
pub use workplace::Workplace;
