"""The builds that the tests here share, from a copy of the sources."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from support.builds import ROOT, build_wheel, run

if TYPE_CHECKING:
    from pathlib import Path

NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.so", "*.log")


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, the link tinyvllm/gateway included, without build output."""
    tree = tmp_path_factory.mktemp("source") / "tinyvllm"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_SOURCES)
    return tree


@pytest.fixture(scope="session")
def sdist(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, ".", cwd=source_tree)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU wheel, built from the sdist."""
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))
