"""Compress neural networks: prune, quantize, distill, and measure what it costs.

The functions run the program `compress`, which this package contains. There is one function for each pass; `run` runs
several passes as a recipe.

>>> import compress
>>> report = compress.quantize_dynamic("minilm", "out/int8", embeddings=True)
>>> report.size.ratio > 1
True
"""

from . import passes, recipe, sections
from ._data import unbatch
from ._errors import Cancelled, CompressError, ProgramNotFound, UsageError
from ._measure import Evaluation, Score, auto, evaluate
from ._process import Progress, command, find_program
from ._run import Job, Settings, plan, run, start, sweep
from .passes import *
from .recipe import Data, Evaluate, Recipe
from .report import Report

__all__ = [
    "Cancelled",
    "CompressError",
    "Data",
    "Evaluate",
    "Evaluation",
    "Job",
    "ProgramNotFound",
    "Progress",
    "Recipe",
    "Report",
    "Score",
    "Settings",
    "UsageError",
    "auto",
    "command",
    "evaluate",
    "find_program",
    "plan",
    "recipe",
    "run",
    "sections",
    "start",
    "sweep",
    "unbatch",
]
__all__ += passes.__all__
