"""The trained weights of a run's versions, in files below the directory to work in: memory holds those of the model alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from counterpoint.inference.digest import layer_of
from counterpoint.trainer.again.learner import RunAgain


class VersionFiles:
    """Keeps versions of the weights of a run that is trained again, and puts them back."""

    def __init__(self, again: RunAgain, directory: Path, versions: int) -> None:
        """Begins without any version; `versions` is how many will be kept."""
        self._parameters = again.run.torch.optimizer.parameters
        self._directory = directory
        self.versions: list[int] = []
        nbytes = versions * sum(each.numel() * each.element_size() for each in self._parameters.values())
        free = shutil.disk_usage(directory).free
        self.lacking = ""
        """Why none is kept; empty if there is room."""
        if nbytes > free:
            self.lacking = (
                f"the weights of {versions} versions take {nbytes / 1e9:.3g} GB below {directory}, which has {free / 1e9:.3g} GB "
                "free; set TMPDIR to a directory with more"
            )

    @property
    def layers(self) -> list[str]:
        """The numbers of the layers; `""` for the weights outside layers."""
        return list(dict.fromkeys(layer_of(name) for name in self._parameters))

    def keep(self, version: int) -> None:
        """Writes the weights that the model has now as this version, if there is room for all. Raises `OSError`."""
        if not self.lacking:
            copies = {name: each.detach().to("cpu", copy=True) for name, each in self._parameters.items()}
            save_file(copies, self._file(version))
            self.versions.append(version)

    @torch.no_grad()
    def put(self, version: int, layer: str | None = None) -> None:
        """Puts the weights of a kept version into the model, or those of one layer."""
        with safe_open(self._file(version), "pt") as file:
            for name, parameter in self._parameters.items():
                if layer is None or layer_of(name) == layer:
                    parameter.copy_(file.get_tensor(name))

    @torch.no_grad()
    def put_none(self) -> None:
        """Sets all weights to zero, which of an adapter leaves the base model."""
        for parameter in self._parameters.values():
            parameter.zero_()

    def _file(self, version: int) -> Path:
        return self._directory / f"version_{version}.safetensors"
