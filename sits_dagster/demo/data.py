"""Partitioned Parquet files of rendered text lines, with the truth beside them."""

from __future__ import annotations

import functools
import io
import itertools
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from PIL import ImageFont

DEFAULT_PARTITIONS = ("2026-01-01", "2026-01-02", "2026-01-03")

ROWS_PER_PARTITION_MIN = 40
ROWS_PER_PARTITION_MAX = 1 << 20
ROWS_PER_GROUP = 32
FILE_SHARES = (6, 3, 7, 1, 3)
"""How the rows of a partition divide over its files: uneven, as files in the wild are."""

CHARACTERS_MIN = 3
CHARACTERS_MAX = 90
HEIGHT_PIXELS = 48
SPECKLE_SHARE = 0.05
FONT_PIXELS = (30, 31, 32, 33, 34)

IMAGE_SCHEMA = pa.schema({"line_id": pa.int64(), "image": pa.binary()})
TRUTH_SCHEMA = pa.schema({"line_id": pa.int64(), "text": pa.string()})

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9'()/-]{0,18}[.,:;)]?")


def generate(
    folder: Path,
    *,
    seed: int = 2026,
    rows_per_partition: int = 480,
    partitions: Sequence[str] = DEFAULT_PARTITIONS,
) -> None:
    """The dataset of the demo lies in `folder`: images of text lines, and the text of each good one.

    Each partition has five files `lines/{partition}/part-N.parquet` of uneven length in row groups of at
    most 32 rows, with the columns `line_id` (int64, unique over all partitions) and `image` (one PNG,
    gray, 48 pixels high, about 50 to 1,500 wide). Four of its rows are broken: two images are null, two
    are bytes that are no image. `truth/{partition}.parquet` holds `line_id` and `text` of the others.

    A partition appears whole or not at all, and one that is there is kept as it is, whatever the seed.
    A partition's bytes depend on its name, the seed, the rows, and the versions of Python (whose reference
    manual is the text), Pillow and pyarrow; not on the other partitions.

    Args:
        folder: Where the dataset goes; created when missing.
        seed: Chooses the texts, their look and the broken rows.
        rows_per_partition: 40 to 1,048,576.
        partitions: Names fit for a folder.

    Raises:
        ValueError: `rows_per_partition` is out of its range.
    """
    if not ROWS_PER_PARTITION_MIN <= rows_per_partition <= ROWS_PER_PARTITION_MAX:
        message = f"rows_per_partition is {rows_per_partition}, not {ROWS_PER_PARTITION_MIN} to 1,048,576."
        raise ValueError(message)
    for partition in partitions:
        if not (folder / "lines" / partition).exists():
            _generate_partition(folder, partition, seed=seed, rows=rows_per_partition)


def _generate_partition(folder: Path, partition: str, *, seed: int, rows: int) -> None:
    key = zlib.crc32(partition.encode())
    images, truth = _render_rows(np.random.default_rng([seed, key]), rows=rows, line_id=key << 20)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".generate-") as name:
        scratch = Path(name)
        (scratch / "lines").mkdir()
        for number, part in enumerate(_split(images)):
            path = scratch / "lines" / f"part-{number}.parquet"
            # PNG is compressed already.
            pq.write_table(part, path, row_group_size=ROWS_PER_GROUP, compression="none")
        pq.write_table(truth, scratch / "truth.parquet")
        _publish(scratch, folder, partition)


def _publish(scratch: Path, folder: Path, partition: str) -> None:
    truth, lines = folder / "truth" / f"{partition}.parquet", folder / "lines" / partition
    for target in (truth, lines):
        target.parent.mkdir(parents=True, exist_ok=True)
    # The lines come last: where they are, the partition is complete.
    (scratch / "truth.parquet").replace(truth)
    try:
        (scratch / "lines").rename(lines)
    except OSError:
        # Another process may have written the same partition meanwhile.
        if not lines.exists():
            raise


def _split(images: pa.Table) -> Iterator[pa.Table]:
    ends = [images.num_rows * share // sum(FILE_SHARES) for share in itertools.accumulate(FILE_SHARES)]
    for start, end in itertools.pairwise([0, *ends]):
        yield images.slice(start, end - start)


def _render_rows(rng: np.random.Generator, *, rows: int, line_id: int) -> tuple[pa.Table, pa.Table]:
    texts = [_draw_text(rng) for _ in range(rows)]
    images: list[bytes | None] = [_render(text, rng) for text in texts]
    null_first, null_second, prose, cut = (int(row) for row in rng.choice(rows, size=4, replace=False))
    images[null_first] = images[null_second] = None
    images[prose] = texts[prose].encode()
    images[cut] = (images[cut] or b"")[:40]
    broken = {null_first, null_second, prose, cut}
    ids = range(line_id, line_id + rows)
    good = [row for row in range(rows) if row not in broken]
    truth = {"line_id": [ids[row] for row in good], "text": [texts[row] for row in good]}
    return (
        pa.table({"line_id": list(ids), "image": images}, schema=IMAGE_SCHEMA),
        pa.table(truth, schema=TRUTH_SCHEMA),
    )


def _draw_text(rng: np.random.Generator) -> str:
    words = _words()
    start = int(rng.integers(len(words) - CHARACTERS_MAX))
    # Log-uniform: as many lines of 3 to 9 characters as of 30 to 90.
    length = int(np.exp(rng.uniform(np.log(CHARACTERS_MIN), np.log(CHARACTERS_MAX + 1))))
    # Whole words, until the line is as long as drawn.
    texts = itertools.accumulate(words[start : start + CHARACTERS_MAX], "{} {}".format)
    return next(text for text in texts if len(text) >= length)


@functools.cache
def _words() -> tuple[str, ...]:
    text = " ".join(topics[name] for name in sorted(topics))
    bare = (word.strip('"*`') for word in text.split())
    return tuple(word for word in bare if _WORD.fullmatch(word))


def _render(text: str, rng: np.random.Generator) -> bytes:
    from PIL import Image, ImageDraw

    font = _font(int(rng.choice(FONT_PIXELS)))
    margin = int(rng.integers(4, 12))
    paper, ink = int(rng.integers(225, 250)), int(rng.integers(0, 70))
    width = round(font.getlength(text)) + 2 * margin
    image = Image.new("L", (width, HEIGHT_PIXELS), paper)
    ImageDraw.Draw(image).text((margin, HEIGHT_PIXELS / 2), text, fill=ink, font=font, anchor="lm")
    buffer = io.BytesIO()
    Image.fromarray(_speckle(np.asarray(image), rng)).save(buffer, "PNG")
    return buffer.getvalue()


def _speckle(plane: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # Few pixels, as from dust on a scanner: noise on all of them would make the PNG decoder the bottleneck.
    hit = rng.random(plane.shape, dtype=np.float32) < SPECKLE_SHARE
    grain = rng.integers(-12, 13, size=plane.shape, dtype=np.int16)
    return (plane + grain * hit).clip(0, 255).astype(np.uint8)


@functools.cache
def _font(size_pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size=size_pixels)
