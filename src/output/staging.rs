//! An output folder that appears whole or not at all.
//!
//! Work happens in a hidden folder beside the final place, under a name that nobody else has:
//!
//! ```text
//! .OUT.compress-0123456789abcdef/
//!     lock    held from before there is anything else until everything else is gone
//!     new     renamed to OUT in one step
//!     old     what OUT was, where the file system cannot exchange two folders in one step
//! ```
//!
//! An output that is a file is made in a folder too, and three things are put in place: a file with the weights, if the format has one, under
//! a name that did not exist; the folder of the report; and last, in one step, the file itself. That step decides: the file names its file of
//! weights, so that before it the old file is paired with the old weights, and after it the new one with the new. Old weights are removed
//! after it. `placing.json`, written before the first step, records what is put where by inode numbers. If a step fails, those before it are
//! taken back; if the process is killed, the next run for this output takes them back, or removes the old weights if the file is the new one.

mod placing;
mod work_folder;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use self::work_folder::{begin, bytes, remove, remove_left, remove_made, sync, sync_folder};
use super::lock::Lock;
use super::place::{Inputs, Replace, absolute, check_place, file_name, free_data_name, refuse};
use crate::error::{Error, Result, tellable};
use crate::files::{self, Destination};

/// An unfinished output folder; dropped without [`commit`](Staging::commit), it is removed.
#[derive(Debug)]
pub struct Staging {
    work: PathBuf,
    destination: Destination,
    target: PathBuf,
    replace: Replace,
    inputs: Inputs,
    data_name: Option<String>,
    /// The outermost folder that was made to hold the output.
    made: Option<PathBuf>,
    _lock: Lock,
    notes: Vec<String>,
}

const LOCK: &str = "lock";
const NEW: &str = "new";
const OLD: &str = "old";
const OLD_REPORT: &str = "old report";
/// The new model file, and what it replaced afterwards.
const MODEL: &str = "model";
const PLACING: &str = "placing.json";

/// Others can take a folder away between two steps of this process, but not often in a row.
const ATTEMPTS: usize = 100;

impl Staging {
    /// Starts an output folder beside its final place.
    ///
    /// # Errors
    /// As [`check_place`], or nothing can be written next to the final place.
    pub fn new(target: &Path, replace: Replace, inputs: impl Into<Inputs>) -> Result<Staging> {
        let (target, inputs) = (absolute(target)?, inputs.into());
        check_place(&target, replace, &inputs)?;
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(refuse(&target, "has no parent folder", "choose a folder inside another one"));
        };
        // What is small, or opened while it is made, is made on this machine first.
        let remote = files::is_remote(&target).then(std::env::temp_dir);
        let parent = remote.as_deref().unwrap_or(parent);
        let made = parent.ancestors().take_while(|p| !p.exists()).last().map(Path::to_owned);
        let prefix = format!(".{}.{}-", name.to_string_lossy(), if remote.is_some() { "upload" } else { "compress" });
        let mut notes = remove_left(parent, &prefix, &target);
        match begin(parent, &prefix) {
            Ok((work, lock)) => {
                if !lock.held {
                    notes.push(format!("{} is on a file system without locks: what a killed run leaves there has to be removed by hand", parent.display()));
                }
                let made = made.filter(|_| remote.is_none());
                let destination = Destination::here(work.join(NEW));
                let data_name = free_data_name(&target);
                let mut staging = Staging { work, destination, target, replace, inputs, data_name, made, _lock: lock, notes };
                fs::create_dir(staging.path()).map_err(Error::io("create", staging.path()))?;
                if remote.is_some() {
                    staging.begin_away()?;
                }
                Ok(staging)
            }
            Err(error) => {
                remove_made(parent, made.as_deref());
                Err(error)
            }
        }
    }

    /// Begins a folder of another machine, which weights go to as they are made.
    fn begin_away(&mut self) -> Result<()> {
        self.destination = Destination::away(&self.target, self.path()).map_err(Error::io("create", &self.target))?;
        if self.destination.is_shared() {
            let target = tellable(&self.target);
            let told = target.display();
            self.notes.push(format!("where {told} is, a file cannot be refused that is there already: of two runs that write it at once, both go on"));
        }
        Ok(())
    }

    /// The folder of this machine to write into.
    pub fn path(&self) -> &Path {
        self.destination.path()
    }

    /// Where weights are written.
    pub fn destination(&self) -> &Destination {
        &self.destination
    }

    /// Where the folder will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The name for a second file, with the weights of a large one, where the output is a file of a format that has such files.
    pub fn data_name(&self) -> Option<&str> {
        self.data_name.as_deref()
    }

    /// Bytes that go to another machine and come back to be compared; none where the folder stays here.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn uploads(&self) -> Result<u64> {
        if self.destination.is_away() { bytes(self.path()).map(|bytes| bytes.saturating_mul(2)) } else { Ok(0) }
    }

    /// Notes on what the file system cannot do.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Moves the folder to its final place, in one step.
    ///
    /// # Errors
    /// The place was taken meanwhile, or the move fails; then nothing has changed.
    pub fn commit(self) -> Result<()> {
        self.commit_telling(&|_| true)
    }

    /// The same, telling of every run of bytes that is done on the way to another machine, [`uploads`](Staging::uploads) in all; the answer is
    /// whether to go on.
    ///
    /// # Errors
    /// As [`commit`](Staging::commit), or the answer is no.
    pub fn commit_telling(mut self, told: &(dyn Fn(u64) -> bool + Sync)) -> Result<()> {
        if self.destination.is_away() {
            return self.destination.publish(told).map_err(|e| match e.kind() {
                ErrorKind::Interrupted => Error::Cancelled,
                _ => Error::io("write", &self.target)(e),
            });
        }
        sync(self.path())?;
        match file_name(&self.target) {
            Some(name) => self.put_file(&name, &|_| {})?,
            None => self.put(self.path(), &self.target)?,
        }
        self.made = None;
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
            remove_made(parent, self.made.as_deref());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::lock::Attempt;
    use super::super::place::{Listing, report_folder};
    use super::*;

    fn input(folder: &Path) -> PathBuf {
        let input = folder.join("input");
        fs::create_dir(&input).unwrap();
        input
    }

    fn hidden(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.')).count()
    }

    /// A report that lists these files.
    fn listing(files: &[&str]) -> String {
        let outputs: Vec<_> = files.iter().map(|path| serde_json::json!({ "path": path })).collect();
        serde_json::json!({ "tool": { "name": "compress" }, "outputs": outputs }).to_string()
    }

    #[test]
    fn appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/out"));
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        assert!(!out.exists());
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        drop(Staging::new(&out.with_file_name("other"), Replace::Nothing, &input).unwrap());
        assert_eq!(hidden(&folder.path().join("a")), 0);
        drop(Staging::new(&folder.path().join("b/c/out"), Replace::Nothing, &input).unwrap());
        assert!(!folder.path().join("b").exists());
    }

    #[test]
    fn replaces_only_when_told_to() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "old").unwrap();
        assert!(Staging::new(&out, Replace::Nothing, &input).unwrap_err().to_string().contains("exists"));
        fs::write(out.join("report.json"), listing(&["file"])).unwrap();
        let staging = Staging::new(&out, Replace::Output, &input).unwrap();
        fs::write(staging.path().join("file"), "new").unwrap();
        staging.commit().unwrap();
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "new");
        assert_eq!(hidden(folder.path()), 0);
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
        // A report does not cover what it does not list, nor does the report of another program.
        fs::write(out.join("weights"), "").unwrap();
        fs::write(out.join("report.json"), listing(&["weights"])).unwrap();
        let error = refused(Replace::Output, &model);
        assert!(error.contains(": inner/thesis.tex would be lost"), "{error}");
        fs::remove_dir_all(out.join("inner")).unwrap();
        fs::write(out.join("report.json"), listing(&["weights"]).replace("compress", "pytest")).unwrap();
        assert!(refused(Replace::Output, &model).contains("report.json, weights would be lost"));
        assert!(refused(Replace::Work("state.json"), &model).contains("report.json, weights would be lost"));
        fs::write(out.join("report.json"), listing(&["weights", "samples.csv"])).unwrap();
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
    fn a_file_appears_with_what_belongs_to_it_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("a/small.onnx"));
        let [data, report] = ["small.onnx.data", "small.onnx.report"].map(|name| out.with_file_name(name));
        let write = |staging: &Staging, text: &str, data: bool| {
            let data = staging.data_name().filter(|_| data);
            let listed: Vec<&str> = data.into_iter().chain(["small.onnx"]).collect();
            fs::write(staging.path().join("report.json"), listing(&listed)).unwrap();
            listed.into_iter().for_each(|name| fs::write(staging.path().join(name), text).unwrap());
        };
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        write(&staging, "first", true);
        assert!(!out.exists() && !report.exists());
        staging.commit().unwrap();
        assert_eq!([read(&out), read(&data)], ["first"; 2]);
        assert!(!report.join("small.onnx").exists() && Staging::new(&out, Replace::Nothing, &input).is_err());
        let staging = Staging::new(&out, Replace::Output, &input).unwrap();
        write(&staging, "second", false);
        staging.commit().unwrap();
        assert!(read(&out) == "second" && report.join("report.json").exists());
        assert!(!data.exists(), "weights of the file that was replaced");
        fs::remove_file(&out).unwrap();
        fs::remove_dir_all(&report).unwrap();
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        write(&staging, "third", true);
        fs::write(&out, "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!((read(&out), data.exists(), report.exists()), ("theirs".into(), false, false));
        assert_eq!(hidden(&folder.path().join("a")), 0);
        // Only ONNX keeps weights beside itself.
        let [gguf, unrelated] = ["small.gguf", "small.gguf.data"].map(|name| out.with_file_name(name));
        fs::write(&unrelated, "theirs").unwrap();
        for replace in [Replace::Nothing, Replace::Output] {
            let staging = Staging::new(&gguf, replace, &input).unwrap();
            fs::write(staging.path().join("small.gguf"), "mine").unwrap();
            fs::write(staging.path().join("report.json"), listing(&["small.gguf"])).unwrap();
            staging.commit().unwrap();
            assert_eq!([read(&gguf), read(&unrelated)], ["mine", "theirs"]);
        }
        // Files that no report lists are not replaced: a model file, and weights that may belong to the input.
        let [other, clash] = ["other.onnx", "other.onnx.data"].map(|name| out.with_file_name(name));
        fs::write(&clash, "theirs").unwrap();
        assert!(Staging::new(&other, Replace::Nothing, &clash).unwrap_err().to_string().contains("other.onnx.data: exists"));
        assert_eq!(Staging::new(&other, Replace::Output, &clash).unwrap().data_name(), Some("other.onnx.2.data"));
        fs::write(&other, "theirs").unwrap();
        assert!(Staging::new(&other, Replace::Output, &clash).unwrap_err().to_string().contains("other.onnx would be lost"));
        assert_eq!([read(&other), read(&clash)], ["theirs"; 2]);
    }

    /// Whenever the process is killed, the model file is paired with the weights that it names, and the next run cleans up.
    #[test]
    fn a_kill_between_two_steps_leaves_one_whole_pair() {
        for (replaces, stop) in [(true, "nothing"), (true, "data"), (true, "report"), (true, "model"), (false, "data"), (false, "report"), (false, "model")] {
            let folder = tempfile::tempdir().unwrap();
            let (input, out) = (input(folder.path()), folder.path().join("small.onnx"));
            // A model file is its text and the name of its weights.
            let write = |staging: &Staging, text: &str| {
                let data = staging.data_name().unwrap();
                fs::write(staging.path().join(data), text).unwrap();
                fs::write(staging.path().join("small.onnx"), format!("{text} {data}")).unwrap();
                fs::write(staging.path().join("report.json"), listing(&["small.onnx", data])).unwrap();
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
            // The system frees the lock of a process that is killed.
            let Attempt::Taken(other) = Lock::take(&folder.path().join("other lock")).unwrap() else { panic!("a new file is free") };
            killed._lock = other;
            let put = || {
                killed.put_file("small.onnx", &|step| {
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
        let staging = Staging::new(&out, Replace::Nothing, &input).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("file"), "theirs").unwrap();
        assert!(staging.commit().is_err());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "theirs");
    }

    #[test]
    fn what_a_killed_process_left_is_removed() {
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
        let _staging = Staging::new(&folder.path().join("out"), Replace::Nothing, &input).unwrap();
        assert!(!dead.exists() && !beginning.exists() && alive.join(NEW).exists() && other.exists());
    }

    #[test]
    fn what_was_to_be_replaced_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let input = input(folder.path());
        let (work, out) = (folder.path().join(".out.compress-0123456789abcdef"), folder.path().join("out"));
        for (part, text) in [(OLD, "old"), (NEW, "new")] {
            fs::create_dir_all(work.join(part)).unwrap();
            fs::write(work.join(part).join("file"), text).unwrap();
            fs::write(work.join(part).join("report.json"), listing(&["file"])).unwrap();
        }
        fs::write(work.join(LOCK), "").unwrap();
        drop(Staging::new(&out, Replace::Output, &input).unwrap());
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "old");
        assert_eq!(hidden(folder.path()), 0);
    }

    #[test]
    fn without_exchange_in_one_step_it_is_replaced_in_two() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (input(folder.path()), folder.path().join("out"));
        for text in ["first", "second"] {
            let staging = Staging::new(&out, Replace::Output, &input).unwrap();
            fs::write(staging.path().join("file"), text).unwrap();
            fs::write(staging.path().join("report.json"), listing(&["file"])).unwrap();
            staging.put_plainly(staging.path(), &staging.target).unwrap();
            drop(staging);
            assert_eq!(fs::read_to_string(out.join("file")).unwrap(), text);
        }
        let mut staging = Staging::new(&out, Replace::Output, &input).unwrap();
        staging.replace = Replace::Nothing;
        assert!(staging.put_plainly(staging.path(), &staging.target).unwrap_err().to_string().contains("exists"));
        drop(staging);
        assert_eq!(hidden(folder.path()), 0);
    }
}
