"""A stranger's pickle: plain data is read in every protocol, and nothing else is looked up, called or allocated."""

from __future__ import annotations

import copyreg
import os
import pickle
import resource
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.job.replay.restricted_pickle import PickledArray, PickleError, load

PLAIN: list[Any] = [
    None, True, 0, -1, 2**70, 1.5, "ü", b"", b"\x80a", bytearray(b"ab"), [1, [2]], (1,), {"a": 1}, {1, 2}, frozenset([3]),
    OrderedDict(a=1), defaultdict(list, a=[1]), defaultdict(int),
]  # fmt: skip
ARRAYS = [
    np.array([True, False]),
    np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    np.arange(3, dtype=">u2"),
    np.array(2.5, dtype=np.float32),
    np.empty((0, 3), dtype=np.float16),
]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where a pickle may be put. Whatever it tries, the process keeps its limits, and no file beside it appears."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    yield tmp_path / "some.pkl"
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.pkl"]


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(PickleError) as refused:
        load(path)
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read(path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps([*PLAIN, np.float32(1.5), np.int64(-3), np.bool_(True), *ARRAYS], protocol))
    found = load(path)
    assert found[: len(PLAIN) + 3] == [*PLAIN, 1.5, -3, True]
    assert type(found[PLAIN.index(OrderedDict(a=1))]) is dict
    for array, read in zip(ARRAYS, found[len(PLAIN) + 3 :], strict=True):
        assert isinstance(read, PickledArray)
        assert read.value.dtype == array.dtype
        np.testing.assert_array_equal(read.value, array)


def test_names_from_before_numpy_2_are_known(path: Path) -> None:
    pickled = pickle.dumps(ARRAYS[1], protocol=2)
    assert b"numpy._core.multiarray" in pickled
    path.write_bytes(pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    np.testing.assert_array_equal(load(path).value, ARRAYS[1])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_function_is_refused_by_name_and_not_called(path: Path, protocol: int) -> None:
    pwned = path.with_name("pwned")
    for call, name in (
        (Call(os.system, f"touch {pwned}"), "posix.system"),
        (Call(eval, f"open({str(pwned)!r}, 'w')"), "eval"),
        (Call(exec, "import os"), "exec"),
        (Call(getattr, {}, "clear"), "getattr"),
        (Call(np.load, str(pwned)), "load"),
        (Call(Path, "/"), "pathlib"),
        (Call(copyreg.add_extension, "os", "system", 1), "copyreg.add_extension"),
    ):
        assert name in refusal(path, pickle.dumps([call], protocol)).split("refused", 1)[1]


def test_a_module_is_not_even_imported(path: Path) -> None:
    assert "refused antigravity.anything" in refusal(path, b"cantigravity\nanything\n.")
    assert "antigravity" not in sys.modules
    assert "refused os.system" in refusal(path, b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
    assert "refused builtins.dict.fromkeys" in refusal(path, b"\x80\x04\x8c\x08builtins\x8c\x0ddict.fromkeys\x93.")
    assert "refused os.system" in refusal(path, b"(S'true'\nios\nsystem\n.")
    assert "refused os.system" in refusal(path, b"(cos\nsystem\nS'true'\no.")


class Extension:
    """What the extension registry names in the next test."""


def test_an_extension_is_refused_by_its_name(path: Path) -> None:
    copyreg.add_extension(__name__, "Extension", 240)
    try:
        pickled = pickle.dumps(Extension, 2)
        assert b"Extension" not in pickled
        assert pickle.loads(pickled) is Extension, "and now it is in the cache"  # noqa: S301
        assert f"refused {__name__}.Extension" in refusal(path, pickled)
    finally:
        copyreg.remove_extension(__name__, "Extension", 240)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_of_anything_but_numbers_are_refused(path: Path, protocol: int) -> None:
    harmful = Call(os.system, f"touch {path.with_name('pwned')}")
    for array, said in (
        (np.array([harmful], dtype=object), "refused "),
        (np.array([[1], None], dtype=object), "numpy.dtype('O8')"),
        (np.array(["text"]), "numpy.dtype('U4')"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy.dtype('V4')"),
        (np.zeros(2, dtype="datetime64[s]"), "numpy.dtype('M8')"),
        (np.zeros(2, dtype=complex), "numpy.dtype('c16')"),
    ):
        assert said in refusal(path, pickle.dumps(array, protocol))


DTYPE = b"cnumpy\ndtype\n(S'u1'\ntR"
ARRAY = b"cnumpy._core.multiarray\n_reconstruct\n(tR"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a pickle, or a damaged one: EOFError"),
        (b"garbage", "not a pickle, or a damaged one"),
        (pickle.dumps(PLAIN)[:-20], "not a pickle, or a damaged one"),
        # Bytes, a frame and a memo that claim to be huge.
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"a.", "more memory"),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"a.", "more memory"),
        (b"\x80\x04\x95" + struct.pack("<Q", 2**50) + b".", "more memory"),
        (b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".", "more memory"),
        (b"cbuiltins\nbytes\n(I99999999999\ntR.", "refused bytes of int"),
        (b"cbuiltins\nbytearray\n(I99999999999\ntR.", "refused bytes of int"),
        # Objects from outside the file.
        (b"P1\n.", "persistent"),
        (b"\x80\x02K\x01Q.", "persistent"),
        (b"\x80\x05\x97.", "out-of-band"),
        # Changing what is called, rather than calling it.
        (b"cnumpy\ndtype\n(N}S'_function'\nI1\nstb.", "refused to change numpy.dtype"),
        (b"cbuiltins\ndict\n(N}S'get'\nI1\nstb.", "cannot set 'get' attribute of immutable type 'dict'"),
        (b"cbuiltins\ndict\n}S'get'\nI1\nsb.", "mappingproxy"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        (b"cnumpy\nndarray\n(I4\ntR.", "refused a call of numpy.ndarray"),
        # Lies about an array or a dtype.
        (DTYPE + b"(I3\nS'<'\nNNNI99\nI1\nI63\ntb.", "refused a numpy.dtype that is not a plain number's"),
        (DTYPE + b"(I3\nS'<'\n(" + DTYPE + b"(I4\nttNNI-1\nI-1\nI0\ntb.", "refused a numpy.dtype"),
        (b"cnumpy\ndtype\n(S'O8'\ntR.", "refused numpy.dtype('O8')"),
        (ARRAY + b"(I1\n(I9\nt" + DTYPE + b"I00\nC\x01at" + b"b.", "refused a numpy array of shape"),
        (ARRAY + b"(I1\n(I-1\nt" + DTYPE + b"I00\nC\x01at" + b"b.", "refused a numpy array"),
        (ARRAY + b"(I1\n(I1\nt" + DTYPE + b"I00\n(lt" + b"b.", "refused a numpy array of something other than numbers"),
        (ARRAY + b"N" + b"b.", "refused a numpy array of something other than numbers"),
        (b"c_codecs\nencode\n(Va\nVrot13\ntR.", "refused _codecs.encode to 'rot13'"),
        (b"ccopyreg\n_reconstructor\n(cbuiltins\nlist\ncbuiltins\nlist\n(ltR.", "other than a dictionary"),
        (b"ccollections\ndefaultdict\n(NI1\ntR.", "other than a dictionary"),
    ],
)  # fmt: skip
def test_tricks_and_damage_are_refused(path: Path, data: bytes, said: str) -> None:
    assert said in refusal(path, data)
