"""A stand-in for torchvision in a server of text: what is imported of it for images is there, and cannot be used.

vLLM and transformers import torchvision for every vision-language family, also where the model computes text alone. Its build
has to fit that of torch, and there is none for every torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "torchvision"


def stand_in_for_torchvision() -> None:
    """Lets this process import torchvision and anything in it, unless it is installed.

    transformers, which looks once for a module of the name, is told before that there is none: it also reads its version.
    """
    if find_spec(NAME) is None:
        from transformers.utils import is_torchvision_available

        is_torchvision_available()
        sys.meta_path.append(_Finder())


class _Finder:
    """Makes the modules."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by each import (`importlib.abc.MetaPathFinder`)."""
        if name.partition(".")[0] != NAME:
            return None
        loader: Any = cls
        return ModuleSpec(name, loader, is_package=True)

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> ModuleType:
        """Called by each import (`importlib.abc.Loader`)."""
        return _Module(spec.name)

    @classmethod
    def exec_module(cls, module: ModuleType) -> None:
        """Called by each import; there is nothing to run."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _Missing(f"{self.__name__}.{name}")


class _Missing:
    """Whatever a module has. It may be named, and not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"{self._name} is needed for images, and torchvision is not installed", name=NAME)
