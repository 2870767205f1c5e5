"""A suite of named checks: runs them in order, prints a line for each and the sum at the end."""

import asyncio
import inspect
import sys
import time
import traceback


class Suite:
    def __init__(self, title):
        self.title = title
        self.checks = []

    def check(self, function):
        """Registers a check; its name is the rule, with underscores for blanks."""
        self.checks.append((function.__name__.replace("_", " "), function))
        return function

    def run(self):
        """Runs every check, whatever the others did. Returns the exit code."""
        print(f"# {self.title}", flush=True)
        failed = 0
        for number, (name, function) in enumerate(self.checks, 1):
            started = time.monotonic()
            try:
                if inspect.iscoroutinefunction(function):
                    asyncio.run(function())
                else:
                    function()
                verdict = "ok"
            except Exception:  # a failed check is a result, not the end of the suite
                failed += 1
                verdict = "not ok"
                for line in traceback.format_exc().rstrip().splitlines():
                    print(f"#   {line}")
            print(f"{verdict} {number} - {name} ({time.monotonic() - started:.1f} s)", flush=True)
        print(f"{len(self.checks) - failed} passed, {failed} failed", flush=True)
        return 1 if failed or not self.checks else 0


def wait_until(probe, what, limit_s=120):
    """Polls until `probe` returns something true, and returns that. Fails after `limit_s`, naming `what` and the last
    value: the limit is for a server that hangs, not for one that is slow."""
    deadline = time.monotonic() + limit_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s} s for {what}; last value {value!r}")
        time.sleep(0.02)


async def wait_until_async(probe, what, limit_s=120):
    """As `wait_until`; the probe runs beside the event loop, so that streams go on."""
    await asyncio.to_thread(wait_until, probe, what, limit_s)


def equal(actual, expected, what="value"):
    if actual != expected:
        raise AssertionError(f"{what}: {actual!r}, expected {expected!r}")


def true(condition, what):
    if not condition:
        raise AssertionError(what)


def arguments(*names):
    """The positional arguments of a suite, by name."""
    if len(sys.argv) != 1 + len(names):
        sys.exit(f"usage: {sys.argv[0]} {' '.join(name.upper() for name in names)}")
    return sys.argv[1:]
