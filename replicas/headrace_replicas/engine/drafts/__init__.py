"""Speculative decoding: a draft model proposes tokens, and one pass of the model verifies them."""
