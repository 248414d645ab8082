"""`vllm serve` with the plugin, on a CPU: the worker is a process of its own. As `test_vllm.py`."""

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import vllm_harness as harness

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: see .ci/run"),
]

ACTIVE = "cactus_kernels: model runner V1 verifies by Cactus(delta=1.0, divergence='taylor')"


@pytest.fixture(scope="module")
def pair(tmp_path_factory, bytes_tokenizer):
    directory = tmp_path_factory.mktemp("pair")
    return [
        harness.checkpoint(directory / name, noise, vocab_size=256, tokenizer=bytes_tokenizer)
        for name, noise in (("target", 0.0), ("draft", 0.2))
    ]


class Server:
    """`vllm serve` with the harness as a second plugin; `with` waits until it answers, and ends it."""

    def __init__(self, directory, pair, *arguments, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        target, draft = pair
        drafts = {
            "model": draft, "method": "draft_model", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic",
        }  # fmt: skip
        self.log = Path(directory) / "log"
        self.environment = {**harness.as_plugin(directory), "VLLM_LOG_STATS_INTERVAL": "1", **environment}
        self.command = [
            str(Path(sys.executable).with_name("vllm")), "serve", target, "--served-model-name", "tiny", "--port",
            str(self.port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
            "--max-num-seqs", "16", "--speculative-config", json.dumps(drafts), "--worker-extension-cls",
            "cactus_kernels.plugins.vllm.worker.CactusWorker", *arguments,
        ]  # fmt: skip

    def start(self):
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )

    def __enter__(self):
        self.start()
        for _ in range(1800):
            assert self.process.poll() is None, self.text()
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.1)
            else:
                return self
        raise AssertionError(self.text())

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def text(self):
        return self.log.read_text(errors="replace")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def post(self, path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or "null")

    def call(self, method, *args):
        (answer,) = self.post("/collective_rpc", {"method": method, "args": list(args)})["results"]
        return answer

    def counter(self, name):
        return float(re.search(rf"^vllm:spec_decode_{name}_total\{{.*\}} (.*)$", self.get("/metrics"), re.M)[1])


CACTUS = "--additional-config", '{"cactus": {"rule": "cactus", "delta": 1.0}}'


def test_a_server_answers_200_requests_some_of_them_with_bad_logits(tmp_path, pair):
    """16 at a time; every tenth has NaN logits. The worker verifies by the rule that was asked for."""
    n, tokens = 200, 24

    def ask(i):
        bad = i % 10 == 3
        body = {
            "model": "tiny", "prompt": f"request {i}", "max_tokens": tokens, "ignore_eos": True, "seed": i,
            "temperature": harness.NAN_TEMPERATURE if bad else (0.0, 0.7, 1.0)[i % 3], "return_token_ids": True,
        }  # fmt: skip
        return server.post("/v1/completions", body)["choices"][0]["token_ids"]

    with Server(tmp_path, pair, *CACTUS, TEST_NAN="1", VLLM_SERVER_DEV_MODE="1") as server:
        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(ask, range(n)))
        steps, accepted = server.counter("num_drafts"), server.counter("num_accepted_tokens")
        status = server.call("cactus_status")
        alone = [ask(i) for i in (0, 6, 9)]  # at temperature 0
        time.sleep(2.5)  # two intervals of the log, then a step
        ask(3)
        server.call("set_cactus", {"rule": "cactus", "delta": 0.0})
        lossless = server.call("cactus_status")
        ask(0)
        with pytest.raises(urllib.error.HTTPError):
            server.call("set_cactus", {"rule": "typical"})
        assert len(ask(1)) == tokens
    print(f"tokens a step: {1 + accepted / steps:.3f}; {status}")
    assert [len(t) for t in texts] == [tokens] * n
    assert all(0 <= token < 256 for text in texts for token in text)
    assert alone == [texts[i] for i in (0, 6, 9)]
    # Between the first token and the last one, which vLLM draws, these had four finite logits.
    assert all(max(text[1:-1]) < 4 for text in texts[3::10])
    assert status["rule"] in ACTIVE and status["invalid"] > 20 and status["calls"] > 50
    assert lossless["rule"].startswith("Cactus(delta=0.0")
    assert accepted / steps > 1
    assert server.text().count(ACTIVE) == 1
    assert "cactus_kernels: bad logits or ids in" in server.text()


def test_two_workers_emit_the_same_tokens(tmp_path, pair):
    """Tensor parallelism: each of two workers draws for itself, and every step comes out the same."""

    def ask(i):
        body = {
            "model": "tiny", "prompt": f"request {i}", "max_tokens": 16, "ignore_eos": True, "return_token_ids": True,
            "temperature": (0.7, 1.0)[i % 2], **({"seed": i} if i % 4 < 2 else {}),
        }  # fmt: skip
        return server.post("/v1/completions", body)["choices"][0]["token_ids"]

    parallel = ["--tensor-parallel-size", "2"]
    with Server(tmp_path, pair, *CACTUS, *parallel, TEST_DIGEST="1", VLLM_SERVER_DEV_MODE="1") as server:
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(ask, range(24)))
        one, two = server.post("/collective_rpc", {"method": "cactus_status"})["results"]
    assert [len(text) for text in texts] == [16] * 24
    assert one == two and one["calls"] > 10 and one["invalid"] == 0
    assert server.text().count(ACTIVE) == 2


def test_without_the_switch_a_worker_verifies_as_vllm_does(tmp_path, pair):
    with Server(tmp_path, pair, VLLM_SERVER_DEV_MODE="1") as server:
        assert server.call("cactus_status") is None
        with pytest.raises(urllib.error.HTTPError):
            server.call("set_cactus", {"rule": "sps"})
        body = {"model": "tiny", "prompt": "a", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        assert len(server.post("/v1/completions", body)["choices"][0]["token_ids"]) == 8
    assert "cactus_kernels:" not in server.text()


def test_a_changed_signature_stops_the_start(tmp_path, pair):
    server = Server(tmp_path, pair, *CACTUS, TEST_CHANGED_SIGNATURE="1")
    server.start()
    assert server.process.wait(120) != 0
    assert re.search(r"rejection_sample of vLLM \S+ takes .*lookahead.*cactus_kernels knows", server.text())
    assert "verifies by" not in server.text()
