"""Where an environment's rows come from (`load.py` loads them): a table `data` in the `args` of an environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from counterpoint.transport.config import Config


def parse_slice(text: str) -> slice:
    """Returns the slice that is written as in Python, such as `1000:`, `:500` or `::10`. Raises `ValueError`."""
    parts = text.split(":")
    try:
        bounds = [int(part) if part.strip() else None for part in parts]
        if not 2 <= len(parts) <= 3 or (len(bounds) == 3 and bounds[2] is not None and bounds[2] < 1):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is not a slice; expected START:STOP or START:STOP:STEP, such as 1000: or ::10"
        ) from None
    return slice(*bounds)


def _is_slice(text: str) -> str:
    parse_slice(text)
    return text


class DataConfig(Config):
    """One source of rows (`path`, `dataset` or `rows`), and what is used of it."""

    path: str | None = None
    """A file, or a pattern such as `data/*.jsonl` whose files are read in the order of their names. `.jsonl` and `.json` hold
    one JSON object a line, or one array of objects; `.parquet` is Parquet."""

    dataset: str | None = None
    """Id of a dataset of the hub, such as `openai/gsm8k`, or a directory that `datasets` saved or can load. The environment
    variable HF_HUB_OFFLINE=1 keeps it from asking the hub. A dataset's own code is never run."""

    rows: list[dict[str, Any]] | None = None
    """The rows, written in the file itself."""

    subset: str | None = None
    """The configuration of `dataset`, such as `main`."""

    revision: str | None = None
    """The commit or tag of `dataset` on the hub. Unset: the newest, which may change before a run is resumed; the
    resume is then refused."""

    split: str | None = None
    """The split of `dataset`, such as `train` or `train[:10%]`. Unset: `train`."""

    select: Annotated[str, AfterValidator(_is_slice)] = ":"
    """The rows that are used, as a slice: `:1000` the first thousand, `1000:` all others, `::10` every tenth."""

    columns: dict[str, str] = {}
    """Names in a row, and the column that each is taken from: `{ prompt = "question" }`. Only these are read. Empty: every
    column, by its own name."""

    weight: str | None = None
    """A column of numbers, 0 or more: how often a row is drawn, relative to the others. Unset: all alike."""

    max_row_bytes: int = Field(default=16 * 2**20, ge=1)
    """A larger row is an error."""

    @model_validator(mode="after")
    def _has_one_source(self) -> DataConfig:
        given = [name for name in ("path", "dataset", "rows") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'no source'}: expected exactly one of path, dataset and rows")
        if self.dataset is None:
            for name in ("subset", "revision", "split"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to a dataset; for {given[0]}, use select")
        return self

    @property
    def used_columns(self) -> list[str]:
        """The columns that are read; empty: all."""
        named = [*self.columns.values(), self.weight] if self.columns and self.weight else self.columns.values()
        return list(dict.fromkeys(named))
