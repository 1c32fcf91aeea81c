"""llama.cpp, built from the source in a Python package."""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from . import cached, venv

PACKAGE = "llama_cpp_python-0.3.36"
TOOLS = ["llama-quantize", "llama-perplexity", "llama-imatrix", "llama-bench"]


def source(folder, only=("",)):
    """Extracts the source to `folder`, only paths that begin with one of `only`."""
    archive = venv.cache() / f"{PACKAGE}.tar.gz"
    if not archive.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-python", f"--dest={venv.cache()}"]
        subprocess.run([*command, PACKAGE.replace("-", "==")], check=True, stdout=sys.stderr)
    inside = f"{PACKAGE}/vendor/llama.cpp/"
    with tarfile.open(archive) as file:
        file.extractall(folder, [member for member in file if member.name.startswith(tuple(inside + start for start in only))], filter="data")
    return Path(folder, inside)


def build(folder):
    tools = venv.prepare("cmake", ["cmake==4.4.4", "ninja==1.13.2"], "100 MB").parent
    print("building llama.cpp (a quarter of an hour on two cores, once)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        out = Path(scratch, "build")
        subprocess.run([tools / "cmake", "-G", "Ninja", "-S", source(scratch), "-B", out, *options], check=True, stdout=sys.stderr)
        subprocess.run([tools / "cmake", "--build", out, "--target", *TOOLS], check=True, stdout=sys.stderr)
        for tool in TOOLS:
            (folder / tool).write_bytes((out / "bin" / tool).read_bytes())
            (folder / tool).chmod(0o755)


def tools():
    """The folder with llama.cpp's tools, which are built if missing."""
    return cached.made(venv.cache() / f"llama.cpp-{PACKAGE.rsplit('-', 1)[1]}-2", build)


def interleaved(rows, heads):
    """The converter's permutation of the rows of Llama's query and key projections."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def finish(writer):
    """Write the file of a `GGUFWriter` of the package `gguf`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
