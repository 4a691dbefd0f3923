"""A user's reward in a process of its own, that may hang, crash, fork or eat memory: it costs that sample alone."""
