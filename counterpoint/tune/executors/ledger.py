"""Which trial holds which resources of a machine. All or nothing, and never more than there is.

Amounts are counted in ten-thousandths, so that thirds and tenths add up. GPUs are handed out as devices: whole ones, or a share
of one device for a trial that asks for less than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counterpoint.tune.errors import TuneError

UNITS = 10_000
"""The units of one: one CPU, one GPU, one byte."""

GPU = "gpu"


class ResourceLedger:
    """The books of one machine."""

    def __init__(self, totals: Mapping[str, float], devices: Sequence[str] = ()) -> None:
        """`devices` are the ids of the GPUs, as `CUDA_VISIBLE_DEVICES` names them."""
        self.totals = {**totals, GPU: float(len(devices))}
        self._free = _units(self.totals)
        self._devices = dict.fromkeys(devices, UNITS)
        """What is free of each."""
        self._held: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        """What each holder has: amounts by resource, and its devices."""

    def impossible(self, needs: Mapping[str, float]) -> str | None:
        """None, or why the needs will never fit: need and total."""
        for name, amount in needs.items():
            total = self.totals.get(name, 0.0)
            if amount > total:
                known = "" if name in self.totals else f"; known are {', '.join(sorted(self.totals))}"
                return f"it needs {amount:g} {name}, and there are {total:g} in all{known}"
        if (gpus := needs.get(GPU, 0.0)) > 1 and gpus != int(gpus):
            return f"it needs {gpus:g} gpu; more than one can only be had in whole devices"
        return None

    def fits(self, needs: Mapping[str, float]) -> bool:
        """Whether all of it is free now."""
        wanted = _units(needs)
        return all(self._free.get(name, 0) >= amount for name, amount in wanted.items()) and (
            not wanted.get(GPU) or self._pick(wanted[GPU]) is not None
        )

    def take(self, holder: str, needs: Mapping[str, float]) -> list[str]:
        """Books the needs for the holder; returns the ids of its devices. Raises `TuneError` if they are not free."""
        if holder in self._held:
            raise TuneError(f"{holder} holds resources already, and asks for more")
        wanted = _units(needs)
        devices = self._pick(wanted[GPU]) if wanted.get(GPU) else {}
        if devices is None or not self.fits(needs):
            raise TuneError(f"{holder} needs {dict(needs)}, which is not free now: {self}")
        for name, amount in wanted.items():
            self._free[name] -= amount
        for device, amount in devices.items():
            self._devices[device] -= amount
        self._held[holder] = (wanted, devices)
        return list(devices)

    def give_back(self, holder: str) -> None:
        """Frees what the holder has; nothing if it has nothing."""
        wanted, devices = self._held.pop(holder, ({}, {}))
        for name, amount in wanted.items():
            self._free[name] += amount
        for device, amount in devices.items():
            self._devices[device] += amount

    def _pick(self, units: int) -> dict[str, int] | None:
        """The devices for so much of GPUs; None if they are not free."""
        if units < UNITS:
            fitting = [device for device, free in self._devices.items() if free >= units]
            best = min(fitting, key=lambda device: self._devices[device], default=None)
            return None if best is None else {best: units}
        whole = [device for device, free in self._devices.items() if free == UNITS][: units // UNITS]
        return dict.fromkeys(whole, UNITS) if len(whole) * UNITS == units else None

    def __str__(self) -> str:
        """Used and total of each resource that there is."""
        parts = []
        for name, total in self.totals.items():
            if total:
                used = total - self._free[name] / UNITS
                scale, unit = (2**30, " GiB") if name in ("memory", "object_store_memory") else (1, "")
                parts.append(f"{used / scale:.4g}/{total / scale:.4g}{unit} {name}")
        return ", ".join(parts)


def _units(amounts: Mapping[str, float]) -> dict[str, int]:
    return {name: round(amount * UNITS) for name, amount in amounts.items()}
