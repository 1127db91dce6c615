"""What the installed package consists of, and what importing it does to a program."""

import importlib.metadata
import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_strategy

PACKAGE = Path(hvd_strategy.__file__).parent

# The development install puts a finder of its own before everything else; a copy of the package is
# only found without it.
FIND_COPY = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""


def run(code: str, *options: str, folder: Path | None = None) -> str:
    """Runs `code` in a fresh interpreter, in `folder`, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needed_libraries(path: Path) -> list[str]:
    """The DT_NEEDED entries of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    section_offset = struct.unpack_from("<Q", data, 40)[0]
    section_size, section_count = struct.unpack_from("<HH", data, 58)
    sections = [  # name, type, flags, address, offset, size, link, info, alignment, entry size
        struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * section_size)
        for i in range(section_count)
    ]
    section_type_dynamic, tag_needed = 6, 1
    names = []
    for section in sections:
        if section[1] != section_type_dynamic:
            continue
        strings = sections[section[6]][4]
        for offset in range(section[4], section[4] + section[5], 16):
            tag, value = struct.unpack_from("<qQ", data, offset)
            if tag == tag_needed:
                start = strings + value
                names.append(data[start : data.index(b"\0", start)].decode())
    return names


def extension() -> Path:
    spec = importlib.util.find_spec("hvd_strategy._core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def test_extension_needs_only_the_c_and_cpp_runtime() -> None:
    needed = needed_libraries(extension())
    assert needed, "an extension without any library: the ELF file was not understood"
    allowed = (
        "libc.",
        "libm.",
        "libgcc_s.",
        "libstdc++.",
        "libpthread.",
        "libdl.",
        "librt.",
        "ld-",
    )
    assert [name for name in needed if not name.startswith(allowed)] == []


def test_extension_has_the_stable_abi() -> None:
    assert extension().name == "_core.abi3.so"


def test_typed_and_stub_delivered() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert "class Session" in (PACKAGE / "_core.pyi").read_text()


def test_import_loads_nothing_but_the_package() -> None:
    # Without site-packages (-S), so that nothing is loaded beforehand and nothing can be.
    loaded = run(
        f"import os, sys; sys.path.append({str(PACKAGE.parent)!r}); before = set(sys.modules)\n"
        "import hvd_strategy; print(*sorted(set(sys.modules) - before))",
        "-S",
    )
    assert loaded.split() == ["__future__", "hvd_strategy", "hvd_strategy._register"]


def test_core_and_errors_need_no_torch() -> None:
    loaded = run("""
import sys, hvd_strategy._core, hvd_strategy.errors
print(*({"torch", "numpy", "lightning", "pytorch_lightning", "torchmetrics"} & set(sys.modules)))
""")
    assert loaded.split() == []


def test_public_names() -> None:
    for name in hvd_strategy.__all__:
        assert getattr(hvd_strategy, name) is not None
        assert name in dir(hvd_strategy)
    assert hvd_strategy.__version__ == importlib.metadata.version("hvd-strategy")
    with pytest.raises(AttributeError, match="no attribute 'HvdStrategie'"):
        hvd_strategy.HvdStrategie  # noqa: B018


@pytest.mark.parametrize(
    "name", ["MismatchError", "RankFailedError", "StallError", "HvdTimeoutError"]
)
def test_errors_have_one_base(name: str) -> None:
    assert issubclass(getattr(hvd_strategy, name), hvd_strategy.HvdError)
    assert issubclass(hvd_strategy.HvdError, RuntimeError)


def test_broken_installation_does_not_break_import_torch(tmp_path: Path) -> None:
    copy = tmp_path / "hvd_strategy"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "_core*"))
    (copy / "_core.abi3.so").write_bytes(b"this is not a shared library")
    for path in copy.rglob("*.py"):
        if path not in (copy / "__init__.py", copy / "_register.py"):
            path.write_text("raise RuntimeError('broken on purpose')\n")

    said = run(
        FIND_COPY
        + """
import torch
assert "hvd_strategy" in sys.modules, "the entry point was not called"
import hvd_strategy
print(hvd_strategy.__file__)
try:
    import hvd_strategy._core
except ImportError:
    print("extension broken")
try:
    hvd_strategy.HvdError
except RuntimeError as error:
    print(error)
""",
        folder=tmp_path,
    )
    assert said.splitlines() == [
        str(copy / "__init__.py"),
        "extension broken",
        "broken on purpose",
    ]
