"""Programs that tests run but that cannot live in the test environment: unmodified clients of
OpenAI's, in environments of their own. Installed once, into build/clients of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from filelock import FileLock

_FOLDER = Path(__file__).parents[2] / "build" / "clients"
_SECONDS = 300


def python_with(*packages: str) -> Path:
    """An interpreter of its own that has `packages`; skips the test where pip cannot get them."""
    folder = _FOLDER / f"python-{sys.version_info.major}.{sys.version_info.minor}-{packages[0]}"
    python = folder / "bin" / "python"

    def install() -> None:
        venv.create(folder, with_pip=True, clear=True)
        _run(str(python), "-m", "pip", "install", "--quiet", *packages)

    _once(folder, install)
    return python


def node_with(*packages: str) -> Path:
    """A folder in which node finds `packages`; skips the test without node or npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not in PATH (apt install nodejs npm)")
    folder = _FOLDER / f"node-{packages[0]}"

    def install() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _run("npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", *packages)

    _once(folder, install)
    return folder


def _once(folder: Path, install: object) -> None:
    assert callable(install)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    done = folder / ".installed"
    with FileLock(f"{folder}.lock"):
        if done.exists():
            return
        try:
            install()
        except (subprocess.SubprocessError, OSError) as exc:
            output = getattr(exc, "stderr", None) or ""
            pytest.skip(f"could not be installed (is there a network?): {exc} {output[-300:]}")
        done.touch()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
