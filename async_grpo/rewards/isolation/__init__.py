"""A user's reward in a process of its own, that may hang, crash, fork or eat memory: it costs that sample alone.

adapter_process        a worker of a queue; starts the process anew when it must
child_process          the parent's end of the process: its start, what it is asked, how long that may take, and its end
framing                the messages between the two
child                  the main program of the process
"""
