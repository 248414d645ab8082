"""Tokens are those of the recording: a change that is to alter none shows it here.

`python tests/test_recorded.py --write` records anew, by the torch backend: for other cases, or another definition of the draw.
"""

import json
import sys
import warnings

import pytest
from support import recorded

from cactus_kernels.rules import RULES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of bad values

INPUTS = "inputs"
IN_THE_INTERPRETER = 41  # one case of so many; with no factor in common with the periods of a group


@pytest.fixture(scope="module")
def recording():
    return json.loads(recorded.RECORDING.read_text())


def compare(expected, cases, backend, device="cpu"):
    """Run cases; all that differ from the recording of their group are named."""
    differing = []
    for name, case in cases.items():
        got = recorded.record(recorded.run(case, backend, device))
        if got != expected[name]:
            differing.append(f"{name}\n  recorded {expected[name]}\n  now      {got}")
    assert not differing, f"{len(differing)} of {len(cases)} cases differ:\n" + "\n".join(differing)


@pytest.mark.parametrize("group", recorded.GROUPS)
def test_torch_gives_the_recorded_tokens(group, recording):
    cases, expected = dict(recorded.GROUPS[group]()), recording[group]
    assert [INPUTS, *cases] == list(expected)
    assert recorded.digest(cases) == expected[INPUTS], "the inputs are not those of the recording"
    compare(expected, cases, "torch")


@pytest.mark.parametrize("group", recorded.GROUPS)
def test_triton_gives_the_recorded_tokens(group, recording, device):
    """On a GPU all cases; in the interpreter every rule at one size, and some of all others."""
    pytest.importorskip("triton")
    cases = dict(recorded.GROUPS[group]())
    if device.type == "cpu":
        some = list(cases)[::IN_THE_INTERPRETER]
        cases = {name: case for name, case in cases.items() if name in some or ", 1030, padded, drawn" in name}
    compare(recording[group], cases, "triton", device)


def test_the_recording_reaches_every_outcome(recording):
    """A recording of requests that all end alike would hold little."""
    plain = {name: outcome for name, outcome in recording["plain"].items() if name != INPUTS}
    for rule in recorded.RULES:
        accepted = {
            n for name, outcome in plain.items() if name.startswith(f"{rule},") for n in outcome["num_accepted"]
        }
        assert {0, 2} <= accepted, f"{rule}: {accepted}"
    assert {make().name for make in recorded.RULES.values()} == {named.default.name for named in RULES.values()}
    outcomes = [outcome for group in recording.values() for name, outcome in group.items() if name != INPUTS]
    ends = {"nothing accepted": 0, "all accepted": 0, "invalid": 0, "beyond the first chunk": 0, "spent": 0}
    for outcome in outcomes:
        m = len(outcome["token_ids"][0]) - 1
        for tokens, accepted, valid in zip(
            *(outcome[key] for key in ("token_ids", "num_accepted", "valid")), strict=True
        ):
            ends["nothing accepted"] += valid and accepted == 0
            ends["all accepted"] += valid and accepted == m > 0
            ends["invalid"] += not valid
            ends["beyond the first chunk"] += max(tokens) >= 1024
        ends["spent"] += sum(float.fromhex(spent) > 0 for spent in outcome.get("spent", ()))
    assert min(ends.values()) >= 50, ends


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_recorded.py --write")
    warnings.simplefilter("ignore", RuntimeWarning)
    recorded.write()
