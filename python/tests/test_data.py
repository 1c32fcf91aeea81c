"""Samples in memory."""

from __future__ import annotations

import array
import importlib.util
import json
import struct
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workspace import InWorkspace

import compress
from compress import Data, Recipe, recipe
from compress._data import write_samples
from compress._run import plain

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
HAS_PANDAS = importlib.util.find_spec("pandas") is not None
MASK = [[1] * 6] * 4
TOKENS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25], [1, 2, 3, 4, 5, 6]]


class Unconvertible:
    """A tensor that does not convert to NumPy."""

    def __array__(self) -> Any:
        raise RuntimeError("requires grad")


def read(path: str) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and data of the tensors of a safetensors file."""
    data = Path(path).read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    assert (8 + size) % 8 == 0
    body = data[8 + size :]
    return {name: (each["dtype"], each["shape"], body[slice(*each["data_offsets"])]) for name, each in header.items()}


def quantize(calibration: Any, **options: Any) -> compress.Report:
    return compress.quantize("llama", "out/gptq", scheme="W4A16", method="gptq", group_size=8, calibration=calibration, force=True, **options)


class Calibration(InWorkspace):
    def test_equal_samples_have_equal_results(self) -> None:
        """Samples as rows of an array, as one mapping each, and as batches, are equivalent."""
        rows = [{"input_ids": row, "attention_mask": MASK[0]} for row in TOKENS]
        batches = [{"input_ids": TOKENS[half], "attention_mask": MASK[half]} for half in (slice(0, 2), slice(2, 4))]
        reports = [
            quantize({"input_ids": TOKENS, "attention_mask": MASK}),
            quantize(rows),
            quantize(compress.unbatch(batches)),
            quantize({name: array.array("i", values) for name, values in row.items()} for row in rows),
        ]
        self.assertEqual(len({report.outputs[0].blake3 for report in reports}), 1)
        other = quantize({"input_ids": TOKENS[:3], "attention_mask": MASK[:3]})
        self.assertNotEqual(other.outputs[0].blake3, reports[0].outputs[0].blake3)

    def test_samples_of_different_lengths_are_separate_files(self) -> None:
        report = quantize({"input_ids": each[: 3 + index], "attention_mask": MASK[0][: 3 + index]} for index, each in enumerate(TOKENS))
        self.assertEqual(report.passes[0].options["method"], "gptq")

    def test_texts_and_files(self) -> None:
        texts = Path("book.txt").read_text().splitlines()
        for equivalent in ((texts, iter(texts)), (Data(text="book.txt"), "book.txt", Path("book.txt"))):
            self.assertEqual(len({quantize(samples).outputs[0].blake3 for samples in equivalent}), 1)

    def test_options_of_data_in_a_mapping(self) -> None:
        document = {"model": "llama", "passes": [{"quantize": {"method": "gptq", "group_size": 8}}], "data": {"calibration": {"text": Path("book.txt"), "samples": 4, "mean": []}}}
        self.assertEqual(compress.run(document, "out/x").recipe["data"]["calibration"]["samples"], 4)

    def test_a_mixture_is_not_an_array(self) -> None:
        mix = [{"text": Path("book.txt"), "weight": 2.0}, Data(text="book.txt")]
        document = {"model": "llama", "passes": [{"quantize": {"method": "gptq", "group_size": 8}}], "data": {"calibration": {"mix": mix, "samples": 4}}}
        self.assertEqual(len(compress.run(document, "out/x").recipe["data"]["calibration"]["mix"]), 2)

    def test_a_mixture_has_any_samples(self) -> None:
        texts = Path("book.txt").read_text().splitlines()
        for equivalent in ((texts, iter(texts)), (Data(text="book.txt"), {"text": "book.txt"}, "book.txt", Path("book.txt"))):
            mixtures: list[Any] = [Data(mix=[part, Data(text="book.txt")]) for part in equivalent]
            self.assertEqual(len({quantize(mix).outputs[0].blake3 for mix in mixtures}), 1)
        self.assertEqual(len({quantize(mix).outputs[0].blake3 for mix in (Data(mix=["book.txt"] * 2), {"mix": ["book.txt"] * 2})}), 1)

    def test_texts_have_labels(self) -> None:
        rows: list[dict[str, Any]] = [{"text": text, "label": index % 2} for index, text in enumerate(["hat", "cat sat", "wet", "red barn", "cat"])]
        Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        expected = compress.evaluate("classifier", Data(text="texts.jsonl", label_column="label"))
        found = compress.evaluate("classifier", ({"label": row["label"], "text": row["text"]} for row in rows))
        self.assertEqual((found.task, found.score), ("classification", expected.score))
        report = compress.finetune("classifier", "out/x", train=rows, max_steps=1)
        self.assertEqual(report.passes[0].options["max_steps"], 1)

    def test_labels_of_samples_of_different_lengths_are_refused(self) -> None:
        rows: list[dict[str, Any]] = [{"input_ids": row[:count], "attention_mask": [1] * count, "token_type_ids": [0] * count, "labels": 1} for count, row in enumerate(TOKENS, 2)]
        with self.assertRaisesRegex(compress.UsageError, "labels of samples with different shapes are not read: pad the arrays"):
            compress.evaluate("classifier", rows)

    def test_evaluation_data(self) -> None:
        report = compress.cast("llama", "out/x", to="bf16", evaluation=Data(text="book.txt", samples=4))
        assert report.accuracy
        self.assertEqual(report.accuracy.metric, "perplexity")
        self.assertGreater(report.accuracy.before["candle"], 1)

    def test_the_program_reports_unsuitable_samples(self) -> None:
        with self.assertRaisesRegex(compress.CompressError, "input_ids"):
            quantize({"pixels": TOKENS, "more": TOKENS})

    @unittest.skipUnless(HAS_NUMPY, "NumPy is not installed")
    def test_arrays_of_numpy(self) -> None:
        import numpy

        arrays = [numpy.array(TOKENS), numpy.array(TOKENS, "int16"), numpy.asfortranarray(TOKENS)]
        same = {quantize({"input_ids": each, "attention_mask": numpy.ones_like(each)}).outputs[0].blake3 for each in [*arrays, numpy.array(TOKENS, "float32")]}
        self.assertEqual(len(same), 1)


class Tensors(InWorkspace):
    def write(self, samples: Any) -> dict[str, tuple[str, list[int], bytes]]:
        return read(write_samples(samples, "calibration", str(self.workspace.folder))["arrays"])

    def test_numbers_have_the_types_of_python(self) -> None:
        found = self.write({"a": [[1, 2], [3, 4]], "b": [0.5, 1], "c": array.array("h", [1, -1])})
        self.assertEqual(found["a"], ("I64", [2, 2], struct.pack("<4q", 1, 2, 3, 4)))
        self.assertEqual(found["b"], ("F32", [2], struct.pack("<2f", 0.5, 1)))
        self.assertEqual(found["c"], ("I16", [2], struct.pack("<2h", 1, -1)))

    def test_rows_become_arrays(self) -> None:
        found = self.write([{"x": [1.5, 2], "label": 3}, {"x": [3.5, 4], "label": 4}])
        self.assertEqual(found["x"], ("F32", [2, 2], struct.pack("<4f", 1.5, 2, 3.5, 4)))
        self.assertEqual(found["label"], ("I64", [2], struct.pack("<2q", 3, 4)))

    def test_samples_with_a_text_are_lines_of_json(self) -> None:
        def lines(samples: Any) -> list[dict[str, Any]]:
            options = write_samples(samples, "train", str(self.workspace.folder))
            return [options, *map(json.loads, Path(options.pop("text")).read_text().splitlines())]

        chat = {"messages": [{"role": "user", "content": "hello"}]}
        self.assertEqual(lines([chat]), [{}, chat])
        self.assertEqual(lines(["a", "b"]), [{}, {"text": "a"}, {"text": "b"}])
        self.assertEqual(lines([{"text": "a", "labels": 1.5}]), [{"label_column": "labels"}, {"text": "a", "labels": 1.5}])
        with self.assertRaisesRegex(TypeError, "train: a sample with a text has a value that is not"):
            lines([{"text": "a", "label": object()}])

    def test_iterators_may_reuse_the_memory_of_an_array(self) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            buffer = array.array("h", [0])
            for buffer[0] in (1, 2):
                yield {"x": buffer}

        self.assertEqual(self.write(rows())["x"], ("I16", [2, 1], struct.pack("<2h", 1, 2)))

    def test_tensors_convert_through_the_array_protocol(self) -> None:
        class Other:
            def __array__(self) -> Any:
                return array.array("d", [1.0, 2.0])

        self.assertEqual(self.write({"x": Other()})["x"], ("F64", [2], struct.pack("<2d", 1, 2)))

    def test_lists_may_have_arrays(self) -> None:
        class Other:
            def __init__(self, *values: int) -> None:
                self.values = values

            def __array__(self) -> Any:
                return array.array("h", self.values)

        for nested in ([Other(1, 2), Other(3, 4)], (Other(1, 2), Other(3, 4))):
            self.assertEqual(self.write({"x": nested})["x"], ("I16", [2, 2], struct.pack("<4h", 1, 2, 3, 4)))
        self.assertEqual(self.write({"x": [[Other(1)], [Other(2)]]})["x"][1], [2, 1, 1])
        with self.assertRaisesRegex(ValueError, r"`x`: a list has arrays of type I16 and shape \(1,\), and of type I16 and shape \(2,\)"):
            self.write({"x": [Other(1), Other(2, 3)]})

    def test_invalid_samples_are_named(self) -> None:
        for samples, kind, text in (
            ([], ValueError, "no samples"),
            ({}, ValueError, "calibration: there are no arrays"),
            ({"x": 5}, ValueError, "calibration: `x` is a number: pass an array"),
            ({"x": Unconvertible()}, TypeError, r"calibration: `x` does not convert to NumPy: requires grad; of PyTorch, pass tensor.detach"),
            ([{"x": Unconvertible()}], TypeError, "calibration: `x` does not convert"),
            (Unconvertible(), TypeError, "calibration: the array does not convert"),
            (7, TypeError, "found int"),
            ([{"x": [1]}, [2]], TypeError, "sample of type list"),
            (["a", {"x": [1]}], TypeError, "sample of type dict"),
            ([{"x": [1]}, {"y": [1]}], ValueError, "sample 1 has the arrays"),
            ([{"x": [1]}, {"x": [1.5]}], TypeError, "I64 and F32"),
            ({"x": [1, 2], "y": [1]}, ValueError, "`x` 2, `y` 1"),
            ({"x": [[1, 2], [1]]}, ValueError, "`x`: the nested lists have different lengths"),
            ({"x": [2**63]}, ValueError, "`x` has a number that I64 cannot store"),
            ({"x": [1.5, 1e300]}, ValueError, "`x` has a number that F32 cannot store"),
            ({"x": ["a"]}, TypeError, "`x` has a value of type str"),
            ({"x": memoryview(bytes(8)).cast("c")}, TypeError, "`x` is an array of type c"),
        ):
            with self.assertRaisesRegex(kind, text):
                self.write(samples)

    def test_invalid_batches_are_named(self) -> None:
        cases: list[tuple[Any, type[Exception], str]] = [
            ({"a": [1], "b": [1, 2]}, ValueError, "`a` 1, `b` 2"),
            (([1], [2]), TypeError, r"expected batches that are mappings of arrays, .*; found tuple \(\[1\], \[2\]\)"),
            ({"a": [1], "b": None}, TypeError, "`b` is no array with one row per sample, but NoneType None"),
            ({}, TypeError, "found dict {}"),
        ]
        for batch, kind, text in cases:
            with self.subTest(batch=batch), self.assertRaisesRegex(kind, text):
                list(compress.unbatch([batch]))

    def test_errors_of_the_program_name_the_samples(self) -> None:
        with self.assertRaisesRegex(compress.CompressError, "^calibration: array `input_ids`.* contains 5.5, but must contain integers of 64 bits$"):
            quantize({"input_ids": [[5.5, 6.0]], "attention_mask": [[1, 1]]})
        with self.assertRaisesRegex(compress.UsageError, "^data: unknown key `text_colum`, did you mean `text_column`\\?\nExpected one of") as raised:
            compress.evaluate("llama", {"text": "book.txt", "text_colum": 7})
        self.assertNotIn("|", str(raised.exception))
        with self.assertRaisesRegex(compress.UsageError, "or a model to compare with by `against`"):
            compress.evaluate("llama", {"input_ids": TOKENS, "attention_mask": MASK})
        with self.assertRaisesRegex(compress.UsageError, "^evaluation: 'nofile' is not a file"):
            compress.auto("llama", "out/x", calibration="book.txt", evaluation="nofile", max_size=0.5)

    @unittest.skipUnless(HAS_NUMPY, "NumPy is not installed")
    def test_dates_of_numpy_are_named(self) -> None:
        import numpy

        with self.assertRaisesRegex(TypeError, r"`x` is an array of type datetime64\[D\]"):
            self.write({"x": numpy.array(["2020-01-01"], "datetime64[D]")})

    def test_failures_leave_no_files(self) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            yield {"input_ids": [1]}
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            quantize(rows())

    def test_numbers_with_a_method_to_iterate(self) -> None:
        class Scalar:
            ndim = 0

            def __iter__(self) -> Iterator[float]:
                raise TypeError("iteration over a 0-d array")

            def item(self) -> float:
                return 0.5

        self.assertEqual(plain({"amount": Scalar()}), {"amount": 0.5})

    @unittest.skipUnless(HAS_NUMPY, "NumPy is not installed")
    def test_types_of_numpy(self) -> None:
        import numpy

        for kind, expected in (("float16", "F16"), ("float32", "F32"), ("float64", "F64"), ("bool", "BOOL"), ("uint8", "U8"), ("int64", "I64"), ("uint32", "U32")):
            self.assertEqual(self.write({"x": numpy.ones((2, 3), kind)})["x"][:2], (expected, [2, 3]))
        rows = self.write({"x": numpy.arange(6, dtype="float32").reshape(2, 3).T})
        self.assertEqual(rows["x"][2], struct.pack("<6f", 0, 3, 1, 4, 2, 5))
        self.assertEqual(self.write({"x": [numpy.int64(1), 2]})["x"], ("I64", [2], struct.pack("<2q", 1, 2)))
        values = numpy.array([1.5, 2.5])
        for mask in (False, [False, False]):
            self.assertEqual(self.write({"x": numpy.ma.masked_array(values, mask)})["x"][2], struct.pack("<2d", 1.5, 2.5))
        for masked in (numpy.ma.masked_array(values, [False, True]), [numpy.ma.masked_array(values, True)]):
            with self.assertRaisesRegex(TypeError, r"`x` is an array with masked values: .*filled"):
                self.write({"x": masked})
        with self.assertRaisesRegex(TypeError, "complex64"):
            self.write({"x": numpy.ones(2, "complex64")})
        with self.assertRaisesRegex(TypeError, ">f4"):
            self.write({"x": numpy.ones(2, ">f4")})
        self.assertEqual(plain({"amount": numpy.float32(0.5), "rank": numpy.int64(3)}), {"amount": 0.5, "rank": 3})


    @unittest.skipUnless(HAS_PANDAS, "pandas is not installed")
    def test_rows_of_pandas_are_selected_by_position(self) -> None:
        import pandas

        labels = pandas.Series([5, 6, 7], index=[2, 0, 4])
        rows = [*compress.unbatch([{"x": [[1], [2], [3]], "labels": labels}])]
        self.assertEqual([row["labels"] for row in rows], [5, 6, 7])


class Serialized(unittest.TestCase):
    def test_fields_with_defaults_are_omitted(self) -> None:
        self.assertEqual(plain(Recipe(model=Path("m"), passes=["cast", recipe.Decompose(rank=1)])), {"model": "m", "passes": ["cast", {"decompose": {"rank": 1}}]})
        step = recipe.Distill(student={"every": 2}, losses={"soft": 1.0})
        self.assertEqual(plain(step), {"distill": {"student": {"every": 2}, "losses": {"soft": 1.0}}})
        with self.assertRaisesRegex(compress.UsageError, "type object"):
            plain({"x": object()})


if __name__ == "__main__":
    unittest.main()
