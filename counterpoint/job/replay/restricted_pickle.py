"""Reads an untrusted pickle: containers, numbers, strings, bytes and numpy arrays, and nothing else.

A pickle is a program: it names functions and calls them. This reader never looks a name up. The few names that such data needs
map to functions and types of our own, which check their arguments; any other name raises an error. Not even numpy's own functions
are called, since `__setstate__` of an array or a dtype does not check its input. Arrays and dtypes become the stand-ins below,
which are made of plain bytes after a check.
"""

from __future__ import annotations

import copyreg
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from counterpoint.transport.arrays import AnyArray

_DTYPES = frozenset(("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"))
_BYTE_ORDERS = frozenset("<>|=")

_MEMORY_PER_BYTE = 32
"""Memory allowed for each byte of the file. Small integers in a list take 4 times their bytes, small dictionaries 10 times."""
_MEMORY_TO_SPARE = 256 * 2**20


class PickleError(ValueError):
    """A file that is not a pickle, or one with more than plain data; the message names the file and what was refused."""


def load(path: Path) -> Any:
    """Reads the file. A numpy array becomes a `PickledArray`, a numpy number a number, any dictionary a plain one. Blocks.

    During the reading, the whole process can allocate at most a multiple of the file's size, so a pickle that claims to be huge
    costs nothing. One attack is not stopped: a key of millions of nested tuples overflows Python's own stack, which ends the
    process. Raises `PickleError`, `OSError`.
    """
    # The unpickler returns a cached extension without looking up its name.
    copyreg.clear_extension_cache()
    with path.open("rb") as file, _bounded_memory(_MEMORY_TO_SPARE + _MEMORY_PER_BYTE * path.stat().st_size):
        try:
            return _Unpickler(file).load()
        except PickleError as error:
            raise PickleError(f"{path}: {error}") from None
        except MemoryError:
            raise PickleError(
                f"{path}: a pickle of {path.stat().st_size} bytes asks for more memory than its data can take"
            ) from None
        except Exception as error:  # a damaged pickle may raise anything
            raise PickleError(
                f"{path}: not a pickle, or a damaged one: {type(error).__name__}: {str(error)[:200]}"
            ) from error


def describe_value(value: object) -> str:
    """Describes an untrusted value for an error message, in at most a hundred characters.

    Containers are not opened: one that contains itself, or one part many times, has no end.
    """
    match value:
        case None | bool() | float():
            return repr(value)
        case int() if value.bit_length() < 256:
            return repr(value)
        case str() | bytes():
            return repr(value[:80])
        case int():
            return "a huge int"
        case _:
            return f"a {type(value).__name__}"


class PickledArray:
    """A numpy array in the making; `value` is the array, read-only or not."""

    __slots__ = ("value",)

    def __init__(self, value: AnyArray | None = None) -> None:
        """Holds `value`, or an empty array until `__setstate__`."""
        self.value = np.empty(0) if value is None else value

    def __setstate__(self, state: object) -> None:
        """Makes the array from its checked state. Raises `PickleError`."""
        match state:
            case (_, tuple(shape), _Dtype() as dtype, fortran, bytes() | bytearray() as data):
                self.value = _array(data, dtype, shape, "F" if fortran else "C")
            case _:
                raise PickleError("refused a numpy array of something other than numbers, or whose state is damaged")


class _Dtype:
    """A numpy dtype of plain numbers."""

    __slots__ = ("_order", "name")

    def __init__(self, name: object, *_: object) -> None:
        if not isinstance(name, str) or name not in _DTYPES:
            raise PickleError(f"refused numpy.dtype({describe_value(name)}): not a number's")
        self.name = name
        self._order = "="

    def __setstate__(self, state: object) -> None:
        match state:
            case (3, str(order), None, None, None, -1, -1, 0) if order in _BYTE_ORDERS:
                self._order = order
            case _:
                raise PickleError("refused a numpy.dtype that is not a plain number's")

    @property
    def value(self) -> np.dtype[Any]:
        return np.dtype(self.name).newbyteorder(self._order)  # type: ignore[arg-type]


class _Admitted:
    """A function that the pickle may call but not change."""

    __slots__ = ("_function", "_name")

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self._name = name
        self._function = function

    def __call__(self, *arguments: object) -> object:
        try:
            return self._function(*arguments)
        except (TypeError, OverflowError) as error:
            raise PickleError(f"refused a call of {self._name}: {error}") from error

    def __setstate__(self, state: object) -> NoReturn:
        raise PickleError(f"refused to change {self._name}")


def _array(data: bytes | bytearray, dtype: _Dtype, shape: tuple[object, ...], order: str) -> AnyArray:
    sizes = [size for size in shape if isinstance(size, int) and size >= 0]
    if len(sizes) < len(shape) or len(sizes) > 8 or prod(sizes) * dtype.value.itemsize != len(data):
        sizes_shown = ", ".join(map(describe_value, shape[:8]))
        raise PickleError(f"refused a numpy array of shape ({sizes_shown}) and {dtype.name} in {len(data)} bytes")
    return np.frombuffer(data, dtype=dtype.value).reshape(sizes, order="F" if order == "F" else "C")


def _reconstruct(*_: object) -> PickledArray:
    return PickledArray()


def _frombuffer(data: object, dtype: object, shape: object, order: object, axes: object = None) -> PickledArray:
    match (data, dtype, shape, order, axes):
        case (bytes() | bytearray() as raw, _Dtype() as known, tuple(sizes), "C" | "F" as plain, None):
            return PickledArray(_array(raw, known, sizes, plain))
        case _:
            raise PickleError("refused a numpy array of something other than numbers, or in an unusual order of axes")


def _scalar(dtype: object, data: object) -> Any:
    match (dtype, data):
        case (_Dtype() as known, bytes() as raw):
            return _array(raw, known, (), "C").item()
        case _:
            raise PickleError("refused a numpy scalar that is not a number")


def _ndarray(*_: object) -> NoReturn:
    raise PickleError("refused a call of numpy.ndarray")


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Replaces `_codecs.encode`, with which older protocols write bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise PickleError(f"refused _codecs.encode to {describe_value(encoding)}")
    return text.encode("latin1")


def _bytes(data: object = b"") -> bytes:
    if not isinstance(data, bytes):  # a number would ask for that many
        raise PickleError(f"refused bytes of {type(data).__name__}")
    return data


def _bytearray(data: object = b"") -> bytearray:
    return bytearray(_bytes(data))


def _reconstructor(kind: object, base: object, state: object) -> dict[Any, Any]:
    """Replaces `copyreg._reconstructor`, with which older protocols write a subclass of dict."""
    if kind is not dict or base is not dict or not isinstance(state, dict):
        raise PickleError("refused copyreg._reconstructor of something other than a dictionary")
    return dict(state)


def _defaultdict(_factory: object = None, items: object = ()) -> dict[Any, Any]:
    if not isinstance(items, dict | tuple):
        raise PickleError("refused collections.defaultdict of something other than a dictionary")
    return dict(items)


_STAND_INS: dict[str, Callable[..., object]] = {
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "collections.defaultdict": _defaultdict,
    "copyreg._reconstructor": _reconstructor,
    "_codecs.encode": _encode,
    "numpy.ndarray": _ndarray,
    "numpy.dtype": _Dtype,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _frombuffer,
}
_TABLE: dict[str, object] = {
    **{name: _Admitted(name, function) for name, function in _STAND_INS.items()},
    # A type of Python's own cannot be changed, and has no `__setstate__`.
    **{f"builtins.{kind.__name__}": kind for kind in (dict, list, tuple, set, frozenset, int, float)},
    "builtins.long": int,
    "collections.OrderedDict": dict,
    "verifiers.types.RolloutOutput": dict,
}
_OLDER_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
"""The modules' names before Python 3 and numpy 2."""


class _Unpickler(pickle.Unpickler):
    """Finds names in the table only. Its base class refuses persistent ids and out-of-band buffers."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        full_name = f"{_OLDER_MODULES.get(module_name, module_name)}.{global_name}"
        if full_name not in _TABLE:
            raise PickleError(
                f"refused {full_name[:200]}: only containers, numbers, strings, bytes and numpy arrays are read"
            )
        return _TABLE[full_name]


@contextmanager
def _bounded_memory(more: int) -> Iterator[None]:
    """Limits the process to `more` bytes of memory beyond its present size during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (soft, hard, mapped + more) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
