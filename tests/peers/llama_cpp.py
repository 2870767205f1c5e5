#!/usr/bin/env python3
"""Builds llama.cpp and our driver of it, to measure it beside our engine: `python3 tests/peers/llama_cpp.py`.

Prints the path of the program as its last line. Nothing else needs it: no test and no other program. Uses only Python's
own library; it wants a C and a C++ compiler, and takes cmake, ninja and llama.cpp's sources from the package index that
pip is set up for. Everything lies in the user's cache folder, and what is there already is not made again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# For the machine it runs on, as a user of llama.cpp would build it; of its programs, none.
FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
]


def cache():
    """Where things of peers are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "starling" / "peers"


def say(text):
    print(f"== {text}", file=sys.stderr, flush=True)


def run(command, **options):
    """Runs a command at low priority with its output on standard error, and stops at a failure."""
    command = ["nice", "-n", "10", *(str(part) for part in command)]
    done = subprocess.run(command, stdout=sys.stderr, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(command)}` exited with {done.returncode}")


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def check(path, wanted):
    found = sha256(path)
    if found != wanted:
        sys.exit(f"{path} has the SHA-256 {found}, not {wanted}; remove it to fetch it again")


def tools(folder):
    """A virtual environment with cmake and ninja."""
    place = folder / "tools"
    if not (place / "bin" / "ninja").exists():
        say("fetch cmake and ninja")
        shutil.rmtree(place, ignore_errors=True)
        run([sys.executable, "-m", "venv", place])
        run([place / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "cmake", "ninja"])
    return place / "bin"


def sources(folder, pip):
    """llama.cpp's sources, out of the source package of its Python binding."""
    archive = folder / "sdist" / SDIST
    if not archive.exists():
        say(f"fetch the sources of {PACKAGE} {VERSION}")
        # Only this package as a source: with `:all:`, pip would compile cmake itself.
        wanted = ["--no-deps", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
        run([pip, "download", "--quiet", "--disable-pip-version-check", "-d", archive.parent, *wanted])
    check(archive, SDIST_SHA256)
    unpacked = folder / SDIST.removesuffix(".tar.gz")
    mark = unpacked / "unpacked"
    if not mark.exists():
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(archive) as package:
            package.extractall(folder, filter="data")
        mark.touch()
    return unpacked / "vendor" / "llama.cpp"


def build_library(folder, source, programs):
    """The folder with libllama and what it needs. cmake finds out by itself what is up to date."""
    build = folder / f"llama-{VERSION}"
    say("build llama.cpp; minutes, the first time")
    ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
    run([programs / "cmake", "-G", "Ninja", "-S", source, "-B", build, ninja, *FLAGS])
    # The target alone: the programs beside it are four times as much to compile.
    run([programs / "cmake", "--build", build, "--target", "llama", "--parallel", os.cpu_count() or 1])
    return build / "bin"


def build_driver(folder, source, libraries):
    say("build the driver")
    program = folder / "llama_bench"
    include = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-cpu", "-lggml-base"]
    compiler = os.environ.get("CXX", "c++")
    run([compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", *include, HERE / "llama_bench.cpp", "-o", program, *link])
    return program


def main():
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    programs = tools(folder)
    source = sources(folder, programs / "pip")
    libraries = build_library(folder, source, programs)
    print(build_driver(folder, source, libraries))


if __name__ == "__main__":
    main()
