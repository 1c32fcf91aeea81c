"""The cache folder, and a virtual environment in it with the reference implementations."""

import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = [
    "torch==2.15.0",
    "torchvision==0.29.2",
    "compressed-tensors==0.20.0",
    "transformers==5.23.0",
    "safetensors==0.8.0",
    "numpy==2.4.6",
    "h5py==3.16.0",
    "onnx==1.22.0",
    "onnxruntime==1.31.1",
    "sentence-transformers==6.2.0",
]


def cache() -> Path:
    if folder := os.environ.get("COMPRESS_CACHE"):
        return Path(folder).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "compress").absolute()


# Older versions of libraries, which precede those of the reference environment in the path.
OLDER = ["transformers==4.57.6", "compressed-tensors==0.13.0", "accelerate==1.15.0"]


def prepare(name: str, requirements: list[str], size: str, above: Path | None = None) -> Path:
    """The python of a virtual environment in the cache, which is built if it is missing or has other requirements.

    Packages of `above`, the python of another environment, are visible too, with lower precedence.
    """
    folder = cache() / f"venv-{name}"
    python = folder / "bin" / "python"
    wanted = "\n".join(requirements) + "\n"
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"preparing {folder} (about {size}, once)", file=sys.stderr)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, stdout=sys.stderr)
        if above:
            places = [subprocess.run([each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, stdout=subprocess.PIPE, text=True) for each in (python, above)]
            own, other = (place.stdout.strip() for place in places)
            Path(own, "above.pth").write_text(other + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return python


def reference() -> Path:
    """The python with the reference implementations."""
    return prepare("reference", REQUIREMENTS, "6 GB")


def older() -> Path:
    """The python with older versions of the libraries."""
    return prepare("transformers-4", OLDER, "100 MB", reference())


def peft() -> Path:
    """The python with PEFT in addition to the reference implementations."""
    return prepare("peft", ["peft==0.21.2", "accelerate==1.15.0"], "10 MB", reference())


def trl() -> Path:
    """The python with trl in addition to the reference implementations."""
    return prepare("trl", ["trl==1.16.0", "accelerate==1.15.0"], "150 MB", reference())


def bitsandbytes() -> Path:
    """The python with bitsandbytes in addition to the reference implementations."""
    return prepare("bitsandbytes", ["bitsandbytes==0.50.2"], "150 MB", reference())


def nncf() -> Path:
    """The python with NNCF, which reads ONNX without PyTorch."""
    return prepare("nncf", ["nncf==3.4.0", "onnx==1.22.0", "onnxruntime==1.31.1", "numpy==2.4.6"], "1 GB")


def tiktoken() -> Path:
    """The python with tiktoken in addition to the reference implementations."""
    return prepare("tiktoken", ["tiktoken==0.14.0"], "2 MB", reference())


def gguf() -> Path:
    """The python with `gguf` in addition to the reference implementations."""
    return prepare("gguf", ["gguf==0.19.0"], "1 MB", reference())


def decoders() -> Path:
    """The python that exports decoders to ONNX and runs them, with the version of transformers that optimum
    requires."""
    wanted = ["optimum-onnx==0.1.0", "onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", "transformers==4.57.6", "accelerate==1.15.0"]
    return prepare("decoders", wanted, "200 MB", reference())


def auto_round() -> Path:
    """The python with auto-round in addition to the reference implementations."""
    return prepare("auto-round", ["auto-round==0.16.1", "accelerate==1.15.0"], "300 MB", reference())


def llm() -> Path:
    """The python with llm-compressor."""
    return prepare("llm", ["llmcompressor==0.14.0.1"], "6 GB")


# The packages that `speculators` imports. It requires older versions of PyTorch and transformers than the reference.
SPECULATORS = [
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "loguru==0.7.3",
    "pydantic-settings==2.16.3",
    "python-dotenv==1.2.4",
    "openai==3.57.0",
    "httpx==0.28.1",
    "httpcore==1.0.9",
    "jiter==0.19.0",
    "sniffio==1.3.1",
    "aiohttp==3.14.5",
    "datasets==5.1.0",
    "distro==1.9.0",
    "multiprocess==0.70.19",
    "dill==0.4.1",
    "xxhash==4.1.0",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "aiosignal==1.4.0",
    "frozenlist==1.8.0",
    "multidict==7.2.1",
    "yarl==1.25.1",
    "propcache==0.5.4",
    "aiohappyeyeballs==2.7.1",
    "attrs==26.1.0",
    "python-dateutil==4.0.0",
    "fsspec==2026.7.0",
]


def speculators() -> Path:
    """The python with `speculators` in addition to the reference implementations."""
    return prepare("speculators", ["--no-deps", *SPECULATORS], "150 MB", reference())


def provenance() -> Path:
    """The python that signs models and validates bills of materials."""
    # model-signing imports pyOpenSSL, which its dependencies no longer install.
    wanted = ["model-signing==1.1.1", "pyOpenSSL==26.4.0", "cyclonedx-python-lib[json-validation]==11.12.0"]
    return prepare("provenance", wanted, "80 MB")


def enter(environment=reference) -> None:
    """Restarts this command in an environment, which is built if missing."""
    try:
        python = environment()
    except subprocess.CalledProcessError as error:
        sys.exit(f"could not prepare the environment: {' '.join(map(str, error.cmd))} failed")
    if Path(sys.prefix) != python.parent.parent:
        os.execv(python, [str(python), *sys.orig_argv[1:]])
