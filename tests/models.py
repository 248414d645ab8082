"""Tiny models for tests: made here, nothing downloaded."""

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TableConfig(PretrainedConfig):
    model_type = "table"

    def __init__(self, vocab_size=8, num_hidden_layers=1, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.num_hidden_layers = vocab_size, num_hidden_layers


class TableModel(PreTrainedModel, GenerationMixin):
    """A language model that looks the next token's logits up by the current token: exact, whatever the batch."""

    config_class = TableConfig
    _supports_sdpa = True

    def __init__(self, table):
        """table: logits fp32 [V, V] of the next token given the current one."""
        super().__init__(TableConfig(vocab_size=table.shape[1]))
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.calls = 0

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, past_key_values=None, **kwargs):
        self.calls += 1
        return CausalLMOutputWithPast(logits=self.table[input_ids])

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}


def table_pair(V=8, seed=0, noise=1.0):
    """A target and a draft with V tokens that differ by Gaussian noise on the logits."""
    generator = torch.Generator().manual_seed(seed)
    table = 1.5 * torch.randn(V, V, generator=generator)
    return TableModel(table), TableModel(table + noise * torch.randn(V, V, generator=generator))


def probs(model, token):
    """The distribution after a token, float64 [V]."""
    return model.table[token].float().softmax(-1).double()
