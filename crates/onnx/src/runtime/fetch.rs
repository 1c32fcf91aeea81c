//! Downloads ONNX Runtime: the user's own pip fetches its wheel, and the library is extracted into the
//! cache.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::find;
use crate::error::{Error, Result};
use crate::program;

/// The downloaded version, against which the tests verify exports. `scripts/fetch` downloads the same
/// one.
const VERSION: &str = "1.31.1";
/// Platform of the wheel: CPython 3.12, regardless of the installed Python, since only the native
/// library is used.
const PLATFORM: [&str; 3] = ["--implementation=cp", "--python-version=3.12", "--abi=cp312"];
/// SHA-256 of the wheel by operating system and processor. On other platforms, the package index is
/// trusted.
const PINNED: [((&str, &str), &str); 1] = [(("linux", "x86_64"), "1f3dea47f2f0e5117c2404cea7d21fd253ae7836a3bf167a501cdfbb2600d536")];
/// Folder of the libraries in the wheel.
const LIBRARIES: &str = "onnxruntime/capi/";

/// Commands that run pip, in order of preference.
const PIPS: [&[&str]; 5] = [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"], &["uvx", "pip"]];

/// Downloads the library into the cache unless it is present, and returns its path. If it fails, the cache is
/// unchanged.
pub fn fetch() -> Result<PathBuf> {
    let none = || Error::run("the cache", "its folder is unknown", "set COMPRESS_CACHE or HOME");
    let cache = crate::cache::folder(crate::cache::variable).ok_or_else(none)?;
    fetch_into(&cache, &PIPS)
}

fn fetch_into(cache: &Path, pips: &[&[&str]]) -> Result<PathBuf> {
    let target = cache.join(format!("onnxruntime-{VERSION}"));
    if let Some(found) = find::libraries(&target).into_iter().next() {
        return Ok(found);
    }
    let scratch = cache.join(format!(".onnxruntime-{VERSION}-{:016x}", fastrand::u64(..)));
    let result = download(&scratch, pips).and_then(|wheel| unpack(&wheel, &scratch.join("libraries"))).and_then(|libraries| {
        let renamed = fs::rename(libraries, &target).map_err(Error::io("create", &target));
        // Another process may have created it first.
        find::libraries(&target).into_iter().next().map_or_else(|| renamed.map(|()| target.clone()), Ok)
    });
    let _ = fs::remove_dir_all(&scratch);
    result
}

/// Downloads the wheel into a folder with pip.
fn download(folder: &Path, pips: &[&[&str]]) -> Result<PathBuf> {
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let current = (std::env::consts::OS, std::env::consts::ARCH);
    let hash = PINNED.iter().find(|(platform, _)| *platform == current).map(|(_, hash)| format!(" --hash=sha256:{hash}"));
    let requirements = folder.join("requirements.txt");
    fs::write(&requirements, format!("onnxruntime=={VERSION}{}\n", hash.unwrap_or_default())).map_err(Error::io("write", &requirements))?;
    let mut tried = Vec::new();
    for pip in pips {
        let Some((program, arguments)) = pip.split_first() else { continue };
        let fixed = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"].into_iter().chain(PLATFORM).map(OsStr::new);
        let paths = [OsStr::new("--dest"), folder.as_os_str(), OsStr::new("--requirement"), requirements.as_os_str()];
        match program::run(program, arguments.iter().map(OsStr::new).chain(fixed).chain(paths)) {
            Ok(_) => {
                let wheel = fs::read_dir(folder).map_err(Error::io("read", folder))?.flatten().map(|entry| entry.path());
                let mut wheels = wheel.filter(|path| path.extension().is_some_and(|ending| ending == "whl"));
                return wheels.next().ok_or_else(|| Error::run(pip.join(" "), "downloaded no wheel", find::HINT));
            }
            Err(reason) => tried.push(format!("`{}`: {reason}", pip.join(" "))),
        }
    }
    let hint = format!("download ONNX Runtime {VERSION} for this machine from its release page, and set {} to its library", find::LIBRARY_VARIABLE);
    Err(Error::run("ONNX Runtime", format!("cannot be downloaded: {}", tried.join("; ")), hint))
}

/// Extracts the libraries of a wheel, and returns their folder.
fn unpack(wheel: &Path, folder: &Path) -> Result<PathBuf> {
    let wrong = |e: zip::result::ZipError| Error::malformed(wheel, format!("is not a wheel: {e}"));
    let mut archive = zip::ZipArchive::new(File::open(wheel).map_err(Error::io("open", wheel))?).map_err(wrong)?;
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let mut extracted = 0;
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(wrong)?;
        let name = entry.name().map_err(wrong)?.strip_prefix(LIBRARIES).map(str::to_owned);
        let Some(name) = name.filter(|name| name.starts_with("libonnxruntime.") && !name.contains(['/', '\\'])) else { continue };
        let path = folder.join(name);
        let mut file = File::create(&path).map_err(Error::io("create", &path))?;
        std::io::copy(&mut entry, &mut file).and_then(|_| file.sync_all()).map_err(Error::io("write", &path))?;
        extracted += 1;
    }
    if extracted == 0 { Err(Error::malformed(wheel, format!("contains no library in {LIBRARIES}"))) } else { Ok(folder.to_owned()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A replacement for pip that copies a file or fails.
    fn pip(folder: &Path, script: &str) -> String {
        let path = folder.join("pip");
        fs::write(&path, format!("#!/bin/sh\nwhile [ \"$1\" != --dest ]; do shift; done\ndest=$2\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn wheel(folder: &Path, entries: &[&str]) -> PathBuf {
        let path = folder.join("a.whl");
        let mut archive = zip::ZipWriter::new(File::create(&path).unwrap());
        for entry in entries {
            archive.start_file(*entry, zip::write::SimpleFileOptions::default()).unwrap();
            archive.write_all(b"library").unwrap();
        }
        archive.finish().unwrap();
        path
    }

    #[test]
    fn the_wheel_is_installed_once_and_atomically() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let left = || fs::read_dir(&cache).map_or(0, Iterator::count);
        let fetch = |script: &str| fetch_into(&cache, &[&["/nowhere/python3", "-m", "pip"], &[&pip(folder.path(), script)]]);
        let failed = fetch("echo no such index >&2; exit 1").unwrap_err();
        assert!(failed.to_string().contains("no such index") && failed.to_string().contains("/nowhere/python3"), "{failed}");
        assert!(failed.hint().unwrap().contains("ORT_DYLIB_PATH"));
        assert!(fetch("true").unwrap_err().to_string().contains("downloaded no wheel"));
        let other = wheel(folder.path(), &["onnxruntime/capi/other.so", "onnxruntime/capi/libonnxruntime.so/../../x"]);
        assert!(fetch(&format!("cp {} $dest", other.display())).unwrap_err().to_string().contains("contains no library"));
        assert_eq!(left(), 0, "a failed fetch leaves nothing");
        let whole = wheel(folder.path(), &["onnxruntime/__init__.py", "onnxruntime/capi/libonnxruntime.so.1.31.1"]);
        let script = format!("grep -q onnxruntime=={VERSION} $4 && cp {} $dest", whole.display());
        let found = fetch(&script).unwrap();
        assert_eq!(fs::read(&found).unwrap(), b"library");
        assert_eq!((found, left()), (cache.join(format!("onnxruntime-{VERSION}/libonnxruntime.so.1.31.1")), 1));
        assert!(fetch("exit 1").is_ok(), "a cached library is not downloaded again");
    }

    #[test]
    fn scripts_fetch_pins_the_same_wheel() {
        let script = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/fetch")).unwrap();
        let pinned = script.split("\"onnxruntime\": Input(").nth(1).unwrap().split("),\n").next().unwrap();
        for wanted in [VERSION].into_iter().chain(PLATFORM).chain(PINNED.map(|(_, hash)| hash)) {
            assert!(pinned.contains(&format!("\"{wanted}\"")), "{wanted}");
        }
    }
}
