"""Model runner V2 on a CPU: a program that generates with it, its Triton kernels and ours in Triton's interpreter.

    python vllm_interpreted.py TARGET DRAFT PROMPTS

It prints one line of JSON: for each way to verify, the texts and the counters of drafts, drafted and accepted tokens.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")


def shims():
    """What vLLM's V2 needs to run in the interpreter, which it is not made for. To be called before vLLM is imported."""
    import triton
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    class Driver:
        @staticmethod
        def is_active():
            return True

    class Cpu:
        driver = Driver

    backends["cpu"] = Cpu  # vLLM's CPU build takes Triton for usable where there is one of this name
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask):  # `&` of a scalar and a block is an integer in the interpreter
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    InterpreterBuilder.create_masked_load = lambda self, at, mask, *rest: load(self, at, as_bool(mask), *rest)
    InterpreterBuilder.create_masked_store = lambda self, at, x, mask, *rest: store(self, at, x, as_bool(mask), *rest)
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    # libdevice's is not in the interpreter.
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: triton.language.log(1.0 + x))
    topk_topp_sampler.HAS_TRITON = False  # its kernel for top-k and top-p does not run in the interpreter


def main(target, draft, prompts):
    shims()
    from vllm.exceptions import VLLMValidationError
    from vllm_harness import Engine, drafts

    few = {"prompts": prompts, "max_tokens": 12}
    random = {"temperature": 1.0, "seed": 7, **few}
    found = {}
    with Engine(target, drafts(draft)) as engine:
        found["stock"] = engine.generate(**random)
        found["stock, greedy"] = engine.generate(temperature=0, **few)
    with Engine(target, drafts(draft), {"rule": "sps"}) as engine:
        found["sps"] = engine.generate(**random)
        for delta in (0.0, 0.05, 1.0):
            engine.call("set_cactus", {"delta": delta})
            found[str(delta)] = engine.generate(**random)
        found["greedy"] = engine.generate(temperature=0, **few)
        found["truncated"] = engine.generate(temperature=0.7, top_k=5, top_p=0.9, seed=7, **few)
        engine.llm.collective_rpc(lambda worker: setattr(worker.cactus, "backend", "triton"))
        found["1.0, kernels"] = engine.generate(**random)
        status = engine.call("cactus_status")
    each = {"logits_processors": ["cactus_kernels.plugins.vllm.request:RequestDelta"]}
    with Engine(target, drafts(draft), {"delta": 0.05}, **each) as engine:
        own = [{"cactus_delta": 0.0}, {"cactus_delta": 1.0}, {}]
        own = [{"extra_args": own[i % 3]} for i in range(len(prompts))]
        found["each"] = engine.generate(**random, each=own)
        try:
            engine.generate(**random, extra_args={"cactus_delta": "much"})
        except VLLMValidationError as error:
            status["refused"] = str(error)
        status["after"] = engine.generate(**random)[0]
    print(json.dumps({k: (texts, counters.tolist()) for k, (texts, counters) in found.items()} | {"status": status}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
