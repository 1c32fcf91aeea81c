//! Invalid output locations.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::{Case, case, check};
use crate::cli::support::model;

fn place(name: &'static str, args: &'static str, message: &'static str, hint: &'static str) -> Case {
    let make = |folder: &Path| {
        model(&folder.join("in"));
        fs::create_dir_all(folder.join("full/inner")).unwrap();
        fs::write(folder.join("full/inner/file"), "precious").unwrap();
        fs::create_dir(folder.join("empty")).unwrap();
        fs::write(folder.join("file"), "precious").unwrap();
        symlink("full", folder.join("link")).unwrap();
        symlink("nowhere", folder.join("dangling")).unwrap();
        symlink("in", folder.join("inlink")).unwrap();
        fs::write(folder.join("recipe.yaml"), "model: in\npasses: [cast]\noutput: full\n").unwrap();
        // An output of this tool, with a file that its report lists and one that a run reads.
        fs::create_dir(folder.join("old")).unwrap();
        let listed = |path: &str| serde_json::json!({ "path": path, "bytes": "precious".len(), "blake3": blake3::hash(b"precious").to_string() });
        let outputs = ["samples.txt", "model.safetensors"].map(listed);
        let listing = serde_json::json!({ "tool": { "name": "compress" }, "outputs": outputs }).to_string();
        fs::write(folder.join("old/report.json"), listing).unwrap();
        fs::write(folder.join("old/samples.txt"), "precious").unwrap();
        let reading = |pass: &str, data: &str| format!("model: in\npasses: [{pass}]\ndata: {{ {data} }}\noutput: old\n");
        fs::write(folder.join("data.yaml"), reading("quantize-static", "calibration: { text: old/samples.txt }")).unwrap();
        fs::write(folder.join("teacher.yaml"), reading("{ distill: { teacher: old } }", "train: { text: in/config.json }")).unwrap();
    };
    case(name, make, args, 1, message, hint)
}

#[test]
fn locations_that_exist() {
    let force = "set `--force` to replace it, or choose another folder";
    let other = "choose another name";
    check([
        place("a folder", "cast in -o full", "full: exists", force),
        place("a folder, of a chain", "chain in -o full -- cast", "full: exists", force),
        place("a folder, of a recipe", "run recipe.yaml", "full: exists", force),
        place("a folder, not even for a dry run", "run recipe.yaml --dry-run", "full: exists", force),
        place("a folder, to densify", "densify in -o full", "full: exists", force),
        place("a file", "cast in -o file", "file: exists and is not a folder", other),
        place("a file, by force", "cast in -o file --force", "file: exists and is not a folder", other),
        place("a link", "cast in -o link --force", "link: exists and is not a folder but a link", other),
        place("a link to nowhere", "cast in -o dangling --force", "dangling: exists and is not a folder", other),
    ]);
}

/// `--force` replaces only files that an earlier run has written.
#[test]
fn locations_with_files_that_force_must_not_delete() {
    let hint = "move what you need and remove the rest";
    let foreign = "full: cannot be replaced: inner/file would be lost, and no report of compress lists them";
    check([
        place("a foreign folder, by force", "cast in -o full --force", foreign, hint),
        place("a foreign folder, of a recipe", "run recipe.yaml --force", foreign, hint),
        place("a foreign folder, to densify", "densify in -o full --force", foreign, hint),
    ]);
}

/// Pages and recipes replace only pages and recipes.
#[test]
fn files_that_force_must_not_overwrite() {
    let with_report = |folder: &Path| {
        crate::cli::support::model(&folder.join("in"));
        crate::cli::support::ok(folder, "cast in -o run");
        symlink("in/model.safetensors", folder.join("page.html")).unwrap();
    };
    let report = |name, args, message| case(name, with_report, args, 1, message, "name a file that ends with .html");
    check([
        report("weights", "report run -o in/model.safetensors --force", "in/model.safetensors: exists, and --force replaces only .html files here"),
        report("weights of the run", "report run run -o run/model.safetensors --force", "run/model.safetensors: exists, and --force replaces only"),
        report("a configuration", "report run -o in/config.json --force", "in/config.json: exists, and --force replaces only .html files here"),
        report("weights, through a link", "report run -o page.html --force", "page.html: exists, and --force replaces only .html files here"),
        case(
            "a page in a missing folder",
            with_report,
            "report run -o nodir/page.html",
            1,
            "nodir/page.html: the folder nodir does not exist",
            "create it, or name another file",
        ),
    ]);
    check([case(
        "the comparison of a sweep",
        |folder: &Path| {
            model(&folder.join("in"));
            fs::write(folder.join("recipe.yaml"), "model: in\npasses: [{ prune-unstructured: { amount: 0.5 } }]\noutput: out\n").unwrap();
            fs::create_dir(folder.join("out")).unwrap();
            fs::write(folder.join("out/comparison.html"), "precious").unwrap();
        },
        "run recipe.yaml --sweep amount=0.3,0.4 --quiet",
        1,
        "out/comparison.html: exists",
        "--force",
    )]);
    #[cfg(feature = "run")]
    check([case(
        "a recipe",
        |folder: &Path| {
            model(&folder.join("in"));
            fs::write(folder.join("notes.txt"), "notes").unwrap();
        },
        "init in -o notes.txt --force",
        1,
        "notes.txt: exists, and --force replaces only .yaml files here",
        "name a file that ends with .yaml",
    )]);
    #[cfg(feature = "run")]
    check([
        place("a recipe in the model", "init in -o in/first.yaml", "in/first.yaml: lies inside the folder of the model", "write it outside: -o /"),
        place("a recipe in the model, through a link", "init in -o inlink/1_Pooling/first.yaml", "first.yaml: lies inside the folder", "/first.yaml"),
    ]);
}

#[cfg(feature = "run")]
#[test]
fn locations_with_inputs_of_the_run() {
    let other = "choose another name";
    check([
        place("samples", "run data.yaml --dry-run --force", "old: cannot be replaced: it contains…old/samples.txt, which this run reads as…samples.txt", other),
        place("a teacher", "run teacher.yaml --dry-run --force", "old: cannot be replaced: it contains…old, which this run reads as…old", other),
    ]);
}

#[test]
fn locations_that_overlap_the_input() {
    let beside = "choose a folder outside it";
    check([
        place("inside", "cast in -o in/out", "in/out: lies inside the input folder", beside),
        place("deep inside", "cast in -o in/a/b/c", "in/a/b/c: lies inside the input folder", beside),
        place("inside, by a detour", "cast in -o full/../in/out", "in/out: lies inside the input folder", beside),
        place("inside, through a link", "cast in -o inlink/out", "inlink/out: lies inside the input folder", beside),
        place("inside a linked input", "cast inlink -o in/out", "in/out: lies inside the input folder", beside),
        place("inside, by force", "cast in -o in/1_Pooling --force", "in/1_Pooling: lies inside the input folder", beside),
        place("the input", "cast in -o in", "in: is the input", "the input is never modified"),
        place("the input, by force", "cast in -o in --force", "in: is the input", "the input is never modified"),
        place("the input by another name", "cast inlink -o in --force", "in: is the input", "the input is never modified"),
        place("around", "cast in -o . --force", "contains the input", "choose another folder"),
        place("far around", "cast in -o / --force", "output /: contains the input", "choose another folder"),
        place("around a file", "cast in/model.safetensors -o in --force", "in: contains the input", "choose another folder"),
    ]);
}

#[test]
fn locations_that_cannot_be_created() {
    check([
        place("inside a file", "cast in -o file/out", "file/out: cannot be created inside…file, which is not a folder", "choose another location"),
        place("deep inside a file", "cast in -o file/a/b/out", "file/a/b/out: cannot be created inside…file, which is not a folder", "choose another location"),
        place("inside a link to nowhere", "cast in -o dangling/out", "cannot create…dangling: File exists", "choose another location"),
        place(
            "a name that is too long",
            concat!(
                "cast in -o new/",
                "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
            ),
            "File name too long",
            "",
        ),
        place("the report of a file", "cast in -o small.onnx.report", "small.onnx.report: has the name of the report of small.onnx", "choose a name"),
        place("where the system makes no folders", "cast in -o /proc/new/out", "cannot create /proc/new", "choose another location"),
    ]);
}

#[test]
fn created_parent_folders_are_removed() {
    let make = |folder: &Path| {
        crate::cli::support::file(&folder.join("in"), crate::cli::support::METADATA, &[crate::cli::support::f32s("x.weight", &[1, 1], &[f32::NAN])])
    };
    check([case("a failure far down", make, "cast in -o new/deep/out", 1, "tensor `x.weight` holds 1 NaN or infinite value", "--allow-nonfinite")]);
}
