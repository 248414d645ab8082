"""Verification put to the test: fuzzed cases, backends compared bit for bit, a rule of one's own, laws on this machine."""
