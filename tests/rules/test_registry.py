"""A rule that its file registers is listed wherever rules are."""

import json
import subprocess
import sys

import pytest

from cactus_kernels.rules import RULES
from cactus_kernels.rules.registry import register

SCRIPT = """
import json
from cactus_kernels.rules import Cactus, SpS, resolve_rule, strengths, table
from cactus_kernels.rules.registry import register

class Own(Cactus):
    '''Own, lossy: as Cactus.

    Reads one row pair.
    '''
    name = "own"

register("own", Own, (0.1, 0.5), {"delta": (0.0, 0.3, 1.0)})
from cactus_kernels.plugins.vllm.patch import parse_rule
from cactus_kernels.testing.fuzz import fuzz_case
from cactus_kernels.tools.frontier import CURVES
from cactus_kernels.tools.settings import make_rule

print(json.dumps({
    "by name": resolve_rule("own").delta, "README": [line for line in table().splitlines() if "`Own(" in line],
    "help": strengths(), "command": make_rule("own", 0.25).delta, "frontier": [rule.delta for rule in CURVES["own"]],
    "fuzzing": sum(type(fuzz_case(seed)["rule"]) is Own for seed in range(100)),
    "vLLM": parse_rule({"rule": "own", "delta": 0.75}).delta,
}))
"""


def test_a_registered_rule_is_listed_everywhere():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["by name"] == 1.0 and found["command"] == 0.25 and found["vLLM"] == 0.75
    assert found["README"] == [
        "| `Own(delta=1.0, divergence='taylor')` | `\"own\"` | Own, lossy: as Cactus. | one row pair |"
    ]
    assert "own (1)" in found["help"] and found["frontier"] == [0.1, 0.5] and found["fuzzing"] > 2


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="a rule is named 'sps' already"):
        register("sps", RULES["sps"].make)
