"""A user's reward in a process of its own, that may hang, crash, fork or eat memory: it costs that sample alone.

process                AdapterProcess: a worker of a lane; starts the process anew when it must
serving, batches       how the process is given requests, and what becomes of those that it dies of
channel, framing       the parent's end of that process, and the messages between the two
child, async_child     the main programs of the process; `calls` is what they share
"""
