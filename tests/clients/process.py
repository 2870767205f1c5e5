"""The binary as a process: how it starts, refuses to start, drains and stops. Arguments: binary, model file."""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from server import Server, environment, get, url
from tap import Suite, arguments, equal, true, wait_until

BINARY, MODEL = arguments("binary", "model")
LIMIT_S = 120
# Slow enough that a stream of a hundred tokens is still open when a signal arrives.
SLOW = {
    "engine.kind": "timed",
    "engine.timed.prefill-per-token": "10us",
    "engine.timed.decode-per-step": "50ms",
}
FAST = {"engine.kind": "timed", "engine.timed.prefill-per-token": "10us", "engine.timed.decode-per-step": "1ms"}

suite = Suite("the binary as a process")


def run(*command, **settings):
    """(exit code, standard output, standard error) of a command that ends by itself."""
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    done = subprocess.run(
        [BINARY, *command],
        env=environment(settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def refuses_to_start(code, *words, arguments=("up", "--nodes", "1", "--quiet"), **settings):
    """Starts, and checks the exit code and that the message names the words. Returns the message."""
    places = {"api__listen": "127.0.0.1:0", "admin__listen": "127.0.0.1:0"}
    actual, _, stderr = run(*arguments, **{**places, **settings})
    true("panicked" not in stderr, f"it panicked: {stderr}")
    equal(actual, code, f"exit code ({stderr.strip()})")
    for word in words:
        true(str(word) in stderr, f"{word!r} is not named in: {stderr.strip()}")
    return stderr


@suite.check
def a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        for listener in ("api__listen", "admin__listen"):
            refuses_to_start(1, address, model__path=MODEL, engine__kind="timed", **{listener: address})


@suite.check
def a_model_file_that_is_not_there_is_named():
    refuses_to_start(4, "no-such-model.gguf", model__path="/tmp/no-such-model.gguf")


@suite.check
def a_truncated_model_file_is_named_with_its_size():
    with tempfile.TemporaryDirectory() as folder:
        for size in (0, 3, 100, 100_000, Path(MODEL).stat().st_size - 1):
            path = Path(folder) / f"cut-{size}.gguf"
            with open(MODEL, "rb") as source, open(path, "wb") as target:
                target.write(source.read(size))
            message = refuses_to_start(4, path.name, model__path=path)
            true(re.search(r"\d", message.replace(str(path), "")), f"no number in: {message}")
            path.unlink()


@suite.check
def a_file_of_another_kind_is_refused():
    refuses_to_start(4, Path(__file__).name, model__path=__file__)


@suite.check
def an_unsupported_architecture_is_named():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mamba.gguf"
        shutil.copyfile(MODEL, path)
        with open(path, "r+b") as file:
            head = file.read(4096)
            at = head.index(b"llama", head.index(b"general.architecture"))
            file.seek(at)
            file.write(b"mamba")
        refuses_to_start(4, path.name, "mamba", model__path=path)


@suite.check
def an_unknown_key_is_named_with_its_neighbour():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.toml"
        path.write_text("[engine]\nblock-token = 16\n")
        serve = ("serve", "--config", str(path))
        refuses_to_start(3, "engine.block-token", "block-tokens", arguments=serve, model__path=MODEL)
        path.write_text("[engine]\nblock-tokens = 'many'\n")
        refuses_to_start(3, "block-tokens", arguments=serve, model__path=MODEL)
        path.write_text("[engine\n")
        refuses_to_start(3, path.name, arguments=serve, model__path=MODEL)
    refuses_to_start(3, "node.toml", arguments=("serve", "--config", "/tmp/no-such-folder/node.toml"))


@suite.check
def an_unknown_command_is_a_usage_error():
    for arguments in (("fly",), ("up", "--no-such-flag")):
        code, _, stderr = run(*arguments)
        equal(code, 2, f"exit code ({stderr.strip()})")


@suite.check
def too_little_memory_for_one_sequence_is_told_with_both_numbers():
    places = {"api__listen": "127.0.0.1:0", "admin__listen": "127.0.0.1:0"}
    code, _, stderr = run("up", "--nodes", "1", "--quiet", model__path=MODEL, engine__kv_memory="64KiB", **places)
    true(code in (3, 4), f"exit code {code} ({stderr.strip()})")
    true("panicked" not in stderr, f"it panicked: {stderr}")
    true(len(re.findall(r"\d+", stderr)) >= 2, f"two numbers are not in: {stderr.strip()}")


@suite.check
def the_configuration_is_printed_and_checked():
    code, stdout, stderr = run("config", "print", engine__block_tokens="32")
    equal(code, 0, f"exit code ({stderr.strip()})")
    true("block-tokens = 32" in stdout, f"the setting is not in {stdout}")
    code, stdout, stderr = run("config", "schema")
    equal(code, 0, f"exit code ({stderr.strip()})")
    true("properties" in json.loads(stdout), "no properties in the schema")


@suite.check
def the_demonstration_reuses_the_conversation():
    arguments = ("up", "--nodes", "1", "--ranks-per-node", "2", "--demo-only", "--json")
    server = Server(BINARY, MODEL, arguments=arguments)
    with server:
        turns = [server.event("turn") for _ in range(3)]
        equal(server.wait(), 0, "exit code")
    cached = [turn["cached_tokens"] for turn in turns]
    true(cached[0] < cached[1] < cached[2], f"cached tokens by turn: {cached}")
    equal(len({turn["rank"] for turn in turns}), 1, "ranks of one conversation")
    for turn in turns:
        true(turn["ttft_ms"] > 0 and turn["prompt_tokens"] > turn["cached_tokens"] and turn["node"], f"turn {turn}")


class Stream:
    """A chat stream on a connection of its own."""

    def __init__(self, server, tokens):
        place = urlsplit(server.base)
        self.connection = http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens, "stream": True}
        self.model = json.loads(get(f"{server.base}/v1/models")[1])["data"][0]["id"]
        body["model"] = self.model
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        self.response = self.connection.getresponse()

    def until_first_piece(self):
        while b'"content":"' not in self.response.readline():
            pass
        return self

    def rest(self):
        """What is still to come, and whether it ends as a stream should."""
        text = self.response.read().decode()
        return text, text.rstrip().endswith("data: [DONE]")


def wait_until_not_ready(server):
    wait_until(lambda: get(f"{server.admin}/readyz")[0] == 503, "/readyz to answer 503")


@suite.check
def a_term_signal_drains_and_exits_with_zero():
    with Server(BINARY, MODEL, SLOW) as server:
        equal(get(f"{server.admin}/readyz")[0], 200, "/readyz before")
        stream = Stream(server, 100).until_first_piece()
        server.signal(signal.SIGTERM)
        wait_until_not_ready(server)
        equal(get(f"{server.admin}/livez")[0], 200, "/livez meanwhile")
        # Refused while it drains, either with an answer that says when to come back or by a closed port.
        place = urlsplit(server.base)
        late = http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)
        try:
            body = json.dumps({"model": stream.model, "messages": [{"role": "user", "content": "late"}]})
            late.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = late.getresponse()
            equal(answer.status, 503, "status of a late request")
            true(answer.headers["retry-after"], "no Retry-After")
        except ConnectionRefusedError:
            pass
        text, whole = stream.rest()
        true(whole, f"the stream did not end with [DONE]: {text[-300:]!r}")
        true('"finish_reason":"length"' in text.replace(": ", ":"), "the stream did not run to its length")
        equal(server.wait(), 0, "exit code")


@suite.check
def a_second_interrupt_exits_at_once_with_130():
    with Server(BINARY, MODEL, SLOW) as server:
        stream = Stream(server, 4000).until_first_piece()
        server.signal(signal.SIGINT)
        wait_until_not_ready(server)
        server.signal(signal.SIGINT)
        equal(server.wait(), 130, "exit code")
        del stream


@suite.check
def an_idle_server_stops_on_either_signal():
    for number in (signal.SIGTERM, signal.SIGINT):
        with Server(BINARY, MODEL, FAST) as server:
            server.signal(number)
            equal(server.wait(), 0, f"exit code after signal {number}")


@suite.check
def a_node_serves_as_its_file_says():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.toml"
        path.write_text(
            f"""
            [node]
            name = "from-the-file"
            [api]
            listen = "127.0.0.1:0"
            [admin]
            listen = "127.0.0.1:0"
            [model]
            path = {json.dumps(MODEL)}
            id = "named-by-the-file"
            [engine]
            kind = "timed"
            """
        )
        command = [BINARY, "serve", "--config", str(path), "--log-format", "json"]
        process = subprocess.Popen(command, env=environment({}), stderr=subprocess.PIPE, text=True)
        try:
            records = (json.loads(line) for line in process.stderr)
            ready = next(record for record in records if record["message"] == "ready")
            models = json.loads(get(f"{url(ready['api'])}/v1/models")[1])["data"]
            equal([model["id"] for model in models], ["named-by-the-file"], "models")
            equal(get(f"{url(ready['admin'])}/readyz")[0], 200, "/readyz")
            process.send_signal(signal.SIGTERM)
            equal(process.wait(LIMIT_S), 0, "exit code")
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


@suite.check
def every_path_of_the_api_asks_for_the_key():
    with Server(BINARY, MODEL, {**FAST, "api.keys": "first,second"}) as server:
        place = urlsplit(server.base)
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/x"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
        ):
            for key in (None, "wrong", "first,second", ""):
                connection = http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                connection.request(method, path, "{}", {"content-type": "application/json", **headers})
                answer = connection.getresponse()
                equal(answer.status, 401, f"{method} {path} with key {key!r}")
                true("message" in json.loads(answer.read())["error"], "no message")
                connection.close()
        for key in ("first", "second"):
            connection = http.client.HTTPConnection(place.hostname, place.port, timeout=LIMIT_S)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            equal(connection.getresponse().status, 200, f"status with the key {key}")
        equal(server.stop(), 0, "exit code")


sys.exit(suite.run())
