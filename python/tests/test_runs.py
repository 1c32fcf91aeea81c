"""Runs of recipes and passes, their reports, and their errors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from workspace import InWorkspace

import compress
from compress import Recipe, recipe
from compress._bar import Bar


class Passes(InWorkspace):
    def test_a_pass_writes_a_folder_and_returns_its_report(self) -> None:
        report = compress.quantize_dynamic("minilm", "out/int8", embeddings=True, observer="mse")
        self.assertGreater(report.size.ratio, 1.5)
        self.assertEqual(report.passes[0].options["observer"], "mse")
        self.assertTrue(all(file.verified.ok for file in report.outputs))
        self.assertTrue(Path("out/int8/model.safetensors").is_file())
        self.assertEqual(compress.Report.open("out/int8").to_dict(), report.to_dict())

    def test_options_equal_to_the_default_are_those_of_the_program(self) -> None:
        given = compress.cast("minilm", Path("out/given"), to="bf16", overflow="error")
        default = compress.run(Recipe(model="minilm", passes=["cast"]), "out/default")
        self.assertEqual(given.passes[0].options, default.passes[0].options)

    def test_counts_and_fractions_differ(self) -> None:
        for amount, all_of_them in ((101, False), (1.0, True)):
            report = compress.prune_unstructured("minilm", "out/pruned", amount=amount, targets=["*query.weight"], force=True)
            layer = next(layer for layer in report.layers if layer.name.endswith("query.weight"))
            self.assertEqual(layer.zeros, math.prod(layer.shape) if all_of_them else 101)

    def test_settings_reach_the_recipe(self) -> None:
        report = compress.quantize("llama", "out/gptq", scheme="W4A16", method="gptq", group_size=8, calibration="book.txt", seed=7, export=[recipe.Safetensors(shard_size="1MB")])
        self.assertEqual(report.seed, 7)
        self.assertEqual(report.recipe["export"], [{"safetensors": {"layout": "auto", "shard_size": "1MB"}}])
        self.assertIn("book.txt", str(report.recipe["data"]["calibration"]))

    def test_unknown_settings_are_rejected(self) -> None:
        with self.assertRaisesRegex(TypeError, "colour"):
            compress.cast("minilm", "out/x", colour="red")  # type: ignore[call-arg]
        with self.assertRaisesRegex(TypeError, "colour"):
            compress.start("recipe.yaml", colour="red")  # type: ignore[call-arg]

    def test_unknown_parameters_name_the_function_and_suggest_one(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"schme": "W4A16"}, r"quantize\(\) has no parameter `schme`; did you mean `scheme`\?"),
            ({"bits": 4}, r"quantize\(\) has no parameter `bits`; did you mean `scheme`\?"),
            ({"eval": "book.txt"}, r"no parameter `eval`; did you mean `evaluation`\?"),
            ({"overwrite": True}, r"no parameter `overwrite`; did you mean `force`\?"),
            ({"zzz": 1}, r"no parameter `zzz`; the parameters are .*`?method"),
        ]
        for given, message in cases:
            with self.assertRaisesRegex(TypeError, message):
                compress.quantize("llama", "out/x", **given)

    def test_types_of_parameters_are_checked(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"ignore": "lm_head"}, r"quantize\(\): `ignore`: expected a list of str, not str 'lm_head'"),
            ({"ignore": [1]}, r"`ignore`: expected a list of str, not list \[1\]"),
            ({"group_size": "many"}, r"`group_size`: expected int or None, not str 'many'"),
            ({"ordered": 3.5}, r"`ordered`: expected"),
            ({"export": "gguf"}, r"`export`: expected a list of .*, not str 'gguf'"),
            ({"seed": None}, r"`seed`: expected int, not None"),
        ]
        for given, message in cases:
            with self.subTest(given=given), self.assertRaisesRegex(TypeError, message):
                compress.quantize("llama", "out/x", **given)
        with self.assertRaisesRegex(TypeError, r"cast\(\): `model`: expected str or a path, not None"):
            compress.cast(None, "out/x")  # type: ignore[arg-type]
        self.assertFalse(Path("out").exists())

    def test_docstrings_have_the_syntax_of_python(self) -> None:
        for name in compress.passes.__all__:
            for module in (compress, recipe):
                thing = getattr(module, name if module is compress else "".join(map(str.capitalize, name.split("_"))))
                with self.subTest(thing=thing):
                    self.assertNotRegex(inspect.getsource(thing).partition('"""')[2], r"(?<![\w-])(macs|layers|steps|every|heads)=\d|(?<![\w-])--\w|\{\w+:")

    def test_values_of_docstrings_are_accepted(self) -> None:
        train: dict[str, Any] = {"train": "book.txt", "max_steps": 1, "force": True}
        compress.finetune("llama", "out/x", adapter={"rank": 4}, checkpoint_every={"steps": 10}, gradient_checkpointing={"every": 1}, betas=[0.9, 0.95], **train)
        compress.distill("llama", "out/x", teacher="llama", losses={"soft": 1.0}, student={"every": 2}, on_policy={"fraction": 0.5}, more_teachers=[{"model": "llama"}], **train)
        compress.prune_structured("llama", "out/x", amount={"heads": 0.5, "mlp": 8}, force=True)
        compress.prune_structured("llama", "out/x", target={"params": "80%"}, force=True)
        compress.quantize("llama", "out/x", scheme="W8A16", group_size=8, correct={"rank": 2, "importance": "none"}, force=True)

    def test_options_that_name_files_accept_paths(self) -> None:
        for keep in (Path("book.txt"), [Path("book.txt")]):
            report = compress.prune_vocabulary("llama", "out/x", keep=keep, force=True)
            self.assertEqual(report.passes[0].name, "prune-vocabulary")
        report = compress.distill("llama", "out/x", teacher=Path("llama"), student={"model": Path("llama")}, train="book.txt", max_steps=1, force=True)
        self.assertEqual(report.passes[0].options["teacher"], "llama")

    def test_none_is_no_value_of_an_option_with_another_default(self) -> None:
        with self.assertRaisesRegex(TypeError, r"finetune\(\): `clip_norm`: expected float, not None"):
            compress.finetune("llama", "out/x", train="book.txt", clip_norm=None)  # type: ignore[arg-type]
        for step, message in (
            (recipe.Cast(to=None), r"Cast\(\): `to`: expected one of .*, not None"),  # type: ignore[arg-type]
            (recipe.Quantize(ignore=None), r"Quantize\(\): `ignore`: expected a list of str, not None"),  # type: ignore[arg-type]
        ):
            with self.subTest(step=step), self.assertRaisesRegex(TypeError, message):
                compress.plan(Recipe(model="llama", passes=[step]))

    def test_types_of_options_are_checked(self) -> None:
        evaluate, auto, cast = (functools.partial(function, "llama", "x") for function in (compress.evaluate, compress.auto, compress.cast))
        run, start, plan = (functools.partial(function, {"model": "llama"}) for function in (compress.run, compress.start, compress.plan))
        cases: list[tuple[Callable[..., object], dict[str, Any], str]] = [
            (run, {"force": "no"}, r"run\(\): `force`: expected bool, not str 'no'"),
            (run, {"cache": None}, r"run\(\): `cache`: expected bool, not None"),
            (run, {"threads": True}, r"run\(\): `threads`: expected int or None, not bool True"),
            (run, {"progress": "yes"}, r"run\(\): `progress`: expected bool or a function or None, not str 'yes'"),
            (run, {"overrides": ["seed=1"]}, r"run\(\): `overrides`: expected a dict or None, not list"),
            (start, {"resume": "False"}, r"start\(\): `resume`: expected bool, not str 'False'"),
            (start, {"forced": True}, r"start\(\) has no parameter `forced`; did you mean `force`"),
            (compress.sweep, {"recipe": "x", "output": "x", "values": {"to": ["f16"]}, "device": 0}, r"sweep\(\): `device`: expected str, not int 0"),
            (compress.sweep, {"recipe": "x", "output": "x", "values": ["to"]}, r"sweep\(\): `values`: expected a dict, not list"),
            (plan, {"overrides": "seed=1"}, r"plan\(\): `overrides`: expected a dict or None"),
            (evaluate, {"threads": "2"}, r"evaluate\(\): `threads`: expected int or None, not str '2'"),
            (auto, {"force": "no"}, r"auto\(\): `force`: expected bool, not str 'no'"),
            (cast, {"progress": 1}, r"cast\(\): `progress`: expected bool or a function or None, not int 1"),
            (compress.run, {"recipe": {"model": "llama", "data": "book.txt"}, "output": "x"}, r"`data`: expected a dict or None, not str 'book.txt'"),
        ]
        for function, given, message in cases:
            with self.subTest(given=given), self.assertRaisesRegex(TypeError, message):
                function(**given)

    def test_paths_may_begin_with_a_hyphen(self) -> None:
        os.rename("llama", "-m")
        Path("-r").write_text("model: -m\npasses: [cast]\n")
        report = compress.run("-r", "-o")
        self.assertEqual(compress.Report.open("-o").to_dict(), report.to_dict())
        self.assertEqual(compress.evaluate("-m", "book.txt").samples, compress.evaluate("-o", "book.txt").samples)
        with self.assertRaisesRegex(compress.CompressError, r"\./-"):
            compress.run("-", "out/x")

    def test_every_pass_is_exported(self) -> None:
        self.assertLessEqual(set(compress.passes.__all__), set(compress.__all__))
        for name in compress.__all__:
            self.assertTrue(getattr(compress, name).__doc__, name)


class Recipes(InWorkspace):
    def test_a_file_a_mapping_and_a_recipe_are_equivalent(self) -> None:
        os.mkdir("recipes")
        Path("recipes/cast.yaml").write_text("model: ../minilm\npasses: [cast: { to: f16 }]\noutput: ../out/file\n")
        reports = [
            compress.run(Path("recipes/cast.yaml")),
            compress.run({"model": "minilm", "passes": [{"cast": {"to": "f16"}}], "output": "out/mapping"}),
            compress.run(Recipe(model="minilm", passes=[recipe.Cast(to="f16")]), "out/recipe"),
        ]
        self.assertEqual(len({report.outputs[0].blake3 for report in reports}), 1)

    def test_iterators_in_a_recipe_are_lists(self) -> None:
        passes: Any = (name for name in ["cast"])
        ignore: Any = (name for name in ["*pooler*"])
        for small in (Recipe(model="minilm", passes=passes), Recipe(model="minilm", passes=[recipe.QuantizeDynamic(ignore=ignore)])):
            first, second = compress.plan(small), compress.plan(small)
            self.assertEqual(first["passes"], second["passes"])
            self.assertTrue(first["passes"])
        with self.assertRaisesRegex(TypeError, "contains a generator, which has its values once: pass a list"):
            compress.plan({"model": "minilm", "passes": (name for name in ["cast"])})

    def test_overrides(self) -> None:
        report = compress.run(Recipe(model="minilm", passes=["cast"]), "out/x", overrides={"cast.to": "f16", "seed": 3}, threads=1, device="cpu", cache=False)
        self.assertEqual((report.seed, report.passes[0].options["to"]), (3, "f16"))

    def test_an_override_is_the_output(self) -> None:
        compress.run({"model": "minilm", "passes": ["cast"]}, overrides={"output": "out/x"})
        self.assertTrue(Path("out/x/report.json").is_file())

    def test_a_plan_writes_nothing(self) -> None:
        planned = compress.plan(Recipe(model="minilm", passes=["quantize-dynamic"]), overrides={"quantize-dynamic.embeddings": True})
        self.assertTrue(planned["passes"][0]["options"]["embeddings"])
        self.assertFalse(Path("out").exists())

    def test_a_sweep_returns_reports_by_name(self) -> None:
        reports = compress.sweep(Recipe(model="minilm", passes=["cast"]), "out/swept", {"to": ["f16", "bf16"]})
        self.assertEqual([*reports], ["to=f16", "to=bf16"])
        self.assertTrue(Path("out/swept/comparison.html").is_file())
        with self.assertRaisesRegex(compress.UsageError, "has a `sweep`"):
            compress.run(Recipe(model="minilm", passes=["cast"], sweep={"to": ["f16"]}), "out/twice")

    def test_a_sweep_needs_lists_of_values(self) -> None:
        with self.assertRaisesRegex(ValueError, r"sweep\(\): `values` is empty"):
            compress.sweep(Recipe(model="minilm", passes=["cast"]), "out/swept", {})
        with self.assertRaisesRegex(TypeError, r"sweep\(\): `cast.to`: expected a list of values, not str 'f16'"):
            compress.sweep(Recipe(model="minilm", passes=["cast"]), "out/swept", {"cast.to": "f16"})
        self.assertFalse(Path("out").exists())


class Measurements(InWorkspace):
    def test_a_model_is_evaluated_on_a_file_on_options_and_in_memory(self) -> None:
        from_file = compress.evaluate("llama", "book.txt")
        assert from_file.score
        self.assertEqual((from_file.task, from_file.score.metric), ("language-modelling", "perplexity"))
        text = Path("book.txt").read_text().splitlines()
        for data in (compress.Data(text="book.txt", samples=2), text[:40]):
            evaluation = compress.evaluate(Path("llama"), data, threads=1, device="cpu")
            assert evaluation.score and evaluation.score.ci95
            self.assertGreater(evaluation.score.value, 1)
            self.assertGreater(evaluation.score.more["tokens"], 0)

    def test_two_models_are_compared(self) -> None:
        compress.cast("llama", "out/bf16")
        evaluation = compress.evaluate("out/bf16", "book.txt", against="llama")
        assert evaluation.fidelity and evaluation.against
        self.assertGreater(evaluation.fidelity.cosine, 0.99)
        self.assertIsInstance(evaluation.fidelity, compress.sections.Fidelity)

    def test_a_mixture_is_searched_and_written(self) -> None:
        report = compress.auto("llama", Path("out/auto"), calibration="book.txt", max_size="6bits", points=1)
        self.assertTrue(Path("out/auto/model.safetensors").is_file())
        assert report.search
        with self.assertRaisesRegex(compress.UsageError, "specify a limit"):
            compress.auto("llama", "out/x", calibration="book.txt")

    def test_the_size_of_a_search_may_be_in_bytes(self) -> None:
        reports = [compress.auto("llama", "out/auto", calibration="book.txt", max_size=size, points=1, force=True) for size in (15000, "15000B")]
        self.assertEqual(*(report.outputs[0].blake3 for report in reports))

    def test_a_search_has_a_time_and_a_latency(self) -> None:
        report = compress.auto("llama", "out/auto", calibration="book.txt", max_size="6bits", points=1, time="1us")
        assert report.search and report.search.methods
        self.assertEqual([(method.method, method.measured) for method in report.search.methods], [("gptq", None)])
        with self.assertRaisesRegex(compress.UsageError, "is measured in ONNX Runtime only"):
            compress.auto("llama", "out/x", calibration="book.txt", latency="5ms")
        with self.assertRaisesRegex(compress.UsageError, "latency"):
            compress.auto("llama", "out/x", calibration="book.txt", max_size="6bits", times=Path("times.json"))

    def test_data_that_does_not_exist_is_reported(self) -> None:
        os.mkdir("empty")
        os.mkdir("texts")
        Path("texts/a.txt").write_text("a")
        Path("texts/.hidden").touch()
        for data, message in (
            ("wikitext", "data: 'wikitext' is not a file or folder; data sets are not downloaded\nhint: pass a file"),
            ("empty", "the folder 'empty' is empty"),
            ("texts", "'texts' is a folder of texts, .*\nhint: pass one file, like 'texts/a.txt'"),
        ):
            with self.subTest(data=data), self.assertRaisesRegex(compress.UsageError, message):
                compress.evaluate("llama", data)
        with self.assertRaisesRegex(compress.UsageError, "calibration: 'wikitext' is not a file"):
            compress.quantize("llama", "out/x", method="gptq", calibration="wikitext")


class Reports(InWorkspace):
    def setUp(self) -> None:
        super().setUp()
        self.report = compress.quantize_dynamic("minilm", "out/int8")

    def test_html_is_a_frame_that_contains_the_page(self) -> None:
        frame = self.report._repr_html_()
        self.assertTrue(frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;'), frame[:80])
        self.assertEqual(frame.count("<"), 2)
        self.assertIn("<title>", self.report.to_html())

    def test_values_have_the_types_of_the_fields(self) -> None:
        self.assertIsInstance(self.report.size.after.bytes, int)
        self.assertIsInstance(self.report.layers[0], compress.sections.Layer)
        self.assertIsNone(self.report.accuracy)
        self.assertRegex(repr(self.report), r"<Report: quantize-dynamic: [\d.]+ kB -> [\d.]+ kB, [\d.]+ x smaller>")

    def test_warnings_of_a_run_are_warnings_of_python(self) -> None:
        goal: Any = {"min_cosine": 0.9999999, "max_trials": 2}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = compress.quantize_static("minilm", "out/static", calibration=["hat sat wet", "cat"], accuracy_goal=goal)
        messages = [str(each.message) for each in caught if "goal" in str(each.message)]
        self.assertIn(f"warning: {messages[0]}", report.notes)
        self.assertEqual({each.filename for each in caught}, {__file__})

    def test_keys_of_newer_versions_are_preserved(self) -> None:
        newer = {**self.report.to_dict(), "new": 1}
        self.assertEqual(compress.Report.from_dict(newer).to_dict(), newer)
        with self.assertRaisesRegex(compress.CompressError, "not a report"):
            compress.Report.from_dict({"schema": 1})

    @unittest.skipUnless(importlib.util.find_spec("pandas"), "pandas is not installed")
    def test_a_table_has_a_row_for_each_weight(self) -> None:
        table = self.report.to_pandas()
        self.assertEqual(len(table), len(self.report.layers))
        self.assertEqual(table["bytes_after"].sum(), sum(layer.bytes_after for layer in self.report.layers))


class Errors(InWorkspace):
    def test_the_message_and_the_hint_are_those_of_the_program(self) -> None:
        with self.assertRaises(compress.CompressError) as raised:
            compress.cast("nothing", "out/x")
        self.assertIn("nothing", raised.exception.message)
        self.assertIn("hint: check the name", str(raised.exception))
        self.assertEqual(raised.exception.exit_code, 1)

    def test_invalid_options_are_usage_errors(self) -> None:
        with self.assertRaisesRegex(compress.UsageError, "`cast.to`|f8") as raised:
            compress.cast("minilm", "out/x", to="f8")  # type: ignore[arg-type]
        self.assertEqual(raised.exception.exit_code, 2)
        with self.assertRaisesRegex(ValueError, "'tpu' for '--device"):
            compress.run(Recipe(model="minilm"), "out/x", device="tpu")
        with self.assertRaisesRegex(compress.UsageError, "no output folder\nhint: pass `output`"):
            compress.run(Recipe(model="minilm"))
        with self.assertRaisesRegex(compress.UsageError, "unexpected argument '--fast'"):
            compress.command("inspect", "minilm", "--fast")

    def test_a_command_may_separate_its_arguments(self) -> None:
        report = compress.command("chain", "llama", "-o", "out/x", "--", "prune-unstructured", "--amount", "0.3", "--", "cast")
        self.assertEqual([step["name"] for step in report["passes"]], ["prune-unstructured", "cast"])

    def test_an_existing_output_is_not_replaced(self) -> None:
        compress.cast("minilm", "out/x")
        with self.assertRaisesRegex(compress.CompressError, "exists\nhint: .* `force=True` to replace it"):
            compress.cast("minilm", "out/x")
        compress.cast("minilm", "out/x", force=True)

    def test_messages_do_not_name_lines_of_a_recipe_in_memory(self) -> None:
        with self.assertRaises(compress.UsageError) as raised:
            compress.quantize("llama", "out/x", scheme="int4")  # type: ignore[arg-type]
        self.assertRegex(str(raised.exception), r"^unknown scheme `int4`, did you mean `W4A16`\?")
        self.assertNotRegex(str(raised.exception), r"line \d|-->|compress init|\^")
        with self.assertRaisesRegex(compress.UsageError, "^unknown key `pases`, did you mean `passes`"):
            compress.run({"model": "llama", "pases": []}, "out/x")
        with self.assertRaisesRegex(compress.UsageError, "^expected a list, like \\[a, b\\] for `passes`$"):
            compress.run({"model": "llama", "passes": "cast"}, "out/x")

    def test_missing_samples_name_the_parameter(self) -> None:
        with self.assertRaisesRegex(compress.UsageError, "needs samples to run the model on: pass `calibration`"):
            compress.quantize("llama", "out/x", method="gptq")

    def test_modules_and_commands_are_not_confused(self) -> None:
        with self.assertRaisesRegex(TypeError, r"`compress.report` is a module: .*Report.open"):
            compress.report("out/x")  # type: ignore[operator]

    def test_budgets_are_errors(self) -> None:
        compress.cast("minilm", "out/x")
        with self.assertRaises(compress.CompressError):
            compress.command("check", "out/x", "--max-bytes", "1B")

    def test_text_instead_of_json_is_reported(self) -> None:
        for arguments in (["help"], ["--version"], ["cast", "--help"]):
            with self.subTest(arguments=arguments), self.assertRaisesRegex(compress.CompressError, "printed no JSON, but .*\nhint: run it by `subprocess` for help"):
                compress.command(*arguments)
        with self.assertRaisesRegex(compress.CompressError, "prints text, not data"):
            compress.command("completions", "bash")

    def test_another_program_is_reported(self) -> None:
        for script in ("true", "echo hello"):
            with program(script), self.assertRaisesRegex(compress.CompressError, "/program printed no JSON, but '(hello)?'\nhint: .*COMPRESS_PROGRAM"):
                compress.evaluate("llama", "book.txt")
            with program(script), self.assertRaisesRegex(compress.CompressError, "printed no JSON"):
                compress.cast("llama", "out/x")

    def test_a_missing_program_is_reported(self) -> None:
        with mock.patch.dict(os.environ, COMPRESS_PROGRAM="/nowhere/compress"):
            with self.assertRaisesRegex(compress.ProgramNotFound, "/nowhere/compress.*No such file") as raised:
                compress.command("doctor")
            self.assertIsInstance(raised.exception, FileNotFoundError)

    def test_a_program_that_is_killed_is_reported(self) -> None:
        with program("echo 'last words' >&2; kill -KILL $$"):
            with self.assertRaisesRegex(compress.CompressError, "SIGKILL\nlast words\nhint: .*memory"):
                compress.command("doctor")


class Running(InWorkspace):
    def test_a_job_that_is_not_read_runs_to_its_end(self) -> None:
        """The events are larger than the buffer of a pipe."""
        code = """import json, pathlib, sys
for event in [{"event": "begin", "stage": "Training", "steps": 9000}, *({"event": "progress", "done": step + 1} for step in range(9000)), {"event": "end"}]:
    print(json.dumps(event), file=sys.stderr)
pathlib.Path("ended").touch()
"""
        with program(f"exec {sys.executable} -c '{code}'"), compress.start(Recipe(model="minilm"), "out/x") as job:
            self.assertTrue(wait_until(Path("ended").exists))
            job._events.wait()
            events = list(job)
        self.assertLess(len(events), 2000)
        self.assertEqual([(events[at].done, events[at].finished) for at in (0, -1)], [(0, False), (9000, True)])

    def test_a_job_that_is_not_read_is_cancelled(self) -> None:
        job = slow()
        job.cancel()
        self.assertTrue(wait_until(lambda: job._process.poll() is not None))
        job._events.wait()
        self.assertNothingWritten()

    def test_another_thread_may_read_the_events(self) -> None:
        for leave in (False, True):
            events: list[compress.Progress] = []
            with compress.start(Recipe(model="minilm", passes=["cast"]), f"out/{leave}") as job:
                thread = threading.Thread(target=lambda: events.extend(job))
                thread.start()
                if not leave:
                    self.assertEqual(job.result().passes[0].name, "cast")
            thread.join()
            self.assertNotEqual(job._process.returncode, -signal.SIGKILL)
            self.assertTrue(leave or events[-1].finished)

    def test_progress_is_an_iterator(self) -> None:
        with compress.start(Recipe(model="minilm", passes=["cast"]), "out/x") as job:
            events = list(job)
            self.assertEqual(job.result().passes[0].name, "cast")
        stages = [event.stage for event in events if event.done == 0 and not event.finished]
        self.assertTrue(stages)
        self.assertEqual(len([event for event in events if event.finished]), len(stages))
        self.assertTrue(any(event.unit == "bytes" and event.total for event in events))

    def test_the_callback_receives_the_events(self) -> None:
        events: list[compress.Progress] = []
        compress.cast("minilm", "out/x", progress=events.append)
        self.assertTrue(events[-1].finished)

    def test_the_bar_is_cleared(self) -> None:
        for progress, drawn in ((True, True), (None, False), (False, False)):
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                compress.cast("minilm", "out/x", force=True, progress=progress)
            self.assertEqual("\r" in stderr.getvalue(), drawn)
            self.assertEqual(stderr.getvalue().rpartition("\r")[2], "")

    def test_the_bar_is_not_wider_than_the_terminal(self) -> None:
        event = compress.Progress("Training", 138, 700, message="loss 4.1310 rate 6.9e-5")
        for width, length in ((80, 79), (200, 104)):
            stream = io.StringIO()
            with mock.patch("os.get_terminal_size", return_value=os.terminal_size((width, 24))), mock.patch.object(stream, "fileno", return_value=2):
                Bar(stream)(event)
            self.assertEqual(len(stream.getvalue().strip("\r")), length)

    def test_a_run_needs_no_stream_for_errors(self) -> None:
        for progress in (None, True):
            with mock.patch("sys.stderr", None):
                compress.cast("minilm", "out/x", force=True, progress=progress)

    def test_a_cancelled_job_raises(self) -> None:
        with slow() as job:
            threading.Timer(0.2, job.cancel).start()
            with self.assertRaisesRegex(compress.Cancelled, "interrupted"):
                job.result()
        self.assertNothingWritten()

    def test_a_job_is_cancelled_if_python_ignores_ctrl_c(self) -> None:
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        with program("exec sleep 3"), compress.start(Recipe(model="minilm"), "out/x") as job:
            job.cancel()
            with self.assertRaisesRegex(compress.Cancelled, "nothing was written"):
                job.result()

    def test_leaving_the_block_stops_the_program(self) -> None:
        with slow() as job:
            next(iter(job))
            process = job._process
        self.assertIsNotNone(process.returncode)
        self.assertNothingWritten()

    def test_ctrl_c_stops_the_program_and_removes_all_files(self) -> None:
        """Sends the signal to the process group, as a terminal does."""
        # Programs that a shell starts in the background ignore the signal, as a gate that runs tests may do.
        handle = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        for wait in ("for event in job: print(event.stage, flush=True)", "print(next(iter(job)), flush=True); job.result()"):
            python = self.start_python(f"{handle}from test_runs import slow\nwith slow() as job:\n    {wait}\n")
            os.killpg(python.pid, signal.SIGINT)
            _, stderr = python.communicate(timeout=60)
            self.assertIn("KeyboardInterrupt", stderr)
            # The note of the exception: before the first step nothing is saved.
            self.assertRegex(stderr, "\ninterrupted(; nothing was written|; finished work is saved| after step)")
            self.assertNothingWritten()
            shutil.rmtree("out", ignore_errors=True)

    def test_the_program_stops_when_python_is_terminated(self) -> None:
        for ended in (signal.SIGTERM, signal.SIGKILL):
            with program("trap 'touch stopped; exit' TERM; touch started; while :; do sleep 0.05; done"):
                python = self.start_python("import compress\njob = compress.start({'model': 'minilm'}, 'out/x')\nprint(job, flush=True)\njob.result()\n")
            self.assertTrue(wait_until(Path("started").exists))
            python.send_signal(ended)
            python.communicate(timeout=60)
            self.assertTrue(wait_until(Path("stopped").exists))
            os.remove("started")
            os.remove("stopped")

    def start_python(self, code: str) -> subprocess.Popen[str]:
        """Runs code in another Python, with a process group of its own, and waits for its first line."""
        environment = {**os.environ, "TMPDIR": str(self.workspace.temporary)}
        code = f"import sys\nsys.path[:0] = {sys.path[:2]!r}\n{code}"
        python = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0, env=environment)
        assert python.stdout
        python.stdout.readline()
        return python

    def assertNothingWritten(self) -> None:
        self.assertFalse(Path("out/slow").exists())
        self.assertEqual(self.workspace.left(), [])


@contextlib.contextmanager
def program(script: str) -> Iterator[None]:
    """Replaces the program by a shell script."""
    path = Path("program")
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with mock.patch.dict(os.environ, COMPRESS_PROGRAM=str(path.absolute())):
        yield


def wait_until(condition: Callable[[], object]) -> bool:
    """Whether a condition becomes true within ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def slow() -> compress.Job:
    """A training that takes minutes, with samples in memory."""
    step = recipe.Finetune(max_steps=1_000_000, batch_size=4)
    return compress.start(Recipe(model="llama", passes=[step], data={"train": ["the cat sat on a mat"] * 64}), "out/slow", cache=False)


if __name__ == "__main__":
    unittest.main()
