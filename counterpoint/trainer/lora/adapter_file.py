"""Reads an adapter in PEFT's format into a run's slot (`training.lora.start_from`).

The file is not trusted: its names and shapes are compared with those of the run's own adapter before a tensor is read, and
nothing in it is executed.

Other runs remove their older broadcasts, so a run keeps what it has begun with, `trainer/<run_id>/start/`, until it has
checkpoints: a resume before the first one begins there again. Where it is the reference policy, too, the run keeps it to its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from counterpoint.run.adapter_description import check_description, require_targets
from counterpoint.run.trained import LoraConfig, TrainedRun
from counterpoint.run.trainer_files import start_directory
from counterpoint.trainer.lora.multi_lora import export_adapter
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.transport.files.atomic import STABLE, publish_directory, remove_directory
from counterpoint.transport.files.untrusted import open_regular

_ORIGIN = "start_from.txt"


def keep_start(
    output_dir: Path, run_id: str, config: LoraConfig, base_model: str, layers: Mapping[str, MultiLora], slot: int
) -> None:
    """Keeps the adapter that a run begins with, that of a slot; replaces that of an earlier beginning. Raises `OSError`."""
    directory = start_directory(output_dir, run_id)
    remove_directory(directory)
    with publish_directory(directory) as partial:
        export_adapter(layers, slot, config, base_model, partial)
        (partial / _ORIGIN).write_text(str(config.start_from))


def beginning(output_dir: Path, config: TrainedRun) -> Path | None:
    """Returns the directory of the adapter with which a new run begins; None: with a fresh one.

    It is the run's `training.lora.start_from`, or if that cannot be found, what the run has kept of it.
    """
    if config.training.lora is None or (start_from := config.training.lora.start_from) is None:
        return None
    kept = start_directory(output_dir, config.run_id)
    # `os.path.exists` is False, too, where the directory may not be read, which is no error of the trainer's.
    is_gone = not os.path.exists(start_from / "adapter_config.json") and (kept / STABLE).exists()
    return kept if is_gone and (kept / _ORIGIN).read_text() == str(start_from) else start_from


def start_of(output_dir: Path, run_id: str, step: int) -> Path | None:
    """Returns where the adapter is that a run has begun with; None: the run has it now, as it is at its first step.

    Raises `ValueError` if it has not been kept.
    """
    if not step:
        return None
    directory = start_directory(output_dir, run_id)
    if not (directory / STABLE).exists():
        raise ValueError(
            f"training.reference: {directory} does not have the adapter that the run has begun with, its reference policy; it "
            "is kept if there is a reference from the first step on; set training.reference.model, or train another run"
        )
    return directory


def load_adapter(state: Callable[[], Mapping[str, Tensor]], config: LoraConfig, directory: Path) -> None:
    """Copies the adapter in `directory` into a run's.

    Args:
        state: returns the run's adapter by PEFT's names, in the memory of its parameters.
        config: of the run; its rank and alpha must be those of the file.
        directory: with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ValueError: there is no adapter, or it does not fit the run; the message says what differs.
    """
    try:
        description = check_description(directory, config)
        own = state()
        require_targets(description, own)
        given = _read(directory / "adapter_model.safetensors", own)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
                if not bool(tensor.isfinite().all()):
                    raise ValueError(f"{name} has numbers that are not finite: the adapter is damaged; use another one")
        for name, tensor in state().items():
            if not torch.equal(tensor.cpu(), given[name].to(tensor.dtype)):
                raise ValueError(
                    f"{name} differs from that of a layer which this model fuses with it; fused layers share one lora_A"
                )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"training.lora.start_from = {str(directory)!r}: {error}") from error


def _read(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads the tensors of the file, whose names and shapes must be those of `own`."""
    # By its descriptor: safetensors would wait for a FIFO, and another file may have this name by now.
    with open_regular(path) as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", "pt") as file:
        found = set(file.keys())
        if found != own.keys():
            missing, unknown = sorted(own.keys() - found), sorted(found - own.keys())
            which = [f"it lacks {len(missing)}, such as {missing[0]}"] if missing else []
            which += [f"it has {len(unknown)} more, such as {unknown[0]}"] if unknown else []
            raise ValueError(
                f"its tensors are not those of this run's adapter: {'; '.join(which)}; compare target_modules, and the file's "
                "target_parameters"
            )
        for name, tensor in own.items():
            if (shape := list(file.get_slice(name).get_shape())) != list(tensor.shape):
                raise ValueError(
                    f"{name} has the shape {shape}; expected {list(tensor.shape)}: is it of another model?"
                )
        return {name: file.get_tensor(name) for name in own}
