"""Starts the real binary and watches it from outside: its lines, its metrics, its exit code."""

import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

START_LIMIT_S = 300
STOP_LIMIT_S = 120


def environment(settings):
    """The environment with `{"engine.kind": "timed"}` as `STARLING__ENGINE__KIND=timed`, and nothing else of ours."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("STARLING")}
    for key, value in settings.items():
        name = "STARLING__" + key.replace("-", "_").replace(".", "__").upper()
        env[name] = str(value)
    return env


class Server:
    """One node. Ports are free ones and the `ready` line says which."""

    def __init__(self, binary, model, settings=(), arguments=("up", "--nodes", "1", "--quiet", "--json")):
        settings = {"api.listen": "127.0.0.1:0", "admin.listen": "127.0.0.1:0", "model.path": model, **dict(settings)}
        self.stderr = tempfile.TemporaryFile()
        self.lines = queue.Queue()
        self.process = subprocess.Popen(
            [binary, *arguments],
            env=environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        try:
            ready = self.event("ready", START_LIMIT_S)
            node = ready["nodes"][0]
            self.base, self.admin = url(node["api"]), url(node["admin"])
        except BaseException:
            self.kill()
            raise

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def event(self, name, limit_s=START_LIMIT_S):
        """The next JSON line on standard output with this `event`."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no event {name!r} within {limit_s} s\n{self.log()}") from None
            if line is None:
                code = self.process.wait(STOP_LIMIT_S)
                raise AssertionError(f"exit code {code} before the event {name!r}\n{self.log()}")
            event = json.loads(line)
            if event.get("event") == name:
                return event

    def log(self):
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")[-8000:]

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        """The exit code."""
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running {STOP_LIMIT_S} s after the signal\n{self.log()}") from None

    def stop(self):
        """Asks it to drain and returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def url(address):
    return address.rstrip("/") if "://" in address else f"http://{address}"


def get(address, limit_s=30):
    """(status, body) of a GET, errors included."""
    try:
        with urllib.request.urlopen(address, timeout=limit_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics:
    """One scrape of `/metrics`."""

    def __init__(self, admin):
        status, text = get(f"{admin}/metrics")
        if status != 200:
            raise AssertionError(f"/metrics answered {status}: {text[:300]}")
        self.samples = []
        for line in text.splitlines():
            match = SAMPLE.match(line)
            if match and not line.startswith("#"):
                self.samples.append((match[1], dict(LABEL.findall(match[2] or "")), float(match[3])))

    def values(self, name, **labels):
        found = [s for s in self.samples if s[0] == name and labels.items() <= s[1].items()]
        return [(at, value) for _, at, value in found]

    def sum(self, name, **labels):
        """The sum over all series with these labels. A name that is not there is a failure, not a zero."""
        found = self.values(name, **labels)
        if not found:
            raise AssertionError(f"no metric {name} {labels}")
        return sum(value for _, value in found)

    def max(self, name, **labels):
        found = self.values(name, **labels)
        if not found:
            raise AssertionError(f"no metric {name} {labels}")
        return max(value for _, value in found)


def nothing_is_held(admin):
    """Whether on every rank no KV block is held: free + reusable = total."""
    metrics = Metrics(admin)
    if metrics.sum("starling_kv_blocks", state="held") != 0:
        return False
    pools = metrics.values("starling_kv_pool_blocks")
    for at, total in pools:
        unheld = [metrics.sum("starling_kv_blocks", rank=at["rank"], state=state) for state in ("free", "reusable")]
        if sum(unheld) != total:
            return False
    return bool(pools)
