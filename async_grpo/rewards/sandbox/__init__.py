"""Runs code that a model wrote, in sandboxed processes (see `run`).

A sandboxed process tries to apply every level of confinement. Only the last one needs a privilege. The levels are:

    level       available                             what it stops
    rlimits     everywhere                            too much processor time, memory, output; content of files
    seccomp     Linux on x86-64 and aarch64, also     network, processes, programs, signals and traces, each way to
                in Docker and Kubernetes              change a file, io_uring, mount, bpf, ...: all but a short list
    namespaces  user namespaces allowed: most         network, capabilities, abstract sockets, shared memory, a
                hosts, seldom in a container          look into other processes
    landlock    Linux 5.13 with Landlock on: most     reading any file but Python's library; changes of files; a look
                distributions since 2022, and         into other processes; in newer kernels TCP, signals
                containers whose profile allows it
    uid         root, if the interpreter can be       what belongs to root or to any other user
                read by every user

Without landlock, code can read what the account can read: the data set, and with it perhaps the expected answers. Keep
these elsewhere, or watch the metric `files_hidden`. No level stops covert channels or bugs of the kernel: code from an
adversary belongs in a virtual machine.
"""
