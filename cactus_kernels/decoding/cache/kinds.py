"""Which kinds of model decode as plain `generate` does, and which do not: what tests/decoding/test_kinds.py found.

It builds every causal kind of the installed transformers small and random, in fp64, and compares greedy tokens and logits of
ragged rows, past windows of 8. The names are those of classes of transformers 5.24. Kinds that other checks refuse (by their
layers, positions or forward pass) are on neither list.
"""

# Equal where the config says `is_decoder`: otherwise they attend to later tokens, too.
DECODERS = frozenset(
    """
    BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM ElectraForCausalLM ErnieForCausalLM
    MegatronBertForCausalLM RemBertForCausalLM RoCBertForCausalLM
    """.split()
)
# Equal; the last two are vision-language models, of which tests/decoding/test_images.py compares texts and images.
EQUAL = DECODERS | frozenset(
    """
    AXK1ForCausalLM AfmoeForCausalLM Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM
    AriaTextForCausalLM BeamForCausalLM BioGptForCausalLM BitNetForCausalLM CTRLLMHeadModel CodeGenForCausalLM
    Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM CohereForCausalLM CwmForCausalLM
    DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DiffLlamaForCausalLM DogeForCausalLM
    Dots1ForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM
    ExaoneMoeForCausalLM FalconForCausalLM FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration GemmaForCausalLM
    GitForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM
    GotOcr2ForConditionalGeneration GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HeliumForCausalLM
    HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM
    JetMoeForCausalLM Kolibri1ForCausalLM LagunaForCausalLM Lfm2ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM
    MellumForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
    Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM MllamaForCausalLM
    ModernBertDecoderForCausalLM NanoChatForCausalLM NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM PersimmonForCausalLM Phi3ForCausalLM Phi4MultimodalForCausalLM
    PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
    SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    VaultGemmaForCausalLM XGLMForCausalLM YoutuForCausalLM
    LlavaForConditionalGeneration Qwen2VLForConditionalGeneration
    """.split()
)
# Not equal, and why.
DIFFERENT = {
    "DoryForCausalLM": "takes the keys of a sliding window from the end of the cache",
    "MoshiForCausalLM": "attends past the sliding window that its config names",
    "XLMWithLMHeadModel": "makes its masks from the length of the text",
}


def check_alike(model) -> None:
    """Raises ValueError for a kind that does not decode as plain `generate` does."""
    name = _kind(model)
    if name in DIFFERENT:
        raise ValueError(f"{name} {DIFFERENT[name]}, which goes wrong here: use another model")
    if name in DECODERS and not model.config.is_decoder:
        raise ValueError(f"{name} attends to later tokens, too: load it with is_decoder=True")
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) is True:
        raise ValueError(
            f"{type(model).__name__} attends to later tokens, too (use_bidirectional_attention): use a model that does not"
        )


def is_tried(model) -> bool:
    """Whether a model is of a kind that was found equal."""
    return _kind(model) in EQUAL


def _kind(model) -> str | None:
    """The class of a model of transformers' own; None of another one, whatever its name."""
    return type(model).__name__ if type(model).__module__.startswith("transformers.models.") else None
