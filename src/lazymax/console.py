"""What the commands share: usage errors, parsing of option values, progress on a terminal."""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from .options import ALIGNMENTS
from .problem import DTYPES, parse_dtype

T = TypeVar("T")


class UsageError(Exception):
    """A mistake of the caller: one line on stderr and exit code 2."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and leave."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Around the part of a command that reads what the user asked for: its ValueError, TypeError and
    NotImplementedError are usage errors. Anything later keeps its traceback."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(str(error)) from error


def parse_shape(text: str) -> tuple[int, ...]:
    """ "B,Hq,Hkv,Sq,Sk,D[,Dv]" -> sizes. Raises ValueError."""
    parts = text.split(",")
    if len(parts) not in (6, 7) or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"--shape: got {text!r}, expected 6 or 7 sizes B,Hq,Hkv,Sq,Sk,D[,Dv], such as 1,32,8,512,512,128"
        )
    return tuple(map(int, parts))


def parse_band(text: str | None) -> tuple[int | None, int | None] | None:
    """ "L,R" of --window -> (left, right); "none" and -1 are open. Raises ValueError."""
    if text is None:
        return None
    sides = [part.strip() for part in text.split(",")]
    if len(sides) != 2 or not all(side == "none" or side.removeprefix("-").isdecimal() for side in sides):
        raise ValueError(f"--window: got {text!r}, expected LEFT,RIGHT key counts, none or -1 for open, such as 511,0")
    left, right = (None if side == "none" else int(side) for side in sides)
    return left, right


def parse_dtypes(text: str) -> tuple[torch.dtype, ...]:
    """Comma list of the dtypes that lazymax takes. Raises ValueError."""
    found = tuple(parse_dtype(part.strip()) for part in text.split(","))
    for dtype in found:
        if dtype not in DTYPES.values():
            raise ValueError(f"--dtype: got {dtype} in {text!r}, expected a comma list of {', '.join(DTYPES)}")
    return found


def parse_device(text: str | None) -> torch.device:
    """A torch device that is there; None: the GPU, or the CPU where there is none. Raises ValueError."""
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"--device: got {text!r}, expected cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {text!r}, expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: got {text!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    return device


def add_rules(parser: argparse.ArgumentParser) -> None:
    """The options that say which keys a query sees, and which kernel is asked for."""
    parser.add_argument(
        "--causal", nargs="?", const="top_left", choices=ALIGNMENTS, help="causal; top_left (PyTorch's) if not said"
    )
    parser.add_argument("--window", metavar="L,R", help="keys before and after, inclusive; none for an open side")
    parser.add_argument("--impl", default="auto", help="a backend's name or reference; default: auto")


def _tqdm() -> Any:
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    return tqdm


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items; with a bar on stderr if that is a terminal and tqdm is installed."""
    tqdm = _tqdm()
    return iter(items if tqdm is None else tqdm(items, desc=what, total=total, leave=False))


def say(text: str = "") -> None:
    """Print a line without running into a progress bar."""
    tqdm = _tqdm()
    if tqdm is None:
        print(text, flush=True)
    else:
        tqdm.write(text)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows])
    return "\n".join(line.rstrip() for line in lines)
