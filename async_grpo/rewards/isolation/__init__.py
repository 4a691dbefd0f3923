"""The process of a user's reward, which may hang, crash, fork or exhaust its memory: that costs one sample alone."""
