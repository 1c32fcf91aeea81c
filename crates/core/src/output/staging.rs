//! Output folders that appear complete or not at all.
//!
//! Files are written to a hidden staging folder next to the final location, under a unique name:
//!
//! ```text
//! .OUT.compress-0123456789abcdef/
//!     lock    created first, removed last, and locked in between
//!     new     renamed to OUT in one step
//!     old     the previous OUT, if the file system cannot exchange two folders atomically
//! ```
//!
//! A single-file output is staged in a folder too. It is published in up to three steps: the external
//! data file, if the format has one, under an unused name; the report folder; and finally, atomically,
//! the file itself. The last step commits: the file references its data file by name, so before this
//! step the old file is paired with the old data, and afterwards the new file with the new data. The old
//! data file is removed after the commit. The journal `placing.json`, written before the first step,
//! records the inode number of each part. If a step fails, the previous steps are reverted. If the
//! process is killed, the next run for this output reverts them, or removes the old data file if the new
//! file was committed.

mod journal;
mod publish;
mod scratch;
mod work_folder;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub use self::scratch::ScratchFolder;
use self::work_folder::{begin, bytes, remove, remove_created, remove_stale, sync, sync_folder};
use super::lock::Lock;
use super::names::{file_name, free_data_name, work_location};
use super::repository::{check_repository, is_repository};
use super::target::{Inputs, Replace, absolute, check_target, refuse, require_expanded};
use crate::error::{Error, Result, redact_path};
use crate::files::{self, Destination};

/// Checks whether an output can be written to `target`. A publication that was interrupted by the end of
/// its process is reverted or completed first, because its report may not describe the files next to it.
/// Fails if the target exists and may not be replaced, is not a folder although it should be one, overlaps
/// the model, or contains a file that the run reads.
pub fn check_output(target: &Path, replace: Replace, inputs: &Inputs) -> Result<()> {
    require_expanded(target)?;
    recover_and_check(&absolute(target)?, replace, inputs).map(drop)
}

/// As [`check_output`]. Returns notes on leftovers of killed runs that were not removed.
fn recover_and_check(target: &Path, replace: Replace, inputs: &Inputs) -> Result<Vec<String>> {
    let notes = work_location(target).map(|(parent, prefix)| remove_stale(&parent, &prefix, target)).unwrap_or_default();
    let checked = if is_repository(target) { check_repository(target, replace, inputs) } else { check_target(target, replace, inputs) };
    checked.map_err(|error| match (error, notes.first()) {
        (Error::Output { path, reason, hint }, Some(note)) => Error::Output { path, reason, hint: format!("{hint}; {note}") },
        (error, _) => error,
    })?;
    Ok(notes)
}

/// An unfinished output folder, removed on drop unless [`commit`](Staging::commit) was called.
#[derive(Debug)]
pub struct Staging {
    work: PathBuf,
    destination: Destination,
    target: PathBuf,
    replace: Replace,
    inputs: Inputs,
    data_name: Option<String>,
    /// The outermost folder that was created for the output.
    created: Option<PathBuf>,
    _lock: Lock,
    notes: Vec<String>,
}

const LOCK: &str = "lock";
const NEW: &str = "new";
const OLD: &str = "old";
const OLD_REPORT: &str = "old report";
/// The new model file. After the commit, the file that it replaced.
const MODEL: &str = "model";

/// Retries when another process removes a folder between two steps of this process.
const ATTEMPTS: usize = 100;

impl Staging {
    /// Creates a staging folder next to the final location.
    pub fn new(target: &Path, replace: Replace, inputs: impl Into<Inputs>) -> Result<Staging> {
        require_expanded(target)?;
        let (target, inputs) = (absolute(target)?, inputs.into());
        let mut notes = recover_and_check(&target, replace, &inputs)?;
        let Some((parent, prefix)) = work_location(&target) else {
            return Err(refuse(&target, "has no parent folder", "choose a folder inside another one"));
        };
        let (parent, is_remote) = (parent.as_path(), files::is_remote(&target));
        let created = parent.ancestors().take_while(|p| !p.exists()).last().map(Path::to_owned);
        match begin(parent, &prefix) {
            Ok((work, lock)) => {
                if !lock.supported {
                    notes.push(format!("{} is on a file system without locks: leftovers of killed runs must be removed manually", parent.display()));
                }
                let created = created.filter(|_| !is_remote);
                let destination = Destination::local(work.join(NEW));
                let data_name = free_data_name(&target);
                let mut staging = Staging { work, destination, target, replace, inputs, data_name, created, _lock: lock, notes };
                fs::create_dir(staging.path()).map_err(Error::io("create", staging.path()))?;
                if is_remote {
                    staging.open_remote()?;
                }
                Ok(staging)
            }
            Err(error) => {
                remove_created(parent, created.as_deref());
                Err(error)
            }
        }
    }

    /// Opens the remote folder, or creates it, if weights are uploaded while they are computed.
    fn open_remote(&mut self) -> Result<()> {
        self.destination = Destination::remote(&self.target, self.path()).map_err(Error::io("create", &self.target))?;
        if self.destination.can_race() {
            let target = redact_path(&self.target);
            self.notes.push(format!(
                "{} does not support creating a file only if it is missing: two concurrent runs that write it would both continue",
                target.display()
            ));
        }
        Ok(())
    }

    /// The local folder to write into.
    pub fn path(&self) -> &Path {
        self.destination.path()
    }

    /// The destination of the weight files.
    pub fn destination(&self) -> &Destination {
        &self.destination
    }

    /// The final location of the folder.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The name for the external data file, if the output is a single file of a format that has one.
    pub fn data_name(&self) -> Option<&str> {
        self.data_name.as_deref()
    }

    /// Bytes to upload, and to hash or to read back for verification; 0 for local outputs.
    pub fn uploads(&self) -> Result<u64> {
        if self.destination.is_remote() { bytes(self.path()).map(|bytes| bytes.saturating_mul(2)) } else { Ok(0) }
    }

    /// Notes on missing capabilities of the file system.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Moves the folder to its final location, atomically. Fails if the location was taken in the meantime,
    /// in which case nothing has changed.
    pub fn commit(self) -> Result<()> {
        self.commit_with_progress(&|_| true)
    }

    /// As [`commit`](Staging::commit), with progress. During an upload, `progress` is called with byte
    /// counts that add up to [`uploads`](Staging::uploads), and returns whether to continue.
    pub fn commit_with_progress(mut self, progress: &(dyn Fn(u64) -> bool + Sync)) -> Result<()> {
        if self.destination.is_remote() {
            return self.destination.publish(progress).map_err(|e| match e.kind() {
                ErrorKind::Interrupted => Error::Cancelled,
                _ => Error::io("write", &self.target)(e),
            });
        }
        sync(self.path())?;
        match file_name(&self.target) {
            Some(name) => self.publish_file(&name, &|_| {})?,
            None => self.put(self.path(), &self.target)?,
        }
        self.created = None;
        if let Some(parent) = self.target.parent() {
            sync_folder(parent);
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        remove(&self.work);
        if let Some(parent) = self.work.parent() {
            remove_created(parent, self.created.as_deref());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::listing::Listing;
    use super::super::lock::Attempt;
    use super::super::names::report_folder;
    use super::*;

    fn input(folder: &Path) -> PathBuf {
        let input = folder.join("input");
        fs::create_dir(&input).unwrap();
        input
    }

    /// A report that lists these files with their contents.
    pub(super) fn listing(files: &[(&str, &str)]) -> String {
        let listed =
            |(path, text): &(&str, &str)| serde_json::json!({ "path": path, "bytes": text.len(), "blake3": blake3::hash(text.as_bytes()).to_string() });
        let outputs: Vec<_> = files.iter().map(listed).collect();
        serde_json::json!({ "tool": { "name": "compress" }, "outputs": outputs }).to_string()
    }

    fn hidden(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.')).count()
    }

    #[test]
    fn appears_complete_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/out"));
        let staging = Staging::new(&out, Replace::Never, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        assert!(!out.exists());
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        drop(Staging::new(&out.with_file_name("other"), Replace::Never, &input).unwrap());
        assert_eq!(hidden(&folder.path().join("a")), 0);
        drop(Staging::new(&folder.path().join("b/c/out"), Replace::Never, &input).unwrap());
        assert!(!folder.path().join("b").exists());
    }

    #[test]
    fn replaces_only_if_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "old").unwrap();
        assert!(Staging::new(&out, Replace::Never, &input).unwrap_err().to_string().contains("exists"));
        fs::write(out.join("report.json"), listing(&[("file", "old")])).unwrap();
        let staging = Staging::new(&out, Replace::Output, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        assert_eq!(hidden(folder.path()), 0);
    }

    /// An empty folder is replaced in one step, unless files appear in it.
    #[test]
    fn an_empty_folder_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir(&out).unwrap();
        let start = || {
            let staging = Staging::new(&out, Replace::Never, &input).unwrap();
            fs::write(staging.path().join("file"), "new").unwrap();
            staging
        };
        let staging = start();
        fs::write(out.join("notes.txt"), "").unwrap();
        assert!(staging.commit().unwrap_err().to_string().contains("exists"));
        assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
        fs::remove_file(out.join("notes.txt")).unwrap();
        start().commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        assert_eq!(hidden(folder.path()), 0);
        assert!(Staging::new(&out, Replace::Never, &input).unwrap_err().to_string().contains("exists"));
        // Only a file or nothing may be at the location of a file and of its report.
        let file = folder.path().join("small.onnx");
        fs::create_dir(&file).unwrap();
        assert!(Staging::new(&file, Replace::Never, &input).is_err());
        fs::remove_dir(&file).unwrap();
        fs::create_dir(folder.path().join("small.onnx.report")).unwrap();
        assert!(Staging::new(&file, Replace::Never, &input).unwrap_err().to_string().contains("its report exists"));
    }

    #[test]
    fn foreign_files_and_inputs_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir_all(out.join("inner")).unwrap();
        fs::write(out.join("inner/thesis.tex"), "years").unwrap();
        let refused = |replace: Replace, inputs: &Inputs| Staging::new(&out, replace, inputs.clone()).unwrap_err().to_string();
        let model = Inputs::from(&input);
        let error = refused(Replace::Output, &model);
        assert!(error.contains("inner/thesis.tex would be lost") && error.contains("no report of compress"), "{error}");
        // A report covers neither unlisted files nor the outputs of other programs.
        fs::write(out.join("weights"), "").unwrap();
        fs::write(out.join("report.json"), listing(&[("weights", "")])).unwrap();
        let error = refused(Replace::Output, &model);
        assert!(error.contains(": inner/thesis.tex would be lost"), "{error}");
        fs::remove_dir_all(out.join("inner")).unwrap();
        fs::write(out.join("report.json"), listing(&[("weights", "")]).replace("compress", "pytest")).unwrap();
        assert!(refused(Replace::Output, &model).contains("report.json, weights would be lost"));
        assert!(refused(Replace::Work("state.json"), &model).contains("report.json, weights would be lost"));
        fs::write(out.join("report.json"), listing(&[("weights", ""), ("samples.csv", "")])).unwrap();
        // A symbolic link to weights of the input, and samples inside the old output.
        std::os::unix::fs::symlink(out.join("weights"), input.join("model.safetensors")).unwrap();
        let error = refused(Replace::Output, &model);
        assert!(error.contains("out/weights, which this run reads as") && error.contains("input"), "{error}");
        fs::remove_file(input.join("model.safetensors")).unwrap();
        fs::write(out.join("samples.csv"), "").unwrap();
        let data = Inputs { files: vec![out.join("samples.csv")], ..model.clone() };
        assert!(refused(Replace::Output, &data).contains("samples.csv, which this run reads as"));
        // Files that appear while the run works.
        let staging = Staging::new(&out, Replace::Output, model.clone()).unwrap();
        fs::write(staging.path().join("weights"), "new").unwrap();
        fs::write(out.join("notes.txt"), "").unwrap();
        assert!(staging.commit().unwrap_err().to_string().contains("notes.txt would be lost"));
        assert!(out.join("notes.txt").exists() && hidden(folder.path()) == 0);
        fs::remove_file(out.join("notes.txt")).unwrap();
        Staging::new(&out, Replace::Output, model).unwrap().commit().unwrap();
        assert!(!out.join("weights").exists());
    }

    #[test]
    fn a_file_appears_with_its_auxiliary_files_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/small.onnx"));
        let [data, report] = ["small.onnx.data", "small.onnx.report"].map(|name| out.with_file_name(name));
        let write = |staging: &Staging, text: &str, data: bool| {
            let data = staging.data_name().filter(|_| data);
            let listed: Vec<(&str, &str)> = data.into_iter().chain(["small.onnx"]).map(|name| (name, text)).collect();
            fs::write(staging.path().join("report.json"), listing(&listed)).unwrap();
            listed.into_iter().for_each(|(name, text)| fs::write(staging.path().join(name), text).unwrap());
        };
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let staging = Staging::new(&out, Replace::Never, &input).unwrap();
        write(&staging, "first", true);
        assert!(!out.exists() && !report.exists());
        staging.commit().unwrap();
        assert_eq!([read(&out), read(&data)], ["first"; 2]);
        assert!(!report.join("small.onnx").exists() && Staging::new(&out, Replace::Never, &input).is_err());
        let staging = Staging::new(&out, Replace::Output, &input).unwrap();
        write(&staging, "second", false);
        staging.commit().unwrap();
        assert!(read(&out) == "second" && report.join("report.json").exists());
        assert!(!data.exists(), "data file of the replaced model file");
        fs::remove_file(&out).unwrap();
        fs::remove_dir_all(&report).unwrap();
        let staging = Staging::new(&out, Replace::Never, &input).unwrap();
        write(&staging, "third", true);
        fs::write(&out, "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!((read(&out), data.exists(), report.exists()), ("theirs".into(), false, false));
        assert_eq!(hidden(&folder.path().join("a")), 0);
        // Only ONNX has external data files.
        let [gguf, unrelated] = ["small.gguf", "small.gguf.data"].map(|name| out.with_file_name(name));
        fs::write(&unrelated, "theirs").unwrap();
        for replace in [Replace::Never, Replace::Output] {
            let staging = Staging::new(&gguf, replace, &input).unwrap();
            fs::write(staging.path().join("small.gguf"), "mine").unwrap();
            fs::write(staging.path().join("report.json"), listing(&[("small.gguf", "mine")])).unwrap();
            staging.commit().unwrap();
            assert_eq!([read(&gguf), read(&unrelated)], ["mine", "theirs"]);
        }
        // Files that no report lists are not replaced: a model file, and a data file that may belong to
        // the input.
        let [other, clash] = ["other.onnx", "other.onnx.data"].map(|name| out.with_file_name(name));
        fs::write(&clash, "theirs").unwrap();
        assert!(Staging::new(&other, Replace::Never, &clash).unwrap_err().to_string().contains("other.onnx.data: exists"));
        assert_eq!(Staging::new(&other, Replace::Output, &clash).unwrap().data_name(), Some("other.onnx.2.data"));
        fs::write(&other, "theirs").unwrap();
        assert!(Staging::new(&other, Replace::Output, &clash).unwrap_err().to_string().contains("other.onnx would be lost"));
        assert_eq!([read(&other), read(&clash)], ["theirs"; 2]);
    }

    /// Whenever the process is killed, the model file is paired with the data file that it references,
    /// and the next run cleans up.
    #[test]
    fn a_kill_between_two_steps_leaves_one_intact_pair() {
        for (replaces, stop) in [(true, "nothing"), (true, "data"), (true, "report"), (true, "model"), (false, "data"), (false, "report"), (false, "model")] {
            let folder = tempfile::tempdir().unwrap();
            let (input, out) = (input(folder.path()), folder.path().join("small.onnx"));
            // The content of a model file is a text and the name of its data file.
            let write = |staging: &Staging, text: &str| {
                let data = staging.data_name().unwrap();
                fs::write(staging.path().join(data), text).unwrap();
                let model = format!("{text} {data}");
                fs::write(staging.path().join("small.onnx"), &model).unwrap();
                fs::write(staging.path().join("report.json"), listing(&[("small.onnx", &model), (data, text)])).unwrap();
            };
            let begin = |text: &str| {
                let staging = Staging::new(&out, Replace::Output, &input).unwrap();
                write(&staging, text);
                staging
            };
            if replaces {
                begin("old").commit().unwrap();
            }
            let mut killed = std::mem::ManuallyDrop::new(begin("new"));
            // The operating system releases the lock of a killed process.
            let Attempt::Taken(other) = Lock::take(&folder.path().join("other lock")).unwrap() else { panic!("a new file is free") };
            killed._lock = other;
            let put = || {
                killed.publish_file("small.onnx", &|step| {
                    if step == stop {
                        std::panic::resume_unwind(Box::new("killed"))
                    }
                })
            };
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(put)).is_err(), "{stop}");
            let expected = if stop == "model" { "new" } else { "old" };
            let check = |listed: bool| {
                let Ok(model) = fs::read_to_string(&out) else { return assert!(!replaces && expected == "old", "{stop}") };
                let (text, data) = model.split_once(' ').unwrap();
                assert_eq!((text, fs::read_to_string(out.with_file_name(data)).unwrap().as_str()), (expected, expected), "{stop}");
                assert!(!listed || Listing::open(&report_folder(&out)).unwrap().data_files(&out) == [out.with_file_name(data)], "{stop}");
            };
            check(false);
            // The next run, which fails.
            drop(begin("newer"));
            check(true);
            let data = fs::read_dir(folder.path()).unwrap().filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "data"));
            assert_eq!(data.count(), usize::from(out.exists()), "{stop}");
            assert!(hidden(folder.path()) == 0 && report_folder(&out).exists() == out.exists(), "{stop}");
            begin("newest").commit().unwrap();
            assert!(fs::read_to_string(&out).unwrap().starts_with("newest "));
        }
    }

    #[test]
    fn a_folder_that_appears_meanwhile_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        let staging = Staging::new(&out, Replace::Never, &input).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "theirs");
    }

    #[test]
    fn leftovers_of_a_killed_process_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let work = |name: &str| folder.path().join(format!(".out.compress-{name}"));
        let [dead, alive, beginning, other] = ["0123456789abcdef", "1123456789abcdef", "2123456789abcdef", "notes"].map(work);
        [&dead, &alive, &beginning, &other].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
        for path in [&dead, &alive, &other] {
            fs::create_dir(path.join(NEW)).unwrap();
            fs::write(path.join(LOCK), "").unwrap();
        }
        let held = File::open(alive.join(LOCK)).unwrap();
        held.lock().unwrap();
        let _staging = Staging::new(&folder.path().join("out"), Replace::Never, &input).unwrap();
        assert!(!dead.exists() && !beginning.exists() && alive.join(NEW).exists() && other.exists());
    }

    #[test]
    fn the_replaced_folder_is_restored() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let (work, out) = (folder.path().join(".out.compress-0123456789abcdef"), folder.path().join("out"));
        for (part, text) in [(OLD, "old"), (NEW, "new")] {
            fs::create_dir_all(work.join(part)).unwrap();
            fs::write(work.join(part).join("file"), text).unwrap();
            fs::write(work.join(part).join("report.json"), listing(&[("file", text)])).unwrap();
        }
        fs::write(work.join(LOCK), "").unwrap();
        drop(Staging::new(&out, Replace::Output, &input).unwrap());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "old");
        assert_eq!(hidden(folder.path()), 0);
    }

    #[test]
    fn without_atomic_exchange_it_is_replaced_in_two_steps() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        for text in ["first", "second"] {
            let staging = Staging::new(&out, Replace::Output, &input).unwrap();
            fs::write(staging.path().join("file"), text).unwrap();
            fs::write(staging.path().join("report.json"), listing(&[("file", text)])).unwrap();
            staging.put_plainly(staging.path(), &staging.target).unwrap();
            drop(staging);
            assert_eq!(fs::read_to_string(out.join("file")).unwrap(), text);
        }
        let mut staging = Staging::new(&out, Replace::Output, &input).unwrap();
        staging.replace = Replace::Never;
        assert!(staging.put_plainly(staging.path(), &staging.target).unwrap_err().to_string().contains("exists"));
        drop(staging);
        assert_eq!(hidden(folder.path()), 0);
    }
}
