"""What every command pays for its configuration before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SEARCH_FAILS = """
import importlib.metadata
importlib.metadata.entry_points = None
import counterpoint.transport.config
"""


@pytest.mark.slow
def test_pydantic_searches_no_installed_packages_for_plugins() -> None:
    unset = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    command = [sys.executable, "-c", SEARCH_FAILS]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=unset)
    assert completed.returncode == 0, completed.stderr
