"""Access of scripts to the cache."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import SCRIPTS


def script(*command):
    """The folders that another script prints; exits if it fails."""
    done = subprocess.run([sys.executable, SCRIPTS / command[0], *command[1:]], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return [Path(line) for line in done.stdout.splitlines()]


def fetched(name):
    """The folder of an input of scripts/fetch."""
    (folder,) = script("fetch", name)
    return folder


def prepared(name, make, to="converted"):
    """The folder that `make` creates from an input of scripts/fetch, next to it."""
    source = fetched(name)
    return made(source.with_name(f"{source.name}-{to}"), lambda folder: make(source, folder))


def made(final, make):
    """The folder `final`, which `make` creates if it does not exist; it appears completely or not at all."""
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix="make-") as scratch:
            folder = Path(scratch, final.name)
            folder.mkdir()
            make(folder)
            try:
                os.rename(folder, final)
            except OSError:
                # Another process may have created it.
                if not final.is_dir():
                    raise
    return final
