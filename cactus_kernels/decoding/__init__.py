"""The decoding loop over Hugging Face models: draft, score, verify, commit."""
