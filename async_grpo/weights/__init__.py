"""Weights: how a new policy reaches the engines, and the proof that it did."""
