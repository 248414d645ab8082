"""Models as they are loaded: half precision, quantised weights, layers on several devices, adapters."""

import warnings

import pytest
import torch
from support.decoding import noisy, outputs, plain, random_prompts, run
from support.models import V, build

PROMPTS = random_prompts((3, 17, 9, 1), V)
SETTINGS = {"max_new_tokens": 24}


@torch.no_grad()
def worst_gap(model, prompts, rows):
    """How far the logit of a token is from the largest of its place, in standard deviations, at worst."""
    gaps = []
    for prompt, row in zip(prompts, rows, strict=True):
        logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(row)[:, None])[:, 0]
        gaps.append(((logits.amax(1) - chosen) / logits.std(1)).max())
    return float(max(gaps))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-neox"])
def test_half_precision(family, dtype, attention):
    """Every token is the model's own but for rounding, which differs with the number of tokens in a forward pass."""
    target = build(family, attention, dtype)
    out = run(target, noisy(target, 0.1), PROMPTS, **SETTINGS)
    rows = outputs(out, PROMPTS)
    assert worst_gap(target, PROMPTS, rows) < 0.1
    assert worst_gap(target, PROMPTS[1:] + PROMPTS[:1], rows) > 1
    assert 0 < out.stats.acceptance_rate < 1


class Int8Linear(torch.nn.Module):
    """Weights in int8 with a scale for each output, as weight-only quantisation has them."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantised(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_quantised_weights(attention):
    target, draft = quantised(build("llama", attention)), quantised(noisy(build("llama", attention), 0.1))
    assert {p.dtype for p in target.parameters()} == {torch.int8, torch.float64}
    out = run(target, draft, PROMPTS, **SETTINGS)
    assert outputs(out, PROMPTS) == plain(target, PROMPTS, **SETTINGS)
    assert 0.1 < out.stats.acceptance_rate < 0.9


def test_quantised_activations():
    """torch's dynamic int8: the scale of activations is one for all tokens of a forward pass, so tokens depend on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to move to torchao
        target = torch.ao.quantization.quantize_dynamic(build("llama", dtype=torch.float32), {torch.nn.Linear})
    rows = outputs(run(target, build("llama", dtype=torch.float32), PROMPTS, **SETTINGS), PROMPTS)
    assert worst_gap(target, PROMPTS, rows) < 0.5
    assert worst_gap(target, PROMPTS[1:] + PROMPTS[:1], rows) > 1


def test_layers_on_several_devices(tmp_path):
    """One on disk, whose weights come and go: the first device is where texts and masks are."""
    accelerate = pytest.importorskip("accelerate")
    target = build("llama")
    expected = plain(target, PROMPTS, **SETTINGS)
    placed = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    placed |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    dispatched = accelerate.dispatch_model(build("llama"), placed, main_device="cpu", offload_dir=tmp_path)
    assert {p.device.type for p in dispatched.parameters()} == {"cpu", "meta"}
    for models in ((dispatched, noisy(target, 0.1)), (noisy(target, 0.1), dispatched), (dispatched, dispatched)):
        out = run(*models, PROMPTS, **SETTINGS)
        assert outputs(out, PROMPTS) == (expected if models[0] is dispatched else plain(models[0], PROMPTS, **SETTINGS))


def test_a_model_without_a_device(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    target = build("llama")
    accelerate.disk_offload(target, tmp_path)
    for models in ((target, build("llama")), (build("llama"), target)):
        with pytest.raises(
            ValueError, match="first weights of LlamaForCausalLM are offloaded, so that it has no device"
        ):
            run(*models, PROMPTS, **SETTINGS)


def adapted(model, config, **kwargs):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **kwargs)).double().eval()


LORA = {"r": 2, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def test_adapters_in_the_layers():
    target, draft = (adapted(build("llama"), "LoraConfig", **LORA) for _ in range(2))
    bare, expected = build("llama"), plain(target, PROMPTS, **SETTINGS)
    assert expected != plain(bare, PROMPTS, **SETTINGS)
    for other in (noisy(bare, 0.1), draft):
        out = run(target, other, PROMPTS, **SETTINGS)
        assert outputs(out, PROMPTS) == expected
    assert out.stats.accepted == out.stats.drafted
    out = run(bare, draft, PROMPTS, **SETTINGS)
    assert outputs(out, PROMPTS) == plain(bare, PROMPTS, **SETTINGS)
    assert 0 < out.stats.acceptance_rate < 1


def test_adapters_before_the_prompt_are_refused():
    target = adapted(build("llama"), "PrefixTuningConfig", num_virtual_tokens=2)
    for models in ((target, build("llama")), (build("llama"), target)):
        with pytest.raises(ValueError, match="adapters put tokens of their own before the prompt: merge or leave them"):
            run(*models, PROMPTS, **SETTINGS)
