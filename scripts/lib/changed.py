"""Prints the commands that check the crates which changed since a commit, one per line.

    PYTHONPATH=scripts python3 -m lib.changed BASE

Changed files are those that differ from BASE, and new ones. The commands: formatting, then for each changed crate
lints and unit tests, and then the integration tests of the changed folders.
"""

import subprocess
import sys

from lib import ROOT

# Package and features of each crate, as in CONTRIBUTING.md; dependencies of a crate come first.
CRATES = {
    "crates/testing/": ("compress-testing", ""),
    "crates/kernels/": ("compress-kernels", "run"),
    "crates/core/": ("compress-core", "remote,zstd"),
    "crates/graph/": ("compress-graph", "run"),
    "crates/onnx/": ("compress-onnx", ""),
    "crates/engine/": ("compress-engine", "run"),
    "src/": ("compress-models", ""),
}
# Modules of tests/it that test files, by the beginning of their path; all matching rows apply.
TESTS = {
    "crates/kernels/": "ops laws goldens gguf::tuned",
    "crates/core/src/files": "cli::commands cli::hub_output mutated",
    "crates/core/src/output": "cli parts",
    "crates/core/src/store/gguf": "contract contract_files loads",
    "crates/core/src/store": "goldens laws gguf pieces mutated corpus",
    "crates/graph/src/analysis": "groups structured blockwise rotate",
    "crates/graph/src/arch": "families family_table parity tape generation groups detectors draft_heads towers multimodal multimodal_texts",
    "crates/graph/src/ir": "ops parity tape corpus",
    "crates/onnx/": "onnx onnx_cached onnx_encoder_decoder onnx_in onnx_int8 onnx_lift onnx_opaque onnx_outputs runtime ops::onnx",
    "crates/engine/src/calibration": "static_int8 layerwise properties::calibration",
    "crates/engine/src/data": "contrastive evaluation train training_data properties::folders",
    "crates/engine/src/evaluation": "detectors evaluation properties::fidelity",
    "crates/engine/src/exec": "blockwise dropout parity qat tape run generation drafts",
    "crates/engine/src/model": "families fp8 gguf low_bits other_tools packed_experts quantization_config run corrections adapters",
    "crates/engine/src/train/communicator": "layerwise_processes",
    "crates/engine/src/train/team": "layerwise_processes",
    "crates/engine/src/generation": "generation drafts draft_command on_policy onnx_cached draft_heads",
    "crates/engine/src/train": "adapters contrastive dropout on_policy qat teacher_files train train_encoder_decoder train_extension train_processes train_reports training_data optimizers tape gguf::tuned",
    "src/build": "cached package",
    "src/cli": "cli python_package deployment",
    "src/cli/running/draft": "draft_command draft_heads",
    "src/contract": "contract contract_files loads trials",
    "src/export": "runtime onnx_cached onnx_encoder_decoder fp8 low_bits other_tools packed_experts quantization_config gguf loads properties::families",
    "python/": "python_package",
    "src/pass": "goldens laws properties::options python_package",
    "src/pass/channel_equalization": "static_int8",
    "src/pass/decompose": "low_rank",
    "src/pass/distill": "adapters on_policy qat teacher_files train train_encoder_decoder train_extension training_data draft_heads contrastive dropout",
    "src/pass/finetune": "adapters train train_encoder_decoder contrastive dropout train_extension",
    "src/pass/layerwise": "layerwise layerwise_processes corrections gguf::compensated",
    "src/pass/palettize": "low_rank",
    "src/pass/peft": "adapters corrections",
    "src/pass/prune_structured": "structured properties::pruning",
    "src/pass/search_structure": "structured::search detectors",
    "src/pass/rotate": "rotate",
    "src/pass/split_experts": "split_experts",
    "src/pass/prune_vocabulary": "vocabulary",
    "src/pass/quantize": "low_bits mixed_schemes quantization_config layerwise corrections qat gguf::compensated",
    "src/pass/quantize_static": "static_int8 onnx_int8",
    "src/pipeline": "cached cached_results cards loads parts pieces planned_work run search trials",
    "src/pipeline/finish_passes": "qat gguf::compensated gguf::tuned",
    "src/pipeline/running/draft": "draft_command draft_heads",
    "src/plugin": "plugins",
    "src/provenance": "provenance",
    "src/recipe": "configs properties::options python_package",
    "src/report": "report python_package",
    "src/report/draft": "draft_command",
    "src/report/card": "cards",
    "src/run_state": "laws parts planned_work",
    "configs/": "configs readme deployment",
    "action.yml": "deployment",
    "Dockerfile": "deployment",
    ".pre-commit-hooks.yaml": "deployment",
    "docs/": "readme language python_package",
    "README.md": "readme language python_package",
    "scripts/book": "python_package",
    "scripts/lib/reference": "python_package",
    "examples/": "cached configs plugins",
    "fuzz/": "corpus mutated",
    "tests/golden/": "goldens parity tape ops generation evaluation optimizers",
    "tests/golden/fp8": "fp8",
    "tests/golden/gguf": "gguf",
    "tests/golden/groups": "groups",
    "tests/golden/mxfp4": "packed_experts",
    "tests/golden/other-tools": "other_tools",
    "tests/golden/signatures": "provenance",
    "tests/golden/training": "adapters train_encoder_decoder",
}
# Rules of all source and text files.
RULES = "tidy imports language"
# Files of which everything depends.
EVERYTHING = ("Cargo.toml", "Cargo.lock", "build.rs", "clippy.toml", "crates/testing/", "tests/it/common/", "tests/it/main.rs")


def modules() -> set[str]:
    """The modules of tests/it that contain tests."""
    entries = (path.stem for path in (ROOT / "tests/it").iterdir())
    return set(entries) - {"main", "common"}


def changed_files(base: str) -> list[str]:
    def git(*command):
        return subprocess.run(["git", *command, "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")

    return sorted(filter(None, {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}))


def commands(files: list[str]) -> list[str]:
    """The commands that check changed files."""
    everything = any(name.startswith(EVERYTHING) or name.endswith("/Cargo.toml") for name in files)
    crates = [crate for folder, crate in CRATES.items() if everything or any(name.startswith(folder) for name in files)]
    found = ["cargo fmt --check"]
    features = {name: f" --features {enabled}" if enabled else "" for name, enabled in crates}
    found += [f"cargo clippy --quiet -p {name}{features[name]} --all-targets -- -D warnings" for name in features]
    found += [f"cargo test --quiet -p {name}{features[name]} --lib" for name in features]
    tests = {test for prefix, names in TESTS.items() if any(name.startswith(prefix) for name in files) for test in names.split()}
    own = (name.removeprefix("tests/it/").split("/")[0].removesuffix(".rs") for name in files if name.startswith("tests/it/"))
    tests |= modules() & set(own)
    if everything:
        return [*found, "cargo test --test it"]
    if files:
        tests |= set(RULES.split())
        found.append(f"cargo test --test it -- {' '.join(f'{test}::' for test in sorted(tests))}")
    return found


def main() -> int:
    named = {name.split("::")[0] for names in (*TESTS.values(), RULES) for name in names.split()}
    missing = sorted(modules() ^ named)
    if missing:
        print(f"scripts/lib/changed.py: no row for these modules of tests/it, or no such module: {', '.join(missing)}", file=sys.stderr)
        return 1
    folders = sorted(prefix for prefix in (*TESTS, *CRATES) if not list(ROOT.glob(f"{prefix.rstrip('/')}*")))
    if folders:
        print(f"scripts/lib/changed.py: no such files: {', '.join(folders)}", file=sys.stderr)
        return 1
    print(*commands(changed_files(sys.argv[1])), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
