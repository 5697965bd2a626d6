"""Checks that the set-up resolves from the public package index alone, for every Python and system that it is for.

    python tools/resolve.py [CONSTRAINTS]

No setting of this machine counts (an index of its own, find-links), but for how it reaches the network. uv resolves for
Pythons and systems other than this one, from metadata alone: neither torch nor CUDA is downloaded. Every package must
have a wheel there, but for a few of pure Python.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
SYSTEMS = {
    "Linux": "x86_64-manylinux_2_28",
    "Linux on ARM": "aarch64-manylinux_2_28",
    "macOS": "aarch64-apple-darwin",
}
WITHOUT_WHEELS = ("rouge-score", "sqlitedict", "word2number")
"""Dependencies of lm-eval that pip builds from source; uv would have to build them to know what they need."""
LINUX_ONLY = re.compile(r"^(triton|nvidia-.*|cuda-.*)==", re.MULTILINE)
NETWORK = re.compile(r"(?i:(https?|all|no)_proxy)|SSL_CERT_(FILE|DIR)")


def main() -> int:
    """Resolve for all of them; the exit status says whether each went well."""
    constraints = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "constraints.txt"
    failed = 0
    with tempfile.TemporaryDirectory() as home:
        for python in PYTHONS:
            for system, platform in SYSTEMS.items():
                problem = resolve(python, platform, constraints, home)
                failed += problem is not None
                print(f"Python {python} on {system}: {problem or 'resolves'}", flush=True)
    return 1 if failed else 0


def resolve(python: str, platform: str, constraints: Path, home: str) -> str | None:
    """Say what is wrong with the set-up there; None if nothing is."""
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-build", "--no-annotate"),
        *("--python", sys.executable, "--python-version", python, "--python-platform", platform),
        *("--constraint", str(constraints), "--override", str(skipped(Path(home)))),
        *("--extra", "dev", "--extra", "docs", "--extra", "eval", str(ROOT / "pyproject.toml")),
    ]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        return done.stderr.strip() or f"uv ended with exit status {done.returncode}"
    if platform.endswith("darwin") and (found := LINUX_ONLY.search(done.stdout)):
        return f"{found[1]} is for Linux only"
    return None


def skipped(home: Path) -> Path:
    """Write a file of overrides that leaves out what has no wheels."""
    path = home / "overrides.txt"
    path.write_text("".join(f"{name}; python_version < '3'\n" for name in WITHOUT_WHEELS), encoding="utf-8")
    return path


def environment(home: str) -> dict[str, str]:
    """Keep nothing but the way to the network."""
    kept = {name: value for name, value in os.environ.items() if NETWORK.fullmatch(name)}
    certificates = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
    if certificates:
        kept.setdefault("SSL_CERT_FILE", certificates)
    return kept | {
        "HOME": home,
        "MACOSX_DEPLOYMENT_TARGET": "14.0",  # the oldest that torch has wheels for
        "PATH": os.environ.get("PATH", os.defpath),
        "UV_PYTHON_DOWNLOADS": "never",
    }


if __name__ == "__main__":
    sys.exit(main())
