#!/usr/bin/env python3
"""Runs every test: `python3 tests/run.py`. Sets up what they need first. Uses only Python's own library.

Needs cargo; node and npm are used where they are. Everything it makes lies under the target folder. Arguments, if any,
name the parts to run: rust, process, clients.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "tests" / "clients"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").resolve()
TOOLS = TARGET / "clients"
PARTS = ("rust", "process", "clients")
# What the timed engine takes: slow to prefill, so that a client can leave in the middle of it.
TIMED = {
    "engine.kind": "timed",
    "engine.timed.prefill-per-token": "2ms",
    "engine.timed.decode-per-step": "5ms",
    "ranks.count": "2",
}
CPU = {"engine.kind": "cpu", "ranks.count": "2"}
SUM = re.compile(r"^(\d+) passed, (\d+) failed$")
CARGO_SUM = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored;")


class Tally:
    """Counts of all parts, and what is to be said about them at the end."""

    def __init__(self):
        self.passed, self.failed, self.skipped = 0, 0, 0
        self.lines = []

    def add(self, name, passed, failed, skipped=0):
        self.passed, self.failed, self.skipped = self.passed + passed, self.failed + failed, self.skipped + skipped
        self.lines.append(f"{name}: {passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))

    def skip(self, name, reason):
        self.skipped += 1
        self.lines.append(f"{name}: SKIPPED, {reason}")
        print(f"\n!! {name} is SKIPPED: {reason}\n", flush=True)

    def report(self):
        print("\n== summary")
        for line in self.lines:
            print(f"   {line}")
        print(f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else ""))
        return 1 if self.failed or not self.passed else 0


def say(text):
    print(f"\n== {text}", flush=True)


def follow(command, **options):
    """Runs a command, shows its output line by line and returns (exit code, lines of its standard output)."""
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, **options)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))
    return process.wait(), lines


def build():
    """Builds every target once, as `cargo test` will want it, and returns the path of the binary."""
    say("build")
    command = ["cargo", "build", "--workspace", "--all-targets", "--locked", "--message-format=json-render-diagnostics"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    binary = None
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["executable"] and not message["profile"]["test"]:
            if message["target"]["name"] == "starling" and "bin" in message["target"]["kind"]:
                binary = message["executable"]
    return binary if done.returncode == 0 else None


def fetch_model(binary):
    """The path of the small model: fetched once a user, checked, and printed as the last line."""
    say("model")
    done = subprocess.run([binary, "model", "fetch", "smollm2"], stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.split()
    if done.returncode != 0 or not lines or not Path(lines[-1]).is_file():
        print(f"`starling model fetch smollm2` exited with {done.returncode} and printed {done.stdout!r}")
        return None
    print(lines[-1])
    return lines[-1]


def stamped(folder, *inputs):
    """Whether `folder` was set up from these very inputs; and what marks it as such."""
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()
    stamp = folder / "stamp"
    return stamp.is_file() and stamp.read_text() == digest, lambda: stamp.write_text(digest)


def python_client():
    """A Python that has the pinned packages; set up under the target folder once."""
    requirements = CLIENTS / "requirements.txt"
    folder = TOOLS / "python"
    python = folder / "bin" / "python"
    done, mark = stamped(folder, requirements.read_bytes(), sys.version.encode())
    if not done:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements]
        subprocess.run(pip, check=True)
        mark()
    return python


def node_client():
    """The folder of the JavaScript client, with its pinned package beside it."""
    package, script = CLIENTS / "package.json", CLIENTS / "npm_openai.mjs"
    folder = TOOLS / "node"
    done, mark = stamped(folder, package.read_bytes())
    if not done:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(package, folder)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
        subprocess.run(npm, cwd=folder, check=True)
        mark()
    # A module finds its packages beside itself.
    shutil.copy(script, folder)
    return folder / script.name


def rust_tests(tally, model):
    say("rust tests")
    environment = {**os.environ, "STARLING_MODEL": model}
    command = ["cargo", "test", "--workspace", "--locked", "--no-fail-fast"]
    code, lines = follow(command, cwd=ROOT, env=environment)
    sums = [match for line in lines if (match := CARGO_SUM.match(line))]
    passed, failed, ignored = (sum(int(match[n]) for match in sums) for n in (1, 2, 3))
    # A test binary that dies prints no sum, and a failed build prints none at all.
    tally.add("rust", passed, failed if failed or code == 0 else 1, ignored)


def suite(tally, name, command):
    code, lines = follow(command)
    match = SUM.match(lines[-1]) if lines else None
    passed, failed = (int(match[1]), int(match[2])) if match else (0, 1)
    tally.add(name, passed, failed if failed or code == 0 else failed + 1)


def client_suites(tally, binary, model):
    sys.path.insert(0, str(CLIENTS))
    from server import Server

    clients = {}
    try:
        clients["python"] = python_client()
    except (OSError, subprocess.CalledProcessError) as error:
        tally.add("openai for Python: set-up", 0, 1)
        print(f"cannot set up the Python client: {error}")
    if shutil.which("node") and shutil.which("npm"):
        try:
            clients["node"] = node_client()
        except (OSError, subprocess.CalledProcessError) as error:
            tally.add("openai for JavaScript: set-up", 0, 1)
            print(f"cannot set up the JavaScript client: {error}")
    else:
        tally.skip("openai for JavaScript", "node or npm is not on this machine")

    for engine, settings in (("timed", TIMED), ("cpu", CPU)):
        say(f"clients, engine {engine}")
        try:
            with Server(binary, model, settings) as server:
                places = (server.base, server.admin)
                if "python" in clients:
                    command = [clients["python"], CLIENTS / "python_openai.py", *places, engine]
                    suite(tally, f"openai for Python, {engine}", command)
                if "node" in clients:
                    command = ["node", clients["node"], *places, engine]
                    suite(tally, f"openai for JavaScript, {engine}", command)
                if engine == "timed":
                    suite(tally, "bad input", [sys.executable, CLIENTS / "bad_input.py", *places])
                code = server.stop()
                tally.add(f"stop, {engine}", int(code == 0), int(code != 0))
                if tally.failed:
                    print(f"-- the end of the server's log (exit code {code})\n{server.log()}")
        except AssertionError as error:
            print(error)
            tally.add(f"server, {engine}", 0, 1)


def main():
    started = time.monotonic()
    parts = sys.argv[1:] or PARTS
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    tally = Tally()
    binary = build()
    model = binary and fetch_model(binary)
    if not model:
        tally.add("set-up", 0, 1)
        sys.exit(tally.report())
    if "rust" in parts:
        rust_tests(tally, model)
    if "process" in parts:
        say("the binary as a process")
        suite(tally, "process", [sys.executable, CLIENTS / "process.py", binary, model])
    if "clients" in parts:
        client_suites(tally, binary, model)
    print(f"\ntook {time.monotonic() - started:.0f} s")
    sys.exit(tally.report())


if __name__ == "__main__":
    main()
