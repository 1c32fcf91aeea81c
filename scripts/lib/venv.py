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
]


def cache() -> Path:
    if folder := os.environ.get("COMPRESS_CACHE"):
        return Path(folder).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "compress").absolute()


def enter() -> None:
    """Continue in the reference environment: build it when it is missing, then run this script again inside."""
    folder = cache() / "venv-reference"
    python = folder / "bin" / "python"
    if Path(sys.prefix) == folder:
        return
    wanted = "\n".join(REQUIREMENTS) + "\n"
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"preparing {folder} (about 6 GB, once)", file=sys.stderr)
        try:
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", folder], check=True, stdout=sys.stderr)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True, stdout=sys.stderr)
        except subprocess.CalledProcessError as error:
            sys.exit(f"could not prepare {folder}: {' '.join(map(str, error.cmd))} failed")
        stamp.write_text(wanted)
    os.execv(python, [str(python), *sys.argv])
