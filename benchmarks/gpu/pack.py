"""Make one archive of all that a machine without a package registry lacks: SGLang and its kind.

    python benchmarks/gpu/pack.py            # where pip works: carry/site.tar.xz, 30 MB
    benchmarks/gpu/run.sh --carry carry ...  # on the machine with the GPU

The archive is for Python 3.12, Linux on x86-64, torch 2.11 and an H200; where pip works on the
machine with the GPU, `pip install sglang==0.5.17` is all, and this is not needed. Needs strip.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_BYTES = 60 << 20

# Of no use with --attention-backend triton on an H200, or at all on a server: 1.5 GB of 1.7.
LEFT_OUT = (
    *("sgl_kernel/flash_ops*", "sgl_kernel/sm100/*", "sgl_kernel/infllm_ops*"),
    *("sgl_kernel/flashmla_ops*", "sglang/test/*", "sglang/multimodal_gen/*"),
    *("sglang/srt/*/_core*.so", "tvm_ffi/3rdparty/*", "*.pyi", "*.cu.bak", "*/__pycache__/*"),
)
STANDINS = ("flashinfer", "xgrammar", "soundfile")
GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, default=ROOT / "carry", help="(default: carry/)")
    p.add_argument("--wheels", type=Path, help="keep the wheels here for the next time")
    arguments = p.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels = arguments.wheels or Path(scratch) / "wheels"
        site = Path(scratch) / "site"
        download(wheels)
        for requirement in requirements():
            unpack(wheel_of(requirement, wheels), site)
        add_standins(site)
        libraries = [str(path) for path in site.rglob("*.so*") if path.is_file()]
        subprocess.run(["strip", "--strip-unneeded", *libraries], stderr=subprocess.DEVNULL)
        archive = arguments.out / "site.tar.xz"
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            for path in sorted(site.iterdir()):
                tar.add(path, path.name)
    (arguments.out / "commit").write_text(commit() + "\n")
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB; {arguments.out}: {size / 1e6:.1f} MB")
    if size > LIMIT_BYTES:
        print(f"pack: more than {LIMIT_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    return 0


def requirements() -> list[str]:
    lines = (HERE / "site.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def download(wheels: Path) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [word for name in platforms for word in ("--platform", name)]
    subprocess.run([*command, "-r", str(HERE / "site.txt")], check=True)


def wheel_of(requirement: str, wheels: Path) -> Path:
    name, _, version = requirement.partition("==")
    lead = f"{name.lower().replace('-', '_')}-{version}-"
    (wheel,) = (path for path in wheels.glob("*.whl") if path.name.lower().startswith(lead))
    return wheel


def unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
                archive.extract(name, site)


def add_standins(site: Path) -> None:
    for name in STANDINS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text((HERE / "standin.py").read_text())
    (site / "IPython").mkdir()
    (site / "IPython" / "__init__.py").write_text("")
    (site / "IPython" / "display.py").write_text("HTML = str\ndisplay = print\n")


def commit() -> str:
    """The tree that travels has no history with it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
