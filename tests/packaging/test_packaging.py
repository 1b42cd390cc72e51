"""sdist, wheel and editable install: each holds real files, loads `_C` and runs an op."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.builds import ROOT, Environment, build_wheel, settings

from tinyvllm import __version__

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]


def package_files(tree: Path) -> set[str]:
    """What a wheel of `tree` must hold: the package and, through the link, the gateway."""
    found = {
        str(path.relative_to(tree))
        for suffix in ("*.py", "*.pyi", "py.typed")
        for path in (tree / "tinyvllm").rglob(suffix)
    }
    gateway = [path for path in (tree / "gateway").rglob("*") if path.is_file()]
    return found | {str("tinyvllm" / path.relative_to(tree)) for path in gateway}


def check_install(installed: dict[str, Any], tree: Path, root: Path) -> None:
    """An import that comes from `root`, whole, with a working op."""
    for name in ("package", "extension"):
        assert Path(installed[name]).is_relative_to(root / "tinyvllm"), installed[name]
    assert Path(installed["gateway"]).resolve().is_relative_to(root)
    assert installed["version"] == [__version__, __version__]
    assert installed["typed"]
    assert installed["static"] == sorted(path.name for path in (tree / "gateway/static").iterdir())
    assert "index.html" in installed["static"]
    assert installed["op_result"] == [3.0]


def site_packages(environment: Environment) -> Path:
    (path,) = (environment.path / "lib").glob("python*/site-packages")
    return path


def test_sdist(sdist: Path, source_tree: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert package_files(source_tree) <= names
    assert {
        "csrc/CMakeLists.txt",
        "csrc/find_nvcc.cmake",
        "csrc/ops.h",
        "csrc/cuda/vec.cuh",
        "pyproject.toml",
    } <= names
    assert {"README.md", "LICENSE"} <= names
    assert all(member.isfile() or member.isdir() for member in members), "a link in the sdist"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, source_tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    extensions = {name for name in names if name.endswith((".so", ".pyd"))}
    assert [name.partition(".")[0] for name in extensions] == ["tinyvllm/_C"]
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert names - extensions - metadata == package_files(source_tree)


def test_wheel_installs(wheel: Path, source_tree: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "venv")
    environment.install(wheel)
    installed = environment.describe()
    check_install(installed, source_tree, site_packages(environment))
    assert not installed["has_cuda"]
    assert installed["num_cuda_devices"] == 0


def test_editable_installs(source_tree: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "venv")
    environment.install("--no-build-isolation", *settings(), "-e", source_tree)
    check_install(environment.describe(), source_tree, source_tree)
    added = source_tree / "tinyvllm/added_later.py"
    added.write_text("NAME = __name__")
    script = "import tinyvllm.added_later as m; print(m.NAME)"
    command = [environment.python, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    added.unlink()
    assert done.stdout.strip() == "tinyvllm.added_later"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
def test_wheel_with_cuda_imports_without_a_gpu(source_tree: Path, tmp_path: Path) -> None:
    wheel = build_wheel(source_tree, tmp_path, cuda=True)
    environment = Environment.create(tmp_path / "venv")
    environment.install(wheel)
    installed = environment.describe()
    check_install(installed, source_tree, site_packages(environment))
    assert installed["has_cuda"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ON", "TINYVLLM_CUDA=ON but no CUDA compiler (12.0 or newer) was found"),
        ("maybe", "TINYVLLM_CUDA must be AUTO, ON or OFF; got 'maybe'"),
    ],
)
def test_cuda_option_errors(value: str, message: str, tmp_path: Path) -> None:
    import cmake
    import pybind11

    done = subprocess.run(
        [
            Path(cmake.CMAKE_BIN_DIR) / "cmake",
            *("-S", ROOT / "csrc", "-B", tmp_path, f"-DTINYVLLM_CUDA={value}"),
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        env=os.environ | {"CUDACXX": str(tmp_path / "no-nvcc")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
def test_configuring_again_keeps_the_architectures(tmp_path: Path) -> None:
    """The compiler's own default, which these kernels do not run on, must not come back."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDAARCHS"}
    pybind11_dir = subprocess.check_output(
        [sys.executable, "-m", "pybind11", "--cmakedir"], text=True
    ).strip()
    command = [
        *("cmake", "-S", str(ROOT / "csrc"), "-B", str(tmp_path / "build"), "-G", "Ninja"),
        *("-DTINYVLLM_CUDA=ON", f"-Dpybind11_DIR={pybind11_dir}"),
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for arch in (None, None, "90a-real"):
        variables = environment if arch is None else environment | {"CUDAARCHS": arch}
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        flags = (tmp_path / "build" / "compile_commands.json").read_text(encoding="utf-8")
        assert "sm_90a" in flags and "sm_75" not in flags
        assert ("sm_80" in flags) == (arch is None)
