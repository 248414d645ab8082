"""Speculative decoding in place of `model.generate`: three prompts of different lengths in one batch, and what each row did."""

from cactus_kernels import embedded_pair, speculative_generate

model, draft, tokenizer = embedded_pair()  # or two models of transformers that share a tokenizer
prompts = ["Question: Maria has 5 boxes of pencils.", "Question: A farmer", "Question: There are 12 red and 7 blue"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)  # padded on the left

output = speculative_generate(
    model,
    **inputs,
    assistant_model=draft,
    rule="sps",  # lossless
    seed=[1, 2, 3],  # one random stream for each row
    num_assistant_tokens=4,
    do_sample=True,
    max_new_tokens=50,
    return_dict_in_generate=True,
)

stats = output.stats
for row, text in enumerate(tokenizer.batch_decode(output.sequences, skip_special_tokens=True)):
    print(text)
    print(
        f"  -> {stats.tokens[row]} tokens in {stats.rounds[row]} rounds; "
        f"{stats.accepted[row]} of {stats.drafted[row]} drafted tokens accepted\n"
    )
print(f"{stats.tokens_per_forward:.2f} tokens per forward pass of the target; {stats.acceptance_rate:.0%} accepted")
