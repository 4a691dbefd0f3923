"""Asynchronous GRPO from scratch: generation, scoring and training each at their own pace, one step apart."""

__version__ = "0.1.0"
