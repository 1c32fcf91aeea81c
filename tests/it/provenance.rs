//! Signatures and bills of materials of outputs. `scripts/check signatures` compares them with the programs
//! of OpenSSF and CycloneDX; `scripts/goldens signatures` signs the folders of `tests/golden/signatures`.
#![cfg(feature = "cli")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use base64::prelude::{BASE64_STANDARD, Engine};
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair, UnparsedPublicKey};
use serde_json::{Value, json};

use crate::cli::support::{compress, data, golden_model, model, names, ok, read_json};

/// Bytes of the public key of [`write_keys`] before its point.
const PUBLIC: [u8; 26] = [0x30, 0x59, 0x30, 0x13, 6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7, 3, 0x42, 0];
/// Offset of the key in SEC 1 in one in PKCS #8.
const INNER: usize = 29;

fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a new private key as `NAME.pem` (PKCS #8) and `NAME.sec1.pem`, and its public key as
/// `NAME.pub.pem`. Returns the public key.
pub fn write_keys(folder: &Path, name: &str) -> Vec<u8> {
    let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new()).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key.as_ref(), &SystemRandom::new()).unwrap();
    let public = pair.public_key().as_ref().to_owned();
    let write = |end: &str, text: String| fs::write(folder.join(format!("{name}.{end}")), text).unwrap();
    write("pem", pem("PRIVATE KEY", key.as_ref()));
    write("sec1.pem", pem("EC PARAMETERS", &PUBLIC[13..23]) + &pem("EC PRIVATE KEY", &key.as_ref()[INNER..]));
    write("pub.pem", pem("PUBLIC KEY", &[&PUBLIC, public.as_slice()].concat()));
    public
}

/// The files of a folder by name, which has `/` between folders.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fn collect(root: &Path, inside: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
        for name in names(&root.join(inside)) {
            let name = inside.join(name);
            if root.join(&name).is_dir() {
                collect(root, &name, found);
            } else {
                found.insert(name.to_str().unwrap().to_owned(), fs::read(root.join(&name)).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    collect(folder, Path::new(""), &mut found);
    found
}

fn write_files(folder: &Path, files: &BTreeMap<String, Vec<u8>>) {
    for (name, bytes) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/signatures").join(name)
}

/// Verifies the folder `signed`, and expects a part of a finding of a failed check.
fn refused(folder: &Path, key: &Path, finding: &str) {
    let run = compress(folder, &format!("verify signed --key {}", key.display()));
    assert!(run.code == 1 && run.stderr.contains(finding), "{finding}: exit code {}\n{}{}", run.code, run.stdout, run.stderr);
}

#[test]
fn signatures_of_model_signing_are_verified() {
    for (curve, other) in [("p256", "p384"), ("p384", "p256")] {
        let (folder, signed) = (tempfile::tempdir().unwrap(), files(&golden(curve)));
        let (folder, key) = (folder.path(), golden(&format!("{curve}.pub.pem")));
        let change = |name: &str, bytes: Option<&[u8]>| {
            let mut files = signed.clone();
            match bytes {
                Some(bytes) => drop(files.insert(name.to_owned(), bytes.to_owned())),
                None => drop(files.remove(name)),
            }
            let _ = fs::remove_dir_all(folder.join("signed"));
            write_files(&folder.join("signed"), &files);
        };
        // Files of version control systems are not signed.
        for name in [".gitattributes", ".git/config"] {
            change(name, Some(b"other"));
            let run = ok(folder, &format!("verify signed --key {}", key.display()));
            assert!(run.stdout.contains("4 files are as signed") && run.stdout.contains("not checked: it does not exist"), "{}", run.stdout);
        }
        refused(folder, &golden(&format!("{other}.pub.pem")), "was signed with another key");
        for (name, bytes, finding) in [
            ("a/b.txt", Some(&b"changed\n"[..]), "changed: a/b.txt"),
            ("a/c/empty.txt", None, "missing: a/c/empty.txt"),
            ("a/c/more.txt", Some(b""), "not signed: a/c/more.txt"),
            ("a/.gitignore", Some(b""), "not signed: a/.gitignore"),
            ("model.sig", None, "the output is not signed"),
            ("model.sig", Some(b"{}"), "is not a bundle of Sigstore"),
        ] {
            change(name, bytes);
            refused(folder, &key, finding);
        }
        let bundle: Value = serde_json::from_slice(&signed["model.sig"]).unwrap();
        let payload = BASE64_STANDARD.decode(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
        let forged = String::from_utf8(payload).unwrap().replace("a-b.txt", "c-b.txt");
        for (at, value, finding) in [
            ("/dsseEnvelope/payload", json!(BASE64_STANDARD.encode(forged)), "the signature is not valid"),
            ("/dsseEnvelope/signatures", json!([]), "0 signatures"),
            ("/dsseEnvelope/payloadType", json!("text/plain"), "signs a `text/plain`"),
            ("/mediaType", json!("application/json"), "is of the type"),
            ("/verificationMaterial", json!({ "certificate": {} }), "verify it with `model_signing`"),
        ] {
            let mut changed = bundle.clone();
            *changed.pointer_mut(at).unwrap() = value;
            change("model.sig", Some(changed.to_string().as_bytes()));
            refused(folder, &key, finding);
        }
    }
}

/// The contents of a link can change after the verification.
#[test]
fn symbolic_links_are_not_followed() {
    let (folder, signed) = (tempfile::tempdir().unwrap(), files(&golden("p256")));
    let (folder, key) = (folder.path(), golden("p256.pub.pem"));
    write_files(&folder.join("signed"), &signed);
    ok(folder, &format!("verify signed --key {}", key.display()));
    for name in ["a-b.txt", "a/b.txt"] {
        let (inside, outside) = (folder.join("signed").join(name), folder.join("outside"));
        fs::rename(&inside, &outside).unwrap();
        std::os::unix::fs::symlink(&outside, &inside).unwrap();
        refused(folder, &key, &format!("the folder differs from the signed files: symbolic links, which the signature does not allow: {name}"));
        fs::rename(&outside, &inside).unwrap();
    }
}

/// `--force` replaces the signature that the report describes, and no other file with its name.
#[test]
fn foreign_signatures_are_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("in"));
    write_keys(folder, "key");
    let run = "quantize-dynamic in -o signed --no-measure --sign key.pem --force";
    ok(folder, run);
    ok(folder, run);
    let (path, own) = (folder.join("signed/model.sig"), fs::read(folder.join("signed/model.sig")).unwrap());
    for foreign in [fs::read(golden("p256").join("model.sig")).unwrap(), b"notes".to_vec()] {
        fs::write(&path, &foreign).unwrap();
        let refused = compress(folder, run);
        assert!(refused.code == 1 && refused.stderr.contains("model.sig"), "exit code {}\n{}", refused.code, refused.stderr);
        assert_eq!(fs::read(&path).unwrap(), foreign);
    }
    fs::write(&path, own).unwrap();
    ok(folder, run);
}

/// The statement of a signature, which is valid according to ring.
fn statement(folder: &Path, public: &[u8]) -> Value {
    let bundle = read_json(&folder.join("model.sig"));
    let decode = |value: &Value| BASE64_STANDARD.decode(value.as_str().unwrap()).unwrap();
    let envelope = &bundle["dsseEnvelope"];
    let payload = decode(&envelope["payload"]);
    let message = [format!("DSSEv1 28 application/vnd.in-toto+json {} ", payload.len()).as_bytes(), &payload].concat();
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, public).verify(&message, &decode(&envelope["signatures"][0]["sig"])).unwrap();
    let hint = sha256(pem("PUBLIC KEY", &[&PUBLIC, public].concat()).as_bytes());
    assert_eq!(bundle["mediaType"], "application/vnd.dev.sigstore.bundle.v0.3+json");
    assert_eq!(bundle["verificationMaterial"], json!({ "publicKey": { "hint": hint }, "tlogEntries": [] }));
    serde_json::from_slice(&payload).unwrap()
}

#[test]
fn an_output_is_signed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("in"));
    // A signature of the input does not cover the output.
    for name in ["model.sig", "bom.cdx.json", "in.txt", ".gitattributes"] {
        fs::write(folder.join("in").join(name), name).unwrap();
    }
    let public = write_keys(folder, "key");
    write_keys(folder, "other");
    for (key, force) in [("key.pem", ""), ("key.sec1.pem", "--force"), ("key.pem", "--force --sbom cyclonedx")] {
        ok(folder, &format!("quantize-dynamic in -o signed --no-measure --sign {key} {force}"));
        let (out, statement) = (files(&folder.join("signed")), statement(&folder.join("signed"), &public));
        assert_eq!(out.contains_key("bom.cdx.json"), force.contains("sbom"), "{:?}", out.keys());
        let resources = statement["predicate"]["resources"].as_array().unwrap();
        let signed: Vec<(&str, &str)> = resources.iter().map(|file| (file["name"].as_str().unwrap(), file["digest"].as_str().unwrap())).collect();
        let mut expected: Vec<(&str, String)> = out.iter().map(|(name, bytes)| (name.as_str(), sha256(bytes))).collect();
        expected.retain(|(name, _)| !["model.sig", ".gitattributes"].contains(name));
        expected.sort_by_key(|(name, _)| name.split('/').collect::<Vec<_>>());
        assert_eq!(signed, expected.iter().map(|(name, hash)| (*name, hash.as_str())).collect::<Vec<_>>());
        assert!(signed.iter().any(|(name, _)| *name == "report.json"));
        let digests: Vec<u8> = expected.iter().flat_map(|(name, _)| digest(&SHA256, &out[*name]).as_ref().to_owned()).collect();
        assert_eq!(statement["subject"], json!([{ "name": "signed", "digest": { "sha256": sha256(&digests) } }]));
        ok(folder, "verify signed --key key.pub.pem");
        let run = ok(folder, "verify signed");
        let line = run.stdout.lines().find(|line| line.contains("not checked without the public key")).unwrap_or_else(|| panic!("{}", run.stdout));
        assert!(line.contains("skipped"), "{line}");
        let skipped = data(folder, "verify signed --json").as_array().unwrap().iter().filter(|check| check["skipped"] == true && check["ok"] == true).count();
        assert_eq!(skipped, 1);
        refused(folder, &folder.join("other.pub.pem"), "was signed with another key");
        for text in [&out["report.json"], &out["report.md"], &out["recipe.yaml"]].map(|bytes| String::from_utf8_lossy(bytes)) {
            assert!(!text.contains("key.pem") && !text.contains("sec1"), "{text}");
        }
    }
    let report = folder.join("signed/report.json");
    fs::write(&report, fs::read_to_string(&report).unwrap().replace("\"seed\": 0", "\"seed\": 1")).unwrap();
    refused(folder, &folder.join("key.pub.pem"), "changed: report.json");
    fs::remove_file(folder.join("signed/model.sig")).unwrap();
    let run = compress(folder, "verify signed");
    assert!(run.code == 1 && run.stderr.contains("is missing, although the run signed the output"), "{}{}", run.stdout, run.stderr);
}

#[test]
fn merged_parts_are_signed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("in"));
    write_keys(folder, "key");
    fs::write(folder.join("recipe.yaml"), "model: in\nmeasure: false\nsbom: cyclonedx\npasses: [quantize-dynamic]\n").unwrap();
    let run = compress(folder, "run recipe.yaml -o out --part 1/2 --sign key.pem");
    assert!(run.code == 2 && run.stderr.contains("when the parts are merged"), "{}", run.stderr);
    for part in 1..=2 {
        ok(folder, &format!("run recipe.yaml -o out --part {part}/2"));
    }
    ok(folder, "merge out --sign key.pem");
    let run = ok(folder, "verify out --key key.pub.pem");
    assert!(run.stdout.contains("as signed") && run.stdout.contains("are correct"), "{}", run.stdout);
    let recipe = fs::read_to_string(folder.join("out/recipe.yaml")).unwrap();
    assert!(recipe.contains("sbom: cyclonedx"), "{recipe}");
}

#[test]
fn unsuitable_keys_and_outputs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("in"));
    write_keys(folder, "key");
    write_keys(&folder.join("in"), "secret");
    fs::rename(folder.join("in/secret.pem"), folder.join("in/signer")).unwrap();
    fs::copy(folder.join("in/signer"), folder.join("copy")).unwrap();
    let encrypted = "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\nAAAA\n-----END EC PRIVATE KEY-----\n";
    for (name, text) in [
        ("encrypted", pem("ENCRYPTED PRIVATE KEY", b"key")),
        ("old", encrypted.to_owned()),
        ("rsa", pem("RSA PRIVATE KEY", b"key")),
        ("damaged", pem("PRIVATE KEY", b"key")),
        ("text", "key".to_owned()),
    ] {
        fs::write(folder.join(name), text).unwrap();
    }
    for (args, message) in [
        ("-o out --sign encrypted", "is encrypted, which is not supported: decrypt it with `openssl pkey"),
        ("-o out --sign old", "is encrypted"),
        ("-o out --sign rsa", "is of the kind RSA PRIVATE KEY"),
        ("-o out --sign damaged", "is not a key of the curve P-256 or P-384"),
        ("-o out --sign text", "contains no private key in PEM"),
        ("-o out --sign key.pub.pem", "is a public key"),
        ("-o out --sign in/signer", "is in the model's folder and would be copied"),
        ("-o out --sign copy", "signer would be published, but it is a copy of the private key"),
        ("-o out.gguf --sign key.pem", "choose a folder as the output"),
        ("-o out --sbom spdx", "[possible values: cyclonedx]"),
    ] {
        let run = compress(folder, &format!("quantize-dynamic in --no-measure {args}"));
        assert!(run.code == 2 && run.stderr.contains(message), "{args}: exit code {}\n{}", run.code, run.stderr);
        assert!(!folder.join("out").exists(), "{args}");
    }
    ok(folder, "quantize-dynamic in -o out --no-measure");
    for (key, message) in [("key.pem", "is a private key: `openssl pkey"), ("text", "contains no public key")] {
        let run = compress(folder, &format!("verify out --key {key}"));
        assert!(run.code == 2 && run.stderr.contains(message), "{key}: {}", run.stderr);
    }
    let run = compress(folder, "verify out --key key.pub.pem");
    assert!(run.code == 1 && run.stderr.contains("model.sig"), "{}", run.stderr);
}

/// The output of `distill` is derived from the student and the teacher too.
#[test]
#[cfg(feature = "run")]
fn a_bill_of_materials_lists_all_models_that_passes_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let copy = |name: &str| {
        golden_model(folder, "bert-sequence-classification", &[("word-pieces.json", "tokenizer.json")]);
        fs::rename(folder.join("in"), folder.join(name)).unwrap();
    };
    ["student", "teacher", "first"].into_iter().for_each(copy);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/labelled.csv"), folder.join("labelled.csv")).unwrap();
    let recipe = "model: first\nmeasure: false\ndata: { train: { text: labelled.csv } }\npasses: [distill: { student: { model: student }, teacher: teacher, losses: { soft: 1 }, max_steps: 1 }]\nsbom: cyclonedx\noutput: out\n";
    fs::write(folder.join("recipe.yaml"), recipe).unwrap();
    ok(folder, "run recipe.yaml");
    let bill = read_json(&folder.join("out/bom.cdx.json"));
    let ancestors = bill["metadata"]["component"]["pedigree"]["ancestors"].as_array().unwrap();
    let names: Vec<(&str, &str)> = ancestors.iter().map(|model| (model["bom-ref"].as_str().unwrap(), model["name"].as_str().unwrap())).collect();
    assert_eq!(names, [("base-model", "first"), ("input-model:1", "student"), ("input-model:2", "teacher")], "{ancestors:?}");
    assert!(ancestors.iter().all(|model| model["type"] == "machine-learning-model" && model["properties"][0]["name"] == "compress:source"));
    ok(folder, "verify out");
}

#[test]
fn a_bill_of_materials_lists_files_base_model_data_and_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    golden_model(folder, "bert-sequence-classification", &[("word-pieces.json", "tokenizer.json")]);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/evaluation/labelled.csv"), folder.join("labelled.csv")).unwrap();
    let recipe = "model: in\ndata:\n  evaluation: { text: labelled.csv, label_column: label }\npasses: [quantize-dynamic]\nevaluate: { runtime: [candle], latency: false }\nsbom: cyclonedx\noutput: signed\n";
    fs::write(folder.join("recipe.yaml"), recipe).unwrap();
    ok(folder, "run recipe.yaml");
    let (out, report, bill) = (folder.join("signed"), read_json(&folder.join("signed/report.json")), read_json(&folder.join("signed/bom.cdx.json")));
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&json!("CycloneDX"), &json!("1.6")));
    let component = &bill["metadata"]["component"];
    assert_eq!((&component["type"], &component["name"]), (&json!("machine-learning-model"), &json!("signed")));
    let base = &component["pedigree"]["ancestors"][0];
    assert_eq!((&base["type"], &base["name"]), (&json!("machine-learning-model"), &json!("in")));
    assert!(base["properties"].as_array().unwrap().contains(&json!({ "name": "compress:tensors:blake3", "value": report["model"]["blake3"] })));
    // Hashes of all files except the report, which is written later, and the bill itself.
    let components = bill["components"].as_array().unwrap();
    let listed: BTreeMap<String, Value> =
        components.iter().filter(|part| part["type"] == "file").map(|part| (part["name"].as_str().unwrap().to_owned(), part["hashes"].clone())).collect();
    let mut expected: BTreeMap<String, Value> = BTreeMap::new();
    for (name, bytes) in files(&out).into_iter().filter(|(name, _)| !["report.json", "bom.cdx.json"].contains(&name.as_str())) {
        let hashes =
            [("SHA-256", sha256(&bytes)), ("BLAKE3", blake3::hash(&bytes).to_string())].map(|(alg, content)| json!({ "alg": alg, "content": content }));
        expected.insert(name, json!(hashes));
    }
    assert_eq!(listed, expected);
    let sets: Vec<&Value> = components.iter().filter(|part| part["type"] == "data").collect();
    assert_eq!(sets.len(), 1);
    assert_eq!((&sets[0]["bom-ref"], &sets[0]["description"]), (&json!("data:evaluation"), &json!("evaluation data")));
    assert_eq!(component["modelCard"]["modelParameters"]["datasets"], json!([{ "ref": "data:evaluation" }]));
    for (card, side, index) in [(&component["modelCard"], "after", 1), (&base["modelCard"], "before", 0)] {
        let metric = &card["quantitativeAnalysis"]["performanceMetrics"][0];
        let accuracy = report["accuracy"][side]["candle"].as_f64().unwrap();
        assert_eq!((&metric["type"], &metric["value"]), (&json!("accuracy"), &json!(accuracy.to_string())));
        let low = report["accuracy"]["ci95"][index][0].as_f64().unwrap();
        assert_eq!(metric["confidenceInterval"]["lowerBound"], json!(low.to_string()));
    }
    let pass = component["properties"].as_array().unwrap().iter().find(|property| property["name"] == "compress:pass").unwrap();
    assert!(pass["value"].as_str().unwrap().starts_with("{\"quantize-dynamic\":"), "{pass}");
    // `verify` compares the hashes of the bill with the files.
    let run = ok(folder, "verify signed");
    assert!(run.stdout.contains(&format!("the hashes of {} files are correct", expected.len())), "{}", run.stdout);
    let path = out.join("bom.cdx.json");
    let (text, hash) = (fs::read_to_string(&path).unwrap(), listed["config.json"][0]["content"].as_str().unwrap());
    for (changed, finding) in [
        (text.replace(hash, &"0".repeat(64)), "states other hashes of `config.json` than the file has"),
        (text.replace("\"name\": \"config.json\"", "\"name\": \"other.json\""), "lists `other.json`, which the report does not list"),
    ] {
        fs::write(&path, &changed).unwrap();
        // The report lists the changed bill.
        let mut report = report.clone();
        let entry = report["carried"].as_array_mut().unwrap().iter_mut().find(|file| file["path"] == "bom.cdx.json").unwrap();
        (entry["bytes"], entry["blake3"]) = (json!(changed.len()), json!(blake3::hash(changed.as_bytes()).to_string()));
        fs::write(out.join("report.json"), report.to_string()).unwrap();
        let run = compress(folder, "verify signed");
        assert!(run.code == 1 && run.stderr.contains(finding), "{}{}", run.stdout, run.stderr);
    }
}
