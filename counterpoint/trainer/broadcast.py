"""Publishes a run's weights for inference: `run_<id>/broadcast/step_N/`, in Hugging Face's format or as a PEFT adapter.

The directory has its probe (`counterpoint/trainer/probe.py`) and appears whole, with `STABLE`, so a watcher never sees half a
model. The newest few versions are kept: a server may still load the version before. Weights that are published under a name stay
until they are released.

Next in the reading order of `docs/architecture.md`: `orchestrator/policy.py`.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import BASE, DELTA, read_header, weight_files
from counterpoint.inference.digest import DTYPES, Digest, add_up, digests_of, layer_of
from counterpoint.trainer.lora.multi_lora import digest_adapter, export_adapter
from counterpoint.trainer.model.text_part import keep_other_parts
from counterpoint.trainer.probe import Answers, write_probe
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.runs.witness import note
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import (
    flush,
    make_readable,
    publish_directory,
    published_steps,
    remove_directory,
)

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION_CONFIG_NAME,
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Copied beside full weights, so that a broadcast can be served as a model."""


_HALF = 1 << 32

_MOST_CHANGED = 1 / 3
"""Bytes of the changes, of those of the whole weights, above which the whole are published."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """What all ranks of a sharded model have put together for a broadcast."""

    weights: dict[str, Tensor]
    """The weights on the CPU, by name; empty on all ranks but the first, and where only an adapter is published."""
    digests: dict[str, Digest]
    """The weights' digests, by the precision of a server; empty where only an adapter is published."""
    answers: Answers


@dataclass(frozen=True, slots=True)
class Form:
    """The files of full weights as transformers has written them once: of later versions the weights alone are others.

    It works out a model's configuration and files anew each time, which takes longer than to write a small model.
    """

    weights: Mapping[str, Sequence[str]]
    """The names of the tensors in each safetensors file."""
    others: Mapping[str, bytes]
    """The content of each other file."""

    @classmethod
    def of(cls, directory: Path, weights: Mapping[str, Tensor]) -> Form | None:
        """Returns the form of `directory`, in which `weights` were written; None unless each is there bit for bit.

        That is under its own name, in its shape and with its values: transformers may rename, divide or permute them.
        """
        found = {path: read_header(path) for path in weight_files(directory)}
        entries = {name: entry.shape for header in found.values() for name, entry in header.items()}
        if entries != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
            return None
        written = {name: bits for path in found for name, bits in delta.open_bits(path).items()}
        if not all(
            np.array_equal(bits, delta.bits_of(weights[name].cpu().contiguous())) for name, bits in written.items()
        ):
            return None
        others = {path.name: path.read_bytes() for path in directory.iterdir() if path not in found}
        return cls({path.name: list(header) for path, header in found.items()}, others)

    def write(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """Writes weights of the same names. Raises `OSError` and `SafetensorError`."""
        for file, names in self.weights.items():
            save_file({name: weights[name].contiguous() for name in names}, directory / file, {"format": "pt"})
        for name, content in self.others.items():
            (directory / name).write_bytes(content)


class Broadcaster:
    """Publishes the versions of one run's weights; on rank 0."""

    def __init__(
        self,
        manager: MultiRunManager,
        output_dir: Path,
        run_id: str,
        base_model: str,
        keep: int,
        whole_every: int = 1,
        precisions: Collection[str] = DTYPES.keys(),
    ) -> None:
        """Prepares for a run of the job in `output_dir`; the newest `keep` versions of its weights stay.

        Of full weights, at least each `whole_every`th version is published whole, others as what changed since. `manager` has
        the adapter of a run that trains one. A digest is published for each of `precisions`.
        """
        self._manager = manager
        self._output_dir = output_dir
        self.directory = run_directory(output_dir, run_id) / "broadcast"
        self._named = run_directory(output_dir, run_id) / "published"
        self._base_model = base_model
        self._keep = keep
        self._begun = False
        self._whole_every = whole_every
        self._precisions = precisions
        self._form: Form | None = None
        """How full weights are written, once transformers has written them, if that can be repeated without it."""
        self._base: int | None = None
        """The version that was published whole last, if it was by this process."""
        self._newest: Path | None = None
        """The version that was published last: it has the base, too."""
        self._probed: Tensor | None = None
        """float32 `[candidates, tokens - 1]`: the probe's log-probabilities under the version published last."""

    def publish(self, model: nn.Module, run: Run, assembled: Assembled | None = None) -> None:
        """Publishes the run's weights unless they are published already, and removes all but the newest versions.

        The trainer's note of the step (`counterpoint/trainer/runs/witness.py`) comes before they appear. `assembled` is needed
        of a sharded model.

        Raises:
            OSError: disk full, no permission, or the run's directory is gone; nothing appears.
            BrokenWeights: the weights give results that are not finite; nothing appears.
        """
        version, lora = run.progress.step, run.config.training.lora
        self._check_directory()
        if version in published_steps(self.directory):
            if not self._begun:
                self._note(run, self._path(version), durable=True)
            return
        self.directory.parent.stat()  # do not make a run's deleted directory again
        # Not flushed, as all runs would wait for the disk: a version to which a checkpoint returns is flushed with it. Only the
        # first version of this process, which may have its checkpoint already, is flushed at once, and is on the disk.
        durable, self._begun = not self._begun, True
        with publish_directory(self._path(version), durable) as directory:
            if lora is None:
                self._write(model, _state(model, assembled), run, directory)
            self._probed = self._prove(model, run, assembled, directory, self._probed)
            self._note(run, directory, durable)
        self._newest = self._path(version)
        for old in published_steps(self.directory)[: -self._keep]:
            remove_directory(self._path(old))

    def _note(self, run: Run, weights: Path, durable: bool) -> None:
        note(self._output_dir, run.run_id, run.progress.step, run.progress.batch, weights, durable=durable)

    def publish_as(self, name: str, model: nn.Module, run: Run, assembled: Assembled | None = None) -> Path:
        """Publishes the run's weights as they are under a name, whole and on the disk; returns where they are.

        The name is a link to the directory `.NAME.N`, so it leads to the former weights until the new ones are whole, and these
        are removed then. Raises as `publish`, and `ValueError` for what is no name.
        """
        path = self._named_path(name)
        self.directory.parent.stat()
        former = self._directories_of(name)
        place = path.with_name(f".{name}.{1 + max(former, default=0)}")
        with publish_directory(place) as directory:
            if run.config.training.lora is None:
                self._write_whole(model, _state(model, assembled), directory)
            self._prove(model, run, assembled, directory, None)
        link = path.with_name(f".{name}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(place.name)
        link.replace(path)
        flush(self._named)
        for each in former.values():
            remove_directory(each)
        return path

    def release(self, name: str) -> None:
        """Removes the weights of a name, if there are any. Raises `OSError`, and `ValueError` for what is no name."""
        self._named_path(name).unlink(missing_ok=True)
        for each in self._directories_of(name).values():
            remove_directory(each)

    def _directories_of(self, name: str) -> dict[int, Path]:
        """Returns by number the directories with weights of a name: one, and those that were being removed at a kill."""
        return {
            int(found[1]): each
            for each in self._named.glob(f".{name}.*")
            if (found := re.fullmatch(rf"\.{re.escape(name)}\.([0-9]+)", each.name)) and not each.is_symlink()
        }

    def _named_path(self, name: str) -> Path:
        if not re.fullmatch(IDENTIFIER_PATTERN, name):
            raise ValueError(f"a publication's name is {name!r}; expected {IDENTIFIER_PATTERN}")
        if self._named.is_symlink():
            raise OSError(errno.ELOOP, "is a link; expected a directory of its own", str(self._named))
        return self._named / name

    def _prove(
        self, model: nn.Module, run: Run, assembled: Assembled | None, directory: Path, previous: Tensor | None
    ) -> Tensor:
        """Completes a directory that has full weights, or writes the adapter; with the proof. Returns the probe's results."""
        if (lora := run.config.training.lora) is None:
            self._copy_tokenizer(directory)
            state = _state(model, assembled)
            digests = assembled.digests if assembled else digests_of(own_memory(state), self._precisions)
        else:
            written = export_adapter(self._manager.modules, run.slot, lora, self._base_model, directory)
            digests = digest_adapter(written, self._manager.scaling_factors[run.slot], self._precisions)
        return write_probe(
            model, run.progress.step, directory / "probe.json", run.slot, digests, previous,
            None if assembled is None else assembled.answers,
        )  # fmt: skip

    def _write(self, model: nn.Module, state: dict[str, Tensor], run: Run, directory: Path) -> None:
        """Writes full weights into `directory`."""
        version = run.progress.step
        if version >= run.config.last_step or not self._write_changes(version, own_memory(state), directory):
            self._write_whole(model, state, directory)
            self._base = version

    def _write_whole(self, model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
        if self._form is not None:
            self._form.write(own_memory(state), directory)
        else:
            self._save(model, state, directory)
            self._form = Form.of(directory, own_memory(state))
        make_readable(directory)

    def _save(self, model: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
        """Writes full weights as transformers does, which names some otherwise than the model."""
        if (Path(self._base_model) / GENERATION_CONFIG_NAME).is_file():
            # It is copied as it is: transformers reads some that it refuses to write.
            setattr(model, "generation_config", GenerationConfig())  # noqa: B010 - for the type of a module's attributes
        model.save_pretrained(directory, state_dict=dict(state))
        keep_other_parts(Path(self._base_model), directory)

    def _write_changes(self, version: int, weights: Mapping[str, Tensor], directory: Path) -> bool:
        """Writes the delta (`counterpoint/inference/delta.py`) since this process's last whole version.

        Returns False, with nothing written, where whole weights are due, or smaller, or are not in their files as in the model.
        """
        if (
            self._base is None
            or self._form is None
            or self._newest is None
            or not 0 < version - self._base < self._whole_every
        ):
            return False
        try:
            delta.link_base(self._newest, directory)
            base = {
                name: bits for path in weight_files(directory / BASE) for name, bits in delta.open_bits(path).items()
            }
            whole_bytes = sum(bits.nbytes for bits in base.values())
            same = base.keys() == weights.keys() and all(
                len(base[name]) == tensor.numel() and base[name].itemsize == tensor.element_size()
                for name, tensor in weights.items()
            )
            new = ((name, delta.bits_of(tensor.cpu().contiguous())) for name, tensor in weights.items())
            if same and delta.write_delta(directory / DELTA, base, new, int(whole_bytes * _MOST_CHANGED)):
                for name in ("config.json", *_TOKENIZER_FILES):
                    if (source := self._newest / name).is_file():
                        shutil.copyfile(source, directory / name)
                return True
        except (OSError, ValueError) as error:
            logger.warning("version %d is published whole: %s", version, error)
        remove_directory(directory / BASE)
        (directory / DELTA).unlink(missing_ok=True)
        return False

    def remove_beyond(self, version: int) -> None:
        """Removes the versions later than `version`, which will be trained and published again. Raises `OSError`."""
        self._check_directory()
        for step in published_steps(self.directory):
            if step > version:
                remove_directory(self._path(step))

    @property
    def is_on_disk_of_job(self) -> bool:
        """Whether a full disk here is one of the whole job. False where the directory is a link to another disk."""
        try:
            return self.directory.stat().st_dev == self.directory.parents[1].stat().st_dev
        except OSError:  # not made yet, or removed
            return True

    def _path(self, version: int) -> Path:
        return self.directory / f"step_{version}"

    def _check_directory(self) -> None:
        """Raises `OSError` if the directory is a link into this job's directory, or to steps that are no broadcasts.

        A link to another disk is allowed. Steps are removed there, which must not be those of another job's checkpoints.
        """
        job, found = self.directory.parents[1].resolve(), self.directory.resolve()
        if self.directory.is_symlink():
            for step in published_steps(self.directory):
                if not (self._path(step) / "probe.json").is_file():
                    raise OSError(
                        errno.EEXIST, f"leads to {found}, whose step_{step} is no broadcast", str(self.directory)
                    )
        if found.is_relative_to(job) and found != job / self.directory.parent.name / self.directory.name:
            raise OSError(errno.ELOOP, f"leads to {found}; expected a directory of its own", str(self.directory))

    def _copy_tokenizer(self, directory: Path) -> None:
        for name in _TOKENIZER_FILES:
            source = Path(self._base_model) / name
            if source.is_file():
                shutil.copyfile(source, directory / name)


def _state(model: nn.Module, assembled: Assembled | None) -> dict[str, Tensor]:
    return assembled.weights if assembled is not None else model.state_dict()


def own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors without repetitions: of several names for one memory the first is kept, as in the written file."""
    named = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
    return {name: tensors[name] for name in named.values()}


def digests_over_ranks(model: nn.Module, precisions: Collection[str], ranks: Ranks) -> dict[str, Digest]:
    """Returns `digests_of` the whole weights of a divided model, alike on every rank; every rank calls it.

    The model must be at rest. Each rank hashes its slices where they are: a digest is a sum over elements. Rank 0 would hash
    whole weights on one core, about three seconds for each billion elements, while all other ranks wait.
    """
    weights = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    floating = {name: tensor for name, tensor in weights.values() if tensor.is_floating_point()}  # tied ones once
    own = {name: _local(tensor) for name, tensor in floating.items() if _counts(tensor, ranks.index)}
    digests = digests_of(own, precisions)
    places = [(each, layer) for each in precisions for layer in sorted({layer_of(name) for name in floating})]
    sums = [int(digests[precision].get(layer, "0"), 16) for precision, layer in places]
    # As halves, whose sums over the ranks do not overflow.
    halves = torch.tensor([divmod(value, _HALF) for value in sums], dtype=torch.int64, device=ranks.device)
    ranks.add([halves])
    added = {place: high * _HALF + low for place, (high, low) in zip(places, halves.tolist(), strict=True)}
    return {
        precision: add_up((layer, value) for (each, layer), value in added.items() if each == precision)
        for precision in precisions
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counts(tensor: Tensor, rank: int) -> bool:
    """Whether this rank's part counts: of several ranks with the same part, that of the first does."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    whole = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    return not any(whole) and bool((mesh.mesh == 0).any())
