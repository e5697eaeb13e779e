"""A second name for a file that is never written again, such as one of a published directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from counterpoint.transport.files.untrusted import open_regular


def link_file(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`; a copy where the disk has no links.

    Raises `OSError`, and `UntrustedFileError` for what is no regular file.
    """
    open_regular(source).close()
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
