"""The key and value cache of a batch whose rows keep different numbers of tokens."""
