"""A user's reward in a process of its own, that may hang, crash, fork or eat memory: it costs that sample alone.

adapter_process        a worker of a queue; starts the process anew when it must
child_process          the parent's end of the process: what it is asked, and how long that may take
spawn                  how the process is started, ended and collected (see also `async_grpo.processes`)
framing                the messages between the two
child, async_child     the main programs of the process
"""
