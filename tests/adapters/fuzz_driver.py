"""Works on damaged models one after the other, in a process that may crash at any of them.

Run as a program: the arguments are a file with the cases, one a line as JSON; the number of the first one;
the file to which a line is added when a case begins and when it ends; and the most memory in bytes. The
parent kills it when a case takes too long, and starts it again behind that case.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sits_dagster.adapters.profiling import analyse_model, try_model
from sits_dagster.errors import InvariantError, SitsError
from tests.models.fuzz import mutate

TEXT_CHARACTERS_MAX = 2000


def main() -> None:
    """Take the cases from the given one on."""
    cases, first, notes, memory_bytes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    note = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number, line in enumerate(Path(cases).read_text(encoding="utf-8").splitlines()):
        if number >= first:
            os.write(note, f"{json.dumps([number, 'begins', ''])}\n".encode())
            found = work(*json.loads(line))
            os.write(note, f"{json.dumps([number, *found])}\n".encode())


def work(kind: str, path: str, seed: int) -> tuple[str, str]:
    """Return `"profile"`, `"refusal"`, `"memory"` or `"fault"`, and what there is to say of it."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        model.write_bytes(mutate(Path(path).read_bytes(), seed))
        try:
            _answer(kind, model)
        except InvariantError:
            return "fault", traceback.format_exc()[-TEXT_CHARACTERS_MAX:]
        except SitsError as error:
            return "refusal", str(error)[:TEXT_CHARACTERS_MAX]
        except MemoryError:  # the sandbox makes a ModelError of it
            return "memory", traceback.format_exc()[-TEXT_CHARACTERS_MAX:]
        except BaseException:  # noqa: BLE001 - whatever it is, it is told
            return "fault", traceback.format_exc()[-TEXT_CHARACTERS_MAX:]
    return "profile", ""


def _answer(kind: str, model: Path) -> Any:
    request = {"path": str(model), "shapes": {}, "values": {}}
    if kind == "read":
        return json.dumps(analyse_model(request), allow_nan=False)
    target = model.parent / "optimized" / "model.onnx"
    target.parent.mkdir()
    return json.dumps(try_model({**request, "optimized": str(target)}), allow_nan=False)


if __name__ == "__main__":
    main()
