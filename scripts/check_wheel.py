"""Runs a wheel on every CPython >= 3.10 of this machine: one wheel has to serve them all.

    python scripts/check_wheel.py dist/hvd_strategy-*.whl

For each Python a fresh environment gets `nanobind-backend` and the wheel, and nothing else; there
the core tests itself (`python -m hvd_strategy.selftest` needs no torch). Pythons are looked for on
PATH, in /usr/bin, in /usr/local/bin and in those of pyenv. One per minor version is enough, since
the ABI is what differs; builds without the GIL are left out: they load no stable-ABI extension.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OLDEST = (3, 10)
EXPECTED_FILES = ["_core.abi3.so", "_core.pyi", "py.typed", "__init__.py", "selftest.py"]
ABOUT = """
import json, sys, sysconfig
in_venv = sys.prefix != sys.base_prefix
without_gil = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([sys.implementation.name, sys.version_info[:2], in_venv, without_gil]))
"""


def check_contents(wheel: Path) -> None:
    """Checks the wheel's tag and that it holds the extension, its stub and nothing foreign."""
    if not re.search(r"-cp310-abi3-linux_(x86_64|aarch64)\.whl$", wheel.name):
        sys.exit(f"{wheel.name}: not tagged as a stable-ABI wheel for Python 3.10 and later")
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in EXPECTED_FILES if f"hvd_strategy/{name}" not in names]
    if missing:
        sys.exit(f"{wheel.name}: lacks {', '.join(missing)}")
    foreign = [name for name in names if not name.startswith(("hvd_strategy/", "hvd_strategy-"))]
    if foreign:
        sys.exit(f"{wheel.name}: holds files outside the package: {', '.join(foreign)}")


def find_pythons() -> dict[tuple[int, int], list[str]]:
    """Returns minor version -> executables, all of them CPython with the GIL, not in a venv."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += [Path("/usr/bin"), Path("/usr/local/bin")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"))

    candidates = [Path(getattr(sys, "_base_executable", sys.executable))]
    for folder in folders:
        if folder.is_dir() and folder != pyenv / "shims":
            candidates += [
                path
                for path in sorted(folder.iterdir())
                if re.fullmatch(r"python3(\.\d+)?", path.name)
            ]

    found: dict[tuple[int, int], list[str]] = {}
    seen = set()
    for candidate in candidates:
        real = candidate.resolve()
        # A virtual environment's python is a link to the one that made it.
        if real in seen or not os.access(real, os.X_OK):
            continue
        seen.add(real)
        try:
            answer = subprocess.run(
                [str(real), "-I", "-c", ABOUT],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            implementation, version, in_venv, without_gil = json.loads(answer.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
        minor = (version[0], version[1])
        if implementation == "cpython" and minor >= OLDEST and not in_venv and not without_gil:
            found.setdefault(minor, []).append(str(real))
    return found


def run_selftest(python: str, wheel: Path, folder: Path) -> str:
    """Installs the wheel for `python` under `folder` and returns what its self-test prints."""
    environment = folder / "environment"
    inner = str(environment / "bin" / "python")
    # This Python's pip installs into the new environment: quicker than giving it a pip of its own.
    pip_install = [sys.executable, "-m", "pip", "--python", inner, "install", "--quiet"]
    pip_install.append("--disable-pip-version-check")
    commands = [
        [python, "-m", "venv", "--without-pip", str(environment)],
        [*pip_install, "nanobind-backend>=1.0,<2"],
        [*pip_install, "--no-deps", str(wheel)],
        [inner, "-I", "-m", "hvd_strategy.selftest"],
    ]
    output = ""
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        output = done.stdout.strip()
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return output


def main() -> None:
    """Checks one wheel; exits non-zero on the first Python where it does not work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()

    check_contents(wheel)
    pythons = find_pythons()
    for minor, executables in sorted(pythons.items()):
        name = f"Python {minor[0]}.{minor[1]}"
        failure = None
        # A distribution's Python may come without the parts that make an environment.
        for executable in executables:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    print(f"{name}: {run_selftest(executable, wheel, Path(folder))}", flush=True)
                    failure = None
                    break
                except RuntimeError as error:
                    failure = failure or error
        if failure is not None:
            sys.exit(f"{name}: {wheel.name} does not work\n{failure}")
    print(f"{wheel.name} works on {len(pythons)} Python version(s)")


if __name__ == "__main__":
    main()
