"""Our own declarations of CUDA's and NCCL's functions, against the official headers.

The core is compiled without them. Here ``tests/headers/*_check.cpp`` are compiled with every header
that the machine has: those of installed ``nvidia`` packages (torch brings them, or ``pip install
nvidia-cuda-runtime-cu12 nvidia-nccl-cu12``), and those in the folders that ``HVD_CUDA_INCLUDE`` and
``HVD_NCCL_INCLUDE`` name, separated by colons.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "tests" / "headers"


def _folders_with(header: str, variable: str) -> list[Path]:
    folders = [Path(folder) for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    for folder in folders:
        assert (folder / header).is_file(), f"{variable} names {folder}, which has no {header}"
    spec = importlib.util.find_spec("nvidia")  # many packages share this folder
    for package in (spec and spec.submodule_search_locations) or []:
        folders += [found.parent for found in sorted(Path(package).glob(f"*/include/{header}"))]
    return folders


CUDA = _folders_with("cuda.h", "HVD_CUDA_INCLUDE")
NCCL = _folders_with("nccl.h", "HVD_NCCL_INCLUDE")


def _compile(check: str, include: Path, sources: Path = ROOT / "csrc") -> str:
    """Compiles a check file and gives the compiler's errors, empty if there are none."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", f"-I{sources}", f"-I{HEADERS}"]
    command += [f"-I{HEADERS / 'shim'}", "-isystem", str(include), str(HEADERS / check)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == ("error" not in done.stderr), done.stderr
    return done.stderr


@pytest.mark.skipif(not CUDA, reason="no cuda.h: install nvidia-cuda-runtime-cu12")
@pytest.mark.parametrize("include", CUDA, ids=str)
def test_driver_functions_are_those_of_cuda_h(include: Path) -> None:
    assert _compile("cuda_check.cpp", include) == ""


@pytest.mark.skipif(not NCCL, reason="no nccl.h: install nvidia-nccl-cu12 or nvidia-nccl-cu13")
@pytest.mark.parametrize("include", NCCL, ids=str)
def test_nccl_functions_and_config_are_those_of_nccl_h(include: Path) -> None:
    assert _compile("nccl_check.cpp", include) == ""


@pytest.mark.parametrize(
    ("ours", "changed", "complaint"),
    [
        ("unsigned int flags, int priority", "unsigned int flags, long priority", "cuStreamCreate"),
        ("void* to, CudaPointer from", "const void* to, CudaPointer from", "cuMemcpyDtoHAsync_v2"),
        ("CudaStream stream, CudaEvent event", "CudaEvent event, CudaStream stream", "WaitEvent"),
        ("not_ready = 600", "not_ready = 601", "CUDA_ERROR_NOT_READY"),
        ("enum class CudaResult : int", "enum class CudaResult : long", "different sizes"),
    ],
)
@pytest.mark.skipif(not CUDA, reason="no cuda.h: install nvidia-cuda-runtime-cu12")
def test_a_wrong_declaration_of_the_driver_does_not_compile(
    tmp_path: Path, ours: str, changed: str, complaint: str
) -> None:
    assert complaint in _compile_changed(
        tmp_path, "driver_functions.h", ours, changed, "cuda_check.cpp", CUDA[0]
    )


@pytest.mark.parametrize(
    ("ours", "changed", "complaint"),
    [
        (
            "size_t count, NcclDataType type, int peer",
            "int count, NcclDataType type, int peer",
            "Send",
        ),
        ("float16 = 6", "float16 = 7", "ncclFloat16"),
        ("int blocking = 0;", "long blocking = 0;", "blocking lies elsewhere"),
        ("char internal[128]", "char internal[64]", "different sizes"),
        ("kNcclConfigMagic = 0xcafebeef", "kNcclConfigMagic = 0xcafebabe", "magic"),
    ],
)
@pytest.mark.skipif(not NCCL, reason="no nccl.h: install nvidia-nccl-cu12 or nvidia-nccl-cu13")
def test_a_wrong_declaration_of_nccl_does_not_compile(
    tmp_path: Path, ours: str, changed: str, complaint: str
) -> None:
    assert complaint in _compile_changed(
        tmp_path, "nccl_functions.h", ours, changed, "nccl_check.cpp", NCCL[0]
    )


def _compile_changed(
    tmp_path: Path, file: str, ours: str, changed: str, check: str, include: Path
) -> str:
    shutil.copytree(ROOT / "csrc" / "gpu", tmp_path / "gpu")
    text = (tmp_path / "gpu" / file).read_text()
    assert ours in text
    (tmp_path / "gpu" / file).write_text(text.replace(ours, changed))
    return _compile(check, include, sources=tmp_path)


def _nccl_libraries() -> list[Path]:
    """The library that lies beside each header, as in the wheels, where there is one."""
    folders = [include.parent / "lib" for include in NCCL]
    return [folder for folder in folders if (folder / "libnccl.so.2").is_file()]


@pytest.mark.skipif(
    not _nccl_libraries(), reason="no libnccl.so.2: install nvidia-nccl-cu12 or nvidia-nccl-cu13"
)
@pytest.mark.parametrize("folder", _nccl_libraries(), ids=str)
def test_the_real_nccl_answers_through_our_table_without_a_gpu(
    tmp_path: Path, folder: Path
) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "real_nccl"
    sources = [HEADERS / "real_nccl.cpp", ROOT / "csrc/gpu/nccl_api.cpp"]
    sources.append(ROOT / "csrc/gpu/shared_library.cpp")
    command = [compiler, "-std=c++17", f"-I{ROOT / 'csrc'}", *map(str, sources), "-ldl"]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
    done = subprocess.run(
        [program, folder], capture_output=True, text=True, timeout=120, check=True
    )
    library, features, ids = done.stdout.splitlines()
    version = int(features.split()[1])
    text = f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
    assert library == f"libnccl.so.2, version {text} ({folder / 'libnccl.so.2'})"
    since = {"split": 21800, "memory": 21900, "shrink": 22700, "window": 22700}
    since |= {"revoke": 22807, "grow": 22902}
    expected = [f"{name} {int(version >= first)}" for name, first in since.items()]
    assert features == f"version {version} " + " ".join(expected)
    assert ids == "ids differ 1"
