"""Hooks of `mkdocs.yml`: pages of the repository that docs/ links to become pages of the site, and formulas become MathML.

GitHub shows the same files as they are: links lead out of docs/ (`../CONTRIBUTING.md`) and formulas stand in blocks of `math`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "perf/README.md": "benchmarks.md",
    "findings/README.md": "surprises.md",
}
"""Pages outside of docs/, and their names in the site."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def math(source: str, *_: Any, **__: Any) -> str:
    """A block of TeX as MathML, which browsers show without a script."""
    return convert(" ".join(source.split()), display="block")


def on_config(config: Any) -> Any:
    """Has blocks of `math` made by `math`."""
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [{"name": "math", "class": "math", "format": math}]}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside of docs/."""
    root = Path(config.config_file_path).parent
    for source, name in OUTSIDE.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_linked(text, root / source, root)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Leads the links of a page of docs/ to the pages that are outside of it."""
    if page.file.src_uri in OUTSIDE.values():
        return markdown
    root = Path(config.config_file_path).parent
    return _linked(markdown, root / "docs" / page.file.src_uri, root)


def _linked(text: str, source: Path, root: Path) -> str:
    """The text with links as the site has them: a file that is in no page of it is only named."""

    def link(found: re.Match[str]) -> str:
        title, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target:
            return found[0]
        path = (source.parent / target).resolve()
        if path.is_relative_to(root / "docs"):
            return f"[{title}]({path.relative_to(root / 'docs').as_posix()}{anchor})"
        name = path.relative_to(root).as_posix()
        return f"[{title}]({OUTSIDE[name]}{anchor})" if name in OUTSIDE else f"{title} (`{name}`)"

    return LINK.sub(link, text)
