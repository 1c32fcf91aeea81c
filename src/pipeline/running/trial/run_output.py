"""Runs a folder in a Python runtime: run_output.py FOLDER SCRATCH

The other file in SCRATCH, the module of the runtime, defines `run`.
"""

import json
import sys
from pathlib import Path

from compress_trial_runtime import run


def main():
    folder, scratch = map(Path, sys.argv[1:])
    result = {}
    try:
        run(folder, scratch, result)
    except ImportError as error:
        result["missing"] = error.name or str(error)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    (scratch / "result.json").write_text(json.dumps(result))


# Processes that vLLM starts import this file.
if __name__ == "__main__":
    main()
