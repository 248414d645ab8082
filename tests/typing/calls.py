"""Calls as users write them, for a type checker alone: check.py has mypy --strict say what it thinks of each line.

A line with `wrong:` must be an error of that kind, every other line must be none.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TextStreamer,
)

from cactus_kernels import Cactus, GenerationStats, SpeculativeOutput, embedded_pair, skip_layers, speculative_generate

model, assistant_model, tokenizer = embedded_pair()
inputs = tokenizer(["Question: A", "Question: Maria has"], return_tensors="pt", padding=True)
ids = torch.ones(2, 3, dtype=torch.int64)
other = AutoModelForCausalLM.from_pretrained("somewhere")


def right(
    target: PreTrainedModel, draft: PreTrainedModel, cache: DynamicCache, config: GenerationConfig
) -> GenerationStats | None:
    speculative_generate(model, **inputs, assistant_model=assistant_model, rule=Cactus(0.5), seed=1, max_new_tokens=60)
    speculative_generate(other, ids, assistant_model=skip_layers(target, [1, 2]), rule="sps", budget=[0.5, 1])
    speculative_generate(
        target, ids, prompt_lookup_num_tokens=5, max_matching_ngram_size=3, seed=[1, 2], backend="torch"
    )
    speculative_generate(target, ids, assistant_model=draft, num_assistant_tokens=[0, 5], draft_temperature=0.5)
    speculative_generate(target, ids, assistant_model=draft, seed=torch.ones(2, dtype=torch.int64), budget=2)
    speculative_generate(
        target, inputs=ids, assistant_model=draft, attention_mask=torch.ones(2, 3), do_sample=True, temperature=0.7,
        top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, bad_words_ids=[[3]], stop_strings=["\n"], num_beams=1,
        tokenizer=tokenizer, past_key_values=cache, generation_config=config, use_cache=True,
        logits_processor=LogitsProcessorList(), stopping_criteria=StoppingCriteriaList(), eos_token_id=[1, 2],
        prefix_allowed_tokens_fn=lambda row, text: [1, 2], streamer=[TextStreamer(tokenizer)] * 2, pixel_values=None,
        guidance_scale=None,
    )  # fmt: skip
    output = speculative_generate(target, ids, assistant_model=draft, return_dict_in_generate=True)
    if isinstance(output, SpeculativeOutput):
        return output.stats
    print(output.shape)
    return None


def wrong(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    speculative_generate(target, ids, assistant_modle=draft)  # wrong: call-arg
    speculative_generate(target, ids, assistant_model=draft, num_asistant_tokens=3)  # wrong: call-arg
    speculative_generate(target, ids, draft)  # wrong: call-arg
    speculative_generate("gpt2", ids, assistant_model=draft)  # wrong: arg-type
    speculative_generate(target, [[1, 2]], assistant_model=draft)  # wrong: arg-type
    speculative_generate(target, ids, assistant_model="draft")  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, rule=0.5)  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, budget="2 nats")  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, num_assistant_tokens=2.5)  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, seed=0.5)  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, backend="cuda")  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, max_new_tokens="60")  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, do_sample="yes")  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, temperature="hot")  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, num_beams=4)  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, use_cache=False)  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, inputs_embeds=torch.ones(2, 3, 4))  # wrong: arg-type
    speculative_generate(target, ids, assistant_model=draft, output_attentions=True)  # wrong: arg-type
    print(speculative_generate(target, ids, assistant_model=draft).stats)  # wrong: union-attr
    speculative_generate()  # wrong: call-arg
