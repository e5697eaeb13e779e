"""What every test file shares: property tests are deterministic and have no time limit of their own on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("counterpoint", deadline=None, derandomize=True, database=None)
settings.load_profile("counterpoint")
