"""Bound chains of linear maps and activations by LipSDP, one matrix inequality per frequency."""
